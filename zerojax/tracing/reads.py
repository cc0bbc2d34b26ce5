"""Reads of each parameter in a traced model, and values that bypass them.

A parameter may be gathered where it is read only when every device gets there, and only when
nothing looks at the stored value by another way: `nnx.state(model)` hands out what is stored, which
at stage 3 is a shard. Both are found in the program of one abstract forward pass, in which every
read has left a mark.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

from zerojax.operators.marks import (
    inner_programs,
    mark_read,
    read_name,
    read_shape,
    reads_eight_bits,
)
from zerojax.tracing.jaxpr import split_scan

Names = frozenset[str]
_NOTHING: Names = frozenset()


@dataclasses.dataclass(eq=False)
class EightBits:
    """A read of a kernel that a model uses as 8-bit floats alone.

    Attributes:
      history: float32 [3, length], from which the scale follows (`zerojax.zoo.fp8`).
      largest: None: what is read is the value itself. Else what is read is what 8 bits keep of it,
        in units of the scale (`zerojax.zoo.fp8.from_bits`), and whoever reads sets here
        float32 [], the largest magnitude of the value itself on this device.
    """

    history: jax.Array
    largest: jax.Array | None = None


_ASKED: contextvars.ContextVar[EightBits | None] = contextvars.ContextVar("eight_bits")


@contextlib.contextmanager
def in_eight_bits(history: jax.Array) -> Iterator[EightBits]:
    """The reads inside may give what 8 bits keep of a value, and set `largest`."""
    asked = EightBits(history)
    token = _ASKED.set(asked)
    try:
        yield asked
    finally:
        _ASKED.reset(token)


def asked_eight_bits() -> EightBits | None:
    """The read that is under way, if 8 bits are all that is used of it."""
    return _ASKED.get(None)


@dataclasses.dataclass(frozen=True)
class MarkRead:
    """A read that gives the value itself and leaves a mark in the traced program.

    Attributes:
      name: of the parameter.
      handed: gets the name when a model has what stands for the parameter in its own hands.
    """

    name: str
    handed: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def __call__(self, value: jax.Array) -> jax.Array:
        return mark_read(value, self.name, eight_bits=asked_eight_bits() is not None)


@dataclasses.dataclass
class Reads:
    """What a program does with the values that hold parameters.

    Attributes:
      shapes: name -> the shapes it is read with.
      mapped_dims: name -> how many leading dimensions `jax.vmap` maps at a read, at most.
      barriers: name -> why it cannot be gathered where it is read.
      in_full: names of which some read needs more than 8 bits.
    """

    shapes: dict[str, set[tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    mapped_dims: dict[str, int] = dataclasses.field(default_factory=dict)
    barriers: dict[str, str] = dataclasses.field(default_factory=dict)
    in_full: set[str] = dataclasses.field(default_factory=set)


def find_reads(jaxpr: Jaxpr, inputs: Sequence[str | None]) -> Reads:
    """Follows parameters from the inputs of a program to their reads.

    Args:
      jaxpr: traced with `MarkRead` at every read.
      inputs: for each input, the parameter whose stored value it is, or None.
    """
    reads = Reads()
    start = [_NOTHING if name is None else frozenset([name]) for name in inputs]
    outputs = _follow(jaxpr, start, "", reads)
    for name in _NOTHING.union(*outputs):
        reads.barriers.setdefault(name, "is returned as it is stored")
    return reads


def _follow(jaxpr: Jaxpr, inputs: Sequence[Names], branch: str, reads: Reads):
    """The parameters that each output of a piece of program holds unchanged."""
    held: dict[Any, Names] = dict(zip(jaxpr.invars, inputs, strict=True))

    def names_of(atom: Any) -> Names:
        return _NOTHING if isinstance(atom, Literal) else held.get(atom, _NOTHING)

    for equation in jaxpr.eqns:
        given = [names_of(atom) for atom in equation.invars]
        for variable, names in zip(
            equation.outvars, _outputs(equation, given, branch, reads), strict=True
        ):
            if names:
                held[variable] = names
    return [names_of(atom) for atom in jaxpr.outvars]


def _outputs(equation: Any, given: list[Names], branch: str, reads: Reads) -> Sequence[Names]:
    """The parameters that the outputs of one equation hold unchanged."""
    nothing = [_NOTHING] * len(equation.outvars)
    kind = equation.primitive.name
    if read_name(equation) is not None:
        _note_read(equation, given[0], branch, reads)
        return nothing
    if kind == "scan":
        return _follow_scan(equation, given, branch, reads)
    if kind in ("cond", "while"):
        return _follow_branches(equation, given, branch, reads)
    inner = list(inner_programs(equation.params))
    if len(inner) == 1 and len(inner[0].invars) == len(given):
        return _follow(inner[0], given, branch, reads)
    if kind == "optimization_barrier":
        return given
    if _slices_leading_dim(equation) and not any(given[1:]):
        return given[:1]
    for name in _NOTHING.union(*given):
        reads.barriers.setdefault(
            name, f"its stored value goes into `{kind}` directly, as with nnx.state(model)"
        )
    return nothing


def _note_read(equation: Any, given: Names, branch: str, reads: Reads) -> None:
    name = read_name(equation)
    assert name is not None
    stored, shape = tuple(equation.invars[0].aval.shape), read_shape(equation)
    reads.shapes.setdefault(name, set()).add(shape)
    if not reads_eight_bits(equation):
        reads.in_full.add(name)
    mapped = len(stored) - len(shape)
    reads.mapped_dims[name] = max(mapped, reads.mapped_dims.get(name, 0))
    if mapped and list(_leaving(stored, shape)) != [tuple(range(mapped))]:
        reads.barriers.setdefault(
            name,
            f"is read as {list(shape)} of {list(stored)} under `vmap`, which may map another "
            "dimension than the leading one",
        )
    if name not in given:
        reads.barriers.setdefault(name, "is written before it is read")
    if branch:
        reads.barriers.setdefault(
            name, f"is read inside `{branch}`, which not every device may enter"
        )


def _leaving(shape: tuple[int, ...], rest: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every choice of dimensions without which `shape` is `rest`."""
    for dims in itertools.combinations(range(len(shape)), len(shape) - len(rest)):
        if tuple(size for dim, size in enumerate(shape) if dim not in dims) == rest:
            yield dims


def _follow_scan(equation: Any, given: list[Names], branch: str, reads: Reads) -> Sequence[Names]:
    """A carry may come back as something else, so it is followed until nothing changes."""
    num_consts, num_carry = split_scan(equation)
    body = equation.params["jaxpr"].jaxpr
    carry = slice(num_consts, num_consts + num_carry)
    while True:
        outputs = _follow(body, given, branch, reads)
        joined = [old | new for old, new in zip(given[carry], outputs[:num_carry], strict=True)]
        if joined == given[carry]:
            return [*joined, *outputs[num_carry:]]
        given = [*given[: carry.start], *joined, *given[carry.stop :]]


def _follow_branches(
    equation: Any, given: list[Names], branch: str, reads: Reads
) -> Sequence[Names]:
    kind, params = equation.primitive.name, equation.params
    branch = branch or kind
    if kind == "cond":
        branches = [_follow(b.jaxpr, given[1:], branch, reads) for b in params["branches"]]
        return [_NOTHING.union(*names) for names in zip(*branches, strict=True)]
    first, second = params["cond_nconsts"], params["body_nconsts"]
    carry = given[first + second :]
    _follow(params["cond_jaxpr"].jaxpr, [*given[:first], *carry], branch, reads)
    outputs = _follow(
        params["body_jaxpr"].jaxpr, [*given[first : first + second], *carry], branch, reads
    )
    return [old | new for old, new in zip(carry, outputs, strict=True)]


def _slices_leading_dim(equation: Any) -> bool:
    """Whether an equation takes one piece of a stack, as `stack[i]` does."""
    kind, before, after = equation.primitive.name, equation.invars, equation.outvars
    if kind == "squeeze":
        return equation.params["dimensions"] == (0,)
    return (
        kind in ("slice", "dynamic_slice") and after[0].aval.shape[1:] == before[0].aval.shape[1:]
    )
