"""Products of `zerojax.experts` without slack: where their kernel can run, and on which rows.

The kernel is `pallas_kernels.grouped`. A plan's trace, which is read and not run, holds one product
of all rows in its place, which has the arithmetic of the rows alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import grouped as kernels
from pallas_kernels.grouped import GroupedImpl, Segments
from zerojax.operators.attention_choice import device_here

Products = Literal["batched", "grouped", "loop"]
"""How experts multiply: all slots of all experts in one batched product, or tiles of rows that
exist, by a kernel, or one after the other by XLA."""

Product = Callable[[jax.Array, jax.Array], jax.Array]
"""(rows [R, in], kernels [E, in, out]) -> [R, out]: each row times the kernel of its expert."""


@dataclasses.dataclass(frozen=True)
class GroupedProducts:
    """How a call of `zerojax.experts` multiplies by the kernel.

    Attributes:
      impl: as `pallas_kernels.grouped.grouped_product` has it.
      is_read: the trace is read and not run.
      capability: compute capability of the GPU; None: not known, or a CPU.
    """

    impl: GroupedImpl
    is_read: bool
    capability: float | None

    @classmethod
    def here(cls, products: Products) -> GroupedProducts | None:
        """None for "batched".

        Raises:
          ValueError: the devices of the step, or this JAX, cannot run the kernel.
        """
        if products == "batched":
            return None
        device, why = device_here(), None
        if products == "grouped":
            why = device.why_no_gpu() or kernels.missing()
        if why is None and device.split > 1:
            why = f"it cannot be split over the {device.split} devices of tensor parallelism"
        if why is not None:
            raise _refusal(products, why)
        capability = device.capability if device.is_gpu else None
        impl: GroupedImpl = "loop" if products == "loop" else "mosaic_gpu"
        return cls(impl, device.where == "plan", capability)

    def product(self, segments: Segments) -> Product:
        """Of rows that lie in these segments; other rows of the result are not defined."""

        def multiply(rows: jax.Array, matrices: jax.Array) -> jax.Array:
            if self.impl != "loop":
                why = kernels.why_not(rows, matrices, capability=self.capability)
                if why is not None:
                    raise _refusal("grouped", why)
            if self.is_read:
                return stand_in(rows, matrices)
            return kernels.grouped_product(rows, matrices, segments, impl=self.impl)

        return multiply


def _refusal(products: str, why: str) -> ValueError:
    return ValueError(
        f"products={products!r} of experts: {why}; use products='batched', which computes the same "
        "(in a run file moe.products)"
    )


def stand_in(rows: jax.Array, matrices: jax.Array) -> jax.Array:
    """Shape and arithmetic of a product, for who reads a trace."""
    return jnp.matmul(rows, matrices[0])


def whole_tiles(rows: int) -> int:
    """Rows of whole tiles of the kernel."""
    return -(-rows // kernels.LARGE_TILE) * kernels.LARGE_TILE


def whole_slots(capacity: int, num_experts: int, parts: int) -> int:
    """`capacity` or a little more, so that slots of all experts are whole tiles, and a `parts`-th.

    >>> whole_slots(10, 8, 4), whole_slots(640, 64, 4)
    (32, 640)
    """
    step = parts * kernels.SMALL_TILE // math.gcd(num_experts, kernels.SMALL_TILE)
    return -(-capacity // step) * step


def most_rows(choices: int, num_experts: int, spacing: int | None) -> int:
    """Rows of all tiles that the kernel multiplies at most, of so many rows that there are.

    Args:
      spacing: slots from where rows of one expert begin to where those of the next do, with about
        equal loads; None: they lie next to each other, with any loads.

    >>> most_rows(32768, 8, None), most_rows(32768, 64, None), most_rows(32768, 64, 640)
    (33664, 36800, 36864)
    """
    if spacing is None:
        rows = whole_tiles(choices)
        tile = kernels.row_tile(rows, num_experts)
        return kernels.most_visits(num_experts, rows, tile) * tile
    tile = kernels.row_tile(spacing * num_experts, num_experts)
    begins_inside = spacing % tile > 0
    return (choices // num_experts // tile + 1 + begins_inside) * tile * num_experts


def segments_of_slots(taken: jax.Array, capacity: int) -> Segments:
    """Of slots that are taken from the first on.

    Args:
      taken: int32 [E, devices], slots that each device's rows take of its `capacity` of an expert.
    """
    count: Any = taken.reshape(-1).astype(jnp.int32)
    return Segments(jnp.arange(count.size, dtype=jnp.int32) * capacity, count)
