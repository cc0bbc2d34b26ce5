"""Integers of a batch that look up rows of a parameter are held against the number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import zerojax
from zerojax.models.losses import next_token

ROWS = 10


class Own(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(ROWS, 8, rngs=rngs)
        self.out = nnx.Linear(8, ROWS, rngs=rngs)

    def __call__(self, ids):
        return self.out(self.table(ids))


class OwnLinen(linen.Module):
    @linen.compact
    def __call__(self, ids):
        return linen.Dense(ROWS)(linen.Embed(ROWS, 8)(ids))


def init(key):
    return {"table": jax.random.normal(key, (ROWS, 8)), "out": jnp.ones((8, ROWS))}


def apply(params, ids):
    return params["table"][ids] @ params["out"]


def batch_of(ids) -> dict[str, np.ndarray]:
    return {"ids": np.full((8, 5), ids, np.int32)}


def own_loss(model, batch):
    return next_token(model(batch["ids"][:, :-1]), batch["ids"][:, 1:] % ROWS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [Own, OwnLinen(), (init, apply)])
@pytest.mark.parametrize("zero", [1, 3])
def test_a_table_of_any_model_is_found(model, precision, zero):
    plan = zerojax.make_plan(
        model, {"zero": zero}, example_batch=batch_of(0), loss=own_loss, precision=precision
    )
    (limit,) = plan.traced.index_limits["ids"]
    assert (limit.low, limit.high) == (-ROWS, ROWS)
    assert limit.window == (slice(None), slice(0, 4, 1)), "targets are not looked up"
    zerojax.shard_batch(plan, batch_of(ROWS - 1))
    last = batch_of(3)
    last["ids"][:, -1] = 99
    zerojax.shard_batch(plan, last)
    wrong = batch_of(3)
    wrong["ids"][6, 2] = ROWS
    with pytest.raises(ValueError, match=rf"holds {ROWS} at index \(6, 2\).*has {ROWS} rows"):
        zerojax.shard_batch(plan, wrong)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "inside",
    [
        lambda ids: jnp.clip(ids, 0, ROWS - 1),
        lambda ids: ids % ROWS,
        lambda ids: jnp.where(ids < ROWS, ids, 0),
        lambda ids: jnp.minimum(ids, ROWS - 1),
    ],
)
def test_what_the_model_does_about_them_itself_is_its_own_affair(inside):
    def loss(model, batch):
        return jnp.mean(model(inside(batch["ids"])) ** 2)

    plan = zerojax.make_plan(Own, {}, example_batch=batch_of(0), loss=loss, precision="fp32")
    assert not plan.traced.index_limits
    zerojax.shard_batch(plan, batch_of(99))


@pytest.mark.thorough
def test_train_says_it_before_there_is_a_nan():
    with pytest.raises(ValueError, match=r"batch\['ids'\] holds 99 .* table/embedding"):
        zerojax.train(Own, {"zero": 3}, [batch_of(99)], loss=own_loss, run_dir=None)
