"""Products of experts over tiles of rows that there are: the table of tiles, and what is computed.

A loop of XLA goes through the table that the kernel goes through, on any device; rows of no expert
are NaN in it. The kernel itself is compared in test_kernels_grouped.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import zerojax
from pallas_kernels import grouped as kernels
from pallas_kernels.grouped import (
    Segments,
    grouped_product,
    most_visits,
    reference_product,
    row_tile,
    segments_of,
    visits_of,
)
from tests.operators.test_experts import (
    EXPERTS,
    TOKENS,
    TOLERANCE,
    K,
    arrays,
    assert_close,
    plain,
    routing,
    swiglu,
)
from tests.parallel.test_expert_axis import (
    assert_same_gradients,
    assert_same_run,
    gradients,
    mixture,
    on_one_device,
    run_of,
)
from tests.support.trajectories import plan_for, text_batch, train_for
from tests.zoo.test_moe import EXPERTS as FEW_EXPERTS
from tests.zoo.test_moe import llama
from zerojax.config import MoEConfig
from zerojax.hardware.gpus import find_gpu
from zerojax.operators.grouped_products import most_rows, whole_slots, whole_tiles
from zerojax.operators.routed_experts import experts_split_over, rounds_needed
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.make import make_plan
from zerojax.zoo.moe import _GatedMlps

GROUPS, ROWS, IN, OUT = 5, 256, 24, 16
SIZES = {
    "straddling": (70, 0, 121, 1, 40),
    "whole tiles": (64, 128, 0, 64, 0),
    "one has all": (0, 0, 256, 0, 0),
    "none": (0, 0, 0, 0, 0),
}


def rows_of(visits, tile):
    """[rows] of a group each: its number, -1 for none; each visit is of a new part of it."""
    found = np.full(ROWS, -1)
    for group, at, first, last in zip(*map(np.asarray, visits[:4]), strict=True):
        part = found[at * tile + first : at * tile + last]
        assert 0 <= first <= last <= tile
        assert np.all(part == -1), "a row is in two visits"
        part[:] = group
    return found


@pytest.mark.parametrize("tile", [64, 128])
def test_a_table_has_every_row_once(tile):
    random = np.random.default_rng(0)
    table = jax.jit(lambda sizes: visits_of(segments_of(sizes), GROUPS, ROWS, tile))
    drawn = [random.multinomial(random.integers(ROWS + 1), np.ones(GROUPS) / GROUPS)]
    drawn += [random.multinomial(ROWS, random.dirichlet(np.ones(GROUPS) / 3)) for _ in range(50)]
    for sizes in (*SIZES.values(), *drawn):
        visits = table(jnp.asarray(sizes, jnp.int32))
        wanted = np.repeat([*range(GROUPS), -1], [*sizes, ROWS - sum(sizes)])
        np.testing.assert_array_equal(rows_of(visits, tile), wanted)
        begin, used = np.asarray(visits.begin), np.asarray(visits.first < visits.last)
        assert begin[-1] == used.sum() <= most_visits(GROUPS, ROWS, tile)
        for group in range(GROUPS):
            assert np.all(np.asarray(visits.group)[begin[group] : begin[group + 1]] == group)
        assert begin[-1] <= sum(sizes) // tile + GROUPS  # less than a tile more for each group


@pytest.mark.thorough
def test_rows_may_lie_in_several_segments_of_a_group():
    """As slots that are taken from the first on, of two devices for each expert."""
    count = jnp.asarray([3, 40, 0, 64, 64, 1, 9, 0], jnp.int32)
    start, count = jnp.arange(8, dtype=jnp.int32) * 32, jnp.minimum(count, 32)
    visits = visits_of(Segments(start, count), 4, ROWS, 64)
    wanted = np.concatenate([[s // 2] * int(n) + [-1] * (32 - int(n)) for s, n in enumerate(count)])
    np.testing.assert_array_equal(rows_of(visits, 64), wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("case", SIZES)
def test_a_product_and_its_derivatives_are_those_of_each_row(case):
    """In float64, against every matrix on every row; rows of no group are left out."""
    with jax.enable_x64(True):
        random = np.random.default_rng(1)
        rows, matrices, slope = (
            jnp.asarray(random.normal(size=shape))
            for shape in ((ROWS, IN), (GROUPS, IN, OUT), (ROWS, OUT))
        )
        segments = segments_of(jnp.asarray(SIZES[case]))
        mine = (jnp.arange(ROWS) < sum(SIZES[case]))[:, None]
        found, pull = jax.vjp(
            lambda *given: grouped_product(*given, segments, impl="loop"), rows, matrices
        )
        expected, plainly = jax.vjp(lambda *x: reference_product(*x, segments), rows, matrices)
        assert np.all(np.isnan(found) == ~np.asarray(mine))
        of_rows, of_matrices = pull(slope)
        found = jnp.where(mine, found, 0), jnp.where(mine, of_rows, 0), of_matrices
        for one, other in zip(found, (expected, *plainly(slope)), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * (1 + np.abs(other).max()))


def result_and_slopes(way, given, ids):
    def total(x, gates, weights):
        out = way(x, gates, ids, weights)
        return jnp.sum(given["slope"] * out), out

    run = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
    (_, out), slopes = jax.jit(run)(given["x"], given["gates"], given["weights"])
    return out, slopes


def by_tiles(x, gates, ids, weights, **options):
    return zerojax.experts(x, gates, ids, weights, _GatedMlps("silu"), products="loop", **options)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["balanced", "random", "all to one"])
def test_experts_give_what_every_expert_on_every_token_gives(kind, dtype):
    with jax.enable_x64(dtype == "float64"):
        given, ids = arrays(dtype), routing(kind)
        found = result_and_slopes(by_tiles, given, ids)
        assert_close(found, result_and_slopes(plain, given, ids), TOLERANCE[dtype])


@pytest.mark.thorough
def test_choices_that_are_left_out_take_no_row():
    given, ids = arrays("float32"), routing("random")
    keep = jnp.arange(TOKENS * K).reshape(TOKENS, K) % 3 > 0
    found = result_and_slopes(functools.partial(by_tiles, keep=keep), given, ids)

    def batched(x, gates, ids, weights):
        return zerojax.experts(x, gates, ids, weights, swiglu, keep=keep)

    assert_close(found, result_and_slopes(batched, given, ids), TOLERANCE["float32"])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["balanced", "all to one", "random"])
@pytest.mark.parametrize("devices", [2, 8])
def test_a_call_on_several_devices_in_float64(devices, kind):
    with jax.enable_x64(True):
        given, ids = arrays("float64"), routing(kind)
        mesh = Mesh(np.array(jax.devices()[:devices]), "expert")

        def split(*given):
            def local(*given):
                with experts_split_over("expert"):
                    return by_tiles(*given)

            rows = P("expert")
            specs = {"in_specs": (rows,) * 4, "out_specs": rows}
            return jax.shard_map(local, mesh=mesh, check_vma=False, **specs)(*given)

        found = result_and_slopes(split, given, ids)
        assert_close(found, result_and_slopes(plain, given, ids), TOLERANCE["float64"])


@pytest.mark.thorough
@pytest.mark.parametrize(("stage", "expert"), [(0, 2), (1, 8), (2, 4), (3, 4), (3, 1)])
def test_gradients_are_those_of_batched_products(stage, expert):
    """2e-6 of a leaf's largest: the same products, summed in another order."""
    assert_same_gradients(gradients(8, stage, expert, products="loop"), gradients(1, 0, 1))


@pytest.mark.thorough
@pytest.mark.parametrize("stage", range(4))
def test_a_run_is_that_of_batched_products(stage):
    mesh = {"data": 2, "expert": 4}
    many = run_of(mixture(products="loop"), mesh=mesh, zero=stage, persistence_threshold=1)
    assert_same_run(many, on_one_device())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("remat", "options"),
    [("full", {"zero": 3, "mesh": {"data": 4, "expert": 2}}), ("none", {"mesh": {"stage": 2}})],
    ids=["remat", "pipeline"],
)
def test_decoders_train_as_with_batched_products(remat, options):
    """Layers in one loop; one run beside the other on the same mesh."""
    options = {"num_microbatches": 4, "steps": 4, "zero": 1, **options}
    loop = dataclasses.replace(FEW_EXPERTS, products="loop")
    found = train_for(llama(moe=loop, remat=remat), **options)
    assert_same_run(found, train_for(llama(remat=remat), **options))


def test_rounds_are_needed_for_what_other_devices_send_alone():
    ids = jnp.zeros((64, 2), jnp.int32)
    assert rounds_needed(ids, EXPERTS) > 1
    assert rounds_needed(ids, EXPERTS, products="loop") == 1
    with experts_split_over("expert"):
        # 32 slots of an expert in the first round, 8 in each further one.
        assert rounds_needed(ids, EXPERTS, products="loop") == 1 + (128 - 32) // 8
    assert whole_slots(33, 8, 4) == 64


@pytest.mark.thorough
def test_no_load_needs_more_rows_than_a_plan_says():
    """And one needs as many: sizes that are no multiples of a tile."""
    random = np.random.default_rng(2)
    for choices, number in ((32768, 8), (4096, 64), (1000, 7)):
        rows = whole_tiles(choices)
        tile = row_tile(rows, number)
        table = jax.jit(
            lambda n, tile=tile, rows=rows: visits_of(segments_of(n), len(n), rows, tile)
        )
        found = []
        for _ in range(20):
            sizes = random.multinomial(choices, random.dirichlet(np.full(number, 50.0)))
            found.append(int(table(jnp.asarray(sizes, jnp.int32)).begin[-1]) * tile)
        most = most_rows(choices, number, None)
        assert 0.97 * most <= max(found) <= most


def test_what_cannot_run_is_refused_by_the_plan_in_one_sentence():
    model = mixture(products="grouped")
    with pytest.raises(ValueError, match="products='grouped' of experts: .*CPUs; .*moe.products"):
        plan_for(model)
    with pytest.raises(ValueError, match="'loop' of experts: .* 2 devices of tensor parallelism"):
        plan_for(mixture(products="loop"), mesh={"data": 4, "model": 2})
    with pytest.raises(ValueError, match="'gropued' .*batched, grouped, loop"):
        MoEConfig(num_experts=2, products="gropued")


def test_a_jax_that_cannot_build_the_kernel_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "missing", lambda: "the kernels need jax >= 0.11")
    mesh = make_abstract_mesh({"data": 8}, 8, gpu=find_gpu("h100"))
    model = mixture(products="grouped", width=64, hidden=64)
    with pytest.raises(ValueError, match="'grouped' of experts: the kernels need jax >= 0.11; use"):
        make_plan(model, mesh, example_batch=text_batch(0), precision="bf16")
