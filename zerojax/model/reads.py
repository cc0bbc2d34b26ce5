"""How each parameter of a traced model reaches the computation: through its read, or around it.

Knows traced programs and names; never knows Flax, or what a read does.

A parameter may be gathered where it is read only when every device gets there, and only when
nothing looks at the stored value by another way: `nnx.state(model)` hands out what is stored, which
at stage 3 is a shard. Both are found in the program of one abstract forward pass, in which every
read has left a mark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_MARK = "zerojax.read:"

Names = frozenset[str]
_NOTHING: Names = frozenset()


@dataclasses.dataclass(frozen=True)
class MarkRead:
    """A read that gives the value itself and leaves a mark in the traced program."""

    name: str

    def __call__(self, value: jax.Array) -> jax.Array:
        return checkpoint_name(value, _MARK + self.name)


@dataclasses.dataclass
class Reads:
    """What a program does with the values that hold parameters.

    Attributes:
      shapes: name -> the shapes it is read with.
      barriers: name -> why it cannot be gathered where it is read.
      outside_checkpoints: names that are read, somewhere, outside of any `jax.checkpoint`.
    """

    shapes: dict[str, set[tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    barriers: dict[str, str] = dataclasses.field(default_factory=dict)
    outside_checkpoints: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class _Surroundings:
    """What a piece of program lies in."""

    branching: str = ""
    checkpointed: bool = False


def find_reads(jaxpr: Jaxpr, inputs: Sequence[str | None]) -> Reads:
    """Follows parameters from the inputs of a program to their reads.

    Args:
      jaxpr: traced with `MarkRead` at every read.
      inputs: for each input, the parameter whose stored value it is, or None.
    """
    reads = Reads()
    start = [_NOTHING if name is None else frozenset([name]) for name in inputs]
    outputs = _follow(jaxpr, start, _Surroundings(), reads)
    for name in _NOTHING.union(*outputs):
        reads.barriers.setdefault(name, "is returned as it is stored")
    return reads


def _follow(jaxpr: Jaxpr, inputs: Sequence[Names], where: _Surroundings, reads: Reads):
    """The parameters that each output of a piece of program holds unchanged."""
    held: dict[Any, Names] = dict(zip(jaxpr.invars, inputs, strict=True))

    def names_of(atom: Any) -> Names:
        return _NOTHING if isinstance(atom, Literal) else held.get(atom, _NOTHING)

    for equation in jaxpr.eqns:
        given = [names_of(atom) for atom in equation.invars]
        for variable, names in zip(
            equation.outvars, _outputs(equation, given, where, reads), strict=True
        ):
            if names:
                held[variable] = names
    return [names_of(atom) for atom in jaxpr.outvars]


def _outputs(
    equation: Any, given: list[Names], where: _Surroundings, reads: Reads
) -> Sequence[Names]:
    """The parameters that the outputs of one equation hold unchanged."""
    nothing = [_NOTHING] * len(equation.outvars)
    kind = equation.primitive.name
    if kind == "name" and equation.params["name"].startswith(_MARK):
        _note_read(equation, given[0], where, reads)
        return nothing
    if kind == "scan":
        return _follow_scan(equation, given, where, reads)
    if kind in ("cond", "while"):
        return _follow_branches(equation, given, where, reads)
    inner = list(_inner_programs(equation.params.values()))
    if len(inner) == 1 and len(inner[0].invars) == len(given):
        checkpointed = where.checkpointed or is_checkpoint(equation)
        return _follow(
            inner[0], given, dataclasses.replace(where, checkpointed=checkpointed), reads
        )
    if kind == "optimization_barrier":
        return given
    if _slices_leading_dim(equation) and not any(given[1:]):
        return given[:1]
    for name in _NOTHING.union(*given):
        reads.barriers.setdefault(
            name, f"its stored value goes into `{kind}` directly, as with nnx.state(model)"
        )
    return nothing


def _note_read(equation: Any, given: Names, where: _Surroundings, reads: Reads) -> None:
    name = equation.params["name"].removeprefix(_MARK)
    reads.shapes.setdefault(name, set()).add(tuple(equation.invars[0].aval.shape))
    if name not in given:
        reads.barriers.setdefault(name, "is written before it is read")
    if where.branching:
        reads.barriers.setdefault(
            name, f"is read inside `{where.branching}`, which not every device may enter"
        )
    if not where.checkpointed:
        reads.outside_checkpoints.add(name)


def _follow_scan(
    equation: Any, given: list[Names], where: _Surroundings, reads: Reads
) -> Sequence[Names]:
    """A carry may come back as something else, so it is followed until nothing changes."""
    num_consts, num_carry = _scan_sizes(equation.params)
    body = equation.params["jaxpr"].jaxpr
    carry = slice(num_consts, num_consts + num_carry)
    while True:
        outputs = _follow(body, given, where, reads)
        joined = [old | new for old, new in zip(given[carry], outputs[:num_carry], strict=True)]
        if joined == given[carry]:
            return [*joined, *outputs[num_carry:]]
        given = [*given[: carry.start], *joined, *given[carry.stop :]]


def _scan_sizes(params: Any) -> tuple[int, int]:
    """Constants and carried values of a scan; JAX 0.12 says so by the structure of its inputs."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _follow_branches(
    equation: Any, given: list[Names], where: _Surroundings, reads: Reads
) -> Sequence[Names]:
    kind, params = equation.primitive.name, equation.params
    where = dataclasses.replace(where, branching=where.branching or kind)
    if kind == "cond":
        branches = [_follow(b.jaxpr, given[1:], where, reads) for b in params["branches"]]
        return [_NOTHING.union(*names) for names in zip(*branches, strict=True)]
    first, second = params["cond_nconsts"], params["body_nconsts"]
    carry = given[first + second :]
    _follow(params["cond_jaxpr"].jaxpr, [*given[:first], *carry], where, reads)
    outputs = _follow(
        params["body_jaxpr"].jaxpr, [*given[first : first + second], *carry], where, reads
    )
    return [old | new for old, new in zip(carry, outputs, strict=True)]


def is_checkpoint(equation: Any) -> bool:
    """Whether an equation is a `jax.checkpoint`."""
    return equation.primitive.name in ("checkpoint", "remat", "remat2")


def has_checkpoint(jaxpr: Jaxpr) -> bool:
    """Whether any equation, at any depth, is a `jax.checkpoint`."""
    return any(
        is_checkpoint(equation)
        or any(map(has_checkpoint, _inner_programs(equation.params.values())))
        for equation in jaxpr.eqns
    )


def _inner_programs(values: Any) -> Iterator[Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _inner_programs(value)


def _slices_leading_dim(equation: Any) -> bool:
    """Whether an equation takes one piece of a stack, as `stack[i]` does."""
    kind, before, after = equation.primitive.name, equation.invars, equation.outvars
    if kind == "squeeze":
        return equation.params["dimensions"] == (0,)
    return (
        kind in ("slice", "dynamic_slice") and after[0].aval.shape[1:] == before[0].aval.shape[1:]
    )
