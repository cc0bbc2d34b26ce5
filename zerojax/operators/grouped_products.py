"""Grouped matrix products of `zerojax.experts`: availability of the kernel, and its tiles of rows.

The kernel is `pallas_kernels.grouped`. A plan only traces a program and never runs it. In place of
the kernel its trace contains one product of all rows, with the FLOPs of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import grouped as kernels
from pallas_kernels.grouped import GroupedImpl, Segments
from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.attention_choice import device_here

Products = Literal["batched", "grouped", "loop"]
"""Method of multiplying rows by experts: one batched product over all slots of all experts; a
kernel over tiles of occupied rows; or an XLA loop over these tiles."""

Product = Callable[[jax.Array, jax.Array], jax.Array]
"""Function (rows [R, in], kernels [E, in, out]) that returns [R, out]: each row is multiplied by
the kernel of its expert."""


@dataclass(frozen=True)
class GroupedProducts:
    """Settings of the grouped products of one call of `zerojax.experts`.

    Attributes:
      impl: implementation, an argument of `pallas_kernels.grouped.grouped_product`.
      is_read: whether the trace is only analysed and never run.
      capability: compute capability of the GPU; None for an unknown device or a CPU.
    """

    impl: GroupedImpl
    is_read: bool
    capability: float | None

    @classmethod
    def here(cls, products: Products) -> GroupedProducts | None:
        """Returns the settings for the current devices; None if the method is "batched".

        Raises:
          ValueError: the devices of the step, or the installed JAX, cannot run the kernel.
        """
        if products == "batched":
            return None
        device, why = device_here(), None
        if products == "grouped":
            why = device.why_no_gpu() or kernels.missing()
        if why is None and device.split > 1:
            why = (
                f"the kernel cannot be split over the {device.split} devices of tensor parallelism"
            )
        if why is not None:
            raise _refusal(products, why)
        capability = device.capability if device.is_gpu else None
        impl: GroupedImpl = "loop" if products == "loop" else "mosaic_gpu"
        return cls(impl, device.where == "plan", capability)

    def product(self, segments: Segments) -> Product:
        """Returns the product function for rows in these segments; other rows are undefined."""

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
        f"products={products!r} of experts: {why}; use products='batched', which gives the same "
        "results (moe.products in a run file)"
    )


def stand_in(rows: jax.Array, matrices: jax.Array) -> jax.Array:
    """Computes a product with the kernel's shape and FLOPs, for programs that are only traced."""
    return jnp.matmul(rows, matrices[0])


def whole_tiles(rows: int) -> int:
    """Rounds the number of rows up to whole tiles of the kernel."""
    return -(-rows // kernels.LARGE_TILE) * kernels.LARGE_TILE


def whole_slots(capacity: int, num_experts: int, parts: int) -> int:
    """Rounds `capacity` up so that all slots, and 1 / `parts` of them, fill whole tiles.

    >>> whole_slots(10, 8, 4), whole_slots(640, 64, 4)
    (32, 640)
    """
    step = parts * kernels.SMALL_TILE // math.gcd(num_experts, kernels.SMALL_TILE)
    return -(-capacity // step) * step


def most_rows(choices: int, num_experts: int, spacing: int | None) -> int:
    """Returns the maximum number of rows in all tiles that the kernel multiplies.

    Args:
      choices: number of occupied rows.
      num_experts: number of experts.
      spacing: distance in slots between the first rows of consecutive experts, whose loads are
        about equal; None: rows of experts are adjacent, with any loads.

    >>> most_rows(32768, 8, None), most_rows(32768, 64, None), most_rows(32768, 64, 640)
    (33664, 36800, 36864)
    """
    if spacing is None:
        rows = whole_tiles(choices)
        tile = kernels.row_tile(rows, num_experts)
        return kernels.most_visits(num_experts, rows, tile) * tile
    tile = kernels.row_tile(spacing * num_experts, num_experts)
    begins_inside = spacing % tile > 0
    # A segment ends in a partly filled tile, and touches one more if it begins inside a tile.
    return (choices // num_experts // tile + 1 + begins_inside) * tile * num_experts


def segments_of_slots(taken: jax.Array, capacity: int) -> Segments:
    """Returns the segments of occupied slots; each segment begins at the first slot of a buffer.

    Args:
      taken: int32 [E, devices], number of occupied slots among each device's slots per expert.
      capacity: number of slots per expert of each device.
    """
    count: jax.Array = taken.reshape(-1).astype(jnp.int32)
    return Segments(jnp.arange(count.size, dtype=jnp.int32) * capacity, count)
