"""Attention by own kernels: differentiable, or in parts that the caller merges.

Visible blocks of keys are data: a layout of blocks of 16 tokens, positions and segments. Runs only
on Hopper GPUs, with 16-bit floats and a head_dim of 64 or 128.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention_kernel
from pallas_kernels.attention_tables import (
    BLOCK,
    PARTS,
    TILE,
    BlockTables,
    Form,
    TileTable,
    tables_of,
)
from pallas_kernels.choice import KernelUnavailable, missing

DTYPES = (jnp.bfloat16, jnp.float16)
HEAD_DIMS = (64, 128)
COMPUTE_CAPABILITY = 9.0
"""Hopper, because the kernels use warpgroup products. For other GPUs the assembler would end the
process."""

Pair = tuple[jax.Array, jax.Array]


class Part(NamedTuple):
    """Result of attention over a part of the keys, to be merged with results over other parts.

    Attributes:
      out: [rows, queries, heads, head_dim] in the dtype of the query; 0 for a query that sees no
        key.
      log_sum: float32 [rows, queries, heads], log-sum-exp of the scores in nats; -inf for a query
        that sees no key.
    """

    out: jax.Array
    log_sum: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """Static mask: which keys are visible to which queries.

    Attributes:
      causal: whether a query sees only keys at its own position and before.
      window: a query sees only positions less than `window` away; None for no limit.
      layout: NumPy bool [heads or 1, blocks of queries, blocks of keys], visible pairs of blocks of
        16 tokens; None makes all visible.
    """

    causal: bool = False
    window: int | None = None
    layout: np.ndarray | None = None


def why_not(query: jax.Array, key: jax.Array, *, capability: float | None = None) -> str | None:
    """Returns why the kernels cannot compute attention of these arrays; None if they can.

    Args:
      query, key: arrays or `jax.ShapeDtypeStruct`s, [rows, tokens, heads, head_dim].
      capability: compute capability of the GPU; None is not checked.
    """
    if (obstacle := missing()) is not None:
        return obstacle
    if capability is not None and capability != COMPUTE_CAPABILITY:
        return (
            f"the kernels need compute capability {COMPUTE_CAPABILITY} (Hopper), not {capability}"
        )
    if query.dtype not in DTYPES:
        return f"the kernels take bfloat16 and float16, not {query.dtype}"
    if query.shape[-1] not in HEAD_DIMS:
        return f"the kernels take a head_dim of 64 or 128, not {query.shape[-1]}"
    if query.shape[2] % key.shape[2]:
        return f"{key.shape[2]} key/value heads do not divide {query.shape[2]} heads"
    return None


def block_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    seen: Seen,
    scale: float | None = None,
    segments: Pair | None = None,
    positions: Pair | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes softmax attention; has only first derivatives in reverse mode.

    Args:
      query: [rows, queries, heads, head_dim], bfloat16 or float16.
      key, value: [rows, keys, kv_heads, head_dim]; kv_heads divides heads.
      seen: static mask.
      scale: factor of the scores; None uses 1 / sqrt(head_dim).
      segments: integers ([rows, queries], [rows, keys]): a query sees only keys of its own segment;
        keys with a negative segment are never visible. None means one segment.
      positions: integers ([rows, queries], [rows, keys]) that `seen` compares; None uses the
        indices.
      interpret: whether to run the kernels on the CPU, for tests.

    Returns:
      [rows, queries, heads, head_dim] in the dtype of `query`.

    Raises:
      KernelUnavailable: the kernels do not support these arrays.
      ValueError: the layout is for other numbers of tokens or heads.
    """
    call = _Call.of(query, key, seen, scale, segments, positions, interpret)
    return _attend(call, query, key, value, call.integers(segments, positions))


def attention_part(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    seen: Seen,
    scale: float | None = None,
    segments: Pair | None = None,
    positions: Pair | None = None,
    interpret: bool = False,
) -> Part:
    """Computes attention over a part of the keys, for a caller that merges and differentiates.

    Arguments and errors are those of `block_attention`.
    """
    call = _Call.of(query, key, seen, scale, segments, positions, interpret)
    return _forward(call, query, key, value, call.integers(segments, positions))


def part_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    log_sum: jax.Array,
    turned: jax.Array,
    slope: jax.Array,
    seen: Seen,
    scale: float | None = None,
    segments: Pair | None = None,
    positions: Pair | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the contribution of a part of the keys to the gradients of attention over all keys.

    Args:
      query, key, value, seen, scale, segments, positions, interpret: the arguments of
        `block_attention`.
      log_sum: float32 [rows, queries, heads], log-sum-exp over all keys; -inf for a query that sees
        no key.
      turned: float32 [rows, queries, heads], sum over features of the result times `slope`.
      slope: [rows, queries, heads, head_dim], gradient with respect to the result.

    Returns:
      Gradients of query (in its dtype), key and value (float32).
    """
    call = _Call.of(query, key, seen, scale, segments, positions, interpret)
    integers = call.integers(segments, positions)
    return _backward(call, (query, key, value), integers, log_sum, turned, slope)


# --- one call -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Call:
    """Static description of a call of the attention kernels: everything except its arrays.

    Attributes:
      form: description for the kernels, with tokens padded to whole tiles.
      queries, keys: numbers of tokens without padding.
      tables: tables of the layout; None without a layout.
      interpret: whether to run the kernels on the CPU.
    """

    form: Form
    queries: int
    keys: int
    tables: BlockTables | None
    interpret: bool

    @classmethod
    def of(
        cls,
        query: jax.Array,
        key: jax.Array,
        seen: Seen,
        scale: float | None,
        segments: Pair | None,
        positions: Pair | None,
        interpret: bool,
    ) -> _Call:
        if (obstacle := why_not(query, key)) is not None:
            raise KernelUnavailable(f"attention by Mosaic GPU: {obstacle}")
        queries, keys, heads = query.shape[1], key.shape[1], query.shape[2]
        tables = None
        if seen.layout is not None:
            tables = _tables(_Layout.of(seen, heads, queries, keys, positions is not None))
        # Keys that fill the last tile are hidden by segment -1 (`padded_integers`). A causal mask
        # over as many keys as queries hides them anyway.
        hidden_by_order = seen.causal and positions is None and queries == keys
        form = Form(
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            heads=heads,
            kv_heads=key.shape[2],
            head_dim=query.shape[-1],
            queries=_whole(queries),
            keys=_whole(keys),
            causal=seen.causal,
            window=seen.window,
            has_positions=positions is not None,
            has_segments=segments is not None or (keys % TILE > 0 and not hidden_by_order),
            **({} if tables is None else _of_tables(tables, heads)),
        )
        return cls(form, queries, keys, tables, interpret)

    def integers(self, segments: Pair | None, positions: Pair | None) -> dict[str, jax.Array]:
        """Collects the integers of tokens that the kernels compare, each [rows or 1, tokens]."""
        found = {}
        sides = (("query", self.queries), ("key", self.keys))
        for place, (side, tokens) in enumerate(sides):
            if self.form.compares_positions:
                index = jnp.arange(tokens, dtype=jnp.int32)[None]
                found[f"{side}_position"] = index if positions is None else positions[place]
            if self.form.has_segments:
                one = jnp.zeros((1, tokens), jnp.int32)
                found[f"{side}_segment"] = one if segments is None else segments[place]
        return found

    def padded_integers(self, given: dict[str, jax.Array], rows: int) -> dict[str, jax.Array]:
        """Broadcasts positions and segments to all rows and pads them to whole tiles; added keys
        are invisible."""
        fill = {"key_position": 2**30}  # a position after all queries
        fill |= dict.fromkeys(("query_segment", "key_segment"), -1)
        return {
            name: jnp.broadcast_to(
                _padded(x.astype(jnp.int32), fill=fill.get(name, 0)), (rows, _whole(x.shape[1]))
            )
            for name, x in given.items()
        }

    def table(self, side: str) -> tuple[jax.Array, ...]:
        """Returns (blocks, words, counts) of one side's `TileTable`; () without a layout."""
        if self.tables is None:
            return ()
        table: TileTable = getattr(self.tables, side)
        return tuple(map(jnp.asarray, (table.blocks, table.words, table.counts)))


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Hashable layout without the blocks that `causal` and `window` mask anyway."""

    seen: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, seen: Seen, heads: int, queries: int, keys: int, has_positions: bool) -> _Layout:
        layout = np.asarray(seen.layout)
        wanted = (-(-queries // BLOCK), -(-keys // BLOCK))
        if layout.dtype != bool or layout.shape[1:] != wanted or layout.shape[0] not in (1, heads):
            raise ValueError(
                f"the layout is {layout.dtype}{list(layout.shape)}; for {heads} heads, {queries} "
                f"queries and {keys} keys give bool [{heads} or 1, {wanted[0]}, {wanted[1]}]"
            )
        if not has_positions:
            query, key = (np.arange(n) * BLOCK for n in wanted)
            # The distances in a pair of blocks differ from that of their first tokens by at most
            # BLOCK - 1.
            distance = query[:, None] - key[None]
            if seen.causal:
                layout = layout & (distance > -BLOCK)
            if seen.window is not None:
                layout = layout & (distance < seen.window + BLOCK - 1)
                if not seen.causal:
                    layout = layout & (-distance < seen.window + BLOCK - 1)
        # `tables_of` takes whole tiles of blocks. The added blocks are not visible, so that no
        # table lists them.
        layout = np.pad(layout, [(0, 0), *((0, -n % PARTS) for n in wanted)])
        return cls(layout.tobytes(), layout.shape)


def _of_tables(tables: BlockTables, heads: int) -> dict[str, Any]:
    """Returns the fields of `Form` that describe the tables of a layout."""
    layouts = tables.of_queries.num_heads
    times = heads // layouts
    sides = tables.of_queries, tables.of_keys
    listed = tuple(times * int(side.counts.sum()) for side in sides)
    return {"layouts": layouts, "listed": listed}


@functools.lru_cache(maxsize=64)
def _tables(layout: _Layout) -> BlockTables:
    return tables_of(np.frombuffer(layout.seen, bool).reshape(layout.shape))


def _whole(tokens: int) -> int:
    """Rounds the number of tokens up to whole tiles."""
    return -(-tokens // TILE) * TILE


def _padded(array: jax.Array, fill: float = 0) -> jax.Array:
    """Pads [rows, tokens, ...] to whole tiles of tokens."""
    missing_tokens = _whole(array.shape[1]) - array.shape[1]
    widths = [(0, 0), (0, missing_tokens)] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(array, widths, constant_values=fill) if missing_tokens else array


# --- differentiation ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    call: _Call, query: jax.Array, key: jax.Array, value: jax.Array, integers: dict[str, jax.Array]
) -> jax.Array:
    return _forward(call, query, key, value, integers).out


def _attend_forward(
    call: _Call, query: jax.Array, key: jax.Array, value: jax.Array, integers: dict[str, jax.Array]
) -> Any:
    part = _forward(call, query, key, value, integers)
    return part.out, (query, key, value, integers, part)


def _attend_backward(call: _Call, kept: Any, slope: jax.Array) -> Any:
    query, key, value, integers, part = kept
    turned = jnp.sum(slope.astype(jnp.float32) * part.out.astype(jnp.float32), axis=-1)
    found = _backward(call, (query, key, value), integers, part.log_sum, turned, slope)
    return *(x.astype(y.dtype) for x, y in zip(found, (query, key, value), strict=True)), None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(
    call: _Call, query: jax.Array, key: jax.Array, value: jax.Array, integers: dict[str, jax.Array]
) -> Part:
    rows = query.shape[0]
    out, log_sum = attention_kernel.forward(
        call.form,
        _padded(query),
        _padded(key),
        _padded(value),
        call.padded_integers(integers, rows),
        call.table("of_queries"),
        interpret=call.interpret,
    )
    return Part(out[:, : call.queries], jnp.moveaxis(log_sum, 1, 2)[:, : call.queries])


def _backward(
    call: _Call,
    operands: tuple[jax.Array, ...],
    integers: dict[str, jax.Array],
    log_sum: jax.Array,
    turned: jax.Array,
    slope: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    dtype, rows = operands[0].dtype, operands[0].shape[0]
    arrays = tuple(map(_padded, (*operands, slope.astype(dtype))))
    # The weights of such a query are exp2(score - inf) = 0.
    log_sum = jnp.where(log_sum == -jnp.inf, jnp.inf, log_sum)
    # Queries that fill the last tile get weights 0, too.
    sums = (_padded(log_sum, fill=jnp.inf), _padded(turned))
    sums = tuple(jnp.moveaxis(x, 2, 1).astype(jnp.float32) for x in sums)
    given = call.padded_integers(integers, rows)
    more = {"interpret": call.interpret}
    of_query = attention_kernel.query_gradients(
        call.form, arrays, sums, given, call.table("of_queries"), **more
    )
    of_key, of_value = attention_kernel.key_gradients(
        call.form, arrays, sums, given, call.table("of_keys"), **more
    )
    return of_query[:, : call.queries], of_key[:, : call.keys], of_value[:, : call.keys]
