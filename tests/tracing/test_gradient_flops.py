"""The FLOPs of a step with frozen parameters are those of its traced gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.small_models import reference_model
from tests.support.trajectories import plan_for, text_batch
from zerojax.config import LoraConfig
from zerojax.plan.counts import model_flops
from zerojax.tracing.flops import count_flops
from zerojax.zoo import add_lora

LORA = LoraConfig(rank=3)


class Layers(nnx.Module):
    """A Python list of layers, the first of which may be frozen."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])

    def loss(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return jnp.sum(x**2), jnp.float32(x.size)


def of_gradient(module, frozen, batch) -> float:
    """FLOPs of `jax.value_and_grad` over the parameters that are not frozen."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    leaves, tree = jax.tree.flatten(params)
    paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(params)]
    trained = [x for x, path in zip(leaves, paths, strict=True) if not frozen(path)]

    def loss(trained):
        values = iter(trained)
        whole = [x if frozen(path) else next(values) for x, path in zip(leaves, paths, strict=True)]
        return nnx.merge(graph, jax.tree.unflatten(tree, whole), rest).loss(batch)[0]

    return count_flops(jax.value_and_grad(loss), trained)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", ["first", "last", "all but the middle"])
def test_layers_of_which_some_are_frozen(part):
    batch = {"x": np.ones((8, 16), np.float32)}
    numbers = {"first": "0", "last": "2", "all but the middle": "02"}[part]
    plan = plan_for(
        Layers, devices=1, batch=lambda _: batch, freeze=f"^layers/[{numbers}]/", roll="off"
    )
    expected = of_gradient(Layers(nnx.Rngs(0)), lambda path: path.split("/")[1] in numbers, batch)
    assert model_flops(plan) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_adapters(name):
    """Their layers run in a scan, whose carry depends on adapters from the second layer on."""
    module = add_lora(reference_model(name)(nnx.Rngs(0)), LORA)
    plan = plan_for(module, devices=1, freeze=LORA.freeze)
    expected = of_gradient(module, lambda path: "lora" not in path, text_batch(0))
    whole = model_flops(plan_for(module, devices=1))
    assert expected <= model_flops(plan) <= 1.02 * expected
    assert model_flops(plan) < 0.75 * whole
