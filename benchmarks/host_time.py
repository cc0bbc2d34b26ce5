"""Host time per step with many arrays: the cost of passing the state in and out, on one core.

Uses a model of 144 tiny arrays (433 with both Adam moments), so that host work takes all the time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax
from benchmarks import plain_jax
from benchmarks.machine import load_average, pin_to_core
from benchmarks.measuring import Sample, interleave, least_of, median_of, ratio_of, sample
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.config import LogConfig

LIMIT = 1.3
WIDTH = 8
# `fit` opens and closes a log and a thread: what a step costs is seen over many.
STEPS_PER_SAMPLE = 400


class ManyLayers(nnx.Module):
    """The sum of all entries of many small linear maps, times the mean of the input."""

    def __init__(self, num_layers: int, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(num_layers)])

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns (sum over rows, number of rows)."""
        total = jnp.float32(0)
        for layer in self.layers:
            total += jnp.sum(layer.kernel[...]) + jnp.sum(layer.bias[...])
        return total * jnp.sum(jnp.mean(batch["x"], axis=1)), jnp.float32(batch["x"].shape[0])


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    pin_to_core(0)
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Runs the sides in this process, which must already be pinned to a core."""
    num_layers = 4 if smoke else 72
    factory = lambda rngs: ManyLayers(num_layers, rngs=rngs)  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        sides = _build_sides(factory, folder)
        samples = interleave(
            sides, warm_up=3, steps=2 if smoke else STEPS_PER_SAMPLE, rounds=2 if smoke else 9
        )
    flat = samples["flat list, same step"]
    rows = [
        {
            "way": name,
            "cpu_us": 1e6 * median_of(samples[name], "cpu"),
            "least_cpu_us": 1e6 * least_of(samples[name], "cpu"),
            "wall_us": 1e6 * median_of(samples[name], "wall"),
            "cpu/flat": ratio_of(samples[name], flat, "cpu"),
        }
        for name in sides
    ]
    goals = [
        Goal(
            name=f"host time per step, {name} / flat list of the same step",
            value=ratio_of(samples[name], flat, "cpu"),
            limit=LIMIT,
        )
        for name in ("zerojax.build_step", "zerojax.train")
    ]
    leaves = 2 * num_layers
    note = f"{leaves} parameters, {3 * leaves + 1} arrays with the optimizer's"
    return Record(name="host_time", rows=rows, goals=goals, notes=[note])


def _build_sides(
    factory: Callable[[nnx.Rngs], ManyLayers], folder: str
) -> dict[str, Callable[[int], Sample]]:
    """Builds the sides; each places its batch and, except for `train`, waits for each step.

    So the host work of a step cannot overlap with that of another step.
    """
    tx = optax.adam(1e-3)
    initial = plain_jax.init_params(factory)
    fresh = lambda: plain_jax.build_model(factory, jax.tree.map(jnp.copy, initial))  # noqa: E731
    host_batch = {"x": np.ones((8, WIDTH), np.float32)}
    plan = zerojax.make_plan(
        fresh(),
        zerojax.make_mesh({"data": 1}),
        example_batch=host_batch,
        optimizer=tx,
        zero=1,
        precision="fp32",
    )
    place = lambda: jax.device_put(host_batch, plan.batch_sharding)  # noqa: E731
    state, step = zerojax.init_state(plan), zerojax.build_step(plan)
    leaves, treedef = jax.tree.flatten(zerojax.init_state(plan))

    def flat(leaves: list[jax.Array], batch: Any) -> tuple[list[jax.Array], Any]:
        state, metrics = step(jax.tree.unflatten(treedef, leaves), batch)
        return jax.tree.leaves(state), metrics["loss"]

    flat_step = jax.jit(flat, donate_argnums=0)
    bare_step = plain_jax.build_step(factory, tx)
    params = jax.tree.map(jnp.copy, initial)
    opt_state = tx.init(params)
    nnx_step = plain_jax.build_nnx_step(fresh(), tx)

    def run_flat() -> Any:
        nonlocal leaves
        leaves, loss = flat_step(leaves, place())
        return loss

    def run_zerojax() -> Any:
        nonlocal state
        state, metrics = step(state, zerojax.shard_batch(plan, host_batch))
        return metrics["loss"]

    def run_bare() -> Any:
        nonlocal params, opt_state
        params, opt_state, loss = bare_step(params, opt_state, place())
        return loss

    return {
        "flat list, same step": _repeat(run_flat),
        "zerojax.build_step": _repeat(run_zerojax),
        "zerojax.train": _train(fresh(), plan.mesh, host_batch, tx, folder),
        "bare jit, dicts": _repeat(run_bare),
        "nnx.jit + nnx.Optimizer": _repeat(lambda: nnx_step(place())),
    }


def _repeat(one: Callable[[], Any]) -> Callable[[int], Sample]:
    def steps(count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(one())

    return lambda count: sample(lambda: steps(count), count)


def _train(
    model: ManyLayers, mesh: Any, batch: Any, tx: Any, folder: str
) -> Callable[[int], Sample]:
    """Returns the side of the whole loop, which reports every 10 steps and waits only then."""
    trainer: zerojax.Trainer | None = None

    def steps(count: int) -> None:
        nonlocal trainer
        if trainer is not None:
            trainer.fit(lambda _: batch, steps=trainer.num_steps + count)
            return
        trainer = zerojax.train(
            model,
            mesh,
            lambda _: batch,
            optimizer=tx,
            precision="fp32",
            steps=count,
            run_dir=folder,
            log=LogConfig(console="quiet"),
        )

    return lambda count: sample(lambda: steps(count), count)


if __name__ == "__main__":
    main()
