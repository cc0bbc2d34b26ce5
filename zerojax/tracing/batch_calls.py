"""Finds calls of `zerojax.batch_sum`, `batch_mean` and `gather_batch` in a traced loss, with their
sizes and counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation
from zerojax.operators.marks import BatchCall, batch_call, inner_programs
from zerojax.tracing.dependence import Follow, Marks, union
from zerojax.tracing.jaxpr import is_checkpoint

_OF_BATCH, _OF_MODEL, _OF_TRAINED = 1, 2, 4


@dataclass(frozen=True, kw_only=True)
class BatchSum:
    """Call of `zerojax.batch_sum` or a similar function of the whole batch in a traced loss.

    Attributes:
      kind: name of the function.
      num_bytes: bytes of its array as it is sent: in the dtype of a sum (at least 4 for each
        floating-point number), or, for `gather_batch`, the rows of one device in their own dtype.
      times: number of times that the call runs in one forward pass of a microbatch, counting
        iterations of loops.
      passes: number of sums per run in a step: one in the forward pass; if its gradient is needed,
        one in the backward pass, and one more if a checkpoint recomputes it.
      of_batch, of_model: whether the summed array depends on the batch (of_batch), and on
        parameters or extras (of_model).
    """

    kind: BatchCall
    num_bytes: int
    times: int
    passes: int
    of_batch: bool
    of_model: bool


def find_batch_sums(program: Jaxpr, *, trained: Sequence[bool], num_extras: int) -> list[BatchSum]:
    """Returns all calls of functions of the whole batch in a traced loss, in order.

    Args:
      program: traced loss whose inputs are parameters, extras (non-parameter state) and leaves of
        the batch.
      trained: for each parameter input, whether the parameter is trained.
      num_extras: number of extras, which follow the parameters.
    """
    marks = [_OF_MODEL | _OF_TRAINED if is_trained else _OF_MODEL for is_trained in trained]
    marks += [_OF_MODEL] * num_extras
    marks += [_OF_BATCH] * (len(program.invars) - len(marks))
    follow = _CallMarks()
    follow.outputs(program, marks)
    return list(_walk(program, follow.marks, 1, False))


class _CallMarks(Follow):
    """Traversal that records on which inputs the operand of each reduction over the batch
    depends.
    """

    def __init__(self) -> None:
        super().__init__(frozenset())
        self.marks: dict[int, Marks] = {}

    def _ends(self, equation: Equation, operands: list[Marks]) -> bool:
        return False

    def _leaf(self, equation: Equation, operands: list[Marks]) -> Marks:
        if batch_call(equation) is not None:
            # The body of a loop is traversed more than once, with more marks each time.
            self.marks[id(equation)] = self.marks.get(id(equation), 0) | union(operands)
        return union(operands)


def _walk(program: Jaxpr, marks: dict[int, Marks], times: int, again: bool) -> Iterator[BatchSum]:
    for equation in program.eqns:
        kind = batch_call(equation)
        if kind is not None:
            array: Any = equation.invars[0].aval
            floating = jnp.issubdtype(array.dtype, jnp.inexact)
            is_summed = floating and kind != "gather_batch"
            mark = marks.get(id(equation), 0)
            needs_gradient = floating and bool(mark & _OF_TRAINED)
            yield BatchSum(
                kind=kind,
                num_bytes=math.prod(array.shape) * max(array.dtype.itemsize, 4 * is_summed),
                times=times,
                passes=1 + needs_gradient * (1 + again),
                of_batch=bool(mark & _OF_BATCH),
                of_model=bool(mark & _OF_MODEL),
            )
        iterations = equation.params["length"] if equation.primitive.name == "scan" else 1
        inside = again or is_checkpoint(equation)
        for inner in inner_programs(equation.params):
            yield from _walk(inner, marks, times * iterations, inside)
