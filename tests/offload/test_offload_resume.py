"""A run whose masters and moments lie on the host is saved, resumed, moved and used as any other.

What a checkpoint holds knows no tiers, so each tier reads what another has saved. On one mesh and
stage nothing may change, not one bit; on another mesh sums are taken in another order.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

import zerojax
from tests.support.recipe import RECIPE
from tests.support.small_models import reference_model
from tests.support.trajectories import TOLERANCE, advance, plan_for, text_batch, train_for
from zerojax.checkpoint import Checkpointer
from zerojax.config import LogConfig
from zerojax.step.reshard import from_portable_state, to_portable_state

pytestmark = pytest.mark.slow

BATCHES = [text_batch(index) for index in range(4)]
SLICES = {"slice_elements": 400, "min_elements": 100}
DEVICE = {}
HOST = {"offload": {"opt_state": "host", **SLICES}}
SHARES = {"offload": {"opt_state": {"device": 0.4, "host": 0.6}, **SLICES}}
BASE = {"data": 4, "model": 2, "zero": 2}


def train(mesh: Any, steps: int, **changes: Any) -> tuple[zerojax.Trainer, list[float]]:
    """The trainer of a run after so many steps, and the losses of those that it took."""
    losses: list[float] = []
    options = {
        "optimizer": zerojax.adamw(1e-3, eps=1e-5, **RECIPE),
        "precision": "fp32",
        "run_dir": None,
        "log": LogConfig(every=1),
        "callbacks": [lambda trainer, values: losses.append(values["loss"])],
        **changes,
    }
    with zerojax.train(reference_model("llama"), mesh, BATCHES, steps=steps, **options) as trainer:
        return trainer, losses


def bits(plan: zerojax.Plan, state: Any) -> dict[str, bytes]:
    """{path: bytes} of the portable state, which has no tiers."""
    leaves = jax.tree.leaves_with_path(to_portable_state(plan, state))
    return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in leaves}


@functools.cache
def on_the_device() -> tuple[dict[str, bytes], list[float]]:
    """State and losses of eight steps without any offload."""
    trainer, losses = train(BASE, 8)
    return bits(trainer.plan, trainer.state), losses


def test_checkpoints_go_from_tier_to_tier_without_losing_a_bit(tmp_path):
    losses = []
    for steps, tier in ((2, HOST), (4, DEVICE), (6, SHARES), (8, HOST)):
        trainer, more = train(BASE | tier, steps, checkpoint=tmp_path / "run")
        assert len(more) == 2
        losses += more
    state, expected = on_the_device()
    assert losses == expected
    assert bits(trainer.plan, trainer.state) == state


def test_a_live_run_changes_its_tiers_without_losing_a_bit():
    changes = {2: BASE | HOST, 4: BASE | SHARES, 6: BASE}

    def reshard(trainer, values):
        losses.append(values["loss"])
        if trainer.num_steps - 1 in changes:
            before = bits(trainer.plan, trainer.state)
            trainer.reshard(changes.pop(trainer.num_steps - 1))
            assert bits(trainer.plan, trainer.state) == before

    losses: list[float] = []
    trainer, _ = train(BASE, 8, callbacks=[reshard])
    assert not changes, "every reshard has to have happened"
    state, expected = on_the_device()
    assert losses == expected
    assert bits(trainer.plan, trainer.state) == state


ON_EIGHT = {"devices": 8, "optimizer": zerojax.adamw(1e-3, eps=1e-5, **RECIPE)}
ON_FOUR = {**ON_EIGHT, "devices": 4}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({**ON_EIGHT, "zero": 1, **HOST}, {**ON_FOUR, "zero": 3}),
        ({**ON_EIGHT, "zero": 3}, {**ON_FOUR, "zero": 1, **HOST}),
        ({**ON_EIGHT, "zero": 1, **SHARES}, {**ON_FOUR, "zero": 3, "mesh": {"model": 2}, **HOST}),
        ({**ON_FOUR, "zero": 3, "mesh": {"model": 2}, **HOST}, {**ON_EIGHT, "zero": 2, **SHARES}),
    ],
    ids=["host-device", "device-host", "shares-host", "host-shares"],
)
def test_what_is_saved_is_what_another_mesh_and_stage_restores(first, second, tmp_path):
    model = reference_model("llama")
    saved = train_for(model, steps=4, **first)
    portable = to_portable_state(saved.plan, saved.state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, portable, data_state={}, config={}, plan={})
    plan = plan_for(model, **second)
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(plan.abstract_portable).state
    state = from_portable_state(plan, restored)
    assert bits(plan, state) == bits(saved.plan, saved.state)
    run = advance(plan, state, range(4, 8))
    whole = train_for(model, steps=8, **ON_EIGHT)
    np.testing.assert_allclose([*saved.losses, *run.losses], whole.losses, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tier", [HOST, SHARES], ids=["host", "shares"])
def test_a_step_that_follows_a_save_does_not_reach_what_is_saved(tier, tmp_path):
    """Saving goes on while the next step writes into the same, donated memory."""
    at_save = {}

    def save(trainer, values):
        if trainer.num_steps == 4:
            at_save.update(bits(trainer.plan, trainer.state))
            trainer.save()

    trainer, _ = train(BASE | tier, 8, checkpoint=tmp_path / "run", callbacks=[save])
    assert bits(trainer.plan, trainer.state) == on_the_device()[0]
    trainer.restore(4)
    assert bits(trainer.plan, trainer.state) == at_save


def test_it_is_evaluated_handed_over_and_writes_text_as_on_the_device():
    results = []
    for tier in (DEVICE, HOST):
        trainer, _ = train(BASE | tier, 2, validation=BATCHES[:1], precision="bf16")
        model = trainer.to_model()
        text = zerojax.zoo.generate(model, BATCHES[0]["tokens"][:2, :4], 4, seed=3)
        results.append((trainer.evaluate()["loss"], np.asarray(text).tolist()))
    assert results[0] == results[1]
