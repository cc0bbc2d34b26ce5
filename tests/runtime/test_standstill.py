"""Notes of processes without progress, and what they say together."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerojax.cli import main
from zerojax.forecasting.hlo.communication import find_groups
from zerojax.forecasting.hlo.program import read_program
from zerojax.forecasting.step_meetings import first_needs
from zerojax.runtime import standstill
from zerojax.runtime.hang_map import describe_hang
from zerojax.runtime.standstill import FOLDER, Meeting, Note, StandstillNotes, read_notes

NOW = 1000.0
STEP = "in step 8"


def note(process: int, **changes: Any) -> Note:
    """A process of four that waits in step 8."""
    values = {
        "num_processes": 4,
        "host": "a",
        "pid": 100 + process,
        "since": NOW - 60,
        "doing": STEP,
        "line": None,
        "entered": 9,
        "finished": 7,
        "program": "the training step",
        "meetings": (
            Meeting(what="all-gather.1 over data", processes=(process ^ 1,)),
            Meeting(what="all-reduce.2 over stage", processes=tuple({2, 3} - {process})),
        ),
    }
    return Note(process=process, **(values | changes))


def on_host(process: int, doing: str, **changes: Any) -> Note:
    return note(process, doing=doing, entered=7, meetings=(), **changes)


def test_who_waits_where_and_for_whom():
    """Each process that waits names the first collective that needs the missing one."""
    line = "train.py:3: sleep(9)"
    found = describe_hang([note(0), note(1), note(2), on_host(3, "in a callback", line=line)], NOW)
    waiting = {text.partition(" (")[0]: text for text in found}
    both = waiting["processes 0-1 wait in step 8"]
    assert "all-reduce.2" in both
    assert "needs process 3" in both
    assert "all-gather.1" in waiting["process 2 waits in step 8"]
    assert found[-1].startswith("process 3 on a, pid 103, is in a callback")
    assert "60 s after step 7" in found[-1]
    assert line in found[-1]
    assert found[-1].endswith("has not begun step 8")


def test_processes_without_a_note_are_missing():
    *_, last = found = describe_hang([note(0), note(2)], NOW)
    assert "needs process 1" in found[0]
    assert last.startswith("processes 1, 3 left no note")


def test_a_note_from_before_a_step_that_others_have_finished_does_not_count():
    old = note(1, doing="compiling, or in step 1", entered=0, finished=0, meetings=())
    *_, last = found = describe_hang([note(0), old, note(2), note(3)], NOW)
    assert found[0].startswith("process 0 waits in step 8")
    assert last.startswith("process 1 left no note")


def test_a_note_of_an_earlier_start_with_more_processes_does_not_count():
    found = describe_hang([*map(note, range(3)), note(7, finished=90, entered=90)], NOW)
    assert found[0].startswith("processes 0-1 wait in step 8")
    assert found[-1].startswith("process 3 left no note")


def test_a_step_that_every_process_has_begun_blames_no_process():
    found = describe_hang([note(process) for process in range(4)], NOW)
    assert found[0].startswith("processes 0-3 wait in step 8")
    assert "needs" not in found[0]
    assert "network" in found[1]


def test_different_programs_of_one_step_are_told_apart():
    found = describe_hang([*map(note, range(3)), note(3, program="the step for 64 rows")], NOW)
    assert [text.partition(" wait")[0] for text in found[:2]] == ["processes 0-2", "process 3"]
    assert "different shapes" in found[2]


def test_processes_outside_of_a_step_are_grouped_by_activity():
    notes = [on_host(process, "evaluating") for process in range(3)]
    notes.append(on_host(3, "saving step 7"))
    found = describe_hang(notes, NOW)
    assert found[0].startswith("processes 0-2 are evaluating")
    assert found[1].startswith("process 3 on a, pid 103, is saving step 7")
    assert "condition" in found[2]


def result(*, is_ready: bool) -> Any:
    return SimpleNamespace(is_ready=lambda: is_ready)


def test_a_note_is_written_once_and_removed_with_its_folder(tmp_path: Path):
    notes = StandstillNotes(tmp_path, 1, 2, line=lambda reads_data: f"a.py:{int(reads_data)}")
    meetings = [Meeting(what="all-gather.1 over data", processes=(0,))]
    for step, is_ready in ((1, True), (2, True), (3, False)):
        notes.entered(step, result(is_ready=is_ready), "the training step", lambda: meetings)
    notes.note("key", "waiting for data", 30.0)
    notes.wait(60)
    [written] = read_notes(tmp_path)
    assert (written.process, written.entered, written.finished) == (1, 3, 2)
    assert written.line == "a.py:1"
    assert written.meetings == tuple(meetings)
    assert 30 <= time.time() - written.since < 90
    path = tmp_path / FOLDER / "process-1.json"
    path.unlink()
    notes.note("key", "waiting for data", 40.0)
    notes.wait(60)
    assert not path.exists(), "it was written for this standstill"
    notes.note("other", "in a callback", 1.0)
    notes.wait(60)
    notes.forget()
    notes.wait(60)
    assert not (tmp_path / FOLDER).exists()


def test_the_limit_of_a_removal_holds_for_both_of_its_waits(tmp_path, monkeypatch):
    now, waits = [0.0], []

    def join(thread: Any, seconds: float) -> None:
        waits.append(seconds)
        now[0] += min(seconds, 0.75)

    notes = StandstillNotes(tmp_path, 1, 2)
    notes.note("key", "waiting for data", 30.0)
    notes.wait(60)
    monkeypatch.setattr(standstill, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(standstill.threading.Thread, "join", join)
    notes.remove(1.0)
    assert waits == [1.0, 0.25]


def test_files_that_are_no_notes_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / FOLDER
    folder.mkdir()
    for index, text in enumerate(("{", "[]", "null", '{"process": "x"}', "\x00")):
        (folder / f"process-{index}.json").write_text(text)
    assert read_notes(tmp_path) == []
    assert main(["where", str(tmp_path)]) == 0
    assert "no process" in capsys.readouterr().out
    values = json.dumps(
        {**vars(on_host(0, "in a callback", num_processes=2, since=time.time())), "meetings": []}
    )
    (folder / "process-0.json").write_text(values)
    assert main(["where", str(tmp_path)]) == 0
    assert "in a callback" in capsys.readouterr().out
    assert main(["where", str(tmp_path / "none")]) == 2


def test_the_first_collective_with_each_process():
    groups = {
        "within": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "across": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "all": [tuple(range(8))],
    }
    owners = [0, 0, 1, 1, 2, 2, 3, 3]
    assert first_needs(groups, owners, 0) == [("across", (1,)), ("all", (2, 3))]
    assert first_needs(groups, owners, 3) == [("across", (2,)), ("all", (0, 1))]


PROGRAM = """
HloModule m, entry_computation_layout={(f32[4]{0})->f32[4]{0}}, num_partitions=8

ENTRY main {
  p = f32[4]{0} parameter(0)
  a = f32[4]{0} all-reduce(p), channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=add
  ROOT b = f32[4]{0} collective-permute(a), channel_id=2, source_target_pairs={{0,1},{1,0},{6,7}}
}
"""  # noqa: E501


def test_all_groups_of_a_collective_are_read():
    groups = find_groups(read_program(PROGRAM), 8)
    assert groups == {"a": [(0, 1, 2, 3), (4, 5, 6, 7)], "b": [(0, 1), (6, 7)]}
