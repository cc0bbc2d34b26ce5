"""A run that goes on with other settings of the optimizer says which ones count."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
LINE = (lambda key: {"w": jnp.ones((4, 1))}, lambda params, x: x @ params["w"])


SLOPE = optax.linear_schedule(0.1, 0, 9)


def injected(rate, decay=0.0):
    return optax.inject_hyperparams(optax.adamw)(learning_rate=rate, weight_decay=decay)


def cosine(steps):
    return zerojax.adamw(optax.cosine_decay_schedule(0.1, steps))


def resume(folder, first, second, capsys, steps=4):
    """What the second run says of the optimizer, and its trainer."""
    for optimizer, count in ((first, 2), (second, steps)):
        capsys.readouterr()
        trainer = zerojax.train(
            LINE,
            {"zero": 1},
            lambda step: {"x": X},
            loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
            optimizer=optimizer,
            steps=count,
            checkpoint=folder,
        )
    lines = capsys.readouterr().out.splitlines()
    words = "of the checkpoint is used", "would have been"
    return [line for line in lines if any(word in line for word in words)], trainer


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_saved_value_of_an_injected_setting_counts_and_is_said(tmp_path, capsys, wrapped):
    around = (lambda tx: optax.chain(optax.clip(1.0), tx)) if wrapped else (lambda tx: tx)
    first, second = around(injected(0.1, 0.5)), around(injected(0.01, 0.5))
    (line,), trainer = resume(tmp_path, first, second, capsys)
    assert "learning_rate=0.1 of the checkpoint is used, not 0.01 of this call" in line
    assert "trainer.state['opt_state']" in line
    state = trainer.state["opt_state"][1] if wrapped else trainer.state["opt_state"]
    np.testing.assert_allclose(state.hyperparams["learning_rate"], 0.1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (cosine(100), cosine(10), "is 0.09045; in the saved run it would have been 0.0999"),
        (None, None, "(saved run: steps=2, this call: steps=4): the schedule of this call is used"),
        (cosine(100), cosine(100), None),
        (injected(0.1), injected(0.1), None),
        (
            injected(optax.linear_schedule(0.1, 0, 9)),
            injected(optax.linear_schedule(1, 0, 9)),
            None,
        ),
    ],
    ids=["length", "default", "same schedule", "same value", "a schedule in the state"],
)
def test_a_schedule_that_jumps_is_said(tmp_path, capsys, first, second, said):
    lines, _ = resume(tmp_path, first, second, capsys)
    assert [said in line for line in lines] == ([] if said is None else [True])
