"""The loss of a head without its logits: equal to the plain one, and what it holds and computes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.parallel.test_zero_program import SIZES, THRESHOLD, count_collectives, lower
from tests.support import equal_trees
from tests.support.marks import slow
from tests.support.small_models import reference_model
from tests.support.trajectories import TOLERANCE, plan_for, train_for
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client, gpus
from zerojax.models.losses import next_token
from zerojax.operators.chunked_loss import head_next_token
from zerojax.step.build import build_evaluation, build_step
from zerojax.tracing.flops import count_flops, count_program_flops

BATCH, SEQ, WIDTH, VOCAB = 2, 13, 16, 37
TOKENS = BATCH * SEQ
RANDOM = np.random.default_rng(0)
HIDDEN = jnp.asarray(RANDOM.normal(size=(BATCH, SEQ, WIDTH)), jnp.float32)
TABLE = jnp.asarray(0.5 * RANDOM.normal(size=(VOCAB, WIDTH)), jnp.float32)
TARGETS = jnp.asarray(RANDOM.integers(0, VOCAB, (BATCH, SEQ)), jnp.int32)
MASK = jnp.asarray(RANDOM.integers(0, 2, (BATCH, SEQ)), jnp.float32)
UNEVEN = jnp.asarray(RANDOM.uniform(-1, 2, (BATCH, SEQ)), jnp.float32)
PRODUCT = 2 * TOKENS * WIDTH * VOCAB
"""Floating-point operations of one product of all tokens with the head."""


def plain(hidden, head, weights=None, *, vocab_dim=0, targets=TARGETS):
    table = head if vocab_dim == 0 else head.T
    return next_token(jnp.einsum("bsw,vw->bsv", hidden, table), targets, weights)


def chunked(hidden, head, weights=None, *, vocab_dim=0, targets=TARGETS, chunk=8):
    return head_next_token(hidden, head, targets, weights, vocab_dim=vocab_dim, chunk=chunk)


def loss_sum(function, **options):
    return lambda *arrays: function(*arrays, **options)[0]


def assert_same(ours, plain):
    """float32 sums of up to 37 terms of O(1) in another order: 37 x 2^-24 = 2e-6 of the largest."""
    equal_trees.assert_near(ours, plain, tolerance=2e-6)


# --- the same numbers -------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [{"scale": 0.3}, {"softcap": 2.0}, {"scale": 0.5, "softcap": 1.0}]
)
def test_scales_and_caps_of_logits_are_in_loss_and_gradients(options):
    def theirs(hidden, head):
        logits = options.get("scale", 1.0) * jnp.einsum("bsw,vw->bsv", hidden, head)
        if (cap := options.get("softcap")) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return next_token(logits, TARGETS, UNEVEN)

    def ours(hidden, head):
        return head_next_token(hidden, head, TARGETS, UNEVEN, vocab_dim=0, chunk=5, **options)

    run = lambda f: jax.value_and_grad(f, (0, 1), has_aux=True)(HIDDEN, TABLE)  # noqa: E731
    assert_same(run(ours), run(theirs))
    assert float(ours(HIDDEN, TABLE)[0]) != float(chunked(HIDDEN, TABLE, UNEVEN)[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chunk", [1, 5, 8, 13, 26, 1000])
@pytest.mark.parametrize("vocab_dim", [0, 1])
def test_loss_and_gradients_are_those_of_the_plain_loss(vocab_dim, chunk):
    """26 tokens in chunks that do and do not divide them."""
    head = TABLE if vocab_dim == 0 else TABLE.T
    ours = functools.partial(chunked, vocab_dim=vocab_dim, chunk=chunk)
    theirs = functools.partial(plain, vocab_dim=vocab_dim)
    run = lambda f: jax.value_and_grad(f, (0, 1), has_aux=True)(HIDDEN, head)  # noqa: E731
    ours, theirs = jax.jit(lambda: (run(ours), run(theirs)))()
    assert_same(ours, theirs)
    assert float(ours[0][1]) == TOKENS


@pytest.mark.parametrize("repeats", [100, 160])
def test_chunks_of_an_automatic_size_give_the_gradients_of_the_plain_loss(repeats):
    """2600 float32 tokens: 808 before two chunks of 896; 4160: 576 before four of 896."""
    hidden, targets = (jnp.concatenate([x] * repeats, axis=1) for x in (HIDDEN, TARGETS))
    run = lambda f: jax.value_and_grad(loss_sum(f, targets=targets), (0, 1))(hidden, TABLE)  # noqa: E731
    ours = run(functools.partial(chunked, chunk="auto"))
    # Sums of thousands of float32 terms in another order.
    equal_trees.assert_near(ours, run(plain), tolerance=1e-5)


@pytest.mark.parametrize("weights", [MASK, UNEVEN], ids=["mask", "uneven"])
def test_weights_count_and_have_a_gradient_too(weights):
    run = lambda f: jax.value_and_grad(f, (0, 1, 2), has_aux=True)(HIDDEN, TABLE, weights)  # noqa: E731
    ours, theirs = jax.jit(lambda: (run(chunked), run(plain)))()
    assert_same(ours, theirs)
    dead = np.asarray(weights) == 0
    assert not np.asarray(ours[1][0])[dead].any()


@pytest.mark.thorough
def test_what_is_divided_or_scaled_afterwards_scales_the_gradients():
    """The gradients are made for a derivative of 1; a loss scale or a mean comes later."""

    def mean(function):
        def scaled(hidden, head):
            total, weight = function(hidden, head, MASK)
            return 3.7 * total / weight

        return jax.grad(scaled, (0, 1))(HIDDEN, TABLE)

    assert_same(mean(chunked), mean(plain))


@pytest.mark.thorough
@pytest.mark.parametrize("unknown", [-1, -100, VOCAB, 10 * VOCAB])
@pytest.mark.parametrize("function", [plain, chunked], ids=["plain", "chunked"])
def test_a_target_outside_the_vocabulary_is_ignored_at_weight_0_and_nan_otherwise(
    function, unknown
):
    hit = jnp.zeros((BATCH, SEQ), bool).at[1, 3].set(True)
    targets = jnp.where(hit, unknown, TARGETS)

    @jax.jit
    def run(weights, targets):
        graded = jax.value_and_grad(loss_sum(function, targets=targets), (0, 1))
        return graded(HIDDEN, TABLE, weights)

    ignored = jnp.where(hit, 0.0, 1.0)
    assert_same(run(ignored, targets), run(ignored, TARGETS))
    loss, gradients = run(jnp.ones((BATCH, SEQ)), targets)
    assert jnp.isnan(loss)
    assert all(jnp.isnan(g).any() for g in gradients)
    assert jnp.isnan(function(HIDDEN, TABLE, targets=targets)[0])


@pytest.mark.thorough
def test_large_logits_neither_overflow_nor_vanish():
    """exp(88) is the largest of float32. In the second case no logit is near 0 or above it."""
    for arrays in ((1000 * HIDDEN, TABLE), (-1000 * jnp.abs(HIDDEN), jnp.abs(TABLE))):
        assert_same(chunked(*arrays)[0], plain(*arrays)[0])


def test_narrow_targets_hit_one_token_of_a_large_vocabulary():
    """255 + 1 as uint8 is 0."""
    large = jnp.concatenate([TABLE] * 10)
    narrow = TARGETS.astype(jnp.uint8)
    for function in (chunked, plain):
        ours, theirs = (function(HIDDEN, large, targets=t)[0] for t in (narrow, TARGETS))
        assert ours == theirs


# --- narrow dtypes ----------------------------------------------------------------------------


@pytest.mark.thorough
def test_bfloat16_sums_the_gradient_of_the_head_over_chunks_in_float32():
    """512 equal terms: summed in bfloat16, whose mantissa has 8 bits, most would be lost."""
    hidden = jnp.broadcast_to(HIDDEN[:1, :1], (1, 512, WIDTH)).astype(jnp.bfloat16)
    table, targets = TABLE.astype(jnp.bfloat16), jnp.full((1, 512), 3)
    ours = jax.grad(loss_sum(chunked, targets=targets, chunk=1), (0, 1))(hidden, table)
    exact = jax.grad(loss_sum(plain, targets=targets), (0, 1))(
        hidden.astype(jnp.float32), table.astype(jnp.float32)
    )
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype == jnp.bfloat16
        # The slope and the result are each rounded once, by up to 2^-9 of themselves.
        np.testing.assert_allclose(
            one.astype(jnp.float32), other, rtol=2**-8, atol=2**-9 * float(jnp.abs(other).max())
        )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logits_and_their_gradient_are_rounded_where_the_plain_loss_rounds_them(dtype):
    """Once each, to the head's dtype; everything else is float32 in both."""
    hidden, table = HIDDEN.astype(dtype), TABLE.astype(dtype)
    run = lambda f: jax.value_and_grad(loss_sum(f), (0, 1))(hidden, table)  # noqa: E731
    (ours, gradients), (theirs, expected) = run(chunked), run(plain)
    np.testing.assert_allclose(ours, theirs, rtol=2e-6)  # as `assert_same`
    exact = plain(hidden.astype(jnp.float32), table.astype(jnp.float32))[0]
    assert abs(ours - exact) > 10 * abs(ours - theirs)
    # A sum of float32 in another order can round to the next number of the dtype.
    equal_trees.assert_near(gradients, expected, tolerance=float(jnp.finfo(dtype).eps))


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_float16_keeps_slopes_that_are_smaller_than_its_smallest_number(scale):
    """A token of weight 1e-6 has slopes of 1e-8 and less; float16 ends at 6e-8."""
    weights = jnp.full((BATCH, SEQ), scale)
    run = jax.grad(lambda f, x, w: f(x, w, weights)[0] / scale, (1, 2))
    hidden, table = HIDDEN.astype(jnp.float16), TABLE.astype(jnp.float16)
    ours = run(chunked, hidden, table)
    exact = run(plain, hidden.astype(jnp.float32), table.astype(jnp.float32))
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype == jnp.float16
        # 11 significant bits, rounded twice.
        np.testing.assert_allclose(
            one.astype(jnp.float32), other, rtol=0, atol=2**-10 * float(jnp.abs(other).max())
        )


def test_float16_weights_of_0_are_no_division_by_0():
    gradients = jax.grad(loss_sum(chunked), (0, 1))(
        HIDDEN.astype(jnp.float16), TABLE.astype(jnp.float16), jnp.zeros((BATCH, SEQ))
    )
    assert not any(np.asarray(g).any() for g in gradients)


# --- what is computed and kept ----------------------------------------------------------------


def test_no_product_is_done_twice_and_none_that_nobody_wants():
    """Evaluation: one product. A frozen head or input: two. Training: three, as in the plain one.

    Chunks of 5, 7, 7 and 7 tokens: no row is filled up.
    """
    ours, theirs = loss_sum(chunked, chunk=8), loss_sum(plain)
    for wanted, products in ((), 1), ((0,), 2), ((1,), 2), ((0, 1), 3):
        for function in (ours, theirs):
            graded = jax.grad(function, wanted) if wanted else function
            assert count_flops(graded, HIDDEN, TABLE) == products * PRODUCT, (function, wanted)


POLICIES = {
    "nothing": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", POLICIES)
def test_a_checkpoint_around_it_keeps_no_copy_of_the_head_per_chunk(name):
    def inside(hidden, head):
        return loss_sum(chunked, chunk=2)(1.5 * hidden, 2 * head, MASK)

    wrapped = jax.checkpoint(inside, policy=POLICIES[name])
    kept = jax.eval_shape(lambda *arrays: jax.vjp(wrapped, *arrays)[1], HIDDEN, TABLE)
    assert max(leaf.size for leaf in jax.tree.leaves(kept)) <= max(HIDDEN.size, TABLE.size)
    forms = wrapped, lambda x, w: loss_sum(plain)(1.5 * x, 2 * w, MASK)
    assert_same(*(jax.jit(jax.grad(form, (0, 1)))(HIDDEN, TABLE) for form in forms))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_wait_for_the_backward_pass_in_their_own_dtype(dtype):
    hidden, table = HIDDEN.astype(dtype), TABLE.astype(dtype)
    kept = jax.eval_shape(lambda *arrays: jax.vjp(loss_sum(chunked), *arrays)[1], hidden, table)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    assert held == hidden.nbytes + table.nbytes


def test_second_derivatives_are_refused():
    with pytest.raises(NotImplementedError, match="no second derivative.*loss_chunk=None"):
        jax.jacrev(jax.grad(loss_sum(chunked)))(HIDDEN, TABLE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_dim": 1}, r"head has shape \(37, 16\), .* its dimension 0 must be 16"),
        ({"weights": MASK[0]}, r"weights have shape \(13,\)"),
        ({"hidden": HIDDEN[:0]}, r"hidden has shape \(0, 13, 16\)"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(options, message):
    given = {"hidden": HIDDEN, **options}
    with pytest.raises(ValueError, match=message):
        chunked(given.pop("hidden"), TABLE, **given)


# --- over devices -----------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("spec", [P("model", None), P(None, "model")], ids=["vocab", "width"])
def test_a_head_that_is_split_over_devices_stays_split(spec):
    """Nothing as large as the head is sent, neither it nor its gradient."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    table = jnp.concatenate([TABLE, -TABLE])
    hidden, targets = HIDDEN, TARGETS
    split, whole = NamedSharding(mesh, spec), NamedSharding(mesh, P())

    def local(hidden, table):
        return jax.value_and_grad(loss_sum(chunked, targets=targets), (0, 1))(hidden, table)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=(P(), (P("data"), P())),
        axis_names={"data"},
        check_vma=False,
    )
    shardings = (whole, (whole, split))
    program = jax.jit(mapped, in_shardings=(whole, split), out_shardings=shardings)
    compiled = program.lower(hidden, table).compile()
    sent = hlo.find_collectives(hlo.read_program(compiled.as_text()), 2)
    assert 0 < max(one.payload_bytes for one in sent) < table.nbytes
    ours = compiled(jax.device_put(hidden, whole), jax.device_put(table, split))
    assert_same(ours, jax.value_and_grad(loss_sum(plain, targets=targets), (0, 1))(hidden, table))


@functools.cache
def plain_run(name):
    return train_for(reference_model(name, loss_chunk=None), devices=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "zero", "mesh", "options"),
    [
        ("gpt2", 3, {"model": 2, "data": 4}, {"num_microbatches": 2}),
        slow("llama", 2, {}, {}),
        slow("gpt2", 1, {}, {"num_microbatches": 4}),
        slow("llama", 3, {"model": 2, "data": 4}, {"sequence_sharding": True}),
        slow("llama", 3, {"replica": 2, "data": 4}, {}),
        slow("gpt2", 0, {}, {}),
    ],
)
def test_runs_in_chunks_equal_the_plain_loss_on_one_device(name, zero, mesh, options):
    """Chunks of at most 24 of the 64 or more tokens that a device has."""
    model = reference_model(name, loss_chunk=24)
    run = train_for(model, zero=zero, mesh=mesh, persistence_threshold=200, **options)
    expected = plain_run(name)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=TOLERANCE)
    assert expected.losses[0] - expected.losses[-1] > 0.02


def step_plan(name, zero, chunk, **options):
    model = reference_model(name, **SIZES, loss_chunk=chunk)
    return plan_for(model, zero=zero, persistence_threshold=THRESHOLD, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "zero", "parts"),
    [("gpt2", 3, 1), ("llama", 3, 2), ("llama", 2, 1), slow("llama", 3, 1), slow("gpt2", 2, 2)],
)
def test_chunks_send_nothing_and_stage_3_gathers_the_head_once_instead_of_twice(name, zero, parts):
    """The gradients are made in the forward pass, so the backward pass has no use for the head."""
    whole, cut = (
        count_collectives(lower(step_plan(name, zero, chunk, num_microbatches=parts)))
        for chunk in (None, 24)
    )
    assert len(cut.loops) == len(whole.loops) + 1
    assert {} in cut.loops
    total = lambda found, kind: found.outside[kind] + found.inside[kind]  # noqa: E731
    for kind in ("all_reduce", "reduce_scatter"):
        assert total(cut, kind) == total(whole, kind)
    assert total(cut, "all_gather") == total(whole, "all_gather") - (zero == 3)


@pytest.mark.thorough
def test_evaluation_in_chunks_gathers_as_the_plain_one():
    counts = []
    for chunk in (None, 24):
        plan = step_plan("llama", 3, chunk)
        lowered = build_evaluation(plan).lower(plan.abstract_state, plan.abstract_batch)
        counts.append(count_collectives(lowered))
    whole, cut = counts
    assert (cut.outside, cut.inside) == (whole.outside, whole.inside)
    assert len(cut.loops) == len(whole.loops) + 1


@pytest.mark.thorough
def test_a_frozen_head_gets_no_gradient_in_the_step():
    """Of the step's products, those that make the head's gradient are gone, and nothing else."""

    def products(chunk, **options):
        plan = step_plan("llama", 3, chunk, **options)
        traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
        return count_program_flops(traced.jaxpr)

    frozen = {"freeze": ("lm_head/",)}
    for options in ({}, frozen):
        assert products(16, **options) == products(None, **options)
    assert products(16) - products(16, **frozen) == 2 * 512 * SIZES["embed_dim"] * 64


# --- compiled for a GPU -----------------------------------------------------------------------

MANY, LARGE, WIDE = 8192, 128_256, 2048


@pytest.mark.gpu_programs
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_logits_of_a_large_vocabulary_are_never_held(dtype):
    """8192 tokens, the vocabulary of Llama 3: 8.4 GB of float32 logits become 1.1 GB.

    float32: logits of 1024 tokens and their gradient; the head's is summed where it is returned.
    bfloat16: logits of half the size, which their gradient replaces, beside the float32 sum of the
    head's gradient, which is 1.05 GB. Either way at most a float32 gradient of all hidden states.
    """
    (device,) = compile_client.gpu_devices(gpus.find_gpu("h200"), 1)
    whole = NamedSharding(Mesh(np.array([device]), ("data",)), P())
    of = lambda *shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)  # noqa: E731
    arrays = of(1, MANY, WIDE, dtype=dtype), of(LARGE, WIDE, dtype=dtype)
    targets = of(1, MANY, dtype=jnp.int32)

    def temporary(function):
        graded = lambda x, w, t: jax.value_and_grad(loss_sum(function, targets=t), (0, 1))(x, w)  # noqa: E731
        jitted = jax.jit(graded, out_shardings=whole)
        flops = count_flops(graded, *arrays, targets)
        assert flops == 3 * 2 * math.prod((MANY, LARGE, WIDE))
        return compile_client.compile_for_gpus(
            jitted, *arrays, targets, sketch=True
        ).memory.temporary

    logits, head, hidden = (4 * math.prod(s) for s in ((MANY, LARGE), (LARGE, WIDE), (MANY, WIDE)))
    narrow = dtype == jnp.bfloat16
    assert temporary(plain) > logits * (1.45 if narrow else 0.99)
    chunk = functools.partial(chunked, chunk=1024)
    assert temporary(chunk) < hidden + (head + logits / 16 if narrow else 2 * logits / 8)
