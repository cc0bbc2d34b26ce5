"""Adds partial sums of each leaf or row over its programs, in one kernel and in a fixed order.

The compiler's own reduction for all leaves would read all partial sums once per leaf, store a long
matrix in memory, and then need two launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.table import kernel_of

STRIDE = mosaic.THREADS
"""Number of values that are read at once. Each array of partial sums ends with as many unused
numbers, which are neither written nor added."""


class Part(NamedTuple):
    """Programs whose numbers are added: the programs of a leaf, or of one row of it.

    Attributes:
      kernel: index of the kernel of the programs.
      start: index of the first program within the kernel.
      count: number of programs.
    """

    kernel: int
    start: int
    count: int


def width_of(programs: int) -> int:
    """Returns how many partial sums are stored per sum: one per program, and padding."""
    return programs + STRIDE


def total(
    partial: Sequence[jax.Array], parts: Sequence[Part], num_sums: int, *, interpret: bool
) -> tuple[jax.Array, ...]:
    """Adds partial sums; returns for each sum its total in each part, float32 [parts].

    Args:
      partial: partial sums of each kernel: float32 [sums * width]; for each sum, one number per
        program and `STRIDE` padding numbers.
      parts: ranges of programs to add up, in the order of the results.
      num_sums: number of sums of each kernel.
      interpret: whether to run the kernel on the CPU.
    """
    kernel = kernel_of(
        _body([values.size // num_sums for values in partial], num_sums),
        len(parts),
        name="totals",
        out_type=(jax.ShapeDtypeStruct((len(parts),), jnp.float32),) * num_sums,
        has_barriers=True,
        interpret=interpret,
    )
    return tuple(kernel(*partial, np.array(parts, np.int32).reshape(-1)))


def _body(widths: Sequence[int], num_sums: int) -> Any:
    """Builds the function of one program, which adds the numbers of one leaf or row."""
    from jax.experimental import pallas as pl  # here for the reason in `mosaic.run_on_tiles`

    def body(*refs: Any) -> None:
        partials, where, outputs = refs[: len(widths)], refs[len(widths)], refs[len(widths) + 1 :]
        number = lax.axis_index("program")
        kernel, start, count = (where[3 * number + k] for k in range(3))
        lanes = mosaic.laid_out(lax.broadcasted_iota(jnp.int32, (STRIDE,), 0))
        zero = mosaic.laid_out(jnp.zeros((STRIDE,), jnp.float32))

        def sums_of(ref: Any, width: int) -> tuple[Any, ...]:
            def add(step: Any, found: tuple[Any, ...]) -> tuple[Any, ...]:
                first = step * STRIDE
                is_own = lanes + mosaic.spread(first, STRIDE) < mosaic.spread(count, STRIDE)
                reads = [ref.at[pl.ds(k * width + start + first, STRIDE)] for k in range(num_sums)]
                values = [mosaic.load_block(one, STRIDE) for one in reads]
                pairs = zip(found, values, strict=True)
                return tuple(a + jnp.where(is_own, x, zero) for a, x in pairs)

            steps = lax.div(count + jnp.int32(STRIDE - 1), jnp.int32(STRIDE))
            found = lax.fori_loop(0, steps, add, (zero,) * num_sums)
            return tuple(jnp.sum(x) for x in found)

        pairs = list(zip(partials, widths, strict=True))
        if len(pairs) == 1:
            found = sums_of(*pairs[0])
        else:
            found = lax.switch(kernel, [lambda pair=pair: sums_of(*pair) for pair in pairs])
        for ref, value in zip(outputs, found, strict=True):
            ref[number] = value

    return body
