"""Small models with heads for tasks, and their batches, for two programs.

Imports NumPy only, for `tests/oracles/task_heads.py` runs elsewhere.
"""

from typing import Any

import numpy as np

from tests.support import bert_weights
from tests.support.hugging_face_weights import norms_near, weights

VOCAB, LENGTH, PAD = 20, 8, 3
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": PAD,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
_THREE = {"id2label": {0: "bad", 1: "fair", 2: "good"}}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQUENCE, TOKENS, ANSWER = (
    "sequence_classification",
    "token_classification",
    "question_answering",
)
# {name: (model_type, kind of the task, further keys of config.json)}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert_classes": ("bert", SEQUENCE, {**_THREE, **_NO_DROPOUT}),
    "bert_flags": ("bert", SEQUENCE, {**_THREE, "problem_type": "multi_label_classification"}),
    "bert_number": ("bert", SEQUENCE, {"num_labels": 1}),
    "bert_tokens": ("bert", TOKENS, {"num_labels": 5}),
    "bert_answer": ("bert", ANSWER, {}),
    "gpt2": ("gpt2", SEQUENCE, {**_GPT2, **_THREE, "pad_token_id": PAD}),
    "llama": ("llama", SEQUENCE, {**_DECODER, **_THREE}),
    "llama_left": ("llama", SEQUENCE, {**_DECODER, **_THREE}),
    "gpt2_left": ("gpt2", SEQUENCE, {**_GPT2, **_THREE, "pad_token_id": PAD}),
    "qwen2_number": ("qwen2", SEQUENCE, {**_DECODER, "num_labels": 1}),
    "mistral_numbers": (
        *("mistral", SEQUENCE),
        {**_DECODER, **_THREE, "problem_type": "regression", "sliding_window": 4},
    ),
    "gemma2_flags": (
        *("gemma2", SEQUENCE),
        {
            **_DECODER,
            **_THREE,
            "problem_type": "multi_label_classification",
            "head_dim": 6,
            "sliding_window": 5,
            "query_pre_attn_scalar": 9,
        },
    ),
    "phi3": ("phi3", SEQUENCE, {**_DECODER, "num_labels": 2}),
}
_LENGTHS = (8, 5, 6)


def keys_of(name: str) -> dict[str, Any]:
    """Keys of the model's configuration class."""
    model_type, _, keys = CASES[name]
    return (
        {**bert_weights.SIZES, "vocab_size": VOCAB, **_NO_DROPOUT, **keys}
        if model_type == "bert"
        else keys
    )


def tensor_of(model_type: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of the model by formula."""
    if model_type == "bert":
        return bert_weights.weight(name, shape)
    return weights(name, shape, norms_near=norms_near(model_type))


def batch_of(name: str) -> dict[str, np.ndarray]:
    """Three padded texts with labels, under zerojax's names."""
    model_type, kind, keys = CASES[name]
    is_left, pad = name.endswith("_left"), 0 if model_type == "bert" else PAD
    index = np.arange(LENGTH)
    tokens = np.stack([(7 * index + 5 * row + index**2) % 14 + 4 for row in range(3)])
    real = np.stack([index >= LENGTH - n if is_left else index < n for n in _LENGTHS])
    found: dict[str, np.ndarray] = {"tokens": np.where(real, tokens, pad).astype(np.int32)}
    if model_type == "bert" or is_left:
        found["attention_mask"] = real.astype(np.int32)
    if model_type == "bert":
        found["token_types"] = np.where(real & (index > 3), 1, 0).astype(np.int32)
    return found | _labels(kind, keys, real)


def _labels(kind: str, keys: dict[str, Any], real: np.ndarray) -> dict[str, np.ndarray]:
    if kind == ANSWER:
        first, last = np.array([2, -1, 1], np.int32), np.array([4, 0, 3], np.int32)
        return {"start_positions": first, "end_positions": last}
    if kind == TOKENS:
        labels = (np.arange(3 * LENGTH).reshape(3, LENGTH) * 3) % 5
        return {"labels": np.where(real, labels, -100).astype(np.int32)}
    count = len(keys["id2label"]) if "id2label" in keys else keys["num_labels"]
    problem = keys.get("problem_type", "regression" if count == 1 else None)
    if problem is None:
        return {"labels": np.array([1, -100, 0], np.int32)}
    numbers = np.arange(3 * count).reshape(3, count)
    if problem == "regression":
        values = np.sin(numbers).astype(np.float32)
        return {"labels": values[:, 0] if count == 1 else values}
    return {"labels": (numbers % 2).astype(np.float32)}
