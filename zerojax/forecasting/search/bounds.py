"""Lower bounds of a candidate's memory and time, by formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from zerojax.forecasting.roofline import estimate, memory_limit
from zerojax.forecasting.search.candidates import REMATS, Candidate
from zerojax.hardware.gpus import Gpu
from zerojax.models.flops import count_program_flops
from zerojax.parallel.step import build_step
from zerojax.plan import counts
from zerojax.plan.counts import role_bytes, state_bytes
from zerojax.plan.offload_costs import hiding
from zerojax.plan.pipeline_costs import executed_flops, message_bytes, useful_flops
from zerojax.plan.plan import Plan
from zerojax.plan.wire import wire_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a candidate needs at least.

    Attributes:
      seconds: per step, by the roofline of products and wire; 0 where the card has no peak.
      wire_seconds: of these, the wire's.
      state: bytes per device between steps; peak: with weights and gradients, without activations.
      limit: bytes per device that JAX may take.
    """

    seconds: float
    wire_seconds: float
    state: int
    peak: int
    limit: int


MakePlan = Callable[[Candidate], Plan]
FindBounds = Callable[[Candidate], Bounds]


def bounds_on(gpu: Gpu, make_plan_for: MakePlan) -> FindBounds:
    """The function that finds the bounds of candidates on a card; it raises what planning raises.

    Remat changes neither bytes nor wire by formula, so that one plan serves all its kinds; only a
    pipeline's buffers hold less with more of it, and one plan with all of it bounds them from
    below. The step without a pipeline is traced once per kind, to count what is computed again:
    that share depends neither on the mesh nor on the microbatches.
    """
    plans: dict[tuple[int, ...], Plan] = {}
    repeats: dict[str, float] = {}

    def find(candidate: Candidate) -> Bounds:
        key = (candidate.zero, candidate.model, candidate.stage, candidate.num_microbatches)
        if key not in plans:
            least = dataclasses.replace(candidate, remat=REMATS[-1])
            plans[key] = make_plan_for(candidate if candidate.stage == 1 else least)
        if candidate.remat not in repeats and candidate.stage == 1:
            repeats[candidate.remat] = repeated(make_plan_for(candidate))
        return bounds_of(plans[key], gpu, repeats.get(candidate.remat, 1.0))

    return find


def bounds_of(plan: Plan, gpu: Gpu, repeat: float) -> Bounds:
    """The bounds of one plan, whose step computes `repeat` times the FLOPs of one without remat.

    A pipeline computes in empty slots, too, and waits for its slowest stage.
    """
    flops = counts.model_flops(plan) / plan.mesh.size
    executed = flops
    if plan.pipeline is not None:
        executed = flops * executed_flops(plan.pipeline) / useful_flops(plan.pipeline)
    time = estimate(
        gpu,
        mesh={str(name): size for name, size in plan.mesh.shape.items()},
        dtype=plan.precision.compute_dtype.name,
        flops=executed * repeat,
        model_flops=flops,
        hbm_bytes=None,
        rows=(),
        formula_bytes=wire_bytes(plan),
        message_bytes=message_bytes(plan.pipeline) if plan.pipeline else 0,
        hiding=hiding(plan, gpu),
    )
    return Bounds(
        seconds=time.step_seconds or 0.0,
        wire_seconds=time.wire_seconds,
        state=state_bytes(plan),
        peak=sum(role_bytes(plan).values()),
        limit=memory_limit(gpu)[0],
    )


def repeated(plan: Plan) -> float:
    """FLOPs of the step with what remat computes again, over those without."""
    traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    return count_program_flops(traced.jaxpr) / counts.model_flops(plan)
