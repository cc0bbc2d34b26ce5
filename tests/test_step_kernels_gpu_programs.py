"""Training steps with the Pallas kernels, compiled for H100s, beside those of XLA's fusions.

Needs the compile-only client (extra `plan`), no GPU: pytest -m gpu_programs. Ten seconds of
processor time for each program.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import zerojax
from pallas_kernels import choice
from tests.small_models import reference_model
from zerojax.config import MeshConfig
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.plan.device_mesh import make_abstract_mesh, make_mesh

MISSING = choice.missing() or compile_client.missing()
pytestmark = [
    pytest.mark.gpu_programs,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
SMALL = 32 * 1024
"""Bytes of scalars, partial sums and tails."""
SAME_PLACES = 0.01
"""Whether two buffers share a place hangs on their order."""
OPTIMIZERS = {
    "adamw": zerojax.adamw(1e-3, weight_decay=0.1),
    "lion": zerojax.lion(1e-3),
    "lamb": zerojax.lamb(1e-3),
    "adam8bit": zerojax.optim.adam8bit(1e-3),
}


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROJAX_CACHE", str(tmp_path_factory.mktemp("forecasts")))
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """One step of a GPT of four layers on H100s."""

    devices: int
    zero: int
    optimizer: str = "adamw"
    precision: str = "bf16"
    stage: int = 1

    @property
    def name(self) -> str:
        parts = [f"{self.devices} GPUs", f"zero {self.zero}", self.optimizer, self.precision]
        parts += ["pipeline"] * (self.stage > 1)
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Program:
    """What was read from a compiled step.

    Attributes:
      kernels: {name of a Pallas kernel: how often it stands in the program}.
      sent: (kind, bytes on the wire) of all collectives.
      copied: bytes of copies outside of loops.
    """

    memory: compile_client.MemoryUse
    kernels: Mapping[str, int]
    sent: tuple[Any, ...]
    copied: int


@functools.cache
def compiled(case: Case, kernels: str) -> Program:
    devices = compile_client.gpu_devices(find_gpu("h100"), case.devices)
    mesh = make_mesh({"stage": case.stage}, devices)
    rows = jax.ShapeDtypeStruct((2 * case.devices, 128), jnp.int32)
    plan = zerojax.make_plan(
        reference_model("gpt2", max_seq_len=128, embed_dim=256, num_layers=4),
        mesh,
        example_batch={"tokens": rows, "targets": rows},
        optimizer=OPTIMIZERS[case.optimizer],
        zero=case.zero,
        precision=case.precision,
        persistence_threshold=0,
        num_microbatches=2 if case.stage > 1 else None,
        kernels=kernels,
    )
    lowered = zerojax.build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    found = compile_client.compile_for_gpus(lowered, sketch=True)
    lines = [line for line in found.text.splitlines() if "mosaic_gpu_v2" in line]
    names = collections.Counter(re.findall(r"/(\w+)/mpmd_map", "\n".join(lines)))
    program = hlo.read_program(found.text)
    entry = program.entry.instructions
    return Program(
        found.memory,
        names,
        tuple(sorted((c.kind, c.wire_bytes) for c in hlo.find_collectives(program, case.devices))),
        sum(i.bytes for i in entry if i.opcode in ("copy", "copy-start")),
    )


STATISTICS = {"gradient_stats_many": 1}
ADAMW = {**STATISTICS, "adamw_many": 1}
CASES: list[Any] = [
    (Case(8, 3, precision="fp16"), ADAMW),
    (Case(64, 1, precision="fp16"), ADAMW),
    (Case(8, 3, optimizer="lamb"), {**STATISTICS, "lamb_moments": 9, "lamb_apply": 9}),
    (Case(8, 1, optimizer="adam8bit"), {**STATISTICS, "adam8bit": 9}),
    (Case(64, 3, optimizer="lion"), {**STATISTICS, "lion_many": 1}),
    (Case(8, 2, stage=2), ADAMW),
]
SLOW = [case for case, _ in CASES[4:]]


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        pytest.param(case, kernels, id=case.name, marks=[pytest.mark.slow] if case in SLOW else [])
        for case, kernels in CASES
    ],
)
def test_the_kernels_are_in_the_step_and_nothing_else_changes(
    case: Case, kernels: Mapping[str, int]
) -> None:
    """State stays in its place, nothing more is sent, copied or held."""
    ours, twin = compiled(case, "mosaic_gpu"), compiled(case, "xla")
    assert not twin.kernels
    assert ours.kernels == kernels
    assert ours.sent == twin.sent
    assert ours.memory.aliased == twin.memory.aliased
    assert ours.memory.temporary <= twin.memory.temporary * (1 + SAME_PLACES) + SMALL
    assert ours.copied <= twin.copied + SMALL


def test_slices_on_the_host_come_to_the_device_before_a_kernel_reads_them() -> None:
    """XLA 0.12 hands a kernel the memory of the host otherwise, and refuses its own program."""
    rows = jax.ShapeDtypeStruct((16, 128), jnp.int32)
    pages = [
        zerojax.forecast(
            zerojax.make_plan(
                reference_model("gpt2", max_seq_len=128, embed_dim=256, num_layers=2),
                make_abstract_mesh(MeshConfig(), 8, gpu=find_gpu("h100")),
                example_batch={"tokens": rows, "targets": rows},
                optimizer=OPTIMIZERS["adamw"],
                zero=3,
                precision="bf16",
                persistence_threshold=0,
                kernels=kernels,
                offload={"opt_state": "host", "min_elements": 1},
            ),
            gpu="h100",
            devices=8,
            fast=True,
        )
        for kernels in ("mosaic_gpu", "xla")
    ]
    ours, twin = (page.memory for page in pages)
    assert ours.host == twin.host > 0
    assert ours.peak <= twin.peak * (1 + SAME_PLACES) + SMALL
