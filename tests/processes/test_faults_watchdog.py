"""The watchdog by itself: what is a sign of life, what it says, and that it ends what hangs."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zerojax.config import ConfigError, WatchConfig
from zerojax.runtime import shutdown
from zerojax.runtime.watchdog import Watchdog

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.4


class Ends:
    """What a watchdog calls in place of ending the process."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.has_ended = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.has_ended.set()


def make(ends: Ends, tmp_path: Path | None = None, **limits: float) -> Watchdog:
    config = WatchConfig(**({"step_timeout": LIMIT, "long_timeout": 60.0} | limits))
    return Watchdog(config, folder=tmp_path, end=ends)


@pytest.mark.thorough
def test_a_step_that_hangs_is_ended_and_told(tmp_path, capfd):
    ends = Ends()
    with make(ends, tmp_path) as watchdog, watchdog.during("in step 3"):
        watchdog.finished(2)
        assert ends.has_ended.wait(60)
    assert ends.codes[0] == shutdown.HUNG
    errors = capfd.readouterr().err
    assert "after step 2: it is in step 3; the limit is 0.4 s (watch.step_timeout)" in errors
    assert "run the same command again to resume" in errors
    for text in (errors, (tmp_path / "stacks-process-0.txt").read_text()):
        assert "test_a_step_that_hangs_is_ended_and_told" in text, "where the main thread is"


@pytest.mark.thorough
def test_signs_of_life_keep_it_quiet():
    ends = Ends()
    with make(ends, step_timeout=3.0) as watchdog, watchdog.during("in a step"):
        began, step = time.monotonic(), 0
        while time.monotonic() - began < 4.5:
            time.sleep(0.1)
            step += 1
            watchdog.finished(step)
    assert ends.codes == []


@pytest.mark.thorough
def test_what_is_rare_has_its_own_limit():
    ends = Ends()
    with make(ends) as watchdog, watchdog.during("in a step"):
        with watchdog.during("compiling", is_long=True):
            time.sleep(4 * LIMIT)
        assert ends.codes == []
        with watchdog.during("waiting for data"):
            assert ends.has_ended.wait(60)


@pytest.mark.thorough
def test_what_has_a_limit_of_its_own_is_ended_by_that_alone(capfd):
    ends = Ends()
    watchdog = make(ends, step_timeout=60.0)
    with watchdog, watchdog.during("trying a kernel", limit=LIMIT):
        assert ends.has_ended.wait(60)
    errors = capfd.readouterr().err
    assert "it is trying a kernel; the limit is 0.4 s" in errors
    assert "raised" not in errors, "no setting changes it"
    patient = make(ends := Ends(), step_timeout=LIMIT)
    with patient, patient.during("trying a kernel", limit=60.0):
        time.sleep(2 * LIMIT)
    assert ends.codes == []


@pytest.mark.thorough
def test_what_is_rare_is_ended_too(capfd):
    ends = Ends()
    watchdog = make(ends, step_timeout=60.0, long_timeout=LIMIT)
    with watchdog, watchdog.during("saving step 3", is_long=True):
        assert ends.has_ended.wait(60)
    assert "saving step 3; the limit is 0.4 s (watch.long_timeout)" in capfd.readouterr().err


@pytest.mark.thorough
def test_at_half_of_the_limit_it_says_what_takes_so_long(capfd):
    ends = Ends()
    with make(ends, step_timeout=2.0) as watchdog, watchdog.during("waiting for data"):
        assert ends.has_ended.wait(60)
    errors = capfd.readouterr().err
    assert "it is waiting for data; the watchdog ends it after 2 s" in errors
    assert errors.index("the watchdog ends it after 2 s") < errors.index("most recent call first")


def test_off_starts_no_thread():
    before = set(threading.enumerate())  # others may end meanwhile
    with Watchdog(WatchConfig(step_timeout=0)), Watchdog():
        assert set(threading.enumerate()) <= before


def test_a_default_limit_grows_with_the_steps():
    limit = WatchConfig().step_limit
    assert limit(None) == WatchConfig().long_timeout, "the first step may compile"
    assert limit(2.0) == 600
    assert limit(900.0) == 2700
    assert WatchConfig(step_timeout=5).step_limit(900.0) == 5


def test_limits_are_checked():
    with pytest.raises(ConfigError, match="must be >= 0"):
        WatchConfig(step_timeout=-1)
    with pytest.raises(ConfigError, match="must be above 0"):
        WatchConfig(long_timeout=0)


def test_steps_are_measured_without_what_compiles():
    now = [0.0]
    watchdog = Watchdog(WatchConfig(), clock=lambda: now[0])
    for step, at in ((1, 500.0), (2, 503.0), (4, 513.0)):
        now[0] = at
        watchdog.finished(step)
    assert watchdog._longest == 5.0
    watchdog.plan_changed()
    now[0] = 2000.0
    watchdog.finished(5)
    assert watchdog._longest is None


@pytest.mark.parametrize(("processes", "before"), [(1, 8.0), (2, 60.0)])
def test_other_processes_may_compile_the_first_step_longer(processes, before):
    """One process finds the compiled step in its cache, another compiles it for minutes."""
    config = WatchConfig(step_timeout=8, long_timeout=60)
    watchdog = Watchdog(config, processes=processes)
    limits = []
    with watchdog.during("in a step"):
        limits.append(watchdog._limit(watchdog._phase))
        watchdog.finished(1)
        limits.append(watchdog._limit(watchdog._phase))
        watchdog.plan_changed()
        limits.append(watchdog._limit(watchdog._phase))
    assert limits == [before, 8.0, before]


@pytest.mark.parametrize("options", [{"is_apart": True}, {"is_long": True}])
def test_the_longest_step_has_no_evaluation_in_it(options):
    now = [0.0]
    watchdog = Watchdog(WatchConfig(), clock=lambda: now[0])
    watchdog.finished(1)
    now[0] = 5.0
    watchdog.finished(2)
    with watchdog.during("evaluating", **options):
        now[0] = 1800.0
    now[0] = 1806.0
    watchdog.finished(3)
    assert watchdog._longest == 5.0, "since the evaluation came between steps 2 and 3"
    now[0] = 1813.0
    watchdog.finished(4)
    assert watchdog._longest == 7.0


HANGS = """
import ctypes, sys
from zerojax.runtime import watchdog
from zerojax.config import WatchConfig
watchdog.NET_SECONDS = 1.0
config = WatchConfig(step_timeout=1.0)
with watchdog.Watchdog(config, process=1, processes=int(sys.argv[1])) as dog:
    dog.finished(0)
    with dog.during("in step 1"):
        import time; time.sleep(0.5)
        {hang}
"""


def hang(statement: str, processes: int) -> subprocess.CompletedProcess[str]:
    code = HANGS.format(hang=statement)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(processes)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.thorough
def test_a_main_thread_inside_of_c_is_ended():
    ended = hang("ctypes.CDLL(None).sleep(100)", processes=1)
    assert ended.returncode == shutdown.HUNG, ended.stderr
    assert "it is in step 1" in ended.stderr


@pytest.mark.thorough
def test_a_net_below_catches_what_keeps_the_interpreter():
    """`PyDLL` does not release the interpreter's lock: no Python thread gets a turn."""
    ended = hang("ctypes.PyDLL(None).sleep(100)", processes=2)
    assert ended.returncode == shutdown.FAILED, ended.stderr
    assert "Timeout" in ended.stderr
    assert 'File "<string>", line' in ended.stderr


@pytest.mark.thorough
def test_time_in_which_the_process_was_stopped_does_not_count():
    """As after Ctrl-Z, or with a laptop closed."""
    code = HANGS.format(hang="print('here', flush=True); time.sleep(3); print('done')")
    code = code.replace("step_timeout=1.0", "step_timeout=6.0")
    process = subprocess.Popen(
        [sys.executable, "-c", code, "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(7)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0] == "done\n"
        assert process.returncode == 0
    finally:
        process.kill()
