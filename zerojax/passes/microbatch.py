"""Runs one microbatch through the model, and builds the `shard_map` region of a pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.models.losses import as_sums
from zerojax.operators.context import ContextSplit, sequences_split
from zerojax.operators.routed_experts import experts_split_over
from zerojax.operators.whole_batch import batch_axes, batch_split_over
from zerojax.optim.precision import Precision
from zerojax.placement.device_mesh import CONTEXT, DATA_AXES, EXPERT, MANUAL_AXES, MODEL, PASS_AXES
from zerojax.placement.state import dtype_in_loss
from zerojax.placement.state_layout import OffloadLayout, PipelineLayout, WeightTiles
from zerojax.placement.table import Placement
from zerojax.tracing.protocol import Loss, Model, on_batch
from zerojax.tracing.trees import path_name
from zerojax.transport.collective_order import in_program_order
from zerojax.transport.sums import TreeOrder
from zerojax.zoo.layers import activation_rules

Arrays = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PassConfig:
    """Configuration of forward and backward pass over a batch.

    Attributes:
      model, loss: model and loss function to run.
      mesh: mesh of the devices; an `AbstractMesh` suffices for tracing and lowering.
      placement, precision: placement of parameters, and dtypes in which they are read and reduced.
      num_microbatches: number of microbatches into which each device's rows are divided, for
        gradient accumulation.
      reduce_bucket_size, allgather_bucket_size: largest number of elements per collective.
      sequence_sharding: whether the residual stream is sharded over `model` along the sequence.
      exact_leaves: names of the floating-point leaves of the batch whose exact values matter.
      unroll: whether loops over layers are unrolled.
      scale_layers: function (function of the parameters, parameters in its closure) that returns
        the function with a further argument: the scale of each layer, 0 for one that is left out.
        None: layers have no scales.
      regather: whether stage 3 gathers parameters again in the backward pass instead of keeping
        them.
      pipeline: distribution of the layers over pipeline stages; None if there is one stage.
      context: distribution of sequences over the mesh axis `context`; None if sequences are not
        split.
      before_cut: function that prepares a batch so that its sequences can be split; None if they
        are not split.
      offload: layout of state outside device memory; None if there is none.
      fixed_pieces: number of pieces into which the batch is divided on any number of devices, for
        equal bits; None: the batch is divided by devices only.
      metrics: names of the metrics that the loss returns, sorted.
      tiles: {name: tiles} of the layer weights that are gathered tile by tile
        (`offload.tile_bytes`).
      counted: names of the extras (non-parameter arrays) to which a pass adds sums over the batch
        (see `model_state`).
    """

    model: Model
    loss: Loss
    mesh: Mesh | AbstractMesh
    placement: Placement
    precision: Precision
    num_microbatches: int
    reduce_bucket_size: int
    allgather_bucket_size: int
    sequence_sharding: bool
    regather: bool
    pipeline: PipelineLayout | None = None
    context: ContextSplit | None = None
    before_cut: Callable[[Arrays], Arrays] | None = None
    offload: OffloadLayout | None = None
    fixed_pieces: int | None = None
    metrics: tuple[str, ...] = ()
    counted: frozenset[str] = frozenset()
    exact_leaves: frozenset[str] = frozenset()
    unroll: bool = False
    scale_layers: Callable[[Callable[..., Any], Sequence[Any]], Callable[..., Any]] | None = None
    tiles: Mapping[str, WeightTiles] = dataclasses.field(default_factory=dict)

    @property
    def tree(self) -> TreeOrder | None:
        """Fixed order in which gradients are summed; None if the order is free.

        From stage 2 on, the gradients of each virtual shard are exchanged separately, so the sum
        over devices comes first. Below stage 2, a device's gradients are summed before they are
        exchanged.
        """
        if self.fixed_pieces is None:
            return None
        early = self.placement.zero >= 2
        return TreeOrder.HIGHEST_FIRST if early else TreeOrder.LOWEST_FIRST


def cast_batch(batch: Arrays, precision: Precision, exact: Collection[str]) -> Arrays:
    """Casts the leaves of a batch to the dtypes in which the loss gets them (`dtype_in_loss`)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.astype(
            dtype_in_loss(x.dtype, precision, is_exact=path_name(path) in exact)
        ),
        batch,
    )


def split_batch(batch: Arrays, number: int) -> Arrays:
    """Reshapes [rows, ...] to [microbatches, rows, ...]."""
    return jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), batch)


def shard_key(key_data: jax.Array) -> jax.Array:
    """Folds the index of this data shard into the step's key, so that shards have different dropout
    masks.
    """
    index = lax.axis_index(PASS_AXES)
    return jax.random.fold_in(jax.random.wrap_key_data(key_data), index)


def cut_batch(config: PassConfig, batch: Arrays) -> tuple[Arrays, P]:
    """Prepares a batch for the pass: returns (batch, its partition spec).

    Rows are sharded over the data axes and tokens over `context`. Tokens are permuted to the order
    of the devices that hold them. Of unsplit rows, a device stores only integer arrays.
    """
    if config.context is None or config.before_cut is None:
        return batch, P(DATA_AXES)
    return jax.tree.map(config.context.in_order, config.before_cut(batch)), P(DATA_AXES, CONTEXT)


def run_microbatch(
    config: PassConfig,
    values: Arrays,
    extras: Arrays,
    key: jax.Array,
    batch: Arrays,
    on_read: Mapping[str, Any],
    *,
    train: bool,
) -> tuple[Arrays, Arrays]:
    """Runs one microbatch with the given parameter values.

    Returns:
      (sums of loss and metrics, see `losses.as_sums`; extras (non-parameter arrays) afterwards).
    """
    assert batch_axes() != (), "a pass has to be traced inside of `over_batch`"
    rules = {"sequence": MODEL} if config.sequence_sharding else None
    batch = cast_batch(batch, config.precision, config.exact_leaves)
    with activation_rules(rules), sequences_split(config.context):
        result, after = config.model.run(
            values,
            extras,
            key,
            on_batch(config.loss, batch),
            train=train,
            on_read=on_read,
        )
    return as_sums(result), after


def map_gradients(
    config: PassConfig,
    local: Callable[..., tuple[Arrays, Arrays, Arrays]],
    *,
    unsummed: Collection[str] = (),
) -> Callable[..., tuple[Arrays, Arrays, Arrays]]:
    """Maps the gradient function of one device over the mesh by `shard_map` (see
    `build_gradients`).

    Args:
      config: configuration of the pass.
      local: function of one device, `(params, frozen, extras, key_data, batch, loss_factor) ->
        (sums, grads, extras)`. `grads` is sharded like `params`; `sums` and `extras` are the same
        on every device. If there are copies of weights (`LeafPlacement.delta_codes`), it also takes
        the keyword `copies`; if layers have scales, the keyword `scales`.
      unsummed: names of gradients that are not summed over devices; `local` returns them as [1,
        ...].
    """

    def gradients(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        key_data: jax.Array,
        batch: Arrays,
        loss_factor: jax.Array | None = None,
        copies: Arrays | None = None,
        scales: jax.Array | None = None,
    ) -> tuple[Arrays, Arrays, Arrays]:
        specs = specs_of(config, params), specs_of(config, frozen)
        batch, rows = cut_batch(config, batch)
        grads = {n: P(PASS_AXES) if n in unsummed else spec for n, spec in specs[0].items()}
        mapped = jax.shard_map(
            in_program_order(over_batch(config, _with_keywords(local)), config.mesh),
            mesh=config.mesh,
            in_specs=(*specs, P(), P(), rows, P(), P()),
            out_specs=(P(), grads, P()),
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        keywords = {"copies": copies, "scales": scales}
        return mapped(params, frozen, extras, key_data, batch, loss_factor, keywords)

    return gradients


def map_forward(
    config: PassConfig,
    local: Callable[..., Arrays],
) -> Callable[..., Arrays]:
    """Maps the forward function of one device over the mesh by `shard_map`, like
    `map_gradients`.
    """

    def forward(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        key_data: jax.Array,
        batch: Arrays,
        copies: Arrays | None = None,
    ) -> Arrays:
        specs = specs_of(config, params), specs_of(config, frozen)
        batch, rows = cut_batch(config, batch)
        mapped = jax.shard_map(
            in_program_order(over_batch(config, _with_keywords(local)), config.mesh),
            mesh=config.mesh,
            in_specs=(*specs, P(), P(), rows, P()),
            out_specs=P(),
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        return mapped(params, frozen, extras, key_data, batch, {"copies": copies})

    return forward


def _with_keywords(local: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `local` with its last argument, a dict, passed as keywords without the None
    values.
    """

    @functools.wraps(local)
    def taking(*args: Tree) -> Any:
        *others, keywords = args
        given = {name: value for name, value in keywords.items() if value is not None}
        return local(*others, **given)

    return taking


def over_batch(config: PassConfig, local: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `local` so that code inside its trace knows the mesh axes that split batch and experts.

    Inside `local`, `zerojax.batch_sum` sums over devices and `zerojax.experts` has only the
    device's own experts.
    """
    axes = PASS_AXES if config.fixed_pieces is None else None
    axis = EXPERT if config.mesh.shape[EXPERT] > 1 else None

    @functools.wraps(local)
    def traced(*args: Tree) -> Any:
        with batch_split_over(axes), experts_split_over(axis):
            return local(*args)

    return traced


def specs_of(config: PassConfig, arrays: Arrays) -> dict[str, P]:
    """Returns {name: partition spec of a parameter inside the `shard_map`}."""
    return {name: config.placement.leaves[name].manual_spec for name in arrays}
