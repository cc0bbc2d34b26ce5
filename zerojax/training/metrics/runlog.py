"""Writes a run's log: reports, rates, and MFU (model FLOPs utilization) from published peaks."""

import contextlib
import importlib
import json
import math
import operator
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from zerojax.config import ConfigError, LogConfig
from zerojax.config.display import printable
from zerojax.config.late_dataclasses import dataclass
from zerojax.hardware.gpus import gpu_of_device
from zerojax.runtime.redaction import redact
from zerojax.runtime.user_files import open_appending, open_to_everybody, replace_text, replacing
from zerojax.training.metrics import console
from zerojax.training.metrics.images import IMAGE, as_pixels, encode_png, image_file
from zerojax.training.metrics.loss_spikes import SpikeDetector
from zerojax.training.metrics.metric_files import (
    FILE_NAME,
    EventWriter,
    MetricsFile,
    first_loss,
    read_metrics,
    set_aside,
)
from zerojax.training.metrics.stragglers import ProcessTimes, Stragglers, spread

TAGS = {
    "tokens_per_second_per_device": "speed/tokens_per_second_per_device",
    "tflops_per_device": "speed/tflops_per_device",
    "mfu": "speed/mfu",
    "step_seconds": "speed/step_seconds",
    "memory_in_use": "memory/in_use_bytes",
    "memory_peak": "memory/peak_bytes",
}
SPENT = "spent_"
"""Prefix of metric names for the seconds spent on an activity (`stragglers.ACTIVITIES`) since the
last report."""
SETTINGS = ("plan.txt", "plan.json", "config.json")
MAX_REASONS = 20
MEMORY_SECONDS = 0.1
"""Seconds for which reports repeat a measurement of the memory, which takes a quarter of a report's
time."""
STILL_COMPILING_SECONDS = 30.0
"""Seconds between lines that report a compilation in progress."""


class Work(Protocol):
    """Numbers of tokens and FLOPs of steps, summed over all devices."""

    def tokens(self, after: int, until: int) -> int | None:
        """Returns the tokens of the steps `after` + 1 to `until`; None if they are not known."""
        ...

    def flops(self, after: int, until: int) -> float:
        """Returns the floating-point operations of steps `after` + 1 to `until`."""
        ...


class RunLog:
    """Writes the reports of a run to the terminal and to `run_dir`.

    Args:
      run_dir: folder for files, created if missing; `start` describes what happens to existing
        metrics. None: write no files.
      config: outputs and intervals.
      total_steps: step at which the run ends.
      tokens_per_step: number of tokens of a step over all devices; None if examples are not made of
        tokens.
      loss_unit: unit of the mean loss (`zerojax.losses`); None if it is not known.
      flops_per_step: FLOPs of a step over all devices, forward and backward, without recomputation
        (remat); None if they are not known.
      work: tokens and FLOPs of each step, if steps differ; replaces `tokens_per_step` and
        `flops_per_step`.
      num_devices: number of devices over all processes.
      device_kind: kind of the devices; MFU is reported if its peak is published.
      precision: "bf16" or "fp32", which selects the published peak.
      read_memory: function like `hardware.devices.device_memory`; None: do not report memory.
      process_index: index of this process; only process 0 writes and prints.
      stream: output stream; None: standard output.
      clock: function that returns a monotonic time in seconds.
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        config: LogConfig,
        *,
        total_steps: int,
        tokens_per_step: int | None = None,
        loss_unit: str | None = None,
        flops_per_step: float | None = None,
        work: Work | None = None,
        num_devices: int = 1,
        device_kind: str = "",
        precision: str = "bf16",
        read_memory: Callable[[], Mapping[str, Any]] | None = None,
        process_index: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run_dir, self._config = None if run_dir is None else Path(run_dir), config
        self.is_enabled = process_index == 0
        self.traced_steps = () if run_dir is None else config.profile
        self._spikes, self._stragglers = SpikeDetector(config.spike), Stragglers(config.straggler)
        self._stream, self._clock, self._read_memory = stream, clock, read_memory
        self._total_steps, self._num_devices = total_steps, num_devices
        self._tokens_per_step, self._flops_per_step = tokens_per_step, flops_per_step
        self._work, self._tokens_seen = work, (0, 0)
        self._loss_unit = loss_unit
        self._device_kind, self._peak = device_kind, peak_flops(device_kind, precision)
        self._display: console.Display = console.QuietDisplay()
        self._file: MetricsFile | None = None
        self._events: EventWriter | None = None
        self._wandb: Any = None
        self._began = self._last_time = self._steady_since = clock()
        self._start_step = self._last_step = self._steady_step = 0
        self._first_interval: tuple[int, float] | None = None
        self._untimed = 0.0
        self._last_memory, self._memory_until = dict[str, Any](), -math.inf
        self._kept: dict[str, str] = {}
        self._clipped: set[str] = set()
        self._identity: tuple[int, int] | None = None

    def start(
        self,
        plan_line: str,
        reasons: Sequence[str],
        plan_table: str,
        plan_dict: Mapping[str, Any],
        config_dict: Mapping[str, Any],
        *,
        start_step: int = 0,
        is_new: bool = False,
    ) -> None:
        """Prints the plan with its reasons, writes it to the run folder, and starts the clock.

        Passwords and keys in any of the arguments are redacted (`zerojax.runtime.redaction`).

        Args:
          plan_line: the resolved plan in one line.
          reasons: one sentence for each default that was chosen.
          plan_table: the plan as text of many lines.
          plan_dict: the plan as JSON values.
          config_dict: the configuration as JSON values.
          start_step: number of steps that were done before the run resumed.
          is_new: True: existing metrics in the folder belong to another run; they are renamed, and
            the new name is printed. False: this run appends to them.

        Raises:
          OSError: the run folder cannot be written; the message has a remedy.
        """
        if not self.is_enabled:
            return
        plan_line, plan_table = redact(plan_line), redact(plan_table)
        reasons, plan_dict, config_dict = redact([*reasons]), redact(plan_dict), redact(config_dict)
        said, unreported = [], []
        if self.run_dir is not None:
            shown = (f"- {printable(reason)}" for reason in reasons)
            summary = printable("\n".join([plan_line, "", *shown, "", plan_table]), is_page=True)
            texts = {"plan.txt": summary}
            texts |= {"plan.json": json.dumps(plan_dict, indent=2)}
            texts |= {"config.json": json.dumps(config_dict, indent=2)}
            said = self._fill_folder(self.run_dir, texts, is_new=is_new)
            unreported = _unreported(self.run_dir, start_step)
            self._open_files(self.run_dir, start_step, config_dict)
        self._display = console.make_display(
            self._config.console,
            self._stream or sys.stdout,
            total_steps=self._total_steps,
            start_step=start_step,
        )
        self._announce(plan_line, reasons, start_step)
        for text in said:
            self._display.message(text)
        if unreported:
            steps = _listed(unreported)
            self.event(
                "not_reported",
                start_step,
                f"{steps}: their metrics were not written before the earlier process was ended, "
                "although the state after them was saved; the metrics have no lines of them",
                first_missing=unreported[0],
                last_missing=unreported[-1],
            )
        self._start_step = self._last_step = self._steady_step = start_step
        self._began = self._last_time = self._clock()

    def keep_files(self, names: Sequence[str]) -> None:
        """Reads these files into memory, so that they can be rewritten if the folder is deleted.

        If the folder of a running run is deleted or replaced, writing does not fail: open files
        stay writable, but nobody can find them.
        """
        if not self.is_enabled or self.run_dir is None:
            return
        paths = (self.run_dir / name for name in (*SETTINGS, *names))
        self._kept = {path.name: path.read_text("utf-8") for path in paths if path.is_file()}
        self._identity = _identity(self.run_dir)

    def _see_folder(self, step: int) -> None:
        """Rewrites the run's files if another program deleted or replaced the run folder."""
        folder = self.run_dir
        if folder is None or self._identity is None:
            return
        if (found := _identity(folder)) == self._identity:
            return
        what = "was removed" if found is None else "was replaced by another one"
        try:
            _make_folder(folder)
            for name, content in self._kept.items():
                if not (folder / name).exists():
                    replace_text(folder / name, content)
            before, after = self._file, MetricsFile(folder / FILE_NAME)
            if before is not None and not (folder / FILE_NAME).stat().st_size:
                after.copy(before)
            _close(before)
            self._file = after
            if self._events is not None:
                _close(self._events)
                self._events = EventWriter(folder, first_step=step)
        except OSError as error:
            self._identity = None  # warn only once
            said = f"and cannot be written again ({error.strerror}): no more files are written"
        else:
            self._identity = _identity(folder)
            said = "so its settings and metrics are written again; its other files are lost"
        self._display.message(
            f"warning: step {step}: the run folder {folder} {what} by another program, {said}"
        )

    def write(
        self, step: int, values: Mapping[str, Any], spent: Mapping[str, float] | None = None
    ) -> None:
        """Reports a finished step.

        Args:
          step: number of batches consumed, including this step's.
          values: numbers of the report. "loss", "grad_norm", "learning_rate" and "skipped" (number
            of non-finite steps so far) are printed first; other values follow in their order here.
          spent: {activity: seconds since the last report}.
        """
        if not self.is_enabled:
            return
        numbers = {key: _number(value) for key, value in values.items()}
        spent = {f"{SPENT}{key}": round(value, 6) for key, value in (spent or {}).items()}
        now = self._clock()
        measured = {**self._speed(step, now), **self._seen(step), **self._memory(now)}
        report = {**numbers, **measured}
        self._record("train", step, {**report, **spent})
        tagged = {f"train/{key}": value for key, value in numbers.items()}
        tagged.update((tag, measured[key]) for key, tag in TAGS.items() if key in measured)
        self._send(step, tagged)
        self._display.update(step, report, self._seconds_left(step, now))

    def write_layers(self, step: int, norms: Mapping[str, float]) -> None:
        """Reports norms by layer, {"gradient_norm/LAYER": norm}, beside a report of a step."""
        if self.is_enabled:
            self._record("layers", step, norms)
            self._send(step, norms)

    def write_image(self, step: int, name: str, image: object) -> Path | None:
        """Writes an image into `images` of the run folder, and into the TensorBoard file.

        Args:
          step: number of the step.
          name: name of the image, its tag in TensorBoard.
          image: [height, width] or [height, width, 1, 3 or 4]; uint8, or floats in [0, 1].

        Returns:
          The PNG file; None if this process writes no files, or could not write this one.

        Raises:
          ValueError: the name, the shape or the dtype is invalid.
        """
        file, (pixels, note) = image_file(name, step), as_pixels(name, image)
        if not self.is_enabled or self.run_dir is None:
            return None
        if note is not None and name not in self._clipped:
            self._clipped.add(name)
            self._display.message(f"warning: step {step}: {note}")
        png, path = encode_png(pixels), self.run_dir / file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as stream:
                stream.write(png)
        except OSError as error:
            self._display.message(f"warning: cannot write {path} ({error.strerror})")
            return None
        height, width, channels = pixels.shape
        self._to_tensorboard(
            lambda events: events.image(step, name, png, (height, width, channels))
        )
        self.event(IMAGE, step, f"image {name!r} in {file}", say=False, image=name)
        return path

    def write_eval(self, step: int, values: Mapping[str, Any]) -> None:
        """Reports an evaluation of the model after `step` batches."""
        if not self.is_enabled:
            return
        numbers = {key: _number(value) for key, value in values.items()}
        self._record("eval", step, numbers)
        self._send(step, {f"eval/{key}": value for key, value in numbers.items()})
        line = console.format_line(step, numbers, total_steps=self._total_steps)
        self._display.message(f"{line}  (validation)")

    def see_loss(self, step: int, loss: float) -> str | None:
        """Adds the loss of a step; returns a description if the loss spiked. Must be called for
        every step.
        """
        spike = self._spikes.see(loss)
        if spike is None:
            return None
        around = f"{spike.median:.4g} at the median of the steps before"
        times = f", {spike.times:.3g} times their spread" if math.isfinite(spike.times) else ""
        return f"step {step}: loss {spike.value:.4g} jumped from {around}{times}"

    def event(self, kind: str, step: int, text: str, *, say: bool = True, **facts: Any) -> None:
        """Writes an event of a step to metrics.jsonl, and one line to the terminal.

        Args:
          kind: "loss_spike", "not_finite", "not_reported", "slow_process", "fast_again", "epoch",
            "sequence_length", "sample", "image", "failed" or "interrupted".
          step: number of the step.
          text: the line to print.
          say: True: print the line.
          facts: further JSON values, such as the name of the affected parameter as `leaf`.
        """
        if not self.is_enabled:
            return
        self._record("event", step, {"event": kind, "text": text, **facts})
        if say:
            self._display.message(text)

    def write_processes(self, step: int, rows: Sequence[ProcessTimes]) -> None:
        """Reports the spread of process times, and processes for which the others wait."""
        if not self.is_enabled:
            return
        found = spread(rows)
        self._record("processes", step, found)
        self._send(step, {f"processes/{key}": value for key, value in found.items()})
        for finding in self._stragglers.see(rows):
            kind = "slow_process" if finding.is_slow else "fast_again"
            text = f"step {step}: {finding.text}"
            self.event(kind, step, text, process=finding.process, host=rows[finding.process].name)

    def end(self, step: int, spent: Mapping[str, float]) -> None:
        """Records {activity: seconds} after the last report, for example for the last save."""
        if self.is_enabled:
            seconds = {f"{SPENT}{key}": round(value, 6) for key, value in spent.items()}
            self._record("end", step, seconds)

    def message(self, text: str) -> None:
        """Prints a line above the live display."""
        if self.is_enabled:
            self._display.message(text)

    @contextlib.contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Reports that a program is being compiled in the `with` block, and how long it took.

        Args:
          what: name of the program, such as "the training step".
        """
        if not self.is_enabled:
            yield
            return
        began = self._clock()
        self._display.waiting(f"compiling {what} ...")
        with _every(STILL_COMPILING_SECONDS, lambda: self._still_compiling(what, began)):
            yield
        self._display.message(f"compiled {what} in {self._clock() - began:.1f} s")

    def _still_compiling(self, what: str, began: float) -> None:
        seconds = console.format_seconds(self._clock() - began)
        self._display.waiting(f"still compiling {what}, {seconds} so far")

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Excludes the duration of a `with` block (evaluation, saving) from the time of training
        steps.
        """
        began = self._clock()
        try:
            yield
        finally:
            self._untimed += self._clock() - began

    def close(self) -> None:
        """Restores the terminal and closes the files; a second call does nothing."""
        self._display.close()
        self._display = console.QuietDisplay()
        _close(self._file)
        _close(self._events)
        if self._wandb is not None:
            self._wandb.finish()
        self._file = self._events = self._wandb = None

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The folder and the files

    def _fill_folder(self, folder: Path, texts: Mapping[str, str], *, is_new: bool) -> list[str]:
        """Writes `texts` as files into the folder, after renaming the metrics of an earlier run if
        `is_new`; returns lines to print on the terminal."""
        _check_own(folder, texts)
        _make_folder(folder)
        earlier = set_aside(folder / FILE_NAME) if is_new else None
        for name, text in texts.items():
            replace_text(folder / name, text + "\n")
        said = [open_to_everybody(folder)]
        if earlier is not None:
            said.insert(0, f"the metrics of an earlier run in this folder are now {earlier.name}")
        return [text for text in said if text is not None]

    def _open_files(self, folder: Path, start_step: int, config_dict: Mapping[str, Any]) -> None:
        # A jump is compared with the decrease since the first loss of the whole run, not of this
        # start.
        if start_step:
            first = first_loss(folder)
            self._spikes = SpikeDetector(self._config.spike, first=first)
        if self._config.wandb is not None:
            self._wandb = _start_wandb(self._config.wandb, folder, config_dict)
        self._file = MetricsFile(folder / FILE_NAME)
        if self._config.tensorboard:
            self._events = EventWriter(folder, first_step=start_step + 1)
        start = {
            "total_steps": self._total_steps,
            "num_devices": self._num_devices,
            "device_kind": self._device_kind,
            "tokens_per_step": self._tokens_per_step,
            "loss_unit": self._loss_unit,
            "flops_per_step": self._flops_per_step,
            "peak_flops_per_device": self._peak,
            "log_every": self._config.report_every,
        }
        self._record("start", start_step, start)

    def _record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self._see_folder(step)
        seconds = round(self._clock() - self._began, 3) if kind != "start" else 0.0
        record = {"kind": kind, "step": step, "time": time.time(), "seconds": seconds, **values}
        try:
            if self._file is not None:
                self._file.write(record)
        except OSError as error:
            self._give_up(self._file, "metrics.jsonl", error)
            self._file = None

    def _send(self, step: int, tagged: Mapping[str, float]) -> None:
        self._to_tensorboard(lambda events: events.scalars(step, tagged))
        if self._wandb is not None:
            self._wandb.log(dict(tagged), step=step)

    def _to_tensorboard(self, write: Callable[[EventWriter], object]) -> None:
        try:
            if self._events is not None:
                write(self._events)
        except OSError as error:
            self._give_up(self._events, "the TensorBoard file", error)
            self._events = None

    def _give_up(self, writer: MetricsFile | EventWriter | None, what: str, error: OSError) -> None:
        """Stops writing a file after an error such as a full disk, and warns once.

        Training continues.
        """
        self._display.message(
            f"warning: cannot write {what} ({error.strerror}); training continues without it"
        )
        _close(writer)

    # Words

    def _announce(self, plan_line: str, reasons: Sequence[str], start_step: int) -> None:
        say = self._display.message
        say(plan_line)
        for reason in reasons[:MAX_REASONS]:
            wrapped = textwrap.wrap(reason, 96, break_long_words=False, break_on_hyphens=False)
            say("  - " + "\n    ".join(wrapped))
        if len(reasons) > MAX_REASONS:
            rest = len(reasons) - MAX_REASONS
            where = "trainer.plan.reasons" if self.run_dir is None else self.run_dir / "plan.txt"
            say(f"  - and {rest} more: {where}")
        if start_step and not 0 < self._total_steps <= start_step:
            say(f"resuming after step {start_step} of {self._total_steps or 'an open number'}")
        if self.run_dir is not None:
            say(f"run folder {self.run_dir}")

    # Numbers that are computed from the clock

    def _speed(self, step: int, now: float) -> dict[str, float]:
        """Returns {metric: value} of the rates since the last report. The first interval includes
        compilation, so it gives only "first_interval_seconds"; the second one also gives
        "compile_seconds"."""
        steps, seconds = step - self._last_step, now - self._last_time - self._untimed
        self._last_step, self._last_time, self._untimed = step, now, 0.0
        if self._first_interval is None:
            self._first_interval = (steps, seconds)
            # The remaining time is estimated from here on, without the compilation.
            self._steady_step, self._steady_since = step, now
            return {"first_interval_seconds": seconds}
        if steps < 1 or seconds <= 0:
            return {}
        report = {"step_seconds": seconds / steps}
        if self._first_interval[0] > 0:
            count, first = self._first_interval
            self._first_interval = (0, 0.0)
            report["compile_seconds"] = max(0.0, first - count * report["step_seconds"])
        per_device = 1 / seconds / self._num_devices
        tokens, flops = self._work_of(step - steps, step)
        if tokens:
            report["tokens_per_second_per_device"] = tokens * per_device
        if flops:
            flops *= per_device
            report["tflops_per_device"] = flops / 1e12
            if self._peak:
                report["mfu"] = flops / self._peak
        return report

    def _work_of(self, after: int, until: int) -> tuple[float | None, float | None]:
        """Returns (tokens, FLOPs) over all devices of the steps `after` + 1 to `until`; None for
        one that is not known."""
        if self._work is not None:
            return self._work.tokens(after, until), self._work.flops(after, until)
        tokens, flops, steps = self._tokens_per_step, self._flops_per_step, until - after
        return tokens and tokens * steps, flops and flops * steps

    def _seen(self, step: int) -> dict[str, int]:
        """Returns the tokens of all steps so far, if steps differ in their numbers of tokens."""
        if self._work is None:
            return {}
        before, tokens = self._tokens_seen
        more = self._work.tokens(before, step)
        if more is None:
            return {}
        self._tokens_seen = step, tokens + more
        return {"tokens_seen": tokens + more}

    def _memory(self, now: float) -> dict[str, Any]:
        if self._read_memory is not None and now >= self._memory_until:
            self._memory_until = now + MEMORY_SECONDS
            found = self._read_memory().items()
            self._last_memory = {f"memory_{key}": value for key, value in found}
        return self._last_memory

    def _seconds_left(self, step: int, now: float) -> float | None:
        done = step - self._steady_step
        if done < 1 or not self._total_steps:
            return None
        return (now - self._steady_since) / done * max(0, self._total_steps - step)


@contextlib.contextmanager
def _every(seconds: float, say: Callable[[], object]) -> Iterator[None]:
    """Calls `say` every `seconds` seconds, from a thread, while a `with` block runs."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            say()

    thread = threading.Thread(target=repeat, name="zerojax-compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        # So that `say` is not under way when the block is left.
        thread.join()


def _check_own(folder: Path, names: Iterable[str]) -> None:
    """Raises if files of a folder that is no run's would be replaced, such as the config.json of a
    model. An empty `metrics.jsonl` does not make it a run's: `_make_folder` makes one first.

    Raises:
      FileExistsError: the message names the file.
    """
    metrics = folder / FILE_NAME
    if (folder / SETTINGS[0]).exists() or (metrics.exists() and metrics.stat().st_size):
        return
    for name in names:
        if os.path.lexists(folder / name):
            raise FileExistsError(
                f"'{folder / name}' is of no run, and this run would replace it; set run_dir to "
                "another folder, or move the file"
            )


def _unreported(folder: Path, start_step: int) -> list[int]:
    """Returns the steps until `start_step` whose reports were due, but not written before the
    process was killed.

    Args:
      folder: folder of the run, before the resumed run has written its first record.
      start_step: number of steps that were done before the run resumed.
    """
    # The file exists: `_fill_folder` has made it, and only a run that begins at step 0 renames it.
    if not start_step or not (folder / FILE_NAME).stat().st_size:
        return []
    found = read_metrics(folder)
    every = found.starts[-1].get("log_every") if found.starts else None
    if not every:
        return []  # written by an older version
    last = max(record["step"] for record in (*found.starts, *found.train))
    # `Trainer` also reports step 1, which may be no multiple of `every`.
    return [step for step in range(last + 1, start_step + 1) if step == 1 or step % every == 0]


def _listed(steps: Sequence[int]) -> str:
    first, last = steps[0], steps[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        open_appending(folder / FILE_NAME).close()
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write to the run folder '{folder}' ({error.strerror}); "
            "choose another folder with run_dir=",
        ) from None


def _identity(folder: Path) -> tuple[int, int] | None:
    """Returns (device, inode) of a folder, which identify it; None if it does not exist."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _number(value: Any) -> int | float:
    """Converts a Python, NumPy or JAX number (a scalar on the host) to a Python number."""
    try:
        return operator.index(value)
    except TypeError:
        return float(value)


def _close(writer: MetricsFile | EventWriter | None) -> None:
    with contextlib.suppress(OSError):  # the error of a full disk was reported before
        if writer is not None:
            writer.close()


def _start_wandb(project: str, run_dir: Path, config_dict: Mapping[str, Any]) -> Any:
    try:
        # An optional package that is slow to import; imported only if log.wandb is set.
        wandb = importlib.import_module("wandb")
    except ImportError:
        raise ConfigError(
            f"{project!r} needs the package wandb; pip install wandb, or set log.wandb=null",
            ("log", "wandb"),
        ) from None
    return wandb.init(
        project=project, name=run_dir.name, dir=str(run_dir), config=dict(config_dict)
    )


@dataclass(frozen=True)
class Peak:
    """Published limits of a device kind, for dense matrix products accumulated in float32."""

    bf16: float | None
    """TFLOP/s of bfloat16 products; None if the device has no units for them."""
    fp32: float | None
    """TFLOP/s of float32 products as JAX runs them by default, with TF32 units if there are any."""
    memory: float
    """Memory in GB (10^9 bytes), as sold."""
    source: str
    """Publication with these numbers. Rates that are published with sparsity are halved."""


def find_peak(device_kind: str) -> Peak | None:
    """Returns the limits of a device kind such as "NVIDIA H100 80GB HBM3"; None if unknown."""
    gpu = gpu_of_device(device_kind)
    if gpu is None:
        return None
    return Peak(
        bf16=gpu.bf16_flops and gpu.bf16_flops / 1e12,
        fp32=gpu.fp32_flops and gpu.fp32_flops / 1e12,
        memory=gpu.memory_gb,
        source="; ".join(gpu.sources),
    )


def peak_flops(device_kind: str, precision: str = "bf16") -> float | None:
    """Returns the peak FLOP/s of one device in "bf16" or "fp32"; None if unknown."""
    gpu = gpu_of_device(device_kind)
    if gpu is None:
        return None
    return {"bf16": gpu.bf16_flops, "fp32": gpu.fp32_flops}[precision]
