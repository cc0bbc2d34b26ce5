"""Refusals of checks in another process and of comparisons with DeepSpeed. Nothing is trained."""

from __future__ import annotations

import json
import subprocess
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support.refusals import Refusal, refused
from tests.support.small_models import Line
from zerojax import equality
from zerojax.config import ConfigError
from zerojax.equality import deepspeed_compare, pickling

BATCH = {"x": np.ones((16, 4), np.float32)}


def mean(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]) ** 2)


def test_a_check_that_takes_too_long(monkeypatch):
    """The child ends by its time limit; with another limit, or a smaller model, it would not."""

    def run(command: Any, *, timeout: float, **_: Any) -> None:
        if timeout < 5:
            raise subprocess.TimeoutExpired(command, timeout)
        raise KeyboardInterrupt  # the child began its work

    monkeypatch.setattr(equality.subprocess, "run", run)
    check = lambda limit: zerojax.check(Line, batch=BATCH, loss=mean, timeout=limit)  # noqa: E731
    refused(lambda: check(1), "timeout=1", "smaller raise", error=RuntimeError)
    with pytest.raises(KeyboardInterrupt):
        check(10)


def test_batches_of_checks(monkeypatch):
    monkeypatch.setattr(equality, "run_request", lambda request, **_: request)

    def check(rows: int) -> None:
        batch = {"x": np.ones((rows, 4), np.float32)}
        zerojax.check(Line, batch=batch, loss=mean)

    Refusal(3, "3", "16", [16]).check(check)


def test_models_that_cannot_be_sent():
    hidden = types.ModuleType("hidden_module_of_a_test")
    send = lambda module: pickling.dumps({"module": module})  # noqa: E731
    refused(lambda: send(hidden), hidden.__name__, "importable", error=pickling.NotSendableError)
    send(json)


def test_numbers_of_processes_of_a_comparison(tmp_path, monkeypatch):
    file, ended = tmp_path / "ds.json", RuntimeError("it ends here")

    def end(*_: Any, **__: Any) -> None:
        raise ended

    pretrained = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=8, embed_dim=8))
    monkeypatch.setattr(deepspeed_compare, "from_hugging_face", lambda _: pretrained)
    monkeypatch.setattr(deepspeed_compare, "_run_deepspeed", end)

    def compare(given: dict[str, Any]) -> None:
        """Goes as far as DeepSpeed itself."""
        content = {"train_batch_size": 8, "gradient_clipping": 1.0} | given.get("file", {})
        file.write_text(json.dumps({k: x for k, x in content.items() if x is not None}))
        number = given.get("processes", 8)
        with pytest.raises(RuntimeError, match="it ends here"):
            deepspeed_compare.compare_with_deepspeed(file, tmp_path, processes=number)

    Refusal({"processes": 2}, "8 2", "processes=8", [{"processes": 8}]).check(compare)
    bad = {"file": {"train_batch_size": None}}
    Refusal(bad, "batch", "train_batch_size", [{}], ConfigError).check(compare)


def test_a_python_without_deepspeed(tmp_path):
    said = tmp_path / "said"
    said.write_text("No module named 'deepspeed'\n")
    missing = deepspeed_compare.deepspeed_reference.MISSING
    check = lambda code: deepspeed_compare._check_codes([code], [Path(said)], "python")  # noqa: E731
    remedy = '"pip install torch deepspeed transformers"'
    Refusal(missing, "'deepspeed'", remedy, [0], RuntimeError).check(check)
