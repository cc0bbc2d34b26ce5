"""Candidate settings of a search, and lower bounds of their memory and time by formula."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

from zerojax.forecasting.roofline import estimate, memory_limit
from zerojax.hardware.gpus import Gpu
from zerojax.models.flops import count_program_flops
from zerojax.parallel.step import build_step
from zerojax.plan import counts
from zerojax.plan.counts import role_bytes, state_bytes
from zerojax.plan.eight_bits import eight_bit_share
from zerojax.plan.expert_costs import exchange_bytes
from zerojax.plan.make import Plan
from zerojax.plan.offload_costs import hiding
from zerojax.plan.pipeline_costs import executed_flops, message_bytes, useful_flops
from zerojax.plan.whole_matrices import matrix_bytes
from zerojax.plan.wire import bytes_by_level, wire_bytes

Remat = Literal["none", "dots", "attention", "full"]
REMATS: tuple[Remat, ...] = ("none", "dots", "attention", "full")
"""Of a reference model, from the most memory to the least."""
MODEL_SIZES = (1, 2, 4, 8)
STAGE_SIZES = (1, 2, 4, 8)
MICROBATCHES_PER_STAGE = 2
"""Fewest with which a pipeline is looked at: its bubble is then below a third."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """The settings that the search varies.

    Attributes:
      zero: 0..3; model, stage, expert: sizes of these mesh axes; num_microbatches; remat: of
        `REMATS`.
      unroll: whether the loop over layers is straight code.
    """

    zero: int
    model: int
    num_microbatches: int
    remat: Remat
    stage: int = 1
    expert: int = 1
    unroll: bool = False

    @property
    def simplicity(self) -> tuple[int, ...]:
        """The least is the simplest: of equal ones it is preferred."""
        remat = REMATS.index(self.remat)
        return (self.stage, self.model, self.expert, self.num_microbatches, remat, self.zero)

    def words(self) -> tuple[str, ...]:
        """The KEY=VALUE words that set it; `data` takes what the other axes leave. Of `expert` only
        where it is above 1: models without experts have nothing to set."""
        return (
            "mesh.data=-1",
            f"mesh.zero={self.zero}",
            f"mesh.model={self.model}",
            f"mesh.stage={self.stage}",
            *[f"mesh.expert={self.expert}"] * (self.expert > 1),
            f"num_microbatches={self.num_microbatches}",
            f"model.remat={self.remat}",
            *["mesh.unroll=true"] * self.unroll,
        )

    def describe(self) -> str:
        """For people, in one line."""
        plural = "es" if self.num_microbatches > 1 else ""
        stages = f"stage={self.stage}, " if self.stage > 1 else ""
        experts = f"expert={self.expert}, " if self.expert > 1 else ""
        return (
            f"zero={self.zero}, model={self.model}, {stages}{experts}"
            f"{self.num_microbatches} microbatch{plural}, remat={self.remat}"
            f"{', unroll' * self.unroll}"
        )


def list_candidates(
    devices: int,
    global_batch_size: int,
    *,
    node_devices: int,
    replicas: int = 1,
    context: int = 1,
    remats: Sequence[Remat] = REMATS,
    num_layers: int = 1,
    num_experts: int = 0,
    unrolls: bool = False,
) -> list[Candidate]:
    """Every combination that cuts the devices and the batch evenly, from the simplest on.

    Tensor parallelism stays inside a node, and microbatches are powers of two. With one device on
    `data` and `context` ZeRO splits nothing, so that only stage 0 is listed. Of pipelines those are
    listed that cut the layers evenly, with the two largest numbers of microbatches: the more there
    are, the less they idle. Stage 0 beside a pipeline sends what stage 1 sends and needs more
    memory. Where sequences are split there are none. Experts are split over every number of devices
    that divides both, whether one node has so many or not: the time knows the links.

    Args:
      devices: all; node_devices: that one fast fabric joins.
      global_batch_size: rows.
      replicas, context: sizes of these mesh axes, which the search leaves as they are.
      remats: of `REMATS`, what the model takes.
      num_layers: of the loop that a pipeline cuts; 1 lists no pipelines.
      num_experts: of a layer; 0: the model has none. They are not split beside pipelines and split
        sequences.
      unrolls: unroll the loop over layers below stage 3 where no layer is computed again. It moves
        and holds less than the loop, so that the loop is not listed there.
    """
    found = []
    stages = STAGE_SIZES if context == 1 else (1,)
    for stage, model in itertools.product(stages, MODEL_SIZES):
        if (
            devices % (stage * model * replicas * context)
            or model > node_devices
            or num_layers % stage
        ):
            continue
        shards = devices // (stage * model * context)
        rows, rest = divmod(global_batch_size, shards)
        if rest:
            continue
        pieces = [2**power for power in range(rows.bit_length()) if rows % 2**power == 0]
        zeros = range(4) if shards * context > replicas else range(1)
        if stage > 1:
            pieces = [number for number in pieces if number >= MICROBATCHES_PER_STAGE * stage][-2:]
            zeros = zeros[1:] or zeros
        split = shards // replicas if num_experts and stage == context == 1 else 1
        found += [
            Candidate(
                zero=zero,
                model=model,
                stage=stage,
                expert=expert,
                num_microbatches=number,
                remat=remat,
                unroll=unrolls and stage == expert == 1 and zero < 3 and remat == "none",
            )
            for expert in _divisors(math.gcd(num_experts, split) if split > 1 else 1)
            for zero in zeros
            for number in pieces
            for remat in remats
        ]
    return sorted(found, key=lambda candidate: candidate.simplicity)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


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
    below. (Rows of experts travel once more with remat; the plan is the one with the least of it.)
    The step without a pipeline is traced once per kind, to count what is computed again:
    that share depends neither on the mesh nor on the microbatches.
    """
    plans: dict[tuple[int, ...], Plan] = {}
    repeats: dict[str, float] = {}

    def find(candidate: Candidate) -> Bounds:
        mesh = candidate.model, candidate.stage, candidate.expert
        key = (candidate.zero, *mesh, candidate.num_microbatches)
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
    eight_bits = eight_bit_share(plan.traced.forward)
    time = estimate(
        gpu,
        mesh={str(name): size for name, size in plan.mesh.shape.items()},
        dtype=plan.precision.compute_dtype.name,
        flops=executed * repeat,
        eight_bits=eight_bits,
        model_eight_bits=eight_bits,
        model_flops=flops,
        hbm_bytes=None,
        rows=(),
        formula_bytes=wire_bytes(plan),
        level_bytes=bytes_by_level(plan),
        message_bytes=message_bytes(plan.pipeline) if plan.pipeline else 0,
        exchange_bytes=exchange_bytes(plan),
        matrix_bytes=matrix_bytes(plan),
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
