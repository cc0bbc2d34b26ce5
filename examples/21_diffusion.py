"""A diffusion model draws handwritten digits with the moving average of its weights.

The model predicts the noise in a noisy image (DDPM, arXiv:2006.11239), given the level of noise.
The loss draws noise and level of each row from a key that is made of a number in the batch, so the
draws do not depend on the number of devices. The images are those of example 20.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sklearn.datasets import load_digits

import zerojax

jax.config.update("jax_num_cpu_devices", 8)

LEVELS, ROWS = 100, 128
images = load_digits().images.astype(np.float32) / 8 - 1  # [1797, 8, 8] in -1..1
# The share of the image in the variance of a noisy image, by level: a cosine schedule.
KEPT = np.cos(np.linspace(0, 1.54, LEVELS + 1)[1:]).astype(np.float32) ** 2


class Block(nnx.Module):
    """A layer of a transformer, shifted by the level of noise."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.level = nnx.Linear(width, 4 * width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, level):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.silu(self.up(self.norm2(x)) + self.level(level)))


class Denoiser(nnx.Module):
    """Predicts the noise of an image; each line of pixels is a token."""

    def __init__(self, rngs: nnx.Rngs, *, width: int = 64, layers: int = 4, size: int = 8):
        self.level = nnx.Embed(LEVELS, width, rngs=rngs)
        self.lines = nnx.Linear(size, width, rngs=rngs)
        self.positions = nnx.Param(0.5 * jax.random.normal(rngs.params(), (1, size, width)))
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, size, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x, levels):
        level = self.level(levels)[:, None]
        x = self.lines(x) + self.positions[...]
        for block in self.blocks:
            x = block(x, level)
        return self.out(self.norm(x))


def draw_noise(seed):
    """Returns the level and the noise [8, 8] of one row."""
    first, second = jax.random.split(jax.random.key(seed))
    return jax.random.randint(first, (), 0, LEVELS), jax.random.normal(second, (8, 8))


def loss(model, batch):
    levels, noise = jax.vmap(draw_noise)(batch["seeds"])
    kept = jnp.asarray(KEPT)[levels][:, None, None]
    noisy = jnp.sqrt(kept) * batch["images"] + jnp.sqrt(1 - kept) * noise
    return zerojax.losses.mean_squared_error(model(noisy, levels), noise)


def make_batch(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    chosen = images[random.integers(0, len(images), ROWS)]
    return {"images": chosen, "seeds": random.integers(0, 2**32, ROWS, dtype=np.uint32)}


def draw(model: Denoiser, key: jax.Array, count: int) -> np.ndarray:
    """Returns images [count, 8, 8]: removes noise level by level, from noise alone."""
    kept, parts = jnp.asarray(KEPT), nnx.split(model)

    def remove(x, level):
        after, before = kept[level], jnp.where(level > 0, kept[level - 1], 1.0)
        clean = x - jnp.sqrt(1 - after) * nnx.merge(*parts)(x, jnp.full(count, level))
        clean = jnp.clip(clean / jnp.sqrt(after), -1, 1)
        share = after / before
        of_clean = jnp.sqrt(before) * (1 - share) / (1 - after)
        of_noisy = jnp.sqrt(share) * (1 - before) / (1 - after)
        spread = jnp.sqrt((1 - share) * (1 - before) / (1 - after))
        x = of_clean * clean + of_noisy * x
        return x + spread * jax.random.normal(jax.random.fold_in(key, level), x.shape), None

    noise = jax.random.normal(key, (count, 8, 8))
    return np.asarray(jax.lax.scan(remove, noise, jnp.arange(LEVELS)[::-1])[0])


def nearest(drawn: np.ndarray) -> float:
    """Returns the mean distance, per pixel, to the nearest training image that is not the same."""
    distances = np.sqrt(((drawn[:, None] - images[None]) ** 2).mean(axis=(2, 3)))
    return float(np.where(distances > 0, distances, np.inf).min(axis=1).mean())


if __name__ == "__main__":
    trainer = zerojax.train(
        Denoiser,
        {"data": 8, "zero": 3, "persistence_threshold": 0},
        make_batch,
        loss=loss,
        optimizer=zerojax.with_ema(zerojax.adamw(3e-3), 0.99),
        steps=240,
        run_dir=None,
    )
    drawn = draw(trainer.to_model(weights="ema"), jax.random.key(0), 64)
    for line in np.clip(np.concatenate(drawn[:8], axis=1) + 1, 0, 1.99):
        print("".join(" .:-=+*#%@"[int(5 * grey)] * 2 for grey in line))
    shuffled = np.random.default_rng(0).permuted(images[:64].ravel()).reshape(drawn.shape)
    near, real, other = nearest(drawn), nearest(images[:64]), nearest(shuffled)
    print(f"distance to training images: {near:.2f}; real {real:.2f}, shuffled pixels {other:.2f}")
    assert real < near < 0.5 < other
