"""How traced programs (jaxprs) are walked, and how reads of parameters are found in them.

Knows the form of programs in every version of JAX that is supported; never what they compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr

_READ = "zerojax.read:"


def mark_read(value: jax.Array, name: str) -> jax.Array:
    """`value`, with a mark in the traced program that it was read as parameter `name`."""
    return checkpoint_name(value, _READ + name)


def read_name(equation: Any) -> str | None:
    """The parameter whose read an equation marks, if it is such a mark."""
    if equation.primitive.name != "name" or not equation.params["name"].startswith(_READ):
        return None
    return equation.params["name"].removeprefix(_READ)


def inner_programs(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """The programs among the parameters of an equation."""
    return _programs(params.values())


def _programs(values: Any) -> Iterator[Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _programs(value)


def is_checkpoint(equation: Any) -> bool:
    """Whether an equation is a `jax.checkpoint`."""
    return equation.primitive.name in ("checkpoint", "remat", "remat2")


def split_scan(equation: Any) -> tuple[int, int]:
    """(number of constants, number of carried values) of a `scan` equation.

    Its inputs are constants, carried values and stacks; its outputs are carried values and stacks.
    Stacks have one dimension less inside, which, unlike the equation's parameters, is the same in
    every version of JAX.
    """
    body = equation.params["jaxpr"].jaxpr
    num_carry = _count_whole(equation.outvars, body.outvars)
    return _count_whole(equation.invars, body.invars) - num_carry, num_carry


def _count_whole(outside: Any, inside: Any) -> int:
    """How many values have the same number of dimensions outside and inside of a loop."""
    pairs = zip(outside, inside, strict=True)
    return sum(outer.aval.ndim == inner.aval.ndim for outer, inner in pairs)


_COLLECTIVES = (
    "psum",
    "pmax",
    "pmin",
    "ppermute",
    "pgather",
    "all_gather",
    "all_to_all",
    "ragged_all_to_all",
    "reduce_scatter",
    "unreduced_",
)
"""How the names of JAX's collectives begin, `psum_invariant` and `all_gather_reduced` included."""


def holds_collectives(program: ClosedJaxpr | Jaxpr) -> bool:
    """Whether a traced program has a collective over manual axes, at any depth."""
    jaxpr: Any = getattr(program, "jaxpr", program)
    return any(
        equation.primitive.name.startswith(_COLLECTIVES)
        or any(holds_collectives(inner) for inner in inner_programs(equation.params))
        for equation in jaxpr.eqns
    )


def collectives_in_branches(program: ClosedJaxpr | Jaxpr) -> list[str]:
    """Names of the collectives of which a `cond` or `switch` decides whether they run.

    Sees those that are written over manual axes; what the partitioner adds for automatic ones is in
    the compiled program alone (`zerojax.hlo.find_in_branches`).

    Args:
      program: traced, as in `jitted.trace(...).jaxpr`.
    """
    jaxpr: Any = getattr(program, "jaxpr", program)
    return list(_in_branches(jaxpr, inside=False))


def _in_branches(program: Jaxpr, *, inside: bool) -> Iterator[str]:
    for equation in program.eqns:
        name = equation.primitive.name
        if inside and name.startswith(_COLLECTIVES):
            yield name
        for inner in inner_programs(equation.params):
            yield from _in_branches(inner, inside=inside or name == "cond")
