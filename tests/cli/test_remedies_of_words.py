"""Refusals of commands' words: options that exclude each other, files of prompts, scripts.

Nothing is compiled, trained or measured: what would do it is replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.cli.test_remedies_of_commands import PLAN, command, commands
from tests.support.refusals import Refusal, refused, table
from zerojax.checkpoint import Checkpointer
from zerojax.checkpoint.errors import CheckpointError
from zerojax.cli import (
    check_targets,
    generate_command,
    jax_environment,
    script_process,
    script_runs,
    tune_search,
)
from zerojax.cli.finetune_command import _check_one_process

__all__ = ["commands"]

COMMANDS = table(
    f"""
check train.py steps=3 | steps=3 | leave | check train.py
check train.py --devices 100000 | --devices 100000 1024 | fewer | check train.py --devices 8
check train.py --steps 100000 | --steps 100000 1000 | fewer | check train.py --steps 8
{PLAN} --devices 1000000 | --devices 1000000 262144 | fewer | {PLAN} --devices 262144
plan --devices 8 --parameter x --collectives | --parameter | leave --gpu
  | plan --devices 8 --parameter x ; {PLAN} --collectives
{PLAN} --memory-fraction 2 | --memory-fraction 2 | 0.92 | {PLAN} --memory-fraction $
{PLAN} --collectives --no-compile | --collectives --no-compile | leave
  | {PLAN} --collectives ; {PLAN} --no-compile
{PLAN} --collectives --search | --collectives --search | leave
  | {PLAN} --collectives ; {PLAN} --search
{PLAN} --generation --search | --generation --search | leave
  | {PLAN} --generation ; {PLAN} --search
{PLAN} --card node_devices | 'node_devices' | "--card node_devices=2" | {PLAN} $
profile --out new --start | --out --start | leave | profile --out new ; profile --start
profile opt_state=nvme mesh.offload.params=nvme | offload.params=nvme | host
  | profile opt_state=host mesh.offload.params=host
report runs/a --out x.html | --out x.html | several | report runs/a ;
    report runs/a runs/b --out x.html
data prepare book.txt out --template a.jinja | --template chats | "--format chat" leave
  | data prepare book.txt out ;
    data prepare book.txt out --format chat --template a.jinja
tune --best 2 | --best 2 | leave --search | tune ; tune --search --best 2
tune --search --no-steps | --search --no-steps | leave | tune --search ; tune --no-steps
tune --search --best 0 | --best 0 | 1 | tune --search --best $
tune --search --budget 0 | --budget 0 | 300 | tune --search --budget $
tune --search --out train.py | --out train.py | new | tune --search --out new.yaml
sweep --max-trials 0 | --max-trials 0 | 1 | sweep --max-trials $
checkpoint export runs/a 1 2 out | 1 2 | newest new
  | checkpoint export runs/a out ; checkpoint export runs/a 1 out ;
    checkpoint export runs/a best out
checkpoint export runs/a out --quantize int8 | --quantize int8 | "--format hugging_face"
  | checkpoint export runs/a out --quantize int8 $
checkpoint export runs/a out --shard-gb 0 | --shard-gb 0 | 5
  | checkpoint export runs/a out --shard-gb $
""",
    (ValueError, CheckpointError),
)


@pytest.fixture
def replaced(commands, monkeypatch):
    """Further commands end where their work would begin."""
    done = lambda *_, **__: 0  # noqa: E731
    for name in (
        "zerojax.cli.plan_command.check",
        "zerojax.cli.plan_command.bound_generation",
        "zerojax.training.metrics.comparison.write_comparison",
        "zerojax.training.metrics.report.write_report",
        "zerojax.cli.data_command._run_chats",
        "zerojax.cli.profile_command.profile_start",
        "zerojax.cli.tune_command.tune_by_search",
    ):
        monkeypatch.setattr(name, done)
    for name, error in (
        ("zerojax.data.preparation.prepare", EndError),
        ("zerojax.cli.sweep_command.prepare_devices", EndError),
        ("zerojax.checkpoint.inspection.find_step", EndError),
        ("zerojax.training.tuning.why_not_measured", EndError),
    ):
        monkeypatch.setattr(name, raising(error))


class EndError(Exception):
    """Ends a command where its work would begin."""


def raising(error: type[Exception]) -> Any:
    def end(*_: Any, **__: Any) -> None:
        raise error

    return end


@pytest.mark.sampled(8)
@pytest.mark.parametrize("row", COMMANDS)
def test_commands(row, replaced, capsys):
    def succeed(words: str) -> None:
        with contextlib.suppress(EndError):
            assert command(words) == 0

    COMMANDS[row].check(succeed)


# --- prompts --------------------------------------------------------------------------------------


def test_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("To be\n")
    Path("none.txt").write_text("\n")
    Path("rows.jsonl").write_text('{"text": "To be"}\n')
    Path("good.jsonl").write_text('{"prompt": "To be"}\n')

    def take(given: dict[str, Any]) -> None:
        args = {"run": "runs/a", "prompt": None, "prompts": None, "overrides": []} | given
        found = generate_command._prompts_and_overrides(argparse.Namespace(**args))
        assert found == (["To be"], [])

    one, file = {"prompt": "To be"}, {"prompts": "prompts.txt"}
    Refusal({}, "0 runs/a", '"--prompts FILE" write', [one, file]).check(take)
    Refusal(one | file, "'To be' prompts.txt", "one", [one, file]).check(take)
    absent = Refusal({"prompts": "no.txt"}, "no.txt", "existing", [file], FileNotFoundError)
    absent.check(take)
    Refusal({"prompts": "none.txt"}, "none.txt 0", "one", [file]).check(take)
    good = {"prompts": "good.jsonl"}
    Refusal({"prompts": "rows.jsonl"}, "rows.jsonl:1", ['{"prompt": "To be"}'], [good]).check(take)
    ids = generate_command._ids
    good = ["2", "2,7", "none"]
    Refusal("2;7", "'2;7'", good, good, argparse.ArgumentTypeError).check(ids)


# --- scripts --------------------------------------------------------------------------------------


def test_a_name_that_a_script_does_not_have(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("parts = {'model': 1, 'batch': 2}\ndef made(): return parts\n")
    named = lambda name: check_targets.parts_by_name(str(path), name)  # noqa: E731
    Refusal("part", "'part'", "function dict", ["parts", "made"]).check(named)


@pytest.mark.parametrize("code", [None, -9, 0])
def test_a_script_that_does_not_come_to_an_end(code, tmp_path):
    """The notes of a child that has begun its script, and not come to a call of zerojax."""
    coded = lambda notes: script_process._code(code, notes, "train.py", 5)  # noqa: E731
    begun = script_process.BEGUN
    remedy = ["zerojax", "check", "train.py:NAME"]
    remedy += ["--time-limit", "shorten"] if code is None else ["remove"]
    Refusal(begun, "train.py", remedy, [f"{begun}{script_process.OVER}"][: code == 0]).check(coded)


def test_scripts_of_other_meshes(tmp_path):
    path = tmp_path / "script.py"

    def call(mesh: str) -> Any:
        path.write_text(
            "import numpy as np, jax, jax.numpy as jnp, zerojax\n"
            "model = (lambda key: {'w': jnp.ones(4)}, lambda params, x: x * params['w'])\n"
            "batch = {'x': np.ones((8, 4), np.float32)}\n"
            "loss = lambda model, batch: jnp.mean(model(batch['x']) ** 2)\n"
            f"zerojax.train(model, {mesh}, [batch], loss=loss, steps=1, run_dir=None)\n"
        )
        return script_runs.call_of_script(str(path), [], 8)

    good = ["zerojax.MeshConfig(zero=1)"]
    bad = "{'train_batch_size': 8, 'gradient_clipping': 1.0}"
    Refusal(bad, "DeepSpeed", "zerojax.MeshConfig --search", good).check(call)
    mesh = jax.make_mesh((8,), ("data",))
    train = lambda mesh_config=None: mesh_config  # noqa: E731
    changed = script_runs._overriding(train, ["zero=3"])
    remedy = "zerojax.MeshConfig dict"
    Refusal(mesh, "zero=3", remedy, [zerojax.MeshConfig(), {"zero": 1}]).check(changed)


# --- processes and devices ------------------------------------------------------------------------


def test_a_fine_tuning_in_several_processes(monkeypatch):
    monkeypatch.setattr(os, "environ", {"ZEROJAX_NUM_PROCESSES": "2", **VARIABLES})
    remedy = '"zerojax finetune FOLDER DATA --out RUN --write-only" "zerojax train RUN/run.yaml"'
    refused(_check_one_process, "2", remedy)
    monkeypatch.setattr(os, "environ", {})
    _check_one_process()


VARIABLES = {"ZEROJAX_PROCESS_ID": "0", "ZEROJAX_COORDINATOR": "127.0.0.1:12355"}


def test_numbers_of_virtual_devices(commands, monkeypatch):
    most = jax_environment.MAX_CPU_DEVICES
    monkeypatch.delitem(sys.modules, "jax")  # as a command begins
    monkeypatch.setattr(os, "environ", {})
    use = jax_environment.use_cpu_devices
    Refusal(most + 1, [f"cpu_devices={most + 1}", most], '"zerojax plan" fewer', [most]).check(use)


def test_a_search_for_an_unknown_card():
    device = lambda kind: types.SimpleNamespace(device_kind=kind)  # noqa: E731
    card = lambda name: tune_search._card(name, device("cpu"))  # noqa: E731
    Refusal(None, "'cpu'", '"--gpu h100" YAML', ["h100"]).check(card)


def test_commands_in_several_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    search = lambda: tune_search.tune_by_search(argparse.Namespace(), None)  # noqa: E731
    refused(search, "--search 2", '"zerojax plan --search" "zerojax tune"')


def test_folders_that_a_command_looks_into(tmp_path, capsys):
    for name in ("runs", "empty"):
        (tmp_path / name).mkdir()
    with Checkpointer(tmp_path / "run") as checkpointer:
        state = {"params": {"w": jnp.ones(2)}}
        checkpointer.save(1, state, data_state={}, config={}, plan={})

    def where(folder: Path) -> None:
        assert command(f"where {folder}") == 0

    good = [tmp_path / "runs"]
    Refusal(tmp_path / "run.txt", "run.txt", "folder", good, FileNotFoundError).check(where)

    def verify(folder: Path) -> None:
        assert command(f"checkpoint verify {folder}") == 0

    bad, good = tmp_path / "empty", [tmp_path / "run"]
    Refusal(bad, [bad], "saved", good, CheckpointError).check(verify)
