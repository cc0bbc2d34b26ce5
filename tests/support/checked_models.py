"""Losses and models that `zerojax.check` has to tell apart: right ones, and each known fault."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import zerojax

ROWS = 16


def batch(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    x = random.normal(size=(ROWS, 5)).astype(np.float32)
    mask = np.ones(ROWS, np.float32)
    mask[1 : ROWS // 2 : 2] = 0.0  # each piece has rows that count, but not as many
    return {"x": x, "y": np.sin(x[:, :3]), "mask": mask}


def init(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {
        "first": jax.random.normal(first, (5, 7)) * 0.4,
        "last": jax.random.normal(second, (7, 3)) * 0.4,
        "scale": jnp.ones(()),
    }


def apply(params: dict, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["first"]) @ params["last"] * params["scale"]


PAIR = init, apply


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, gradient: (jnp.clip(gradient, -0.01, 0.01),))


def errors(model: Any, batch: dict) -> jax.Array:
    return (model(batch["x"]) - batch["y"]) ** 2


def mean(model, batch):
    return jnp.mean(errors(model, batch))


def pair(model, batch):
    return jnp.sum(errors(model, batch)), batch["x"].shape[0]


def picks_by_row_number(model, batch):
    """Numbers of rows, as in an index, are right: each device has its own."""
    rows, labels = jnp.arange(batch["x"].shape[0]), jnp.argmax(batch["y"], axis=1)
    return -jnp.mean(jax.nn.log_softmax(model(batch["x"]))[rows, labels])


def plain_sum(model, batch):
    return jnp.sum(errors(model, batch))


def sum_and_one(model, batch):
    return jnp.sum(errors(model, batch)), 1.0


def mean_and_count(model, batch):
    return jnp.mean(errors(model, batch)), batch["x"].shape[0]


def sum_and_decay(model, batch):
    total = jnp.sum(errors(model, batch))
    return total + jnp.sum(model.params["first"] ** 2), batch["x"].shape[0]


def masked_mean(model, batch):
    rows = jnp.mean(errors(model, batch), axis=1)
    return jnp.sum(rows * batch["mask"]) / jnp.sum(batch["mask"])


def centred(model, batch):
    y = model(batch["x"])
    y = y - y.mean(0, keepdims=True)
    return jnp.mean((y - batch["y"]) ** 2)


def one_row_decides(model, batch):
    y = model(batch["x"])
    y = jax.lax.cond(batch["x"][0, 0] > 0, lambda: y, lambda: 2 * y)
    return jnp.mean((y - batch["y"]) ** 2)


def contrastive(model, batch):
    y = model(batch["x"])
    return jnp.mean(jax.nn.logsumexp(y @ y.T, axis=1))


def pairwise_distances(model, batch):
    y = model(batch["x"])
    return jnp.mean(jnp.exp(-jnp.sum((y[:, None] - y[None]) ** 2, axis=-1)))


def contrastive_in_groups(model, batch):
    """The remedy: groups of four rows, which no mesh cuts."""

    def loss_of_group(x):
        y = model(x)
        return jnp.mean(jax.nn.logsumexp(y @ y.T, axis=1))

    return jnp.mean(jax.vmap(loss_of_group)(batch["groups"]))


def root(model, batch):
    return jnp.sqrt(jnp.mean(errors(model, batch)))


def balanced(model, batch):
    y = model(batch["x"])
    share = jax.nn.softmax(y).mean(0)
    used = (y > 0).astype(jnp.float32).mean(0)
    return jnp.mean((y - batch["y"]) ** 2) + 0.1 * jnp.sum(share * used)


def balanced_over_batch(model, batch):
    y = model(batch["x"])
    share = zerojax.batch_mean(jax.nn.softmax(y).mean(0))
    used = zerojax.batch_mean((y > 0).astype(jnp.float32).mean(0))
    return jnp.mean((y - batch["y"]) ** 2) + 0.1 * jnp.sum(share * used)


def normalised_over_batch(model, batch):
    """Inside of a loop, by sums and their number, and what is made of them for each row."""

    def layer(x, _):
        rows = zerojax.batch_sum(jnp.float32(x.shape[0]))
        mean = zerojax.batch_sum(x.sum(0, keepdims=True)) / rows
        return jnp.tanh(x - mean), None

    y, _ = jax.lax.scan(layer, model(batch["x"]), None, length=2)
    return jnp.sum((y - batch["y"]) ** 2), batch["x"].shape[0]


def balanced_and_centred(model, batch):
    """One coupling is over the batch, and another is not."""
    y = model(batch["x"])
    y = y - y.mean(0, keepdims=True)
    return balanced_over_batch(model, batch) + jnp.mean((y - batch["y"]) ** 2)


def sum_of_means(model, batch):
    share = zerojax.batch_sum(jax.nn.softmax(model(batch["x"])).mean(0))
    return jnp.mean(errors(model, batch)) + jnp.sum(share**2)


def half_of_it_over_batch(model, batch):
    y = model(batch["x"])
    share = zerojax.batch_mean(jax.nn.softmax(y).mean(0))
    used = (y > 0).astype(jnp.float32).mean(0)
    return jnp.mean((y - batch["y"]) ** 2) + 0.1 * jnp.sum(jnp.exp(used) * share)


def clipping(model, batch):
    return jnp.mean((clipped(model(batch["x"])) - batch["y"]) ** 2)


def clipping_under_own_weight(model, batch):
    """The weight is known after the forward pass alone, so rules see gradients of the sum."""
    y = clipped(model(batch["x"]))
    counted = jax.lax.stop_gradient(y > 0)
    return jnp.sum(jnp.where(counted, (y - batch["y"]) ** 2, 0)), jnp.sum(counted)


def weight_of_parameters(model, batch):
    scale = jax.nn.softplus(model.params["scale"])
    return jnp.sum(errors(model, batch)) * scale, scale**2 * batch["x"].shape[0]


RIGHT = [mean, pair, picks_by_row_number, balanced_over_batch, normalised_over_batch]
"""What the forward pass shows of them is right; `clipping` trains right, too."""
WRONG = {
    plain_sum: ("sum", "jnp.sum(errors"),
    sum_and_one: ("sum", "jnp.sum(errors"),
    mean_and_count: ("sum", "jnp.mean(errors"),
    sum_and_decay: ("sum", 'total + jnp.sum(model.params["first"]'),
    masked_mean: ("uneven_mean", 'jnp.sum(rows * batch["mask"]) / '),
    centred: ("coupled_rows", "y = y - y.mean(0"),
    one_row_decides: ("coupled_rows", "jax.lax.cond"),
    contrastive: ("coupled_rows", "y @ y.T"),
    pairwise_distances: ("coupled_rows", "y[:, None] - y[None]"),
    root: ("coupled_rows", "jnp.sqrt"),
    balanced: ("auxiliary_loss", "jnp.sum(share * used)"),
    balanced_and_centred: ("coupled_rows", "y = y - y.mean(0"),
    sum_of_means: ("coupled_rows", "zerojax.batch_sum("),
    half_of_it_over_batch: ("coupled_rows", "jnp.exp(used)"),
}
"""loss: (kind of the reason, a part of the line that it names). What the forward pass shows."""


class Seen(nnx.Variable):
    pass


class Counting(nnx.Module):
    """Counts rows, as integers or as a float, and calls."""

    def __init__(self, kind: str, rngs: nnx.Rngs):
        self.linear = nnx.Linear(5, 3, rngs=rngs)
        self.seen = Seen(jnp.int32(0) if kind == "integers" else jnp.float32(0))
        self.calls = Seen(jnp.int32(0))

    def __call__(self, x):
        count = jnp.sum(x[:, 0] > 0).astype(self.seen[...].dtype)
        self.seen[...] = self.seen[...] + count
        self.calls[...] = self.calls[...] + 1
        return self.linear(x)


class Iterating(nnx.Module):
    """A norm that each pass brings closer, as spectral normalisation does."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(5, 3, rngs=rngs)
        self.direction = Seen(jnp.ones(3) / jnp.sqrt(3))

    def __call__(self, x):
        kernel = self.linear.kernel[...]
        moved = kernel.T @ (kernel @ self.direction[...])
        self.direction[...] = jax.lax.stop_gradient(moved / jnp.linalg.norm(moved))
        return self.linear(x) / jnp.linalg.norm(kernel @ self.direction[...])


class LastSeen(nnx.Module):
    """Keeps an integer of the batch that is no count."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(5, 3, rngs=rngs)
        self.most = Seen(jnp.int32(0))

    def __call__(self, x):
        self.most[...] = jnp.max(jnp.abs(100 * x)).astype(jnp.int32)
        return self.linear(x)


class Normalised(nnx.Module):
    """Batch norm and dropout."""

    def __init__(self, rate: float, rngs: nnx.Rngs):
        self.first = nnx.Linear(5, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if rate == 0 else nnx.LayerNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))
