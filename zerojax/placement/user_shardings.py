"""Refuses meshes and shardings in a user's code that contradict the mesh of the run.

A step splits rows, sequences, layers and state itself. Only axes in `COMPILER_AXES` are left to the
compiler, and only these may be named by `jax.lax.with_sharding_constraint` in a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.operators.marks import inner_programs
from zerojax.placement.device_mesh import COMPILER_AXES, MODEL
from zerojax.tracing.source_lines import line_of_equation

_NO_MESH = ("requires a non-empty mesh", "not under a mesh context")


def check_context_mesh(mesh: Mesh | AbstractMesh) -> None:
    """Raises if a context mesh (`jax.set_mesh`) is not the mesh of the run.

    Raises:
      ValueError: the message states the sizes of both.
    """
    context, own = jax.sharding.get_abstract_mesh(), mesh
    if isinstance(own, Mesh):
        own = own.abstract_mesh
    if context.empty or context == own:
        return
    kinds = {kind.name for kind in context.axis_types}
    raise ValueError(
        f"jax.set_mesh has set a mesh {dict(context.shape)} with {' and '.join(sorted(kinds))} "
        "axes, but a run has a mesh of its own, "
        f"{dict(own.shape)}; call zerojax outside of jax.set_mesh, or "
        "set the mesh of the run: jax.set_mesh(zerojax.make_mesh(mesh_config))"
    )


def about_no_mesh(error: Exception, line: str) -> ValueError | None:
    """Returns an error with remedies if JAX has refused a `PartitionSpec` in a model because no
    mesh is set; else None.

    Args:
      error: what was raised while the loss was traced.
      line: the line of the user's code that raised it.
    """
    if not isinstance(error, RuntimeError | ValueError):
        return None
    if not any(text in str(error) for text in _NO_MESH):
        return None
    return ValueError(
        f"{line} gives an array a PartitionSpec, but no mesh is set; leave this out, since "
        "zerojax splits rows and weights itself; or, to split over the axis "
        f"{MODEL!r} only, use jax.lax.with_sharding_constraint under "
        "jax.set_mesh(zerojax.make_mesh(mesh_config))"
    )


def check_constraints(program: Jaxpr, mesh: Mesh | AbstractMesh) -> None:
    """Raises if a model's sharding of an array cannot be followed on the mesh of the run.

    Args:
      program: traced loss.
      mesh: the mesh of the run.

    Raises:
      ValueError: the message states the line and what may stand there instead.
    """
    for equation in _equations(program):
        name = equation.primitive.name
        line = line_of_equation(equation) or "a line of the model"
        if name == "reshard":
            raise ValueError(
                f"{line} uses jax.sharding.reshard, which needs a mesh with Explicit axes, but a "
                "run has Auto axes; leave it out, or use jax.lax.with_sharding_constraint"
            )
        if name == "sharding_constraint":
            _check(equation.params["sharding"], line, mesh)


def _check(sharding: Any, line: str, mesh: Mesh | AbstractMesh) -> None:
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"{line} fixes the devices of an array ({type(sharding).__name__}); leave this out, "
            f"or use jax.sharding.NamedSharding over `{MODEL}`"
        )
    own, theirs = _devices(mesh), _devices(sharding.mesh)
    if sharding.mesh.size != mesh.size or (own and theirs and own != theirs):
        raise ValueError(
            f"{line} shards an array over {sharding.mesh.size} devices, but the run has "
            f"{mesh.size} devices or these in another order; leave this out, or use "
            "zerojax.make_mesh(mesh_config) there"
        )
    split = [
        name
        for entry in sharding.spec
        for name in (entry if isinstance(entry, tuple) else (entry,))
        if isinstance(name, str) and sharding.mesh.shape[name] > 1
    ]
    size = math.prod(mesh.shape[axis] for axis in COMPILER_AXES)
    innermost = next((name for name, many in reversed(sharding.mesh.shape.items()) if many > 1), "")
    wrong = [name for name in split if name != innermost or sharding.mesh.shape[name] != size]
    if wrong:
        kept = P(*(None if _names(entry, wrong) else entry for entry in sharding.spec))
        remedy = f"use {kept}" if any(entry is not None for entry in kept) else "leave this out"
        raise ValueError(
            f"{line} splits an array as {sharding.spec} on {dict(sharding.mesh.shape)}, but "
            f"over {' and '.join(wrong)} only zerojax splits; a model may split over the "
            f"innermost axis, of size {MODEL}={size}; {remedy}"
        )


def _names(entry: Any, wanted: list[str]) -> bool:
    return any(name in wanted for name in (entry if isinstance(entry, tuple) else (entry,)))


def _devices(mesh: Mesh | AbstractMesh) -> list[Any]:
    """Returns the devices of a mesh in order; none if it is abstract."""
    return [] if isinstance(mesh, AbstractMesh) else mesh.devices.ravel().tolist()


def _equations(program: Jaxpr) -> Iterator[Any]:
    """Yields the equations of a program, at any depth."""
    for equation in program.eqns:
        yield equation
        for inner in inner_programs(equation.params):
            yield from _equations(inner)
