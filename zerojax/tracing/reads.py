"""Finds how a traced model reads each parameter, and uses of stored values that bypass a read.

A parameter may be gathered at its reads only under two conditions: every device reaches the reads,
and nothing else uses the stored value. (`nnx.state(model)`, for example, returns the stored value,
which is a shard at stage 3.) Both conditions are checked in the program of one abstract forward
pass, in which every read is marked (`operators.marks`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import (
    inner_programs,
    mark_read,
    read_name,
    read_shape,
    reads_eight_bits,
)
from zerojax.tracing.jaxpr import split_scan
from zerojax.tracing.source_lines import line_of_equation

Names = frozenset[str]
_NOTHING: Names = frozenset()


@dataclasses.dataclass(eq=False)
class EightBits:
    """Read of a kernel that a model uses only as 8-bit floats.

    Attributes:
      history: largest magnitudes of earlier steps, float32 [3, length], from which the scale is
        computed (`zerojax.zoo.fp8`).
      largest: None if the read returns the value itself. Otherwise the read returns the 8-bit value
        in units of the scale (`zerojax.zoo.fp8.from_bits`), and sets this attribute to the maximum
        magnitude of the value on this device, float32 [].
    """

    history: jax.Array
    largest: jax.Array | None = None


_ASKED: contextvars.ContextVar[EightBits | None] = contextvars.ContextVar("eight_bits")


@contextlib.contextmanager
def in_eight_bits(history: jax.Array) -> Iterator[EightBits]:
    """Declares that reads inside this context may return 8-bit values; such a read sets
    `largest`.
    """
    read = EightBits(history)
    token = _ASKED.set(read)
    try:
        yield read
    finally:
        _ASKED.reset(token)


def asked_eight_bits() -> EightBits | None:
    """Returns the `EightBits` of the enclosing `in_eight_bits` context; None outside of such a
    context.
    """
    return _ASKED.get(None)


@dataclass(frozen=True)
class MarkRead:
    """Read that returns the stored value, marked in the traced program (`operators.marks`).

    Attributes:
      name: name of the parameter.
      handed: set to which the name is added when a model accesses the placeholder of the parameter.
    """

    name: str
    handed: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def __call__(self, value: jax.Array) -> jax.Array:
        return mark_read(value, self.name, eight_bits=asked_eight_bits() is not None)


@dataclasses.dataclass
class Reads:
    """Uses of the stored values of parameters in a program.

    Attributes:
      shapes: {name: shapes with which the parameter is read}.
      mapped_dims: {name: maximum number of leading dimensions that `jax.vmap` maps at a read}.
      barriers: {name: reason why the parameter cannot be gathered at its reads}.
      in_full: names of parameters with a read that needs more than 8 bits.
      in_branches: names of parameters that are read in a branch that is the same on all devices.
      uniform: `id` of each `cond` equation whose branch is the same on all devices
        (`tracing.uniform`).
    """

    shapes: dict[str, set[tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    mapped_dims: dict[str, int] = dataclasses.field(default_factory=dict)
    barriers: dict[str, str] = dataclasses.field(default_factory=dict)
    in_full: set[str] = dataclasses.field(default_factory=set)
    in_branches: set[str] = dataclasses.field(default_factory=set)
    uniform: frozenset[int] = frozenset()


Branch = str | None
"""The `cond` or loop around an equation that not every device may enter, as a primitive name.

None: the equation is outside of any branch; "": it is in a branch that is the same on all devices.
"""


def find_reads(
    jaxpr: Jaxpr, inputs: Sequence[str | None], uniform: frozenset[int] = frozenset()
) -> Reads:
    """Finds how a traced program reads each parameter: shapes, obstacles to gathering, precision.

    Args:
      jaxpr: program traced with `MarkRead` at every read.
      inputs: for each input, the name of the parameter whose stored value it is, or None.
      uniform: `id` of each `cond` equation whose branch is the same on all devices.
    """
    reads = Reads(uniform=uniform)
    start = [_NOTHING if name is None else frozenset([name]) for name in inputs]
    outputs = _follow(jaxpr, start, None, reads)
    for name in _NOTHING.union(*outputs):
        reads.barriers.setdefault(name, "is returned as it is stored")
    return reads


def _follow(jaxpr: Jaxpr, inputs: Sequence[Names], branch: Branch, reads: Reads):
    """Returns, for each output of a program, the parameters whose stored values it contains
    unchanged.
    """
    held: dict[Any, Names] = dict(zip(jaxpr.invars, inputs, strict=True))

    def names_of(atom: Operand) -> Names:
        return _NOTHING if isinstance(atom, Literal) else held.get(atom, _NOTHING)

    for equation in jaxpr.eqns:
        operands = [names_of(atom) for atom in equation.invars]
        for variable, names in zip(
            equation.outvars, _outputs(equation, operands, branch, reads), strict=True
        ):
            if names:
                held[variable] = names
    return [names_of(atom) for atom in jaxpr.outvars]


def _outputs(
    equation: Equation, operands: list[Names], branch: Branch, reads: Reads
) -> Sequence[Names]:
    """Returns, for each output of one equation, the parameters whose stored values it contains
    unchanged.
    """
    nothing = [_NOTHING] * len(equation.outvars)
    kind = equation.primitive.name
    if read_name(equation) is not None:
        _note_read(equation, operands[0], branch, reads)
        return nothing
    if kind == "scan":
        return _follow_scan(equation, operands, branch, reads)
    if kind in ("cond", "while"):
        return _follow_branches(equation, operands, branch, reads)
    inner = list(inner_programs(equation.params))
    if len(inner) == 1 and len(inner[0].invars) == len(operands):
        return _follow(inner[0], operands, branch, reads)
    if kind == "optimization_barrier":
        return operands
    if _slices_leading_dim(equation) and not any(operands[1:]):
        return operands[:1]
    for name in _NOTHING.union(*operands):
        reads.barriers.setdefault(
            name, f"its stored value goes into `{kind}` directly, as with nnx.state(model)"
        )
    return nothing


def _note_read(equation: Equation, names: Names, branch: Branch, reads: Reads) -> None:
    name = read_name(equation)
    assert name is not None
    stored, shape = tuple(equation.invars[0].aval.shape), read_shape(equation)
    reads.shapes.setdefault(name, set()).add(shape)
    if not reads_eight_bits(equation):
        reads.in_full.add(name)
    mapped = len(stored) - len(shape)
    reads.mapped_dims[name] = max(mapped, reads.mapped_dims.get(name, 0))
    # If other dimensions could have been left out, it is not known which ones `vmap` maps.
    if mapped and list(_leaving(stored, shape)) != [tuple(range(mapped))]:
        reads.barriers.setdefault(
            name,
            f"is read as {list(shape)} of {list(stored)} under `vmap`, which may map another "
            "dimension than the leading one",
        )
    if name not in names:
        reads.barriers.setdefault(name, "is written before it is read")
    if branch:
        reads.barriers.setdefault(
            name, f"is read inside `{branch}`, which not every device may enter"
        )
    elif branch is not None:
        reads.in_branches.add(name)


def _leaving(shape: tuple[int, ...], rest: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields each tuple of dimensions whose removal from `shape` leaves the shape `rest`."""
    for dims in itertools.combinations(range(len(shape)), len(shape) - len(rest)):
        if tuple(size for dim, size in enumerate(shape) if dim not in dims) == rest:
            yield dims


def _follow_scan(
    equation: Equation, operands: list[Names], branch: Branch, reads: Reads
) -> Sequence[Names]:
    """Processes the body of a scan repeatedly, until its carry contains no further parameters."""
    num_consts, num_carry = split_scan(equation)
    body = equation.params["jaxpr"].jaxpr
    carry = slice(num_consts, num_consts + num_carry)
    while True:
        outputs = _follow(body, operands, branch, reads)
        joined = [old | new for old, new in zip(operands[carry], outputs[:num_carry], strict=True)]
        if joined == operands[carry]:
            return [*joined, *outputs[num_carry:]]
        operands = [*operands[: carry.start], *joined, *operands[carry.stop :]]


def _follow_branches(
    equation: Equation, operands: list[Names], branch: Branch, reads: Reads
) -> Sequence[Names]:
    kind, params = equation.primitive.name, equation.params
    # "" is not final: a branch inside of one that is the same on all devices may still differ.
    branch = branch or ("" if id(equation) in reads.uniform else kind)
    if kind == "cond":
        branches = [_follow(b.jaxpr, operands[1:], branch, reads) for b in params["branches"]]
        return [_NOTHING.union(*names) for names in zip(*branches, strict=True)]
    first, second = params["cond_nconsts"], params["body_nconsts"]
    consts, carry = operands[first : first + second], operands[first + second :]
    while True:  # as in `_follow_scan`: an iteration may move a parameter to another place
        _follow(params["cond_jaxpr"].jaxpr, [*operands[:first], *carry], branch, reads)
        outputs = _follow(params["body_jaxpr"].jaxpr, [*consts, *carry], branch, reads)
        joined = [old | new for old, new in zip(carry, outputs, strict=True)]
        if joined == carry:
            return joined
        carry = joined


def _slices_leading_dim(equation: Equation) -> bool:
    """Returns whether an equation selects one row of a stack, as `stack[i]` does."""
    kind, before, after = equation.primitive.name, equation.invars, equation.outvars
    if kind == "squeeze":
        return equation.params["dimensions"] == (0,)
    return (
        kind in ("slice", "dynamic_slice") and after[0].aval.shape[1:] == before[0].aval.shape[1:]
    )


def line_of_read(program: Jaxpr, names: Collection[str | None]) -> str | None:
    """Returns the line that first reads one of the parameters; None if none is read.

    The parameters of a pair of functions are read before its code runs; then it is the line that
    first uses one of them.
    """
    for equation in program.eqns:
        if read_name(equation) in names:
            uses = (one for one in program.eqns if equation.outvars[0] in one.invars)
            return next(filter(None, map(line_of_equation, (equation, *uses))), None)
        for inner in inner_programs(equation.params):
            line = line_of_read(inner, names)
            if line is not None:
                return line
    return None
