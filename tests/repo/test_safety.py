"""What a run reads is data: no configuration, checkpoint or token file can run code."""

from __future__ import annotations

import ast
import json
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.syntax_trees import nodes
from zerojax import equality
from zerojax.cli import main
from zerojax.config import ConfigError, RunConfig, load

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("zerojax", "pallas_kernels", "benchmarks", "examples")

LOADS_CODE = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
OWN_CHILD = ROOT / "zerojax" / "equality"
"""A check gives the user's own objects and functions to a child process that it starts, as
`multiprocessing` does, through a folder made for that."""
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
SAFE_YAML = {
    *("safe_load", "safe_dump", "SafeLoader", "YAMLError", "Node", "MappingNode", "SequenceNode"),
    *("ScalarNode", "nodes", "compose", "resolver", "constructor"),
    # Parsing makes events, of which nothing is constructed.
    *("parse", "CollectionStartEvent", "CollectionEndEvent", "AliasEvent", "ScalarEvent"),
}


def calls_and_imports(source: str) -> Iterator[str]:
    """Every way of running text as code, or of reading objects that may, in a module."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
            yield from (f"import {name}" for name in names if name in LOADS_CODE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LOADS_CODE:
            yield f"from {node.module} import"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "yaml" and node.attr not in SAFE_YAML:
                yield f"yaml.{node.attr}"
            if (node.value.id, node.attr) in {("os", "system"), ("os", "popen"), ("torch", "load")}:
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in RUNS_TEXT:
                yield f"{node.func.id}(...)"
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", None)
                if keyword.arg in ("shell", "allow_pickle") and value is not False:
                    yield f"{keyword.arg}=..."


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_source_runs_what_it_reads(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        found = set(calls_and_imports(path.read_text(encoding="utf-8")))
        if path.is_relative_to(OWN_CHILD):
            found -= {"import pickle", "import marshal"}
        assert not found, f"{path.relative_to(ROOT)}: {', '.join(found)}"


def test_what_a_check_sends_to_its_child_lies_where_nobody_else_writes(monkeypatch):
    seen = {}

    def run(command, **options):
        seen["mode"] = stat.S_IMODE(Path(command[-2]).parent.stat().st_mode)
        Path(command[-1]).write_bytes(pickle.dumps(("result", "answered")))

    monkeypatch.setattr(equality.subprocess, "run", run)
    monkeypatch.setattr(equality, "dumps", lambda request: b"")
    assert equality.run_request(SimpleNamespace(devices=2), timeout=1) == "answered"
    assert seen["mode"] == 0o700


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import yaml\nyaml.load('a', Loader=yaml.SafeLoader)",
        "import yaml\nyaml.unsafe_load('a')",
        "eval('1')",
        "exec('a = 1')",
        "import numpy as np\nnp.load('a', allow_pickle=True)",
        "import subprocess\nsubprocess.run('a', shell=True)",
        "import os\nos.system('a')",
    ],
)
def test_the_search_above_finds_each_way(source):
    assert list(calls_and_imports(source))


YAML_THAT_RUNS = """
steps: !!python/object/apply:os.mkdir ["{folder}"]
"""


def test_a_configuration_file_runs_nothing(tmp_path, capsys):
    path, made = tmp_path / "run.yaml", tmp_path / "made"
    path.write_text(YAML_THAT_RUNS.format(folder=made), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the tag .*os\.mkdir.*run\.yaml:2"):
        load(RunConfig, path)
    assert main(["train", str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(ConfigError):
        load(RunConfig, None, [f'steps=!!python/object/apply:os.mkdir ["{made}"]'])
    assert not made.exists()


def test_a_token_file_that_holds_objects_is_refused(tmp_path):
    from zerojax.data.tokens import open_tokens

    class Evil:
        def __reduce__(self):
            return Path.mkdir, (tmp_path / "made",)

    path = tmp_path / "tokens.npy"
    np.save(path, np.array([Evil()], dtype=object), allow_pickle=True)
    with pytest.raises((TypeError, ValueError), match=str(path)):
        open_tokens([path])
    assert not (tmp_path / "made").exists()


def test_settings_of_a_run_are_read_as_plain_data(tmp_path):
    """`run.json` names no class and no function: a changed one is refused by key or by type."""
    from zerojax.training.loading import load_run

    path = tmp_path / "run.json"
    path.write_text(json.dumps({"py/object": "os.system", "steps": 1}), encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown key"):
        load_run(tmp_path)
