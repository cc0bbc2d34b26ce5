"""A `flax.linen` model, unchanged, under ZeRO-3; batch statistics are carried along.

The loss gets the module bound to its variables, so that it is called without naming them.
"""

import flax.linen as nn
import jax
import numpy as np

import zerojax

jax.config.update("jax_num_cpu_devices", 8)


class Classifier(nn.Module):
    """A small convolutional network with batch normalisation."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(16, (3, 3))(images)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        x = nn.Conv(32, (3, 3), strides=2)(x)
        return nn.Dense(10)(nn.relu(x).mean(axis=(1, 2)))


def make_batch(step: int) -> dict[str, np.ndarray]:
    """Ten kinds of stripes under noise."""
    rng = np.random.default_rng(step)
    labels = rng.integers(0, 10, 64).astype(np.int32)
    waves = np.sin(np.arange(12) * (labels[:, None] + 1) / 4)
    images = waves[:, :, None, None] + rng.normal(0, 0.3, (64, 12, 12, 1))
    return {"images": images.astype(np.float32), "labels": labels}


def loss(model, batch):
    logits = model(batch["images"])
    picked = jax.nn.log_softmax(logits)[np.arange(len(logits)), batch["labels"]]
    return -picked.mean()


trainer = zerojax.train(
    Classifier(),
    {"data": 8, "zero": 3, "persistence_threshold": 0},
    make_batch,
    loss=loss,
    optimizer=zerojax.adamw(1e-2),
    precision="fp32",
    steps=60,
)
variables = trainer.to_model()
print(jax.tree.map(np.shape, variables))
print(f"loss {trainer.history[0]['loss']:.3f} -> {trainer.metrics['loss']:.3f}")
assert set(variables) == {"params", "batch_stats"}
assert trainer.metrics["loss"] < 0.3 * trainer.history[0]["loss"]
