"""Makes a plan from a model, a mesh and an example batch, by tracing the loss.

No step is run, and the mesh may be an `AbstractMesh` for devices that do not exist here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import models, optim, tracing
from zerojax.config import (
    MeshConfig,
    OptimizerConfig,
)
from zerojax.config.batch_division import BatchDivision
from zerojax.config.checks import as_patterns, names_keywords
from zerojax.config.display import as_details
from zerojax.config.features import Features
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.mesh import NVME
from zerojax.config.tree_types import Tree
from zerojax.features.deterministic.equal_bits import (
    describe_equal_bits,
    fixed_options,
    microbatches_of_equal_bits,
)
from zerojax.features.known import choose_microbatches as microbatches_of_features
from zerojax.features.known import describe_features, need_loop, plan_features, with_parts
from zerojax.features.one_bit.sign_plan import describe_one_bit, with_errors
from zerojax.features.seam import Facts
from zerojax.hardware import compile_client
from zerojax.models.adapt import bound_attribute
from zerojax.models.losses import split_result
from zerojax.offload.layer_draws import describe_draws
from zerojax.offload.offload_tiers import (
    check_late_update,
    check_update_in_backward,
    find_stacked,
    plan_offload,
)
from zerojax.operators.attention_choice import attention_planned_for
from zerojax.operators.marks import gathers_batch
from zerojax.operators.whole_batch import (
    GathersRowsError,
    stopping_at_gathers,
    with_rows_of_all,
)
from zerojax.optim.precision import Precision, as_precision, default_precision
from zerojax.pipeline.planning import choose_microbatches, plan_pipeline
from zerojax.placement import device_mesh as meshes
from zerojax.placement.decisions import Decisions, ProgramChoices, TracedLoss
from zerojax.placement.device_mesh import COMPILER_AXES, DATA_AXES, EXPERT, STAGE
from zerojax.placement.expert_axis import plan_experts
from zerojax.placement.frozen_codes import check_lazy_reads, describe_codes
from zerojax.placement.layer_stacks import Stacks, row_layout, row_placement, row_structs
from zerojax.placement.optional_parts import with_copies, with_delayed
from zerojax.placement.state import (
    TrainState,
    abstract,
    abstract_model,
    abstract_offloaded,
    abstract_state,
    as_read,
    portable_on_host,
    slice_batch,
)
from zerojax.placement.state_layout import LayerTiles, OffloadLayout, PipelineLayout
from zerojax.placement.table import Placement, place_model, straight_pieces, unrolled
from zerojax.placement.user_shardings import follow_shardings, under_own_mesh
from zerojax.plan.batch_sums import check_batch_sums, describe_batch_sums, sums_of_trace
from zerojax.plan.combinations import Combination, check_combination
from zerojax.plan.compiler_options import choose_options
from zerojax.plan.context_split import check_parts_of_rows, plan_context
from zerojax.plan.counts import describe_constants
from zerojax.plan.explain import explain_parameter
from zerojax.plan.fp8_costs import describe_wire
from zerojax.plan.gradient_wire import (
    describe_gradient_wire,
    with_gradient_wire,
)
from zerojax.plan.inputs import MESH_OPTIONS, PlanInputs, plan_options, resolve_mesh
from zerojax.plan.layer_tiles import describe_tiles, plan_tiles
from zerojax.plan.loss_checks import (
    check_divisor,
    check_loss,
    check_pieces,
    check_step_counts,
    check_weight,
    choose_batch_weight,
    describe_pieces,
    trace_pieces,
)
from zerojax.plan.muon_matrices import describe_matrices, describe_taken, with_matrices
from zerojax.plan.named_dims import under_axis_rules, with_named_dims
from zerojax.plan.optimizer_shapes import fit_padding
from zerojax.plan.plan_page import plan_dict, plan_line, plan_table
from zerojax.plan.reasons import (
    describe_adapters,
    describe_batch,
    describe_choices,
    describe_frozen,
    describe_model,
    describe_offload,
    describe_options,
    describe_ragged,
    describe_update,
)
from zerojax.plan.refusals import (
    check_arguments,
    check_batch,
    check_not_per_example,
    check_reads,
    check_rows,
    check_trained,
    check_wire,
    errors_with_users_lines,
)
from zerojax.plan.rolling import (
    Rolling,
    RollingOptions,
    check_remat,
    check_same_result,
    choose_rolling,
    fit_stacks,
    stack_structs,
)
from zerojax.plan.secondary_wire import describe_secondary, with_secondary
from zerojax.plan.sizes_of_steps import sizes_of_steps
from zerojax.plan.table_lookups import Lookups, check_update_of_tables, plan_lookups
from zerojax.plan.weight_wire import describe_weight_wire, with_weight_wire
from zerojax.runtime.distributed import check_joined
from zerojax.tracing.activation_offload import describe_layer_inputs
from zerojax.tracing.loops import find_stacks
from zerojax.tracing.rolling import find_lists
from zerojax.tracing.unrolling import choose_unrolling
from zerojax.zoo.task_heads import TaskConfig, limit_of_labels

_ELSEWHERE = {
    axis: "axis sizes belong to the mesh: zerojax.make_plan(model, zerojax.make_mesh({"
    f'"{axis}": ...}}), ...)'
    for axis in meshes.AXES
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Decisions):
    """All decisions about a run before its first array exists; the fields are described at
    `Decisions`."""

    def __repr__(self) -> str:
        return f"Plan({plan_line(self)}; plan.table() has every parameter and reason)"

    def _repr_html_(self) -> str:
        return as_details(plan_line(self), plan_table(self))

    def table(self) -> str:
        """Formats the plan as text: bytes per device by role, each parameter, and every exception
        with its reason."""
        return plan_table(self)

    def explain(self, name: str) -> str:
        """Describes the plan of one parameter: sharding, collectives with bytes, update, memory,
        and checkpoint names.

        Args:
          name: name of the parameter, as in `table`: "blocks/mlp/up/kernel".

        Raises:
          ValueError: there is no such parameter; the message states the nearest name.
        """
        return explain_parameter(self, name)

    @property
    def inputs(self) -> PlanInputs:
        """Inputs of planning; `plan_of` plans the same run on another mesh from them."""
        assert isinstance(self.remake, Remake)
        return self.remake.inputs

    def describe(self) -> str:
        """Formats the plan as one line of text: size, mesh, ZeRO stage, batch, and bytes of
        state."""
        return plan_line(self)

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as a JSON-compatible dictionary."""
        return plan_dict(self)


def require_plan(plan: object, taker: str) -> Plan:
    """Returns `plan` if it is a `Plan`, else raises.

    Args:
      plan: argument that a user passed.
      taker: name of the public function that the user called.

    Raises:
      TypeError: `plan` is something else, for example a model.
    """
    if not isinstance(plan, Plan):
        given = plan.__name__ if isinstance(plan, type) else f"a {type(plan).__name__}"
        raise TypeError(
            f"{taker} needs a Plan, not {given}; make one: "
            "zerojax.make_plan(model, mesh_config, ...)"
        )
    return plan


@names_keywords(also=MESH_OPTIONS, elsewhere=_ELSEWHERE)
def make_plan(
    model: tracing.ModelLike,
    mesh: Mesh | AbstractMesh | MeshConfig | Mapping[str, Any] | None,
    *,
    example_batch: Tree,
    loss: tracing.Loss | None = None,
    optimizer: optax.GradientTransformation | OptimizerConfig | None = None,
    zero: int | None = None,
    precision: Precision | str | None = None,
    reduce_dtype: str | None = None,
    accumulate_dtype: str | None = None,
    num_microbatches: int | None = None,
    freeze: str | Sequence[str] = (),
    steps: int | None = None,
    **mesh_options: Any,
) -> Plan:
    """Plans a run without making an array: placement of every parameter, memory, communication and
    the reasons.

    Args:
      model: an `nnx.Module`, a factory `rngs -> nnx.Module`, a `linen.Module`, or a pair of
        functions `(init, apply)`.
      mesh: mesh from `make_mesh`; or a `MeshConfig` (or its fields as a dict), from which the mesh
        is made.
      example_batch: a global batch, as arrays or `ShapeDtypeStruct`s; dimension 0 is the rows.
      loss: function `loss(model, batch) -> scalar | (sum, weight)`, called for each part of a
        batch: the rows of one microbatch on one device. A scalar must be the mean over these rows.
        Pairs are summed and divided once by the sum of weights, which must not depend on
        parameters. A plain sum over rows is refused where there are several parts, on whose number
        it would depend, as does a loss that couples rows. A mapping `{name: metric}` of means or
        pairs `(sum, weight)` may follow. None: the model's method `loss(batch)`.
      optimizer: an optax transformation or an `OptimizerConfig`; None: the default
        `OptimizerConfig`.
      zero: ZeRO stage 0 to 3; None: the stage in the mesh config, or 1.
      precision: "bf16", "fp32" or a `Precision`. None: bf16, or fp32 on CPU devices.
      reduce_dtype: dtype in which gradients are reduced over devices, "fp32" or "bf16"; None: the
        compute dtype. Sums over `model` stay in the compute dtype.
      accumulate_dtype: dtype of the sum over microbatches, "fp32" or "bf16"; None: see
        `as_precision`.
      num_microbatches: number of parts into which each device's rows are split; gradients are
        accumulated. None: 1, or with pipeline stages as many as the rows allow, up to 4 for each
        stage.
      freeze: one or several regular expressions on names of parameters that are not trained.
      steps: number of steps of the run, for the learning-rate schedule.
      **mesh_options: other fields of `MeshConfig` (`plan.inputs.MESH_OPTIONS`), such as rules,
        offload, wire or unroll; not the sizes of axes.

    Raises:
      ValueError, TypeError: an invalid argument or combination; the message states the value, the
        limit and the remedy.
    """
    inputs = PlanInputs(
        model=model,
        example_batch=example_batch,
        loss=loss,
        optimizer=optimizer,
        precision=precision,
        reduce_dtype=reduce_dtype,
        accumulate_dtype=accumulate_dtype,
        num_microbatches=num_microbatches,
        freeze=as_patterns("freeze", freeze),
        steps=steps,
    )
    return plan_of(inputs, mesh, zero=zero, **mesh_options)


def plan_of(inputs: PlanInputs, mesh: Any, *, zero: int | None = None, **mesh_options: Any) -> Plan:
    """Plans a run from its `PlanInputs`.

    Args:
      inputs: inputs of planning that are the same on every mesh.
      mesh: mesh, or the options from which it is made.
      zero: ZeRO stage; None: the stage in the options.
      **mesh_options: other fields of `MeshConfig`.
    """
    settings, mesh = resolve_mesh(mesh, zero, mesh_options)
    return _make(settings, mesh, inputs)


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A model on a mesh, with every default resolved; the input of the steps of planning."""

    settings: MeshConfig
    mesh: Mesh | AbstractMesh
    model: tracing.Model
    loss: tracing.Loss
    precision: Precision
    optimizer: optim.BuiltOptimizer
    batch: Tree
    num_microbatches: int


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Facts from tracing the loss on one microbatch of one data shard."""

    params: dict[str, Any]
    extras: dict[str, Any]
    microbatch: Tree
    trace: tracing.ModelTrace


def _make(settings: MeshConfig, mesh: Mesh | AbstractMesh, inputs: PlanInputs) -> Plan:
    with under_own_mesh(mesh), attention_planned_for(mesh, COMPILER_AXES):
        return _make_traced(settings, mesh, inputs)


def _make_traced(settings: MeshConfig, mesh: Mesh | AbstractMesh, inputs: PlanInputs) -> Plan:
    task, *reasons = _resolve(settings, mesh, inputs)
    task, seen, why_followed = _trace(task, inputs.users_mesh)
    settings, why_split = with_named_dims(settings, task.model, inputs.axis_rules)
    optimizer = task.optimizer.on_tree_of(task.model)
    task = dataclasses.replace(task, settings=settings, optimizer=optimizer)
    reasons = [*reasons[:-1], [*reasons[-1], *why_split, *why_followed]]
    options = RollingOptions(
        settings=settings,
        mesh=mesh,
        freeze=inputs.freeze,
        tx=task.optimizer.tx,
        in_loop=need_loop(inputs.features),
    )
    has_lists = bool(find_lists(sorted(seen.params)))
    rolling = (
        choose_rolling(task.model, seen.trace, seen.params, options) if has_lists else Rolling()
    )
    check_remat(settings, rolling)
    if rolling.model is None:
        try:
            return _decide(task, seen, rolling, inputs, reasons)
        except ValueError as error:
            if options.needs_loop and rolling.reasons:
                raise ValueError(f"{error}. In this model {'; '.join(rolling.reasons)}") from error
            raise
    try:
        rolled = _trace_rolled(task, seen, rolling)
        return _decide(*rolled, rolling, inputs, reasons)
    except Exception as error:
        try:
            return _decide(task, seen, rolling.given_up(error), inputs, reasons)
        except Exception as unrolled:
            # Both fail: where the settings need a loop, report why there is none.
            raise (error if options.needs_loop else unrolled) from None


# Long: the order in which a plan is decided, one line a decision, and its fields.
def _decide(
    task: _Task, seen: _Seen, rolling: Rolling, inputs: PlanInputs, why: Sequence[Sequence[str]]
) -> Plan:
    """Makes the plan of a traced model, with or without rolled layers (a list of layers that runs
    as one loop)."""
    settings, mesh, (why_defaults, why_microbatches) = task.settings, task.mesh, why
    names = rolling.stacks
    context, why_context = plan_context(settings, mesh, seen.trace, seen.microbatch)
    placement, layout, stacked = _place(task, seen, inputs.freeze, names)
    traced, why_traced, rules = _examine_loss(task, seen, placement)
    traced = _with_labels(traced, task, inputs)
    tx = fit_stacks(optim.fit_optimizer(task.optimizer.tx, task.precision), names)
    tx = with_matrices(tx, seen.trace, placement)
    stacks = find_stacks(seen.trace.jaxpr, sorted(seen.params))
    tx, why_padding = fit_padding(tx, seen.params, placement, task.precision, mesh, stacks=stacks)
    offload = _plan_offload(task, placement, tx, stacked)
    tiles = plan_tiles(settings, offload, placement, _read(task, seen), seen.trace.jaxpr)
    loops = tiles, names, inputs.features
    program, why_unrolled = _choose_program(task, seen, placement, tx, loops)
    features = _plan_features(task, seen, placement, inputs.features, (names, layout))
    stored, portable = _forms(task, seen, placement, tx, (names, offload, features))
    return Plan(
        mesh=mesh,
        model=task.model,
        loss=task.loss,
        settings=settings,
        placement=placement,
        precision=task.precision,
        tx=tx,
        learning_rate=task.optimizer.learning_rate,
        num_microbatches=task.num_microbatches,
        pipeline=layout,
        context=context,
        offload=offload,
        abstract_state=abstract_offloaded(stored, offload, task.precision) if offload else stored,
        abstract_stored=stored,
        stacks=names,
        abstract_portable=portable,
        abstract_batch=_abstract_batch(task),
        traced=traced,
        program=program,
        reasons=(
            *inputs.reasons,
            *describe_choices(settings, mesh, task.precision, placement),
            *why_defaults,
            *describe_equal_bits(settings, task.num_microbatches),
            *why_microbatches,
            *why_context,
            *task.optimizer.reasons,
            *describe_model(
                task.model,
                seen.params,
                seen.trace,
                placement,
                seen.extras,
                traced.counted_state,
                traced.written_state,
                task.precision,
                program.regather,
            ),
            *describe_constants(seen.trace.jaxpr),
            *describe_ragged(seen.trace, mesh),
            *describe_adapters(placement),
            *describe_frozen(seen.params, stored["frozen"], task.precision),
            *describe_codes([x for x in placement.leaves.values() if x.frozen], task.precision),
            *_describe_sent(task, placement, seen.trace, tx),
            *why_traced,
            *rolling.reasons,
            *rules,
            *describe_features(features, placement),
            *_describe_state(task, offload, tiles),
            *describe_layer_inputs(settings, seen.trace.jaxpr, len(seen.params)),
            *why_unrolled,
            *describe_update(program.kernels, tx, stacks, stored["params"], mesh),
            *why_padding,
            *describe_taken(tx, seen.trace, stored, placement, stacks - names.keys()),
            *describe_matrices(tx, stored, placement, mesh),
            *describe_options(program.options, program.dropped),
        ),
        remake=Remake(settings=settings, inputs=inputs),
        tiles=tiles,
        features=features,
    )


def _plan_features(
    task: _Task, seen: _Seen, placement: Placement, features: Features, layouts: tuple[Any, Any]
) -> dict[str, Any]:
    stacks, pipeline = layouts
    facts = Facts(
        settings=task.settings,
        model=task.model,
        trace=seen.trace,
        params=seen.params,
        placement=placement,
        stacks=stacks,
        pipeline=pipeline,
        division=BatchDivision(meshes.num_data_shards(task.mesh), task.num_microbatches),
    )
    return plan_features(features, facts)


def _describe_state(task: _Task, offload: OffloadLayout | None, tiles: LayerTiles) -> list[str]:
    draws = describe_draws(task.model, task.batch, task.loss, offload)
    rest = [*describe_tiles(task.settings, tiles), *draws]
    return [*describe_offload(task.settings, offload), *rest]


def _plan_offload(
    task: _Task, placement: Placement, tx: optax.GradientTransformation, stacked: frozenset[str]
) -> OffloadLayout | None:
    settings, mesh = task.settings, task.mesh
    layout = plan_offload(settings.offload, placement, task.precision, tx, mesh, stacked=stacked)
    if settings.offload.params != NVME:
        check_update_in_backward(layout, task.num_microbatches)
    check_late_update(settings.offload, layout, task.num_microbatches)
    return layout


def _forms(
    task: _Task,
    seen: _Seen,
    placement: Placement,
    tx: optax.GradientTransformation,
    layouts: tuple[Stacks, Any, Any],
) -> tuple[TrainState, TrainState]:
    """Returns (abstract state as stored without offload, abstract state in the form of checkpoints
    under the user's names)."""
    names, offload, features = layouts
    build = functools.partial(
        abstract_state, extras=seen.extras, tx=tx, precision=task.precision, mesh=task.mesh
    )
    stored = with_parts(build(seen.params, placement=placement, portable=False), features, names)
    by_name, users = row_structs(seen.params, names), row_placement(placement, names)
    portable = with_parts(build(by_name, placement=users, portable=True), features, names)
    portable = with_copies(portable, placement, task.precision, task.mesh)
    stored = with_copies(stored, placement, task.precision, task.mesh)
    portable, stored = (with_errors(x, placement, task.mesh, tx) for x in (portable, stored))
    if offload is not None:
        users_layout = row_layout(offload, names)
        portable = portable_on_host(portable, users_layout)
        if offload.delayed:
            dtypes = task.precision, task.mesh
            stored = with_delayed(stored, offload.leaves, placement, *dtypes)
            if not offload.in_forward:  # a portable state has no update that waits
                portable = with_delayed(portable, users_layout.leaves, users, *dtypes)
    return stored, portable


def _describe_sent(
    task: _Task, placement: Placement, trace: tracing.ModelTrace, tx: optax.GradientTransformation
) -> list[str]:
    """Returns the plan's lines on weights and gradients not sent in the default format or dtype."""
    settings = task.settings
    weights = describe_wire(settings, placement, trace.eight_bits)
    weights += [*describe_weight_wire(settings, placement, task.precision)]
    secondary = describe_secondary(settings, placement)
    gradients = describe_gradient_wire(settings, placement, task.mesh)
    signs = describe_one_bit(placement, task.precision, tx, settings)
    return [*weights, *secondary, *gradients, *signs]


def _resolve(
    settings: MeshConfig, mesh: Mesh | AbstractMesh, inputs: PlanInputs
) -> tuple[_Task, list[str], list[str]]:
    """Resolves the defaults of the inputs.

    Returns:
      (the task, reasons of the precision, reasons of the number of microbatches).
    """
    if isinstance(mesh, Mesh):
        check_joined()
    internal = models.as_model(inputs.model)
    batch = abstract(inputs.example_batch)
    check_rows(batch)  # before the number of rows is read
    precision, why_precision = inputs.precision, []
    if precision is None:
        platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else None
        precision, why = default_precision(platform)
        why_precision.append(why)
    precision = as_precision(
        precision, reduce_dtype=inputs.reduce_dtype, accumulate_dtype=inputs.accumulate_dtype
    )
    depends = isinstance(inputs.optimizer, OptimizerConfig) and inputs.optimizer.depends_on_sizes
    sizes = sizes_of_steps(inputs) if depends else None
    optimizer = optim.build_optimizer(inputs.optimizer, inputs.steps, sizes)
    combination = Combination(
        settings=settings,
        mesh=mesh,
        precision=precision,
        tx=optimizer.tx,
        features=inputs.features,
        layer_norms=inputs.layer_norms,
    )
    check_combination(combination)
    check_lazy_reads(precision, reads_lazily=internal.reads_lazily)
    check_parts_of_rows(mesh, internal, inputs.loss)
    loss = models.as_loss(inputs.loss, internal, inputs.example_batch)
    table = settings.logical_axis_rules or inputs.axis_rules
    loss = under_axis_rules(loss, table, splits=mesh.shape[meshes.MODEL] > 1)
    number = microbatches_of_equal_bits(settings, mesh, inputs.num_microbatches)
    why_ramp: list[str] = []
    if settings.fixed_pieces is None:
        number, why_ramp = microbatches_of_features(inputs.features, number, mesh, batch)
    number, why_number = choose_microbatches(number, mesh, batch)
    check_batch(batch, mesh, number)
    task = _Task(
        settings=settings,
        mesh=mesh,
        model=internal,
        loss=loss,
        precision=precision,
        optimizer=optimizer,
        batch=batch,
        num_microbatches=number,
    )
    return task, why_precision, [*why_ramp, *why_number]


def _trace(task: _Task, users: AbstractMesh | None) -> tuple[_Task, _Seen, list[str]]:
    """Traces the loss on one microbatch of one data shard, and checks the loss.

    Args:
      task: the task.
      users: mesh that the user has set.

    Returns:
      (the task, whose model may be wrapped to follow its shardings; what was seen; reasons).

    Raises:
      ValueError, TypeError: the loss, or an array that it reads, cannot be planned.
    """
    shards = meshes.num_data_shards(task.mesh)
    pieces, exact = shards * task.num_microbatches, dict[str, str]()
    microbatch = slice_batch(task.batch, pieces, task.precision)
    check_arguments(task.loss)

    def first(model: tracing.Model) -> tuple[Any, Any]:
        params, extras = abstract_model(model, task.batch, task.loss)
        read = as_read(params, task.precision)
        loss, trace = _first_trace(
            task, lambda loss: tracing.trace_model(model, read, extras, microbatch, loss)
        )
        return (params, extras, read, loss, trace), trace.program.jaxpr

    with errors_with_users_lines(microbatch):
        model, found, why = follow_shardings(task.model, first, users)
        params, extras, read, loss, trace = found
        trace_of = lambda rows: tracing.trace_model(model, read, extras, rows, loss)  # noqa: E731
        while trace.exact_leaves.keys() - exact:
            exact |= trace.exact_leaves
            before = microbatch
            microbatch = slice_batch(task.batch, pieces, task.precision, exact)
            if jax.tree.leaves(microbatch) != jax.tree.leaves(before):
                trace = trace_of(microbatch)
        check_not_per_example(trace.result, task.batch, microbatch)
    check_loss(trace.result)
    check_step_counts(trace, params, extras, microbatch, model)
    check_reads(params, trace.read_shapes.keys() | trace.barriers.keys())
    whole = slice_batch(task.batch, 1, task.precision, exact)
    check_divisor(trace, params, extras, microbatch, whole, trace_of)
    trace = dataclasses.replace(trace, exact_leaves=exact)
    seen = _Seen(params=params, extras=extras, microbatch=microbatch, trace=trace)
    return dataclasses.replace(task, model=model, loss=loss), seen, why


def _first_trace(
    task: _Task, trace_of: Callable[[tracing.Loss], tracing.ModelTrace]
) -> tuple[tracing.Loss, tracing.ModelTrace]:
    """Traces the loss; returns (the loss, its trace).

    A loss that gathers the batch is traced with the rows of all devices, because it may need their
    number, and so that the work with them is counted.

    Args:
      task: the task.
      trace_of: function that traces a loss with the rows of one microbatch.
    """
    with contextlib.suppress(GathersRowsError), stopping_at_gathers():
        trace = trace_of(task.loss)
        # A jitted function that JAX has traced before does not stop.
        if not gathers_batch(trace.program.jaxpr):
            return task.loss, trace
    loss = with_rows_of_all(task.loss, jax.tree.leaves(task.batch)[0].shape[0])
    return loss, trace_of(loss)


def _trace_rolled(task: _Task, seen: _Seen, rolling: Rolling) -> tuple[_Task, _Seen]:
    """Returns the task and its trace with loops in place of lists of layers.

    Raises:
      ValueError: the rolled loss returns another result than the user's loss.
    """
    model = rolling.model
    assert model is not None
    params = stack_structs(seen.params, rolling.stacks)
    read = as_read(params, task.precision)
    trace = tracing.trace_model(model, read, seen.extras, seen.microbatch, task.loss)
    trace = dataclasses.replace(trace, exact_leaves=seen.trace.exact_leaves)
    check_same_result(seen.trace, trace)
    rolled = dataclasses.replace(seen, params=params, trace=trace)
    return dataclasses.replace(task, model=model), rolled


def _read(task: _Task, seen: _Seen) -> tuple[Any, Any, Any]:
    arrays = as_read(seen.params, task.precision), seen.extras, seen.microbatch
    return task.model, task.loss, arrays


def _place(
    task: _Task, seen: _Seen, freeze: tuple[str, ...], stacks: Stacks
) -> tuple[Placement, PipelineLayout | None, frozenset[str]]:
    """Places the parameters of the model.

    Returns:
      (placement table, pipeline layout or None, names of parameters that are read layer by layer).
    """
    layout, (model, loss, arrays) = None, _read(task, seen)
    stacked = find_stacked(task.settings, model, loss, arrays)
    if task.mesh.shape[STAGE] > 1:
        number, trace = task.num_microbatches, seen.trace
        layout = plan_pipeline(task.settings, task.mesh, number, model, loss, trace, arrays)
        stacked = layout.stacked
    check_wire(task.settings, seen.trace.eight_bits)
    shapes = {name: leaf.shape for name, leaf in seen.params.items()}
    rows = [row for name in shapes for row in stacks.get(name, (name,))]
    frozen = tracing.trees.match_names(rows, freeze, option="freeze")
    experts: Mapping[str, int] = {}
    if task.mesh.shape[EXPERT] > 1:
        experts = plan_experts(model, shapes, seen.trace.program.jaxpr, task.mesh, stacks)
    placement = place_model(
        model,
        seen.params,
        seen.trace,
        task.settings,
        task.mesh,
        freeze=freeze,
        freeze_codes=task.precision.freeze_codes,
        stacked=stacked,
        layout=layout,
        stacks=stacks,
        expert_dims=experts,
        lookups=_lookups(task, seen, frozen).row_reads,
    )
    check_trained(placement)
    placement = with_secondary(placement, task.settings, task.mesh)
    placement = with_weight_wire(placement, task.settings, task.precision)
    return with_gradient_wire(placement, task.settings, task.mesh), layout, stacked


def _lookups(task: _Task, seen: _Seen, frozen: Collection[str]) -> Lookups:
    if task.settings.lookup != "owners":
        return Lookups()
    return plan_lookups(
        seen.params,
        seen.trace,
        task.settings,
        task.mesh,
        precision=task.precision,
        num_microbatches=task.num_microbatches,
        frozen=frozen,
    )


def _examine_loss(
    task: _Task, seen: _Seen, placement: Placement
) -> tuple[TracedLoss, list[str], list[str]]:
    """Checks the loss; returns (facts about it, reasons about the batch, its parts and lookups,
    reasons about custom derivatives)."""
    trace, params, extras = seen.trace, seen.params, seen.extras
    check_weight(trace, placement)
    pieces = trace_pieces(trace, params, extras, seen.microbatch, task.model)
    check_pieces(pieces, meshes.num_data_shards(task.mesh), task.num_microbatches)
    batch_weight, rules = choose_batch_weight(
        trace, params.keys(), extras.keys(), task.settings, task.model
    )
    sums = sums_of_trace(trace, placement, len(extras))
    check_batch_sums(sums, task.settings, task.mesh, task.num_microbatches)
    parts = split_result(trace.result)
    traced = TracedLoss(
        forward=trace.jaxpr,
        index_limits=trace.index_limits,
        exact_leaves=seen.trace.exact_leaves,
        has_weight=parts.weight is not None,
        metric_names=tuple(sorted(parts.metrics)),
        counted_state=pieces.counted,
        written_state=pieces.written,
        attention_calls=trace.attention_calls,
        batch_weight=batch_weight,
    )
    over_batch = describe_batch_sums(sums, task.mesh, task.num_microbatches)
    frozen = [name for name, leaf in placement.leaves.items() if leaf.frozen]
    lookups = _lookups(task, seen, frozen).reasons
    dtypes = describe_batch(task.batch, trace.exact_leaves, task.precision)
    return traced, [*dtypes, *describe_pieces(pieces), *over_batch, *lookups], [*rules]


def _with_labels(traced: TracedLoss, task: _Task, inputs: PlanInputs) -> TracedLoss:
    """Adds the limits of the labels of a task, if the loss is the model's own."""
    of_task = getattr(bound_attribute(task.model, "config"), "task", None)
    if inputs.loss is not None or not isinstance(of_task, TaskConfig):
        return traced
    limit = limit_of_labels(of_task, task.batch)
    if limit is None:
        return traced
    limits = {**traced.index_limits, "labels": (limit,)}
    return dataclasses.replace(traced, index_limits=limits)


def _choose_program(
    task: _Task,
    seen: _Seen,
    placement: Placement,
    tx: optax.GradientTransformation,
    loops: tuple[LayerTiles, Stacks, Any],
) -> tuple[ProgramChoices, tuple[str, ...]]:
    """Chooses how the step is compiled.

    Args:
      loops: what the plan does with loops over layers: (weights gathered in tiles, lists of layers
        that became loops, features of the run).

    Returns:
      (choices, lines of the plan about unrolled loops).
    """
    settings, (tiles, lists, features) = task.settings, loops
    pays = not lists and not need_loop(features) and _pays_to_unroll(settings, task.mesh)
    unroll, why = choose_unrolling(settings, seen.trace.jaxpr, len(seen.params), pays=pays)
    check_update_of_tables(placement, tx)
    regather = settings.zero == 3 and task.model.reads_lazily
    options, dropped = choose_options(
        task.mesh,
        regather,
        settings.offload.on_host,
        unrolled=task.num_microbatches > 1
        and bool(unrolled(placement, straight_pieces(seen.trace.jaxpr.jaxpr))),
        tiled=bool(tiles.cut),
    )
    if settings.fixed_pieces is not None:
        fixed, unused = fixed_options(task.mesh)
        options, dropped = fixed | options, dropped | unused
    kernels = optim.choose_update(tx, task.mesh, settings.kernels)
    choices = ProgramChoices(
        options=options, dropped=dropped, kernels=kernels, regather=regather, unroll=unroll
    )
    return choices, why


def _pays_to_unroll(settings: MeshConfig, mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether unrolled layers are faster than a loop: on GPUs, without experts, whose
    layers have a loop of their own, and without offload, whose plans do not know the device."""
    is_gpu = isinstance(mesh, Mesh) and compile_client.is_cuda(mesh)
    return is_gpu and settings.offload.is_off and mesh.shape[EXPERT] == 1


def _abstract_batch(task: _Task) -> Tree:
    """Returns the global batch as `ShapeDtypeStruct`s with shardings: dimension 0 is split over the
    data axes."""
    sharding = NamedSharding(task.mesh, P(DATA_AXES))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), task.batch
    )


@dataclass(frozen=True, kw_only=True)
class Remake:
    """Function object that plans the same run on another mesh; stored as `Decisions.remake`."""

    settings: MeshConfig
    inputs: PlanInputs

    def __call__(self, mesh: Mesh | AbstractMesh) -> Plan:
        options = plan_options(self.settings)
        return _make(*resolve_mesh(mesh, self.settings.zero, options), self.inputs)
