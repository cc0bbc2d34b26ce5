"""A loss over the whole batch: two views of an image find each other among all images.

SimCLR (arXiv:2002.05709) compares each view with the views of all other images of the batch. On
eight devices each holds an eighth of them; `zerojax.gather_batch` has the rows of all devices, so
that the loss is that of one device. The features are then judged by their nearest neighbours.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import zerojax

jax.config.update("jax_num_cpu_devices", 8)

ROWS, SHARPNESS = 256, 10.0
digits = load_digits()
images = digits.images.astype(np.float32) / 8 - 1  # [1797, 8, 8] in -1..1


class Encoder(nnx.Module):
    """A network that maps an image to a point on a sphere."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 256, rngs=rngs)
        self.second = nnx.Linear(256, 256, rngs=rngs)
        self.out = nnx.Linear(256, 32, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.first(images.reshape(len(images), -1)))
        x = self.out(nnx.relu(self.second(x)))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def view(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Moves each image by up to one pixel, and adds noise."""
    moved = [np.roll(x, random.integers(-1, 2, 2), (0, 1)) for x in images]
    return np.stack(moved) + random.normal(0, 0.3, images.shape).astype(np.float32)


def batches(step: int) -> dict[str, np.ndarray]:
    """Two views of random images, [256, 8, 8] each."""
    random = np.random.default_rng(step)
    chosen = images[random.choice(len(images), ROWS, replace=False)]
    return {"one": view(chosen, random), "other": view(chosen, random)}


def loss(model: Encoder, batch: dict) -> jax.Array:
    """Each view is to find the other view of its image among those of all images."""
    one, other = model(batch["one"]), model(batch["other"])
    labels = zerojax.row_numbers(one)  # where this device's rows are among all rows
    entropy = optax.softmax_cross_entropy_with_integer_labels
    found = entropy(SHARPNESS * one @ zerojax.gather_batch(other).T, labels)
    return jnp.mean(found + entropy(SHARPNESS * other @ zerojax.gather_batch(one).T, labels)) / 2


def accuracy(model: Encoder) -> float:
    """How often the nearest of the first 1000 images has the label of one of the others."""
    points = np.asarray(model(images))
    nearest = np.argmax(points[1000:] @ points[:1000].T, axis=-1)
    return float(np.mean(digits.target[nearest] == digits.target[1000:]))


if __name__ == "__main__":
    one = zerojax.make_mesh({}, devices=jax.devices()[:1])
    options = {"loss": loss, "optimizer": zerojax.adamw(2e-3), "run_dir": None}
    alone = zerojax.train(Encoder, one, batches, steps=1, **options)
    trainer = zerojax.train(Encoder, {"zero": 2}, batches, steps=200, **options)
    first = alone.history[0]["loss"], trainer.history[0]["loss"]
    print(f"loss of the first step on one device and on eight: {first[0]:.6f}, {first[1]:.6f}")
    found = accuracy(Encoder(nnx.Rngs(0))), accuracy(trainer.to_model())
    print(f"neighbours with the same label, before and after: {found[0]:.1%}, {found[1]:.1%}")
    assert abs(first[0] - first[1]) < 1e-5
    assert found[1] > 0.9
