"""`zerojax checkpoint resume-check`: a resume on another mesh, compared with the run's own mesh."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.refusals import refused
from tests.training.test_rate_range import config_of, contents
from zerojax.cli import main
from zerojax.data import Feed
from zerojax.training import resume_check
from zerojax.training.resume_check import CLOSE, DIFFERS, IDENTICAL, REDRAWN, check_resume
from zerojax.training.resumed_steps import (
    AFTER,
    BEFORE,
    RECORD,
    StepsRecord,
    StepsRequest,
    take_steps,
)
from zerojax.training.resumed_steps import main as run_child
from zerojax.training.run_file import run_from_config

SAVED = StepsRecord(
    first_step=4,
    axes={"data": 4},
    num_microbatches=1,
    is_deterministic=False,
    plan="plan",
    compute_dtype="float32",
    state={"params/w": "a", "rng": "b"},
    batches=["c", "d"],
    steps=[{"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1}] * 2,
    notes=[],
)
TWO = dataclasses.replace(SAVED, axes={"data": 2})
KEYED = dataclasses.replace(SAVED, steps=[{**SAVED.steps[0], "loss": 2.2}])


def with_losses(record: StepsRecord, *losses: float) -> StepsRecord:
    return dataclasses.replace(record, steps=[{**record.steps[0], "loss": loss} for loss in losses])


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run_from_config(config_of(folder, "steps=2", "zero=0", "eval_every=null"))
    return folder


@pytest.fixture
def compare(saved_run, monkeypatch):
    """Returns the findings of a check whose child processes leave the given records."""

    def check(
        own: StepsRecord, new: StepsRecord, key: StepsRecord, moved: float = 0.0
    ) -> dict[str, str]:
        weights = np.arange(8, dtype=np.float32)

        def run(self, request: StepsRequest, devices: int, folder: Path, title: str):
            record = key if request.other_key else (own if devices == 8 else new)
            after = weights + 1 + moved * (devices != 8)
            return resume_check._Steps(record, {"w": weights}, {"w": after})

        monkeypatch.setattr(resume_check._Children, "run", run)
        found = check_resume(saved_run, devices=2)
        return {one.aspect: one.verdict for one in found.findings} | {
            "agrees": str(found.agrees),
            "exact": str(found.is_exact),
        }

    return check


def test_each_aspect_has_its_own_verdict(compare):
    same = compare(SAVED, TWO, SAVED)
    assert (same.pop("agrees"), same.pop("exact")) == ("True", "True")
    assert set(same.values()) == {IDENTICAL}
    other = {
        "state": dataclasses.replace(TWO, state={"params/w": "x", "rng": "b"}),
        "data": dataclasses.replace(TWO, batches=["c", "x"]),
        "learning rate": dataclasses.replace(
            TWO, steps=[TWO.steps[0], {**TWO.steps[1], "learning_rate": 0.2}]
        ),
        "loss": with_losses(TWO, 2.0, 2.1),
        "gradient norm": dataclasses.replace(
            TWO, steps=[TWO.steps[0], {**TWO.steps[1], "grad_norm": 1.1}]
        ),
    }
    for aspect, record in other.items():
        found = compare(SAVED, record, SAVED)
        assert [name for name, verdict in found.items() if verdict == DIFFERS] == [aspect]
        assert found["agrees"] == "False"
    assert compare(SAVED, TWO, SAVED, moved=0.3)["parameters"] == DIFFERS
    fewer = dataclasses.replace(TWO, state={"rng": "b"}, batches=["c"], steps=TWO.steps[:1])
    found = compare(SAVED, fewer, SAVED)
    assert {found[name] for name in ("state", "data", "loss")} == {DIFFERS}


def test_rounding_is_told_from_a_difference(compare):
    found = compare(SAVED, with_losses(TWO, 2.0, 2.000001), SAVED, moved=1e-3)
    assert (found["loss"], found["parameters"]) == (CLOSE, CLOSE)
    assert (found["agrees"], found["exact"]) == ("True", "False")


def test_random_numbers_may_depend_on_the_mesh_alone(compare):
    assert compare(SAVED, with_losses(TWO, 2.15, 2.0), KEYED)["random numbers"] == REDRAWN
    assert compare(SAVED, with_losses(TWO, 2.0001, 2.0), KEYED)["random numbers"] == CLOSE
    same_mesh = with_losses(SAVED, 2.15, 2.0)
    assert compare(SAVED, same_mesh, KEYED)["random numbers"] == DIFFERS
    exact = [dataclasses.replace(one, is_deterministic=True) for one in (SAVED, TWO)]
    found = compare(exact[0], with_losses(exact[1], 2.15, 2.0), KEYED)
    assert found["random numbers"] == DIFFERS


def test_bad_input_is_refused(tmp_path):
    refused(lambda: check_resume(tmp_path, devices=2), tmp_path.name, "zerojax train")
    refused(lambda: check_resume(tmp_path, devices=0), "devices 0", "1")
    refused(lambda: check_resume(tmp_path, devices=2, steps=0), "steps 0", "1")


@pytest.mark.slow
def test_a_resume_on_fewer_devices_is_compared_in_processes(tmp_path, capsys):
    """Dropout differs by design; all else is equal, and no file of the run changes."""
    words = ("steps=4", "model.dropout=0.1", "eval_every=null")
    run_from_config(config_of(tmp_path, *words))
    before = contents(tmp_path)
    options = ["--devices", "2", "--steps", "2", "--json"]
    assert main(["checkpoint", "resume-check", str(tmp_path), *options, "mesh.zero=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert contents(tmp_path) == before
    verdicts = {one["aspect"]: one["verdict"] for one in found["findings"]}
    assert verdicts["state"] == verdicts["data"] == verdicts["learning rate"] == IDENTICAL
    assert verdicts["random numbers"] == REDRAWN
    assert {verdicts["loss"], verdicts["parameters"]} <= {IDENTICAL, CLOSE}
    assert found["agrees"]
    assert found["steps"] == 2
    options = ["--devices", "2", "--steps", "1", "optimizer.learning_rate=0.1"]
    assert main(["checkpoint", "resume-check", str(tmp_path), *options]) == 4
    assert re.search("learning rate +differs", capsys.readouterr().out)
    assert main(["checkpoint", "resume-check", str(tmp_path), "--devices", "3"]) == 2
    assert "batch size 8 is not divisible by 3 data shards" in capsys.readouterr().err


@pytest.mark.slow
def test_rows_that_come_again_after_a_resume_are_found(tmp_path, monkeypatch):
    """As torchtitan #816: the resumed run has lost its position in the data, and says nothing."""
    run_from_config(config_of(tmp_path, "steps=2", "eval_every=null"))
    restore, steps = Feed.restore, []

    def run(self, request: StepsRequest, devices: int, folder: Path, title: str):
        def lost(feed: Feed, state: dict[str, Any], **options: bool) -> None:
            restore(feed, {**state, "row": 0}, **options)

        if request.other_key:
            return steps[0]
        folder.mkdir()
        other = dataclasses.replace(request, words=(*request.words, "checkpoint.path=other"))
        refused(lambda: take_steps(other, folder), "other", "checkpoint.path")
        is_new = title.endswith("new mesh")
        monkeypatch.setattr(Feed, "restore", lost if is_new else restore)
        record = take_steps(request, folder)
        before, after = (resume_check._arrays(folder / name) for name in (BEFORE, AFTER))
        steps.append(resume_check._Steps(record, before, after))
        return steps[-1]

    monkeypatch.setattr(resume_check._Children, "run", run)
    found = {one.aspect: one for one in check_resume(tmp_path, devices=8, steps=1).findings}
    assert found["data"].verdict == DIFFERS
    assert "step 3" in found["data"].text
    assert found["state"].verdict == IDENTICAL


@pytest.mark.slow
def test_a_deterministic_run_continues_bit_for_bit(tmp_path):
    words = ("steps=3", "model.dropout=0.1", "deterministic=mesh", "eval_every=null")
    run_from_config(config_of(tmp_path, *words))
    found = check_resume(tmp_path, devices=4, steps=2)
    assert found.is_exact, found.page()
    assert "bit for bit" in found.page()


def test_a_child_process_leaves_its_error(tmp_path):
    request = StepsRequest(config=str(tmp_path / "none.json"), words=(), steps=1)
    file = tmp_path / "request.json"
    file.write_text(json.dumps(dataclasses.asdict(request)))
    run_child(str(file), str(tmp_path))
    assert "none.json" in json.loads((tmp_path / RECORD).read_text())["error"]
    assert not (tmp_path / BEFORE).exists()
    assert not (tmp_path / AFTER).exists()
