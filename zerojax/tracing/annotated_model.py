"""Model whose code gives arrays shardings: it is traced under a mesh of its own, in which they can
be written, and runs without them under the mesh of the step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.tree_util import Partial
from jax.typing import ArrayLike

from zerojax.config.tree_types import Batch, Tree
from zerojax.tracing.meshless import Constrain, Context, without_mesh
from zerojax.tracing.protocol import Arrays, Loss, Model, OnRead
from zerojax.tracing.reads import MarkRead
from zerojax.tracing.rolling.rolled_model import RolledModel, evaluate_reads


class AnnotatedModel:
    """Wraps a user's model; what is not defined here is that of the model.

    Attributes:
      inner: model of the user.
    """

    def __init__(self, inner: Model, under: Context, constrain: Constrain) -> None:
        """Wraps a model.

        Args:
          inner: model of the user.
          under: makes the context of the mesh under which the model is traced.
          constrain: replaces the model's constraints under the mesh of the step.
        """
        self.inner, self._under, self._constrain = inner, under, constrain

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "_under", "_constrain"):  # before `__init__`, in copy.copy
            raise AttributeError(name)
        return getattr(self.inner, name)

    def around(self, model: Model) -> Model:
        """Wraps another model in the same way."""
        wrapped: Any = AnnotatedModel(model, self._under, self._constrain)
        return wrapped

    def init(self, key: jax.Array, batch: Batch, loss: Loss) -> tuple[Arrays, Arrays]:
        given = key, batch
        program, shape = self._trace(lambda key, batch: self.inner.init(key, batch, loss), given)
        outputs = evaluate_reads(program, jax.tree.leaves(given), {})
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    def run(
        self,
        params: Arrays,
        extras: Arrays,
        key: jax.Array,
        function: Callable[[Any], Any],
        *,
        train: bool = True,
        on_read: OnRead | None = None,
    ) -> tuple[Any, Arrays]:
        """Runs the model like `Model.run`; `function` must be a result of `on_batch`, or must use
        no array of an enclosing trace."""
        reads = on_read or {}
        if not isinstance(function, Partial):
            function = Partial(function)
        # The trace only marks the reads: their real functions belong to the mesh of the step, so
        # `evaluate_reads` puts them in afterwards.
        marks = {name: MarkRead(name) for name in params if name in reads}
        values = {
            name: jax.eval_shape(reads.get(name, lambda x: x), value)
            for name, value in params.items()
        }
        others = extras, key, function.args

        def traced(values: Arrays, others: Tree) -> Any:
            extras, key, arguments = others
            call = functools.partial(function.func, *arguments)
            return self.inner.run(values, extras, key, call, train=train, on_read=marks)

        program, shape = self._trace(traced, (values, others))
        # JAX flattens dicts in sorted order.
        inputs = [*(params[name] for name in sorted(params)), *jax.tree.leaves(others)]
        outputs = evaluate_reads(program, inputs, reads)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    def _trace(self, function: Callable[..., Any], given: Tree) -> tuple[ClosedJaxpr, Any]:
        """Returns (the program of a function for the mesh of the current context, its result as
        `ShapeDtypeStruct`s)."""
        structs = jax.tree.map(_struct, given)
        with self._under():
            program, shape = jax.make_jaxpr(function, return_shape=True)(*structs)
        return without_mesh(program, self._under, self._constrain), shape


def annotated_as(planned: Model, model: Model) -> Model:
    """Returns a model that can run where no mesh is set.

    Args:
      planned: model of a plan; its layers may be rolled.
      model: the user's model of that plan, or a variant of it.

    Returns:
      `model`, wrapped as in the plan if its code gives arrays shardings.
    """
    inner = planned.inner if isinstance(planned, RolledModel) else planned
    return inner.around(model) if isinstance(inner, AnnotatedModel) else model


def _struct(value: ArrayLike) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(value) if not isinstance(value, jax.ShapeDtypeStruct) else value
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
