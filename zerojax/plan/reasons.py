"""Reasons of a plan's decisions, in sentences."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from pallas_kernels.choice import Choice
from zerojax.config import MeshConfig
from zerojax.config.mesh import HOST
from zerojax.models.adapt import bound_attribute
from zerojax.models.protocol import Model
from zerojax.models.trace import ModelTrace
from zerojax.optim import Optimizer
from zerojax.optim.precision import Precision
from zerojax.plan import device_mesh as meshes
from zerojax.plan.device_mesh import MODEL, STAGE
from zerojax.plan.leaf_placement import Access
from zerojax.plan.placement import Placement, straight_pieces, unrolled
from zerojax.plan.state_layout import OffloadLayout


def describe_choices(
    settings: MeshConfig,
    mesh: Mesh | AbstractMesh,
    precision: Precision,
    placement: Placement,
) -> list[str]:
    """What the settings come down to, one sentence each."""
    shards = math.prod(mesh.shape[axis] for axis in meshes.STATE_AXES)
    num_shards = meshes.num_data_shards(mesh)
    split = "the batch is not split" if num_shards == 1 else f"{num_shards} shards of the batch"
    lines = [f"mesh {meshes.describe_mesh(mesh)}: {split}"]
    if shards == 1 and settings.zero and mesh.shape[STAGE] > 1:
        lines.append(
            f"zero={settings.zero} splits only what all pipeline stages read: the data axis has "
            "one device"
        )
    elif shards == 1 and settings.zero:
        lines.append(f"zero={settings.zero} shards nothing: the data axis has one device")
    else:
        roles = ("nothing", "optimizer state", "optimizer state and gradients", "all state")
        lines.append(f"zero={settings.zero}: {roles[settings.zero]} split over {shards} devices")
    model_axis = mesh.shape[MODEL]
    if model_axis > 1 and not any(MODEL in leaf.axes for leaf in placement.leaves.values()):
        lines.append(
            f"model={model_axis} splits nothing, so {model_axis} devices each compute the same: no "
            "rule matches a parameter; pass rules=((pattern, axes), ...), or model=1"
        )
    lines.append(f"precision: {precision.describe()}")
    exceptions = placement.exceptions()
    if exceptions:
        count = len(exceptions)
        found = "1 placement differs" if count == 1 else f"{count} placements differ"
        lines.append(f"{found} from the plain rule: see plan.table()")
    return lines


def describe_deterministic(settings: MeshConfig, num_microbatches: int) -> list[str]:
    """What `deterministic` comes down to, in one sentence."""
    if settings.deterministic is None:
        return []
    count = settings.virtual_shards
    lines = [
        f"deterministic='mesh': the same bits on any number of devices that divides {count}, each "
        f"of which computes {num_microbatches} of {count} virtual shards, one after the other"
    ]
    if settings.zero >= 2:
        lines.append("gradients of each virtual shard are exchanged by themselves")
    elif num_microbatches > 1:
        lines.append("gradients travel as float32 sums, once per step")
    return lines


def describe_model(
    model: Model,
    params: Mapping[str, Any],
    trace: ModelTrace,
    placement: Placement,
    extras: Mapping[str, Any],
    counted: Collection[str],
    precision: Precision,
    regather: bool,
) -> list[str]:
    """What the model does that a reader should know, one sentence each.

    Args:
      model: the model; params: {name: parameter as the model has it}.
      trace: what its forward pass does.
      placement: the table.
      extras: {name: its state besides parameters}; counted: those to which sums are added.
      precision: the dtypes.
      regather: whether the step gathers parameters again in the backward pass.
    """
    lines = []
    if regather:
        lines += _describe_gathers(placement, trace)
    lines += _describe_raised(params, precision)
    unread = [
        n for n in placement.leaves if n not in (trace.read_shapes.keys() | trace.barriers.keys())
    ]
    if unread:
        lines.append(f"{_some(unread, 'parameters')} never read by the loss")
    averaged = [
        name
        for name, leaf in extras.items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        and name not in model.overwritten
        and name not in counted
    ]
    if averaged:
        lines.append(
            f"{_some(averaged, 'arrays')} carried besides parameters: each shard of the batch "
            "updates them from its own rows, then the updates are averaged"
        )
    if counted:
        lines.append(
            f"{_some(sorted(counted), 'arrays')} carried besides parameters as counts: what the "
            "shards of the batch add to them is added up"
        )
    if model.overwritten:
        lines.append(
            f"{_some(sorted(model.overwritten), 'arrays')} overwritten with their gradient: the "
            "largest value over all microbatches and shards of the batch"
        )
    if getattr(bound_attribute(model, "config"), "matmul_dtype", None) == "fp8":
        lines.append(
            "matmuls: fp8 in the layers (e4m3 forward, e5m2 gradients, scales from the steps "
            f"before); attention scores, embedding and head in {precision.compute_dtype.name}"
        )
    return [*lines, *trace.attention]


def _describe_gathers(placement: Placement, trace: ModelTrace) -> list[str]:
    """What is gathered how often at stage 3, and what lives together of it."""
    leaves = placement.leaves.values()
    on_use = [leaf.name for leaf in leaves if leaf.access is Access.GATHER_ON_USE]
    once = sum(leaf.access is Access.GATHER_ONCE for leaf in leaves)
    rest = f"; {once} {'are' if once > 1 else 'is'} gathered once per step and kept" if once else ""
    if not on_use:
        return [f"no parameter is gathered where it is read{rest}"] if once else []
    lines = [
        f"{len(on_use)} of {len(placement.leaves)} parameters are gathered where they are read and "
        f"again in the backward pass, which keeps none of them{rest}"
    ]
    together = unrolled(placement, straight_pieces(trace.jaxpr.jaxpr))
    if together:
        lines.append(
            f"{len(together)} of these are read outside of loops, so that the compiler may gather "
            "all of them at once, and the table counts them so: layers that run in a jax.lax.scan "
            "(zerojax.Stages, flax.linen.scan, nnx.scan) are gathered one at a time"
        )
    return lines


def _describe_raised(params: Mapping[str, Any], precision: Precision) -> list[str]:
    """Which parameters are kept in more bits than the model's own."""
    kept = jnp.dtype(precision.param_dtype)
    lower = [
        name
        for name, leaf in params.items()
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < kept.itemsize
    ]
    if not lower:
        return []
    own = ", ".join(sorted({params[name].dtype.name for name in lower}))
    computed = jnp.dtype(precision.compute_dtype).name
    return [
        f"{_some(lower, 'parameters')} {own} in the model, kept here in {kept.name} and computed "
        f"with in {computed}"
    ]


def _some(names: list[str], things: str) -> str:
    """How many, with an example: "3 parameters (such as a/kernel) are"."""
    verb = "are" if len(names) > 1 else "is"
    return f"{len(names)} {things if len(names) > 1 else things[:-1]} (such as {names[0]}) {verb}"


def describe_update(
    choices: Mapping[str, Choice], tx: Any, stacks: Collection[str], mesh: Mesh | AbstractMesh
) -> list[str]:
    """Which implementation updates parameters, and why; what is done to each layer by itself.

    Args:
      stacks: names of the trained parameters in which layers are stacked.
    """
    chosen = choices["update"]
    on_gpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform in ("gpu", "cuda", "rocm")
    lines = []
    # That no kernel runs says something where one could.
    if on_gpu or chosen.implementation != "xla":
        lines.append(f"optimizer update by {chosen.implementation}: {chosen.reason}")
    statistics = choices["statistics"]
    if statistics.implementation != "xla":
        lines.append(f"gradient statistics by {statistics.implementation}: {statistics.reason}")
    if isinstance(tx, Optimizer) and tx.kernel == "lamb" and stacks:
        each = "each layer" if tx.per_layer else "all layers together (per_layer=False)"
        lines.append(
            f"lamb: one ratio of norms for {each} of {len(stacks)} stacked parameters, such as "
            f"{min(stacks)}; one for each other array"
        )
    return lines


def describe_options(known: Mapping[str, Any], dropped: Mapping[str, str]) -> list[str]:
    """One line per compiler option that was asked for."""
    lines = [f"compiler option {name}={value}" for name, value in known.items()]
    return lines + [f"compiler option {name} is left out: {why}" for name, why in dropped.items()]


def describe_offload(settings: MeshConfig, layout: OffloadLayout | None) -> list[str]:
    """How many parameters have their masters and moments where they were asked for, and why."""
    config = settings.offload
    if layout is None or not (config.moves_opt_state or config.params == HOST):
        return []
    if config.moves_opt_state:
        shares = config.shares
        where = " and ".join(f"{share:.0%} {tier}" for tier, share in shares.items())
        where = next(iter(shares)) if len(shares) == 1 else where
        what = f"offload.opt_state {where}"
    else:
        what = f"offload.params {config.params}"
    largest = max((leaf.slice_elements for leaf in layout.leaves.values()), default=0)
    if not layout.leaves:
        return [
            f"{what} moves nothing: no parameter's shard has offload.min_elements "
            f"{config.min_elements:,}; lower it, or leave offload out"
        ]
    lines = [
        f"{what}: {len(layout.leaves)} parameters, in slices of at most {largest:,} elements; "
        f"{len(layout.kept)} with shards below {config.min_elements:,} elements stay on the device"
    ]
    if layout.streamed:
        lines.append(
            f"offload.params host: the weights of {len(layout.streamed)} parameters come to the "
            "device layer by layer"
        )
    return lines
