"""CONTRIBUTING.md: each of its recipes, followed in a copy of the sources, works as it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()

SMALL = """
import jax, numpy as np, zerojax
from zerojax.config import MeshConfig, OptimizerConfig

def init(key):
    return {"w": jax.random.normal(key, (16, 8))}

def apply(params, x):
    return x @ params["w"]

def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()

rng = np.random.default_rng(0)
batch = {"x": rng.normal(size=(16, 16)).astype("float32"), "y": np.ones((16, 8), "float32")}

def train(mesh, **options):
    trainer = zerojax.train((init, apply), mesh, [batch] * 3, loss=loss, run_dir=None, **options)
    return [report["loss"] for report in trainer.history], trainer
"""

RECIPES = {
    "An option of the mesh": (
        {
            "zerojax/config/mesh.py": (
                "    unroll: bool | None = None\n",
                '    toy: int = 3\n    """A toy."""\n    unroll: bool | None = None\n',
            ),
            "zerojax/plan/inputs.py": ('    "unroll",\n', '    "unroll",\n    "toy",\n'),
        },
        """
assert train({"toy": 5})[1].plan.settings.toy == 5
plan = zerojax.make_plan((init, apply), zerojax.make_mesh(), example_batch=batch, loss=loss, toy=7)
assert plan.settings.toy == 7
from zerojax.cli import main
assert main(["keys", "mesh.toy"]) == 0
""",
    ),
    "An optimizer": (
        {
            "zerojax/optim/methods.py": (
                "@names_keywords()\ndef lion(",
                "def toy(learning_rate, **_):\n    return sgd(learning_rate)\n\n\n"
                "@names_keywords()\ndef lion(",
            ),
            "zerojax/optim/__init__.py": (
                "methods import adamw, lamb, lion, sgd\n",
                "methods import adamw, lamb, lion, sgd, toy\n",
            ),
            "zerojax/__init__.py": ('    "tune": "', '    "toy": "optim",\n    "tune": "'),
            "zerojax/config/run.py": ('name: Literal["adamw", ', 'name: Literal["toy", "adamw", '),
            "zerojax/optim/building.py": (
                '    build = {"adamw": adamw, ',
                "    from zerojax.optim.methods import toy\n"
                '    build = {"toy": toy, "adamw": adamw, ',
            ),
        },
        """
config = OptimizerConfig(name="toy", learning_rate=0.1, schedule="constant", warmup_steps=0)
given, named = train({"zero": 2}, optimizer=zerojax.toy(0.1))[0], train({}, optimizer=config)[0]
assert given[0] > given[-1]
np.testing.assert_allclose(given, named, rtol=1e-6)  # other orders of the sums over devices
""",
    ),
    "A model family of Hugging Face": (
        {
            "zerojax/zoo/hugging_face/families.py": (
                '        row("mistral", ',
                '        row("toy", "ToyForCausalLM", _read_mistral, _write_mistral),\n'
                '        row("mistral", ',
            )
        },
        """
from zerojax.zoo.hugging_face import config_from_hugging_face
import json, pathlib
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8,
         "rms_norm_eps": 1e-6}
pathlib.Path("config.json").write_text(json.dumps({"model_type": "toy", **sizes}))
assert config_from_hugging_face("config.json").family == "toy"
""",
    ),
    "A mesh axis": (
        {
            "zerojax/placement/device_mesh.py": (
                "    Axis(name=DATA, ",
                '    Axis(name="toy", splits="batch", shards_state=True, manual=True),\n'
                "    Axis(name=DATA, ",
            ),
            "zerojax/config/mesh.py": (
                "    context: int = 1\n",
                '    toy: int = 1\n    """A toy."""\n    context: int = 1\n',
            ),
        },
        """
split, trainer = train({"toy": 2, "data": 2, "zero": 3, "persistence_threshold": 0})
assert "toy" in str(trainer.state["params"]["w"].sharding.spec), trainer.plan.table()
plain = train({"data": 4, "zero": 0})[0]
np.testing.assert_allclose(split, plain, rtol=1e-5)  # sums in another order
""",
    ),
}


def sections() -> dict[str, str]:
    """{heading of the second level: its text}"""
    parts = re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_the_files_that_its_toy_changes(name):
    steps = "\n".join(re.findall(r"^\d\. .*(?:\n   .*)*", sections()[name], flags=re.MULTILINE))
    named = set(re.findall(r"`(zerojax/[\w/]+\.py)`", steps))
    also = {"zerojax/zoo/hugging_face/architectures.py"}  # which collects rows by itself
    assert named - also == set(RECIPES[name][0])


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_a_toy_added_as_the_recipe_says_works(name, tmp_path):
    for package in ("zerojax", "pallas_kernels"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignore)
    changes, script = RECIPES[name]
    for path, (old, new) in changes.items():
        text = (tmp_path / path).read_text()
        assert text.count(old) == 1, f"{path}: {old!r}"
        (tmp_path / path).write_text(text.replace(old, new))
    variables = {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    result = subprocess.run(
        [sys.executable, "-c", SMALL + script],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


def test_the_page_names_files_that_exist():
    for path in re.findall(r"`((?:zerojax|tests|docs)/[\w/.]*)`", PAGE):
        assert (ROOT / path).exists(), path
