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
from zerojax.operators.attention_branches import Branch, attention_of_branch
from zerojax.operators.attention_choice import (
    IMPLEMENTATIONS,
    Device,
    Implementation,
    choose,
    device_here,
    kind_of,
    measured_choice,
    on_each_device,
)
from zerojax.operators.attention_tiles import tiles_of
from zerojax.operators.chunked_attention import Visibility, chunked_attention, extent_of
from zerojax.operators.context import attend_over, current_split
from zerojax.operators.cudnn_attention import cudnn_attention
from zerojax.operators.kernel_attention import kernel_attention
from zerojax.operators.sparse_layouts import BlockTable, layout_table
from zerojax.operators.stored_attention import masked_attention, stored_attention

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
      kind: words for its sizes (`attention_choice.kind_of`), where "auto" may take what was
        measured; None elsewhere.
      rows, dtype, window: of the query, and as it was asked for.
      layers: (layers that make this call, layers of all) where a layer's kind decides.
      has_sinks: whether heads have scores of no key.
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
    kind: str | None = None
    rows: int = 1
    dtype: str = "float32"
    window: int | None = None
    layers: tuple[int, int] | None = None
    has_sinks: bool = False

    def describe(self) -> str:
        """One sentence: what was taken, and why."""
        if self.layers is None:
            return self._describe()
        seen = "all tokens" if self.window is None else f"a window of {self.window}"
        return f"{self._describe()}; {self.layers[0]} of {self.layers[1]} layers, {seen}"

    def _describe(self) -> str:
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


@dataclasses.dataclass(frozen=True)
class WindowOfLayer:
    """A window that depends on the layer, one of a few that are known before any array.

    Attributes:
      windows: of each kind of layer, at least two; None: all tokens.
      index: int32 [], which of them is this layer's.
      layers: for each of them (layers that have it, layers of all); (): not known.
    """

    windows: tuple[int | None, ...]
    index: jax.Array
    layers: tuple[tuple[int, int], ...] = ()

    def limit(self) -> jax.Array:
        """The window as data: int32 [], above any distance where there is none."""
        none = jnp.iinfo(jnp.int32).max
        sizes = [none if window is None else window for window in self.windows]
        return jnp.asarray(sizes, jnp.int32)[self.index]


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
    softcap: float | None = None,
    sinks: jax.Array | None = None,
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
        `zerojax.config`, such as `BigBirdLayout`, or a `zerojax.operators.BlockTable` of at least
        as many tokens, which is cut. "chunked" computes only the blocks that are seen, joined into
        tiles; "xla" computes all scores.
      scale: None: head_dim^-0.5.
      softcap: scores become cap * tanh(scores / cap), as in Gemma 2 (arXiv:2408.00118).
      sinks: [heads], a score of each head that is of no key: it takes part in the softmax and adds
        nothing, as in gpt-oss.
      implementation: "xla" holds the scores of all queries and keys; "chunked" holds those of 512
        by 512 at a time and computes them again in the backward pass; "cudnn" is NVIDIA's fused
        kernel, for bfloat16 and float16 without segments, positions, layout, softcap and sinks;
        "mosaic_gpu" is zerojax's own for Hopper, with the first three, which no GPU has timed.
        "auto" is "cudnn"
        on GPUs where that can compute it, else "chunked" above 4096 keys or with a layout, else
        "xla"; a run on GPUs may have measured another to be faster (`zerojax.tune`).

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
    return attend_with(
        query,
        key,
        value,
        causal=causal,
        segments=segments,
        positions=positions,
        window=window,
        layout=layout,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        implementation=implementation,
    )


def attend_with(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    segments: Both | None = None,
    positions: Both | None = None,
    window: int | WindowOfLayer | None = None,
    layout: BlockLayout | BlockTable | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """`attention`, whose window may be the layer's."""
    by_layer = window if isinstance(window, WindowOfLayer) else None
    windows: tuple[Any, ...] = (window,) if by_layer is None else by_layer.windows
    _check(query, key, value, windows, implementation, softcap, sinks)
    where = _pair("segments", segments, query, key), _pair("positions", positions, query, key)
    table = _table(layout, query, key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    split = current_split()
    if split is not None:  # a plan has refused layouts
        assert sinks is None, "a plan has refused sinks"
        attend = functools.partial(attend_with, implementation=implementation)
        options: dict[str, Any] = {"causal": causal, "scale": scale, "softcap": softcap}
        options |= {"segments": where[0], "positions": where[1]}
        if by_layer is None:
            return attend_over(split, attend, query, key, value, window=windows[0], **options)

        def of_layer(index: jax.Array, *arrays: jax.Array, **given: Any) -> jax.Array:
            given["window"] = dataclasses.replace(by_layer, index=index)
            return attend(*arrays, **given)

        options |= {"window": None, "index": by_layer.index}
        return attend_over(split, of_layer, query, key, value, **options)
    device = device_here()
    more = {"segments": segments, "positions": positions, "layout": table}
    more |= {"softcap": softcap, "sinks": sinks}
    given = frozenset(name for name, value in more.items() if value is not None)
    calls = [
        _call(query, key, Visibility(causal, each), given, table, implementation, device)
        for each in windows
    ]
    if by_layer is not None and by_layer.layers:
        counted = zip(calls, by_layer.layers, strict=True)
        calls = [dataclasses.replace(call, layers=layers) for call, layers in counted]
    if (noted := _CALLS.get()) is not None:
        noted.extend(calls)
    pairs = {"segments": where[0], "positions": where[1]}
    return _run(
        query,
        key,
        value,
        {name: pair for name, pair in pairs.items() if pair is not None},
        calls=tuple(calls),
        by_layer=by_layer,
        where=device.where,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
    )


def _call(
    query: jax.Array,
    key: jax.Array,
    visibility: Visibility,
    given: frozenset[str],
    table: BlockTable | None,
    implementation: Implementation,
    device: Device,
) -> Call:
    """What computes a call, and why."""
    chosen, why = choose(implementation, device, query, key, visibility, given, table)
    kind = kind_of(query, key, visibility, given) if implementation == "auto" else None
    call = Call(
        *(measured_choice(kind) or chosen, why, query.shape[1], key.shape[1]),
        layout=table,
        heads=query.shape[2],
        kv_heads=key.shape[2],
        head_dim=query.shape[3],
        itemsize=query.dtype.itemsize,
        causal=visibility.causal,
        kind=kind,
        rows=query.shape[0],
        dtype=str(query.dtype),
        window=visibility.window,
        has_sinks="sinks" in given,
    )
    return _with_tiles(call, visibility, "positions" in given, query.shape[2] // key.shape[2])


def _run(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: dict[str, Any],
    *,
    calls: tuple[Call, ...],
    by_layer: WindowOfLayer | None,
    where: str,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """What was chosen, on the arrays; `rows` are the segments and positions that are given."""
    table, causal = calls[0].layout, calls[0].causal
    chosen = {call.implementation for call in calls}
    common: dict[str, Any] = {"scale": scale, "table": table}
    if chosen == {"xla"}:
        window: Any = calls[0].window if by_layer is None else by_layer.limit()
        seen = Visibility(causal=causal, window=window)
        run = functools.partial(
            stored_attention, visibility=seen, softcap=softcap, sinks=sinks, **common, **rows
        )
        return _in_float32_on_cpus(run, query, key, value)
    if by_layer is not None or sinks is not None:
        branches = tuple(_branch(call, where) for call in calls)
        index = None if by_layer is None else by_layer.index
        run = functools.partial(
            attention_of_branch, branches=branches, causal=causal, softcap=softcap, **common
        )
        if {branch.implementation for branch in branches} != {"chunked"}:
            return on_each_device(run, index, rows, sinks)(query, key, value)
        run = functools.partial(_in_order, run, index, rows, sinks)
        return _in_float32_on_cpus(run, query, key, value)
    seen = Visibility(causal=causal, window=calls[0].window)
    implementation = calls[0].implementation
    if implementation == "cudnn" and where != "plan":
        alone = where == "alone"
        run = functools.partial(
            _cudnn_of_jax if alone else cudnn_attention, visibility=seen, scale=scale
        )
        return run(query, key, value) if alone else on_each_device(run)(query, key, value)
    if implementation == "mosaic_gpu" and where != "plan":
        run = functools.partial(kernel_attention, visibility=seen, **common)
        return on_each_device(run, rows)(query, key, value)
    block = _planned_block(implementation, key.shape[1], table)
    run = functools.partial(
        chunked_attention, visibility=seen, softcap=softcap, block=block, **common, **rows
    )
    return _in_float32_on_cpus(run, query, key, value)


def _in_order(
    run: Callable[..., jax.Array], index: Any, rows: Any, sinks: Any, *arrays: Any
) -> Any:
    return run(*arrays, index, rows, sinks)


def _branch(call: Call, where: str) -> Branch:
    """How a layer with this call is computed beside others of other calls."""
    if call.implementation == "xla":  # all scores as one tile
        return Branch("chunked", call.window, max(call.queries, call.keys), call.layers)
    if where == "plan" or call.implementation == "chunked":
        block = _planned_block(call.implementation, call.keys, call.layout)
        return Branch("chunked", call.window, block, call.layers)
    fused: Any = call.implementation
    return Branch(fused, call.window, None, call.layers)


def _planned_block(
    implementation: Implementation, keys: int, table: BlockTable | None
) -> int | None:
    """Tokens of a block of "chunked" where it stands for a library's call in a plan's trace.

    Its products are then those of the call, to within one 64th of those of causal attention.
    """
    return -(-keys // 64) if implementation != "chunked" and table is None else None


def attend_to_cache(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    positions: jax.Array,
    window: int | WindowOfLayer | None,
    table: BlockTable | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of new tokens to a cache of keys; no gradient is meant.

    Args:
      query, key, value: see `attention`; the keys are at 0, 1, 2, ...
      positions: integers [queries], where the queries are; not known before the arrays.
      window, scale, softcap, sinks: see `attention`; the window may be the layer's.
      table: the blocks that are seen, of at least as many tokens; None: all.
    """
    limit: Any = window.limit() if isinstance(window, WindowOfLayer) else window
    visibility = Visibility(causal=True, window=limit)
    seen = visibility.is_visible(positions[None], jnp.arange(key.shape[1])[None])
    assert seen is not None  # it is causal
    seen = seen[:, None]
    if table is not None:
        seen = seen & table.of_positions(positions, key.shape[1])[None]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    run = functools.partial(masked_attention, seen=seen, scale=scale, softcap=softcap, sinks=sinks)
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


# --- what is given --------------------------------------------------------------------------------


def _check(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    windows: tuple[Any, ...],
    implementation: str,
    softcap: float | None,
    sinks: jax.Array | None,
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
    for window in windows:
        if window is not None and (isinstance(window, bool) or window < 1):
            raise ValueError(f"window={window!r} must be at least 1; 1 is the token itself")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap!r} must be above 0; use None for none")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(
            f"sinks has shape {sinks.shape}, and query {heads} heads; give one score for each head"
        )
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
            "zerojax.operators.BlockTable"
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
