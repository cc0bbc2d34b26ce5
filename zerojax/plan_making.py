"""Construction of a plan from a model, a mesh and an example batch, by tracing alone.

An `AbstractMesh` of absent devices does as well. No step is run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as meshes
from zerojax import model as models
from zerojax import optim
from zerojax.abstract_model import abstract, abstract_model, as_read, slice_batch
from zerojax.abstract_state import abstract_state
from zerojax.config import MeshConfig, as_mesh_config
from zerojax.config.checks import as_patterns, check_whole_number
from zerojax.config.keywords import names_keywords
from zerojax.config.recognition import is_deepspeed
from zerojax.distributed import check_joined
from zerojax.layer_inputs import describe_layer_inputs
from zerojax.layer_loop import find_stacks
from zerojax.losses import split_result
from zerojax.mesh import DATA, DATA_AXES, STAGE
from zerojax.offload.abstract import abstract_offloaded, canonical_on_host
from zerojax.offload.disk_checks import check_durable
from zerojax.offload.streaming_checks import check_update_in_backward, find_stacked
from zerojax.placement import straight_pieces, unrolled
from zerojax.plan import Plan
from zerojax.plan_checks import (
    check_batch,
    check_deterministic,
    check_elementwise,
    check_not_per_example,
    check_reads,
    check_trained,
    naming_the_call,
)
from zerojax.plan_decisions import ProgramChoices, TracedLoss
from zerojax.plan_losses import check_loss, check_weight, choose_batch_weight
from zerojax.plan_offload import plan_offload
from zerojax.plan_padding import fit_padding
from zerojax.plan_pieces import check_pieces, describe_pieces, look_at_pieces
from zerojax.plan_pipeline import choose_microbatches, plan_pipeline
from zerojax.plan_placement import place_model
from zerojax.plan_reasons import (
    describe_choices,
    describe_deterministic,
    describe_model,
    describe_offload,
    describe_options,
    describe_update,
)
from zerojax.precision import Precision, as_precision, default_precision
from zerojax.step_options import choose_options

Tree = Any

_MESH_OPTIONS = (
    "rules",
    "persistence_threshold",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sequence_sharding",
    "offload",
    "pipeline_schedule",
    "partition",
    "stash",
    "deterministic",
    "virtual_shards",
)
_ELSEWHERE = {
    axis: "sizes are the mesh's: zerojax.make_plan(model, zerojax.make_mesh({"
    f'"{axis}": ...}}), ...)'
    for axis in meshes.AXES
}


@names_keywords(also=_MESH_OPTIONS, elsewhere=_ELSEWHERE)
def make_plan(
    model: models.ModelLike,
    mesh: Mesh | AbstractMesh | MeshConfig | Mapping[str, Any] | None,
    *,
    example_batch: Tree,
    loss: models.Loss | None = None,
    optimizer: Any = None,
    zero: int | None = None,
    precision: Precision | str | None = None,
    reduce_dtype: str | None = None,
    accumulate_dtype: str | None = None,
    num_microbatches: int | None = None,
    freeze: str | Sequence[str] = (),
    steps: int | None = None,
    **mesh_options: Any,
) -> Plan:
    """Plans a run without making an array.

    Args:
      model: as `zerojax.train` takes it.
      mesh: from `make_mesh`; or a `MeshConfig` (or its fields as a dict), from which the mesh is
        made.
      example_batch: a global batch, as arrays or `ShapeDtypeStruct`s; dimension 0 is the batch.
      loss: `loss(model, batch) -> scalar | (sum, weight)`, called for each piece of a batch: the
        rows of one microbatch on one device. A scalar has to be the mean over these rows; of pairs
        the sums are added up and divided once by all weights, which no parameter may change. What
        is neither, as a plain `jnp.sum`, or couples rows, depends on the number of pieces. A
        mapping `{name: metric}` may follow either, of means or pairs `(sum, weight)`. None takes
        the model's method `loss(batch)`.
      optimizer: an optax transformation, an `OptimizerConfig`, or None for AdamW.
      zero: ZeRO stage 0..3; None takes the mesh config's, or 1.
      precision: "bf16", "fp32" or a `Precision`. None: bf16, on CPU devices fp32.
      reduce_dtype, accumulate_dtype: "fp32" or "bf16"; None: see `as_precision`.
      num_microbatches: pieces each device's rows are cut into; gradients are accumulated. None: 1,
        or with pipeline stages as many as the rows allow, up to 4 for each stage.
      freeze: regular expressions, or one, on names of parameters that get no gradient.
      steps: length of the run, for the learning-rate schedule.
      **mesh_options: other fields of `MeshConfig`: rules, persistence_threshold,
        reduce_bucket_size, allgather_bucket_size, sequence_sharding.

    Raises:
      ValueError, TypeError: with the value, the limit and the remedy.
    """
    freeze = as_patterns("freeze", freeze)
    check_whole_number("num_microbatches", num_microbatches, 1)
    given = {
        "model": model,
        "example_batch": example_batch,
        "loss": loss,
        "optimizer": optimizer,
        "precision": precision,
        "reduce_dtype": reduce_dtype,
        "accumulate_dtype": accumulate_dtype,
        "num_microbatches": num_microbatches,
        "freeze": freeze,
        "steps": steps,
    }
    settings, mesh = _resolve_mesh(mesh, zero, mesh_options)
    if isinstance(mesh, Mesh):
        check_joined()
    internal = models.as_model(model)
    loss = models.as_loss(loss, internal, example_batch)
    why_precision = []
    if precision is None:
        platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else None
        precision, why = default_precision(platform)
        why_precision.append(why)
    precision = as_precision(
        precision, reduce_dtype=reduce_dtype, accumulate_dtype=accumulate_dtype
    )
    optimizer_built = optim.build_optimizer(optimizer, steps)
    batch = abstract(example_batch)
    num_microbatches = check_deterministic(settings, mesh, precision, num_microbatches)
    num_microbatches, reasons = choose_microbatches(num_microbatches, mesh, batch)
    check_batch(batch, mesh, num_microbatches)
    microbatch = slice_batch(batch, meshes.num_data_shards(mesh) * num_microbatches)
    with naming_the_call(microbatch):
        params, extras = abstract_model(internal, batch, loss)
        trace = models.trace_model(internal, as_read(params, precision), extras, microbatch, loss)
        check_not_per_example(trace.result, batch, microbatch)
    check_loss(trace.result)
    parts = split_result(trace.result)
    check_reads(params, trace.read_shapes.keys() | trace.barriers.keys())
    layout, arrays = None, (as_read(params, precision), extras, microbatch)
    stacked = find_stacked(settings, internal, loss, arrays)
    if mesh.shape[STAGE] > 1:
        layout = plan_pipeline(settings, mesh, num_microbatches, internal, loss, trace, arrays)
        stacked = layout.stacked
    placement = place_model(
        internal, params, trace, settings, mesh, freeze=freeze, stacked=stacked, layout=layout
    )
    check_trained(placement)
    check_weight(trace, placement)
    pieces = look_at_pieces(trace, params, extras, microbatch, internal.overwritten)
    check_pieces(pieces, meshes.num_data_shards(mesh), num_microbatches)
    regather = settings.zero == 3 and internal.reads_lazily
    compiler_options, dropped_options = choose_options(
        mesh,
        regather,
        settings.offload.on_host,
        deterministic=settings.deterministic is not None,
        unrolled=num_microbatches > 1
        and bool(unrolled(placement, straight_pieces(trace.jaxpr.jaxpr))),
    )
    tx = optim.fit_optimizer(optimizer_built.tx, precision)
    check_elementwise(settings, tx)
    update_choices = optim.choose_update(tx, mesh)
    abstract_batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, P(DATA_AXES))
        ),
        batch,
    )
    stacks = find_stacks(trace.jaxpr, sorted(params))
    tx, padding_lines = fit_padding(tx, params, placement, precision, mesh, stacks=stacks)
    build = functools.partial(abstract_state, params, extras, placement, tx, precision, mesh)
    check_durable(settings.offload, precision, jax.process_count())
    offload = plan_offload(settings.offload, placement, precision, tx, mesh, stacked=stacked)
    check_update_in_backward(offload, num_microbatches, precision, tx)
    batch_weight, rules = choose_batch_weight(
        trace, params.keys(), extras.keys(), settings, internal
    )
    stored, canonical = build(canonical=False), build(canonical=True)
    return Plan(
        mesh=mesh,
        model=internal,
        loss=loss,
        settings=settings,
        placement=placement,
        precision=precision,
        tx=tx,
        learning_rate=optimizer_built.learning_rate,
        num_microbatches=num_microbatches,
        pipeline=layout,
        offload=offload,
        abstract_state=abstract_offloaded(stored, offload, precision) if offload else stored,
        abstract_stored=stored,
        abstract_canonical=canonical_on_host(canonical, offload) if offload else canonical,
        abstract_batch=abstract_batch,
        traced=TracedLoss(
            forward=trace.jaxpr,
            index_limits=trace.index_limits,
            has_weight=parts.weight is not None,
            metric_names=tuple(sorted(parts.metrics)),
            counted_state=pieces.counted,
            batch_weight=batch_weight,
        ),
        program=ProgramChoices(
            options=compiler_options,
            dropped=dropped_options,
            kernels=update_choices,
            regather=regather,
        ),
        reasons=(
            *describe_choices(settings, mesh, precision, placement),
            *why_precision,
            *describe_deterministic(settings, num_microbatches),
            *reasons,
            *optimizer_built.reasons,
            *describe_model(
                internal, params, trace, placement, extras, pieces.counted, precision, regather
            ),
            *describe_pieces(pieces),
            *rules,
            *describe_offload(settings, offload),
            *describe_layer_inputs(settings, trace.jaxpr, len(params)),
            *describe_update(update_choices, tx, stacks & stored["params"].keys(), mesh),
            *padding_lines,
            *optim.describe_muon(stored["opt_state"], stacks),
            *describe_options(compiler_options, dropped_options),
        ),
        remake=functools.partial(_remake, settings, given),
    )


def plan_options(settings: MeshConfig) -> dict[str, Any]:
    """What `make_plan` takes beside a mesh that is made already: all but sizes and stage."""
    return {name: getattr(settings, name) for name in _MESH_OPTIONS}


def _remake(settings: MeshConfig, given: dict[str, Any], mesh: Mesh | AbstractMesh) -> Plan:
    return make_plan(mesh=mesh, zero=settings.zero, **given, **plan_options(settings))


def _resolve_mesh(
    mesh: Any, zero: int | None, options: Mapping[str, Any]
) -> tuple[MeshConfig, Mesh | AbstractMesh]:
    """The options with their sizes resolved, and the mesh itself."""
    if isinstance(mesh, (Mesh, AbstractMesh)):
        if isinstance(mesh, Mesh):
            mesh = meshes.normalise_mesh(mesh)
        settings = MeshConfig(**{axis: mesh.shape.get(axis, 1) for axis in meshes.AXES}, **options)
    else:
        if isinstance(mesh, Mapping) and is_deepspeed(mesh):
            raise TypeError(
                "mesh is a DeepSpeed configuration, which zerojax.train and zerojax.initialize "
                "take; its plan is zerojax.initialize(model, config, example_batch=batch).plan"
            )
        settings = dataclasses.replace(as_mesh_config(mesh), **options)
        mesh = meshes.make_mesh(settings)
    settings = dataclasses.replace(settings, data=mesh.shape[DATA])
    if zero is not None:
        settings = dataclasses.replace(settings, zero=zero)
    return settings, mesh
