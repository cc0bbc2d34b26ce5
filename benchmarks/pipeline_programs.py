"""A GPT on a pipeline, compiled for H100s, and the traffic that is expected of it.

Compiles the step of a plan and reads the program. Expected values are computed here, not by
zerojax's formulas: p stages, m microbatches, N data shards; 1f1b has m + p - 1 ticks with an F
slot and as many with a B slot, on every stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.config import MeshConfig
from zerojax.forecasting import hlo
from zerojax.forecasting.hlo.live_buffers import LiveAtPeak, read_live
from zerojax.hardware import compile_client, gpus
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import Plan, make_plan
from zerojax.step.build import build_step
from zerojax.zoo import GPT2, GPT2Config

BF16 = 2
GPT_1B = GPT2Config(
    vocab_size=50304, max_seq_len=1024, num_layers=24, num_heads=16, embed_dim=2048, remat="full"
)
SMALL = GPT2Config(
    vocab_size=4096, max_seq_len=512, num_layers=8, num_heads=8, embed_dim=512, remat="full"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One step with a sequence per data shard and microbatch, bfloat16 with float32 masters.

    Attributes:
      data, stage, model: sizes of the mesh axes.
      microbatches: number of microbatches per step.
      zero, schedule, stash: values of the mesh options of these names.
      config: sizes of the model.
    """

    data: int = 2
    stage: int = 4
    model: int = 1
    zero: int = 1
    microbatches: int = 8
    schedule: str = "1f1b"
    stash: str = "residuals"
    config: GPT2Config = GPT_1B

    @property
    def devices(self) -> int:
        return self.data * self.stage * self.model

    @property
    def name(self) -> str:
        axes = [f"data{self.data}", f"stage{self.stage}", f"model{self.model}"]
        parts = [f"zero{self.zero}", *axes[: 2 + (self.model > 1)], f"m{self.microbatches}"]
        parts += [x for x in (self.schedule, self.stash) if x not in ("1f1b", "residuals")]
        return "-".join(parts)

    @property
    def ticks(self) -> int:
        """Returns the number of ticks with an F slot, equal to that with a B slot."""
        return self.microbatches + self.stage - 1

    @property
    def layer_parameters(self) -> float:
        """Returns the number of matrix elements of a stage's layers in a tensor-parallel shard."""
        config = self.config
        return 12 * config.embed_dim**2 * config.num_layers / self.stage / self.model

    @property
    def common_parameters(self) -> float:
        """Returns the parameters of the token and the position table, which every stage has."""
        config = self.config
        return (config.vocab_size / self.model + config.max_seq_len) * config.embed_dim

    @property
    def message(self) -> int:
        """Returns the bytes of the activation of one microbatch."""
        return BF16 * self.config.max_seq_len * self.config.embed_dim

    @property
    def forward_flops(self) -> float:
        """Returns forward FLOPs of a stage's layers for a microbatch, of one tensor-parallel shard.

        Counts only the unmasked scores of causal attention, as cuDNN computes no others.
        """
        tokens, width = self.config.max_seq_len, self.config.embed_dim
        layer = 2 * 12 * width**2 * tokens + 2 * 2 * (tokens * (tokens + 1) // 2) * width
        return layer * self.config.num_layers / self.stage / self.model

    @property
    def layer_units(self) -> int:
        """Returns how often a device sends its layers' weights or gradients over `data` in a step.

        By ZeRO stage. 0: an all-reduce, which counts twice; 1: one gather and one scatter; 2: a
        scatter in every B slot; 3: also a gather in every F and every B slot.
        """
        return (2, 2, 1 + self.ticks, 3 * self.ticks)[self.zero]

    @property
    def layer_bytes(self) -> float:
        """Returns the bytes sent over `data` for the layers."""
        return self.layer_units * BF16 * self.layer_parameters * (self.data - 1) / self.data

    @property
    def common_bytes(self) -> float:
        """Returns the bytes sent over `data` and `stage` together for the two tables.

        They are summed, or gathered and scattered, once per step."""
        members = self.data * self.stage
        return 2 * BF16 * self.common_parameters * (members - 1) / members

    @property
    def permute_bytes(self) -> float:
        """Returns the bytes that a device of a middle stage sends to its neighbours."""
        return 2 * self.ticks * self.message


@dataclasses.dataclass(frozen=True)
class Built:
    """Facts read from a compiled step.

    Attributes:
      collectives: all collectives of one step.
      overlap: overlap with computation by the name of a collective.
      live: arrays of a device at the peak, if requested.
    """

    case: Case
    plan: Plan
    memory: compile_client.MemoryUse
    program: hlo.Program
    collectives: tuple[hlo.Collective, ...]
    overlap: Mapping[str, hlo.Overlap]
    live: LiveAtPeak | None = None

    def over(self, *axes: str) -> list[hlo.Collective]:
        """Returns the collectives whose groups span exactly these mesh axes."""
        return [c for c in self.collectives if self._axes(c) == axes]

    def _axes(self, collective: hlo.Collective) -> tuple[str, ...]:
        case = self.case
        places = np.unravel_index(collective.group, (case.data, case.stage, case.model))
        names = ("data", "stage", "model")
        return tuple(n for n, found in zip(names, places, strict=True) if len(set(found)) > 1)

    @property
    def permutes(self) -> list[hlo.Collective]:
        return [c for c in self.over("stage") if c.kind == "collective-permute"]

    @property
    def steady_permutes(self) -> list[hlo.Collective]:
        """Returns the permutes of the loop of ticks with both an F and a B slot (m above p)."""
        least = self.case.microbatches - 1  # the first tick may stand before the loop
        return [c for c in self.permutes if c.times >= least and c.loop_depth]


def wire(found: Iterable[hlo.Collective]) -> int:
    """Returns the bytes that one device sends in a step."""
    return sum(c.wire_bytes * c.times for c in found)


def make_case_plan(case: Case, devices: Any) -> Plan:
    """Returns the plan of a case for these devices."""
    rows = case.data * case.microbatches
    tokens = jax.ShapeDtypeStruct((rows, case.config.max_seq_len), np.int32)
    mesh = MeshConfig(data=case.data, stage=case.stage, model=case.model)
    return make_plan(
        lambda rngs: GPT2(case.config, rngs=rngs),
        make_mesh(mesh, devices),
        example_batch={"tokens": tokens, "targets": tokens},
        zero=case.zero,
        num_microbatches=case.microbatches,
        pipeline_schedule=case.schedule,
        stash=case.stash,
        persistence_threshold=0,
    )


def compile_case(case: Case, dump: Path | None = None) -> Built:
    """Traces, compiles and reads one step: about seven seconds of processor time.

    Args:
      dump: an empty folder for the compiler's accounts of memory, to read `Built.live` from.
    """
    plan = make_case_plan(case, compile_client.gpu_devices(gpus.find_gpu("h100"), case.devices))
    lowered = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    compiled = compile_client.compile_for_gpus(lowered, sketch=True, dump=dump)
    program = hlo.read_program(compiled.text)
    collectives = tuple(hlo.find_collectives(program, case.devices))
    overlap = hlo.find_overlap(program, collectives)
    live = None if dump is None else read_live(dump)
    return Built(case, plan, compiled.memory, program, collectives, overlap, live)
