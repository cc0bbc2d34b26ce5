"""Sums values over mesh axes: replicated values, by permutes, or with equal bits on any device
count.

**Fixed order.** A floating-point sum depends on how its operands are associated, not on the order
of two operands. So a sum over `2^k` numbered values is fixed by the order in which bits of the
number are combined. Devices hold consecutive values, so the high bits are the device's number. Sums
on a device before communication combine the lowest bit first; sums of values that are sent one by
one combine the highest bit first. Either order gives the same tree on every number of devices.

**Fusion barriers** make the parts of such a sum compile to the same code in any context. When a
compiler fuses an operation with its neighbours, the last bits may change: a product is contracted
with an addition, or a sum is taken in another order. A part between barriers is compiled separately
and never fused with the code around it. On CPUs `optimization_barrier` does not achieve that with
every JAX (0.10 removes it before it fuses). So there the part is a branch of a `cond` whose
predicate is always true, which XLA cannot know. On other devices a barrier before and after the
part suffices, with no predicate to wait for.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.extend.core import Literal as Constant
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Equation
from zerojax.optim.wire_codes import WireCodes
from zerojax.placement.device_mesh import COMPILER_AXES, DATA_AXES, PASS_AXES

Arrays = dict[str, Any]
Groups = tuple[tuple[int, ...], ...]
"""Groups of devices that exchange data, by their position along the axes of a collective."""
MAX_PERMUTES = 3
"""Largest number of permutes by which CPU processes exchange gradients. With more shards they use
one all-to-all instead, because the program contains every permute once per bucket.
"""
BarrierKind = Literal["branch", "barrier"]


class TreeOrder(enum.Enum):
    """Order in which `tree_sum` adds n rows.

    Lowest bit first adds neighbouring rows first; highest bit first adds rows i and i + n/2 first.
    """

    LOWEST_FIRST = "lowest bit first"
    HIGHEST_FIRST = "highest bit first"


def tree_sum(rows: jax.Array, order: TreeOrder) -> jax.Array:
    """Returns the sum of `rows` over dimension 0, in the order of a fixed binary tree.

    The size of dimension 0 is a power of two.
    """
    while rows.shape[0] > 1:
        half = rows.shape[0] // 2
        if order is TreeOrder.LOWEST_FIRST:
            pairs = rows.reshape(half, 2, *rows.shape[1:])
            rows = pairs[:, 0] + pairs[:, 1]
        else:
            rows = rows[:half] + rows[half:]
    return rows[0]


def tree_total(
    value_of: Callable[[jax.Array, Any], tuple[Any, Any]],
    count: int,
    order: TreeOrder,
    *,
    like: Tree,
    carried: Tree,
) -> tuple[Any, Any]:
    """Sums `count` values that are computed in sequence, in the order of a fixed binary tree.

    The program consists of nested loops of two iterations, so it contains `value_of` once. At most
    log2(count) partial sums are in memory beside the current value.

    Args:
      value_of: function `(number, carry) -> (value, new carry)`; `number` is int32 [].
      count: number of values, a power of two.
      order: bit of the number that is combined first.
      like: pytree with the shapes and dtypes of a value.
      carried: initial carry; it passes through all calls in the order in which they run.

    Returns:
      (the sum, final carry).
    """
    bits = count.bit_length() - 1

    def level(depth: int, number: jax.Array, carried: Tree) -> tuple[Any, Any]:
        if depth == bits:
            return value_of(number, carried)
        bit = depth if order is TreeOrder.HIGHEST_FIRST else bits - 1 - depth

        def half(which: jax.Array, carry: Tree) -> Any:
            earlier, carried = carry
            later, carried = level(depth + 1, number + (which << bit), carried)
            # A select, not an addition to zero: 0 + -0 is not -0.
            total = jax.tree.map(lambda a, x: jnp.where(which == 0, x, a + x), earlier, later)
            return total, carried

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return lax.fori_loop(0, 2, half, (zeros, carried))

    return level(0, jnp.int32(0), carried)


def over_auto_axes(function: Callable, in_specs: Tree, out_specs: Tree) -> Callable:
    """Returns `function` mapped over the local shards of the axes that the compiler partitions.

    If all of `COMPILER_AXES` are already manual, it returns `function` itself.
    """
    remaining = set(COMPILER_AXES) - set(jax.sharding.get_abstract_mesh().manual_axes)
    if not remaining:
        return function
    return jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=remaining,
        check_vma=False,
    )


def is_one_device(over: Sequence[str]) -> bool:
    """Returns whether these manual axes have only one device, so that no collective is needed.

    Callers then do not concatenate arrays either: XLA would compile each array that is cut out
    separately, which took 20 s of 24 for 200 parameters on a CPU.
    """
    return all(lax.axis_size(axis) == 1 for axis in over)


def groups_of_nodes(devices: int, members: int) -> tuple[Groups, Groups]:
    """Returns (groups of the devices of one node, groups of devices at one position in all nodes).

    >>> groups_of_nodes(6, 2)
    (((0, 1), (2, 3), (4, 5)), ((0, 2, 4), (1, 3, 5)))
    """
    inside = tuple(tuple(range(first, first + members)) for first in range(0, devices, members))
    return inside, tuple(zip(*inside, strict=True))


def sum_in_codes(
    rows: jax.Array, codes: WireCodes, over: tuple[str, ...], groups: Groups | None = None
) -> jax.Array:
    """Reduce-scatters quantized rows: sends codes, sums in float32; returns this device's row.

    If the devices of `over` belong to several nodes, the sum has two levels: first the devices of
    each node exchange rows and sum, then the sums are exchanged between nodes.

    Args:
      rows: [devices, elements], floating point; row i is this device's addend to the row of device
        i.
      over: manual mesh axes to sum over, outermost first.
      groups: groups of devices; each group sums separately, in one level. None: all devices.

    Returns:
      The summed row of this device, float32 [elements].
    """
    devices, elements = rows.shape
    members, nodes = codes.in_node, devices // codes.in_node

    def exchanged(parts: jax.Array, groups: Groups | None) -> jax.Array:
        """Exchanges parts [n, ...] within each group; returns the sum of the n received parts."""
        sent = codes.encode(parts)
        got = lax.all_to_all(sent, over, 0, 0, axis_index_groups=groups)
        return jnp.sum(codes.decode(got, elements), axis=0)

    if groups is not None or 1 in (members, nodes):
        return exchanged(rows, groups)
    inside, between = groups_of_nodes(devices, members)
    by_member = jnp.swapaxes(rows.reshape(nodes, members, elements), 0, 1)
    return exchanged(exchanged(by_member, inside), between)


def sum_replicated(values: Tree, over: tuple[str, ...] = PASS_AXES) -> Any:
    """Returns the sum of each array of a pytree over the manual axes `over`.

    The arrays are replicated over the compiler's axes.
    """
    if is_one_device(over):
        return values
    specs = jax.tree.map(lambda _: P(), values)
    return over_auto_axes(lambda tree: lax.psum(tree, over), (specs,), specs)(values)


def max_replicated(
    values: dict[str, jax.Array], over: tuple[str, ...] = PASS_AXES
) -> dict[str, jax.Array]:
    """Returns the elementwise maximum of each array over the manual axes `over`.

    All arrays of one dtype are sent together.
    """
    if is_one_device(over):
        return values
    result = {}
    for dtype in dict.fromkeys(value.dtype for value in values.values()):
        result |= _max_of_one_dtype({n: x for n, x in values.items() if x.dtype == dtype}, over)
    return {name: result[name] for name in values}


def _max_of_one_dtype(values: dict[str, jax.Array], over: tuple[str, ...]) -> dict[str, jax.Array]:
    flat = jnp.concatenate([value.reshape(-1) for value in values.values()])
    flat = over_auto_axes(lambda x: lax.pmax(x, over), P(), P())(flat)
    result, start = {}, 0
    for name, value in values.items():
        piece = lax.slice_in_dim(flat, start, start + value.size)
        result[name] = piece.reshape(value.shape)
        start += value.size
    return result


class Cut(Protocol):
    """The interface of a sharded array; see `zerojax.transport.collectives.LeafCollectives`."""

    @property
    def num_shards(self) -> int: ...
    @property
    def over(self) -> tuple[str, ...]: ...
    @property
    def groups(self) -> Groups | None: ...

    def piece(self, whole: jax.Array, index: jax.Array) -> jax.Array: ...
    def split_rows(self, whole: jax.Array) -> jax.Array: ...
    def shard_shape(self, whole_shape: Sequence[int]) -> tuple[int, ...]: ...


def scatter_by_permutes(wholes: Arrays, leaves: Mapping[str, Cut]) -> Arrays:
    """Returns this device's shards of the sums of unsharded values, without a reduce-scatter.

    Used between CPU processes, because gloo's reduce-scatter sends from a buffer that it already
    overwrites, so that pieces are sometimes wrong (https://github.com/jax-ml/jax/issues/40830; seen
    with jax 0.10.2 and 0.11.2). For 14 MB between two processes a reduce-scatter takes 14 ms of CPU
    time, an all-to-all 5 ms and permutes 3 ms.

    Args:
      wholes: {name: unsharded value}, all of one dtype and summed over the same axes.
    """
    first = leaves[next(iter(wholes))]
    size, over = first.num_shards, first.over
    if size > MAX_PERMUTES + 1 or first.groups is not None:
        return _scatter_by_all_to_all(wholes, leaves)
    rank = lax.axis_index(over)
    sums = {name: leaves[name].piece(whole, rank) for name, whole in wholes.items()}
    # In round `shift`, device i sends the shard of device i + shift to that device.
    for shift in range(1, size):
        owner = lax.rem(rank + shift, size)
        pieces = [leaves[name].piece(whole, owner).reshape(-1) for name, whole in wholes.items()]
        around = [(sender, (sender + shift) % size) for sender in range(size)]
        received = lax.ppermute(jnp.concatenate(pieces), over, around)
        parts = cut_flat(received, {name: total.shape for name, total in sums.items()})
        sums = {name: total + parts[name] for name, total in sums.items()}
    return sums


def _scatter_by_all_to_all(wholes: Arrays, leaves: Mapping[str, Cut]) -> Arrays:
    rows = [leaves[name].split_rows(whole) for name, whole in wholes.items()]
    first = leaves[next(iter(wholes))]
    received = lax.all_to_all(
        jnp.concatenate(rows, axis=1), first.over, 0, 0, axis_index_groups=first.groups
    )
    shapes = {name: leaves[name].shard_shape(whole.shape) for name, whole in wholes.items()}
    return cut_flat(jnp.sum(received, axis=0), shapes)


def cut_flat(flat: jax.Array, shapes: Mapping[str, Sequence[int]]) -> Arrays:
    """Cuts a flat array into arrays of these shapes, one after the other."""
    pieces = cut_columns(flat, [math.prod(shape) for shape in shapes.values()])
    return {n: x.reshape(shape) for (n, shape), x in zip(shapes.items(), pieces, strict=True)}


def cut_columns(rows: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Cuts an array along its last dimension into pieces of these sizes, one after the other.

    The pieces begin at numbers that the compiler does not know. It compiles equal operations on
    pieces of equal shape once, and would compile them for each piece if their beginnings were a
    part of the program: the step of 80 arrays on 8 CPU devices in 18 s instead of 5, and on 8 H100
    as 232 kernels instead of 62.
    """
    ends = list(itertools.accumulate(sizes))
    if len(sizes) == 1 or ends[-1] > np.iinfo(np.int32).max:
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    else:  # unsigned: JAX adds nothing for negative numbers
        starts = lax.optimization_barrier(
            [np.uint32(e - n) for e, n in zip(ends, sizes, strict=True)]
        )
    return [
        lax.dynamic_slice_in_dim(rows, start, size, axis=-1)
        for start, size in zip(starts, sizes, strict=True)
    ]


def scatter_in_tree(
    wholes: Arrays, leaves: Mapping[str, Cut], order: TreeOrder, wire_dtype: DTypeLike
) -> Arrays:
    """Sums like `scatter_by_permutes`, but in float32 and a fixed order, by one all-to-all.

    It sends the same number of bytes.

    Args:
      wholes: {name: unsharded value, any float dtype}, all summed over the same axes.
      order: bit of the device's number that is combined first.
      wire_dtype: dtype in which pieces are sent; sums are float32.
    """
    rows = {name: leaves[name].split_rows(x.astype(wire_dtype)) for name, x in wholes.items()}
    shapes = {name: leaves[name].shard_shape(whole.shape) for name, whole in wholes.items()}
    over = leaves[next(iter(wholes))].over
    if is_one_device(over):
        return {name: row.astype(jnp.float32).reshape(shapes[name]) for name, row in rows.items()}
    received = lax.all_to_all(jnp.concatenate([*rows.values()], axis=1), over, 0, 0)
    return cut_flat(tree_sum(received.astype(jnp.float32), order), shapes)


def sum_in_tree(
    values: Arrays,
    order: TreeOrder,
    wire_dtype: DTypeLike = jnp.float32,
    over: tuple[str, ...] = DATA_AXES,
) -> Arrays:
    """Sums replicated values in float32 over mesh axes, in a fixed order.

    Each device sums one part of all values: an all-to-all and an all-gather replace an all-reduce,
    whose order depends on the number of devices.

    Args:
      values: {name: array of any float dtype}.
      over: mesh axes to sum over.
    """
    if not values:
        return {}
    if is_one_device(over):
        return {name: x.astype(wire_dtype).astype(jnp.float32) for name, x in values.items()}
    size = math.prod(lax.axis_size(axis) for axis in over)
    flat = jnp.concatenate([x.reshape(-1).astype(wire_dtype) for x in values.values()])
    padded = jnp.pad(flat, (0, -flat.size % size))
    received = lax.all_to_all(padded.reshape(size, -1), over, 0, 0)
    summed = tree_sum(received.astype(jnp.float32), order)
    whole = lax.all_gather(summed, over, tiled=True)
    return cut_flat(whole, {name: value.shape for name, value in values.items()})


def barrier_kind(mesh: Mesh | AbstractMesh) -> BarrierKind:
    """Returns "branch" for a mesh of CPU devices, and "barrier" for others and abstract meshes."""
    if isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform != "cpu":
        return "barrier"
    return "branch"


def zero_at_run_time(witness: jax.Array) -> jax.Array:
    """Returns a 0, int32 [], that the compiler cannot constant-fold: bit 1 of a square is always 0.

    Args:
      witness: array of at least one element whose values are known only at run time.
    """
    first = witness[(0,) * witness.ndim]
    if jnp.issubdtype(first.dtype, jnp.floating):
        first = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.uint32)
    first = first.astype(jnp.uint32)
    return ((first * first) & jnp.uint32(2)).astype(jnp.int32)


def run_in_barriers(
    kind: BarrierKind, witness: jax.Array, function: Callable[..., Any], *args: Tree
) -> Any:
    """Runs `function(*args)` between fusion barriers, so it is compiled separately; not
    differentiable.

    Arrays cross the barriers as vectors, because the layout of an array of several dimensions would
    depend on the code around it. Divisions are rewritten by `fix_divisions`.

    Args:
      kind: result of `barrier_kind`.
      witness: array of at least one element whose values are known only at run time.
      function: function of pytrees of arrays; it is traced once.
    """
    leaves = jax.tree.leaves(args)
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    results, result_structure = jax.tree.flatten(shape)
    run = jaxpr_as_fun(fix_divisions(closed))

    def flat(*vectors: jax.Array) -> list[Any]:
        return _as_vectors(run(*_with_shapes(list(vectors), leaves)))

    def never(*_: Any) -> list[jax.Array]:
        zero = _zero_of_a_sort(witness)
        return [jnp.full((x.size,) if x.ndim > 1 else x.shape, zero, x.dtype) for x in results]

    vectors = _as_vectors(leaves)
    if kind == "barrier":
        outputs = lax.optimization_barrier(flat(*lax.optimization_barrier(vectors)))
    else:
        outputs = lax.cond(zero_at_run_time(witness) == 0, flat, never, *vectors)
    return jax.tree.unflatten(result_structure, _with_shapes(list(outputs), results))


def _zero_of_a_sort(witness: jax.Array) -> jax.Array:
    """Returns a 0, int32 [], that keeps XLA from compiling the loops around it as one function.

    XLA's CPU compiler turns a loop that accesses few bytes into one function
    (`small-while-loop-hoisting`), by a code generator whose sums have another order than those of
    separate operations. A loop over one piece is no loop any more, so it is not affected. With JAX
    0.12, sums of squares on one device, which has 8 pieces, were an ulp from those on 8 devices, in
    up to 5 of 16 gradients of a transformer per step. XLA leaves alone a loop that contains a sort,
    also in a branch that never runs. Then all bits are equal, as they are with
    `--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=0`.
    """
    return lax.sort(jnp.stack([zero_at_run_time(witness), jnp.int32(1)]))[0]


def _as_vectors(tree: Tree) -> Any:
    """Reshapes arrays of two or more dimensions in a tree to vectors."""
    return jax.tree.map(lambda x: x if jnp.ndim(x) < 2 else x.reshape(-1), tree)


def _with_shapes(tree: Tree, like: Tree) -> Any:
    """Reshapes the vectors of `_as_vectors` to the shapes of `like`."""
    return jax.tree.map(lambda x, one: x if jnp.ndim(one) < 2 else x.reshape(one.shape), tree, like)


def fix_divisions(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrites divisions so that XLA cannot replace them by products with reciprocals.

    If `b` is broadcast, XLA computes `a / b` in one program as a division and in another as a
    product, and the last bits differ. In the returned program XLA cannot see that `b` is broadcast.
    The values are those of a division.
    """
    return ClosedJaxpr(_with_divisions(closed.jaxpr), closed.consts)


def _with_divisions(program: Jaxpr) -> Jaxpr:
    equations: list[Any] = []
    for equation in program.eqns:
        if _divides_by_array(equation):
            equations += _opaque_division(equation)
        else:
            params = {name: _with_inner(value) for name, value in equation.params.items()}
            equations.append(equation.replace(params=params))
    return program.replace(eqns=equations)


def _with_inner(value: object) -> Any:
    """Returns an equation's parameter with `fix_divisions` applied to the programs in it."""
    if isinstance(value, ClosedJaxpr):
        return fix_divisions(value)
    if isinstance(value, Jaxpr):
        return _with_divisions(value)
    if type(value) is tuple:  # no named tuples (such as dimension numbers)
        return tuple(_with_inner(one) for one in value)
    return value


def _divides_by_array(equation: Equation) -> bool:
    if equation.primitive.name != "div":
        return False
    bottom = equation.invars[1]
    is_array = not isinstance(bottom, Constant) and bottom.aval.ndim > 0 and bottom.aval.size > 0
    return is_array and jnp.issubdtype(bottom.aval.dtype, jnp.floating)


def _opaque_division(equation: Equation) -> list[Any]:
    """Returns equations that divide the same values, by a divisor the compiler cannot see as
    broadcast.
    """

    shape = equation.outvars[0].aval.shape

    def divide(top: jax.Array, bottom: jax.Array) -> jax.Array:
        number = lax.iota(jnp.int32, math.prod(shape)).reshape(shape)
        always = number >= zero_at_run_time(bottom)
        whole = jnp.broadcast_to(bottom, shape)
        return lax.div(top, lax.select(always, whole, jnp.ones_like(whole)))

    like = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
    made = jax.make_jaxpr(divide)(*like).jaxpr
    given = dict(zip(made.invars, equation.invars, strict=True))
    *before, last = [
        one.replace(invars=[x if isinstance(x, Constant) else given.get(x, x) for x in one.invars])
        for one in made.eqns
    ]
    return [*before, last.replace(outvars=equation.outvars)]


def values_in_barriers(kind: BarrierKind, witness: jax.Array, values: Tree) -> Any:
    """Puts the values into separate buffers, so that producer and consumer are not fused."""
    if kind == "barrier":
        return lax.optimization_barrier(values)
    return run_in_barriers(kind, witness, lambda same: same, values)
