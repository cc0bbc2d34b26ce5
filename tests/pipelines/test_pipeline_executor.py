"""The executor: every schedule gives the gradients that one device gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.support.pipeline_toy import (
    Toy,
    build_pipelined,
    make_batch,
    make_extras,
    microbatch,
    plain,
    restore,
    store,
)
from zerojax.config import MeshConfig
from zerojax.placement.device_mesh import make_mesh
from zerojax.schedules import check_schedule, forward_schedule, make_schedule
from zerojax.tracing.loops.split import split_passes

KEY = jnp.uint32(7)


def relative_error(ours, theirs):
    """Largest difference of a leaf, over the largest number in it.

    A single number is a sum of terms of both signs, which may nearly cancel: its difference counts
    over the largest number of all leaves.
    """
    worst = 0.0
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))
    largest = max(float(np.max(np.abs(b))) for _, b in pairs)
    for a, b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        scale = np.max(np.abs(b)) if b.size > 1 else largest
        worst = max(worst, float(np.max(np.abs(a - b)) / scale))
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
    """Up to the order in which float32 sums are taken; 2.7e-7 was the largest that was seen."""
    ((sums, extras), grads), ((their_sums, their_extras), their_grads) = ours, theirs
    assert relative_error(sums, their_sums) < 5e-7
    assert relative_error(grads, their_grads) < 5e-7
    for name in extras:
        np.testing.assert_array_equal(extras[name], their_extras[name])


SCHEDULES = ["1f1b", "gpipe", "1f1b_classic", "interleaved", "zb_h1", "zb_v"]


def even(toy, schedule):
    parts = schedule.num_virtual_stages
    return (toy.num_layers // parts,) * parts


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "stages", "stash"),
    [
        pytest.param("1f1b", 4, "residuals", marks=pytest.mark.slow),
        ("1f1b", 2, "input"),
        pytest.param("gpipe", 2, "residuals", marks=pytest.mark.slow),
        pytest.param("1f1b_classic", 4, "input", marks=pytest.mark.slow),
        ("interleaved", 2, "residuals"),
        pytest.param("zb_h1", 2, "input", marks=pytest.mark.slow),
        ("zb_v", 2, "residuals"),
    ],
)
def test_gradients_are_those_of_one_device(name, stages, stash):
    toy = Toy(tied=name != "gpipe", remat=name == "1f1b", counter=name == "interleaved")
    schedule = make_schedule(name, stages=stages, microbatches=2 * stages)
    check(*run(toy, schedule, even(toy, schedule), stash=stash))


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_for_every_schedule_and_number_of_microbatches(name, stages, times):
    schedule = make_schedule(name, stages=stages, microbatches=times * stages)
    toy = Toy(tied=times != 2, remat=stages == 4, counter=times == 4)
    stash = "input" if (times + stages // 2) % 2 else "residuals"
    check(*run(toy, schedule, even(toy, schedule), stash=stash))


@pytest.mark.thorough
def test_stages_may_have_different_numbers_of_layers():
    schedule = make_schedule("1f1b", stages=4, microbatches=4)
    check(*run(Toy(num_layers=7), schedule, (1, 3, 2, 1)))


@pytest.mark.thorough
def test_embedding_and_head_on_all_stages_give_the_same():
    """As where collectives are in them: every stage computes them, and most throw it away."""
    schedule = make_schedule("interleaved", stages=2, microbatches=4)
    toy = Toy(tied=False)
    check(*run(toy, schedule, even(toy, schedule), alone=False))


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "count"), [("1f1b", 5), ("zb_v", 3), ("interleaved(4)", 6)])
def test_the_forward_pass_alone(name, count):
    schedule = forward_schedule(make_schedule(name, stages=2, microbatches=2), count)
    toy = Toy()
    blocks, outer = toy.init()
    extras, batch = make_extras(toy), make_batch(count)
    local, flat = build_pipelined(toy, schedule, even(toy, schedule), backward=False)
    step = over_stages(local, 2, backward=False)
    sums = step(store(blocks, flat), outer, extras, batch, KEY)
    (theirs, _), _ = plain(toy, blocks, outer, extras, batch, KEY)
    assert relative_error(sums, theirs) < 1e-6


@pytest.mark.thorough
def test_an_input_stash_holds_no_more_than_inputs_and_residuals_no_weights():
    """What goes through buffers depends on the microbatch: not on weights alone."""
    toy = Toy(remat=True)
    blocks, outer = toy.init()
    extras, batch = make_extras(toy), make_batch(2)
    rows = jnp.arange(toy.num_layers)

    def layers(weights, fixed, inputs, index):
        given = microbatch(batch, KEY, index)
        return toy.layers(weights, fixed["outer"], extras, *given, fixed["rows"], inputs)

    (x,), _ = toy.embed(outer, extras, *microbatch(batch, KEY, jnp.int32(1)))
    fixed = {"outer": outer, "rows": rows}
    passes = split_passes(layers, blocks, fixed, [x], jnp.int32(1))
    sizes = {leaf.shape for leaf in jax.tree.leaves(blocks)}
    assert not sizes & {leaf.shape for leaf in passes.stored}
    # One input for each layer, and numbers: a count, a row, the microbatch's own.
    large = [leaf for leaf in passes.stored if leaf.size >= x.size]
    assert [leaf.shape for leaf in large] == [(toy.num_layers, *x.shape)] * len(large)
    assert len(large) <= 2  # the input, and the noise that does not depend on it
    outputs, _, stored = passes.forward(blocks, fixed, [x], jnp.int32(1))
    cotangents = [jnp.ones_like(y) for y in outputs]
    found = passes.backward(blocks, fixed, stored, cotangents)
    _, pull, _ = jax.vjp(
        lambda blocks, x: layers(blocks, fixed, x, jnp.int32(1)), blocks, [x], has_aux=True
    )
    assert relative_error(found, pull(cotangents)) < 1e-6


@pytest.mark.sampled(4)
@pytest.mark.parametrize("count", [1, 3, 4, 7])
@pytest.mark.parametrize("name", ["1f1b", "interleaved(3)", "zb_v"])
def test_forward_schedules_have_no_gap_and_hold_no_more_than_they_need(name, count):
    given = make_schedule(name, stages=4, microbatches=4)
    schedule = check_schedule(forward_schedule(given, count))
    assert (schedule.num_chunks, schedule.placement) == (given.num_chunks, given.placement)
    ticks = [at for (kind, *_), at in schedule.tick_of.items() if kind == "F"]
    if name == "1f1b":
        assert max(ticks) + 1 == count + 3
    if name == "interleaved(3)" and count == 4:
        assert max(ticks) + 1 == 3 * count + 3
