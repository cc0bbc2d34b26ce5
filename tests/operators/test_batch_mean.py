"""`zerojax.batch_sum` and `zerojax.batch_mean`: losses that couple rows are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import zerojax
from tests.support.small_models import VOCAB
from tests.support.trajectories import ROWS, STEPS, TOLERANCE, optimizer, plan_for, train_for
from zerojax.equality import make_request
from zerojax.equality.check_in_child import check_here
from zerojax.forecasting.hlo import find_collectives, read_program
from zerojax.operators.whole_batch import batch_split_over
from zerojax.plan.batch_sums import bytes_sent
from zerojax.tracing.batch_calls import find_batch_sums
from zerojax.tracing.trees import format_bytes

EXPERTS, WIDTH, LAYERS = 4, 12, 3


def init(key):
    """A stack of routed layers, and a head."""
    keys = jax.random.split(key, 4)
    normal = jax.random.normal
    return {
        "router": normal(keys[0], (LAYERS, WIDTH, EXPERTS)),
        "experts": normal(keys[1], (LAYERS, EXPERTS, WIDTH, WIDTH)) / 4,
        "scale": jnp.ones((LAYERS, WIDTH)),
        "head": normal(keys[2], (WIDTH, 5)) / 4,
    }


def wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def routed(x, layer, mean, of_experts):
    """Top-1 experts and a batch norm: (rows, what balances the experts)."""
    p = jax.nn.softmax(wide(x @ layer["router"]), -1)
    chosen = jax.nn.one_hot(jnp.argmax(p, -1), EXPERTS)
    f, p_mean = of_experts(jnp.mean(chosen, 0)), of_experts(jnp.mean(p, 0))
    gates = (p * chosen).astype(x.dtype)
    y = jnp.einsum("nd,edk,ne->nk", x, layer["experts"], gates)
    y = wide(y)
    center = mean(jnp.mean(y, 0, keepdims=True))
    square = mean(jnp.mean(y * y, 0, keepdims=True))
    normed = (y - center) * jax.lax.rsqrt(square - center * center + 0.1)
    x += jnp.tanh(normed.astype(x.dtype) * layer["scale"][None])
    return x, EXPERTS * jnp.sum(f * p_mean)


@pytest.fixture(autouse=True)
def not_kept():
    """Programs of these tests are not kept: jaxlib 0.10.2 often dies of one when it is read."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)


def build_apply(
    mean=zerojax.batch_mean, of_experts=None, *, layers="carried", remat=False, jitted=False
):
    """The model.

    mean: of the batch norm; of_experts: of what balances experts, None for the same; layers: what
    balances them is "carried" through a scan or "returned" by it, or layers are "unrolled".
    """
    one = lambda x, layer: routed(x, layer, mean, of_experts or mean)  # noqa: E731
    one = jax.checkpoint(one) if remat else one
    one = jax.jit(one) if jitted else one

    def carried(carry, layer):
        x, balance = one(carry[0], layer)
        return (x, carry[1] + balance), None

    def apply(params, x):
        stacks = {name: params[name] for name in ("router", "experts", "scale")}
        if layers == "carried":
            (x, balance), _ = jax.lax.scan(carried, (x, jnp.zeros((), wide(x).dtype)), stacks)
            return x @ params["head"], balance / LAYERS
        if layers == "returned":
            x, balance = jax.lax.scan(one, x, stacks)
            return x @ params["head"], jnp.mean(balance)
        balance = 0.0
        for index in range(LAYERS):
            x, more = one(x, {name: params[name][index] for name in stacks})
            balance += more
        return x @ params["head"], balance / LAYERS

    return apply


def loss(model, batch):
    y, balance = model(batch["x"])
    return jnp.mean((y - batch["y"]) ** 2) + 0.1 * balance


def pair_loss(model, batch):
    """Rows of weight 0 do not count; what is added to the mean is multiplied by the weight."""
    y, balance = model(batch["x"])
    errors = jnp.mean((y - batch["y"]) ** 2, -1).astype(jnp.float32) * batch["w"]
    weight = jnp.sum(batch["w"])
    return jnp.sum(errors) + 0.1 * balance * weight, weight


def batch_of(index):
    random = np.random.default_rng(index % 4)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    # Rows are in order, so that devices have different means.
    x = x[np.argsort(x[:, 0])]
    w = (np.arange(ROWS) % 5 != 0).astype(np.float32)
    w[-3:] = 0
    return {"x": x, "y": np.sin(x[:, :5] * 2) + x[:, 5:10], "w": w}


def microbatches(batch, devices, count):
    """The rows of each microbatch: the same part of each device's rows."""
    index = np.arange(ROWS).reshape(devices, count, -1)
    return [{n: x[index[:, m].reshape(-1)] for n, x in batch.items()} for m in range(count)]


@functools.cache
def plain_losses(loss=loss, devices=1, count=1):
    """Plain JAX on one device, which adds up the gradients of the same microbatches."""
    apply, tx = build_apply(), optimizer()
    params = zerojax.init_state(plan_of(apply, devices=1), 0)["params"]
    state = tx.init(params)

    @jax.jit
    def step(params, state, pieces):
        def total(params):
            parts = [loss(functools.partial(apply, params), piece) for piece in pieces]
            if isinstance(parts[0], tuple):
                return sum(p[0] for p in parts) / sum(p[1] for p in parts)
            return sum(parts) / len(parts)

        value, grads = jax.value_and_grad(total)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for index in range(STEPS):
        params, state, value = step(params, state, microbatches(batch_of(index), devices, count))
        losses.append(float(value))
    return np.array(losses)


def plan_of(apply=None, loss=loss, **options):
    return plan_for((init, apply or build_apply()), loss=loss, batch=batch_of, **options)


def run(apply=None, loss=loss, **options):
    options = {"persistence_threshold": 0, **options}
    return train_for((init, apply or build_apply()), loss=loss, batch=batch_of, **options)


def assert_equal(found, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(found, expected[: len(found)], rtol=0, atol=tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_losses_are_those_of_one_device(zero):
    expected = plain_losses()
    assert_equal(run(zero=zero).losses, expected)
    assert expected[0] - expected[-1] > 0.02


@pytest.mark.thorough
def test_without_it_they_are_others():
    """That the tests around this one can fail: for the balance alone, and the batch norm alone."""
    with pytest.warns(RuntimeWarning, match="product of means"):
        apart = run(build_apply(of_experts=lambda x: x), pair_loss, steps=1).losses
    assert abs(apart[0] - plain_losses(pair_loss)[0]) > 1e-3
    balanced = build_apply(lambda x: x, zerojax.batch_mean)
    assert abs(run(balanced, steps=1).losses[0] - plain_losses()[0]) > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_microbatches_are_those_of_plain_jax(zero):
    """A mean is over one microbatch, of all devices."""
    expected = plain_losses(devices=8, count=2)
    assert_equal(run(zero=zero, num_microbatches=2).losses, expected)
    assert np.abs(expected - plain_losses()).max() > 1e-3


@pytest.mark.thorough
def test_rows_of_weight_0():
    assert_equal(run(loss=pair_loss, zero=2).losses, plain_losses(pair_loss))


def padded_loss(model, batch):
    """Means over the rows that count, of which devices have unequal numbers."""
    y, _ = model(batch["x"])
    w = batch["w"]
    mean = lambda x: zerojax.batch_sum(w @ x) / zerojax.batch_sum(jnp.sum(w))  # noqa: E731
    share = EXPERTS * jnp.sum(mean(jax.nn.softmax(y, -1)) * mean((y > 0).astype(jnp.float32)))
    errors = jnp.mean((y - batch["y"]) ** 2, -1)
    return jnp.sum(errors * w) + share * jnp.sum(w), jnp.sum(w)


@pytest.mark.thorough
def test_means_over_rows_that_count():
    assert_equal(run(loss=padded_loss, zero=1, steps=6).losses, plain_losses(padded_loss))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, given: (jnp.clip(given, -1e-3, 1e-3),))


def whole_pair(model, batch, rule=lambda y: y):
    """Sum and weight of the whole batch on every device: both are larger by their number."""
    y, balance = model(batch["x"])
    total = zerojax.batch_sum(batch["w"] @ jnp.mean((rule(y) - batch["y"]) ** 2, -1))
    weight = zerojax.batch_sum(jnp.sum(batch["w"]))
    return total + 0.1 * balance * weight, weight


@pytest.mark.thorough
def test_a_sum_and_a_weight_of_the_whole_batch():
    """Right without a rule that clips; a plan knows that such a rule is not told the weight."""
    assert_equal(run(loss=whole_pair, zero=2, steps=6).losses, plain_losses(pair_loss))
    plan = plan_of(loss=functools.partial(whole_pair, rule=clipped))
    assert plan.traced.batch_weight is None
    assert any("the model or on the whole batch" in reason for reason in plan.reasons)


RULES = [("experts", (None, None, None, "model")), ("scale", (None, "model"))]
WAYS = {
    "remat": (build_apply(remat=True), {"zero": 3}),
    "jitted": (build_apply(jitted=True), {"zero": 3}),
    "returned": (build_apply(layers="returned"), {"zero": 2}),
    "unrolled": (build_apply(layers="unrolled"), {"zero": 3}),
    "replicas": (None, {"zero": 3, "mesh": {"replica": 2}}),
    "tensor parallel": (None, {"zero": 1, "mesh": {"model": 2}, "rules": RULES}),
    "tensor parallel, remat": (
        build_apply(remat=True), {"zero": 3, "mesh": {"model": 2}, "rules": RULES}
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("apply", "options"), WAYS.values(), ids=WAYS)
def test_it_works_in_every_step(apply, options):
    found = run(apply, steps=6, **options)
    assert_equal(found.losses, plain_losses())
    if "rules" in options:
        assert "model" in found.plan.placement.leaves["experts"].axes


@pytest.mark.thorough
@pytest.mark.parametrize("in_backward", [False, True])
def test_offload(in_backward):
    """Layers come one by one from the host, forward and backward."""
    options = {"optimizer": zerojax.adamw(1e-3, eps=1e-5, clip_norm=None), "steps": 6}
    host = {"params": "host", "opt_state": "host", "min_elements": 1}
    found = run(zero=1, offload={**host, "update_in_backward": in_backward}, **options)
    assert found.plan.offload.streamed
    assert_equal(found.losses, run(devices=1, **options).losses)


def summed_over_devices(x):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(x):
        with batch_split_over(("data",)):
            return zerojax.batch_sum(x[0])

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P()))(x)


def test_16_bits_are_summed_in_float32():
    """In bfloat16 256 + 1 is 256, however often; so it is in gradients."""
    ones = jnp.ones(8, jnp.bfloat16).at[0].set(256)
    assert summed_over_devices(ones) == 264  # of 263, the nearest that has 8 bits
    gradient = jax.grad(lambda x: (summed_over_devices(x) * 3).astype(jnp.float32))(ones)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), 3.0)


@pytest.mark.thorough
def test_bfloat16():
    """Losses of 3 steps, which differ by the rounding of activations: 2^-9 of each."""
    options = {"precision": "bf16", "steps": 3}
    found = run(zero=3, **options).losses
    assert_equal(found, run(devices=1, **options).losses, 2e-2)
    assert abs(found[0] - plain_losses()[0]) < 2e-2


@pytest.mark.thorough
@pytest.mark.parametrize("batches", [1, 3])
def test_evaluation(batches):
    options = {"loss": pair_loss, "steps": 2, "run_dir": None, "precision": "fp32"}
    given = [batch_of(index) for index in range(batches)]
    losses = []
    one = zerojax.make_mesh({}, devices=jax.devices()[:1])
    # What is jitted is traced once for a mesh, also where evaluation looks at how it reads.
    apply = build_apply(jitted=True)
    for mesh in (one, {"zero": 3}):
        trainer = zerojax.train((init, apply), mesh, batch_of, validation=given, **options)
        losses.append(trainer.evaluate()["loss"])
    assert abs(losses[0] - losses[1]) < TOLERANCE


class Normalised(nnx.Module):
    """A batch norm of the whole batch, with running statistics, and a count of its rows."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH))
        self.variance = nnx.BatchStat(jnp.ones(WIDTH))
        self.rows = nnx.BatchStat(jnp.int32(0))

    def __call__(self, x):
        y = self.linear(x)
        mean = zerojax.batch_mean(jnp.mean(y, 0))
        variance = zerojax.batch_mean(jnp.mean(y * y, 0)) - mean * mean
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * jax.lax.stop_gradient(mean)
        self.variance[...] = 0.9 * self.variance[...] + 0.1 * jax.lax.stop_gradient(variance)
        self.rows[...] += zerojax.batch_sum(x.shape[0])
        return x + jnp.tanh((y - mean[None]) * jax.lax.rsqrt(variance + 0.1)[None])


class Listed(nnx.Module):
    """Layers that a Python loop calls."""

    def __init__(self, rngs):
        self.layers = nnx.List([Normalised(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mean_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"zero": 1}, {"zero": 3}])
def test_batch_statistics_are_those_of_one_device(options):
    options = {"loss": mean_loss, "batch": batch_of, "persistence_threshold": 0, **options}
    found, expected = train_for(Listed, **options), train_for(Listed, **options, devices=1)
    assert_equal(found.losses, expected.losses)
    assert expected.losses[0] - expected.losses[-1] > 0.02
    extras = found.state["extras"]
    for name, value in extras.items():
        np.testing.assert_allclose(value, expected.state["extras"][name], rtol=0, atol=1e-5)
    assert {int(value) for name, value in extras.items() if "rows" in name} == {STEPS * ROWS}


@pytest.mark.thorough
def test_the_check_has_no_fault_to_find_in_them():
    """Running statistics and a count of rows, with two microbatches on four devices."""
    request = make_request(
        Listed, batch_of, loss=mean_loss, optimizer=optax.adamw(1e-2, eps=1e-4), devices=4
    )
    result = check_here(request)
    assert result.agrees, result.table()
    assert not result.reasons, result.table()


class Rolled(nnx.Module):
    """Layers that a Python loop calls and that hold parameters alone, so that they are rolled."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(6)])
        self.head = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            y = layer(x)
            center = zerojax.batch_mean(jnp.mean(y, 0, keepdims=True))
            square = zerojax.batch_mean(jnp.mean((y - center) ** 2, 0, keepdims=True))
            x = x + jnp.tanh((y - center) * jax.lax.rsqrt(square + 0.1))
        return self.head(x)


@pytest.mark.thorough
def test_rolled_layers():
    options = {"loss": mean_loss, "batch": batch_of, "persistence_threshold": 0, "zero": 3}
    found = train_for(Rolled, **options, steps=6)
    assert found.plan.stacks
    expected = train_for(Rolled, **options, steps=6, devices=1)
    assert_equal(found.losses, expected.losses)


class Mixing(zerojax.zoo.GPT2):
    """A decoder whose loss has a product of means over all tokens of the batch."""

    @staticmethod
    def before_cut(batch):
        return zerojax.zoo.GPT2.before_cut(batch)

    def loss(self, batch):
        total, weight = super().loss(batch)
        hidden = self.hidden(batch["tokens"], None, batch.get("positions"))
        p = jax.nn.softmax(self.head(hidden).astype(jnp.float32), -1)
        used = zerojax.batch_mean(jnp.mean((p > 0.1).astype(jnp.float32), (0, 1)))
        return total + weight * jnp.sum(used * zerojax.batch_mean(jnp.mean(p, (0, 1)))), weight


@pytest.mark.thorough
def test_sequences_over_devices():
    sizes = {"num_layers": 2, "num_heads": 4, "embed_dim": 32, "max_seq_len": 16}
    config = zerojax.zoo.GPT2Config(vocab_size=VOCAB, **sizes)
    model = lambda rngs: Mixing(config, rngs=rngs)  # noqa: E731
    found = train_for(model, zero=2, mesh={"data": 2, "context": 4}, steps=6)
    expected = train_for(model, devices=1, steps=6)
    assert_equal(found.losses, expected.losses)
    assert any("taken over the batch of 8 devices" in reason for reason in found.plan.reasons)


@pytest.mark.thorough
@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 1), ("1f1b", 3), ("zb_h1", 1)])
@pytest.mark.parametrize("loss", [loss, padded_loss], ids=["layers", "head"])
def test_pipelines(loss, schedule, zero):
    """In layers, and in what is behind them."""
    options = {"mesh": {"stage": 3, "data": 2}, "devices": 6, "num_microbatches": 4}
    found = run(None, loss, steps=6, zero=zero, pipeline_schedule=schedule, **options)
    assert found.plan.pipeline is not None
    assert_equal(found.losses, plain_losses(loss, devices=2, count=4))


# --- the derivative -------------------------------------------------------------------------------


def summed(params, batch):
    """Sums, means and products of both, of which some rows count more: (sum, weight)."""
    hidden = jnp.tanh(batch["x"] @ params["router"][0])
    weight = jnp.sum(batch["w"])
    center = zerojax.batch_mean(jnp.mean(hidden, 0))
    weighted = zerojax.batch_sum(batch["w"] @ hidden) / zerojax.batch_sum(weight)
    coupled = jnp.sum(center * weighted) + jnp.sum(jnp.exp(zerojax.batch_mean(weighted)))
    y, balance = build_apply()(params, batch["x"])
    errors = jnp.mean((y - batch["y"]) ** 2, -1) * jnp.mean(jnp.cos(hidden - center[None]), -1)
    return jnp.sum(batch["w"] * errors) + (coupled + balance) * weight, weight


def gradient_over_devices(params, batch, mesh):
    """As a step has it: each device differentiates what it returns, and all of it is added up."""

    def local(params, batch):
        with batch_split_over(mesh.axis_names):
            total, weight = jax.grad(summed, has_aux=True)(params, batch)
        return jax.lax.psum((total, weight), mesh.axis_names)

    rows = P(mesh.axis_names)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), rows), out_specs=P(), check_vma=False)
    total, weight = jax.jit(mapped)(params, batch)
    return jax.tree.map(lambda x: x / weight, total)


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-6), ("float64", 1e-12)])
def test_gradients_are_those_of_one_device(dtype, limit):
    with jax.enable_x64(dtype == "float64"):
        cast = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x), dtype), tree)  # noqa: E731
        params, batch = cast(init(jax.random.key(0))), cast(batch_of(0))
        mean = lambda p: summed(p, batch)[0] / summed(p, batch)[1]  # noqa: E731
        expected = jax.jit(jax.grad(mean))(params)
        mesh = jax.make_mesh((4, 2), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
        found = gradient_over_devices(params, batch, mesh)
        for name, leaf in expected.items():
            assert found[name].dtype == dtype
            difference = np.abs(np.asarray(found[name]) - np.asarray(leaf)).max()
            assert difference <= limit * np.abs(np.asarray(leaf)).max(), name


# --- what a plan says -----------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layers", ["carried", "returned", "unrolled"])
@pytest.mark.parametrize("function", [loss, pair_loss])
def test_a_product_of_means_is_warned_of_with_the_remedy(layers, function):
    apply = build_apply(of_experts=lambda x: x, layers=layers)
    with pytest.warns(RuntimeWarning, match="product of means.*8 parts.*zerojax.batch_mean"):
        plan = plan_of(apply, function)
    assert any("with zerojax.batch_mean" in reason for reason in plan.reasons)
    plan_of(apply, function, devices=1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layers", ["carried", "returned", "unrolled"])
@pytest.mark.parametrize("function", [loss, pair_loss])
def test_batch_mean_is_not_warned_of_but_counted(layers, function):
    plan = plan_of(build_apply(layers=layers), function)
    (said,) = [reason for reason in plan.reasons if "batch_mean" in reason]
    assert "zerojax.batch_mean: 12 values are taken over the batch of 8 devices" in said
    assert not any("product of means" in reason for reason in plan.reasons)
    plan = plan_of(build_apply(layers=layers), function, devices=1)
    assert any("12 values are taken over the batch" in x for x in plan.reasons)


def all_reduced(plan):
    """Bytes that one device sends for all-reduces in a step, as compiled."""
    state = zerojax.init_state(plan, 0)
    batch = jax.device_put(batch_of(0), plan.batch_sharding)
    program = read_program(zerojax.build_step(plan).lower(state, batch).compile().as_text())
    found = find_collectives(program, plan.mesh.size)
    return sum(x.wire_bytes * x.times for x in found if x.kind == "all-reduce")


@pytest.mark.thorough
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_the_bytes_said_are_those_of_the_compiled_step(remat, count):
    """Against the same model without the sums; without experts, as shares have no gradient."""
    nothing = lambda x: jnp.zeros_like(x)  # noqa: E731
    plan = plan_of(build_apply(of_experts=nothing, remat=remat), num_microbatches=count)
    without = plan_of(build_apply(lambda x: x, nothing, remat=remat), num_microbatches=count)
    sums = find_batch_sums(plan.traced.forward.jaxpr, trained=[True] * 4, num_extras=0)
    said = bytes_sent(sums, plan.mesh, count)
    numbers = 2 * LAYERS * WIDTH * (3 if remat else 2) * count  # forward, backward, recomputed
    assert said == 4 * numbers * 2 * 7 // 8
    assert all_reduced(plan) - all_reduced(without) == said
    assert any(f"at most {format_bytes(said)} sent" in reason for reason in plan.reasons)


REFUSED = {
    "rows": (
        lambda p, x: zerojax.batch_mean(x) @ p["head"],
        ("has a dimension of the 4 rows of one device"),
    ),
    "rows of a sum": (
        lambda p, x: zerojax.batch_sum(x @ p["head"]),
        r"zerojax.batch_sum\(jnp.sum\(x, axis=0\)\)",
    ),
    "no batch": (
        lambda p, x: x @ (p["head"] + zerojax.batch_sum(jnp.sum(p["head"]))),
        "not on the batch.*each of 8 devices",
    ),
}


@pytest.mark.parametrize(("apply", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_not_be_the_batch_is_refused(apply, message):
    def error(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    with pytest.raises(ValueError, match=message):
        plan_of(apply, error)


def test_virtual_shards_are_refused():
    message = "batch_mean .* deterministic='mesh'.*leave deterministic out"
    options = {"deterministic": "mesh", "virtual_shards": 8, "optimizer": zerojax.adamw(1e-3)}
    with pytest.raises(ValueError, match=message):
        plan_of(**options)
    # Another loss, in evaluation alone: the plan has not seen it.
    plan = plan_of(lambda p, x: (x @ p["head"], 0.0), **options)
    batch = jax.device_put(batch_of(0), plan.batch_sharding)

    def other(model, batch):
        return zerojax.batch_mean(loss(model, batch))

    with pytest.raises(ValueError, match=message):
        zerojax.build_evaluation(plan, other)(zerojax.init_state(plan, 0), batch)


@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_a_mean_of_integers_is_refused(dtype):
    with pytest.raises(TypeError, match=rf"batch_mean does not support {dtype}\[3\].*astype"):
        zerojax.batch_mean(jnp.ones(3, dtype))


@pytest.mark.thorough
def test_integers_and_numbers_of_rows_are_summed():
    assert zerojax.batch_sum(jnp.arange(3)).tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="batch_sum does not support bool"):
        zerojax.batch_sum(jnp.ones(3, bool))

    def counted(model, batch):
        """Rows of the batch, as numbers and as integers that are counted."""
        rows = zerojax.batch_sum(batch["x"].shape[0])
        positive = zerojax.batch_sum(jnp.sum(batch["x"][:, 0] > 0))
        assert rows.dtype == positive.dtype == jnp.int32
        metrics = {"rows": rows.astype(jnp.float32), "positive": positive.astype(jnp.float32)}
        return jnp.mean((model(batch["x"])[0] - batch["y"]) ** 2), metrics

    plan = plan_of(loss=counted)
    batch = jax.device_put(batch_of(0), plan.batch_sharding)
    _, metrics = zerojax.build_step(plan)(zerojax.init_state(plan, 0), batch)
    assert metrics["rows"] == ROWS
    assert metrics["positive"] == (batch_of(0)["x"][:, 0] > 0).sum()
