"""A signal during a step, a compilation or a wait that does not end: the process ends in time."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zerojax.config import ConfigError, WatchConfig
from zerojax.runtime import preemption
from zerojax.runtime.preemption import Interrupted, StopRequest, sigterm_raised
from zerojax.runtime.watchdog import Watchdog

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120.0

SCRIPT = """
import os, sys
import jax, jax.numpy as jnp, numpy as np, optax
import zerojax
from zerojax.config import CheckpointConfig, LogConfig, WatchConfig

def init(key):
    return {"w": jax.random.normal(key, (4, 4))}

def loss(model, batch):
    rest = jax.lax.fori_loop(0, batch["turns"][0], lambda i, x: jnp.tanh(x), batch["x"])
    return jnp.mean((model(batch["x"]) - jax.lax.stop_gradient(rest)) ** 2)

def batch(number):
    turns = np.full(4, 1 if number < 3 else 2**31 - 1, np.int32)
    return {"x": np.ones((4, 4), np.float32), "turns": turns}

zerojax.train(
    (init, lambda params, x: x @ params["w"]), {"zero": 1}, batch, loss=loss,
    optimizer=optax.sgd(1e-3), steps=9, run_dir=None, log=LogConfig(every=1),
    checkpoint=CheckpointConfig(path=sys.argv[1], every=2),
    callbacks=[lambda trainer, metrics: print("reported", int(metrics["step"]), flush=True)],
    watch=WatchConfig(stop_timeout=float(sys.argv[2])),
)
"""
"""Step 4 takes hours of one compiled loop."""


def processor_seconds(process: subprocess.Popen) -> float:
    user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def in_a_long_step(folder: Path, stop_timeout: float):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(stop_timeout)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    killer = threading.Timer(LIMIT, process.kill)
    killer.start()
    try:
        for line in process.stdout:
            if line == "reported 2\n":
                break
        begun = processor_seconds(process)  # step 3, and what is around it, needs none
        assert wait_for(lambda: processor_seconds(process) > begun + 1.0, LIMIT)
        yield process
    finally:
        killer.cancel()
        process.kill()
        process.communicate()


@pytest.mark.thorough
def test_a_step_that_does_not_end_is_given_up_and_the_last_checkpoint_named(tmp_path):
    with in_a_long_step(tmp_path / "kept", 1.0) as process:
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, error
    sentence = error.splitlines()[-1]
    assert sentence.startswith("zerojax: SIGTERM: the current work did not end within 1 s and ")
    assert f"; the last checkpoint is step 2 in {tmp_path / 'kept'}: call train again" in sentence
    assert "Traceback" not in error


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_long_step(number, tmp_path):
    with in_a_long_step(tmp_path / "kept", 0) as process:
        process.send_signal(number)
        time.sleep(preemption.SAME_REQUEST_SECONDS + 0.5)
        assert process.poll() is None
        process.send_signal(number)
        process.communicate()
    assert process.returncode in (128 + number, -number)


@pytest.fixture
def codes(monkeypatch) -> list[int]:
    """Exit codes with which this process would have ended."""
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.05)
    return []


def wait_for(condition, seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


@pytest.mark.thorough
class TestStopRequest:
    def test_what_does_not_end_in_time_is_ended(self, codes, capfd):
        with StopRequest(
            limit=lambda: 0.1, describe=lambda: "all is well", end=codes.append
        ) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert wait_for(lambda: codes)
            assert stop.is_due
        assert codes == [143]
        assert "did not end within 0 s and cannot be saved" in capfd.readouterr().err

    def test_a_description_that_hangs_is_not_waited_for(self, codes, capfd, monkeypatch):
        monkeypatch.setattr(preemption, "_TELL_SECONDS", 0.2)
        hang = threading.Event()
        with StopRequest(limit=lambda: 0.1, describe=hang.wait, end=codes.append):
            os.kill(os.getpid(), signal.SIGINT)
            assert wait_for(lambda: codes)
        hang.set()
        assert codes == [130]
        assert "saves are complete" in capfd.readouterr().err

    def test_once_the_step_is_over_nothing_is_ended(self, codes):
        with StopRequest(limit=lambda: 0.1, end=codes.append) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert wait_for(lambda: stop.is_due)
            stop.step_over()
            time.sleep(0.4)
        assert codes == []

    def test_saving_is_waited_for(self, codes):
        with StopRequest(limit=lambda: 0.1, end=codes.append) as stop:
            with stop.unhurried():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.4)
                assert codes == []
            assert wait_for(lambda: codes)

    def test_without_a_limit_nothing_is_ended(self, codes):
        with StopRequest(limit=lambda: None, end=codes.append):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        assert codes == []

    def test_signals_of_others_are_told_to_them_and_everything_is_given_back(self, codes):
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        handler = signal.getsignal(signal.SIGTERM)
        before = signal.set_wakeup_fd(writer)
        try:
            with sigterm_raised(), StopRequest(limit=lambda: None, end=codes.append):
                os.kill(os.getpid(), signal.SIGTERM)
                assert os.read(reader, 1) == bytes([signal.SIGTERM])
        finally:
            assert signal.set_wakeup_fd(before) == writer
            os.close(reader)
            os.close(writer)
        assert signal.getsignal(signal.SIGTERM) is handler
        assert preemption._watchers == []

    def test_a_signal_outside_of_the_steps_is_raised(self):
        def send() -> None:
            with sigterm_raised():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)

        with pytest.raises(Interrupted, match="while no step was running"):
            send()

    def test_a_signal_outside_of_the_steps_reaches_the_handler_of_the_caller(self):
        received = []
        before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
        try:
            with sigterm_raised():
                os.kill(os.getpid(), signal.SIGTERM)
            assert received == [signal.SIGTERM]
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with sigterm_raised():
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            signal.signal(signal.SIGTERM, before)


class TestLimit:
    def test_it_follows_the_longest_step_up_to_ten_minutes(self):
        config = WatchConfig()
        assert [config.stop_limit(x) for x in (None, 1.0, 40.0, 1800.0)] == [60, 60, 120, 600]

    def test_what_is_given_holds(self):
        assert WatchConfig(stop_timeout=5).stop_limit(1800.0) == 5
        assert WatchConfig(stop_timeout=0).stop_limit(1.0) is None
        with pytest.raises(ConfigError, match=r"stop_timeout: -1\.0 must be >= 0"):
            WatchConfig(stop_timeout=-1)

    def test_at_a_prompt_there_is_none_unless_it_is_given(self, monkeypatch):
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        assert Watchdog(WatchConfig()).stop_limit() is None
        assert Watchdog(WatchConfig(stop_timeout=7)).stop_limit() == 7
        monkeypatch.delattr(sys, "ps1")
        assert Watchdog().stop_limit() == 60
