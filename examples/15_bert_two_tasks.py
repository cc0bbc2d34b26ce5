"""One BERT encoder with heads for two tasks, trained together with ZeRO-3.

The first task classifies each letter of a text: vowel, consonant or neither. The second classifies
a whole text: whether it contains a word in capitals, such as the name of a speaker. Every batch has
rows of both tasks; a row has weight 0 in the other task. The loss of each task is a sum and a
weight, divided once over all devices, so that the weights of the tasks do not depend on how the
batch is divided.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import zerojax
from zerojax.data import as_source
from zerojax.zoo import Bert, BertConfig

jax.config.update("jax_num_cpu_devices", 4)

ROWS, LETTERS = 32, 32
KINDS = np.full(256, 2)  # neither
KINDS[np.frombuffer(b"aeiouAEIOU", np.uint8)] = 0
KINDS[[x for x in range(256) if chr(x).isascii() and chr(x).isalpha() and KINDS[x]]] = 1
WEIGHTS = {"letters": 1.0, "capitals": 0.5}

config = BertConfig(vocab_size=256, max_seq_len=LETTERS, num_layers=2, num_heads=4, embed_dim=32)
text, validation, _ = as_source(None, seq_len=LETTERS, global_batch_size=ROWS)


class TwoTasks(nnx.Module):
    """An encoder with a head for letters, and one for the mean over letters."""

    def __init__(self, rngs):
        self.encoder = Bert(config, rngs=rngs)
        self.letters = nnx.Linear(config.embed_dim, 3, rngs=rngs)
        self.capitals = nnx.Linear(config.embed_dim, 2, rngs=rngs)

    def __call__(self, tokens):
        hidden = self.encoder.hidden(tokens)
        return self.letters(hidden), self.capitals(hidden.max(axis=1))


def batch_of(source, step):
    """Returns rows of text with labels; even rows have the first task, odd rows the second."""
    tokens = source.batch(step)["tokens"]
    is_capital = (tokens >= ord("A")) & (tokens <= ord("Z"))
    return {
        "tokens": tokens,
        "kinds": KINDS[tokens].astype(np.int32),
        "has_capitals": (is_capital[:, 1:] & is_capital[:, :-1]).any(1).astype(np.int32),
        "is_second": np.arange(len(tokens)) % 2,
    }


def loss(model, batch):
    """Returns (sum, weight) of both tasks with their weights, and each task's loss as a metric."""
    letters, capitals = model(batch["tokens"])
    second = batch["is_second"].astype(jnp.float32)
    losses = {
        # The mean over a row's letters, so that each row has one term in both tasks.
        "letters": (cross_entropy(letters, batch["kinds"]).mean(1), 1 - second),
        "capitals": (cross_entropy(capitals, batch["has_capitals"]), second),
    }
    sums = {task: (jnp.sum(x * rows), jnp.sum(rows)) for task, (x, rows) in losses.items()}
    total, weight = (sum(WEIGHTS[task] * pair[i] for task, pair in sums.items()) for i in (0, 1))
    return total, weight, sums


def cross_entropy(logits, labels):
    """Computes the cross-entropy over the last axis, in float32."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def train(mesh):
    return zerojax.train(
        TwoTasks,
        mesh,
        lambda step: batch_of(text, step),
        loss=loss,
        optimizer=zerojax.adamw(3e-3),
        precision="fp32",
        log=zerojax.LogConfig(every=1, console="quiet"),
        steps=40,
        run_dir=None,
    )


sharded = train(zerojax.MeshConfig(data=4, zero=3, persistence_threshold=0))
alone = train(zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1]))

start = sharded.history[0]
last = sharded.evaluate([batch_of(validation, step) for step in range(8)])
for task in WEIGHTS:
    print(f"{task:9} {start[task]:.3f} at the first step, {last[task]:.3f} on text not seen")
whole = (last["letters"] + 0.5 * last["capitals"]) / 1.5
assert len(sharded.history) == len(alone.history) == 40
difference = max(
    abs(ours["loss"] - theirs["loss"])
    for ours, theirs in zip(sharded.history, alone.history, strict=True)
)
print(f"ZeRO-3 on four devices and one device: losses differ by {difference:.1e} at most")

assert abs(last["loss"] - whole) < 1e-5  # as many rows of both, weighted as written above
assert last["letters"] < 0.1
assert last["capitals"] < 0.4
assert difference < 4e-6
