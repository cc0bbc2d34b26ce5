"""A GPT of 1.3 billion parameters compiled for H100s, and what ZeRO says of it.

Knows how the step of a plan is compiled and read; the expectations below are written out from the
papers, not taken from zerojax's own formulas.
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

import zerojax
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client, gpus
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import Plan, make_plan
from zerojax.step.build import build_step
from zerojax.zoo import GPT2, GPT2Config

LAYERS, WIDTH, HEADS, VOCAB, SEQ = 24, 2048, 16, 50304, 1024
LAYER_PARAMETERS = 12 * WIDTH * WIDTH
"""Of the six matrices of one layer; biases and norms are 0.05 % of it."""
TABLE_PARAMETERS = VOCAB * WIDTH
"""Of the token table, which is read at both ends of the model."""
BF16, FP32 = 2, 4
OPTIMIZERS = {"adamw": None, "muon": zerojax.muon(1e-3, clip_norm=1.0)}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step: one sequence of 1024 tokens per data shard and microbatch.

    Attributes:
      devices: number of H100; model: of these, how many split each matrix.
      zero: the stage; microbatches: per step.
      remat: of the model; optimizer: "adamw" or "muon".
      regather, prefetch: False takes away what stage 3 does about the backward pass's gathers, and
        the compiler options that let it gather early.
    """

    devices: int
    zero: int
    microbatches: int = 1
    model: int = 1
    remat: str = "full"
    regather: bool = True
    prefetch: bool = True
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        parts = [f"zero{self.zero}", f"{self.devices}gpus"]
        parts += [f"accumulate{self.microbatches}"] * (self.microbatches > 1)
        parts += [f"model{self.model}"] * (self.model > 1)
        parts += [f"remat_{self.remat}"] * (self.remat != "full")
        parts += [self.optimizer] * (self.optimizer != "adamw")
        return "-".join(parts)

    @property
    def data(self) -> int:
        """Size of the data axis."""
        return self.devices // self.model


@dataclasses.dataclass(frozen=True)
class GpuProgram:
    """What was compiled, read.

    Attributes:
      collectives: all of one step; overlap: by the name of a collective.
    """

    case: Case
    plan: Plan
    memory: compile_client.MemoryUse
    program: hlo.Program
    collectives: tuple[hlo.Collective, ...]
    overlap: Mapping[str, hlo.Overlap]

    @property
    def parameters(self) -> float:
        """Parameters that one device's data axis shards: all, divided by tensor parallelism."""
        return self.plan.placement.num_parameters() / self.case.model

    def over_data(self, *kinds: str) -> list[hlo.Collective]:
        """Collectives over the data axis, of these kinds or all."""
        return [c for c in self._of_axis(data=True) if not kinds or c.kind in kinds]

    def over_model(self) -> list[hlo.Collective]:
        """Collectives inside a group of tensor parallelism."""
        return self._of_axis(data=False)

    def _of_axis(self, *, data: bool) -> list[hlo.Collective]:
        # `model` is the innermost axis: its groups are neighbours, those of `data` are not.
        if self.case.model == 1:
            return list(self.collectives) if data else []
        return [c for c in self.collectives if (c.group[1] - c.group[0] == 1) != data]


def compile_case(case: Case) -> GpuProgram:
    """Traces, compiles and reads one step: about ten seconds of processor time."""
    devices = compile_client.gpu_devices(gpus.find_gpu("h100"), case.devices)
    tokens = jax.ShapeDtypeStruct((case.data * case.microbatches, SEQ), np.int32)
    plan = make_plan(
        lambda rngs: GPT2(gpt_config(case.remat), rngs=rngs),
        make_mesh({"model": case.model}, devices),
        example_batch={"tokens": tokens, "targets": tokens},
        zero=case.zero,
        num_microbatches=case.microbatches,
        optimizer=OPTIMIZERS[case.optimizer],
    )
    if not case.regather:
        program = dataclasses.replace(plan.program, regather=False)
        plan = dataclasses.replace(plan, program=program)
    if not case.prefetch:
        plan = dataclasses.replace(plan, program=dataclasses.replace(plan.program, options={}))
    lowered = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    compiled = compile_client.compile_for_gpus(lowered, sketch=True)
    program = hlo.read_program(compiled.text)
    collectives = tuple(hlo.find_collectives(program, case.devices))
    overlap = hlo.find_overlap(program, collectives)
    return GpuProgram(case, plan, compiled.memory, program, collectives, overlap)


def gpt_config(remat: str = "full") -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCAB,
        max_seq_len=SEQ,
        num_layers=LAYERS,
        num_heads=HEADS,
        embed_dim=WIDTH,
        remat=remat,
    )


def wire_units(case: Case) -> int:
    """Bytes that one device sends over `data` per step, in units of `wire_unit`.

    0: the gradients, reduced and spread again. 1: the same bytes, as scatter and gather. 2: one
    gather, one scatter per microbatch. 3: two gathers and a scatter per microbatch.
    """
    parts = case.microbatches
    return (2, 2, 1 + parts, 3 * parts)[case.zero]


def wire_unit(built: GpuProgram) -> float:
    """Bytes that a ring sends per device to gather all bfloat16 weights once."""
    return BF16 * built.parameters * (built.case.data - 1) / built.case.data


def argument_bytes(built: GpuProgram) -> float:
    """Masters and two moments in float32: whole at stage 0, else in pieces."""
    return 3 * FP32 * built.parameters / (built.case.data if built.case.zero else 1)


def formula_bytes(built: GpuProgram) -> float:
    """What one device holds at the peak, without activations.

    State; the weights that are read; the gradients that the backward pass leaves, and the float32
    sum of them where there are microbatches. Pieces from stage 1 (state), 2 (gradients), 3
    (weights) on; what is whole for a moment comes on top: at stages 2 and 3 the gradients of the
    token table and of the layer that is being scattered, at stage 3 the gathered table, this layer
    and the next.
    """
    case, all_of_it = built.case, built.parameters
    pieces = all_of_it / case.data
    weights = BF16 * (pieces if case.zero == 3 else all_of_it)
    gradients = BF16 + FP32 * (case.microbatches > 1)
    gradients *= pieces if case.zero >= 2 else all_of_it
    for_a_moment = (0, 0, TABLE_PARAMETERS + LAYER_PARAMETERS, 2 * TABLE_PARAMETERS)[case.zero]
    if case.zero == 3:
        for_a_moment += 3 * LAYER_PARAMETERS
    return argument_bytes(built) + weights + gradients + BF16 * for_a_moment / case.model


def activation_bytes(built: GpuProgram) -> float:
    """One sequence, full remat: the input of every layer, the head's logits, one layer's inside.

    Logits: bfloat16, float32 for the softmax, bfloat16 cotangents. Inside a layer: the residual,
    query, key, value and the attention's output; the MLP's hidden width twice; the attention's
    probabilities in float32.
    """
    inputs = LAYERS * SEQ * WIDTH * BF16
    logits = SEQ * VOCAB * (BF16 + FP32 + BF16)
    inside = SEQ * WIDTH * (5 + 2 * 4) * BF16 + HEADS * SEQ * SEQ * FP32
    return inputs + (logits + inside) / built.case.model
