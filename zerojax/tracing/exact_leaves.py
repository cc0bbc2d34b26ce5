"""Finds the floating-point arrays of a batch whose exact values matter, from the traced loss.

Class ids, token ids or positions may come as floats: many loaders return whole tables so. A float
that becomes an integer, is compared or is rounded must not be cast to fewer bits before: bfloat16
has no number between 256 and 258. An array is followed through any operation that does not mix it
with parameters, such as `(y - 1) * mask`; what a layer computes of it is not an id anymore.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal

from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import inner_programs
from zerojax.tracing.dependence import SAME_NUMBERS, Follow, Marks, union

_ROUNDING = ("ceil", "floor", "round", "sign")
_CALLBACKS = ("ffi_call", "io_callback", "pure_callback")
_CASTS = ("bitcast_convert_type", "convert_element_type")
_CHOICES = SAME_NUMBERS | {"concatenate", "dynamic_update_slice", "pad", "scatter", "select_n"}
"""Primitives whose result contains elements of their operands as they are."""
_OF_PARAMETERS: Marks = 1


def find_exact_leaves(program: Jaxpr, leaves: Sequence[str | None]) -> dict[str, str]:
    """Finds leaves of a batch whose exact values matter: {name: what the program does with it}.

    Args:
      program: traced loss.
      leaves: for each input of the program, the name of a floating-point leaf of the batch, "" for
        other leaves, or None for a parameter or another array of the model.
    """
    names = [name for name in leaves if name]
    # Bit 0 is `_OF_PARAMETERS`.
    bits = {name: 2 << index for index, name in enumerate(names)}
    if not names:
        return {}
    follow = _Exact()
    marks = [_OF_PARAMETERS if name is None else bits.get(name, 0) for name in leaves]
    follow.outputs(program, marks)
    found: dict[str, str] = {}
    for marks, use in follow.used.values():
        for name in names:
            if marks & bits[name]:
                found.setdefault(name, use)
    return found


class _Exact(Follow):
    """Traversal that records which leaves reach an operation that needs their exact values.

    Attributes:
      used: {positions of an equation and those around it: (marks of its operands, what it does)}.
        The body of a loop is traversed until the marks of its carry are final; each time replaces
        the last.
    """

    def __init__(self) -> None:
        super().__init__(frozenset())
        self.used: dict[tuple[int, ...], tuple[Marks, str]] = {}
        self._around: tuple[int, ...] = ()

    def _equation(self, equation: Equation, operands: list[Marks]) -> Sequence[Marks]:
        before = self._around
        # JAX may call one traced program from several places, so an equation is told by those
        # around it, too.
        self._around = (*before, id(equation))
        results = super()._equation(equation, operands)
        self._around = before
        # An integer has no bits to lose: what made it of a float is recorded.
        return [
            mark if _is_float(variable) else 0
            for mark, variable in zip(results, equation.outvars, strict=True)
        ]

    def _leaf(self, equation: Equation, operands: list[Marks]) -> Marks:
        kind, marks = equation.primitive.name, union(operands)
        if (use := _use(equation)) is not None:
            # Other operands of a sort are only moved along with its keys.
            examined = operands[: equation.params["num_keys"]] if kind == "sort" else operands
            self.used[self._around] = union(examined), use
        is_of_layer = marks & _OF_PARAMETERS and kind not in _CHOICES
        return _OF_PARAMETERS if is_of_layer else marks


def _use(equation: Equation) -> str | None:
    """Returns what an operation does that depends on the last bits of its operands, or None."""
    kind = equation.primitive.name
    if kind in _ROUNDING:
        return "rounds it"
    if kind in _CALLBACKS:
        return "passes it to a callback"
    if any(map(_use, (e for inner in inner_programs(equation.params) for e in inner.eqns))):
        return "compares it"
    if all(map(_is_float, equation.outvars)):  # rounded values alone have the same order
        return "compares it" if kind == "sort" and len(equation.outvars) > 1 else None
    if kind in ("eq", "ne"):  # tests for NaN and for infinity do not depend on the last bits
        first, second = equation.invars
        if first is second or _is_infinite(first) or _is_infinite(second):
            return None
    if kind == "is_finite" or not any(map(_is_float, equation.invars)):
        return None
    return "makes an integer of it" if kind in _CASTS else "compares it"


def _is_float(atom: Operand) -> bool:
    dtype = getattr(atom.aval, "dtype", None)  # tokens have none
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_infinite(atom: Operand) -> bool:
    return isinstance(atom, Literal) and not np.shape(atom.val) and math.isinf(atom.val)
