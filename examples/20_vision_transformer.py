"""A vision transformer reads handwritten digits: ZeRO-3, augmentation on the host, accuracy.

The images are 1,797 digits of 8 x 8 pixels from the "Optical Recognition of Handwritten Digits"
data set (E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, CC BY 4.0), which come with
scikit-learn: `pip install '.[examples]'`. A batch is a function of the number of its step, so a
resumed run reads the same images with the same noise.
"""

import jax
import numpy as np
from flax import nnx
from sklearn.datasets import load_digits

import zerojax

jax.config.update("jax_num_cpu_devices", 8)

NUM_TRAINED, ROWS = 1500, 128
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))  # the others are held out
images = digits.images[order, ..., None].astype(np.uint8)  # [1797, 8, 8, 1], values 0 to 16
labels = digits.target[order].astype(np.int32)


class Block(nnx.Module):
    def __init__(self, width: int, num_heads: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class VisionTransformer(nnx.Module):
    """Classifies images of `size` x `size` pixels, cut into squares of `patch` x `patch`."""

    def __init__(self, rngs, *, width=64, layers=4, heads=4, size=8, patch=2, classes=10):
        num_patches = (size // patch) ** 2
        self.stem = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.patches = nnx.Conv(32, width, (patch, patch), strides=(patch, patch), rngs=rngs)
        positions = jax.random.normal(rngs.params(), (1, num_patches, width))
        self.positions = nnx.Param(0.5 * positions)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(num_patches * width, classes, rngs=rngs)

    def __call__(self, images):
        positions = self.positions[...]
        x = images.astype(positions.dtype) / 16 - 0.3  # uint8 to the dtype of the weights
        x = self.patches(nnx.gelu(self.stem(x)))
        x = x.reshape(len(x), -1, x.shape[-1]) + positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).reshape(len(x), -1))


def loss(model, batch):
    logits = model(batch["images"])
    total, weight = zerojax.losses.classification(logits, batch["labels"])
    right = (logits.argmax(-1) == batch["labels"]).sum()
    return total, weight, {"accuracy": (right, weight)}


def make_batch(step: int) -> dict[str, np.ndarray]:
    """Draws rows and changes each pixel by at most one level; a pure function of the step."""
    random = np.random.default_rng(step)
    rows = random.integers(0, NUM_TRAINED, ROWS)
    noise = random.integers(-1, 2, images[rows].shape)
    return {"images": np.clip(images[rows] + noise, 0, 16).astype(np.uint8), "labels": labels[rows]}


validation = [
    {"images": images[start : start + ROWS], "labels": labels[start : start + ROWS]}
    for start in range(NUM_TRAINED, len(images), ROWS)
]

if __name__ == "__main__":
    trainer = zerojax.train(
        VisionTransformer,
        {"data": 8, "zero": 3, "persistence_threshold": 0},
        make_batch,
        loss=loss,
        optimizer=zerojax.OptimizerConfig(learning_rate=2e-3, warmup_steps=20, weight_decay=0.05),
        steps=120,
        validation=validation,
        eval_every=60,
        run_dir=None,
    )
    result = trainer.evaluate()
    print(f"{result['accuracy']:.1%} of {result['weight']:.0f} held-out digits are read correctly")
    assert result["accuracy"] > 0.95
