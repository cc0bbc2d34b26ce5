"""What a script does before its training: it is told as the script's, and never for ever."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cli_complaints import fails
from zerojax.cli import check_targets
from zerojax.cli.complaints import explain
from zerojax.cli.script_process import run_in_child

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import os, sys
import numpy as np
import zerojax

def init(key):
    return {"w": np.ones((4, 3))}

def batch(step):
    return {"x": np.ones((8, 4)), "y": np.ones((8, 3))}

def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()

def go(batches=batch, **options):
    zerojax.train((init, np.dot), {"zero": 2}, batches, loss=loss, **options)

def parts():
    return {"model": (init, np.dot), "batch": batch, "loss": loss}
"""


def write(folder: Path, text: str, model: str = MODEL) -> str:
    path = folder / "script.py"
    path.write_text(f"{model}\n{text}\n")
    return str(path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "text",
    [
        "try: go()\nexcept BaseException: print('caught')",
        "try: go()\nexcept: sys.exit(1)",
        "try: go()\nfinally: raise OSError('of the clean-up')",
        "try: go(los=loss)\nexcept TypeError: go()",
        "import threading\nt = threading.Thread(target=go)\nt.start()\nt.join()",
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_script_that_catches_everything_has_trained(text, tmp_path):
    parts = check_targets.parts_of_script(write(tmp_path, text), steps=1)
    assert parts["loss"].__name__ == "loss"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}['no']", r"script\.py raised KeyError: 'no' .*script\.py:21: .*zerojax check .*:NAME"),
        ("open('absent.txt')", r"script\.py raised FileNotFoundError: .*absent\.txt"),
        ("import absent_module", r"script\.py raised ModuleNotFoundError"),
        ("np.ones(3) @ np.ones(4)", r"script\.py raised ValueError: matmul.*script\.py:21"),
        ("assert 1 == 2", r"script\.py raised AssertionError before"),
        ("raise type('Odd', (BaseException,), {})('x')", r"script\.py raised Odd: x"),
        ("x = = 3", r"script\.py raised SyntaxError: .*script\.py:21"),
        ("go(lambda step: {}['no'])", r"script\.py raised KeyError: 'no' .*script\.py:21"),
    ],
)
def test_an_error_of_the_script_is_told_as_its_own(text, words, tmp_path, capsys):
    with pytest.raises(ValueError, match=words) as raised:
        check_targets.parts_of_script(write(tmp_path, text), steps=1)
    assert explain(raised.value) == (str(raised.value), True)
    printed = capsys.readouterr().err
    assert "line 21" in printed
    assert "zerojax/cli" not in printed
    assert len(printed.splitlines()) <= 20


def test_an_error_of_a_function_of_a_script_is_its_own(tmp_path, capsys):
    path = write(tmp_path, "def parts(): raise LookupError('of the function')")
    with pytest.raises(ValueError, match=r"script\.py:parts raised LookupError: of the func"):
        check_targets.parts_by_name(path, "parts")
    assert "of the function" in capsys.readouterr().err
    write(tmp_path, "def parts(): sys.exit(0)")
    with pytest.raises(ValueError, match=r"ended \(0\)"):
        check_targets.parts_by_name(path, "parts")


def run_cli(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zerojax", "check", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=given,
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.mark.parametrize("stdin", [io.StringIO(""), None], ids=["at its end", "closed"])
def test_a_script_that_asks_is_told_so(stdin, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", stdin)
    path = write(tmp_path, "x = input('which? ')")
    with pytest.raises(ValueError, match=r"waits for input at .*script\.py:21.*echo VALUE \|"):
        check_targets.parts_of_script(path, steps=1)


def test_a_file_that_ends_too_early_is_no_question(tmp_path):
    path = write(tmp_path, "import pickle\npickle.loads(b'')")
    with pytest.raises(ValueError, match="raised EOFError: Ran out of input"):
        check_targets.parts_of_script(path, steps=1)


@pytest.mark.parametrize("after", ["pass", "sys.exit(1)"])
def test_what_zerojax_says_is_told_although_the_script_catches_it(after, tmp_path):
    path = write(tmp_path, f"try: go(los=loss)\nexcept Exception: {after}")
    with pytest.raises(TypeError, match="no keyword 'los'"):
        check_targets.parts_of_script(path, steps=1)


def test_an_error_of_zerojax_keeps_its_sentence(tmp_path):
    path = write(tmp_path, "zerojax.MeshConfig(zero=7)")
    with pytest.raises(ValueError, match="zero") as raised:
        check_targets.parts_of_script(path, steps=1)
    assert "raised" not in str(raised.value)


# --- the process ----------------------------------------------------------------------------------

CHILD = """
import runpy, sys
from zerojax.cli.script_process import until_training
with until_training(sys.argv[-1], 0.3):
    runpy.run_path("script.py", run_name="__main__")
{then}
"""


def run_script(folder: Path, text: str, then: str = "sys.exit(4)") -> int:
    """Runs a script without a model in a child process."""
    write(folder, text, model="import os, re, signal, time\n")
    (folder / "child.py").write_text(CHILD.replace("{then}", then))
    return run_in_child([sys.executable, "child.py"], "script.py", 0.3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "def wait():\n    while True: time.sleep(0.01)\nwait()",
            r"0\.3 seconds, at line 4 in wai",
        ),
        ("re.match('(a+)+$', 50 * 'a' + 'b')", r"0\.3 seconds, at line 3 in <module>"),
        ("while True:\n    try: time.sleep(9)\n    except BaseException: pass", "at line 4"),
        ("os._exit(0)", r"ended its own process \(exit code 0\).*script\.py:NAME"),
        ("os._exit(2)", r"ended its own process \(exit code 2\)"),
        ("os.abort()", r"ended its own process \(SIGABRT\)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"ended its own process \(SIGKILL\)"),
    ],
)
def test_a_script_that_does_not_reach_its_training_is_told(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        run_script(tmp_path, text)


def test_the_limit_is_over_when_training_begins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_script(tmp_path, "pass", "import time; time.sleep(0.6); sys.exit(4)") == 4
    with pytest.raises(RuntimeError, match="was ended by SIGKILL"):
        run_script(tmp_path, "pass", "import os; os.kill(os.getpid(), 9)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([__file__, "--time-limit", "0"], "--time-limit 0: give seconds from 1"),
        ([__file__, "--time-limit", "1000000"], "to 86400"),
        (["configs/tiny_shakespeare.yaml", "--time-limit", "9"], "limits scripts"),
    ],
)
def test_a_time_limit_that_cannot_be(words, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert message in fails(capsys, "check", *words)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("os._exit(0)", "", "ended its own process (exit code 0)"),
        ("while True: pass", "", "was still running after 2 seconds, at line 21"),
        ("def parts():\n    while True: pass", ":parts", "after 2 seconds, at line 22"),
        ("{}['no']", "", "raised KeyError: 'no' before its training"),
        ("def batch(step): return {}['no']", ":parts", "raised KeyError: 'no' before its"),
        ("input()", "", "waits for input"),
    ],
)
def test_the_command_says_it_in_its_last_line(text, name, words, tmp_path):
    found = run_cli(write(tmp_path, text) + name, "--time-limit", "2")
    assert found.returncode == 2
    assert words in found.stderr.splitlines()[-1]
    assert "defect" not in found.stderr
    assert found.stdout == ""


@pytest.mark.thorough
def test_the_script_gets_what_the_command_is_given(tmp_path):
    found = run_cli(write(tmp_path, "print(f'got {input()}'); sys.exit(3)"), given="an answer\n")
    assert "got an answer" in found.stderr
    assert "ended (3)" in found.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("caught", [False, True])
def test_ctrl_c_ends_the_script_too(caught, tmp_path):
    loop = "while True:\n  try: time.sleep(9)\n  except BaseException: pass"
    begun = f"import time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    path = write(tmp_path, begun + (loop if caught else "time.sleep(99)"))
    child = subprocess.Popen(
        [sys.executable, "-m", "zerojax", "check", path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert child.poll() is None, child.stderr
        time.sleep(0.1)
    os.killpg(child.pid, signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert (child.returncode, said.count("interrupted")) == (130, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
