"""Many leaves in one kernel: what each would give alone; no tile meets another's elements."""

import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import gradients, mosaic, optimizers, rounding, table, totals
from pallas_kernels.adam8bit import init_moments
from pallas_kernels.adam8bit_kernel import update_adam8bit
from pallas_kernels.adam8bit_many import update_adam8bit_many
from pallas_kernels.choice import Choice
from pallas_kernels.many import update_many
from pallas_kernels.update import update
from tests.kernels.test_kernels_elementwise import (
    BF16,
    F16,
    F32,
    arrays_of,
    check_equal,
    normal,
    scalars_of,
)
from tests.support.kernel_rules import RULES
from tests.support.marks import needs_kernels

XLA = Choice("xla", "the oracle")
by_name = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)

# Tiles of 512, 128, 256; less than a tile; a tile and a tail; nothing but a number.
SHAPES = [(2, 512), (384,), (3, 256), (33,), (513,), (), (640,)]


def leaves_of(rule, shapes=SHAPES, dtypes=(F32,), grad_dtypes=(BF16,)):
    """(updated, read): for each array of the rule a dict of leaves."""
    rows = []
    for number, shape in enumerate(shapes):
        kinds = (dtypes[number % len(dtypes)], grad_dtypes[number % len(grad_dtypes)])
        rows.append(arrays_of(rule, shape, *kinds))
    columns = [zip(*part, strict=True) for part in zip(*rows, strict=True)]
    return tuple(
        tuple({f"leaf {k}": x for k, x in enumerate(column)} for column in part) for part in columns
    )


def one_by_one(rule, updated, read, scalars, *, out_dtypes=(), seeds=None):
    """The reference on each leaf: arrays in the order of trees, then the sums of all leaves."""
    results = []
    for k, name in enumerate(updated[0] if updated else read[0]):
        seed = None if seeds is None else seeds[k]
        more = {"scalars": scalars[k], "out_dtypes": out_dtypes, "seed": seed, "impl": XLA}
        leaf = [tuple(tree[name] for tree in trees) for trees in (updated, read)]
        results.append(update(rule, *leaf, **more))
    columns = zip(*[(*r.updated, *r.outputs) for r in results], strict=True)
    arrays = [x for column in columns for x in column]
    return arrays + [jnp.stack(column) for column in zip(*[r.sums for r in results], strict=True)]


@pytest.mark.thorough
@needs_kernels
@by_name
def test_every_leaf_is_updated_as_it_would_be_alone(rule):
    updated, read = leaves_of(rule)
    outputs = (BF16,) * rule.num_outputs
    more = {"scalars": scalars_of(rule), "out_dtypes": outputs, "impl": "interpret"}
    found = jax.tree.leaves(update_many(rule, updated, read, **more))
    expected = one_by_one(rule, updated, read, [scalars_of(rule)] * len(SHAPES), out_dtypes=outputs)
    check_equal(found, expected, sums=rule.num_sums)


@pytest.mark.thorough
@needs_kernels
def test_leaves_may_differ_in_their_dtypes_and_have_scalars_and_seeds_of_their_own():
    """Decayed leaves, others, and one with its own rate, in one kernel."""
    rule = optimizers.LION
    updated, read = leaves_of(rule, dtypes=(F32, BF16), grad_dtypes=(BF16, F32, F16))
    decayed, plain, slow = (
        optimizers.lion_scalars(rate, weight_decay=decay)
        for rate, decay in ((1e-2, 0.1), (1e-2, 0.0), (1e-4, 0.1))
    )
    scalars = [decayed, plain, decayed, plain, plain, slow, slow]
    seeds = jax.random.bits(jax.random.key(2), (len(SHAPES), 2), jnp.uint32)
    more = {"scalars": scalars, "seeds": seeds, "out_dtypes": (BF16,)}
    found = jax.tree.leaves(update_many(rule, updated, read, impl="interpret", **more))
    reference = jax.tree.leaves(update_many(rule, updated, read, impl=XLA, **more))
    expected = one_by_one(rule, updated, read, scalars, out_dtypes=(BF16,), seeds=seeds)
    for ours, theirs in ((found, expected), (reference, expected)):
        assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in theirs]
        for a, b in zip(ours, theirs, strict=True):
            # A product and a sum contracted otherwise may move what random bits decide (one
            # element in thousands) by a unit of bfloat16: 2^-7 of its size.
            np.testing.assert_allclose(
                np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2**-7, atol=2**-21
            )
            assert np.mean(np.asarray(a) != np.asarray(b)) <= 2 / a.size or a.dtype == F32


# By rows in tiles of 256 and 128, by rows that 128 does not divide, whole, and with a tail.
ROWS = [((2, 256), True), ((2, 33), True), ((384,), False), ((3, 128), True), ((513,), False)]


def numbers_for_rows(rule, shape, has_rows, number):
    """Scalars of one leaf, of which some are other numbers in each row."""
    own = 1.0 + number + jnp.arange(shape[0], dtype=F32) if has_rows else 1.0 + number
    adam = scalars_of(optimizers.LAMB_MOMENTS)._replace(gradient_scale=own)
    if rule is optimizers.LAMB_MOMENTS:
        return adam
    return optimizers.lamb_scalars(adam._replace(gradient_scale=1.0), trust_ratio=own)


@needs_kernels
@pytest.mark.thorough
@pytest.mark.parametrize(
    "rule", [optimizers.LAMB_MOMENTS, optimizers.LAMB_APPLY], ids=lambda rule: rule.name
)
def test_every_row_has_scalars_and_sums_of_its_own(rule):
    shapes, by_row = zip(*ROWS, strict=True)
    updated, read = leaves_of(rule, shapes, grad_dtypes=(F32,))
    scalars = [numbers_for_rows(rule, *row, k) for k, row in enumerate(ROWS)]
    more = {"scalars": scalars, "by_row": by_row}
    alone = []
    for k, (one, has_rows) in enumerate(zip(scalars, by_row, strict=True)):
        leaf = [tuple(tree[f"leaf {k}"] for tree in trees) for trees in (updated, read)]
        alone.append(update(rule, *leaf, scalars=one, by_row=has_rows, impl=XLA))
    arrays = [x for column in zip(*(r.updated for r in alone), strict=True) for x in column]
    sums = [
        jnp.concatenate([x.reshape(-1) for x in column])
        for column in zip(*(r.sums for r in alone), strict=True)
    ]
    assert all(x.shape == (2 + 2 + 1 + 3 + 1,) for x in sums)
    for impl in ("interpret", XLA):
        found = jax.tree.leaves(update_many(rule, updated, read, impl=impl, **more))
        check_equal(found, [*arrays, *sums], sums=rule.num_sums)


@needs_kernels
def test_sums_are_of_the_programs_of_their_leaf_and_of_no_other():
    """Two kernels' numbers; parts shorter and longer than what is read at once, in any order."""
    counts = [[1, 300, 5], [128, 129]]
    partial, parts, expected = [], [], []
    for kernel, own in enumerate(counts):
        drawn = np.random.default_rng(kernel).normal(size=(2, sum(own))).astype(np.float32)
        unwritten = np.full((2, totals.width_of(sum(own))), np.nan, np.float32)
        unwritten[:, : sum(own)] = drawn
        partial.append(jnp.asarray(unwritten.reshape(-1)))
        starts = np.cumsum([0, *own])
        parts += [totals.Part(kernel, a, n) for a, n in zip(starts, own, strict=False)]
        expected += [
            drawn[:, a : a + n].astype(np.float64).sum(1) for a, n in zip(starts, own, strict=False)
        ]
    order = [3, 0, 4, 2, 1]
    found = totals.total(partial, [parts[k] for k in order], 2, interpret=True)
    wanted = np.stack([expected[k] for k in order], axis=1)
    # 300 terms of size 1: their rounding errors are below 300 * 2^-24.
    np.testing.assert_allclose(np.stack(found), wanted, atol=2e-5)


EIGHT_BIT = [(2, 512), (3, 128), (33, 25), (5,)]


@needs_kernels
@pytest.mark.thorough
def test_leaves_with_moments_of_eight_bits_share_a_kernel():
    """Bit for bit as alone. What ends in a short block is on its own in both, and the last bit of
    that block hangs on how a product and a sum are contracted."""
    params = [normal(k, shape, (F32, BF16)[k % 2]) for k, shape in enumerate(EIGHT_BIT)]
    grads = [normal(10 + k, shape, BF16) for k, shape in enumerate(EIGHT_BIT)]
    moments = [init_moments(shape) for shape in EIGHT_BIT]
    seeds = jax.random.bits(jax.random.key(3), (len(EIGHT_BIT), 2), jnp.uint32)
    plain = scalars_of(optimizers.ADAMW)
    scalars = [plain, plain._replace(weight_decay=jnp.float32(0.5))] * 2
    found, reference = (
        update_adam8bit_many(
            params, moments, grads, scalars=scalars, seeds=seeds, compute_dtype=BF16, impl=impl
        )
        for impl in ("interpret", XLA)
    )
    for k, one in enumerate(zip(params, moments, grads, strict=True)):
        more = {"scalars": scalars[k], "seed": seeds[k], "compute_dtype": BF16}
        alone = update_adam8bit(*one, impl="interpret", **more)
        if alone.param.size % 128 == 0:
            chex.assert_trees_all_equal(found[k], alone, strict=True)
        assert not np.array_equal(found[k].moments.mu, moments[k].mu)
        for other in (alone, reference[k]):
            # A code may be the next one where random bits decide it: see test_kernels_adam8bit.
            np.testing.assert_allclose(found[k].compute, other.compute, rtol=2**-7, atol=2**-12)


@pytest.mark.thorough
@needs_kernels
def test_a_skipped_step_changes_nothing_in_any_leaf():
    rule = optimizers.ADAMW
    updated, read = leaves_of(rule)
    bad = ({name: jnp.full_like(x, jnp.nan) for name, x in read[0].items()},)
    more = {"scalars": scalars_of(rule, skip=True), "impl": "interpret"}
    after = update_many(rule, updated, bad, **more).updated
    chex.assert_trees_all_equal(after, updated, strict=True)


@pytest.mark.thorough
@needs_kernels
def test_more_leaves_than_one_kernel_takes(monkeypatch):
    """Three kernels of at most two leaves; and branches within branches."""
    rule = optimizers.SGD
    updated, read = leaves_of(rule, [(128,)] * 5)
    expected = one_by_one(rule, updated, read, [scalars_of(rule)] * 5)
    for name, limit in (("MAX_PARAMETERS", 6), ("BRANCHES", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(table, name, limit)
            jax.clear_caches()
            found = update_many(rule, updated, read, scalars=scalars_of(rule), impl="interpret")
            check_equal(jax.tree.leaves(found), expected)
    jax.clear_caches()


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2, 16, 17])
def test_every_program_finds_its_leaf_once(count):
    """The branches, followed with numbers."""
    rows = [((number * 7) % 3 + 1, 128) for number in range(count)]
    entries = [
        table.Entry(leaf, mosaic.tiles_of_rows(shape, block=128), table.ScalarsAt(leaf))
        for leaf, shape in enumerate(rows)
    ]
    (whole,) = table.tables_of(entries, arrays=3)
    found = []
    for program in range(sum(entry.programs for entry in whole)):
        cuts = list(range(count + 1))
        number = table.branch(whole, jnp.int32(program), cuts, lambda first, _: jnp.int32(first))
        found.append((whole[int(number)].leaf, program - whole[int(number)].start))
    assert sorted(found) == [(k, row) for k, (n, _) in enumerate(rows) for row in range(n)]


@pytest.mark.thorough
def test_every_program_finds_its_row_of_scalars():
    """Leaves with a row of their own, that share one, and with one for each of their rows."""
    shapes = [(3, 128), (2, 256), (2, 128), (1, 128), (3, 256)]
    shared, own, others = (table.ScalarsAt(k, by_row=k > 0) for k in (0, 1, 3))
    where = [shared, shared, own, shared, others]
    entries = [
        table.Entry(leaf, mosaic.tiles_of_rows(shape, block=128), at)
        for leaf, (shape, at) in enumerate(zip(shapes, where, strict=True))
    ]
    (whole,) = table.tables_of(entries, arrays=3)
    for entry in whole:
        each = entry.tiles.row_programs
        for program in range(entry.programs):
            own = entry.scalars.first + (program // each if entry.scalars.by_row else 0)
            assert int(table.row_of_scalars(whole, jnp.int32(entry.start + program))) == own


def test_what_does_not_fit_is_refused():
    rule, x = optimizers.LION, {"a": jnp.zeros((4,)), "b": jnp.zeros((128,))}
    one = optimizers.lion_scalars(1e-3)
    with pytest.raises(ValueError, match="lion: 1 sets of scalars for 2 leaves"):
        update_many(rule, (x, x), (x,), scalars=[one])
    with pytest.raises(ValueError, match="lion: by_row has 1 .* there are 2 leaves; give"):
        update_many(rule, (x, x), (x,), scalars=one, by_row=[True])
    with pytest.raises(ValueError, match=r"seeds have shape \(2,\), but for 2 leaves .* \(2, 2\)"):
        update_many(rule, (x, x), (x,), scalars=one, seeds=jnp.zeros((2,), jnp.uint32))
    with pytest.raises(ValueError, match="lion updates 2 arrays and reads 1; got 1 and 2"):
        update_many(rule, (x,), (x, x), scalars=one)


def run_alone_and_together(rule):
    # A rule with sums goes through up to 32 tiles in one program, but not through a prime number.
    rows = 4 if rule.num_sums == 0 else 37
    updated, read = leaves_of(rule, [(rows, 512), (384,)])
    more = {"scalars": scalars_of(rule), "impl": "interpret"}
    leaf = [tuple(tree["leaf 0"] for tree in trees) for trees in (updated, read)]
    return update_many(rule, updated, read, **more), update(rule, *leaf, **more)


def run_adam8bit(shape=(5, 512)):
    param, grad = normal(0, shape), normal(1, shape, BF16)
    moments, seed = init_moments(shape), rounding.seed_of(jax.random.key(0))
    scalars = scalars_of(optimizers.ADAMW)
    for _ in range(2):
        more = {"scalars": scalars, "seed": seed, "impl": "interpret"}
        param, moments, *_ = update_adam8bit(param, moments, grad, **more)
    more = {"scalars": [scalars] * 2, "seeds": jnp.stack([seed] * 2), "impl": "interpret"}
    return update_adam8bit_many([param] * 2, [moments] * 2, [grad] * 2, **more)


@pytest.mark.thorough
@needs_kernels
@pytest.mark.parametrize("rule", [*RULES, None], ids=lambda rule: rule.name if rule else "adam8bit")
def test_the_order_of_programs_does_not_matter(rule, monkeypatch):
    """Interpret mode runs program after program. Had one read what another writes, running them
    from the last to the first would change bits. That two write the same element is an error."""
    run = run_adam8bit if rule is None else lambda: run_alone_and_together(rule)
    jax.clear_caches()
    forwards = jax.tree.leaves(run())
    in_order, grids = lax.axis_index, []
    build = mosaic.mesh_of

    def mesh_of(programs):
        grids.append(programs)
        return build(programs)

    monkeypatch.setattr(mosaic, "mesh_of", mesh_of)
    monkeypatch.setattr(lax, "axis_index", lambda name: grids[-1] - 1 - in_order(name))
    jax.clear_caches()
    backwards = jax.tree.leaves(run())
    jax.clear_caches()
    assert max(grids) >= 4
    for a, b in zip(forwards, backwards, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


OVERLAPPING = """
import jax, jax.numpy as jnp
from pallas_kernels import mosaic, optimizers
from pallas_kernels.update import update
at_tile = mosaic.at_tile
mosaic.at_tile = lambda ref, row, tiles: at_tile(ref, row // 2, tiles)
x = jnp.ones((1024,))
more = {"scalars": optimizers.lion_scalars(1e-3), "impl": "interpret"}
jax.block_until_ready(update(optimizers.LION, (x, x), (x,), **more))
"""


@pytest.mark.thorough
@needs_kernels
def test_two_tiles_that_write_the_same_elements_are_found():
    """In a process of its own: JAX's interpreter is of no use after an error."""
    done = subprocess.run(
        [sys.executable, "-c", OVERLAPPING], capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "RACE DETECTED" in done.stderr


@pytest.mark.thorough
def test_statistics_of_many_leaves_are_one_number_each():
    grads = {"a": normal(0, (130,)), "b": normal(1, (256,)).at[3].set(jnp.nan)}
    more = {"scalars": gradients.StatsScalars(), "impl": XLA}
    squares, bad = update_many(gradients.GRADIENT_STATS, (), (grads,), **more).sums
    assert squares.shape == bad.shape == (2,)
    assert bad.tolist() == [0, 1]
    np.testing.assert_allclose(
        squares[0], np.sum(np.square(grads["a"], dtype=np.float64)), rtol=1e-6
    )
