"""Updates slices in host memory with overlap: loads, computes and stores different slices at once.

Where stacks (arrays of slices) are updated in place, the device computes slice i, loads slice i + 1
and stores slice i - 1 in iteration i, so that both directions of the link are in use. Two copies of
one stack cannot be in progress at the same time, because the compiler does not know that they touch
different slices. So the stacks alternate: while one is loaded, another one is stored.

The device holds at most three slices of each stack in host memory: i - 1, i and i + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.placement.slices import put_slice, take_slice, to_device, to_host

Slices = tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True)
class SliceStack:
    """An array in slices that a loop reads, writes in place, or both.

    Attributes:
      array: the slices, [slices, elements].
      first: position in `array` of the loop's first slice.
      on_host: whether `array` is in pinned host memory.
      is_read: whether the update takes the old values of the array.
      is_written: whether the update returns new values of the array.
    """

    array: jax.Array
    first: int = 0
    on_host: bool
    is_read: bool = True
    is_written: bool = True


def update_slices(
    count: int, stacks: Sequence[SliceStack], update: Callable[[Any, Slices], Slices]
) -> tuple[jax.Array, ...]:
    """Updates `count` slices of all stacks (traced).

    Args:
      count: number of slices to update, at least 1.
      stacks: the arrays; an iteration takes the slice with the same number from each.
      update: function `(number, slices) -> new slices`. `number` is an int32 [] that counts slices
        from 0. `slices` has one slice of each stack that is read, the result one of each stack that
        is written; all are on the device, in the order of the stacks.

    Returns:
      The arrays of the written stacks, in order.
    """
    return _Pipeline(stacks, update).run(count)


@dataclass(frozen=True)
class _Pipeline:
    """The loop of `update_slices`; it carries the arrays of all stacks and slices of the host's
    stacks.
    """

    stacks: Sequence[SliceStack]
    update: Callable[[Any, Slices], Slices]

    def run(self, count: int) -> tuple[jax.Array, ...]:
        in_place = any(one.on_host and one.is_read and one.is_written for one in self.stacks)
        run = self._run_in_place if in_place else self._run_apart
        arrays = run(tuple(stack.array for stack in self.stacks), count)
        pairs = zip(self.stacks, arrays, strict=True)
        return tuple(array for stack, array in pairs if stack.is_written)

    def _run_apart(self, arrays: Slices, count: int) -> Slices:
        """Runs all slices, where no stack is both read from the host and written to it.

        A slice is stored in its own iteration, while the next one is loaded. If it were stored in
        the next iteration, as in `_run_in_place`, the compiler would keep it in the memory of the
        slice that is computed there, so that store, update and load wait for each other. Slices are
        taken from the last to the first, since the number of the next one must not be the counter +
        1: that is the loop's own sum, which waits for all copies that read the counter.
        """
        last = count - 1

        def body(done: jax.Array, carry: Tree) -> Any:
            arrays, loaded = carry
            index = last - done
            arrays, new = self._compute(arrays, loaded, index)
            return self._exchange(arrays, load=index - 1, store=(new, index))

        carry = self._exchange(arrays, load=last)
        arrays, loaded = lax.fori_loop(0, last, body, carry)
        arrays, new = self._compute(arrays, loaded, 0)
        return self._exchange(arrays, store=(new, 0))[0]

    def _run_in_place(self, arrays: Slices, count: int) -> Slices:
        """Runs all slices, where a stack is read from the host and written to it."""
        arrays, loaded = self._exchange(arrays, load=0)
        if count > 1:
            arrays, following = self._exchange(arrays, load=1)
            if count == 2:
                # All loads precede all stores; otherwise the compiler would copy the arrays. With
                # more than two slices the loop gives this order.
                arrays, loaded, following = lax.optimization_barrier((arrays, loaded, following))
            arrays, new = self._compute(arrays, loaded, 0)

            def body(index: jax.Array, carry: Tree) -> Any:
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
        return arrays

    def _exchange(
        self, arrays: Slices, *, load: Any = None, store: tuple[Slices, Any] | None = None
    ) -> tuple[Slices, Slices]:
        """Stores slices into the stacks on the host, and loads others from them.

        Args:
          arrays: arrays of all stacks.
          load: number of the slices to load; None loads none.
          store: (new slices, their number); None stores nothing.

        Returns:
          (arrays after the store, loaded slices).
        """
        after, loaded, written = list(arrays), [], 0
        for position, stack in enumerate(self.stacks):
            if not stack.on_host:
                continue
            array = arrays[position]
            loads = load is not None and stack.is_read
            stores = store is not None and stack.is_written
            # Stacks alternate, so that one is loaded while another one is stored.
            loads_first = loads and (not stores or written % 2 == 0)
            if loads_first:
                piece = to_device(take_slice(array, load + stack.first))
                if stores:
                    # Without the barrier the compiler would copy the array to keep its old values.
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

    def _compute(
        self, arrays: Slices, loaded: Slices, index: jax.Array | int
    ) -> tuple[Slices, Slices]:
        """Updates the slices numbered `index`; returns (arrays, new slices of the stacks on the
        host).
        """
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
