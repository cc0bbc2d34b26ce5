"""What docs/vision_and_diffusion.md says of examples 20 and 21, with a few steps of each."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax

pytest.importorskip("sklearn.datasets", reason="the digits of the examples")

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 2e-5
"""Of losses near 1 after a few steps of float32, summed in another order; 4e-6 were seen."""
ON_EIGHT = {"zero": 3, "persistence_threshold": 0}


def example(name: str) -> dict[str, Any]:
    """Returns the names of an example, which does not train unless it is the main program."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name=name)


def losses_of(names, model, devices, *, loss=None, steps=4, **mesh):
    """Returns the losses of a few steps on some devices, and the trainer."""
    trainer = zerojax.train(
        names[model],
        zerojax.make_mesh({"data": devices}, devices=jax.devices()[:devices])
        if not mesh
        else {"data": devices, **mesh},
        names["make_batch"],
        loss=loss or names["loss"],
        optimizer=zerojax.adamw(2e-3),
        steps=steps,
        run_dir=None,
        log=zerojax.LogConfig(every=1, console="quiet"),
    )
    return [report["loss"] for report in trainer.history], trainer
