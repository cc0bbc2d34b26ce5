"""The size of slices of offloaded state, measured: same bits, other bytes, a plan that is whole."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import zerojax
from tests.offload.test_offload_layout import plan_of
from tests.support.trajectories import text_batch
from tests.support.tuning_doubles import Clock
from zerojax.config import MeshConfig
from zerojax.config.mesh import SLICE_ELEMENTS, OffloadConfig
from zerojax.forecasting import hlo
from zerojax.forecasting.hlo.host_copies import TO_DEVICE, TO_HOST
from zerojax.hardware import compile_client, gpus
from zerojax.offload.sliced_update import LeafUpdate
from zerojax.optim.precision import Precision
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.compiler_options import choose_options
from zerojax.plan.counts import role_tiers
from zerojax.plan.make import Plan, make_plan
from zerojax.runtime.memory import Room
from zerojax.step.offload_variants import with_slices
from zerojax.step.reshard import to_portable_state
from zerojax.training.tuning import (
    Answer,
    KeptChoices,
    decide,
    measured_choices,
    slice_choices,
    tuned_plan,
)

HOST = {"opt_state": "host", "min_elements": 64}
SMALL = 256
"""Elements of a slice of a small model's matrices, which have four to sixteen then."""
LARGEST = "blocks/mlp/up/kernel"


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices are taken for GPUs, nothing but slices is asked, and sizes fit small models."""
    monkeypatch.setattr(tuned_plan, "is_on_gpus", lambda plan: True)
    monkeypatch.setattr(tuned_plan, "open_kernels", lambda plan: {})
    monkeypatch.setattr(tuned_plan, "open_calls", lambda plan: {})
    monkeypatch.setattr(slice_choices, "SIZES", (SMALL, 2 * SLICE_ELEMENTS))


def times(monkeypatch: pytest.MonkeyPatch, small: float) -> None:
    """Slices of `SMALL` elements take so many seconds, others one."""

    def timed(ways: Any, _: Any) -> list[list[float]]:
        return [[small if way.name.startswith(f"{SMALL} ") else 1.0] * 7 for way in ways]

    monkeypatch.setattr(measured_choices, "_times", timed)


# Plans


def facts(plan: Plan) -> dict[str, Any]:
    """All of a plan that can be compared: objects of the model are made anew for each."""
    left_out = ("model", "loss", "tx", "traced", "remake", "learning_rate", "program", "mesh")
    names = [field.name for field in dataclasses.fields(plan) if field.name not in left_out]
    found = {name: getattr(plan, name) for name in names}
    layout = found.pop("offload")
    return {**found, "layout": dataclasses.asdict(layout), "kernels": plan.program.kernels}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "offload",
    [HOST, {**HOST, "opt_state": {"device": 0.3, "host": 0.7}}, {**HOST, "params": "host"}],
    ids=["host", "shares", "params"],
)
def test_a_plan_with_other_slices_is_the_plan_that_was_asked_for(offload: Any) -> None:
    plan, wanted = plan_of(offload), plan_of({**offload, "slice_elements": SMALL})
    found = with_slices(plan, SMALL)
    assert facts(found) == facts(wanted) != facts(plan)
    assert found.as_dict() == wanted.as_dict()
    assert found.table() == wanted.table()
    assert role_tiers(found) == role_tiers(wanted)
    assert facts(found.remake(found.mesh)) == facts(wanted), "also on another mesh"


# Choice


@pytest.mark.thorough
@pytest.mark.usefixtures("on_gpus")
def test_what_is_faster_is_in_the_plan_with_its_reason_and_kept(kept, monkeypatch):
    times(monkeypatch, 0.5)
    plan = plan_of(HOST)
    tuned = zerojax.tune(plan, kept=kept, clock=Clock())
    wanted = plan_of({**HOST, "slice_elements": SMALL})
    (said,) = [reason for reason in tuned.reasons if reason not in wanted.reasons]
    assert said.startswith("slices of offloaded state: 256 elements at most (256 elements at most ")
    assert "is 2.00 times as fast here" in said
    assert "33,554,432 elements at most is 0.50 times as fast here" in said, "beside the best"
    assert facts(dataclasses.replace(tuned, reasons=wanted.reasons)) == facts(wanted)
    assert said in tuned.as_dict()["reasons"]
    times(monkeypatch, 2.0)
    again = zerojax.tune(plan, kept=kept, clock=Clock())
    assert facts(again) == facts(tuned), "what was measured is kept"


@pytest.mark.thorough
@pytest.mark.usefixtures("on_gpus")
def test_what_is_not_faster_changes_nothing_but_the_reasons(kept, monkeypatch):
    times(monkeypatch, 0.98)
    plan = plan_of(HOST)
    tuned = zerojax.tune(plan, kept=kept, clock=Clock())
    (said,) = [reason for reason in tuned.reasons if reason not in plan.reasons]
    assert said.startswith("slices of offloaded state: 16,777,216 elements at most (256 elements ")
    assert "33,554,432 elements at most gives the same slices" in said
    assert facts(dataclasses.replace(tuned, reasons=plan.reasons)) == facts(plan)


@pytest.mark.thorough
@pytest.mark.usefixtures("on_gpus")
def test_the_steps_of_a_tuned_plan_have_the_bits_of_the_plan(kept, monkeypatch):
    times(monkeypatch, 0.5)
    plan = plan_of(HOST)
    tuned = zerojax.tune(plan, kept=kept, clock=Clock())
    states = []
    for one in (plan, tuned):
        state, step = zerojax.init_state(one, 0), zerojax.build_step(one)
        for number in range(2):
            state, _ = step(state, zerojax.shard_batch(one, text_batch(number)))
        states.append(jax.tree.map(np.asarray, to_portable_state(one, state)))
    chex.assert_trees_all_equal(*states)


NOT_ASKED = {
    "no optimizer state is on": {"opt_state": "device", "activations": "host"},
    "slice_elements=256 sets": {**HOST, "slice_elements": 256},
    "files keep the slice size": {
        **HOST,
        "opt_state": {"host": 0.5, "nvme": 0.5},
        "folder": "unused",
    },
    "a slice is a layer": {**HOST, "params": "host", "update_in_backward": True},
}


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("why", NOT_ASKED)
def test_what_leaves_nothing_to_choose_is_not_measured(why: str, kept: KeptChoices) -> None:
    optimizer = zerojax.adamw(1e-3, clip_norm=None)
    plan = plan_of(NOT_ASKED[why], optimizer=optimizer, precision="bf16")
    assert why in str(tuned_plan.why_slices_are_fixed(plan))
    assert zerojax.tune(plan, kept=kept, clock=Clock()).reasons == plan.reasons


@pytest.mark.parametrize("option", ["param_dtype", "moments_dtype"])
def test_what_is_rounded_at_random_is_not_measured(option: str) -> None:
    plan = plan_of(HOST, precision=Precision(**{option: "bfloat16"}))
    assert "rounded stochastically" in str(tuned_plan.why_slices_are_fixed(plan))


@pytest.mark.usefixtures("on_gpus")
def test_where_nothing_is_left_of_the_time_slices_stay(kept: KeptChoices) -> None:
    now = iter([0.0, *[11.0] * 99])
    tuned = zerojax.tune(plan := plan_of(HOST), kept=kept, clock=lambda: next(now))
    assert tuned.offload == plan.offload
    assert "nothing was measured: the 10 s for measurements are used up" in tuned.reasons[-1]


# What is measured


def asked(plan: Plan, size: int = SMALL) -> Any:
    return slice_choices.slice_question(plan, with_slices(plan, size))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("offload", [HOST, {**HOST, "params": "host"}], ids=["host", "params"])
def test_slices_of_any_size_have_the_same_bits(optimizer: str, offload: Any) -> None:
    plan = plan_of(offload, optimizer=getattr(zerojax, optimizer)(1e-3), precision="bf16")
    question = asked(plan)
    assert question.key["slices"] == [4096, SMALL]
    found, wanted = question.other.run(), question.reference.run()
    assert question.difference(found, wanted) is None
    weights, master, moments = wanted
    assert weights.dtype == jnp.bfloat16
    assert master["host"].shape == (1, 4096)
    assert found[1]["host"].shape == (16, SMALL)
    assert len(moments) == len(plan.tx.moments)
    struct = jax.ShapeDtypeStruct(weights.shape, weights.dtype, sharding=weights.sharding)
    given = slice_choices._filled(struct)
    assert not np.array_equal(np.asarray(given), np.asarray(weights)), "something was updated"
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves((master, moments))}
    assert kinds == {"pinned_host"}
    for way in (question.reference, question.other):
        first, second = way.repeat(), way.repeat()
        assert all(x.is_deleted() for x in jax.tree.leaves(first)), "updated in place, as steps do"
        assert jax.tree.structure(first) == jax.tree.structure(second)


def test_slices_with_other_bits_are_refused(kept, monkeypatch):
    right = LeafUpdate.__call__

    def wrong(self: Any, *arrays: Any) -> Any:
        weights, master, moments = right(self, *arrays)
        if self._leaf.num_slices > 1:
            master = jax.tree.map(lambda x: x.at[1, 0].add(1e-6), master)
        return weights, master, moments

    monkeypatch.setattr(LeafUpdate, "__call__", wrong)
    answer = decide(lambda: asked(plan_of(HOST)), kept)
    assert answer == Answer(
        choice="16,777,216 elements at most",
        reason="256 elements at most was not chosen: its results are wrong: an element has other "
        "bits",
    )


def test_the_largest_parameter_of_which_slices_differ_is_cut_to_some() -> None:
    plan = plan_of({**HOST, "slice_elements": 512})
    first, second = slice_choices.parts_of(plan, with_slices(plan, SMALL), _alone(plan))
    assert first.leaf.name == second.leaf.name == LARGEST
    assert (first.leaf.num_slices, second.leaf.num_slices) == (4, 8)
    assert first.weights.shape == second.weights.shape == (2048,)


def test_what_measuring_holds_at_once_is_counted() -> None:
    """Two ways in turns, or one that is given something and three results; weights in bfloat16."""
    plan = plan_of(HOST, precision="bf16")
    for part in slice_choices.parts_of(plan, with_slices(plan, SMALL), _alone(plan)):
        elements, slice_elements = 4096, part.leaf.slice_elements
        weights, gradient, state = 2 * elements, 2 * elements, 3 * 4 * elements
        assert part.host_bytes == state + 3 * state
        loaded = max(4 * 3 * 4 * slice_elements, 4 * elements)
        assert part.device_bytes == weights + gradient + 3 * weights + loaded


def _alone(plan: Plan) -> Mesh:
    return Mesh([plan.mesh.devices.flat[0]], ("alone",), axis_types=(AxisType.Auto,))


def test_measuring_keeps_to_the_room_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(HOST)
    other = with_slices(plan, SMALL)
    parts = slice_choices.parts_of(plan, other, _alone(plan))
    on_device = max(part.device_bytes for part in parts)
    on_host = max(part.host_bytes for part in parts)
    assert asked(plan).other.obstacle is None
    monkeypatch.setattr(slice_choices, "room", lambda plan: on_device - 1)
    assert asked(plan).other.obstacle == (
        f"measuring takes {on_device:,} bytes of device memory; {on_device - 1:,} may be used"
    )
    monkeypatch.setattr(slice_choices, "room", lambda plan: on_device)
    assert asked(plan).other.obstacle is None
    monkeypatch.setattr(slice_choices, "share_of", lambda free: free // 50)
    room = Room(10**9, 50 * on_host - 1, "a test")
    monkeypatch.setattr(slice_choices, "least_room", lambda: room)
    assert "bytes of host memory" in str(asked(plan).other.obstacle)
    monkeypatch.setattr(slice_choices, "least_room", lambda: None)
    assert "bytes of host memory" in str(asked(plan).other.obstacle)


# Compiled for a GPU


@pytest.mark.gpu_programs
@pytest.mark.parametrize("params", ["device", "host"])
def test_a_part_takes_the_memory_that_was_counted_and_moves_slices_by_dma(params: str) -> None:
    """Slices of the sizes that are tried on a card, 4 to 32 million elements."""
    mesh = make_mesh(MeshConfig(), compile_client.gpu_devices(gpus.find_gpu("h200"), 1))
    plan = _large_plan(mesh, params)
    alone = Mesh(np.array(mesh.devices.flat[:1]), ("alone",), axis_types=(AxisType.Auto,))
    options, _ = choose_options(mesh, False, True)
    for size in slice_choices.SIZES:
        for part in slice_choices.parts_of(plan, with_slices(plan, size), alone.abstract_mesh):
            update = slice_choices.update_of(plan, part, alone.abstract_mesh)
            shardings = jax.tree.map(lambda x: x.sharding, part.arrays[:3])
            jitted = jax.jit(update, donate_argnums=(0, 1, 2), out_shardings=shardings)
            compiled = compile_client.compile_for_gpus(
                compile_client.lower_for_gpus(jitted.trace(*part.arrays)),
                devices=list(alone.devices.flat),
                options=options,
                sketch=True,
            )
            memory = compiled.memory
            assert memory.host_temporary == 0
            assert memory.host_aliased == memory.host_outputs, "updated in place"
            in_turns = slice_choices.SETS * memory.arguments + memory.temporary
            results = slice_choices.RESULTS * memory.outputs
            most = max(in_turns, memory.arguments + results + memory.temporary)
            assert most <= 1.001 * part.device_bytes
            host = slice_choices.RESULTS * memory.host_outputs + memory.host_arguments
            assert max(host, slice_choices.SETS * memory.host_arguments) <= part.host_bytes
            copies = hlo.find_host_copies(hlo.read_program(compiled.text))
            assert len(copies) >= 6, "three arrays each way"
            inside = [copy for copy in copies if copy.loop_depth]
            assert inside, "a loop over slices"
            assert all(copy.is_linear for copy in inside)
            moved = hlo.link_bytes(copies)
            assert moved[TO_HOST] == memory.host_outputs
            # With masters, weights on the host are only written.
            written = part.weights.size * part.weights.dtype.itemsize * (params == "host")
            assert moved[TO_DEVICE] == memory.host_arguments - written


def _large_plan(mesh: Mesh, params: str) -> Plan:
    """Half a billion parameters in layers of four million, whose update is all there is."""

    def apply(params: Any, x: jax.Array) -> jax.Array:
        layer = lambda x, w: (x * jnp.mean(w.astype(jnp.float32)), None)  # noqa: E731
        return jax.lax.scan(layer, x, params["w"])[0]

    def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        found = model(batch["x"])
        return jnp.sum(jnp.square(found)), jnp.float32(found.size)

    shape = (128, 2**22)
    return make_plan(
        (lambda key: {"w": jax.random.normal(key, shape)}, apply),
        mesh.abstract_mesh,
        example_batch={"x": jax.ShapeDtypeStruct((8,), jnp.float32)},
        loss=loss,
        optimizer=zerojax.adamw(1e-3),
        precision="bf16",
        offload=OffloadConfig(opt_state="host", params=params),  # type: ignore[arg-type]
    )
