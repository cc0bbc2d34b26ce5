"""Computes a matrix product with a weight tile by tile, in place of the product in a traced
program.

A weight that only one product reads is never gathered completely. A loop gathers one tile of the
weight, multiplies, and gathers the next tile meanwhile. The backward pass gathers the tiles once
more, and reduce-scatters the gradient of each tile before it computes the next one. Source:
ZeRO-Infinity (arXiv:2104.07857), section 5.1.3, memory-centric tiling. The caller passes the
functions that gather and scatter shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, Primitive
from jax.typing import DTypeLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import inner_programs
from zerojax.tracing.jaxpr import is_checkpoint, program_of, variables

_TILED = "product in tiles"
_SAME = frozenset(["copy", "copy_p", "name", "optimization_barrier"])
_LAYOUT = frozenset(["broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose"])


@dataclass(frozen=True, eq=False)
class WeightProduct:
    """The matrix product that alone reads a weight, perhaps after casts and changes of layout.

    Attributes:
      equation: `dot_general` equation of the product.
      side: position of the weight among the operands, 0 or 1.
      dims: for each dimension of the weight operand, the dimension of the stored weight; None for a
        dimension of size 1.
      casts: dtypes to which the weight is cast before the product, in order.
    """

    equation: Equation
    side: int
    dims: tuple[int | None, ...]
    casts: tuple[Any, ...]

    @property
    def contracted(self) -> list[int]:
        """Dimensions of the weight over which the product sums."""
        return self._in_weight(self._numbers[0][self.side])

    @property
    def free(self) -> list[int]:
        """Dimensions of the weight that the result keeps."""
        return self._in_weight(self.free_of(self.side))

    @property
    def other(self) -> Any:
        """Shape and dtype of the operand that is not the weight."""
        return self.equation.invars[1 - self.side].aval

    @property
    def result(self) -> Any:
        """Shape and dtype of the result."""
        return self.equation.outvars[0].aval

    @property
    def _numbers(self) -> Any:
        return self.equation.params["dimension_numbers"]

    def _in_weight(self, dims: Sequence[int]) -> list[int]:
        return [dim for at in dims if (dim := self.dims[at]) is not None]

    def free_of(self, side: int) -> list[int]:
        """Returns the dimensions of an operand that the result keeps."""
        taken = self._numbers[0][side]
        return [at for at in range(self.equation.invars[side].aval.ndim) if at not in taken]

    def dim_of_other(self, dim: int) -> int:
        """Returns the dimension of the other operand that is contracted with dimension `dim` of the
        weight.
        """
        contracting = self._numbers[0]
        at = list(contracting[self.side]).index(self.dims.index(dim))
        return contracting[1 - self.side][at]

    def dim_of_result(self, dim: int) -> int:
        """Returns the dimension of the result that comes from dimension `dim` of the weight."""
        before = len(self.free_of(0)) if self.side == 1 else 0
        return before + self.free_of(self.side).index(self.dims.index(dim))

    def operand(self, weight: jax.Array) -> jax.Array:
        """Casts, transposes and reshapes a weight, or a tile of it, to the operand of the
        product.
        """
        kept = [dim for dim in self.dims if dim is not None]
        dropped = [dim for dim in range(weight.ndim) if dim not in kept]
        for dtype in self.casts:
            weight = weight.astype(dtype)
        shape = [1 if dim is None else weight.shape[dim] for dim in self.dims]
        return lax.transpose(weight, [*kept, *dropped]).reshape(shape)

    def multiply(
        self, weight: jax.Array, other: jax.Array, dtype: DTypeLike | None = None
    ) -> jax.Array:
        """Computes the product.

        Args:
          weight: result of `operand`.
          other: operand that is not the weight.
          dtype: dtype of the sums and the result; None uses the dtypes of the traced program.
        """
        operands = (weight, other) if self.side == 0 else (other, weight)
        params = dict(self.equation.params)
        if dtype is not None:
            params["preferred_element_type"] = np.dtype(dtype)
        return self.equation.primitive.bind(*operands, **params)

    def pull_back(self, weight: jax.Array, cotangent: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Returns the gradient of the other operand, with sums and result in `dtype`."""
        (contracting, _), mine = self._numbers, self.free_of(self.side)
        first = 0 if self.side == 0 else len(self.free_of(0))
        of_result = tuple(range(first, first + len(mine)))
        wide = jnp.promote_types(weight.dtype, cotangent.dtype)
        found = lax.dot_general(
            cotangent.astype(wide),
            weight.astype(wide),
            ((of_result, tuple(mine)), ((), ())),
            precision=self.equation.params["precision"],
            preferred_element_type=dtype,
        )
        # The product has the free dimensions of the cotangent, then those of the weight in order.
        pairs = dict(zip(contracting[self.side], contracting[1 - self.side], strict=True))
        order = [*self.free_of(1 - self.side), *(pairs[at] for at in sorted(pairs))]
        return lax.transpose(found, [order.index(at) for at in range(len(order))])


def find_product(program: Jaxpr, variable: Operand) -> WeightProduct | str:
    """Finds the product that alone reads a weight, through casts, changes of layout, calls and
    checkpoints.

    Args:
      program: program that reads the weight.
      variable: variable of the weight.

    Returns:
      The product, or a clause such as "it has 2 readers" that says why there is none.
    """
    start = tuple(range(variable.aval.ndim))
    return _follow(program, variable, start, ())


def _follow(
    program: Jaxpr, variable: Operand, dims: tuple[int | None, ...], casts: tuple[Any, ...]
) -> WeightProduct | str:
    uses = [(e, i) for e in program.eqns for i, atom in enumerate(e.invars) if atom is variable]
    if variable in set(variables(program.outvars)):
        return "the layer returns it"
    if len(uses) != 1:
        return f"it has {len(uses)} readers"
    ((equation, place),) = uses
    kind = equation.primitive.name
    if kind == "dot_general":
        if equation.params["dimension_numbers"][1][place]:
            return "its product is a batched product"
        return WeightProduct(equation, place, dims, casts)
    if is_call(equation):
        inner = program_of(equation).jaxpr
        return _follow(inner, inner.invars[place], dims, casts)
    if not is_step(equation):
        return f"`{kind}` reads it"
    after = _moved(equation, dims)
    if after is None:
        return f"`{kind}` joins or repeats its dimensions"
    if kind == "convert_element_type":
        casts = (*casts, equation.params["new_dtype"])
    return _follow(program, equation.outvars[0], after, casts)


def is_call(equation: Equation) -> bool:
    """Returns whether an equation is a call or a checkpoint."""
    return equation.primitive.name in ("jit", "pjit") or is_checkpoint(equation)


def is_step(equation: Equation) -> bool:
    """Returns whether an equation casts a weight or changes its layout."""
    kind = equation.primitive.name
    return kind in _SAME or kind in _LAYOUT or kind == "convert_element_type"


def _moved(equation: Equation, dims: tuple[int | None, ...]) -> tuple[int | None, ...] | None:
    """Returns the weight's dimension for each dimension of the result of a cast or layout change.

    Returns None if the dimensions of the weight do not stay separate.
    """
    kind, before, after = equation.primitive.name, equation.invars[0].aval, equation.outvars[0].aval
    if kind in _SAME or kind == "convert_element_type":
        return dims if len(equation.invars) == 1 else None
    if kind == "transpose":
        return tuple(dims[at] for at in equation.params["permutation"])
    if kind == "broadcast_in_dim":
        found: list[int | None] = [None] * after.ndim
        for at, place in enumerate(equation.params["broadcast_dimensions"]):
            found[place] = dims[at] if before.shape[at] != 1 else None
        # A broadcast that keeps the number of elements only adds dimensions of size 1.
        return tuple(found) if before.size == after.size else None
    left = [dim for dim, size in zip(dims, before.shape, strict=True) if size != 1]
    sizes = [size for size in before.shape if size != 1]
    if sizes != [size for size in after.shape if size != 1]:
        return None
    remaining = iter(left)
    return tuple(None if size == 1 else next(remaining) for size in after.shape)


# --- the product in tiles -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TiledProduct:
    """A product whose weight is gathered in tiles.

    Attributes:
      product: product to compute.
      gather: function `this device's part of a tile -> tile`.
      scatter: function `gradient of a tile -> this device's part of the sum over all devices`;
        None if the weight has no gradient.
      dim: dimension of the weight along which tiles are cut.
      count: number of tiles, at least 2.
      groups: number of shards along `dim`; 1 if another dimension is sharded. A tile contains an
        equally long run of each shard.
    """

    product: WeightProduct
    gather: Callable[[jax.Array], jax.Array]
    scatter: Callable[[jax.Array], jax.Array] | None
    dim: int
    count: int
    groups: int

    @property
    def sums(self) -> bool:
        """Whether the products of the tiles are added up; if not, they are concatenated."""
        return self.dim in self.product.contracted

    def forward(self, shard: jax.Array, other: jax.Array) -> jax.Array:
        """Computes the product; adds tiles in at least float32."""
        product, result = self.product, self.product.result
        if self.sums:
            at, dtype = product.dim_of_other(self.dim), _wide(result.dtype)

            def add(index: jax.Array | int, tile: jax.Array, total: jax.Array) -> jax.Array:
                part = self._take(other, at, index)
                return total + product.multiply(product.operand(tile), part, dtype)

            total = self._loop(shard, add, jnp.zeros(result.shape, dtype))
            return total.astype(result.dtype)
        at = product.dim_of_result(self.dim)

        def put(index: jax.Array | int, tile: jax.Array, found: jax.Array) -> jax.Array:
            return self._put(found, at, index, product.multiply(product.operand(tile), other))

        found = self._loop(shard, put, jnp.zeros(self._cut_shape(result.shape, at), result.dtype))
        return found.reshape(result.shape)

    def backward(
        self, shard: jax.Array, other: jax.Array, cotangent: jax.Array, dtype: DTypeLike
    ) -> tuple[jax.Array | None, jax.Array]:
        """Returns (gradient of the shard in `dtype`, summed over devices; gradient of `other`).

        The first is None without `scatter`.
        """
        product, sums = self.product, self.sums
        at = product.dim_of_other(self.dim) if sums else product.dim_of_result(self.dim)
        size = shard.shape[self.dim] // self.count

        def one(index: jax.Array | int, tile: jax.Array, state: Tree) -> Any:
            grads, of_other = state
            given = self._take(other, at, index) if sums else other
            part = cotangent if sums else self._take(cotangent, at, index)
            multiply = lambda tile, given: product.multiply(product.operand(tile), given)  # noqa: E731
            of_tile, of_given = jax.vjp(multiply, tile, given)[1](part)
            if self.scatter is not None:
                own = self.scatter(of_tile).astype(dtype)
                grads = lax.dynamic_update_slice_in_dim(grads, own, index * size, self.dim)
            if sums:
                return grads, self._put(of_other, at, index, of_given)
            # The parts of all tiles are added, so they come in the dtype of the sum; `jax.vjp`
            # would round each to the operand's.
            return grads, of_other + product.pull_back(product.operand(tile), part, of_other.dtype)

        shape = self._cut_shape(other.shape, at) if sums else other.shape
        of_other = jnp.zeros(shape, other.dtype if sums else _wide(other.dtype))
        grads = None if self.scatter is None else jnp.zeros(shard.shape, dtype)
        grads, of_other = self._loop(shard, one, (grads, of_other))
        return grads, of_other.reshape(other.shape).astype(other.dtype)

    def _loop(self, shard: jax.Array, step: Callable[..., Any], state: Tree) -> Any:
        """Runs `step(index, tile, state)` for all tiles; gathers the next tile at the same time."""
        size = shard.shape[self.dim] // self.count

        def tile(index: jax.Array | int) -> jax.Array:
            return self.gather(lax.dynamic_slice_in_dim(shard, index * size, size, self.dim))

        def body(index: jax.Array | int, carry: Tree) -> Any:
            here, state = carry
            following = tile(index + 1)
            return following, step(index, here, state)

        # The last tile is outside of the loop: there is no next one to gather.
        last = self.count - 1
        here, state = lax.fori_loop(0, last, body, (tile(0), state))
        return step(last, here, state)

    def _cut_shape(self, shape: Sequence[int], at: int) -> tuple[int, ...]:
        run = shape[at] // (self.groups * self.count)
        return (*shape[:at], self.groups, self.count, run, *shape[at + 1 :])

    def _take(self, whole: jax.Array, at: int, index: jax.Array | int) -> jax.Array:
        """Returns the part of `whole` along dimension `at` that belongs to a tile."""
        parts = whole.reshape(self._cut_shape(whole.shape, at))
        part = lax.dynamic_index_in_dim(parts, index, at + 1, keepdims=False)
        return part.reshape(*whole.shape[:at], -1, *whole.shape[at + 1 :])

    def _put(self, parts: jax.Array, at: int, index: jax.Array | int, part: jax.Array) -> jax.Array:
        """Writes the part of a tile into an array of shape `_cut_shape`, the inverse of `_take`."""
        part = part.reshape(*parts.shape[: at + 1], *parts.shape[at + 2 :])
        return lax.dynamic_update_index_in_dim(parts, part.astype(parts.dtype), index, at + 1)


def _wide(dtype: DTypeLike) -> Any:
    """Returns the dtype in which products of tiles are added up: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply_in_tiles(
    tiled: TiledProduct, shard: jax.Array, sink: jax.Array | None, other: jax.Array
) -> jax.Array:
    """Computes a product in tiles; the weight's gradient is returned as the gradient of `sink`, in
    its dtype.

    If `sink` is None, the weight's gradient is the gradient of `shard`.
    """
    return checkpoint_name(tiled.forward(shard, other), _TILED)


def _in_tiles_forward(
    tiled: TiledProduct, shard: jax.Array, sink: jax.Array, other: jax.Array
) -> Any:
    # As a call, so that a checkpoint policy sees one product (`is_in_tiles`).
    return multiply_in_tiles(tiled, shard, sink, other), (shard, sink, other)


def _in_tiles_backward(
    tiled: TiledProduct, given: tuple[jax.Array, ...], cotangent: jax.Array
) -> Any:
    shard, sink, other = given
    dtype = shard.dtype if sink is None else sink.dtype
    # Without the barrier the compiler would keep the first tile of a recomputed product until here.
    shard, cotangent = lax.optimization_barrier((shard, cotangent))
    grads, of_other = tiled.backward(shard, other, cotangent, dtype)
    if sink is None or grads is None:
        return jnp.zeros_like(shard) if grads is None else grads, None, of_other
    return jnp.zeros_like(shard), grads, of_other


multiply_in_tiles.defvjp(_in_tiles_forward, _in_tiles_backward)


def is_in_tiles(primitive: Primitive, params: Mapping[str, Any]) -> bool:
    """Returns whether an operation of a program computes a product in tiles."""
    return primitive.name == "custom_vjp_call" and any(
        equation.primitive.name == "name" and equation.params["name"] == _TILED
        for program in inner_programs(params)
        for equation in program.eqns
    )
