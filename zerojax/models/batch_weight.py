"""Computes the weight of a whole batch before the forward pass, if it does not depend on the model.

An ordinary backward pass is linear, so the gradient may be divided by the weight before or after
it. A `jax.custom_vjp` of the model may be nonlinear, for example clip its cotangent. The division
before the backward pass gives it the same cotangent as on one device, where the loss is a mean.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch
from zerojax.models.losses import split_result
from zerojax.operators.equations import Operand
from zerojax.operators.marks import inner_programs, takes_over_batch
from zerojax.tracing.jaxpr import cut_piece
from zerojax.tracing.trace import ModelTrace


@dataclass(frozen=True, eq=False)
class BatchWeight:
    """Weight of a batch as a function of some of its arrays.

    Attributes:
      program: traced program that computes the weight of one part of the batch from these arrays;
        None if each part has weight 1.
      leaves: indices of the arrays in `jax.tree.leaves(batch)`.
    """

    program: ClosedJaxpr | None = None
    leaves: tuple[int, ...] = ()

    @property
    def needs_batch(self) -> bool:
        """Returns whether the weight depends on the batch."""
        return bool(self.leaves)

    def __call__(self, batch: Batch, num_pieces: int) -> jax.Array:
        """Computes the sum of the weights of all parts of the batch, float32 []; call it inside a
        traced program.

        Args:
          batch: global batch, {key: [rows, ...]}.
          num_pieces: number of consecutive parts with equally many rows.
        """
        if self.program is None:
            return jnp.float32(num_pieces)
        run = jaxpr_as_fun(self.program)
        if not self.leaves:
            return jnp.asarray(run()[0], jnp.float32) * num_pieces
        leaves = [jax.tree.leaves(batch)[place] for place in self.leaves]
        pieces = [x.reshape(num_pieces, -1, *x.shape[1:]) for x in leaves]
        return jnp.sum(jax.vmap(lambda *piece: run(*piece)[0])(*pieces).astype(jnp.float32))


def find_batch_weight(trace: ModelTrace, num_before: int) -> BatchWeight | None:
    """Extracts the weight of a batch from the traced loss of one part of the batch.

    Args:
      trace: trace of the loss.
      num_before: number of inputs of the traced program before the arrays of the batch.

    Returns:
      The weight; None if it is random, depends on the model, or already sums over the whole
      batch.
    """
    if split_result(trace.result).weight is None:
        return BatchWeight()
    piece = cut_piece(trace.jaxpr, trace.jaxpr.jaxpr.outvars[1:2])
    if takes_over_batch(piece.closed.jaxpr):
        return None
    if _draws(piece.closed.jaxpr) or any(place < num_before for place in piece.inputs):
        return None
    return BatchWeight(piece.closed, tuple(place - num_before for place in piece.inputs))


def _draws(program: Jaxpr) -> bool:
    """Returns whether a program draws random numbers; they differ in each step and part of the
    batch.
    """
    atoms: list[Operand] = [
        *program.constvars,
        *(atom for eqn in program.eqns for atom in eqn.invars),
    ]
    if any(jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.prng_key) for atom in atoms):
        return True
    return any(
        equation.primitive.name.startswith("random_")
        or any(map(_draws, inner_programs(equation.params)))
        for equation in program.eqns
    )
