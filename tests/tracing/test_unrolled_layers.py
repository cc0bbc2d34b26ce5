"""Layers of a Python list that are not rolled: their collectives, their losses, their planning.

The programs are traced, lowered and, where losses are compared, run on 8 CPU devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.parallel.test_zero_program import count_collectives, lower
from tests.support.trajectories import STEPS, TOLERANCE, plan_for, regression_batch, train_for
from zerojax.step.build import build_evaluation
from zerojax.tracing.trees import layer_of
from zerojax.transport import collectives

WIDTH = 24
SINGLE = 4
"""Kernels and biases of the first and the last layer, which are in no list and stay alone."""
SINGLE_GATHERS = SINGLE + 1
"""The backward pass needs only the last kernel of these."""


class Layer(nnx.Module):
    """Six parameters, one of them in a stock norm, which reads its scale once in vain."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.norm(x)
        return x + self.down(nnx.silu(self.gate(hidden)) * self.up(hidden))


class Listed(nnx.Module):
    """`calls` counts how often the loss and the constructor ran."""

    calls: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, rngs: nnx.Rngs, num_layers: int = 4, casts: bool = False):
        Listed.calls["made"] = Listed.calls.get("made", 0) + 1
        self.casts = casts
        self.first = nnx.Linear(12, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(num_layers)])
        self.last = nnx.Linear(WIDTH, 5, rngs=rngs)

    def loss(self, batch: dict) -> jax.Array:
        Listed.calls["loss"] = Listed.calls.get("loss", 0) + 1
        # As models do that cast all their weights beforehand.
        doubled = [2 * layer.up.kernel[...] for layer in self.layers if self.casts]
        x = self.first(batch["x"])
        for layer in self.layers:
            x = layer(x)
        for kernel in doubled:
            x = x + 0.02 * jnp.tanh(x @ kernel) @ kernel.T
        return jnp.mean((self.last(x) - batch["y"]) ** 2)


def listed_plan(num_layers=4, *, casts=False, **options):
    options: dict[str, Any] = {"persistence_threshold": 0, "roll": "off", **options}
    make = lambda rngs: Listed(rngs, num_layers, casts)  # noqa: E731
    return plan_for(make, batch=regression_batch, **options)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("layers/3/attn/q/kernel", "layers/3"),
        ("encoder/layers/3/experts/5/up", "encoder/layers/3"),
        ("layer1/0/conv2/kernel", "layer1/0"),
        ("h_11/mlp/up", "h_11"),
        ("Block_2/Conv_0/kernel", "Block_2"),
        ("blocks/mlp/up/kernel", None),
    ],
)
def test_a_layer_is_what_has_one_number(name, layer):
    assert layer_of(name) == layer


@pytest.mark.thorough
@pytest.mark.parametrize("full_enough", [1, collectives.FULL_ENOUGH])
@pytest.mark.parametrize("num_layers", [4, 8])
def test_a_layer_is_gathered_twice_and_scattered_once_at_stage_3(
    num_layers, full_enough, monkeypatch
):
    """In one collective each, whatever number of parameters it has, and however large it is."""
    monkeypatch.setattr(collectives, "FULL_ENOUGH", full_enough)
    found = count_collectives(lower(listed_plan(num_layers, zero=3)))
    assert found.outside["all_gather"] == 2 * num_layers + SINGLE_GATHERS
    assert found.outside["reduce_scatter"] == num_layers + SINGLE


@pytest.mark.thorough
@pytest.mark.parametrize("num_layers", [4, 8])
def test_a_layer_is_scattered_once_at_stage_2(num_layers):
    found = count_collectives(lower(listed_plan(num_layers, zero=2)))
    assert found.outside["reduce_scatter"] == num_layers + SINGLE


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_buckets_of_whole_layers_once_they_are_full_enough(zero, monkeypatch):
    """What is reduced or gathered outside of the layers, with layers as large as buckets."""
    monkeypatch.setattr(collectives, "FULL_ENOUGH", 1000)
    kinds = {0: ["all_reduce"], 1: ["reduce_scatter", "all_gather"], 2: ["all_gather"]}[zero]
    few, many = (count_collectives(lower(listed_plan(n, zero=zero))).outside for n in (4, 8))
    assert all(many[kind] - few[kind] == 4 for kind in kinds)


def test_buckets_end_with_a_layer_or_at_the_limit():
    sizes = {"embed": 500, "h/0/a": 700, "h/0/b": 600, "h/1/a": 700, "h/1/b": 600, "norm": 9}
    full = {name: 1000 * size for name, size in sizes.items()}
    whole = [["embed", "h/0/a", "h/0/b"], ["h/1/a", "h/1/b"], ["norm"]]
    assert collectives.make_buckets(full, 10**9) == whole
    assert collectives.make_buckets(sizes, 10**9) == [[*sizes]], "all too small to be cut"
    cut = [["embed"], ["h/0/a"], ["h/0/b"], ["h/1/a"], ["h/1/b", "norm"]]
    assert collectives.make_buckets(full, 10**6) == cut
    unnumbered = {"blocks/a": 10**7, "blocks/b": 10**7}
    assert collectives.make_buckets(unnumbered, 10**9) == [[*unnumbered]]


@pytest.mark.thorough
def test_a_smaller_bucket_cuts_a_layer():
    """A kernel and the small ones beside it fit: gate, up and down are apart."""
    plan = listed_plan(zero=3, allgather_bucket_size=WIDTH * 2 * WIDTH + 2 * WIDTH)
    found = count_collectives(lower(plan))
    assert found.outside["all_gather"] == 2 * 3 * 4 + SINGLE_GATHERS
    assert found.outside["reduce_scatter"] == 3 * 4 + SINGLE


@pytest.mark.thorough
def test_each_layer_is_gathered_again_by_itself():
    """One barrier holds back each layer's gathers of the backward pass, one first and last."""
    text = lower(listed_plan(6, zero=3)).as_text()
    assert text.count("stablehlo.optimization_barrier") == 6 + 2


@pytest.mark.thorough
def test_weights_that_are_taken_beforehand_are_not_kept():
    """Nothing made of parameters alone goes from one checkpoint to another: there is one."""
    text = lower(listed_plan(6, zero=3, casts=True)).as_text()
    assert text.count("stablehlo.optimization_barrier") < 6


def test_frozen_parameters_of_a_layer_have_their_own_bucket():
    found = count_collectives(lower(listed_plan(zero=3, freeze=("layers/.*/up/",))))
    assert found.outside["all_gather"] == 2 * 2 * 4 + SINGLE_GATHERS
    assert found.outside["reduce_scatter"] == 4 + SINGLE


def test_evaluation_gathers_each_layer_once():
    plan = listed_plan(zero=3)
    lowered = build_evaluation(plan).lower(plan.abstract_state, plan.abstract_batch)
    found = count_collectives(lowered)
    assert found.outside["all_gather"] == 4 + SINGLE
    assert found.outside["reduce_scatter"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("zero", "options"),
    [
        (2, {}),
        (3, {}),
        (3, {"num_microbatches": 2}),
        (2, {"num_microbatches": 2}),
        (3, {"casts": True}),
        (3, {"mesh": {"model": 2}}),
    ],
)
def test_losses_are_those_of_one_device(zero, options):
    """Equal to 4e-6 over 20 steps, as for every other way of sharding
    (`tests.support.trajectories`)."""
    options = dict(options)
    casts = options.pop("casts", False)
    make = lambda rngs: Listed(rngs, 4, casts)  # noqa: E731
    alone = train_for(make, steps=STEPS, batch=regression_batch, devices=1)
    shared = train_for(
        make,
        steps=STEPS,
        batch=regression_batch,
        zero=zero,
        persistence_threshold=0,
        roll="off",
        **options,
    )
    np.testing.assert_allclose(shared.losses, alone.losses, atol=TOLERANCE, rtol=0)
    assert alone.losses[-1] < alone.losses[0]


@pytest.mark.thorough
def test_planning_calls_loss_and_constructor_as_often_for_any_depth():
    calls = []
    for num_layers in (4, 12):
        Listed.calls.clear()
        listed_plan(num_layers, zero=3)
        calls.append(dict(Listed.calls))
    assert calls == [{"made": 1, "loss": 1}] * 2
