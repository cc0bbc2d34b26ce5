"""What stands on the screen, read as text."""

from __future__ import annotations

import io
import math
import sys
import types

import pytest
from rich.console import Console

from zerojax.training.metrics.console import (
    GIB,
    LineDisplay,
    LiveDisplay,
    QuietDisplay,
    format_line,
    format_loss,
    format_memory,
    format_number,
    format_seconds,
    make_display,
    sparkline,
)

REPORT = {
    "loss": 3.14159,
    "grad_norm": 1.25,
    "learning_rate": 3e-4,
    "skipped": 0,
    "step_seconds": 0.5,
    "tokens_per_second_per_device": 12345.6,
    "tflops_per_device": 412.34,
    "mfu": 0.4167,
    "memory_source": "device",
    "memory_in_use": 20 * GIB,
    "memory_peak": 40 * GIB,
    "memory_limit": 80 * GIB,
    "first_interval_seconds": 9.0,
}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_a_line_says_it_all_in_order():
    assert format_line(120, REPORT, total_steps=3000, eta=3725) == (
        "step  120/3000  loss  3.1416  grad norm  1.250  lr 3.00e-04  tokens/s/device  12,346"
        "  TFLOP/s  412.3  MFU 41.7%  memory 40.0/80.0 GiB (50%)  ETA 1:02:05"
    )


def test_columns_stand_still():
    lines = [
        format_line(step, {**REPORT, "loss": loss, "grad_norm": norm}, total_steps=1000)
        for step, loss, norm in [(1, 10.5, 12.0), (50, 3.2, 0.4), (1000, 0.99, 0.0012)]
    ]
    assert len({line.index("tokens/s") for line in lines}) == 1
    assert len({len(line) for line in lines}) == 1


def test_trouble_is_said_in_words():
    line = format_line(3, {"loss": math.nan, "grad_norm": math.inf, "skipped": 2}, total_steps=9)
    assert "loss     nan" in line
    assert "grad norm    inf" in line
    assert "skipped 2 (not finite)" in line


def test_other_metrics_follow_by_name():
    assert format_line(7, {"loss": 1.0}, total_steps=0).startswith("step 7  loss")
    assert "expert load 0.75" in format_line(1, {"expert_load": 0.75}, total_steps=1)
    assert "s/step 0.5" in format_line(1, {"step_seconds": 0.5}, total_steps=1)
    assert "ema loss 2.6500" in format_line(1, {"ema_loss": 2.65}, total_steps=1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (42.4, "0:42"), (59.6, "1:00"), (725, "12:05"), (11220, "3:07:00")],
)
def test_times(seconds, text):
    assert format_seconds(seconds) == text


def test_days():
    assert format_seconds(2 * 86400 + 3 * 3600 + 7 * 60) == "2d 03:07"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (3.14159, "3.142"),
        (12345.6, "12,346"),
        (1e-5, "1.00e-05"),
        (2.5e7, "2.50e+07"),
        (None, "not finite"),
        (math.nan, "nan"),
    ],
)
def test_numbers(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (3.14159, "3.1416"),
        (0.0251, "0.0251"),
        (2.8312e-4, "2.831e-04"),
        (-0.5, "-0.5000"),
        (8.73e18, "8.730e+18"),
        (None, "not finite"),
        (math.nan, "nan"),
    ],
)
def test_losses_keep_their_digits(value, text):
    assert format_loss(value) == text


def test_memory_says_what_it_is():
    host = {"memory_source": "host RSS", "memory_peak": 1.5 * GIB, "memory_limit": 8 * GIB}
    assert format_memory(host) == "1.50 GiB host RSS"
    assert format_memory({"memory_peak": GIB, "memory_limit": 0}) == "1.00 GiB"


def test_sparkline():
    assert sparkline([3, 2, 1], 10) == "█▅▁"
    assert sparkline([1.0] * 100, 20) == "▁" * 20
    assert sparkline([1, math.nan, 2], 10) == "▁ █"
    assert sparkline([math.nan], 10) == ""
    assert len(sparkline(list(range(1000)), 37)) == 37


def test_lines_go_to_files_and_pipes():
    stream = io.StringIO()
    display = make_display("auto", stream, total_steps=10, start_step=0)
    assert isinstance(display, LineDisplay)
    display.message("hello [red]")
    display.update(1, {"loss": 2.0}, None)
    display.close()
    assert stream.getvalue() == "hello [red]\nstep  1/10  loss  2.0000\n"


def test_which_display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    def chosen(kind, stream):
        display = make_display(kind, stream, total_steps=10, start_step=0)
        display.close()
        return type(display)

    assert chosen("auto", Terminal()) is LiveDisplay
    assert chosen("live", io.StringIO()) is LiveDisplay
    assert chosen("lines", Terminal()) is LineDisplay
    assert chosen("quiet", Terminal()) is QuietDisplay
    monkeypatch.setenv("TERM", "dumb")
    assert chosen("auto", Terminal()) is LineDisplay


@pytest.fixture
def live():
    """A live display on a terminal of 100 columns, and what it shows, as text without colour."""
    terminal = Console(width=100, file=Terminal(), force_terminal=True, color_system=None)
    times = [0.0]
    display = LiveDisplay(terminal, total_steps=300, clock=lambda: times[0])

    def shown():
        page = Console(width=100, file=Terminal(), color_system=None)
        page.print(display.render())
        return page.file.getvalue().splitlines()

    yield display, shown, times
    display.close()


def test_the_live_display_waits_for_the_compiler(live):
    _, shown, times = live
    times[0] = 12.0
    assert shown() == ["compiling the training step ... 0:12"]


def test_the_live_display_shows_place_learning_and_speed(live):
    display, shown, times = live
    for step in range(10, 130, 10):
        display.update(step, {**REPORT, "loss": 6 - step / 40}, 72.0)
    times[0] = 2.0
    progress, learning, speed, curve = (line.rstrip() for line in shown())
    assert progress.startswith("step 120/300  ━")
    assert progress.endswith("40%  0:02 elapsed, 1:10 left")
    assert learning == "loss 3.0000   grad norm 1.250   lr 3.00e-04"
    assert speed == (
        "tokens/s/device 12,346   TFLOP/s 412.3   MFU 41.7%   memory 40.0/80.0 GiB (50%)"
    )
    assert curve == "loss 5.75 █▇▇▆▅▅▄▄▃▂▂▁ 3.00"


def test_messages_scroll_above_the_live_display(live):
    display, *_ = live
    display.update(10, REPORT, None)
    display.message("saved [step 10]")
    written = display._console.file.getvalue()
    assert "saved [step 10]\n" in written
    assert written.rindex("saved") < written.rindex("loss 3.1416")


def test_a_narrow_terminal_and_one_without_unicode():
    class Ascii(Terminal):
        encoding = "ascii"

    display = LiveDisplay(Console(file=io.StringIO(), force_terminal=True), total_steps=0)
    display.update(3, {"loss": 1.0}, None)
    display.close()
    display = LiveDisplay(Console(width=40, file=Ascii(), force_terminal=True), total_steps=10)
    for step in (1, 2, 3):
        display.update(step, REPORT, None)
    page = Console(width=40, file=Ascii(), color_system=None)
    page.print(display.render())
    display.close()
    text = page.file.getvalue()
    text.encode("ascii")
    assert "loss 3.1416" in text


class Shell:
    """What IPython has in the kernel of a notebook."""

    kernel = object()


@pytest.fixture
def notebook(monkeypatch):
    """A notebook that records what it shows: [(number of the place, text)]."""
    shown = []

    class Handle:
        def __init__(self, place):
            self.place = place

        def update(self, text):
            shown.append((self.place, text))

    def display(text, *, display_id):
        assert display_id is True
        handle = Handle(len({place for place, _ in shown}))
        handle.update(text)
        return handle

    theirs = types.SimpleNamespace(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=Shell))
    monkeypatch.setitem(sys.modules, "IPython.display", theirs)
    return shown


def test_in_a_notebook_the_report_is_a_line_that_is_replaced(notebook, capsys):
    display = make_display("auto", sys.stdout, total_steps=30, start_step=0)
    for step in (10, 20):
        display.update(step, {"loss": 1.0 / step}, None)
    display.message("a <message>")
    display.update(30, {"loss": 0.01}, None)
    display.close()
    assert capsys.readouterr().out == "a <message>\n"
    assert [place for place, _ in notebook] == [0, 0, 1]
    assert "step 20/30" in notebook[1][1]
    lines = make_display("lines", sys.stdout, total_steps=30, start_step=0)
    lines.update(10, {"loss": 0.1}, None)
    assert "step 10/30" in capsys.readouterr().out
