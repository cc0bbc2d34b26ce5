"""Plans offload: which parameters, in how many slices, and the memory of each slice; raises for
unsupported settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from zerojax.config import MeshConfig
from zerojax.config.mesh import DEVICE, HOST, NVME, SLICE_ELEMENTS, TIERS, OffloadConfig
from zerojax.config.tree_types import Batch, Tree
from zerojax.models.losses import as_sums
from zerojax.optim import Optimizer
from zerojax.optim.precision import Precision
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.placement.state_layout import MASTER, OffloadLayout, SlicedLeaf
from zerojax.placement.table import Placement, axes_of_spec
from zerojax.tracing import trees
from zerojax.tracing.loops import LossPieces, cut_loss
from zerojax.tracing.protocol import Loss, Model, on_batch

MAX_SLICES = 2**16
"""Largest number of slices of a device's state. Each slice is a separate transfer and update,
measured on a CPU to take at least 0.3 ms, so that this number of slices takes 20 s of every
step."""

Arrays = Mapping[str, Any]


def plan_offload(
    config: OffloadConfig,
    placement: Placement,
    precision: Precision,
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    *,
    stacked: frozenset[str] = frozenset(),
) -> OffloadLayout | None:
    """Plans the state that is stored outside device memory; returns None without offload.

    Args:
      config: requested settings of offload.
      placement: placement table.
      precision: dtypes of the run, which say whether there are float32 master weights.
      tx: the optimizer.
      mesh: the device mesh.
      stacked: names of the parameters that the loop over layers reads layer by layer.

    Raises:
      ValueError: there are too many slices.
    """
    if config.is_off:
        return None
    by_layer = config.by_layer
    trained = [leaf for leaf in placement.leaves.values() if not leaf.frozen]
    streamed, kept, sliced = [], [], []
    for leaf in placement.leaves.values() if by_layer else ():
        if leaf.name not in stacked:
            continue
        reason = _why_not_streamed(leaf)
        if reason is None:
            streamed.append(leaf)
        else:
            kept.append((leaf.name, reason))
    for leaf in trained if config.moves_opt_state else streamed:
        shard = _shard_shape(leaf, mesh)
        if trees.num_elements(shard) < config.min_elements:
            kept.append((leaf.name, _why_small(trees.num_elements(shard), config.min_elements)))
        else:
            sliced.append((leaf, shard))
    names = {leaf.name for leaf, _ in sliced}
    _check_number_of_slices(sliced, config)
    layers = frozenset(leaf.name for leaf in streamed if leaf.name in names)
    place = {HOST: "streamed", NVME: "paged", DEVICE: "delayed"}[config.params]
    where = {name: frozenset() for name in ("streamed", "paged", "delayed")}
    return OffloadLayout(
        leaves=_share_out(sliced, config, mesh, layers),
        arrays=(*((MASTER,) if precision.has_masters else ()), *_moments(tx)),
        **{**where, place: layers},
        in_forward=config.update_in_forward,
        activations=config.activations,
        update_in_backward=config.update_in_backward,
        kept=tuple(kept),
    )


def resliced(
    layout: OffloadLayout, config: OffloadConfig, placement: Placement, mesh: Mesh | AbstractMesh
) -> OffloadLayout:
    """Returns an offload layout of the same parameters with slices of another size.

    Args:
      layout: result of `plan_offload` with settings that differ only in `slice_elements`.
      config: new settings.
      placement, mesh: placement table and mesh of the plan.

    Raises:
      ValueError: there are too many slices.
    """
    leaves = [placement.leaves[name] for name in layout.leaves]
    sliced = [(leaf, _shard_shape(leaf, mesh)) for leaf in leaves]
    _check_number_of_slices(sliced, config)
    return dataclasses.replace(layout, leaves=_share_out(sliced, config, mesh, layout.by_layer))


def _why_not_streamed(leaf: LeafPlacement) -> str | None:
    """Returns the reason why a parameter's layers cannot be copied to the device one by one; None
    if they can."""
    if leaf.frozen:
        return "frozen: only trained parameters are streamed"
    if leaf.axes[0] is not None:
        return f"its layers are split over {leaf.axes[0]}: no device has a whole layer to stream"
    return None


def _why_small(elements: int, limit: int) -> str:
    return f"shard of {elements} elements < offload.min_elements {limit}: stays on the device"


def check_sliced_update(config: OffloadConfig, tx: optax.GradientTransformation) -> None:
    """Raises if offload updates parameters in slices and the optimizer may need whole parameters.

    Raises:
      ValueError: the message states the optimizers that can update slices.
    """
    moves = not config.is_off and (config.moves_opt_state or config.by_layer)
    if not moves or (isinstance(tx, Optimizer) and tx.begin is not None):
        return
    name = tx.kernel if isinstance(tx, Optimizer) else "a plain optax transformation"
    what = (
        f"opt_state={dict(config.shares)}" if config.moves_opt_state else f"params={config.params}"
    )
    raise ValueError(
        f"offload {what} updates each parameter in slices, and the optimizer, {name}, may need all "
        "of a parameter at once; use zerojax.adamw, lion or sgd (not inside optax.chain; in a "
        "ds_config AdamW, Lion, or Adam with adam_w_mode true), or leave opt_state and params on "
        "the device"
    )


def _moments(tx: optax.GradientTransformation) -> tuple[str, ...]:
    return tx.moments if isinstance(tx, Optimizer) else ()


def _shard_shape(leaf: LeafPlacement, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """Returns the shape of a stored parameter on one device."""
    return NamedSharding(mesh, leaf.stored_spec).shard_shape(leaf.stored_shape)


_Sliced = list[tuple[LeafPlacement, tuple[int, ...]]]


def _share_out(
    sliced: _Sliced, config: OffloadConfig, mesh: Mesh | AbstractMesh, layers: frozenset[str]
) -> Mapping[str, SlicedLeaf]:
    """Distributes the slices of all parameters over device, host and files so that the requested
    shares hold for their sum.

    With an update in a pass the state of all layers is in one memory. A share of device
    memory is then for parameters outside of the layers.

    Raises:
      ValueError: that share is larger than the parameters outside of the layers.
    """
    shares = config.shares if config.moves_opt_state else {DEVICE: 1.0}
    outer = [one for one in sliced if one[0].name not in layers]
    inner = [one for one in sliced if one[0].name in layers]
    beside = inner[0][1][0] if config.delayed_update and inner else 0
    if not (config.updates_in_pass and set(shares) == {DEVICE, HOST}):
        if not beside:
            return _in_shares(sliced, config, mesh, shares)
        found = {
            **_in_shares(outer, config, mesh, shares, beside),
            **_in_shares(inner, config, mesh, shares),
        }
        return {leaf.name: found[leaf.name] for leaf, _ in sliced}
    size, total = (sum(trees.num_elements(x) for _, x in found) for found in (outer, sliced))
    share, most = shares[DEVICE], math.ceil(1000 * size / total) / 1000
    if share > most:
        name = config.late_key or "update_in_backward"
        outside = f"{{device: {most:g}, host: {1 - most:g}}}, " if size else ""
        raise ValueError(
            f"offload.opt_state={dict(shares)}: with {name} the optimizer state of all layers is "
            f"in the same memory, and {most:g} of the state is outside of them; use "
            f"offload.opt_state: {outside}host" + ", or device" * (config.late_key is None)
        )
    here = min(1.0, share * total / size)
    found = {
        **_in_shares(outer, config, mesh, {DEVICE: here, HOST: 1 - here}, beside),
        **_in_shares(inner, config, mesh, {HOST: 1.0}),
    }
    return {leaf.name: found[leaf.name] for leaf, _ in sliced}


def _in_shares(
    sliced: _Sliced,
    config: OffloadConfig,
    mesh: Mesh | AbstractMesh,
    shares: Mapping[str, float],
    beside: int = 0,
) -> dict[str, SlicedLeaf]:
    """Distributes slices over memories; with `beside`, they are updated beside so many layers."""
    # Target and assigned elements per tier, over the leaves so far.
    wanted, given = dict.fromkeys(shares, 0.0), dict.fromkeys(shares, 0)
    result = {}
    for leaf, shard in sliced:
        size = trees.num_elements(shard)
        elements = _elements_of_slice(leaf, shard, config, config.slice_limit, beside)
        left = count = size // elements
        counts = dict.fromkeys(TIERS, 0)
        for tier, share in shares.items():
            wanted[tier] += share * size
            fit = round((wanted[tier] - given[tier]) / elements)
            counts[tier] = min(max(fit, 0), left)
            left -= counts[tier]
            given[tier] += counts[tier] * elements
        last = list(shares)[-1]
        counts[last] += left
        given[last] += left * elements
        assert sum(counts.values()) == count
        axes = axes_of_spec(leaf.stored_spec)
        over = tuple(axis for axis in mesh.axis_names if axis in axes and mesh.shape[axis] > 1)
        result[leaf.name] = SlicedLeaf(
            name=leaf.name,
            shard_shape=shard,
            axes=over,
            num_shards=math.prod(mesh.shape[axis] for axis in over),
            slice_elements=elements,
            counts=counts,
        )
    return result


def _elements_of_slice(
    leaf: LeafPlacement,
    shard: tuple[int, ...],
    config: OffloadConfig,
    limit: int,
    beside: int = 0,
) -> int:
    if beside:
        return slice_elements_beside(trees.num_elements(shard), beside, limit)
    layers = shard[0] if leaf.stack_dims else 1
    layer = trees.num_elements(shard) // layers
    whole_layers = config.updates_in_pass or config.update_in_backward or config.params == NVME
    return slice_elements(layer, layers, limit, whole_layers=whole_layers)


def _check_number_of_slices(
    sliced: list[tuple[LeafPlacement, tuple[int, ...]]], config: OffloadConfig
) -> None:
    def count(limit: int) -> int:
        return sum(
            trees.num_elements(shard) // _elements_of_slice(leaf, shard, config, limit)
            for leaf, shard in sliced
        )

    found, limit = count(config.slice_limit), config.slice_limit
    if found <= MAX_SLICES:
        return
    while count(limit) > MAX_SLICES and limit < 2**62:
        limit = 2 ** limit.bit_length()
    remedy = (
        f"use slice_elements={limit} or more (the default is {SLICE_ELEMENTS})"
        if count(limit) <= MAX_SLICES
        else "raise min_elements, so that small parameters stay on the device"
    )
    raise ValueError(
        f"offload.slice_elements={config.slice_limit} cuts the state of a device into {found:,} "
        f"slices, and the limit is {MAX_SLICES:,}: each is a separate transfer; {remedy}"
    )


def slice_elements(layer: int, layers: int, limit: int, *, whole_layers: bool) -> int:
    """Returns the number of elements of one slice: as many as the limit allows.

    Args:
      layer: number of elements of one layer in a shard.
      layers: number of layers.
      limit: largest number of elements of a slice. A layer without a suitable divisor is one slice.
      whole_layers: whether a slice is at most one layer.

    >>> slice_elements(1000, 24, 300, whole_layers=False)
    250
    >>> slice_elements(1000, 24, 9000, whole_layers=False)
    8000
    """
    if layer > limit:
        fewest = -(-layer // limit)
        parts = next((n for n in range(fewest, 8 * fewest + 1) if layer % n == 0), 1)
        return layer // parts
    if whole_layers:
        return layer
    together = max(n for n in range(1, layers + 1) if layers % n == 0 and n * layer <= limit)
    return together * layer


def slice_elements_beside(elements: int, layers: int, limit: int) -> int:
    """Returns the number of elements of a slice of which each iteration of a loop over layers
    updates the same number, so that as few slices as possible are left.

    Args:
      elements: number of elements of a shard.
      layers: number of layers.
      limit: largest number of elements of a slice.

    >>> slice_elements_beside(65_536_000, 22, 2**24)  # 640 slices, of which 2 are left
    102400
    """
    fewest = max(layers, -(-elements // limit))
    counts = [n for n in range(fewest, 64 * fewest + 1) if elements % n == 0]
    count = min(counts, key=lambda n: (n % layers) / n, default=1)
    return elements // count


def find_stacked(
    settings: MeshConfig, model: Model, loss: Loss, arrays: tuple[Arrays, Arrays, Any]
) -> frozenset[str]:
    """Returns the names of the parameters that the loop over layers reads layer by layer; none if
    no setting needs them.

    Args:
      settings: mesh options.
      model, loss: model that is trained, and its loss.
      arrays: (parameters as they are read, extras, microbatch), as `ShapeDtypeStruct`s.

    Raises:
      ValueError: the layers do not run in one loop, or the model has 8-bit products.
    """
    pieces = cut_into_layers(settings, model, loss, arrays)
    return frozenset() if pieces is None else pieces.stacked


def check_by_layer(settings: MeshConfig) -> None:
    """Raises if layers run one by one, because of offload, in a pipeline.

    Raises:
      ValueError: the message states the remedies.
    """
    if settings.offload.by_layer and settings.stage > 1:
        asked, away = _by_layer(settings)
        raise ValueError(
            f"{asked} cannot be combined with a pipeline of stage={settings.stage} stages: each "
            "runs its layers once per microbatch, and would load them or their state each time; "
            f"use stage=1 (no pipeline), or {away} and put opt_state on the host"
        )


def _by_layer(settings: MeshConfig) -> tuple[str, str]:
    """Returns (the setting because of which layers run one by one, the remedy to leave it out)."""
    asked = settings.offload.by_layer_key
    if settings.offload.late_key is not None:
        return asked, f"leave {asked} out"
    return asked, "leave offload.params on the device"


def cut_into_layers(
    settings: MeshConfig, model: Model, loss: Loss, arrays: tuple[Arrays, Arrays, Any]
) -> LossPieces | None:
    """Splits the loss at its loop over layers; returns None if no setting needs it.

    Args:
      settings: mesh options.
      model, loss: model that is trained, and its loss.
      arrays: (parameters as they are read, extras, microbatch), as `ShapeDtypeStruct`s.

    Raises:
      ValueError: the layers do not run in one loop, or the model has 8-bit products.
    """
    if not settings.offload.by_layer:
        return None
    asked, away = _by_layer(settings)
    does = "streams" if settings.offload.late_key is None else "updates"
    params, extras, batch = arrays
    if model.overwritten:
        raise ValueError(
            f"{asked} cannot be combined with 8-bit products: their scales (such as "
            f"{min(model.overwritten)}) are gradients of the whole loop over layers; use "
            f"matmul_dtype=None, or {away}"
        )

    def run(values: Tree, extras: dict[str, Any], key: jax.Array, batch: Batch) -> Any:
        result, after = model.run(values, extras, key, on_batch(loss, batch))
        return as_sums(result), after

    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        return cut_loss(run, dict(params), dict(extras), key, batch)
    except ValueError as error:
        raise ValueError(
            f"{asked} {does} layers one by one, so it needs layers that pipeline stages could "
            f"divide, and this model does not have them: {error}. Or {away}"
        ) from error


_IN_BACKWARD = "offload.update_in_backward updates a layer as soon as its gradient exists"
_UNDONE = "or offload.params: nvme with durable: true, whose update can be undone"


def check_early_update(
    config: OffloadConfig, precision: Precision, tx: optax.GradientTransformation
) -> None:
    """Raises if an update of layers on the host in the backward pass is requested with settings
    that need all gradients first.

    Layers in files have no such limits: their update can be undone (`durable`).

    Raises:
      ValueError: the message states the conflicting setting and the remedy.
    """
    if not config.update_in_backward or config.params != HOST:
        return
    what, undone = _IN_BACKWARD, _UNDONE
    clip_norm = getattr(tx, "clip_norm", None)
    if clip_norm is not None:
        raise ValueError(
            f"{what}, before the global gradient norm is known, so they cannot be clipped to "
            f"clip_norm={clip_norm:g}; use clip_norm=None, leave update_in_backward out (an update "
            "in host memory could be undone only from a second copy of the optimizer state, 12 "
            f"bytes per parameter), {undone}"
        )
    if precision.loss_scale is not None:
        raise ValueError(
            f"{what}, before a float16 overflow in another layer is detected, so a step cannot be "
            f"undone; use precision bf16 or fp32, {undone}"
        )


def check_update_in_backward(layout: OffloadLayout | None, num_microbatches: int) -> None:
    """Raises if an update of layers on the host in the backward pass is requested but needs
    gradients that do not exist yet, or state that is not at hand.

    Raises:
      ValueError: the message states the conflicting setting and the remedy.
    """
    if layout is None or not layout.update_in_backward:
        return
    what, undone = _IN_BACKWARD, _UNDONE
    if num_microbatches != 1:
        raise ValueError(
            f"{what}, so gradients of num_microbatches={num_microbatches} cannot be accumulated "
            f"first; use num_microbatches=1 and a smaller batch, more data shards, {undone}"
        )
    for name in sorted(layout.streamed & layout.leaves.keys()):
        counts = layout.leaves[name].counts
        tiers = [tier for tier, count in counts.items() if count]
        if len(tiers) > 1 or tiers[0] not in (DEVICE, HOST):
            raise ValueError(
                f"{what}, and {name} has its optimizer state in {' and '.join(tiers)}; all layers "
                "must have it in the same memory: use offload.opt_state: host, or device"
            )


def check_late_update(
    config: OffloadConfig, layout: OffloadLayout | None, num_microbatches: int
) -> None:
    """Raises if an update in the next step is requested but cannot run beside a pass of layers.

    Raises:
      ValueError: the message states the conflicting setting and the remedy.
    """
    name = config.late_key
    if name is None:
        return
    which = "forward" if config.update_in_forward else "backward"
    what = f"offload.{name} updates layers in the {which} pass of the next step"
    if num_microbatches != 1:
        raise ValueError(
            f"{what}, and with num_microbatches={num_microbatches} there are several; use "
            f"num_microbatches=1, or leave {name} out: with that many tokens a step the "
            "update costs less"
        )
    if layout is None or not layout.delayed:
        raise ValueError(
            f"{what}, and no parameter of a layer has a shard of offload.min_elements="
            f"{config.min_elements:,}; lower it, or leave {name} out"
        )


def check_durable(config: OffloadConfig, precision: Precision) -> None:
    """Raises if `durable` is set but a killed run could not continue from its files alone.

    Raises:
      ValueError: the message states the conflicting setting and the remedy.
    """
    if not config.durable:
        return
    remedy = "leave durable out: a killed run then resumes from its last checkpoint"
    others = [tier for tier in config.shares if tier != NVME]
    if others:
        raise ValueError(
            f"offload.durable with opt_state={config.shares}: state in {' and '.join(others)} "
            "memory is lost with the process, so the files alone do not have a whole step; set "
            f"opt_state: nvme, or {remedy}"
        )
    if not precision.has_masters:
        raise ValueError(
            "offload.durable with param_dtype=bfloat16: weights are rebuilt from float32 "
            "master weights in the files, but bfloat16 parameters have none; use "
            "param_dtype=float32, or "
            f"{remedy}"
        )
