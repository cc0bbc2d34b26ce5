"""1-bit Adam: a recurrence of NumPy, what it sends, what it keeps, and what it refuses."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import zerojax
from tests.support.gpu_plans import text_plan
from tests.support.small_models import (
    Layers,
    apply_functions,
    init_functions,
    reference_model,
    regression_loss,
)
from tests.support.trajectories import advance, plan_for, regression_batch, train_for
from tests.tracing import test_rolled_training
from zerojax import deepspeed_config as deepspeed
from zerojax.checkpoint import Checkpointer
from zerojax.config import ConfigError
from zerojax.features.one_bit.sign_plan import (
    compressed_bytes,
    errors_key,
    row_elements,
    signs_sent,
)
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client
from zerojax.optim import decay_mask, one_bit_adam
from zerojax.optim.one_bit import BLOCK, decode_signs, encode_signs, message_bytes
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import reshard_state
from zerojax.training.checkpointing import restore_state, save_state, what_differs

MODEL = (lambda key, batch: init_functions(key), apply_functions)
REGRESSION = {"batch": regression_batch, "loss": regression_loss}
FREEZE, B1, B2, EPS, RATE = 4, 0.9, 0.99, 1e-6, 5e-3


def adam(**changes):
    options = {"freeze_step": FREEZE, "b1": B1, "b2": B2, "eps": EPS, "weight_decay": 0.1}
    options |= {"mask": decay_mask}
    return one_bit_adam(RATE, **{**options, **changes})


def run(*, steps=12, **options):
    options = {"optimizer": adam(), "zero": 1, **REGRESSION, **options}
    return train_for(MODEL, steps=steps, **options)


# --- messages -------------------------------------------------------------------------------------


def plain_signs(values):
    """float32 [rows, elements] -> what a message of each row says, by loops."""
    said = np.empty_like(values)
    for row, line in enumerate(values):
        for start in range(0, len(line), BLOCK):
            block = line[start : start + BLOCK]
            scale = np.float32(np.mean(np.abs(block)).astype(ml_dtypes.bfloat16))
            said[row, start : start + BLOCK] = np.where(block >= 0, scale, -scale)
    return said


@pytest.mark.parametrize("elements", [1, 7, 8, 255, 256, 257, 1000])
def test_a_message_says_signs_and_the_mean_magnitude_of_each_block(elements):
    values = np.random.default_rng(0).normal(size=(3, elements)).astype(np.float32)
    message = jax.jit(encode_signs)(values)
    assert message.shape == (3, message_bytes(elements))
    assert message.dtype == jnp.uint8
    said = np.asarray(jax.jit(decode_signs, static_argnums=1)(message, elements))
    np.testing.assert_array_equal(np.sign(said), np.where(values >= 0, 1, -1))
    # A mean that is summed in another order may be rounded to the next bfloat16.
    np.testing.assert_allclose(said, plain_signs(values), rtol=2**-7)


# --- the recurrence -------------------------------------------------------------------------------


class Plain:
    """1-bit Adam on simulated devices, in float32 of NumPy: arXiv:2102.02888, algorithm 1."""

    def __init__(self, plan, params):
        self.devices, self.params = plan.mesh.shape["data"], dict(params)
        self.leaves = plan.placement.leaves
        self.mu = {name: np.zeros_like(x) for name, x in params.items()}
        self.nu = {name: np.zeros_like(x) for name, x in params.items()}
        rows = {name: row_elements(self.leaves[name], self.devices) for name in params}
        self.worker = {n: np.zeros((self.devices, self.devices, row)) for n, row in rows.items()}
        self.server = {n: np.zeros((self.devices, row)) for n, row in rows.items()}
        self.count = 0

    def split(self, name, whole):
        """[devices, row], as the plan cuts it."""
        leaf = self.leaves[name]
        if leaf.zero_dim is not None:
            dim = whole.ndim + leaf.zero_dim
            widths = [(0, new - old) for new, old in zip(leaf.stored_shape, whole.shape)]  # noqa: B905
            cut = np.split(np.pad(whole, widths), self.devices, axis=dim)
            return np.stack([part.reshape(-1) for part in cut])
        flat = np.zeros(self.devices * row_elements(leaf, self.devices))
        flat[: whole.size] = whole.reshape(-1)
        return flat.reshape(self.devices, -1)

    def join(self, name, rows):
        leaf = self.leaves[name]
        if leaf.zero_dim is None:
            return rows.reshape(-1)[: math.prod(leaf.shape)].reshape(leaf.shape)
        dim = len(leaf.shape) + leaf.zero_dim
        shape = list(leaf.stored_shape)
        shape[dim] //= self.devices
        whole = np.concatenate([row.reshape(shape) for row in rows], axis=dim)
        return whole[tuple(slice(size) for size in leaf.shape)]

    def agree(self, name, grads):
        """The momentum that all devices have after this step."""
        momentum = self.split(name, self.mu[name])
        said = []
        for device, grad in enumerate(grads):
            wanted = B1 * momentum + (1 - B1) * self.split(name, grad) + self.worker[name][device]
            said.append(plain_signs(wanted.astype(np.float32)))
            self.worker[name][device] = wanted - said[-1]
        mean = np.mean(said, axis=0) + self.server[name]
        agreed = plain_signs(mean.astype(np.float32))
        self.server[name] = mean - agreed
        return self.join(name, agreed)

    def step(self, grads):
        """grads: [{name: gradient of one device's part of the batch}]."""
        self.count += 1
        frozen = self.count > FREEZE
        for name, param in self.params.items():
            own = [np.asarray(grad[name], np.float64) for grad in grads]
            mean = np.mean(own, axis=0)
            if frozen:
                self.mu[name] = self.agree(name, own)
            else:
                self.mu[name] = B1 * self.mu[name] + (1 - B1) * mean
                self.nu[name] = B2 * self.nu[name] + (1 - B2) * mean * mean
            root = np.sqrt(self.nu[name] / (1 - B2 ** min(self.count, FREEZE))) + EPS
            decay = 0.1 * param if param.ndim > 1 else 0
            moved = self.mu[name] / (1 - B1**self.count) / root
            self.params[name] = param - RATE * (np.where(self.nu[name] > 0, moved, 0) + decay)


def flat_loss(params, batch):
    nested = {"in": {"w": params["in/w"], "b": params["in/b"]}, "out": {"w": params["out/w"]}}
    total, weight = regression_loss(functools.partial(apply_functions, nested), batch)
    return total / weight


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("devices", "steps"), [(8, 8), (3, 5)])
def test_it_is_numpys_recurrence(zero, devices, steps):
    """4 steps in signs on 8 devices. float32 against float64 is off by 1e-6 of a step until a mean
    is 0 but for rounding, and its sign is either; among three devices that is in the second step,
    where two have opposite signs and what was left out makes up for the third."""

    def batch(index):
        return {name: x[: 4 * devices] for name, x in regression_batch(index).items()}

    options = {**REGRESSION, "batch": batch, "devices": devices, "zero": zero}
    plan = plan_for(MODEL, optimizer=adam(), **options)
    state = init_state(plan, 0)

    def true(tree):
        leaves = plan.placement.leaves
        return {n: np.asarray(x)[tuple(map(slice, leaves[n].shape))] for n, x in tree.items()}

    begun = true(state["params"])
    plain, gradient = Plain(plan, begun), jax.jit(jax.grad(flat_loss))
    for index in range(steps):
        given = batch(index)
        parts = [{n: x[4 * d : 4 * d + 4] for n, x in given.items()} for d in range(devices)]
        now = {name: np.asarray(x, np.float32) for name, x in plain.params.items()}
        plain.step([gradient(now, part) for part in parts])
    state = advance(plan, state, range(steps), batch=batch).state
    for name, wanted in plain.params.items():
        moved = np.abs(wanted - begun[name]).max()
        assert moved > RATE
        np.testing.assert_allclose(true(state["params"])[name], wanted, atol=2e-5 * moved)
    momentum = true(state["opt_state"][0].mu)
    for name, wanted in plain.mu.items():  # of scales in bfloat16, so to the last bit
        np.testing.assert_array_equal(momentum[name], wanted.astype(np.float32))


@pytest.mark.thorough
def test_the_warm_up_is_adamw_bit_for_bit():
    options = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": 0.1, "mask": decay_mask}
    plain = run(optimizer=zerojax.adamw(RATE, **options), steps=FREEZE)
    signed = run(steps=FREEZE)
    np.testing.assert_array_equal(signed.losses, plain.losses)
    for name, wanted in plain.state["params"].items():
        np.testing.assert_array_equal(signed.state["params"][name], wanted)


def equal_rows(rows):
    """A batch in which every device's part is the same."""
    return lambda index: {
        name: np.tile(x[:rows], (8, 1)) for name, x in regression_batch(index).items()
    }


@pytest.mark.thorough
def test_one_device_is_eight_where_gradients_are_equal():
    """Parts are whole blocks (4096 / 8 = 2 x 256), so scales are the same ones; what differs is how
    a mean of 8 equal parts of a batch is summed."""

    def init(key, batch):
        first, second = jax.random.split(key)
        hidden = jax.random.normal(first, (12, 1024)) * 0.3
        return {"in": hidden, "out": jax.random.normal(second, (1024, 6)) * 0.05}

    def apply(params, x):
        return (jnp.tanh(x @ params["in"]) @ params["out"])[:, :5]

    options = {"batch": equal_rows(4), "loss": regression_loss, "zero": 0, "optimizer": adam()}
    eight = train_for((init, apply), steps=10, **options)
    one = train_for((init, apply), steps=10, devices=1, **options)
    np.testing.assert_allclose(eight.losses, one.losses, rtol=1e-3)
    np.testing.assert_allclose(eight.norms, one.norms, rtol=1e-3)


@pytest.mark.thorough
def test_exact_names_are_adamws_throughout():
    """All of them: a run with no signs is AdamW's, and its second moments go on."""
    options = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": 0.1, "mask": decay_mask}
    wire = {"exact": ["."]}
    plain = run(optimizer=zerojax.adamw(RATE, **options), wire=wire)
    exact = run(wire=wire)
    np.testing.assert_allclose(exact.losses, plain.losses, rtol=1e-6)
    some = run(wire={"exact": ["out"]})
    assert (some.losses[FREEZE + 1 :] != plain.losses[FREEZE + 1 :]).all()
    key = errors_key(some.plan.placement)
    assert sorted(some.state["one_bit"][key]["worker"]) == ["in/b", "in/w"]


CASES = {
    "microbatches": {"num_microbatches": 2},
    "small buckets": {"reduce_bucket_size": 1},
    "bfloat16": {"precision": "bf16"},
    "float16": {"precision": "fp16"},
    "stage 0": {"zero": 0},
    "frozen": {"freeze": ["in/b"]},
    "clipped": {"optimizer": adam(clip_norm=1.0)},
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_it_learns_with(case):
    """AdamW's loss falls to 0.2 of its first in 30 steps."""
    found = run(steps=30, **CASES[case])
    assert found.losses[-4:].mean() < 0.45 * found.losses[:4].mean()
    skipped = int(found.state["skipped"])  # of float16 the first, until the loss scale fits
    assert skipped == 0 or (case == "float16" and skipped < FREEZE)


@pytest.mark.thorough
def test_the_norm_is_never_below_that_of_the_mean_and_clips():
    same = run(batch=equal_rows(4), steps=FREEZE + 1)
    plain = run(
        batch=equal_rows(4),
        steps=FREEZE + 1,
        optimizer=zerojax.adamw(RATE, b1=B1, b2=B2, eps=EPS, weight_decay=0.1, mask=decay_mask),
    )
    np.testing.assert_allclose(same.norms, plain.norms, rtol=1e-5)
    differ = run(steps=FREEZE + 1)
    assert differ.norms[-1] > 1.1 * differ.norms[-2]
    clipped = run(steps=FREEZE + 3, optimizer=adam(clip_norm=1e-3))
    free = run(steps=FREEZE + 3)
    assert (clipped.losses[1:] != free.losses[1:]).all()


# --- NaN ------------------------------------------------------------------------------------------


@jax.custom_vjp
def spoiled(weights, mark):
    """The weights; their gradient has `mark` in one place."""
    return weights


spoiled.defvjp(
    lambda weights, mark: (weights, mark), lambda mark, slope: (slope.at[0, 0].add(mark), None)
)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1])
def test_a_gradient_that_is_not_finite_on_one_device_skips_the_step_and_names_the_leaf(zero):
    """After the warm-up; nothing changes, not what signs have left out either."""

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
        zero=zero,
        optimizer=adam(freeze_step=1),
    )
    state, step = init_state(plan), build_step(plan)
    for _ in range(3):
        state, metrics = step(state, jax.device_put(given, plan.batch_sharding))
        assert int(metrics["skipped"]) == 0
    before = jax.device_get(state)
    mark[5] = np.nan
    state, metrics = step(state, jax.device_put(given, plan.batch_sharding))
    assert int(metrics["skipped"]) == 1
    assert sorted(before["params"])[int(metrics["bad_leaf"])] == "out/w"
    for part in ("params", "opt_state", "one_bit"):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state[part]), before[part])
    mark[5] = 0
    state, metrics = step(state, jax.device_put(given, plan.batch_sharding))
    assert int(metrics["skipped"]) == 0


# --- checkpoints ----------------------------------------------------------------------------------


ABOUT = {"data_state": {}, "config": {}, "plan": {}}


def planned(model=MODEL, **options):
    given = REGRESSION if model is MODEL else {}
    return plan_for(model, **{"optimizer": adam(), "zero": 1, **given, **options})


def save(folder, found, step):
    with Checkpointer(folder) as checkpointer:
        save_state(checkpointer, found.plan, found.state, step=step, about=ABOUT)


def restore(folder, plan):
    """(the state, what a run says of it)."""
    with Checkpointer(folder) as checkpointer:
        restored, state = restore_state(checkpointer, plan)
    return state, what_differs(plan, restored)


def same(first, second):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(first), jax.device_get(second))


@pytest.mark.thorough
@pytest.mark.parametrize("at", [FREEZE - 1, FREEZE, FREEZE + 3])
def test_a_run_that_goes_on_has_the_same_bits(at, tmp_path):
    check_going_on(at, tmp_path, adam())


def check_going_on(at, tmp_path, optimizer):
    whole = run(steps=FREEZE + 6, optimizer=optimizer)
    save(tmp_path, run(steps=at, optimizer=optimizer), at)
    plan = planned(optimizer=optimizer)
    state, said = restore(tmp_path, plan)
    assert said == []
    rest = advance(plan, state, range(at, FREEZE + 6), batch=regression_batch)
    np.testing.assert_array_equal(rest.losses, whole.losses[at:])
    same(rest.state, whole.state)


@pytest.mark.thorough
def test_a_rolled_model_goes_on_with_the_same_bits(tmp_path):
    """Its layers are arrays of their own in a checkpoint, and one stack in what signs left out."""
    optimizer = adam(freeze_step=2)
    plan = test_rolled_training.plan_of({"data": 4, "zero": 1}, optimizer=optimizer)
    assert plan.stacks
    whole, losses = test_rolled_training.train(plan, 5)
    assert losses[-1] < losses[0]
    half, _ = test_rolled_training.train(plan, 3)
    with Checkpointer(tmp_path) as checkpointer:
        save_state(checkpointer, plan, half, step=3, about=ABOUT)
    state, said = restore(tmp_path, plan)
    assert said == []
    step = build_step(plan)
    for _ in range(2):
        state, _ = step(state, jax.device_put(test_rolled_training.batch(), plan.batch_sharding))
    same(state, whole)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [{"devices": 4}, {"zero": 0}, {"wire": {"exact": ["/b$"]}}],
    ids=["devices", "stage", "exact names"],
)
def test_on_other_devices_what_was_left_out_begins_at_zero_and_is_told(change, tmp_path):
    """Weights and moments are kept, and the second moment is as old as it was."""
    at = FREEZE + 3
    found = run(steps=at)
    save(tmp_path, found, at)
    plan = planned(**change)
    state, said = restore(tmp_path, plan)
    assert len(said) == 1
    assert "at zero here" in said[0]
    assert int(state["one_bit"]["frozen_at"]) == FREEZE
    key = errors_key(plan.placement)
    assert key != errors_key(found.plan.placement)
    begun = build_step(plan).begin(state)
    errors = begun["one_bit"][key]
    for name, worker in errors["worker"].items():
        leaf = plan.placement.leaves[name]
        momentum = np.asarray(begun["opt_state"][0].mu[name])[tuple(map(slice, leaf.shape))]
        each = np.abs(np.asarray(worker)).reshape(worker.shape[0], -1).sum(axis=1)
        np.testing.assert_allclose(each, B1 * np.abs(momentum).sum(), rtol=1e-5)
        assert not np.asarray(errors["server"][name]).any()
    rest = advance(plan, begun, range(at, at + 20), batch=regression_batch)
    assert rest.losses[-4:].mean() < 0.8 * found.losses[-4:].mean()


@pytest.mark.thorough
def test_it_goes_on_from_adamw_and_adamw_from_it(tmp_path):
    options = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": 0.1, "mask": decay_mask}
    adamw = zerojax.adamw(RATE, **options)
    save(tmp_path / "a", run(steps=FREEZE + 2, optimizer=adamw), FREEZE + 2)
    plan = planned()
    state, said = restore(tmp_path / "a", plan)
    assert said == []
    after = advance(plan, state, range(FREEZE + 2, FREEZE + 5), batch=regression_batch)
    assert int(after.state["one_bit"]["frozen_at"]) == FREEZE + 2
    save(tmp_path / "b", after, FREEZE + 5)
    back = planned(optimizer=adamw)
    state, said = restore(tmp_path / "b", back)
    assert said == []
    same(state["params"], after.state["params"])
    same(state["opt_state"], after.state["opt_state"])


@pytest.mark.thorough
def test_a_state_moves_to_another_stage_and_number_of_devices():
    found = run(steps=FREEZE + 3)
    same_place = reshard_state(found.plan, planned(), found.state)
    same(same_place, found.state)
    plan = planned(zero=0, devices=4)
    moved = reshard_state(found.plan, plan, found.state)
    same(moved["params"]["in/w"], found.state["params"]["in/w"])
    rest = advance(plan, moved, range(FREEZE + 3, FREEZE + 20), batch=regression_batch)
    assert rest.losses[-4:].mean() < 0.8 * found.losses[-4:].mean()


@pytest.mark.thorough
def test_the_number_of_the_step_decides_without_waiting(monkeypatch):
    """It is read once of each state that did not come from the step before."""
    plan = planned(optimizer=adam(freeze_step=2))
    step, calls = build_step(plan), []
    for name in ("warm_up", "begin", "compressed"):
        inner = getattr(step, name)
        monkeypatch.setattr(step, name, lambda *args, n=name, f=inner: calls.append(n) or f(*args))
    state = init_state(plan)
    for index in range(4):
        batch = jax.device_put(regression_batch(index), plan.batch_sharding)
        state, _ = step(state, batch)
    assert calls == ["warm_up", "warm_up", "begin", "compressed", "compressed"]


# --- what is sent ---------------------------------------------------------------------------------


def collectives(jitted, plan, devices):
    text = jitted.lower(plan.abstract_state, plan.abstract_batch).compile().as_text()
    return hlo.find_collectives(hlo.read_program(text), devices)


def sent(found):
    """Bytes, without the sums of a few numbers that every step has."""
    return sum(one.wire_bytes * one.times for one in found if one.payload_bytes > 64)


@pytest.mark.thorough
def test_weights_in_codes_are_counted_as_codes():
    wire = {"weights": "int8"}
    plan = planned(lambda rngs: Layers(rngs, width=96), wire=wire, **REGRESSION)
    found = collectives(build_step(plan).compressed, plan, 8)
    assert any(leaf.wire_codes for leaf in plan.placement.leaves.values())
    assert sent(found) == pytest.approx(compressed_bytes(plan.placement, plan.precision), abs=16)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1])
def test_the_program_after_the_warm_up_sends_what_the_plan_says(zero):
    plan = planned(zero=zero, wire={"exact": ["/b$"]})
    found = collectives(build_step(plan).compressed, plan, 8)
    codes = [one for one in found if one.dtype == "u8"]
    assert [one.kind for one in codes] == ["all-to-all", "all-gather"]
    assert sum(one.wire_bytes for one in codes) == signs_sent(plan.placement)
    # Sums of a few numbers for the report may travel with a bias.
    assert sent(found) == pytest.approx(compressed_bytes(plan.placement, plan.precision), abs=16)
    said = " ".join(plan.reasons)
    assert "momentum of 2 of 3 parameters as signs" in said


def check_signs_on_h100(devices, zero, optimizer):
    """34 bytes for 256 parameters, there and back: 2 x 0.1328 x (n-1)/n bytes for each, 0.232 on 8
    and 0.261 on 64; at stage 1 bfloat16 weights besides. Rows end in blocks that are not full."""
    sizes = {"num_layers": 2, "num_heads": 8, "embed_dim": 512, "max_seq_len": 128}
    options = {"precision": "bf16", "zero": zero, "optimizer": optimizer}
    plan = text_plan(reference_model("gpt2", **sizes), devices, 128, devices=devices, **options)
    parameters = plan.placement.num_parameters()
    given = build_step(plan).compressed, plan.abstract_state, plan.abstract_batch
    text = compile_client.compile_for_gpus(*given).text
    found = hlo.find_collectives(hlo.read_program(text), devices)
    codes = [one for one in found if one.dtype == "u8"]
    assert {one.kind for one in codes} == {"all-to-all", "all-gather"}
    each = sum(one.wire_bytes * one.times for one in codes) / parameters
    ring = (devices - 1) / devices
    assert each == pytest.approx(2 * 34 / 256 * ring, rel=0.02)
    assert sent(found) == pytest.approx(compressed_bytes(plan.placement, plan.precision), rel=0.01)
    wide = sent(found) - sum(one.wire_bytes * one.times for one in codes)
    assert wide / parameters == pytest.approx(2 * ring * zero, rel=0.02, abs=0.01)


@pytest.mark.gpu_programs
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("devices", [8, 64])
def test_on_h100_momentum_travels_as_signs(devices, zero):
    check_signs_on_h100(devices, zero, adam())


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero": 2}, r"4 bytes per parameter that sharding cannot divide.*16/8 = 2 bytes"),
        (
            {"zero": 3},
            ("stage 3 would save only the 2 bytes of a weight in addition; use zero=0 or 1"),
        ),
        ({"mesh": {"data": 4, "model": 2}}, "1-bit Adam with model=2 is not supported"),
        ({"mesh": {"data": 4, "replica": 2}}, "1-bit Adam with replica=2 is not supported"),
        ({"mesh": {"data": 4, "expert": 2}}, "1-bit Adam with expert=2 is not supported"),
        ({"mesh": {"data": 4, "stage": 2}}, "1-bit Adam with stage=2 is not supported"),
        (
            {"model": reference_model("gpt2"), "mesh": {"data": 4, "context": 2}},
            "1-bit Adam with context=2 is not supported",
        ),
        ({"deterministic": "mesh"}, "1-bit Adam with deterministic=mesh is not supported"),
        ({"offload": {"opt_state": "host"}}, "1-bit Adam with offload is not supported"),
        ({"lookup": "owners"}, "1-bit Adam with lookup=owners is not supported"),
        ({"wire": {"gradients": "int8"}}, "1-bit Adam with wire.gradients=int8 is not supported"),
        (
            {"optimizer": zerojax.with_ema(adam())},
            r"average of the weights \(ema\) is not supported",
        ),
        ({"precision": zerojax.Precision(param_dtype="bfloat16")}, "would be lost in bfloat16"),
        ({"optimizer": optax.chain(optax.clip(1.0), adam())}, "by itself, not in an optax chain"),
    ],
)
def test_what_signs_cannot_go_with_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        planned(**options)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"freeze_step": 0}, ValueError, "without a warm-up there is no second moment"),
        ({"freeze_step": 2.5}, TypeError, "is not an integer"),
        ({"b1": lambda count: 0.9}, TypeError, "b1 must be a number"),
        ({"b2": 1.0}, ValueError, "b2=1.0 must be"),
        ({"impl": "cuda"}, ValueError, "cuda"),
    ],
)
def test_numbers_out_of_range_are_refused(options, error, said):
    with pytest.raises(error, match=said):
        adam(**options)


# --- DeepSpeed ------------------------------------------------------------------------------------

BLOCK_OF_A_FILE = {
    "type": "OneBitAdam",
    "params": {
        "lr": RATE,
        "freeze_step": 3,
        "betas": [B1, B2],
        "eps": EPS,
        "weight_decay": 0.01,
        "cuda_aware": False,
        "comm_backend_name": "nccl",
    },
}


@pytest.mark.thorough
def test_a_block_of_deepspeed_means_its_own_update():
    """Decay on every parameter and no corrected moment: `onebit/adam.py` takes bias_correction and
    does nothing with it."""
    file = {"train_batch_size": 32, "gradient_clipping": 0, "optimizer": BLOCK_OF_A_FILE}
    read = deepspeed.translate(file)
    assert read.optimizer.one_bit.freeze_step == 3
    lines = {line.key: line.verdict for line in read.lines}
    assert lines["optimizer.params.freeze_step"] == "honoured"
    assert lines["optimizer.params.cuda_aware"] == "compiler"
    found = run(optimizer=read.optimizer, steps=3, zero=0)
    plan = found.plan
    params = {name: np.asarray(x, np.float64) for name, x in init_state(plan)["params"].items()}
    mu = {name: np.zeros_like(x) for name, x in params.items()}
    nu = {name: np.zeros_like(x) for name, x in params.items()}
    gradient = jax.jit(jax.grad(flat_loss))
    for index in range(3):
        now = {name: x.astype(np.float32) for name, x in params.items()}
        for name, grad in gradient(now, regression_batch(index)).items():
            mu[name] = B1 * mu[name] + (1 - B1) * np.asarray(grad)
            nu[name] = B2 * nu[name] + (1 - B2) * np.asarray(grad) ** 2
            update = mu[name] / (np.sqrt(nu[name]) + EPS) + 0.01 * params[name]
            params[name] = params[name] - RATE * update
    for name, wanted in params.items():
        np.testing.assert_allclose(found.state["params"][name], wanted, atol=1e-6)
    after = run(optimizer=read.optimizer, steps=30, zero=0)
    assert after.losses[-4:].mean() < 0.45 * after.losses[:4].mean()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"freeze_step": 0}, "freeze_step=0.*must be at least 1"),
        ({"amsgrad": True}, "AMSGrad is not supported"),
        ({"max_grad_norm": 1.0}, '"gradient_clipping": 1.0'),
    ],
)
def test_what_a_block_cannot_say_is_refused(changes, said):
    block = {**BLOCK_OF_A_FILE, "params": {**BLOCK_OF_A_FILE["params"], **changes}}
    with pytest.raises(ConfigError, match=said):
        deepspeed.translate({"train_batch_size": 32, "optimizer": block})


@pytest.mark.thorough
def test_an_engine_saves_and_loads_what_signs_left_out(tmp_path):
    file = {
        "train_batch_size": 32,
        "gradient_clipping": 1.0,
        "optimizer": BLOCK_OF_A_FILE,
        "zero_optimization": {"stage": 1},
    }

    def losses(engine, indices):
        return [float(engine.train_batch(regression_batch(index))) for index in indices]

    def engine_of():
        return zerojax.initialize(MODEL, file, loss=regression_loss, run_dir=None)

    with engine_of() as first:
        losses(first, range(5))
        first.save_checkpoint(tmp_path)
        wanted = losses(first, range(5, 8))
    with engine_of() as second:
        second.train_batch(regression_batch(9))
        second.load_checkpoint(tmp_path)
        assert losses(second, range(5, 8)) == wanted
