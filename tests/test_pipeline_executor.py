"""The executor: every schedule gives the gradients that one device gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.pipeline_toy import Toy, build_pipelined, make_batch, make_extras, plain, restore, store
from zerojax.config import MeshConfig
from zerojax.mesh import make_mesh
from zerojax.schedules import make_schedule

KEY = jnp.uint32(7)


def relative_error(ours, theirs):
    """Largest difference of a leaf, over the largest number in it."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        worst = max(worst, float(np.max(np.abs(a - b)) / np.max(np.abs(b))))
    return worst


def over_stages(local, stages, *, backward=True):
    mesh = make_mesh(MeshConfig(data=1, stage=stages), jax.devices()[:stages])
    blocks = P("stage")
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(blocks, P(), P(), P(), P()),
            out_specs=((P(), P()), (blocks, P())) if backward else P(),
            axis_names={"replica", "data", "stage"},
            check_vma=False,
        )
    )


def run(toy, schedule, layers, **options):
    blocks, outer = toy.init()
    extras, batch = make_extras(toy), make_batch(schedule.num_microbatches)
    local, flat = build_pipelined(toy, schedule, layers, **options)
    step = over_stages(local, schedule.num_stages)
    found, (chunks, others) = step(store(blocks, flat), outer, extras, batch, KEY)
    expected = plain(toy, blocks, outer, extras, batch, KEY)
    return (found, (restore(chunks, flat), others)), expected


def check(ours, theirs):
    """Up to the order in which float32 sums are taken."""
    ((sums, extras), grads), ((their_sums, their_extras), their_grads) = ours, theirs
    assert relative_error(sums, their_sums) < 1e-6
    assert relative_error(grads, their_grads) < 1e-6
    for name in extras:
        np.testing.assert_array_equal(extras[name], their_extras[name])


SCHEDULES = ["1f1b", "gpipe", "1f1b_classic", "interleaved", "zb_h1", "zb_v"]


@pytest.mark.parametrize("stash", ["residuals", "input"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_one_device(name, stages, stash):
    toy = Toy(tied=name != "gpipe", remat=name == "1f1b", counter=name == "interleaved")
    schedule = make_schedule(name, stages=stages, microbatches=2 * stages)
    parts = schedule.num_virtual_stages
    check(*run(toy, schedule, (toy.num_layers // parts,) * parts, stash=stash))
