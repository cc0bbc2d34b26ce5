"""Logits of transformers for variants of each family's config.json, for test_config_variants.py.

Needs torch and transformers, which no test imports; run with transformers 5.23.0, torch 2.13.0 (ten
minutes on one core):

    PYTHONPATH=. python tests/oracles/config_variants.py tests/data/config_variants.json.gz

Each key is removed, set to null, and given another value; keys of rotary positions are written
under all spellings, at all levels, and twice with different values. The weights stay the same.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.support.config_variants import (
    ABSENT,
    BASES,
    base_of,
    digest,
    tensors_of,
    tokens_of,
    varied,
)

P, S, THETA, PARTIAL = "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"
ORIGINAL, LONGEST = "original_max_position_embeddings", "max_position_embeddings"
FULL, SLIDING = "full_attention", "sliding_attention"
Patch = dict[str, Any]
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {ORIGINAL: 16}
KINDS: dict[str, Patch] = {
    "linear": LINEAR,
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "llama3": LLAMA3,
}
OTHERS = {
    "hidden_act": ["gelu", "relu", "gelu_new", "swish", "gelu_pytorch_tanh", "tanh"],
    "hidden_activation": ["gelu", "relu", "silu"],
    "activation_function": ["gelu", "relu", "gelu_pytorch_tanh"],
    "feed_forward_proj": ["gelu", "gated-silu", "gated-gelu", "relu"],
    "position_embedding_type": ["relative_key"],
    "clip_qkv": [0.2],
    "sliding_window": [3, 0],
    "attn_logit_softcapping": [1.0],
    "final_logit_softcapping": [1.0],
    "logit_scale": [0.25],
    "no_rope_layers": [[0, 1, 1], []],
    "layer_types": [[FULL, SLIDING, FULL], []],
    "head_dim": [8],
    "mlp_only_layers": [[0]],
    "architectures": [["SomethingElse"], []],
    "pretraining_tp": [2],
}
ADDED: dict[str, list[Any]] = {
    "attention_bias": [True, False],
    "mlp_bias": [True],
    "head_dim": [4, None],
    "sliding_window": [3],
    "use_sliding_window": [True, False],
    "layer_types": [[FULL, SLIDING, FULL]],
    "max_window_layers": [1],
    "sliding_window_pattern": [2],
    "_sliding_window_pattern": [2],
    "rope_local_base_freq": [50.0],
    "rms_norm_eps": [0.3],
    "layer_norm_eps": [0.3],
    "layer_norm_epsilon": [0.3],
    "tie_word_embeddings": [True, False],
    "hidden_activation": ["relu"],
    "hidden_act": ["relu"],
    "attention_dropout": [0.5],
    "logits_scaling": [2.0],
    "attention_multiplier": [0.7],
    "use_qk_norm": [True],
    "norm_topk_prob": [True, False],
    "clip_qkv": [0.2],
    "is_decoder": [True],
    "use_bidirectional_attention": [True],
    "num_experts": [3],
    "num_local_experts": [3],
    "swiglu_limit": [0.3],
    "no_rope_layers": [[0, 1, 1]],
    "no_rope_layer_interval": [2],
    "rope_interleaved": [True],
    "quantization_config": [None],
    "text_config": [{}, None],
}


def variants(config: dict[str, Any]) -> Iterator[Patch]:
    """Lists the changes of a family's config.json."""
    yield {}
    for key, value in config.items():
        yield {key: ABSENT}
        yield {key: None}
        for other in [*OTHERS.get(key, ()), *_others(key, value)]:
            yield {key: other}
    for key, values in ADDED.items():
        if key not in config:
            for value in values:
                yield {key: value}
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[config["model_type"]]
    for alias, key in kind.attribute_map.items():
        if key in config:
            yield {alias: config[key], key: ABSENT}
            yield {alias: _other_number(config[key]), key: config[key]}
    if P in config:
        flat = not any(isinstance(x, dict) for x in config[P].values())
        yield from _of_rope(config) if flat else _of_ropes(config)


def _others(key: str, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value, int(value)]
    if isinstance(value, int) and key not in (LONGEST, "n_positions"):
        return [2 * value, float(value), 0]
    if isinstance(value, int):
        return [2 * value]
    if isinstance(value, float):
        return [2 * value + 0.1, round(value), str(value)]
    return []


def _other_number(value: Any) -> Any:
    return 2 * value if isinstance(value, int | float) and not isinstance(value, bool) else value


def _of_rope(config: dict[str, Any]) -> Iterator[Patch]:
    """Lists variants of rotary positions that are the same in all layers."""
    own = config[P]
    yield {P: ABSENT, THETA: 100.0}
    yield {P: None, THETA: 100.0}
    yield {P: {}, THETA: 100.0}
    yield {P: {"rope_type": "default"}, THETA: 100.0}
    yield {P: {"rope_type": "default"}}
    yield {P: {THETA: 100.0}}
    yield {P: {"type": "default", THETA: 100.0}}
    yield {P: {**own, THETA: 100.0}}
    yield {P: {**own, THETA: 100.0}, THETA: 1000.0}
    yield {THETA: 100.0}
    yield {THETA: None}
    for fraction in (0.5, 1.0, None):
        yield {PARTIAL: fraction}
        yield {f"{P}.{PARTIAL}": fraction}
    yield {PARTIAL: 0.5, f"{P}.{PARTIAL}": 0.25}
    yield {PARTIAL: 0.5, P: ABSENT, S: {**own}}
    yield {f"{P}.unknown": 1.0}
    yield {f"{P}.rope_type": "else"}
    for name, values in KINDS.items():
        old = {"type": name} | {k: x for k, x in values.items() if k != "rope_type"}
        base = {THETA: 100.0}
        yield {P: {**values, **base}}
        yield {P: {**old, **base}}
        yield {P: values, THETA: 100.0}
        yield {P: values}
        yield {P: ABSENT, S: values, THETA: 100.0}
        yield {P: ABSENT, S: old, THETA: 100.0}
        yield {P: ABSENT, S: {**values, **base}}
        yield {P: ABSENT, S: {**values, **base}, THETA: 1000.0}
        yield {P: None, S: values, THETA: 100.0}
        yield {P: {**values, **base}, S: None}
        yield {P: {**values, **base}, S: {}}
        yield {P: own, S: values}
        yield {P: own, S: {**values, **base}}
        yield {P: {"rope_type": "default", THETA: 1000.0}, S: values}
        yield {P: {**values, **base}, S: {"rope_type": "default"}}
        yield {P: {**values, **base}, S: {"rope_type": "default", THETA: 1000.0}}
        yield {P: {**values, **base}, S: {"factor": 2.0}}
        yield {P: {k: x for k, x in {**values, **base}.items() if k != "rope_type"}}
        yield {P: {k: x for k, x in {**values, **base}.items() if k != "factor"}}
        yield {P: {**values, **base, "rope_type": name.upper()}}
        yield {P: {**values, **base, "type": "default"}}
        yield {P: {**values, **base, PARTIAL: 0.5}}
        yield {P: {**values, **base, "factor": 1.0}}
        yield {P: {**values, **base, "factor": 8}}
        if ORIGINAL in values:
            without = {k: x for k, x in values.items() if k != ORIGINAL} | base
            yield {P: without}
            yield {P: without, ORIGINAL: 12}
            yield {P: {**values, **base}, ORIGINAL: 12}
            yield {P: {**values, **base, ORIGINAL: None}}
            yield {P: ABSENT, S: without, ORIGINAL: 12}
    yield from _of_yarn()
    yield {P: {FULL: own, SLIDING: own}}
    yield {P: {FULL: own}}
    yield {ORIGINAL: 12}
    if own.get("rope_type") == "longrope":
        yield from _of_longrope(own)


def _of_yarn() -> Iterator[Patch]:
    base = {**YARN, THETA: 100.0}
    for more in (
        {"attention_factor": 1.5},
        {"attention_factor": None},
        {"mscale": 1.0},
        {"mscale_all_dim": 0.5},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"mscale": 1.0, "mscale_all_dim": 0.0},
        {"mscale": 2.0, "mscale_all_dim": 0.5, "attention_factor": 1.5},
        {"beta_fast": 4.0},
        {"beta_fast": 4.0, "beta_slow": 2.0},
        {"beta_fast": None},
        {"truncate": False},
        {"truncate": None},
        {"factor": None},
        {"short_factor": [1.0]},
        {"low_freq_factor": 2.0},
    ):
        yield {P: {**base, **more}}


def _of_longrope(own: dict[str, Any]) -> Iterator[Patch]:
    for kind in ("su", "yarn", "longrope"):
        named = {k: x for k, x in own.items() if k != "rope_type"}
        yield {P: {**named, "type": kind}}
        yield {P: ABSENT, S: {"type": kind, **named}}
        yield {P: ABSENT, S: {"rope_type": kind, **named}, THETA: 1000.0}
    for more in ({"factor": 3.0}, {"attention_factor": 1.5}, {ORIGINAL: 12}, {PARTIAL: ABSENT}):
        yield {f"{P}.{key}": x for key, x in more.items()}
    for key in ("short_factor", "long_factor", "short_mscale", "long_mscale"):
        yield {f"{P}.{key}": ABSENT}
        yield {f"{P}.{key}": 1.2}
        yield {f"{P}.{key}": [1.5] * 3}
        yield {f"{P}.{key}": [1.5] * 2}
    yield {ORIGINAL: ABSENT, f"{P}.{ORIGINAL}": 12}
    yield {ORIGINAL: 12, f"{P}.{ORIGINAL}": 14}


def _of_ropes(config: dict[str, Any]) -> Iterator[Patch]:
    """Lists variants of rotary positions that differ between types of layers."""
    default = {"rope_type": "default"}
    for key in (P, S):
        other = {P: ABSENT} if key == S else {}
        for values in (
            {},
            default,
            {**default, THETA: 100.0},
            {**LINEAR, THETA: 100.0},
            LINEAR,
            YARN,
            {"type": "linear", "factor": 4.0},
            {FULL: {**default, THETA: 100.0}},
            {SLIDING: {**default, THETA: 100.0}},
            {FULL: {THETA: 100.0}, SLIDING: {THETA: 50.0}},
            {FULL: {**LINEAR, THETA: 100.0}, SLIDING: {**default, THETA: 50.0}},
            {FULL: LINEAR, SLIDING: default},
            {FULL: LINEAR, SLIDING: LINEAR},
            {FULL: None, SLIDING: {**default, THETA: 50.0}},
            {FULL: {**YARN, THETA: 100.0}, SLIDING: {**YARN, THETA: 50.0}},
            {FULL: {**default, THETA: 100.0}, SLIDING: {**default}, THETA: 70.0},
            {FULL: {**default, THETA: 100.0, PARTIAL: 0.5}, SLIDING: {**default, PARTIAL: 0.5}},
        ):
            yield {**other, key: values}
            yield {**other, key: values, THETA: 1000.0}
            yield {**other, key: values, "rope_local_base_freq": 30.0}
            yield {**other, key: values, THETA: 1000.0, "rope_local_base_freq": 30.0}
    for scaling in (LINEAR, {**LINEAR, THETA: 100.0}, default, YARN, {}, None):
        yield {S: scaling}
        yield {S: scaling, P: {}}
        yield {S: scaling, P: None, THETA: 1000.0}
        yield {S: scaling, P: {FULL: {**default, THETA: 100.0}, SLIDING: {**default, THETA: 50.0}}}
    yield {S: {FULL: LINEAR, SLIDING: default}}
    yield {P: ABSENT, THETA: 100.0}
    yield {P: ABSENT, THETA: 100.0, "rope_local_base_freq": 50.0}
    yield {P: ABSENT, "rope_local_base_freq": 50.0}
    yield {THETA: 100.0}
    yield {"rope_local_base_freq": 50.0}
    yield {PARTIAL: 0.5}
    yield {PARTIAL: 0.5, P: ABSENT}
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        for value in (2, 3, 1, 0, None):
            yield {name: value, "layer_types": ABSENT}
            yield {name: value}
    yield {"sliding_window_pattern": 2, "_sliding_window_pattern": 3, "layer_types": ABSENT}
    yield {f"{P}.chunked_attention": {**default, THETA: 100.0}}


def computed(name: str, folder: Path, config: dict[str, Any]) -> list[float] | None:
    """Digest of the logits; None if transformers does not make this model of these weights."""
    (folder / "config.json").write_text(json.dumps(config))
    kind = transformers.AutoModelForCausalLM
    if name == "bert":
        kind = transformers.BertForPreTraining
    if name.startswith("t5_"):
        kind = transformers.T5ForConditionalGeneration
    tokens = torch.from_numpy(tokens_of(name)).long()
    try:
        model, report = kind.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        if report["missing_keys"] or report["mismatched_keys"]:
            return None
        model.eval()
        more = {"labels": tokens} if name.startswith("t5_") else {}
        with torch.no_grad():
            out = model(tokens, **more)
        logits = (out.prediction_logits if name == "bert" else out.logits).numpy()
        found = digest(logits)
    except Exception as error:  # whatever it is, there are no logits
        REASONS.append(f"{type(error).__name__}: {str(error)[:200]!r}")
        return None
    return found if all(x == x for x in found) else None


REASONS: list[str] = []


def run(name: str) -> list[tuple[list[float] | None, list[Patch]]]:
    """[(digest, the variants that have it)]."""
    config, _ = base_of(name)
    found: dict[str, list[Patch]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tensors = {key: torch.from_numpy(x) for key, x in tensors_of(name).items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        seen = set()
        for patch in variants(config):
            after = json.dumps(varied(config, patch), sort_keys=True)
            if after in seen:
                continue
            seen.add(after)
            REASONS.clear()
            numbers = computed(name, folder, json.loads(after))
            found.setdefault(json.dumps(numbers), []).append(patch)
            if numbers is None and "-v" in sys.argv:
                print(name, json.dumps(patch), *REASONS, file=sys.stderr)
    return [(json.loads(numbers), patches) for numbers, patches in found.items()]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    names = [x for x in sys.argv[2:] if not x.startswith("-")] or list(BASES)
    cases = {}
    for name in names:
        cases[name] = run(name)
        print(name, sum(len(x) for _, x in cases[name]), len(cases[name]), file=sys.stderr)
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    body = ",\n".join(
        f"{json.dumps(k)}: {json.dumps(x, separators=(',', ':'))}" for k, x in cases.items()
    )
    text = f'{{"versions": {json.dumps(about)}, "cases": {{\n{body}\n}}}}\n'
    Path(sys.argv[1]).write_bytes(gzip.compress(text.encode(), mtime=0))
