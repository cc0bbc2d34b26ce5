"""Placement of a sequence while a model is traced, which `zerojax.attention` asks for.

A step sets it around the model; the model itself says nothing of devices.
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
from jax.sharding import PartitionSpec as P

from zerojax.operators.context.order import Order, order_of_tokens
from zerojax.operators.context.ring import ring_attention
from zerojax.operators.context.ways import ORDERS, Pair, Way, allgather_attention, ulysses_attention

SCOPE = "attention_over_context"
"""In the names of the operations of attention over a split sequence, compiled ones too."""


@dataclasses.dataclass(frozen=True)
class ContextSplit:
    """Sequences that lie over an axis.

    Attributes:
      axis: its name; manual where the model is traced.
      devices: of the axis.
      way: how attention sees the whole sequence.
      heads_axis: the axis over which the compiler splits heads (tensor parallelism), if any.
    """

    axis: str
    devices: int
    way: Way
    heads_axis: str | None = None

    @property
    def order(self) -> Order:
        return ORDERS[self.way]

    def in_order(self, array: jax.Array) -> jax.Array:
        """[rows, tokens, ...] of whole sequences -> the same, as tokens lie on the axis."""
        if self.order == "contiguous":
            return array
        there = order_of_tokens(self.order, array.shape[1], self.devices)
        return jnp.take(array, there, axis=1, unique_indices=True, mode="clip")


_SPLIT: contextvars.ContextVar[ContextSplit | None] = contextvars.ContextVar("split", default=None)


def current_split() -> ContextSplit | None:
    """How sequences lie where a model is traced now; None: each is whole on its device."""
    return _SPLIT.get()


@contextlib.contextmanager
def sequences_split(split: ContextSplit | None) -> Iterator[None]:
    """Models that are traced meanwhile see the tokens of one device of `split.axis`."""
    token = _SPLIT.set(split)
    try:
        yield
    finally:
        _SPLIT.reset(token)


def whole_length(tokens: int) -> int:
    """Tokens of a whole sequence of which this device has so many."""
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
    """Attention of the tokens of this device over the whole sequence.

    Where the compiler splits heads over an axis each of its devices sends its own heads alone: in a
    nested `shard_map`, without which XLA would gather them first.

    Args:
      split: how the sequence lies.
      attend: `zerojax.attention` with the options that are left; for Ulysses and all-gather.
      query, key, value, causal, window, scale, segments, positions, softcap: as `zerojax.attention`
        has them, of the tokens of this device.
      index: int32 [], what `attend` takes first where it says which of several windows is this
        layer's; None: `window` is that of all. The collectives of a way are outside of that.

    Raises:
      ValueError: what a way cannot compute.
    """
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} tokens and key {key.shape[1]}; with context="
            f"{split.devices} both are the same part of one sequence; use context=1"
        )
    if split.way == "ring" and (not causal or positions is not None):
        raise ValueError(
            "context_parallel='ring' computes causal attention by the indices of tokens; use "
            "context_parallel='ulysses' or 'allgather'"
        )
    assert split.way != "ring" or index is None, "a plan has refused windows of layers"
    options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
    pairs = {"segments": segments, "positions": positions}
    rows = {name: pair for name, pair in pairs.items() if pair is not None}
    is_one = {name for name, pair in rows.items() if pair[0] is pair[1]}

    def local(
        query: jax.Array, key: jax.Array, value: jax.Array, rows: dict[str, Pair], index: Any
    ) -> Any:
        given: Any = {name: (x[0], x[0]) if name in is_one else x for name, x in rows.items()}
        arrays = query, key, value
        if split.way == "ring":
            rest = {"scale": scale, "window": window, "softcap": softcap}
            return ring_attention(*arrays, axis=split.axis, **rest, **given)
        way = ulysses_attention if split.way == "ulysses" else allgather_attention
        with sequences_split(None):
            own = () if index is None else (index,)
            whole = functools.partial(attend, *own, **options)
            return way(*arrays, axis=split.axis, attend=whole, **given)

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
    """Axes of the mesh that are not manual where this is traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_names) - set(mesh.manual_axes)
