"""Refusals of models, batches and optimizers as they are given; of updates outside of a run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import zerojax
from tests.support import torch_stand_in
from tests.support.refusals import Refusal, refused, table
from tests.support.small_models import Line
from zerojax.config import OptimizerConfig
from zerojax.models.losses import next_token
from zerojax.optim import matrices_by_shape
from zerojax.optim.ema import check_weights
from zerojax.optim.schedules import build_schedule

wrong_type = functools.partial(refused, error=TypeError)
X = {"x": np.ones((8, 4), np.float32)}


def mean(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]) ** 2)


def plan(model: Any = Line, batch: Any = None, loss: Any = mean, **options: Any) -> zerojax.Plan:
    return zerojax.make_plan(model, {}, example_batch=batch or X, loss=loss, **options)


def multiply(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["w"]


KEYS = jax.random.split(jax.random.key(0), 8)
PARAMS = {"w": jnp.ones((4, 4))}


def functions(**more: Any) -> zerojax.Plan:
    return plan((lambda key: {**PARAMS, **more}, multiply))


class Holding(nnx.Module):
    """A line with another variable."""

    def __init__(self, rngs: nnx.Rngs, value: Any, name: str = "more") -> None:
        self.out = nnx.Linear(4, 1, rngs=rngs)
        setattr(self, name, value)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


def holding(value: Any) -> zerojax.Plan:
    return plan(Holding(nnx.Rngs(0), value))


def keyed(key: str) -> zerojax.Plan:
    both = {"a": nnx.Dict({"b": nnx.Variable(jnp.ones(1))}), key: nnx.Variable(jnp.ones(1))}
    return holding(nnx.Dict(both))


class Separated(nnx.Module):
    """A language model whose method separates the texts of a row."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(8, 8, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self.embed(tokens))


class WithMethod(Separated):
    def loss(self, batch: Any) -> Any:
        return next_token(self(batch["tokens"]), batch["targets"])


TOKENS = np.ones((8, 4), np.int32)
PACKED = dict.fromkeys(("tokens", "targets", "segments"), TOKENS)


def packed(model: Any, loss: Any = zerojax.losses.next_token_of_call) -> zerojax.Plan:
    return plan(model, PACKED, loss)


def of_segments(model: Any, batch: Any) -> Any:
    return next_token(model(batch["tokens"]), batch["targets"])


def called(uses: bool) -> zerojax.Plan:
    loss = lambda model, batch: mean(model, batch) if uses else jnp.mean(batch["x"])  # noqa: E731
    return plan(linen.Dense(3), loss=loss)


MODELS = table(
    """
plan((PARAMS, multiply)) | dict | "lambda key: params"
  | plan((lambda key: PARAMS, multiply))
functions(name="x") | name 'x' | closure | functions()
holding(nnx.Intermediate((jnp.ones(2), jnp.ones(2)))) | Intermediate tuple | nnx.pop
  | holding(nnx.Intermediate(jnp.ones(2))) ; plan()
keyed("a/b") | more/a/b | rename | keyed("c")
called(False) | Dense | "model(...)" | called(True)
packed(Separated) | batch['segments'] | "loss(batch)" loss=
  | packed(WithMethod, None) ; packed(Separated, of_segments)
plan(batch={**X, "keys": KEYS}) | batch['keys'] | "jax.random.key_data(keys)" seed=
  | plan(batch={**X, "keys": jax.random.key_data(KEYS)}) ; plan()
plan(batch={"x": []}) | no | "[rows, ...]" | plan(batch={"x": np.ones((8, 4))})
plan(batch={**X, "scale": 2.0}) | batch['scale'] | "numpy.full(8, value)"
  | plan(batch={**X, "scale": np.full(8, 2.0)})
plan(loss=lambda model, x, y: 0.0) | <lambda> | one batch | plan()
""",
    (ValueError, TypeError),
)
IMPORTED = {"linen": linen, "np": np, "jnp": jnp, "nnx": nnx}


def take(call: str) -> None:
    eval(call, globals() | IMPORTED)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("row", MODELS)
def test_models_and_batches(row):
    MODELS[row].check(take)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({"place": "cuda:1"}, ".cpu()"), ({"layout": "sparse_coo"}, ".to_dense()")],
)
def test_tensors_of_torch_in_a_batch(options, remedy):
    given = {"x": torch_stand_in.tensor(X["x"], **options)}
    good = {"x": eval(f"batch['x']{remedy}", {"batch": given})}
    batch = lambda batch: plan(batch=batch)  # noqa: E731
    value = [*options.values()]
    Refusal(given, value, [f"batch['x']{remedy}"], [good], TypeError).check(batch)


def test_parameters_and_losses_of_torch():
    tensor, remedy = torch_stand_in.tensor(X["x"]), "tensor.detach().cpu().numpy()"
    good = [jnp.asarray(eval(remedy, {"tensor": tensor}))]
    own = lambda value: functions(more=value)  # noqa: E731
    Refusal(tensor, "'more'", [f"jax.numpy.asarray({remedy})"], good, TypeError).check(own)
    bad, loss = torch_stand_in.Module(), lambda loss: plan(loss=loss)
    Refusal(bad, "Module", "zerojax.losses optax", [mean], TypeError).check(loss)


def updated(tx: Any, *, params: Any = PARAMS, chained: bool = False) -> Any:
    """Takes a step outside of a run."""
    tx = optax.chain(tx) if chained else tx
    state = tx.init(PARAMS)
    given = () if params is None else (params,)
    return jax.eval_shape(lambda: tx.update(PARAMS, state, *given))


def groups() -> Any:
    return zerojax.adamw(1e-3, groups={"w": {"weight_decay": 0.1}})


def dimensions(params: Any) -> Any:
    return {"kernel": optax.contrib.MuonDimensionNumbers((0, 1), 2)}


def muon(dimensions: Any) -> Any:
    """What muon makes of an array with three dimensions."""
    params = {"kernel": jnp.ones((4, 4, 4))}
    return zerojax.muon(1e-3, dimensions=dimensions).init(params)


def scheduled(**options: Any) -> Any:
    return build_schedule(OptimizerConfig(**options), 10)


OPTIMIZERS = table(
    """
updated(zerojax.adam8bit(1e-3), params=None) | adam8bit | "update(gradients, state, params)"
  | updated(zerojax.adam8bit(1e-3))
updated(groups(), params=None) | groups | "update(gradients, state, params)" | updated(groups())
updated(zerojax.with_ema(zerojax.sgd(1e-3), 0.9), params=None) | ema
  | "update(gradients, state, params)" | updated(zerojax.with_ema(zerojax.sgd(1e-3), 0.9))
updated(zerojax.optim.one_bit_adam(1e-3, freeze_step=3)) | 1-bit | zerojax.train
  | plan(optimizer=zerojax.optim.one_bit_adam(1e-3, freeze_step=3))
zerojax.with_ema(1e-3, 0.9) | float | zerojax.adamw(3e-4) OptimizerConfig(ema_decay=...)
  | zerojax.with_ema(zerojax.adamw(3e-4), 0.9) ; OptimizerConfig(ema_decay=0.9)
check_weights("average") | 'average' | 'trained' 'ema' | check_weights($)
zerojax.optim.one_bit_adam(1e-3, freeze_step=1.5) | freeze_step=1.5 | number
  | zerojax.optim.one_bit_adam(1e-3, freeze_step=2)
muon(matrices_by_shape) | kernel 3 | dimensions= zerojax.muon | muon(dimensions)
scheduled(scaling="linear", base_batch=8) | scaling rows | learning_rate leave
  | scheduled(learning_rate=1e-3)
""",
    (ValueError, TypeError),
)
IMPORTED |= {"check_weights": check_weights, "matrices_by_shape": matrices_by_shape}


@pytest.mark.parametrize("row", OPTIMIZERS)
def test_optimizers(row):
    OPTIMIZERS[row].check(take)
