"""Describes the reasons of a plan's decisions in sentences, which are part of the plan's page."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from pallas_kernels.choice import SAME_BYTES, Choice
from zerojax.config import MeshConfig
from zerojax.config.mesh import DEVICE, HOST
from zerojax.config.tree_types import Batch
from zerojax.models.adapt import bound_attribute
from zerojax.operators.rounded_weights import FORMATS
from zerojax.optim import Optimizer
from zerojax.optim.precision import Precision
from zerojax.placement import device_mesh as meshes
from zerojax.placement.device_mesh import MODEL, STAGE
from zerojax.placement.expert_axis import describe_experts
from zerojax.placement.state import dtype_in_loss
from zerojax.placement.state_layout import OffloadLayout
from zerojax.placement.table import Placement, straight_pieces, unrolled
from zerojax.plan.fp8_costs import describe_eight_bits
from zerojax.tracing.flops import products, ragged_groups, without_waste
from zerojax.tracing.protocol import Model
from zerojax.tracing.trace import ModelTrace
from zerojax.tracing.trees import flatten_names, format_bytes
from zerojax.tracing.wide_products import find_wide_products
from zerojax.zoo.fp8 import rounded_format
from zerojax.zoo.lora import adapted_kernels


def describe_choices(
    settings: MeshConfig,
    mesh: Mesh | AbstractMesh,
    precision: Precision,
    placement: Placement,
) -> list[str]:
    """Describes the effects of the run's settings, one sentence each."""
    shards = math.prod(mesh.shape[axis] for axis in meshes.STATE_AXES)
    num_shards = meshes.num_data_shards(mesh)
    split = "the batch is not split" if num_shards == 1 else f"{num_shards} shards of the batch"
    lines = [f"mesh {meshes.describe_mesh(mesh)}: {split}"]
    if shards == 1 and settings.zero and mesh.shape[STAGE] > 1:
        lines.append(
            f"zero={settings.zero} splits only embedding and head, which all pipeline stages "
            "have: the data axis has "
            "one device"
        )
    elif shards == 1 and settings.zero:
        lines.append(f"zero={settings.zero} shards nothing: the data axis has one device")
    else:
        roles = ("nothing", "optimizer state", "optimizer state and gradients", "all state")
        lines.append(f"zero={settings.zero}: {roles[settings.zero]} split over {shards} devices")
    lines += describe_experts(mesh, placement)
    model_axis = mesh.shape[MODEL]
    splits = model_axis > 1 and any(MODEL in leaf.axes for leaf in placement.leaves.values())
    if model_axis > 1 and not splits:
        lines.append(
            f"model={model_axis} splits nothing, so {model_axis} devices repeat the same "
            "computation: no "
            "rule matches a parameter; pass rules=, which zerojax.propose_rules(model, mesh, "
            "example_batch=batch) proposes, or model=1"
        )
    lines.append(f"precision: {precision.describe()}")
    compute, reduce = precision.compute_dtype, precision.reduce_dtype
    if splits and jnp.finfo(reduce).bits > jnp.finfo(compute).bits:
        lines.append(
            f"sums over `model` are placed by the compiler in {compute.name}, not in "
            f"reduce_dtype={reduce.name}: those of activations and their gradients, and of the "
            "gradients of parameters that are whole but multiply split values. To sum these "
            "gradients in float32, cast such parameters and values to float32 in the model, or "
            "use precision=fp32; expect.gradients_in=fp32 refuses a step that sums them in "
            f"{compute.name}"
        )
    count = len({name for name, _ in placement.exceptions()})
    if count:
        found = "1 parameter is" if count == 1 else f"{count} parameters are"
        lines.append(
            f"{found} stored differently (for example padded or not sharded): "
            "the section `exceptions` of plan.table() says why"
        )
    return lines


def describe_model(
    model: Model,
    params: Mapping[str, Any],
    trace: ModelTrace,
    placement: Placement,
    extras: Mapping[str, Any],
    counted: Collection[str],
    written: Collection[str],
    precision: Precision,
    regather: bool,
) -> list[str]:
    """Describes properties of the model that a reader should know, one sentence each.

    Args:
      model: the model.
      params: {name: parameter}, in the model's dtypes.
      trace: trace of the model's forward pass.
      placement: placement table.
      extras: {name: array} of the model's state that is not parameters.
      counted: names of the arrays of this state to which sums over the batch are added.
      written: names of the arrays of this state whose new values depend on a shard's rows.
      precision: dtypes of the run.
      regather: whether the step gathers parameters again in the backward pass.
    """
    lines = []
    if regather:
        lines += _describe_gathers(placement, trace)
    lines += [
        *_describe_raised(params, placement, precision),
        *_describe_wide(trace, precision),
    ]
    unread = [
        n for n in placement.leaves if n not in (trace.read_shapes.keys() | trace.barriers.keys())
    ]
    if unread:
        lines.append(f"{_some(unread, 'parameters')} never read by the loss")
    lines += getattr(model, "notes", ())
    if switched := getattr(model, "switched", ()):
        names = ", ".join(switched)
        lines.append(f"{names}: set by the mode (training or evaluation) unless a call passes them")
    lines += _describe_state(model, extras, counted, written)
    if model.step_rules:
        targets = sorted(rule.target for rule in model.step_rules.values())
        lines.append(
            f"{_some(targets, 'arrays')} recomputed once per step, by a rule of the model, from "
            f"the counts of all passes in {_some(sorted(model.step_rules), 'arrays')}"
        )
    if model.overwritten:
        lines.append(
            f"{_some(sorted(model.overwritten), 'arrays')} overwritten with their gradient: the "
            "largest value over all microbatches and shards of the batch"
        )
    matmul_dtype = getattr(bound_attribute(model, "config"), "matmul_dtype", None)
    if matmul_dtype is not None and matmul_dtype != "fp8":
        lines.append(
            f"matmuls: {matmul_dtype}: each pass rounds the kernels of the layers; products in "
            f"{precision.compute_dtype.name}; master weights are not rounded"
        )
        schedule = getattr(bound_attribute(model, "config"), "bit_schedule", None)
        if schedule is not None and not schedule.is_off:
            bits = FORMATS[rounded_format(matmul_dtype)].bits
            lines.append(f"matmuls: {schedule.describe(bits)}")
    if matmul_dtype == "fp8":
        lines.append(
            "matmuls: fp8 in the layers (e4m3 forward, e5m2 gradients, scales from the steps "
            f"before); attention scores, embedding and head in {precision.compute_dtype.name}"
        )
    if (kinds := getattr(bound_attribute(model, "config"), "describe_kinds", None)) is not None:
        lines += kinds()
    lines += describe_eight_bits(trace.jaxpr, precision)
    return [*lines, *trace.attention]


def _describe_state(
    model: Model, extras: Mapping[str, Any], counted: Collection[str], written: Collection[str]
) -> list[str]:
    """Describes how the values that shards give non-parameter state are combined."""
    lines = []
    floating = [
        name
        for name, leaf in extras.items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        and name not in model.overwritten
        and name not in counted
        and name not in {rule.target for rule in model.step_rules.values()}
    ]
    if alike := [name for name in floating if name not in written]:
        lines.append(
            f"{_some(alike, 'arrays')} non-parameter state: new values do not depend on which rows "
            "of the batch a shard has"
        )
    if averaged := [name for name in floating if name in written]:
        lines.append(
            f"{_some(averaged, 'arrays')} non-parameter state: each shard of the batch "
            "updates them from its own rows, then the updates are averaged"
        )
    if counted:
        lines.append(
            f"{_some(sorted(counted), 'arrays')} counts in the non-parameter state: the "
            "additions of all shards of the batch are summed"
        )
    return lines


def _describe_gathers(placement: Placement, trace: ModelTrace) -> list[str]:
    """Describes how often parameters are gathered at stage 3, and which gathered parameters exist
    at the same time."""
    leaves = placement.leaves.values()
    on_use = [leaf.name for leaf in leaves if leaf.access.gathers_on_use]
    once = sum(leaf.access.scatters_late for leaf in leaves)
    rest = (
        f"; {once} {'are' if once > 1 else 'is'} gathered once per step and stored until its end"
        if once
        else ""
    )
    if not on_use:
        return [f"no parameter is gathered on use{rest}"] if once else []
    lines = [
        f"{len(on_use)} of {len(placement.leaves)} parameters are gathered on use in the forward "
        f"pass and again in the backward pass; none is stored in between{rest}"
    ]
    together = unrolled(placement, straight_pieces(trace.jaxpr.jaxpr))
    if together:
        lines.append(
            f"{len(together)} of these are read outside of loops, so that the compiler may gather "
            "all of them at once, as the memory table assumes. Layers that run in a jax.lax.scan "
            "(zerojax.Stages, flax.linen.scan, nnx.scan) are gathered one at a time"
        )
    return lines


def _describe_raised(
    params: Mapping[str, Any], placement: Placement, precision: Precision
) -> list[str]:
    """Describes parameters that are stored in more bits than in the model, or that are float64 in
    the model but not stored so."""
    kept = jnp.dtype(precision.param_dtype)
    lower = [
        name
        for name, leaf in params.items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        and leaf.dtype.itemsize < kept.itemsize
        and not placement.leaves[name].frozen
    ]
    wide = [name for name, leaf in params.items() if leaf.dtype == jnp.float64]
    if wide:
        return [f"{_some(wide, 'parameters')} float64 in the model, stored in {kept.name}"]
    if not lower:
        return []
    own = ", ".join(sorted({params[name].dtype.name for name in lower}))
    computed = jnp.dtype(precision.compute_dtype).name
    return [
        f"{_some(lower, 'parameters')} {own} in the model, stored in {kept.name} and computed "
        f"with in {computed}"
    ]


def describe_batch(batch: Batch, exact: Mapping[str, str], precision: Precision) -> list[str]:
    """Describes which floating-point arrays of a batch are cast, and which are not and why.

    Args:
      batch: tree of structs with the dtypes of the user's batch.
      exact: {leaf whose exact values matter: what the loss does with it}.
    """
    computed, cast = jnp.dtype(precision.compute_dtype), list[str]()
    kept: dict[str, list[str]] = {}
    for name, leaf in flatten_names(batch).items():
        own = jnp.dtype(leaf.dtype)
        if dtype_in_loss(own, precision, is_exact=name in exact) != own:
            cast.append(repr(name))
        elif jnp.issubdtype(own, jnp.floating) and own != computed:
            why = f"kept in {own.name}, because the loss {exact[name]}"
            kept.setdefault(why, []).append(repr(name))
    lines = [f"{', '.join(names)} {why}" for why, names in kept.items()]
    lines += [f"{', '.join(cast)} cast to {computed.name}"] if cast else []
    return [f"batch: {'; '.join(lines)}"] if lines else []


def describe_frozen(
    params: Mapping[str, Any], frozen: Mapping[str, Any], precision: Precision
) -> list[str]:
    """Describes the dtype of parameters that are not trained, and its effect on values.

    Args:
      params: {name: parameter}, in the model's dtypes.
      frozen: {name: parameter without gradient}, as they are stored.
      precision: dtypes of the run.
    """
    kept, trained = precision.frozen_dtype, jnp.dtype(precision.param_dtype)
    floats = [x for x in frozen.values() if jnp.issubdtype(x.dtype, jnp.floating)]
    if not floats or kept == trained:
        return []
    computed = jnp.dtype(precision.compute_dtype)
    many = f"{len(floats)} frozen parameters are" if len(floats) > 1 else "1 frozen parameter is"
    line = f"{many} stored in {kept.name} and computed with in {computed.name}"
    if any(params[name].dtype.itemsize > kept.itemsize for name in frozen):
        line += f": the model's extra precision beyond {kept.name} is lost, in exports too"
        if kept == jnp.float16:
            line += f", and values beyond {jnp.finfo(kept).max:,.0f} become infinite"
        line += "; freeze_dtype=fp32 preserves all values"
    return [line]


def describe_adapters(placement: Placement) -> list[str]:
    """Says that kernels are trained themselves although they have adapters; [] if none is."""
    leaves = placement.leaves
    kernels = sorted(
        name for name in adapted_kernels(leaves) if name in leaves and not leaves[name].frozen
    )
    if not kernels:
        return []
    return [
        f"adapters: {_some(kernels, 'kernels')} trained beside their own adapters, so this run "
        "trains the whole model. To train only the adapters pass freeze=lora.freeze, which the "
        "LoraConfig gives; the model of a folder of adapters has the same attribute"
    ]


WIDE_ENOUGH = 0.1
"""Share of FLOPs above which float32 products are reported; the float32 products of attention
itself are below it at most lengths."""
WIDE_PRODUCTS = "products: "
"""First words of the reason about products that have float32 operands."""


def _describe_wide(trace: ModelTrace, precision: Precision) -> list[str]:
    """Describes the share of products in float32 despite a 16-bit compute dtype; returns [] if it
    is small."""
    computed = jnp.dtype(precision.compute_dtype)
    if computed.itemsize >= 4:
        return []
    found = find_wide_products(trace.jaxpr)
    if found is None or found.share < WIDE_ENOUGH:
        return []
    cause = "" if found.cause is None else f", because {found.cause}"
    return [
        f"{WIDE_PRODUCTS}{found.share:.0%} of their FLOPs take float32 operands, which run at "
        f"float32's rate and keep twice the bytes for the backward pass{cause}; for "
        f"{computed.name} give that layer dtype=jnp.{computed.name}, or cast what it returns"
    ]


def _some(names: list[str], things: str) -> str:
    """Returns a count with one example, such as "3 parameters (such as a/kernel) are"."""
    verb = "are" if len(names) > 1 else "is"
    return f"{len(names)} {things if len(names) > 1 else things[:-1]} (such as {names[0]}) {verb}"


def describe_update(
    choices: Mapping[str, Choice],
    tx: optax.GradientTransformation,
    stacks: Collection[str],
    params: Mapping[str, Any],
    mesh: Mesh | AbstractMesh,
) -> list[str]:
    """Describes the implementation of the optimizer's update and its reason, and how it handles
    stacked layers.

    Args:
      choices: {"update" and "statistics" (of the gradients): implementation and reason}.
      tx: the optimizer.
      stacks: names of parameters in which layers are stacked.
      params: {name: trained parameter}, as they are stored.
      mesh: mesh of the plan.
    """
    chosen = choices["update"]
    on_gpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform in ("gpu", "cuda", "rocm")
    lines, stacks = [], params.keys() & set(stacks)
    # Report a missing kernel only where one could run.
    if on_gpu or chosen.implementation != "xla":
        lines.append(f"optimizer update by {chosen.implementation}: {chosen.reason}")
        measured = isinstance(tx, Optimizer) and tx.begin is not None
        if measured and chosen.reason.startswith(SAME_BYTES):
            lines[-1] += (
                f"; both launch a kernel for each of {len(params)} arrays. With tune=auto a run "
                "measures both on its GPUs"
            )
    statistics = choices["statistics"]
    if statistics.implementation != "xla":
        lines.append(f"gradient statistics by {statistics.implementation}: {statistics.reason}")
    if isinstance(tx, Optimizer) and tx.kernel == "lamb" and stacks:
        each = "each layer" if tx.per_layer else "all layers together (per_layer=False)"
        lines.append(
            f"lamb: one trust ratio for {each} of {len(stacks)} stacked parameters, such as "
            f"{min(stacks)}; one for every other array"
        )
    return lines


def describe_ragged(trace: ModelTrace, mesh: Mesh | AbstractMesh) -> list[str]:
    """Describes in one sentence the cost of `jax.lax.ragged_dot` products on NVIDIA GPUs.

    XLA copies each row into a row that is longer by the number of groups and padded with zeros, and
    multiplies it with the matrices of all groups. Compiled for H100 with jax 0.10.2 and 0.12.0, 8
    groups: 8.0 times the FLOPs, forward and in both products of the backward pass.
    """
    if not meshes.has_nvidia_gpus(mesh):
        return []
    needed = without_waste(trace.jaxpr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loop without a known length counts once
        by_groups = ragged_groups(needed)
        total = sum(flops for _, flops in products(needed))
    if not by_groups:
        return []
    groups = max(by_groups, key=lambda number: number * by_groups[number])
    share = sum(by_groups.values()) / total
    return [
        f"jax.lax.ragged_dot with {groups} groups: XLA for NVIDIA GPUs multiplies each row with "
        f"the matrices of all groups, {groups} times the arithmetic, in the backward pass too "
        f"({share:.0%} of the FLOPs of all products, counted once); zerojax.experts takes "
        "batched products with the same number of rows for each expert"
    ]


def describe_options(known: Mapping[str, Any], dropped: Mapping[str, str]) -> list[str]:
    """Describes each compiler option that the plan chose, used or left out, in one line."""
    lines = [f"compiler option {name}={value}" for name, value in known.items()]
    return lines + [f"compiler option {name} is not used: {why}" for name, why in dropped.items()]


def describe_offload(settings: MeshConfig, layout: OffloadLayout | None) -> list[str]:
    """Describes how many parameters are in the requested tier, and why."""
    config = settings.offload
    if layout is None or not (config.moves_opt_state or config.params != DEVICE):
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
            f"{what} has no effect: no parameter's shard has offload.min_elements "
            f"{config.min_elements:,}; lower it, or leave offload out"
        ]
    limit = f"{config.min_elements:,} elements"
    stay = f"; {len(layout.kept)} with shards below {limit} stay on the device"
    lines = [
        f"{what}: {len(layout.leaves)} parameters, in slices of at most {largest:,} elements"
        + stay * bool(layout.kept)
    ]
    if layout.in_forward:
        lines.append(
            f"offload.update_in_forward: {len(layout.delayed)} parameters of layers are updated in "
            "the forward pass of the next step, and all others before it; between steps the last "
            "update waits for it, or for build_finish"
        )
    elif layout.delayed:
        beside = sum(bool(layout.beside_a_layer(name)) for name in layout.leaves)
        lines.append(
            f"offload.delayed_update: {len(layout.delayed)} parameters of layers, and slices of "
            f"{beside} others, are updated in the backward pass of the next step; weights are one "
            "step behind"
        )
    elif layout.by_layer:
        lines.append(
            f"offload.params {config.params}: the weights of {len(layout.by_layer)} parameters "
            "are copied to the device layer by layer"
        )
    outer = [leaf for name, leaf in layout.leaves.items() if name not in layout.by_layer]
    in_pass = layout.in_forward or layout.updated_in_pass - layout.delayed
    if in_pass and any(x.counts[HOST] for x in outer):
        size, total = (
            sum(math.prod(leaf.shard_shape) for leaf in leaves)
            for leaves in (outer, layout.leaves.values())
        )
        share = math.ceil(1000 * size / total) / 1000
        when = "before the forward" if layout.in_forward else "after the backward"
        lines.append(
            f"the optimizer state of {len(outer)} parameters outside of the layers "
            f"({format_bytes(4 * size * len(layout.arrays))} per device) is updated {when} pass; "
            f"offload.opt_state={{device: {share:g}, host: {1 - share:g}}} keeps it on the device"
        )
    return lines
