"""The run files of configs/ are what their names say, on devices that need not be here."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import zerojax
from zerojax.config import RunConfig, load

ROOT = Path(__file__).resolve().parent.parent
# File -> devices, bytes of one device, parameters in millions.
EXPECTED = {
    "tiny_shakespeare": (8, 2**30, 1.9),
    "gpt2_124m_zero1_1xh200": (1, 139 * 2**30, 124),
    "llama_1b_zero3_8xh100": (8, 80 * 2**30, 1126),
}


def test_every_run_file_is_looked_at():
    assert {file.stem for file in (ROOT / "configs").glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_plan_of_a_run_file_fits_its_devices(name):
    devices, memory, millions = EXPECTED[name]
    config = load(RunConfig, ROOT / "configs" / f"{name}.yaml")
    shape = config.global_batch_size, config.data.seq_len
    tokens = jax.ShapeDtypeStruct(shape, np.int32)
    plan = zerojax.make_plan(
        zerojax.models.build_model(config.model, config.model.vocab_size or 256),
        zerojax.make_abstract_mesh(config.mesh, devices),
        example_batch={"tokens": tokens, "targets": tokens},
        optimizer=config.optimizer,
        precision=config.precision,
        num_microbatches=config.num_microbatches,
        zero=config.mesh.zero,
        steps=config.steps,
    )
    state = plan.abstract_state
    parameters = sum(leaf.size for leaf in jax.tree.leaves(plan.abstract_canonical["params"]))
    assert parameters == pytest.approx(millions * 1e6, rel=0.02)
    held = sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )
    # Masters and two moments in float32, split over the devices; small leaves may stay whole.
    assert held == pytest.approx(12 * parameters / devices, rel=0.02)
    assert held < memory / 2, "what is left is for activations, gradients and gathered weights"
