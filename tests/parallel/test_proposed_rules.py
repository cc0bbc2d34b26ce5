"""Runs with proposed rules: losses of one device, and the all-reduces that the proposal counts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import zerojax
from tests.support.own_transformers import LENGTH, VOCAB, WIDTH, LinenDecoder, Mlp, OwnDecoder
from tests.support.small_models import linen_loss, reference_model
from tests.support.trajectories import ROWS, STEPS, TOLERANCE, optimizer, text_batch, train_for
from zerojax.forecasting.hlo import find_collectives, read_program
from zerojax.plan.make import make_plan
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.zoo import T5, Bert
from zerojax.zoo.bert import BertConfig
from zerojax.zoo.t5 import T5Config

SCALARS = 400
"""Bytes: for each of some 40 parameters two numbers at most."""
DEEPER_TOLERANCE = 6e-6
"""As `TOLERANCE`: of the Linen model and of four own layers, reversed rows differ by 4.8e-6."""


def masked(index: int) -> dict[str, np.ndarray]:
    tokens = text_batch(index)["tokens"]
    weights = (np.arange(tokens.shape[1]) % 3 == index % 3).astype(np.float32)
    return {
        "tokens": tokens,
        "targets": tokens,
        "weights": np.broadcast_to(weights, tokens.shape).copy(),
    }


def points(index: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(index % 4).normal(size=(ROWS, WIDTH)).astype(np.float32)}


def bert(rngs: Any) -> Bert:
    config = BertConfig(
        vocab_size=VOCAB, num_layers=2, num_heads=4, embed_dim=WIDTH, max_seq_len=LENGTH
    )
    return Bert(config, rngs=rngs)


def t5(rngs: Any) -> T5:
    config = T5Config(
        vocab_size=VOCAB, num_layers=2, num_heads=4, embed_dim=WIDTH, head_dim=8, mlp_dim=64
    )
    return T5(config, rngs=rngs)


class Case(NamedTuple):
    """A run with proposed rules.

    Attributes:
      row_sums: all-reduces of row products in the forward pass of one microbatch.
      zero: its ZeRO stage; its weights do not change what `model` sends.
    """

    model: Any
    mesh: dict[str, int]
    row_sums: int
    batch: Callable[[int], Any] = text_batch
    loss: Any = None
    zero: int = 0
    tolerance: float = TOLERANCE


ON_2, ON_4 = {"data": 4, "model": 2}, {"data": 2, "model": 4}
# Attention and MLP of each layer.
CASES = {
    "mlp": Case(Mlp, ON_4, 1, points),
    "own list": Case(lambda rngs: OwnDecoder(rngs), ON_2, 2 * 3),
    "own list, ZeRO-3": Case(lambda rngs: OwnDecoder(rngs, kv_heads=4), ON_4, 2 * 3, zero=3),
    "linen": Case(LinenDecoder(), ON_2, 2 * 2, loss=linen_loss, tolerance=DEEPER_TOLERANCE),
    "gpt2": Case(reference_model("gpt2"), ON_4, 2 * 2),
    "llama": Case(reference_model("llama", remat="full"), ON_2, 2 * 2, zero=1),
    "bert": Case(bert, ON_4, 2 * 2, masked),
    "t5": Case(t5, ON_2, 2 * 2 + 3 * 2),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_one_device_and_all_reduces_those_of_the_proposal(name):
    model, mesh, row_sums, batch, loss, zero, tolerance = CASES[name]
    given = {"example_batch": batch(0), "loss": loss, "precision": "fp32"}
    proposal = zerojax.propose_rules(model, mesh, **given)
    rows = [part for part in proposal.parts if part.kind == "row"]
    assert sum(part.forward_sums for part in rows) == row_sums
    options = {"optimizer": optimizer(), "rules": proposal.rules, "roll": "off", "zero": zero}
    plan = make_plan(model, mesh, persistence_threshold=0, **options, **given)
    state = init_state(plan)
    rows_of = lambda index: jax.device_put(batch(index), plan.batch_sharding)  # noqa: E731
    step = build_step(plan).lower(state, rows_of(0)).compile()
    check_all_reduces(plan, step.as_text(), proposal)
    losses = []
    for index in range(STEPS):
        state, metrics = step(state, rows_of(index))
        losses.append(float(metrics["loss"]))
    expected = train_for(model, batch=batch, devices=1, loss=loss, roll="off")
    np.testing.assert_allclose(losses, expected.losses, rtol=0, atol=tolerance)
    assert losses[0] - losses[-1] > 0.02


def check_all_reduces(plan: zerojax.Plan, text: str, proposal: zerojax.RuleProposal) -> None:
    """Compares what a compiled step sends over `model` with the proposal: bytes and number."""
    neighbours = tuple(range(proposal.model))
    found = [one for one in find_collectives(read_program(text), 8) if one.group == neighbours]
    assert {one.kind for one in found} == {"all-reduce"}
    expected = proposal.forward_bytes + proposal.backward_bytes
    # The others are a few numbers after the pass: one device's parts of the norm of all gradients.
    # The compiler sends some of them together with the last gradients at stage 3.
    of_pass = [one for one in found if "jvp(" in one.op_name]
    sent = sum(one.payload_bytes * one.times for one in of_pass)
    assert sum(one.payload_bytes * one.times for one in found) < expected + SCALARS
    assert sent >= expected
    if plan.zero < 3:
        assert sent == expected
        sums = sum(part.forward_sums + part.backward_sums for part in proposal.parts)
        assert sum(one.arrays * one.times for one in of_pass) == sums


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"data": 4, "model": 2}, "zero": 3, "persistence_threshold": 0},
        {"mesh": {"data": 2, "stage": 2, "model": 2}, "zero": 1, "num_microbatches": 4},
    ],
    ids=["rolled, ZeRO-3", "pipeline"],
)
def test_layers_of_a_list_that_become_a_loop(options):
    model = lambda rngs: OwnDecoder(rngs, layers=4)  # noqa: E731
    proposal = zerojax.propose_rules(model, options["mesh"], example_batch=text_batch(0))
    run = train_for(model, rules=proposal.rules, **options)
    leaf = run.plan.placement.leaves["m/0..3/g/a/kernel"]
    assert leaf.axes == (None, None, "model")
    expected = train_for(model, devices=1)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=DEEPER_TOLERANCE)
