"""State of AdamW with 8-bit moments: its sharding, and conversion to and from optax's state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.adam8bit import (
    MU_FLOOR,
    NU_FLOOR,
    NU_ZERO,
    Moments8bit,
    decode_moments,
    encode_moments,
    num_blocks,
)
from zerojax.config.tree_types import Tree
from zerojax.tracing import trees

SMALLEST_CODED = 4096
"""Minimum number of elements of a parameter with 8-bit moments. Smaller parameters keep float32
moments, as in bitsandbytes (`min_8bit_size`), because norms and biases cost little memory. The size
of the whole parameter counts, not of its shard, so the result does not depend on the mesh."""


class ScaleByAdam8bitState(NamedTuple):
    """Counterpart of `optax.ScaleByAdamState` with 8-bit codes; its four trees have the structure
    of the parameters.

    Attributes:
      count: int32 []; number of updates applied.
      mu, nu: codes of the first and second moment, int8 with the parameter's shape (see
        `Moments8bit`); float32 moments for small parameters.
      mu_scale, nu_scale: float32 [number of blocks]. Blocks do not cross shards, so the scales of
        all shards are concatenated. `optax.MaskedNode()` for small parameters.
    """

    count: Any
    mu: Tree
    nu: Tree
    mu_scale: Tree
    nu_scale: Tree


def abstract_state(portable: Tree, params: Tree, sizes: Mapping[str, int]) -> Tree:
    """Returns the structs of a state with 8-bit moments, sharded like the parameters.

    Args:
      portable: structs of optax's state.
      params: structs of the parameters in any tree, all with a `NamedSharding` or all without.
      sizes: {name: number of elements of the whole parameter, which decides if it is small}.
    """
    names = trees.flatten_names(params)
    shardings = [x.sharding for x in names.values() if x.sharding is not None]
    count_sharding = NamedSharding(shardings[0].mesh, P()) if shardings else None

    def replicated(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=count_sharding)

    def moment(name: str) -> jax.ShapeDtypeStruct:
        x = names[name]
        dtype = jnp.int8 if sizes[name] >= SMALLEST_CODED else jnp.float32
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

    def scale(name: str) -> Any:
        return _scale_struct(names[name]) if sizes[name] >= SMALLEST_CODED else optax.MaskedNode()

    def of_all(make: Callable[[str], Any]) -> Tree:
        structure = jax.tree.structure(params)
        return structure.unflatten([make(name) for name in names])

    def coded(part: Tree) -> ScaleByAdam8bitState:
        moments, scales = of_all(moment), of_all(scale)
        return ScaleByAdam8bitState(replicated(part.count), moments, moments, scales, scales)

    return _map_parts(portable, coded, _is_plain, replicated)


def _scale_struct(param: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the struct of the scales of one parameter's moment, concatenated over shards."""
    if param.sharding is None:
        return jax.ShapeDtypeStruct((num_blocks(param.size),), jnp.float32)
    mesh, spec = param.sharding.mesh, param.sharding.spec
    entries = [(entry,) if isinstance(entry, str) else entry for entry in spec if entry is not None]
    axes = tuple(axis for entry in entries for axis in entry)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    sharding = NamedSharding(mesh, P(axes) if axes else P(), memory_kind=param.sharding.memory_kind)
    shape = (shards * num_blocks(param.size // shards),)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def new_state(structs: Tree) -> Tree:
    """Builds the state before the first update: the count and all moments are 0."""

    def full(tree: Tree, value: float) -> Tree:
        return jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), tree)

    def no_moment(code: int) -> Callable[[Any], jax.Array]:
        return lambda x: jnp.full(x.shape, code if x.dtype == jnp.int8 else 0, x.dtype)

    def coded(part: ScaleByAdam8bitState) -> ScaleByAdam8bitState:
        return ScaleByAdam8bitState(
            count=full(part.count, 0),
            mu=jax.tree.map(no_moment(0), part.mu),
            nu=jax.tree.map(no_moment(NU_ZERO), part.nu),
            mu_scale=full(part.mu_scale, MU_FLOOR),
            nu_scale=full(part.nu_scale, NU_FLOOR),
        )

    return _map_parts(structs, coded, _is_coded, lambda leaf: full(leaf, 0))


def to_portable_state(state: Tree) -> Tree:
    """Decodes a state (whole or one device's shards) to optax's state with float32 moments."""

    def decoded(part: ScaleByAdam8bitState) -> optax.ScaleByAdamState:
        def leaf(*moments: Any) -> tuple[jax.Array, jax.Array]:
            coded = moments[0].dtype == jnp.int8
            return decode_moments(Moments8bit(*moments)) if coded else moments[:2]

        mu, nu = _map_leaves(leaf, 2, part.mu, part.nu, part.mu_scale, part.nu_scale)
        return optax.ScaleByAdamState(part.count, mu, nu)

    return _map_parts(state, decoded, _is_coded)


def from_portable_state(portable: Tree, structs: Tree) -> Tree:
    """Encodes optax's moments as 8-bit codes wherever `structs` (of `abstract_state`) has codes."""
    target = part_of(structs)
    none: Any = optax.MaskedNode()

    def encoded(part: optax.ScaleByAdamState) -> ScaleByAdam8bitState:
        def leaf(wanted: jax.ShapeDtypeStruct, mu: jax.Array, nu: jax.Array) -> tuple[Any, ...]:
            mu, nu = mu.astype(jnp.float32), nu.astype(jnp.float32)
            return encode_moments(mu, nu) if wanted.dtype == jnp.int8 else (mu, nu, none, none)

        return ScaleByAdam8bitState(part.count, *_map_leaves(leaf, 4, target.mu, part.mu, part.nu))

    return _map_parts(portable, encoded, _is_plain)


def _is_coded(node: object) -> bool:
    return isinstance(node, ScaleByAdam8bitState)


def _is_plain(node: object) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def _map_parts(
    state: Tree,
    change: Callable[[Any], Any],
    is_part: Callable[[Any], bool],
    others: Callable[[Any], Any] = lambda leaf: leaf,
) -> Tree:
    """Maps `change` over the parts of `state` for which `is_part` is true, `others` over the
    rest."""
    return jax.tree.map(lambda x: change(x) if is_part(x) else others(x), state, is_leaf=is_part)


def _map_leaves(
    function: Callable[..., tuple[Any, ...]], num_results: int, first: Tree, *rest: Tree
) -> list[Tree]:
    """Maps a function over leaves of trees of equal structure; returns one tree per result."""
    leaves, structure = jax.tree.flatten(first)
    rows = zip(leaves, *(structure.flatten_up_to(tree) for tree in rest), strict=True)
    results = [function(*row) for row in rows]
    return [structure.unflatten([r[number] for r in results]) for number in range(num_results)]


def part_of(state: Tree) -> ScaleByAdam8bitState:
    """Returns the `ScaleByAdam8bitState` in an optimizer's state, which has exactly one."""
    (part,) = (x for x in jax.tree.leaves(state, is_leaf=_is_coded) if _is_coded(x))
    return part


def map_trees(state: Tree, change: Callable[[Tree], Tree]) -> Tree:
    """Maps a function over each tree of codes and each tree of scales in `state`."""
    return _map_parts(
        state,
        lambda part: ScaleByAdam8bitState(part.count, *(change(tree) for tree in part[1:])),
        _is_coded,
    )


def paired(state: Tree) -> Tree:
    """Converts to optax's state type with (codes, scales) pairs as moments, as `fused` expects."""
    return _map_parts(
        state,
        lambda part: optax.ScaleByAdamState(
            part.count, (part.mu, part.mu_scale), (part.nu, part.nu_scale)
        ),
        _is_coded,
    )


def unpaired(state: Tree) -> Tree:
    """Reverses `paired`."""

    def split(part: Tree) -> ScaleByAdam8bitState:
        (mu, mu_scale), (nu, nu_scale) = part.mu, part.nu
        return ScaleByAdam8bitState(part.count, mu, nu, mu_scale, nu_scale)

    return _map_parts(state, split, _is_plain)
