"""What docs/from_deepspeed.md says is done here: its script, its commands, its tables.

tests/oracles/from_deepspeed.py ran the page's other script, and wrote what it printed.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from zerojax.deepspeed_engine.engine import Engine
from zerojax.deepspeed_engine.engine_absent import ABSENT

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from_deepspeed.md").read_text(encoding="utf-8")
FOUND = json.loads((ROOT / "tests/data/from_deepspeed.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-5
"""Of losses near 1 after up to 60 steps of float32 on both sides; 4e-6 were seen."""


def block(first_line):
    return re.search(rf"^```\w+\n({re.escape(first_line)}\n.*?)^```", PAGE, re.M | re.S).group(1)


def rows(title):
    """The cells of the table under a line that begins with `title`."""
    table = re.search(rf"^{re.escape(title)}.*?\n\|---\|---\|\n(.*?)\n\n", PAGE + "\n", re.M | re.S)
    return [line.strip("| ").split(" | ") for line in table.group(1).splitlines()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "ds_config.json").write_text(block("{"), encoding="utf-8")
    weights = {name: np.asarray(x, np.float32) for name, x in FOUND["weights"].items()}
    np.savez(tmp_path / "weights.npz", **weights)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_script(capsys):
    """(steps, losses) that the page's script prints."""
    exec(compile(block("# train_zerojax.py"), "train_zerojax.py", "exec"), {"__name__": "page"})
    printed = re.findall(r"^(\d+) ([\d.]+)$", capsys.readouterr().out, re.M)
    return [int(step) for step, _ in printed], [float(loss) for _, loss in printed]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:scheduler WarmupDecayLR")
@pytest.mark.filterwarnings("ignore:nothing is loaded")
def test_the_script_has_the_losses_of_deepspeeds_and_resumes(folder, capsys):
    steps, losses = run_script(capsys)
    assert steps == list(range(60))
    np.testing.assert_allclose(losses, FOUND["losses"], atol=TOLERANCE)
    assert losses[-1] < losses[0] - 0.3, "it learns nothing, so the comparison says nothing"

    (folder / "checkpoints" / "latest").write_text("global_step40\n")
    again = run_script(capsys)
    assert again == (list(range(40, 60)), pytest.approx(losses[40:], abs=1e-6))


@pytest.mark.slow
@pytest.mark.examples
@pytest.mark.parametrize("line", re.findall(r"^```sh\n(.*)\n```", PAGE, re.M))
def test_the_commands_run(folder, line):
    words = [sys.executable, "-m", *shlex.split(line)]
    subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def test_every_name_in_the_table_of_calls_is_there_or_says_why_not():
    text = " ".join(cell for row in rows("| DeepSpeed") for cell in row)
    named = re.findall(r"(?:engine\.|`\.)(\w+)", text)
    names = {name for name in named if not hasattr(Engine, name)}
    attributes = {"global_steps", "state"}  # set in __init__
    assert len(set(named)) > 20
    assert names - attributes <= set(ABSENT)


@pytest.mark.slow
def test_layers_hold_the_same_numbers_as_torchs():
    torch = pytest.importorskip("torch", reason="torch is an extra of the tests")
    torch.manual_seed(0)
    rngs = nnx.Rngs(0)
    x = np.random.default_rng(0).normal(size=(2, 6, 7, 3)).astype(np.float32)

    def same(theirs, ours):
        # Flax takes a variance as a difference of means, which rounds more (1.6e-5 was seen).
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=5e-5)

    linear, dense = torch.nn.Linear(3, 5), nnx.Linear(3, 5, rngs=rngs)
    dense.kernel[...], dense.bias[...] = linear.weight.detach().numpy().T, linear.bias.detach()
    same(linear(torch.from_numpy(x)), dense(jnp.asarray(x)))

    embedding, embed = torch.nn.Embedding(9, 4), nnx.Embed(9, 4, rngs=rngs)
    embed.embedding[...] = embedding.weight.detach().numpy()
    same(embedding(torch.arange(9)), embed(jnp.arange(9)))

    norm, layer = torch.nn.LayerNorm(3), nnx.LayerNorm(3, epsilon=1e-5, rngs=rngs)
    torch.nn.init.normal_(norm.weight)
    layer.scale[...] = norm.weight.detach().numpy()
    same(norm(torch.from_numpy(x)), layer(jnp.asarray(x)))
    assert (norm.eps, nnx.LayerNorm(3, rngs=rngs).epsilon) == (1e-5, 1e-6)

    images = torch.from_numpy(x).permute(0, 3, 1, 2)
    conv = torch.nn.Conv2d(3, 5, (3, 2))
    ours = nnx.Conv(3, 5, (3, 2), padding="VALID", rngs=rngs)
    ours.kernel[...] = conv.weight.detach().numpy().transpose(2, 3, 1, 0)
    ours.bias[...] = conv.bias.detach().numpy()
    same(conv(images).permute(0, 2, 3, 1), ours(jnp.asarray(x)))
