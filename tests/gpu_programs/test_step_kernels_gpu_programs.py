"""Training steps with the Pallas kernels, compiled for H100s, beside those of XLA's fusions.

Needs the compile-only client (extra `plan`), no GPU: pytest -m gpu_programs. Ten seconds of
processor time for each program.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from tests.support.gpu_plans import compile_step, text_plan
from tests.support.marks import needs_kernels
from tests.support.recipe import CLIPPED, RECIPE
from tests.support.small_models import reference_model
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.operators.attending import Call
from zerojax.optim.precision import as_precision
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.compiler_options import choose_options
from zerojax.training.tuning import attention_choices

pytestmark = [pytest.mark.gpu_programs, needs_kernels]
SMALL = 32 * 1024
"""Bytes of scalars, partial sums and tails."""
SAME_PLACES = 0.01
"""Whether two buffers share a place hangs on their order."""
OPTIMIZERS = {
    "adamw": zerojax.adamw(1e-3, **RECIPE),
    "lion": zerojax.lion(1e-3, weight_decay=0.3, **CLIPPED),
    "sgd": zerojax.sgd(1e-3, momentum=0.9, **CLIPPED),
    "lamb": zerojax.lamb(1e-3, weight_decay=0.01, **CLIPPED),
    "adam8bit": zerojax.optim.adam8bit(1e-3, **RECIPE),
    "muon": zerojax.optim.muon(1e-3, weight_decay=0.1, clip_norm=1.0),
}
WITHOUT_MASTERS = "bf16 without masters"


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
      moved: {name of a kernel: bytes that it reads and writes, for each parameter of the device}.
      sent: (kind, bytes on the wire) of all collectives.
      copied: bytes of copies outside of loops.
    """

    memory: compile_client.MemoryUse
    kernels: Mapping[str, int]
    moved: Mapping[str, float]
    sent: tuple[Any, ...]
    copied: int


def test_the_plan_of_gpus_that_are_not_here_shows_both_ways():
    mesh = make_mesh({}, compile_client.gpu_devices(find_gpu("h100"), 8))
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    for name, tx in OPTIMIZERS.items():
        plan = zerojax.make_plan(reference_model("gpt2"), mesh, example_batch=batch, optimizer=tx)
        (line,) = [one for one in plan.reasons if one.startswith("optimizer update by")]
        both = f"both launch a kernel for each of {len(plan.placement.leaves)} arrays"
        measured = name in ("adamw", "lion", "sgd")
        assert (both in line) == measured
        assert ("a run measures both" in line) == measured


@pytest.mark.parametrize("name", ["cudnn", "mosaic_gpu"])
def test_what_is_timed_of_attention_compiles_for_a_gpu(name):
    """Each way of one call, as `zerojax.tune` runs it."""
    (device,) = compile_client.gpu_devices(find_gpu("h100"), 1)
    mesh = Mesh([device], ("alone",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    kv = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    call = Call(name, "auto", 256, 256, heads=4, kv_heads=2, head_dim=64, itemsize=2, causal=True)
    for program in attention_choices.programs_of(call, name, mesh):
        text = program.lower(x, kv, kv, x).compile().as_text()
        assert {"cudnn": "__cudnn$fmha", "mosaic_gpu": "mosaic_gpu"}[name] in text


def _precision(name: str) -> Any:
    if name != WITHOUT_MASTERS:
        return name
    return as_precision("bf16", param_dtype="bf16", moments_dtype="bf16")


@functools.cache
def compiled(case: Case, kernels: str) -> Program:
    plan = text_plan(
        reference_model("gpt2", max_seq_len=128, embed_dim=256, num_layers=4),
        2 * case.devices,
        128,
        axes={"stage": case.stage},
        devices=case.devices,
        optimizer=OPTIMIZERS[case.optimizer],
        zero=case.zero,
        precision=_precision(case.precision),
        persistence_threshold=0,
        num_microbatches=2 if case.stage > 1 else None,
        kernels=kernels,
    )
    return _read(plan, compile_step(plan))


def _read(plan: zerojax.Plan, found: compile_client.CompiledProgram) -> Program:
    program = hlo.read_program(found.text)
    everywhere = [x for part in program.computations.values() for x in part.instructions]
    named = {one.name: one for one in everywhere}
    kernels, moved = collections.Counter(), collections.Counter()
    for one in everywhere:
        if one.opcode == "custom-call" and "mosaic_gpu_v2" in one.attribute_text:
            (name,) = re.findall(r"/(\w+)/mpmd_map", one.attribute_text)
            kernels[name] += 1
            moved[name] += one.bytes + sum(named[other].bytes for other in one.operands)
    shards = (x.sharding.shard_shape(x.shape) for x in plan.abstract_stored["params"].values())
    parameters = sum(map(math.prod, shards))
    collectives = hlo.find_collectives(program, plan.mesh.size)
    entry = program.entry.instructions
    return Program(
        found.memory,
        kernels,
        {name: total / parameters for name, total in moved.items()},
        tuple(sorted((c.kind, c.wire_bytes) for c in collectives)),
        sum(i.bytes for i in entry if i.opcode in ("copy", "copy-start")),
    )


# Bytes that a kernel reads and writes for each parameter that it has: gradients are float32, as the
# step sums them up, and are read once more by the statistics. Beside the gradient AdamW has 3
# float32 arrays, read and written (28 in all); without masters 3 of bfloat16 (16, which would be 14
# with gradients of bfloat16); Lion and SGD have 2 (20). Moments of one byte come with 16 bytes of
# scales for each block of up to 512. LAMB reads parameters and moments twice (24 and 16).
STATISTICS = {"gradient_stats": 4.0}
ADAMW, LION, SGD = {"adamw": 28.0}, {"lion": 20.0}, {"sgd": 20.0}
ROUNDED = {"adamw": 16.0}
EIGHT_BIT = {"adam8bit": 16 + 16 / 512}
LAMB = {"lamb_moments": 24.0, "lamb_apply": 16.0}
# Momentum and gradient in, momentum and direction out; then parameter and direction, parameter.
MUON = {"muon_momentum": 16.0, "muon_descent": 12.0}
BESIDE = {"adam8bit": "adamw", "muon": "nesterov_adam"}
"""The kernel of parameters that are too small for codes, or no matrices: 2 % here."""
FEW = 0.03
"""Part of the parameters that are in other kernels, or too small on a device for any."""
CASES: list[Any] = [
    (Case(8, 3, precision="fp16"), ADAMW),
    (Case(64, 1, precision="fp16"), ADAMW),
    (Case(8, 3, optimizer="lamb"), LAMB),
    (Case(8, 1, optimizer="adam8bit"), EIGHT_BIT),
    (Case(8, 3, optimizer="muon"), MUON),
    (Case(64, 3, optimizer="lion"), LION),
    (Case(8, 2, stage=2), ADAMW),
    (Case(8, 1, precision=WITHOUT_MASTERS), ROUNDED),
    (Case(8, 1, optimizer="sgd"), SGD),
]
SLOW = [case for case, _ in CASES[5:]]


@pytest.mark.parametrize(
    ("case", "promised"),
    [
        pytest.param(case, promised, id=case.name, marks=[pytest.mark.slow] * (case in SLOW))
        for case, promised in CASES
    ],
)
def test_the_kernels_are_in_the_step_and_nothing_else_changes(case, promised):
    """State stays in its place, nothing more is sent, copied or held; the bytes are those
    promised."""
    ours, twin = compiled(case, "mosaic_gpu"), compiled(case, "xla")
    assert not twin.kernels
    kernels = {**STATISTICS, **promised}
    beside = BESIDE.get(case.optimizer)
    assert set(ours.kernels) == {*kernels, *({beside} - {None})}
    for name in promised:  # one for each array that has statistics
        count = ours.kernels[name] + ours.kernels.get(beside, 0)
        if case.optimizer == "lamb":  # a layer's part of a vector is shorter than a tile
            assert 5 < count < ours.kernels["gradient_stats"]
        else:
            assert count == ours.kernels["gradient_stats"]
    for name, bytes_of_each in kernels.items():
        assert (1 - FEW) * bytes_of_each <= ours.moved[name] <= 1.002 * bytes_of_each, name
    assert ours.sent == twin.sent
    assert ours.memory.aliased == twin.memory.aliased
    assert ours.memory.temporary <= twin.memory.temporary * (1 + SAME_PLACES) + SMALL
    assert ours.copied <= twin.copied + SMALL


def test_slices_on_the_host_come_to_the_device_before_a_kernel_reads_them() -> None:
    """XLA 0.12 hands a kernel the memory of the host otherwise, and refuses its own program. One
    kernel for each parameter, in the loop over its slices."""
    mesh = make_mesh({}, compile_client.gpu_devices(find_gpu("h100"), 8))
    rows = jax.ShapeDtypeStruct((16, 128), jnp.int32)
    pages, sliced = [], 0
    for kernels in ("mosaic_gpu", "xla"):
        plan = zerojax.make_plan(
            reference_model("gpt2", max_seq_len=128, embed_dim=256, num_layers=2),
            mesh.abstract_mesh,
            example_batch={"tokens": rows, "targets": rows},
            optimizer=OPTIMIZERS["adamw"],
            zero=3,
            precision="bf16",
            persistence_threshold=0,
            kernels=kernels,
            offload={"opt_state": "host", "min_elements": 1},
        )
        assert plan.offload is not None
        sliced = sum(one.slice_elements >= 128 for one in plan.offload.leaves.values())
        options, _ = choose_options(mesh, plan.program.regather, plan.settings.offload.on_host)
        traced = zerojax.build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
        found = compile_client.compile_for_gpus(
            compile_client.lower_for_gpus(traced),
            devices=list(mesh.devices.flat),
            options=options,
            sketch=True,
        )
        pages.append(_read(plan, found))
    ours, twin = pages
    assert not twin.kernels
    assert ours.kernels == {"gradient_stats": sliced, "adamw": sliced}
    assert sliced > 5
    assert ours.sent == twin.sent
    assert ours.memory.host_arguments == twin.memory.host_arguments > 0
    assert ours.memory.host_temporary == twin.memory.host_temporary
    assert ours.memory.temporary <= twin.memory.temporary * (1 + SAME_PLACES) + SMALL
