"""Context that tells `zerojax.attention` how sequences are split while a model is traced.

A step sets this context around the model, so the model's code does not depend on devices.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.context.order import Order, order_of_tokens
from zerojax.operators.context.ring import ring_attention
from zerojax.operators.context.ways import ORDERS, Pair, Way, allgather_attention, ulysses_attention

SCOPE = "attention_over_context"
"""Named scope of operations of attention over a split sequence; visible in compiled programs.
"""


@dataclass(frozen=True)
class ContextSplit:
    """Split of sequences over a mesh axis.

    Attributes:
      axis: mesh axis, manual while the model is traced.
      devices: number of devices of the axis.
      way: method by which attention reaches the whole sequence.
      heads_axis: mesh axis over which the compiler splits heads (tensor parallelism), if any.
    """

    axis: str
    devices: int
    way: Way
    heads_axis: str | None = None

    @property
    def order(self) -> Order:
        return ORDERS[self.way]

    def in_order(self, array: jax.Array) -> jax.Array:
        """Reorders [rows, tokens, ...] of whole sequences to the order of tokens on the devices."""
        if self.order == "contiguous":
            return array
        there = order_of_tokens(self.order, array.shape[1], self.devices)
        return jnp.take(array, there, axis=1, unique_indices=True, mode="clip")


_SPLIT: contextvars.ContextVar[ContextSplit | None] = contextvars.ContextVar("split", default=None)


def current_split() -> ContextSplit | None:
    """Returns the split of sequences in the current trace; None if there is none."""
    return _SPLIT.get()


@contextlib.contextmanager
def sequences_split(split: ContextSplit | None) -> Iterator[None]:
    """Sets the split of sequences inside this context; models see the tokens of one device."""
    token = _SPLIT.set(split)
    try:
        yield
    finally:
        _SPLIT.reset(token)


def whole_length(tokens: int) -> int:
    """Returns the length of the whole sequence, given the number of tokens on this device."""
    split = current_split()
    return tokens if split is None else tokens * split.devices


def attend_over(
    split: ContextSplit,
    attend: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    segments: Pair | None,
    positions: Pair | None,
    softcap: float | None = None,
    index: jax.Array | None = None,
) -> jax.Array:
    """Computes attention of the tokens of this device over the whole sequence.

    If the compiler splits heads over an axis, a nested `shard_map` makes each device send only its
    own heads; otherwise XLA would gather the heads first.

    Args:
      split: split of the sequence.
      attend: `zerojax.attention` with the remaining options, for Ulysses and all-gather.
      query, key, value, segments, positions: arrays as for `zerojax.attention`, with the tokens of
        this device.
      causal, window, scale, softcap: options as for `zerojax.attention`.
      index: int32 [], first argument of `attend`, which selects the window of this layer. None if
        `window` applies to all layers. The method's collectives do not depend on it.

    Raises:
      ValueError: the method does not support the arguments.
    """
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} tokens and key has {key.shape[1]}; with context="
            f"{split.devices} both must be the same part of one sequence; use context=1"
        )
    if split.way == "ring" and (not causal or positions is not None):
        raise ValueError(
            "context_parallel='ring' supports only causal attention without positions; use "
            "context_parallel='ulysses' or 'allgather'"
        )
    assert split.way != "ring" or index is None, "planning refuses windows that depend on the layer"
    options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
    pairs = {"segments": segments, "positions": positions}
    rows = {name: pair for name, pair in pairs.items() if pair is not None}
    is_shared = {name for name, pair in rows.items() if pair[0] is pair[1]}

    def local(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        rows: dict[str, Pair],
        index: jax.Array | None,
    ) -> Any:
        # `shard_map` passes one array of a pair as two; as one object again, it is gathered once.
        pairs: Any = {name: (x[0], x[0]) if name in is_shared else x for name, x in rows.items()}
        arrays = query, key, value
        if split.way == "ring":
            rest = {"scale": scale, "window": window, "softcap": softcap}
            return ring_attention(*arrays, axis=split.axis, **rest, **pairs)
        way = ulysses_attention if split.way == "ulysses" else allgather_attention
        # `attend` now has whole sequences; it must not come back to this function.
        with sequences_split(None):
            own = () if index is None else (index,)
            whole = functools.partial(attend, *own, **options)
            return way(*arrays, axis=split.axis, attend=whole, **pairs)

    remaining = _axes_of_compiler()
    if remaining:
        heads = P(None, None, split.heads_axis)
        local = jax.shard_map(
            local,
            in_specs=(heads, heads, heads, P(), P()),
            out_specs=heads,
            axis_names=remaining,
            check_vma=False,
        )
    with jax.named_scope(SCOPE):
        return local(query, key, value, rows, index)


def _axes_of_compiler() -> set[str]:
    """Returns the mesh axes that are not manual in the current trace."""
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_names) - set(mesh.manual_axes)
