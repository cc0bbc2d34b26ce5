"""Secondary shards (hpZ): a node gathers weights by itself, with the results of stage 3."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.plan.test_plan import list_plan
from tests.processes.test_processes import train
from tests.support.gpu_plans import compile_step, gpu_mesh, text_plan
from tests.support.saved_states import restore, save
from tests.support.small_models import (
    Layers,
    UserText,
    apply_functions,
    init_functions,
    reference_model,
    regression_loss,
)
from tests.support.trajectories import TOLERANCE, advance, plan_for, regression_batch, train_for
from zerojax.config import ElasticityConfig, MeshConfig, RunConfig, WireConfig
from zerojax.forecasting import hlo, roles
from zerojax.optim.precision import as_precision
from zerojax.plan.counts import role_bytes
from zerojax.plan.wire import leaf_transfers, wire_bytes
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.initialization import init_state

SECONDARY = {"secondary": True}
REGRESSION = {"batch": regression_batch, "loss": regression_loss}
LAYERS = {"zero": 3, "persistence_threshold": 1, **REGRESSION}


class ListOfLayers(nnx.Module):
    """Five layers that a Python loop calls; as one loop where they are rolled."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(12, 24, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(24, 24, rngs=rngs) for _ in range(5)])
        self.out = nnx.Linear(24, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.out(x)


FUNCTIONS = (lambda key, batch: init_functions(key), apply_functions)
TEXT = {"zero": 3, "persistence_threshold": 1}
SIX = {"batch": lambda index: {name: x[:30] for name, x in regression_batch(index).items()}}
ADAMW = zerojax.adamw(1e-3, eps=1e-5, weight_decay=1e-4)
CASES = {
    "loop": (Layers, {"num_microbatches": 4, **LAYERS}),
    "loop, nodes of two": (Layers, {"node": 2, "num_microbatches": 2, **LAYERS}),
    "odd sizes": (lambda rngs: Layers(rngs, width=23), LAYERS),
    "rolled list": (ListOfLayers, {"num_microbatches": 2, **LAYERS}),
    "plain list": (ListOfLayers, {"roll": "off", "num_microbatches": 2, **LAYERS}),
    "functions": (FUNCTIONS, LAYERS),
    "six devices in three nodes": (Layers, {"devices": 6, "node": 2, **LAYERS, **SIX}),
    "replicas": (Layers, {"mesh": {"data": 4, "replica": 2}, "node": 2, **LAYERS}),
    "some stay whole for a step": (Layers, {**LAYERS, "persistence_threshold": 200}),
    "one at a time": (Layers, {"allgather_bucket_size": 1, "reduce_bucket_size": 1, **LAYERS}),
    "text": (UserText, TEXT),
    "gpt2": (reference_model("gpt2"), {"num_microbatches": 2, **TEXT}),
    "tensor parallelism": (
        reference_model("llama"),
        {"mesh": {"data": 4, "model": 2}, "node": 4, **TEXT},
    ),
    "context": (
        reference_model("llama"),
        {"mesh": {"data": 2, "context": 4}, "context_parallel": "ring", **TEXT},
    ),
    "optimizer on the host": (
        Layers,
        {"offload": {"opt_state": "host"}, "optimizer": ADAMW, **LAYERS},
    ),
    "looked up": (UserText, {"lookup": "owners", **TEXT}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_are_those_of_one_device_and_of_stage_three(case):
    model, options = CASES[case]
    own = {name: options[name] for name in ("optimizer", *REGRESSION) if name in options}
    wanted = train_for(model, devices=1, **own)
    options = {"node": 4, **options}
    flat, found = (train_for(model, wire=wire, **options) for wire in ({}, SECONDARY))
    assert any(leaf.node_shards for leaf in found.plan.placement.leaves.values())
    for run in (flat, wanted):
        np.testing.assert_allclose(found.losses, run.losses, rtol=1e-6, atol=TOLERANCE)
    assert wanted.losses[-1] < wanted.losses[0]


@pytest.mark.thorough
@pytest.mark.parametrize("codes", ["int8", "nf4"])
def test_frozen_weights_in_codes_are_gathered_so(codes):
    options = {"freeze": "up/kernel", "precision": as_precision("fp32", freeze_dtype=codes)}
    model = reference_model("gpt2", embed_dim=256, num_layers=1)
    flat, found = (
        train_for(model, node=4, wire=wire, steps=5, **options, **TEXT) for wire in ({}, SECONDARY)
    )
    np.testing.assert_allclose(found.losses, flat.losses, rtol=1e-6, atol=TOLERANCE)
    leaf = found.plan.placement.leaves["blocks/mlp/up/kernel"]
    sent = [(t.kind, t.dtype, t.within) for t in leaf_transfers(found.plan, leaf)]
    gathers = ("all-gather", "uint8", "node")
    assert sent == [("all-gather", "uint8", "nodes"), gathers, gathers]


@pytest.mark.thorough
def test_a_run_goes_on_from_a_checkpoint_on_other_meshes(tmp_path):
    """Nothing of a node's copy is state: 8, 6 and 6 steps on three meshes are 20 on one device."""
    batches = {"batch": regression_batch}
    wanted = train_for(Layers, devices=1, **REGRESSION)
    plan = plan_for(Layers, node=4, wire=SECONDARY, num_microbatches=2, **LAYERS)
    begun = advance(plan, init_state(plan, 0), range(8), **batches)
    losses = [*begun.losses]
    save(tmp_path, plan, begun.state, 8)
    other = plan_for(Layers, devices=4, node=2, wire=SECONDARY, **LAYERS)
    second = advance(other, restore(tmp_path, other)[0], range(8, 14), **batches)
    save(tmp_path, other, second.state, 14)
    last = plan_for(Layers, zero=2, **REGRESSION)
    third = advance(last, restore(tmp_path, last)[0], range(14, 20), **batches)
    losses += [*second.losses, *third.losses]
    np.testing.assert_allclose(losses, wanted.losses, rtol=1e-6, atol=TOLERANCE)


@pytest.mark.thorough
def test_an_evaluation_reads_the_same_weights():
    found = []
    for wire in ({}, SECONDARY):
        plan = plan_for(Layers, node=4, wire=wire, **LAYERS)
        batch = jax.device_put(regression_batch(1), plan.batch_sharding)
        found.append(float(build_evaluation(plan)(init_state(plan, 0), batch)["loss"]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(("wire", "bound"), [("int8", 0.01), ("int4", 0.2)])
def test_codes_go_between_nodes_alone(wire, bound):
    """A gradient is off by the rounding of its codes, as in
    `tests/parallel/test_wire_gradients.py`."""
    taken = []
    for kind in ("reduce", wire):
        options = {"wire": {"gradients": kind, **SECONDARY}, "optimizer": optax.sgd(0.1)}
        plan = plan_for(Layers, node=4, num_microbatches=2, **options, **LAYERS)
        state = init_state(plan, 3)
        before = jax.device_get(state["params"])
        batch = jax.device_put(regression_batch(0), plan.batch_sharding)
        after = jax.device_get(build_step(plan)(state, batch)[0]["params"])
        taken.append({name: before[name] - after[name] for name in before})
    for name, wanted in taken[0].items():
        error = np.sqrt(np.mean((taken[1][name] - wanted) ** 2) / np.mean(wanted**2))
        assert 1e-5 < error < bound, name
    found = _collectives(plan)
    coded = [one for one in found if one.kind == "all-to-all"]
    assert {(one.dtype, one.group_size) for one in coded} == {("u8", 2)}
    assert sum(one.wire_bytes * one.times for one in found if one.dtype != "s32") == pytest.approx(
        wire_bytes(plan), rel=0.05
    )


# --- what is sent and held ---------------------------------------------------------------------


def _collectives(plan):
    text = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile().as_text()
    return hlo.find_collectives(hlo.read_program(text), plan.mesh.size)


@pytest.mark.thorough
def test_between_nodes_weights_and_gradients_go_once_per_step():
    """Neighbours for each of 8 layers and 4 microbatches; one of each node outside of all loops."""
    plan = plan_for(
        lambda rngs: Layers(rngs, width=64), node=4, wire=SECONDARY, num_microbatches=4, **LAYERS
    )
    found = [one for one in _collectives(plan) if one.kind != "all-reduce"]
    assert {one.group for one in found} == {(0, 1, 2, 3), (0, 4)}
    between = [one for one in found if one.group_size == 2]
    assert sorted(one.kind for one in between) == ["all-gather", "reduce-scatter"]
    assert {(one.times, one.loop_depth) for one in between} == {(1, 0)}
    assert {one.times for one in found if one.group_size == 4 and one.loop_depth == 2} == {8 * 4}
    sent = sum(one.wire_bytes * one.times for one in found)
    assert sent == pytest.approx(wire_bytes(plan), rel=0.03)


def test_a_page_says_what_stays_in_a_node():
    plan = plan_for(Layers, node=4, wire=SECONDARY, num_microbatches=4, **LAYERS)
    said = " ".join(plan.reasons)
    assert "are fetched from the other 1 nodes once per step and gathered by the 4 shards" in said
    page = plan.explain("blocks/kernel")
    assert "before     all-gather over data between nodes in float32, once" in page
    assert "forward    all-gather over data inside a node in float32, 4 times" in page
    assert "after      reduce-scatter over data between nodes in float32, once" in page


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero": 0}, "zero=0 gathers none on use; use zero=3, or wire.secondary=false"),
        ({"zero": 1}, "zero=1 gathers none"),
        ({"zero": 2}, "zero=2 gathers none"),
        ({"node": 8}, "all 8 are in one node; use wire.secondary=false, or set mesh.node"),
        ({"node": None}, "all 8 are in one node"),
        ({"node": 1}, "needs the same number of shards in each node, at least 2"),
        ({"node": 3}, "node=3 does not divide the 8 devices"),
        ({"devices": 1, "node": None}, "all 1 are in one node"),
        ({"deterministic": "mesh"}, "with deterministic=mesh is not supported"),
        ({"offload": {"params": "host", "opt_state": "host"}}, "offload.params=host is not supp"),
        ({"mesh": {"data": 4, "stage": 2}}, "with stage=2 is not supported"),
        ({"mesh": {"data": 4, "expert": 2}}, "with expert=2 is not supported"),
    ],
)
def test_what_nodes_cannot_gather_is_refused(options, said):
    options = {"node": 4, **LAYERS, **options}
    with pytest.raises(ValueError, match=said):
        plan_for(Layers, wire=SECONDARY, **options)


# --- what a GPU would run ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_64_h100():
    """{wire: (plan, forecast)} of the layers of a GPT, four microbatches."""
    sizes = {"num_layers": 12, "num_heads": 8, "embed_dim": 1024, "max_seq_len": 128}
    found = {}
    for secondary in (False, True):
        wire = {"secondary": secondary}
        options = {"precision": "bf16", "zero": 3, "num_microbatches": 4, "wire": wire}
        plan = text_plan(reference_model("gpt2", **sizes), 256, 128, devices=64, **options)
        found[secondary] = plan, zerojax.forecast(plan, gpu="h100", fast=True)
    return found


@pytest.mark.gpu_programs
def test_on_64_h100_a_sixth_of_the_bytes_go_between_nodes(on_64_h100):
    """0.44 in place of 2.95 bytes per parameter: 7/64 of 2 bytes, there and back, once."""
    (_, flat), (plan, found) = on_64_h100[False], on_64_h100[True]
    count = plan.placement.num_parameters()
    assert flat.traffic.network_bytes / count == pytest.approx(2.95, rel=0.02)
    assert found.traffic.network_bytes / count == pytest.approx(2 * 2 * 7 / 64, rel=0.02)
    assert 6 * found.traffic.network_bytes < flat.traffic.network_bytes
    for forecast in (flat, found):
        traffic = forecast.traffic
        assert traffic.data_wire_bytes == pytest.approx(traffic.formula_bytes, rel=0.03)


@pytest.mark.gpu_programs
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_list_takes_what_the_plan_says(num_microbatches):
    """As `tests/gpu_programs/test_gpu_programs.py` has it of stage 3, with the same bound."""
    plan = list_plan(
        gpu_mesh(),
        num_microbatches=num_microbatches,
        precision="bf16",
        width=2048,
        settings={"node": 4, "wire": SECONDARY},
    )
    compiled = compile_step(plan)
    held = role_bytes(plan)
    counted = held["gathered weights"] + held["gradients"]
    assert counted == pytest.approx(compiled.memory.temporary, rel=0.25)


@pytest.mark.gpu_programs
def test_on_64_h100_a_device_holds_its_part_of_a_node(on_64_h100):
    """Bounds as in `tests/forecasting/test_forecast_roles.py`: at most the whole gradients of two
    layers and the weights of two come to what the plan says."""
    plan, forecast = on_64_h100[True]
    found = {role.role: role for role in forecast.memory.roles}
    leaves = plan.placement.leaves
    layer = 2 * 12 * 1024 * 1024
    held = sum(np.prod(leaf.shape) for leaf in leaves.values() if leaf.node_shards) / 8
    weights, gradients = found[roles.WEIGHTS], found[roles.GRADIENTS]
    assert 0.97 * 2 * held < weights.bytes < 1.03 * 2 * held + 2.05 * layer
    assert gradients.formula == pytest.approx((4 + 2) * held, rel=0.03)
    assert 0.97 * gradients.formula < gradients.bytes < gradients.formula + 2.2 * layer


@pytest.mark.thorough
def test_eight_bits_go_inside_of_a_node():
    """Few steps: a difference in the last place may later round to another 8-bit float."""
    model = reference_model("gpt2", matmul_dtype="fp8")
    flat, found = (
        train_for(model, node=4, wire={"weights": "fp8", **more}, steps=5, **TEXT)
        for more in ({}, SECONDARY)
    )
    assert found.losses[0] == flat.losses[0]
    np.testing.assert_allclose(found.losses, flat.losses, rtol=1e-6, atol=TOLERANCE)
    leaf = found.plan.placement.leaves["blocks/mlp/up/kernel"]
    sent = {(t.dtype, t.within) for t in leaf_transfers(found.plan, leaf) if "gather" in t.kind}
    assert sent == {("float32", "nodes"), ("uint8", "node")}


def test_an_elastic_run_on_one_node_goes_without():
    mesh = MeshConfig(zero=3, node=8, wire=WireConfig(secondary=True))
    config = RunConfig(mesh=mesh, elasticity=ElasticityConfig(enabled=True))
    found = [config.mesh_on(count) for count in (64, 8, 12)]
    assert [(one.node, one.wire.secondary) for one in found] == [
        (8, True),
        (None, False),
        (None, False),
    ]


@pytest.mark.thorough
def test_a_run_is_loaded_on_devices_that_are_one_node(tmp_path):
    words = ("zero=3", "mesh.persistence_threshold=1", "mesh.node=2", "mesh.wire.secondary=true")
    train(tmp_path, "run", *words, "steps=4")
    loaded = zerojax.load_run(tmp_path / "run")
    assert loaded.step == 4
    assert not loaded.plan.settings.wire.secondary


@pytest.mark.multihost
@pytest.mark.slow
def test_two_processes_are_two_nodes(tmp_path):
    """Each has two devices and is a node by itself; gloo adds up by all-to-alls."""
    words = ("zero=3", "mesh.persistence_threshold=1", "num_microbatches=2")
    one = train(tmp_path, "one", *words, "steps=8")
    two = train(tmp_path, "two", *words, "mesh.wire.secondary=true", "steps=8", processes=2)
    np.testing.assert_allclose(two, one, rtol=1e-6, atol=TOLERANCE)
