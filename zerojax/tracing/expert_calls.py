"""Calls of `zerojax.experts` in a traced loss: which parameters are their weights, what they send.

Where experts are split over devices, a parameter of theirs is a part on each device. That is known
to be right for the weights of `zerojax.experts` alone: a norm of all experts would be one of a
part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from jax import lax
from jax.extend.core import Jaxpr, Literal

from zerojax.operators.grouped_products import Products, most_rows, whole_slots
from zerojax.operators.marks import expert_call, expert_weights_ndim, inner_programs
from zerojax.operators.routed_experts import PARTS, slots_of_further_rounds
from zerojax.tracing.jaxpr import is_checkpoint, split_scan

Name = str | None
"""The parameter whose values a variable holds: all, or those of one layer; None: no one's."""

_SAME = frozenset({"name", "convert_element_type", "optimization_barrier", "copy", "copy_p"})


@dataclasses.dataclass
class ExpertCalls:
    """What a program does with parameters and `zerojax.experts`.

    Attributes:
      dims: {parameter that is a call's weights: its dimension of experts, negative}.
      elsewhere: {parameter: where else it goes, for people}.
      computed: shapes of weights that are no parameter as it is stored.
      conditional: "cond" or "while" around a call, if there is one.
      count: how many arrays of weights calls have.
    """

    dims: dict[str, int] = dataclasses.field(default_factory=dict)
    elsewhere: dict[str, str] = dataclasses.field(default_factory=dict)
    computed: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    conditional: str | None = None
    count: int = 0


def find_expert_calls(program: Jaxpr, names: Sequence[str]) -> ExpertCalls:
    """Follows parameters through a traced loss.

    Args:
      program: its first inputs are the parameters `names`, in this order.
    """
    found = _Follow()
    rest = len(program.invars) - len(names)
    for name in found.outputs(program, [*names, *[None] * rest], None):
        found.note(name, "is returned")
    return found.calls


class _Follow:
    """Follows what is stored, or one layer of it, in any dtype."""

    def __init__(self) -> None:
        self.calls = ExpertCalls()

    def note(self, name: Name, where: str) -> None:
        if name is not None:
            self.calls.elsewhere.setdefault(name, where)

    def outputs(self, program: Jaxpr, inputs: Sequence[Name], around: str | None) -> list[Name]:
        """What each output of a program holds."""
        held: dict[Any, Name] = dict(zip(program.invars, inputs, strict=True))

        def name_of(atom: Any) -> Name:
            return None if isinstance(atom, Literal) else held.get(atom)

        for equation in program.eqns:
            given = [name_of(atom) for atom in equation.invars]
            held |= zip(equation.outvars, self._equation(equation, given, around), strict=True)
        return [name_of(atom) for atom in program.outvars]

    def _equation(self, equation: Any, given: list[Name], around: str | None) -> list[Name]:
        kind = equation.primitive.name
        nothing: list[Name] = [None] * len(equation.outvars)
        ndim = expert_weights_ndim(equation)
        if ndim is not None:
            self._weights(equation.invars[0].aval, ndim, given[0], around)
            return nothing
        if kind == "scan":
            return self._scan(equation, given, around)
        if kind == "cond":
            return self._cond(equation, given, around)
        if kind == "while":
            return self._while(equation, given, around)
        inner = list(inner_programs(equation.params))
        if len(inner) == 1 and len(inner[0].invars) == len(given):
            return self.outputs(inner[0], given, around)
        if kind in _SAME:
            return given
        if _takes_a_layer(equation) and not any(given[1:]):
            return given[:1]
        for name in given:
            self.note(name, f"goes into `{kind}`")
        return nothing

    def _weights(self, array: Any, ndim: int, name: Name, around: str | None) -> None:
        calls = self.calls
        calls.count += 1
        calls.conditional = calls.conditional or around
        if name is None:
            calls.computed.append(tuple(array.shape))
        elif ndim != array.ndim:
            self.note(name, "goes into zerojax.experts under `vmap`")
        elif calls.dims.setdefault(name, -ndim) != -ndim:
            self.note(name, "goes into zerojax.experts with two numbers of dimensions")

    def _scan(self, equation: Any, given: list[Name], around: str | None) -> list[Name]:
        num_consts, num_carry = split_scan(equation)
        body, carry = equation.params["jaxpr"].jaxpr, slice(num_consts, num_consts + num_carry)
        return self._repeated(body, given, carry, around)

    def _while(self, equation: Any, given: list[Name], around: str | None) -> list[Name]:
        first, second = (equation.params[f"{part}_nconsts"] for part in ("cond", "body"))
        for name in given[:first]:
            self.note(name, "decides how often a loop runs")
        body = equation.params["body_jaxpr"].jaxpr
        return self._repeated(body, given[first:], slice(second, None), around or "while")

    def _repeated(
        self, body: Jaxpr, given: list[Name], carry: slice, around: str | None
    ) -> list[Name]:
        """Of a loop: what it carries has to be the same in each turn."""
        carried = given[carry]
        outputs = self.outputs(body, given, around)
        for before, after in zip(carried, outputs, strict=False):
            if before != after:
                self.note(before, "is carried by a loop")
                self.note(after, "is carried by a loop")
        return outputs

    def _cond(self, equation: Any, given: list[Name], around: str | None) -> list[Name]:
        self.note(given[0], "decides a branch")
        branches = [
            self.outputs(branch.jaxpr, given[1:], around or "cond")
            for branch in equation.params["branches"]
        ]
        outputs: list[Name] = []
        for names in zip(*branches, strict=True):
            same = len(set(names)) == 1
            for name in () if same else names:
                self.note(name, "is one of two values of a branch")
            outputs.append(names[0] if same else None)
        return outputs


def _takes_a_layer(equation: Any) -> bool:
    """Whether an equation takes one piece of a stack, as `stack[i]` does."""
    kind, before, after = equation.primitive.name, equation.invars, equation.outvars
    if kind == "squeeze":
        return equation.params["dimensions"] == (0,)
    return (
        kind in ("slice", "dynamic_slice") and after[0].aval.shape[1:] == before[0].aval.shape[1:]
    )


# --- sizes ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsOfCall:
    """What a call of `zerojax.experts` sends between the devices that its experts are split over.

    Attributes:
      choices: of one device's tokens, k for each.
      num_experts, capacity: E and C.
      products: as the call has them.
      row_bytes, result_bytes, gate_bytes: of what an expert is given, of what it gives, and of what
        this is multiplied by.
      times: in one forward pass of a microbatch: in loops, once for each turn.
      again: whether a checkpoint computes the call again in the backward pass.
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
        """Rows that are multiplied in the first round: all slots, or at most so many of tiles.

        Args:
          devices: that experts are split over.
        """
        if products == "batched":
            return self.num_experts * self.capacity
        spacing = None if devices == 1 else whole_slots(self.capacity, self.num_experts, PARTS)
        return most_rows(self.choices, self.num_experts, spacing)

    @property
    def first_round(self) -> int:
        """Bytes of all slots in one step, each travel counted, without (n - 1) / n.

        Rows, gates and results go in the forward pass, the gradients of all three in the backward
        pass, rows and gates once more where they are computed again.
        """
        given = self.row_bytes + self.gate_bytes
        sent = (3 if self.again else 2) * given + 2 * self.result_bytes
        return self.times * self.num_experts * self.capacity * sent

    @property
    def further_round(self) -> int:
        """The same of one of the rounds after the first, which always computes again."""
        slots = self.num_experts * slots_of_further_rounds(self.capacity)
        sent = 3 * (self.row_bytes + self.gate_bytes) + 2 * self.result_bytes
        return self.times * slots * sent


def find_rows(program: Jaxpr, times: int = 1, again: bool = False) -> Iterator[RowsOfCall]:
    """All calls in a traced loss, in order.

    Args:
      times, again: of the program itself, as `RowsOfCall` has them.
    """
    for equation in program.eqns:
        numbers = expert_call(equation)
        if numbers is not None:
            gates, num_experts, capacity, row_bytes, result_bytes, kind = numbers
            products: Products = get_args(Products)[kind]
            if products != "batched":  # a plan's trace has no axis
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
                times=times * (array.size // gates),
                again=again,
            )
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        inside = again or (is_checkpoint(equation) and not _keeps_rows(equation))
        for inner in inner_programs(equation.params):
            yield from find_rows(inner, times * turns, inside)


def _keeps_rows(equation: Any) -> bool:
    """Whether a checkpoint's policy keeps what an all-to-all has brought."""
    policy = equation.params["policy"]
    if policy is None or not equation.invars:
        return False
    how = {"axis_name": ("expert",), "split_axis": 0, "concat_axis": 1, "tiled": True}
    kept = policy(lax.all_to_all_p, equation.invars[0].aval, axis_index_groups=None, **how)
    return kept is True  # and no object that says where it is kept
