"""How long measuring may take, what counts as noise, and what an answer is kept for."""

import contextlib
import dataclasses
import errno
import gc
import importlib.metadata
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import zerojax
from tests.support.tuning_doubles import (
    Clock,
    Processes,
    Runs,
    asked,
    choices,
    plan_for,
    process,
    question,
)
from zerojax.hardware import local_devices
from zerojax.training.tuning import (
    Answer,
    KeptChoices,
    decide,
    kept_choices,
    trials,
    tune,
    tuned_plan,
)
from zerojax.training.tuning.measured_choices import AT_START, BY_ITSELF

OVER = "the 10 s for measurements are used up; run zerojax tune"


@pytest.fixture
def clock() -> Clock:
    return Clock()


# Time


def test_what_comes_too_late_is_not_even_asked(clock: Clock, kept: KeptChoices) -> None:
    other = Runs(clock, 0.1)
    answer = asked(clock, kept, other, deadline=0.0)
    assert answer == Answer(choice="xla", reason=f"nothing was measured: {OVER}")
    assert other.times == 0


def test_where_the_check_takes_all_of_the_time_nothing_is_timed_or_kept(clock, kept):
    other = Runs(clock, 0.1)
    answer = asked(clock, kept, other, deadline=1.0)
    assert answer == Answer(choice="xla", reason=f"mosaic_gpu was not chosen: {OVER}")
    assert other.times == 2
    fast, reference = Runs(clock, 0.01), Runs(clock, 0.015)
    found = asked(clock, kept, fast, reference=reference, deadline=100.0)
    assert found.choice == "mosaic_gpu"
    assert fast.times == 2 + 1 + AT_START.rounds, "no mark, and no answer, was left"


def test_a_kept_answer_needs_the_check_alone(clock: Clock, kept: KeptChoices) -> None:
    asked(clock, kept, Runs(clock, 0.1))
    late = Runs(clock, 0.1)
    assert asked(clock, kept, late, deadline=clock.now + 0.5).choice == "mosaic_gpu"
    assert late.times == 2


def test_rounds_end_with_the_time_but_for_the_first_three(clock: Clock, kept: KeptChoices) -> None:
    slow = Runs(clock, 0.5)
    assert asked(clock, kept, slow).choice == "mosaic_gpu"
    assert slow.times == 2 + 1 + 3, "1.5 s a round, and two seconds for all of them"
    few = Runs(clock, 0.01)
    found = asked(
        clock, kept, few, key={"n": 2}, reference=Runs(clock, 0.02), deadline=clock.now + 0.1
    )
    assert found.choice == "mosaic_gpu"
    assert few.times == 2 + 1 + 3


def test_the_time_of_one_process_counts_for_all(tmp_path: Path) -> None:
    slow = process(tmp_path, 1, 0.5, deadline=0.6)
    found = Processes(2).run(process(tmp_path, 0, 0.5, deadline=100.0), slow)
    assert [answer.reason for answer in found] == [f"mosaic_gpu was not chosen: {OVER}"] * 2


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[str]:
    """Each question of a plan takes 0.5 s for XLA and 0.25 s for the kernel, once."""
    made: list[str] = []

    def ask(what: str, *_: Any) -> Any:
        made.append(what)
        return question(Runs(clock, 0.5), Runs(clock, 0.25), what=what)

    monkeypatch.setattr(tuned_plan, "is_on_gpus", lambda plan: True)
    monkeypatch.setattr(tuned_plan, "statistics_question", lambda *_: ask("statistics"))
    monkeypatch.setattr(tuned_plan, "update_question", lambda *_: ask("update"))
    monkeypatch.setattr(tuned_plan, "open_calls", lambda plan: dict.fromkeys("abcd"))
    monkeypatch.setattr(
        tuned_plan,
        "choose_attention",
        lambda plan, call, decided: decided(lambda: ask(f"attention {len(made)}")),
    )
    return made


def test_all_questions_of_a_start_share_ten_seconds(asks, clock, kept):
    """Each takes 1 s to be checked, and 3 s for four rounds: the fourth is checked, not timed."""
    plan = tune(plan_for(), kept=kept, clock=clock)
    assert asks == ["statistics", "update", "attention 2"]
    assert clock.now == pytest.approx(12.0)
    chosen = plan.program.kernels
    took = {what: one.implementation for what, one in chosen.items()}
    assert took == dict.fromkeys(("update", "statistics", "a"), "mosaic_gpu") | dict.fromkeys(
        "bcd", "xla"
    )
    assert all(chosen[what].reason == f"nothing was measured: {OVER}" for what in "bcd")
    assert f"b by xla: nothing was measured: {OVER}" in plan.reasons
    asks.clear()
    again = tune(plan_for(), kept=kept, clock=clock).program.kernels
    assert again["b"].implementation == "mosaic_gpu", "a later start has time for what is left"


def test_the_command_takes_its_time(asks: list[str], clock: Clock, kept: KeptChoices) -> None:
    plan = tune(plan_for(), kept=kept, clock=clock, again=True)
    assert {one.implementation for one in plan.program.kernels.values()} == {"mosaic_gpu"}
    assert len(asks) == 6
    rounds = (clock.now / 6 - 1.0) / 0.75
    assert rounds == pytest.approx(14), "ten seconds for each, rounded up to a round"
    fast = Runs(clock, 0.01)
    asked(clock, kept, fast, reference=Runs(clock, 0.02), again=True, effort=BY_ITSELF)
    assert fast.times == 2 + 1 + BY_ITSELF.rounds


def test_what_may_hang_is_watched_and_what_waits_for_others_is_not(clock, kept):
    said: list[str] = []
    inside: list[str] = []

    @contextlib.contextmanager
    def during(what: str) -> Iterator[None]:
        said.append(what)
        inside.append(what)
        yield
        inside.clear()

    class Watched(Runs):
        def __call__(self) -> Any:
            assert inside
            return super().__call__()

    def exchange(values: np.ndarray) -> np.ndarray:
        assert not inside
        return values[None]

    asked(clock, kept, Watched(clock, 0.5), during=during, exchange=exchange)
    assert said == ["trying mosaic_gpu for a sum", "timing mosaic_gpu for a sum"]


# What fails late


class Late:
    """A result on a device where the program that computes it has failed."""

    def block_until_ready(self) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: seen when it was waited for")


def test_what_fails_only_when_it_is_waited_for_is_refused(clock: Clock, kept: KeptChoices) -> None:
    answer = asked(clock, kept, Runs(clock, 0.5, result=Late()))
    assert answer.choice == "xla"
    assert "it failed: CUDA_ERROR_ILLEGAL_ADDRESS: seen when" in answer.reason
    assert "it failed in an earlier start" in asked(clock, kept, Runs(clock, 0.5)).reason


class Fails(Runs):
    """Works until it has run so often."""

    def __init__(self, clock: Clock, times: int) -> None:
        super().__init__(clock, 0.5)
        self.most = times

    def __call__(self) -> Any:
        if self.times >= self.most:
            raise RuntimeError("CUDA_ERROR_LAUNCH_TIMEOUT")
        return super().__call__()


def test_what_fails_while_it_is_timed_is_left_out_by_the_next_start(clock, kept):
    answer = asked(clock, kept, Fails(clock, 4))
    assert (answer.choice, "it failed: CUDA_ERROR" in answer.reason) == ("xla", True)
    fresh = Runs(clock, 0.5)
    assert "it failed in an earlier start" in asked(clock, kept, fresh).reason
    assert fresh.times == 0


def test_a_device_that_is_lost_while_it_is_timed_ends_the_start(clock, kept):
    lost = Fails(clock, 4)  # checked once, and three rounds
    with pytest.raises(RuntimeError, match="no longer use its device; start again"):
        asked(clock, kept, Fails(clock, 5), reference=lost)


def test_a_difference_that_cannot_be_told_refuses(clock: Clock, kept: KeptChoices) -> None:
    answer = asked(clock, kept, Runs(clock, 0.5, result=object()))
    assert answer.choice == "xla"
    assert "mosaic_gpu was not chosen: it failed: " in answer.reason


# Noise


def test_a_gain_within_the_noise_is_none(clock: Clock, kept: KeptChoices) -> None:
    """5 % less, where the quartiles are 10 % apart: two medians of seven times differ as much."""
    wide = Runs(clock, 0.5, 0.5, 0.5, 0.90, 1.00, 0.95, 0.90, 1.00, 0.95, 0.95)
    patient = dataclasses.replace(AT_START, rounds=7, seconds=100.0)
    answer = asked(clock, kept, wide, effort=patient)
    assert answer.choice == "xla"
    assert "times vary too much to decide (5.0% less, +- 10.3%)" in answer.reason
    narrow = Runs(clock, 0.5, 0.5, 0.5, 0.94, 0.96, 0.95, 0.94, 0.96, 0.95, 0.95)
    assert asked(clock, kept, narrow, effort=patient).choice == "mosaic_gpu", "nothing was kept"


# What is kept


def test_two_starts_at_once_do_not_take_each_other_for_dead(clock: Clock, tmp_path: Path) -> None:
    one, other = KeptChoices(tmp_path), KeptChoices(tmp_path)
    key = question(Runs(clock), Runs(clock)).key
    with one.marked(key) as leave_mark:
        assert not other.is_marked(key)
        assert other.tried() == []
        assert asked(clock, other, Runs(clock, 0.5)).choice == "mosaic_gpu"
        leave_mark()
    assert other.is_marked(key)
    assert other.tried() == [key]
    assert not KeptChoices(tmp_path, 1).is_marked(key), "another process of the start"
    with other.marked(key):
        pass
    assert not one.is_marked(key), "what is tried again takes the old mark's place"
    assert not list(tmp_path.glob(".*")), "and nothing else is left"


def test_every_machine_keeps_the_answer(tmp_path: Path) -> None:
    """Two machines without a common folder: where one had no answer both would measure always."""
    folders = [tmp_path / "a", tmp_path / "b"]
    start = lambda second: Processes(2).run(  # noqa: E731
        process(folders[0], 0, second), process(folders[1], 1, second)
    )
    first = start(0.5)
    assert choices(first) == ["mosaic_gpu"] * 2
    assert start(5.0) == first, "it would lose if it were timed"


def test_an_answer_is_the_same_on_machines_whose_days_differ(tmp_path, monkeypatch):
    Processes(1).run(process(tmp_path / "a", 0, 0.5))
    text = (tmp_path / "a" / kept_choices.FILE).read_text()
    (tmp_path / "b").mkdir()
    (entry,) = KeptChoices(tmp_path / "a").all()
    later = text.replace(entry[1].date, "2000-01-02")
    (tmp_path / "b" / kept_choices.FILE).write_text(later)
    found = Processes(2).run(process(tmp_path / "a", 0, 5.0), process(tmp_path / "b", 1, 5.0))
    assert choices(found) == ["mosaic_gpu"] * 2


def test_a_folder_that_is_read_only_is_read(clock, kept, tmp_path, monkeypatch):
    asked(clock, kept, Runs(clock, 0.5))
    names = sorted(path.name for path in tmp_path.iterdir())
    _make_read_only(monkeypatch)
    known = Runs(clock, 5.0)
    assert asked(clock, kept, known).choice == "mosaic_gpu"
    assert known.times == 2
    assert asked(clock, kept, Runs(clock, 5.0), key={"n": 2}).choice == "xla"
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def _make_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system that is mounted so; its mode would say nothing to root."""
    opened = os.open

    def refuse(*_: Any, **options: Any) -> None:
        del options
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def reading(path: Any, flags: int, *mode: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse()
        return opened(path, flags, *mode)

    monkeypatch.setattr(kept_choices, "replace_text", refuse)
    monkeypatch.setattr(os, "open", reading)


# What an answer hangs on


CHANGES = {
    "the driver": lambda patch: patch.setattr(trials, "driver_version", lambda: "1.2"),
    "XLA's flags": lambda patch: patch.setenv("XLA_FLAGS", "--xla_something=1"),
    "a package": lambda patch: patch.setattr(importlib.metadata, "version", lambda name: "9.9"),
    "a source": lambda patch: patch.setattr(trials, "source_hash", lambda: "another"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_answer_is_of_one_driver_and_one_software(name, monkeypatch):
    plan = plan_for()
    before = trials.base_key(plan, "adamw")
    assert before == trials.base_key(plan, "adamw")
    CHANGES[name](monkeypatch)
    assert before != trials.base_key(plan, "adamw")


def test_a_key_needs_no_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may run the sources as they are."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert trials.base_key(plan_for(), "adamw")["versions"] == {}


def test_the_source_of_what_is_measured_counts(monkeypatch, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernel.py").write_text("x = 1\n")

    class Module:
        __file__ = str(package / "__init__.py")

    monkeypatch.setattr(trials, "SOURCES", (Module,))
    hashed = trials.source_hash.__wrapped__
    before = hashed()
    assert before == hashed()
    (package / "kernel.py").write_text("x = 2\n")
    assert hashed() != before


DRIVERS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    "GCC version:  gcc version 11.4.0\n": "535.104.05",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (x@y)\n": (
        "580.65.06"
    ),
    "something else\n": None,
}


@pytest.mark.parametrize("text", DRIVERS)
def test_the_driver_says_its_version(text, monkeypatch, tmp_path):
    monkeypatch.setattr(local_devices, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(local_devices, "NVML", "libnothing.so.1")
    (tmp_path / "version").write_text(text)
    read = local_devices.driver_version.__wrapped__
    assert read() == DRIVERS[text]


def test_without_the_drivers_file_its_library_is_asked(monkeypatch, tmp_path):
    class Library:
        status, closed = 0, 0

        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
            assert size == len(text)
            text.value = b"580.159.04"
            return self.status

        def nvmlShutdown(self) -> int:
            self.closed += 1
            return 0

    library = Library()
    monkeypatch.setattr(local_devices, "DRIVER_FILE", tmp_path / "nothing")
    monkeypatch.setattr(local_devices.ctypes, "CDLL", lambda name: library)
    read = local_devices.driver_version.__wrapped__
    assert (read(), library.closed) == ("580.159.04", 1)
    library.status = 3
    assert (read(), library.closed) == (None, 2)


# Memory


class Recorded:
    """`jax.jit` that notes the most bytes that live while its programs run.

    Attributes:
      most: bytes of arrays and temporaries, less what lived before.
    """

    def __init__(self) -> None:
        self._jit, self._before, self.most = jax.jit, _live_bytes(), 0

    def __call__(self, function: Any = None, **options: Any) -> Any:
        if function is None:
            return lambda function: self(function, **options)
        jitted = self._jit(function, **options)

        def call(*arguments: Any) -> Any:
            compiled = jitted.lower(*arguments).compile()
            stats = compiled.memory_analysis()
            made = stats.output_size_in_bytes - stats.alias_size_in_bytes
            now = self.left() + made + stats.temp_size_in_bytes
            self.most = max(self.most, now)
            return compiled(*arguments)

        return call

    def left(self) -> int:
        """Bytes that live and did not before."""
        return _live_bytes() - self._before


def _live_bytes() -> int:
    return sum(x.nbytes for x in jax.live_arrays())


OTHERS = {"lamb": zerojax.lamb(1e-3), "adam8bit": zerojax.adam8bit(1e-3)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "what", ["statistics", *(f"update by {name}" for name in ("adamw", "adamw with ema", *OTHERS))]
)
def test_arrays_and_temporaries_fit_into_the_room(what, monkeypatch):
    """By the sizes of compiled programs and of the arrays that live when they are called."""
    room = 2**20
    monkeypatch.setattr(tuned_plan, "room", lambda plan: room)
    averages = what.endswith("ema")
    tx = OTHERS.get(what.removeprefix("update by "), zerojax.adamw(1e-3))
    plan = plan_for(
        mesh=zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1]),
        optimizer=zerojax.with_ema(tx) if averages else tx,
    )
    elements = sum(map(math.prod, tuned_plan.sample_shapes(plan).values()))
    each = tuned_plan.BYTES_PER_ELEMENT + tuned_plan.BYTES_OF_AVERAGE * averages
    assert elements >= 0.9 * room / each, "the room is used"
    gc.collect()
    recorded, slack = Recorded(), 2**13  # counters and scalars
    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", recorded)
        ask = getattr(tuned_plan, f"{what.split()[0]}_question")
        assert ask(plan, "xla").key["what"].endswith("with ema") == averages
        decide(lambda: ask(plan, "xla"), KeptChoices(None))
    assert 0.3 * room < recorded.most <= room + slack
    gc.collect()
    assert recorded.left() < slack, "freed before the state exists"
