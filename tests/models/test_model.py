"""Models as users write them: every way to read a parameter, to hold state, and to get it wrong.

At stage 3 a parameter is stored in shards, so each unusual model is compared with plain Flax: the
same loss, and the same gradient of every parameter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from tests.support.small_models import Plain, Recurrent, WithStatistics, regression_loss
from tests.support.trajectories import plan_for, regression_batch
from zerojax.models.adapt import as_model, default_loss
from zerojax.models.losses import mean_squared_error
from zerojax.passes import model_state
from zerojax.placement.leaf_placement import Access
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state
from zerojax.tracing.trace import trace_model

WIDTH = 16


class Operators(nnx.Module):
    """Reads by operators, indices, methods and attributes, and asks for shapes."""

    def __init__(self, rngs):
        self.first = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, 12)) * 0.3)
        self.last = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, 5)) * 0.3)
        self.scale = nnx.Param(jnp.ones((WIDTH,)))

    def __call__(self, x):
        assert self.first.shape == (WIDTH, 12)
        assert (self.first.ndim, self.first.size, len(self.scale)) == (2, WIDTH * 12, WIDTH)
        hidden = jnp.tanh(x @ self.first.T) * (2.0 - self.scale)[None]
        hidden = hidden + jnp.zeros((1, WIDTH), self.first.dtype) + self.first[:, 3][None]
        return jnp.dot(hidden, jnp.asarray(self.last)) + (-self.last).sum(axis=0)[None]


class Containers(nnx.Module):
    def __init__(self, rngs):
        self.ends = nnx.Dict(
            first=nnx.Linear(12, WIDTH, rngs=rngs), last=nnx.Linear(WIDTH, 5, rngs=rngs)
        )
        self.middle = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.gains = nnx.data({"out": nnx.Param(jnp.ones((5,)))})

    def __call__(self, x):
        x = self.ends["first"](x)
        for layer in self.middle:
            x = x + jnp.tanh(layer(x))
        return self.ends["last"](x) * self.gains["out"][...][None]


class Normalised(nnx.Param):
    """A user's own kind of parameter, whose value is made of the whole stored one."""

    def get_value(self, **index):
        value = super().get_value(**index)
        return value / jnp.sqrt(jnp.mean(value * value))


class OwnKind(Plain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.first.kernel = Normalised(self.first.kernel[...])


class Writes(Plain):
    def __call__(self, x):
        self.first.kernel[...] = self.first.kernel[...] / jnp.linalg.norm(self.first.kernel[...])
        self.last.bias[0] = 2.0 * self.last.bias[1]
        return super().__call__(x)


class WeightNormalised(Plain):
    """A stock layer that goes through nnx.state and writes its parameters."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.first = nnx.WeightNorm(self.first, rngs=rngs)


class Ensemble(nnx.Module):
    def __init__(self, rngs):
        self.members = nnx.vmap(Plain, in_axes=0, out_axes=0)(rngs.split(3))

    def __call__(self, x):
        call = nnx.vmap(lambda member, x: member(x), in_axes=(0, None))
        return jnp.mean(call(self.members, x), axis=0)


class PythonLoop(Plain):
    """Indexes a stack of layers by hand."""

    def __init__(self, rngs):
        super().__init__(rngs)
        build = lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs)  # noqa: E731
        self.stack = nnx.vmap(build, in_axes=0, out_axes=0)(rngs.split(2))

    def __call__(self, x):
        x = self.first(x)
        graph, state = nnx.split(self.stack)
        for index in range(2):
            layer = nnx.merge(graph, jax.tree.map(lambda stacked, i=index: stacked[i], state))
            x = x + jnp.tanh(layer(x))
        return self.last(x)


class Transformed(Plain):
    """Reads inside jit, remat and a custom derivative."""

    def __call__(self, x):
        hidden = jnp.tanh(nnx.jit(lambda layer, x: layer(x))(self.first, x))
        return nnx.remat(lambda layer, x: jax.nn.relu(layer(x)))(self.last, hidden)


class PlainArrays(Plain):
    """Arrays that are no Variables: a mask with infinities, a counter, NumPy constants."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.mask = jnp.where(jnp.arange(12) < 6, 0.0, -jnp.inf)
        self.calls = jnp.zeros(())
        self.constants = np.arange(12, dtype=np.float32)

    def __call__(self, x):
        self.calls = self.calls + 1
        return super().__call__(x * jax.nn.softmax(self.mask)[None] + 0.1 * self.constants[None])


class Branching(Plain):
    def __call__(self, x):
        first, other = (lambda x: jnp.tanh(self.first(x))), (lambda x: self.first(x))
        return self.last(jax.lax.cond(jnp.sum(x) < 1e6, first, other, x))


def with_decay(model, batch):
    """Adds the squares of all parameters, as they are stored."""
    total, weight = regression_loss(model, batch)
    squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return total + weight * 0.01 * squares, weight


UNUSUAL = {
    "operators": (Operators, regression_loss, {}),
    "containers": (Containers, regression_loss, {}),
    "own kind": (OwnKind, regression_loss, {}),
    "writes": (Writes, regression_loss, {}),
    "weight norm": (WeightNormalised, regression_loss, {}),
    "ensemble": (Ensemble, regression_loss, {}),
    "python loop": (PythonLoop, regression_loss, {}),
    "transformed": (Transformed, regression_loss, {}),
    "plain arrays": (PlainArrays, regression_loss, {}),
    "a scan from zeros": (Recurrent, regression_loss, {}),
    "branching": (
        Branching,
        regression_loss,
        dict.fromkeys(["first/kernel", "first/bias"], "is read inside `cond`"),
    ),
    "decay": (
        Plain,
        with_decay,
        dict.fromkeys(
            ["first/kernel", "first/bias", "last/kernel", "last/bias"],
            "its stored value goes into `integer_pow` directly, as with nnx.state(model)",
        ),
    ),
}


def of_plain_flax(model, loss, batch):
    """Loss and {name: gradient}, without zerojax."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def differentiate(params):
        def mean(params):
            total, weight = loss(nnx.merge(graph, params, rest, copy=True), batch)
            return total / weight

        return jax.value_and_grad(mean)(params)

    value, gradients = differentiate(params)
    flat = nnx.to_flat_state(gradients)
    return value, {"/".join(map(str, path)): leaf.get_raw_value() for path, leaf in flat}


def of_a_step(model, loss, *, zero, **options):
    """Loss, {name: gradient} and the plan: one step of plain descent at rate 1."""
    plan = plan_for(
        model,
        loss=loss,
        batch=regression_batch,
        devices=4,
        zero=zero,
        **{"optimizer": optax.sgd(1.0), "persistence_threshold": 0, **options},
    )
    state = init_state(plan)
    before = jax.device_get(to_portable_state(plan, state)["params"])
    batch = jax.device_put(regression_batch(0), plan.batch_sharding)
    state, metrics = build_step(plan)(state, batch)
    after = jax.device_get(to_portable_state(plan, state)["params"])
    return metrics["loss"], {name: before[name] - after[name] for name in before}, plan


@pytest.mark.thorough
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_models_at_stage_3(name):
    build, loss, barriers = UNUSUAL[name]
    model = build(nnx.Rngs(0))
    expected, gradients = of_plain_flax(model, loss, regression_batch(0))
    found, stepped, plan = of_a_step(model, loss, zero=3)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert stepped.keys() == gradients.keys()
    for key, gradient in gradients.items():
        np.testing.assert_allclose(stepped[key], gradient, rtol=1e-4, atol=2e-6, err_msg=key)
    reasons = {
        name: reason
        for name, reason in plan.placement.exceptions()
        if reason.endswith("gathered once per step")
    }
    assert reasons.keys() == barriers.keys()
    assert all(barriers[name] in reason for name, reason in reasons.items())
    others = [leaf for name, leaf in plan.placement.leaves.items() if name not in barriers]
    assert all(leaf.access in (Access.GATHER_ON_USE, Access.WHOLE) for leaf in others)


@pytest.mark.thorough
def test_a_loss_that_looks_at_stored_values_at_stage_2():
    model = Plain(nnx.Rngs(0))
    expected, gradients = of_plain_flax(model, with_decay, regression_batch(0))
    found, stepped, _ = of_a_step(model, with_decay, zero=2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for key, gradient in gradients.items():
        np.testing.assert_allclose(stepped[key], gradient, rtol=1e-4, atol=2e-6, err_msg=key)


def test_an_evaluation_may_look_at_stored_values_where_training_does_not():
    model = Plain(nnx.Rngs(0))
    plan = plan_for(
        model, zero=3, loss=regression_loss, batch=regression_batch, persistence_threshold=0
    )
    assert all(leaf.access is Access.GATHER_ON_USE for leaf in plan.placement.leaves.values())
    batch = jax.device_put(regression_batch(0), plan.batch_sharding)
    sums = build_evaluation(plan, with_decay)(init_state(plan), batch)
    expected, _ = of_plain_flax(model, with_decay, regression_batch(0))
    np.testing.assert_allclose(sums["loss"] / sums["weight"], expected, rtol=1e-5)


def test_a_factory_may_hold_plain_arrays():
    _, gradients, plan = of_a_step(lambda rngs: PlainArrays(rngs), regression_loss, zero=3)
    assert set(plan.abstract_state["extras"]) == {"mask", "calls", "constants"}
    assert set(gradients) == set(plan.placement.leaves)


@pytest.mark.thorough
def test_parameters_are_read_in_the_compute_dtype_at_every_stage():
    seen = set()

    def loss(model, batch):
        seen.add((model.first.kernel.dtype.name, model.first.kernel[...].dtype.name))
        return regression_loss(model, batch)

    for zero in range(4):
        plan = plan_for(
            Plain(nnx.Rngs(0)),
            zero=zero,
            loss=loss,
            batch=regression_batch,
            precision="bf16",
            persistence_threshold=0,
        )
        build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    assert seen == {("bfloat16", "bfloat16")}


def test_asking_for_a_shape_is_no_read():
    def loss(model, batch):
        assert model.last.kernel.shape == (WIDTH, 5)
        return jnp.sum(model.first(batch["x"])), model.last.kernel.size

    model = as_model(Plain(nnx.Rngs(0)))
    params, extras = model.initial_arrays()
    trace = trace_model(model, params, extras, regression_batch(0), loss)
    assert set(trace.read_shapes) == {"first/kernel", "first/bias"}


# --- state besides parameters -----------------------------------------------------------------


class LinenNorm(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.5)(linen.Dense(WIDTH)(x))
        return linen.Dense(5)(linen.Dropout(0.5, deterministic=not train)(x))

    def loss(self, batch, train=False):
        return mean_squared_error(self(batch["x"], train), batch["y"])


def linen_loss(model, batch):
    return mean_squared_error(model(batch["x"], train=model.training), batch["y"])


class Averaged(nnx.Module):
    """A batch norm, and an average of a kernel that no row changes."""

    def __init__(self, rngs):
        self.net = WithStatistics(rngs)
        self.average = nnx.BatchStat(jnp.zeros((12, 32)))

    def __call__(self, x):
        kernel = jax.lax.stop_gradient(self.net.hidden.kernel[...])
        self.average[...] = 0.9 * self.average[...] + 0.1 * kernel
        return self.net(x)


def test_a_plan_tells_state_that_rows_change_from_other_state():
    plan = plan_for(Averaged(nnx.Rngs(0)), loss=regression_loss, batch=regression_batch)
    alike, apart = (reason for reason in plan.reasons if "non-parameter state" in reason)
    assert "average" in alike
    assert "do not depend on which rows" in alike
    assert "net/norm/" in apart
    assert "average non" not in apart
    assert "from its own rows" in apart


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "loss", "mean"),
    [
        (WithStatistics(nnx.Rngs(0), rate=0.5), regression_loss, "norm/mean"),
        (LinenNorm(), linen_loss, "batch_stats/BatchNorm_0/mean"),
    ],
    ids=["nnx", "linen"],
)
def test_statistics_move_in_training_and_are_used_in_evaluation(model, loss, mean):
    plan = plan_for(model, zero=3, loss=loss, batch=regression_batch, persistence_threshold=20)
    assert any("non-parameter state" in reason for reason in plan.reasons)
    batch = jax.device_put(regression_batch(0), plan.batch_sharding)
    state, step, evaluate = init_state(plan), build_step(plan), build_evaluation(plan)
    first = evaluate(state, batch)
    np.testing.assert_array_equal(first["loss"], evaluate(state, batch)["loss"])
    np.testing.assert_array_equal(state["extras"][mean], 0)
    for _ in range(2):
        state, metrics = step(state, batch)
    assert np.abs(state["extras"][mean]).max() > 0
    assert int(metrics["skipped"]) == 0
    # Dropout and the statistics of the batch itself are for training only.
    second = evaluate(state, batch)
    assert second["loss"] != first["loss"]
    assert abs(float(second["loss"] / second["weight"]) - float(metrics["loss"])) > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_statistics_are_the_mean_over_the_shards_of_the_batch(num_microbatches):
    """A shard's microbatches follow on each other."""

    def build(rngs):
        return nnx.Dict(
            norm=nnx.BatchNorm(12, momentum=0.5, rngs=rngs), out=nnx.Linear(12, 5, rngs=rngs)
        )

    def loss(model, batch):
        return mean_squared_error(model["out"](model["norm"](batch["x"])), batch["y"])

    options = {"loss": loss, "batch": regression_batch, "num_microbatches": num_microbatches}
    plan = plan_for(build, zero=1, **options)
    batch = regression_batch(0)
    state, _ = build_step(plan)(init_state(plan), jax.device_put(batch, plan.batch_sharding))
    pieces = batch["x"].reshape(8, num_microbatches, -1, 12)
    mean, var = np.zeros((8, 12)), np.ones((8, 12))
    for index in range(num_microbatches):
        mean = 0.5 * mean + 0.5 * pieces[:, index].mean(1)
        var = 0.5 * var + 0.5 * pieces[:, index].var(1)
    np.testing.assert_allclose(state["extras"]["norm/mean"], mean.mean(0), atol=1e-6)
    np.testing.assert_allclose(state["extras"]["norm/var"], var.mean(0), atol=1e-6)
    copies = {shard.data.tobytes() for shard in state["extras"]["norm/mean"].addressable_shards}
    assert len(copies) == 1


@pytest.mark.thorough
def test_dropout_depends_on_seed_and_step_and_differs_between_shards():
    def build(rngs):
        model = Plain(rngs)
        model.dropout = nnx.Dropout(0.5, rngs=rngs)
        return model

    def counting(model, batch):
        kept = model.dropout(batch["x"] * 0 + 1)
        rows = jnp.arange(1.0, 13.0)[None]
        total = jnp.sum(kept * rows) + 0 * jnp.sum(model.first.bias[...])
        return total, float(len(kept))

    plan = plan_for(build, loss=counting, batch=regression_batch, optimizer=optax.sgd(0.0))
    batch = jax.device_put(regression_batch(0), plan.batch_sharding)

    def losses(seed):
        state, step, found = init_state(plan, seed), build_step(plan), []
        for _ in range(2):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"] * metrics["weight"]))
        return found

    first = losses(0)
    assert first == losses(0)
    assert len({*first, *losses(1)}) == 4
    # Eight equal shards would give a multiple of 8 x 2 (what is kept is doubled).
    assert any(total % 16 for total in first)


@pytest.mark.thorough
def test_each_microbatch_has_a_key_of_its_own():
    def loss(model, batch):
        return jax.random.uniform(model.key) + 0 * jnp.sum(model.params["w"])

    pair = (lambda key: {"w": jnp.ones(3)}), (lambda params, x: x)
    found = set()
    for number in (2, 4):
        plan = plan_for(pair, loss=loss, batch=regression_batch, devices=1, num_microbatches=number)
        batch = jax.device_put(regression_batch(0), plan.batch_sharding)
        found.add(float(build_step(plan)(init_state(plan), batch)[1]["loss"]))
    assert len(found) == 2, "means of two and of four numbers that are not the same"


# --- the door ---------------------------------------------------------------------------------


def test_kinds():
    assert as_model(Plain(nnx.Rngs(0))).kind == "nnx module"
    assert as_model(lambda rngs: Plain(rngs)).kind == as_model(Plain).kind == "nnx factory"
    assert as_model(LinenNorm()).kind == "linen module"
    functions = as_model((lambda key: {"w": jnp.ones(3)}, lambda params, x: x))
    assert (functions.kind, functions.reads_lazily) == ("functions", False)
    assert as_model(functions) is functions


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (3, TypeError, "cannot train a int.* nnx.Module, a callable rngs -> nnx.Module"),
        (LinenNorm, TypeError, r"LinenNorm is a linen class.* LinenNorm\("),
        (lambda rngs: {"w": 1}, TypeError, "<lambda> returned a dict, .* nnx.Module"),
    ],
)
def test_what_is_no_model_is_refused(model, error, message):
    with pytest.raises(error, match=message):
        as_model(model)


def test_the_default_loss_is_the_models_own():
    with pytest.raises(ValueError) as caught:
        default_loss(as_model(Plain))
    assert str(caught.value) == (
        "the nnx factory Plain has no method loss(batch), and no loss is given; pass a loss that "
        "returns a scalar or (sum, weight), such as loss=lambda model, batch: "
        "zerojax.losses.next_token(model(batch['tokens']), batch['targets'])"
    )
    plan = plan_for(LinenNorm(), batch=regression_batch, devices=1)
    assert set(plan.placement.leaves) >= {"Dense_0/kernel", "BatchNorm_0/scale"}


def test_a_linen_module_that_is_never_called_has_no_shapes():
    with pytest.raises(ValueError, match="the loss never called the linen module LinenNorm"):
        plan_for(LinenNorm(), batch=regression_batch, loss=lambda model, batch: jnp.float32(0))


@pytest.mark.thorough
def test_functions_may_look_at_the_batch_and_get_mode_and_key():
    def init(key, batch):
        return {"w": jax.random.normal(key, (batch["x"].shape[1], 5))}

    def loss(model, batch):
        assert model.key.shape == ()
        scale = 1.0 if model.training else 2.0
        return mean_squared_error(scale * model(batch["x"]), batch["y"])

    plan = plan_for((init, lambda params, x: x @ params["w"]), loss=loss, batch=regression_batch)
    state, batch = init_state(plan), jax.device_put(regression_batch(0), plan.batch_sharding)
    assert state["params"]["w"].shape == (12, 5)
    evaluated = build_evaluation(plan)(state, batch)
    _, metrics = build_step(plan)(state, batch)
    assert float(evaluated["loss"] / evaluated["weight"]) > float(metrics["loss"]) * 1.5


@pytest.mark.thorough
def test_the_users_kind_of_object_comes_back():
    for model, loss in ((Plain(nnx.Rngs(0)), regression_loss), (LinenNorm(), linen_loss)):
        plan = plan_for(model, zero=3, loss=loss, batch=regression_batch)
        state = to_portable_state(plan, init_state(plan))
        source = plan.model.to_source({**state["params"], **state["frozen"]}, state["extras"])
        x = regression_batch(0)["x"]
        output = source(x) if isinstance(source, nnx.Module) else model.apply(source, x)
        assert output.shape == (32, 5)
        if isinstance(source, nnx.Module):
            np.testing.assert_allclose(output, model(x), atol=1e-6)


def test_an_infinity_in_the_models_state_that_stays_has_not_changed():
    """As the mask of an attention layer: the difference of two infinities is not a number."""
    before = {"mask": jnp.array([0.0, -jnp.inf]), "mean": jnp.array([1.0])}
    found = model_state.changes(before, {**before, "mean": jnp.array([3.0])}, frozenset())
    assert found["mask"].tolist() == [0.0, 0.0]
    assert found["mean"].tolist() == [2.0]
