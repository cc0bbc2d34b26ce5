"""Models of scripts and notebooks reach the process of a check: by value where no name is known."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import zerojax
from tests.support import checked_models as cases
from tests.support.checked_models import batch
from zerojax.equality import pickling
from zerojax.equality.check_result import CheckResult, ComparedRun, Reason

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import dataclasses
import functools
import pickle
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import linen, nnx

import zerojax
from zerojax.equality import pickling


class Block(nnx.Module):
    def __init__(self, width, rngs):
        super().__init__()
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Model(nnx.Module):
    def __init__(self, rngs, width=4):
        self.blocks = nnx.List([Block(width, rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Norm(linen.Module):
    width: int = 4

    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False)(linen.Dense(self.width)(x))


class Network(linen.Module):
    widths: tuple[int, ...] = (4, 5)

    def setup(self):
        self.parts = [Norm(width) for width in self.widths]

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x


@dataclasses.dataclass(frozen=True)
class Settings:
    width: int = 4
    names: list[str] = dataclasses.field(default_factory=list)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@functools.partial(jax.jit, static_argnums=1)
def times(x, number):
    return x * number


def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def make(settings):
    offset = fibonacci(10)

    def loss(model, batch):
        return jnp.mean(clipped(model(batch["x"])) ** 2) + times(offset, 2) + settings.width

    return loss


X = np.ones((2, 4), np.float32)


def update(tx):
    return tx.update({"w": X}, tx.init({"w": X}), {"w": X})[0]["w"]


def use(things):
    return [
        np.asarray(value).tolist()
        for value in (
            things["module"](X),
            things["factory"](nnx.Rngs(1))(X),
            things["network"].init_with_output(jax.random.key(0), X)[0],
            things["loss"](things["module"], {"x": X}),
            *(update(things[name]) for name in ("optimizer", "muon", "own")),
            jax.random.normal(things["key"], (2,)),
            things["contrib"](),
        )
    ]


if __name__ == "__main__":
    things = {
        "module": Model(nnx.Rngs(0)),
        "factory": lambda rngs: Model(rngs, width=4),
        "network": Network(),
        "loss": make(Settings()),
        "optimizer": optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(optax.warmup_cosine_decay_schedule(0.1, 1, 2, 10)),
        ),
        "muon": optax.contrib.muon(1e-2),
        "own": zerojax.adamw(1e-2),
        "key": jax.random.key(3),
        "contrib": lambda: float(callable(optax.contrib.muon)),
        "use": use,
    }
    with open(sys.argv[1], "wb") as file:
        file.write(pickling.dumps(things))
    print(use(things))
"""

READER = """
import sys
from zerojax.equality import pickling
from zerojax.equality.check_result import CheckResult, ComparedRun, Reason

with open(sys.argv[1], "rb") as file:
    things = pickling.loads(file.read())
print(things["use"](things))
"""


@pytest.mark.slow
def test_what_a_script_defines_computes_the_same_in_another_process(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(*words: str) -> str:
        result = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert run("script.py", "things") == run("-c", READER, "things")


def test_functions_and_classes_inside_of_functions_go_by_value():
    factor = 3

    class Own(nnx.Module):
        def __init__(self, rngs):
            super().__init__()
            self.scale = nnx.Param(jnp.float32(factor))

        def again(self):
            return Own(nnx.Rngs(0))

    made = pickling.loads(pickling.dumps({"class": Own, "call": lambda x: factor * x}))
    assert made["call"](2) == 6
    assert made["class"] is not Own
    assert type(made["class"](nnx.Rngs(0)).again()) is made["class"]
    # What can be imported stays what it is.
    assert pickling.loads(pickling.dumps(cases.mean)) is cases.mean


def test_what_is_of_this_process_alone_is_refused():
    with pytest.raises(pickling.NotSendableError, match="lock"):
        pickling.dumps(threading.Lock())
    lock = threading.Lock()
    with pytest.raises(pickling.NotSendableError):
        pickling.dumps(lambda: lock)


@pytest.mark.slow
def test_a_check_runs_in_a_process_of_its_own(monkeypatch):
    """Whose devices and settings are its own; its errors are raised here."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")  # this process could be one of two
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29411")
    scale = 2.0
    result = zerojax.check(
        cases.PAIR,
        batch,
        loss=lambda model, batch: scale * jnp.mean(cases.errors(model, batch)),
        optimizer=optax.sgd(0.1),
        devices=2,
    )
    assert result.agrees, result.table()
    assert {run.name.split(",")[0] for run in result.runs} == {"1 device", "2 devices"}
    assert not result.notes
    with pytest.raises(TypeError, match="cannot train a int"):
        zerojax.check(3, batch, loss=cases.mean, devices=2)
    with pytest.raises(RuntimeError, match=r"longer than timeout=0\.1 seconds"):
        zerojax.check(cases.PAIR, batch, loss=cases.mean, timeout=0.1)


def test_what_cannot_be_sent_is_checked_here_and_says_so(monkeypatch):
    lock = threading.Lock()
    seen = []

    def here(request):
        seen.append(request)
        return request

    monkeypatch.setattr("zerojax.equality.check_here", here)

    def loss(model, batch):
        with lock:
            return cases.mean(model, batch)

    zerojax.check(cases.PAIR, batch, loss=loss)
    assert "the check ran in this process" in seen[0].notes[0]
    monkeypatch.setattr(jax, "devices", lambda *_: [None])
    with pytest.raises(RuntimeError, match="zerojax check FILE.py"):
        zerojax.check(cases.PAIR, batch, loss=loss)


def test_results_are_pickled_whole():
    result = CheckResult(
        agrees=False,
        reasons=(Reason("sum", "a sum", "a mean", "file.py:3: x"),),
        runs=(ComparedRun("1 device", "plain", True, 0.0, 0.0, 0.0, noise={"loss": 3e-5}),),
        notes=("few rows",),
        tolerances={"loss": 4e-6},
        seconds=1.0,
    )
    assert pickle.loads(pickle.dumps(result)) == result
    assert "note: few rows" in result.table()
    assert "loss 4e-06 + noise 3e-05" in result.table()
