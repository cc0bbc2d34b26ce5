"""Variants of a config.json and digests of logits, for a program with and one without zerojax.

Imports NumPy only, since `tests/oracles/config_variants.py` runs elsewhere.
"""

import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import bert_weights
from tests.support.hugging_face_weights import norms_near, text_of, weights, weights_of_t5

DATA = Path(__file__).parents[1] / "data"
ABSENT = "<absent>"
"""Value of a key that a variant lacks."""
BASES = (
    *("gpt2", "llama", "llama_rope_llama3", "qwen2_windows", "qwen3_biases", "mistral"),
    *("mistral_yarn", "ministral", "gemma", "gemma2", "gemma3", "gemma3_linear", "phi3"),
    *("phi3_longrope_long", "olmo_clipped", "olmo2", "olmo3", "smollm3_windows", "granite"),
    *("cohere", "cohere2", "mixtral", "olmoe", "qwen3_moe_windows", "gpt_oss"),
    *("bert", "t5_first", "t5_version_1_1"),
)
"""One model of each family, or several whose keys differ."""
LENGTH = 24


@functools.cache
def base_of(name: str) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """(config.json, {tensor: shape}) as transformers saves a model."""
    if name == "bert":
        return _BERT, _bert_tensors()
    file, case = "t5.json", name.removeprefix("t5_")
    for file in ("t5.json", "hugging_face.json", "families.json", "moe_families.json"):
        cases = json.loads((DATA / file).read_text())["cases"]
        if case in cases and (file == "t5.json") == name.startswith("t5_"):
            return cases[case]["config"], cases[case]["tensors"]
    raise KeyError(name)


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """{tensor: float32 values} by formula."""
    config, shapes = base_of(name)
    if name == "bert":
        return {key: bert_weights.weight(key, tuple(shape)) for key, shape in shapes.items()}
    if name.startswith("t5_"):
        return {key: weights_of_t5(key, shape) for key, shape in shapes.items()}
    near = norms_near(config["model_type"])
    return {key: weights(key, shape, norms_near=near) for key, shape in shapes.items()}


def tokens_of(name: str) -> np.ndarray:
    """int32 [2, length] of input."""
    config, _ = base_of(name)
    length = {"gpt2": 12, "bert": 10}.get(config["model_type"], LENGTH)
    return np.asarray(text_of(length, config["vocab_size"]), np.int32)


def varied(config: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with changes {key: value}; "a.b" is the key b of the object a."""
    result = copy.deepcopy(dict(config))
    for path, value in patch.items():
        *outer, key = path.split(".")
        inside = result
        for name in outer:
            inside = inside.setdefault(name, {})
        if value == ABSENT:
            inside.pop(key, None)
        else:
            inside[key] = value
    return result


def digest(logits: np.ndarray) -> list[float]:
    """Five numbers of logits [2, length, vocab]: their size and products with random directions.

    Two directions are of the last position only, where a window or a scaling shows most.
    """
    wide = np.asarray(logits, np.float64)
    size = float(np.sqrt(np.mean(wide**2)))
    numbers = [size]
    for number, values in enumerate((wide, wide, wide[:, -1], wide[:, -1])):
        direction = np.random.default_rng(number).standard_normal(values.size)
        numbers.append(float(values.reshape(-1) @ direction / np.sqrt(values.size)))
    return [float(f"{x:.7g}") for x in numbers]


def alike(ours: list[float], theirs: list[float], tolerance: float = 1e-4) -> bool:
    """Whether two digests are of the same logits, computed in float32 with sums in other orders."""
    scale = max(theirs[0], 1e-6)
    return all(abs(x - y) <= tolerance * scale for x, y in zip(ours, theirs, strict=True))


_BERT = {
    **bert_weights.SIZES,
    "architectures": ["BertForPreTraining"],
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "model_type": "bert",
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
    "use_cache": True,
}


def _bert_tensors() -> dict[str, list[int]]:
    sizes = bert_weights.SIZES
    wide, inner, vocab = (sizes[x] for x in ("hidden_size", "intermediate_size", "vocab_size"))
    dense = {"attention.self.query": (wide, wide), "attention.self.key": (wide, wide)}
    dense |= {"attention.self.value": (wide, wide), "attention.output.dense": (wide, wide)}
    dense |= {"intermediate.dense": (inner, wide), "output.dense": (wide, inner)}
    named = {
        f"bert.encoder.layer.{n}.{name}": shape for n in (0, 1) for name, shape in dense.items()
    }
    named |= {"bert.pooler.dense": (wide, wide), "cls.seq_relationship": (2, wide)}
    named |= {"cls.predictions.transform.dense": (wide, wide)}
    norms = [
        f"bert.encoder.layer.{n}.{x}.LayerNorm"
        for n in (0, 1)
        for x in ("attention.output", "output")
    ]
    norms += ["bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"]
    tables = {"word": vocab, "position": sizes["max_position_embeddings"], "token_type": 2}
    return {
        **{f"bert.embeddings.{x}_embeddings.weight": [n, wide] for x, n in tables.items()},
        **{f"{name}.weight": list(shape) for name, shape in named.items()},
        **{f"{name}.bias": [shape[0]] for name, shape in named.items()},
        **{f"{name}.{x}": [wide] for name in norms for x in ("weight", "bias")},
        "cls.predictions.bias": [vocab],
    }
