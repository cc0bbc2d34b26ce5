"""A `flax.linen` network with batch normalization classifies handwritten digits, with ZeRO-3.

The module does not depend on zerojax. Its batch statistics are part of the state; each device
normalizes by those of its own rows. The 1,797 images of digits come with scikit-learn:
`pip install '.[examples]'`.
"""

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import zerojax

jax.config.update("jax_num_cpu_devices", 8)

digits = load_digits()
images = (digits.images[..., None] / 16).astype(np.float32)  # [1797, 8, 8, 1]
labels = digits.target.astype(np.int32)
NUM_TRAINED = 1500


class Classifier(nn.Module):
    """Two convolutions with batch normalization, then one linear layer."""

    @nn.compact
    def __call__(self, images, *, train):
        x = images
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


def loss(model, batch):
    """Computes the loss; `model` is the module bound to its variables."""
    logits = model(batch["images"], train=model.training)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def make_batch(step: int) -> dict[str, np.ndarray]:
    chosen = np.random.default_rng(step).integers(0, NUM_TRAINED, 128)
    return {"images": images[chosen], "labels": labels[chosen]}


trainer = zerojax.train(
    Classifier(),
    {"data": 8, "zero": 3, "persistence_threshold": 0},
    make_batch,
    loss=loss,
    optimizer=zerojax.adamw(3e-3),
    steps=100,
)
variables = trainer.to_model()  # the variables for `Classifier().apply`
assert set(variables) == {"params", "batch_stats"}

guesses = Classifier().apply(variables, images[NUM_TRAINED:], train=False).argmax(axis=1)
accuracy = (guesses == labels[NUM_TRAINED:]).mean()
print(f"{accuracy:.1%} of {len(guesses)} held-out digits are classified correctly")
assert accuracy > 0.9
