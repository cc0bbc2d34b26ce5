"""Tables in a traced loss that are read by gathers of whole rows alone.

Such a table need not be whole on any device: what is asked of it is rows. Anything else that a
program does with a parameter, such as a product with all of it, needs all of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal
from jax.lax import GatherScatterMode

from zerojax.operators.marks import inner_programs
from zerojax.tracing.jaxpr import is_checkpoint, split_scan

Name = str | None
"""The parameter whose values a variable holds, in any dtype; None: no one's."""

SAME = frozenset({"name", "convert_element_type", "copy", "copy_p"})
"""Primitives that give what they are given, up to the dtype."""
CALLS = ("jit", "pjit")

_MODES = (
    GatherScatterMode.FILL_OR_DROP,
    GatherScatterMode.CLIP,
    GatherScatterMode.PROMISE_IN_BOUNDS,
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """How many rows a pass asks of a table; equal ones count as often as they are asked for.

    Attributes:
      rows: in the forward pass, and so many gradients of rows in the backward pass.
      again: of these, in the backward pass once more, since they are inside of a `jax.checkpoint`.
    """

    rows: int = 0
    again: int = 0


@dataclasses.dataclass
class RowLookups:
    """What a program does with tables.

    Attributes:
      asked: {parameter that some gather takes rows of: how many}.
      elsewhere: {parameter: where else it goes, for people}.
    """

    asked: dict[str, Asked] = dataclasses.field(default_factory=dict)
    elsewhere: dict[str, str] = dataclasses.field(default_factory=dict)


def takes_rows(equation: Any) -> bool:
    """Whether an equation gathers whole rows of an array [rows, width] by integers."""
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
    """Follows parameters through a traced loss.

    Args:
      program: its first inputs are the parameters `names`, in this order.
    """
    found = _Follow()
    rest = len(program.invars) - len(names)
    for name in found.outputs(program, [*names, *[None] * rest], 1, again=False):
        found.note(name, "is returned")
    return found.lookups


class _Follow:
    """Follows what is stored, in any dtype."""

    def __init__(self) -> None:
        self.lookups = RowLookups()

    def note(self, name: Name, where: str) -> None:
        if name is not None:
            self.lookups.elsewhere.setdefault(name, where)

    def outputs(
        self, program: Jaxpr, inputs: Sequence[Name], times: int, *, again: bool
    ) -> list[Name]:
        """What each output of a program holds.

        Args:
          times: how often it runs; again: whether the backward pass runs it once more.
        """
        held: dict[Any, Name] = dict(zip(program.invars, inputs, strict=True))

        def name_of(atom: Any) -> Name:
            return None if isinstance(atom, Literal) else held.get(atom)

        for equation in program.eqns:
            given = [name_of(atom) for atom in equation.invars]
            if not any(given):
                continue
            outputs = self._equation(equation, given, times, again)
            held |= zip(equation.outvars, outputs, strict=True)
        return [name_of(atom) for atom in program.outvars]

    def _equation(
        self, equation: Any, given: list[Name], times: int, again: bool
    ) -> Sequence[Name]:
        kind = equation.primitive.name
        inner = list(inner_programs(equation.params))
        if kind in SAME:
            return given[:1]
        if (kind in CALLS or is_checkpoint(equation)) and len(inner) == 1:
            again = again or is_checkpoint(equation)
            return self.outputs(inner[0], given, times, again=again)
        if takes_rows(equation) and given[1] is None:
            self._gather(equation, given[0], times, again)
        elif kind == "scan":
            self._scan(equation, given, times, again)
        elif kind in ("cond", "while"):
            self._branch(equation, given, times, again)
        else:
            for name in given:
                self.note(name, f"goes into `{kind}`, which needs all of it, as a tied head does")
        return [None] * len(equation.outvars)

    def _gather(self, equation: Any, name: Name, times: int, again: bool) -> None:
        assert name is not None
        number = times * math.prod(equation.invars[1].aval.shape[:-1])
        before = self.lookups.asked.get(name, Asked())
        self.lookups.asked[name] = Asked(before.rows + number, before.again + number * again)

    def _branch(self, equation: Any, given: list[Name], times: int, again: bool) -> None:
        """Devices would wait for each other there; gathers inside show that it is a table."""
        kind, params = equation.primitive.name, equation.params
        for name in given:
            self.note(name, f"is read inside `{kind}`, which not every device may enter")
        if kind == "cond":
            for branch in params["branches"]:
                self.outputs(branch.jaxpr, given[1:], times, again=again)
        else:
            inputs = given[params["cond_nconsts"] :]
            self.outputs(params["body_jaxpr"].jaxpr, inputs, times, again=again)

    def _scan(self, equation: Any, given: list[Name], times: int, again: bool) -> None:
        num_consts, _ = split_scan(equation)
        for name in given[num_consts:]:
            self.note(name, "is carried or sliced by a loop")
        consts = [*given[:num_consts], *[None] * (len(given) - num_consts)]
        body, length = equation.params["jaxpr"].jaxpr, equation.params["length"]
        for name in self.outputs(body, consts, times * length, again=again):
            self.note(name, "is returned from a loop")
