"""A model from three parts is its layers one after the other, and trains like any model."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.trajectories import TOLERANCE, regression_batch, train_for
from zerojax import Stages
from zerojax.models.losses import mean_squared_error

WIDTH = 8


class Layer(nnx.Module):
    """A residual layer with dropout."""

    def __init__(self, rngs: nnx.Rngs, *, rate: float = 0.0, width: int = WIDTH):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jnp.tanh(self.linear(x)))


def make_stages(
    rngs: nnx.Rngs, *, num_layers: int = 4, rate: float = 0.0, **options: Any
) -> Stages:
    return Stages(
        nnx.Linear(12, WIDTH, rngs=rngs),
        functools.partial(Layer, rate=rate),
        nnx.Linear(WIDTH, 5, rngs=rngs),
        num_layers=num_layers,
        rngs=rngs,
    )


class Listed(nnx.Module):
    """The same model as most people write it."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        self.embed = nnx.Linear(12, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Layer(rngs, rate=rate) for _ in range(3)])
        self.head = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def squared_error(model: Any, batch: Any) -> Any:
    return mean_squared_error(model(batch["x"]), batch["y"])


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_it_is_the_same_layers_in_a_python_loop(rate: float, remat: str) -> None:
    """To float32 rounding: a loop's body is compiled by itself. Dropout: every layer of the list
    keeps its own key and count when it is stacked."""
    listed = Listed(nnx.Rngs(0), rate)
    stages = Stages(listed.embed, list(listed.blocks), listed.head, remat=remat)
    x = jnp.asarray(regression_batch(0)["x"])

    def loss_and_grads(model: nnx.Module) -> Any:
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        loss = lambda params: jnp.sum(nnx.merge(graphdef, params, rest, copy=True)(x) ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    expected, wanted = loss_and_grads(listed)
    loss, grads = loss_and_grads(stages)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for part in ("embed", "head"):
        for name, grad in grads[part].items():
            np.testing.assert_allclose(grad[...], wanted[part][name][...], rtol=1e-5, atol=1e-5)
    for index in range(3):
        for name, grad in grads["blocks"]["linear"].items():
            theirs = wanted["blocks"][index]["linear"][name][...]
            np.testing.assert_allclose(grad[...][index], theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_layers_have_values_keys_and_counts_of_their_own() -> None:
    stages = make_stages(nnx.Rngs(1), rate=0.5, num_layers=3)
    kernel = np.asarray(stages.blocks.linear.kernel[...])
    assert kernel.shape == (3, WIDTH, WIDTH)
    assert len({row.tobytes() for row in kernel}) == 3
    x = jnp.ones((4, 12))
    first, second = stages(x), stages(x)
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(stages.blocks.dropout.rngs.count[...], [2, 2, 2])
    stages.eval()
    np.testing.assert_array_equal(stages(x), stages(x))


def test_several_activations_and_several_inputs() -> None:
    """What a block takes may be a tree, of which it passes some on as they are."""

    class Masked(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, mask = carried
            return x + jnp.where(mask, self.linear(x), 0), mask

    rngs = nnx.Rngs(0)
    embed = lambda x, mask: (x, mask[:, None])  # noqa: E731
    stages = Stages(embed, Masked, lambda carried: carried[0], num_layers=2, rngs=rngs)
    x, mask = jnp.ones((4, WIDTH)), jnp.asarray([True, False, True, False])
    changed = np.any(np.asarray(stages(x, mask) != x), axis=1)
    np.testing.assert_array_equal(changed, mask)


class TiedHead(nnx.Module):
    def __init__(self, embed: nnx.Embed):
        self.embed = embed

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.embed.attend(x)


def test_a_head_that_uses_the_embedding_shares_it() -> None:
    rngs = nnx.Rngs(0)
    embed = nnx.Embed(10, WIDTH, rngs=rngs)
    stages = Stages(embed, Layer, TiedHead(embed), num_layers=2, rngs=rngs)
    names = [
        "/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(stages, nnx.Param))
    ]
    assert sorted(names) == ["blocks/linear/bias", "blocks/linear/kernel", "embed/embedding"]
    assert stages(jnp.zeros((2, 3), int)).shape == (2, 3, 10)


@pytest.mark.thorough
@pytest.mark.parametrize("rate", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_training_over_pipeline_stages_is_training(rate: float) -> None:
    """Dropout, too: every layer draws what it draws without a pipeline."""
    factory = functools.partial(make_stages, rate=rate)
    options = {"loss": squared_error, "batch": regression_batch, "num_microbatches": 4, "steps": 6}
    alone = train_for(lambda rngs: factory(rngs), devices=1, **options)
    assert rate or alone.losses[4] < alone.losses[0]  # the same batch
    assert alone.plan.pipeline is None
    piped = train_for(lambda rngs: factory(rngs), devices=2, mesh={"stage": 2}, **options)
    assert piped.plan.pipeline.layers == (2, 2)
    np.testing.assert_allclose(piped.losses, alone.losses, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(piped.norms, alone.norms, rtol=1e-5)


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs)


RNGS = nnx.Rngs(0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((linear(RNGS), linear, 3), {}, TypeError, "head is a int; .* nnx.Module or a func"),
        ((linear(RNGS).__call__, linear, linear(RNGS)), {}, TypeError, "embed .* holds a Linear, "),
        (
            (linear(RNGS), linear, functools.partial(lambda module, x: module(x), linear(RNGS))),
            {},
            TypeError,
            "head .* holds a Linear, .* not be trained; pass an nnx.Module",
        ),
        (
            (jnp.sin, linear(RNGS), jnp.sin),
            {},
            TypeError,
            "block is one Linear; .*lambda rngs: Lin",
        ),
        ((jnp.sin, linear, jnp.sin), {}, TypeError, "pass num_layers and rngs"),
        ((jnp.sin, linear, jnp.sin), {"num_layers": 0, "rngs": RNGS}, ValueError, "=0 must be at"),
        ((jnp.sin, [linear(RNGS)], jnp.sin), {"num_layers": 1}, TypeError, "remove them"),
        (
            (jnp.sin, [linear(RNGS)], jnp.sin),
            {"remat": "some"},
            ValueError,
            "use one of none, full",
        ),
        (
            (jnp.sin, [linear(RNGS), nnx.Linear(WIDTH, 3, rngs=RNGS)], jnp.sin),
            {},
            ValueError,
            r"layers 0 and 1 differ: bias is float32\(8,\) and float32\(3,\)\. .* stack such",
        ),
    ],
)
def test_refused(arguments: Any, options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Stages(*arguments, **options)
