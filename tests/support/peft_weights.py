"""Adapters by formula, in PEFT's names and shapes, so that two programs have the same.

Knows names and shapes; imports NumPy only, for `tests/oracles/lora.py` runs elsewhere.
"""

import numpy as np

from tests.support.hugging_face_weights import weights

RANK, ALPHA = 2, 6.0

CASES: dict[str, dict[str, tuple[int, ...]]] = {
    "gpt2": {"attn.c_attn": (0, 2), "attn.c_proj": (0,), "mlp.c_fc": (0,), "mlp.c_proj": (0,)},
    "llama": {
        **{f"self_attn.{x}_proj": (0,) for x in "qkvo"},
        **{f"mlp.{x}_proj": (0,) for x in ("gate", "up", "down")},
    },
}
"""Of each model the modules with adapters, and which of our projections in them have one: of
GPT-2's c_attn query and value, not key."""

JOINED = 3
"""Projections in a module that holds several."""


def part_of(name: str, shape: tuple[int, int], part: int) -> np.ndarray:
    """The adapter of one of our projections: its own array, as PEFT would have it."""
    return 0.5 * weights(f"{name}/{part}", shape)


def adapter_tensor(case: str, name: str, shape: tuple[int, int]) -> np.ndarray:
    """An adapter's array; a module with several adapters has them side by side."""
    parts = next(parts for target, parts in CASES[case].items() if f".{target}." in name)
    if len(parts) == 1:
        return part_of(name, shape, parts[0])
    if ".lora_A." in name:
        return np.concatenate([part_of(name, (RANK, shape[1]), part) for part in parts])
    joined = np.zeros(shape, np.float32)
    rows = shape[0] // JOINED
    for number, part in enumerate(parts):
        columns = slice(number * RANK, (number + 1) * RANK)
        joined[part * rows : (part + 1) * rows, columns] = part_of(name, (rows, RANK), part)
    return joined
