"""What zerojax expects of a step that a GPU is about to run, from the program that it runs.

Written to a part's record before anything is timed; `python -m benchmarks foresight` compares it
with the measured time.
"""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path
from typing import Any

import jax

import zerojax
from zerojax.forecasting.compiled_step import forecast_attached
from zerojax.hardware.gpus import Gpu, gpu_of_device

ROOT = Path(__file__).resolve().parents[2]


def predict_step(plan: zerojax.Plan, step: Any, gpu: Gpu | None = None) -> dict[str, Any] | None:
    """Predicts time and memory of a step on the devices of its plan.

    Args:
      plan: plan on devices of this process; its step must be one program.
      step: result of `zerojax.build_step(plan)`. Its program is compiled, unless it was called.
      gpu: card to predict for; None: that of the devices.

    Returns:
      The prediction as JSON values, or {"note": error}, since a failure must not lose the
      measurement that follows; None if the devices have no card, such as CPUs.
    """
    card = gpu or gpu_of_device(plan.mesh.devices.flat[0].device_kind)
    if card is None:
        return None
    try:
        made = forecast_attached(plan, step, card)
    except Exception as error:
        return {"note": f"{type(error).__name__}: {error}"[:300]}
    expected, least = made.estimate.expected, made.estimate.step_seconds
    if expected is None or least is None:
        return {"note": f"{card.name} has no published rate for the dtype of this step"}
    memory = made.memory.on_card
    return {
        "expected_ms": 1e3 * expected.seconds,
        "at_best_ms": 1e3 * least,
        "memory_MB": None if memory is None else memory / 1e6,
        "card": card.name,
        "source": expected.source,
        "zerojax": zerojax.__version__,
        "commit": commit(),
        "jax": jax.__version__,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def shown(prediction: dict[str, Any] | None) -> dict[str, float]:
    """Returns what a row of a table shows of a prediction: `expected_ms`, if there is one."""
    found = {} if prediction is None else prediction
    return {"expected_ms": found["expected_ms"]} if "expected_ms" in found else {}


def commit() -> str | None:
    """Returns the commit of the sources, with "-dirty" if they were changed since; None if it is
    not known."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None
