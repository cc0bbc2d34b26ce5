"""Part "optimizer": kernels, XLA, optax and torch's fused AdamW against the copy of the same run.

On a CPU (--smoke) the kernels run in interpret mode, so that only the program is shown to work.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.subjects import peak_device_bytes
from benchmarks.machine import load_average
from benchmarks.measuring import Sample, interleave, median_of, ratio_of, sample
from benchmarks.optimizer import (
    BYTES,
    Leaves,
    Ours,
    Way,
    compile_way,
    make_gradients,
    num_parameters,
    take_samples,
    ways_of,
)
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from pallas_kernels.choice import Choice, KernelUnavailable, choose
from zerojax import compiler, hlo

GPT2_LAYER = [
    (768,),
    (768,),
    (768, 2304),
    (2304,),
    (768, 768),
    (768,),
    (768,),
    (768,),
    (768, 3072),
    (3072,),
    (3072, 768),
    (768,),
]
GPT2 = [(50257, 768), (1024, 768), *GPT2_LAYER * 12, (768,), (768,)]
"""124 million parameters in 148 leaves."""
LAYOUTS: Mapping[str, Leaves] = {"1 leaf": [(1 << 20, 1 << 10)], "148 leaves": GPT2}
SMOKE_LAYOUTS: Mapping[str, Leaves] = {"1 leaf": [(2, 512)], "2 leaves": [(700,), (512,)]}
LAUNCHES = ("fusion", "custom-call", "copy", "fusion-start", "copy-start")
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
"""XLA starts each kernel by itself. Without this option it gathers five or more of them in one
command buffer (a CUDA graph)."""
TABLES = ("adamw", "lion", "stats")
TORCH_BYTES = 28
"""Per parameter of torch's AdamW, all float32: four arrays read, three written."""


def main(argv: list[str] | None = None) -> None:
    """Measures and records, after each layout, so that a late failure loses little."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    # torch and JAX share the device, one after the other.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    notes: list[str] = []
    for layout, shapes in (SMOKE_LAYOUTS if arguments.smoke else LAYOUTS).items():
        torch_row = _torch_row(shapes, arguments.smoke)  # before JAX takes memory that it keeps
        copy = copy_rate(1 << 16 if arguments.smoke else 1 << 30)
        rows.append({"leaves": layout, "kind": "copy", "way": "x + 1", "TB/s": copy / 1e12})
        if "TB/s" in torch_row:
            torch_row["/copy"] = torch_row["TB/s"] * 1e12 / copy
        rows.append({"leaves": layout} | torch_row)
        for kind in BYTES:
            found, more = _measure_kind(kind, shapes, copy, arguments.smoke)
            rows += [{"leaves": layout} | row for row in found]
            goals += [_named(goal, layout) for goal in more]
            gc.collect()
        peak = peak_device_bytes()
        notes = [] if peak is None else [f"peak of the process: {peak / 1e9:.1f} GB"]
        record = Record(name="optimizer", rows=rows, goals=goals, notes=notes)
        write_record(record, arguments, load_before)


def copy_rate(count: int) -> float:
    """Bytes per second of a float32 array read once and written once."""
    x = jnp.arange(count, dtype=jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    repeats = 20
    jax.block_until_ready(copy(copy(x)))
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(repeats):
            result = copy(x)
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - began) / repeats)
    return 8 * count / best


def implementations(
    kind: str, smoke: bool, *, many_leaves: bool = False
) -> tuple[dict[str, Ours], str | None]:
    """(ways of ours, why there is no kernel among them or None)."""
    reference = Choice("xla", "to compare with")
    ours = {"XLA": Ours(reference)}
    if many_leaves:
        ours["XLA, no command buffers"] = Ours(reference, options=NO_GRAPHS)
    try:
        kernel = choose("interpret" if smoke else "mosaic_gpu", kernel=kind)
    except KernelUnavailable as error:
        return ours, str(error)
    ours["kernel"] = Ours(kernel)
    if kind in ("adamw", "lion"):
        ours["kernel, tiles of 1024"] = Ours(kernel, block=1024)
    if many_leaves:
        ours["kernel, no command buffers"] = Ours(kernel, options=NO_GRAPHS)
        if kind in TABLES:
            ours["kernel, a table of leaves"] = Ours(kernel, is_table=True)
    return ours, None


def _measure_kind(
    kind: str, shapes: Leaves, copy: float, smoke: bool
) -> tuple[list[dict[str, Any]], list[Goal]]:
    ours, why_not = implementations(kind, smoke, many_leaves=len(shapes) > 1)
    ways = ways_of(kind, shapes, ours)
    rounds, steps = (2, 1) if smoke else (5, 10)
    samples = take_samples(ways, shapes, rounds=rounds, steps=steps, warm_up=2)
    size = num_parameters(shapes)
    rows = []
    for name, taken in samples.items():
        seconds = median_of(taken, "wall")
        rate = BYTES[kind] * size / seconds
        row = {"kind": kind, "way": name, "ms": seconds * 1e3, "TB/s": rate / 1e12}
        row |= {"/copy": rate / copy} | _program_facts(ways[name], shapes)
        if name.startswith("kernel"):
            row["max_ulp"] = largest_difference(ways[name], ways["XLA"], shapes)
        rows.append(row)
    if why_not:
        rows.append({"kind": kind, "way": "kernel", "note": why_not})
        return rows, []
    least = 0.90 if len(shapes) == 1 else 0.80
    fraction = next(row["/copy"] for row in rows if row["way"] == "kernel")
    name = f"{kind}: kernel's bytes / time, of the copy's"
    goals = [Goal(name=name, value=fraction, limit=least, at_least=True)]
    if kind == "adamw" and len(shapes) > 1:
        ratio = ratio_of(samples["optax"], samples["kernel"], "wall")
        goals.append(Goal(name="adamw: optax / kernel", value=ratio, limit=1.3, at_least=True))
    if kind in TABLES and len(shapes) > 1:
        ratio = ratio_of(samples["XLA"], samples["kernel, a table of leaves"], "wall")
        name = f"{kind}: XLA with command buffers / one kernel for all leaves"
        goals.append(Goal(name=name, value=ratio, limit=1.3, at_least=True))
    return rows, goals


def _named(goal: Goal, layout: str) -> Goal:
    return Goal(
        name=f"{layout}, {goal.name}", value=goal.value, limit=goal.limit, at_least=goal.at_least
    )


def _program_facts(way: Way, shapes: Leaves) -> dict[str, Any]:
    """What the compiler says: kernels that one step starts, and bytes it needs."""
    compiled = compile_way(way, shapes)
    program = hlo.read_program(compiled.as_text())
    launches = 0
    for computation in program.computations.values():
        if not computation.name.startswith("fused"):
            times = program.times_run(computation.name)
            launches += times * sum(i.opcode in LAUNCHES for i in computation.instructions)
    memory = compiler.memory_of(compiled)
    return {
        "launches": launches,
        "needs_MB": memory.peak / 1e6,
        "temp_MB": memory.temporary / 1e6,
    }


def largest_difference(way: Way, other: Way, shapes: Leaves) -> int:
    """Units in the last place between all float32 arrays of two ways after one step."""
    grads = make_gradients(shapes)
    results = []
    for one in (way, other):
        found = compile_way(one, shapes)(jax.jit(one.init)(), grads, jnp.int32(1))
        results.append([x for x in jax.tree.leaves(found) if x.dtype == jnp.float32])

    @jax.jit
    def distance(a: Any, b: Any) -> Any:
        a, b = _ordered(a), _ordered(b)
        return jnp.max(jnp.maximum(a, b) - jnp.minimum(a, b))

    return max(int(distance(a, b)) for a, b in zip(*results, strict=True))


def _ordered(x: Any) -> Any:
    """Neighbouring floats as neighbouring uint32."""
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(raw >> 31 == 1, ~raw, raw | jnp.uint32(1 << 31))


def _torch_row(shapes: Leaves, smoke: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": "adamw", "way": "torch fused, all float32"}
    if importlib.util.find_spec("torch") is None:
        return row | {"note": "left out: torch is not installed (pip install torch)"}
    try:
        side, peak = _torch_side(shapes)
        taken = interleave({"torch": side}, warm_up=3, steps=2 if smoke else 10, rounds=5)["torch"]
    except Exception as error:  # the rows of JAX do not depend on it
        return row | {"note": f"{type(error).__name__}: {error}"[:200]}
    seconds = median_of(taken, "wall")
    rate = TORCH_BYTES * num_parameters(shapes) / seconds
    held = peak()
    needs = None if held is None else held / 1e6
    return row | {"ms": seconds * 1e3, "TB/s": rate / 1e12, "needs_MB": needs}


def _torch_side(shapes: Leaves) -> tuple[Callable[[int], Sample], Callable[[], int | None]]:
    import torch  # only where it is installed

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    params = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-2
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)

    def run(steps: int) -> Sample:
        def one_after_the_other() -> None:
            for _ in range(steps):
                optimizer.step()
            if on_gpu:
                torch.cuda.synchronize()

        return sample(one_after_the_other, steps)

    def peak() -> int | None:
        """The most that torch held; it holds nothing afterwards."""
        if not on_gpu:
            return None
        found = torch.cuda.max_memory_allocated()
        params.clear()
        optimizer.param_groups.clear()
        optimizer.state.clear()
        torch.cuda.empty_cache()
        return found

    return run, peak


if __name__ == "__main__":
    main()
