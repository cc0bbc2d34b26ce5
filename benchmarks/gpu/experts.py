"""Part "experts": values, gradients and time of experts, by batched and by grouped products.

Values and gradients in bfloat16 are compared with batched products in float32; times are those of
the forward and the backward pass of one layer. Without a Hopper GPU, or with JAX before 0.11, the
kernel cannot run: then the loop over the same tiles is compared, and the record says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zerojax
from benchmarks.machine import load_average
from benchmarks.measuring import Sample, interleave, least_of, median_of, sample
from benchmarks.recording import Goal, Record, parse_arguments, save_so_far, write_record
from pallas_kernels.choice import missing
from pallas_kernels.grouped import COMPUTE_CAPABILITY

TOLERANCE = 2e-2
"""Tolerance relative to the largest value: bfloat16 has 8 bits, and three products are in
sequence."""
ROUNDS, STEPS, WARM_UP = 3, 5, 2
LOADS = ("equal", "drawn", "skewed")
"""Loads of experts: equal, drawn uniformly, and proportional to 1 / (1 + number of the expert)."""
# name: tokens, width, hidden, experts, k
CASES = {
    "OLMoE, experts over 8": (4096, 2048, 1024, 8, 8),
    "OLMoE, on one device": (4096, 2048, 1024, 64, 8),
    "Mixtral 8x7B, experts over 4": (8192, 4096, 14336, 2, 1),
}
SMOKE_CASES = {"tiny": (96, 64, 128, 4, 2)}


def main(argv: list[str] | None = None) -> None:
    """Compares and times the products, and writes the record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    for record in measure(arguments.smoke):
        save_so_far(record, arguments, load_before)
    write_record(record, arguments, load_before)
    if not all(goal.is_met for goal in record.goals):
        raise SystemExit("experts differ by more than the rounding of bfloat16: see the table")


def measure(smoke: bool) -> Iterator[Record]:
    """Yields the record after each load of each case."""
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    why = why_no_kernel()
    other = "grouped" if why is None else "loop"
    notes = [] if why is None else [f"grouped products were left out: {why}"]
    cases = SMOKE_CASES if smoke else CASES
    for case, sizes in cases.items():
        for load in LOADS:
            ways = ("batched", other) if smoke or other == "grouped" else ("batched",)
            found = _compared(sizes, load, ways)
            for way, difference in found.items():
                name = f"{way}, {case}, {load}: difference from float32, over the largest value"
                goals.append(Goal(name=name, value=difference, limit=TOLERANCE))
            for row in _times(sizes, load, ways):
                of = {"case": case, "load": load, "difference": found[row["way"]]}
                rows.append(of | row)
            yield Record(name="experts", rows=rows, goals=goals, notes=notes)


def why_no_kernel() -> str | None:
    """Returns why this machine cannot run the kernel; None if it can."""
    if jax.default_backend() != "gpu":
        return f"they need an NVIDIA GPU, and these devices are {jax.default_backend().upper()}s"
    capability = float(jax.devices()[0].compute_capability)
    if capability != COMPUTE_CAPABILITY:
        return f"they need compute capability {COMPUTE_CAPABILITY} (Hopper), not {capability}"
    return missing()


def _operands(sizes: tuple[int, ...], load: str, dtype: Any) -> tuple[Any, ...]:
    """Returns x, gates, ids, weights, and the cotangent for the gradients."""
    tokens, width, hidden, experts, k = sizes
    random = np.random.default_rng(0)
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(1), 3), strict=True))

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.bfloat16) * shape[-2] ** -0.5).astype(dtype)

    weights = {name: normal(keys[name], experts, *shape) for name, shape in shapes.items()}
    x, slope = (normal(jax.random.key(n), tokens, width) * tokens**0.5 for n in (2, 3))
    gates = jnp.asarray(random.random((tokens, k)), jnp.float32)
    if load == "equal":
        ids = np.arange(tokens * k).reshape(tokens, k) % experts
    else:
        share = 1.0 / np.arange(1, experts + 1) if load == "skewed" else np.ones(experts)
        # The k largest sums of logarithmic shares and Gumbel noise: k different experts.
        keyed = np.log(share) + random.gumbel(size=(tokens, experts))
        ids = np.argsort(-keyed, axis=1)[:, :k]
    return x, gates, jnp.asarray(ids, jnp.int32), weights, slope


def _mlps(weights: Any, rows: jax.Array, product: Any = None) -> jax.Array:
    """Computes a gated MLP per expert, for rows [experts, slots, width] or sorted rows."""
    times = functools.partial(jnp.einsum, "eci,eio->eco") if product is None else product
    hidden = jax.nn.silu(times(rows, weights["gate"])) * times(rows, weights["up"])
    return times(hidden, weights["down"])


def _both_passes(products: Any) -> Callable[..., Any]:
    def run(x: Any, gates: Any, ids: Any, weights: Any, slope: Any) -> Any:
        def result(x: Any, gates: Any, weights: Any) -> jax.Array:
            return zerojax.experts(x, gates, ids, weights, _mlps, products=products)

        out, pull = jax.vjp(result, x, gates, weights)
        return out, *pull(slope)

    return jax.jit(run)


def _compared(sizes: tuple[int, ...], load: str, ways: tuple[str, ...]) -> dict[str, float]:
    """Returns {way: largest difference of the result and the gradients}."""
    with jax.default_matmul_precision("highest"):
        expected = _both_passes("batched")(*_operands(sizes, load, jnp.float32))
    expected = [np.asarray(x) for x in jax.tree.leaves(expected)]
    differences = {}
    for way in ways:
        found = jax.tree.leaves(_both_passes(way)(*_operands(sizes, load, jnp.bfloat16)))
        pairs = [(np.asarray(a, np.float32), b) for a, b in zip(found, expected, strict=True)]
        differences[way] = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
    return differences


def _times(sizes: tuple[int, ...], load: str, ways: tuple[str, ...]) -> list[dict[str, Any]]:
    """Returns one row per way, timed in alternation."""
    given = _operands(sizes, load, jnp.bfloat16)
    sides = {way: functools.partial(_steps, _both_passes(way), given) for way in ways}
    samples = interleave(sides, warm_up=WARM_UP, steps=STEPS, rounds=ROUNDS)
    tokens, width, hidden, _, k = sizes
    ideal = 9 * 2 * tokens * k * width * hidden
    rows = []
    for way in ways:
        seconds = median_of(samples[way], "wall")
        least = 1e3 * least_of(samples[way], "wall")
        row = {"way": way, "ms": 1e3 * seconds, "least_ms": least}
        rows.append(row | {"TFLOP/s of rows": ideal / seconds / 1e12})
    return rows


def _steps(run: Callable[..., Any], given: tuple[Any, ...], steps: int) -> Sample:
    def one_after_the_other() -> None:
        for _ in range(steps):
            result = run(*given)
        jax.block_until_ready(result)

    return sample(one_after_the_other, steps)


if __name__ == "__main__":
    main()
