"""Gradients that travel in codes: near the run that sends them whole, and never lost unseen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.support.gpu_plans import text_plan
from tests.support.small_models import (
    apply_functions,
    init_functions,
    reference_model,
    regression_loss,
)
from tests.support.trajectories import plan_for, regression_batch, train_for
from zerojax.config import MeshConfig
from zerojax.forecasting import hlo
from zerojax.hardware import gpus
from zerojax.optim.wire_codes import WireCodes
from zerojax.placement.device_mesh import make_abstract_mesh, make_mesh
from zerojax.plan.gradient_wire import shards_in_node
from zerojax.plan.wire import leaf_transfers
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state

MODEL = (lambda key, batch: init_functions(key), apply_functions)
REGRESSION = {"batch": regression_batch, "loss": regression_loss}
STEP = 0.1


def gradients(wire, zero=2, **options):
    """{name: what one step of plain gradient descent takes from a parameter, / its rate}."""
    plan = plan_for(
        MODEL,
        zero=zero,
        wire=wire,
        optimizer=optax.sgd(STEP),
        persistence_threshold=1,
        **REGRESSION,
        **options,
    )
    state = init_state(plan, 3)
    before = jax.device_get(state["params"])
    placed = jax.device_put(regression_batch(0), plan.batch_sharding)
    state, _ = build_step(plan)(state, placed)
    after = jax.device_get(state["params"])
    return {name: (before[name] - after[name]) / STEP for name in before}


CASES = {
    "zero 1": {"zero": 1},
    "zero 2, microbatches": {"num_microbatches": 2},
    "zero 3, two levels": {"zero": 3, "node": 4},
    "six devices in two nodes": {"devices": 4, "node": 2},
    "three devices": {"devices": 2},
    "replicas": {"mesh": {"data": 4, "replica": 2}},
    "update in backward buckets": {"reduce_bucket_size": 1},
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("wire", "bound"), [("int8", 0.01), ("int4", 0.2)])
def test_a_gradient_is_off_by_the_rounding_of_its_codes(case, wire, bound):
    """rms of the error over rms, a few times 1 / (2 x 127) and 1 / (2 x 7) of a block's largest."""
    options = CASES[case]
    exact, coded = (gradients({"gradients": kind}, **options) for kind in ("reduce", wire))
    for name, wanted in exact.items():
        error = np.sqrt(np.mean((coded[name] - wanted) ** 2) / np.mean(wanted**2))
        assert 1e-5 < error < bound, name


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_losses_are_near_those_of_whole_gradients(zero):
    """20 steps of a small GPT; 4e-4 is a tenth of what they fall by, the difference less."""
    model = reference_model("gpt2", num_layers=1)
    options = {"zero": zero, "persistence_threshold": 100, "precision": "bf16"}
    whole = train_for(model, **options)
    coded = train_for(model, wire={"gradients": "int8"}, node=4, **options)
    fallen = whole.losses[0] - whole.losses[-1]
    assert fallen > 0.05
    assert np.abs(coded.losses - whole.losses).max() < 0.05 * fallen
    assert (coded.norms != whole.norms).any()


@pytest.mark.thorough
@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_skips_the_step_and_names_the_leaf(wire, value):
    """One of 8 devices has it, in the gradient of one parameter alone; the loss is finite."""

    @jax.custom_vjp
    def spoiled(weights, mark):
        return weights

    spoiled.defvjp(
        lambda weights, mark: (weights, mark), lambda mark, slope: (slope.at[0, 0].add(mark), None)
    )

    def apply(params, x, mark):
        out = spoiled(params["out"]["w"], mark)
        return jnp.tanh(x @ params["in"]["w"] + params["in"]["b"][None]) @ out

    def loss(model, batch):
        return jnp.mean((model(batch["x"], jnp.sum(batch["mark"])) - batch["y"]) ** 2)

    mark = np.zeros(32, np.float32)
    given = {**regression_batch(0), "mark": mark}
    plan = plan_for(
        (lambda key, batch: init_functions(key), apply),
        batch=lambda index: given,
        loss=loss,
        zero=2,
        wire={"gradients": wire},
    )
    state, step = init_state(plan), build_step(plan)
    state, metrics = step(state, jax.device_put(given, plan.batch_sharding))
    assert int(metrics["skipped"]) == 0
    before = jax.device_get(state["params"])
    mark[5] = value
    state, metrics = step(state, jax.device_put(given, plan.batch_sharding))
    assert int(metrics["skipped"]) == 1
    assert sorted(before)[int(metrics["bad_leaf"])] == "out/w"
    for name, kept in before.items():
        np.testing.assert_array_equal(state["params"][name], kept)


def by_formula(plan, kind):
    return sum(
        transfer.num_bytes
        for leaf in plan.placement.leaves.values()
        for transfer in leaf_transfers(plan, leaf)
        if transfer.kind == kind
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("node", "groups"), [(8, {8}), (2, {2, 4})])
def test_the_program_sends_codes_in_one_level_or_two(node, groups):
    plan = plan_for(MODEL, zero=1, wire={"gradients": "int8"}, node=node, **REGRESSION)
    text = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile().as_text()
    found = hlo.find_collectives(hlo.read_program(text), 8)
    codes = [one for one in found if (one.kind, one.dtype) == ("all-to-all", "u8")]
    assert {one.group_size for one in codes} == groups
    sent = sum(one.wire_bytes * one.times for one in codes)
    assert sent == pytest.approx(by_formula(plan, "all-to-all"), rel=0.01)
    assert not [one for one in found if one.kind == "reduce-scatter"]


def test_names_that_are_exact_travel_in_float32():
    plan = plan_for(
        MODEL,
        zero=1,
        precision="bf16",
        wire={"gradients": "int4", "exact": ["/b$"]},
        persistence_threshold=1,
        **REGRESSION,
    )
    kinds = {
        name: [(t.kind, t.dtype) for t in leaf_transfers(plan, leaf)][-1]
        for name, leaf in plan.placement.leaves.items()
    }
    assert kinds == {
        "in/b": ("reduce-scatter", "float32"),
        "in/w": ("all-to-all", "uint8"),
        "out/w": ("all-to-all", "uint8"),
    }
    said = " ".join(plan.reasons)
    assert "wire.exact: gradients of 1 parameters (such as in/b) are sent in float32" in said
    assert "wire.gradients=int4: gradients of 2 of 3 parameters are sent as integers of 4" in said


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_exact_gradients_are_those_of_a_run_that_sends_all_in_float32(zero):
    options = {"zero": zero, "precision": "bf16"}
    every = gradients(None, reduce_dtype="fp32", **options)
    exact = gradients({"exact": ["."]}, **options)
    for name, wanted in every.items():
        np.testing.assert_array_equal(exact[name], wanted)


@pytest.mark.parametrize(
    ("sizes", "over", "node", "shards"),
    [
        ({"data": 64}, ("data",), 8, 8),
        ({"data": 24}, ("data",), 8, 8),
        ({"data": 16, "model": 4}, ("data",), 8, 2),
        ({"data": 8, "model": 8}, ("data",), 8, 1),
        ({"data": 4, "replica": 2}, ("data",), 8, 4),
        ({"data": 8, "context": 2}, ("data", "context"), 8, 8),
        ({"data": 12}, ("data",), 8, 1),
        ({"data": 8}, ("data",), None, 8),
    ],
)
def test_shards_of_a_node(sizes, over, node, shards):
    """One level where nodes cut groups unevenly."""
    count = int(np.prod(list(sizes.values())))
    gpu = gpus.find_gpu("h100")
    mesh = make_abstract_mesh(sizes, count, gpu=gpu)
    assert shards_in_node(mesh, over, node) == shards


def test_devices_of_one_process_are_one_node():
    assert shards_in_node(make_mesh(MeshConfig()), ("data",)) == 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero": 0}, "with zero=0 every device has full gradients; use zero=1, 2 or 3"),
        ({"deterministic": "mesh"}, "with deterministic=mesh is not supported"),
        ({"node": 3}, "node=3 does not divide the 8 devices"),
        ({"wire": {"gradients": "int8", "exact": ["nothing"]}}, "'nothing' matches none of the 3"),
    ],
)
def test_what_codes_are_not_for_is_refused(options, said):
    options = {"zero": 1, "wire": {"gradients": "int8"}, **options}
    with pytest.raises(ValueError, match=said):
        plan_for(MODEL, **REGRESSION, **options)


@pytest.mark.gpu_programs
@pytest.mark.parametrize(
    ("devices", "wire"), [(8, "int8"), (24, "int8"), (64, "int8"), (64, "int4")]
)
def test_on_h100_no_gradient_travels_wide(devices, wire):
    """Two levels on three nodes and on eight, by the formula's bytes; nothing but codes above 1 %
    of the bytes, the gather of weights apart."""
    sizes = {"num_layers": 2, "num_heads": 8, "embed_dim": 512, "max_seq_len": 128}
    options = {"precision": "bf16", "zero": 2, "wire": {"gradients": wire}}
    plan = text_plan(reference_model("gpt2", **sizes), devices, 128, devices=devices, **options)
    rows = zerojax.forecast(plan, gpu="h100", fast=True).traffic.rows
    codes = [row for row in rows if (row.kind, row.dtype) == ("all-to-all", "u8")]
    sent = sum(row.wire_bytes for row in codes)
    assert sent == pytest.approx(by_formula(plan, "all-to-all"), rel=0.01)
    others = [row for row in rows if row not in codes and row.kind != "all-gather"]
    assert sum(row.wire_bytes for row in others) < 0.01 * sent
    # A row for each node to 7 neighbours, and one to each other node; a row of the plan has it.
    nodes = devices // 8
    between = sum(row.network_bytes for row in codes)
    assert between == pytest.approx(sent * (nodes - 1) / (8 * nodes - 1), rel=0.01)
    leaf = plan.placement.leaves["blocks/mlp/up/kernel"]
    assert leaf.gradient_codes == WireCodes(int(wire[3:]), 8)
