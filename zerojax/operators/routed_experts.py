"""Mixture-of-experts layers for any model: `zerojax.experts`, without dropped rows or dynamic
shapes.

Rows are sent to experts in rounds of at most C rows per expert. The number of rounds depends on the
expert with the most rows; a balanced batch needs only the first one, which is not in a loop. The
result is a sum over rounds, so the backward pass is the same loop over the derivative of one round.
If experts are split over devices, each round sends rows to their experts and results back.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from zerojax.config.checks import names_keywords
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.operators.expert_rows import (
    Routes,
    Slots,
    all_slots,
    from_slots,
    gates_to_slots,
    slots_of_round,
    sort_choices,
    to_slots,
)
from zerojax.operators.grouped_products import (
    GroupedProducts,
    Products,
    Segments,
    segments_of_slots,
    stand_in,
    whole_slots,
    whole_tiles,
)
from zerojax.operators.marks import (
    FURTHER_ROUNDS,
    LINEAR_RULE,
    inner_programs,
    mark_expert_call,
    mark_expert_weights,
)

FEWEST_SLOTS = 8
"""Minimum number of slots per expert in a round; with few tokens, as in generation, loads are
uneven."""

SLACK = 1.25
"""Default number of slots per expert in the first round, relative to the mean load."""

PARTS = 4
"""Ratio of the slots of the first round to those of further rounds. An expert slightly above
capacity costs only a quarter of a round, and the loop's buffers are small compared with those of
the first round."""

Apply = Callable[..., jax.Array]

_AXIS: contextvars.ContextVar[str | None] = contextvars.ContextVar("expert_axis", default=None)


@contextlib.contextmanager
def experts_split_over(axis: str | None) -> Iterator[None]:
    """Sets the mesh axis over which experts are split while a model is traced.

    Inside this context each array of expert weights contains only this device's experts.

    Args:
      axis: manual mesh axis over which experts are split, in order; None if each device has all
        experts.
    """
    token = _AXIS.set(axis)
    try:
        yield
    finally:
        _AXIS.reset(token)


@names_keywords()
def experts(
    x: jax.Array,
    gates: jax.Array,
    ids: jax.Array,
    weights: Tree,
    apply: Apply,
    *,
    slack: float = SLACK,
    keep: jax.Array | None = None,
    products: Products = "batched",
) -> jax.Array:
    """Computes the sum of gate * expert(row) over the k choices of every token; drops no row.

    Rows are sorted by expert into buffers of C = ceil(slack * tokens * k / E) slots per expert (at
    least 8, or tokens * k if that is less), and `apply` runs once on all of them. If an expert has
    more rows, further rounds of C / 4 slots run in a loop, so `slack` changes the time, not the
    result. `apply` determines the precision of products. Gates are multiplied and choices are
    summed in float32 (float64 for float64 rows). Has only first derivatives in reverse mode.

    Args:
      x: [..., D], floating point; one row per token.
      gates: [..., k], floating point, preferably float32: factor of each choice's output. A NaN
        makes the token's output NaN.
      ids: [..., k], integers in [0, E): expert of each choice. Concrete values are checked; a
        traced value out of range makes the token's output NaN, so that no choice is lost silently.
      weights: tree of arrays whose first dimension is E, the number of experts, in the dtype that
        `apply` computes in.
      apply: function (weights, rows [E, C, D]) that returns [E, C, D_out], applying each expert to
        its rows; rows must not depend on each other. It must not close over traced arrays.
      slack: value of C relative to the mean load; a larger value needs more memory, and fewer
        batches need a second round.
      keep: bool [..., k], False for choices to skip, which occupy no slot and contribute 0; None
        computes all choices.
      products: method of the matrix products. "batched": one product over all slots. "grouped": a
        kernel for Hopper multiplies only tiles of occupied rows, and `apply` is a function
        (weights, rows [R, D], product) that returns [R, D_out], where product(rows, kernels [E, in,
        out]) multiplies each row by the kernel of its expert; without the mesh axis `expert` there
        is a single round. "loop": the same tiles and the same form of `apply` in an XLA loop, on
        any device.

    Returns:
      [..., D_out] in the dtype of the result of `apply`.

    Raises:
      TypeError, ValueError: shapes, dtypes, concrete ids, `slack` or the result of `apply` are
        invalid, or the devices cannot compute `products`.
    """
    axis = _AXIS.get()
    devices = 1 if axis is None else lax.axis_size(axis)
    grouped = GroupedProducts.here(products)
    num_experts = _check(x, gates, ids, weights, slack, devices)
    weights = jax.tree.map(mark_expert_weights, weights)
    rows = x.reshape(-1, x.shape[-1])
    k = ids.shape[-1]
    flat_ids, flat_gates = ids.reshape(-1, k), gates.reshape(-1, k)
    is_known = (flat_ids >= 0) & (flat_ids < num_experts)
    flat_gates = jnp.where(is_known, flat_gates, jnp.nan)
    flat_ids = jnp.where(is_known, flat_ids, 0)
    if keep is not None:
        flat_ids = jnp.where(keep.reshape(-1, k), flat_ids, num_experts)
    routes = sort_choices(flat_ids, num_experts)
    capacity = _capacity(rows.shape[0], k, num_experts, slack, grouped is not None)
    slots: tuple[int, ...] = (num_experts // devices, devices * capacity)
    if grouped is not None:
        slots = (whole_tiles(flat_ids.size) if axis is None else math.prod(slots),)
    shape, dtype = _result(apply, weights, (*slots, rows.shape[-1]), rows.dtype)
    wide = jnp.promote_types(dtype, jnp.float32).name
    row, result = rows.shape[-1] * rows.dtype.itemsize, shape[-1] * dtype.itemsize
    kind = get_args(Products).index(products)
    flat_gates = mark_expert_call(flat_gates, num_experts, capacity, row, result, kind)
    call = _Call(apply, num_experts, capacity, dtype.name, wide, axis, grouped)
    with jax.named_scope("experts"):
        out = _in_rounds(call, rows, flat_gates, weights, routes)
    return out.astype(dtype).reshape(*x.shape[:-1], shape[-1])


def slots_per_expert(tokens: int, k: int, num_experts: int, slack: float) -> int:
    """Returns C, the number of slots per expert in the first round.

    >>> slots_per_expert(4096, 8, 64, 1.25), slots_per_expert(2, 2, 8, 1.25)
    (640, 4)
    """
    mean = tokens * k / num_experts
    return max(math.ceil(slack * mean), min(FEWEST_SLOTS, tokens * k))


def _capacity(tokens: int, k: int, num_experts: int, slack: float, is_grouped: bool) -> int:
    """Returns `slots_per_expert`, rounded to whole tiles if the kernel gets rows of other
    devices."""
    capacity = slots_per_expert(tokens, k, num_experts, slack)
    if not is_grouped or _AXIS.get() is None:
        return capacity
    return whole_slots(capacity, num_experts, PARTS)


def rounds_needed(
    ids: jax.Array, num_experts: int, slack: float = SLACK, *, products: Products = "batched"
) -> jax.Array:
    """Computes the number of rounds, int32 [], that `experts` needs for one device's choices.

    If experts are split over devices, all devices of a group run the maximum of their numbers.

    Args:
      ids: integers [..., k], expert of each choice; num_experts for skipped choices.
      num_experts: number of experts.
      slack, products: arguments as for `experts`.

    >>> rounds_needed(jnp.zeros((16, 1), jnp.int32), 2).item()  # 10 slots, and then 3 each
    3
    """
    k, is_grouped = ids.shape[-1], products != "batched"
    if is_grouped and _AXIS.get() is None:
        return jnp.ones((), jnp.int32)
    capacity = _capacity(ids.size // k, k, num_experts, slack, is_grouped)
    count = jnp.sum(jax.nn.one_hot(ids.reshape(-1), num_experts, dtype=jnp.int32), axis=0)
    further = jnp.maximum(jnp.max(count) - capacity, 0)
    return 1 + -(-further // slots_of_further_rounds(capacity))


def slots_of_further_rounds(capacity: int) -> int:
    """Returns the number of slots per expert in each round after the first."""
    return -(-capacity // PARTS)


@dataclass(frozen=True)
class _Call:
    """Static properties of a call of `experts`.

    Attributes:
      apply: function that applies the experts, an argument of `experts`.
      num_experts, capacity: numbers E (experts) and C (slots per expert).
      dtype: name of the dtype of the result of `apply`.
      wide: name of the dtype in which choices are summed.
      axis: mesh axis over which experts are split; None if not split.
      grouped: settings of the kernel; None for batched products.
    """

    apply: Apply
    num_experts: int
    capacity: int
    dtype: str
    wide: str
    axis: str | None = None
    grouped: GroupedProducts | None = None

    def slots_of(
        self, routes: Routes, begin: jax.Array | int
    ) -> tuple[Slots, tuple[int, int, int]]:
        """Returns the slots of a round, and their shape [experts, slots of each, -1]."""
        if self.takes_all:
            size = whole_tiles(routes.choices.size)
            return all_slots(routes, size), (1, size, -1)
        slots = slots_of_round(routes, self.capacity, begin)
        return slots, (self.num_experts, self.capacity, -1)

    @property
    def takes_all(self) -> bool:
        """Returns whether one round has a slot for every choice, so that no further round is
        needed."""
        return self.grouped is not None and self.axis is None

    def segments(self, routes: Routes, begin: jax.Array | int) -> Segments:
        """Returns the segments of rows that this device's experts receive in a round."""
        if self.takes_all:
            return Segments(routes.start, routes.count)
        taken = jnp.clip(routes.count - begin, 0, self.capacity)
        return segments_of_slots(self.to_experts(taken[:, None]), self.capacity)

    def results(self, weights: Tree, rows: jax.Array, segments: Segments | None) -> jax.Array:
        """Applies the experts to their rows [experts, slots per expert, D]."""
        if self.grouped is None:
            return self.apply(weights, rows)
        assert segments is not None
        flat = rows.reshape(-1, rows.shape[-1])
        out = self.apply(weights, flat, self.grouped.product(segments))
        return out.reshape(*rows.shape[:2], -1)

    def to_experts(self, slots: jax.Array) -> jax.Array:
        """Sends rows to their experts, [E, C, ...] -> [own experts, devices * C, ...]."""
        if self.axis is None:
            return slots
        return lax.all_to_all(slots, self.axis, split_axis=0, concat_axis=1, tiled=True)

    def from_experts(self, slots: jax.Array) -> jax.Array:
        """Reverses `to_experts`."""
        if self.axis is None:
            return slots
        return lax.all_to_all(slots, self.axis, split_axis=1, concat_axis=0, tiled=True)


_CALLS = frozenset(("custom_jvp_call", "custom_vjp_call", "jit", "pjit"))
_ELEMENT_BY_ELEMENT = """
abs add add_any and broadcast_in_dim clamp clip concatenate convert_element_type copy copy_p cos div
eq erf erfc exp exp2 expand_dims expm1 floor gather ge gt integer_pow iota is_finite le log log1p
logistic lt max min mul name ne neg not or pow reduce_precision rem reshape round rsqrt select_n
sign sin slice sqrt square squeeze stop_gradient sub tan tanh transpose
"""
_CHEAP = frozenset(_ELEMENT_BY_ELEMENT.split())
"""Primitives that read and write each element a few times."""


def _is_kept(primitive: Primitive, *_: jax.core.AbstractValue, **params: Any) -> bool:
    """Returns whether a checkpoint around a round saves the results of a primitive.

    It saves results of products, kernels and exchanges for the backward pass. It recomputes rows
    in their slots and element-wise results.
    """
    if primitive.name in _CALLS:
        return any(
            _is_kept(equation.primitive, **equation.params)
            for program in inner_programs(params)
            for equation in program.eqns
        )
    return primitive.name not in _CHEAP


def _one_round(
    call: _Call,
    routes: Routes,
    begin: jax.Array | int,
    rows: jax.Array,
    gates: jax.Array,
    weights: Tree,
) -> jax.Array:
    """Computes the contribution of one round to the output of `experts`: [T, D_out] in `call.wide`.

    A round computes `call.capacity` rows of each expert, from rank `begin` on.
    """
    slots, size = call.slots_of(routes, begin)
    segments = None if call.grouped is None else call.segments(routes, begin)

    def results(rows: jax.Array, weights: Tree) -> jax.Array:
        brought = call.to_experts(to_slots(rows, slots).reshape(size))
        return call.results(weights, brought, segments)

    def summed(out: jax.Array, gates: jax.Array) -> jax.Array:
        # Gates are sent with their rows, so that their gradient is computed next to the result.
        gate = call.to_experts(gates_to_slots(gates, slots).reshape(size))
        # Rounded before the exchange, so that devices do not send the wide dtype.
        out = (out.astype(call.wide) * gate.astype(call.wide)).astype(call.dtype)
        out = call.from_experts(out)
        return from_slots(out.reshape(-1, out.shape[-1]), slots, call.wide)

    # Two checkpoints, so that the backward pass first computes the gradient of `out` and frees its
    # operands, and only then copies rows to their slots again.
    out = jax.checkpoint(results, policy=_is_kept)(rows, weights)
    return jax.checkpoint(summed, policy=_is_kept)(out, gates)


def _fullest(call: _Call, routes: Routes) -> jax.Array:
    """Returns the largest number of rows of any expert, over all devices that exchange rows: int32
    [].
    """
    # Each round contains an exchange, so all devices that exchange rows must run equally many.
    most = jnp.max(routes.count)
    return most if call.axis is None else lax.pmax(most, call.axis)


def _further(
    call: _Call, routes: Routes, add: Callable[[_Call, Any, Any], Any], first: Tree
) -> Any:
    """Runs `add(call, begin, total)` for each round after the first; these rounds have fewer slots.

    Args:
      call: properties of the call, with the capacity of the first round.
      routes: routing of all choices.
      add: function that adds one round to the total.
      first: total after the first round.
    """
    if call.takes_all:
        return first
    smaller = dataclasses.replace(call, capacity=slots_of_further_rounds(call.capacity))
    fullest = _fullest(call, routes)

    def body(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        begin, total = state
        return begin + smaller.capacity, add(smaller, begin, total)

    start = jnp.int32(call.capacity), first
    with jax.named_scope(FURTHER_ROUNDS):
        return lax.while_loop(lambda state: state[0] < fullest, body, start)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_rounds(
    call: _Call, rows: jax.Array, gates: jax.Array, weights: Tree, routes: Routes
) -> jax.Array:
    first = _one_round(call, routes, 0, rows, gates, weights)
    return checkpoint_name(_rest_of(call, rows, gates, weights, routes, first), LINEAR_RULE)


def _rest_of(
    call: _Call, rows: jax.Array, gates: jax.Array, weights: Tree, routes: Routes, first: jax.Array
) -> jax.Array:
    def add(call: _Call, begin: jax.Array, total: jax.Array) -> jax.Array:
        return total + _one_round(call, routes, begin, rows, gates, weights)

    return _further(call, routes, add, first)


def _forward(
    call: _Call, rows: jax.Array, gates: jax.Array, weights: Tree, routes: Routes
) -> tuple[jax.Array, Any]:
    # Residuals of the first round are saved like those of any layer (see `_is_kept`). A
    # `jax.checkpoint` around the model recomputes them.
    first, pull = jax.vjp(functools.partial(_one_round, call, routes, 0), rows, gates, weights)
    out = _rest_of(call, rows, gates, weights, routes, first)
    return out, (pull, rows, gates, weights, routes)


def _backward(call: _Call, kept: tuple[Any, ...], slope: jax.Array) -> tuple[Any, ...]:
    pull, rows, gates, weights, routes = kept
    operands = rows, gates, weights

    def add(call: _Call, begin: jax.Array, total: Tree) -> Any:
        _, again = jax.vjp(functools.partial(_one_round, call, routes, begin), *operands)
        return jax.tree.map(lambda sum_, part: sum_ + part.astype(sum_.dtype), total, again(slope))

    total = _further(call, routes, add, jax.tree.map(_widened, pull(slope)))
    return *jax.tree.map(lambda x, like: x.astype(like.dtype), total, operands), None


_in_rounds.defvjp(_forward, _backward)


def _widened(x: jax.Array) -> jax.Array:
    """Casts to float32 or a wider dtype, in which rounds are summed."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# --- checks of the arguments ----------------------------------------------------------------------


def _result(
    apply: Apply, weights: Tree, shape: tuple[int, ...], dtype: DTypeLike
) -> tuple[tuple[int, ...], np.dtype]:
    """Returns (shape, dtype) of the result of `apply` for rows of shape [E, C, D] or [R, D]."""
    run = apply if len(shape) == 3 else functools.partial(_with_stand_in, apply)
    closed, result = jax.make_jaxpr(run, return_shape=True)(
        weights, jax.ShapeDtypeStruct(shape, dtype)
    )
    for value in closed.consts:
        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                f"apply uses an array of shape {list(value.shape)} that is computed outside of "
                "apply; pass it as a part of weights, with the experts as its first dimension"
            )
    result_shape = getattr(result, "shape", None)
    if result_shape is None or len(result_shape) != len(shape) or result_shape[:-1] != shape[:-1]:
        dims = "experts, slots, width" if len(shape) == 3 else "rows, width"
        raise ValueError(
            f"apply returns {type(result).__name__ if result_shape is None else result_shape} for "
            f"rows of shape {list(shape)} ({dims}); return one array "
            f"[{', '.join(map(str, shape[:-1]))}, width]"
        )
    if not jnp.issubdtype(result.dtype, jnp.floating):
        raise TypeError(f"apply returns {result.dtype.name}; return a floating-point array")
    return result_shape, np.dtype(result.dtype)


def _with_stand_in(apply: Apply, weights: Tree, rows: jax.Array) -> jax.Array:
    return apply(weights, rows, stand_in)


def _check(
    x: jax.Array, gates: jax.Array, ids: jax.Array, weights: Tree, slack: float, devices: int
) -> int:
    """Checks the arguments of `experts`; returns the number of experts on all devices together.

    Raises:
      TypeError, ValueError: an argument is invalid, see `experts`.
    """
    for name, value in (("x", x), ("gates", gates)):
        if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise TypeError(f"{name} has {jnp.result_type(value).name}; use a floating-point dtype")
    if not jnp.issubdtype(jnp.result_type(ids), jnp.integer):
        raise TypeError(
            f"ids have {jnp.result_type(ids).name}; use integers, as jax.lax.top_k returns"
        )
    if jnp.ndim(x) < 1 or jnp.ndim(ids) < 1 or ids.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"ids have shape {list(jnp.shape(ids))} and x has shape {list(jnp.shape(x))}; ids must "
            "be [..., k] for x [..., D], with the same leading dimensions"
        )
    if jnp.shape(gates) != ids.shape:
        raise ValueError(
            f"gates have shape {list(jnp.shape(gates))} and ids have shape {list(ids.shape)}; "
            "they must be equal: one gate for each choice"
        )
    if 0 in (*x.shape, *ids.shape):
        raise ValueError(
            f"x {list(x.shape)} with ids {list(ids.shape)} has no rows; skip the call of experts"
        )
    if not (isinstance(slack, int | float) and 0 < slack < math.inf):
        raise ValueError(f"slack={slack!r} must be a number above 0; 1.25 is usual")
    num_experts = _number_of_experts(weights) * devices
    _check_ids(ids, num_experts)
    return num_experts


def _number_of_experts(weights: Tree) -> int:
    leaves = jax.tree.leaves(weights)
    sizes = {jnp.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) != 1 or sizes == {()} or sizes == {(0,)}:
        shapes = [list(jnp.shape(leaf)) for leaf in leaves]
        raise ValueError(
            f"weights have the shapes {shapes}; the first dimension of each array must be the "
            "number of experts"
        )
    return sizes.pop()[0]


def _check_ids(ids: jax.Array, num_experts: int) -> None:
    """Raises a ValueError for concrete ids outside of [0, num_experts)."""
    if isinstance(ids, jax.core.Tracer):
        return
    held = np.asarray(ids)
    low, high = int(held.min()), int(held.max())
    if low < 0 or high >= num_experts:
        wrong = low if low < 0 else high
        raise ValueError(
            f"ids contain {wrong}, but there are {num_experts} experts; use ids from 0 to "
            f"{num_experts - 1}"
        )
