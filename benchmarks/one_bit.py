"""1-bit Adam on Shakespeare compared with controls: losses, and bytes per step.

The control of 1-bit Adam is Adam whose second moment is frozen at the same step and whose gradients
are summed exactly, since freezing alone makes another optimizer. Without error feedback the loss
must be clearly higher; otherwise the comparison would show nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax.data
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.config import ModelConfig
from zerojax.features.one_bit import one_bit_update
from zerojax.forecasting import hlo
from zerojax.optim import one_bit_adam
from zerojax.optim.optimizer import Arrays
from zerojax.zoo import build_model

NUM_DEVICES = 4
TEXT = Path(zerojax.data.__file__).parent / "shakespeare.txt"
ROWS, SEQ = 32, 32
STEPS, FREEZE, LAST = 360, 120, 30
SMOKE = {"steps": 6, "freeze": 2, "last": 2, "seeds": 1}
SEEDS = 5
B1, B2, EPS = 0.9, 0.99, 1e-8
EXACT = ("norm", "embed")
RATE = 3e-3
"""Highest learning rate."""

ADAM, CONTROL, SIGNS, NO_FEEDBACK = (
    "Adam",
    "control: v frozen, gradients whole",
    "1-bit Adam",
    "1-bit Adam, no feedback",
)
CONTROL_EXACT, SIGNS_EXACT = (
    "control: v frozen but of norms and embeddings",
    "1-bit Adam, norms and embeddings exact",
)
WAYS = (ADAM, CONTROL, SIGNS, NO_FEEDBACK, CONTROL_EXACT, SIGNS_EXACT)


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    # One program at a time: with several under way, collectives may wait for each other's threads.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Returns a row for each way: the mean loss of the last steps for each seed, and bytes."""
    sizes = SMOKE if smoke else {"steps": STEPS, "freeze": FREEZE, "last": LAST, "seeds": SEEDS}
    runs = {way: _Run(way, sizes["freeze"]) for way in WAYS}
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(sizes["seeds"]):
        for way, run in runs.items():
            curve = run.train(seed, sizes["steps"])
            losses[way].append(float(np.mean(curve[-sizes["last"] :])))
            print(f"seed {seed}: {way}: {losses[way][-1]:.4f}", flush=True)
    rows = [
        {
            "way": way,
            **{f"seed {seed}": loss for seed, loss in enumerate(losses[way])},
            "mean": float(np.mean(losses[way])),
            "bytes_per_parameter": runs[way].bytes_per_parameter,
        }
        for way in WAYS
    ]
    mean = {way: float(np.mean(losses[way])) for way in WAYS}
    above_control = {
        "1-bit Adam - its control": mean[SIGNS] - mean[CONTROL],
        "the same with norms and embeddings exact": mean[SIGNS_EXACT] - mean[CONTROL_EXACT],
    }
    worse = mean[NO_FEEDBACK] - mean[SIGNS]
    goals = [
        *(Goal(name=name, value=x, limit=0.02) for name, x in above_control.items()),
        Goal(name="no feedback - 1-bit Adam", value=worse, limit=0.05, at_least=True),
    ]
    parameters = runs[ADAM].plan.placement.num_parameters()
    notes = [
        f"GPT-2 of {parameters:,} parameters on Shakespeare's bytes, {ROWS * SEQ} tokens a step, "
        f"{sizes['steps']} steps, v frozen after {sizes['freeze']}; stage 0 on {NUM_DEVICES} "
        f"virtual devices, float32; b2 {B2}; highest rate {RATE:g}; loss: mean of the last "
        f"{sizes['last']} steps",
        "bytes: that one device sends in a step after the warm-up, from the compiled program",
    ]
    return Record(name="one_bit", rows=rows, goals=goals, notes=notes)


class _Run:
    """One way of training."""

    def __init__(self, way: str, freeze: int) -> None:
        self._way, self._tokens = way, np.frombuffer(TEXT.read_bytes(), np.uint8)
        exact = EXACT if way in (CONTROL_EXACT, SIGNS_EXACT) else ()
        options = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": 0.0, "clip_norm": None}
        rate = learning_rate(RATE)
        if way == ADAM:
            optimizer: Any = zerojax.adamw(rate, **options)
        elif way in (CONTROL, CONTROL_EXACT):
            optimizer = frozen_adam(rate, freeze, exact)
        else:
            optimizer = one_bit_adam(rate, freeze_step=freeze, **options)
        config = ModelConfig(num_layers=2, num_heads=2, embed_dim=48, max_seq_len=SEQ)
        self.plan = zerojax.make_plan(
            build_model(config, 256),
            zerojax.make_mesh(None, devices=jax.devices()[:NUM_DEVICES]),
            example_batch=self._batch(np.random.default_rng(0)),
            optimizer=optimizer,
            zero=0,
            precision="fp32",
            wire={"exact": exact} if way == SIGNS_EXACT else None,
        )
        with self._agreement():
            self._step = zerojax.build_step(self.plan)
            self.bytes_per_parameter = self._bytes_sent() / self.plan.placement.num_parameters()

    def _bytes_sent(self) -> float:
        after = getattr(self._step, "compressed", self._step)
        text = after.lower(self.plan.abstract_state, self.plan.abstract_batch).compile().as_text()
        found = hlo.find_collectives(hlo.read_program(text), NUM_DEVICES)
        return sum(one.wire_bytes * one.times for one in found)

    def _agreement(self) -> contextlib.AbstractContextManager[Any]:
        """Replaces the exchange of signs in programs that are traced meanwhile, for the way without
        error feedback."""
        if self._way != NO_FEEDBACK:
            return contextlib.nullcontext()
        return mock.patch.object(one_bit_update, "_agree", _forget)

    def train(self, seed: int, steps: int) -> list[float]:
        """Returns the loss of each step."""
        random, state, losses = np.random.default_rng(seed), zerojax.init_state(self.plan, seed), []
        for _ in range(steps):
            placed = jax.device_put(self._batch(random), self.plan.batch_sharding)
            with self._agreement():
                state, metrics = self._step(state, placed)
            losses.append(float(metrics["loss"]))  # waits: queued steps would wait for each other
        return losses

    def _batch(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        starts = random.integers(0, self._tokens.size - SEQ - 1, ROWS)
        rows = np.stack([self._tokens[at : at + SEQ + 1] for at in starts]).astype(np.int32)
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def learning_rate(highest: float) -> optax.Schedule:
    """Returns a warm-up of 20 steps and a cosine decay to a tenth of `highest`."""
    return optax.warmup_cosine_decay_schedule(0.0, highest, 20, STEPS, highest / 10)


_agree = one_bit_update._agree
"""The exchange of signs; see there for arguments and results of `_forget`."""


def _forget(
    made: Arrays, left_before: Arrays, parts: Any, limit: int
) -> tuple[Arrays, Arrays, Arrays, Arrays]:
    """Exchanges signs, and drops the errors that they leave."""
    nothing = jax.tree.map(jnp.zeros_like, left_before)
    rows, own, left, left_of_mean = _agree(made, nothing, parts, limit)
    drop = lambda errors: jax.tree.map(jnp.zeros_like, errors)  # noqa: E731
    return rows, own, drop(left), drop(left_of_mean)


def frozen_adam(
    rate: Callable[[Any], Any], freeze: int, exact: tuple[str, ...] = ()
) -> optax.GradientTransformation:
    """Returns Adam with second moments frozen after `freeze` updates, except names in `exact`."""

    def init(params: Any) -> optax.ScaleByAdamState:
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(grads: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, Any]:
        count = state.count + 1

        def one(path: Any, grad: Any, mu: Any, nu: Any) -> tuple[Any, Any, Any]:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            goes_on = any(re.search(pattern, name) for pattern in exact)
            limit = count if goes_on else jnp.minimum(count, freeze)
            mu, second = B1 * mu + (1 - B1) * grad, B2 * nu + (1 - B2) * grad * grad
            nu = second if goes_on else jnp.where(count <= freeze, second, nu)
            root = jnp.sqrt(nu / (1 - B2**limit)) + EPS
            moved = jnp.where(nu > 0, mu / (1 - B1**count) / root, 0.0)
            return -rate(state.count) * moved, mu, nu

        found = jax.tree.map_with_path(one, grads, state.mu, state.nu)
        of_three = jax.tree.structure((0, 0, 0))
        updates, mu, nu = jax.tree.transpose(jax.tree.structure(grads), of_three, found)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


if __name__ == "__main__":
    main()
