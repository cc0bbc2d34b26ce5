"""Offload's promises, read from the very programs that 1, 8 and 64 H200 would run.

Needs the compile-only client (extra `plan`) and no GPU. A test compiles one kind of step for models
of several depths and looks at every claim about it, at each depth and from one to the next.
"""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import zerojax
from tests.support.program_claims import Claims
from tests.support.recipe import RECIPE
from zerojax.config import MeshConfig, RunConfig, load
from zerojax.config.mesh import OffloadConfig
from zerojax.forecasting import hlo
from zerojax.forecasting.hlo.host_copies import TO_DEVICE, TO_HOST
from zerojax.hardware import compile_client, gpus
from zerojax.offload.layer_draws import find_draws
from zerojax.optim import adamw
from zerojax.placement.device_mesh import make_mesh
from zerojax.placement.state import run_key_data
from zerojax.plan.compiler_options import choose_options
from zerojax.plan.make import Plan, make_plan
from zerojax.step.build import build_step
from zerojax.step.initialization import build_layer_draw
from zerojax.training.run_file import plan_from_config
from zerojax.zoo import GPT2, GPT2Config

pytestmark = pytest.mark.gpu_programs

ROOT = Path(__file__).resolve().parents[2]
H200 = gpus.find_gpu("h200")
WIDTH, HEADS, VOCAB, SEQ, ROWS = 256, 4, 512, 64, 32
BF16, FP32 = 2, 4
LAYER_PARAMETERS = 12 * WIDTH * WIDTH
"""Of the six matrices of one layer; biases and norms are 0.5 % of it."""
ACTIVATION = BF16 * ROWS * SEQ * WIDTH
"""Bytes that one layer is given on one device: 1 MiB."""
MIN_ELEMENTS = 2**12


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of step.

    Attributes:
      devices: number of H200; model: of these, how many split each matrix.
      zero: the stage; microbatches: per step.
      opt_state, activations: their tiers.
      depths: layers of the models that are compiled.
    """

    devices: int
    zero: int
    microbatches: int = 1
    model: int = 1
    opt_state: str = "device"
    activations: str = "device"
    depths: tuple[int, ...] = (4,)

    @property
    def name(self) -> str:
        parts = [f"zero{self.zero}", f"{self.devices}gpus"]
        parts += [role for role in ("opt_state", "activations") if getattr(self, role) == "host"]
        parts += [f"accumulate{self.microbatches}"] * (self.microbatches > 1)
        parts += [f"model{self.model}"] * (self.model > 1)
        return "-".join(parts)

    @property
    def data(self) -> int:
        """Size of the data axis."""
        return self.devices // self.model

    @property
    def offload(self) -> OffloadConfig:
        """With slices of a part of a layer, so that every matrix has several."""
        return OffloadConfig(
            opt_state=self.opt_state,
            activations=self.activations,  # type: ignore[arg-type]
            min_elements=MIN_ELEMENTS,
            slice_elements=max(MIN_ELEMENTS, 2**16 // self.devices),
        )


@dataclasses.dataclass(frozen=True)
class Built:
    """What was compiled for one depth, read."""

    case: Case
    layers: int
    plan: Plan
    memory: compile_client.MemoryUse
    copies: list[hlo.HostCopy]
    collectives: list[hlo.Collective]

    @property
    def state_bytes(self) -> int:
        """Of masters and two moments in slices, on one device."""
        leaves = self.plan.offload.leaves.values() if self.plan.offload else ()
        return 3 * FP32 * sum(math.prod(leaf.shard_shape) for leaf in leaves)

    @property
    def waiting(self) -> int:
        """Bytes of activations on the host."""
        return self.layers * ACTIVATION * (self.case.activations == "host")


CASES = [
    Case(1, 1, opt_state="host", depths=(4, 8)),
    *(Case(8, zero, opt_state="host") for zero in range(4)),
    Case(64, 3, opt_state="host"),
    Case(1, 1, activations="host", depths=(4, 8, 16)),
    Case(8, 3, activations="host", depths=(4, 8)),
    Case(8, 3, model=2, opt_state="host", activations="host"),
    Case(8, 1, microbatches=2, opt_state="host", activations="host"),
]
SLOW = [case for case in CASES if case.activations == "host" and case.model == 1]
SLOW += [case for case in CASES if case.devices == 64]  # what it shows of stage 3, 8 GPUs show too
claim = Claims()


def compile_case(case: Case, layers: int) -> Built:
    """Traces, compiles and reads one step: about five seconds of processor time."""
    mesh = make_mesh(MeshConfig(model=case.model), compile_client.gpu_devices(H200, case.devices))
    tokens = jax.ShapeDtypeStruct((case.data * case.microbatches * ROWS, SEQ), np.int32)
    config = GPT2Config(
        vocab_size=VOCAB,
        max_seq_len=SEQ,
        num_layers=layers,
        num_heads=HEADS,
        embed_dim=WIDTH,
        remat="full",
    )
    plan = make_plan(
        lambda rngs: GPT2(config, rngs=rngs),
        mesh.abstract_mesh,
        example_batch={"tokens": tokens, "targets": tokens},
        optimizer=adamw(1e-3, **RECIPE),
        zero=case.zero,
        num_microbatches=case.microbatches,
        offload=case.offload,
    )
    memory, program = compile_plan(plan, mesh)
    collectives = hlo.find_collectives(program, case.devices)
    return Built(case, layers, plan, memory, hlo.find_host_copies(program), collectives)


def compile_plan(plan: Plan, mesh: Mesh) -> tuple[compile_client.MemoryUse, hlo.Program]:
    """The step of a plan over the axes of a mesh of GPUs."""
    options, dropped = choose_options(mesh, plan.program.regather, plan.settings.offload.on_host)
    assert not dropped.keys() & compile_client.HOST_OPTIONS.keys()
    traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    devices = list(mesh.devices.flat)
    lowered = compile_client.lower_for_gpus(traced)
    compiled = compile_client.compile_for_gpus(
        lowered, devices=devices, options=options, sketch=True
    )
    program = hlo.read_program(compiled.text)
    assert program.unknown_loops == ()
    return compiled.memory, program


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case in SLOW else [])
        for case in CASES
    ],
)
def test_a_program_keeps_every_promise_of_its_tiers(case):
    claim.check(case, [compile_case(case, layers) for layers in case.depths])


# --- what lies on the host --------------------------------------------------------------------


@claim(lambda case: case.opt_state == "host")
def the_state_lies_on_the_host_and_is_updated_where_it_lies(built):
    for one in built:
        memory, expected = one.memory, one.state_bytes
        all_of_it = 3 * FP32 * one.plan.placement.num_parameters()
        share = all_of_it / one.case.model / (one.case.data if one.case.zero else 1)
        assert expected > 0.94 * share  # biases and norms are small
        assert memory.host_arguments == memory.host_outputs == memory.host_aliased == expected


@claim(lambda case: case.opt_state == "host" and case.model == 1)
def weights_and_what_is_small_stay_on_the_device(built):
    """Weights in bfloat16, small parameters with their state, tokens, counters."""
    for one in built:
        weights = one.state_bytes / 3 / FP32 * BF16
        all_of_it = 3 * FP32 * one.plan.placement.num_parameters()
        small = all_of_it - one.state_bytes * (one.case.data if one.case.zero else 1)
        tokens = 2 * 4 * SEQ * ROWS * one.case.microbatches
        assert one.memory.arguments < weights + small + tokens + 2**12


@claim(lambda case: case.opt_state == "device")
def nothing_else_lies_on_the_host(built):
    for one in built:
        assert one.memory.host_arguments == 0


@claim()
def of_temporaries_only_activations_are_on_the_host(built):
    """One of each layer; none when they stay on the device."""
    for one in built:
        assert one.memory.host_temporary == one.waiting


# --- what lies on the device ------------------------------------------------------------------


def held_per_layer(case: Case) -> float:
    """Bytes of a layer on the device for the whole step beside the state: weights, gradients.

    Whole or in pieces by stage, gradients in bfloat16; pieces of them also in float32, where
    microbatches add up or the update casts them.
    """
    weights = 0 if case.zero == 3 else BF16  # at stage 3 an argument, not a temporary
    gradients = BF16 if case.zero < 2 else BF16 / case.data
    pieces = FP32 / case.data if case.data > 1 else 0
    return LAYER_PARAMETERS / case.model * (weights + gradients + pieces)


@claim(lambda case: len(case.depths) > 1 and case.activations == "host")
def temporaries_grow_by_no_activation(built):
    """From the shallowest: whether two buffers share a place moves them by 2 MB, once and back.

    Measured with XLA of jaxlib 0.12.0.1 at 2 to 20 layers: 3.16 MB a layer, and two such jumps.
    """
    shallow, *deeper = built
    for deep in deeper:
        growth = deep.memory.temporary - shallow.memory.temporary
        layers = deep.layers - shallow.layers
        assert growth / layers < 1.05 * held_per_layer(deep.case) + 0.1 * ACTIVATION


@claim(lambda case: len(case.depths) > 1 and case.opt_state == "host")
def temporaries_do_not_grow_with_the_state(built):
    for shallow, deep in itertools.pairwise(built):
        growth = deep.memory.temporary - shallow.memory.temporary
        layers = deep.layers - shallow.layers
        activation = ACTIVATION * (deep.case.activations == "device")
        assert growth / layers < 1.05 * held_per_layer(deep.case) + 1.1 * activation


# --- what passes over the link ----------------------------------------------------------------


@claim()
def the_link_carries_each_byte_once_each_way(built):
    for one in built:
        expected = one.state_bytes * (one.case.opt_state == "host")
        expected += one.case.microbatches * one.waiting
        found = hlo.link_bytes(one.copies)
        # Where the compiler takes the last layer out of the forward loop, its input stays here too.
        kept = ACTIVATION * one.case.microbatches * (one.case.activations == "host")
        assert found[TO_DEVICE] in (expected, expected - kept)
        assert found[TO_HOST] == expected


@claim()
def every_slice_in_a_loop_is_moved_by_the_copy_engine(built):
    for one in built:
        # Not the one layer that the compiler takes out of its loop at stage 3: a kernel copies it.
        inside = [c for c in one.copies if c.loop_depth]
        assert inside
        assert [c.name for c in inside if not c.is_linear] == []
        assert [c.name for c in inside if not c.is_async] == []


@claim(lambda case: case.opt_state == "host" and case.activations == "device")
def a_slice_is_loaded_while_another_is_stored(built):
    """In the loop of the update; the first and the last slices are copied outside of it."""
    for one in built:
        inside = [c for c in one.copies if c.loop_depth]
        assert {c.direction for c in inside} == {TO_DEVICE, TO_HOST}
        assert [c.name for c in inside if c.opposite_bytes < c.bytes] == []


@claim(lambda case: case.activations == "host")
def activations_leave_and_come_back_while_a_layer_computes(built):
    for one in built:
        moved = [c for c in one.copies if c.loop_depth and c.bytes == ACTIVATION]
        assert {c.direction for c in moved} == {TO_DEVICE, TO_HOST}
        assert all(c.overlap.matmul_flops > 0 for c in moved)


@claim(lambda case: case.devices > 1 and case.model == 1)
def devices_send_each_other_what_they_send_without(built):
    """2, 2, 2 and 3 units (arXiv:1910.02054); activations on the host cost no further gather."""
    for one in built:
        data = one.case.data
        unit = BF16 * one.plan.placement.num_parameters() * (data - 1) / data
        sent = sum(c.wire_bytes * c.times for c in one.collectives)
        assert sent / unit == pytest.approx((2, 2, 2, 3)[one.case.zero], rel=0.02)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_state_of_few_slices_is_updated_in_place(count):
    """Some slices are loaded and stored outside of the loop; two slices have no loop."""
    mesh = make_mesh({}, compile_client.gpu_devices(H200, 1))
    width = 256
    plan = make_plan(
        (
            lambda key: {name: jax.random.normal(key, (width, width)) for name in "ab"},
            lambda params, x: jax.numpy.tanh(x @ params["a"]) @ params["b"],
        ),
        mesh.abstract_mesh,
        example_batch={"x": jax.ShapeDtypeStruct((ROWS, width), np.float32)},
        loss=lambda model, batch: (jax.numpy.sum(model(batch["x"]) ** 2), np.float32(ROWS)),
        optimizer=adamw(1e-3, **RECIPE),
        offload=OffloadConfig(
            opt_state="host", min_elements=1, slice_elements=width * width // count
        ),
    )
    assert plan.offload is not None
    assert plan.offload.leaves["a"].num_slices == count
    memory, program = compile_plan(plan, mesh)
    assert memory.host_temporary == 0
    assert hlo.bytes_within_host(program) == 0


def test_a_step_that_does_not_fit_moves_no_more_than_it_was_told_to():
    """13 billion parameters with the state shared out: more than an H200 holds.

    XLA would look for memory by itself, and send activations to the host (see HOST_OPTIONS).
    """
    config = GPT2Config(
        vocab_size=VOCAB, max_seq_len=2048, num_layers=16, num_heads=64, embed_dim=8192
    )
    mesh = make_mesh({}, compile_client.gpu_devices(H200, 1))
    tokens = jax.ShapeDtypeStruct((8, 2048), np.int32)
    plan = make_plan(
        lambda rngs: GPT2(config, rngs=rngs),
        mesh.abstract_mesh,
        example_batch={"tokens": tokens, "targets": tokens},
        optimizer=adamw(1e-3, **RECIPE),
        offload=OffloadConfig(opt_state={"device": 0.4, "host": 0.6}),  # type: ignore[arg-type]
    )
    memory, program = compile_plan(plan, mesh)
    assert memory.peak > H200.memory_bytes
    assert memory.host_temporary == 0
    moved = memory.host_arguments
    assert hlo.link_bytes(hlo.find_host_copies(program)) == {TO_DEVICE: moved, TO_HOST: moved}


# --- and the forecast -------------------------------------------------------------------------


def test_a_forecast_counts_host_memory_apart(monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", "off")
    config = GPT2Config(
        vocab_size=VOCAB, max_seq_len=SEQ, num_layers=2, num_heads=HEADS, embed_dim=WIDTH
    )
    tokens = jax.ShapeDtypeStruct((8 * ROWS, SEQ), np.int32)
    plan: Any = make_plan(
        lambda rngs: GPT2(config, rngs=rngs),
        MeshConfig(),
        example_batch={"tokens": tokens, "targets": tokens},
        optimizer=adamw(1e-3, **RECIPE),
        offload=Case(8, 1, opt_state="host").offload,
    )
    monkeypatch.setattr(
        compile_client, "FAST_OPTIONS", compile_client.SKETCH_OPTIONS
    )  # for less work
    forecast = zerojax.forecast(plan, gpu=H200, devices=8, fast=True)
    state = 3 * FP32 * plan.placement.num_parameters() / 8
    assert forecast.memory.host == pytest.approx(state, rel=0.03)
    assert forecast.memory.arguments < 0.3 * state
    guarded = [line for line in forecast.plan["reasons"] if line.startswith("compiler option")]
    assert all(any(name in line for line in guarded) for name in compile_client.HOST_OPTIONS)


# --- first values of layers in files ----------------------------------------------------------


@pytest.mark.thorough
def test_first_values_of_a_trillion_parameters_are_drawn_on_eight_gpus():
    """One layer of the largest parameter in float32, of which a device draws its shard alone."""
    config = load(RunConfig, ROOT / "configs/gpt_1t_files_8xh200.yaml")
    plan = plan_from_config(config, 8, gpu=H200)
    mesh = make_mesh(plan.settings, compile_client.gpu_devices(H200, 8))
    layout = plan.offload
    draws = find_draws(plan.model, plan.abstract_batch, plan.loss, layout.paged_order)
    assert not draws.whole
    sizes = {n: math.prod(x.shard_shape[1:]) * FP32 for n, x in layout.leaves.items()}
    name = max(layout.paged_order, key=sizes.__getitem__)
    key = jax.eval_shape(lambda: run_key_data(0))
    traced = build_layer_draw(plan, name, draws.rows[name]).trace(
        jax.ShapeDtypeStruct((), np.int32), key
    )
    compiled = compile_client.compile_for_gpus(
        compile_client.lower_for_gpus(traced), devices=list(mesh.devices.flat)
    )
    assert sizes[name] <= compiled.memory.peak < 1.01 * sizes[name]
    page = " ".join((ROOT / "docs/offload.md").read_text().split())
    assert f"{compiled.memory.peak / 2**30:.1f} GiB of each GPU" in page
    assert not hlo.find_collectives(hlo.read_program(compiled.text), 8)
