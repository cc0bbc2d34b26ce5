"""What ends a run of several processes from outside, one after the other, and that nothing is lost.

Real processes, real signals. Every end that Python sees is one plain sentence with the right exit
code, and what was ever written of a loss is, to the last bit, what an undisturbed run has.
"""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.fault_runs import Ended, Run
from zerojax.runtime import shutdown

pytestmark = pytest.mark.multihost

GO_ON = "; to go on: "


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, float]:
    """Loss of each step of a run of 2 processes that nothing happens to."""
    run = Run(tmp_path_factory.mktemp("undisturbed"))
    ended = run.run()
    assert ended.codes == [shutdown.OK] * 2, ended.outputs
    losses = dict(run.losses())
    assert sorted(losses) == list(range(1, 17))
    return losses


def finish(run: Run, undisturbed: dict[int, float]) -> None:
    ended = run.run()
    assert ended.codes == [shutdown.OK] * run.num_processes, ended.outputs
    run.check_losses(undisturbed)


def check_peer_lost(sentence: str, process: int, processes: int = 2) -> None:
    lost = f"process {1 - process}" if processes == 2 else "(process 0|another process)"
    assert re.match(f"zerojax: error: {lost} of this run has ended", sentence)
    assert f"(process {process} of {processes})" in sentence
    assert "resume" in sentence or GO_ON in sentence


def check_other_ended(ended: Ended, process: int) -> None:
    """With one sentence about a lost process, and without a C++ stack of JAX's runtime."""
    assert ended.codes[process] == shutdown.FAILED, ended.outputs
    check_peer_lost(ended.sentence(process), process, len(ended.codes))
    assert not re.search(r"^\*\*\* |@ +0x", ended.outputs[process], re.MULTILINE)


@pytest.mark.slow
def test_a_signal_a_kill_and_a_hang_in_one_run(tmp_path, undisturbed):
    run = Run(tmp_path)
    run.start(pace=0.1)
    run.wait_for_step(3)
    run.started[1].send_signal(signal.SIGTERM)
    ended = run.end()
    assert ended.codes == [shutdown.SAVED_AND_STOPPED] * 2, ended.outputs
    last = run.steps()[-1]
    assert 3 <= last < 16
    assert run.saved()[-1] == last, "the step at which all stopped"
    assert ended.sentence(1).startswith(f"zerojax: SIGTERM after step {last}: saved in ")
    told = f"zerojax: SIGTERM, sent to one of the run's processes, after step {last}: saved in "
    assert ended.sentence(0).startswith(told)
    assert "to go on: " in ended.outputs[0]

    run.start(fault={"process": 1, "at": "step", "count": last + 2, "what": "kill"})
    ended = run.end()
    assert ended.codes == [shutdown.FAILED, -signal.SIGKILL], ended.outputs
    check_peer_lost(ended.sentence(0), 0)

    hang = {"process": 1, "at": "step", "count": last + 3, "what": "hang"}
    ended = run.run("watch.step_timeout=3", fault=hang)
    assert ended.codes == [shutdown.HUNG] * 2, ended.outputs
    for process in range(2):
        sentence = ended.sentence(process)
        told = re.search(r"process (\d) of 2 has made no progress for (\d+) s", sentence)
        assert told, sentence
        assert (int(told[1]), int(told[2]) >= 3) == (process, True)
        assert "the limit is 3 s (watch.step_timeout)" in ended.sentence(process)
        stacks = (tmp_path / "run" / f"stacks-process-{process}.txt").read_text()
        assert "trainer.py" in stacks
    assert "fault_process.py" in stacks, "it shows where process 1 was"
    assert run.saved()[-1] >= last
    finish(run, undisturbed)


@pytest.mark.slow
def test_an_exception_on_one_process_ends_the_others(tmp_path, undisturbed):
    run = Run(tmp_path)
    ended = run.run(fault={"process": 1, "at": "data", "count": 7, "what": "raise"})
    assert ended.codes == [shutdown.FAILED, shutdown.FAILED], ended.outputs
    assert ended.sentence(1) == "zerojax: error: /data/tokens.bin: Input/output error"
    check_peer_lost(ended.sentence(0), 0)
    assert "the last checkpoint is step 4" in ended.sentence(0)
    assert run.saved() == [4], "the save in flight was not lost"
    finish(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize(("at", "count"), [("step", 1), ("step", 7), ("saved", 1), ("save", 2)])
def test_kill_9(tmp_path, undisturbed, process, at, count):
    """Process 0 is the coordinator: JAX ends the others when it is lost."""
    run = Run(tmp_path)
    ended = run.run(fault={"process": process, "at": at, "count": count, "what": "kill"})
    other = 1 - process
    assert ended.codes[process] == -signal.SIGKILL
    check_other_ended(ended, other)
    finish(run, undisturbed)


@pytest.mark.slow
def test_an_exception_on_the_coordinator(tmp_path, undisturbed):
    run = Run(tmp_path)
    ended = run.run(fault={"process": 0, "at": "step", "count": 7, "what": "raise"})
    assert ended.codes[0] == shutdown.FAILED
    assert "Input/output error" in ended.sentence(0)
    check_other_ended(ended, 1)
    assert run.saved() == [4]
    finish(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_stopped_process_is_found_by_the_others(tmp_path, undisturbed, process):
    run = Run(tmp_path)
    fault = {"process": process, "at": "step", "count": 7, "what": "stop"}
    run.start("watch.step_timeout=4", fault=fault)
    ended = run.end(stopped=[process])
    other = 1 - process
    assert ended.codes[other] == shutdown.HUNG, ended.outputs
    assert f"process {other} of 2 has made no progress for 4 s after step 6" in ended.sentence(
        other
    )
    assert ended.codes[process] == -signal.SIGKILL, "by this test, as a scheduler does"
    finish(run, undisturbed)


@pytest.mark.slow
def test_the_heartbeat_finds_a_stopped_process_where_the_watchdog_is_off(tmp_path, undisturbed):
    run = Run(tmp_path)
    fault = {"process": 1, "at": "step", "count": 7, "what": "stop"}
    heartbeat = {"ZEROJAX_HEARTBEAT_SECONDS": "10"}
    run.start("watch.step_timeout=0", fault=fault, environment=heartbeat)
    ended = run.end(stopped=[1])
    check_other_ended(ended, 0)
    finish(run, undisturbed)


@pytest.mark.slow
def test_who_waits_for_data_says_so(tmp_path, undisturbed):
    run = Run(tmp_path)
    fault = {"process": 1, "at": "data", "count": 7, "what": "hang"}
    ended = run.run("watch.step_timeout=3", fault=fault)
    assert ended.codes == [shutdown.HUNG] * 2, ended.outputs
    assert "it is waiting for data" in ended.sentence(1)
    assert "it is in step 7" in ended.sentence(0)
    finish(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "at", "count"),
    [
        ("term", "start", 0),
        ("term", "step", 1),
        ("int", "step", 6),
        ("term", "evaluate", 1),
        ("term", "save", 1),
        ("term", "saved", 2),
    ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_at_any_time_saves(tmp_path, undisturbed, processes, what, at, count):
    """Before the first step, while it compiles, in an evaluation and while a save is in flight."""
    run = Run(tmp_path, processes=processes)
    if processes == 1:
        run.settings = ("cpu_devices=2",)
    fault = {"process": processes - 1, "at": at, "count": count, "what": what}
    ended = run.run(fault=fault, pace=0.15)
    if (processes, at) == (1, "start"):
        assert ended.codes == [128 + signal.SIGTERM], ended.outputs
        assert "SIGTERM received while no step was running" in ended.sentence(0)
        assert run.saved() == []
        return
    assert ended.codes == [shutdown.SAVED_AND_STOPPED] * processes, ended.outputs
    last = max(run.steps(), default=0)
    assert run.saved()[-1] == last < 16
    name = {"term": "SIGTERM", "int": "SIGINT"}[what]
    if at == "start":  # nobody listened yet, but JAX
        name += ", sent to one of the run's processes,"
    expected = f"zerojax: {name} after step {last}: saved in {tmp_path}/run/checkpoints{GO_ON}"
    assert ended.sentence(processes - 1).startswith(expected)
    if processes == 1:
        assert run.run().codes == [shutdown.OK]
        assert run.steps() == list(range(1, 17))
    else:
        finish(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_signal_acts_at_once(tmp_path, processes):
    run = Run(tmp_path, processes=processes)
    run.start(fault={"process": 0, "at": "step", "count": 7, "what": "hang"})
    run.wait_for_step(5)  # reported once step 6 is under way
    for _ in range(2):
        time.sleep(3.0)  # with several processes, two close together are one request
        run.started[0].send_signal(signal.SIGTERM)
    ended = run.end(stopped=[1] * (processes - 1))
    if processes == 1:
        assert ended.codes == [-signal.SIGTERM]
    else:
        assert ended.codes[0] == 128 + signal.SIGTERM, ended.outputs
        assert ended.sentence(0) == (
            "zerojax: SIGTERM received again: the process ends at once, without saving"
        )
    assert run.saved() == [4]


@pytest.mark.slow
def test_four_processes(tmp_path):
    whole = Run(tmp_path / "whole", processes=4)
    assert whole.run().codes == [0] * 4
    run = Run(tmp_path / "run", processes=4)
    ended = run.run(fault={"process": 2, "at": "step", "count": 6, "what": "kill"})
    assert ended.codes[2] == -signal.SIGKILL
    for process in (0, 1, 3):
        check_other_ended(ended, process)
    check_peer_lost(ended.sentence(0), 0, 4)
    fault = {"process": 3, "at": "step", "count": 6, "what": "term"}
    ended = run.run(fault=fault, pace=0.1)
    assert ended.codes == [shutdown.SAVED_AND_STOPPED] * 4, ended.outputs
    finish(run, dict(whole.losses()))


SHAPES = {
    "float16": ("precision=fp16",),
    "pipeline": ("mesh.stage=2", "zero=1", "num_microbatches=2", "model.num_layers=2"),
    "files": ("opt_state=nvme", "slice_elements=1024", "min_elements=100"),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_signal_saves_whatever_the_state_is_made_of(tmp_path, shape):
    whole = Run(tmp_path / "whole", *SHAPES[shape])
    ended = whole.run()
    assert ended.codes == [shutdown.OK] * 2, ended.outputs
    run = Run(tmp_path / "run", *SHAPES[shape])
    ended = run.run(fault={"process": 1, "at": "step", "count": 5, "what": "term"}, pace=0.15)
    assert ended.codes == [shutdown.SAVED_AND_STOPPED] * 2, ended.outputs
    assert run.saved()[-1] == run.steps()[-1] < 16
    finish(run, dict(whole.losses()))


def test_the_table_of_codes_is_what_the_command_says():
    text = (Path(__file__).parents[2] / "zerojax" / "cli" / "train_command.py").read_text()
    for code in (shutdown.SAVED_AND_STOPPED, shutdown.HUNG, shutdown.INTERRUPTED):
        assert f" {code} " in text
