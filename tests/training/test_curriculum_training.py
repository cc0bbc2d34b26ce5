"""Training with a curriculum of the row length: equal to training on rows that were cut before."""

from __future__ import annotations

import json
import math

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.support.refusals import refused
from zerojax.training.metrics import read_metrics
from zerojax.training.step_programs import StepPrograms

ROWS, TOKENS, VOCAB = 8, 24, 13
CURRICULUM = zerojax.CurriculumConfig(
    type="seqlen", min_length=6, length_step=1, total_steps=TOKENS - 6
)
"""Step t has 6 + t tokens; 18 lengths with 6 compiled: 9, 12, 15, 18, 21, 24."""
STEPS = 7
"""Steps 1 to 3 are computed with 9 tokens, 4 to 6 with 12, 7 with 15."""


class Causal(nnx.Module):
    """A small language model whose tokens see the mean of the tokens so far."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Param(0.3 * jax.random.normal(rngs.params(), (VOCAB, 16)))
        self.places = nnx.Param(0.3 * jax.random.normal(rngs.params(), (TOKENS, 16)))
        self.head = nnx.Param(0.3 * jax.random.normal(rngs.params(), (16, VOCAB)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        seen = self.embed[...][tokens] + self.places[...][: tokens.shape[1]][None]
        counts = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.float32)
        return jnp.tanh(jnp.cumsum(seen, 1) / counts[None, :, None]) @ self.head[...]


class Looking(Causal):
    """Its tokens see all others, also later ones."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return (
            super().__call__(tokens) + jnp.mean(self.embed[...][tokens], 1, keepdims=True)[..., :1]
        )


def batch_of(step: int) -> dict[str, np.ndarray]:
    text = np.random.default_rng(step).integers(0, VOCAB, (ROWS, TOKENS + 1), np.int32)
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def trained(
    mesh: dict | None = None, *, steps: int = STEPS, model=None, batches=batch_of, **options
) -> zerojax.Trainer:
    settings = {
        "loss": zerojax.losses.next_token_of_call,
        "optimizer": optax.adamw(1e-2),
        "run_dir": None,
        "log": zerojax.LogConfig(every=1, console="quiet"),
        "curriculum": CURRICULUM,
    }
    model = Causal(nnx.Rngs(0)) if model is None else model
    return zerojax.train(model, mesh or {}, batches, steps=steps, **{**settings, **options})


def plain_training(steps: int, lengths) -> tuple[list[float], dict[str, np.ndarray]]:
    """One device, rows cut before: (loss of each step, parameters)."""
    graph, params = nnx.split(Causal(nnx.Rngs(0)))
    tx = optax.adamw(1e-2)
    state = tx.init(params)

    def loss_of(params, tokens, targets):
        logits = nnx.merge(graph, params)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    losses = []
    for step in range(steps):
        short = {name: x[:, : lengths(step + 1)] for name, x in batch_of(step).items()}
        loss, grads = jax.value_and_grad(loss_of)(params, **short)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, {name: np.asarray(x[...]) for name, x in nnx.to_pure_dict(params).items()}


def parameters(trainer: zerojax.Trainer) -> dict[str, np.ndarray]:
    model = trainer.to_model()
    return {name: np.asarray(getattr(model, name)[...]) for name in ("embed", "places", "head")}


@pytest.fixture
def compiled_steps():
    """Names of the step programs that XLA compiles or reads from a cache in the test."""
    names = []

    def listen(event: str, _: float, **facts) -> None:
        if event.endswith("backend_compile_duration") and facts.get("fun_name") == "jit(step)":
            names.append(facts["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("zero", [0, 3])
def test_steps_equal_those_of_one_device_on_short_rows(zero, compiled_steps):
    trainer = trained({"zero": zero, "persistence_threshold": 0})
    losses, expected = plain_training(STEPS, lambda step: 6 + step)

    # float32 sums over 8 shards instead of one, in another order, over 7 steps
    assert [one["loss"] for one in trainer.history] == pytest.approx(losses, rel=2e-6)
    for name, value in parameters(trainer).items():
        np.testing.assert_allclose(value, expected[name], atol=3e-6, err_msg=name)
    assert len(compiled_steps) == 3, "one program for each compiled length that a step has"
    assert trainer.plan.ladder.config.rungs == (9, 12, 15, 18, 21, 24)
    for rung, plan in trainer.plan.ladder.plans.items():
        assert plan.abstract_batch["weights"].shape == (ROWS, rung)
