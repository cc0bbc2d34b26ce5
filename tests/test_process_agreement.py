"""Processes that are about to start different runs end with the first difference."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import zerojax
from tests.offload_disk_runs import Regression
from tests.process_groups import run_group
from tests.trajectories import plan_for, regression_batch
from zerojax.data import as_feed
from zerojax.training import process_agreement
from zerojax.training.process_agreement import check_same_run, describe_run

OPTIMIZERS = {
    "optax": lambda rate: optax.adamw(rate),
    "schedule": lambda rate: optax.sgd(optax.cosine_decay_schedule(rate, 100)),
    "zerojax": lambda rate: zerojax.adamw(rate),
    "8 bits": lambda rate: zerojax.adam8bit(rate),
    "muon": lambda rate: zerojax.muon(rate, dimensions=None),
}


def described(optimizer=None, *, zero=1, seed=0, steps=5):
    optimizer = optimizer or optax.sgd(0.1)
    plan = plan_for(Regression, batch=regression_batch, optimizer=optimizer, zero=zero)
    loop = {"eval_every": 10}
    return describe_run(plan, as_feed(regression_batch), seed=seed, steps=steps, loop=loop)


def compare(monkeypatch, *runs):
    """Checks the last of several runs, as the last process of a group would."""
    values = [{**run} for run in runs]

    def gather(own):
        if own.dtype == np.uint32:
            digest = process_agreement._digest
            return np.array([[digest(x.encode()) for x in v.values()] for v in values], np.uint32)
        return np.stack([own] * len(runs))

    monkeypatch.setattr(jax, "process_count", lambda: len(runs))
    monkeypatch.setattr(process_agreement, "gather", gather)
    check_same_run(values[-1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_learning_rate_is_found(name, monkeypatch):
    first, same, other = (described(OPTIMIZERS[name](rate)) for rate in (0.01, 0.01, 0.02))
    compare(monkeypatch, first, same)
    with pytest.raises(ValueError, match="process 0 and process 1"):
        compare(monkeypatch, first, other)


@pytest.mark.parametrize(
    ("change", "what"),
    [({"seed": 1}, "seed"), ({"steps": 6}, "steps"), ({"zero": 2}, "the mesh settings")],
)
def test_the_difference_is_named(change, what, monkeypatch):
    with pytest.raises(ValueError, match=f"^{what} differs between process 0 and process 2"):
        compare(monkeypatch, described(), described(), described(**change))


SCRIPT = """
import jax, numpy as np, optax, zerojax
from tests.offload_disk_runs import Regression
from tests.trajectories import regression_batch
zerojax.join_processes()
rate, steps = {rate}, {steps}
try:
    zerojax.train(Regression, {{"zero": 1}}, regression_batch, optimizer=optax.sgd(rate),
                  steps=steps, run_dir=None)
except ValueError as error:
    print("REFUSED", error)
else:
    print("TRAINED")
"""


@pytest.mark.multihost
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rate", "steps", "expected"),
    [
        ("0.1", "3", "TRAINED"),
        ("0.1 + 0.1 * jax.process_index()", "3", "REFUSED the optimizer"),
        ("0.1", "3 + jax.process_index()", "REFUSED steps differs"),
    ],
)
def test_two_processes_compare_their_runs(rate, steps, expected, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(rate=rate, steps=steps))
    variables = {"JAX_NUM_CPU_DEVICES": "2"}
    outputs = run_group([[str(script)]] * 2, folder=tmp_path, variables=variables, join=True)
    assert all(expected in output for output in outputs), outputs
