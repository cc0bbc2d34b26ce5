"""Attention for any model: `zerojax.attention`, its implementations and the choice among them.

Each implementation computes the same function of the same arguments, packed texts included; one
that cannot do what is asked is refused.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.config.attention_layouts import LAYOUTS, BlockLayout
from zerojax.config.checks import names_keywords
from zerojax.models.attention_choice import (
    IMPLEMENTATIONS,
    Implementation,
    choose,
    device_here,
    on_each_device,
)
from zerojax.models.attention_tiles import tiles_of
from zerojax.models.chunked_attention import Visibility, chunked_attention, extent_of
from zerojax.models.context import attend_over, current_split
from zerojax.models.cudnn_attention import cudnn_attention
from zerojax.models.kernel_attention import kernel_attention
from zerojax.models.sparse_layouts import BlockTable, layout_table

Both = jax.Array | tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of `attention` while a model was traced.

    Attributes:
      implementation: the one that is taken.
      why: "asked for", or what made "auto" take it.
      queries, keys: numbers of tokens.
      tile: queries and keys that "chunked" holds the scores of.
      computed: share of the scores that is computed, where a layout or a window is given.
      layout: the table of blocks, if there is one.
      heads, kv_heads, head_dim, itemsize: of query and key; itemsize in bytes.
      causal: as it was asked for.
    """

    implementation: Implementation
    why: str
    queries: int
    keys: int
    tile: tuple[int, int] | None = None
    computed: float | None = None
    layout: BlockTable | None = None
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    itemsize: int = 4
    causal: bool = False

    def describe(self) -> str:
        """One sentence: what was taken, and why."""
        stored = f"{self.queries} x {self.keys} scores of each head"
        if self.tile is not None:
            queries, keys = self.tile
            does = f"holds {queries} x {keys} of the {stored} at a time"
        elif self.implementation == "mosaic_gpu":
            does = f"stores none of the {stored}; not measured on a GPU yet"
        elif self.implementation == "cudnn":
            does = f"stores none of the {stored}; cuDNN's workspace is not counted"
        else:
            does = f"holds all {stored}"
        return f"attention {self.implementation} ({self.why}): {does}{self._shares()}"

    def _shares(self) -> str:
        parts = [] if self.computed is None else [f"computes {self.computed:.1%} of them"]
        if self.layout is not None:
            name, size = self.layout.name, self.layout.block
            parts.append(f"layout {name}, blocks of {size}, shows {self.layout.share:.1%}")
        return "".join(f"; {part}" for part in parts)


_CALLS: contextvars.ContextVar[list[Call] | None] = contextvars.ContextVar("calls", default=None)


@contextlib.contextmanager
def calls_of_attention() -> Iterator[list[Call]]:
    """The calls of `attention` that are made meanwhile, in order; a cached trace makes none."""
    calls: list[Call] = []
    token = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(token)


_IN_FORCE: contextvars.ContextVar[tuple[BlockLayout, list[BlockTable]] | None]
_IN_FORCE = contextvars.ContextVar("layout in force", default=None)


@contextlib.contextmanager
def layout_in_force(layout: BlockLayout) -> Iterator[list[BlockTable]]:
    """Gives a layout to the calls of `attention` made meanwhile; a cached trace makes none.

    Yields:
      The tables that calls have taken so far.
    """
    taken: list[BlockTable] = []
    token = _IN_FORCE.set((layout, taken))
    try:
        yield taken
    finally:
        _IN_FORCE.reset(token)


@names_keywords()
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    segments: Both | None = None,
    positions: Both | None = None,
    window: int | None = None,
    layout: BlockLayout | BlockTable | None = None,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Softmax attention, `softmax(scale * query @ key^T) @ value`, over the keys that are seen.

    A query sees the keys for which all that is given holds: `causal`, `window`, `segments` and
    `layout`. One that sees none gives 0. Scores and softmax are float32 in every implementation;
    their results differ by rounding alone.

    Args:
      query: [batch, queries, heads, head_dim], any float dtype.
      key, value: [batch, keys, kv_heads, head_dim] in the dtype of `query`; kv_heads divides heads,
        and each serves heads / kv_heads neighbouring heads (arXiv:2305.13245).
      causal: a query sees the keys at its own position and before.
      segments: integers [batch, tokens], the text that each token belongs to: tokens of other texts
        in a row are not seen, and neither are keys of negative segments (padding). Or a pair, of
        queries and of keys.
      positions: integers [batch, tokens] which `causal` and `window` compare; or a pair, of queries
        and of keys. None: the indices. Packed texts need `segments` alone.
      window: a query sees keys less than so many positions away, its own included.
      layout: which blocks of keys the queries of a block see, by their indices in the row: one of
        `zerojax.config`, such as `BigBirdLayout`, or a `zerojax.models.BlockTable` of at least as
        many tokens, which is cut. "chunked" computes the blocks alone that are seen, put together
        to tiles; "xla" computes all scores.
      scale: None: head_dim^-0.5.
      implementation: "xla" holds the scores of all queries and keys; "chunked" holds those of 512
        by 512 at a time and computes them again in the backward pass; "cudnn" is NVIDIA's fused
        kernel, for bfloat16 and float16 without segments, positions and layout; "mosaic_gpu" is
        zerojax's own for Hopper, with them, which no GPU has timed. "auto" is "cudnn"
        on GPUs where that can compute it, else "chunked" above 4096 keys or with a layout, else
        "xla".

    Returns:
      [batch, queries, heads, head_dim] in the dtype of `query`.

    Raises:
      TypeError: dtypes that are not floating-point, or differ; segments or positions that are not
        integers; a layout that is none.
      ValueError: shapes that do not belong together, a window below 1, an unknown implementation, a
        table of a layout for other heads or fewer tokens, or "cudnn" for what it cannot compute or
        on devices that are not NVIDIA GPUs.

    Example:
      >>> import jax, zerojax
      >>> x = jax.random.normal(jax.random.key(0), (2, 8, 4, 16))
      >>> out = zerojax.attention(x, x, x, causal=True, implementation="chunked")
      >>> out.shape
      (2, 8, 4, 16)
    """
    _check(query, key, value, window, implementation)
    where = _pair("segments", segments, query, key), _pair("positions", positions, query, key)
    visibility = Visibility(causal=causal, window=window)
    table = _table(layout, query, key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    split = current_split()
    if split is not None:  # a plan has refused layouts
        attend = functools.partial(attention, implementation=implementation)
        options = {"causal": causal, "window": window, "scale": scale}
        rows = {"segments": where[0], "positions": where[1]}
        return attend_over(split, attend, query, key, value, **options, **rows)
    device = device_here()
    more = {"segments": segments, "positions": positions, "layout": table}
    given = frozenset(name for name, value in more.items() if value is not None)
    chosen, why = choose(implementation, device, query, key, visibility, given, table)
    calls = _CALLS.get()
    if calls is not None:
        call = Call(
            *(chosen, why, query.shape[1], key.shape[1]),
            layout=table,
            heads=query.shape[2],
            kv_heads=key.shape[2],
            head_dim=query.shape[3],
            itemsize=query.dtype.itemsize,
            causal=causal,
        )
        groups = query.shape[2] // key.shape[2]
        calls.append(_with_tiles(call, visibility, positions is not None, groups))
    if chosen == "cudnn" and device.where != "plan":
        alone = device.where == "alone"
        run = functools.partial(
            _cudnn_of_jax if alone else cudnn_attention, visibility=visibility, scale=scale
        )
        return run(query, key, value) if alone else on_each_device(run)(query, key, value)
    if chosen == "mosaic_gpu" and device.where != "plan":
        run = functools.partial(kernel_attention, visibility=visibility, scale=scale, table=table)
        pairs = {"segments": where[0], "positions": where[1]}
        rows = {name: pair for name, pair in pairs.items() if pair is not None}
        return on_each_device(run, rows)(query, key, value)
    attend = _stored if chosen == "xla" else chunked_attention
    if chosen in ("cudnn", "mosaic_gpu") and table is None:
        # Its products, to within one 64th of those of causal attention.
        attend = functools.partial(chunked_attention, block=-(-key.shape[1] // 64))
    run = functools.partial(
        attend,
        visibility=visibility,
        scale=scale,
        segments=where[0],
        positions=where[1],
        table=table,
    )
    return _in_float32_on_cpus(run, query, key, value)


def attend_to_cache(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    positions: jax.Array,
    window: int | None,
    table: BlockTable | None,
) -> jax.Array:
    """Causal attention of new tokens to a cache of keys; no gradient is meant.

    Args:
      query, key, value: see `attention`; the keys are at 0, 1, 2, ...
      positions: integers [queries], where the queries are; not known before the arrays.
      window: see `attention`.
      table: the blocks that are seen, of at least as many tokens; None: all.
    """
    visibility = Visibility(causal=True, window=window)
    seen = visibility.is_visible(positions[None], jnp.arange(key.shape[1])[None])
    assert seen is not None  # it is causal
    seen = seen[:, None]
    if table is not None:
        seen = seen & table.of_positions(positions, key.shape[1])[None]
    run = functools.partial(_masked, seen=seen, scale=query.shape[-1] ** -0.5)
    return _in_float32_on_cpus(run, query, key, value)


def _with_tiles(call: Call, visibility: Visibility, has_positions: bool, groups: int) -> Call:
    """What a call holds and computes."""
    if call.implementation in ("cudnn", "mosaic_gpu"):
        return call
    if call.implementation == "xla":
        return dataclasses.replace(call, computed=None if call.layout is None else 1.0)
    tiles = tiles_of(
        extent_of(
            call.queries,
            call.keys,
            visibility=visibility,
            table=call.layout,
            has_positions=has_positions,
            groups=groups,
        )
    )
    has_share = call.layout is not None or visibility.window is not None
    computed = tiles.num_scores / (call.queries * call.keys) if has_share else None
    return dataclasses.replace(call, tile=tiles.shape, computed=computed)


def check_implementation(option: str, name: str) -> None:
    """Raises ValueError for a name that `attention` does not know."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"{option}={name!r} is not valid; use {', '.join(IMPLEMENTATIONS)}")


def _in_float32_on_cpus(
    run: Callable[..., jax.Array], query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """XLA has no float16 products on CPUs.

    (Both ask for float16 products that are summed in float32, which XLA:CPU refuses when it
    compiles; seen with jax 0.10.2 and 0.12.)
    """
    if query.dtype != jnp.float16:
        return run(query, key, value)

    def in_float32(*operands: jax.Array) -> jax.Array:
        return run(*(x.astype(jnp.float32) for x in operands)).astype(jnp.float16)

    return lax.platform_dependent(query, key, value, cpu=in_float32, default=run)


def _cudnn_of_jax(
    query: jax.Array, key: jax.Array, value: jax.Array, *, visibility: Visibility, scale: float
) -> jax.Array:
    """Where no mesh tells how arrays are split: JAX's call has a rule for the compiler."""
    window = None if visibility.window is None else (visibility.window - 1, 0)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=scale,
        is_causal=visibility.causal,
        local_window_size=window,
        implementation="cudnn",
    )


def _stored(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    visibility: Visibility,
    scale: float,
    segments: tuple[jax.Array, jax.Array] | None,
    positions: tuple[jax.Array, jax.Array] | None,
    table: BlockTable | None,
) -> jax.Array:
    """`jax.nn.dot_product_attention` by XLA, which holds all scores."""
    run = functools.partial(jax.nn.dot_product_attention, scale=scale, implementation="xla")
    plain = positions is None and visibility.window is None and table is None
    if plain and segments is None:
        return run(query, key, value, is_causal=visibility.causal)
    if positions is None:
        at = (jnp.arange(x.shape[1])[None] for x in (query, key))
    else:
        at = iter(positions)
    seen = visibility.is_visible(*at)
    if segments is not None:
        of_query, of_key = segments
        own = (of_query[:, :, None] == of_key[:, None, :]) & (of_key >= 0)[:, None, :]
        seen = own if seen is None else own & jnp.broadcast_to(seen, own.shape)
    seen = None if seen is None else seen[:, None]
    if table is not None:
        blocks = table.of_tokens(query.shape[1], key.shape[1])[None]
        seen = blocks if seen is None else blocks & seen
    if seen is None:
        return run(query, key, value)
    return _masked(query, key, value, seen, scale)


def _masked(
    query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array, scale: float
) -> jax.Array:
    """By XLA with `seen`: bool [batch or 1, heads or 1, queries, keys]; 0 where none is seen."""
    out = jax.nn.dot_product_attention(
        query, key, value, mask=seen, scale=scale, implementation="xla"
    )
    sees_any = jnp.moveaxis(jnp.any(seen, axis=-1), 1, 2)[..., None]
    return jnp.where(sees_any, out, 0)


# --- what is given --------------------------------------------------------------------------------


def _check(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int | None,
    implementation: str,
) -> None:
    arrays = {"query": query, "key": key, "value": value}
    for name, array in arrays.items():
        if array.ndim != 4:
            raise ValueError(
                f"{name} has shape {array.shape}, but must be [batch, tokens, heads, head_dim]; "
                f"write {name}[None] for a single sequence"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype != query.dtype:
            raise TypeError(
                f"{name} is {array.dtype} and query is {query.dtype}; give all three in one "
                "floating-point dtype"
            )
    if key.shape != value.shape:
        raise ValueError(f"key has shape {key.shape} and value {value.shape}; give the same shape")
    batch, _, heads, features = query.shape
    if (key.shape[0], key.shape[3]) != (batch, features):
        raise ValueError(
            f"key has shape {key.shape}, and query {query.shape}: batch and head_dim have to be "
            f"{batch} and {features}"
        )
    if heads % key.shape[2]:
        raise ValueError(
            f"query has {heads} heads, which is not a multiple of the {key.shape[2]} of key and "
            f"value; use 1 or {heads} key/value heads"
        )
    if window is not None and (isinstance(window, bool) or window < 1):
        raise ValueError(f"window={window!r} must be at least 1; 1 is the token itself")
    check_implementation("implementation", implementation)


def _table(
    layout: BlockLayout | BlockTable | None, query: jax.Array, key: jax.Array
) -> BlockTable | None:
    """The table of a layout for these tokens and heads, or of the one that is in force."""
    in_force = _IN_FORCE.get()
    if in_force is None:
        return _own_table(layout, query, key)
    table = _own_table(in_force[0], query, key)
    own = _own_table(layout, query, key)
    if own is not None and own != table:
        raise ValueError(
            f"layout={in_force[0].mode} is in force, and a call of zerojax.attention has another "
            f"one ({own.name}); give it in one place"
        )
    assert table is not None
    in_force[1].append(table)
    return table


def _own_table(
    layout: BlockLayout | BlockTable | None, query: jax.Array, key: jax.Array
) -> BlockTable | None:
    queries, heads, keys = query.shape[1], query.shape[2], key.shape[1]
    if isinstance(layout, BlockLayout):
        layout = layout_table(layout, num_heads=heads, num_tokens=max(queries, keys))
    if layout is None:
        return None
    if not isinstance(layout, BlockTable):
        names = ", ".join(one.__name__ for one in LAYOUTS.values())
        raise TypeError(
            f"layout is a {type(layout).__name__}; give a layout of zerojax.config ({names}) or a "
            "zerojax.models.BlockTable"
        )
    if layout.seen.shape[0] not in (1, heads):
        raise ValueError(
            f"the table of the layout is for {layout.seen.shape[0]} heads and query has {heads}; "
            f"make it for {heads}, or for 1, which all heads share"
        )
    return layout.cut(queries, keys)


def _pair(
    name: str, given: Any, query: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array] | None:
    """Integers of queries and of keys, [batch, tokens] each."""
    if given is None:
        return None
    pair = given if isinstance(given, tuple) else (given, given)
    if len(pair) != 2:
        raise ValueError(
            f"{name} has {len(pair)} entries; give one array, or one each of queries and keys"
        )
    for array, tokens in zip(pair, (query, key), strict=True):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name} is {array.dtype}, but must be integers; use .astype('int32')")
        if array.shape != tokens.shape[:2]:
            raise ValueError(
                f"{name} has shape {array.shape}, and the tokens {tokens.shape[:2]}; give one "
                "integer for each token, [batch, tokens]"
            )
    return pair
