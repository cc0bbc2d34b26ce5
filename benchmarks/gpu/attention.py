"""Part "attention": values, gradients and time of each implementation, of JAX's and of torch's.

Values and gradients are compared with stored scores in float32; times are of the forward and the
backward pass of one call, causal, in bfloat16.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zerojax
from benchmarks.machine import load_average
from benchmarks.measuring import Sample, interleave, least_of, median_of, sample
from benchmarks.recording import Goal, Record, parse_arguments, save_so_far, write_record
from pallas_kernels.attention import COMPUTE_CAPABILITY
from pallas_kernels.choice import missing
from zerojax.config import SlidingWindowLayout

TOLERANCE = 2e-2
"""Tolerance relative to the largest value: bfloat16 has 8 bits, and the backward pass rounds
twice."""
ROUNDS, STEPS, WARM_UP = 3, 5, 2
# number of tokens, number of rows, whether stored scores fit
CASES, SMOKE_CASES = ((1024, 16, True), (4096, 4, True), (32768, 1, False)), ((64, 2, True),)
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SMOKE_HEADS = (4, 2, 16)
TOKENS = 256
"""Of what is compared."""
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "all": {},
    "window": {"causal": True, "window": 48},
    "packed": {"causal": True, "segments": np.arange(2 * TOKENS).reshape(2, TOKENS) // 77},
    "layout": {"causal": True, "layout": SlidingWindowLayout(block=16)},
}
NOT_BY_CUDNN = ("packed", "layout")


def main(argv: list[str] | None = None) -> None:
    """Compares and times the implementations, and writes the record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    for record in measure(arguments.smoke):
        save_so_far(record, arguments, load_before)
    write_record(record, arguments, load_before)
    if not all(goal.is_met for goal in record.goals):
        raise SystemExit("attention differs by more than the rounding of bfloat16: see the table")


def measure(smoke: bool) -> Iterator[Record]:
    """Yields the record after each row: first the comparisons, then the times."""
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    ways = ("chunked", *_ways_of_gpu())
    for mask, options in MASKS.items():
        for way in ways:
            if way == "cudnn" and mask in NOT_BY_CUDNN:
                continue
            difference = _difference(way, options, smoke)
            rows.append({"way": way, "mask": mask, "difference": difference})
            name = f"{way}, {mask}: difference from float32, over the largest value"
            goals.append(Goal(name=name, value=difference, limit=TOLERANCE))
            yield Record(name="attention", rows=rows, goals=goals)
    for tokens, batch, stores in SMOKE_CASES if smoke else CASES:
        for row in _times(tokens, batch, stores, smoke):
            rows.append(row)
            yield Record(name="attention", rows=rows, goals=goals)


def _ways_of_gpu() -> tuple[str, ...]:
    """Returns the implementations that this GPU supports; () without a GPU."""
    if jax.default_backend() != "gpu":
        return ()
    capability = float(jax.devices()[0].compute_capability)
    own = missing() is None and capability == COMPUTE_CAPABILITY
    return ("cudnn", "mosaic_gpu") if own else ("cudnn",)


def _operands(tokens: int, batch: int, smoke: bool, dtype: str) -> tuple[jax.Array, ...]:
    """Returns query, key, value and the cotangent for the gradients."""
    heads, kv_heads, head_dim = SMOKE_HEADS if smoke else (HEADS, KV_HEADS, HEAD_DIM)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(batch, tokens, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    drawn = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]
    return tuple(x.astype(dtype) for x in drawn)


def _both_passes(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    def run(query: jax.Array, key: jax.Array, value: jax.Array, slope: jax.Array) -> Any:
        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(slope)

    return jax.jit(run)


def _difference(way: str, options: dict[str, Any], smoke: bool) -> float:
    """Returns the largest relative difference of the result and its three gradients."""
    attend = functools.partial(zerojax.attention, **options)
    of = lambda name: _both_passes(functools.partial(attend, implementation=name))  # noqa: E731
    found = of(way)(*_operands(TOKENS, 2, smoke, "bfloat16"))
    with jax.default_matmul_precision("highest"):
        expected = of("xla")(*_operands(TOKENS, 2, smoke, "float32"))
    pairs = [
        (np.asarray(a, np.float32), np.asarray(b)) for a, b in zip(found, expected, strict=True)
    ]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def _times(tokens: int, batch: int, stores: bool, smoke: bool) -> list[dict[str, Any]]:
    """Returns a row per implementation, timed in alternation; a failed one has the reason."""
    given = _operands(tokens, batch, smoke, "bfloat16")
    ways = {"chunked": _of_zerojax("chunked")}
    if stores:
        ways["xla"] = _of_zerojax("xla")
    ways |= {name: _of_zerojax(name) for name in _ways_of_gpu()}
    if "cudnn" in ways:
        ways["cudnn through JAX"] = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
        )
    sides, failed = {}, []
    for name, attend in ways.items():
        side = functools.partial(_steps, _both_passes(attend), given)
        try:
            side(1)
        except Exception as error:  # a failure must not lose the other rows
            failed.append(
                _named(name, tokens, batch, note=f"{type(error).__name__}: {error}"[:200])
            )
        else:
            sides[name] = side
    torch_side = _torch_side(tokens, batch, smoke)
    if torch_side is not None:
        sides["torch"] = torch_side
    samples = interleave(sides, warm_up=WARM_UP, steps=STEPS, rounds=ROUNDS)
    timed = [
        _named(
            name,
            tokens,
            batch,
            ms=1e3 * median_of(samples[name], "wall"),
            least_ms=1e3 * least_of(samples[name], "wall"),
        )
        for name in sides
    ]
    return timed + failed


def _named(way: str, tokens: int, batch: int, **more: Any) -> dict[str, Any]:
    return {"way": way, "mask": "causal", "tokens": tokens, "rows": batch, **more}


def _of_zerojax(name: Any) -> Callable[..., jax.Array]:
    return functools.partial(zerojax.attention, causal=True, implementation=name)


def _steps(run: Callable[..., Any], given: tuple[jax.Array, ...], steps: int) -> Sample:
    def one_after_the_other() -> None:
        for _ in range(steps):
            result = run(*given)
        jax.block_until_ready(result)

    return sample(one_after_the_other, steps)


def _torch_side(tokens: int, batch: int, smoke: bool) -> Callable[[int], Sample] | None:
    """Returns PyTorch's fused attention on the same shapes; None if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch  # only where it is installed

    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads, kv_heads, head_dim = SMOKE_HEADS if smoke else (HEADS, KV_HEADS, HEAD_DIM)
    query, key, value = (
        torch.randn(
            batch, n, tokens, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True
        )
        for n in (heads, kv_heads, kv_heads)
    )
    slope = torch.randn_like(query)
    attend = torch.nn.functional.scaled_dot_product_attention

    def run(steps: int) -> Sample:
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            out = attend(query, key, value, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, (query, key, value), slope)
        if device == "cuda":
            torch.cuda.synchronize()
        return Sample((time.perf_counter() - began) / steps, (time.process_time() - cpu) / steps)

    return run


if __name__ == "__main__":
    main()
