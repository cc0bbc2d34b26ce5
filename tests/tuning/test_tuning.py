"""Measured choice of kernels: by an injected clock and exchange, without a GPU."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tuning_doubles import (
    RIGHT,
    Clock,
    Processes,
    Runs,
    asked,
    choices,
    process,
    question,
)
from zerojax.cli import main
from zerojax.training.tuning import Answer, KeptChoices, Question, decide
from zerojax.training.tuning.kept_choices import FILE


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_faster_one_is_taken_kept_and_not_timed_again(clock: Clock, kept: KeptChoices) -> None:
    answer = asked(clock, kept, Runs(clock, 0.5))
    assert answer.choice == "mosaic_gpu"
    assert "2.00 times as fast here" in answer.reason
    again = Runs(clock, 5.0)  # it would lose if it were timed
    assert asked(clock, kept, again) == answer
    assert again.times == 2  # checked at every start, for its bits twice
    anew = asked(clock, kept, Runs(clock, 5.0), again=True)
    assert anew.choice == "xla"
    assert asked(clock, kept, Runs(clock, 0.5)).choice == "xla", "what was measured last is kept"


@pytest.mark.parametrize(("seconds", "choice"), [(0.98, "xla"), (0.96, "mosaic_gpu"), (1.5, "xla")])
def test_it_has_to_be_faster_by_three_percent(seconds, choice, clock, kept):
    assert asked(clock, kept, Runs(clock, seconds)).choice == choice


def test_noise_leaves_the_reference_and_nothing_is_kept(clock: Clock, kept: KeptChoices) -> None:
    noisy = Runs(clock, 0.1, 0.1, 0.1, 0.2, 0.9, 0.1, 0.8, 0.3, 0.9, 0.1)
    answer = asked(clock, kept, noisy)
    assert answer.choice == "xla"
    assert "vary too much" in answer.reason
    assert asked(clock, kept, Runs(clock, 0.5)).choice == "mosaic_gpu"


def test_an_answer_of_another_source_is_not_taken(clock: Clock, kept: KeptChoices) -> None:
    assert asked(clock, kept, Runs(clock, 0.5)).choice == "mosaic_gpu"
    slow = Runs(clock, 2.0)
    assert asked(clock, kept, slow, key={"source": "2"}).choice == "xla"
    assert slow.times > 2


WRONG = {
    "half a percent": (RIGHT * 1.005, "its results are wrong: .* differs by 0.015"),
    "not a number": (RIGHT * np.float32("nan"), "is not finite"),
    "another shape": (RIGHT[:3], r"float32\[3\]"),
    "a crash": (RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"), "it failed: CUDA_ERROR_ILLEGAL"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_refused_also_where_it_is_kept(name, clock, kept):
    result, reason = WRONG[name]
    assert asked(clock, kept, Runs(clock, 0.5)).choice == "mosaic_gpu"
    answer = asked(clock, kept, Runs(clock, 0.5, result=result))
    assert answer.choice == "xla"
    with pytest.raises(AssertionError, match=f"(?s){reason}"):
        raise AssertionError(answer.reason)


def test_what_failed_is_not_tried_again_until_it_is_asked_for(clock, kept):
    asked(clock, kept, Runs(clock, 0.5, result=RuntimeError("CUDA_ERROR")))
    other = Runs(clock, 0.5)
    answer = asked(clock, kept, other)
    assert (answer.choice, other.times) == ("xla", 0)
    assert "it failed in an earlier start" in answer.reason
    assert asked(clock, kept, Runs(clock, 0.5), again=True).choice == "mosaic_gpu"


def test_a_device_that_is_lost_ends_the_start_and_the_next_one_leaves_the_kernel_out(clock, kept):
    class Lost(Runs):
        """Works until something else has failed."""

        def __call__(self) -> Any:
            if self.times:
                raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an earlier kernel")
            return super().__call__()

    other = Runs(clock, 0.5, result=RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"))
    with pytest.raises(RuntimeError, match=r"no longer use its device; start again: the failed"):
        asked(clock, kept, other, reference=Lost(clock, 1.0))
    fresh = Runs(clock, 0.5)
    assert asked(clock, kept, fresh).choice == "xla"
    assert fresh.times == 0


def test_a_reference_that_fails_ends_no_start_and_marks_nothing(clock, kept):
    reference, other = Runs(clock, 1.0, result=KeyError("blocks")), Runs(clock, 0.1)
    answer = asked(clock, kept, other, reference=reference)
    assert answer.choice == "xla"
    assert "nothing was measured" in answer.reason
    assert "blocks" in answer.reason
    assert other.times == 0
    assert not kept.is_marked(question(reference, other).key)


def test_other_bits_the_second_time_are_a_race(clock: Clock, kept: KeptChoices) -> None:
    class Racing(Runs):
        def __call__(self) -> Any:
            return super().__call__() + np.float32(1e-7) * self.times

    answer = asked(clock, kept, Racing(clock, 0.5))
    assert answer.choice == "xla"
    assert "other bits" in answer.reason


def test_a_question_that_cannot_be_asked_leaves_the_reference(clock, kept):
    def ask() -> Question:
        raise ValueError("no such array")

    answer = decide(ask, kept, clock=clock)
    assert answer == Answer(choice="xla", reason="nothing was measured: no such array")


def test_an_obstacle_is_told_and_nothing_runs(clock: Clock, kept: KeptChoices) -> None:
    reference, other = Runs(clock, 1.0), Runs(clock, 0.1)

    def ask() -> Question:
        found = question(reference, other)
        blocked = dataclasses.replace(found.other, obstacle="it needs compute capability 8.0")
        return dataclasses.replace(found, other=blocked)

    answer = decide(ask, kept, clock=clock)
    assert (answer.choice, reference.times, other.times) == ("xla", 0, 0)
    assert "compute capability" in answer.reason


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', "\0" * 9, '{"x": {"choice": "xla"}}'])
def test_a_torn_file_costs_a_measurement(text, clock, kept, tmp_path):
    (tmp_path / FILE).write_text(text)
    assert asked(clock, kept, Runs(clock, 0.5)).choice == "mosaic_gpu"
    assert kept.find(question(Runs(clock), Runs(clock)).key) is not None


def test_an_entry_of_another_form_is_measured_again(clock, kept, tmp_path):
    asked(clock, kept, Runs(clock, 0.5))
    entries = json.loads((tmp_path / FILE).read_text())
    (entry,) = entries.values()
    entry["seconds"] = -1.0
    (tmp_path / FILE).write_text(json.dumps(entries))
    assert asked(clock, kept, Runs(clock, 2.0)).choice == "xla"


def test_a_folder_that_cannot_be_written_keeps_nothing(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "cache", None):
        nowhere = KeptChoices(folder)
        assert asked(clock, nowhere, Runs(clock, 0.5)).choice == "mosaic_gpu"
        assert asked(clock, nowhere, Runs(clock, 2.0)).choice == "xla"


class Killed(BaseException):
    """Stands for a process that ends without a word."""


def test_what_ended_a_start_is_not_tried_by_the_next_one(clock, kept, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process removes no mark
        with pytest.raises(Killed):
            asked(clock, kept, Runs(clock, 0.5), exchange=_killing_at(4))
    other = Runs(clock, 0.5)
    answer = asked(clock, kept, other)
    assert (answer.choice, other.times) == ("xla", 0)
    assert "it failed in an earlier start, or ended it" in answer.reason
    assert asked(clock, kept, Runs(clock, 0.5), again=True).choice == "mosaic_gpu"
    assert asked(clock, kept, Runs(clock, 0.5)).choice == "mosaic_gpu", "the mark is gone"


def _killing_at(number: int) -> Callable[[np.ndarray], np.ndarray]:
    calls = iter(range(1, 99))

    def exchange(values: np.ndarray) -> np.ndarray:
        if next(calls) == number:
            raise Killed
        return values[None]

    return exchange


def test_zerojax_env_lists_what_was_measured_and_what_is_left_out(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))
    kept = KeptChoices(tmp_path)
    about = {"device": "NVIDIA H200", "devices": 8, "elements": 2**20, "ways": ["cudnn", "mine"]}
    asked(clock, kept, Runs(clock, 0.5), key={**about, "what": "adamw"})
    asked(clock, kept, Runs(clock, 2.0), key={**about, "what": "lion"})
    asked(clock, kept, Runs(clock, 2.0), key={"what": "of another version, which says less"})
    for _ in range(2):  # starts, or processes of one
        with kept.marked({**about, "what": "lamb"}) as leave_mark:
            leave_mark()
    assert main(["env"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "H200" in line]
    assert main(["env", "--json"]) == 0
    adamw, lion, lamb = [line.removeprefix("kernels").strip() for line in told]
    where = "on 8 x NVIDIA H200"
    assert adamw.startswith(
        f"adamw {where}, 1,048,576 elements: mosaic_gpu; mine is 2.00 times as fast as cudnn"
    )
    assert "xla; mine is 0.50 times as fast as cudnn" in lion
    assert lamb.startswith(f"lamb {where}: not used, because it failed")
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert [row["choice"] for row in rows] == ["mosaic_gpu", "xla", None]
    (tmp_path / FILE).write_text("{torn")
    assert main(["env"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "H200" in line]
    assert len(told) == 1, "what is left out has a file of its own"


def test_processes_that_measure_opposite_times_take_the_slowest_ones(tmp_path: Path) -> None:
    found = Processes(2).run(process(tmp_path, 0, 0.5), process(tmp_path, 1, 1.2))
    assert choices(found) == ["xla", "xla"]
    found = Processes(2).run(process(tmp_path, 0, 0.5), process(tmp_path, 1, 0.9))
    assert choices(found) == ["xla", "xla"], "what was measured together is kept"


def test_all_measure_where_one_has_no_answer(tmp_path: Path) -> None:
    full, empty = tmp_path / "full", tmp_path / "empty"
    Processes(1).run(process(full, 0, 0.5))
    found = Processes(2).run(process(full, 0, 1.2), process(empty, 1, 1.2))
    assert choices(found) == ["xla", "xla"]


def test_a_kernel_that_fails_on_one_process_is_taken_on_none(tmp_path: Path) -> None:
    failing = process(tmp_path, 1, 0.5, result=RuntimeError("no such card"))
    found = Processes(2).run(process(tmp_path, 0, 0.5), failing)
    assert choices(found) == ["xla", "xla"]
    assert "another process" in found[0].reason
    assert "no such card" in found[1].reason
