"""Runs of several processes for tests of what ends them: started, watched, read back."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerojax.training.metrics.metric_files import read_metrics

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
model: {num_layers: 1, num_heads: 2, embed_dim: 32, max_seq_len: 32}
data: {seq_len: 32}
mesh: {zero: 2, persistence_threshold: 100}
optimizer: {schedule: constant, warmup_steps: 2}
precision: fp32
global_batch_size: 16
steps: 16
eval_every: 6
eval_batches: 1
checkpoint: {every: 4}
log: {every: 1, console: lines, tensorboard: false}
"""
_OF_A_MAP = (
    r" waits? in step | left no note|, without progress for |has begun step|different things"
)
LONGEST = 240.0
"""Seconds that any of these runs gets, on a machine that does other things as well."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How the processes of a run ended.

    Attributes:
      codes: exit code of each; -n: signal n.
      outputs: of each, standard output and standard error together.
      seconds: from when the first of them ended to the end of the last.
    """

    codes: list[int]
    outputs: list[str]
    seconds: float

    def sentence(self, process: int) -> str:
        """What zerojax itself says of the end of a process: one line, without the map of a hang."""
        lines = self.outputs[process].splitlines()
        said = [
            line
            for line in lines
            if line.startswith("zerojax: ")
            and "after " not in line[-30:]
            and not re.search(_OF_A_MAP, line)
        ]
        assert len(said) == 1, self.outputs[process]
        return said[0]


class Run:
    """One run of `zerojax train`, in a folder of its own that later runs resume from."""

    def __init__(self, folder: Path, *settings: str, processes: int = 2) -> None:
        self.folder, self.settings, self.num_processes = folder, settings, processes
        self.started: list[subprocess.Popen[str]] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tiny.yaml").write_text(CONFIG, encoding="utf-8")

    def start(
        self,
        *settings: str,
        fault: Mapping[str, Any] | None = None,
        pace: float = 0.0,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the processes.

        Args:
          settings: laid over those of the run.
          fault, pace: see `tests.support.fault_process`.
          before: words before the command.
          environment: of the processes, beside what they have anyway.
        """
        port = _free_port()
        words = [sys.executable, "-u", "-m", "tests.support.fault_process", "train", "tiny.yaml"]
        words += ["cpu_devices=1", "run_dir=run", *self.settings, *settings]
        self.started = []
        for index in range(self.num_processes):
            variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
            variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiling is most of a run's time
            variables["PACE"] = str(pace)
            if fault is not None:
                variables["FAULT"] = json.dumps(fault)
            if self.num_processes > 1:
                variables |= {
                    "ZEROJAX_COORDINATOR": f"127.0.0.1:{port}",
                    "ZEROJAX_NUM_PROCESSES": str(self.num_processes),
                    "ZEROJAX_PROCESS_ID": str(index),
                }
            output = (self.folder / f"output-{index}.txt").open("w")
            with output:
                process = subprocess.Popen(
                    [*before, *words],
                    cwd=self.folder,
                    env=variables,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            self.started.append(process)

    def wait_for_step(self, step: int) -> None:
        """Returns when that step has been reported."""
        for steps in self._polled():
            if steps and steps[-1] >= step:
                return

    def _polled(self) -> Iterator[list[int]]:
        deadline = time.monotonic() + LONGEST
        while time.monotonic() < deadline:
            codes = [process.poll() for process in self.started]
            yield self.steps()
            assert codes == [None] * len(codes), self.read_outputs()
            time.sleep(0.02)
        raise AssertionError(f"no such step within {LONGEST:g} s: {self.read_outputs()}")

    def end(self, stopped: Sequence[int] = ()) -> Ended:
        """Waits for all processes, those apart that somebody has stopped: these are killed then."""
        first = None
        deadline = time.monotonic() + LONGEST
        waiting = [index for index in range(self.num_processes) if index not in stopped]
        try:
            while waiting and time.monotonic() < deadline:
                waiting = [index for index in waiting if self.started[index].poll() is None]
                if first is None and len(waiting) < self.num_processes - len(stopped):
                    first = time.monotonic()
                time.sleep(0.02)
            ended = time.monotonic()
            assert not waiting, f"processes {waiting} have not ended: {self.read_outputs()}"
        finally:
            self.kill()
        codes = [process.wait() for process in self.started]
        return Ended(codes, self.read_outputs(), ended - (first or ended))

    def kill(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)

    def run(self, *settings: str, **options: Any) -> Ended:
        """`start` and `end`."""
        self.start(*settings, **options)
        return self.end()

    def read_outputs(self) -> list[str]:
        paths = [self.folder / f"output-{index}.txt" for index in range(self.num_processes)]
        return [path.read_text(encoding="utf-8", errors="replace") for path in paths]

    def steps(self) -> list[int]:
        return [step for step, _ in self.losses()]

    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) as they were written, steps that were done twice included."""
        path = self.folder / "run" / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [(row["step"], row["loss"]) for row in rows if row["kind"] == "train"]

    def saved(self) -> list[int]:
        """Steps whose checkpoints are whole."""
        folder = self.folder / "run" / "checkpoints"
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        return sorted(int(name) for name in names if name.isdigit())

    def check_losses(self, expected: Mapping[int, float]) -> None:
        """Every loss that was ever written is, to the last bit, that of the undisturbed run."""
        assert self.losses() == [(step, expected[step]) for step in self.steps()]
        final = [row["step"] for row in read_metrics(self.folder / "run").train]
        assert final == sorted(expected), "no step is missing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
