"""What programs with layers in host memory move, and that their device memory is flat in depth.

The first tests read what is handed to a compiler for CUDA, on any machine. The others (marker
`gpu_programs`) read programs compiled for H200s.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support.program_claims import Claims
from zerojax.config import OffloadConfig
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client, gpus
from zerojax.offload import streaming
from zerojax.placement.device_mesh import make_abstract_mesh, make_mesh
from zerojax.plan.compiler_options import choose_options
from zerojax.plan.make import Plan, make_plan
from zerojax.step.build import build_step, pass_config
from zerojax.zoo import GPT2, GPT2Config

WIDTH, SEQ, ROWS = 256, 128, 2
MIB = 2**20
MATRICES = 6
"""Stacked matrices of a GPT-2; its biases and norms are small and stay on the device."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of a GPT-2 whose weights, masters, moments and layers' inputs are on the host."""

    devices: int
    zero: int
    microbatches: int = 1
    in_backward: bool = False
    delayed: bool = False
    forward: bool = False

    @property
    def name(self) -> str:
        parts = [f"zero{self.zero}", f"{self.devices}gpus", f"m{self.microbatches}"]
        ways = ("in_backward", "delayed", "forward")
        return "-".join(parts + [way for way in ways if getattr(self, way)])

    @property
    def keeps_weights(self) -> bool:
        """Whether weights are on the device."""
        return self.delayed or self.forward

    @property
    def updates(self) -> bool:
        """Whether the backward pass updates layers."""
        return self.in_backward or self.delayed

    @property
    def depths(self) -> tuple[int, ...]:
        """Numbers of layers to compile with.

        With an update in the backward pass buffers are packed otherwise from 16 layers on (4 MiB).
        """
        if self.updates or self.forward:
            return (16, 32)
        return (4, 16) if self.microbatches > 1 else (4, 8, 16)


def plan_of(case: Case, layers: int) -> Plan:
    """Slices are small, so that every matrix has several."""
    config = GPT2Config(
        vocab_size=512, max_seq_len=SEQ, num_layers=layers, num_heads=4, embed_dim=WIDTH
    )
    tokens = jax.ShapeDtypeStruct((case.devices * case.microbatches * ROWS, SEQ), np.int32)
    return make_plan(
        lambda rngs: GPT2(config, rngs=rngs),
        make_abstract_mesh({}, case.devices),
        example_batch={"tokens": tokens, "targets": tokens},
        zero=case.zero,
        num_microbatches=case.microbatches,
        optimizer=zerojax.adamw(1e-3, clip_norm=None),
        persistence_threshold=1000,
        offload=OffloadConfig(
            opt_state="host",
            params="device" if case.keeps_weights else "host",
            activations="host",
            update_in_backward=case.in_backward,
            delayed_update=case.delayed,
            update_in_forward=case.forward,
            min_elements=layers * WIDTH * WIDTH // case.devices,
            slice_elements=WIDTH * WIDTH // case.devices,
        ),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_is_placed_where_is_in_the_program_for_cuda(microbatches):
    """Each matrix: twice a first row and one in the loop forward, one in the loop backward.

    The backward pass begins with the row that the forward pass ended with. Each gradient: where it
    is made, one in the loop and the last one behind it; with several microbatches each is read
    before it is written. The layers' inputs: made, written in a loop, and read in a loop.
    """
    plan = plan_of(Case(2, 3, microbatches), 4)
    assert plan.offload is not None
    assert len(plan.offload.streamed) == MATRICES
    gradients = jax.jit(streaming.build_gradients(pass_config(plan)))
    state = plan.abstract_state
    key_data = jax.ShapeDtypeStruct((2,), jnp.uint32)
    traced = gradients.trace(
        state["params"], state["frozen"], state["extras"], key_data, plan.abstract_batch
    )
    text = compile_client.lower_for_gpus(traced).as_text()
    placed = re.findall(r'_xla_buffer_placement = "(\w+)"', text)
    weights, read = 3 * MATRICES, 2 * MATRICES * (microbatches > 1)
    assert placed.count("device") == weights + read + 1
    assert placed.count("pinned_host") == 3 * MATRICES + 2
    assert len(placed) == placed.count("device") + placed.count("pinned_host")


CASES = [
    Case(1, 1),
    Case(8, 3),
    Case(8, 1, 2),
    Case(1, 1, in_backward=True),
    Case(8, 3, in_backward=True),
    Case(1, 1, delayed=True),
    Case(8, 3, delayed=True),
    Case(1, 1, forward=True),
    Case(8, 3, forward=True),
]
SLOW = [*CASES[1:3], CASES[4], CASES[6], CASES[8]]
claim = Claims()


@dataclasses.dataclass(frozen=True)
class Built:
    """The same step at several depths: {layers: ...}."""

    case: Case
    plans: dict[int, Plan]
    memory: dict[int, compile_client.MemoryUse]
    copies: dict[int, list[hlo.HostCopy]]
    within_host: dict[int, int]

    def in_loops(self, layers: int) -> list[hlo.HostCopy]:
        return [copy for copy in self.copies[layers] if copy.loop_depth]


@pytest.mark.gpu_programs
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case in SLOW else [])
        for case in CASES
    ],
)
def test_a_program_with_layers_on_the_host_keeps_every_promise(case):
    plans = {layers: plan_of(case, layers) for layers in case.depths}
    memory, copies, within_host = {}, {}, {}
    devices = compile_client.gpu_devices(gpus.find_gpu("h200"), case.devices)
    mesh = make_mesh({}, devices=devices)
    for layers, plan in plans.items():
        traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
        compiled = compile_client.compile_for_gpus(
            compile_client.lower_for_gpus(traced),
            devices=devices,
            options=choose_options(mesh, plan.program.regather, on_host=True)[0],
            sketch=True,
        )
        memory[layers] = compiled.memory
        program = hlo.read_program(compiled.text)
        copies[layers] = hlo.find_host_copies(program)
        within_host[layers] = hlo.bytes_within_host(program)
    claim.check(case, Built(case, plans, memory, copies, within_host))


def matrices(plan: Plan) -> int:
    """Elements of the streamed parameters on one device."""
    return sum(
        leaf.num_slices * leaf.slice_elements
        for name, leaf in plan.offload.leaves.items()
        if name in plan.offload.by_layer
    )


@claim()
def device_temporaries_do_not_grow_with_depth(built):
    """But for the small stacks, of which forward and backward hold a few copies."""
    small = lambda layers: sum(  # noqa: E731
        x.size * 4
        for name, x in built.plans[layers].abstract_stored["params"].items()
        if name.startswith("blocks/") and name not in built.plans[layers].offload.by_layer
    )
    first, last = built.case.depths[0], built.case.depths[-1]
    grown = built.memory[last].temporary - built.memory[first].temporary
    assert grown <= 4 * (small(last) - small(first)), f"{grown / MIB:.2f} MiB"
    gathered = built.case.devices * (matrices(built.plans[last]) - matrices(built.plans[first]))
    assert grown < 0.05 * 2 * gathered, f"{grown / MIB:.2f} MiB"


@claim()
def nothing_on_the_host_is_copied(built):
    """Beside the state there are gradients, in bfloat16 or added up in float32, and inputs."""
    for layers in built.case.depths:
        plan, memory = built.plans[layers], built.memory[layers]
        inputs = (layers - 1) * ROWS * SEQ * WIDTH * 2
        size = 4 if built.case.microbatches > 1 else 2
        keeps_none = built.case.updates or built.case.forward
        gradients = 0 if keeps_none else size * matrices(plan)
        assert memory.host_temporary == pytest.approx(inputs + gradients, rel=0.01)
        assert memory.host_aliased == memory.host_arguments == memory.host_outputs
        # Query, key and value have stacks of one shape; so have their gradients.
        assert built.within_host[layers] == 0


@claim()
def copies_in_loops_are_done_by_the_copy_engine(built):
    for layers in built.case.depths:
        found = built.in_loops(layers)
        # Of the first and the last layer of a microbatch, outside of the loops over layers.
        peeled = 1 if built.case.microbatches > 1 else 0
        inner = [copy for copy in found if copy.loop_depth > peeled or copy.is_linear]
        assert len(inner) >= 3 * MATRICES
        assert [copy.name for copy in inner if not copy.is_linear] == []
        assert [copy.name for copy in inner if not copy.is_async] == []


@claim(lambda case: not case.keeps_weights)
def weights_are_on_their_way_beside_products(built):
    """In the loop backward, and on one device also forward; where a row is gathered before use, its
    copy ends where gathering begins, and in the forward loop of a small model that is soon."""
    beside = [
        copy
        for copy in built.in_loops(built.case.depths[-1])
        if copy.direction == "to device" and copy.overlap.matmuls
    ]
    assert len(beside) >= MATRICES * (2 if built.case.devices == 1 else 1)


@claim(lambda case: case.updates)
def the_update_is_copied_beside_products(built):
    """In the loop backward: master and moments of each matrix in, and the same (and weights that
    are on the host) out, with both directions of the link in use.

    A gradient that waits for its reduction lets no product run beside the last copies."""
    for direction, arrays in (("to device", 3), ("to host", 3 + built.case.in_backward)):
        found = [copy for copy in built.in_loops(built.case.depths[-1]) if copy.opposite_bytes]
        beside = [copy for copy in found if copy.direction == direction and copy.overlap.matmuls]
        assert len(beside) >= (arrays if built.case.devices == 1 else 1) * MATRICES


@claim(lambda case: case.updates and case.devices == 1)
def no_copy_in_a_loop_is_beside_nothing(built):
    found = built.in_loops(built.case.depths[-1])
    assert [copy.name for copy in found if not copy.overlap.matmuls] == []


@claim(lambda case: case.forward and case.devices == 1)
def nearly_all_of_an_update_in_the_forward_pass_uses_both_directions(built):
    found = built.in_loops(built.case.depths[-1])
    size = lambda copies: sum(copy.bytes * copy.times for copy in copies)  # noqa: E731
    assert size(copy for copy in found if copy.opposite_bytes) > 0.9 * size(found)


@claim(lambda case: not case.updates and not case.forward and case.devices == 1)
def the_update_is_copied_in_both_directions_at_once(built):
    found = [copy for copy in built.in_loops(built.case.depths[-1]) if not copy.overlap.matmuls]
    assert {copy.direction for copy in found} == {"to device", "to host"}
    assert [copy.name for copy in found if not copy.opposite_bytes] == []
