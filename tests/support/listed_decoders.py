"""Models whose layers a Python loop calls, in the ways that people write them.

None knows zerojax. A style is how its layers are made and how the loop over them is written.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.models.losses import next_token

DROPPED = 0.1
Layers = Sequence[Any]
Flow = tuple[jax.Array, jax.Array | float]
"""What a loop over layers gives: activations [rows, length, width], and the sum of other losses."""


def example_batch(rows: int = 4, length: int = 8, vocab: int = 32) -> dict[str, jax.Array]:
    """Random tokens and what follows them: int32 [rows, length] each."""
    tokens = jax.random.randint(jax.random.key(1), (rows, length + 1), 0, vocab, jnp.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


class RootMeanSquare(nnx.Module):
    """Divides by the root mean square and multiplies by `offset` plus a learned scale [width]."""

    def __init__(self, width: int, *, offset: float = 0.0, rngs: nnx.Rngs):
        self.offset = offset
        self.scale = nnx.Param(jnp.full((width,), 1 - offset) + 0.1 * rngs.params.normal((width,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        scale = self.offset + self.scale[...] if self.offset else self.scale[...]
        return normed * scale[None, None]


def causal(length: int, window: int | None = None) -> jax.Array:
    """Which keys a query sees: bool [1, 1, length, length]; those of the last `window` places."""
    behind = jnp.arange(length)[:, None] - jnp.arange(length)[None]
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return seen[None, None]


def rotate(x: jax.Array) -> jax.Array:
    """x [rows, length, heads, size], each pair of numbers turned by an angle of its place."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 100.0 ** (jnp.arange(half)[None] / half)
    sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def drop(x: jax.Array, key: jax.Array | None) -> jax.Array:
    """x with a tenth of its numbers set to 0, or as it is without a key."""
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - DROPPED, x.shape), x / (1 - DROPPED), 0.0)


class Block(nnx.Module):
    """Causal attention of two heads, and an MLP."""

    def __init__(
        self,
        width: int,
        rngs: nnx.Rngs,
        *,
        times: int = 2,
        norm: Callable[..., Any] = RootMeanSquare,
        activation: Callable[[jax.Array], jax.Array] = nnx.gelu,
    ):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.before_attention, self.before_mlp = norm(width, rngs=rngs), norm(width, rngs=rngs)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, times * width), linear(times * width, width)
        self.activation = activation

    def attend(
        self, x: jax.Array, mask: jax.Array | None = None, first: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """(result [rows, length, width], values [rows, length, 2, size]); `first`: added values."""
        rows, length, width = x.shape
        joined = self.qkv(self.before_attention(x)).reshape(rows, length, 2, -1)
        query, key, value = jnp.split(joined, 3, -1)
        value = value if first is None else 0.5 * (value + first)
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(query), rotate(key)) / (width // 2) ** 0.5
        scores = jnp.where(causal(length) if mask is None else mask, scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return self.out(mixed.reshape(x.shape)), value

    def mlp(self, x: jax.Array) -> jax.Array:
        return self.down(self.activation(self.up(self.before_mlp(x))))

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        scale: float | None = None,
    ) -> jax.Array:
        attended = drop(self.attend(x, mask)[0], key)
        x = x + (attended if scale is None else attended * scale)
        return x + self.mlp(x)


class WithDropout(Block):
    def __init__(self, width: int, rngs: nnx.Rngs):
        super().__init__(width, rngs)
        self.dropout = nnx.Dropout(DROPPED, rngs=rngs)

    def mlp(self, x: jax.Array) -> jax.Array:
        return self.dropout(super().mlp(x))


class Gated(Block):
    """Mixes two MLPs by a gate, which has a loss of its own."""

    def __init__(self, width: int, rngs: nnx.Rngs, **changes: Any):
        super().__init__(width, rngs, **changes)
        self.gate = nnx.Linear(width, 2, rngs=rngs)
        self.other = nnx.Linear(width, width, rngs=rngs)

    def mlp(self, x: jax.Array) -> jax.Array:
        shares = jax.nn.softmax(self.gate(x))
        return shares[..., :1] * super().mlp(x) + shares[..., 1:] * jnp.tanh(self.other(x))

    def unbalance(self, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.softmax(self.gate(x)) ** 2)


class WithShared(Block):
    """Adds what a projection gives that all layers have in common."""

    def __init__(self, width: int, rngs: nnx.Rngs, shared: nnx.Linear):
        super().__init__(width, rngs)
        self.shared = shared

    def mlp(self, x: jax.Array) -> jax.Array:
        return super().mlp(x) + jnp.tanh(self.shared(x))


class Crossed(Block):
    """A layer of a decoder that also attends to what an encoder gave."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        super().__init__(width, rngs)
        self.query, self.keys = (
            nnx.Linear(width, width, rngs=rngs),
            nnx.Linear(width, width, rngs=rngs),
        )

    def cross(self, x: jax.Array, memory: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqd,bkd->bqk", self.query(x), self.keys(memory))
        return self(x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), memory))


def scaled_backwards(number: float) -> Callable[[jax.Array], jax.Array]:
    """A tanh whose derivative is `number`; each call of this factory makes another rule."""

    @jax.custom_vjp
    def activation(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    activation.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * number,))
    return activation


def in_turn(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    for layer in layers:
        x = layer(x)
    return x, 0.0


def with_folded_keys(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    for index, layer in enumerate(layers):
        x = layer(x, key=jax.random.fold_in(key, index))
    return x, 0.0


def with_split_keys(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    for layer, own in zip(layers, jax.random.split(key, len(layers)), strict=True):
        x = layer(x, key=own)
    return x, 0.0


def with_chained_keys(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    for layer in layers:
        key, own = jax.random.split(key)
        x = layer(x, key=own)
    return x, 0.0


def scaled_by_layer(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    for index, layer in enumerate(layers):
        x = layer(x, scale=1.0 / (index + 1))
    return x, 0.0


def windows_in_turn(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    full, near = causal(x.shape[1]), causal(x.shape[1], window=3)
    for index, layer in enumerate(layers):
        x = layer(x, full if index % 2 else near)
    return x, 0.0


def checkpointed(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    for layer in layers:
        x = jax.checkpoint(lambda x, layer=layer: layer(x))(x)
    return x, 0.0


def checkpointed_with_keys(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    for index, layer in enumerate(layers):
        own = jax.random.fold_in(key, index)
        x = jax.checkpoint(lambda x, own, layer=layer: layer(x, key=own))(x, own)
    return x, 0.0


def checkpointed_with_numbers(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    """Numbers that differ by layer stand inside of the checkpoint's program."""
    for index, layer in enumerate(layers):
        call = lambda x, layer=layer, index=index: layer(  # noqa: E731
            x, key=jax.random.fold_in(key, index), scale=1.0 / (index + 1)
        )
        x = jax.checkpoint(call)(x)
    return x, 0.0


def in_turn_with_remat(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    call = nnx.remat(lambda layer, x: layer(x))
    for layer in layers:
        x = call(layer, x)
    return x, 0.0


def attention_checkpointed(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    for layer in layers:
        x = x + jax.checkpoint(lambda x, layer=layer: layer.attend(x)[0])(x)
        x = x + layer.mlp(x)
    return x, 0.0


def summing_losses(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    total = 0.0
    for layer in layers:
        x = layer(x)
        total = total + layer.unbalance(x)
    return x, total


def listing_losses(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    losses = []
    for layer in layers:
        x = layer(x)
        losses.append(layer.unbalance(x))
    return x, jnp.sum(jnp.stack(losses))


def reusing_first_values(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    first = None
    for layer in layers:
        attended, values = layer.attend(x, first=first)
        first = values if first is None else first
        x = x + attended
        x = x + layer.mlp(x)
    return x, 0.0


def many_at_once(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    """First values, keys, windows and a list of losses in one loop."""
    first, losses = None, []
    for index, layer in enumerate(layers):
        mask = causal(x.shape[1], window=2 + index % 2)
        attended, values = layer.attend(x, mask, first)
        first = values if first is None else first
        x = x + drop(attended, jax.random.fold_in(key, index))
        x = x + layer.mlp(x)
        losses.append(layer.unbalance(x))
    return x, jnp.sum(jnp.stack(losses))


def with_skips(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    """A U-net: each layer of the second half adds what its counterpart of the first half took."""
    half, kept = len(layers) // 2, []
    for layer in layers[:half]:
        kept.append(x)
        x = layer(x)
    for layer in layers[half:]:
        x = layer(x + kept.pop())
    return x, 0.0


def interleaved(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    """The attention of all layers runs before the MLP of the first."""
    for layer in layers:
        x = x + layer.attend(x)[0]
    for layer in layers:
        x = x + layer.mlp(x)
    return x, 0.0


def with_callbacks(layers: Layers, x: jax.Array, key: jax.Array) -> Flow:
    for layer in layers:
        x = layer(x)
        jax.debug.callback(lambda mean: None, jnp.mean(x))
    return x, 0.0


def varying(changes: Callable[[int], dict[str, Any]], kind: Callable[..., Any] = Block) -> Any:
    """Layers of one kind, whose further settings depend on their number."""
    return lambda width, rngs, count: [
        kind(width, rngs, **changes(index)) for index in range(count)
    ]


def each(kind: Callable[..., Any] = Block, **changes: Any) -> Any:
    """Layers of one kind and one setting."""
    return varying(lambda index: changes, kind)


_ALIKE = each()


@dataclasses.dataclass(frozen=True)
class Style:
    """How layers are made, and how the loop over them is written.

    Attributes:
      loop: function(layers, activations [rows, length, width], key) -> `Flow`.
      make: function(width, random streams, number of layers) -> layers.
      is_noisy: whether the loop uses its key.
    """

    loop: Callable[[Layers, jax.Array, jax.Array], Flow] = in_turn
    make: Callable[[int, nnx.Rngs, int], Layers] = _ALIKE
    is_noisy: bool = False


def _sharing(width: int, rngs: nnx.Rngs, count: int) -> Layers:
    shared = nnx.Linear(width, width, rngs=rngs)
    return [WithShared(width, rngs, shared) for _ in range(count)]


def _tied(width: int, rngs: nnx.Rngs, count: int) -> Layers:
    pair = [Block(width, rngs) for _ in range(2)]
    return [pair[index % 2] for index in range(count)]


def _in_two_sizes(index: int) -> dict[str, int]:
    return {"times": 2 + index % 2}


def _dense_first(index: int) -> dict[str, int]:
    return {"times": 2 if index else 3}


_ONE_PLUS = functools.partial(RootMeanSquare, offset=1.0)
_STYLES = {
    "plain": Style(),
    "one_plus": Style(make=each(norm=_ONE_PLUS)),
    "relu": Style(make=each(activation=nnx.relu)),
    "layernorm": Style(make=each(norm=nnx.LayerNorm)),
    "batchnorm": Style(make=each(norm=nnx.BatchNorm)),
    "fold_in": Style(with_folded_keys, is_noisy=True),
    "split_keys": Style(with_split_keys, is_noisy=True),
    "key_chain": Style(with_chained_keys, is_noisy=True),
    "nnx_dropout": Style(make=each(WithDropout)),
    "scale": Style(scaled_by_layer),
    "windows": Style(windows_in_turn),
    "checkpoint": Style(checkpointed),
    "checkpoint_fold_in": Style(checkpointed_with_keys, is_noisy=True),
    "checkpoint_numbers": Style(checkpointed_with_numbers, is_noisy=True),
    "nnx_remat": Style(in_turn_with_remat),
    "remat_of_attention": Style(attention_checkpointed),
    "checkpoint_period": Style(checkpointed, varying(_in_two_sizes)),
    "period": Style(make=varying(_in_two_sizes)),
    "period_fold_in": Style(with_folded_keys, varying(_in_two_sizes), is_noisy=True),
    "gate_sum": Style(summing_losses, each(Gated)),
    "gate_list": Style(listing_losses, each(Gated)),
    "dense_first": Style(make=varying(_dense_first)),
    "value_residual": Style(reusing_first_values),
    "mix": Style(
        many_at_once, varying(_dense_first, functools.partial(Gated, norm=_ONE_PLUS)), is_noisy=True
    ),
    "same_rules": Style(make=varying(lambda index: {"activation": scaled_backwards(0.5)})),
    "other_rules": Style(make=varying(lambda index: {"activation": scaled_backwards(0.5 + index)})),
    "shared_projection": Style(make=_sharing),
    "tied": Style(make=_tied),
    "unet": Style(with_skips),
    "interleaved": Style(interleaved),
    "effects": Style(with_callbacks),
}


class ListedDecoder(nnx.Module):
    """A decoder with a tied head whose layers lie in a list; see `Style`."""

    def __init__(self, style: Style, layers: int, width: int, vocab: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.layers = nnx.List(style.make(width, rngs, layers))
        self.norm = RootMeanSquare(width, rngs=rngs)
        self.noise = nnx.Rngs(noise=rngs.noise()) if style.is_noisy else None
        self.loop = style.loop

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key = self.noise.noise() if self.noise is not None else jax.random.key(0)
        x, further = self.loop(self.layers, self.embed(batch["tokens"]), key)
        total, weight = next_token(self.embed.attend(self.norm(x)), batch["targets"])
        return total + 0.01 * further, weight


class EncoderDecoder(nnx.Module):
    """Two lists: the layers of the second all read what the first gave."""

    def __init__(self, layers: int, width: int, vocab: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.encoder = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.decoder = nnx.List([Crossed(width, rngs) for _ in range(layers)])

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        memory = x = self.embed(batch["tokens"])
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer.cross(x, memory)
        return next_token(self.embed.attend(x), batch["targets"])


class Convolutions(nnx.Module):
    """Two convolutions with batch norm around a shortcut, which projects where sizes change."""

    def __init__(self, before: int, width: int, rngs: nnx.Rngs):
        strides = 1 if before == width else 2
        self.first = nnx.Conv(before, width, (3,), strides=strides, use_bias=False, rngs=rngs)
        self.second = nnx.Conv(width, width, (3,), use_bias=False, rngs=rngs)
        self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs) for _ in range(2)])
        self.shortcut = nnx.data(None)
        if before != width:
            self.shortcut = nnx.Conv(before, width, (1,), strides=strides, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norms[1](self.second(nnx.relu(self.norms[0](self.first(x)))))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class Residual(nnx.Module):
    """A ResNet of two stages: the first block of the second halves the length."""

    def __init__(self, layers: int, width: int, vocab: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.narrow = nnx.List([Convolutions(width, width, rngs) for _ in range(layers)])
        sizes = [width] + [2 * width] * (layers - 1)
        self.wide = nnx.List([Convolutions(size, 2 * width, rngs) for size in sizes])
        self.head = nnx.Linear(2 * width, vocab, rngs=rngs)

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = self.embed(batch["tokens"])
        for block in [*self.narrow, *self.wide]:
            x = block(x)
        logits = self.head(jnp.mean(x, 1, keepdims=True))
        return next_token(logits, batch["targets"][:, :1])


_OTHERS = {"encoder_decoder": EncoderDecoder, "residual": Residual}
STYLES: tuple[str, ...] = (*_STYLES, *_OTHERS)


def build_decoder(
    style: str, *, layers: int = 6, width: int = 16, vocab: int = 32, rngs: nnx.Rngs | None = None
) -> Any:
    """An `nnx.Module` with `loss({"tokens", "targets"}) -> (sum, weight)`.

    Args:
      style: one of `STYLES`.
      layers: in each list of the model.
    """
    rngs = rngs or nnx.Rngs(0)
    if style in _OTHERS:
        return _OTHERS[style](layers, width, vocab, rngs)
    return ListedDecoder(_STYLES[style], layers, width, vocab, rngs)
