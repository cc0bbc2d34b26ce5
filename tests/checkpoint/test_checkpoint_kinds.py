"""Kinds of arrays in checkpoints: without elements, and of dtypes that no file has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.support.recipe import RECIPE
from zerojax.checkpoint import Checkpointer
from zerojax.cli import main
from zerojax.config import LogConfig

ROWS = {"x": np.ones((8, 4), np.float32)}


def init(key):
    return {"w": jnp.ones((4, 1)), "a": jnp.zeros((4, 0)), "b": jnp.zeros((0, 1))}


def apply(params, x):
    """An adapter of rank 0 beside the kernel."""
    return x @ params["w"] + (x @ params["a"]) @ params["b"]


def loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def train(model, folder, steps=2, mesh=None, **options):
    options = {"optimizer": optax.adam(0.1), "log": LogConfig(console="quiet"), **options}
    return zerojax.train(
        model, mesh or {"zero": 1}, [ROWS], loss=loss, steps=steps, checkpoint=folder, **options
    )


@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [
        ({"zero": 1}, optax.adam(0.1)),
        pytest.param(
            {"zero": 1, "offload": {"opt_state": "host", "min_elements": 1}},
            zerojax.adamw(0.1, **RECIPE),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {"zero": 1, "offload": {"opt_state": "nvme", "min_elements": 1}},
            zerojax.adamw(0.1, **RECIPE),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_parameter_without_elements_is_saved_and_read_back(tmp_path, mesh, optimizer):
    options = {"optimizer": optimizer}
    train((init, apply), tmp_path, mesh=mesh, **options).close()
    sharded = {"zero": 3, "persistence_threshold": 0}
    trainer = train((init, apply), tmp_path, 3, sharded, **options)
    assert trainer.num_steps == 3
    found = zerojax.load_run(tmp_path, model=(init, apply), loss=loss).to_model()
    assert {name: x.shape for name, x in found.items()} == {"w": (4, 1), "a": (4, 0), "b": (0, 1)}
    np.testing.assert_array_equal(found["w"], trainer.to_model()["w"])
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    trainer.close()


def test_an_array_without_elements_alone(tmp_path):
    leaf = jnp.zeros((3, 0), jnp.int32)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": leaf, "y": jnp.ones(2)}, data_state={}, config={}, plan={})
        abstract = {"x": jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)}
        found = checkpointer.restore(abstract, subset=True).state["x"]
    assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)


class Narrow(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(4, 1, rngs=rngs)
        self.table = nnx.BatchStat(jnp.zeros(4, jnp.uint4))

    def __call__(self, x):
        return self.out(x)


def test_a_dtype_that_files_do_not_have_is_refused_before_the_first_step(tmp_path):
    steps = []
    with pytest.raises(TypeError, match="table' of the state is uint4, .* cannot store; use uint8"):
        train(Narrow, tmp_path, callbacks=[lambda *_: steps.append(1)])
    assert not steps
