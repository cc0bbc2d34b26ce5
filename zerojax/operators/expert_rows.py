"""Sorts rows of tokens by expert into buffers of fixed size, and back, in rounds.

A "choice" is one of the k experts that a token is routed to; a "slot" is one row of a buffer. This
module does not depend on the experts' computation or on devices. Both directions are gathers, in
the backward pass too, because a scatter-add would sum in a different order in each run.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from zerojax.operators.marks import LINEAR_RULE


class Routes(NamedTuple):
    """All choices of experts, sorted by expert. Choice j of token t has index t * k + j.

    Attributes:
      choices: int32 [T * k], indices of the choices, sorted by expert.
      start, count: int32 [E], for each expert its first position in `choices` and its number of
        choices.
      expert: int32 [T, k], expert of each choice.
      rank: int32 [T, k], index of each choice among those of its expert; -1 if it has no expert.
    """

    choices: jax.Array
    start: jax.Array
    count: jax.Array
    expert: jax.Array
    rank: jax.Array


class Slots(NamedTuple):
    """Buffer of one round, with E * C slots, and the choices that occupy the slots.

    Attributes:
      choice: int32 [E * C], choice in each slot. A free slot holds a copy of another row, so that
        its unused result is finite if the results of real rows are.
      is_taken: bool [E * C], False for a free slot.
      slot: int32 [T, k], slot of each choice; 0 if the choice is not in this round.
      is_here: bool [T, k], whether the choice is in this round.
    """

    choice: jax.Array
    is_taken: jax.Array
    slot: jax.Array
    is_here: jax.Array


def sort_choices(ids: jax.Array, num_experts: int) -> Routes:
    """Sorts choices by expert; choices of one expert stay in the order of tokens.

    Args:
      ids: int32 [T, k], expert of each choice in [0, num_experts); num_experts means no expert.
    """
    flat = ids.reshape(-1).astype(jnp.int32)
    index = jnp.arange(flat.size, dtype=jnp.int32)
    experts, choices = jax.lax.sort((flat, index), num_keys=1, is_stable=True)
    numbers = jnp.arange(num_experts + 1, dtype=jnp.int32)
    # No bisection, which on a GPU is a loop of many small kernels.
    first = jnp.searchsorted(experts, numbers, method="compare_all")
    start = first.astype(jnp.int32)
    # The indices are distinct, so this scatter adds nothing up and is the same in each run.
    place = jnp.zeros_like(index).at[choices].set(index, unique_indices=True)
    rank = jnp.where(flat < num_experts, place - start[flat], -1)
    return Routes(
        choices,
        start[:-1],
        start[1:] - start[:-1],
        flat.reshape(ids.shape),
        rank.reshape(ids.shape),
    )


def slots_of_round(routes: Routes, capacity: int, begin: jax.Array | int) -> Slots:
    """Assigns the slots of a round: for each expert `capacity` choices, from its `begin`-th on.

    Args:
      routes: routing of all choices.
      capacity: number of slots per expert, C.
      begin: rank of each expert's first choice in this round.
    """
    rank = begin + jnp.arange(capacity, dtype=jnp.int32)[None]
    taken = rank < routes.count[:, None]
    # A free slot repeats the expert's last row; an expert without rows reads a neighbour's.
    place = routes.start[:, None] + jnp.minimum(rank, routes.count[:, None] - 1)
    place = jnp.clip(place, 0, routes.choices.size - 1)
    here = (routes.rank >= begin) & (routes.rank < begin + capacity)
    slot = jnp.where(here, routes.expert * capacity + routes.rank - begin, 0)
    return Slots(routes.choices[place].reshape(-1), taken.reshape(-1), slot, here)


def all_slots(routes: Routes, size: int) -> Slots:
    """Assigns slots to all choices at once; slots of one expert are adjacent, without gaps.

    Args:
      routes: routing of all choices.
      size: number of slots, at least the number of choices.
    """
    place = jnp.arange(size, dtype=jnp.int32)
    choice = routes.choices[jnp.minimum(place, routes.choices.size - 1)]
    here = routes.rank >= 0
    # "No expert" is the index beyond the last expert; `here` discards what it reads.
    start = routes.start.at[routes.expert].get(mode="clip")
    slot = jnp.where(here, start + routes.rank, 0)
    return Slots(choice, place < jnp.sum(routes.count), slot, here)


def to_slots(rows: jax.Array, slots: Slots) -> jax.Array:
    """Copies rows to slots, [T, ...] -> [E * C, ...]: each slot gets the row of its token."""
    return _to_slots(rows, slots)


def gates_to_slots(gates: jax.Array, slots: Slots) -> jax.Array:
    """Copies gates to slots, [T, k] -> [E * C]: each slot gets the gate of its choice."""
    as_column = lambda x: x.reshape(-1, 1)  # noqa: E731
    single = slots._replace(slot=as_column(slots.slot), is_here=as_column(slots.is_here))
    return _to_slots(gates.reshape(-1), single)


def from_slots(values: jax.Array, slots: Slots, dtype: DTypeLike) -> jax.Array:
    """Sums slots by token, [E * C, D] -> [T, D] in `dtype`, over the choices of this round."""
    return _from_slots(values, slots, jnp.dtype(dtype).name)


# --- two functions: each is the transpose of the other --------------------------------------------


def _spread(rows: jax.Array, slots: Slots) -> jax.Array:
    return rows.at[slots.choice // slots.slot.shape[1]].get(mode="clip")


def _gathered(values: jax.Array, slots: Slots, dtype: DTypeLike) -> jax.Array:
    """Sums the k choices of each row by k successive gathers, without an array [T, k, D]."""
    shape = (slots.slot.shape[0],) + (1,) * (values.ndim - 1)
    total = None
    for column in range(slots.slot.shape[1]):
        value = values.at[slots.slot[:, column]].get(mode="clip").astype(dtype)
        value = jnp.where(slots.is_here[:, column].reshape(shape), value, 0)
        total = value if total is None else total + value
    assert total is not None
    return total


@jax.custom_vjp
def _to_slots(rows: jax.Array, slots: Slots) -> jax.Array:
    return checkpoint_name(_spread(rows, slots), LINEAR_RULE)


def _to_slots_forward(rows: jax.Array, slots: Slots) -> tuple[jax.Array, Slots]:
    return _to_slots(rows, slots), slots


def _to_slots_backward(slots: Slots, slope: jax.Array) -> tuple[jax.Array, None]:
    # The slopes of a token's k slots are added, so their sum is float32.
    wide = jnp.promote_types(slope.dtype, jnp.float32)
    return _gathered(slope, slots, wide).astype(slope.dtype), None


_to_slots.defvjp(_to_slots_forward, _to_slots_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _from_slots(values: jax.Array, slots: Slots, dtype: str) -> jax.Array:
    return checkpoint_name(_gathered(values, slots, dtype), LINEAR_RULE)


def _from_slots_forward(values: jax.Array, slots: Slots, dtype: str) -> tuple[jax.Array, Any]:
    # The scalar carries the dtype of `values` to the backward pass.
    return _from_slots(values, slots, dtype), (slots, jnp.zeros((), values.dtype))


def _from_slots_backward(
    dtype: str, kept: tuple[Slots, jax.Array], slope: jax.Array
) -> tuple[jax.Array, None]:
    slots, like = kept
    spread = _spread(slope.astype(like.dtype), slots)
    shape = (-1,) + (1,) * (spread.ndim - 1)
    # Nothing reads the value in a free slot, so its gradient is 0.
    return jnp.where(slots.is_taken.reshape(shape), spread, 0), None


_from_slots.defvjp(_from_slots_forward, _from_slots_backward)
