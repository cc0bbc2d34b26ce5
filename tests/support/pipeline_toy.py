"""A small model written as embedding, layers and head, and its loss on one device.

Each block also looks at its microbatch (a row of numbers) and at a random key of its own, so that a
stage that works on another microbatch than it should gives other numbers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.pipeline.pipeline_passes import execute
from zerojax.pipeline.stage import StageWork
from zerojax.placement.state_layout import layer_rows
from zerojax.schedules import lower

WIDTH, ROWS, VOCAB = 6, 3, 11


def fold(key, number):
    """A small stand-in for `jax.random.fold_in`, which takes long to compile."""
    return key * jnp.uint32(1664525) + number.astype(jnp.uint32) * jnp.uint32(40503) + jnp.uint32(7)


def noise(key, shape):
    places = jnp.arange(np.prod(shape), dtype=jnp.uint32).reshape(shape)
    return jnp.sin((places + key % jnp.uint32(1000)).astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Toy:
    """tied: the head reads the embedding's table; counter: an integer travels along."""

    num_layers: int = 8
    tied: bool = True
    counter: bool = False
    remat: bool = False

    def init(self, seed=0):
        keys = jax.random.split(jax.random.key(seed), 4)
        blocks = {
            "kernel": 0.5 * jax.random.normal(keys[0], (self.num_layers, WIDTH, WIDTH)),
            "bias": 0.1 * jax.random.normal(keys[1], (self.num_layers, WIDTH)),
        }
        outer = {
            "table": jax.random.normal(keys[2], (VOCAB, WIDTH)),
            "temperature": jnp.float32(1.3),
        }
        if not self.tied:
            outer["head"] = jax.random.normal(keys[3], (VOCAB, WIDTH))
        return blocks, outer

    def embed(self, outer, extras, batch, key):
        x = outer["table"][batch["tokens"]]
        x = x * (1 + 0.1 * noise(fold(key, extras["embed count"]), x.shape))
        changes = {"embed count": extras["embed count"] + 1}
        return [x, jnp.int32(0)] if self.counter else [x], changes

    def layers(self, blocks, outer, extras, batch, key, rows, activations):
        x, *rest = activations

        def layer(carry, item):
            x, rest = carry
            kernel, bias, row = item
            count = extras["count"][row]
            factor = 1 + 0.1 * noise(fold(fold(key, row), count), x.shape)

            def block(x):
                y = jnp.tanh(x @ kernel + bias[None] + batch["shift"][:, None])
                return x + y / outer["temperature"] * factor

            y = jax.checkpoint(block, prevent_cse=False)(x) if self.remat else block(x)
            there = row >= 0
            rest = [i + there.astype(i.dtype) for i in rest]
            return (jnp.where(there, y, x), rest), count + 1

        (x, rest), counts = lax.scan(layer, (x, rest), (blocks["kernel"], blocks["bias"], rows))
        return [x, *rest], {"count": counts}

    def head(self, outer, extras, batch, key, activations):
        x, *rest = activations
        if rest:
            x = x * (rest[0] / self.num_layers)
        logits = x @ outer["table" if self.tied else "head"].T
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][:, None], 1)
        weight = jnp.sum(batch["weights"])
        loss = -jnp.sum(chosen[:, 0] * batch["weights"])
        return loss, ({"loss": loss, "weight": weight}, {})


def make_extras(toy):
    return {"count": jnp.arange(toy.num_layers, dtype=jnp.uint32), "embed count": jnp.uint32(3)}


def make_batch(num_microbatches, seed=1):
    keys = jax.random.split(jax.random.key(seed), 4)
    shape = (num_microbatches, ROWS)
    return {
        "tokens": jax.random.randint(keys[0], shape, 0, VOCAB),
        "targets": jax.random.randint(keys[1], shape, 0, VOCAB),
        "shift": 0.2 * jax.random.normal(keys[2], shape),
        "weights": jax.random.uniform(keys[3], shape),
    }


def microbatch(batch, key, index):
    return jax.tree.map(lambda x: x[index], batch), fold(key, index)


def plain(toy, blocks, outer, extras, batch, key):
    """((sums, extras), (gradients of blocks, of outer)) on one device, by jax.grad."""
    rows = jnp.arange(toy.num_layers)

    def loss_of(blocks, outer):
        state, total = extras, {"loss": jnp.float32(0), "weight": jnp.float32(0)}
        for index in range(len(batch["tokens"])):
            given = microbatch(batch, key, jnp.uint32(index))
            activations, embedded = toy.embed(outer, state, *given)
            activations, changed = toy.layers(blocks, outer, state, *given, rows, activations)
            _, (sums, _) = toy.head(outer, state, *given, activations)
            state = {**state, **embedded, **changed}
            total = jax.tree.map(jnp.add, total, sums)
        return total["loss"], (total, state)

    (_, aux), grads = jax.jit(jax.value_and_grad(loss_of, (0, 1), has_aux=True))(blocks, outer)
    return aux, grads


def build_pipelined(
    toy, schedule, layers, *, stash="residuals", alone=True, backward=True, axis=True
):
    """A function of (stored blocks, outer, extras, batch, key), and the rows of the blocks."""
    table = lower(schedule, stash=stash)
    stages = schedule.num_stages
    flat = layer_rows(schedule, layers)
    rows = np.asarray(flat, np.int32).reshape(stages, schedule.num_chunks, -1)
    names = frozenset(["table", "temperature"] if toy.tied else ["table", "temperature", "head"])

    def local(blocks, outer, extras, batch, key):
        work = StageWork(
            embed=lambda o, e, i: toy.embed(o, e, *microbatch(batch, key, i)),
            layers=lambda w, f, x, c: toy.layers(
                w["chunk"], w["outer"], c[0], *microbatch(batch, key, c[1]), f["rows"], x
            ),
            head=lambda o, e, i, x: toy.head(o, e, *microbatch(batch, key, i), x),
            embed_reads=frozenset(["table"]),
            layers_reads=frozenset(["temperature"]),
            head_reads=names - {"temperature"} - ({"table"} if not toy.tied else set()),
            embed_alone=alone,
            head_alone=alone,
        )
        found = execute(
            table,
            work,
            weights=blocks,
            fixed={},
            outer=outer,
            rows=rows,
            extras=extras,
            accumulate_dtype=jnp.float32,
            activation_spec=P(),
            backward=backward,
        )
        stage = lax.axis_index("stage")
        sums = lax.psum(found.sums, "stage")
        extras = {
            "embed count": lax.psum(jnp.where(stage == 0, found.extras["embed count"], 0), "stage"),
            "count": extras["count"] + lax.psum(found.extras["count"] - extras["count"], "stage"),
        }
        if not backward:
            return sums
        return (sums, extras), (found.chunks, lax.psum(found.outer, "stage"))

    return local, flat


def store(blocks, flat):
    """Blocks in the rows of the stages."""
    rows = np.asarray(flat)
    filled = lambda x: jnp.where((rows >= 0).reshape(-1, *[1] * (x.ndim - 1)), x[rows], 0)  # noqa: E731
    return jax.tree.map(filled, blocks)


def restore(blocks, flat):
    """The inverse of `store`."""
    rows = np.asarray(flat)
    order = np.argsort(np.where(rows >= 0, rows, len(rows)), kind="stable")[: (rows >= 0).sum()]
    return jax.tree.map(lambda x: x[order], blocks)
