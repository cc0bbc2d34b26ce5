"""Times torch's copies between pinned host memory and the device, for comparison with JAX.

Uses torch and does not import JAX.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any


def torch_link_row(smoke: bool) -> dict[str, Any]:
    """Returns GB/s of one GiB in, out, and both at once on two streams; a note if that fails."""
    row: dict[str, Any] = {"what": "link", "way": "torch, pinned copies"}
    if importlib.util.find_spec("torch") is None:
        return row | {"note": "left out: torch is not installed (pip install torch)"}
    try:
        return row | _measure(1 << 20 if smoke else 1 << 30)
    except Exception as error:  # a failure must not lose the rows of JAX
        return row | {"note": f"{type(error).__name__}: {error}"[:200]}


def _measure(num_bytes: int) -> dict[str, Any]:
    import torch  # only where it is installed

    if not torch.cuda.is_available():
        return {"note": "left out: torch sees no GPU"}
    inside, inside_2 = (torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in "ab")
    outside, outside_2 = (torch.zeros(num_bytes, dtype=torch.uint8).pin_memory() for _ in "ab")
    one, two = torch.cuda.Stream(), torch.cuda.Stream()

    def copy_in() -> None:
        with torch.cuda.stream(one):
            inside.copy_(outside, non_blocking=True)

    def copy_out() -> None:
        with torch.cuda.stream(two):
            outside_2.copy_(inside_2, non_blocking=True)

    def copy_both() -> None:
        copy_in()
        copy_out()

    def rate(copy: Callable[[], None], moved: int) -> float:
        copy()
        torch.cuda.synchronize()
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            copy()
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return moved / best / 1e9

    return {
        "in_GB/s": rate(copy_in, num_bytes),
        "out_GB/s": rate(copy_out, num_bytes),
        "both_GB/s": rate(copy_both, 2 * num_bytes),
    }
