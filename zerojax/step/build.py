"""Builds the training step: forward, backward, reduction and update in one donating program.

Also builds the evaluation of a plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import passes
from zerojax.config.checks import names_keywords
from zerojax.config.mesh import HOST
from zerojax.config.tree_types import Batch, Tree
from zerojax.features.deterministic import fixed_passes
from zerojax.features.deterministic.deterministic_update import (
    build_chunked_update,
    build_fixed_norm,
)
from zerojax.features.known import active
from zerojax.features.one_bit.one_bit_update import (
    TwoPrograms,
    build_signed_update,
    unsummed_names,
)
from zerojax.models.adapt import bound_attribute
from zerojax.models.losses import own_means
from zerojax.models.step_count import after_step
from zerojax.offload import streaming
from zerojax.offload.delayed_update import (
    DelayedUpdates,
    build_delayed_gradients,
    with_delay,
)
from zerojax.offload.disk_durable import write_rest
from zerojax.offload.disk_step import DiskStep, pending_of, pending_shardings
from zerojax.offload.forward_update import build_forward_gradients, leave_gradients
from zerojax.offload.paged_layers import LayerPrograms, build_paged_gradients
from zerojax.offload.paged_step import PagedEvaluation, PagedStep
from zerojax.offload.sliced_update import build_offload_update
from zerojax.offload.streaming_update import build_updating_gradients
from zerojax.offload.waiting import check_nothing_waits, finished
from zerojax.operators.attention_choice import attention_measured
from zerojax.optim import loss_scale, one_bit_of
from zerojax.passes.layer_norms import build_changes, layer_stacks
from zerojax.passes.update import GradientNorm, ThisStep, build_norm, build_update
from zerojax.pipeline import pipeline_passes
from zerojax.placement.optional_parts import copies_key
from zerojax.placement.slices import without_moments
from zerojax.placement.state import OPTIONAL_PARTS, TrainState, feature_parts, step_key
from zerojax.placement.user_shardings import on_mesh_of_plan, under_own_mesh
from zerojax.plan.make import Plan, require_plan
from zerojax.runtime.memory import keep_freed_memory
from zerojax.step.offload_variants import streamed_from_host
from zerojax.step.step_numbers import StepWithNumbers, takes_numbers
from zerojax.tracing.protocol import Loss
from zerojax.transport.weight_copies import build_following

Metrics = dict[str, jax.Array]


@names_keywords()
@on_mesh_of_plan
def build_step(plan: Plan) -> Any:
    """Builds the training step of a plan, jitted once.

    Steps run asynchronously, and a loop that never waits queues any number of them. Wait for a
    metric at least every 64 steps (`Trainer` does). If the plan's devices are CPU devices, the
    process keeps freed memory from now on (`zerojax.runtime.memory.keep_freed_memory`).

    Returns:
      `step(state, batch) -> (state, metrics)`. `state` is donated: use only the returned state.
      A state that was already passed to a step raises ValueError. `batch` comes from `shard_batch`.
      `step.lower(...)` returns the lowered program. For `zerojax.optim.one_bit_adam`, which sends
      signs, it is a `one_bit_update.TwoPrograms`.

      Metrics are replicated scalars on the devices:
      - "loss": float32, the global sum divided by the global weight.
      - "weight": float32.
      - "grad_norm": float32, norm of the gradient before clipping; with 1-bit optimizers, whose
        gradients are not summed over devices, the root mean square of the devices' norms.
      - "bad_leaf": int32, number of the first parameter whose gradient is not finite, -1 if all
        are finite.
      - "largest_leaf": int32, number of the parameter with the largest gradient;
        `zerojax.passes.update.leaf_names` has the names of both.
      - "largest_share": float32, share of this gradient in the sum of squares of all gradients.
      - "skipped": int32, 1 when loss or gradients were not finite and only the counters changed.
        With `update_in_backward` of layers on the host it is 1 when the loss was not finite, and
        nothing changed, or when a gradient was not finite: then the layers after it were updated.
      - "num_skipped": int32, number of skipped steps of the run so far.
      - with a loss scale: "loss_scale" (float32, the scale of this step) and "at_floor" (bool: this
        step overflowed although the scale could not be lower).
      - with `PlanInputs.layer_norms`, which `log.per_layer` sets: "layer_sums", float32 [3, sums]:
        sums of squares, from which `zerojax.passes.layer_norms.norms_of_layers` computes the norms
        of each layer.
      - the loss's own metrics under their names: float32, the mean over the global batch; NaN where
        the weight is 0.

    Raises:
      TypeError: `plan` is not a plan.
    """
    require_plan(plan, "build_step")
    _keep_memory(plan)
    rows = layer_stacks(plan) if plan.inputs.layer_norms else None
    is_free = plan.settings.fixed_pieces is None
    norm = build_norm(plan, rows=rows) if is_free else build_fixed_norm(plan)
    step = _jitted_step(plan, _build_gradients(plan), norm, _build_update(plan))
    if one_bit_of(plan.tx) is None:
        return step
    unsummed = unsummed_names(plan)
    gradients = _build_gradients(plan, unsummed=unsummed)
    norm = build_norm(plan, unsummed=unsummed)
    return TwoPrograms(plan, step, _jitted_step(plan, gradients, norm, build_signed_update(plan)))


def _keep_memory(plan: Plan) -> None:
    """Makes this process keep freed memory if the plan's devices are CPU devices."""
    if isinstance(plan.mesh, Mesh) and plan.mesh.devices.flat[0].platform == "cpu":
        keep_freed_memory()


def _jitted_step(
    plan: Plan,
    gradients: Callable[..., Any],
    read_norm: Callable[..., Any],
    update: Callable[..., Any],
) -> LiveStateOnly:
    """Builds the jitted step of `build_step` from three traced parts.

    Args:
      plan: plan of the step.
      gradients: result of `_build_gradients`.
      read_norm: `(gradients, scale, known sums of squares) -> GradientNorm`.
      update: result of `_build_update`.
    """
    replicated = NamedSharding(plan.mesh, P())
    scaling, factor_of = plan.precision.loss_scale, _build_factor(plan)
    on_disk = plan.offload is not None and bool(plan.offload.on_disk)
    in_backward = _updates_in_backward(plan)
    paged = _reads_pages(plan)
    changes = build_changes(plan) if plan.inputs.layer_norms else None

    measured = {kind: choice.implementation for kind, choice in plan.program.kernels.items()}

    def step(state: TrainState, batch: Batch, numbers: Tree = None) -> tuple[Any, ...]:
        with attention_measured(measured):
            return compute(state, batch, numbers)

    def compute(state: TrainState, batch: Batch, numbers: Tree) -> tuple[Any, ...]:
        key = step_key(state["rng"], state["step"])
        factor = factor_of(state, batch["batch"] if paged else batch)
        sums, grads, extras, state = gradients(state, jax.random.key_data(key), batch, factor)
        loss = sums["loss"] / sums["weight"]
        # `factor` is the one that the loss was multiplied by, not that of the next step.
        scale = 1 / (sums["weight"] if factor is None else sums["weight"] * factor)
        for feature, decision in active(plan):
            grads = feature.gradients(plan, decision, grads, state, scale)
        read = read_norm(grads, scale, sums.get("squares"))
        grad_norm = read.norm
        finite = jnp.isfinite(loss) & (read.read_finite if in_backward else jnp.isfinite(grad_norm))
        now = ThisStep(scale, grad_norm, ~finite, key, loss, numbers)
        updated = update(grads, state, now)
        extras = after_step(extras, plan.model.step_rules)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        skipped = 1 - finite.astype(jnp.int32)
        new_state = TrainState(
            step=state["step"] + 1,
            skipped=state["skipped"] + skipped,
            rng=state["rng"],
            params=updated["params"],
            frozen=state["frozen"],
            opt_state=updated["opt_state"],
            extras=jax.tree.map(keep, extras, state["extras"]),
            loss_scale=state["loss_scale"],
        )
        if plan.offload is not None:
            new_state |= {"masters": updated["masters"], "disk": state["disk"]}
        new_state = _with_optional_parts(plan, new_state, state, updated)
        metrics = _metrics_of(loss, sums, read, skipped, new_state["skipped"])
        if changes is not None:
            rest = changes(state["params"], new_state["params"])
            metrics["layer_sums"] = jnp.concatenate([read.sums[None], rest])
        if scaling is not None:
            new_state["loss_scale"], at_floor = loss_scale.update(
                scaling, state["loss_scale"], finite
            )
            metrics |= {"loss_scale": state["loss_scale"]["scale"], "at_floor": at_floor}
        if on_disk:
            return new_state, metrics, pending_of(plan, grads, state["opt_state"], now)
        return new_state, metrics

    pending = (pending_shardings(plan),) if on_disk else ()
    jitted = jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(plan.state_shardings, replicated, *pending),
        compiler_options=dict(plan.program.options) or None,
    )
    rest = functools.partial(write_rest, plan)
    if paged:
        programs = LayerPrograms(plan, pass_config(plan), train=True)
        step = PagedStep(plan, jitted, rest, programs=programs, factor_of=factor_of)
        return LiveStateOnly(plan.mesh, step, _OneProgram(plan))
    if on_disk:
        jitted = DiskStep(plan, jitted, rest)
    return LiveStateOnly(
        plan.mesh, StepWithNumbers(plan, jitted) if takes_numbers(plan) else jitted
    )


def _metrics_of(
    loss: jax.Array, sums: Metrics, read: GradientNorm, skipped: jax.Array, num_skipped: jax.Array
) -> Metrics:
    """Returns the metrics that each step has, and those of the loss."""
    metrics = {
        "loss": loss,
        "weight": sums["weight"],
        "grad_norm": read.norm,
        "bad_leaf": read.bad_leaf,
        "largest_leaf": read.largest_leaf,
        "largest_share": read.largest_share,
        "skipped": skipped,
        "num_skipped": num_skipped,
    }
    return metrics | own_means(sums)


def _with_optional_parts(
    plan: Plan, new_state: Any, state: TrainState, updated: dict[str, Any]
) -> TrainState:
    """Adds the parts that only some runs have to the state after a step."""
    kept = {part: updated.get(part, state[part]) for part in OPTIONAL_PARTS if part in state}
    new_state |= {**kept, **feature_parts(state)}
    for feature, decision in active(plan):
        changed = feature.updated(plan, decision, new_state)
        new_state["params"], new_state["opt_state"] = changed
    return new_state


class _OneProgram:
    """A step program that streams the same layers from host memory; used to count FLOPs and bytes.

    A step that reads layers from files is several programs and a Python loop, so it has no single
    program.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @functools.cached_property
    def _step(self) -> tuple[Any, TrainState]:
        twin = streamed_from_host(self._plan)
        return build_step(twin), twin.abstract_state

    def trace(self, _: TrainState, batch: Batch) -> Any:
        """Traces the program with an abstract state of its own plan; the given state is ignored."""
        step, state = self._step
        return step.trace(state, batch)

    def lower(self, _: TrainState, batch: Batch) -> Any:
        """Lowers the program with an abstract state of its own plan; the given state is ignored."""
        step, state = self._step
        return step.lower(state, batch)


class LiveStateOnly:
    """Wraps a compiled function of a state and a batch: raises ValueError for a donated state.

    Without this check XLA's CPU devices would read the freed memory. The check reads one array of
    each part of the state, which takes microseconds. The function runs under the mesh of the plan,
    whatever mesh the user has set.

    Attributes:
      compiled: the wrapped function.
      trace, lower: methods `trace` and `lower` of the wrapped function (or of `program`).
    """

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        compiled: Any,
        program: Any = None,
    ) -> None:
        """Wraps a function.

        Args:
          mesh: mesh of the plan.
          compiled: function to wrap.
          program: object whose `trace` and `lower` are used; None: `compiled`.
        """
        self.compiled, self._mesh = compiled, mesh
        program = compiled if program is None else program
        self.trace, self.lower = map(self._under_mesh, (program.trace, program.lower))

    def _under_mesh(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def under(*arguments: Tree) -> Any:
            with under_own_mesh(self._mesh):
                return function(*arguments)

        return under

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        for name, part in state.items():
            array = _first_array(part)
            if array is not None and array.is_deleted():
                raise ValueError(
                    f"state[{name!r}] was passed to an earlier step, which freed its memory: a "
                    "step donates its state. Write `state, metrics = step(state, batch)` and "
                    "continue with the returned state (jax.device_get(state) before the step "
                    "keeps a copy)"
                )
        if jax.sharding.get_abstract_mesh().empty:
            return self.compiled(state, batch)
        with under_own_mesh(self._mesh):
            return self.compiled(state, batch)


def _first_array(tree: Tree) -> jax.Array | None:
    """Returns one array of a tree, without flattening the tree; None for a tree without arrays."""
    if isinstance(tree, dict | tuple | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            found = _first_array(child)
            if found is not None:
                return found
        return None
    is_array = isinstance(tree, jax.Array) and not isinstance(tree, jax.core.Tracer)
    return tree if is_array else None


def _build_factor(plan: Plan) -> Callable[[TrainState, Any], jax.Array | None]:
    """Builds the traced `(state, batch) -> factor`; the loss is multiplied by it before
    differentiation.

    The factor is float32 [], or None if the loss is not multiplied.
    """
    scaling, weight = plan.precision.loss_scale, _expected_weight(plan)
    num_pieces = plan.division.unit

    def factor_of(state: TrainState, batch: Batch) -> jax.Array | None:
        if plan.traced.batch_weight is None:
            return None if scaling is None else state["loss_scale"]["scale"] / weight
        whole = plan.traced.batch_weight(batch, num_pieces)
        # Avoids a division by a weight of 0; the loss is not finite then, and the step is skipped.
        whole = jnp.where(whole == 0, 1, whole)
        return (1 if scaling is None else state["loss_scale"]["scale"]) / whole

    return factor_of


def _expected_weight(plan: Plan) -> float:
    """Estimates the weight by which the loss will be divided, rounded to a power of two.

    A loss scale is meant for the mean loss, but the step differentiates the sum, whose gradient is
    larger by the weight. The exact weight is known only after the forward passes.
    """
    leaves = jax.tree.leaves(plan.abstract_batch)
    if not plan.traced.has_weight:
        count = plan.division.unit
    else:  # a language model's integers are [rows, seq], a classifier's [rows]
        integers = [x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.integer)]
        count = max(integers, default=leaves[0].shape[0])
    return 2.0 ** round(math.log2(count))


@names_keywords()
@on_mesh_of_plan
def build_evaluation(plan: Plan, loss: Loss | None = None) -> Any:
    """Builds the evaluation of a plan, jitted once.

    Args:
      loss: loss to evaluate, with the signature of the training loss; None uses the plan's loss.

    Returns:
      `evaluate(state, batch) -> {"loss": sum, "weight": sum}`, float32 scalars over the global
      batch; with metrics of the loss also `"metrics": {name: {"sum": ..., "weight": ...}}`. The
      model runs in evaluation mode; the state is not donated and does not change. A state that was
      donated to a step raises ValueError.

    Raises:
      TypeError: `plan` is not a plan.
      ValueError: a custom loss is given, but the plan splits sequences over devices.
    """
    require_plan(plan, "build_evaluation")
    if plan.context is not None and loss is not None:
        raise ValueError(
            f"context={plan.context.devices} splits sequences over devices, but a custom loss may "
            "combine tokens of a sequence; use loss=None, the model's method loss(batch), or "
            "context=1"
        )
    _keep_memory(plan)
    config = pass_config(plan)
    if _reads_pages(plan):
        evaluation = PagedEvaluation(plan, config, loss or plan.loss)
        return LiveStateOnly(plan.mesh, evaluation, _OneProgram(plan))
    forward = _passes(plan).build_forward(config, loss or plan.loss)
    follow = build_following(plan)

    def evaluate(state: TrainState, batch: Batch) -> Metrics:
        given = state["params"], state["frozen"], state["extras"], state["rng"], batch
        # Evaluate with the copies that the next step would read.
        return forward(*given) if follow is None else forward(*given, follow(state))

    options = None if config.fixed_pieces is None else dict(plan.program.options)
    replicated = NamedSharding(plan.mesh, P())
    jitted = jax.jit(evaluate, out_shardings=replicated, compiler_options=options)
    return LiveStateOnly(plan.mesh, NewWeightsOnly(plan, jitted) if is_late(plan) else jitted)


class NewWeightsOnly:
    """Wraps a compiled evaluation: raises ValueError for a state whose last update waits.

    Attributes:
      trace, lower: methods of the evaluation.
    """

    def __init__(self, plan: Plan, compiled: Any) -> None:
        self._plan, self._compiled = plan, compiled
        self.trace, self.lower = compiled.trace, compiled.lower

    def __call__(self, state: TrainState, batch: Any) -> Any:
        check_nothing_waits(self._plan, state, "an evaluation")
        return self._compiled(state, batch)


def is_late(plan: Plan) -> bool:
    """Returns whether the state between steps lacks the last update
    (`offload.update_in_forward`)."""
    return plan.offload is not None and plan.offload.in_forward


@names_keywords()
@on_mesh_of_plan
def build_finish(plan: Plan) -> Callable[[TrainState], TrainState]:
    """Builds the function that completes the last update of a state, jitted once.

    With `offload.update_in_forward` a state between steps has the weights before the update of its
    last step. Finish it before anything reads weights or moments: an evaluation, a checkpoint, an
    export, the end of training. Steps may follow: weights are the same with and without it. `train`
    does so by itself.

    Returns:
      `finish(state) -> state`. `state` is donated: use only the returned state. With any other plan
      it returns its argument.

    Raises:
      TypeError: `plan` is not a plan.
    """
    require_plan(plan, "build_finish")
    if not is_late(plan):
        return lambda state: state
    update = build_offload_update(plan, whole=True)
    jitted = jax.jit(
        lambda state, _: finished(update, state),
        donate_argnums=0,
        out_shardings=plan.state_shardings,
        compiler_options=dict(plan.program.options) or None,
    )
    live = LiveStateOnly(plan.mesh, jitted)
    return lambda state: live(state, None)


def _updates_in_backward(plan: Plan) -> bool:
    """Returns whether the backward pass of the jitted step updates layers on the host."""
    offload = plan.settings.offload
    return offload.update_in_backward and offload.params == HOST


def _reads_pages(plan: Plan) -> bool:
    return plan.offload is not None and bool(plan.offload.paged)


def _build_gradients(plan: Plan, *, unsummed: frozenset[str] = frozenset()) -> Any:
    """Builds the traced gradient function of a step.

    The function maps `(state, key_data, batch, loss_factor)` to `(sums, gradients, extras, state)`.
    The state is unchanged, except for layers already updated in the backward pass and for copies of
    weights, which are refreshed before they are read. Gradients of `unsummed` names are not summed
    over devices.
    """
    config = pass_config(plan)
    if _reads_pages(plan):
        end = build_paged_gradients(config)

        def ending(
            state: TrainState, _: object, given: Tree, factor: jax.Array | None
        ) -> tuple[Any, ...]:
            return *end(state["params"], state["extras"], given["totals"]), state

        return ending
    if plan.offload is not None and plan.offload.delayed:
        if plan.offload.in_forward:
            return build_forward_gradients(plan, config)
        late = build_delayed_gradients(plan, config, DelayedUpdates)

        def delayed(state: TrainState, *given: Any) -> tuple[Any, ...]:
            return late(state, *given, without_moments(state["opt_state"]))

        return delayed
    if _updates_in_backward(plan):
        updating = build_updating_gradients(plan, config)
        return lambda state, key_data, batch, _: updating(state, key_data, batch)
    build = _passes(plan).build_gradients
    gradients = passes.build_gradients(config, unsummed=unsummed) if unsummed else build(config)

    def unchanged(
        state: TrainState, key_data: jax.Array, batch: Batch, factor: jax.Array | None
    ) -> tuple[Any, ...]:
        given = state["params"], state["frozen"], state["extras"], key_data, batch, factor
        return *gradients(*given, **drawn(plan, state)), state

    follow = build_following(plan)
    if follow is None:
        return unchanged
    key = copies_key(plan.placement, plan.precision)

    def following(
        state: TrainState, key_data: jax.Array, batch: Batch, factor: jax.Array | None
    ) -> tuple[Any, ...]:
        given = state["params"], state["frozen"], state["extras"], key_data, batch, factor
        copies = follow(state)
        renewed = state.copy()
        renewed["copies"] = {key: copies}
        return *gradients(*given, copies, **drawn(plan, state)), renewed

    return following


def drawn(plan: Plan, state: TrainState) -> dict[str, jax.Array]:
    """Returns the arguments of the gradient function that features draw for a step; traced."""
    found: dict[str, jax.Array] = {}
    for feature, decision in active(plan):
        found |= feature.draw(plan, decision, state)
    return found


def _build_update(plan: Plan) -> Any:
    """Builds the traced update, `(gradients, state, ThisStep) -> changed parts of the state`."""
    if plan.offload is not None and plan.offload.leaves:
        if plan.offload.in_forward:
            return leave_gradients(plan)
        update = build_offload_update(plan)
        return with_delay(plan, update) if plan.offload.delayed else update
    is_free = plan.settings.fixed_pieces is None
    update = build_update(plan) if is_free else build_chunked_update(plan)

    def updated(grads: Tree, state: TrainState, now: ThisStep) -> dict[str, Any]:
        params, opt_state = update(grads, state, now)
        return {"params": params, "opt_state": opt_state, "masters": {}}

    return updated


def _passes(plan: Plan) -> Any:
    """Returns the module that runs forward and backward pass: `passes`, `fixed_passes`, `streaming`
    or `pipeline_passes`.
    """
    if plan.settings.fixed_pieces is not None:
        return fixed_passes
    if plan.pipeline is not None:
        return pipeline_passes
    return streaming if plan.offload is not None and plan.offload.streamed else passes


def pass_config(plan: Plan) -> passes.PassConfig:
    """Returns the part of a plan that the forward and backward passes need."""
    options: dict[str, Any] = {}
    for feature, decision in active(plan):
        more = feature.pass_options(decision)
        assert not options.keys() & more.keys(), "two features set one option of the passes"
        options |= more
    return passes.PassConfig(
        model=plan.model,
        loss=plan.loss,
        mesh=plan.mesh,
        placement=plan.placement,
        precision=plan.precision,
        num_microbatches=plan.num_microbatches,
        reduce_bucket_size=plan.settings.reduce_bucket_size,
        allgather_bucket_size=plan.settings.allgather_bucket_size,
        sequence_sharding=plan.settings.sequence_sharding,
        regather=plan.program.regather,
        pipeline=plan.pipeline,
        context=plan.context,
        before_cut=bound_attribute(plan.model, "before_cut"),
        offload=plan.offload,
        fixed_pieces=plan.settings.fixed_pieces,
        metrics=plan.traced.metric_names,
        counted=plan.traced.counted_state,
        exact_leaves=frozenset(plan.traced.exact_leaves),
        unroll=plan.program.unroll,
        tiles=plan.tiles.cut,
        **options,
    )
