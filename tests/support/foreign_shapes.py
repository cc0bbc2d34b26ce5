"""Models in the shapes in which others write theirs, in our own words, and what all have in common.

Each stands for models of checkouts (`tests/support/foreign_checkouts.py`), which CI does not have.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

ROWS, LENGTH, VOCAB, WIDTH = 8, 8, 40, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForeignModel:
    """A model as a user brings it.

    Attributes:
      model: what `zerojax.make_plan` takes.
      batch: index of a step -> arrays of `ROWS` rows.
      loss: as a user writes it, a scalar.
      rolled: the layers that become loops: "NAME/FIRST..LAST" or "NAME_FIRST..LAST", each with the
        number of layers in a turn.
    """

    model: Any
    batch: Callable[[int], dict[str, np.ndarray]]
    loss: Callable[[Any, Any], jax.Array]
    rolled: Mapping[str, int]


def tokens(step: int) -> np.ndarray:
    """Random tokens without 0, which pads; int32 [ROWS, LENGTH]."""
    random = np.random.default_rng(step % 4)
    return random.integers(1, VOCAB, (ROWS, LENGTH)).astype(np.int32)


def words(step: int) -> dict[str, np.ndarray]:
    return {"words": tokens(step)}


def pictures(step: int, size: int = 16) -> dict[str, np.ndarray]:
    """Random pictures, float32 [ROWS, size, size, 3], and one of ten labels for each."""
    random = np.random.default_rng(step % 4)
    images = random.normal(size=(ROWS, size, size, 3)).astype(np.float32)
    return {"images": images, "labels": random.integers(0, 10, ROWS).astype(np.int32)}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(wide, labels).mean()


def next_word(logits: jax.Array, words: jax.Array) -> jax.Array:
    return cross_entropy(logits[:, :-1], words[:, 1:])


def causal_mask(words: jax.Array) -> jax.Array:
    """bool [rows, length, length]: what each word sees."""
    rows, length = words.shape
    return jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))


def places(words: jax.Array) -> jax.Array:
    """int32 [rows, length]: 0, 1, 2, ... in each row."""
    return jnp.broadcast_to(jnp.arange(words.shape[1]), words.shape)


def window_mask(words: jax.Array, window: int) -> jax.Array:
    """bool [rows, length, length]: each word sees itself and `window` - 1 before it."""
    return causal_mask(words) & jnp.triu(jnp.ones((words.shape[1],) * 2, bool), 1 - window)


# --- a decoder that keeps keys and values, made in the loss ---------------------------------------


class Kept(nnx.Module):
    """Keys and values of one layer, and how many are there."""

    def __init__(self, rows: int):
        self.keys = nnx.Cache(jnp.zeros((rows, LENGTH, WIDTH)))
        self.values = nnx.Cache(jnp.zeros((rows, LENGTH, WIDTH)))
        self.filled = nnx.Variable(jnp.zeros((), jnp.int32))

    def add(self, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = (0, self.filled[...], 0)
        self.keys.set_value(jax.lax.dynamic_update_slice(self.keys[...], keys, start))
        self.values.set_value(jax.lax.dynamic_update_slice(self.values[...], values, start))
        self.filled.set_value(self.filled[...] + keys.shape[1])
        return self.keys[...], self.values[...]


class Attention(nnx.Module):
    """One head; turns queries and keys by their places with a base of its own."""

    def __init__(self, *, rngs: nnx.Rngs, base: float = 1e4, scale: float = 1.0):
        def linear() -> nnx.Linear:
            return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

        self.query, self.key, self.value, self.out = linear(), linear(), linear(), linear()
        self.base, self.scale = base, scale

    def __call__(self, x: jax.Array, mask: jax.Array | None, kept: Kept | None = None) -> jax.Array:
        query, key, value = self._turned(self.query(x)), self._turned(self.key(x)), self.value(x)
        if kept is not None:
            key, value = kept.add(key, value)
        scores = jnp.einsum("btd,bsd->bts", query, key) * WIDTH**-0.5
        if mask is not None:
            scores = jnp.where(mask, scores, -1e30)
        return self.out(jax.nn.softmax(scores) @ value)

    def _turned(self, x: jax.Array) -> jax.Array:
        steps = self.base ** (-jnp.arange(WIDTH // 2) / (WIDTH // 2)) / self.scale
        angles = (jnp.arange(x.shape[1])[:, None] * steps[None])[None]
        first, second = jnp.split(x, 2, axis=-1)
        sine, cosine = jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)


class Block(nnx.Module):
    """Attention and a gated feed-forward part, each behind a norm."""

    def __init__(self, *, rngs: nnx.Rngs, base: float = 1e4, scale: float = 1.0):
        self.before, self.between = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = Attention(rngs=rngs, base=base, scale=scale)
        self.gate, self.up = (nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None, kept: Kept | None = None) -> jax.Array:
        x = x + self.attention(self.before(x), mask, kept)
        inner = self.between(x)
        return x + self.down(jax.nn.silu(self.gate(inner)) * self.up(inner))


class Decoder(nnx.Module):
    """Words to logits, through a list of blocks; each may see another part of the sequence."""

    def __init__(self, blocks: Callable[[], list[nnx.Module]], *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List(blocks())
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, words: jax.Array, run: Callable[..., jax.Array]) -> jax.Array:
        """run: (index, layer, x) -> x."""
        x = self.embed(words)
        for index, layer in enumerate(self.layers):
            x = run(index, layer, x)
        return self.embed.attend(self.norm(x))


def kept_keys() -> ForeignModel:
    """As bonsai's Qwen3: each layer writes into a cache that the loss makes."""

    def loss(model: Any, batch: Any) -> jax.Array:
        given = batch["words"]
        caches, mask = [Kept(given.shape[0]) for _ in range(6)], causal_mask(given)
        run = lambda index, layer, x: layer(x, mask, caches[index])  # noqa: E731
        return next_word(model(given, run), given)

    def build(rngs: nnx.Rngs) -> Decoder:
        return Decoder(lambda: [Block(rngs=rngs) for _ in range(6)], rngs=rngs)

    return ForeignModel(model=build, batch=words, loss=loss, rolled={"layers/0..5": 1})


def windows(every: int = 3, layers: int = 12) -> ForeignModel:
    """As bonsai's Gemma3: every third layer sees everything, and turns by another base."""

    def build(rngs: nnx.Rngs) -> Decoder:
        def block(index: int) -> Block:
            sees_all = index % every == every - 1
            return Block(rngs=rngs, base=1e6 if sees_all else 1e4, scale=8.0 if sees_all else 1.0)

        return Decoder(lambda: [block(index) for index in range(layers)], rngs=rngs)

    def loss(model: Any, batch: Any) -> jax.Array:
        given = batch["words"]
        near, all_before = window_mask(given, 4), causal_mask(given)

        def run(index: int, layer: Any, x: jax.Array) -> jax.Array:
            return layer(x, all_before if index % every == every - 1 else near)

        return next_word(model(given, run), given)

    # Masks, bases and scales are values that differ by layer: one layer in a turn.
    rolled = {f"layers/0..{layers - 1}": 1}
    return ForeignModel(model=build, batch=words, loss=loss, rolled=rolled)


class Recomputing(nnx.Module):
    """A layer that splits itself, to run under `jax.checkpoint`, as tunix's do."""

    def __init__(self, window: int | None, *, rngs: nnx.Rngs):
        self.window, self.block = window, Block(rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(self)

        def run(state: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, state).inside(x, mask)

        return jax.checkpoint(run)(state, x, mask)

    def inside(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        if self.window is not None:
            mask = mask & (jnp.triu(jnp.ones_like(mask), 1 - self.window) > 0)
        return self.block(x, mask)


def own_remat(pattern: tuple[int | None, ...] = (None,), layers: int = 6) -> ForeignModel:
    """As tunix's Llama3; with a pattern of windows as its Gemma3, whose sixth layers differ."""

    def build(rngs: nnx.Rngs) -> Decoder:
        kinds = [pattern[index % len(pattern)] for index in range(layers)]
        return Decoder(lambda: [Recomputing(kind, rngs=rngs) for kind in kinds], rngs=rngs)

    def loss(model: Any, batch: Any) -> jax.Array:
        mask = causal_mask(batch["words"])
        logits = model(batch["words"], lambda index, layer, x: layer(x, mask))
        return next_word(logits, batch["words"])

    rolled = {f"layers/0..{layers - 1}": len(pattern)}
    return ForeignModel(model=build, batch=words, loss=loss, rolled=rolled)


# --- pictures -------------------------------------------------------------------------------------


class Bottleneck(nnx.Module):
    """Three convolutions with norms; the first of a stage has a way around of its own."""

    def __init__(self, inside: int, outside: int, stride: int, *, rngs: nnx.Rngs):
        narrow = outside // 4
        self.narrow = nnx.Conv(inside, narrow, (1, 1), use_bias=False, rngs=rngs)
        self.across = nnx.Conv(narrow, narrow, (3, 3), stride, use_bias=False, rngs=rngs)
        self.wide = nnx.Conv(narrow, outside, (1, 1), use_bias=False, rngs=rngs)
        self.norms = nnx.List(
            nnx.BatchNorm(width, use_running_average=True, rngs=rngs)
            for width in (narrow, narrow, outside)
        )
        self.around = nnx.data(None)
        if inside != outside or stride > 1:
            self.around = nnx.Conv(inside, outside, (1, 1), stride, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        result = nnx.relu(self.norms[0](self.narrow(x)))
        result = nnx.relu(self.norms[1](self.across(result)))
        result = self.norms[2](self.wide(result))
        return nnx.relu(result + (x if self.around is None else self.around(x)))


class Stages(nnx.Module):
    """Pictures to one of ten labels, through stages of blocks that get wider."""

    def __init__(self, depths: tuple[int, ...], *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        widths = [8, *(16 * 2**stage for stage in range(len(depths)))]
        self.stages = nnx.List(
            nnx.List(
                Bottleneck(
                    widths[stage + (block > 0)], widths[stage + 1], 1 + (block == 0), rngs=rngs
                )
                for block in range(depth)
            )
            for stage, depth in enumerate(depths)
        )
        self.head = nnx.Linear(widths[-1], 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.head(x.mean(axis=(1, 2)))


def stages() -> ForeignModel:
    """As bonsai's ResNet: of each stage the blocks after the first become a loop."""
    return ForeignModel(
        model=lambda rngs: Stages((5, 6, 2), rngs=rngs),
        batch=pictures,
        loss=lambda model, batch: cross_entropy(model(batch["images"]), batch["labels"]),
        rolled={"stages/0/1..4": 1, "stages/1/1..5": 1},
    )


# --- linen ----------------------------------------------------------------------------------------


class LinenBlock(linen.Module):
    """Attention, perhaps to what an encoder gave, and a feed-forward part, with dropout."""

    sees_encoder: bool = False
    is_causal: bool = True

    @linen.compact
    def __call__(self, x: jax.Array, heard: jax.Array | None, is_still: bool) -> jax.Array:
        mask = linen.make_causal_mask(x[..., 0]) if self.is_causal else None
        x = self._attend(x, x, mask, is_still)
        if self.sees_encoder:
            x = self._attend(x, heard, None, is_still)
        inner = jax.nn.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x)))
        inner = linen.Dropout(0.1)(linen.Dense(WIDTH)(inner), deterministic=is_still)
        return x + inner

    def _attend(self, x: jax.Array, seen: Any, mask: Any, is_still: bool) -> jax.Array:
        attention = linen.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=is_still)
        return x + attention(linen.LayerNorm()(x), seen, mask=mask)


class LinenStack(linen.Module):
    """Layers under numbers alone ("0", "1", ...), as Hugging Face's, or behind a name.

    Attributes:
      name_of: "" or what stands before the number.
      is_recomputed: whether each layer runs under `linen.remat`.
      block: settings of `LinenBlock`.
    """

    name_of: str = ""
    is_recomputed: bool = False
    block: tuple[tuple[str, bool], ...] = ()

    @linen.compact
    def __call__(self, x: jax.Array, heard: jax.Array | None, is_still: bool) -> jax.Array:
        kind = linen.remat(LinenBlock, static_argnums=(3,)) if self.is_recomputed else LinenBlock
        for index in range(6):
            x = kind(name=f"{self.name_of}{index}", **dict(self.block))(x, heard, is_still)
        return x


class LinenLanguage(linen.Module):
    """Words to logits by the embedding itself, which is read from the variables."""

    is_recomputed: bool = False
    name_of: str = ""

    def setup(self) -> None:
        self.embed = linen.Embed(VOCAB, WIDTH)
        self.h = LinenStack(self.name_of, self.is_recomputed)
        self.norm = linen.LayerNorm()

    def __call__(self, words: jax.Array, is_still: bool) -> jax.Array:
        x = self.norm(self.h(self.embed(words), None, is_still))
        return x @ self.embed.variables["params"]["embedding"].T


def numbered(is_recomputed: bool = False, name_of: str = "") -> ForeignModel:
    """As Hugging Face's FlaxGPT2, FlaxBert with its checkpoints, and flax's LM1B."""
    return ForeignModel(
        model=LinenLanguage(is_recomputed, name_of),
        batch=words,
        loss=lambda model, batch: next_word(
            model(batch["words"], not model.training), batch["words"]
        ),
        rolled={f"h/{name_of}0..5": 1},
    )


class LinenTranslation(linen.Module):
    """An encoder and a decoder that share their embedding."""

    @linen.compact
    def __call__(self, words: jax.Array, targets: jax.Array, is_still: bool) -> jax.Array:
        embed = linen.Embed(VOCAB, WIDTH)
        encoder = LinenStack("encoderblock_", block=(("is_causal", False),), name="encoder")
        decoder = LinenStack("decoderblock_", block=(("sees_encoder", True),), name="decoder")
        heard = linen.LayerNorm()(encoder(embed(words), None, is_still))
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        return embed.attend(linen.LayerNorm()(decoder(embed(shifted), heard, is_still)))


def translation() -> ForeignModel:
    """As flax's WMT: two lists, the second of which sees the result of the first in all layers."""
    return ForeignModel(
        model=LinenTranslation(),
        batch=lambda step: {"words": tokens(step), "targets": tokens(step + 1)},
        loss=lambda model, batch: cross_entropy(
            model(batch["words"], batch["targets"], not model.training), batch["targets"]
        ),
        rolled={"encoder/encoderblock_0..5": 1, "decoder/decoderblock_0..5": 1},
    )


SHAPES: Mapping[str, Callable[[], ForeignModel]] = {
    "kept keys": kept_keys,
    "windows": windows,
    "own remat": own_remat,
    "own remat, windows": lambda: own_remat((4, 4, None), 12),
    "stages": stages,
    "numbers alone": numbered,
    "numbers alone, remat": lambda: numbered(True),
    "numbers behind a name": lambda: numbered(name_of="block_"),
    "encoder and decoder": translation,
}
