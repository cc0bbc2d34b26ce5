"""Tiny runs with slices in files, and without, whose states are compared bit for bit."""

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.small_models import reference_model
from tests.support.trajectories import regression_batch, text_batch
from zerojax.config import MeshConfig, OffloadConfig
from zerojax.data import shard_batch
from zerojax.models.losses import mean_squared_error
from zerojax.optim import adamw
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import Plan, make_plan
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state
from zerojax.tracing.trees import flatten_names

SHARES = {"device": 0.3, "host": 0.3, "nvme": 0.4}


def offload(folder: Path, opt_state: Any = "nvme", **options: Any) -> OffloadConfig:
    """Slices so small that the larger parameters have several."""
    return OffloadConfig(
        opt_state=opt_state, folder=str(folder), slice_elements=100, min_elements=100, **options
    )


class Regression(nnx.Module):
    """Two layers of width 33, which no mesh divides; compiles in a moment."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(12, 33, rngs=rngs)
        self.middle = nnx.Linear(33, 33, rngs=rngs)
        self.down = nnx.Linear(33, 5, rngs=rngs)

    def loss(self, batch: dict) -> Any:
        hidden = jnp.tanh(self.middle(jnp.tanh(self.up(batch["x"]))))
        return mean_squared_error(self.down(hidden), batch["y"])


def plan_of(
    config: OffloadConfig | None,
    zero: int = 1,
    data: int = 8,
    *,
    text: bool = False,
    **options: Any,
) -> Plan:
    """A plan of `Regression`, or of a tiny GPT-2."""
    given = {} if config is None else {"offload": config}
    mesh = make_mesh(MeshConfig(data=data), jax.devices()[:data])
    model = reference_model("gpt2", num_layers=2, num_heads=2, embed_dim=16) if text else Regression
    batch = text_batch(0) if text else regression_batch(0)
    options = {"optimizer": adamw(1e-2, clip_norm=1.0), "precision": "fp32", **options}
    options |= {"persistence_threshold": 100, "zero": zero}
    return make_plan(model, mesh, example_batch=batch, **given, **options)


def batch_of(plan: Plan, index: int) -> Any:
    """A batch on the plan's devices."""
    make = text_batch if "tokens" in plan.abstract_batch else regression_batch
    return shard_batch(plan, make(index))


def train(plan: Plan, steps: int, state: Any = None, first: int = 0) -> tuple[Any, list[float]]:
    """(state, losses) after `steps` more steps."""
    state = init_state(plan) if state is None else state
    step, losses = build_step(plan), []
    for index in range(first, first + steps):
        state, metrics = step(state, batch_of(plan, index))
        losses.append(float(metrics["loss"]))
    return state, losses


def portable(plan: Plan, state: Any) -> dict[str, np.ndarray]:
    """{name: the whole array} of the portable form."""
    return {n: np.array(x) for n, x in flatten_names(to_portable_state(plan, state)).items()}


def differing(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    """Names of arrays that are not the same bit for bit."""
    assert one.keys() == other.keys()
    same = lambda x, y: x.dtype == y.dtype and x.tobytes() == y.tobytes()  # noqa: E731
    return [name for name in one if not same(one[name], other[name])]


def close(state: Any) -> None:
    """Ends the store of a state."""
    if state.get("disk"):
        state["disk"].close()


def num_leaves(state: Any) -> int:
    return len(jax.tree.leaves(state["disk"]))


def steps_as_undisturbed(plan: Plan, state: Any, step: Any, other: Plan, batch: Any) -> None:
    """Checks that a step of `state` has the loss and the bits of the first step of `other`.

    Closes both states.
    """
    state, metrics = step(state, batch)
    found = portable(plan, state)
    close(state)
    expected, expected_metrics = build_step(other)(init_state(other), batch)
    assert float(metrics["loss"]) == float(expected_metrics["loss"])
    assert differing(found, portable(other, expected)) == []
    close(expected)


def fail_after(
    patched: pytest.MonkeyPatch,
    call: str,
    number: int,
    *,
    error: int = errno.EIO,
    counts: Callable[[int], bool] = lambda descriptor: True,
) -> None:
    """Lets calls of `os.preadv` or `os.pwritev` fail after so many; others of a file that does not
    count go on."""
    real, calls = getattr(os, call), []

    def fail(descriptor: int, *args: Any) -> int:
        calls.extend([1] * counts(descriptor))
        if len(calls) > number and counts(descriptor):
            raise OSError(error, os.strerror(error))
        return real(descriptor, *args)

    patched.setattr(os, call, fail)


@contextlib.contextmanager
def counted_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Counts the bytes that are read and written."""
    done = {"preadv": 0, "pwritev": 0}

    def move(name: str, real: Any, *args: Any) -> int:
        count = real(*args)
        done[name] += count
        return count

    with monkeypatch.context() as patched:
        for name in done:
            patched.setattr(os, name, functools.partial(move, name, getattr(os, name)))
        yield done
