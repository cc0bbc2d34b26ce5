"""What is said of steps that were not finite, when they end a run, and of the memory at its end."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.config import LossScale
from zerojax.hardware import compile_client
from zerojax.optim.precision import Precision, as_precision
from zerojax.training.metrics.loss_spikes import SpikeDetector
from zerojax.training.metrics.stragglers import ACTIVITIES, Stopwatch
from zerojax.training.process_times import LoopClock
from zerojax.training.reporting import MAX_STEPS_UNDER_WAY, Reports, compare_peak

NAMES = ("embed", "mlp/kernel", "norm")


def make_plan(precision):
    """What `Reports` asks of a plan."""
    return types.SimpleNamespace(
        precision=as_precision(precision),
        abstract_stored={"params": dict.fromkeys(NAMES)},
        stacks={},
        learning_rate=None,
        traced=types.SimpleNamespace(metric_names=()),
    )


BF16 = make_plan("bf16")
FP16 = make_plan("fp16")
FP16_STATIC = make_plan(
    Precision(
        compute_dtype=jnp.float16, reduce_dtype=jnp.float16, loss_scale=LossScale(static=128.0)
    )
)


def metrics(*, skipped=0, num_skipped=0, loss=2.5, grad_norm=1.0, **others):
    """What a step gives, as scalars on the device."""
    values = {"loss": loss, "grad_norm": grad_norm, "skipped": skipped, "num_skipped": num_skipped}
    return {name: jnp.asarray(value) for name, value in {**values, **others}.items()}


def overflow(count, **others):
    """A step that was skipped, the `count`-th."""
    return metrics(skipped=1, num_skipped=count, grad_norm=jnp.inf, **others)


class Log:
    """Keeps what it is told."""

    is_enabled, traced_steps, run_dir = True, (), None

    def __init__(self):
        self.written, self.messages, self.events = [], [], []
        self._spikes = SpikeDetector(8.0)

    def write(self, step, values, spent):
        assert set(spent) == set(ACTIVITIES)
        self.written.append((step, values))

    def see_loss(self, step, loss):
        return f"step {step}: jumped" if self._spikes.see(loss) else None

    def event(self, kind, step, text, *, say=True, **facts):
        self.events.append((kind, step, facts))
        if say:
            self.messages.append(text)

    def message(self, text):
        self.messages.append(text)


def report(reports, plan, step, held, log=None):
    reports.hold(plan, step, held)
    return reports.read(plan, log)


# --- numbers that are shown -----------------------------------------------------------------------


def test_the_loss_scale_is_shown_where_there_is_one():
    log, reports = Log(), Reports(5)
    finite = {"bad_leaf": -1, "at_floor": False}
    values = report(reports, FP16, 1, metrics(loss_scale=65536.0, **finite), log)
    assert values["loss_scale"] == 65536.0
    report(reports, BF16, 2, metrics(bad_leaf=-1), log)
    shown = [sorted(values) for _, values in log.written]
    assert shown == [
        ["grad_norm", "loss", "loss_scale", "skipped"],
        ["grad_norm", "loss", "skipped"],
    ]
    assert log.messages == []


def test_the_learning_rate_is_that_of_the_step_and_computed_before_it_is_read():
    """Of 8 steps before the ninth one was skipped, so that 7 updates were made."""
    plan = types.SimpleNamespace(**vars(BF16))
    plan.learning_rate = lambda updates: 0.1 * updates
    reports = Reports(5)
    reports.hold(plan, 9, metrics(num_skipped=2, skipped=1))
    plan.learning_rate = None
    assert reports.read(plan, None)["learning_rate"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        (optax.constant_schedule(3e-4), 3e-4),
        (lambda updates: 1e-3 / (updates + 1), 1e-3 / 8),
        (lambda updates: np.float64(0.1), 0.1),
        (optax.linear_schedule(1e-3, 0.0, 10), float(optax.linear_schedule(1e-3, 0.0, 10)(7))),
    ],
)
def test_the_learning_rate_is_the_number_that_the_schedule_gives(schedule, rate):
    """Not its neighbour in float32, where the schedule itself has no arrays."""
    plan = types.SimpleNamespace(**vars(BF16))
    plan.learning_rate = schedule
    held = metrics(num_skipped=2, skipped=1)
    with jax.transfer_guard("disallow"):
        values = report(Reports(5), plan, 9, held)
    assert values["learning_rate"] == rate


# --- steps that are skipped -----------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("plan", "others", "found"),
    [
        (BF16, {"bad_leaf": 1}, ", first in the gradient of 'mlp/kernel'"),
        (BF16, {"bad_leaf": 0}, ", first in the gradient of 'embed'"),
        (BF16, {"bad_leaf": -1}, ""),
        (BF16, {}, ""),
        (
            FP16,
            {"bad_leaf": 2, "loss_scale": 65536.0, "at_floor": False},
            ", first in the gradient of 'norm', loss scale 65536",
        ),
    ],
)
def test_a_skipped_step_is_said_with_the_parameter_to_blame(plan, others, found):
    log = Log()
    report(Reports(5), plan, 12, overflow(3, **others), log)
    assert log.messages == [
        f"step 12: loss 2.5, gradient norm inf{found}: not finite, the update was skipped "
        "(3 skipped since the last report, 3 in all)"
    ]


def test_what_a_trace_waits_for_is_time_of_steps():
    now = [0.0]

    class Loss:
        def block_until_ready(self):
            now[0] += 5.0

        def is_ready(self):
            return False

    clock = LoopClock(Stopwatch(lambda: now[0]))
    reports, log = Reports(9, clock=clock), Log()
    reports._trace = types.SimpleNamespace(follow=lambda *args: None)
    log.traced_steps, log.run_dir = (3, 4), "run"
    for step in (1, 2, 3, 4, 5):
        reports.follow(BF16, step, {"loss": Loss()}, log)
    spent, _ = clock.take()
    assert spent["step"] == 10.0
    assert spent["host"] == 0.0


def test_the_first_of_several_skipped_reports_speaks_for_all():
    log, reports = Log(), Reports(9)
    for step in (1, 2, 3):
        report(reports, BF16, step, overflow(step, bad_leaf=1), log)
    assert len(log.messages) == 1
    assert len(log.written) == 3


def test_a_run_that_stays_non_finite_ends_with_the_name():
    reports = Reports(3)
    for step in (1, 2):
        report(reports, BF16, step, overflow(step, bad_leaf=1))
    with pytest.raises(FloatingPointError) as end:
        report(reports, BF16, 3, overflow(3, bad_leaf=1))
    assert str(end.value) == (
        "loss 2.5, gradient norm inf, first in the gradient of 'mlp/kernel' at step 3: not finite "
        "at 3 reports in a row, 3 updates skipped. The parameters are those before the first "
        "skipped update. Lower the learning rate, use precision='fp32', or look at the data"
    )


def test_a_finite_report_starts_the_count_anew():
    reports = Reports(2)
    for step in range(1, 9):
        skipped = step % 2
        held = overflow(step, bad_leaf=0) if skipped else metrics(num_skipped=step)
        report(reports, BF16, step, held)


def test_a_dynamic_scale_may_search_for_as_long_as_it_needs():
    reports = Reports(5)
    for step in range(1, 18):
        scale = 2.0 ** (18 - step)
        report(reports, FP16, step, overflow(step, bad_leaf=0, loss_scale=scale, at_floor=False))


def test_a_static_scale_ends_as_other_precisions_do_with_its_own_remedy():
    reports = Reports(2)
    held = {"bad_leaf": 0, "loss_scale": 128.0, "at_floor": False}
    report(reports, FP16_STATIC, 1, overflow(1, **held))
    with pytest.raises(FloatingPointError, match=r"loss scale 128.*Lower loss_scale\.static"):
        report(reports, FP16_STATIC, 2, overflow(2, **held))


# --- steps between two reports --------------------------------------------------------------------


def test_a_step_that_nobody_reports_is_said_with_its_parameter():
    log, reports = Log(), Reports(5)
    for step in range(1, 10):
        held = overflow(1, bad_leaf=1) if step == 4 else metrics(num_skipped=int(step > 4))
        reports.follow(BF16, step, held, log)
    reports.settle(BF16, log)
    assert log.events == [("not_finite", 4, {"leaf": "mlp/kernel"})]
    assert log.messages == [
        "step 4: loss 2.5, gradient norm inf, first in the gradient of 'mlp/kernel': not finite, "
        "the update was skipped"
    ]


def test_a_reported_step_is_said_once_and_its_parameter_is_in_the_metrics():
    log, reports, held = Log(), Reports(5), overflow(1, bad_leaf=2)
    reports.follow(BF16, 1, held, log)
    reports.hold(BF16, 1, held)
    reports.follow(BF16, 2, metrics(num_skipped=1), log)
    reports.read(BF16, log)
    reports.settle(BF16, log)
    assert len(log.messages) == 1
    assert log.events == [("not_finite", 1, {"leaf": "norm"})]


def test_a_loss_scale_that_is_searched_for_is_no_news():
    log, reports = Log(), Reports(5)
    held = overflow(1, bad_leaf=0, loss_scale=8.0, at_floor=False)
    reports.follow(FP16, 3, held, log)
    reports.settle(FP16, log)
    assert log.messages == []
    assert log.events == [("not_finite", 3, {"leaf": "embed"})]


def test_a_jump_of_the_loss_names_the_largest_gradient():
    log, reports = Log(), Reports(5)
    largest = {"largest_leaf": 1, "largest_share": 0.75}
    for step in range(1, 61):
        loss = 9.0 if step == 50 else 2.5 + 0.01 * (step % 3)
        reports.follow(BF16, step, metrics(loss=loss, grad_norm=3.0, **largest), log)
    reports.settle(BF16, log)
    ((kind, step, facts),) = log.events
    assert (kind, step, facts["leaf"], facts["loss"]) == ("loss_spike", 50, "mlp/kernel", 9.0)
    assert log.messages[0].startswith(
        "step 50: jumped; gradient norm 3, 75% of its square in 'mlp/kernel'. Look at this step's"
    )


def test_other_processes_read_nothing_back_for_it():
    log, reports = Log(), Reports(5)
    log.is_enabled = False
    for step in range(60):
        reports.follow(BF16, step, metrics(loss=9.0 if step == 50 else 2.5), log)
    reports.settle(BF16, log)
    assert log.events == []


# --- the floor of the loss scale ------------------------------------------------------------------

AT_FLOOR = {"bad_leaf": 1, "loss_scale": 1.0, "at_floor": True}
NOT_AT_FLOOR = {"bad_leaf": -1, "loss_scale": 1.0, "at_floor": False}


def test_at_the_floor_the_run_ends_with_name_and_remedies():
    log = Log()
    with pytest.raises(FloatingPointError) as end:
        report(Reports(5), FP16, 21, overflow(18, **AT_FLOOR), log)
    assert str(end.value) == (
        "step 21 overflowed: loss 2.5, gradient norm inf, first in the gradient of 'mlp/kernel', "
        "loss scale 1: this loss scale is the smallest allowed, but a smaller one is needed. 18 "
        "updates were skipped, including this one. Lower the learning rate, use precision='bf16', "
        "which has the range of float32, or look at 'mlp/kernel' and what it is multiplied with"
    )
    assert "step 21: loss 2.5" in log.messages[0], "the log has it too"


def test_a_loss_that_is_not_finite_is_told_apart():
    held = overflow(18, loss=jnp.nan, **{**AT_FLOOR, "bad_leaf": -1})
    with pytest.raises(FloatingPointError) as end:
        report(Reports(5), FP16, 21, held)
    assert str(end.value) == (
        "step 21 overflowed: loss nan, gradient norm inf, loss scale 1: the loss itself is not "
        "finite, and no loss scale changes that. 18 updates were skipped, including this one. "
        "Look at the data and at the largest activations, use precision='bf16', which has the "
        "range of float32"
    )


def test_the_floor_between_two_reports_ends_the_run_a_fixed_number_of_steps_later():
    reports = Reports(5)
    reports.follow(FP16, 1, metrics(**NOT_AT_FLOOR))
    reports.follow(FP16, 2, overflow(1, **AT_FLOOR))
    for step in range(3, 2 + MAX_STEPS_UNDER_WAY):
        reports.follow(FP16, step, metrics(num_skipped=1, **NOT_AT_FLOOR))
    with pytest.raises(FloatingPointError, match="step 2 overflowed"):
        reports.follow(FP16, 99, metrics(num_skipped=1, **NOT_AT_FLOOR))
    reports.settle(FP16)  # nothing is left to wait for


def test_the_floor_in_the_last_steps_of_a_run_is_not_missed():
    reports = Reports(5)
    for step in (1, 2):
        reports.follow(FP16, step, metrics(**NOT_AT_FLOOR))
    reports.settle(FP16)
    reports.follow(FP16, 3, overflow(1, **AT_FLOOR))
    with pytest.raises(FloatingPointError, match="step 3 overflowed"):
        reports.settle(FP16)


def test_steps_without_a_loss_scale_are_only_waited_for():
    reports = Reports(5)
    for step in range(3 * MAX_STEPS_UNDER_WAY):
        reports.follow(BF16, step, overflow(step, bad_leaf=0))
    reports.settle(BF16)


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stepped():
    """A step that ran, its plan, and what the compiler said of it."""
    model = (
        lambda key, batch: {"w": jnp.ones((64, 64))},
        lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2),
    )
    batch = {"x": np.ones((8, 64), np.float32)}
    plan = zerojax.make_plan(
        model,
        zerojax.make_mesh({"data": 8}),
        example_batch=batch,
        loss=lambda apply, batch: apply(batch),
        optimizer=optax.sgd(0.1),
    )
    step = zerojax.build_step(plan)
    step(zerojax.init_state(plan), zerojax.shard_batch(plan, batch))
    compiled = step.lower(plan.abstract_state, plan.abstract_batch).compile()
    return step, plan, compile_client.memory_of(compiled).peak


def test_measured_and_predicted_peak_stand_side_by_side(stepped):
    step, plan, predicted = stepped
    assert predicted >= 64 * 64 * 4 / 8, "at least this device's part of the master weights"
    line = compare_peak(step, plan, {"source": "device", "peak": 2 * predicted})
    assert line is not None
    assert "measured" in line
    assert line.endswith("predicted (+100.0%)")


def test_nothing_is_compared_where_devices_do_not_count_their_memory(stepped):
    step, plan, _ = stepped
    assert compare_peak(step, plan, {"source": "host RSS", "peak": 1 << 30}) is None
