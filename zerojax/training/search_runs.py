"""Searches for settings of a run of any model: `zerojax.search`, `zerojax plan SCRIPT --search`.

What may vary is read from the plan: the layers that a pipeline can divide, whether layers of a list
became a loop, whether rules say how to split tensors.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax
from jax.sharding import AbstractMesh

from zerojax import tracing
from zerojax.config import MeshConfig, as_mesh_config
from zerojax.config.checks import as_patterns, names_keywords
from zerojax.config.display import as_details
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.run import OptimizerConfig
from zerojax.config.tree_types import Batch
from zerojax.forecasting import forecast
from zerojax.forecasting.settings_search import (
    LIST_REMATS,
    Candidate,
    SearchedRun,
    SearchResult,
    find_settings,
    list_candidates,
    own_candidate,
    search_dict,
    search_page,
)
from zerojax.forecasting.settings_search.candidates import LIST_OPTION, MODEL_SIZES
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import Gpu, find_gpu
from zerojax.models import bound_attribute
from zerojax.optim.precision import Precision
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.inputs import PlanInputs
from zerojax.plan.make import Plan
from zerojax.plan.refusals import check_rows
from zerojax.tracing.unrolling import MOST_UNROLLED, why_never_unrolled
from zerojax.training.run_spec import plan_elsewhere


@dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """The run that a call of `train` or `make_plan` describes, as input of a search.

    Attributes:
      inputs: inputs of the plan.
      settings: the mesh options; `data` takes the devices that other axes leave.
      mesh_options: mesh options that override fields of `settings` on every mesh.
      is_deepspeed: whether a DeepSpeed configuration sets the mesh.
    """

    inputs: PlanInputs
    settings: MeshConfig
    mesh_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_deepspeed: bool = False

    def plan_on(self, mesh: AbstractMesh, gpu: Gpu | None = None) -> Plan:
        """Returns the plan of the run on a mesh of absent devices.

        Args:
          mesh: mesh of the absent devices.
          gpu: kind of the devices; None: not known, and `offload.auto` offloads nothing.
        """
        return plan_elsewhere(self.inputs, self.settings, mesh, gpu=gpu, **self.mesh_options)

    def with_settings(self, num_microbatches: int | None, **fields: Any) -> PlannedCall:
        """Returns the same call with other mesh options and number of microbatches."""
        return dataclasses.replace(
            self,
            inputs=dataclasses.replace(self.inputs, num_microbatches=num_microbatches),
            settings=dataclasses.replace(self.settings, **fields),
        )


@dataclass(frozen=True, repr=False)
class SettingsFound:
    """The settings that a search chose.

    Attributes:
      mesh: mesh options to pass to `zerojax.train` or `make_plan`; None if nothing fits.
      num_microbatches: number of microbatches to pass with `mesh`; None if nothing fits.
      result: all candidates with reasons, and the forecast of the choice.
    """

    mesh: MeshConfig | None
    num_microbatches: int | None
    result: SearchResult

    def page(self) -> str:
        """Returns the compiled candidates, the reasons for the others and the choice as text."""
        return search_page(self.result)

    def as_dict(self) -> dict[str, Any]:
        """Returns every number as a JSON-compatible dictionary."""
        return search_dict(self.result)

    def __repr__(self) -> str:
        return f"SettingsFound({self.result.sentence} page() has all candidates)"

    def _repr_html_(self) -> str:
        return as_details(self.result.sentence, self.page())


@names_keywords()
def search(
    model: tracing.ModelLike,
    mesh: MeshConfig | Mapping[str, Any] | None = None,
    *,
    gpu: Gpu | str,
    devices: int,
    example_batch: Batch,
    loss: tracing.Loss | None = None,
    optimizer: optax.GradientTransformation | OptimizerConfig | None = None,
    precision: Precision | str | None = None,
    freeze: str | Sequence[str] = (),
    budget: float = 300.0,
    progress: Callable[[str], None] | None = None,
) -> SettingsFound:
    """Finds the settings that fit on GPUs and cost the least time per step; no GPU is needed.

    It varies ZeRO stage, microbatches, pipeline stages (if the layers run in one loop), what layers
    of a list recompute, tensor parallelism (if the model or `mesh` has rules), and bucket sizes; if
    nothing fits, also offload to host memory. Candidates that cannot win are ruled out by formula;
    the others are compiled for the GPUs.

    Args:
      model: as `zerojax.train` takes it.
      mesh: mesh options that the search keeps, such as rules, replica or offload.
      gpu: a card's name ("h100"), its YAML file, or a `Gpu`.
      devices: number of GPUs.
      example_batch: a global batch, as arrays or `ShapeDtypeStruct`s; dimension 0 is the batch.
      loss, optimizer, precision, freeze: as in `zerojax.make_plan`.
      budget: time limit in seconds; a compilation that has begun still finishes.
      progress: function called with a few words about each stage of the work.

    Returns:
      The choice: `zerojax.train(model, found.mesh, num_microbatches=found.num_microbatches)`.

    Raises:
      ValueError, TypeError: a setting is invalid, or the model cannot be planned.
      CompilerMissing: the compile-only client is not installed (`zerojax[plan]`).
    """
    missing = compile_client.missing()
    if missing is not None:
        raise compile_client.CompilerMissing(f"search compares compiled plans, but {missing}")
    if budget <= 0:
        raise ValueError(f"budget={budget:g}: use seconds above 0, such as 300")
    if devices < 1:
        raise ValueError(f"devices={devices}: use at least 1")
    card = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    inputs = PlanInputs(
        model=model,
        example_batch=example_batch,
        loss=loss,
        optimizer=optimizer,
        precision=precision,
        freeze=as_patterns("freeze", freeze),
    )
    call = PlannedCall(inputs=inputs, settings=as_mesh_config(mesh))
    return find_for(call, card, devices, budget=budget, progress=progress)


def find_for(
    call: PlannedCall,
    gpu: Gpu,
    devices: int,
    *,
    budget: float,
    num_microbatches: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> SettingsFound:
    """Finds the settings of a call of `train` or `make_plan`; see `search`.

    Args:
      call: the run.
      gpu, devices: the card, and the number of cards.
      budget, progress: as in `search`.
      num_microbatches: number of microbatches of every candidate; None: the search varies it.
    """
    report = progress or (lambda text: None)
    began = time.monotonic()
    searched = searched_run(call, gpu, devices, num_microbatches)
    result = find_settings(
        searched,
        gpu,
        forecast_of=lambda plan: forecast(plan, gpu=gpu, fast=True, progress=report),
        # Listing the candidates has planned, too, and is part of the time.
        budget=max(budget - (time.monotonic() - began), 1.0),
        report=report,
    )
    if result.chosen is None:
        return SettingsFound(None, None, result)
    assert result.options is not None
    options = {**result.chosen.candidate.mesh_options(), **result.options}
    settings = dataclasses.replace(call.settings, **options)
    return SettingsFound(settings, result.chosen.candidate.num_microbatches, result)


def searched_run(
    call: PlannedCall, gpu: Gpu, devices: int, num_microbatches: int | None = None
) -> SearchedRun:
    """Returns the run of a call with the candidates that its model permits.

    Args:
      call, gpu, devices, num_microbatches: as in `find_for`.

    Raises:
      ValueError, TypeError: the model cannot be planned, or nothing divides devices and batch.
    """

    def plan_for(candidate: Candidate, options: Mapping[str, Any]) -> Plan:
        fields = {**candidate.mesh_options(), **options}
        changed = call.with_settings(candidate.num_microbatches, **fields)
        return changed.plan_on(make_abstract_mesh(changed.settings, devices, gpu=gpu))

    rows = check_rows(call.inputs.example_batch)
    settings = call.settings
    if settings.offload.auto:  # the search tries offload by itself
        settings = dataclasses.replace(settings, offload=settings.offload.chosen())
        call = dataclasses.replace(call, settings=settings)
    listed: dict[str, Any] = {
        "node_devices": gpu.node_devices,
        "replicas": settings.replica,
        "context": settings.context,
        "num_microbatches": num_microbatches,
    }
    lone = list_candidates(devices, rows, models=(1,), remat_option=None, **listed)
    if not lone:
        unit, pieces = settings.replica * settings.context, num_microbatches or 1
        remedy = f"a multiple of {devices * pieces} rows"
        if devices % unit:
            more = -(-devices // unit) * unit
            remedy = f"{more} devices and a multiple of {more * pieces} rows"
        raise ValueError(
            f"devices={devices} with replica={settings.replica}, context={settings.context} and "
            f"num_microbatches={pieces}: the {rows} rows of a batch cannot be divided evenly; use "
            f"{remedy}"
        )
    # At stage 3 layers of a list are a loop.
    plan = plan_for(max(lone, key=lambda candidate: candidate.zero), {})
    layers = max((leaf.num_slices for leaf in plan.placement.leaves.values()), default=1)
    candidates = list_candidates(
        devices,
        rows,
        num_layers=layers,
        models=MODEL_SIZES if _has_rules(plan) else (1,),
        remats=[
            remat for remat in LIST_REMATS if remat != "attention" or plan.traced.attention_calls
        ],
        remat_option=LIST_OPTION if plan.stacks else None,
        unrolls=_can_unroll(lone[0], layers, plan, plan_for),
        **listed,
    )
    remat = settings.roll_remat if plan.stacks else "none"
    own = own_candidate(
        candidates,
        zero=settings.zero,
        model=settings.model,
        stage=settings.stage,
        num_microbatches=call.inputs.num_microbatches or 1,
        remat="none" if remat == "model" else remat,
    )
    return SearchedRun(plan_for=plan_for, candidates=candidates, offload=settings.offload, own=own)


def _has_rules(plan: Plan) -> bool:
    return bool(plan.settings.rules or bound_attribute(plan.model, "tensor_parallel_rules"))


def _can_unroll(
    candidate: Candidate, layers: int, plan: Plan, plan_for: Callable[..., Plan]
) -> bool:
    """Returns whether the loop over layers can be straight code below ZeRO stage 3."""
    settings = dataclasses.replace(plan.settings, zero=0, stage=1)
    if plan.stacks or not 1 < layers <= MOST_UNROLLED or why_never_unrolled(settings):
        return False
    try:
        plan_for(dataclasses.replace(candidate, zero=0, unroll=True), {})
    except ValueError:
        return False
    return True
