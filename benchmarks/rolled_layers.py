"""Layers of a Python list as a loop, compared with layers in a scan and with unrolled layers.

Three forms of one decoder that checkpoints every layer: `rolled` (a list, which the plan converts
to a loop), `scanned` (the same model with `zerojax.Stages`) and `unrolled` (the list with
roll=off). On 8 CPU devices: processor time to plan, trace, lower and compile the step, and its
temporaries. Compiled for 8 H100, if the extra `plan` is installed: temporaries, units sent, and the
share of the time of communication that overlaps with matrix products. Nothing is run.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import zerojax
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, save_so_far, write_record
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client, gpus
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import Plan, make_plan
from zerojax.step.build import build_step

NUM_DEVICES = 8
CPU, H100 = "8 CPU devices", "8 H100"
ROLLED, SCANNED, UNROLLED = "rolled", "scanned", "unrolled"
DEPTHS = (4, 12, 24, 48)
UNROLLED_DEPTHS = (4, 12, 24)
DEPTHS_AT_STAGE_2 = (4, 12)
COMPILE_LIMIT = 1.2
UNROLLED_LIMIT = 1.1
"""Limit of compile time of stages 1 and 2 relative to stage 3, unrolled; measurements vary as
much."""
REPEATS = 3
MEMORY_LIMIT = 1.02
NEAR = 1.01
"""Tolerance of bytes sent and of their hidden share, in both directions."""
MB = 1e6


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the decoder and of one device's batch.

    Attributes:
      rows: number of rows per device.
      precision: precision of the plan.
    """

    width: int
    heads: int
    vocab: int
    tokens: int
    rows: int
    precision: str

    @property
    def layer_parameters(self) -> int:
        """Returns a layer's parameters: two norms, query/key/value, attention output, MLP."""
        return 12 * self.width**2 + 2 * self.width

    @property
    def carry_bytes(self) -> int:
        """Returns the bytes that a checkpointed layer stores on each device, its input."""
        return self.rows * self.tokens * self.width * self._itemsize

    @property
    def inherent_bytes(self) -> int:
        """Returns the bytes that every layer adds to the temporaries of stage 3, in any form.

        These are its input and its shard of the gradients; in bfloat16 also its shard of the
        weights, cast from float32 before the gather.
        """
        pieces = 1 if self.precision == "fp32" else 2
        return self.carry_bytes + pieces * self.layer_parameters * self._itemsize // NUM_DEVICES

    @property
    def dtype(self) -> Any:
        """Returns the dtype of the activations between layers."""
        return jnp.dtype(jnp.float32 if self.precision == "fp32" else jnp.bfloat16)

    @property
    def _itemsize(self) -> int:
        return self.dtype.itemsize


ON_CPU = Sizes(width=64, heads=4, vocab=512, tokens=64, rows=1, precision="fp32")
WIDER = dataclasses.replace(ON_CPU, width=256)
"""Sizes for unrolled layers, large enough for separate buckets (`collectives.FULL_ENOUGH`)."""
ON_H100 = Sizes(width=1024, heads=8, vocab=4096, tokens=1024, rows=4, precision="bf16")
TINY = Sizes(width=16, heads=2, vocab=32, tokens=16, rows=1, precision="fp32")


class Block(nnx.Module):
    """One layer of a decoder; maps [rows, tokens, width] to the same shape."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        width = sizes.width
        self.heads = sizes.heads
        self.before_attention = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.before_mlp = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        parts = jnp.split(self.qkv(self.before_attention(x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], self.heads, -1) for part in parts)
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.before_mlp(x))))


class Listed(nnx.Module):
    """A decoder that calls a list of checkpointed layers, as most people write it."""

    def __init__(self, sizes: Sizes, num_layers: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(sizes.vocab, sizes.width, dtype=sizes.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(num_layers)])
        self.head = nnx.Linear(sizes.width, sizes.vocab, use_bias=False, rngs=rngs)

    def loss(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = self.embed(batch["tokens"])
        for block in self.blocks:
            x = nnx.remat(Block.__call__)(block, x)
        return loss_of(self.head(x), batch)


class Scanned(nnx.Module):
    """The same decoder with stacked layers in a scan."""

    def __init__(self, sizes: Sizes, num_layers: int, rngs: nnx.Rngs) -> None:
        self.parts = zerojax.Stages(
            nnx.Embed(sizes.vocab, sizes.width, dtype=sizes.dtype, rngs=rngs),
            lambda rngs: Block(sizes, rngs),
            nnx.Linear(sizes.width, sizes.vocab, use_bias=False, rngs=rngs),
            num_layers=num_layers,
            rngs=rngs,
            remat="full",
        )

    def loss(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return loss_of(self.parts(batch["tokens"]), batch)


def loss_of(logits: jax.Array, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns (sum of cross-entropy, number of tokens) for logits [rows, tokens, vocab]."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    picked = jnp.take_along_axis(logs, batch["targets"][..., None], axis=-1)
    return -jnp.sum(picked), jnp.float32(batch["targets"].size)


def plan_form(form: str, num_layers: int, sizes: Sizes, devices: Any, *, zero: int = 3) -> Plan:
    """Returns the plan of one form of the decoder."""
    make = Scanned if form == SCANNED else Listed
    tokens = jax.ShapeDtypeStruct((NUM_DEVICES * sizes.rows, sizes.tokens), np.int32)
    plan = make_plan(
        lambda rngs: make(sizes, num_layers, rngs),
        make_mesh({"data": NUM_DEVICES}, devices),
        example_batch={"tokens": tokens, "targets": tokens},
        precision=sizes.precision,
        zero=zero,
        roll="off" if form == UNROLLED else "auto",
        persistence_threshold=0,
    )
    assert bool(plan.stacks) == (form == ROLLED), plan.reasons
    return plan


@dataclasses.dataclass(frozen=True)
class GpuStep:
    """A step that was compiled for 8 H100.

    Attributes:
      temporary: bytes of temporaries per device, without arguments and outputs.
      wire_units: bytes that a device sends, in units of all bfloat16 weights x 7/8.
      hidden: share of communication time that overlaps with products, at published peak rates.
    """

    temporary: int
    wire_units: float
    hidden: float


def compile_for_h100(form: str, num_layers: int, sizes: Sizes, *, zero: int = 3) -> GpuStep:
    """Plans, compiles and reads one step: about ten seconds of processor time."""
    card = gpus.find_gpu("h100")
    devices = compile_client.gpu_devices(card, NUM_DEVICES)
    plan = plan_form(form, num_layers, sizes, devices, zero=zero)
    forecast = zerojax.forecast(plan, gpu="h100", fast=True)
    rows = forecast.traffic.rows
    wire = math.fsum(row.wire_bytes for row in rows)
    temporary, sent = forecast.memory.temporary, forecast.traffic.data_wire_bytes
    assert temporary is not None, "there is a compiler"
    assert sent is not None, "there is a compiler"
    return GpuStep(
        temporary=temporary,
        wire_units=sent / forecast.traffic.unit,
        hidden=math.fsum(row.hidden * row.wire_bytes for row in rows) / wire,
    )


# --- measuring ------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    record = Record(name="rolled_layers", rows=[], notes=_notes())
    for row in _rows(arguments.smoke):
        record = dataclasses.replace(record, rows=[*record.rows, row])
        save_so_far(record, arguments, load_before)
    goals = goals_of(record.rows)
    write_record(dataclasses.replace(record, goals=goals), arguments, load_before)


def _rows(smoke: bool) -> Iterator[dict[str, Any]]:
    if smoke:
        yield from (_cpu_row(form, 4, TINY) for form in (ROLLED, SCANNED, UNROLLED))
        return
    _cpu_row(ROLLED, DEPTHS[0], ON_CPU)  # pays for what JAX does once
    for depth, form in itertools.product(DEPTHS, (ROLLED, SCANNED, UNROLLED)):
        if form != UNROLLED or depth in UNROLLED_DEPTHS:
            yield _cpu_row(form, depth, ON_CPU)
    yield from _stages_unrolled()
    if compile_client.missing() is None:
        for depth, form in itertools.product(DEPTHS, (ROLLED, SCANNED)):
            yield _gpu_row(form, depth, zero=3)
        for depth, form in itertools.product(DEPTHS_AT_STAGE_2, (ROLLED, SCANNED)):
            yield _gpu_row(form, depth, zero=2)
        yield _gpu_row(UNROLLED, DEPTHS[1], zero=3)


def _cpu_row(form: str, depth: int, sizes: Sizes) -> dict[str, Any]:
    """Returns the fastest of several compilations; of one compilation for many unrolled layers."""
    tries = 1 if form == UNROLLED or sizes is TINY else REPEATS
    rows = [_compile_on_cpus(form, depth, sizes) for _ in range(tries)]
    return min(rows, key=lambda row: row["lower_and_compile_cpu_s"])


def _compile_on_cpus(form: str, depth: int, sizes: Sizes) -> dict[str, Any]:
    jax.clear_caches()
    times = [time.process_time()]
    plan = plan_form(form, depth, sizes, jax.devices()[:NUM_DEVICES])
    times.append(time.process_time())
    traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    times.append(time.process_time())
    compiled = traced.lower().compile()
    times.append(time.process_time())
    planning, tracing, compiling = (after - before for before, after in itertools.pairwise(times))
    temporary = compile_client.memory_of(compiled).temporary
    return {
        **_row(CPU, 3, form, depth, temporary, sizes),
        "plan_cpu_s": planning,
        "trace_cpu_s": tracing,
        "lower_and_compile_cpu_s": compiling,
        "hlo_instructions": count_instructions(compiled),
    }


def _stages_unrolled() -> Iterator[dict[str, Any]]:
    """Returns the fastest compilation of each stage, measured in alternation."""
    depth, best = UNROLLED_DEPTHS[1], dict.fromkeys((3, 2, 1), math.inf)
    temporary = {}
    for _, zero in itertools.product(range(REPEATS), best):
        jax.clear_caches()
        plan = plan_form(UNROLLED, depth, WIDER, jax.devices()[:NUM_DEVICES], zero=zero)
        traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
        before = time.process_time()
        compiled = traced.lower().compile()
        best[zero] = min(best[zero], time.process_time() - before)
        temporary[zero] = compile_client.memory_of(compiled).temporary
    for zero, seconds in best.items():
        row = _row(CPU, zero, UNROLLED, depth, temporary[zero], WIDER)
        yield row | {"width": WIDER.width, "lower_and_compile_cpu_s": seconds}


def _gpu_row(form: str, depth: int, *, zero: int) -> dict[str, Any]:
    step = compile_for_h100(form, depth, ON_H100, zero=zero)
    found = {"wire_units": step.wire_units, "hidden": step.hidden}
    return _row(H100, zero, form, depth, step.temporary, ON_H100) | found


def _row(
    where: str, zero: int, form: str, depth: int, temporary: int, sizes: Sizes
) -> dict[str, Any]:
    row: dict[str, Any] = {"on": where, "zero": zero, "form": form, "layers": depth}
    row |= {"temporary_MB": temporary / MB}
    if zero == 3:
        row |= {"without_layers_MB": (temporary - depth * sizes.inherent_bytes) / MB}
    return row


def count_instructions(compiled: jax.stages.Compiled) -> int:
    """Counts the instructions of a compiled program, each of its computations once."""
    computations = hlo.read_program(compiled.as_text() or "").computations.values()
    return sum(len(computation.instructions) for computation in computations)


# --- goals ----------------------------------------------------------------------------------------


def goals_of(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Returns the goals of the rolled step: compile time, temporaries, bytes sent, hidden share."""
    goals = [*_growth_with_depth(rows), *_unrolled_stages(rows)]
    for row, twin in _pairs(rows):
        name = f"{row['on']}, zero {row['zero']}, {row['layers']} layers: rolled / scanned"
        limits = {"temporary_MB": MEMORY_LIMIT, "wire_units": NEAR}
        for key, limit in limits.items():
            if row.get(key):
                ratio = row[key] / twin[key]
                goals.append(Goal(name=f"{name}, {key}", value=ratio, limit=limit))
        if twin.get("hidden"):
            ratio = row["hidden"] / twin["hidden"]
            goals.append(Goal(name=f"{name}, hidden", value=ratio, limit=1 / NEAR, at_least=True))
    return goals


def _growth_with_depth(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    limits = {"lower_and_compile_cpu_s": COMPILE_LIMIT, "without_layers_MB": MEMORY_LIMIT}
    goals = []
    for where, key in itertools.product((CPU, H100), limits):
        same = [row for row in rows if (row["on"], row["form"]) == (where, ROLLED) and key in row]
        for few in same[: 2 if key == "without_layers_MB" else 1]:
            many = same[-1]
            name = f"{where}, zero 3, rolled: {key}, {many['layers']} / {few['layers']} layers"
            goals.append(Goal(name=name, value=many[key] / few[key], limit=limits[key]))
    return goals


def _unrolled_stages(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Returns goals of compile time at stages 1 and 2 relative to stage 3, unrolled."""
    key = "lower_and_compile_cpu_s"
    times = {row["zero"]: row[key] for row in rows if "width" in row}
    return [
        Goal(
            name=f"{CPU}, unrolled: {key}, zero {zero} / zero 3",
            value=times[zero] / times[3],
            limit=UNROLLED_LIMIT,
        )
        for zero in (2, 1)
        if zero in times
    ]


def _pairs(
    rows: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Returns each rolled row with the scanned row of the same case."""
    of = {
        (row["on"], row["zero"], row["layers"], row["form"]): row
        for row in rows
        if "width" not in row
    }
    for (*case, form), row in of.items():
        if form == ROLLED:
            yield row, of[*case, SCANNED]


def _notes() -> list[str]:
    return [
        "without_layers_MB: temporaries at stage 3 less what every layer keeps in any form: its "
        "input and its piece of the gradients, in bfloat16 also its piece of the weights",
        "on 8 H100 which arrays of attention scores live together hangs on the order that the "
        "compiler chooses for the whole program",
        "hidden: share of the wire's time that products scheduled beside it last, at peak rates",
        compile_client.missing() or f"compiled with {compile_client.compiler_version(fast=True)}",
    ]


if __name__ == "__main__":
    main()
