"""A model without a framework: a pair of functions `(init, apply)` over any tree of arrays.

zerojax cannot see where `apply` uses a parameter, so ZeRO-3 gathers all parameters before `apply`
starts. So pairs of functions benefit only from stages 1 and 2. Modules (examples 02, 05, 11) are
gathered layer by layer.
"""

import jax
import jax.numpy as jnp
import numpy as np

import zerojax

jax.config.update("jax_num_cpu_devices", 8)


def init(key):
    first, second = jax.random.split(key)
    return {
        "first": jax.random.normal(first, (2, 64)),
        "second": jax.random.normal(second, (64, 2)) / 8,
    }


def apply(params, points):
    return jnp.sin(points @ params["first"]) @ params["second"]


def loss(model, batch):
    """Returns the classification loss of two spirals as (sum, weight), divided once globally."""
    logits = model(batch["points"])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], axis=1)
    return -chosen.sum(), chosen.size


def make_batch(step):
    rng = np.random.default_rng(step)
    labels = rng.integers(0, 2, 128)
    angle = rng.uniform(0, 6, 128)
    arms = angle + labels * np.pi
    points = (angle / 2)[:, None] * np.stack([np.cos(arms), np.sin(arms)], axis=1)
    return {"points": points.astype(np.float32), "labels": labels.astype(np.int32)}


trainer = zerojax.train(
    (init, apply),
    {"data": 8, "zero": 2},
    make_batch,
    loss=loss,
    optimizer=zerojax.adamw(3e-2, weight_decay=0.0),
    precision="fp32",
    steps=200,
)
params = trainer.to_model()
test = make_batch(10_000)
accuracy = (np.argmax(apply(params, test["points"]), axis=1) == test["labels"]).mean()
print(f"accuracy {accuracy:.2f}")
assert accuracy > 0.95
