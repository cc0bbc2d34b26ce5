"""`mesh.roll_remat` as a mapping: each list of layers has its own value."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.support.two_lists import (
    DECODER,
    ENCODER,
    TOKENS,
    WIDTH,
    TwoLists,
    batch,
    plan_of,
    remats,
)
from zerojax import tracing
from zerojax.config.loader import ConfigError, load_dataclass
from zerojax.data import shard_batch
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state
from zerojax.tracing.rolling import kept_bytes, trained_flops

VALUES = ("model", "none", "full", "attention", "dots", "elementwise")
SGD = optax.sgd(0.03)
"""Its steps are proportional to gradients; Adam's magnify the rounding of small ones."""
LOSSES = 4e-6
"""Relative: a loss sums the batch's rows in another order on several devices."""
PARAMS = 1e-6
"""Absolute, of parameters up to 1."""


def trained(plan: zerojax.Plan) -> tuple[list[float], list[np.ndarray]]:
    """The losses of three steps, and the parameters after them."""
    state, step, losses = init_state(plan), build_step(plan), []
    for _ in range(3):
        state, metrics = step(state, shard_batch(plan, batch()))
        losses.append(float(metrics["loss"]))
    params = to_portable_state(plan, state)["params"]
    return losses, [np.asarray(x) for x in jax.tree.leaves(params)]


@functools.cache
def plainly_trained() -> tuple[list[float], list[np.ndarray]]:
    """With the layers as written, on one device."""
    plan = plan_of(0, "auto", devices=1, roll="off", optimizer=SGD)
    losses, params = trained(plan)
    assert losses[2] < 0.9 * losses[0]  # gradients show in losses
    return losses, params


MIXES = [mix for mix in itertools.product(VALUES, repeat=2) if mix[0] != mix[1]]
OFTEN = [("full", "dots")]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("zero", "encoder", "decoder"),
    [
        pytest.param(zero, *mix, marks=() if mix in OFTEN else pytest.mark.thorough)
        for zero, mix in itertools.product((0, 3), MIXES)
        if zero == 3 or "none" not in mix  # "none" alone is no reason for a loop below stage 3
    ],
)
def test_losses_with_any_mix_are_those_of_the_layers_as_written(zero, encoder, decoder):
    plan = plan_of(zero, {"encoder": encoder, "decoder": decoder}, optimizer=SGD)
    asked = {ENCODER: encoder, DECODER: decoder}
    rolled = {t: v for t, v in asked.items() if zero == 3 or v != "model"}
    assert remats(plan) == rolled
    for title, value in rolled.items():
        pattern = title.partition("/")[0]
        assert f"roll_remat={{{pattern}: {value}}}" in _reason(plan, title)
    (losses, params), (expected, expected_params) = trained(plan), plainly_trained()
    np.testing.assert_allclose(losses, expected, rtol=LOSSES)
    for one, other in zip(params, expected_params, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=PARAMS)


def _reason(plan: zerojax.Plan, title: str) -> str:
    return next(line for line in plan.reasons if line.startswith(f"layers: {title}"))


@pytest.mark.thorough
def test_the_rest_is_auto_and_an_exact_name_comes_first() -> None:
    auto = remats(plan_of(3, "auto"))
    assert remats(plan_of(3, {"decoder/.*/up": "full"})) == {**auto, DECODER: "full"}
    setting = {".": "dots", ENCODER: "full"}
    assert remats(plan_of(3, setting)) == {DECODER: "dots", ENCODER: "full"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("zero", "setting", "options", "words"),
    [
        (3, {"encodr": "full"}, {}, [ENCODER, DECODER]),
        (3, {"encodr": "auto"}, {}, [ENCODER, DECODER]),
        (3, {".": "full", "encoder": "dots"}, {}, [ENCODER, DECODER]),
        (0, {"encoder": "none"}, {}, ["a loop would store more"]),
        (3, {"encoder": "full"}, {"roll": "off"}, ["roll=off"]),
    ],
)
def test_a_pattern_that_applies_to_no_loop_is_refused(zero, setting, options, words):
    with pytest.raises(ValueError, match="applies to no loop") as error:
        plan_of(zero, setting, **options)
    assert all(word in str(error.value) for word in words)


def test_run_files_and_overrides_take_a_mapping(tmp_path: Any) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text("roll_remat:\n  encoder/0..3: full\n  decoder: dots\n")
    expected = ((ENCODER, "full"), ("decoder", "dots"))
    assert load_dataclass(zerojax.MeshConfig, path, []).roll_remat == expected
    word = "roll_remat={encoder/0..3: full, decoder: dots}"
    assert load_dataclass(zerojax.MeshConfig, None, [word]).roll_remat == expected
    with pytest.raises(ConfigError, match=r"roll_remat\.decoder: 'dot' .* mean 'dots'"):
        load_dataclass(zerojax.MeshConfig, None, ["roll_remat={decoder: dot}"])
    with pytest.raises(ConfigError, match="not a regular expression"):
        load_dataclass(zerojax.MeshConfig, None, ["roll_remat={'(': dots}"])
    with pytest.raises(ValueError, match="'decoder' twice"):
        zerojax.MeshConfig(roll_remat=(("decoder", "dots"), ("decoder", "full")))


@pytest.mark.thorough
def test_bytes_and_flops_of_a_policy_are_those_of_the_program() -> None:
    """Of one layer: products of the forward pass, and two of each for gradients."""
    plan = plan_of(0, "full")
    assert isinstance(plan.model, tracing.rolling.RolledModel)
    body = next(loop.body for loop in plan.model.loops if loop.title == ENCODER)
    rows = 2 * TOKENS  # of 8 on 4 devices
    weights = (1 + 2 + 2 + 2) * WIDTH**2
    scores = rows * TOKENS * WIDTH
    products = 2 * rows * weights + 4 * scores
    kept = {value: kept_bytes(body, value) for value in VALUES[1:]}
    flops = {value: trained_flops(body, value) for value in VALUES[1:]}
    assert flops["none"] == flops["elementwise"] == 3 * products
    assert flops["dots"] == 3 * products + 4 * scores  # products of two activations
    # The result of the last product, and that of attention, are not needed again.
    assert kept["full"] == 0
    assert kept["none"] > kept["elementwise"] > kept["dots"] > 0
    assert flops["dots"] < flops["full"] <= 4 * products


ACTIVATIONS = {
    **{name: getattr(jax.nn, name) for name in (
        "gelu", "silu", "relu", "sigmoid", "elu", "selu", "relu6", "squareplus", "leaky_relu",
        "soft_sign",
    )},
    "tanh": jnp.tanh,
    "relu squared": lambda x: jnp.square(jax.nn.relu(x)),
    "root of a mean of squares": lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_elementwise_stores_the_product_before_an_activation_and_masks(name: str) -> None:
    """A comparison's result, one byte for each number, may be stored beside the product."""

    def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return ACTIVATIONS[name](x @ up) @ down

    numbers = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)
    weights = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    body = jax.make_jaxpr(layer)(numbers, weights, weights)
    product = 4 * TOKENS * WIDTH
    assert product <= kept_bytes(body, "elementwise") <= 1.5 * product
    assert kept_bytes(body, "elementwise") <= kept_bytes(body, "none")


@pytest.mark.thorough
def test_a_run_is_loaded_at_another_stage_whatever_its_values(tmp_path: Any) -> None:
    """Evaluation recomputes nothing, so the values of the run do not count."""
    trainer = zerojax.train(
        TwoLists(nnx.Rngs(0)),
        {"data": -1, "zero": 3, "roll_remat": {"encoder": "none"}},
        lambda step: batch(),
        steps=1,
        precision="fp32",
        checkpoint=tmp_path / "run",
    )
    expected = trainer.evaluate([batch()])["loss"]
    for mesh in (None, {"zero": 0}):
        loaded = zerojax.load_run(tmp_path / "run", model=TwoLists(nnx.Rngs(0)), mesh=mesh)
        np.testing.assert_allclose(loaded.evaluate([batch()])["loss"], expected, rtol=LOSSES)
