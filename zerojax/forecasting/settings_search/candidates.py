"""Lists the candidates of a search for settings, and computes lower bounds of their memory and time
by formula."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from zerojax.config.late_dataclasses import dataclass
from zerojax.forecasting.roofline import estimate, memory_limit
from zerojax.hardware.gpus import Gpu
from zerojax.hardware.gpus.achieved import achieved_rates
from zerojax.pipeline.pipeline_costs import executed_flops, message_bytes, useful_flops
from zerojax.plan import counts
from zerojax.plan.counts import role_bytes, state_bytes
from zerojax.plan.expert_costs import exchange_bytes
from zerojax.plan.fp8_costs import eight_bit_share
from zerojax.plan.make import Plan
from zerojax.plan.muon_matrices import matrix_bytes
from zerojax.plan.offload_costs import hiding
from zerojax.plan.wire import bytes_by_level, wire_bytes
from zerojax.step.build import build_step
from zerojax.tracing.flops import count_program_flops

Remat = Literal["none", "elementwise", "dots", "attention", "full"]
RematOption = Literal["model.remat", "mesh.roll_remat"]
"""Names of the settings for recomputation: of a reference model, and of rolled layers (a list of
layers that runs as one loop)."""
LIST_OPTION: RematOption = "mesh.roll_remat"
REMATS: tuple[Remat, ...] = ("none", "dots", "attention", "full")
"""Values of the recomputation setting of a reference model, from the most memory to the least."""
LIST_REMATS: tuple[Remat, ...] = ("none", "elementwise", "dots", "attention", "full")
"""Values of the recomputation setting of rolled layers, in the same order. For a Llama with fused
attention `elementwise` stores a tenth more than `dots`, and recomputes no matrix product."""
MODEL_SIZES = (1, 2, 4, 8)
STAGE_SIZES = (1, 2, 4, 8)
MICROBATCHES_PER_STAGE = 2
"""Fewest microbatches per stage of a pipeline candidate: its bubble is then below a third."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One combination of the settings that the search varies.

    Attributes:
      zero: ZeRO stage, 0 to 3.
      model, stage, expert: sizes of these mesh axes.
      num_microbatches: number of microbatches.
      remat: recomputation, one of `LIST_REMATS`.
      unroll: whether the loop over layers is unrolled.
      remat_option: name of the setting that has the value `remat`; None: the model decides, and
        `remat` is "none".
      mix: (title of a loop over layers, its recomputation) of all loops, in place of `remat`; () if
        `remat` is that of all loops.
    """

    zero: int
    model: int
    num_microbatches: int
    remat: Remat
    stage: int = 1
    expert: int = 1
    unroll: bool = False
    remat_option: RematOption | None = "model.remat"
    mix: tuple[tuple[str, str], ...] = ()

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Key by which candidates are sorted: of those within 1 % of the fastest (`SAME`), the one
        with the smallest key is preferred."""
        remat = LIST_REMATS.index(self.remat)
        return (self.stage, self.model, self.expert, self.num_microbatches, remat, self.zero)

    def words(self) -> tuple[str, ...]:
        """Returns the KEY=VALUE texts that set this candidate; the `data` axis takes the remaining
        devices.

        `expert` is included only if it is above 1, because models without experts do not have this
        setting.
        """
        return (
            "mesh.data=-1",
            f"mesh.zero={self.zero}",
            f"mesh.model={self.model}",
            f"mesh.stage={self.stage}",
            *[f"mesh.expert={self.expert}"] * (self.expert > 1),
            f"num_microbatches={self.num_microbatches}",
            *[self.remat_word] * (self.remat_option is not None),
            *[f"mesh.unroll={str(self._unroll).lower()}"] * (self._unroll is not None),
        )

    def mesh_options(self) -> dict[str, Any]:
        """Returns the fields of `MeshConfig` that this candidate sets."""
        options: dict[str, Any] = {
            "data": -1,
            "model": self.model,
            "stage": self.stage,
            "expert": self.expert,
            "zero": self.zero,
            "unroll": self._unroll,
        }
        if self.remat_option == LIST_OPTION:
            options["roll_remat"] = self.mix or self._remat_value
        return options

    @property
    def _unroll(self) -> bool | None:
        """Value of `mesh.unroll`; None where a plan never unrolls by itself."""
        may = self.remat == "none" and self.zero < 3 and self.stage == self.expert == 1
        return self.unroll if may else None

    @property
    def _remat_value(self) -> str:
        # "none" would require a loop, also where layers need none.
        is_list = self.remat_option == LIST_OPTION
        return "model" if is_list and self.remat == "none" else self.remat

    @property
    def remat_word(self) -> str:
        """The KEY=VALUE text that sets the recomputation."""
        pairs = ", ".join(f"{title}: {value}" for title, value in self.mix)
        return f"{self.remat_option}={f'{{{pairs}}}' if self.mix else self._remat_value}"

    @property
    def short_remat(self) -> str:
        """The recomputation for a column of a table; the values of a mix in the order of loops."""
        return "+".join(value for _, value in self.mix) or self.remat

    def describe(self) -> str:
        """Describes the candidate in one line for users."""
        plural = "es" if self.num_microbatches > 1 else ""
        stages = f"stage={self.stage}, " if self.stage > 1 else ""
        experts = f"expert={self.expert}, " if self.expert > 1 else ""
        return (
            f"zero={self.zero}, model={self.model}, {stages}{experts}"
            f"{self.num_microbatches} microbatch{plural}"
            f"{f', remat={self.short_remat}' * (self.remat_option is not None)}"
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
    models: Sequence[int] = MODEL_SIZES,
    remat_option: RematOption | None = "model.remat",
    num_microbatches: int | None = None,
) -> list[Candidate]:
    """Lists every combination of settings that divides the devices and the batch evenly, the
    simplest first.

    Tensor parallelism stays inside a node, and numbers of microbatches are powers of two. With one
    device on `data` and `context` ZeRO shards nothing, so only stage 0 is listed. A pipeline must
    divide the layers evenly and is listed with the two largest numbers of microbatches, because
    more microbatches mean less idle time; it is not listed with stage 0, which sends as much as
    stage 1 and needs more memory, nor with split sequences. Experts are split over every number of
    devices that divides both the experts and the devices, also across nodes, because the time
    estimate includes the links.

    Args:
      devices: number of all devices.
      node_devices: number of devices that one fast fabric connects.
      global_batch_size: number of rows of the batch.
      replicas, context: sizes of these mesh axes, which the search does not change.
      remats: the values of `LIST_REMATS` that the model supports.
      num_layers: number of layers in the loop that a pipeline divides; 1 lists no pipelines.
      num_experts: number of experts in a layer; 0: the model has none. Experts are not split in
        pipelines or with split sequences.
      unrolls: whether to list an unrolled loop over layers instead of the loop, below ZeRO stage 3
        and where no layer is recomputed. It moves and stores less than the loop.
      models: sizes of the `model` axis to list.
      remat_option: name of the recomputation setting of the candidates; None: `remats` is not used.
      num_microbatches: number of microbatches of every candidate; None: all powers of two that
        divide the rows.
    """
    found = []
    stages = STAGE_SIZES if context == 1 else (1,)
    # Without the option every value would give the same plan.
    remats = remats if remat_option else ("none",)
    for stage, model in itertools.product(stages, models):
        if (
            devices % (stage * model * replicas * context)
            or model > node_devices
            or num_layers % stage
        ):
            continue
        shards = devices // (stage * model * context)
        # A batch that the shards do not divide cannot be planned.
        rows, rest = divmod(global_batch_size, shards)
        if rest:
            continue
        powers = [2**power for power in range(rows.bit_length())]
        pieces = [
            number
            for number in (powers if num_microbatches is None else [num_microbatches])
            if rows % number == 0
        ]
        # Replicas hold the same state, so ZeRO needs a shard beyond them.
        zeros = range(4) if shards * context > replicas else range(1)
        if stage > 1:
            # The last two are the largest numbers of microbatches.
            pieces = [number for number in pieces if number >= MICROBATCHES_PER_STAGE * stage][-2:]
            # A single stage in the list must stay, or there would be no candidate.
            zeros = zeros[1:] or zeros
        # Experts share the devices of the batch, within one replica.
        split = shards // replicas if num_experts and stage == context == 1 else 1
        found += [
            Candidate(
                zero=zero,
                model=model,
                stage=stage,
                expert=expert,
                num_microbatches=number,
                remat=remat,
                remat_option=remat_option,
                unroll=unrolls and stage == expert == 1 and zero < 3 and remat == "none",
            )
            for expert in _divisors(math.gcd(num_experts, split) if split > 1 else 1)
            for zero in zeros
            for number in pieces
            for remat in remats
        ]
    # Equal times are decided by this order, so the result does not depend on how they were listed.
    return sorted(found, key=lambda candidate: candidate.simplicity)


def own_candidate(candidates: Sequence[Candidate], **settings: object) -> Candidate | None:
    """Finds the candidate that has a run's own settings; returns None if there is none.

    Args:
      candidates: candidates of the search.
      settings: fields of `Candidate` without `unroll`, which `list_candidates` decides.
    """
    return next(
        (
            candidate
            for candidate in candidates
            if all(getattr(candidate, name) == value for name, value in settings.items())
        ),
        None,
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Lower bounds of the time and memory of a candidate.

    Attributes:
      seconds: seconds per step by the roofline of products and communication; 0 if the GPU has no
        published peak.
      wire_seconds: seconds of communication per step.
      products_seconds: seconds of matrix products per step. Without a pipeline they depend only on
        the values of remat and `expert`; a pipeline takes at least as long.
      state: bytes per device of the training state between steps.
      peak: bytes per device of state, weights and gradients, without activations.
      limit: bytes per device that JAX may use.
      layer_inputs: bytes per device of all layers' inputs in a microbatch; 0 if unknown.
    """

    seconds: float
    wire_seconds: float
    state: int
    peak: int
    limit: int
    layer_inputs: int = 0
    products_seconds: float = 0.0


MakePlan = Callable[[Candidate], Plan]
FindBounds = Callable[[Candidate], Bounds]


def bounds_on(gpu: Gpu, make_plan_for: MakePlan) -> FindBounds:
    """Returns a function that computes the bounds of candidates; it raises the errors of planning.

    By formula, recomputation changes neither bytes nor communication time, so one plan serves all
    values of remat. There are two exceptions: a pipeline's buffers shrink with more recomputation,
    and one plan with full recomputation bounds them from below; rows sent to experts are sent again
    with recomputation, and the plan has the least of it. The step without a pipeline is traced once
    per value of remat to count the recomputed FLOPs, whose share depends neither on the mesh nor on
    the microbatches.
    """
    plans: dict[tuple[int, ...], Plan] = {}
    repeats: dict[str, float] = {}

    def find(candidate: Candidate) -> Bounds:
        mesh = candidate.model, candidate.stage, candidate.expert
        key = (candidate.zero, *mesh, candidate.num_microbatches)
        if key not in plans:
            least = dataclasses.replace(candidate, remat=REMATS[-1])
            plans[key] = make_plan_for(candidate if candidate.stage == 1 else least)
        # With a pipeline the step is not traced here, so the bound counts recomputation as free.
        if candidate.remat not in repeats and candidate.stage == 1:
            repeats[candidate.remat] = repeated(make_plan_for(candidate))
        return bounds_of(plans[key], gpu, repeats.get(candidate.remat, 1.0))

    return find


def bounds_of(plan: Plan, gpu: Gpu, repeat: float) -> Bounds:
    """Computes the lower bounds of a plan's memory and expected time, at rates that programs reach.

    A pipeline also computes in idle slots, and waits for its slowest stage.

    Args:
      plan: the plan.
      gpu: specification of the GPU.
      repeat: FLOPs of the step divided by the FLOPs of a step without recomputation.
    """
    flops = counts.model_flops(plan) / plan.mesh.size
    executed = flops
    if plan.pipeline is not None:
        # Idle slots compute too, and their FLOPs take time.
        executed = flops * executed_flops(plan.pipeline) / useful_flops(plan.pipeline)
    eight_bits = eight_bit_share(plan.traced.forward)
    reached = achieved_rates(gpu).card
    time = estimate(
        reached,
        mesh={str(name): size for name, size in plan.mesh.shape.items()},
        dtype=plan.precision.compute_dtype.name,
        flops=executed * repeat,
        eight_bits=eight_bits,
        model_eight_bits=eight_bits,
        model_flops=flops,
        # Nothing is compiled, so the roofline uses the formulas for communication.
        hbm_bytes=None,
        rows=(),
        formula_bytes=wire_bytes(plan),
        level_bytes=bytes_by_level(plan),
        message_bytes=message_bytes(plan.pipeline) if plan.pipeline else 0,
        exchange_bytes=exchange_bytes(plan),
        matrix_bytes=matrix_bytes(plan),
        hiding=hiding(plan, gpu),
    )
    # Each microbatch reads the weights of all layers in the forward and in the backward pass.
    memory_seconds = 2 * plan.num_microbatches * layer_bytes(plan) / reached.memory_bandwidth
    return Bounds(
        # The roofline has no bytes of memory here; weights alone already give a bound.
        seconds=max(time.step_seconds or 0.0, memory_seconds),
        wire_seconds=time.wire_seconds,
        products_seconds=time.compute_seconds or 0.0,
        state=state_bytes(plan),
        peak=sum(role_bytes(plan).values()),
        limit=memory_limit(gpu)[0],
        layer_inputs=counts.kept_activation_bytes(plan) or 0,
    )


def layer_bytes(plan: Plan) -> int:
    """Returns the bytes of the layers' weights on one device in the compute dtype, without the
    weights of experts."""
    leaves = plan.placement.leaves.values()
    size = plan.precision.compute_dtype.itemsize
    return sum(
        counts.whole_elements(plan.placement, leaf) * (1 if leaf.eight_bits else size)
        for leaf in leaves
        # Each device reads its own experts only, and codes have fewer bytes than the dtype says.
        if leaf.num_slices > 1 and leaf.expert_dim is None and leaf.codes is None
    )


def repeated(plan: Plan) -> float:
    """Returns the FLOPs of a step with recomputation, divided by its FLOPs without
    recomputation."""
    traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    return count_program_flops(traced.jaxpr) / counts.model_flops(plan)
