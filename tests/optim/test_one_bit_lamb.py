"""1-bit LAMB: a recurrence of NumPy, its numbers of layers, what it sends, keeps and refuses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from pallas_kernels.choice import Choice
from tests.optim import test_one_bit
from tests.optim.test_one_bit import (
    ABOUT,
    B1,
    B2,
    EPS,
    FREEZE,
    MODEL,
    REGRESSION,
    collectives,
    flat_loss,
    restore,
    same,
    save,
    sent,
)
from tests.support.trajectories import advance, plan_for, regression_batch, train_for
from tests.tracing import test_rolled_training
from zerojax import deepspeed_config as deepspeed
from zerojax.checkpoint import Checkpointer
from zerojax.config import ConfigError
from zerojax.optim import UpdateContext, decay_mask, one_bit_adam, one_bit_lamb
from zerojax.optim.one_bit_layers import COEFFICIENTS, FACTORS, FRESH, SCALES
from zerojax.placement.signed_momentum import (
    compressed_bytes,
    errors_key,
    layers_key,
    row_elements,
    signs_sent,
)
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import reshard_state
from zerojax.training.checkpointing import save_state

RATE, DECAY = 0.02, 0.1
BETA, FACTOR_BOUNDS, THRESHOLD, BOUNDS = 0.6, (0.8, 1.3), 0.08, (0.05, 2.0)


def lamb(**changes):
    options = {
        "freeze_step": FREEZE,
        "b1": B1,
        "b2": B2,
        "eps": EPS,
        "weight_decay": DECAY,
        "mask": decay_mask,
        "coeff_beta": BETA,
        "factor_min": FACTOR_BOUNDS[0],
        "factor_max": FACTOR_BOUNDS[1],
        "factor_threshold": THRESHOLD,
        "min_coeff": BOUNDS[0],
        "max_coeff": BOUNDS[1],
    }
    return one_bit_lamb(RATE, **{**options, **changes})


def plain_lamb(**changes):
    options = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY, "mask": decay_mask}
    return zerojax.lamb(RATE, **{**options, **changes})


def planned(model=MODEL, **options):
    given = REGRESSION if model is MODEL else {}
    return plan_for(model, **{"optimizer": lamb(), "zero": 1, **given, **options})


def run(*, steps=12, **options):
    options = {"optimizer": lamb(), "zero": 1, **REGRESSION, **options}
    return train_for(MODEL, steps=steps, **options)


def kept_of(found_plan, state):
    """(coefficients and factors, what is kept for these devices)."""
    kept = state["one_bit"]
    return kept[layers_key(kept)], kept[errors_key(found_plan.placement, "errors_lamb")]


# --- the recurrence -------------------------------------------------------------------------------


class Plain(test_one_bit.Plain):
    """1-bit LAMB on simulated devices, in NumPy: arXiv:2104.06069, algorithm 1.

    Stacks are arrays in which layers have numbers of their own.
    """

    def __init__(self, plan, params, decays, stacks=(), factor=(*FACTOR_BOUNDS, THRESHOLD)):
        super().__init__(plan, params)
        self.decays, self.factor_bounds, self.threshold = decays, factor[:2], factor[2]
        self.layers = {n: len(x) if n in stacks else 1 for n, x in params.items()}
        ones = {name: np.ones(count) for name, count in self.layers.items()}
        self.coefficients = {name: 0 * x for name, x in ones.items()}
        self.factors, self.scales, self.fresh = dict(ones), dict(ones), {}

    def each(self, name, x):
        """[layers, elements of a layer]."""
        return x.reshape(self.layers[name], -1)

    def spread(self, name, of_layers, like):
        return np.repeat(of_layers, like.size // len(of_layers)).reshape(like.shape)

    def norms(self, name, x):
        return np.sqrt((self.each(name, x) ** 2).sum(axis=1))

    def freeze(self):
        sizes = {
            name: self.norms(name, x) / math.sqrt(x.size / self.layers[name])
            for name, x in self.mu.items()
        }
        united = np.mean(np.concatenate(list(sizes.values())))
        self.scales = {name: united / size for name, size in sizes.items()}
        self.fresh = dict(self.nu)
        for name, scale in self.scales.items():
            self.mu[name] = self.mu[name] * self.spread(name, scale, self.mu[name])

    def step(self, grads):
        self.count += 1
        if self.count == FREEZE + 1:
            self.freeze()
        frozen = self.count > FREEZE
        for name, param in self.params.items():
            own = [np.asarray(grad[name], np.float64) for grad in grads]
            update = self.compressed(name, own) if frozen else self.warm_up(name, own)
            self.params[name] = param - RATE * update

    def root(self, nu, count):
        return np.sqrt(nu / (1 - B2**count)) + EPS

    def warm_up(self, name, own):
        mean, param = np.mean(own, axis=0), self.params[name]
        self.mu[name] = B1 * self.mu[name] + (1 - B1) * mean
        self.nu[name] = B2 * self.nu[name] + (1 - B2) * mean * mean
        update = self.mu[name] / (1 - B1**self.count) / self.root(self.nu[name], self.count)
        update = update + self.decays[name] * param
        of_param, of_update = self.norms(name, param), self.norms(name, update)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.clip(of_param / of_update, *BOUNDS)
        is_zero = (of_param == 0) | (of_update == 0)
        ratio = np.where(is_zero, 1, ratio)
        old = self.coefficients[name]
        new = np.where(old == 0, ratio, BETA * old + (1 - BETA) * ratio)
        self.coefficients[name] = np.where(is_zero, old, new)
        return self.spread(name, ratio, update) * update

    def compressed(self, name, own):
        """Momentum is kept as it is sent: multiplied by the scales."""
        scale = self.spread(name, self.scales[name], self.params[name])
        before = self.mu[name] / scale
        self.mu[name] = self.agree(name, [grad * scale for grad in own])
        now = self.mu[name] / scale
        grad = (now - B1 * before) / (1 - B1)
        self.fresh[name] = B2 * self.fresh[name] + (1 - B2) * grad * grad
        root, real = self.root(self.nu[name], FREEZE), self.root(self.fresh[name], self.count)
        step = np.where(self.nu[name] > 0, now / (1 - B1**self.count) / root, 0)
        update = step + self.decays[name] * self.params[name]
        factor = self.each(name, np.where(self.nu[name] > 0, root / real, 0)).max(axis=1)
        part = np.minimum(1, self.norms(name, step) / self.norms(name, update))
        factor = np.clip(factor * part + 1 - part, *self.factor_bounds)
        last, change = self.factors[name], self.threshold
        self.factors[name] = np.clip(factor, last * (1 - change), last * (1 + change))
        return self.spread(name, self.coefficients[name] * self.factors[name], update) * update


def true_of(plan):
    leaves = plan.placement.leaves
    return lambda tree: {
        n: np.asarray(x)[tuple(map(slice, leaves[n].shape))] for n, x in tree.items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("devices", "steps"), [(8, 8), (3, 5)])
def test_it_is_numpys_recurrence(zero, devices, steps):
    """The tolerance is that of 1-bit Adam's: float32 against float64."""

    def batch(index):
        return {name: x[: 4 * devices] for name, x in regression_batch(index).items()}

    options = {**REGRESSION, "batch": batch, "devices": devices, "zero": zero}
    plan = planned(**options)
    state, true = init_state(plan, 0), true_of(plan)
    begun = true(state["params"])
    decays = {name: DECAY if x.ndim > 1 else 0.0 for name, x in begun.items()}
    plain, gradient = Plain(plan, begun, decays), jax.jit(jax.grad(flat_loss))
    for index in range(steps):
        given = batch(index)
        parts = [{n: x[4 * d : 4 * d + 4] for n, x in given.items()} for d in range(devices)]
        now = {name: np.asarray(x, np.float32) for name, x in plain.params.items()}
        plain.step([gradient(now, part) for part in parts])
    state = advance(plan, state, range(steps), batch=batch).state
    compare(plan, state, plain, begun)


def compare(plan, state, plain, begun):
    true = true_of(plan)
    of_all, of_devices = kept_of(plan, state)
    for name, wanted in plain.params.items():
        moved = np.abs(wanted - begun[name]).max()
        assert moved > 0
        np.testing.assert_allclose(true(state["params"])[name], wanted, atol=1e-4 * moved)
        for found, numbers in (
            (of_all[COEFFICIENTS], plain.coefficients),
            (of_all[FACTORS], plain.factors),
            (of_devices[SCALES], plain.scales),
        ):
            np.testing.assert_allclose(
                np.asarray(found[name]).reshape(-1), numbers[name], rtol=1e-4
            )
        fresh, largest = true(of_devices[FRESH])[name], plain.fresh[name].max()
        np.testing.assert_allclose(fresh, plain.fresh[name], rtol=1e-3, atol=1e-5 * largest)
    changed = np.concatenate([*plain.factors.values()])
    assert np.abs(changed - 1).max() > THRESHOLD / 2


DEPTH, WIDTH = 3, 12
STACK = "layers/w"


def init_stack(key, batch):
    first, second = jax.random.split(key)
    size = jnp.array([0.1, 0.3, 0.5])[:, None, None]
    layers = jax.random.normal(first, (DEPTH, WIDTH, WIDTH)) * size
    return {"layers": {"w": layers}, "out": jax.random.normal(second, (WIDTH, 8)) * 0.2}


def apply_stack(params, x):
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"]["w"])
    return (x @ params["out"])[:, :5]


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1])
def test_each_layer_of_a_stack_has_numbers_of_its_own(zero):
    """A device's part of the stack is 108 values, so one scale of signs is for several layers.

    Decay is large and bounds are wide, so that factors are those of the formula.
    """
    devices, options = 4, {**REGRESSION, "devices": 4, "zero": zero}
    decay, factor = 3.0, (0.1, 10.0, 0.9)
    names = ("factor_min", "factor_max", "factor_threshold")
    numbers = {"weight_decay": decay, "mask": None, **dict(zip(names, factor, strict=True))}
    plan = planned((init_stack, apply_stack), optimizer=lamb(**numbers), **options)
    begun = init_state(plan, 0)
    state, begun = begun, true_of(plan)(begun["params"])
    decays = dict.fromkeys(begun, decay)
    plain = Plain(plan, begun, decays, stacks=[STACK], factor=factor)

    def loss(params, batch):
        nested = {"layers": {"w": params[STACK]}, "out": params["out"]}
        return jnp.mean((apply_stack(nested, batch["x"]) - batch["y"]) ** 2)

    gradient = jax.jit(jax.grad(loss))
    total, weight = regression_loss_of(begun)
    assert float(total / weight) == pytest.approx(float(loss(begun, regression_batch(0))), rel=1e-5)
    for index in range(FREEZE + 3):
        given = regression_batch(index)
        parts = [{n: x[8 * d : 8 * d + 8] for n, x in given.items()} for d in range(devices)]
        now = {name: np.asarray(x, np.float32) for name, x in plain.params.items()}
        plain.step([gradient(now, part) for part in parts])
    state = advance(plan, state, range(FREEZE + 3), batch=regression_batch).state
    compare(plan, state, plain, begun)
    of_all, of_devices = kept_of(plan, state)
    for numbers in (of_all[COEFFICIENTS], of_devices[SCALES]):
        assert numbers[STACK].shape == (DEPTH,)
        assert numbers["out"].shape == ()
        assert len(set(np.asarray(numbers[STACK]).tolist())) == DEPTH


def regression_loss_of(params):
    nested = {"layers": {"w": params[STACK]}, "out": params["out"]}
    return REGRESSION["loss"](lambda x: apply_stack(nested, x), regression_batch(0))


@pytest.mark.thorough
def test_elements_that_had_no_gradient_take_no_part_in_a_factor():
    """Half of the values: by eps / eps they would say that nothing has grown."""
    one = lamb(factor_min=0.1, factor_threshold=0.9, weight_decay=0.0, bias_correction=False)
    half = {"w": jnp.repeat(jnp.array([0.0, 1.0]), 256)}
    ones = {"w": jnp.float32(1)}
    layers = {COEFFICIENTS: ones, FACTORS: ones, FRESH: {"w": 4 * half["w"]}}
    params = {"w": jnp.ones(512)}
    context = UpdateContext(
        gradient_scale=jnp.float32(1),
        skip=jnp.bool_(False),
        key=jax.random.key(0),
        axes={"w": ()},
        choice=Choice("xla", "a test"),
    )
    counts, whole = (jnp.int32(1), jnp.int32(1)), context.whole(params)
    scalars = one.one_bit.scalars_of(params, one.init(params), whole, counts)
    moved, changed = one.one_bit.move((params, half, half, half), scalars, context, layers)
    factor = 1 / math.sqrt(B2 * 4 + (1 - B2))
    assert float(changed[FACTORS]["w"]) == pytest.approx(factor, rel=1e-5)
    np.testing.assert_allclose(moved["w"], 1 - RATE * factor * half["w"], rtol=1e-5)


@pytest.mark.thorough
def test_the_warm_up_is_lamb_bit_for_bit():
    """Within bounds that hold nothing back."""
    plain = run(optimizer=plain_lamb(), steps=FREEZE)
    signed = run(optimizer=lamb(min_coeff=1e-9, max_coeff=1e9), steps=FREEZE)
    np.testing.assert_array_equal(signed.losses, plain.losses)
    same(signed.state["params"], plain.state["params"])
    same(signed.state["opt_state"], plain.state["opt_state"])


@pytest.mark.thorough
def test_exact_names_are_lambs_throughout():
    wide = {"min_coeff": 1e-9, "max_coeff": 1e9}
    plain = run(optimizer=plain_lamb(), wire={"exact": ["."]})
    exact = run(optimizer=lamb(**wide), wire={"exact": ["."]})
    np.testing.assert_allclose(exact.losses, plain.losses, rtol=1e-6)
    some = run(optimizer=lamb(**wide), wire={"exact": ["out"]})
    assert (some.losses[FREEZE + 1 :] != plain.losses[FREEZE + 1 :]).all()
    of_all, _ = kept_of(some.plan, some.state)
    assert sorted(of_all[COEFFICIENTS]) == ["in/b", "in/w"]


CASES = {**test_one_bit.CASES, "clipped": {"optimizer": lamb(clip_norm=1.0)}}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_it_learns_with(case):
    """The loss of LAMB falls to 0.5 of its first in 30 steps (measured 0.40 at this rate)."""
    found = run(steps=30, **CASES[case])
    assert found.losses[-4:].mean() < 0.65 * found.losses[:4].mean()
    skipped = int(found.state["skipped"])  # of float16 the first, until the loss scale fits
    assert skipped == 0 or (case == "float16" and skipped < FREEZE)


# --- NaN ------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [1, 4])
def test_a_gradient_that_is_not_finite_on_one_device_changes_nothing(steps):
    """In the warm-up and after it."""

    def apply(params, x, mark):
        out = test_one_bit.spoiled(params["out"]["w"], mark)
        return jnp.tanh(x @ params["in"]["w"] + params["in"]["b"][None]) @ out

    def loss(model, batch):
        return jnp.mean((model(batch["x"], jnp.sum(batch["mark"])) - batch["y"]) ** 2)

    mark = np.zeros(32, np.float32)
    given = {**regression_batch(0), "mark": mark}
    options = {"batch": lambda index: given, "loss": loss, "zero": 1}
    plan = plan_for((MODEL[0], apply), optimizer=lamb(freeze_step=3, min_coeff=1e-9), **options)
    state, step = init_state(plan), build_step(plan)

    def taken(state):
        state, metrics = step(state, jax.device_put(given, plan.batch_sharding))
        return state, metrics

    for _ in range(steps):
        state, _ = taken(state)
    before = jax.device_get(state)
    mark[5] = np.nan
    state, metrics = taken(state)
    assert int(metrics["skipped"]) == 1
    assert sorted(before["params"])[int(metrics["bad_leaf"])] == "out/w"
    for part in ("params", "opt_state", "one_bit"):
        same(state[part], before[part])
    mark[5] = 0
    state, metrics = taken(state)
    assert int(metrics["skipped"]) == 0
    of_all, _ = kept_of(plan, state)
    changed = COEFFICIENTS if steps < 3 else FACTORS
    old = kept_of(plan, before)[0][changed]
    assert all((np.asarray(x) != old[name]).all() for name, x in of_all[changed].items())


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("at", [FREEZE - 1, FREEZE, FREEZE + 3])
def test_a_run_that_goes_on_has_the_same_bits(at, tmp_path):
    test_one_bit.check_going_on(at, tmp_path, lamb())


@pytest.mark.thorough
def test_a_rolled_model_goes_on_rolled_with_the_same_bits_and_as_a_list_with_new_ratios(tmp_path):
    optimizer, mesh = lamb(freeze_step=2), {"data": 4, "zero": 1}
    plan = test_rolled_training.plan_of(mesh, optimizer=optimizer)
    assert plan.stacks
    whole, losses = test_rolled_training.train(plan, 5)
    assert losses[-1] < losses[0]
    half, _ = test_rolled_training.train(plan, 3)
    with Checkpointer(tmp_path) as checkpointer:
        save_state(checkpointer, plan, half, step=3, about=ABOUT)
    state, said = restore(tmp_path, plan)
    assert said == []
    same(goes_on(plan, state, 2)[0], whole)
    listed = test_rolled_training.plan_of({**mesh, "roll": "off"}, optimizer=optimizer)
    state, said = restore(tmp_path, listed)
    assert len(said) == 2
    assert "as the ratios of the next step" in said[1]
    state, found = goes_on(listed, state, 2)
    assert all(float(x) > 0 for x in kept_of(listed, state)[0][COEFFICIENTS].values())
    assert found < losses[2]


def goes_on(plan, state, steps):
    step = build_step(plan)
    for _ in range(steps):
        given = jax.device_put(test_rolled_training.batch(), plan.batch_sharding)
        state, metrics = step(state, given)
    return state, float(metrics["loss"])


@pytest.mark.thorough
@pytest.mark.parametrize("change", [{"devices": 4}, {"zero": 0}], ids=["devices", "stage"])
def test_on_other_devices_ratios_go_on_and_what_was_left_out_begins_at_zero(change, tmp_path):
    """The second moment that is rebuilt begins so that factors are what they were."""
    at = FREEZE + 6
    found = run(steps=at)
    save(tmp_path, found, at)
    plan = planned(**change)
    state, said = restore(tmp_path, plan)
    assert len(said) == 1
    assert "at zero here" in said[0]
    begun = build_step(plan).begin(state)
    (of_all, of_devices), (old, _) = kept_of(plan, begun), kept_of(found.plan, found.state)
    same(of_all, old)
    nu, true = true_of(plan)(begun["opt_state"][0].nu), true_of(plan)
    for name, fresh in true(of_devices[FRESH]).items():
        factor = np.asarray(of_all[FACTORS][name])
        corrected = (nu[name] / (1 - B2**FREEZE), fresh / (1 - B2**at))
        quotient = np.sqrt(corrected[0] / corrected[1])
        np.testing.assert_allclose(quotient, factor, rtol=1e-4)
    rest = advance(plan, begun, range(at, at + 20), batch=regression_batch)
    assert rest.losses[-4:].mean() < 0.9 * found.losses[-4:].mean()


@pytest.mark.thorough
def test_it_goes_on_from_lamb_and_from_one_bit_adam_and_lamb_from_it(tmp_path):
    at = FREEZE + 2
    one_adam = one_bit_adam(RATE / 4, freeze_step=FREEZE, b1=B1, b2=B2, eps=EPS)
    for name, optimizer, frozen_at in (("a", plain_lamb(), at), ("b", one_adam, FREEZE)):
        save(tmp_path / name, run(steps=at, optimizer=optimizer), at)
        plan = planned()
        state, _ = restore(tmp_path / name, plan)
        params, opt_state = (jax.device_get(state[part]) for part in ("params", "opt_state"))
        begun = build_step(plan).begin(state)
        assert int(begun["one_bit"]["frozen_at"]) == frozen_at
        of_all, _ = kept_of(plan, begun)
        param, mu, nu = (true_of(plan)(t)["out/w"] for t in (params, *opt_state[0][1:]))
        root = np.sqrt(nu / (1 - B2**frozen_at)) + EPS
        update = mu / (1 - B1**at) / root + DECAY * param
        wanted = np.clip(np.linalg.norm(param) / np.linalg.norm(update), *BOUNDS)
        np.testing.assert_allclose(of_all[COEFFICIENTS]["out/w"], wanted, rtol=1e-4)
        after = advance(plan, begun, range(at, at + 3), batch=regression_batch)
    save(tmp_path / "c", after, at + 3)
    back = planned(optimizer=plain_lamb())
    state, said = restore(tmp_path / "c", back)
    assert said == []
    same(state["params"], after.state["params"])
    same(state["opt_state"], after.state["opt_state"])


@pytest.mark.thorough
def test_a_state_moves_to_another_stage_and_number_of_devices():
    found = run(steps=FREEZE + 3)
    same(reshard_state(found.plan, planned(), found.state), found.state)
    plan = planned(zero=0, devices=4)
    moved = reshard_state(found.plan, plan, found.state)
    same(kept_of(plan, moved)[0], kept_of(found.plan, found.state)[0])
    rest = advance(plan, moved, range(FREEZE + 3, FREEZE + 20), batch=regression_batch)
    assert rest.losses[-4:].mean() < 0.9 * found.losses[-4:].mean()


# --- what is sent ---------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1])
def test_the_program_after_the_warm_up_sends_what_the_plan_says(zero):
    plan = planned(zero=zero, wire={"exact": ["/b$"]})
    found = collectives(build_step(plan).compressed, plan, 8)
    codes = [one for one in found if one.dtype == "u8"]
    assert [one.kind for one in codes] == ["all-to-all", "all-gather"]
    assert sum(one.wire_bytes for one in codes) == signs_sent(plan.placement)
    # Sums of a few numbers for the report and for norms may travel with a bias.
    assert sent(found) == pytest.approx(compressed_bytes(plan.placement, plan.precision), abs=32)
    said = " ".join(plan.reasons)
    assert f"1-bit LAMB: updates 1 to {FREEZE} are LAMB" in said
    rows = sum(row_elements(plan.placement.leaves[name], 8) for name in ("in/w", "out/w"))
    whole = sum(math.prod(plan.placement.leaves[name].shape) for name in ("in/w", "out/w"))
    (_, of_devices), size = kept_of(plan, plan.abstract_state), 4 * (rows if zero else whole)
    shards = (x.sharding.shard_shape(x.shape) for x in of_devices[FRESH].values())
    assert sum(map(math.prod, shards)) * 4 == size
    assert f"reconstructs from momentum, {zerojax.tracing.trees.format_bytes(size)} on each" in said


@pytest.mark.gpu_programs
def test_on_h100_momentum_travels_as_signs():
    """The bytes are 1-bit Adam's; sums of layers are 1 % of them at most."""
    test_one_bit.check_signs_on_h100(8, 1, lamb())


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero": 2}, "1-bit LAMB with zero=2 .* sharding cannot divide"),
        ({"precision": zerojax.Precision(param_dtype="bfloat16")}, "1-bit LAMB with bfloat16"),
    ],
)
def test_what_signs_cannot_go_with_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        planned(**options)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"b1": lambda count: 0.9}, TypeError, "one_bit_lamb: b1 must be a number"),
        ({"coeff_beta": 1.0}, ValueError, r"coeff_beta=1.0 must be in \[0, 1\)"),
        ({"factor_threshold": 0}, ValueError, "factor_threshold=0 must be in"),
        ({"factor_min": 5.0}, ValueError, "factor_min=5.0 and factor_max=1.3 must be above 0"),
        ({"min_coeff": 0}, ValueError, "min_coeff=0 and max_coeff=2.0 must be above 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options, error, said):
    with pytest.raises(error, match=said):
        lamb(**options)


# --- DeepSpeed ------------------------------------------------------------------------------------

BLOCK_OF_A_FILE = {
    "type": "OneBitLamb",
    "params": {
        "lr": RATE,
        "freeze_step": 3,
        "betas": [B1, B2],
        "eps": EPS,
        "weight_decay": 0.01,
        "max_coeff": 0.15,
        "min_coeff": 0.02,
        "cuda_aware": False,
        "comm_backend_name": "nccl",
        "coeff_beta": 0.5,
        "factor_max": 3.0,
        "factor_min": 0.6,
        "factor_threshold": 0.2,
        "bias_correction": False,
        "eps_inside_sqrt": False,
        "amsgrad": False,
    },
}


@pytest.mark.thorough
def test_a_block_of_deepspeed_means_its_own_update():
    """No moment is corrected, all parameters decay, an array of zeros has the ratio 1."""
    file = {"train_batch_size": 32, "gradient_clipping": 0, "optimizer": BLOCK_OF_A_FILE}
    read = deepspeed.translate(file)
    one = read.optimizer.one_bit
    assert (one.freeze_step, one.b1, one.b2) == (3, B1, B2)
    assert (one.bounds, one.coeff_beta) == ((0.02, 0.15), 0.5)
    assert (one.factor_bounds, one.factor_threshold) == ((0.6, 3.0), 0.2)
    lines = {line.key.rpartition(".")[2]: line.verdict for line in read.lines}
    for key in ("max_coeff", "coeff_beta", "factor_max", "factor_threshold", "freeze_step"):
        assert lines[key] == "honoured"
    assert lines["cuda_aware"] == "compiler"
    assert lines["eps_inside_sqrt"] == "ignored"
    found = run(optimizer=read.optimizer, steps=3, zero=0)
    params = {n: np.asarray(x, np.float64) for n, x in init_state(found.plan)["params"].items()}
    mu = {name: np.zeros_like(x) for name, x in params.items()}
    nu = {name: np.zeros_like(x) for name, x in params.items()}
    gradient, bounded = jax.jit(jax.grad(flat_loss)), 0
    for index in range(3):
        now = {name: x.astype(np.float32) for name, x in params.items()}
        for name, grad in gradient(now, regression_batch(index)).items():
            mu[name] = B1 * mu[name] + (1 - B1) * np.asarray(grad)
            nu[name] = B2 * nu[name] + (1 - B2) * np.asarray(grad) ** 2
            update = mu[name] / (np.sqrt(nu[name]) + EPS) + 0.01 * params[name]
            size = np.linalg.norm(params[name])
            ratio = np.clip(size / np.linalg.norm(update), 0.02, 0.15) if size > 0 else 1.0
            bounded += ratio in (0.02, 0.15)
            params[name] = params[name] - RATE * ratio * update
    assert 0 < bounded < 9
    for name, wanted in params.items():
        np.testing.assert_allclose(found.state["params"][name], wanted, atol=1e-6)
    after = run(optimizer=read.optimizer, steps=30, zero=0)
    assert after.losses[-4:].mean() < 0.65 * after.losses[:4].mean()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"factor_min": 8.0}, "factor_min=8.0 and factor_max=3.0 must be above 0"),
        ({"coeff_beta": 1.5}, r"coeff_beta=1.5 must be in \[0, 1\)"),
    ],
)
def test_what_a_block_cannot_say_is_refused(changes, said):
    block = {**BLOCK_OF_A_FILE, "params": {**BLOCK_OF_A_FILE["params"], **changes}}
    with pytest.raises(ConfigError, match=said):
        deepspeed.translate({"train_batch_size": 32, "optimizer": block})
