"""Memory, traffic and products of attention, forward and backward, compiled for GPUs.

Measures one causal sequence with 32 heads of 128 in bfloat16, by implementation and length. Needs
the extra `plan`; nothing here is a measurement of a GPU (`benchmarks/gpu/attention.py` measures).
cuDNN's workspace is not counted. Matrix products are counted in the compiled program, for zerojax's
own kernels in the trace.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.forecasting.hlo.costs import hbm_bytes, matmul_flops
from zerojax.forecasting.hlo.program import read_program
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.placement.device_mesh import make_mesh
from zerojax.tracing.flops import count_program_flops

HEADS, HEAD_DIM = 32, 128
CASES = (("h100", 9.89e14, 3.35e12), ("a100-80gb", 3.12e14, 2.04e12))
"""Card, dense bfloat16 FLOP/s and bytes/s of its memory, as published."""
LENGTHS, SMOKE_LENGTHS = (1024, 4096, 8192, 32768), (256,)
WAYS = ("xla", "chunked", "cudnn", "mosaic_gpu")
HOPPER = "h100"
"""The card of `CASES` that zerojax's own kernels support."""
GIB = 2**30
LINEAR = {"cudnn": 8, "mosaic_gpu": 9}
"""Limit, in bytes of temporary memory per element of the query, of attention without stored
scores."""


def main(argv: list[str] | None = None) -> None:
    """Compiles the cases and writes the record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    record = measure(SMOKE_LENGTHS if arguments.smoke else LENGTHS)
    write_record(record, arguments, load_before)


def measure(lengths: tuple[int, ...]) -> Record:
    """Returns a row per card, length and implementation; none without the compile-only client."""
    why = compile_client.missing()
    if why is not None:
        return Record(name="attention", rows=[], notes=[why])
    rows = [
        _row(*case, length, way)
        for case in CASES
        for length in lengths
        for way in WAYS
        if way != "mosaic_gpu" or case[0] == HOPPER
    ]
    goals = [
        Goal(
            name=f"{row['gpu']}, {row['attention']}, {row['tokens']} tokens: "
            "temporary bytes per element",
            value=row["temporary_GiB"] * GIB / (row["tokens"] * HEADS * HEAD_DIM),
            limit=LINEAR[row["attention"]],
        )
        for row in rows
        if row["attention"] in LINEAR
    ]
    compiler = compile_client.compiler_version(fast=True)
    return Record(name="attention", rows=rows, goals=goals, notes=[f"compiled with {compiler}"])


def _row(gpu: str, flops: float, bandwidth: float, tokens: int, way: str) -> dict[str, Any]:
    devices = compile_client.gpu_devices(find_gpu(gpu), 1)
    mesh = make_mesh({"data": 1}, devices)
    shape = (1, tokens, HEADS, HEAD_DIM)
    given = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    def both(query: jax.Array, key: jax.Array, value: jax.Array, slope: jax.Array) -> Any:
        attend = lambda *x: zerojax.attention(*x, causal=True, implementation=way)  # noqa: E731
        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(slope)

    everywhere = jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    step = jax.jit(everywhere)
    compiled = compile_client.compile_for_gpus(
        step, *(given,) * 4, options=dict(compile_client.FAST_OPTIONS)
    )
    program = read_program(compiled.text)
    products, moved = matmul_flops(program), hbm_bytes(program)
    if way == "mosaic_gpu":
        products = count_program_flops(step.trace(*(given,) * 4).jaxpr)
    return {
        "gpu": gpu,
        "tokens": tokens,
        "attention": way,
        "temporary_GiB": compiled.memory.temporary / GIB,
        "traffic_GB": moved / 1e9,
        "TFLOP": products / 1e12,
        "least_ms": 1e3 * max(products / flops, moved / bandwidth),
        "bound_by": "compute" if products / flops > moved / bandwidth else "memory",
    }


if __name__ == "__main__":
    main()
