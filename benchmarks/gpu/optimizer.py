"""Part "optimizer": kernels, XLA, optax and torch's fused AdamW, relative to the rate of a copy.

On a CPU (--smoke) the kernels run in interpret mode, so that only the program is shown to work.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.subjects import peak_device_bytes
from benchmarks.gpu.traced import device_events
from benchmarks.machine import load_average
from benchmarks.measuring import Sample, interleave, least_of, median_of, ratio_of, sample
from benchmarks.optimizer import (
    BYTES,
    Leaves,
    Ours,
    Way,
    compile_way,
    forget_programs,
    make_gradients,
    num_parameters,
    take_samples,
    ways_of,
)
from benchmarks.recording import Goal, Record, add_arguments, save_so_far, write_record
from pallas_kernels.choice import Choice, KernelUnavailable, choose
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client

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
"""Shapes of GPT-2: 124 million parameters in 148 leaves."""
LAYOUTS: Mapping[str, Leaves] = {"1 leaf": [(1 << 20, 1 << 10)], "148 leaves": GPT2}
SMOKE_LAYOUTS: Mapping[str, Leaves] = {"1 leaf": [(2, 512)], "2 leaves": [(700,), (512,)]}
LAUNCHES = ("fusion", "custom-call", "copy", "fusion-start", "copy-start")
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
"""With this option XLA launches each kernel separately. Without it, XLA puts five or more kernels
into one command buffer (a CUDA graph)."""
KINDS = ("adamw", "stats", "lion", "adam8bit")
"""Kinds of update in the order of their measurement."""
TRACED = ("XLA", "XLA, no command buffers", "kernel")
UPDATES = 10
"""In one program."""
NOTE = (
    f"times are of one update of {UPDATES} in one program; launches, bytes and ulp are those of a "
    "program of one update"
)
TORCH_BYTES = 28
"""Bytes per parameter of torch's AdamW in float32: four arrays are read and three written."""


def main(argv: list[str] | None = None) -> None:
    """Measures, and writes the record after each kind, so that a late failure loses little."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after this")
    arguments = parser.parse_args(argv)
    load_before = load_average()
    ends = time.monotonic() + arguments.seconds
    # torch and JAX use the device one after the other.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    record = Record(name="optimizer", rows=rows, goals=goals, notes=[NOTE])
    for layout, shapes in (SMOKE_LAYOUTS if arguments.smoke else LAYOUTS).items():
        torch_row = _torch_row(shapes, arguments.smoke)  # before JAX allocates its memory
        copy = copy_rate(1 << 16 if arguments.smoke else 1 << 30)
        rows.append({"leaves": layout, "kind": "copy", "way": "x + 1", "TB/s": copy / 1e12})
        if "TB/s" in torch_row:
            torch_row["/copy"] = torch_row["TB/s"] * 1e12 / copy
        rows.append({"leaves": layout} | torch_row)
        for kind in KINDS:
            try:
                found, more = measure_kind(kind, shapes, copy, arguments.smoke, ends)
            except Exception as error:  # the other kinds may still work
                found, more = [{"kind": kind, "way": "all", "note": short(error)}], []
            rows += [{"leaves": layout} | row for row in found]
            goals += [_named(goal, layout) for goal in more]
            save_so_far(record, arguments, load_before)
            forget_programs()
            gc.collect()
    for row in traced_rows("adamw", arguments.smoke, ends):
        rows.append(row)
        save_so_far(record, arguments, load_before)
    peak = peak_device_bytes()
    if peak is not None:
        record = dataclasses.replace(record, notes=[NOTE, f"peak of JAX: {peak / 1e9:.1f} GB"])
    write_record(record, arguments, load_before)


def copy_rate(count: int) -> float:
    """Returns bytes per second of a copy, which reads and writes a float32 array once."""
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
    """Returns (zerojax's ways, reason why they contain no kernel, or None)."""
    reference = Choice("xla", "to compare with")
    ours = {"XLA": Ours(reference)}
    if many_leaves and kind == "adamw":
        ours["XLA, no command buffers"] = Ours(reference, options=NO_GRAPHS)
    if many_leaves and kind == "adam8bit" and not smoke:
        ours = {}  # compiling it for 148 leaves takes 100 s of processor time
    try:
        kernel = choose("interpret" if smoke else "mosaic_gpu", kernel=kind)
    except KernelUnavailable as error:
        return ours, str(error)
    ours["kernel"] = Ours(kernel)
    if kind == "adamw" and not many_leaves:
        ours["kernel, tiles of 1024"] = Ours(kernel, block=1024)
    if many_leaves and kind == "adamw":
        ours["kernel, no command buffers"] = Ours(kernel, options=NO_GRAPHS)
    return ours, None


def measure_kind(
    kind: str, shapes: Leaves, copy: float, smoke: bool, ends: float
) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Returns rows and goals of one kind of update.

    Args:
      kind: kind of update, a key of `BYTES`.
      shapes: shapes of the leaves.
      copy: bytes per second of a copy.
      smoke: only show that it runs.
      ends: value of time.monotonic() after which nothing is started.
    """
    ours, why_not = implementations(kind, smoke, many_leaves=len(shapes) > 1)
    updates = 2 if smoke else UPDATES
    ways: dict[str, Way] = {}
    rows: list[dict[str, Any]] = []
    for name, way in ways_of(kind, shapes, ours).items():
        note = _build(way, shapes, updates, ends)
        if note is None:
            ways[name] = way
        else:
            rows.append({"kind": kind, "way": name, "note": note})
    if why_not:
        rows.append({"kind": kind, "way": "kernel", "note": why_not})
    if not ways or time.monotonic() > ends:
        return rows, []
    rounds, steps = (2, 1) if smoke else (5, 3 if len(shapes) == 1 else 10)
    samples = take_samples(ways, shapes, rounds=rounds, steps=steps, warm_up=2, updates=updates)
    size = num_parameters(shapes)
    for name, taken in samples.items():
        seconds = median_of(taken, "wall")
        rate = BYTES[kind] * size / seconds
        row = {"kind": kind, "way": name, "ms": seconds * 1e3}
        row["least_ms"] = 1e3 * least_of(taken, "wall")
        row |= {"TB/s": rate / 1e12, "/copy": rate / copy}
        try:
            row |= _facts_of_one(name, ways, shapes, ends)
        except Exception as error:  # a failure must not lose the times
            row["note"] = short(error)
        rows.append(row)
    return rows, _goals(kind, samples, {row["way"]: row for row in rows}, len(shapes) > 1)


def _build(way: Way, shapes: Leaves, updates: int, ends: float) -> str | None:
    """Compiles the timed program; returns why that failed, or None."""
    if time.monotonic() > ends:
        return "left out: time is over"
    try:
        compile_way(way, shapes, updates)
    except Exception as error:  # the other ways may still work
        return short(error)
    return None


def _goals(
    kind: str, samples: Mapping[str, list[Sample]], rows: Mapping[str, Any], many_leaves: bool
) -> list[Goal]:
    if "kernel" not in samples:
        return []
    least = 0.80 if many_leaves else 0.90
    title = f"{kind}: bytes / time of the kernel, of the copy's"
    goals = [Goal(name=title, value=rows["kernel"]["/copy"], limit=least, at_least=True)]
    for other in ("XLA", "XLA, no command buffers") if many_leaves else ():
        if other in samples:
            # Both launch a kernel per leaf and move the same bytes.
            ratio = ratio_of(samples[other], samples["kernel"], "wall")
            title = f"{kind}: {other} / kernel"
            goals.append(Goal(name=title, value=ratio, limit=0.97, at_least=True))
    return goals


def _named(goal: Goal, layout: str) -> Goal:
    return Goal(
        name=f"{layout}, {goal.name}", value=goal.value, limit=goal.limit, at_least=goal.at_least
    )


def _facts_of_one(
    name: str, ways: Mapping[str, Way], shapes: Leaves, ends: float
) -> dict[str, Any]:
    """Returns facts of a program of one update: launched kernels, bytes, largest difference."""
    if "command buffers" in name or time.monotonic() > ends:
        return {}
    facts = _program_facts(ways[name], shapes)
    if name.startswith("kernel") and "XLA" in ways:
        facts["max_ulp"] = largest_difference(ways[name], ways["XLA"], shapes)
    return facts


def _program_facts(way: Way, shapes: Leaves) -> dict[str, Any]:
    """Returns what the compiler reports: number of launched kernels and bytes of one step."""
    compiled = compile_way(way, shapes)
    program = hlo.read_program(compiled.as_text())
    launches = 0
    for computation in program.computations.values():
        if not computation.name.startswith("fused"):
            times = program.times_run(computation.name)
            launches += times * sum(i.opcode in LAUNCHES for i in computation.instructions)
    memory = compile_client.memory_of(compiled)
    return {
        "launches": launches,
        "needs_MB": memory.peak / 1e6,
        "temp_MB": memory.temporary / 1e6,
    }


def traced_rows(kind: str, smoke: bool, ends: float) -> Iterator[dict[str, Any]]:
    """Returns rows of the profiler's counts in one update of many leaves; no rows on a CPU."""
    if jax.default_backend() != "gpu":
        return
    shapes = LAYOUTS["148 leaves"]
    ours, _ = implementations(kind, smoke, many_leaves=True)
    ways = ways_of(kind, shapes, ours)
    for name in TRACED:
        if name not in ways:
            continue
        way = ways[name]
        row = {"leaves": "148 leaves", "kind": f"{kind}, traced", "way": name}
        if time.monotonic() > ends:
            yield row | {"note": "left out: time is over"}
            continue
        try:
            yield row | _traced(way, shapes)
        except Exception as error:  # the times stand without it
            yield row | {"note": short(error)}


def _traced(way: Way, shapes: Leaves) -> dict[str, Any]:
    program, grads = compile_way(way, shapes), make_gradients(shapes)
    state, _ = program(jax.jit(way.init)(), grads, jnp.int32(1))
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(state, grads, jnp.int32(2)))
        kernels = device_events(folder)
    begin = min(kernel.start for kernel in kernels)
    end = max(kernel.end for kernel in kernels)
    busy = sum(kernel.duration for kernel in kernels)
    return {"launches": len(kernels), "ms": (end - begin) / 1e3, "busy_ms": busy / 1e3}


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def largest_difference(way: Way, other: Way, shapes: Leaves) -> int:
    """Returns the largest difference of two ways after a step, in units in the last place."""
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
    """Maps floats to uint32 such that neighbouring floats are neighbouring numbers."""
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
        """Returns the peak memory of torch, and frees its memory."""
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
