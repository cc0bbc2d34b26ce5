"""Finds tables in a traced loss that are read only by gathers of whole rows.

A device needs only the gathered rows of such a table. Any other use of a parameter, such as a
matrix product, needs the complete parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal
from jax.lax import GatherScatterMode

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import inner_programs
from zerojax.tracing.jaxpr import is_checkpoint, split_scan

Name = str | None
"""Name of the parameter whose values a variable holds, in any dtype; None: no parameter."""

SAME = frozenset({"name", "convert_element_type", "copy", "copy_p"})
"""Primitives that return their operand, perhaps in another dtype."""
CALLS = ("jit", "pjit")

_MODES = (
    GatherScatterMode.FILL_OR_DROP,
    GatherScatterMode.CLIP,
    GatherScatterMode.PROMISE_IN_BOUNDS,
)


@dataclass(frozen=True)
class RowReads:
    """Number of rows that a forward pass gathers from a table; repeated rows count each time.

    Attributes:
      rows: number of rows gathered in the forward pass; the backward pass sends as many gradients.
      again: number of rows that the backward pass gathers again, because they are read inside a
        `jax.checkpoint`.
    """

    rows: int = 0
    again: int = 0


@dataclasses.dataclass
class RowLookups:
    """Gathers of whole rows from parameters in a program, and their other uses.

    Attributes:
      row_reads: {parameter from which rows are gathered: number of rows}.
      elsewhere: {parameter: description of a use other than a gather of rows}.
    """

    row_reads: dict[str, RowReads] = dataclasses.field(default_factory=dict)
    elsewhere: dict[str, str] = dataclasses.field(default_factory=dict)


def takes_rows(equation: Equation) -> bool:
    """Returns whether an equation gathers whole rows of an array [rows, width] by integer
    indices.
    """
    if equation.primitive.name != "gather":
        return False
    params, shape = equation.params, equation.invars[0].aval.shape
    numbers = params["dimension_numbers"]
    return (
        len(shape) == 2
        and tuple(params["slice_sizes"]) == (1, shape[1])
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and params["mode"] in _MODES
    )


def find_row_lookups(program: Jaxpr, names: Sequence[str]) -> RowLookups:
    """Finds the parameters from which a traced loss gathers whole rows.

    Args:
      program: traced loss; its first inputs are the parameters `names`, in this order.
      names: names of the parameters.
    """
    follow = _Follow()
    rest = len(program.invars) - len(names)
    for name in follow.outputs(program, [*names, *[None] * rest], 1, again=False):
        follow.note(name, "is returned")
    return follow.lookups


class _Follow:
    """Traversal that tracks which variables hold a stored parameter, in any dtype."""

    def __init__(self) -> None:
        self.lookups = RowLookups()

    def note(self, name: Name, where: str) -> None:
        if name is not None:
            self.lookups.elsewhere.setdefault(name, where)

    def outputs(
        self, program: Jaxpr, inputs: Sequence[Name], times: int, *, again: bool
    ) -> list[Name]:
        """Returns, for each output of a program, the name of the parameter that it holds, or None.

        Args:
          program: program to traverse.
          inputs: name of the parameter that each input holds, or None.
          times: number of times that the program runs.
          again: whether the backward pass runs the program once more.
        """
        held: dict[Any, Name] = dict(zip(program.invars, inputs, strict=True))

        def name_of(atom: Operand) -> Name:
            return None if isinstance(atom, Literal) else held.get(atom)

        for equation in program.eqns:
            operands = [name_of(atom) for atom in equation.invars]
            if not any(operands):
                continue
            outputs = self._equation(equation, operands, times, again)
            held |= zip(equation.outvars, outputs, strict=True)
        return [name_of(atom) for atom in program.outvars]

    def _equation(
        self, equation: Equation, operands: list[Name], times: int, again: bool
    ) -> Sequence[Name]:
        kind = equation.primitive.name
        inner = list(inner_programs(equation.params))
        if kind in SAME:
            return operands[:1]
        if (kind in CALLS or is_checkpoint(equation)) and len(inner) == 1:
            again = again or is_checkpoint(equation)
            return self.outputs(inner[0], operands, times, again=again)
        if takes_rows(equation) and operands[1] is None:
            self._gather(equation, operands[0], times, again)
        elif kind == "scan":
            self._scan(equation, operands, times, again)
        elif kind in ("cond", "while"):
            self._branch(equation, operands, times, again)
        else:
            for name in operands:
                self.note(name, f"goes into `{kind}`, which needs all rows, as a tied head does")
        return [None] * len(equation.outvars)

    def _gather(self, equation: Equation, name: Name, times: int, again: bool) -> None:
        assert name is not None
        number = times * math.prod(equation.invars[1].aval.shape[:-1])
        before = self.lookups.row_reads.get(name, RowReads())
        self.lookups.row_reads[name] = RowReads(before.rows + number, before.again + number * again)

    def _branch(self, equation: Equation, operands: list[Name], times: int, again: bool) -> None:
        """Records that tables are read inside a branch, where a lookup would wait for other
        devices.

        Gathers inside the branch still show that the parameter is a table.
        """
        kind, params = equation.primitive.name, equation.params
        for name in operands:
            self.note(name, f"is read inside `{kind}`, which not every device may enter")
        if kind == "cond":
            for branch in params["branches"]:
                self.outputs(branch.jaxpr, operands[1:], times, again=again)
        else:
            # The body does not get the constants of the condition.
            inputs = operands[params["cond_nconsts"] :]
            self.outputs(params["body_jaxpr"].jaxpr, inputs, times, again=again)

    def _scan(self, equation: Equation, operands: list[Name], times: int, again: bool) -> None:
        num_consts, _ = split_scan(equation)
        for name in operands[num_consts:]:
            self.note(name, "is carried or sliced by a loop")
        consts = [*operands[:num_consts], *[None] * (len(operands) - num_consts)]
        body, length = equation.params["jaxpr"].jaxpr, equation.params["length"]
        for name in self.outputs(body, consts, times * length, again=again):
            self.note(name, "is returned from a loop")
