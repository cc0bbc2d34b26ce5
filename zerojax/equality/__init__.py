"""Defines `zerojax.check`, which compares training of a user's model on one and on several devices.

Sends a request to a child process with CPU devices, and returns the child's result. The child runs
the check by `check_in_child`.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from zerojax.config.checks import (
    MAX_CPU_DEVICES,
    MAX_SIZE,
    check_kind,
    check_whole_number,
    names_keywords,
)
from zerojax.config.run import OptimizerConfig
from zerojax.config.tree_types import Batch
from zerojax.equality.check_in_child import MICROBATCHES, Request, check_here
from zerojax.equality.check_result import CheckResult as CheckResult
from zerojax.equality.check_result import ComparedRun as ComparedRun
from zerojax.equality.check_result import DisagreementError as DisagreementError
from zerojax.equality.check_result import Reason as Reason
from zerojax.equality.pickling import NotSendableError, dumps
from zerojax.models.given_arrays import as_arrays, own_arrays
from zerojax.plan.refusals import check_rows
from zerojax.tracing.protocol import Loss, ModelLike

_JAX_SETTINGS = (
    "jax_numpy_rank_promotion",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_default_matmul_precision",
)
"""JAX settings that change a model's results; they are passed on to the child process."""


@names_keywords()
def check(
    model: ModelLike,
    batch: Batch,
    *,
    loss: Loss | None = None,
    optimizer: optax.GradientTransformation | OptimizerConfig | None = None,
    freeze: str | Sequence[str] = (),
    devices: int = 4,
    steps: int = 3,
    seed: int = 0,
    thorough: bool = False,
    strict: bool = False,
    timeout: float = 600.0,
) -> CheckResult:
    """Checks that a model, its loss and its optimizer train the same on any number of devices.

    Takes a few steps in float32 in plain JAX (`jax.value_and_grad` and optax) and with zerojax: on
    one device, and on `devices` virtual devices at ZeRO stages 0 to 3, with one or two
    microbatches and with every parameter split and padded. Compares losses, gradient norms,
    parameters and the model's other arrays (its state). If they differ, experiments with the plain
    loss search for the reason and the line of the user's code.

    The check runs in a child process with CPU devices, whatever devices this process uses.
    Functions and classes of a script or a notebook are pickled by value. If the model cannot be
    pickled (for example, because it holds a lock or an open file), the check runs in this process
    on its CPU devices, and adds a note to the result. For a large model, check a small version with
    the same kinds of layers, but fewer and narrower ones.

    Args:
      model: model, as for `zerojax.train`.
      batch: global batch of real data (tree of arrays whose dimension 0 is the rows), or a function
        `step -> batch`, with steps from 0. Rows beyond a multiple of devices x 2 are left out.
      loss: function `loss(model, batch)` as for `zerojax.train`; None calls the model's method.
      optimizer: an optax transformation, an `OptimizerConfig`, or None for its defaults. The
        learning rate of an `OptimizerConfig` is constant in the check.
      freeze: regular expressions; parameters whose names match are not trained.
      devices: number of virtual devices, at least 2; a batch with too few rows uses fewer devices.
      steps: number of training steps of each run.
      seed: random seed for new parameters.
      thorough: whether to run every ZeRO stage with each number of microbatches: ten runs instead
        of five.
      strict: whether dropout and batch statistics, which differ between devices by design, count
        as disagreement.
      timeout: maximum seconds for the child process.

    Returns:
      The result; use `print(result.table())`, `result.agrees` or `result.require()`.

    Raises:
      ValueError, TypeError: the batch or a number is invalid.
      RuntimeError: the child process failed or took longer than `timeout`; or the model cannot be
        pickled, and this process has fewer than two CPU devices.
    """
    request = make_request(
        model,
        batch,
        loss=loss,
        optimizer=optimizer,
        freeze=freeze,
        devices=devices,
        steps=steps,
        seed=seed,
        thorough=thorough,
        strict=strict,
    )
    return run_request(request, timeout=timeout)


def make_request(
    model: ModelLike,
    batch: Batch,
    *,
    loss: Loss | None = None,
    optimizer: optax.GradientTransformation | OptimizerConfig | None = None,
    freeze: str | Sequence[str] = (),
    devices: int = 4,
    steps: int = 3,
    seed: int = 0,
    thorough: bool = False,
    strict: bool = False,
) -> Request:
    """Checks the arguments of `check`, and returns a request that holds a batch for each step.

    Raises:
      ValueError, TypeError: the batch or a number is invalid.
    """
    check_whole_number("devices", devices, 2, MAX_CPU_DEVICES)
    check_whole_number("steps", steps, 1, MAX_SIZE)
    check_kind("loss", loss, Callable, "a function loss(model, batch)")
    batches, devices, notes = _batches(batch, devices, steps)
    return Request(
        model=model,
        loss=loss,
        optimizer=optimizer,
        batches=batches,
        freeze=(freeze,) if isinstance(freeze, str) else tuple(freeze),
        devices=devices,
        seed=seed,
        thorough=thorough,
        strict=strict,
        notes=notes,
    )


def run_request(request: Request, *, timeout: float) -> CheckResult:
    """Runs the check in a child process, or in this process if the request cannot be pickled or the
    child cannot read it.

    Raises:
      RuntimeError: the child takes longer than `timeout` seconds, or ends without a result.
      ValueError, TypeError: the error of the check.
    """
    try:
        data = dumps(request)
    except NotSendableError as error:
        return _checked_here(request, str(error))
    with tempfile.TemporaryDirectory(prefix="zerojax-check-") as folder:
        given, answer = Path(folder) / "request", Path(folder) / "answer"
        given.write_bytes(pickle.dumps((_settings(), sys.path, data)))
        command = [sys.executable, "-m", "zerojax.equality.child", str(given), str(answer)]
        try:
            ended = subprocess.run(
                command,
                env=_environment(request.devices),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the check took longer than timeout={timeout:g} seconds; check a smaller version "
                "of the model, with fewer and narrower layers, or raise timeout"
            ) from None
        if not answer.exists():
            tail = "\n".join(ended.stderr.strip().splitlines()[-12:])
            raise RuntimeError(
                f"the process of the check ended with code {ended.returncode} without a result:\n"
                f"{tail}"
            )
        kind, value = pickle.loads(answer.read_bytes())
    if kind == "unreadable":
        return _checked_here(request, value)
    if kind == "error":
        raise value
    return value


def _checked_here(request: Request, why: str) -> CheckResult:
    """Runs the check in this process, which must have at least two CPU devices."""
    count = len(jax.devices("cpu"))
    if count < 2:
        raise RuntimeError(
            "the model cannot be sent to a child process, and this process has a single CPU "
            f"device; define model, loss and optimizer in a module or a script and call `zerojax "
            f"check FILE.py` ({why})"
        )
    note = f"the check ran in this process, because the model cannot be pickled ({why})"
    devices = min(request.devices, count)
    batches = [_cut(batch, devices) for batch in request.batches]
    notes = *request.notes, note
    return check_here(dataclasses.replace(request, devices=devices, batches=batches, notes=notes))


def _settings() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in _JAX_SETTINGS if hasattr(jax.config, name)}


def _environment(devices: int) -> dict[str, str]:
    """Returns environment variables for the child: CPU devices only, and a single process."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if "xla_force_host_platform_device_count" not in flag]
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        # Each program runs only a few steps, so compiling takes most of the time.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": " ".join(kept),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "ZEROJAX_NUM_PROCESSES": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def _batches(batch: Batch, devices: int, steps: int) -> tuple[list[Any], int, tuple[str, ...]]:
    """Returns (a batch for each step, number of devices that divides its rows, notes).

    Raises:
      ValueError: the batch has too few rows, or leaves with different numbers of rows.
    """
    made = (batch(step) if callable(batch) else batch for step in range(steps))
    batches = [own_arrays(jax.tree.map(np.asarray, as_arrays(one))) for one in made]
    rows, *_ = map(check_rows, batches)
    if rows < 2 * MICROBATCHES:
        raise ValueError(
            f"the batch has {rows} rows; a check needs at least {2 * MICROBATCHES} rows, for 2 "
            f"devices with {MICROBATCHES} microbatches each; with 16 or more it compares more "
            "devices"
        )
    notes = []
    fitting = max(n for n in range(2, devices + 1) if n * MICROBATCHES <= rows)
    if fitting < devices:
        notes.append(f"{fitting} devices instead of {devices}: the batch has {rows} rows")
    batches = [_cut(one, fitting) for one in batches]
    if (kept := check_rows(batches[0])) < rows:
        notes.append(
            f"{kept} of {rows} rows were used, as rows must be a multiple of {fitting} devices x "
            f"{MICROBATCHES} microbatches"
        )
    return batches, fitting, tuple(notes)


def _cut(batch: Batch, devices: int) -> Any:
    unit = devices * MICROBATCHES
    return jax.tree.map(lambda x: x[: len(x) // unit * unit], batch)
