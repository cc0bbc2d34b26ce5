"""Weights that are gathered in codes: masters exact, what is read near them, half the bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.plan.test_plan import list_plan
from tests.support.gpu_plans import compile_step, gpu_mesh, text_plan
from tests.support.small_models import Layers, reference_model, regression_loss
from tests.support.trajectories import plan_for, regression_batch, train_for
from zerojax.forecasting import hlo
from zerojax.optim.wire_codes import WireCodes
from zerojax.plan.wire import leaf_transfers, wire_bytes
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.initialization import init_state

CODED = {"weights": "int8"}
WIDE = lambda rngs: Layers(rngs, width=96)  # noqa: E731
REGRESSION = {"batch": regression_batch, "loss": regression_loss}
OPTIONS = {"persistence_threshold": 1, "optimizer": optax.sgd(0.1), **REGRESSION}


def as_read(plan, params):
    """{name: what a step reads of a master: rows of each shard through the codes, written out}."""
    codes, read = WireCodes(8), {}
    for name, leaf in plan.placement.leaves.items():
        whole = np.asarray(params[name])
        if leaf.wire_codes is None:
            read[name] = whole
            continue
        shards = plan.placement.num_shards(leaf)
        at_once = leaf.num_slices if leaf.access.value == "gather on use" else 1
        at_once = 1 if leaf.node_shards else at_once
        layers = np.split(whole, at_once) if at_once > 1 else [whole]
        decoded = []
        for layer in layers:
            pieces = []
            for piece in np.split(layer, shards, axis=layer.ndim + leaf.zero_dim):
                row = jnp.asarray(piece.reshape(-1))
                coded = codes.decode(codes.encode(row), row.size)
                pieces.append(np.asarray(coded).reshape(piece.shape))
            decoded.append(np.concatenate(pieces, axis=layer.ndim + leaf.zero_dim))
        read[name] = np.concatenate(decoded) if at_once > 1 else decoded[0]
    return read


CASES = {
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "zero 3, alone": {"zero": 3, "allgather_bucket_size": 1},
    "zero 3, secondary": {"zero": 3, "node": 4, "wire": {"secondary": True, **CODED}},
    "zero 3, microbatches": {"zero": 3, "num_microbatches": 2},
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_at_the_coded_weights_and_masters_stay_exact(case):
    """1e-6 of the largest: float32 sums over another order of the batch."""
    plan = plan_for(WIDE, **{"wire": CODED, **OPTIONS, **CASES[case]})
    assert plan.placement.leaves["blocks/kernel"].wire_codes == WireCodes(8)
    state = init_state(plan, 3)
    before = jax.device_get(state["params"])
    exact = plan_for(WIDE, devices=1, **OPTIONS)
    read = as_read(plan, before)
    assert any((read[name] != before[name]).any() for name in before)
    theirs = init_state(exact, 3)
    true = {name: tuple(map(slice, leaf.shape)) for name, leaf in theirs["params"].items()}
    theirs["params"] = {
        name: jax.device_put(read[name][true[name]], leaf.sharding)
        for name, leaf in theirs["params"].items()
    }
    batch = regression_batch(0)
    after, metrics = build_step(plan)(state, jax.device_put(batch, plan.batch_sharding))
    wanted, known = build_step(exact)(theirs, jax.device_put(batch, exact.batch_sharding))
    assert float(metrics["loss"]) == pytest.approx(float(known["loss"]), rel=1e-6)
    for name, start in before.items():
        taken = (start - np.asarray(after["params"][name]))[true[name]]
        slope = read[name][true[name]] - np.asarray(wanted["params"][name])
        np.testing.assert_allclose(taken, slope, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.thorough
def test_an_evaluation_reads_what_a_step_reads():
    plan = plan_for(WIDE, zero=3, wire=CODED, **OPTIONS)
    state = init_state(plan, 0)
    batch = jax.device_put(regression_batch(1), plan.batch_sharding)
    found = build_evaluation(plan)(state, batch)
    _, metrics = build_step(plan)(state, batch)
    loss = float(found["loss"]) / float(found["weight"])
    assert loss == pytest.approx(float(metrics["loss"]), rel=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [1, 3])
def test_losses_are_near_those_of_exact_weights(zero):
    """20 steps of a small GPT; the difference is less than a twentieth of what they fall by."""
    model = reference_model("gpt2", num_layers=1, embed_dim=64)
    options = {"zero": zero, "persistence_threshold": 100, "precision": "bf16"}
    exact, coded = (train_for(model, wire=wire, **options) for wire in ({}, CODED))
    fallen = exact.losses[0] - exact.losses[-1]
    assert fallen > 0.05
    assert np.abs(coded.losses - exact.losses).max() < 0.05 * fallen
    assert (coded.losses != exact.losses).any()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("zero", "weights", "value"),
    [
        (3, "compute", np.nan),
        (3, "int8", np.inf),
        (2, "delta_int8", np.inf),
        (1, "delta_int4", np.nan),
    ],
)
def test_a_run_with_a_weight_that_is_not_finite_names_it(
    monkeypatch, tmp_path, zero, weights, value
):
    """All gradients are NaN then, and those of `blocks/bias` come first."""
    monkeypatch.chdir(tmp_path)  # for the run's log

    def spoiled(rngs):
        model = WIDE(rngs)
        model.blocks.kernel[...] = model.blocks.kernel[...].at[3, 5, 7].set(value)
        return model

    words = "first in the weights of 'blocks/kernel' at step 5: not finite at 5 reports in a row"
    with pytest.raises(FloatingPointError, match=f"{words}.*5 updates skipped"):
        zerojax.train(
            spoiled,
            {"zero": zero, "wire": {"weights": weights}, "persistence_threshold": 1},
            regression_batch,
            loss=regression_loss,
            precision="fp32",
            steps=6,
            log=zerojax.LogConfig(every=1),
        )


@pytest.mark.thorough
def test_the_program_gathers_codes_and_what_is_exact_apart():
    """Of 8 layers; `first` and biases are named, or so few that codes would be more."""
    plan = plan_for(WIDE, zero=3, wire={"exact": ["^first"], **CODED}, **OPTIONS)
    leaves = plan.placement.leaves
    coded = {name for name, leaf in leaves.items() if leaf.wire_codes is not None}
    assert coded == {"blocks/kernel"}
    assert leaf_transfers(plan, leaves["first/kernel"])[0].dtype == "float32"
    text = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile().as_text()
    found = hlo.find_collectives(hlo.read_program(text), 8)
    gathers = [one for one in found if (one.kind, one.dtype) == ("all-gather", "u8")]
    sent = sum(one.wire_bytes * one.times for one in gathers)
    # A slice of a shard is 96 x 12: five blocks of 256 and their scales.
    assert sent == 2 * 8 * 7 * 5 * (256 + 2)
    known = [t for t in leaf_transfers(plan, leaves["blocks/kernel"]) if t.dtype == "uint8"]
    assert sent == pytest.approx(sum(t.num_bytes for t in known), rel=0.01)
    said = " ".join(plan.reasons)
    assert "wire.weights=int8: 1 of 6 parameters are gathered as integers of 8 bits" in said


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero": 0}, "zero=0 gathers none; use zero=1, 2 or 3, or wire.weights=compute"),
        ({"deterministic": "mesh"}, "with deterministic=mesh is not supported"),
        ({"offload": {"params": "host", "opt_state": "host"}}, "offload.params=host is not supp"),
        ({"mesh": {"data": 4, "stage": 2}}, "with stage=2 is not supported"),
        ({"mesh": {"data": 4, "expert": 2}}, "expert=2 with wire.weights=int8 is not supported"),
    ],
)
def test_what_codes_are_not_for_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        plan_for(WIDE, wire=CODED, **{"zero": 3, **OPTIONS, **options})


@pytest.mark.gpu_programs
@pytest.mark.parametrize(("devices", "secondary"), [(8, False), (64, False), (64, True)])
def test_on_h100_no_weight_travels_wide(devices, secondary):
    """0.504 of bfloat16's bytes in each gather; with secondary shards between nodes alone."""
    sizes = {"num_layers": 2, "num_heads": 8, "embed_dim": 1024, "max_seq_len": 128}
    rows, sums = {}, {}
    for weights in ("compute", "int8"):
        wire = {"weights": weights, "secondary": secondary}
        options = {"precision": "bf16", "zero": 3, "num_microbatches": 2, "wire": wire}
        model = reference_model("gpt2", **sizes)
        plan = text_plan(model, 2 * devices, 128, devices=devices, **options)
        traffic = zerojax.forecast(plan, gpu="h100", fast=True).traffic
        rows[weights] = [row for row in traffic.rows if row.kind == "all-gather"]
        sums[weights] = sum(row.wire_bytes for row in rows[weights])
        assert traffic.data_wire_bytes == pytest.approx(traffic.formula_bytes, rel=0.03)
        assert traffic.formula_bytes == wire_bytes(plan)
    if secondary:
        between = {weights: sum(row.network_bytes for row in rows[weights]) for weights in rows}
        assert between["int8"] == pytest.approx(0.504 * between["compute"], rel=0.02)
        return
    coded = sum(row.wire_bytes for row in rows["int8"] if row.dtype == "u8")
    assert coded > 0.99 * sums["int8"]
    assert sums["int8"] == pytest.approx(0.504 * sums["compute"], rel=0.02)


@pytest.mark.gpu_programs
@pytest.mark.parametrize("scan", [False, True])
def test_nothing_decoded_waits_for_the_backward_pass(scan):
    """Temporaries of the step for 8 H100 are at most those without codes; 1 % is for scales."""
    held = []
    for weights in ("compute", "int8"):
        plan = list_plan(
            gpu_mesh(),
            precision="bf16",
            width=2048,
            scan=scan,
            settings={"wire": {"weights": weights}},
        )
        held.append(compile_step(plan).memory.temporary)
    assert held[1] < 1.01 * held[0]
