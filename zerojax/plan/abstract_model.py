"""Abstract model and batch: shapes and dtypes without arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import models
from zerojax.models.trees import check_arrays
from zerojax.optim.precision import Precision

Tree = Any


def abstract(tree: Tree) -> Tree:
    """`ShapeDtypeStruct`s of arrays, numbers or structs, with the dtypes JAX would give them.

    Raises:
      TypeError: leaves that are no arrays of numbers.
    """
    check_arrays(tree)

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        if not hasattr(leaf, "shape"):
            leaf = np.asarray(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(one, tree)


def slice_batch(batch: Tree, parts: int) -> Tree:
    """A batch of as many times fewer rows."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype), batch
    )


def abstract_model(model: models.Model, batch: Tree, loss: models.Loss) -> tuple[dict, dict]:
    """({name: parameter}, {name: other state}) of a model, as `ShapeDtypeStruct`s.

    Raises:
      ValueError: a model without parameters, or with complex ones.
    """
    arrays = model.initial_arrays()
    if arrays is not None:
        params, extras = (dict(abstract(part)) for part in arrays)
    else:
        params, extras = jax.eval_shape(
            lambda batch: model.init(jax.random.key(0), batch, loss), batch
        )
    if not params:
        raise ValueError(
            f"the {model.kind} has no parameters; give a model that holds at least one nnx.Param"
        )
    for name, leaf in params.items():
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(f"parameter {name} is {leaf.dtype.name}; use real parameters")
    return params, extras


def as_read(params: Mapping[str, Any], precision: Precision) -> dict[str, Any]:
    """Parameters in the dtype in which the model reads them."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, precision.compute_dtype if floating else leaf.dtype)

    return {name: one(leaf) for name, leaf in params.items()}
