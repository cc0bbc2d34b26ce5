"""Where time goes, who keeps the others waiting, and when a loss jumps: numbers in, words out."""

from __future__ import annotations

import dataclasses
import io
import json
import threading
import time

import jax
import numpy as np
import pytest

from zerojax.config import ConfigError, LogConfig
from zerojax.training.metrics import RunLog, read_metrics
from zerojax.training.metrics.loss_spikes import LEAST, SpikeDetector
from zerojax.training.metrics.stragglers import (
    DATA,
    EVAL,
    HOST,
    IN_A_ROW,
    SAVE,
    STEP,
    ProcessTimes,
    Stopwatch,
    Stragglers,
    difference,
    spread,
)
from zerojax.training.process_times import LoopClock

# --- the stopwatch --------------------------------------------------------------------------------


class Clock:
    """Set by hand."""

    now = 0.0

    def __call__(self):
        return self.now


def test_every_second_belongs_to_one_activity():
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now = 1.0
    with watch.during(DATA):
        clock.now = 3.0
    with watch.during(SAVE):
        clock.now = 4.0
        with watch.during(STEP):
            clock.now = 8.0
        clock.now = 9.0
    clock.now = 9.5
    spent = watch.read()
    assert spent == {DATA: 2.0, STEP: 4.0, SAVE: 2.0, EVAL: 0.0, HOST: 1.5}
    clock.now = 10.0
    assert difference(watch.read(), spent) == {DATA: 0, STEP: 0, SAVE: 0, EVAL: 0, HOST: 0.5}
    assert sum(watch.read().values()) == clock.now


def test_an_error_in_a_block_ends_its_activity():
    clock = Clock()
    watch = Stopwatch(clock)

    def wait_for_data():
        with watch.during(DATA):
            clock.now = 1.0
            next(iter(()))

    with pytest.raises(StopIteration):
        wait_for_data()
    clock.now = 5.0
    assert watch.read()[HOST] == 4.0


# --- processes ------------------------------------------------------------------------------------


def times(late_data=0.0, late_host=0.001, *, steps=10, step=0.1, name="n0"):
    """Seconds per step in, seconds of the interval out."""
    return ProcessTimes(
        steps=steps,
        seconds=steps * step,
        data=steps * late_data,
        host=steps * late_host,
        late_data=steps * late_data,
        late_host=steps * late_host,
        name=name,
    )


def test_a_row_comes_back_from_its_bytes():
    row = times(0.25, name="a-host-with-a-name-that-is-longer-than-forty-bytes.example")
    back = ProcessTimes.from_bytes(row.as_bytes())
    assert back.name == row.name[:40]
    assert (back.steps, back.late, back.seconds) == (row.steps, row.late, row.seconds)
    assert len(row.as_bytes()) == len(times().as_bytes())


class Result:
    """Of a step on the devices, over when it is told."""

    def __init__(self):
        self.over = threading.Event()

    def block_until_ready(self):
        assert self.over.wait(120)


def test_only_the_time_in_which_devices_had_nothing_to_do_is_late(monkeypatch):
    """Data that take a little longer than the devices, which were busy most of that time."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    clock = Clock()
    loop_clock = LoopClock(Stopwatch(clock))
    with loop_clock.stepping():
        clock.now = 1.0
    first = Result()
    loop_clock.dispatched(first)
    with loop_clock.during(DATA):
        clock.now = 10.0
        first.over.set()
        deadline = time.monotonic() + 120
        while loop_clock._devices.idle_at() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        clock.now = 11.0
    with loop_clock.stepping():
        clock.now = 12.0
    second = Result()
    loop_clock.dispatched(second)
    with loop_clock.during(DATA):
        clock.now = 20.0
    with loop_clock.stepping():  # the devices are still at work
        pass
    second.over.set()
    spent, times = loop_clock.take()
    assert spent[DATA] == 18.0
    assert (times.late_data, times.late_host, times.steps) == (1.0, 0.0, 3)


def test_the_thread_that_waits_for_devices_ends_with_its_clock(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    before = set(threading.enumerate())
    loop_clock = LoopClock()
    loop_clock.dispatched(jax.numpy.zeros(()))
    (thread,) = set(threading.enumerate()) - before
    del loop_clock
    thread.join(timeout=120)
    assert not thread.is_alive()


def test_the_spread_names_the_slowest():
    found = spread([times(), times(0.05), times(0.001)])
    assert found["slowest_process"] == 1
    assert found["own_seconds_max"] == pytest.approx(0.051)
    assert found["own_seconds_median"] == pytest.approx(0.002)
    assert found["data_seconds_min"] == 0.0
    assert found["step_seconds_median"] == pytest.approx(0.1)


def test_a_process_is_named_after_some_reports_and_once():
    stragglers, rows = Stragglers(0.2), [times(), times(), times(0.06, name="n2"), times()]
    found = [stragglers.see(rows) for _ in range(3 * IN_A_ROW)]
    assert [len(findings) for findings in found] == [0] * (IN_A_ROW - 1) + [1] + [0] * 6
    (finding,) = found[IN_A_ROW - 1]
    assert finding.process == 2
    assert finding.text == (
        "rank 2 (n2) is slow: it begins each step 0.061 s late (waiting for data 0.06 s), "
        "the others 0.001 s; a step takes 0.1 s, and would take about 0.04 s without this delay"
    )


def test_a_process_that_recovers_is_said_too():
    stragglers = Stragglers(0.2)
    for _ in range(IN_A_ROW):
        stragglers.see([times(), times(late_host=0.05)])
    texts = [f.text for _ in range(IN_A_ROW) for f in stragglers.see([times(), times()])]
    assert texts == ["rank 1 (n0) is no longer slow"]


def test_one_slow_report_is_not_enough():
    stragglers = Stragglers(0.2)
    for index in range(12):
        late = 0.06 if index % IN_A_ROW else 0.0
        assert stragglers.see([times(), times(late)]) == []


@pytest.mark.parametrize(
    "rows",
    [
        [times(), times()],
        [times(0.05), times(0.05)],  # all wait for the same disk
        # All wait, and the last to begin a step is the one whose devices are idle.
        [dataclasses.replace(times(0.03), data=0.95), times(0.09)],
        [times(), times(0.015)],  # 15 % of a step
        [times(step=0.01), times(0.008, step=0.01)],  # below what a scheduler does
        [times(0.09)],
    ],
)
def test_nobody_is_named_without_reason(rows):
    stragglers = Stragglers(0.2)
    assert not any(stragglers.see(rows) for _ in range(10))


def test_no_threshold_names_nobody():
    stragglers = Stragglers(None)
    assert not any(stragglers.see([times(), times(0.09)]) for _ in range(10))


# --- spikes ---------------------------------------------------------------------------------------


def falling_losses(seed, count=2000):
    """A loss that falls from 10 to 3 and is as noisy as single batches are."""
    random = np.random.default_rng(seed)
    steps = np.arange(count)
    return 3 + 7 * np.exp(-steps / 150) + 0.08 * random.standard_normal(count)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_spike(seed):
    detector = SpikeDetector(8.0)
    assert not any(detector.see(loss) for loss in falling_losses(seed))


@pytest.mark.parametrize("seed", range(5))
def test_losses_of_mixed_batches_are_no_spikes(seed):
    """Mixup: the loss is high in the steps whose batches are mixed by halves, one of twelve."""
    random = np.random.default_rng(seed)
    share = random.beta(0.2, 0.2, 2000)
    detector = SpikeDetector(8.0)
    mixed = falling_losses(seed) + 3 * np.minimum(share, 1 - share)
    assert not any(detector.see(loss) for loss in mixed)
    assert detector.see(mixed[-100:].max() + 5) is not None


@pytest.mark.thorough
def test_heavy_tails_are_rarely_spikes():
    random = np.random.default_rng(0)
    detector = SpikeDetector(8.0)
    found = sum(detector.see(3 + 0.05 * x) is not None for x in random.standard_t(5, 20_000))
    assert found <= 20, "one in a thousand, where a normal distribution has none"


def test_a_spike_is_found_where_it_is_and_once():
    losses = falling_losses(1)
    losses[700:704] += 1.5
    losses[1200] += 2.0
    detector = SpikeDetector(8.0)
    found = {step: spike for step, x in enumerate(losses) if (spike := detector.see(x))}
    assert list(found) == [700, 1200]
    assert found[1200].value == losses[1200]
    assert found[1200].median == pytest.approx(3.0, abs=0.1)
    assert 10 < found[1200].times < 60


def test_a_rise_that_stays_is_one_spike():
    detector = SpikeDetector(8.0)
    losses = [*falling_losses(2)[1000:], *(falling_losses(3)[1000:] + 2)]
    assert sum(detector.see(x) is not None for x in losses) == 1


def test_what_is_not_finite_is_no_spike_and_changes_nothing():
    detector = SpikeDetector(8.0)
    for loss in falling_losses(4)[:300]:
        assert detector.see(loss) is None
        assert detector.see(float("nan")) is None
        assert detector.see(float("inf")) is None
    assert detector.see(50.0) is not None


def test_the_first_steps_are_not_judged():
    detector = SpikeDetector(8.0)
    assert not any(detector.see(loss) for loss in [1.0] * (LEAST - 1) + [100.0])


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_has_converged_near_zero_has_no_spikes(seed):
    random = np.random.default_rng(seed)
    detector = SpikeDetector(8.0)
    falling = 4.0 * np.exp(-np.arange(500) / 40)
    noise = 1e-4 * random.lognormal(0, 0.4, 3000)
    noise[[700, 1500, 2400]] *= 30  # 3e-3, beside a first loss of 4
    assert not any(detector.see(x) for x in [*(falling + noise[:500]), *noise[500:]])
    assert detector.see(0.5) is not None


def test_constant_losses_may_move_a_little():
    detector = SpikeDetector(8.0)
    assert not any(detector.see(loss) for loss in [2.0] * 50 + [2.05])
    assert detector.see(2.2).times == float("inf")


# --- what is written ------------------------------------------------------------------------------


def open_log(folder, **config):
    screen = io.StringIO()
    log = RunLog(folder, LogConfig(tensorboard=False, **config), total_steps=100, stream=screen)
    log.start("a plan", [], "", {}, {})
    return log, screen


def test_metrics_hold_the_breakdown_events_and_processes(tmp_path):
    log, screen = open_log(tmp_path)
    spent = {DATA: 0.5, STEP: 2.0, SAVE: 0.25, EVAL: 0.0, HOST: 0.125}
    log.write(10, {"loss": 2.0}, spent)
    log.event("not_finite", 12, "step 12: not finite", leaf="mlp/kernel")
    for step in range(10, 10 + 10 * IN_A_ROW, 10):
        log.write_processes(step, [times(), times(0.05, name="slowhost")])
    log.end(20, {DATA: 0.0, STEP: 0.0, SAVE: 1.5, EVAL: 0.0, HOST: 0.0})
    log.close()
    metrics = read_metrics(tmp_path)
    assert metrics.unreadable_lines == 0
    assert {key: metrics.train[0][f"spent_{key}"] for key in spent} == spent
    assert metrics.ends[0]["spent_save"] == 1.5
    assert [row["slowest_process"] for row in metrics.processes] == [1] * IN_A_ROW
    assert [(e["event"], e["step"]) for e in metrics.events] == [
        ("not_finite", 12),
        ("slow_process", 30),
    ]
    assert metrics.events[0]["leaf"] == "mlp/kernel"
    assert metrics.events[1]["host"] == "slowhost"
    lines = screen.getvalue().splitlines()
    assert "spent" not in "".join(lines), "the breakdown is for the report, not for every line"
    assert lines[-1].startswith("step 30: rank 1 (slowhost) is slow: ")


def test_a_jump_is_put_into_words(tmp_path):
    log, _ = open_log(tmp_path)
    for step in range(100):
        assert log.see_loss(step, 2.0 + 0.01 * (step % 5)) is None
    assert log.see_loss(100, 4.0) == (
        "step 100: loss 4 jumped from 2.02 at the median of the steps before, 134 times their "
        "spread"
    )
    log.close()


def test_other_processes_write_nothing(tmp_path):
    log = RunLog(tmp_path / "run", LogConfig(), total_steps=10, process_index=1)
    log.start("a plan", [], "", {}, {})
    log.event("not_finite", 1, "text")
    log.write_processes(1, [times(), times()])
    log.end(1, {DATA: 1.0})
    log.close()
    assert not (tmp_path / "run").exists()


def test_what_an_attempt_said_of_steps_it_lost_is_gone(tmp_path):
    rows = [
        {"kind": "start", "step": 0},
        {"kind": "train", "step": 10, "loss": 2.0},
        {"kind": "event", "step": 8, "event": "not_finite"},
        {"kind": "event", "step": 12, "event": "loss_spike"},
        {"kind": "processes", "step": 12},
        {"kind": "start", "step": 10},
        {"kind": "train", "step": 20, "loss": 2.0},
        {"kind": "event", "step": 15, "event": "not_finite"},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    metrics = read_metrics(tmp_path)
    assert [event["step"] for event in metrics.events] == [8, 15]
    assert metrics.processes == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"profile": [3]}, "profile: .3. is not .FIRST, LAST. with 2 <= FIRST <= LAST"),
        ({"profile": [5, 3]}, "is not .FIRST, LAST."),
        ({"profile": [1, 3]}, "is not .FIRST, LAST."),
        ({"spike": 0}, "spike: 0.* must be above 0"),
        ({"straggler": -1}, "straggler: -1.* must be above 0"),
    ],
)
def test_settings_are_checked(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        LogConfig(**settings)
