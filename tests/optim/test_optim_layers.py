"""LAMB gives each layer of a stack the ratio that `optax.lamb` gives an array of its own."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import optimizers
from pallas_kernels.choice import Choice
from pallas_kernels.update import update
from tests.support.marks import needs_kernels
from tests.support.optim_steps import check_close, check_same, context
from zerojax.deepspeed_config.unfused_optimizers import bounded_lamb
from zerojax.optim import lamb
from zerojax.tracing.loops import find_stacks

SHAPES = {"blocks/bias": (2, 6), "blocks/kernel": (2, 6, 128), "embed": (12, 4)}
STACKS = ("blocks/bias", "blocks/kernel")
MASK = {"blocks/bias": False, "blocks/kernel": True, "embed": True}
STEPS = 3
TX = lamb(1e-2, weight_decay=0.1, mask=MASK, clip_norm=None)


def arrays(seed, scale=1.0):
    """Layers of very different sizes, so that one ratio for all would be far from theirs."""
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    drawn = {n: jax.random.normal(k, SHAPES[n]) for n, k in zip(SHAPES, keys, strict=True)}
    return {
        name: scale * x * (1.0 + 3 * jnp.arange(len(x))).reshape(-1, *(1,) * (x.ndim - 1))
        for name, x in drawn.items()
    }


def unstacked(tree):
    flat = {name: x for name, x in tree.items() if name not in STACKS}
    rows = ((name, number, x) for name in STACKS for number, x in enumerate(tree[name]))
    return flat | {f"{name}/{number}": x for name, number, x in rows}


def follow(step, state, form=lambda tree: tree):
    """(parameters, state) after a few steps, both in a form of `arrays`."""
    params = form(arrays(0))
    for number in range(STEPS):
        params, state = step(params, state, form(arrays(number + 1, 0.1)))
    return params, state


def by_update(tx, **extra):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


def by_apply(tx, **more):
    axes = dict.fromkeys(SHAPES, ())
    return jax.jit(
        lambda params, state, grads: tx.apply(grads, state, params, context(axes=axes, **more))
    )


@pytest.fixture(scope="module")
def expected():
    """`optax.lamb` with every layer in an array of its own, as no loop needs it."""
    apart = {name: MASK[name.removesuffix(f"/{name[-1]}")] for name in unstacked(arrays(0))}
    tx = optax.lamb(1e-2, weight_decay=0.1, mask=apart)
    return follow(by_update(tx), tx.init(unstacked(arrays(0))), unstacked)[0]


LAYERS = dict.fromkeys(STACKS, ())


@pytest.mark.thorough
def test_each_layer_is_updated_as_an_array_of_its_own(expected):
    params, state = follow(by_update(TX, layers=STACKS), TX.init(arrays(0)))
    check_close(unstacked(params), expected)
    fused = follow(by_apply(TX, layers=LAYERS), TX.init(arrays(0)))
    check_close(fused, (params, state))
    together = follow(by_apply(TX), TX.init(arrays(0)))[0]
    off = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), unstacked(together), expected)
    assert off["blocks/kernel/0"] > 1e-3, "a ratio for all layers must be another"


@pytest.mark.thorough
def test_one_ratio_for_all_layers_where_that_is_asked_for():
    tx = lamb(1e-2, weight_decay=0.1, mask=MASK, clip_norm=None, per_layer=False)
    plain = optax.lamb(1e-2, weight_decay=0.1, mask=MASK)
    wanted = follow(by_update(plain), plain.init(arrays(0)))
    check_same(follow(by_update(tx, layers=STACKS), tx.init(arrays(0))), wanted)
    check_close(follow(by_apply(tx, layers=LAYERS), tx.init(arrays(0))), wanted)


@pytest.mark.thorough
def test_rows_of_rolled_layers_are_arrays_of_their_own_whatever_is_asked_for(expected):
    names = list(unstacked(arrays(0)))
    rows = {s: tuple(n for n in names if n.removesuffix(f"/{n[-1]}") == s) for s in STACKS}
    apart = {name: MASK[name.removesuffix(f"/{name[-1]}")] for name in names}
    tx = lamb(1e-2, weight_decay=0.1, mask=apart, clip_norm=None, per_layer=False)
    tx = tx.with_stacks(rows)
    for follows in (by_update(tx, layers=STACKS), by_apply(tx, layers=LAYERS)):
        check_close(unstacked(follow(follows, tx.init(arrays(0)))[0]), expected)


@pytest.mark.thorough
def test_names_reach_it_in_a_chain_and_in_a_part_of_the_parameters(expected):
    tx = optax.masked(
        optax.chain(optax.identity(), TX), {**dict.fromkeys(STACKS, True), "embed": False}
    )
    params = follow(by_update(tx, layers=STACKS), tx.init(arrays(0)))[0]
    rows = {name: x for name, x in unstacked(params).items() if name != "embed"}
    check_close(rows, {name: expected[name] for name in rows})


@pytest.mark.thorough
def test_the_lamb_of_deepspeed_too():
    numbers = {
        "b1": 0.9,
        "b2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "min_coeff": 0.01,
        "max_coeff": 10.0,
        "eps_inside_sqrt": False,
        "bias_correction": True,
    }
    tx = bounded_lamb(lambda count: 1e-2, **numbers)
    params = follow(by_update(tx, layers=STACKS), tx.init(arrays(0)))[0]
    alone, _ = follow(by_update(tx), tx.init(unstacked(arrays(0))), unstacked)
    check_close(unstacked(params), alone)


@pytest.mark.thorough
@pytest.mark.parametrize("rows_over", ["data", None])
def test_shards_of_layers_are_updated_as_the_whole_is(rows_over):
    """Layers over an axis, as on pipeline stages, and what is in them over others."""
    mesh = jax.make_mesh(
        (2, 2, 2), ("data", "model", "stage"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    specs = {
        "blocks/bias": P(rows_over, "model"),
        "blocks/kernel": P(rows_over, "stage", "model"),
        "embed": P(("data", "stage")),
    }
    axes = {
        n: tuple(a for e in s if e for a in (e if isinstance(e, tuple) else (e,)))
        for n, s in specs.items()
    }
    own = () if rows_over is None else (rows_over,)
    state = TX.init(arrays(0))
    of_state = optax.tree_utils.tree_map_params(
        TX.init, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P()
    )

    def local(grads, state, params):
        given = context(axes=axes, shapes=SHAPES, layers=dict.fromkeys(STACKS, own))
        return TX.apply(grads, state, params, given)

    mapped = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, of_state, specs),
            out_specs=(specs, of_state),
            check_vma=False,
        )
    )
    ours = follow(lambda params, state, grads: mapped(grads, state, params), state)
    check_close(ours, follow(by_apply(TX, layers=LAYERS), state))


@pytest.mark.thorough
@needs_kernels
def test_the_kernel_does_the_same():
    """`blocks/kernel` in tiles, three for each layer; the others have none."""
    kernel = by_apply(TX, layers=LAYERS, choice=Choice("interpret", "a test"))
    check_close(
        follow(kernel, TX.init(arrays(0))), follow(by_apply(TX, layers=LAYERS), TX.init(arrays(0)))
    )


@pytest.mark.thorough
@needs_kernels
def test_a_kernel_whose_programs_have_several_tiles_keeps_rows_apart():
    """34 tiles for each row, 17 for each program, and numbers that differ from row to row."""
    shape = (2, 34, 128)
    mu, nu, param, grad = (jax.random.normal(jax.random.key(k), shape) for k in range(4))
    scalars = optimizers.adam_scalars(1e-2, count=3, weight_decay=jnp.array([0.1, 30.0]))
    kernel, reference = (
        update(
            optimizers.LAMB_MOMENTS,
            (mu, nu * nu),
            (param, grad),
            scalars=scalars,
            block=128,
            impl=Choice(implementation, "a test"),
            by_row=True,
        )
        for implementation in ("interpret", "xla")
    )
    check_close(kernel.updated, reference.updated)
    for ours, theirs in zip(kernel.sums, reference.sums, strict=True):
        assert ours.shape == (2,)
        assert jnp.allclose(ours, theirs, rtol=1e-5)  # another order of 4352 terms
    assert reference.sums[1][1] > 100 * reference.sums[1][0]


@needs_kernels
def test_rows_are_one_kernel_on_a_gpu():
    def program(updated, read, numbers, ratio):
        scalars = optimizers.LambScalars(*numbers[:5], trust_ratio=ratio, skip=numbers[5])
        return update(
            optimizers.LAMB_APPLY, updated, read, scalars=scalars, impl=kernel, by_row=True
        )

    kernel = Choice("mosaic_gpu", "a test")
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    leaf, numbers = f32(12, 768, 768), (f32(),) * 6
    lowered = (
        jax.jit(program)
        .trace((leaf,), (leaf, leaf), numbers, f32(12))
        .lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("shape", "ratio", "sentence"),
    [
        ((), (), r"by_row=True needs rows along dimension 0, but the leaf has shape \[\]; leave"),
        ((0, 3), (), r"the leaf has shape \[0, 3\]"),
        ((4, 3), (3,), r"trust_ratio has shape \[3\], but must be a number, or one for each of 4"),
    ],
)
def test_rows_that_are_none_are_refused(shape, ratio, sentence):
    numbers = {name: jnp.float32(1) for name in optimizers.LambScalars._fields}
    scalars = optimizers.LambScalars(**numbers | {"trust_ratio": jnp.ones(ratio)})
    x = jnp.ones(shape)
    with pytest.raises(ValueError, match=sentence):
        update(optimizers.LAMB_APPLY, (x,), (x, x), scalars=scalars, impl="xla", by_row=True)


def test_a_number_per_row_without_rows_is_refused():
    x = jnp.ones((4, 3))
    scalars = optimizers.LambScalars(*[jnp.float32(1)] * 5, trust_ratio=jnp.ones(4), skip=0.0)
    with pytest.raises(ValueError, match=r"trust_ratio has shape \[4\], but must be a number$"):
        update(optimizers.LAMB_APPLY, (x,), (x, x), scalars=scalars, impl="xla")


def test_stacks_are_what_a_loop_slices():
    def loss(params, x):
        def layer(x, weights):
            y, _ = jax.lax.scan(lambda y, w: (y * w[None], None), x, weights["inner"])
            return y @ weights["kernel"] + params["bias"][None], None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["blocks"])
        return jnp.sum(jax.jit(lambda x: x @ params["head"])(x))

    params = {
        "bias": jnp.ones(3),
        "blocks": {"inner": jnp.ones((2, 5, 3)), "kernel": jnp.ones((2, 3, 3), jnp.bfloat16)},
        "head": jnp.ones((3, 3)),
    }
    closed = jax.make_jaxpr(loss)(params, jnp.ones((4, 3)))
    names = ["bias", "blocks/inner", "blocks/kernel", "head"]
    assert find_stacks(closed, names) == {"blocks/inner", "blocks/kernel"}
    assert find_stacks(jax.make_jaxpr(jax.jit(loss))(params, jnp.ones((4, 3))), names) == {
        "blocks/inner",
        "blocks/kernel",
    }
