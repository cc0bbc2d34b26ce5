"""Measured choice of kernels: by an injected clock and exchange, without a GPU."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from pallas_kernels.choice import missing
from tests.small_models import (
    apply_functions,
    init_functions,
    reference_model,
    regression_loss,
)
from tests.trajectories import regression_batch
from zerojax.cli import main
from zerojax.training.tuning import (
    Answer,
    KeptChoices,
    Question,
    Way,
    decide,
    measured_choices,
    tuned_plan,
)
from zerojax.training.tuning.kept_choices import FILE

RIGHT = np.arange(4.0, dtype=np.float32)


class Clock:
    """Time that passes where a way runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Runs:
    """A way that takes given seconds in turn, and counts how often it ran.

    Args:
      seconds: of each call; the last one goes on.
      result: what it computes; an exception is raised.
    """

    def __init__(self, clock: Clock, *seconds: float, result: Any = RIGHT) -> None:
        self.clock, self.seconds, self.result, self.times = clock, seconds, result, 0

    def __call__(self) -> Any:
        self.times += 1
        self.clock.now += self.seconds[min(self.times, len(self.seconds)) - 1]
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def question(reference: Runs, other: Runs, **key: Any) -> Question:
    return Question(
        title="a sum",
        key={"what": "sum", "source": "1", **key},
        reference=Way(name="xla", run=reference),
        other=Way(name="mosaic_gpu", run=other),
        difference=tuned_plan.difference,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kept(tmp_path: Path) -> KeptChoices:
    return KeptChoices(tmp_path)


def asked(clock: Clock, kept: KeptChoices, other: Runs, **more: Any) -> Answer:
    key = more.pop("key", {})
    reference = more.pop("reference", None) or Runs(clock, 1.0)
    return decide(lambda: question(reference, other, **key), kept, clock=clock, **more)


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
def test_it_has_to_be_faster_by_three_percent(
    seconds: float, choice: str, clock: Clock, kept: KeptChoices
) -> None:
    assert asked(clock, kept, Runs(clock, seconds)).choice == choice


def test_noise_leaves_the_reference_and_nothing_is_kept(clock: Clock, kept: KeptChoices) -> None:
    noisy = Runs(clock, 0.1, 0.1, 0.1, 0.2, 0.9, 0.1, 0.8, 0.3, 0.9, 0.1)
    answer = asked(clock, kept, noisy)
    assert answer.choice == "xla"
    assert "too noisy" in answer.reason
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
def test_a_wrong_kernel_is_refused_also_where_it_is_kept(
    name: str, clock: Clock, kept: KeptChoices
) -> None:
    result, reason = WRONG[name]
    assert asked(clock, kept, Runs(clock, 0.5)).choice == "mosaic_gpu"
    answer = asked(clock, kept, Runs(clock, 0.5, result=result))
    assert answer.choice == "xla"
    with pytest.raises(AssertionError, match=f"(?s){reason}"):
        raise AssertionError(answer.reason)


def test_other_bits_the_second_time_are_a_race(clock: Clock, kept: KeptChoices) -> None:
    class Racing(Runs):
        def __call__(self) -> Any:
            return super().__call__() + np.float32(1e-7) * self.times

    answer = asked(clock, kept, Racing(clock, 0.5))
    assert answer.choice == "xla"
    assert "other bits" in answer.reason


def test_a_question_that_cannot_be_asked_leaves_the_reference(
    clock: Clock, kept: KeptChoices
) -> None:
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


# Files


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', "\0" * 9, '{"x": {"choice": "xla"}}'])
def test_a_torn_file_costs_a_measurement(
    text: str, clock: Clock, kept: KeptChoices, tmp_path: Path
) -> None:
    (tmp_path / FILE).write_text(text)
    assert asked(clock, kept, Runs(clock, 0.5)).choice == "mosaic_gpu"
    assert kept.find(question(Runs(clock), Runs(clock)).key) is not None


def test_an_entry_of_another_form_is_measured_again(
    clock: Clock, kept: KeptChoices, tmp_path: Path
) -> None:
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


def test_what_ended_a_start_is_not_tried_by_the_next_one(
    clock: Clock, kept: KeptChoices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process removes no mark
        with pytest.raises(Killed):
            asked(clock, kept, Runs(clock, 0.5), exchange=_killing_at(3))
    other = Runs(clock, 0.5)
    answer = asked(clock, kept, other)
    assert (answer.choice, other.times) == ("xla", 0)
    assert "an earlier start ended while trying it" in answer.reason
    assert asked(clock, kept, Runs(clock, 0.5), again=True).choice == "mosaic_gpu"
    assert asked(clock, kept, Runs(clock, 0.5)).choice == "mosaic_gpu", "the mark is gone"


def _killing_at(number: int) -> Callable[[np.ndarray], np.ndarray]:
    calls = iter(range(1, 99))

    def exchange(values: np.ndarray) -> np.ndarray:
        if next(calls) == number:
            raise Killed
        return values[None]

    return exchange


# Several processes


class Processes:
    """Threads that exchange numbers as processes do."""

    def __init__(self, number: int) -> None:
        self.rows: list[Any] = [None] * number
        self.barrier = threading.Barrier(number, timeout=20)

    def exchange(self, process: int) -> Callable[[np.ndarray], np.ndarray]:
        def call(values: np.ndarray) -> np.ndarray:
            self.rows[process] = values
            self.barrier.wait()
            found = np.stack(self.rows)
            self.barrier.wait()
            return found

        return call

    def run(self, *calls: Callable[[Any], Answer]) -> list[Answer]:
        answers: list[Any] = [None] * len(calls)

        def one(process: int) -> None:
            answers[process] = calls[process](self.exchange(process))

        threads = [threading.Thread(target=one, args=(k,)) for k in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert not any(thread.is_alive() for thread in threads)
        return answers


def process(folder: Path, number: int, seconds: float, **options: Any) -> Callable[[Any], Answer]:
    def call(exchange: Any) -> Answer:
        clock = Clock()
        other = Runs(clock, seconds, **options)
        return asked(clock, KeptChoices(folder, number), other, exchange=exchange)

    return call


def choices(answers: list[Answer]) -> list[str]:
    return [answer.choice for answer in answers]


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


# Plans


def plan_for(**options: Any) -> zerojax.Plan:
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    return zerojax.make_plan(
        reference_model("gpt2", max_seq_len=16, embed_dim=32, num_layers=2),
        options.pop("mesh", {"data": 8}),
        example_batch={"tokens": tokens, "targets": tokens},
        optimizer=options.pop("optimizer", zerojax.adamw(1e-3, mask=_no_biases)),
        zero=3,
        persistence_threshold=0,
        precision="fp32",
        **options,
    )


def _no_biases(params: Any) -> Any:
    return {name: "bias" not in name for name in params}


def test_on_a_cpu_nothing_is_measured() -> None:
    plan = plan_for()
    assert zerojax.tune(plan) is plan
    assert "no NVIDIA GPUs" in tuned_plan.why_not_measured(plan)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices are taken for GPUs."""
    monkeypatch.setattr(tuned_plan, "is_on_gpus", lambda plan: True)
    monkeypatch.setattr(tuned_plan, "_KERNEL", "interpret")


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.usefixtures("on_gpus")
def test_a_plan_has_the_choices_and_says_them(
    monkeypatch: pytest.MonkeyPatch, kept: KeptChoices
) -> None:
    """The kernels run in interpret mode; which one wins is up to the clock alone."""
    monkeypatch.setattr(measured_choices, "_times", lambda *_: [[1.0] * 7, [0.5] * 7])
    monkeypatch.setattr(tuned_plan, "MAX_ARRAYS", 3)
    plan = plan_for()
    tuned = zerojax.tune(plan, kept=kept)
    chosen = {what: one.implementation for what, one in tuned.program.kernels.items()}
    assert chosen == {"update": "interpret", "statistics": "interpret"}
    said = [reason for reason in tuned.reasons if "times as fast here" in reason]
    assert [reason.partition(":")[0] for reason in said] == [
        "optimizer update by interpret",
        "gradient statistics by interpret",
    ]
    assert tuned.fingerprint == plan.fingerprint


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.usefixtures("on_gpus")
def test_both_ways_are_timed_in_place_on_the_sizes_of_the_plan(
    kept: KeptChoices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the clock of the machine: interpreted kernels lose, by far."""
    monkeypatch.setattr(measured_choices, "NOISE", float("inf"))
    tuned = zerojax.tune(plan_for(), kept=kept)
    for chosen in tuned.program.kernels.values():
        assert chosen.implementation == "xla"
        assert "interpret is 0." in chosen.reason
        assert "times as fast here, measured" in chosen.reason


def test_what_was_asked_for_is_not_measured(on_gpus: None) -> None:
    for options in ({"kernels": "xla"}, {"tune": "off"}, {"deterministic": "mesh"}):
        plan = plan_for(**options)
        assert zerojax.tune(plan) is plan
        assert tuned_plan.why_not_measured(plan)


TINY = [
    *("cpu_devices=8", "steps=1", "model.num_layers=1", "model.embed_dim=16", "model.num_heads=2"),
    *("model.vocab_size=64", "data.seq_len=16", "model.max_seq_len=16", "global_batch_size=8"),
]


def test_the_command_prints_what_was_chosen(
    on_gpus: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))
    answers = iter(["one", "two"])
    monkeypatch.setattr(
        tuned_plan, "decide", lambda *_, **__: Answer(choice="xla", reason=next(answers))
    )
    assert main(["tune", *TINY]) == 0
    told = capsys.readouterr().out.splitlines()
    assert sorted(told[1:]) == ["  statistics: xla (one)", "  update: xla (two)"]


def test_the_command_refuses_what_leaves_nothing_to_measure(capsys: pytest.CaptureFixture) -> None:
    assert main(["tune", *TINY]) == 2
    assert "nothing to measure: the devices are no NVIDIA GPUs" in capsys.readouterr().err
    assert main(["tune", *TINY, "kernels=xla"]) == 2
    assert "kernels=xla asks for them; use kernels=auto" in capsys.readouterr().err


def test_a_plan_says_why_a_kernel_was_not_taken() -> None:
    plan, why = plan_for(), "mosaic_gpu was not taken: its results are wrong"
    answers = {what: Answer(choice="xla", reason=why) for what in ("update", "statistics")}
    reasons = tuned_plan.with_answers(plan, answers).reasons
    for title in ("optimizer update", "gradient statistics"):
        assert reasons.count(f"{title} by xla: {why}") == 1


def test_the_sample_has_small_and_large_arrays_within_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_for()
    whole = {n: x.sharding.shard_shape(x.shape) for n, x in plan.abstract_state["params"].items()}
    monkeypatch.setattr(tuned_plan, "MAX_ARRAYS", 5)
    assert len(found := tuned_plan.sample_shapes(plan)) == 5
    assert all(whole[name] == shape for name, shape in found.items())
    monkeypatch.setattr(tuned_plan, "_room", lambda plan: 600 * tuned_plan.BYTES_PER_ELEMENT)
    cut = tuned_plan.sample_shapes(plan)
    assert cut.keys() == found.keys()
    assert sum(int(np.prod(shape)) for shape in cut.values()) <= 600 + 5 * tuned_plan.SMALLEST
    assert any(cut[name] != whole[name] for name in cut)


def test_a_key_changes_with_what_an_answer_hangs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, shapes = plan_for(), {"x": (1000,)}
    key = tuned_plan.key_of(plan, "adamw", shapes)
    assert key == tuned_plan.key_of(plan, "adamw", {"x": (1010,)}), "sizes are rounded"
    assert key != tuned_plan.key_of(plan, "adamw", {"x": (3000,)})
    assert key != tuned_plan.key_of(plan, "lion", shapes)
    monkeypatch.setattr(tuned_plan, "source_hash", lambda: "another")
    assert key != tuned_plan.key_of(plan, "adamw", shapes)


# Runs that go on


def test_a_run_that_goes_on_with_other_kernels_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The first part of the run says that its update was a kernel's."""

    def train(steps: int) -> None:
        model = (init_functions, apply_functions)
        mesh, folder = {"zero": 1}, str(tmp_path / "run")
        zerojax.train(
            model, mesh, regression_batch, loss=regression_loss, steps=steps, checkpoint=folder
        ).close()

    as_dict = zerojax.Plan.as_dict
    with monkeypatch.context() as patch:
        kernels = {"update": "mosaic_gpu", "statistics": "xla"}
        patch.setattr(zerojax.Plan, "as_dict", lambda plan: {**as_dict(plan), "kernels": kernels})
        train(1)
    train(2)
    told = capsys.readouterr().out
    assert "update by xla, and by mosaic_gpu when the checkpoint of step 1 was written" in told
    train(3)
    assert "when the checkpoint" not in capsys.readouterr().out
