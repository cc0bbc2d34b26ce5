"""A batch with a value that has no rows is refused by its name, wherever batches are taken."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.refusals import refused
from zerojax.cli.check_targets import _fewer_rows
from zerojax.data import DatasetSource
from zerojax.training.loading import _usable

ROWS = 16
SCALAR = np.float32(2)
RAMP = zerojax.BatchRampConfig(start=8, increment=8, ramp_rows=16)


class Scaled(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(4, 1, rngs=rngs)

    def loss(self, batch):
        return jnp.mean(self.layer(batch["x"]) * batch["t"])


def batch_of(scale: Any = SCALAR) -> dict[str, Any]:
    return {"x": np.ones((ROWS, 4), np.float32), "t": scale}


GOOD = np.full((ROWS, 1), 2, np.float32)
SCALARS = {"0-d array": np.array(2.0, np.float32), "jax": jnp.float32(2), "number": 2.0}


def train(batches: Any, mesh: Any = None, **settings: Any) -> Any:
    return zerojax.train(
        Scaled(nnx.Rngs(0)),
        mesh or {"zero": 1},
        batches,
        steps=3,
        run_dir=None,
        log=zerojax.LogConfig(console="quiet"),
        **settings,
    )


def engine() -> Any:
    config = {"train_batch_size": ROWS, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    return zerojax.initialize(Scaled(nnx.Rngs(0)), config, optimizer=zerojax.sgd(0.1))


WARM = zerojax.config.OptimizerConfig(name="adamw", warmup_tokens=100)

USES = {
    "train": lambda b: train([b]),
    "function": lambda b: train(lambda step: b),
    "microbatches": lambda b: train([b], num_microbatches=2),
    "ramp": lambda b: train([b], batch_ramp=RAMP, global_batch_size=ROWS),
    "pipeline": lambda b: train([b], {"stage": 2}),
    "warm-up by tokens": lambda b: train([b], optimizer=WARM),
    "loading": lambda b: _usable(8, 1, b, 0),
    "make_plan": lambda b: zerojax.make_plan(Scaled, {"zero": 1}, example_batch=b),
    "engine": lambda b: engine().train_batch(b),
    "engine, micro-batches": lambda b: engine().train_batch(data_iter=iter([b] * 2)),
    "check": lambda b: zerojax.check(Scaled, b, devices=2, steps=1),
    "check of a script": lambda b: zerojax.check(Scaled, _fewer_rows(b), devices=2, steps=1),
    "validation": lambda b: train([batch_of(GOOD)], validation=[b]),
    "later": lambda b: train([batch_of(GOOD), b]),
    "later, ramp": lambda b: train([batch_of(GOOD), b], batch_ramp=RAMP, global_batch_size=ROWS),
    "shard_batch": lambda b: zerojax.shard_batch(
        zerojax.make_plan(Scaled, {"zero": 1}, example_batch=batch_of(GOOD)), b
    ),
    "evaluate": lambda b: train([batch_of(GOOD)]).evaluate([b]),
    "collated": lambda b: train(
        DatasetSource(dataset=Numbers(), global_batch_size=ROWS, collate=lambda rows: b)
    ),
}


class Numbers:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> int:
        return number


@pytest.mark.parametrize("use", USES)
def test_a_scalar_is_refused_by_its_name(use):
    refused(lambda: USES[use](batch_of()), "'t'", error=(ValueError, TypeError))


@pytest.mark.parametrize("kind", SCALARS)
def test_the_remedy_gives_the_number_of_rows(kind):
    message = refused(lambda: USES["ramp"](batch_of(SCALARS[kind])), "'t' scalar", "numpy.full")
    assert f"({ROWS}, value)" in message
