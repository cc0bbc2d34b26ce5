"""Time of a pipeline's steps relative to its schedule table, for stages that sleep and stages that
compute.

Waiting stages: a layer occupies its device for a set time without using a core (a callback that
sleeps), so that four devices can run at the same time on two cores. Computing stages: matrix
products, two stages on two cores, compared with data parallelism over the same two cores.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import zerojax
from benchmarks.measuring import Side, interleave, least_of, sample
from benchmarks.recipe import CLIPPED
from benchmarks.recording import Goal, Record
from zerojax.schedules import Costs, simulate
from zerojax.transport.sums import over_auto_axes

NUM_DEVICES = 4
SCHEDULES = ("1f1b", "gpipe", "interleaved(2)", "zb_h1", "1f1b_classic")
SLOT_MS = 40.0
"""Milliseconds of each slot of a microbatch on a stage: forward, input gradients, weight
gradients."""
LIMIT = 1.10
"""Limit of a step's time relative to the schedule table; the rest of the step and the host add to
it."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of both parts: schedules, milliseconds per slot and microbatches of waiting stages;
    microbatches, width and rows of the products of computing stages; rounds of both."""

    schedules: tuple[str, ...]
    milliseconds: float
    waiting: tuple[int, ...]
    computing: tuple[int, ...]
    width: int
    rows: int
    rounds: int


FULL = Sizes(SCHEDULES, SLOT_MS, (8, 16), (2, 4, 8, 16), 256, 512, 5)
SMOKE = Sizes(("1f1b", "zb_h1"), 1.0, (4,), (2,), 8, 2, 1)


def measure(smoke: bool) -> Record:
    """Returns rows of waiting stages, then rows of computing stages, by number of microbatches."""
    sizes = SMOKE if smoke else FULL
    rows, goals = _measure_waiting(sizes)
    more_rows, more_goals = _measure_computing(sizes)
    notes = [
        f"waiting: 4 stages; F, input gradients and weight gradients sleep {sizes.milliseconds:g} "
        "ms each per stage and microbatch, idle slots too, as all stages are in step; bubble = 1 - "
        "work / time; in_step and field: zerojax.pipeline_schedules.simulate, the latter "
        "as papers count",
        "computing: 1f1b, 2 stages on 2 cores; work: m times what one more microbatch costs (the "
        "slope between the two largest m); ideal (m+p-1)/m; once: what a step takes beside its "
        "m+p-1 ticks, such as its update; data parallel: the same batch and products on two data "
        "shards, which has no bubble but gathers and scatters weights",
    ]
    return Record(
        name="pipeline_bubble",
        rows=rows + more_rows,
        goals=[*goals, *more_goals],
        notes=notes,
    )


# --- stages that wait ---------------------------------------------------------------------------


def _measure_waiting(sizes: Sizes) -> tuple[list[dict[str, Any]], list[Goal]]:
    sides, simulations = {}, {}
    for number in sizes.waiting:
        for name in sizes.schedules:
            plan, batch = _waiting_plan(name, number, sizes.milliseconds)
            assert plan.pipeline is not None
            sides[name, number] = _side(plan, batch)
            simulations[name, number] = simulate(plan.pipeline.schedule, Costs(1, 1, 1))
    samples = _take(sides, sizes.rounds)
    rows, goals = [], []
    for (name, number), taken in samples.items():
        seconds, found = least_of(taken, "wall"), simulations[name, number]
        slot = sizes.milliseconds / 1e3
        rows.append(
            {
                "work": "waiting",
                "schedule": name,
                "m": number,
                "ms": seconds * 1e3,
                "bubble": 1 - 3 * slot * number / seconds,
                "in_step": found.bubble,
                "field": found.asynchronous_bubble,
                "time/table": seconds / (found.time * slot),
            }
        )
        title = f"{name}, m={number}: time / what the table says, waiting"
        goals.append(Goal(name=title, value=rows[-1]["time/table"], limit=LIMIT))
    return rows, goals


def _waiting_plan(schedule: str, number: int, milliseconds: float) -> tuple[Any, Any]:
    chunks = 2 if schedule.startswith("interleaved") else 1
    operation = _waiting_layer(milliseconds / chunks, split=schedule.startswith("zb"))

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.scale = nnx.Param(jnp.ones(4))

        def __call__(self, x: jax.Array) -> jax.Array:
            return operation(x, self.scale[...])

    layers = NUM_DEVICES * chunks
    mesh = {"stage": NUM_DEVICES, "data": 1, "pipeline_schedule": schedule}
    return _plan(Block, 4, layers, mesh, number, rows=number)


def _waiting_layer(milliseconds: float, *, split: bool) -> Callable[..., jax.Array]:
    """Returns a layer x * scale that sleeps in the forward pass and for each of its two gradients.

    Args:
      milliseconds: time of each sleep.
      split: sleep separately for the two gradients, for schedules that compute one of them later.
    """
    one, both = _wait(milliseconds), _wait(2 * milliseconds)

    @jax.custom_vjp
    def layer(x: jax.Array, scale: jax.Array) -> jax.Array:
        return one(x) * scale[None]

    def forward(x: jax.Array, scale: jax.Array) -> Any:
        return layer(x, scale), (x, scale)

    def backward(kept: Any, gradient: jax.Array) -> Any:
        x, scale = kept
        if split:
            return one(gradient * scale[None]), one(jnp.sum(gradient * x, axis=0))
        gradient = both(gradient)
        return gradient * scale[None], jnp.sum(gradient * x, axis=0)

    layer.defvjp(forward, backward)
    return layer


def _wait(milliseconds: float) -> Callable[[jax.Array], jax.Array]:
    def sleep(x: Any) -> np.ndarray:
        time.sleep(milliseconds / 1e3)
        return np.asarray(x)

    def call(x: jax.Array) -> jax.Array:
        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def wait(x: jax.Array) -> jax.Array:
        # JAX accepts callbacks only if no mesh axis is left to the compiler.
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return (over_auto_axes(call, P(), P()) if manual else call)(x)

    return wait


# --- stages that compute ------------------------------------------------------------------------


def _measure_computing(sizes: Sizes) -> tuple[list[dict[str, Any]], list[Goal]]:
    width, rows_each = sizes.width, sizes.rows

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(nnx.relu(self.up(x)))

    sides = {}
    for number in sizes.computing:
        # The same rows in each product: a data shard has half of the microbatches.
        piped = {"stage": 2, "data": 1}, number
        plain = {"data": 2}, number // 2
        for name, (mesh, microbatches) in {"pipeline": piped, "data": plain}.items():
            plan, batch = _plan(Block, width, 4, mesh, microbatches, rows=number * rows_each)
            sides[name, number] = _side(plan, batch)
    samples = _take(sides, sizes.rounds)
    seconds = {key: least_of(taken, "wall") for key, taken in samples.items()}
    tick, microbatch = (_slope(sizes, seconds, name) for name in ("pipeline", "data"))
    rows, goals = [], []
    for number in sizes.computing:
        found = seconds["pipeline", number]
        rows.append(
            {
                "work": "computing",
                "schedule": "1f1b",
                "m": number,
                "ms": found * 1e3,
                "time/work": found / (number * tick),
                "ideal": (number + 1) / number,
                "once_ms": (found - (number + 1) * tick) * 1e3,
                "data_parallel_ms": seconds["data", number] * 1e3,
            }
        )
        value = rows[-1]["time/work"] / rows[-1]["ideal"]
        title = f"1f1b, m={number}: time / what the table says, computing"
        goals.append(Goal(name=title, value=value, limit=LIMIT))
    title = "1f1b: one more microbatch / the same work without a pipeline, computing"
    goals.append(Goal(name=title, value=tick / microbatch, limit=LIMIT))
    return rows, goals


def _slope(sizes: Sizes, seconds: Mapping[Any, float], name: str) -> float:
    """Returns the seconds of one more microbatch, from the two largest numbers of microbatches."""
    *_, few, many = (0, *sizes.computing)
    return (seconds[name, many] - (seconds[name, few] if few else 0)) / (many - few)


# --- both ---------------------------------------------------------------------------------------


def _plan(
    block: type, width: int, layers: int, mesh: Mapping[str, Any], microbatches: int, *, rows: int
) -> tuple[Any, Any]:
    """Returns a plan of `layers` blocks between two small linear layers, and a batch for it."""

    def factory(rngs: nnx.Rngs) -> Any:
        embed, head = nnx.Linear(4, width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)
        return zerojax.Stages(embed, block, head, num_layers=layers, rngs=rngs)

    def loss(model: Any, batch: Any) -> Any:
        return zerojax.losses.mean_squared_error(model(batch["x"]), batch["y"])

    random = np.random.default_rng(0)
    shapes = {"x": (rows, 4), "y": (rows, 1)}
    batch = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    devices = jax.devices()[: mesh.get("stage", 1) * mesh["data"]]
    axes = {name: mesh[name] for name in ("stage", "data") if name in mesh}
    options = {name: value for name, value in mesh.items() if name not in axes}
    plan = zerojax.make_plan(
        factory,
        zerojax.make_mesh(axes, devices),
        example_batch=batch,
        loss=loss,
        optimizer=zerojax.sgd(1e-4, **CLIPPED),
        num_microbatches=microbatches,
        precision="fp32",
        **options,
    )
    return plan, batch


def _side(plan: Any, batch: Any) -> Side:
    """Returns the side that runs steps of a plan, one after the other."""
    state, step = zerojax.init_state(plan), zerojax.build_step(plan)
    placed = zerojax.shard_batch(plan, batch)

    def run(steps: int) -> Any:
        def all_steps() -> None:
            nonlocal state
            for _ in range(steps):
                state, metrics = step(state, placed)
                jax.block_until_ready(metrics)

        return sample(all_steps, steps)

    return run


def _take(sides: Mapping[Any, Side], rounds: int) -> dict[Any, Any]:
    names = {f"{name} {number}": (name, number) for name, number in sides}
    by_name = {name: sides[key] for name, key in names.items()}
    samples = interleave(by_name, warm_up=1, steps=1, rounds=rounds)
    return {names[name]: taken for name, taken in samples.items()}
