"""The loss scale of float16 follows DeepSpeed's rules, step by step."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.loss_scale_reference import PlainScaler
from zerojax.config import LossScale, RunConfig, describe_loss_scale, load
from zerojax.config.loader import ConfigError, from_dict
from zerojax.optim import loss_scale

# --- by hand --------------------------------------------------------------------------------------

DEFAULTS = LossScale()
WINDOW_3 = LossScale(window=3)
IN_A_ROW = LossScale(window=3, consecutive_hysteresis=True)
STRICT = LossScale(window=3, hysteresis=1)
FOUR = LossScale(window=3, hysteresis=4)
LOW = LossScale(window=3, minimum=0.25, initial=1.0)
UNEVEN = LossScale(window=3, minimum=3.0)
CAPPED = LossScale(window=3, maximum=2.0**17)
TRIPLED = LossScale(window=1, initial=9.0, factor=3.0)

OVERFLOW, CLEAN = False, True

# What happens: config, (scale, good steps, hysteresis), finite?, the same after, at the floor?
CASES = {
    "clean step counts": (DEFAULTS, (8.0, 0, 2), CLEAN, (8.0, 1, 2), False),
    "window not over": (WINDOW_3, (8.0, 2, 1), CLEAN, (8.0, 3, 1), False),
    "first rise is at clean step window + 1": (WINDOW_3, (8.0, 3, 1), CLEAN, (16.0, 4, 2), False),
    "no rise right after it": (WINDOW_3, (8.0, 4, 1), CLEAN, (8.0, 5, 1), False),
    "second rise one window later": (WINDOW_3, (16.0, 6, 2), CLEAN, (32.0, 7, 2), False),
    "no rise at the default window": (DEFAULTS, (8.0, 999, 2), CLEAN, (8.0, 1000, 2), False),
    "rise after the default window": (DEFAULTS, (8.0, 1000, 2), CLEAN, (16.0, 1001, 2), False),
    "first overflow is forgiven": (DEFAULTS, (8.0, 5, 2), OVERFLOW, (8.0, 0, 1), False),
    "second halves": (DEFAULTS, (8.0, 5, 1), OVERFLOW, (4.0, 0, 1), False),
    "and so does the third": (DEFAULTS, (4.0, 0, 1), OVERFLOW, (2.0, 0, 1), False),
    "hysteresis 1 halves at once": (STRICT, (8.0, 2, 1), OVERFLOW, (4.0, 0, 1), False),
    "hysteresis 4 forgives three": (FOUR, (8.0, 2, 3), OVERFLOW, (8.0, 0, 2), False),
    "a clean step refills nothing": (WINDOW_3, (8.0, 0, 1), CLEAN, (8.0, 1, 1), False),
    "a rise refills": (FOUR, (8.0, 6, 1), CLEAN, (16.0, 7, 4), False),
    "in a row: a clean step refills": (IN_A_ROW, (8.0, 0, 1), CLEAN, (8.0, 1, 2), False),
    "in a row: an overflow does not": (IN_A_ROW, (8.0, 0, 2), OVERFLOW, (8.0, 0, 1), False),
    "an overflow ends the window": (WINDOW_3, (8.0, 3, 2), OVERFLOW, (8.0, 0, 1), False),
    "down to the minimum": (DEFAULTS, (2.0, 0, 1), OVERFLOW, (1.0, 0, 1), False),
    "at the minimum, forgiven": (DEFAULTS, (1.0, 0, 2), OVERFLOW, (1.0, 0, 1), False),
    "at the floor": (DEFAULTS, (1.0, 0, 1), OVERFLOW, (1.0, 0, 1), True),
    "at the floor with hysteresis 1": (STRICT, (1.0, 7, 1), OVERFLOW, (1.0, 0, 1), True),
    "clean at the minimum": (DEFAULTS, (1.0, 7, 1), CLEAN, (1.0, 8, 1), False),
    "rise from the minimum": (WINDOW_3, (1.0, 3, 1), CLEAN, (2.0, 4, 2), False),
    "a minimum below 1": (LOW, (0.5, 0, 1), OVERFLOW, (0.25, 0, 1), False),
    "its floor": (LOW, (0.25, 0, 1), OVERFLOW, (0.25, 0, 1), True),
    "cut to the minimum is not the floor": (UNEVEN, (4.0, 0, 1), OVERFLOW, (3.0, 0, 1), False),
    "but after it": (UNEVEN, (3.0, 0, 1), OVERFLOW, (3.0, 0, 1), True),
    "to the maximum": (CAPPED, (2.0**16, 3, 1), CLEAN, (2.0**17, 4, 2), False),
    "not above it, but refilled": (CAPPED, (2.0**17, 6, 1), CLEAN, (2.0**17, 7, 2), False),
    "window 1 rises at the second": (TRIPLED, (9.0, 1, 2), CLEAN, (27.0, 2, 2), False),
    "window 1 not at the first": (TRIPLED, (9.0, 0, 2), CLEAN, (9.0, 1, 2), False),
    "divided by the factor": (TRIPLED, (9.0, 1, 1), OVERFLOW, (3.0, 0, 1), False),
}


def as_state(scale: float, good_steps: int, hysteresis: int) -> loss_scale.State:
    return {
        "scale": jnp.float32(scale),
        "good_steps": jnp.int32(good_steps),
        "hysteresis": jnp.int32(hysteresis),
    }


def as_numbers(state: loss_scale.State) -> tuple[float, int, int]:
    return float(state["scale"]), int(state["good_steps"]), int(state["hysteresis"])


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("config", "before", "finite", "after", "floor"), CASES.values(), ids=CASES
)
def test_one_step(config, before, finite, after, floor):
    state, at_floor = loss_scale.update(config, as_state(*before), finite)
    assert (as_numbers(state), bool(at_floor)) == (after, floor)


def test_the_start_and_its_dtypes():
    state = loss_scale.init(DEFAULTS)
    assert as_numbers(state) == (65536.0, 0, 2)
    assert {name: x.dtype.name for name, x in state.items()} == {
        "scale": "float32",
        "good_steps": "int32",
        "hysteresis": "int32",
    }


def test_the_defaults_are_those_of_deepspeed():
    """`DeepSpeedFP16Config` in deepspeed/runtime/precision_config.py."""
    assert (DEFAULTS.initial, DEFAULTS.window, DEFAULTS.hysteresis) == (2**16, 1000, 2)
    assert (DEFAULTS.consecutive_hysteresis, DEFAULTS.minimum, DEFAULTS.factor) == (False, 1, 2)
    assert DEFAULTS.static is None


def test_a_run_that_always_overflows_reaches_the_floor_at_step_18():
    state, steps = loss_scale.init(DEFAULTS), 0
    at_floor = False
    while not at_floor:
        state, at_floor = loss_scale.update(DEFAULTS, state, OVERFLOW)
        steps += 1
        assert steps < 100
    # One is forgiven, 16 halve 2^16 down to 1, and the next cannot.
    assert steps == 1 + 16 + 1


@pytest.mark.parametrize("finite", [OVERFLOW, CLEAN])
def test_a_static_scale_stays(finite):
    config = LossScale(static=128.0)
    state = loss_scale.init(config)
    for _ in range(5):
        state, at_floor = loss_scale.update(config, state, finite)
        assert float(state["scale"]) == 128.0
        assert not at_floor


def test_a_static_scale_replaces_a_dynamic_one_that_was_stored():
    dynamic = as_state(0.25, 5, 1)
    state, at_floor = loss_scale.update(LossScale(static=128.0), dynamic, OVERFLOW)
    assert (float(state["scale"]), bool(at_floor)) == (128.0, False)


def test_a_stored_scale_comes_into_new_limits():
    state, _ = loss_scale.update(LossScale(minimum=16.0), as_state(2.0, 5, 1), CLEAN)
    assert float(state["scale"]) == 16.0
    state, _ = loss_scale.update(LossScale(maximum=2.0**20), as_state(2.0**30, 5, 1), CLEAN)
    assert float(state["scale"]) == 2.0**20


# --- against a scaler with mutable state ----------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def follow(config: LossScale, finite: jax.Array) -> dict[str, jax.Array]:
    """The states and `at_floor` after each step: [steps] each."""

    def body(state, finite):
        state, at_floor = loss_scale.update(config, state, finite)
        return state, state | {"at_floor": at_floor}

    return jax.lax.scan(body, loss_scale.init(config), finite)[1]


def random_run(rng: np.random.Generator, steps: int) -> np.ndarray:
    """[steps] of whether a step is finite: stretches in which overflows are rare or frequent."""
    stretches = []
    while sum(map(len, stretches)) < steps:
        overflows = rng.choice([0.0, 0.02, 0.1, 0.3, 0.6, 1.0], p=[0.2, 0.2, 0.2, 0.2, 0.1, 0.1])
        stretches.append(rng.random(rng.integers(1, 60)) >= overflows)
    return np.concatenate(stretches)[:steps]


NUM_STEPS = 2000
CONFIGS = [
    LossScale(
        initial=2.0**6,
        window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        minimum=2.0**-1,
        maximum=2.0**20,
    )
    for window, hysteresis, consecutive in itertools.product(
        (1, 2, 3, 5, 7), (1, 2, 3, 4), (False, True)
    )
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("consecutive", [False, True])
def test_every_step_of_random_runs_is_that_of_a_plain_scaler(consecutive):
    seen = dict.fromkeys(("floor", "top", "fall", "rise"), 0)
    for number, config in enumerate(CONFIGS):
        if config.consecutive_hysteresis != consecutive:
            continue
        finite = random_run(np.random.default_rng(number), NUM_STEPS)
        followed = jax.device_get(follow(config, jnp.asarray(finite)))
        names = ("scale", "good_steps", "hysteresis", "at_floor")
        got = list(zip(*(followed[name].tolist() for name in names), strict=True))
        plain, expected = PlainScaler(config), []
        for is_finite in finite.tolist():
            plain.observe(is_finite)
            expected.append(plain.numbers)
        # Exact: all scales are powers of two, which float32 and Python's float both hold.
        wrong = [step for step in range(NUM_STEPS) if got[step] != expected[step]]
        assert not wrong, (config, wrong[0], got[wrong[0]], expected[wrong[0]])
        scales = np.array([config.initial, *followed["scale"]])
        seen["floor"] += int(followed["at_floor"].sum())
        seen["top"] += int((scales == config.maximum).sum())
        seen["fall"] += int((scales[1:] < scales[:-1]).sum())
        seen["rise"] += int((scales[1:] > scales[:-1]).sum())
    assert min(seen.values()) > 100, f"the runs must visit everything often: {seen}"


def test_a_long_run_with_the_defaults_is_that_of_a_plain_scaler():
    finite = np.random.default_rng(0).random(30_000) >= 0.0008
    scales = jax.device_get(follow(DEFAULTS, jnp.asarray(finite))["scale"])
    plain, expected = PlainScaler(DEFAULTS), []
    for is_finite in finite.tolist():
        plain.observe(is_finite)
        expected.append(plain.scale)
    np.testing.assert_array_equal(scales, np.array(expected, np.float32))
    assert len(set(expected)) >= 4, "the scale must have moved"


@pytest.mark.parametrize("config", CONFIGS[::7])
def test_what_always_holds(config):
    finite = random_run(np.random.default_rng(99), NUM_STEPS)
    followed = jax.device_get(follow(config, jnp.asarray(finite)))
    scales = followed["scale"].astype(np.float64)
    assert scales.min() >= config.minimum
    assert scales.max() <= config.maximum
    powers = np.log2(scales / config.initial)
    np.testing.assert_array_equal(powers, np.round(powers))
    assert np.abs(np.diff(powers)).max() <= 1
    rose, fell = np.diff(powers) > 0, np.diff(powers) < 0
    assert not (rose & ~finite[1:]).any()
    assert not (fell & finite[1:]).any()
    assert (followed["good_steps"][~finite] == 0).all()
    assert not (followed["at_floor"] & finite).any()
    assert set(followed["hysteresis"].tolist()) <= set(range(1, config.hysteresis + 1))


def test_zero_gradients_for_ever_do_not_end_at_infinity():
    config = LossScale(window=1)
    scales = jax.device_get(follow(config, jnp.ones(300, bool))["scale"])
    assert scales[-1] == config.maximum == 2.0**32


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [WINDOW_3, IN_A_ROW, LossScale(static=4.0)])
def test_jitted_and_eager_agree_and_the_state_keeps_its_type(config):
    jitted = jax.jit(functools.partial(loss_scale.update, config))
    state = loss_scale.init(config)
    for finite in random_run(np.random.default_rng(3), 60).tolist():
        eager, eager_floor = loss_scale.update(config, state, finite)
        following, at_floor = jitted(state, jnp.asarray(finite))
        assert as_numbers(eager) == as_numbers(following)
        assert bool(eager_floor) == bool(at_floor)
        assert jax.tree.map(jax.typeof, following) == jax.tree.map(jax.typeof, state)
        assert at_floor.dtype == jnp.bool_
        state = following
    assert jitted._cache_size() == 1


def test_the_program_has_no_branch():
    program = jax.make_jaxpr(functools.partial(loss_scale.update, DEFAULTS))(
        loss_scale.init(DEFAULTS), True
    )
    names = {equation.primitive.name for equation in program.eqns}
    assert not names & {"cond", "while", "scan"}


# --- options --------------------------------------------------------------------------------------

WRONG = {
    "zero": ({"initial": 0.0}, "initial: 0.0 must be between 2**-64 and 2**64"),
    "negative": ({"minimum": -1.0}, "minimum: -1.0 must be between"),
    "infinite": ({"maximum": math.inf}, "maximum: expected a finite number"),
    "not a number": ({"initial": math.nan}, "initial: expected a finite number"),
    "initial too low": ({"initial": 0.5}, "0.5 is not between minimum (1) and maximum"),
    "initial too high": ({"initial": 2.0**40}, "change it, or the limit"),
    "limits swapped": ({"minimum": 4.0, "maximum": 2.0, "initial": 4.0}, "initial: 4.0 is not"),
    "half a step": ({"window": 1.5}, "window: expected an integer, got 1.5"),
    "hysteresis as bool": ({"hysteresis": True}, "hysteresis: expected an integer, got True"),
    "text": ({"consecutive_hysteresis": "yes"}, "expected true or false, got 'yes'"),
    "static below": ({"static": -2.0}, "static: -2.0 must be between"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_option_is_refused(options, message):
    with pytest.raises(ConfigError) as refusal:
        LossScale(**options)
    assert message in str(refusal.value)


def test_options_may_come_from_a_file():
    config = from_dict(LossScale, {"initial": 1024, "window": 500, "minimum": 1e-3})
    assert (config.initial, type(config.initial), config.minimum) == (1024.0, float, 1e-3)
    with pytest.raises(ConfigError, match="did you mean 'window'"):
        from_dict(LossScale, {"windo": 500})
    with pytest.raises(ConfigError, match="minimum: '1e-3' is a string; use 0.001"):
        from_dict(LossScale, {"minimum": "1e-3"})


DESCRIPTIONS = [
    (
        DEFAULTS,
        "dynamic loss scale from 2^16: times 2 after 1,000 finite steps, divided by 2 at the 2nd "
        "overflow since it last rose, between 1 and 2^32",
    ),
    (
        LossScale(hysteresis=3, consecutive_hysteresis=True, window=7),
        "dynamic loss scale from 2^16: times 2 after 7 finite steps, divided by 2 at the 3rd "
        "overflow in a row, between 1 and 2^32",
    ),
    (
        LossScale(hysteresis=1, factor=3, initial=1000),
        "dynamic loss scale from 1000: times 3 after 1,000 finite steps, divided by 3 at every "
        "overflow, between 1 and 2^32, not all powers of two, so scaling rounds",
    ),
    (LossScale(static=128), "static loss scale 2^7; overflows skip the step"),
    (
        LossScale(static=1000),
        "static loss scale 1000 (not a power of two, so scaling rounds); overflows skip the step",
    ),
]


@pytest.mark.parametrize(("config", "line"), DESCRIPTIONS)
def test_a_plan_says_it_in_one_line(config, line):
    assert describe_loss_scale(config) == line


def test_a_run_file_says_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("precision: fp16\nloss_scale: {window: 500, minimum: 0.25}\n")
    assert load(RunConfig, file).loss_scale == LossScale(window=500, minimum=0.25)
    static = load(RunConfig, file, ["loss_scale.window=1000", "minimum=1", "loss_scale.static=128"])
    assert static.loss_scale == LossScale(static=128.0)
    file.write_text("precision: fp16\nloss_scale: {window: 0}\n")
    with pytest.raises(ConfigError, match=r"loss_scale.window: 0 must be .*run.yaml:2"):
        load(RunConfig, file)


def test_a_run_file_in_another_precision_takes_no_loss_scale(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("precision: bf16\nloss_scale: {window: 500}\n")
    with pytest.raises(ConfigError, match="only fp16 has a loss scale, but precision is bf16"):
        load(RunConfig, file)
    file.write_text("precision: bf16\nreduce_dtype: fp16\nloss_scale: {window: 500}\n")
    assert load(RunConfig, file).loss_scale.window == 500
