"""Prints a run's reports: a live display on terminals, plain lines elsewhere.

Colour is never the only sign of any information.
"""

import importlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zerojax.config.display import as_html, printable, show

GIB = 2**30
SPARKS = "▁▂▃▄▅▆▇█"
SLOWEST_TFLOPS = 1.0
"""Minimum TFLOP/s per device at which the console shows this rate, because a CPU's rate is of no
interest for GPUs. The metrics file and the report always have it."""
OWN_WORDS = {
    "loss", "grad_norm", "learning_rate", "tokens_per_second_per_device", "tflops_per_device",
    "mfu", "memory_in_use", "memory_peak", "memory_limit", "memory_source", "step_seconds",
    "skipped", "first_interval_seconds", "compile_seconds", "tokens_seen",
}  # fmt: skip


class Display(Protocol):
    """Terminal output as `RunLog` uses it: reports, messages, and a note while compiling."""

    def update(self, step: int, values: Mapping[str, Any], eta: float | None) -> None: ...
    def message(self, text: str) -> None: ...
    def waiting(self, text: str) -> None: ...
    def close(self) -> None: ...


def make_display(kind: str, stream: TextIO, *, total_steps: int, start_step: int) -> Display:
    """Returns the display for `LogConfig.console`, which is "auto", "live", "lines" or "quiet"."""
    if kind == "quiet":
        return QuietDisplay()
    if kind == "auto" and stream is sys.stdout and is_notebook():
        return NotebookDisplay(stream, total_steps=total_steps)
    console = Console(file=stream)
    if kind == "live" or (kind == "auto" and console.is_terminal and not console.is_dumb_terminal):
        return LiveDisplay(console, total_steps=total_steps, start_step=start_step)
    return LineDisplay(stream, total_steps=total_steps)


# Words


def format_seconds(seconds: float) -> str:
    """Formats a duration as 0:42, 12:05, 3:07:00 or 2d 03:07."""
    whole = int(seconds + 0.5)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_number(value: float | None) -> str:
    """Formats a number with three or four significant digits, from 10,000 to a million as a whole
    number. None gives "not finite"."""
    if value is None or not math.isfinite(value):
        return "not finite" if value is None else str(value)
    size = abs(value)
    if size and (size >= 1e6 or size < 1e-3):
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 10_000 else f"{value:.4g}"


def _fixed(value: float, digits: int) -> str:
    """Formats a number with fixed decimals, so that columns align; very small or large numbers are
    formatted in scientific notation.
    """
    usual = value == 0 or 10.0**-digits <= abs(value) < 1e5
    return f"{value:.{digits}f}" if usual else format_number(value)


def format_loss(value: float | None) -> str:
    """Formats a loss with four decimals, or in scientific notation if it is small or very large.

    Examples: 1.0639, 0.0251, 2.831e-04, 8.730e+18. None gives "not finite".
    """
    if value is None or not math.isfinite(value):
        return format_number(value)
    usual = value == 0 or 0.01 <= abs(value) < 1e5
    return f"{value:.4f}" if usual else f"{value:.3e}"


def _short_loss(value: float) -> str:
    return f"{value:.2f}" if 0.1 <= abs(value) < 1e5 else format_number(value)


def format_memory(values: Mapping[str, Any]) -> str:
    """Formats peak memory and, if known, its limit, such as 41.2/79.6 GiB (52 %)."""
    peak, limit = values["memory_peak"], values.get("memory_limit")
    source = values.get("memory_source", "device")
    if source != "device":
        return f"{peak / GIB:.2f} GiB {source}"
    if not limit:
        return f"{peak / GIB:.2f} GiB"
    return f"{peak / GIB:.1f}/{limit / GIB:.1f} GiB ({peak / limit:.0%})"


def learning_words(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (label, value) texts of the metrics that show if the model learns."""
    words = []
    if "loss" in values:
        words.append(("loss", format_loss(values["loss"])))
    if "grad_norm" in values:
        words.append(("grad norm", _fixed(values["grad_norm"], 3)))
    if "learning_rate" in values:
        words.append(("lr", f"{values['learning_rate']:.2e}"))
    others = [key for key in values if key not in OWN_WORDS]
    words += [(key.replace("_", " "), _format_other(key, values[key])) for key in others]
    if values.get("skipped"):
        words.append(("skipped", f"{int(values['skipped'])} (not finite)"))
    return words


def _format_other(key: str, value: float | None) -> str:
    """Formats a user's metric; a metric whose name ends in "_loss" is formatted as a loss."""
    return format_loss(value) if key.endswith("_loss") else format_number(value)


def speed_words(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (label, value) texts of the metrics that show how well the hardware is used."""
    words = []
    if "tokens_per_second_per_device" in values:
        words.append(("tokens/s/device", f"{values['tokens_per_second_per_device']:,.0f}"))
    elif "step_seconds" in values:
        words.append(("s/step", format_number(values["step_seconds"])))
    if (tflops := values.get("tflops_per_device", 0.0)) >= SLOWEST_TFLOPS:
        words.append(("TFLOP/s", _fixed(tflops, 1 if tflops >= 10 else 3)))
    if "mfu" in values:
        words.append(("MFU", f"{values['mfu']:.1%}"))
    # The memory of a whole process with virtual devices hardly changes: the report has it.
    if "memory_peak" in values and values.get("memory_source", "device") == "device":
        words.append(("memory", format_memory(values)))
    return words


def format_line(
    step: int, values: Mapping[str, Any], *, total_steps: int, eta: float | None = None
) -> str:
    """Formats one report as a line with aligned columns."""
    digits = len(str(total_steps))
    parts = [f"step {step:>{digits}}/{total_steps}" if total_steps else f"step {step}"]
    widths = {"loss": 7, "grad norm": 6, "tokens/s/device": 7, "TFLOP/s": 6, "MFU": 5}
    for label, value in learning_words(values) + speed_words(values):
        parts.append(f"{label} {value:>{widths.get(label, 0)}}")
    if eta is not None:
        parts.append(f"ETA {format_seconds(eta)}")
    return "  ".join(parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws a curve with at most `width` block characters; non-finite values leave a gap. Returns
    "" if no value is finite."""
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        values = [_mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    scale = (len(SPARKS) - 1) / span if span else 0.0
    return "".join(
        SPARKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values
    )


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


# Displays


class QuietDisplay:
    """A display that prints nothing."""

    def update(self, step: int, values: Mapping[str, Any], eta: float | None) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def waiting(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class LineDisplay:
    """A display that prints one line per report, for files and pipes."""

    def __init__(self, stream: TextIO, *, total_steps: int):
        self._stream, self._total_steps = stream, total_steps

    def update(self, step: int, values: Mapping[str, Any], eta: float | None) -> None:
        self.message(format_line(step, values, total_steps=self._total_steps, eta=eta))

    def message(self, text: str) -> None:
        show(text, file=self._stream, flush=True)

    def waiting(self, text: str) -> None:
        self.message(text)

    def close(self) -> None:
        self._stream.flush()


class NotebookDisplay(LineDisplay):
    """A display for Jupyter: messages are lines, and each report replaces the previous report."""

    def __init__(self, stream: TextIO, *, total_steps: int) -> None:
        super().__init__(stream, total_steps=total_steps)
        self._handle: Any = None

    def update(self, step: int, values: Mapping[str, Any], eta: float | None) -> None:
        text = format_line(step, values, total_steps=self._total_steps, eta=eta)
        self._show(f"<pre>{as_html(text)}</pre>")

    def message(self, text: str) -> None:
        super().message(text)
        self._handle = None  # the next report is printed below this line

    def _show(self, text: str) -> None:
        theirs = importlib.import_module("IPython.display")  # exists if a notebook runs
        if self._handle is None:
            self._handle = theirs.display(theirs.HTML(text), display_id=True)
        else:
            self._handle.update(theirs.HTML(text))


def is_notebook() -> bool:
    """Returns True if this process is the kernel of a Jupyter notebook."""
    interpreter = sys.modules.get("IPython")
    shell = None if interpreter is None else interpreter.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class LiveDisplay:
    """A few lines at the bottom of a terminal that are redrawn; messages scroll above them."""

    def __init__(
        self,
        console: Console,
        *,
        total_steps: int,
        start_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console, self._total_steps, self._step = console, total_steps, start_step
        self._clock = clock
        self._values: Mapping[str, Any] = {}
        self._losses: list[float] = []
        self._began = self._updated = clock()
        self._eta: float | None = None
        self._live = Live(
            get_renderable=self.render, console=console, refresh_per_second=2, transient=False
        )
        self._live.start()

    def update(self, step: int, values: Mapping[str, Any], eta: float | None) -> None:
        self._step, self._values, self._eta = step, values, eta
        self._updated = self._clock()
        if "loss" in values:
            self._losses.append(values["loss"])
        self._live.refresh()

    def message(self, text: str) -> None:
        self._console.print(Text(printable(text, is_page=True)))

    def waiting(self, text: str) -> None:
        pass  # the display shows how long it has been compiling

    def close(self) -> None:
        self._live.stop()

    def render(self) -> Group:
        """Returns the current content of the display."""
        elapsed = self._clock() - self._began
        if not self._values:
            return Group(Text(f"compiling the training step ... {format_seconds(elapsed)}"))
        lines = [self._progress(elapsed), _words(learning_words(self._values))]
        if speed := speed_words(self._values):
            lines.append(_words(speed))
        if self._console.encoding.startswith("utf") and len(self._losses) > 2:
            width = max(10, min(60, self._console.width - 40))
            first, now = self._losses[0], self._losses[-1]
            shape = sparkline(self._losses, width)
            curve = f"loss {_short_loss(first)} {shape} {_short_loss(now)}"
            lines.append(Text(curve, no_wrap=True, overflow="crop"))
        return Group(*lines)

    def _progress(self, elapsed: float) -> Table | Text:
        times = f"{format_seconds(elapsed)} elapsed"
        if self._eta is not None and self._step < self._total_steps:
            left = max(0.0, self._eta - (self._clock() - self._updated))
            times += f", {format_seconds(left)} left"
        if not self._total_steps:
            return Text(f"step {self._step}  {times}")
        row = Table.grid(padding=(0, 2), expand=False)
        for _ in range(4):
            row.add_column(no_wrap=True)
        bar_width = max(10, min(40, self._console.width - 60))
        row.add_row(
            f"step {self._step}/{self._total_steps}",
            ProgressBar(
                total=self._total_steps,
                completed=self._step,
                width=bar_width,
                complete_style="cyan",
                finished_style="green",
            ),
            f"{self._step / self._total_steps:.0%}",
            times,
        )
        return row


def _words(words: Sequence[tuple[str, str]]) -> Text:
    text = Text()
    for index, (label, value) in enumerate(words):
        text.append("   " if index else "")
        text.append(f"{label} ", style="dim").append(value, style="bold")
    return text
