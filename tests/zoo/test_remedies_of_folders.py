"""Refusals of a config.json: every value that a message names as a remedy is read."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.config_variants import ABSENT, base_of, tensors_of, varied
from tests.support.refusals import Refusal, code_in, refused
from zerojax.config.checks import MAX_LAYERS
from zerojax.zoo import TaskConfig
from zerojax.zoo.hugging_face import config_from_hugging_face, from_hugging_face
from zerojax.zoo.hugging_face.config_reading import UnsupportedError
from zerojax.zoo.hugging_face.mxfp4 import find_coded
from zerojax.zoo.hugging_face.safetensors import Tensor

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE, ORIGINAL = "rope_parameters", "original_max_position_embeddings"
_YARN = {"factor": 4.0, ORIGINAL: 8}
_LLAMA3 = {**_YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_FACTORS = {"short_factor": [1.0, 1.0], "long_factor": [1.0, 1.0], ORIGINAL: 8}
_KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": _LLAMA3,
    "yarn": _YARN,
    "longrope": _FACTORS,
}
_ACTIVATIONS = (*("silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu", "relu", "quick_gelu"),)
_TASKS = ("BertForSequenceClassification", "BertForTokenClassification")
_TASKS = (*_TASKS, "BertForQuestionAnswering")
_HEADS = ("BertModel", "BertForMaskedLM", "BertForPreTraining", *_TASKS)
_FREE = {"is_gated_act": ABSENT, "dense_act_fn": ABSENT}


def each(key: str, *values: Any) -> list[dict[str, Any]]:
    return [{key: value} for value in values]


Patch = dict[str, Any]
Row = tuple[str, Patch, str | list[Any], str | list[Any], list[Patch]]
ROWS: dict[str, Row] = {
    "gated by SiLU": (
        *("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'", "'silu' 'swish'"),
        each("hidden_act", "silu", "swish"),
    ),
    "biases": (
        *("llama", {"attention_bias": True}, "attention_bias=True", "False None"),
        each("attention_bias", False, None),
    ),
    "null": (
        *("llama", {"rms_norm_eps": None}, "rms_norm_eps null", "remove 1e-06"),
        each("rms_norm_eps", 1e-6, ABSENT),
    ),
    "no layers": (
        *("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0", '"at least 1"'),
        each("num_hidden_layers", 1),
    ),
    "too many layers": (
        "llama",
        {"num_hidden_layers": MAX_LAYERS + 1},
        [f"num_hidden_layers={MAX_LAYERS + 1}", MAX_LAYERS],
        "fewer",
        each("num_hidden_layers", MAX_LAYERS),
    ),
    "a size is missing": ("llama", {"hidden_size": ABSENT}, "'hidden_size'", "add", [{}]),
    "an unknown key": ("llama", {"new": 1}, "new=1", "remove", [{}]),
    "a setting that no model has": (
        *("llama", {"pretraining_tp": 2}, "pretraining_tp=2", "1 None"),
        each("pretraining_tp", 1, None),
    ),
    "quantized": (
        *("llama", {"quantization_config": {"quant_method": "gptq"}}, "gptq", "unquantized"),
        [{}],
    ),
    "one entry per type": (
        *("llama", {ROPE: {FULL: {}}}, ROPE, '"same for all layers"'),
        [{ROPE: {"rope_type": "default"}}, {ROPE: ABSENT}],
    ),
    "a kind of positions": (
        *("llama", {ROPE: {"rope_type": "else"}}, "'else'", [*_KINDS]),
        [{ROPE: {"rope_type": kind, **more}} for kind, more in _KINDS.items()],
    ),
    "a part of a head": (
        *("cohere", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5", "1.0"),
        each("partial_rotary_factor", 1.0),
    ),
    "an activation": (
        *("mistral", {"hidden_act": "tanh"}, "hidden_act='tanh'", [*_ACTIVATIONS]),
        each("hidden_act", *_ACTIVATIONS),
    ),
    "a type of layer": (
        *("gemma2", {"layer_types": ["else"] * 3}, "'else'", [FULL, SLIDING]),
        each("layer_types", [FULL] * 3, [SLIDING] * 3),
    ),
    "types of other layers": (
        *("gemma2", {"layer_types": [FULL]}, "layer_types 1 3", '"one entry per layer"'),
        each("layer_types", [FULL] * 3),
    ),
    "no window": (
        *("ministral", {"sliding_window": None}, [SLIDING, "sliding_window"], "add"),
        each("sliding_window", 5),
    ),
    "a window that is off": (
        "qwen2_windows",
        {"use_sliding_window": False},
        [SLIDING],
        "sliding_window use_sliding_window true",
        each("use_sliding_window", True),
    ),
    "old name of a scaling": (
        *("gemma3", {ROPE: ABSENT, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        *("type='linear'", "rope_type remove"),
        [{ROPE: ABSENT, "rope_scaling": x} for x in ({"rope_type": "linear", "factor": 4.0}, None)],
    ),
    "flat positions of two types": (
        *("gemma3", {ROPE: {"rope_type": "default"}}, ROPE, [FULL, SLIDING]),
        [{ROPE: {FULL: {"rope_type": "default"}, SLIDING: {"rope_type": "default"}}}],
    ),
    "a third type": (
        *("gemma3", {f"{ROPE}.other": {}}, "'other'", [FULL, SLIDING]),
        [{}],
    ),
    "soft caps": (
        *("gemma3", {"attn_logit_softcapping": 1.0}, "attn_logit_softcapping=1.0", "None"),
        each("attn_logit_softcapping", None),
    ),
    "positions of Phi": (
        *("phi3", {ROPE: {"rope_type": "linear"}}, "'linear'", "default longrope"),
        [{ROPE: {"rope_type": kind, **_KINDS[kind]}} for kind in ("default", "longrope")],
    ),
    "layers without positions": (
        *("smollm3_windows", {"no_rope_layers": [2]}, '"[2]"', "0 1 3"),
        each("no_rope_layers", [0, 1, 1]),
    ),
    "two numbers of experts": (
        *("mixtral", {"num_experts": 8}, "num_local_experts=4 num_experts=8", "remove"),
        [{}, {"num_experts": 8, "num_local_experts": ABSENT}],
    ),
    "an activation of T5": (
        *("t5_first", {"feed_forward_proj": "gated-silu"}, "'gated-silu'", "relu gated-gelu"),
        [{"feed_forward_proj": kind, **_FREE} for kind in ("relu", "gated-gelu")],
    ),
    "an activation of BERT": (
        *("bert", {"hidden_act": "relu"}, "'relu'", "gelu gelu_new gelu_pytorch_tanh"),
        each("hidden_act", "gelu", "gelu_new", "gelu_pytorch_tanh"),
    ),
    "a head of BERT": (
        *("bert", {"architectures": ["BertForX"]}, "BertForX", [*_HEADS]),
        [{"architectures": [name]} for name in _HEADS],
    ),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ROWS)
def test_a_config(name, tmp_path):
    case, bad, value, remedy, good = ROWS[name]

    def take(patch: Patch) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(varied(base_of(case)[0], patch)))
        return config_from_hugging_face(tmp_path)

    Refusal(bad, value, remedy, good).check(take)


CLASSIFIERS = {
    "BertForSequenceClassification": (["classifier"], {}),
    "BertForTokenClassification": (["classifier"], {"has_pooler": False}),
    "BertForQuestionAnswering": (["qa_outputs"], {"has_pooler": False}),
    "BertForNextSentencePrediction": (["cls.seq_relationship"], {}),
    "BertForMultipleChoice": (["classifier"], {}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_encoder_of_a_classifier(name, tmp_path):
    heads, changes = CLASSIFIERS[name]
    known = {key: x for key, x in tensors_of("bert").items() if not key.startswith("cls.")}
    if changes:
        known = {key: x for key, x in known.items() if "pooler" not in key}
    for head in heads:
        known |= {f"{head}.weight": np.ones((2, 16), "f4"), f"{head}.bias": np.ones(2, "f4")}
    save_file(known, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write = functools.partial(_write, tmp_path)
    write(name)
    remedy = '"architectures": ["BertModel"]'
    if name in _TASKS:
        assert from_hugging_face(tmp_path).left_out == []
    else:
        message = refused(lambda: from_hugging_face(tmp_path), name, [remedy, "has_pooler=False"])
        kind = code_in(message, "zerojax.zoo.TaskConfig(").partition("'")[2].partition("'")[0]
        task = TaskConfig(kind=kind, labels=("a", "b", "c"))
        model = from_hugging_face(tmp_path, task=task).to_model()
        assert model.classify(np.ones((2, 5), np.int32)).shape == (2, 3)
    write("BertModel")
    assert f"{heads[0]}.weight" in from_hugging_face(tmp_path, **changes).left_out


def _write(folder: Path, name: str) -> None:
    config = varied(base_of("bert")[0], {"architectures": [name]})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("blocks", "dtype", "scales"),
    [
        ((4, 6, 2, 16), "float32", (4, 6, 2)),
        ((4, 6, 2, 8), "uint8", (4, 6, 2)),
        ((4, 6, 32), "uint8", (4, 6)),
        ((4, 6, 2, 16), "uint8", (4, 6, 1)),
        ((4, 6, 2, 16), "uint8", None),
    ],
)
def test_codes_that_do_not_fit_each_other(blocks, dtype, scales):
    def find(shape, dtype, scales):
        stored = {"w_blocks": (shape, dtype), "w_scales": (scales, "uint8")}
        return find_coded(
            {
                name: (Path("a"), Tensor(name=name, shape=shape, dtype=np.dtype(dtype)))
                for name, (shape, dtype) in stored.items()
                if shape is not None
            }
        )

    value = ["w_blocks", dtype, str(list(blocks)), None if scales is None else list(scales)]
    remedy = 'uint8 "[experts, out, in / 32, 16]" "[experts, out, in / 32]"'
    refused(lambda: find(blocks, dtype, scales), value, remedy, error=UnsupportedError)
    assert find((4, 6, 2, 16), "uint8", (4, 6, 2))["w"].decoded.shape == (4, 64, 6)
