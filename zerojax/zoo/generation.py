"""Generates tokens with a key/value cache: one pass over the prompts, then token by token.

All prompts share three programs: the empty rows and cache, the pass over prompts, and the loop over
new tokens. If there are more prompts than rows, rows that have ended get the next prompts
(continuous batching).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config.checks import MAX_SIZE, check_whole_number
from zerojax.config.generation_limits import check_generation
from zerojax.config.tree_types import Tree
from zerojax.zoo.decoder import Cache, Decoder, check_tokens
from zerojax.zoo.sampling import Controls, DrawnRows, Sampling
from zerojax.zoo.t5 import T5
from zerojax.zoo.weight_only import (
    is_faster_apart,
    with_codes,
    with_layers_apart,
)

PROMPT_MULTIPLE = 32
"""All prompts are padded to the length of the longest one, rounded up to a multiple of this number
but at most max_seq_len, so that many lengths share a program."""
_HEADS_AXIS = "model"
"""Mesh axis of the heads in `MEGATRON_RULES`."""
CACHE_MULTIPLE = 128
"""The cache is as long as the longest prompt with its new tokens, rounded up to a multiple of this
number but at most max_seq_len."""

_ROOM = 2
"""Free memory for a copy of the layers, in units of their bytes: the copy, and the cache."""
_FREE = -1
"""Number of the prompt of a row without one."""

Prompts = jax.Array | np.ndarray | Sequence[Any]


class Continued(NamedTuple):
    """New tokens of each prompt, on the host."""

    tokens: np.ndarray
    """int32 [batch, num_tokens]; pad tokens after a row's end."""
    lengths: np.ndarray
    """int32 [batch]: number of tokens of each row until it ended, including its end token."""


def generate(
    model: Decoder,
    tokens: Prompts,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    end_tokens: Sequence[int] = (),
    pad_token: int | None = None,
    num_ids: int | None = None,
    seed: int = 0,
    row_numbers: Sequence[int] | None = None,
    quantize: str | None = None,
    cache: str | None = None,
) -> jax.Array:
    """Continues each prompt by `num_tokens` sampled tokens. Dropout is off; `model` is unchanged.

    A row does not depend on the other rows: with the same `row_numbers` it gets the same tokens in
    every batch, up to rounding.

    Args:
      model: a decoder of this package.
      tokens: prompts, integers [batch, prompt], or a sequence of rows of different lengths; each
        has at least one token.
      num_tokens: number of new tokens; prompt + num_tokens <= the model's max_seq_len.
      temperature: divisor of the logits; 0 always takes the most likely token.
      top_k: number of most likely tokens to sample from; None samples from all.
      top_p: sample only from the most likely tokens whose probabilities sum to `top_p`; None
        samples from all.
      repetition_penalty: number that divides the positive logits of tokens that the row already
        has, and multiplies the negative ones; 1 for no penalty.
      end_tokens: ids that end a row; the rest of the row is `pad_token`.
      pad_token: id after a row's end; None uses the first of `end_tokens`, or 0.
      num_ids: sample only ids below this number, for models whose vocabulary is larger than the
        tokenizer's; None samples from all ids.
      seed: random seed of the sampling; equal arguments give equal tokens.
      row_numbers: integers [batch] that determine, with seed and position, the random numbers of
        each row; None uses 0, 1, 2, ...
      quantize: "int8" or "fp8" rounds the kernels of the layers to integers or floats of 8 bits
        with one scale per output; None computes with the weights as they are.
      cache: "int8" stores keys and values as int8 codes with one scale per head and position; None
        stores them in the dtype of the activations.

    Returns:
      int32 [batch, longest prompt + num_tokens]: each row has its prompt, its new tokens, and pad
      tokens.

    Raises:
      TypeError: `model` is not a `Decoder`, or `tokens` are not integers.
      ValueError: `tokens` are not [batch, prompt], exceed the vocabulary or, with `num_tokens`,
        exceed max_seq_len; an option is out of range; or `quantize` does not fit the model.
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        end_tokens=tuple(end_tokens),
        pad_token=pad_token,
        num_ids=num_ids,
        seed=seed,
    )
    check_decoder(model)
    prompts = as_prompts(tokens, max_seq_len=model.config.max_seq_len)
    model = _prepared(model, quantize)
    added = continue_rows(
        model, prompts, num_tokens, sampling, row_numbers=row_numbers, cache_kind=cache
    )
    return jnp.asarray(joined(prompts, added, pad=sampling.pad))


def _prepared(model: Decoder, quantize: str | None) -> Decoder:
    """Returns the model with codes if `quantize` is set; else with layers that are not stacked, if
    that is faster and the model's only device has room for this copy; else `model` itself."""
    if quantize is not None:
        return with_codes(model, quantize)
    arrays = jax.tree.leaves(nnx.state(model.blocks))
    devices = {device for x in arrays for device in getattr(x, "devices", set)()}
    if len(devices) != 1:
        return model
    [device] = devices
    if not is_faster_apart(model, device.platform):
        return model
    memory = device.memory_stats() or {}
    free = memory.get("bytes_limit", 0) - memory.get("bytes_in_use", 0)
    has_room = free >= _ROOM * sum(x.nbytes for x in arrays)
    return with_layers_apart(model) if has_room else model


def check_decoder(model: object) -> None:
    """Raises a TypeError if a model cannot continue texts."""
    if not isinstance(model, Decoder):
        of_t5 = "; for the targets of a T5 use generate_from_source"
        raise TypeError(
            f"{type(model).__name__} cannot continue texts; use a "
            f"Decoder, a GPT2 or a Llama{of_t5 * isinstance(model, T5)}"
        )
    if model.task_head is not None:
        raise TypeError(
            f"a {type(model).__name__} for {model.config.task.kind} cannot continue texts; use "
            "model.classify(tokens), or a model with task=None"
        )


def as_prompts(tokens: Prompts, *, max_seq_len: int) -> list[np.ndarray]:
    """Converts prompts to integer arrays [prompt], one for each row.

    Raises:
      TypeError: `tokens` are not integers.
      ValueError: `tokens` are neither [batch, prompt] nor rows, a row is longer than `max_seq_len`,
        or a row of a sequence is empty.
    """
    if hasattr(tokens, "dtype"):
        whole = np.asarray(tokens)
        check_tokens(whole, max_seq_len=max_seq_len)
        return list(whole)
    rows = [np.asarray(row) for row in tokens]
    for number, row in enumerate(rows):
        _check_not_empty(row, number, len(rows))
        check_tokens(row[None], max_seq_len=max_seq_len)
    return rows


def joined(prompts: Sequence[np.ndarray], added: Continued, *, pad: int) -> np.ndarray:
    """Joins prompts and new tokens to int32 [batch, longest prompt + num_tokens], padded at the
    end."""
    num_tokens = added.tokens.shape[1]
    longest = max((len(row) for row in prompts), default=0)
    texts = np.full((len(prompts), longest + num_tokens), pad, np.int32)
    for text, row, new in zip(texts, prompts, added.tokens, strict=True):
        text[: len(row)] = row
        text[len(row) : len(row) + num_tokens] = new
    return texts


def continue_rows(
    model: Decoder,
    prompts: Sequence[np.ndarray],
    num_tokens: int | Sequence[int],
    sampling: Sampling,
    *,
    row_numbers: Sequence[int] | None = None,
    row_sharding: NamedSharding | None = None,
    num_rows: int | None = None,
    cache_kind: str | None = None,
) -> Continued:
    """Continues prompts of any lengths; see `generate`.

    Args:
      model: a decoder, whose parameters may be sharded over a mesh.
      prompts: integers [prompt] each; at least one prompt.
      num_tokens: number of new tokens, for all rows or for each row.
      sampling: options of the sampling.
      row_numbers: numbers that determine each row's random numbers, as for `generate`.
      row_sharding: sharding of rows [batch] on the mesh of the parameters. None: every device
        computes all rows. With several processes, each one passes the same prompts and gets all
        tokens.
      num_rows: number of rows of the programs, so of prompts that are continued together; None: all
        prompts.
      cache_kind: argument `cache` of `generate`.

    Raises:
      ValueError: an argument is invalid, as for `generate`.
    """
    check_decoder(model)
    for most in {*num_tokens} if isinstance(num_tokens, Sequence) else (num_tokens,):
        check_generation(num_tokens=most, batch_size=num_rows, cache=cache_kind)
    limit, vocab_size = model.config.max_seq_len, model.config.vocab_size
    if not prompts:
        raise ValueError("prompts has 0 entries; pass at least one prompt")
    # Python's integers have no largest one, devices' have: each is checked before it becomes int32.
    limits = np.broadcast_to(np.asarray(num_tokens, object), (len(prompts),))
    for number, row in enumerate(prompts):
        _check_not_empty(row, number, len(prompts))
        _check_vocabulary(row, vocab_size=vocab_size)
    sizes = [(len(row), int(most)) for row, most in zip(prompts, limits, strict=True)]
    check_length(*max(sizes, key=sum), limit=limit)
    sampling.check(vocab_size)
    slots = _Slots(
        prompts,
        limits.astype(np.int32),
        row_numbers=row_numbers,
        num_rows=num_rows,
        sharding=row_sharding,
        limit=limit,
    )
    longest = max(map(sum, sizes))
    return _continue(
        model,
        slots,
        sampling.controls(vocab_size),
        cache_length=min(_rounded_up(longest, CACHE_MULTIPLE), limit),
        has_codes=cache_kind is not None,
    )


class _Batch(NamedTuple):
    """Prompts of the rows that are continued together."""

    tokens: Any
    """int32 [batch, padded length], padded at the end."""
    lengths: Any
    """int32 [batch]; 0 for rows without a prompt."""
    limits: Any
    """int32 [batch]: maximum number of new tokens."""
    rows: Any
    """int32 [batch]: row number of each row, for the random numbers."""


class _Slots:
    """Rows of the programs, which get the prompts one after the other.

    A row whose text has ended gets the next prompt. Rows are replaced when half of them have ended,
    because the pass over the prompts computes all rows.

    Args:
      prompts: integers [prompt] each.
      limits: int32 [prompts], maximum number of new tokens of each prompt.
      row_numbers, num_rows: arguments of `continue_rows`.
      sharding: sharding of rows; None: none.
      limit: the model's max_seq_len.
    """

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        limits: np.ndarray,
        *,
        row_numbers: Sequence[int] | None,
        num_rows: int | None,
        sharding: NamedSharding | None,
        limit: int,
    ) -> None:
        count = len(prompts)
        numbers = np.arange(count) if row_numbers is None else np.asarray(row_numbers)
        if numbers.shape != (count,) or not np.issubdtype(numbers.dtype, np.integer):
            raise ValueError(
                f"row_numbers have shape {numbers.shape} and dtype {numbers.dtype}, but there are "
                f"{count} prompts; use {count} integers"
            )
        if numbers.max(initial=0) > MAX_SIZE or numbers.min(initial=0) < -MAX_SIZE:
            raise ValueError(
                f"row_numbers reach from {numbers.min()} to {numbers.max()}; use numbers of at "
                f"most {MAX_SIZE}"
            )
        shards = 1 if sharding is None else count_shards(sharding)
        size = _rounded_up(count if num_rows is None else num_rows, shards)
        length = min(_rounded_up(max(len(row) for row in prompts), PROMPT_MULTIPLE), limit)
        self._prompts, self._limits, self._numbers = prompts, limits, numbers
        self.size, self.sharding = size, sharding
        self._waiting = collections.deque(range(count))
        self._prompt_of = np.full(size, _FREE)
        self._tokens, self._columns = np.zeros((size, length), np.int32), np.zeros((3, size), int)
        self._found: dict[int, np.ndarray] = {}

    def fill(self) -> tuple[_Batch, Any]:
        """Gives prompts to free rows; returns (prompts of all rows, bool [batch]: new rows)."""
        takes = np.zeros(self.size, bool)
        for row in np.flatnonzero(self._prompt_of == _FREE)[: len(self._waiting)]:
            prompt = self._prompt_of[row] = self._waiting.popleft()
            tokens = self._prompts[prompt]
            self._tokens[row] = 0
            self._tokens[row, : len(tokens)] = tokens
            self._columns[:, row] = len(tokens), self._limits[prompt], self._numbers[prompt]
            takes[row] = True
        arrays = self._tokens, *self._columns.astype(np.int32)
        # Copies, because the next call fills these arrays, and a CPU device may use them as they
        # are.
        return _Batch(*(_placed(x.copy(), self.sharding) for x in arrays)), _placed(
            takes, self.sharding
        )

    def fewest(self) -> np.int32:
        """Returns the number of active rows down to which decoding goes on."""
        active = int(np.sum(self._prompt_of != _FREE))
        return np.int32(active // 2 if self._waiting else 0)

    def collect(self, drawn: Any, lengths: Any, has_ended: Any) -> bool:
        """Keeps the tokens of ended rows and frees the rows; returns whether all are done."""
        drawn, lengths, has_ended = (np.asarray(x) for x in (drawn, lengths, has_ended))
        for row in np.flatnonzero(has_ended & (self._prompt_of != _FREE)):
            self._found[int(self._prompt_of[row])] = drawn[row, : lengths[row]].copy()
            self._prompt_of[row] = _FREE
        return len(self._found) == len(self._prompts)

    def continued(self, pad: int) -> Continued:
        """Returns the new tokens of all prompts, in their order."""
        tokens = np.full((len(self._prompts), self._limits.max()), pad, np.int32)
        for prompt, new in self._found.items():
            tokens[prompt, : len(new)] = new
        lengths = [len(self._found[prompt]) for prompt in range(len(self._prompts))]
        return Continued(tokens, np.asarray(lengths, np.int32))


def count_shards(sharding: NamedSharding) -> int:
    """Returns the number of parts into which a sharding divides dimension 0."""
    size = sharding.mesh.size
    return size // sharding.shard_shape((size,))[0]


def _placed(value: np.ndarray, sharding: NamedSharding | None) -> Any:
    """Places a host array that all processes have on the devices, with a sharding of its rows."""
    if sharding is None:
        return value
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _continue(
    model: Decoder, slots: _Slots, controls: Controls, *, cache_length: int, has_codes: bool
) -> Continued:
    """Continues the prompts of `slots` until all have ended; returns their new tokens."""
    graphdef, state = nnx.split(model)
    options = {"graphdef": graphdef, "row_sharding": slots.sharding}
    sizes = {"size": slots.size, "cache_length": cache_length, "has_codes": has_codes}
    progress, cache = _start(state, controls.pad_token, **sizes, **options)
    while True:
        batch, takes = slots.fill()
        progress, cache = _prefill(state, batch, takes, progress, cache, controls, **options)
        progress, cache, shown = _decode(
            state, progress, cache, batch, controls, slots.fewest(), **options
        )
        if slots.collect(*shown):
            return slots.continued(int(controls.pad_token))


# jax.jit is otherwise used only in step, plan and kernels; decoding without it is too slow.
@functools.partial(
    jax.jit,
    static_argnames=("size", "cache_length", "has_codes", "graphdef", "row_sharding"),
)
def _start(
    state: nnx.State,
    pad: jax.Array | int,
    *,
    size: int,
    cache_length: int,
    has_codes: bool,
    graphdef: nnx.GraphDef[Decoder],
    row_sharding: NamedSharding | None,
) -> tuple[DrawnRows, Cache]:
    """Makes `size` rows without a prompt, and a cache of zeros for `cache_length` positions."""
    model = nnx.merge(graphdef, state)
    nothing = jnp.zeros((size, 1), jnp.int32)
    options = {"vocab_size": model.config.vocab_size, "pad": jnp.asarray(pad)}
    progress = DrawnRows.start(nothing, nothing[:, 0], cache_length, **options)
    cache = model.init_cache(size, cache_length, jnp.int8 if has_codes else None)
    return _placed_rows(progress, row_sharding), _placed_cache(cache, row_sharding)


@functools.partial(
    jax.jit,
    static_argnames=("graphdef", "row_sharding"),
    donate_argnames=("progress", "cache"),
)
def _prefill(
    state: nnx.State,
    batch: _Batch,
    takes: jax.Array | np.ndarray,
    progress: DrawnRows,
    cache: Cache,
    controls: Controls,
    *,
    graphdef: nnx.GraphDef[Decoder],
    row_sharding: NamedSharding | None,
) -> tuple[DrawnRows, Cache]:
    """Processes the prompts of new rows, and draws the first new token of each.

    All rows are computed; the results of the others are dropped. Cache entries of padding are after
    a row's prompt; new tokens overwrite them before they are read.

    Args:
      state: parameters of the model.
      batch: prompts of all rows.
      takes: bool [batch]: whether a row is new.
      progress, cache: rows and cache before.
      controls: options of the sampling.
      graphdef: structure of the model.
      row_sharding: sharding of rows; None: none.
    """
    model = nnx.merge(graphdef, state)
    size, length = batch.tokens.shape
    text_length = batch.lengths + batch.limits
    has_codes = jax.tree.leaves(cache)[0].dtype == jnp.int8
    new_cache = model.init_cache(size, length, jnp.int8 if has_codes else None)
    hidden, new_cache = model.extend(batch.tokens, new_cache, jnp.int32(0), text_length=text_length)
    # Rows without a prompt have length 0; what is computed for them is dropped.
    last = jnp.maximum(batch.lengths - 1, 0)[:, None, None]
    logits = model.head(jnp.take_along_axis(hidden, last, axis=1))[:, 0]
    logits = _placed_rows(logits, row_sharding)
    room, pad = progress.drawn.shape[1], jnp.asarray(controls.pad_token)
    options = {"vocab_size": logits.shape[1], "pad": pad}
    new = DrawnRows.start(batch.tokens, batch.lengths, room, **options)
    new = new.draw(logits, batch.lengths, batch.limits, batch.rows, controls)

    def replace(old: jax.Array, new: jax.Array) -> jax.Array:
        is_new = jnp.asarray(takes).reshape(1, size, *[1] * (old.ndim - 2))
        kept = lax.slice_in_dim(old, 0, length, axis=2)
        return lax.dynamic_update_slice_in_dim(old, jnp.where(is_new, new, kept), 0, axis=2)

    progress = progress.replace(jnp.asarray(takes), new)
    cache = jax.tree.map(replace, cache, new_cache)
    return _placed_rows(progress, row_sharding), _placed_cache(cache, row_sharding)


@functools.partial(
    jax.jit,
    static_argnames=("graphdef", "row_sharding"),
    donate_argnames=("progress", "cache"),
)
def _decode(
    state: nnx.State,
    progress: DrawnRows,
    cache: Cache,
    batch: _Batch,
    controls: Controls,
    fewest: jax.Array | np.int32,
    *,
    graphdef: nnx.GraphDef[Decoder],
    row_sharding: NamedSharding | None,
) -> tuple[DrawnRows, Cache, tuple[jax.Array, jax.Array, jax.Array]]:
    """Draws tokens while more than `fewest` rows have not ended.

    Returns:
      (rows, cache, (new tokens, int32 [batch, room]; number of new tokens, int32 [batch]; whether
      each row has ended, bool [batch]) on all devices).
    """
    model = nnx.merge(graphdef, state)
    text_length = batch.lengths + batch.limits
    cache_length = jax.tree.leaves(cache)[0].shape[2]

    def advance(carry: tuple[DrawnRows, Cache]) -> tuple[DrawnRows, Cache]:
        progress, cache = carry
        position = jnp.maximum(batch.lengths + progress.lengths - 1, 0)
        position = jnp.minimum(position, cache_length - 1)  # rows that have ended continue
        hidden, cache = model.extend(
            progress.token[:, None], cache, position, text_length=text_length
        )
        logits = _placed_rows(model.head(hidden)[:, 0], row_sharding)
        progress = progress.draw(logits, batch.lengths, batch.limits, batch.rows, controls)
        return _placed_rows(progress, row_sharding), _placed_cache(cache, row_sharding)

    start = progress, cache
    progress, cache = lax.while_loop(lambda carry: carry[0].num_active() > fewest, advance, start)
    shown = progress.drawn, progress.lengths, progress.has_ended
    if row_sharding is not None:
        everywhere = NamedSharding(row_sharding.mesh, P())
        shown = lax.with_sharding_constraint(shown, everywhere)
    return progress, cache, shown


def _placed_rows(rows: Tree, row_sharding: NamedSharding | None) -> Any:
    """Shards arrays [batch, ...] like the rows: both programs then have the same inputs, and each
    device has all logits of its rows, which sampling compares."""
    return rows if row_sharding is None else lax.with_sharding_constraint(rows, row_sharding)


def _placed_cache(cache: Cache, row_sharding: NamedSharding | None) -> Cache:
    """Shards the cache like the rows, and its heads over `model` if that axis divides them."""
    if row_sharding is None:
        return cache
    mesh, heads = row_sharding.mesh, jax.tree.leaves(cache)[0].shape[3]
    # heads + 1, which never divides heads, stands for an axis that the mesh lacks.
    divides = heads % mesh.shape.get(_HEADS_AXIS, heads + 1) == 0
    spec = P(None, row_sharding.spec[0], None, _HEADS_AXIS if divides else None)
    return lax.with_sharding_constraint(cache, NamedSharding(mesh, spec))


def generate_from_source(
    model: T5,
    tokens: Any,
    num_tokens: int,
    *,
    attention_mask: jax.Array | np.ndarray | None = None,
    end_token: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
) -> jax.Array:
    """Generates a target, such as a translation, for each source. Dropout is off.

    Args:
      model: an encoder-decoder model of this package.
      tokens: sources, integers [batch, source]; shorter sources are padded (see `attention_mask`).
      num_tokens: length of the targets, at most the model's max_seq_len.
      attention_mask: [batch, source], 0 for padding; None without padding.
      end_token: id that ends a target; all later tokens are `end_token`. None: no early end.
      temperature, top_k, top_p, repetition_penalty, seed: options of the sampling, as for
        `generate`; the penalty applies to tokens of the target.

    Returns:
      Targets, int32 [batch, num_tokens], without the start token.

    Raises:
      TypeError: `model` is not a `T5`, or `tokens` are not integers.
      ValueError: an argument is invalid, as for `generate`, or sources have different lengths.
    """
    if not isinstance(model, T5):
        raise TypeError(
            f"{type(model).__name__} has no encoder for a source; use generate(model, prompts, ...)"
        )
    config = model.config
    tokens = _as_sources(tokens)
    check_tokens(tokens, max_seq_len=config.max_seq_len)
    check_generation(num_tokens=num_tokens)
    check_whole_number("end_token", end_token, 0)
    # One more than the model reads, since the last new token is only drawn.
    check_length(1, num_tokens, limit=config.max_seq_len + 1)
    _check_vocabulary(tokens, vocab_size=config.vocab_size)
    if end_token is not None and end_token >= config.vocab_size:
        raise ValueError(
            f"end_token={end_token} is outside the vocabulary of {config.vocab_size} token ids; "
            "use the tokenizer's id, such as 1 for T5"
        )
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        end_tokens=() if end_token is None else (end_token,),
        seed=seed,
    )
    sampling.check(config.vocab_size)
    graphdef, state = nnx.split(model)
    return _from_source(
        state,
        jnp.asarray(tokens),
        None if attention_mask is None else jnp.asarray(attention_mask),
        sampling.controls(config.vocab_size),
        graphdef=graphdef,
        num_tokens=num_tokens,
    )


def _as_sources(
    tokens: jax.Array | np.ndarray | Sequence[Sequence[int] | np.ndarray],
) -> np.ndarray:
    """Converts the sources of `generate_from_source` to one array [batch, source].

    Raises:
      ValueError: the sources have different lengths.
    """
    if not hasattr(tokens, "dtype"):
        lengths = sorted({np.size(row) for row in tokens})
        if len(lengths) > 1:
            raise ValueError(
                f"the sources have from {lengths[0]} to {lengths[-1]} tokens, but a T5 takes "
                f"sources of one length; pad them to {lengths[-1]} and pass attention_mask with 0 "
                "for the padding"
            )
    return np.asarray(tokens)


@functools.partial(jax.jit, static_argnames=("graphdef", "num_tokens"))
def _from_source(
    state: nnx.State,
    tokens: jax.Array,
    attention_mask: jax.Array | None,
    controls: Controls,
    *,
    graphdef: nnx.GraphDef[T5],
    num_tokens: int,
) -> jax.Array:
    model = nnx.merge(graphdef, state)
    model.eval()
    count = tokens.shape[0]
    cache = model.init_cache(tokens, num_tokens, attention_mask)
    rows, begin = jnp.arange(count), jnp.zeros(count, jnp.int32)
    limits = jnp.full(count, num_tokens, jnp.int32)
    start = DrawnRows.start(
        jnp.full((count, 1), model.config.start_token, jnp.int32),
        jnp.ones(count, jnp.int32),
        num_tokens,
        vocab_size=model.config.vocab_size,
        pad=jnp.asarray(controls.pad_token),
    )

    def advance(carry: tuple[DrawnRows, Any]) -> tuple[DrawnRows, Any]:
        progress, cache = carry
        position = jnp.max(progress.lengths)  # of all rows that have not ended
        hidden, cache = model.extend(progress.token[:, None], cache, position)
        logits = model.head(hidden)[:, 0]
        return progress.draw(logits, begin, limits, rows, controls), cache

    progress, _ = lax.while_loop(lambda carry: carry[0].num_active() > 0, advance, (start, cache))
    return progress.drawn


def _check_not_empty(prompt: np.ndarray, number: int, count: int) -> None:
    if not prompt.size:
        which = f" (number {number} of {count})" if count > 1 else ""
        raise ValueError(f"the prompt is empty{which}; pass at least one token")


def check_length(prompt: int, num_tokens: int, *, limit: int) -> None:
    """Raises a ValueError if numbers of tokens together exceed the model's `limit`."""
    if prompt + num_tokens > limit:
        raise ValueError(
            f"a prompt of {prompt} tokens and num_tokens={num_tokens} are {prompt + num_tokens}"
            f" tokens, but the model takes at most max_seq_len={limit};"
            f" {_remedies(prompt, num_tokens, limit=limit)}"
        )


def _remedies(prompt: int, num_tokens: int, *, limit: int) -> str:
    """Returns remedies for prompt + num_tokens > limit; each must leave both at least 1."""
    fewer, shorter = f"use num_tokens={limit - prompt}", f"cut the prompt to {limit - num_tokens}"
    if limit < 2:
        return "build the model with a larger max_seq_len"
    if prompt >= limit and num_tokens >= limit:
        return f"cut the prompt to {limit - 1} and use num_tokens=1"
    if prompt >= limit:
        return shorter
    return fewer if num_tokens >= limit else f"{fewer}, or {shorter}"


def _check_vocabulary(tokens: np.ndarray, *, vocab_size: int) -> None:
    for token in (tokens.min(initial=0), tokens.max(initial=0)):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"the prompt has token {token}, but the model's table has {vocab_size} rows; encode"
                " the text with the tokenizer that the model was trained with"
            )
