"""Makes the placement table of a model, and finds the parameters that are gathered at the same
time.

In a loop the compiler frees one layer's gathered parameters before it gathers the next layer's.
Outside of loops it has no reason to: layers of a Python list are read in one part of the program
without a loop, and are gathered at the same time, with or without checkpoints. Compiled for 8 H200
(JAX 0.12, ZeRO-3, 8 layers of 1M parameters in a list), temporaries take 36.1 MiB in float32 and
19.3 in bfloat16; all weights once and the shards of gradients would take 36.1 and 18.1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from zerojax import models, tracing
from zerojax.config import MeshConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.marks import inner_programs, marked_reads, read_name
from zerojax.optim.weight_codes import BLOCK, WeightCodes
from zerojax.placement.device_mesh import EXPERT, MODEL, STAGE, state_axes
from zerojax.placement.frozen_codes import check_cut, check_some, choose_codes
from zerojax.placement.leaf_placement import (
    Access,
    LeafPlacement,
    PlacementRules,
    Shape,
    tensor_parallel_axes,
)
from zerojax.placement.state_layout import PipelineLayout
from zerojax.tracing import trees
from zerojax.tracing.reads import line_of_read
from zerojax.tracing.row_lookups import RowReads


@dataclass(frozen=True)
class Placement:
    """Placement table, with one row per parameter.

    Attributes:
      leaves: {name of the parameter: its row}, in the model's order.
      zero: ZeRO stage of the plan.
      axis_sizes: {mesh axis: size}.
    """

    leaves: Mapping[str, LeafPlacement]
    zero: int
    axis_sizes: Mapping[str, int]

    def num_parameters(self, *, frozen: bool | None = None) -> int:
        """Returns the number of parameters without padding: all, or only the frozen or only the
        trained parameters."""
        return sum(
            trees.num_elements(leaf.shape)
            for leaf in self.leaves.values()
            if frozen is None or leaf.frozen == frozen
        )

    def shard_elements(self, leaf: LeafPlacement) -> int:
        """Returns the number of elements of a parameter's stored shard on one device."""
        split = math.prod(self.axis_sizes[axis] for axis in axes_of_spec(leaf.stored_spec))
        return trees.num_elements(leaf.stored_shape) // split

    def held_elements(self, leaf: LeafPlacement) -> int:
        """Returns the number of elements of a parameter that a device stores during a step.

        They are its shard or, with `wire.secondary`, its larger part of the copy that the node
        shares.
        """
        shard = self.shard_elements(leaf)
        return (
            shard if leaf.node_shards is None else shard * self.num_shards(leaf) // leaf.node_shards
        )

    def num_shards(self, leaf: LeafPlacement) -> int:
        """Returns the number of shards into which ZeRO splits a parameter."""
        return math.prod(self.axis_sizes[axis] for axis in leaf.zero_axes)

    def exceptions(self) -> list[tuple[str, str]]:
        """Returns (name, reason) for every parameter whose placement differs from the default rule
        of the ZeRO stage."""
        return [(leaf.name, reason) for leaf in self.leaves.values() for reason in leaf.reasons]


def axes_of_spec(spec: P) -> list[str]:
    """Returns all mesh axes in a partition spec."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return [axis for entry in entries for axis in entry if axis is not None]


def shared_axes(mesh: Mesh | AbstractMesh, spec: P) -> tuple[str, ...]:
    """Returns the mesh axes in a partition spec that have more than one device."""
    return tuple(axis for axis in axes_of_spec(spec) if mesh.shape[axis] > 1)


def axes_of_dims(
    mesh: Mesh | AbstractMesh, leaves: Mapping[str, Any]
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Returns {name: for each dimension the mesh axes with more than one device that split it}."""
    found = {}
    for name, leaf in leaves.items():
        spec = (*leaf.sharding.spec, *[None] * leaf.ndim)[: leaf.ndim]
        found[name] = tuple(shared_axes(mesh, P(one)) for one in spec)
    return found


def place_parameters(
    shapes: Mapping[str, Shape],
    read_shapes: Mapping[str, frozenset[Shape]],
    axis_sizes: Mapping[str, int],
    rules: PlacementRules,
    *,
    always_frozen: Mapping[str, str] | None = None,
    barriers: Mapping[str, str] | None = None,
    reads_lazily: bool = True,
    mapped_dims: Mapping[str, int] | None = None,
    layer_rows: Mapping[str, tuple[int, ...]] | None = None,
    eight_bits: Collection[str] = (),
    line_of: Callable[[str], str | None] = lambda name: None,
) -> Placement:
    """Makes the placement table: decides how each parameter is sharded and read.

    ZeRO shards the largest dimension that the number of shards divides, among the dimensions that
    neither a scan over layers removes nor tensor parallelism splits (both on one dimension would
    permute the stored weights). If no such dimension is divisible, the largest of them is padded.
    Quantized codes are never split inside a block.

    Args:
      shapes: {name: unpadded shape}.
      read_shapes: {name: shapes with which the model reads the parameter}, which show the
        dimensions that a scan removes.
      axis_sizes: {mesh axis: size}.
      rules: the user's settings of placement.
      always_frozen: {name: reason} for parameters that can have no gradient (integers); they are
        not sharded.
      barriers: {name: reason why the parameter cannot be gathered where the model reads it}.
      reads_lazily: whether the model shows where it uses a parameter; False for a pair of
        functions.
      mapped_dims: {name: number of leading dimensions of a read that `jax.vmap` maps}.
      layer_rows: {name: layer in each row of the stored stack}, for parameters that a pipeline
        splits.
      eight_bits: names of parameters that are gathered as 8-bit floats, if they are gathered on
        use.
      line_of: function from a parameter to the line of the model that reads it, for errors.

    Raises:
      ValueError: a rule has an unknown axis, does not fit a shape, or does not divide it; a
        parameter that a pipeline splits is not read layer by layer, or a rule splits its layers; a
        rule splits experts that the axis `expert` splits.
    """
    frozen = dict(always_frozen or {})
    frozen_by_user = _frozen_by_user(shapes, rules) if rules.freeze else frozenset()
    axes_of = tensor_parallel_axes(shapes, axis_sizes, rules.tensor_parallel, rules.stacks, line_of)
    leaves = {}
    for name, shape in shapes.items():
        stack_dims, barrier = _stack_dims(shape, read_shapes.get(name))
        barrier = (barriers or {}).get(name) or barrier
        reasons = [frozen[name]] if name in frozen else []
        mapped = min((mapped_dims or {}).get(name, 0), stack_dims)
        zero_dim = padded = None
        axes = axes_of[name]
        codes = None
        if rules.freeze_codes and name in frozen_by_user and name not in frozen:
            codes, reason = choose_codes(
                name, shape, stack_dims, mapped, barrier, rules.freeze_codes
            )
            reasons += [reason] if reason else []
        if codes is not None:
            check_cut(name, shape, axes, codes, axis_sizes)
        rows = (layer_rows or {}).get(name)
        if rows is not None:
            _check_rows(name, shape, rows, axis_sizes)
            _check_stack(name, axes, stack_dims, barrier)
        expert_dim = rules.expert_dims.get(name)
        zero_axes = state_axes(axis_sizes)
        if expert_dim is not None:
            _check_experts(name, axes, len(shape) + expert_dim)
            zero_axes = tuple(axis for axis in zero_axes if axis != EXPERT)
        zero_axes = (*zero_axes, STAGE) if layer_rows and rows is None else zero_axes
        shards = rules.fixed_pieces or math.prod(axis_sizes[axis] for axis in zero_axes)
        if shards > 1 and rules.zero > 0 and name not in (always_frozen or {}):
            over = f"{' x '.join(zero_axes)} {shards}"
            over = f"{shards} virtual shards" if rules.fixed_pieces else over
            taken = axes if expert_dim is None else _with_experts(axes, expert_dim)
            # A lookup table is split by columns, so that all devices do the same work.
            first = stack_dims if name not in rules.lookups else 1
            zero_dim, padded, reason = _zero_dim(shape, taken, first, shards, over, codes)
            reasons += [reason] if reason else []
        access, reason = Access.WHOLE, None
        if zero_dim is not None:
            common = "all stages read this array in every tick" if STAGE in zero_axes else None
            access, reason = _access(shape, common or barrier, rules, reads_lazily)
            if name in rules.lookups:
                access, reason = Access.LOOK_UP, None
        reasons += [reason] if reason else []
        leaves[name] = LeafPlacement(
            name=name,
            shape=shape,
            stack_dims=stack_dims,
            mapped_dims=mapped,
            axes=axes,
            zero_dim=zero_dim,
            padded_size=padded,
            access=access,
            eight_bits=name in eight_bits and access is Access.GATHER_ON_USE and codes is None,
            frozen=name in frozen or name in frozen_by_user,
            codes=codes,
            zero_axes=zero_axes,
            expert_dim=expert_dim,
            row_reads=rules.lookups.get(name),
            layer_rows=rows,
            reasons=tuple(reasons),
        )
    if rules.freeze_codes:
        check_some(leaves, rules.freeze_codes)
    return Placement(leaves, rules.zero, dict(axis_sizes))


def _frozen_by_user(shapes: Mapping[str, Shape], rules: PlacementRules) -> frozenset[str]:
    """Returns the stored names that the user's patterns freeze; a stack is frozen only if the
    patterns match all its rows."""
    rows_of = {name: rules.stacks.get(name, (name,)) for name in shapes}
    names = [row for rows in rows_of.values() for row in rows]
    matched = trees.match_names(names, rules.freeze, option="freeze")
    return frozenset(name for name, rows in rows_of.items() if matched.issuperset(rows))


def _access(
    shape: Shape, barrier: str | None, rules: PlacementRules, reads_lazily: bool
) -> tuple[Access, str | None]:
    """Returns how a sharded parameter is read (`Access`), and the reason if this is not the default
    of the ZeRO stage."""
    if rules.zero == 1:
        return Access.GATHER_ONCE, None
    if barrier is not None:
        return Access.GATHER_ONCE, f"{barrier}: gathered once per step"
    if rules.zero == 2:
        return Access.GATHER_ONCE_SCATTER_EARLY, None
    elements = trees.num_elements(shape)
    if elements < rules.persistence_threshold:
        return Access.GATHER_ONCE, (
            f"fewer elements than persistence_threshold {rules.persistence_threshold}: "
            "gathered once per step"
        )
    reason = (
        None
        if reads_lazily
        else "a model of functions (init, apply) gathers all parameters when apply starts"
    )
    return Access.GATHER_ON_USE, reason


def _stack_dims(shape: Shape, reads: frozenset[Shape] | None) -> tuple[int, str | None]:
    """Returns (number of leading dimensions that a scan over layers removes, reason why the
    parameter is not gathered on use or None)."""
    if not reads:
        return 0, "is never read by the loss"
    for read in reads:
        if read != shape[len(shape) - len(read) :]:
            return 0, f"is read with shape {list(read)}, not a trailing slice of {list(shape)}"
    return len(shape) - min(map(len, reads)), None


def _check_rows(
    name: str, shape: Shape, rows: tuple[int, ...], axis_sizes: Mapping[str, int]
) -> None:
    """Asserts that `rows` contains each layer of a stack once, and that the number of stages
    divides the number of rows."""
    held = sorted(layer for layer in rows if layer >= 0)
    assert held == list(range(shape[0])), (name, shape, rows)
    assert len(rows) % axis_sizes[STAGE] == 0, (name, rows, dict(axis_sizes))


def _check_stack(
    name: str, axes: tuple[str | None, ...], stack_dims: int, barrier: str | None
) -> None:
    """Raises if a pipeline stage cannot store only its own layers of a parameter."""
    if stack_dims == 0:
        why = barrier or "is read whole"
        raise ValueError(
            f"{name} is stacked over the layers of the pipeline, but {why}; read it inside the "
            "layer loop only, one layer at a time, or use stage=1"
        )
    if axes[0] is not None:
        raise ValueError(
            f"{name}: its tensor-parallel rule splits dim 0 over {axes[0]}, but dim 0 counts the "
            "layers, which the pipeline splits; a rule has one entry for each dimension of one "
            "layer, so remove its first entry, or set stage=1 in the mesh"
        )


def _check_experts(name: str, axes: tuple[str | None, ...], dim: int) -> None:
    """Raises if a tensor-parallel rule splits the dimension of experts over a second axis."""
    if axes[dim] is not None:
        raise ValueError(
            f"{name}: its tensor-parallel rule splits dim {dim} over {axes[dim]}, and dim {dim} "
            f"holds the experts, which `{EXPERT}` splits; use null for that dimension in the rule "
            "and split the width of each expert, or use expert=1"
        )


def _with_experts(axes: tuple[str | None, ...], dim: int) -> tuple[str | None, ...]:
    """Returns `axes`, the mesh axis of each dimension, with `expert` at dimension `dim`."""
    taken = list(axes)
    taken[dim] = EXPERT
    return tuple(taken)


def _zero_dim(
    shape: Shape,
    axes: tuple[str | None, ...],
    stack_dims: int,
    shards: int,
    over: str,
    codes: WeightCodes | None,
) -> tuple[int | None, int | None, str | None]:
    """Chooses the dimension of a parameter that ZeRO shards.

    Returns:
      (negative dimension or None, its stored size, reason if a dimension is padded or none can be
      sharded).
    """
    free = [i for i in range(stack_dims, len(shape)) if axes[i] is None and shape[i] > 0]
    if codes is not None and shape[codes.dim] % (shards * BLOCK):
        free = [i for i in free if i != len(shape) + codes.dim]
    if not free:
        other = f" or cut between {codes.kind} blocks" if codes is not None else ""
        return (
            None,
            None,
            (f"all dimensions are layers or split by tensor parallelism{other}: not sharded"),
        )
    divisible = [i for i in free if shape[i] % shards == 0]
    index = max(divisible or free, key=lambda i: shape[i])
    padded = -(-shape[index] // shards) * shards
    reason = None
    if not divisible:
        reason = f"dim {index} of {shape[index]} is padded to {padded}, a multiple of {over}"
    return index - len(shape), padded, reason


def place_model(
    model: tracing.Model,
    params: Mapping[str, Any],
    trace: tracing.ModelTrace,
    settings: MeshConfig,
    mesh: Mesh | AbstractMesh,
    *,
    freeze: tuple[str, ...],
    freeze_codes: str | None,
    stacked: frozenset[str],
    layout: PipelineLayout | None,
    stacks: Mapping[str, tuple[str, ...]] | None = None,
    expert_dims: Mapping[str, int] | None = None,
    lookups: Mapping[str, RowReads] | None = None,
) -> Placement:
    """Makes the placement table of a model's parameters.

    Args:
      model: model that is trained.
      params: {name: shape and dtype of the parameter}.
      trace: trace of the loss on one microbatch.
      settings: mesh options.
      mesh: the device mesh.
      freeze: regular expressions on names of parameters that are not trained.
      freeze_codes: how frozen kernels are quantized; None: they are not.
      stacked: names of the parameters that a pass reads layer by layer, even if the model reads
        them otherwise.
      layout: pipeline layout; None without a pipeline.
      stacks: {stacked parameter of rolled layers: the user's names of its rows}, which patterns
        match.
      expert_dims: {name: dimension of experts (negative), which is split over `expert`}.
      lookups: {lookup table: number of rows looked up}.
    """
    integers = {
        name: f"{leaf.dtype.name} has no gradient: frozen and not sharded"
        for name, leaf in params.items()
        if not jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    barriers, read_shapes = dict(trace.barriers), dict(trace.read_shapes)
    # Parameters that are read as a whole, but used only by the loop, which slices them.
    early = [name for name in stacked if params[name].shape in read_shapes.get(name, ())]
    barriers |= dict.fromkeys(early, "is read before the loop over layers")
    if why := _why_not_in_branches(settings):
        barriers |= {name: why for name in trace.in_branches if name not in barriers}
    read_shapes |= {name: frozenset([params[name].shape[1:]]) for name in early}
    if settings.fixed_pieces is not None:
        again = "is read more than once, but its gradient needs a fixed order of sums"
        repeated = dict.fromkeys(_read_repeatedly(params, trace), again)
        barriers = repeated | barriers
    rules = settings.rules
    if rules is not None:
        rows = itertools.chain.from_iterable((stacks or {}).values())
        trees.match_names([*params, *rows], [pattern for pattern, _ in rules], option="rules")
    else:
        rules = models.bound_attribute(model, "tensor_parallel_rules") or ()
    return place_parameters(
        {name: tuple(leaf.shape) for name, leaf in params.items()},
        read_shapes,
        mesh.shape,
        PlacementRules(
            zero=settings.zero,
            tensor_parallel=rules if mesh.shape[MODEL] > 1 else (),
            freeze=freeze,
            freeze_codes=freeze_codes,
            persistence_threshold=settings.persistence_threshold,
            fixed_pieces=settings.fixed_pieces,
            stacks=stacks or {},
            expert_dims=expert_dims or {},
            lookups=lookups or {},
        ),
        always_frozen=integers,
        barriers=barriers,
        reads_lazily=model.reads_lazily,
        mapped_dims=trace.mapped_dims,
        layer_rows=None if layout is None else dict.fromkeys(stacked, layout.rows),
        eight_bits=trace.eight_bits if settings.wire.weights == "fp8" else (),
        line_of=lambda name: line_of_read(trace.jaxpr.jaxpr, {name}),
    )


def _why_not_in_branches(settings: MeshConfig) -> str | None:
    """Returns the reason why collectives must not be inside branches, even if all devices take the
    same branch; None if they may be."""
    inside = "is read inside `cond`, and"
    if settings.stage > 1:
        return f"{inside} pipeline stages run different microbatches at the same time"
    if not settings.offload.is_off:
        return f"{inside} offload cannot move state inside branches"
    if settings.deterministic:
        return f"{inside} deterministic={settings.deterministic} cannot sum inside branches"
    if settings.wire.weights != "compute":
        return f"{inside} wire.weights cannot quantize values inside branches"
    return None


def _read_repeatedly(params: Mapping[str, Any], trace: tracing.ModelTrace) -> list[str]:
    """Returns the names of parameters that are read twice: tied weights, or parameters that are
    read as a whole inside a loop."""
    found: dict[str, bool] = {}
    for read in marked_reads(trace.jaxpr.jaxpr):
        sliced = len(params[read.name].shape) - len(read.shape) - read.mapped_dims
        found[read.name] = read.name in found or read.loops > sliced
    return [name for name, again in found.items() if again]


@dataclass(frozen=True)
class StraightPiece:
    """Part of a program without a loop: between two loops that read parameters, or inside the body
    of one.

    Attributes:
      names: names of the parameters that the part reads.
      in_loop: whether the part is inside a loop.
    """

    names: frozenset[str]
    in_loop: bool


def straight_pieces(program: Jaxpr) -> list[StraightPiece]:
    """Splits a traced loss at its loops; returns the parts that read parameters.

    Args:
      program: a jaxpr with a mark at every read of a parameter.
    """
    pieces: list[StraightPiece] = []

    def walk(program: Jaxpr, names: set[str], in_loop: bool) -> set[str]:
        """Adds finished straight-line parts to `pieces`; returns the parameter names of the
        unfinished part.
        """
        for equation in program.eqns:
            name = read_name(equation)
            if name is not None:
                names.add(name)
            loops = equation.primitive.name in ("scan", "while")
            for inner in inner_programs(equation.params):
                if not loops:
                    names = walk(inner, names, in_loop)
                elif found := _finished(inner):
                    pieces.append(StraightPiece(frozenset(names), in_loop))
                    pieces.extend(found)
                    names = set()
        return names

    def _finished(inner: Jaxpr) -> list[StraightPiece]:
        """Returns the straight-line parts inside the body of a loop."""
        return [StraightPiece(piece.names, True) for piece in straight_pieces(inner)]

    last = walk(program, set(), False)
    pieces.append(StraightPiece(frozenset(last), False))
    return [piece for piece in pieces if piece.names]


def unrolled(
    placement: Placement, pieces: Sequence[StraightPiece], *, gradients: bool = False
) -> frozenset[str]:
    """Returns the names of parameters that exist whole at the same time outside of loops.

    The result is empty if these are not most of the parameters that are gathered so.

    Args:
      placement: placement table.
      pieces: parts of the traced loss without loops.
      gradients: False: weights that are gathered on use. True: gradients that are scattered early,
        of weights that are gathered once.
    """
    access = Access.GATHER_ONCE_SCATTER_EARLY if gradients else Access.GATHER_ON_USE
    chosen = {n for n, leaf in placement.leaves.items() if leaf.access is access}
    straight: frozenset[str] = frozenset().union(*(p.names for p in pieces if not p.in_loop))
    found = straight & chosen
    sizes = {name: trees.num_elements(placement.leaves[name].shape) for name in chosen}
    several = len(found) > 1 and 2 * sum(map(sizes.__getitem__, found)) > sum(sizes.values())
    return frozenset(found) if several else frozenset()
