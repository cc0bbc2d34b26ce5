"""What ends an engine: a process that is gone, one that hangs, numbers that are not finite."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from tests.deepspeed.test_engine import batch, initialize
from tests.support.process_groups import ROOT, free_port
from zerojax.config import WatchConfig
from zerojax.deepspeed_engine.engine_guard import Guard, _UnderWay
from zerojax.runtime import shutdown
from zerojax.runtime.watchdog import Watchdog
from zerojax.training.metrics.metric_files import read_metrics

pytestmark = pytest.mark.filterwarnings("ignore:scheduler WarmupDecayLR")
CONFIG = {
    "train_batch_size": 32,
    "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
    "gradient_clipping": 1.0,
    "steps_per_print": 1,
}
SECONDS = 6
LONGEST = 300.0


def run_two(folder, what: str, read: str) -> tuple[int, str]:
    """(exit code, all it said) of the process that is left."""
    address, started = f"127.0.0.1:{free_port()}", []
    script = str(ROOT / "tests" / "support" / "engine_fault_process.py")
    words = [sys.executable, "-u", script, str(folder / "kept"), what, read, str(SECONDS)]
    try:
        for index in range(2):
            group = {
                "PYTHONPATH": str(ROOT),
                "ZEROJAX_COORDINATOR": address,
                "ZEROJAX_NUM_PROCESSES": "2",
                "ZEROJAX_PROCESS_ID": str(index),
            }
            with (folder / f"output-{index}.txt").open("w") as output:
                started.append(
                    subprocess.Popen(words, env=os.environ | group, stdout=output, stderr=output)
                )
        code = started[0].wait(LONGEST)
    finally:
        for process in started:
            process.kill()
    assert started[1].wait() == -signal.SIGKILL
    return code, (folder / "output-0.txt").read_text()


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize("read", ["each", "none"])
def test_a_peer_that_is_killed_ends_the_other_with_a_sentence(tmp_path, read):
    code, said = run_two(tmp_path, "kill", read)
    assert code == shutdown.FAILED, said
    assert "process 1 of this run has ended; this process (process 0 of 2) noticed it" in said
    assert "the last checkpoint is step 3; run the same command again; load_checkpoint" in said


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize("read", ["each", "none"])
def test_a_peer_that_stands_still_ends_the_other_with_its_code(tmp_path, read):
    code, said = run_two(tmp_path, "stop", read)
    assert code == shutdown.HUNG, said
    # How long it stood still is measured: as much as it may, and until somebody looks.
    told = re.search(
        r"process 0 of 2 has made no progress for (\d+) s after step \d+: it is [^;]*; "
        r"the limit is (\d+) s \(watch.step_timeout\); the watchdog ends it",
        said,
    )
    assert told, said
    assert int(told[1]) >= int(told[2]) == SECONDS
    assert "in engine_fault_process.py" in said.replace(f'File "{ROOT}/tests/support/', "in "), (
        "stacks"
    )
    assert "load_checkpoint continues from the last save_checkpoint" in said


class Result:
    """What the devices take their time for."""

    def __init__(self) -> None:
        self.is_ready = False

    def block_until_ready(self) -> None:
        while not self.is_ready:
            time.sleep(0.01)


@pytest.mark.thorough
def test_the_script_of_a_loop_has_all_the_time_it_wants_but_no_step_has():
    codes: list[int] = []
    under_way = _UnderWay()
    config = WatchConfig(step_timeout=0.3)
    watchdog = Watchdog(config, sign=under_way.sign, end=codes.append)
    with watchdog, watchdog.during("in a step"):
        time.sleep(0.9)
        assert codes == [], "nothing is under way"
        results = [Result(), Result(), Result()]
        for result in results:
            under_way.follow(result)
        for result in results:
            time.sleep(0.2)
            assert codes == [], "one after the other is done in time"
            result.is_ready = True
        time.sleep(0.9)
        assert codes == [], "all are done"
        under_way.follow(last := Result())
        deadline = time.monotonic() + 30
        while not codes and time.monotonic() < deadline:
            time.sleep(0.01)
        last.is_ready = True
        assert codes[0] == shutdown.HUNG
    under_way.end()


def test_a_call_is_waited_for_even_where_nothing_is_under_way(monkeypatch):
    guard = Guard(WatchConfig(step_timeout=0.3), None)
    codes, has_ended = [], threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        has_ended.set()

    monkeypatch.setattr(guard.watchdog, "_end", end)
    with guard.during("waiting for data"):
        assert has_ended.wait(120)
    guard.close()
    assert shutdown.HUNG in codes


def test_threads_end_with_an_engine_that_is_never_closed():
    guard = Guard(WatchConfig(step_timeout=60.0, long_timeout=60.0), None)
    with guard.during("in step 1"):
        guard.begun(1, jnp.zeros(()))
    watching, stopping = guard.watchdog._thread, guard.watchdog._stopping
    assert watching.is_alive()
    del guard
    assert stopping.wait(60)
    watching.join(60)
    assert not watching.is_alive()


def bad_batch(step):
    return {name: rows * np.float32(1e30) for name, rows in batch(step).items()}


def train(engine, steps):
    for step in range(steps):
        engine.train_batch(bad_batch(step))


def train_and_close(engine, steps, error=None):
    with engine:
        train(engine, steps)
        if error is not None:
            raise error


@pytest.mark.thorough
def test_an_error_is_told_once_and_a_checkpoint_mends_it(tmp_path):
    """By `train_batch`, which reads a step when the next one is under way."""
    engine = initialize(CONFIG, run_dir=tmp_path / "log")
    engine.train_batch(batch(0))
    engine.save_checkpoint(tmp_path / "kept")
    with pytest.raises(FloatingPointError):
        train(engine, 20)
    engine.load_checkpoint(tmp_path / "kept")
    engine.train_batch(batch(1))
    assert engine.was_step_applied()
    with pytest.raises(FloatingPointError, match="5 reports in a row") as told:
        train_and_close(engine, 20)
    assert engine.global_steps == 2 + 6
    assert not hasattr(told.value, "__notes__")
    assert told.value.__context__ is None
    engine.close()
    assert read_metrics(tmp_path / "log").train[-1]["step"] == 2 + 5


def test_what_only_closing_finds_out_is_told_once_by_it(tmp_path):
    engine = initialize(CONFIG, run_dir=tmp_path)
    with pytest.raises(FloatingPointError, match="5 reports in a row"):
        train_and_close(engine, 5)
    engine.close()
    assert len(read_metrics(tmp_path).train) == 5


def test_an_error_of_the_loop_is_what_is_told(tmp_path):
    engine = initialize(CONFIG, run_dir=tmp_path)
    with pytest.raises(KeyError, match="of the loop") as told:
        train_and_close(engine, 5, KeyError("of the loop"))
    (note,) = told.value.__notes__
    assert note.startswith("Also: loss ")
    engine.close()


NEVER_CLOSED = """
import sys, warnings
from tests.support.engine_process import CONFIG, Regression, batch
warnings.simplefilter("ignore")
import zerojax
config = CONFIG | {"steps_per_print": 1, "gradient_accumulation_steps": 1}
engine = zerojax.initialize(model=Regression, config=config, run_dir=sys.argv[1])
for step in range(3):
    engine.train_batch(batch(step, 0, 16))
if sys.argv[2] == "failing":
    raise KeyError("of the script")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["over", pytest.param("failing", marks=pytest.mark.slow)])
def test_a_script_that_does_not_close_its_engine_loses_no_line_and_ends_in_silence(how, tmp_path):
    """Python clears modules before it closes generators: what had stayed open failed there."""
    ended = subprocess.run(
        [sys.executable, "-c", NEVER_CLOSED, str(tmp_path / "log"), how],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert [row["step"] for row in read_metrics(tmp_path / "log").train] == [1, 2, 3]
    if how == "over":
        assert (ended.returncode, ended.stderr) == (0, "")
    else:
        assert ended.returncode == 1
        assert ended.stderr.splitlines()[-1] == "KeyError: 'of the script'"
