"""Decoder model: embedding, stacked blocks and head, with loss and key/value cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from zerojax.config.expert_settings import MoEConfig
from zerojax.config.tree_types import Tree
from zerojax.models.losses import NATS_PER_TOKEN, next_token
from zerojax.operators.chunked_loss import head_next_token
from zerojax.operators.context import current_split
from zerojax.tracing.stacking import scan_blocks, stack_blocks
from zerojax.zoo.decoder_config import DecoderConfig
from zerojax.zoo.layers import Dropout, Embedding, Mlp, Norm, Projection, constrain, in_chunks
from zerojax.zoo.moe import EXPERT_PARAMETERS, MoE, Routing, balance_losses
from zerojax.zoo.self_attention import Attention, KVCache, positions_after
from zerojax.zoo.task_heads import build_task_head, last_tokens, task_loss, tokens_of

INIT_STDDEV = 0.02
RESIDUAL_DIMS = ("batch", "sequence", "embed")
TensorParallelRules = tuple[tuple[str, tuple[str | None, ...]], ...]

# Megatron's sharding (arXiv:1909.08053): heads and the MLP's width are split over `model`, with one
# sum per sub-layer after the row-parallel output; embedding and head are split over `model` along
# the vocabulary. Axes apply to trailing dimensions, so that rules fit stacked and single layers.
MEGATRON_RULES: TensorParallelRules = (
    (r"attention/(query|key|value)/kernel$", (None, "model", None)),
    (r"attention/(query|key|value)/bias$", ("model", None)),
    (r"attention/(query|key)_heads_norm/(scale|bias)$", ("model", None)),
    (r"attention/sinks$", ("model",)),
    (r"attention/output/kernel$", ("model", None, None)),
    (r"mlp/(shared/)?(gate|up)/kernel$", (None, "model")),
    (r"mlp/(gate|up)/bias$", ("model",)),
    (r"mlp/(shared/)?down/kernel$", ("model", None)),
    (r"mlp/experts/(gate|up)$", (None, None, "model")),
    (r"mlp/experts/down$", (None, "model", None)),
    (r"mlp/experts/(gate|up)_bias$", (None, "model")),
    (r"attention/(query|key|value)/lora/b$", (None, "model", None)),
    (r"attention/output/lora/a$", ("model", None, None)),
    (r"mlp/(shared/)?(gate|up)/lora/b$", (None, "model")),
    (r"mlp/(shared/)?down/lora/a$", ("model", None)),
    (r"token_embedding/embedding$", ("model", None)),
    (r"lm_head/kernel$", (None, "model")),
)


Cache = KVCache | tuple[KVCache, ...]
"""Cache of all layers: one of stacked arrays, or one for each layer, with a first dimension of size
1, if the layers are not stacked (see `weight_only`)."""


class Packed(NamedTuple):
    """Values passed from layer to layer, if they are more than hidden states."""

    hidden: jax.Array
    """[batch, seq, embed]."""
    segments: jax.Array | None
    """Integers [batch, seq]: index of each token's text, negative for padding; None for one
    text."""
    positions: jax.Array | None
    """Integers [batch, seq]: position of each token in its text; None uses the index in the row."""
    routing: Routing | None = None
    """[layers, ...]: routing statistics of all tokens except padding; None if not collected."""


class Block(nnx.Module):
    """One residual layer: x + attention(norm(x)), then x + mlp(norm(x)).

    A sub-layer whose norm is None gets `x` unchanged. `attention_post_norm` and `mlp_post_norm`
    apply to the sub-layers' outputs before they are added. With `is_parallel`, both sub-layers get
    `attention_norm(x)` and both outputs are added to `x`.
    """

    def __init__(
        self,
        *,
        attention_norm: Callable[[jax.Array], jax.Array] | None,
        attention: Attention,
        mlp_norm: Callable[[jax.Array], jax.Array] | None,
        mlp: Mlp | MoE,
        dropout: float,
        rngs: nnx.Rngs,
        mlp_chunk: int | None = None,
        attention_post_norm: Callable[[jax.Array], jax.Array] | None = None,
        mlp_post_norm: Callable[[jax.Array], jax.Array] | None = None,
        is_parallel: bool = False,
        residual_scale: float = 1.0,
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_dropout = Dropout(dropout, rngs=rngs)
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_dropout = Dropout(dropout, rngs=rngs)
        self.mlp_chunk = mlp_chunk
        self.attention_post_norm, self.mlp_post_norm = attention_post_norm, mlp_post_norm
        self.is_parallel, self.residual_scale = is_parallel, residual_scale

    def __call__(self, x: jax.Array | Packed, kind: jax.Array | None = None) -> jax.Array | Packed:
        """Applies the layer; the result has the structure, shapes and dtypes of `x`.

        Args:
          x: [batch, seq, embed], or `Packed`.
          kind: int32 [], index of the layer's kind; None if all layers are of one kind.
        """
        if not isinstance(x, Packed):
            return self._layer(x, kind)[0]
        hidden, seen = self._layer(x.hidden, kind, segments=x.segments, positions=x.positions)
        if x.routing is None:
            return x._replace(hidden=hidden)
        assert seen is not None, "a layer without experts has no routing statistics"
        return x._replace(hidden=hidden, routing=x.routing.push(seen))

    def _layer(
        self, x: jax.Array, kind: jax.Array | None, **texts: jax.Array | None
    ) -> tuple[jax.Array, Routing | None]:
        segments, seen = texts.get("segments"), None

        def attend(normed: jax.Array) -> jax.Array:
            mixed = _apply(self.attention_post_norm, self.attention(normed, kind=kind, **texts))
            return self.attention_dropout(mixed)

        def widen(normed: jax.Array) -> jax.Array:
            nonlocal seen
            if isinstance(self.mlp, MoE):
                change, seen = self.mlp(normed, None if segments is None else segments >= 0)
            elif self.mlp_chunk is None:
                change = self.mlp(normed)
            else:
                change = in_chunks(self.mlp, normed, self.mlp_chunk)
            return self.mlp_dropout(_apply(self.mlp_post_norm, change))

        return self._add_both(x, attend, widen), seen

    def extend(
        self,
        x: jax.Array,
        cache: KVCache,
        position: jax.Array,
        kind: jax.Array | None = None,
        *,
        text_length: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Applies the layer to new tokens after cached ones, without dropout; see
        `Attention.extend`."""

        def attend(normed: jax.Array) -> jax.Array:
            nonlocal cache
            mixed, cache = self.attention.extend(
                normed, cache, position, kind, text_length=text_length
            )
            return _apply(self.attention_post_norm, mixed)

        def widen(normed: jax.Array) -> jax.Array:
            change = self.mlp(normed)[0] if isinstance(self.mlp, MoE) else self.mlp(normed)
            return _apply(self.mlp_post_norm, change)

        return self._add_both(x, attend, widen), cache

    def _add_both(
        self,
        x: jax.Array,
        attend: Callable[[jax.Array], jax.Array],
        widen: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        normed = _apply(self.attention_norm, x)
        if self.is_parallel:
            return self._add(self._add(x, attend(normed)), widen(normed))
        x = self._add(x, attend(normed))
        return self._add(x, widen(_apply(self.mlp_norm, x)))

    def _add(self, x: jax.Array, change: jax.Array) -> jax.Array:
        if self.residual_scale != 1.0:
            change = change * self.residual_scale
        return constrain(x + change.astype(x.dtype), RESIDUAL_DIMS)


def _apply(norm: Callable[[jax.Array], jax.Array] | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


class Decoder(nnx.Module):
    """Decoder-only language model: `head(blocks(embed(tokens)))`.

    `model(tokens) -> logits`, `model.loss(batch) -> (sum, weight)`. The configuration selects the
    architecture; `Llama` and `GPT2` are subclasses with configurations of their own. With
    `config.task` the model classifies texts instead: `model(tokens)` are the logits of the classes,
    and the loss takes labels.
    """

    tensor_parallel_rules: ClassVar[TensorParallelRules] = MEGATRON_RULES
    expert_parameters: ClassVar[tuple[str, ...]] = EXPERT_PARAMETERS
    loss_unit: str | None = NATS_PER_TOKEN
    """Unit of the mean loss; None for tasks."""
    task_head: Projection | None = None

    config: Any
    """A `DecoderConfig`, or a configuration with `as_decoder` and the same field names for
    sizes."""
    position_embedding: Embedding | None = None
    kind_of_layer: tuple[int, ...] | None = None
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    moe: MoEConfig | None = None
    """Settings of the layers' experts; None if the layers have MLPs."""
    deterministic: bool = False
    """Set by `eval()`: the loss then omits terms that are only for training, such as the balance
    loss of experts."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.kind_of_layer = config.pattern
        self.embed_scale, self.logit_scale = config.embed_scale, config.logit_scale
        self.logit_softcap = config.logit_softcap
        self.moe = config.moe if config.moe.num_experts else None
        self.deterministic = False
        width = config.embed_dim
        self.token_embedding = Embedding(config.vocab_size, width, stddev=INIT_STDDEV, rngs=rngs)
        if config.learned_positions:
            self.position_embedding = Embedding(
                config.max_seq_len, width, stddev=INIT_STDDEV, rngs=rngs
            )
        self.embed_dropout = Dropout(config.dropout, rngs=rngs)
        self.blocks: Any = stack_blocks(
            lambda layer_rngs: build_block(config, layer_rngs), config.num_layers, rngs=rngs
        )
        self.final_norm: Callable[[jax.Array], jax.Array] = Norm((width,), config.norm)
        if config.task is None:
            self.lm_head = build_lm_head(config, stddev=INIT_STDDEV, rngs=rngs)
            return
        self.lm_head = None
        self.task_head = build_task_head(config.task, width, use_bias=False, rngs=rngs)
        self.loss_unit = None
        # A text is classified by one token, so that rows cannot be split over devices.
        setattr(self, "before_cut", None)  # noqa: B010 - replaces a method

    def look_up(self, tokens: jax.Array, position: jax.Array | int) -> jax.Array:
        """Embeds tokens [batch, new] as [batch, new, embed], without dropout.

        Args:
          tokens: integers [batch, new].
          position: position of the first token, or integers [batch, new], the positions of all
            tokens. Only learned positions use it, because attention applies rotary positions.
        """
        x = self.token_embedding(tokens)
        if self.embed_scale != 1.0:
            x = x * jnp.asarray(self.embed_scale, x.dtype)
        if self.position_embedding is None:
            return x
        if jnp.ndim(position) == 2:
            return x + self.position_embedding(jnp.asarray(position)).astype(x.dtype)
        positions = lax.dynamic_slice_in_dim(
            self.position_embedding.embedding[...], position, tokens.shape[1], axis=0
        )
        return x + positions[None].astype(x.dtype)

    def embed(self, tokens: jax.Array, positions: jax.Array | int = 0) -> jax.Array:
        """Embeds tokens, integers [batch, seq], as [batch, seq, embed].

        Args:
          tokens: integers [batch, seq].
          positions: positions of the tokens, see `look_up`.

        Raises:
          TypeError: `tokens` are not integers.
          ValueError: `tokens` do not have two dimensions, or are longer than `max_seq_len`.
        """
        check_tokens(tokens, max_seq_len=self.config.max_seq_len)
        return constrain(self.embed_dropout(self.look_up(tokens, positions)), RESIDUAL_DIMS)

    def head(self, x: jax.Array) -> jax.Array:
        """Maps [batch, seq, embed] to logits [batch, seq, vocab], in the output weights' dtype.

        Raises:
          ValueError: the model has a head for a task instead.
        """
        if self.task_head is not None:
            raise ValueError(
                f"this model has a head for {self.config.task.kind}, not for tokens; use "
                "model.classify(tokens), or build it with task=None"
            )
        x = self.final_norm(x)
        logits = self.token_embedding.attend(x) if self.lm_head is None else self.lm_head(x)
        if self.logit_scale == 1.0 and self.logit_softcap is None:
            return logits
        wide = logits.astype(jnp.float32) * self.logit_scale
        cap = self.logit_softcap
        return (wide if cap is None else cap * jnp.tanh(wide / cap)).astype(logits.dtype)

    def hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the hidden states [batch, seq, embed] after the last block, for `head`.

        Args:
          tokens: integers [batch, seq].
          segments: integers [batch, seq], index of each token's text in rows of several texts.
            Tokens attend only within their text, and positions restart in each text.
          positions: integers [batch, seq], position of each token in its text; None derives them
            from `segments`, or uses the index in the row.
        """
        return self._hidden(tokens, segments, positions, None)[0]

    def _hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array | None,
        positions: jax.Array | None,
        routing: Routing | None,
    ) -> tuple[jax.Array, Routing | None]:
        """Computes (`hidden`, `routing` with the statistics of all layers)."""
        if positions is None and segments is not None:
            positions = positions_in_texts(segments)
        if positions is None and routing is None:
            return self._through_blocks(self.embed(tokens)), None
        embedded = self.embed(tokens, 0 if positions is None else positions)
        x = self._through_blocks(Packed(embedded, segments, positions, routing))
        return x.hidden, x.routing

    def _through_blocks(self, x: Tree) -> Any:
        return scan_blocks(
            self.blocks, x, remat=self.config.remat, kind_of_layer=self.kind_of_layer
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Computes logits [batch, seq, vocab] of the next token at each position; with a task,
        `classify`."""
        if self.task_head is not None:
            return self.classify(tokens)
        return self.head(self.hidden(tokens))

    def classify(self, tokens: jax.Array, attention_mask: jax.Array | None = None) -> jax.Array:
        """Computes the logits of a text's classes from the last token that is not padding.

        Args:
          tokens: integers [batch, seq].
          attention_mask: [batch, seq], 0 for padding, to which no token then attends; needed for
            padding at the beginning of rows. Positions count it, as in transformers.

        Returns:
          Logits [batch, labels].

        Raises:
          ValueError: the model has no head for a task.
        """
        if self.task_head is None:
            raise ValueError(
                "this model has no head for a task; build it with task=zerojax.zoo.TaskConfig(...)"
            )
        if attention_mask is None:
            x = self.hidden(tokens)
        else:
            index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            segments = jnp.where(attention_mask != 0, 0, -1).astype(jnp.int32)
            x = self.hidden(tokens, segments, jnp.broadcast_to(index, tokens.shape))
        at = last_tokens(tokens, self.config.task, attention_mask)
        last = jnp.take_along_axis(x, at[:, None, None], axis=1)
        return self.task_head(self.final_norm(last))[:, 0]

    @staticmethod
    def before_cut(batch: Mapping[str, Any]) -> dict[str, Any]:
        """Prepares a batch whose rows will be split over devices (context parallelism).

        Computes the values that depend on neighbouring tokens before rows are split: positions in
        texts, and weights that exclude targets of another text.

        Args:
          batch: batch for `loss`.

        Returns:
          Dict with "tokens", "targets" and "positions", with "weights" if the batch has weights or
          segments, and with "segments" if it has them; each [batch, seq].
        """
        names = ("tokens", "targets", "weights", "segments", "positions")
        prepared = {name: batch[name] for name in names if name in batch}
        segments = batch.get("segments")
        if segments is not None:
            prepared["weights"] = _weights_within_texts(segments, batch.get("weights"))
        if "positions" not in batch and segments is not None:
            prepared["positions"] = positions_in_texts(segments)
        elif "positions" not in batch:
            index = jnp.arange(batch["tokens"].shape[1], dtype=jnp.int32)
            prepared["positions"] = jnp.broadcast_to(index, batch["tokens"].shape)
        return prepared

    def loss(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """Computes the next-token cross-entropy in float32, as (sum, weight).

        With `config.loss_chunk`, logits are computed for this number of tokens at a time; the
        output weights are read once, outside this loop.

        Args:
          batch: dict with "tokens" and "targets", integers [batch, seq]. Optional "weights" [batch,
            seq]. Optional "segments", integers [batch, seq], index of each token's text: texts do
            not attend to each other, and padding (a negative segment) and tokens whose target
            belongs to another text are ignored. Optional "positions", integers [batch, seq],
            position of each token in its text, by default derived from the segments. With a task:
            "tokens", optional "attention_mask", and the labels of `task_heads.task_loss`.

        Returns:
          (sum, weight), float32. In training mode, a model with experts returns metrics as a third
          element (see `moe.balance_losses`), and the sum includes the balance loss times the
          weight; in evaluation mode it does not. The loss of a task includes no balance loss, as in
          transformers.
        """
        if self.task_head is not None:
            logits = self.classify(tokens_of(batch), batch.get("attention_mask"))
            return task_loss(logits, batch, self.config.task)
        targets, weights = batch["targets"], batch.get("weights")
        segments, positions = batch.get("segments"), batch.get("positions")
        if segments is not None and current_split() is None:  # if split, `before_cut` has done it
            weights = _weights_within_texts(segments, weights)
        counted = None
        if self.moe is not None and not self.deterministic:
            counted = Routing.empty(self.config.num_layers, self.moe.num_experts)
        x, routing = self._hidden(batch["tokens"], segments, positions, counted)
        total, weight = self._next_token(x, targets, weights)
        if routing is None or self.moe is None:
            return total, weight
        added, metrics = balance_losses(routing, self.moe)
        # Multiplied by the weight, because the sum is divided by it later.
        return total + weight * added, weight, metrics

    def _next_token(
        self, x: jax.Array, targets: jax.Array, weights: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Computes (sum, weight) of the loss from the hidden states."""
        chunk = self.config.loss_chunk
        if chunk is None:
            return next_token(self.head(x), targets, weights)
        x = self.final_norm(x)
        options = {"chunk": chunk, "scale": self.logit_scale, "softcap": self.logit_softcap}
        if self.lm_head is None:
            table = self.token_embedding.embedding[...]
            return head_next_token(x, table, targets, weights, vocab_dim=0, **options)
        kernel = self.lm_head.kernel[...]
        return head_next_token(x, kernel, targets, weights, vocab_dim=1, **options)

    def init_cache(self, batch_size: int, length: int, dtype: DTypeLike | None = None) -> Cache:
        """Returns a cache of zeros for `length` positions.

        Args:
          batch_size: number of rows.
          length: number of positions.
          dtype: `jnp.int8` for codes; None uses the dtype of the activations.
        """
        config, wide = self.config, self.token_embedding.embedding[...].dtype
        head_dim = config.head_dim or config.embed_dim // config.num_heads
        kv_heads = config.num_kv_heads or config.num_heads
        shape = (batch_size, length, kv_heads, head_dim)

        def zeros(num_layers: int) -> KVCache:
            whole = (num_layers, *shape)
            arrays = [jnp.zeros(whole, dtype or wide) for _ in range(2)]
            scales = [] if dtype is None else [jnp.zeros(whole[:-1], wide) for _ in range(2)]
            return KVCache(*arrays, *scales)

        if isinstance(self.blocks, nnx.List):
            return tuple(zeros(1) for _ in range(config.num_layers))
        return zeros(config.num_layers)

    def extend(
        self,
        tokens: jax.Array,
        cache: Cache,
        position: jax.Array,
        *,
        text_length: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Computes the hidden states of new tokens after cached ones, without dropout.

        Args:
          tokens: integers [batch, new].
          cache: result of `init_cache` or of an earlier call.
          position: number of tokens in the cache, int32 [], or [batch] if rows differ.
          text_length: int32 [batch], final number of tokens of each text; see `Attention.extend`.

        Returns:
          (hidden states [batch, new, embed] for `head`, cache that includes the new tokens).
        """
        at = position if jnp.ndim(position) == 0 else positions_after(position, tokens.shape[1])
        x = self.look_up(tokens, at)
        if isinstance(self.blocks, nnx.List):
            return self._extend_layers(x, cache, position, text_length)
        graphdef, state = nnx.split(self.blocks)
        pattern = self.kind_of_layer
        kinds = None if pattern is None else np.asarray(pattern, np.int32)

        # The cache is a carry of the scan, not a scanned input, so that one buffer is updated in
        # place.
        def layer(
            carry: tuple[jax.Array, Cache], slices: tuple[nnx.State, Any, jax.Array]
        ) -> tuple[tuple[jax.Array, Cache], None]:
            (x, cache), (layer_state, kind, index) = carry, slices
            block = nnx.merge(graphdef, layer_state)
            block.eval()  # an adapter may have its own dropout
            own = jax.tree.map(
                lambda whole: lax.dynamic_index_in_dim(whole, index, 0, keepdims=False), cache
            )
            x, longer = block.extend(x, own, position, kind, text_length=text_length)
            written = jax.tree.map(
                lambda whole, new: lax.dynamic_update_index_in_dim(whole, new, index, 0),
                cache,
                longer,
            )
            return (x, written), None

        numbers = jnp.arange(self.config.num_layers)
        (x, longer), _ = lax.scan(layer, (x, cache), (state, kinds, numbers))
        return x, longer

    def _extend_layers(
        self, x: jax.Array, cache: Cache, position: jax.Array, text_length: jax.Array | None
    ) -> tuple[jax.Array, Cache]:
        """Computes `extend` for layers that are not stacked, each with a cache of its own."""
        longer = []
        for index, (block, own) in enumerate(zip(self.blocks, cache, strict=True)):
            pattern = self.kind_of_layer
            kind = None if pattern is None else jnp.int32(pattern[index])
            own = jax.tree.map(lambda whole: whole[0], own)
            x, new = block.extend(x, own, position, kind, text_length=text_length)
            longer.append(jax.tree.map(lambda array: array[None], new))
        return x, tuple(longer)


def positions_in_texts(segments: jax.Array) -> jax.Array:
    """Returns int32 [batch, seq] positions, from 0 in each run of equal `segments` [batch, seq]."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    begins = segments[:, 1:] != segments[:, :-1]
    begins = jnp.concatenate([jnp.ones_like(begins[:, :1]), begins], axis=1)
    return index - lax.cummax(jnp.where(begins, index, 0), axis=1)


def _weights_within_texts(segments: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Returns `weights` with 0 for padding and for tokens whose next token is of another text.

    The target of a row's last token is outside the row, so its weight is unchanged.
    """
    same = segments[:, 1:] == segments[:, :-1]
    counts = jnp.concatenate([same, jnp.ones_like(same[:, :1])], axis=1) & (segments >= 0)
    return counts.astype(jnp.float32) if weights is None else jnp.where(counts, weights, 0)


def build_block(config: DecoderConfig, rngs: nnx.Rngs) -> Block:
    """Builds one layer of a decoder."""
    width, places = config.embed_dim, config.norm_places
    # The 2 * num_layers outputs that are added to the residual stream start smaller, so that the
    # stream's variance does not grow with depth (Radford et al. 2019, section 2.3).
    output_stddev = INIT_STDDEV / (2 * config.num_layers) ** 0.5

    def norm(*at: str) -> Norm | None:
        return Norm((width,), config.norm) if places in at else None

    return Block(
        attention_norm=norm("pre", "pre_post", "parallel"),
        attention=Attention(
            width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads or config.num_heads,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            stddev=INIT_STDDEV,
            output_stddev=output_stddev,
            kinds=config.kinds,
            pattern=config.pattern,
            rngs=rngs,
            head_dim=config.head_dim,
            matmul_dtype=config.matmul_dtype,
            bit_schedule=config.bit_schedule,
            implementation=config.attention,
            layout=config.attention_layout,
            max_seq_len=config.max_seq_len,
            norm=config.norm,
            query_key_norm=config.query_key_norm,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            has_sinks=config.attention_sinks,
            clip=config.clip_qkv,
        ),
        attention_post_norm=norm("post", "pre_post"),
        mlp_norm=norm("pre", "pre_post"),
        mlp=_build_mlp(config, output_stddev, rngs),
        mlp_post_norm=norm("post", "pre_post"),
        mlp_chunk=config.mlp_chunk,
        dropout=config.dropout,
        is_parallel=places == "parallel",
        residual_scale=config.residual_scale,
        rngs=rngs,
    )


def _build_mlp(config: DecoderConfig, output_stddev: float, rngs: nnx.Rngs) -> Mlp | MoE:
    """Builds the MLP of a layer, or the mixture of experts that replaces it."""
    if config.moe.num_experts:
        return MoE(
            config.embed_dim,
            config.moe,
            activation=config.activation,
            stddev=INIT_STDDEV,
            output_stddev=output_stddev,
            rngs=rngs,
            use_bias=config.mlp_bias,
            limit=config.expert_limit,
        )
    return Mlp(
        config.embed_dim,
        config.mlp_dim or 0,
        activation=config.activation,
        gated=config.gated,
        use_bias=config.mlp_bias,
        stddev=INIT_STDDEV,
        output_stddev=output_stddev,
        rngs=rngs,
        matmul_dtype=config.matmul_dtype,
        bit_schedule=config.bit_schedule,
    )


def build_lm_head(config: Any, *, stddev: float, rngs: nnx.Rngs) -> Projection | None:
    """Builds the output weights `[embed, vocab]`; None if they are tied to the token table."""
    if config.tie_embeddings:
        return None
    shapes = (config.embed_dim,), (config.vocab_size,)
    return Projection(*shapes, stddev=stddev, use_bias=False, rngs=rngs)


def check_tokens(tokens: jax.Array | np.ndarray, *, max_seq_len: int) -> None:
    """Checks dtype and shape of tokens, but not their values.

    Raises:
      TypeError: the tokens are not integers.
      ValueError: their shape is not [batch, seq], or seq is above `max_seq_len`.
    """
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(
            f"tokens are {tokens.dtype}, but must be integers; encode text with a tokenizer, or "
            "cast ids with tokens.astype('int32')"
        )
    if tokens.ndim != 2:
        raise ValueError(
            f"tokens have shape {tokens.shape}, but must be [batch, seq];"
            " write tokens[None] for a single text"
        )
    if tokens.shape[1] > max_seq_len:
        raise ValueError(
            f"tokens have length {tokens.shape[1]}, but the model takes at most"
            f" max_seq_len={max_seq_len}; truncate them or build the model with a larger"
            " max_seq_len"
        )
