"""Whether an optimizer asks how large arrays are, so that padding them would change its updates.

Knows traced updates; never a mesh or why arrays are padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.programs import inner_programs

Structs = Mapping[str, jax.ShapeDtypeStruct]


def depends_on_sizes(tx: optax.GradientTransformation, one: Structs, other: Structs) -> bool:
    """Whether an update does something else to arrays that are larger, beside doing more of it.

    A mean over an array divides by its size, and an update scaled by the shape of a matrix
    multiplies by it: such numbers are in the traced update, and here the updates of the same
    parameters with two sizes are compared. Sums, norms and whatever is done to each element are the
    same in both.

    Args:
      one, other: {name: struct}; the same names and dtypes, other shapes.
    """
    return _trace(tx, one) != _trace(tx, other)


def _trace(tx: optax.GradientTransformation, params: Structs) -> list[Any]:
    """Operations and numbers of an update, in order; no shapes."""
    bare = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
    state = jax.eval_shape(tx.init, bare)
    update = optax.with_extra_args_support(tx).update

    def run(grads: Any, state: Any, params: Any, norm: jax.Array) -> Any:
        return update(grads, state, params, grad_norm=norm)

    norm = jax.ShapeDtypeStruct((), jnp.float32)
    return list(_facts(jax.make_jaxpr(run)(bare, state, bare, norm).jaxpr))


def _facts(program: Any) -> Iterator[Any]:
    for equation in program.eqns:
        yield equation.primitive.name
        for value in equation.invars:
            if hasattr(value, "val"):  # a number that is written into the program
                yield str(value.val)
        for inner in inner_programs(equation.params):
            yield from _facts(inner)
