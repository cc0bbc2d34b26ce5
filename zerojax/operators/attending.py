"""Attention for any model: `zerojax.attention`, its implementations and the choice between them.

All implementations compute the same function of the same arguments, including packed texts. An
implementation that does not support the arguments raises an error.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.config.attention_layouts import LAYOUTS, BlockLayout
from zerojax.config.checks import names_keywords
from zerojax.config.late_dataclasses import dataclass
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


@dataclass(frozen=True)
class Call:
    """Record of one call of `attention` while a model was traced.

    Attributes:
      implementation: implementation that computes the call.
      why: `SET_BY_CALL`, or the reason for the choice of "auto".
      queries, keys: numbers of tokens.
      tile: numbers of queries and keys whose scores "chunked" stores at a time.
      computed: fraction of the scores that is computed, if there is a layout or a window.
      layout: block table of the layout, if any.
      heads, kv_heads: numbers of query heads and of key/value heads.
      head_dim: number of features of a head.
      itemsize: size of an element of the query in bytes.
      causal: argument of the call.
      kind: description of the call's sizes (`attention_choice.kind_of`) if "auto" may use a
        measured choice; None otherwise.
      rows, dtype: number of sequences and dtype of the query.
      window: argument of the call.
      layers: (number of layers that make this call, number of all layers) if the window depends on
        the layer.
      has_sinks: whether heads have attention sinks.
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
        """Describes in one sentence the implementation and the reason for it."""
        if self.layers is None:
            return self._describe()
        seen = "all tokens" if self.window is None else f"a window of {self.window}"
        return f"{self._describe()}; {self.layers[0]} of {self.layers[1]} layers, {seen}"

    def _describe(self) -> str:
        stored = f"{self.queries} x {self.keys} scores of each head"
        if self.tile is not None:
            queries, keys = self.tile
            does = f"stores {queries} x {keys} of the {stored} at a time"
        elif self.implementation == "mosaic_gpu":
            does = f"stores none of the {stored}; not measured on a GPU yet"
        elif self.implementation == "cudnn":
            does = f"stores none of the {stored}; cuDNN's workspace is not counted"
        else:
            does = f"stores all {stored}"
        return f"attention {self.implementation} ({self.why}): {does}{self._shares()}"

    def _shares(self) -> str:
        parts = [] if self.computed is None else [f"computes {self.computed:.1%} of these scores"]
        if self.layout is not None:
            name, size = self.layout.name, self.layout.block
            parts.append(
                f"layout {name}, blocks of {size}, makes {self.layout.share:.1%} of them visible"
            )
        return "".join(f"; {part}" for part in parts)


_CALLS: contextvars.ContextVar[list[Call] | None] = contextvars.ContextVar("calls", default=None)


@contextlib.contextmanager
def calls_of_attention() -> Iterator[list[Call]]:
    """Yields a list that collects the calls of `attention` inside this context, in order.

    A cached trace does not call `attention` again, so its calls are missing.
    """
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
    """Applies a layout to the calls of `attention` inside this context.

    A cached trace does not call `attention` again, so the layout does not apply to it.

    Yields:
      A list of the block tables that calls have used so far.
    """
    taken: list[BlockTable] = []
    token = _IN_FORCE.set((layout, taken))
    try:
        yield taken
    finally:
        _IN_FORCE.reset(token)


@dataclass(frozen=True)
class WindowOfLayer:
    """Attention window that depends on the layer, chosen from a few static sizes.

    Attributes:
      windows: window size for each kind of layer, at least two kinds; None: all tokens.
      index: int32 [], kind of this layer.
      layers: for each kind, (number of layers of this kind, number of all layers); () if unknown.
    """

    windows: tuple[int | None, ...]
    index: jax.Array
    layers: tuple[tuple[int, int], ...] = ()

    def limit(self) -> jax.Array:
        """Returns the window as int32 []; a number above any distance if there is no window."""
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
    """Computes softmax attention, `softmax(scale * query @ key^T) @ value`, over the visible keys.

    A query sees the keys that `causal`, `window`, `segments` and `layout` all allow. The output of
    a query that sees no key is 0. Scores and softmax are float32 in every implementation, so
    results differ only by rounding. Only "xla" has second derivatives.

    Args:
      query: [batch, queries, heads, head_dim], any float dtype.
      key, value: [batch, keys, kv_heads, head_dim] in the dtype of `query`. kv_heads divides heads;
        each key/value head serves heads / kv_heads neighbouring heads (arXiv:2305.13245).
      causal: whether a query sees only keys at its own position and before.
      segments: integers [batch, tokens], index of the text of each token. A query sees neither
        tokens of other texts nor keys of negative segments (padding). A pair gives separate arrays
        for queries and keys.
      positions: integers [batch, tokens] that `causal` and `window` compare. A pair gives separate
        arrays for queries and keys. None uses the token indices. Packed texts need only `segments`.
      window: maximum distance plus 1: a query sees keys less than `window` positions away, and
        itself.
      layout: block-sparse mask by token index: a layout of `zerojax.config`, such as
        `BigBirdLayout`, or a `zerojax.operators.BlockTable`, which is cut to the number of tokens.
        "chunked" computes only the visible blocks, joined into tiles; "xla" computes all scores.
      scale: factor of the scores; None uses head_dim^-0.5.
      softcap: limit of the scores, which become softcap * tanh(scores / softcap), as in Gemma 2
        (arXiv:2408.00118).
      sinks: attention sinks [heads], as in gpt-oss: an additional score per head that is part of
        the softmax's denominator and has no value.
      implementation: "xla" stores the scores of all queries and keys. "chunked" stores 512 by 512
        scores at a time and recomputes them in the backward pass. "cudnn" is NVIDIA's fused kernel,
        for bfloat16 and float16 without segments, positions, layout, softcap and sinks.
        "mosaic_gpu" is zerojax's own kernel for Hopper, which also supports segments, positions and
        layout; it has not been timed on a GPU. "auto" chooses "cudnn" on GPUs if it supports the
        call, else "chunked" above 4096 keys or with a layout, else "xla". On GPUs a run may replace
        this choice by a faster, measured one (`zerojax.tune`).

    Returns:
      [batch, queries, heads, head_dim] in the dtype of `query`.

    Raises:
      TypeError: dtypes are not floating-point, or differ; segments or positions are not integers;
        `layout` is not a layout.
      ValueError: shapes do not match, the window is below 1, the softcap is not above 0, the
        implementation is unknown, a block table has other heads or fewer tokens, or "cudnn" or
        "mosaic_gpu" does not support the call or the devices.

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
    """Computes `zerojax.attention` with a window that may depend on the layer (`WindowOfLayer`)."""
    by_layer = window if isinstance(window, WindowOfLayer) else None
    windows: tuple[Any, ...] = (window,) if by_layer is None else by_layer.windows
    _check(query, key, value, windows, implementation, softcap, sinks)
    where = _pair("segments", segments, query, key), _pair("positions", positions, query, key)
    table = _table(layout, query, key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    split = current_split()
    if split is not None:  # planning has already refused layouts for split sequences
        assert sinks is None, "planning refuses sinks"
        attend = functools.partial(attend_with, implementation=implementation)
        options: dict[str, Any] = {"causal": causal, "scale": scale, "softcap": softcap}
        options |= {"segments": where[0], "positions": where[1]}
        if by_layer is None:
            return attend_over(split, attend, query, key, value, window=windows[0], **options)

        def of_layer(index: jax.Array, *arrays: jax.Array, **options: Any) -> jax.Array:
            options["window"] = dataclasses.replace(by_layer, index=index)
            return attend(*arrays, **options)

        options |= {"window": None, "index": by_layer.index}
        return attend_over(split, of_layer, query, key, value, **options)
    device = device_here()
    more = {"segments": segments, "positions": positions, "layout": table}
    more |= {"softcap": softcap, "sinks": sinks}
    features = frozenset(name for name, value in more.items() if value is not None)
    calls = [
        _call(query, key, Visibility(causal, each), features, table, implementation, device)
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
    features: frozenset[str],
    table: BlockTable | None,
    implementation: Implementation,
    device: Device,
) -> Call:
    """Chooses the implementation of a call, and returns the record of the call."""
    chosen, why = choose(implementation, device, query, key, visibility, features, table)
    kind = kind_of(query, key, visibility, features) if implementation == "auto" else None
    measured = measured_choice(kind)
    if measured is not None and measured != chosen:
        chosen, why = measured, "auto: measured on these devices"
    call = Call(
        *(chosen, why, query.shape[1], key.shape[1]),
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
        has_sinks="sinks" in features,
    )
    return _with_tiles(call, visibility, "positions" in features, query.shape[2] // key.shape[2])


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
    """Runs the chosen implementation; `rows` contains segments and positions, if given."""
    table, causal = calls[0].layout, calls[0].causal
    chosen = {call.implementation for call in calls}
    common: dict[str, Any] = {"scale": scale, "table": table}
    # Stored scores have no static tiles, so the window of a layer may be a traced number and needs
    # no branch.
    if chosen == {"xla"}:
        window: Any = calls[0].window if by_layer is None else by_layer.limit()
        seen = Visibility(causal=causal, window=window)
        run = functools.partial(
            stored_attention, visibility=seen, softcap=softcap, sinks=sinks, **common, **rows
        )
        return _in_float32_on_cpus(run, query, key, value)
    # JAX's own derivative of a conditional saves the residuals of every branch.
    if by_layer is not None or sinks is not None:
        branches = tuple(_branch(call, where) for call in calls)
        index = None if by_layer is None else by_layer.index
        run = functools.partial(
            attention_of_branch, branches=branches, causal=causal, softcap=softcap, **common
        )
        # The compiler can partition "chunked"; only library calls and kernels need a manual axis.
        if {branch.implementation for branch in branches} != {"chunked"}:
            return on_each_device(run, index, rows, sinks)(query, key, value)
        # For float16 on CPUs all operands are cast, so only the arrays may be operands.
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
    # In a plan "cudnn" and "mosaic_gpu" come here too, with about the FLOPs of the library.
    block = _planned_block(implementation, key.shape[1], table)
    run = functools.partial(
        chunked_attention, visibility=seen, softcap=softcap, block=block, **common, **rows
    )
    return _in_float32_on_cpus(run, query, key, value)


def _in_order(
    run: Callable[..., jax.Array],
    index: jax.Array | None,
    rows: Mapping[str, Any],
    sinks: jax.Array | None,
    *arrays: jax.Array,
) -> Any:
    return run(*arrays, index, rows, sinks)


def _branch(call: Call, where: str) -> Branch:
    """Builds the `Branch` that computes this call in a model whose layers make different calls."""
    if call.implementation == "xla":  # becomes "chunked" with all scores in one tile
        return Branch("chunked", call.window, max(call.queries, call.keys), call.layers)
    if where == "plan" or call.implementation == "chunked":
        block = _planned_block(call.implementation, call.keys, call.layout)
        return Branch("chunked", call.window, block, call.layers)
    fused: Any = call.implementation
    return Branch(fused, call.window, None, call.layers)


def _planned_block(
    implementation: Implementation, keys: int, table: BlockTable | None
) -> int | None:
    """Returns the block size with which "chunked" replaces a library call in the trace of a plan.

    The matrix products of the trace then equal those of the library call to within 1/64 for causal
    attention. None uses the default block size.
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
    code_scales: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Computes causal attention of new tokens to a cache of keys, for inference only.

    Args:
      query, key, value: arrays as for `attention`; the keys have positions 0, 1, 2, ...
      positions: positions of the queries, integers [queries] or [batch, queries]; may be traced.
      window: window as for `attention`, or a `WindowOfLayer`.
      table: mask by blocks, for at least as many tokens; None makes all keys visible.
      scale, softcap, sinks: options of the scores, as for `attention`.
      code_scales: factors of keys and values that are codes, as for `masked_attention`.
    """
    limit: Any = window.limit() if isinstance(window, WindowOfLayer) else window
    visibility = Visibility(causal=True, window=limit)
    rows = positions if positions.ndim == 2 else positions[None]
    seen = visibility.is_visible(rows, jnp.arange(key.shape[1])[None])
    assert seen is not None  # because the call is causal
    seen = seen[:, None]
    if table is not None:
        seen = seen & jnp.moveaxis(table.of_positions(rows, key.shape[1]), 1, 0)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    options = {"scale": scale, "softcap": softcap, "sinks": sinks, "code_scales": code_scales}
    run = functools.partial(masked_attention, seen=seen, **options)
    return _in_float32_on_cpus(run, query, key, value)


def _with_tiles(call: Call, visibility: Visibility, has_positions: bool, groups: int) -> Call:
    """Adds to a call record the tile of scores it stores and the fraction of scores it computes."""
    if call.implementation in ("cudnn", "mosaic_gpu"):
        return call
    if call.implementation == "xla":
        # "xla" also computes the scores that a layout masks.
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
    """Raises a ValueError if `name` is not an implementation of `attention`."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"{option}={name!r} is not valid; use {', '.join(IMPLEMENTATIONS)}")


def _in_float32_on_cpus(
    run: Callable[..., jax.Array], query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Runs `run`; for float16 inputs on CPUs, in float32.

    XLA:CPU does not compile float16 products with float32 accumulation, which "xla" and "chunked"
    use; seen with jax 0.10.2 and 0.12.
    """
    if query.dtype != jnp.float16:
        return run(query, key, value)

    def in_float32(*operands: jax.Array) -> jax.Array:
        return run(*(x.astype(jnp.float32) for x in operands)).astype(jnp.float16)

    return lax.platform_dependent(query, key, value, cpu=in_float32, default=run)


def _cudnn_of_jax(
    query: jax.Array, key: jax.Array, value: jax.Array, *, visibility: Visibility, scale: float
) -> jax.Array:
    """Calls cuDNN through JAX's function, which the compiler can partition; for use without a
    mesh."""
    # JAX counts the keys before the query, while `window` also counts the query's own.
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


# --- checks of the arguments ----------------------------------------------------------------------


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
                f"use {name}[None] for a single sequence"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype != query.dtype:
            raise TypeError(
                f"{name} is {array.dtype} and query is {query.dtype}; cast query, key and value to "
                "one floating-point dtype"
            )
    if key.shape != value.shape:
        raise ValueError(f"key has shape {key.shape} and value {value.shape}; they must be equal")
    batch, _, heads, features = query.shape
    if (key.shape[0], key.shape[3]) != (batch, features):
        raise ValueError(
            f"key has shape {key.shape} and query {query.shape}; batch and head_dim of the key "
            f"must be {batch} and {features}"
        )
    if heads % key.shape[2]:
        raise ValueError(
            f"query has {heads} heads, which is not a multiple of the {key.shape[2]} heads of key "
            f"and value; use 1 or {heads} key/value heads"
        )
    for window in windows:
        # `True` is an integer in Python, and would pass as a window of 1.
        if window is not None and (isinstance(window, bool) or window < 1):
            raise ValueError(f"window={window!r} must be at least 1 (1: only the token itself)")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap!r} must be above 0; use None for no softcap")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(
            f"sinks has shape {sinks.shape}, but must be ({heads},): one score for each query head"
        )
    check_implementation("implementation", implementation)


def _table(
    layout: BlockLayout | BlockTable | None, query: jax.Array, key: jax.Array
) -> BlockTable | None:
    """Returns the block table of the call's or the run's layout, for these tokens and heads."""
    in_force = _IN_FORCE.get()
    if in_force is None:
        return _own_table(layout, query, key)
    table = _own_table(in_force[0], query, key)
    assert table is not None
    own = _own_table(layout, query, key)
    if own is not None and own != table:
        raise ValueError(
            f"a call of zerojax.attention has layout={own.name} with blocks of {own.block}, but "
            f"sparse_attention of the ds_config is {table.name} with blocks of {table.block}; "
            "remove layout= from the call, or sparse_attention from the ds_config"
        )
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
        names = ", ".join(kind.__name__ for kind in LAYOUTS.values())
        raise TypeError(
            f"layout is a {type(layout).__name__}; use a layout of zerojax.config ({names}) or a "
            "zerojax.operators.BlockTable"
        )
    if layout.seen.shape[0] not in (1, heads):
        raise ValueError(
            f"the block table has {layout.seen.shape[0]} heads, but query has {heads}; "
            f"make it for {heads} heads, or for 1 head, which all heads share"
        )
    return layout.cut(queries, keys)


def _pair(
    name: str,
    integers: jax.Array | tuple[jax.Array, jax.Array] | None,
    query: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array] | None:
    """Returns integers [batch, tokens] for queries and for keys; None if the argument is None."""
    if integers is None:
        return None
    pair = integers if isinstance(integers, tuple) else (integers, integers)
    if len(pair) != 2:
        raise ValueError(
            f"{name} has {len(pair)} entries; use one array, or a pair for queries and keys"
        )
    for array, tokens in zip(pair, (query, key), strict=True):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name} is {array.dtype}, but must be integers; use .astype('int32')")
        if array.shape != tokens.shape[:2]:
            raise ValueError(
                f"{name} has shape {array.shape}, but must be [batch, tokens] = "
                f"{tokens.shape[:2]}: one integer for each token"
            )
    return pair
