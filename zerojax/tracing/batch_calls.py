"""Calls of `zerojax.batch_sum` and `batch_mean` in a traced loss: of which values, how often."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr

from zerojax.operators.marks import BatchCall, batch_call, inner_programs
from zerojax.tracing.dependence import Follow, Marks, union
from zerojax.tracing.jaxpr import is_checkpoint

_OF_BATCH, _OF_MODEL, _OF_TRAINED = 1, 2, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSum:
    """One call, as a step runs it.

    Attributes:
      kind: of the call.
      num_bytes: of its array, as it is summed: at least 4 for each floating-point number.
      times: in one forward pass of a microbatch: in loops, once for each turn.
      passes: how often one step sums for each of these: forward, backward where its gradient is
        wanted, and once more where a checkpoint computes it again.
      of_batch, of_model: whether its array depends on the batch, on parameters or on state.
    """

    kind: BatchCall
    num_bytes: int
    times: int
    passes: int
    of_batch: bool
    of_model: bool


def find_batch_sums(program: Jaxpr, *, trained: Sequence[bool], num_extras: int) -> list[BatchSum]:
    """All calls in a traced loss, in order.

    Args:
      program: its inputs are parameters, state and leaves of the batch.
      trained: for each parameter; num_extras: how many arrays of state follow them.
    """
    marks = [_OF_MODEL | _OF_TRAINED if one else _OF_MODEL for one in trained]
    marks += [_OF_MODEL] * num_extras
    marks += [_OF_BATCH] * (len(program.invars) - len(marks))
    given = _Given()
    given.outputs(program, marks)
    return list(_walk(program, given.found, 1, False))


class _Given(Follow):
    """Notes the marks of what each call is given."""

    def __init__(self) -> None:
        super().__init__(frozenset())
        self.found: dict[int, Marks] = {}

    def _ends(self, equation: Any, given: list[Marks]) -> bool:
        return False

    def _leaf(self, equation: Any, given: list[Marks]) -> Marks:
        if batch_call(equation) is not None:
            # A loop's body is followed more than once, with more marks each time.
            self.found[id(equation)] = self.found.get(id(equation), 0) | union(given)
        return union(given)


def _walk(program: Jaxpr, marks: dict[int, Marks], times: int, again: bool) -> Iterator[BatchSum]:
    for equation in program.eqns:
        kind = batch_call(equation)
        if kind is not None:
            array: Any = equation.invars[0].aval
            floating = jnp.issubdtype(array.dtype, jnp.inexact)
            found = marks.get(id(equation), 0)
            wanted = floating and bool(found & _OF_TRAINED)
            yield BatchSum(
                kind=kind,
                num_bytes=math.prod(array.shape) * max(array.dtype.itemsize, 4 * floating),
                times=times,
                passes=1 + wanted * (1 + again),
                of_batch=bool(found & _OF_BATCH),
                of_model=bool(found & _OF_MODEL),
            )
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        inside = again or is_checkpoint(equation)
        for inner in inner_programs(equation.params):
            yield from _walk(inner, marks, times * turns, inside)
