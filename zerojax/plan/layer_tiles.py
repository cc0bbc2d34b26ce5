"""Decides which layer weights are gathered in tiles (`offload.tile_bytes`), and along which
dimension.

A weight is cut along the dimension for which the partial results take the least memory. Tiles along
a dimension that the product keeps add up the gradient of its input; tiles along a dimension that
the product sums over add up its result. If both take equal memory, a dimension that the product
keeps is chosen, because it changes no sum of the forward pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.config.mesh import DEVICE
from zerojax.config.tree_types import Tree
from zerojax.offload.offload_tiers import cut_into_layers
from zerojax.operators.marks import inner_programs
from zerojax.placement.device_mesh import DATA_AXES, EXPERT
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.placement.state_layout import LayerTiles, OffloadLayout, WeightTiles
from zerojax.placement.table import Placement
from zerojax.tracing.activation_offload import keep_inputs_on_host
from zerojax.tracing.flops import without_waste
from zerojax.tracing.jaxpr import cut_piece
from zerojax.tracing.loops import LossPieces
from zerojax.tracing.protocol import Loss, Model
from zerojax.tracing.tiled_products import TiledProduct, WeightProduct
from zerojax.tracing.tiled_programs import ShardedWeight, find_reads_in_loops, tile_reads
from zerojax.tracing.trees import format_bytes

_MARK = "zerojax.tile:"


def plan_tiles(
    settings: MeshConfig,
    layout: OffloadLayout | None,
    placement: Placement,
    traced: tuple[Model, Loss, Any],
    forward: ClosedJaxpr,
) -> LayerTiles:
    """Decides which layer weights are gathered in tiles.

    Args:
      settings: mesh options.
      layout: offload layout, which says which weights come to the device layer by layer.
      placement: placement table.
      traced: (model, loss, arrays), as `cut_into_layers` takes them.
      forward: traced loss of one microbatch on one data shard, with a mark at every read; its first
        inputs are the parameters, by sorted names.
    """
    limit = settings.offload.tile_bytes
    if limit is None:
        return LayerTiles()
    if settings.offload.params == DEVICE:
        return _tiles_of_reads(settings, limit, placement, traced[2][0], forward)
    if layout is None:
        return LayerTiles()
    pieces = cut_into_layers(settings, *traced)
    assert pieces is not None
    return _tiles_of_layers(layout.by_layer, limit, placement, pieces)


def check_tiles(settings: MeshConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raises if `offload.tile_bytes` cannot be combined with another setting.

    Raises:
      ValueError: the message states the conflicting setting and the remedy.
    """
    if settings.offload.tile_bytes is None:
        return
    for obstacle, remedy in _obstacles(settings, mesh):
        raise ValueError(
            f"offload.tile_bytes={settings.offload.tile_bytes} {obstacle}; {remedy}, or leave "
            "tile_bytes out"
        )


def _obstacles(settings: MeshConfig, mesh: Mesh | AbstractMesh) -> Iterator[tuple[str, str]]:
    """Yields (reason why tiles cannot be used, remedy), as parts of a sentence."""
    zero, wire = settings.zero, settings.wire
    if zero == 0:
        yield "splits gathered weights, but at zero=0 nothing is gathered", "use zero=3"
    if zero < 3 and settings.offload.params == DEVICE:
        yield (
            f"splits weights that each layer gathers, but at zero={zero} with params: device all "
            "weights are gathered once per step",
            "use zero=3, or params: host",
        )
    for axis, size in mesh.shape.items():
        if size > 1 and (axis not in DATA_AXES or axis == EXPERT):
            yield f"cannot be combined with {axis}={size}, which splits layers", f"use {axis}=1"
    if settings.offload.updates_in_pass:
        name = settings.offload.late_key or "update_in_backward"
        yield (
            f"gathers weights again in the backward pass, which is not tested with {name}",
            f"leave {name} out",
        )
    if settings.lookup == "owners":
        yield "is not tested with lookup=owners", "use lookup=gather"
    if settings.deterministic:
        yield (
            f"adds up products in an order that depends on the mesh, but deterministic="
            f"{settings.deterministic} needs the same order on all meshes",
            "leave deterministic out",
        )
    sent = {
        f"wire.weights={wire.weights}": (wire.weights != "compute", "compute"),
        f"wire.gradients={wire.gradients}": (wire.gradients != "reduce", "reduce"),
        "wire.secondary=true": (wire.secondary, "false"),
    }
    for asked, (is_set, default) in sent.items():
        if is_set:
            option = asked.partition("=")[0]
            yield (
                f"sends tiles among all devices in the compute dtype, but {asked} sends whole "
                "weights in another format",
                f"use {option}={default}",
            )


def _tiles_of_layers(
    names: Collection[str], limit: int, placement: Placement, pieces: LossPieces
) -> LayerTiles:
    """Chooses the tiles of the streamed layer weights that are larger than `limit`.

    Args:
      names: weights that come to the device layer by layer.
      limit: largest number of bytes of a tile.
      placement: placement table.
      pieces: traced loss, split at its loop over layers.
    """
    rows = {name: _row(pieces, name) for name in names}
    tiles = _choose(rows, pieces.find_products(), limit, placement)
    return _with_counts(tiles, lambda cut: _gathered_again(pieces, cut, placement))


def _tiles_of_reads(
    settings: MeshConfig,
    limit: int,
    placement: Placement,
    params: Mapping[str, Any],
    forward: ClosedJaxpr,
) -> LayerTiles:
    """Chooses the tiles of layer weights that are gathered on use and larger than `limit`.

    Args:
      settings: mesh options.
      limit: largest number of bytes of a tile.
      placement: placement table.
      params: {name: abstract value as the model reads it}.
      forward: as in `plan_tiles`.
    """
    leaves = placement.leaves
    reads = find_reads_in_loops(forward.jaxpr, leaves)
    rows, products = {}, {}
    for name, leaf in leaves.items():
        if not leaf.access.looks_up:
            shape = leaf.shape[max(leaf.stack_dims - leaf.mapped_dims, 0) :]
            rows[name] = jax.ShapeDtypeStruct(shape, params[name].dtype)
            products[name] = _product_of_reads(leaf, reads.get(name, []))
    tiles = _choose(rows, products, limit, placement)
    return _with_counts(tiles, lambda cut: _gathered_again_on_use(settings, forward, cut, leaves))


def _product_of_reads(
    leaf: LeafPlacement, reads: Sequence[WeightProduct | str]
) -> WeightProduct | str:
    """Returns the product that alone reads a parameter, or why it cannot be gathered in tiles."""
    if not leaf.access.gathers_on_use:
        return "all layers are gathered once per step"
    if leaf.codes is not None:
        return "it is stored in codes"
    if leaf.mapped_dims:
        return "`vmap` maps it"
    if not reads:
        return "it is read in a branch or in a custom derivative"
    return reads[0] if len(reads) == 1 else f"it is read {len(reads)} times"


def _choose(
    rows: Mapping[str, jax.ShapeDtypeStruct],
    products: Mapping[str, WeightProduct | str],
    limit: int,
    placement: Placement,
) -> LayerTiles:
    """Chooses the tiles of the weights that are larger than `limit`; `WeightTiles.again` is 0.

    Args:
      rows: {name: shape and dtype of the weight of one layer}.
      products: {name: product that alone reads it, or why there is none}.
      limit: largest number of bytes of a tile.
      placement: placement table.
    """
    tiles: dict[str, WeightTiles] = {}
    untiled = []
    for name in sorted(rows):
        leaf, found, row = placement.leaves[name], products[name], rows[name]
        size = math.prod(row.shape) * row.dtype.itemsize
        if size <= limit:
            continue
        if leaf.zero_dim is None:
            found = "every device has all of it"
        if not isinstance(found, str):
            found = _cut(leaf, found, row.shape, placement.num_shards(leaf), -(-size // limit))
        if isinstance(found, str):
            of_layer = " of a layer" * (leaf.num_slices > 1)
            untiled.append((name, f"{format_bytes(size)}{of_layer} are gathered whole: {found}"))
        else:
            tiles[name] = found
    return LayerTiles(cut=tiles, whole=tuple(untiled))


def _with_counts(
    tiles: LayerTiles, count: Callable[[Mapping[str, WeightTiles]], Mapping[str, int]]
) -> LayerTiles:
    """Returns the tiles with `WeightTiles.again` set from `count(tiles)`."""
    again = count(tiles.cut) if tiles.cut else {}
    cut = {n: dataclasses.replace(found, again=again[n]) for n, found in tiles.cut.items()}
    return dataclasses.replace(tiles, cut=cut)


def _row(pieces: LossPieces, name: str) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the row of a stacked parameter that one layer reads."""
    program = pieces.loop.program.jaxpr
    variable: Any = program.invars[pieces.loop.names.index(name)]
    return jax.ShapeDtypeStruct(variable.aval.shape[1:], variable.aval.dtype)


def _cut(
    leaf: LeafPlacement, product: WeightProduct, shape: Sequence[int], shards: int, fewest: int
) -> WeightTiles | str:
    """Chooses the dimension and the number of tiles of a weight, at least `fewest`; returns a
    reason if it cannot be cut."""
    assert leaf.zero_dim is not None
    choices = []
    for dim in (*product.free, *product.contracted):
        is_sharded = dim == len(shape) + leaf.zero_dim
        if is_sharded and leaf.is_padded:
            continue
        groups = shards if is_sharded else 1
        run, sums = shape[dim] // groups, dim in product.contracted
        count = next((n for n in range(fewest, run + 1) if run % n == 0), None)
        if count is not None:
            partial = (product.result if sums else product.other).size
            choices.append((partial, sums, groups, count, dim))
    if not choices:
        return f"no dimension of {list(shape)} can be cut into {fewest} tiles or more"
    _, _, groups, count, dim = min(choices)
    return WeightTiles(dim=dim, count=count, groups=groups)


def _gathered_again(
    pieces: LossPieces, tiles: Mapping[str, WeightTiles], placement: Placement
) -> dict[str, int]:
    """Counts how often the backward pass gathers each weight again to recompute a product.

    The counts are read from the traced derivative of a layer, in which gathers and scatters are
    replaced by marks.

    Returns:
      {name: number of times}.
    """
    products = pieces.find_products()

    def sharded(name: str, shard: jax.Array, sink: jax.Array) -> ShardedWeight:
        tile, product, whole = tiles[name], products[name], _row(pieces, name)
        assert isinstance(product, WeightProduct)
        shape = list(whole.shape)
        shape[tile.dim] //= tile.count
        part = list(shard.shape)
        part[tile.dim] //= tile.count
        first = lambda x, shape: jnp.broadcast_to(x.reshape(-1)[0], shape)  # noqa: E731
        tiled = TiledProduct(
            product=product,
            gather=lambda x: checkpoint_name(first(x, shape), _MARK + name),
            scatter=lambda x: first(x, part),
            dim=tile.dim,
            count=tile.count,
            groups=tile.groups,
        )
        return ShardedWeight(shard, sink, tiled)

    def run(floats: Tree, fixed: Tree) -> list[Any]:
        rows, consts, others, activations = _joined(floats, fixed)
        weights = {n: sharded(n, rows[n], floats[0][n]) for n in tiles}
        after, _ = pieces.layer({**rows, **weights}, consts, others, activations)
        return [x for x in after if jnp.issubdtype(x.dtype, jnp.inexact)]

    def backward(floats: Tree, fixed: Tree, cotangents: Tree) -> Any:
        return jax.vjp(lambda floats: run(floats, fixed), floats)[1](cotangents)

    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
    rows = {name: _row(pieces, name) for name in sorted(pieces.stacked)}
    rows |= {name: _shard(rows[name], placement, name) for name in tiles}
    around = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in pieces.loop.consts]
    others = [jax.ShapeDtypeStruct(x.aval.shape[1:], x.aval.dtype) for x in pieces.loop.others]
    given = rows, around, others, pieces.activations
    floats = jax.tree.map(lambda x: x if is_float(x) else None, given)
    floats = (
        {n: None if placement.leaves[n].frozen else x for n, x in floats[0].items()},
        *floats[1:],
    )
    if not pieces.layers_reads_outer:
        floats = floats[0], [None] * len(around), [None] * len(others), floats[3]
    closed = jax.make_jaxpr(backward)(floats, given, jax.eval_shape(run, floats, given))
    counts = dict.fromkeys(tiles, 0)
    _count(cut_piece(closed, closed.jaxpr.outvars).closed.jaxpr, 1, counts)
    return {name: max(counts[name] // tile.count - 1, 0) for name, tile in tiles.items()}


def _gathered_again_on_use(
    settings: MeshConfig,
    forward: ClosedJaxpr,
    tiles: Mapping[str, WeightTiles],
    leaves: Mapping[str, LeafPlacement],
) -> dict[str, int]:
    """Returns the counts of `_gathered_again`, for weights that are gathered on use.

    They are counted in the traced derivative of the whole loss.
    """

    def tiling(name: str) -> Callable[[WeightProduct], TiledProduct]:
        # A whole weight in place of a shard: only the numbers of gathers count.
        return lambda product: TiledProduct(
            product=product,
            gather=lambda x: checkpoint_name(x, _MARK + name),
            scatter=None if leaves[name].frozen else lambda x: x,
            dim=tiles[name].dim,
            count=tiles[name].count,
            groups=tiles[name].groups,
        )

    names = sorted(leaves)
    run = lambda params, others: jaxpr_as_fun(forward)(*params, *others)  # noqa: E731
    if settings.offload.activations != DEVICE:
        run = keep_inputs_on_host(run)
    run = tile_reads(run, {name: tiling(name) for name in tiles})

    def both_passes(inputs: list[Any], others: list[Any]) -> Any:
        given = dict(zip(names, inputs, strict=True))
        is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
        trained = {n: x for n, x in given.items() if not leaves[n].frozen and is_float(x)}

        def loss(trained: Mapping[str, Any]) -> tuple[Any, Any]:
            first, *more = run([trained.get(name, given[name]) for name in names], others)
            return first, more

        value, pull, more = jax.vjp(loss, trained, has_aux=True)
        return value, more, pull(jnp.ones_like(value))

    variables: Any = forward.jaxpr.invars
    inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
    closed = jax.make_jaxpr(both_passes)(inputs[: len(names)], inputs[len(names) :])
    counts = dict.fromkeys(tiles, 0)
    _count(without_waste(closed), 1, counts)
    times = {n: counts[n] // (leaves[n].num_slices * tile.count) for n, tile in tiles.items()}
    return {name: max(number - 2, 0) for name, number in times.items()}


def _joined(floats: Tree, fixed: Tree) -> Any:
    return jax.tree.map(
        lambda x, other: other if x is None else x, floats, fixed, is_leaf=lambda x: x is None
    )


def _shard(row: jax.ShapeDtypeStruct, placement: Placement, name: str) -> jax.ShapeDtypeStruct:
    leaf, shape = placement.leaves[name], list(row.shape)
    assert leaf.zero_dim is not None
    shape[leaf.zero_dim] = leaf.stored_shape[leaf.zero_dim] // placement.num_shards(leaf)
    return jax.ShapeDtypeStruct(tuple(shape), row.dtype)


def _count(program: Jaxpr, times: int, counts: dict[str, int]) -> None:
    """Adds the marked gathers of a jaxpr to `counts`; `times` is the number of iterations of the
    loops around it."""
    for equation in program.eqns:
        mark = equation.params["name"] if equation.primitive.name == "name" else ""
        if mark.startswith(_MARK):
            counts[mark.removeprefix(_MARK)] += times
        inside = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        for inner in inner_programs(equation.params):
            _count(inner, inside, counts)


def describe_tiles(settings: MeshConfig, tiles: LayerTiles) -> list[str]:
    """Describes how many layer weights are gathered in tiles, and why others are not."""
    limit = settings.offload.tile_bytes
    if limit is None:
        return []
    asked = f"offload.tile_bytes {limit:,}"
    alike: dict[str, list[str]] = {}
    for name, reason in tiles.whole:
        alike.setdefault(reason, []).append(name)
    lines = [f"{asked}: {_listed(names)}: {reason}" for reason, names in alike.items()]
    if not tiles.cut:
        return [
            *lines,
            f"{asked} cuts nothing: no layer weight above this size can be gathered in parts",
        ]
    counts = [found.count for found in tiles.cut.values()]
    few, many = min(counts), max(counts)
    number = f"{few}" if few == many else f"{few} to {many}"
    again = [name for name, found in tiles.cut.items() if found.again]
    more = f"; the backward pass gathers {len(again)} of them once more, to compute products again"
    return [
        f"{asked}: {len(tiles.cut)} weights of a layer are gathered in {number} tiles each, "
        "with one collective for each tile" + more * bool(again),
        *lines,
    ]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
