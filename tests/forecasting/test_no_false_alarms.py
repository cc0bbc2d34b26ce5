"""Program rules find nothing in sound steps of models that users write, except what is true."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import pytest

import zerojax
from tests.support.foreign_shapes import SHAPES
from tests.support.listed_decoders import build_decoder, example_batch
from tests.support.own_transformers import FusedDecoder, LinenDecoder, OwnDecoder
from tests.support.small_models import LinenText, UserText, linen_loss, reference_model
from zerojax.forecasting.program_rules import check_rules, check_step

pytestmark = pytest.mark.thorough
RULES = {"gradients_in": "fp32", "max_gather_mb": 0.0, "max_replicated_mb": 0.001}
TOKENS = np.zeros((16, 16), np.int32)
TEXT = {"tokens": TOKENS, "targets": TOKENS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sound:
    """A model, and its number of loops over layers; 0: its layers truly run outside of loops."""

    model: Any
    loops: int
    batch: Mapping[str, Any] = dataclasses.field(default_factory=lambda: TEXT)
    loss: Callable[..., Any] | None = None


def listed(style: str, loops: int) -> Callable[[], Sound]:
    def make() -> Sound:
        batch = {name: np.asarray(x) for name, x in example_batch(16).items()}
        return Sound(model=lambda rngs: build_decoder(style, rngs=rngs), loops=loops, batch=batch)

    return make


def foreign(name: str) -> Callable[[], Sound]:
    def make() -> Sound:
        given = SHAPES[name]()
        return Sound(
            model=given.model, loops=len(given.rolled), batch=given.batch(0), loss=given.loss
        )

    return make


CASES: dict[str, Callable[[], Sound]] = {
    # Fewer than four layers of a list stay as they are.
    "own": lambda: Sound(model=OwnDecoder, loops=0),
    "own, one matrix": lambda: Sound(model=FusedDecoder, loops=0),
    "own, linen": lambda: Sound(model=LinenDecoder(), loops=0, loss=linen_loss),
    "scanned": lambda: Sound(model=UserText, loops=1),
    "scanned, linen": lambda: Sound(model=LinenText(), loops=1, loss=linen_loss),
    "gpt2": lambda: Sound(model=reference_model("gpt2"), loops=1),
    "listed": listed("plain", 1),
    "batch norm": listed("batchnorm", 1),
    "gates": listed("gate_sum", 1),
    "dense first": listed("dense_first", 1),
    "mix": listed("mix", 1),
    "two lists": listed("encoder_decoder", 2),
    # Layers that share parameters, and layers that read what others kept, are no loop.
    "tied": listed("tied", 0),
    "skips": listed("unet", 0),
    **{name: foreign(name) for name in SHAPES},
}


@pytest.fixture(autouse=True)
def _as_users_write():
    """Others multiply arrays of different rank; warnings of losses are not looked at here."""
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def plan_of(given: Sound, **mesh: Any):
    return zerojax.make_plan(
        given.model,
        {"persistence_threshold": 0, **mesh},
        example_batch=given.batch,
        loss=given.loss,
        precision="fp32",
    )


@pytest.mark.parametrize(
    ("name", "zero"),
    [*((name, 3) for name in CASES), *(("scanned", z) for z in range(3)), ("listed", 2)],
)
def test_rules_find_what_is_true_alone(name, zero):
    given = CASES[name]()
    loops = 0 if name == "listed" and zero < 3 else given.loops  # lists become loops at stage 3
    rules = zerojax.ExpectConfig(**RULES, layer_loops=max(loops, 1))
    found = check_step(plan_of(given, zero=zero), rules).violations
    assert [one.describe() for one in found if one.rule != "layer_loops"] == []
    outside = [one.found for one in found if one.rule == "layer_loops"]
    assert bool(outside) == (loops == 0), outside
    assert all("outside of loops" in one for one in outside)


@pytest.mark.parametrize("name", ["own", "own, one matrix", "own, linen", "gpt2"])
def test_every_proposed_rule_has_an_effect(name):
    given = CASES[name]()
    options = {"example_batch": given.batch, "loss": given.loss}
    mesh = {"data": 2, "model": 4}
    proposed = zerojax.propose_rules(given.model, mesh, **options)
    plan = plan_of(given, **mesh, rules=proposed.rules)
    (rule,) = check_rules(None, plan, zerojax.ExpectConfig(rules_split=True))
    assert proposed.rules
    assert rule.violations == ()
