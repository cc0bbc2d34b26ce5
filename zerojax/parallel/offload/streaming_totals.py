"""Accumulation of each layer's gradients, on the host and on the device."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from zerojax.parallel.offload.streaming_rows import LayerRows, apart
from zerojax.plan.slices import put_slice, take_slice

Arrays = dict[str, Any]


class Sink(Protocol):
    """Where a backward pass leaves the gradients of layers, one layer after the other."""

    def start(self, totals: Any, sums: Arrays) -> Any:
        """The totals before the backward pass of a microbatch with these sums of loss and weight,
        which are those of this data shard."""
        ...

    def take(self, totals: Any, index: Any, grads: Arrays) -> Any:
        """The totals after a layer; grads {name: of its trained row, whole and not reduced}."""
        ...

    @property
    def load(self) -> Any:
        """`(totals, index) -> whole rows`, where totals hold the weights; None elsewhere."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientTotals:
    """Adds gradients up: {"host": stacks, "device": stacks, "squares": sums of squares}.

    Attributes:
      rows: the stacks.
      num_layers: rows of each.
      first: bool [], whether this is the first microbatch; None where there is only one. What is
        read of the host before it was written is thrown away.
    """

    rows: LayerRows
    num_layers: int
    first: jax.Array | None = None

    load: Any = None

    def empty(self, *, adds: bool) -> Arrays:
        """The totals before the first microbatch; `adds` where there are several."""
        precision = self.rows.config.precision
        dtype = precision.accumulate_dtype if adds else precision.reduce_dtype
        like = {
            name: jax.ShapeDtypeStruct(self.rows.waiting[name].shape[1:], dtype)
            for name in self.rows.streamed
        }
        return {
            "host": self.rows.stacks.empty(self.num_layers, like),
            "device": {
                name: jnp.zeros(x.shape, precision.accumulate_dtype if adds else x.dtype)
                for name, x in self.rows.inputs.items()
            },
            "squares": {name: self.rows.squares_like(name) for name in self.rows.streamed},
        }

    def start(self, totals: Arrays, sums: Arrays) -> Arrays:
        """Sums of squares are those of the last microbatch's totals."""
        del sums
        return {**totals, "squares": jax.tree.map(jnp.zeros_like, totals["squares"])}

    def take(self, totals: Arrays, index: Any, grads: Arrays) -> Arrays:
        """Reduces the gradients of a layer and adds them."""
        waiting, here = apart(self.rows.reduce(grads), self.rows.streamed)
        if self.first is not None:
            before = self.rows.stacks.load(totals["host"], index)
            waiting = {
                name: jnp.where(self.first, 0, before[name]) + grad.astype(before[name].dtype)
                for name, grad in waiting.items()
            }
        squares = {
            name: totals["squares"][name] + self.rows.squares(name, grad)
            for name, grad in waiting.items()
        }
        return {
            "host": self.rows.stacks.store(totals["host"], waiting, index),
            "device": put_rows(totals["device"], here, index, adds=self.first is not None),
            "squares": squares,
        }


def put_rows(stacks: Arrays, rows: Arrays, index: Any, *, adds: bool) -> Arrays:
    """Stacks on the device with one row of each written, or added to."""

    def put(stack: jax.Array, row: jax.Array) -> jax.Array:
        row = row.astype(stack.dtype)
        return put_slice(stack, take_slice(stack, index) + row if adds else row, index)

    return {name: put(stack, rows[name]) for name, stack in stacks.items()}
