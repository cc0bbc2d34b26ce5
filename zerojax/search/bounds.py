"""What formulas say of a candidate before it is compiled: bytes it needs, a time it cannot beat.

Knows plans and a card; never a compiled program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from zerojax import profile
from zerojax.forecast import formulas
from zerojax.forecast.roofline import estimate, memory_limit
from zerojax.gpus import Gpu
from zerojax.plan import Plan
from zerojax.plan_table import role_bytes, shard_bytes
from zerojax.search.candidates import Candidate
from zerojax.step import build_step


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

    Remat changes neither bytes nor wire by formula, so that one plan serves all its kinds. The step
    is traced once per kind, to count what is computed again: that share depends neither on the mesh
    nor on the microbatches.
    """
    plans: dict[tuple[int, int, int], Plan] = {}
    repeats: dict[str, float] = {}

    def find(candidate: Candidate) -> Bounds:
        key = (candidate.zero, candidate.model, candidate.num_microbatches)
        if key not in plans:
            plans[key] = make_plan_for(candidate)
        if candidate.remat not in repeats:
            repeats[candidate.remat] = repeated(make_plan_for(candidate))
        return bounds_of(plans[key], gpu, repeats[candidate.remat])

    return find


def bounds_of(plan: Plan, gpu: Gpu, repeat: float) -> Bounds:
    """The bounds of one plan, whose step computes `repeat` times the FLOPs of one without remat."""
    flops = formulas.model_flops(plan) / plan.mesh.size
    time = estimate(
        gpu,
        mesh={str(name): size for name, size in plan.mesh.shape.items()},
        dtype=plan.precision.compute_dtype.name,
        flops=flops * repeat,
        model_flops=flops,
        hbm_bytes=None,
        rows=(),
        formula_bytes=formulas.wire_bytes(plan),
    )
    return Bounds(
        seconds=time.step_seconds or 0.0,
        wire_seconds=time.wire_seconds,
        state=shard_bytes(plan.abstract_state),
        peak=sum(role_bytes(plan).values()),
        limit=memory_limit(gpu)[0],
    )


def repeated(plan: Plan) -> float:
    """FLOPs of the step with what remat computes again, over those without."""
    traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    return profile.count_program_flops(traced.jaxpr) / formulas.model_flops(plan)
