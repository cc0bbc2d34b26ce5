"""Cost of zerojax's step and loop relative to a jitted step written by hand, on one core.

Four ways to train the same model on the same batches, in alternation; ratios of process CPU time.
Of a tiny model, whose steps take less than the loop around them, an own loop and `train`'s.
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
from benchmarks import plain_jax, small_gpt
from benchmarks.machine import load_average, pin_to_core
from benchmarks.measuring import Sample, interleave, least_of, median_of, ratio_of, sample
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.config import LogConfig
from zerojax.runtime.memory import keep_freed_memory

LIMIT = 1.02
WARM_UP = 3
STEPS_PER_SAMPLE = 3
ROUNDS = 9
LOOP_LIMIT = 1.2
LOOP_STEPS = 3000
"""Steps of a sample of the tiny model: so many that a call of `fit` counts for little."""


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    pin_to_core(0)
    keep_freed_memory()
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Runs the four sides in this process, which must already be pinned to a core."""
    with tempfile.TemporaryDirectory() as folder:
        sides = _build_sides(small_gpt.choose_config(smoke), folder)
        samples = interleave(
            {name: side.run for name, side in sides.items()},
            warm_up=WARM_UP,
            steps=1 if smoke else STEPS_PER_SAMPLE,
            rounds=2 if smoke else ROUNDS,
        )
    check_losses_agree({name: side.loss for name, side in sides.items()})
    bare = samples["bare jit"]
    rows = [
        {
            "way": name,
            "cpu_ms": 1e3 * median_of(samples[name], "cpu"),
            "least_cpu_ms": 1e3 * least_of(samples[name], "cpu"),
            "wall_ms": 1e3 * median_of(samples[name], "wall"),
            "cpu/bare": ratio_of(samples[name], bare, "cpu"),
            "loss": side.loss,
        }
        for name, side in sides.items()
    ]
    goals = [
        Goal(
            name=f"CPU time per step, {name} / bare jit",
            value=ratio_of(samples[name], bare, "cpu"),
            limit=LIMIT,
        )
        for name in ("zerojax.build_step", "zerojax.train")
    ]
    loop_rows, loop_goal = _measure_loop(smoke)
    return Record(name="overhead", rows=[*rows, *loop_rows], goals=[*goals, loop_goal])


def _measure_loop(smoke: bool) -> tuple[list[dict[str, Any]], Goal]:
    """Returns the rows and the goal of a tiny model: two layers of 8 x 8, eight rows a step."""
    sides = _build_tiny_sides()
    samples = interleave(
        {name: side.run for name, side in sides.items()},
        warm_up=100,
        steps=10 if smoke else LOOP_STEPS,
        rounds=2 if smoke else ROUNDS,
    )
    check_losses_agree({name: side.loss for name, side in sides.items()})
    own = samples["tiny, own loop"]
    rows = [
        {
            "way": name,
            "cpu_ms": 1e3 * median_of(samples[name], "cpu"),
            "least_cpu_ms": 1e3 * least_of(samples[name], "cpu"),
            "wall_ms": 1e3 * median_of(samples[name], "wall"),
            "cpu/own loop": ratio_of(samples[name], own, "cpu"),
            "loss": side.loss,
        }
        for name, side in sides.items()
    ]
    value = ratio_of(samples["tiny, train"], own, "cpu")
    name = "CPU time per step of a tiny model, train / own loop with build_step and shard_batch"
    return rows, Goal(name=name, value=value, limit=LOOP_LIMIT)


def _build_tiny_sides() -> dict[str, _Side]:
    array = np.ones((8, 8), np.float32)
    batch = {"x": array, "y": array}
    tx, mesh = zerojax.adamw(1e-3), zerojax.make_mesh({"data": 1})
    plan = zerojax.make_plan(
        _Tiny, mesh, example_batch=batch, loss=_tiny_loss, optimizer=tx, precision="fp32"
    )
    step, state = zerojax.build_step(plan), zerojax.init_state(plan)
    source = lambda index: batch  # noqa: E731

    def own_loop(index: int) -> jax.Array:
        nonlocal state
        state, metrics = step(state, zerojax.shard_batch(plan, batch))
        return metrics["loss"]

    def train(steps: int) -> zerojax.Trainer:
        return zerojax.train(
            _Tiny, mesh, source, loss=_tiny_loss, optimizer=tx, precision="fp32", steps=steps,
            run_dir=None, log=LogConfig(console="quiet"),
        )  # fmt: skip

    return {"tiny, own loop": _Side(own_loop), "tiny, train": _TrainSide(train, source)}


class _Tiny(nnx.Module):
    """Two layers of 8 x 8."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


def _tiny_loss(model: _Tiny, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


class _Side:
    """One way of training; `step(index)` trains on the batch of that index and returns its loss."""

    def __init__(self, step: Callable[[int], Any]) -> None:
        self._step = step
        self._done = 0
        self.loss = float("nan")

    def run(self, count: int) -> Sample:
        return sample(lambda: self._steps(count), count)

    def _steps(self, count: int) -> None:
        for index in range(self._done, self._done + count):
            loss = self._step(index)
        self._done += count
        self.loss = float(loss)


class _TrainSide(_Side):
    """The side of `zerojax.train` and its trainer's `fit`, with prefetch, reports and run files."""

    def __init__(self, train: Callable[[int], zerojax.Trainer], source: Any) -> None:
        self._train, self._source = train, source
        self._trainer: zerojax.Trainer | None = None

    def _steps(self, count: int) -> None:
        if self._trainer is None:
            self._trainer = self._train(count)
        else:
            self._trainer.fit(self._source, steps=self._trainer.num_steps + count)
        self.loss = self._trainer.metrics["loss"]


def _build_sides(config: Any, folder: str) -> dict[str, _Side]:
    source = small_gpt.make_source(config)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.01))
    factory = small_gpt.make_factory(config)
    initial = plain_jax.init_params(factory)
    fresh = lambda: plain_jax.build_model(factory, jax.tree.map(jnp.copy, initial))  # noqa: E731

    mesh = zerojax.make_mesh({"data": 1})
    plan = zerojax.make_plan(
        fresh(), mesh, example_batch=source.batch(0), optimizer=tx, zero=1, precision="fp32"
    )
    step = zerojax.build_step(plan)
    bare_step = plain_jax.build_step(factory, tx)
    state = zerojax.init_state(plan)
    params = jax.tree.map(jnp.copy, initial)
    opt_state = tx.init(params)
    nnx_step = plain_jax.build_nnx_step(fresh(), tx)

    def bare(index: int) -> jax.Array:
        nonlocal params, opt_state
        params, opt_state, loss = bare_step(params, opt_state, source.batch(index))
        return loss

    def own_loop(index: int) -> jax.Array:
        nonlocal state
        state, metrics = step(state, zerojax.shard_batch(plan, source.batch(index)))
        return metrics["loss"]

    def train(steps: int) -> zerojax.Trainer:
        return zerojax.train(
            fresh(),
            mesh,
            source,
            optimizer=tx,
            precision="fp32",
            steps=steps,
            run_dir=folder,
            log=LogConfig(console="quiet"),
        )

    return {
        "bare jit": _Side(bare),
        "zerojax.build_step": _Side(own_loop),
        "zerojax.train": _TrainSide(train, source),
        "nnx.jit + nnx.Optimizer": _Side(lambda index: nnx_step(source.batch(index))),
    }


def check_losses_agree(losses: dict[str, float], tolerance: float = 1e-4) -> None:
    """Checks that all sides computed the same losses; otherwise their times are not comparable.

    Raises:
      RuntimeError: the relative difference is above the tolerance.
    """
    low, high = min(losses.values()), max(losses.values())
    if not high - low <= tolerance * abs(high):
        raise RuntimeError(f"the ways of training differ in their last loss: {losses}")


if __name__ == "__main__":
    main()
