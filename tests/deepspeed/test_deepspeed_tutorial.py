"""The steps of docs/deepspeed_tutorial.md: its files, its commands and the losses it promises.

tests/oracles/deepspeed_tutorial.py ran the page's DeepSpeed script and recorded its losses.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "deepspeed_tutorial.md").read_text(encoding="utf-8")
RECORDED = ROOT / "tests" / "data" / "deepspeed_tutorial.npz"
TOLERANCE = 5e-5
"""Of losses near 2 over 60 steps of float32 on both sides; 1.1e-5 were seen."""
DOES_NOT_FIT, NOT_DECIDED = 1, 3

EVALUATE = """
import numpy as np
from flax import nnx
from model import GPT, read_torch
from shared import batch
tokens, targets = batch(60)
total, weight = read_torch(GPT(nnx.Rngs(1)), np.load("trained.npz")).loss(
    {"tokens": tokens, "targets": targets}
)
print(float(total / weight))
"""


def files() -> dict[str, str]:
    """Returns {name: text} of the blocks that are files."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    return {text.partition("\n")[0].removeprefix("# "): text for text in blocks}


def commands() -> list[str]:
    return "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)).splitlines()


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return dict(arrays)


def write_files(folder: Path) -> None:
    for name, text in files().items():
        (folder / name).write_text(text, encoding="utf-8")
    (content,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)
    (folder / "ds_config.json").write_text(content, encoding="utf-8")
    recorded = arrays_of(RECORDED)
    del recorded["losses"]
    weights = {name.removeprefix("weights/"): value for name, value in recorded.items()}
    np.savez(folder / "weights.npz", **weights)


def run(folder: Path, line: str) -> tuple[int, str]:
    """Runs a command of the page; returns its exit code and what it prints."""
    words = shlex.split(line)
    settings = {}
    while "=" in words[0]:
        name, _, settings[name] = words.pop(0).partition("=")
    programs = {"python": [sys.executable], "zerojax": [sys.executable, "-m", "zerojax"]}
    variables = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as in conftest.py
        **settings,
    }
    result = subprocess.run(
        [*programs[words[0]], *words[1:]],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode in (0, DOES_NOT_FIT, NOT_DECIDED), result.stderr
    return result.returncode, result.stdout


def losses_in(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^\d+ ([\d.]+)$", text, re.M)]


def test_every_block_is_a_file_a_command_or_what_a_command_prints():
    assert all(re.fullmatch(r"\w+\.py", name) for name in files())
    assert {line.split("zerojax ")[-1].split()[0] for line in commands() if "zerojax " in line} == {
        "deepspeed",
        "plan",
        "checkpoint",
    }
    for name, text in files().items():
        compile(text, name, "exec")


@pytest.mark.slow
@pytest.mark.examples
def test_the_steps_in_their_order(tmp_path):
    write_files(tmp_path)
    printed = {line: run(tmp_path, line) for line in commands()}
    on_eight, on_four = (text for line, (_, text) in printed.items() if "train_zerojax" in line)
    assert on_eight.startswith("8 devices, from step 0")
    assert on_four.startswith("4 devices, from step 40")
    losses = losses_in(on_eight) + losses_in(on_four)
    expected = arrays_of(RECORDED)["losses"]
    assert len(losses) == len(expected) == 60
    np.testing.assert_allclose(losses, expected, rtol=0, atol=TOLERANCE)
    assert losses[-1] < losses[0] - 2, "it learns nothing, so the comparison says nothing"

    plans = [answer for line, answer in printed.items() if "zerojax plan" in line]
    assert [code for code, _ in plans] == [DOES_NOT_FIT, NOT_DECIDED]
    excerpts = re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S)
    for excerpt, (_, text) in zip(excerpts, plans, strict=True):
        shown = [line for line in excerpt.splitlines() if line != "..."]
        assert [line for line in shown if line not in text.splitlines()] == []

    # The exported arrays have PyTorch's names and shapes.
    given, trained = (arrays_of(tmp_path / f"{name}.npz") for name in ("weights", "trained"))
    assert {n: given[n].shape for n in given} == {n: trained[n].shape for n in trained}
    (tmp_path / "evaluate.py").write_text(EVALUATE)
    loss = float(run(tmp_path, "python evaluate.py")[1])
    assert abs(loss - losses[-1]) < 0.2
    if importlib.util.find_spec("torch"):  # it is an extra: `compare`
        assert abs(float(run(tmp_path, "python read_in_torch.py")[1]) - loss) < TOLERANCE
