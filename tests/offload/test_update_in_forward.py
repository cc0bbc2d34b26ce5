"""An update beside the next forward pass: losses and weights are those of an update after the step.

The reference is the same plan without `update_in_forward`. Both programs add and multiply the same
numbers, but XLA may sum a gradient in another order: without ZeRO the gradients of layers are
summed over devices layer by layer. Then values differ by the rounding of float32.
"""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import zerojax
from tests.support.late_updates import ROWS, LateRow, late_plan
from tests.support.pipeline_runs import function_model
from tests.support.small_models import reference_model, regression_loss
from tests.support.trajectories import advance, plan_for, regression_batch
from zerojax.config import LogConfig
from zerojax.hardware.gpus import find_gpu
from zerojax.optim.loss_scale import LossScale
from zerojax.optim.precision import as_precision
from zerojax.plan.offload_costs import hiding, moved_bytes
from zerojax.step.build import build_evaluation, build_finish, build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import (
    from_portable_state,
    model_parts,
    reshard_state,
    to_portable_state,
    with_weights,
)
from zerojax.training.checkpointing import optimizer_state_of

PLAIN = {"opt_state": "host", "min_elements": 30, "slice_elements": 60}
FORWARD = {**PLAIN, "update_in_forward": True}
ROUNDING = 2e-6
STEPS = 8


def make_optimizer(**changes: Any) -> Any:
    given = {"b2": 0.95, "eps": 1e-5, "weight_decay": 0.1, "clip_norm": 0.05, **changes}
    rate = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, warmup_steps=3, decay_steps=20)
    return zerojax.adamw(rate, mask=None, **given)


def values(tree: Any) -> dict[str, np.ndarray]:
    """{path: array on the host}."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether two dicts have the same names and bits."""
    return one.keys() == other.keys() and all(
        x.tobytes() == other[name].tobytes() for name, x in one.items()
    )


def assert_close(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Asserts that two dicts have the same names, and values up to rounding."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=0, atol=ROUNDING, err_msg=name)


def make(row: LateRow, offload: dict[str, Any], **changes: Any) -> Any:
    return late_plan(row, offload, **{"optimizer": make_optimizer(), **changes})


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(row), marks=[pytest.mark.slow] * row.is_slow) for row in ROWS]
)
def test_losses_and_weights_are_those_of_an_update_after_the_step(row):
    """A batch in between has an infinite loss, so that its step is skipped."""

    def batch(index: int) -> Any:
        found = regression_batch(index)
        return {**found, "x": found["x"] * (np.inf if index == 4 else 1)}

    found = []
    for offload in (PLAIN, FORWARD):
        plan = make(row, offload)
        run = advance(plan, init_state(plan, 0), range(STEPS), batch=batch)
        portable = to_portable_state(plan, build_finish(plan)(run.state))
        found.append((np.array(run.losses), values(portable)))
    assert make(row, FORWARD).offload.delayed
    (losses, plain), (mine, forward) = found
    kept = np.arange(STEPS) != 4
    tolerance = 0 if row.has_bits else ROUNDING
    np.testing.assert_allclose(mine[kept], losses[kept], rtol=0, atol=tolerance)
    assert forward.keys() == plain.keys()
    for name, value in plain.items():
        np.testing.assert_allclose(
            forward[name], value, rtol=0, atol=tolerance, err_msg=name, strict=True
        )
    assert int(plain["['skipped']"]) == 1
    assert losses[0] - losses[-1] > 0.01


READERS = {
    "to_portable_state": to_portable_state,
    "model_parts": model_parts,
    "with_weights": lambda plan, state: with_weights(plan, state, "trained"),
    "optimizer_state_of": optimizer_state_of,
    "reshard_state": lambda plan, state: reshard_state(plan, plan, state),
    "build_evaluation": lambda plan, state: build_evaluation(plan)(
        state, zerojax.shard_batch(plan, regression_batch(0))
    ),
}


@pytest.fixture(scope="module")
def waiting() -> tuple[Any, Any]:
    """A plan, and a state in which an update waits."""
    plan = make(ROWS[0], FORWARD)
    return plan, advance(plan, init_state(plan, 0), range(2), batch=regression_batch).state


@pytest.mark.parametrize("name", READERS)
def test_every_reader_of_an_own_loop_refuses_weights_without_their_update(name, waiting):
    plan, state = waiting
    with pytest.raises(ValueError, match=r"update_in_forward.*zerojax\.build_finish\(plan\)"):
        READERS[name](plan, state)
    READERS[name](plan, init_state(plan, 0))  # nothing waits in a new state


def test_a_step_goes_on_from_a_finished_state_with_the_same_bits():
    plan = make(ROWS[0], FORWARD)
    step, finish = build_step(plan), build_finish(plan)
    ends = []
    for finishes in (False, True):
        state = init_state(plan, 0)
        for index in range(4):
            state, metrics = step(state, zerojax.shard_batch(plan, regression_batch(index)))
            state = finish(finish(state)) if finishes else state
        ends.append(values((to_portable_state(plan, finish(state)), metrics)))
    assert same(*ends)


def test_a_finished_state_moves_to_other_plans():
    old, new = make(ROWS[0], FORWARD), make(LateRow(zero=3, devices=2), FORWARD)
    plain = make(LateRow(zero=2, devices=2), PLAIN)
    run = advance(old, init_state(old, 0), range(3), batch=regression_batch)
    state = build_finish(old)(run.state)
    held = jax.tree.map(np.asarray, to_portable_state(old, state))
    losses = []
    for plan in (old, new, plain):
        shardings = jax.tree.map(lambda x: x.sharding, plan.abstract_portable)
        placed = jax.tree.map(jax.device_put, held, shardings)
        moved = from_portable_state(plan, placed)
        losses.append(advance(plan, moved, range(3, 6), batch=regression_batch).losses)
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=ROUNDING)
    np.testing.assert_allclose(losses[2], losses[0], rtol=0, atol=ROUNDING)


def test_any_other_plan_has_nothing_to_finish():
    plan = make(ROWS[0], PLAIN)
    state = init_state(plan, 0)
    assert build_finish(plan)(state) is state


# --- the training loop ----------------------------------------------------------------------------


def train(steps: int, offload: Any, **changes: Any) -> tuple[zerojax.Trainer, list[float]]:
    """The trainer of a run after so many steps, and the losses of those that it took."""
    losses: list[float] = []
    note = lambda trainer, values: losses.append(values["loss"])  # noqa: E731
    options = {
        "loss": regression_loss,
        "optimizer": zerojax.with_ema(make_optimizer(), decay=0.9),
        "precision": "fp32",
        "run_dir": None,
        "log": LogConfig(every=1),
        **changes,
    }
    options["callbacks"] = [note, *options.get("callbacks", ())]
    batches = [regression_batch(index) for index in range(4)]
    mesh = {"zero": 1, "persistence_threshold": 10, "offload": offload}
    with zerojax.train(function_model()[0], mesh, batches, steps=steps, **options) as trainer:
        return trainer, losses


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[dict[str, np.ndarray], list[float]]:
    """Bits and losses of a run that nobody reads before its end."""
    trainer, losses = train(4, FORWARD)
    return bits(trainer), losses


def bits(trainer: Any) -> dict[str, np.ndarray]:
    return values(to_portable_state(trainer.plan, trainer.state))


@pytest.mark.slow
def test_a_run_hands_out_weights_after_their_update(uninterrupted):
    """Everything that a trainer hands out, in a callback after each step and at the end."""
    batch = [regression_batch(9)]

    def read(trainer: Any) -> dict[str, np.ndarray]:
        found = {
            "loss": trainer.evaluate(batch)["loss"],
            "ema": trainer.evaluate(batch, weights="ema")["loss"],
            "model": trainer.to_model(),
            "moments": trainer.optimizer_state(),
        }
        return values(jax.tree.map(np.asarray, found))

    seen: dict[Any, list[dict[str, np.ndarray]]] = {}

    def reads(offload: Any) -> Any:
        rows = seen.setdefault(str(offload), [])
        return lambda trainer, _: rows.append({**read(trainer), **bits(trainer)})

    _, losses = train(4, PLAIN, callbacks=[reads(PLAIN)])
    trainer, mine = train(4, FORWARD, callbacks=[reads(FORWARD)])
    np.testing.assert_allclose(mine, losses, rtol=0, atol=ROUNDING)
    assert len(seen[str(FORWARD)]) == 4
    for one, other in zip(seen[str(FORWARD)], seen[str(PLAIN)], strict=True):
        assert_close(one, other)
    assert (mine, same(bits(trainer), uninterrupted[0])) == (uninterrupted[1], True)


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(uninterrupted, tmp_path):
    _, losses = train(2, FORWARD, checkpoint=tmp_path / "run")
    trainer, more = train(4, FORWARD, checkpoint=tmp_path / "run")
    assert losses + more == uninterrupted[1]
    assert same(bits(trainer), uninterrupted[0])
    assert not any("delayed" in name for name in bits(trainer))
    _, last = train(5, PLAIN, checkpoint=tmp_path / "run")
    _, all_losses = train(5, FORWARD)
    np.testing.assert_allclose(last, all_losses[4:], rtol=0, atol=ROUNDING)


@pytest.mark.slow
def test_an_overflow_of_float16_changes_nothing_but_the_counters():
    precision = as_precision("fp16", loss_scale=LossScale(initial=2.0**30, hysteresis=1))
    options = {"optimizer": make_optimizer(), "zero": 1, "devices": 2, "precision": precision}
    ends = []
    for offload in (PLAIN, FORWARD):
        plan = plan_for(reference_model("llama"), offload=offload, **options)
        run = advance(plan, init_state(plan, 0), range(20))
        state = build_finish(plan)(run.state)
        assert 5 < int(state["skipped"]) < 18
        ends.append((run.losses, values(to_portable_state(plan, state))))
    (losses, one), (mine, other) = ends
    np.testing.assert_allclose(mine, losses, rtol=0, atol=2e-3)
    assert int(one["['skipped']"]) == int(other["['skipped']"])
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=0, atol=2e-3, err_msg=name)


def test_the_plan_counts_the_waiting_gradients_and_the_hidden_update():
    late = make(ROWS[0], FORWARD)
    assert any("update_in_forward" in reason for reason in late.reasons)
    (update,) = moved_bytes(late)
    sliced = sum(x.num_slices * x.slice_elements for x in late.offload.leaves.values())
    assert update.to_device == update.to_host == 12 * sliced
    waits = sum(x.size for x in late.abstract_state["delayed"]["grads"].values())
    assert waits == sum(x.size for x in late.abstract_stored["params"].values())
    assert "delayed" not in late.abstract_portable
    text = [
        plan_for(reference_model("llama"), optimizer=make_optimizer(), offload=offload)
        for offload in (PLAIN, FORWARD)
    ]
    after, beside = (hiding(plan, find_gpu("h100")).update_seconds for plan in text)
    assert beside < after
