"""Finds branches (`lax.cond`) of a traced loss that are provably the same on all devices.

A `lax.cond` is uniform if its predicate depends on no value that differs between devices. Values
that differ are: the batch, parameters (a device may hold a shard), random numbers (each device has
its own key), the position of the device, and results of callbacks. State of the model counts as
equal on all devices if its next value depends only on such state, for example a counter of calls.
Predicates may also depend on steps, layers and constants. If the program does not show that a value
is equal, it counts as different: values read from a reference (`jax.new_ref`), and results of
custom derivatives, whose forward rules replace the traced functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Jaxpr

from zerojax.operators.equations import Equation
from zerojax.operators.marks import inner_programs
from zerojax.tracing.dependence import Follow, Marks, union
from zerojax.tracing.jaxpr import is_own_rule

_DIFFERS: Marks = 1
_DIFFERING = ("random_", "threefry", "rng_", "axis_index")
"""Prefixes of the names of primitives whose results differ between devices."""


def find_uniform_branches(
    program: Jaxpr, *, num_params: int, num_extras: int, num_results: int
) -> frozenset[int]:
    """Returns the `id` of each `cond` equation, at any depth, whose predicate is uniform.

    Args:
      program: traced loss. Its inputs are parameters, extras (non-parameter arrays) and the batch;
        its outputs are results and the new extras.
      num_params, num_extras: number of inputs that are parameters, and number of inputs that are
        extras.
      num_results: number of outputs before the new extras.
    """
    rest = len(program.invars) - num_params - num_extras
    extras: list[Marks] = [0] * num_extras
    # Marks are only added, so the loop ends.
    # What is computed from state that differs will differ in the next call.
    while True:
        walk = _Predicates()
        marks = [*[_DIFFERS] * num_params, *extras, *[_DIFFERS] * rest]
        after = walk.outputs(program, marks)[num_results:]
        joined = [old | new for old, new in zip(extras, after, strict=True)]
        if joined == extras:
            return frozenset(key for key, mark in walk.predicates.items() if not mark)
        extras = joined


class _Predicates(Follow):
    """Traversal that records on which inputs the predicate of each `cond` depends.

    Attributes:
      predicates: {`id` of a `cond` equation: marks of its predicate}.
    """

    def __init__(self) -> None:
        super().__init__(frozenset())
        self.predicates: dict[int, Marks] = {}

    # Also equations without marks are visited: their predicates are those that are the same
    # everywhere.
    def _ends(self, equation: Equation, operands: list[Marks]) -> bool:
        return False

    def _equation(self, equation: Equation, operands: list[Marks]) -> Sequence[Marks]:
        if equation.primitive.name == "cond":
            # The body of a loop is traversed more than once, with more marks each time.
            before = self.predicates.get(id(equation), 0)
            self.predicates[id(equation)] = before | operands[0]
        followed = super()._equation(equation, operands)
        return [_DIFFERS] * len(followed) if is_own_rule(equation) else followed

    def _leaf(self, equation: Equation, operands: list[Marks]) -> Marks:
        return _DIFFERS if _differs(equation) else union(operands)


def _differs(equation: Equation) -> bool:
    """Returns whether an equation's results may differ between devices even if its operands are
    equal.
    """
    kind = equation.primitive.name
    return (
        kind.startswith(_DIFFERING)
        or "callback" in kind
        or bool(equation.effects)
        or any(map(_differs, (e for p in inner_programs(equation.params) for e in p.eqns)))
    )
