"""Runs an update over slices in host memory: loads, computes and stores different slices at a time.

In iteration i the device computes slice i, loads slice i + 1 and stores slice i - 1, so that both
directions of the link are in use. Each stack is loaded and stored in place. Two copies of one stack
cannot be in progress at the same time, because the compiler does not know that they touch different
slices. So the stacks alternate: while one is loaded, another is stored.

On the device are three slices of each stack on the host: i - 1, i and i + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from zerojax.plan.slices import put_slice, take_slice, to_device, to_host

Slices = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceStack:
    """An array in slices that a loop reads, writes in place, or both.

    Attributes:
      array: [slices, elements].
      first: position in `array` of the loop's first slice.
      on_host: whether it is in pinned host memory.
      is_read: whether the update takes its old values.
      is_written: whether the update returns new values.
    """

    array: jax.Array
    first: int = 0
    on_host: bool
    is_read: bool = True
    is_written: bool = True


def update_slices(
    count: int, stacks: Sequence[SliceStack], update: Callable[[Any, Slices], Slices]
) -> tuple[jax.Array, ...]:
    """Updates `count` slices of all stacks, in order (traced).

    Args:
      count: number of slices, at least 1.
      stacks: the arrays; slices of one iteration have the same number in each.
      update: (int32 [] number of the slice, counted from 0; one slice of each stack that is read)
        -> new slices of the stacks that are written; slices are on the device, in stack order.

    Returns:
      The arrays of the stacks that are written.
    """
    return _Pipeline(stacks, update).run(count)


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """The loop. Its values: the arrays of all stacks, and slices of the stacks on the host."""

    stacks: Sequence[SliceStack]
    update: Callable[[Any, Slices], Slices]

    def run(self, count: int) -> tuple[jax.Array, ...]:
        arrays = tuple(stack.array for stack in self.stacks)
        arrays, loaded = self._exchange(arrays, load=0)
        if count > 1:
            arrays, following = self._exchange(arrays, load=1)
            if count == 2:
                # Loads before stores: otherwise the compiler would copy the arrays. With more
                # slices the loop orders them.
                arrays, loaded, following = lax.optimization_barrier((arrays, loaded, following))
            arrays, new = self._compute(arrays, loaded, 0)

            def body(index: jax.Array, carry: Any) -> Any:
                arrays, loaded, new = carry
                arrays, following = self._exchange(arrays, load=index + 1, store=(new, index - 1))
                arrays, new = self._compute(arrays, loaded, index)
                return arrays, following, new

            carry = arrays, following, new
            if count > 2:
                carry = lax.fori_loop(1, count - 1, body, carry)
            arrays, loaded, new = carry
            arrays, _ = self._exchange(arrays, store=(new, count - 2))
        arrays, new = self._compute(arrays, loaded, count - 1)
        arrays, _ = self._exchange(arrays, store=(new, count - 1))
        pairs = zip(self.stacks, arrays, strict=True)
        return tuple(array for stack, array in pairs if stack.is_written)

    def _exchange(
        self, arrays: Slices, *, load: Any = None, store: tuple[Slices, Any] | None = None
    ) -> tuple[Slices, Slices]:
        """Returns the arrays with the slices of `store` written, and the slices numbered `load`."""
        after, loaded, written = list(arrays), [], 0
        for position, stack in enumerate(self.stacks):
            if not stack.on_host:
                continue
            array = arrays[position]
            loads = load is not None and stack.is_read
            stores = store is not None and stack.is_written
            loads_first = loads and (not stores or written % 2 == 0)
            if loads_first:
                piece = to_device(take_slice(array, load + stack.first))
                if stores:
                    # Otherwise the compiler would copy the array to keep its old values.
                    array, piece = lax.optimization_barrier((array, piece))
                loaded.append(piece)
            if stores:
                assert store is not None
                new, number = store
                array = put_slice(array, to_host(new[written]), number + stack.first)
                written += 1
            if loads and not loads_first:
                loaded.append(to_device(take_slice(array, load + stack.first)))
            after[position] = array
        return tuple(after), tuple(loaded)

    def _compute(self, arrays: Slices, loaded: Slices, index: Any) -> tuple[Slices, Slices]:
        """Updates slices `index`. Returns the arrays, and the new slices of stacks on the host."""
        from_host, after, waiting = iter(loaded), list(arrays), []
        slices = [
            next(from_host) if stack.on_host else take_slice(array, index + stack.first)
            for stack, array in zip(self.stacks, arrays, strict=True)
            if stack.is_read
        ]
        new = iter(self.update(index, tuple(slices)))
        for position, stack in enumerate(self.stacks):
            if stack.is_written and stack.on_host:
                waiting.append(next(new))
            elif stack.is_written:
                after[position] = put_slice(arrays[position], next(new), index + stack.first)
        return tuple(after), tuple(waiting)
