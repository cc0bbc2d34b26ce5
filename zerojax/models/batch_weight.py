"""Weight of a whole batch, computed before its forward pass where it does not need the model.

A backward pass is linear, so it does not matter whether the gradient of the summed loss is divided
by the weight before or after it. Derivatives that a model brings along (`jax.custom_vjp`) may not
be, such as one that clips: they are to see what they would see on one device, where the loss is a
mean.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from zerojax.models.losses import split_result
from zerojax.operators.marks import inner_programs, takes_over_batch
from zerojax.tracing.jaxpr import cut_piece
from zerojax.tracing.trace import ModelTrace


@dataclasses.dataclass(frozen=True, eq=False)
class BatchWeight:
    """The weight as a function of a batch.

    Attributes:
      program: gives the weight of one piece from some leaves of the batch; None: 1 for each piece.
      leaves: which leaves these are.
    """

    program: ClosedJaxpr | None = None
    leaves: tuple[int, ...] = ()

    @property
    def needs_batch(self) -> bool:
        """Whether it is another number for other batches."""
        return bool(self.leaves)

    def __call__(self, batch: Any, num_pieces: int) -> jax.Array:
        """The sum of the weights of all pieces, float32 []; to be traced.

        Args:
          batch: {key: [global batch, ...]}.
          num_pieces: the batch's consecutive pieces of equal rows.
        """
        if self.program is None:
            return jnp.float32(num_pieces)
        run = jaxpr_as_fun(self.program)
        if not self.leaves:
            return jnp.asarray(run()[0], jnp.float32) * num_pieces
        leaves = [jax.tree.leaves(batch)[place] for place in self.leaves]
        pieces = [x.reshape(num_pieces, -1, *x.shape[1:]) for x in leaves]
        return jnp.sum(jax.vmap(lambda *one: run(*one)[0])(*pieces).astype(jnp.float32))


def find_batch_weight(trace: ModelTrace, num_before: int) -> BatchWeight | None:
    """The weight of a batch, from the traced loss of a piece.

    Args:
      trace: of the loss.
      num_before: how many inputs of its program are no leaves of the batch.

    Returns:
      None where the weight is drawn at random, depends on the model, or is a sum over the batch.
    """
    if split_result(trace.result).weight is None:
        return BatchWeight()
    piece = cut_piece(trace.jaxpr, trace.jaxpr.jaxpr.outvars[1:2])
    if takes_over_batch(piece.closed.jaxpr):
        return None
    if _draws(piece.closed.jaxpr) or any(place < num_before for place in piece.inputs):
        return None
    return BatchWeight(piece.closed, tuple(place - num_before for place in piece.inputs))


def _draws(program: Any) -> bool:
    """Whether a program has random numbers, whose key is another one in each step and piece."""
    atoms = [*program.constvars, *(atom for eqn in program.eqns for atom in eqn.invars)]
    if any(jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.prng_key) for atom in atoms):
        return True
    return any(
        equation.primitive.name.startswith("random_")
        or any(map(_draws, inner_programs(equation.params)))
        for equation in program.eqns
    )
