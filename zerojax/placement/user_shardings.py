"""Meshes and shardings in a user's code, beside the mesh of the run.

A step splits rows, sequences, layers and state itself. A sharding that a model gives an array never
changes its values, so those over other axes than `COMPILER_AXES`, which the compiler splits, are
left out. A mesh that the user has set stays the user's: the run is under its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.operators.equations import Equation
from zerojax.operators.marks import inner_programs, takes_over_batch
from zerojax.placement.device_mesh import AXES, MODEL
from zerojax.tracing.annotated_model import AnnotatedModel
from zerojax.tracing.meshless import CONSTRAINTS
from zerojax.tracing.protocol import Model
from zerojax.tracing.source_lines import is_of_zerojax, line_of_equation

Found = TypeVar("Found")
F = TypeVar("F", bound=Callable[..., Any])
_NO_MESH = AbstractMesh((), ())
_ABOUT_MESHES = ("mesh", "sharding", "PartitionSpec", "Explicit", "reshard", "partitioned", "@")
"""Words in JAX's errors about shardings."""
_USERS: contextvars.ContextVar[AbstractMesh | None] = contextvars.ContextVar("_USERS", default=None)


# --- the mesh that a user has set -----------------------------------------------------------------


@contextlib.contextmanager
def under_own_mesh(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Context manager for work of a run: a mesh that the user has set (`jax.set_mesh`) does not
    apply inside."""
    context = jax.sharding.get_abstract_mesh()
    own = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    if context.empty or context == own:
        yield
        return
    token = _USERS.set(context)
    try:
        outside = jax.set_mesh(mesh) if isinstance(mesh, Mesh) else without_users_mesh()
        with outside:
            yield
    finally:
        _USERS.reset(token)


def on_mesh_of_plan(function: F) -> F:
    """Decorates a function whose first argument is a plan, or has one as `plan`, to run under the
    plan's mesh whatever mesh the user has set."""

    @functools.wraps(function)
    def under(first: object, *args: Any, **options: Any) -> Any:
        if jax.sharding.get_abstract_mesh().empty:
            return function(first, *args, **options)
        plan = getattr(first, "plan", first)
        mesh = getattr(plan, "mesh", None)
        if not isinstance(mesh, Mesh | AbstractMesh):  # the function refuses it
            return function(first, *args, **options)
        with under_own_mesh(mesh):
            return function(first, *args, **options)

    return under  # type: ignore[return-value]


def without_users_mesh() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which no mesh is set."""
    return jax.sharding.use_abstract_mesh(_NO_MESH)


def users_mesh() -> AbstractMesh | None:
    """Returns the mesh that the user has set; None if there is none."""
    found = _USERS.get() or jax.sharding.get_abstract_mesh()
    return None if found.empty else found


# --- shardings that a model gives its arrays ------------------------------------------------------


def follow_shardings(
    model: Model, trace_of: Callable[[Model], tuple[Found, Jaxpr]], users: AbstractMesh | None
) -> tuple[Model, Found, list[str]]:
    """Traces a model that may give its arrays shardings.

    Args:
      model: the user's model.
      trace_of: traces a model; returns (what was found, the traced program).
      users: the mesh that the user has set when the run was planned.

    Returns:
      (the model, wrapped if it has shardings; what `trace_of` found; reasons for the plan).

    Raises:
      ValueError: a sharding cannot be followed; the message states its line and a remedy.
    """
    first: Exception | None = None
    try:
        with without_users_mesh():
            found, program = trace_of(model)
        if not any(map(_is_constraint, _equations(program))):
            return model, found, []
    except Exception as error:
        if not is_about_meshes(error):
            raise
        first = error
    for kind in (None, AxisType.Auto, AxisType.Explicit):
        shardings = _Shardings(kind, users)
        annotated: Any = AnnotatedModel(model, shardings.context, shardings.over_model)
        try:
            found, program = trace_of(annotated)
        except Exception as error:
            if not is_about_meshes(error):
                raise
            unset = first is None or "non-empty mesh" in str(first)
            first = error if unset else first  # a spec without a mesh: what is wrong with a mesh
            continue
        if takes_over_batch(program):
            raise ValueError(
                f"{next(iter(shardings.lines))} gives an array a sharding in a loss that computes "
                "over the whole batch (zerojax.batch_sum, batch_mean, gather_batch, row_numbers); "
                "leave the sharding out"
            )
        return annotated, found, shardings.describe()
    assert first is not None
    raise first


class _Shardings:
    """The mesh under which a model is traced, and what its constraints become in a step.

    Attributes:
      lines: the line of each constraint of the model, in order.
    """

    def __init__(self, kind: AxisType | None, users: AbstractMesh | None) -> None:
        """Makes the mesh: None if `kind` is None; else that of the user, or one with the axes of
        the run, with axes of this kind and of size 1, since a device has one part of the rows."""
        self._users, self.lines = users, dict[str, Any]()
        names = tuple(dict.fromkeys([*(users.axis_names if users else ()), *AXES]))
        self._mesh = None
        if kind is not None:
            sizes, kinds = (1,) * len(names), (kind,) * len(names)
            self._mesh = AbstractMesh(sizes, names, axis_types=kinds)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with without_users_mesh():  # JAX refuses to go from one mesh to one of another size
            if self._mesh is None:
                yield
                return
            with jax.sharding.use_abstract_mesh(self._mesh):
                yield

    def over_model(self, equation: Equation) -> Callable[[jax.Array], jax.Array] | None:
        """Returns what applies the part of a constraint over `model` in the mesh of the context;
        None: nothing is left of it.

        Raises:
          ValueError: the constraint fixes devices instead of axes.
        """
        params = equation.params
        sharding = params.get("sharding", params.get("dst_sharding"))
        line = line_of_equation(equation)  # None: JAX gave the sharding, inside an operation
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"{line or 'the model'} fixes the devices of an array "
                f"({type(sharding).__name__}); leave this out, or use jax.sharding.NamedSharding "
                f"over `{MODEL}`"
            )
        if line is not None:
            self.lines.setdefault(line, sharding.spec)
        mesh = jax.sharding.get_abstract_mesh()
        named = any(MODEL in _names(entry) for entry in sharding.spec)
        # Under a mesh with this axis, a spec that does not name it makes the array whole over it.
        theirs = self._users or (None if sharding.mesh == self._mesh else sharding.mesh)
        whole = theirs is not None and MODEL in theirs.axis_names
        if mesh.empty or mesh.shape.get(MODEL, 1) == 1 or not (named or whole):
            return None
        kept = P(*(MODEL if MODEL in _names(entry) else None for entry in sharding.spec))
        return lambda x: jax.lax.with_sharding_constraint(x, kept)

    def describe(self) -> list[str]:
        """Says what becomes of the model's shardings."""
        shown = [f"{line}: {spec}" for line, spec in list(self.lines.items())[:3]]
        more = f" and {len(self.lines) - 3} more" if len(self.lines) > 3 else ""
        return [
            f"shardings in the model ({'; '.join(shown)}{more}) apply over `{MODEL}`; over other "
            "axes they are left out, because the step splits rows and state itself"
        ]


def _names(entry: object) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def is_about_meshes(error: Exception) -> bool:
    """Returns whether an error is JAX's, or a library's, about a mesh or a sharding."""
    return not is_of_zerojax(error) and any(word in str(error) for word in _ABOUT_MESHES)


def _is_constraint(equation: Equation) -> bool:
    return equation.primitive.name in CONSTRAINTS


def _equations(program: Jaxpr) -> Iterator[Any]:
    """Yields the equations of a program, at any depth."""
    for equation in program.eqns:
        yield equation
        for inner in inner_programs(equation.params):
            yield from _equations(inner)
