"""Finds calls of `zerojax.experts` in a traced loss, the parameters of their weights, and bytes
sent.

If experts are split over devices, each device has only a part of the parameters of the experts.
This is known to be correct only for the weights of `zerojax.experts`. The norm of all experts, for
example, would be computed from a part of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import jax
from jax import lax
from jax.extend.core import Jaxpr, Literal

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation, Operand
from zerojax.operators.grouped_products import Products, most_rows, whole_slots
from zerojax.operators.marks import expert_call, expert_weights_ndim, inner_programs
from zerojax.operators.routed_experts import PARTS, slots_of_further_rounds
from zerojax.tracing.jaxpr import is_checkpoint, split_scan

Name = str | None
"""Name of the parameter (or of the stack of which it is one layer) that a variable holds, or None.
"""

_SAME = frozenset({"name", "convert_element_type", "optimization_barrier", "copy", "copy_p"})


@dataclasses.dataclass
class ExpertCalls:
    """Uses of parameters in a program with calls of `zerojax.experts`.

    Attributes:
      dims: {parameter that a call takes as weights: dimension that counts experts, negative}.
      elsewhere: {parameter: description of a use outside of the calls}.
      computed: shapes of weights that are computed and are not stored parameters.
      conditional: "cond" or "while" if a call is inside of it; otherwise None.
      count: number of weight arrays, summed over all calls.
    """

    dims: dict[str, int] = dataclasses.field(default_factory=dict)
    elsewhere: dict[str, str] = dataclasses.field(default_factory=dict)
    computed: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    conditional: str | None = None
    count: int = 0


def find_expert_calls(program: Jaxpr, names: Sequence[str]) -> ExpertCalls:
    """Finds the parameters that calls of `zerojax.experts` take as weights in a traced loss.

    Args:
      program: traced loss; its first inputs are the parameters `names`, in this order.
      names: names of the parameters.
    """
    follow = _Follow()
    rest = len(program.invars) - len(names)
    for name in follow.outputs(program, [*names, *[None] * rest], None):
        follow.note(name, "is returned")
    return follow.calls


class _Follow:
    """Traversal that tracks which variables hold a stored parameter or one layer of it, in any
    dtype.
    """

    def __init__(self) -> None:
        self.calls = ExpertCalls()

    def note(self, name: Name, where: str) -> None:
        if name is not None:
            self.calls.elsewhere.setdefault(name, where)

    def outputs(self, program: Jaxpr, inputs: Sequence[Name], around: str | None) -> list[Name]:
        """Returns, for each output of a program, the name of the parameter that it holds,
        or None.
        """
        held: dict[Any, Name] = dict(zip(program.invars, inputs, strict=True))

        def name_of(atom: Operand) -> Name:
            return None if isinstance(atom, Literal) else held.get(atom)

        for equation in program.eqns:
            operands = [name_of(atom) for atom in equation.invars]
            held |= zip(equation.outvars, self._equation(equation, operands, around), strict=True)
        return [name_of(atom) for atom in program.outvars]

    def _equation(self, equation: Equation, operands: list[Name], around: str | None) -> list[Name]:
        kind = equation.primitive.name
        nothing: list[Name] = [None] * len(equation.outvars)
        ndim = expert_weights_ndim(equation)
        if ndim is not None:
            self._weights(equation.invars[0].aval, ndim, operands[0], around)
            return nothing
        if kind == "scan":
            return self._scan(equation, operands, around)
        if kind == "cond":
            return self._cond(equation, operands, around)
        if kind == "while":
            return self._while(equation, operands, around)
        inner = list(inner_programs(equation.params))
        if len(inner) == 1 and len(inner[0].invars) == len(operands):
            return self.outputs(inner[0], operands, around)
        if kind in _SAME:
            return operands
        if _takes_a_layer(equation) and not any(operands[1:]):
            return operands[:1]
        for name in operands:
            self.note(name, f"goes into `{kind}`")
        return nothing

    def _weights(
        self, array: jax.core.ShapedArray, ndim: int, name: Name, around: str | None
    ) -> None:
        calls = self.calls
        calls.count += 1
        calls.conditional = calls.conditional or around
        if name is None:
            calls.computed.append(tuple(array.shape))
        elif ndim != array.ndim:
            self.note(name, "goes into zerojax.experts under `vmap`")
        elif calls.dims.setdefault(name, -ndim) != -ndim:
            self.note(name, "goes into zerojax.experts with two numbers of dimensions")

    def _scan(self, equation: Equation, operands: list[Name], around: str | None) -> list[Name]:
        num_consts, num_carry = split_scan(equation)
        body, carry = equation.params["jaxpr"].jaxpr, slice(num_consts, num_consts + num_carry)
        return self._repeated(body, operands, carry, around)

    def _while(self, equation: Equation, operands: list[Name], around: str | None) -> list[Name]:
        first, second = (equation.params[f"{part}_nconsts"] for part in ("cond", "body"))
        for name in operands[:first]:
            self.note(name, "decides how often a loop runs")
        body = equation.params["body_jaxpr"].jaxpr
        return self._repeated(body, operands[first:], slice(second, None), around or "while")

    def _repeated(
        self, body: Jaxpr, operands: list[Name], carry: slice, around: str | None
    ) -> list[Name]:
        """Processes the body of a loop; its carry must hold the same parameters in all
        iterations.
        """
        # Once is enough: a parameter that changes its place in the carry is noted, and so refused.
        carried = operands[carry]
        outputs = self.outputs(body, operands, around)
        # Outputs after the carry are stacked rows of the iterations.
        for before, after in zip(carried, outputs, strict=False):
            if before != after:
                self.note(before, "is carried by a loop")
                self.note(after, "is carried by a loop")
        return outputs

    def _cond(self, equation: Equation, operands: list[Name], around: str | None) -> list[Name]:
        self.note(operands[0], "decides a branch")
        branches = [
            self.outputs(branch.jaxpr, operands[1:], around or "cond")
            for branch in equation.params["branches"]
        ]
        outputs: list[Name] = []
        for names in zip(*branches, strict=True):
            same = len(set(names)) == 1
            for name in () if same else names:
                self.note(name, "is one of two values of a branch")
            outputs.append(names[0] if same else None)
        return outputs


def _takes_a_layer(equation: Equation) -> bool:
    """Returns whether an equation selects one row of a stack, as `stack[i]` does."""
    kind, before, after = equation.primitive.name, equation.invars, equation.outvars
    if kind == "squeeze":
        return equation.params["dimensions"] == (0,)
    return (
        kind in ("slice", "dynamic_slice") and after[0].aval.shape[1:] == before[0].aval.shape[1:]
    )


# --- sizes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowsOfCall:
    """Token rows that one call of `zerojax.experts` exchanges between devices.

    Attributes:
      choices: number of (token, expert) choices of one device, k for each token.
      num_experts, capacity: number of experts, and number of token slots per expert.
      products: argument `products` of the call, the method of multiplication.
      row_bytes, result_bytes, gate_bytes: bytes of an expert's input row, of its result, and of the
        gate.
      times: number of times that the call runs in one forward pass of a microbatch, counting
        iterations of loops.
      again: whether a checkpoint recomputes the call in the backward pass.
    """

    choices: int
    num_experts: int
    capacity: int
    products: Products
    row_bytes: int
    result_bytes: int
    gate_bytes: int
    times: int
    again: bool

    def computed(self, products: Products, devices: int) -> int:
        """Returns how many rows the first round multiplies: all slots, or at most the rows of all
        tiles.

        Args:
          products: method of multiplication.
          devices: number of devices over which experts are split.
        """
        if products == "batched":
            return self.num_experts * self.capacity
        spacing = None if devices == 1 else whole_slots(self.capacity, self.num_experts, PARTS)
        return most_rows(self.choices, self.num_experts, spacing)

    @property
    def first_round(self) -> int:
        """Bytes of all slots in the first round for one microbatch, without the factor (n - 1) / n
        for sent bytes.

        Each of n devices keeps 1 / n of the slots. Rows, gates and results are sent in the forward
        pass, and their gradients in the backward pass; a recomputation sends rows and gates once
        more.
        """
        inputs = self.row_bytes + self.gate_bytes
        sent = (3 if self.again else 2) * inputs + 2 * self.result_bytes
        return self.times * self.num_experts * self.capacity * sent

    @property
    def further_round(self) -> int:
        """Bytes of all slots in each round after the first for one microbatch, without the factor
        (n - 1) / n; such a round is always recomputed.
        """
        slots = self.num_experts * slots_of_further_rounds(self.capacity)
        sent = 3 * (self.row_bytes + self.gate_bytes) + 2 * self.result_bytes
        return self.times * slots * sent


def find_rows(program: Jaxpr, times: int = 1, again: bool = False) -> Iterator[RowsOfCall]:
    """Yields a `RowsOfCall` for each call of `zerojax.experts` in a traced loss, in order.

    Args:
      program: traced loss.
      times, again: `RowsOfCall.times` and `RowsOfCall.again` of the program itself.
    """
    for equation in program.eqns:
        numbers = expert_call(equation)
        if numbers is not None:
            gates, num_experts, capacity, row_bytes, result_bytes, kind = numbers
            products: Products = get_args(Products)[kind]
            if products != "batched":  # the trace of a plan has no mesh axis
                capacity = whole_slots(capacity, num_experts, PARTS)
            array: Any = equation.invars[0].aval
            yield RowsOfCall(
                choices=gates,
                num_experts=num_experts,
                capacity=capacity,
                products=products,
                row_bytes=row_bytes,
                result_bytes=result_bytes,
                gate_bytes=array.dtype.itemsize,
                # Under `vmap` the marked value has the gates of several calls.
                times=times * (array.size // gates),
                again=again,
            )
        iterations = equation.params["length"] if equation.primitive.name == "scan" else 1
        inside = again or (is_checkpoint(equation) and not _keeps_rows(equation))
        for inner in inner_programs(equation.params):
            yield from find_rows(inner, times * iterations, inside)


def _keeps_rows(equation: Equation) -> bool:
    """Returns whether a checkpoint's policy saves the result of an all-to-all."""
    policy = equation.params["policy"]
    if policy is None or not equation.invars:
        return False
    how = {"axis_name": ("expert",), "split_axis": 0, "concat_axis": 1, "tiled": True}
    kept = policy(lax.all_to_all_p, equation.invars[0].aval, axis_index_groups=None, **how)
    return kept is True  # and not an object that names a memory kind
