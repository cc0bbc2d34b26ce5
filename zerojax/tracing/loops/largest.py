"""Finds the loop over layers with the most weights, and what it carries from layer to layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from zerojax.operators.equations import Equation
from zerojax.tracing import jaxpr


def largest_loop(program: Jaxpr | ClosedJaxpr) -> Any:
    """Returns the scan with the most bytes of stacked arrays; None if a jaxpr has no scan.

    Scans inside of scans do not count.
    """
    return max(_loops(program), key=_stacked_bytes, default=None)


def carried_arrays(loop: Equation) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the floating-point arrays that a scan carries, without scalars: the inputs of a
    layer, which are stored for the backward pass."""
    constants, carried = jaxpr.split_scan(loop)
    given = [v.aval for v in loop.invars[constants : constants + carried]]
    return tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in given
        if x.shape and jnp.issubdtype(x.dtype, jnp.floating)
    )


def _loops(program: Jaxpr | ClosedJaxpr) -> Iterator[Any]:
    for equation in program.eqns:
        if equation.primitive.name == "scan":
            yield equation
        else:
            for inner in jaxpr.inner_programs(equation.params):
                yield from _loops(inner)


def _stacked_bytes(loop: Equation) -> int:
    stacks = loop.invars[sum(jaxpr.split_scan(loop)) :]
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in stacks)
