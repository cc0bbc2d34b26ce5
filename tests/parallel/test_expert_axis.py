"""The mesh axis `expert`: the numbers of one device, with experts and their rows on several."""

import functools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import zerojax
from tests.operators.test_experts import arrays, plain, result_and_slopes, routing
from tests.processes.test_processes import train_here
from tests.support.recipe import RECIPE
from tests.support.small_models import VOCAB
from tests.support.trajectories import (
    TOLERANCE,
    advance,
    plan_for,
    regression_batch,
    text_batch,
    train_for,
)
from tests.zoo.test_moe import llama, of_microbatches
from zerojax import passes
from zerojax.config import MoEConfig
from zerojax.models.losses import mean_squared_error, next_token
from zerojax.operators.routed_experts import experts_split_over
from zerojax.optim import precision as precisions
from zerojax.optim.precision import Precision
from zerojax.step.build import build_evaluation, pass_config
from zerojax.step.initialization import init_state
from zerojax.step.reshard import reshard_state, to_portable_state
from zerojax.zoo import MoE, Routing, balance_losses

STEPS = 6
MESHES = ({"data": 8}, {"data": 4, "expert": 2}, {"data": 2, "expert": 4}, {"data": 1, "expert": 8})
OVER_MODEL = (
    {"data": 2, "expert": 2, "model": 2},
    {"data": 1, "expert": 4, "model": 2},
    {"data": 1, "expert": 2, "model": 4},
)
OF_A_LEAF = {"float32": 2e-6, "float64": 1e-12}
"""Of a leaf's largest entry: both ways sum the same products in other orders."""


class Mixture(nnx.Module):
    """A user's own model: a list of mixtures, a few wide, and their balance."""

    expert_parameters: ClassVar[tuple[str, ...]] = MoE.expert_parameters
    pull_to: int | Literal["all"] | None = None
    """Expert of all tokens, or "all", each for an equal part of them; None: as routers choose."""

    def __init__(
        self, rngs, *, number=8, pull_to=None, width=16, layers=2, hidden=12, products="batched"
    ):
        self.config = MoEConfig(
            num_experts=number,
            expert_dim=hidden,
            balance_weight=0.1,
            z_weight=0.01,
            products=products,
        )
        self.pull_to = pull_to
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.layers = nnx.List(
            [MoE(width, self.config, rngs=rngs, stddev=0.3) for _ in range(layers)]
        )
        self.head = nnx.Linear(width, VOCAB, rngs=rngs)

    def loss(self, batch):
        x = self.embed(batch["tokens"])
        seen = Routing.empty(len(self.layers), self.config.num_experts)
        for layer in self.layers:
            gates, ids, routing = layer.router(x)
            if self.pull_to == "all":
                in_turn = jnp.arange(ids[0].size, dtype=ids.dtype) % self.config.num_experts
                ids = jnp.broadcast_to(in_turn.reshape(ids[0].shape), ids.shape)
            elif self.pull_to is not None:
                ids = jnp.full_like(ids, self.pull_to)
            x = x + layer.experts(x, gates, ids, products=self.config.products)
            seen = seen.push(routing)
        added, metrics = balance_losses(seen, self.config)
        total, weight = next_token(self.head(x), batch["targets"])
        return total + added * weight, weight, metrics


class Split(Mixture):
    """One that says how each expert is split over `model`."""

    tensor_parallel_rules: ClassVar = (
        (r"experts/(gate|up)$", (None, None, "model")),
        (r"experts/down$", (None, "model", None)),
        (r"head/kernel$", (None, "model")),
    )


def mixture(**changes):
    return lambda rngs: Mixture(rngs, **changes)


def split(**changes):
    return lambda rngs: Split(rngs, **changes)


def of_mesh(mesh):
    """The model that a mesh needs."""
    return split if "model" in mesh else mixture


def run_of(model, *, steps=STEPS, **options):
    """Fast enough that six steps learn something."""
    return train_for(model, steps=steps, **{"optimizer": fast(), **options})


def fast():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-5))


@functools.cache
def on_one_device(**changes):
    return run_of(mixture(**changes), devices=1)


def assert_same_run(many, one):
    assert np.abs(many.losses - one.losses).max() <= TOLERANCE
    assert np.abs(many.norms - one.norms).max() <= TOLERANCE


# --- equality with one device ---------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mesh", [*MESHES, *OVER_MODEL], ids=str)
def test_losses_and_norms_are_those_of_one_device(mesh, stage):
    """With balance and z-loss; all that can be sharded is."""
    one = on_one_device()
    many = run_of(of_mesh(mesh)(), mesh=mesh, zero=stage, persistence_threshold=1)
    assert one.losses[0] - one.losses[4] > 0.02  # of the same batch
    assert_same_run(many, one)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"replica": 2, "data": 2, "expert": 2}, "zero": 2},
        {
            "mesh": {"data": 2, "expert": 4},
            "zero": 1,
            "optimizer": zerojax.adamw(1e-2, eps=1e-5, **RECIPE),
        },
    ],
    ids=["replicas", "update in place"],
)
def test_combinations_too(options):
    one = train_for(mixture(), devices=1, steps=STEPS, **{**options, "mesh": {}, "zero": 0})
    assert_same_run(train_for(mixture(), steps=STEPS, **options), one)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "stage", "is_decoder"),
    [
        *((MESHES[2], stage, is_decoder) for stage in (1, 3) for is_decoder in (True, False)),
        (OVER_MODEL[0], 3, False),
    ],
)
def test_layers_that_run_in_one_loop(mesh, stage, is_decoder):
    """Those of a decoder, and those of a list that are rolled."""
    model = llama() if is_decoder else of_mesh(mesh)(layers=4)
    options = {"mesh": mesh, "zero": stage, "persistence_threshold": 1}
    many = train_for(model, steps=STEPS, **options)
    assert is_decoder or bool(many.plan.stacks) == (stage == 3)
    assert_same_run(many, train_for(model, devices=1, steps=STEPS))


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("mesh", [MESHES[2], OVER_MODEL[0]], ids=str)
def test_accumulated_gradients(mesh, stage):
    model = of_mesh(mesh)()
    options = {"mesh": mesh, "zero": stage, "persistence_threshold": 1}
    many = train_for(model, num_microbatches=4, steps=STEPS, **options)
    batch = of_microbatches(mesh["data"] * mesh["expert"], 4)
    one = train_for(model, devices=1, num_microbatches=4, batch=batch, steps=STEPS)
    assert_same_run(many, one)


@pytest.mark.thorough  # the quick one: a call, below
@pytest.mark.parametrize(
    ("mesh", "expert"), [(MESHES[2], 0), (MESHES[2], 7), (OVER_MODEL[0], 3), (OVER_MODEL[1], 3)]
)
def test_all_tokens_to_one_expert_take_more_rounds(mesh, expert):
    """Of 128 choices of each device 20 are in a round, so there are seven.

    Further rounds are loops, with collectives of both axes inside.
    """
    one = on_one_device(pull_to=expert)
    many = run_of(of_mesh(mesh)(pull_to=expert), mesh=mesh, zero=3)
    assert_same_run(many, one)


@functools.cache
def gradients(devices, stage, expert, model=1, **changes):
    """{name: the summed gradient at the state of seed 0, in true shape}."""
    made = of_mesh({"model": model} if model > 1 else {})(**changes)
    return gradients_of(made, devices, stage, expert, split_over=model)


def gradients_of(model, devices, stage, expert, batch=text_batch, split_over=1, **options):
    mesh = {"data": devices // expert // split_over, "expert": expert, "model": split_over}
    options = {"persistence_threshold": 1, "batch": batch, **options}
    plan = plan_for(model, devices=devices, mesh=mesh, zero=stage, **options)
    state = init_state(plan, 0)
    given = state["params"], state["frozen"], state["extras"], jax.random.key_data(state["rng"])
    rows = jax.device_put(batch(0), plan.batch_sharding)
    grads = jax.jit(passes.build_gradients(pass_config(plan)))(*given, rows, None)[1]
    leaves = plan.placement.leaves
    return {
        name: np.asarray(grad)[tuple(map(slice, leaves[name].shape))]
        for name, grad in grads.items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("expert", [1, 2, 4, 8])
@pytest.mark.parametrize("pull_to", ["all", 5], ids=["balanced", "all to one"])
def test_gradients_are_those_of_one_device(pull_to, expert, stage):
    """With four choices of each row for an expert, or all 32."""
    options = {"layers": 1, "pull_to": pull_to}
    assert_same_gradients(gradients(8, stage, expert, **options), gradients(1, 0, 1, **options))


@pytest.mark.thorough
@pytest.mark.parametrize(("stage", "mesh"), [*zip((3, 0, 2), OVER_MODEL, strict=True)])
def test_gradients_of_split_experts_are_those_of_one_device(stage, mesh):
    found = gradients(8, stage, mesh["expert"], mesh["model"])
    assert_same_gradients(found, gradients(1, 0, 1))


class Wide(nnx.Module):
    """Experts and router in the dtype of the batch; zerojax's routers compute in float32.

    Of three sets of experts the rows of one go where the router says, of one to all experts alike,
    and of one all to a single expert.
    """

    expert_parameters: ClassVar[tuple[str, ...]] = (r"^(routed|balanced|to_one)$",)

    def __init__(self, rngs):
        self.router = nnx.Linear(12, 8, use_bias=False, rngs=rngs)
        draw = lambda: nnx.Param(jax.random.normal(rngs.params(), (8, 12, 5)) * 0.3)  # noqa: E731
        self.routed, self.balanced, self.to_one = draw(), draw(), draw()

    def loss(self, batch):
        x = batch["x"]
        gates, ids = jax.lax.top_k(jax.nn.softmax(x @ self.router.kernel[...]), 2)
        in_turn = jnp.arange(ids.size, dtype=ids.dtype).reshape(ids.shape) % 8
        sent = (self.routed, ids), (self.balanced, in_turn), (self.to_one, jnp.full_like(ids, 5))
        y = sum(
            zerojax.experts(x, gates, ids, weights[...], lambda w, rows: rows @ w)
            for weights, ids in sent
        )
        return jnp.sum((y - batch["y"]) ** 2), jnp.asarray(len(x), jnp.float32)


@functools.cache
def gradients_in_float64(*place):
    def batch(index):
        return {name: x.astype(np.float64) for name, x in regression_batch(index).items()}

    double = np.dtype(np.float64)
    wide = Precision(compute_dtype=double, reduce_dtype=double, accumulate_dtype=double)
    return gradients_of(Wide, *place, batch=batch, precision=wide)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("expert", [1, 2, 4, 8])
def test_gradients_in_float64_are_those_of_one_device(monkeypatch, expert, stage):
    """Gradients end in float32; here in a dtype that shows errors of 1e-12."""
    double = np.dtype(np.float64)
    monkeypatch.setattr(passes.parameters, "_GRADIENT_DTYPE", double)
    monkeypatch.setattr(precisions, "STORED", (*precisions.STORED, double))
    with jax.enable_x64(True):
        found, wanted = gradients_in_float64(8, stage, expert), gradients_in_float64(1, 0, 1)
        assert {x.dtype.name for x in found.values()} == {"float64"}
        assert_same_gradients(found, wanted)


def assert_same_gradients(many, one):
    assert one.keys() == many.keys()
    for name, grad in one.items():
        largest = np.abs(grad).max()
        assert largest > 0
        np.testing.assert_allclose(
            many[name], grad, rtol=0, atol=OF_A_LEAF[grad.dtype.name] * largest, err_msg=name
        )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["balanced", "all to one", "random"])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_call_on_several_devices_in_float64(devices, kind):
    """Values and all gradients, against every expert on every token."""
    with jax.enable_x64(True):
        given, ids = arrays("float64"), routing(kind)
        mesh = Mesh(np.array(jax.devices()[:devices]), "expert")

        def split(x, gates, ids, weights, apply, **options):
            def local(x, gates, ids, weights):
                with experts_split_over("expert"):
                    return zerojax.experts(x, gates, ids, weights, apply, **options)

            rows = P("expert")
            specs = {"in_specs": (rows, rows, rows, rows), "out_specs": rows}
            return jax.shard_map(local, mesh=mesh, check_vma=False, **specs)(x, gates, ids, weights)

        wanted = result_and_slopes(plain, given, ids)
        found = result_and_slopes(split, given, ids)
        for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            largest = float(jnp.abs(one).max())
            np.testing.assert_allclose(other, one, rtol=0, atol=OF_A_LEAF["float64"] * largest)


@pytest.mark.thorough
def test_every_row_goes_to_its_experts_and_comes_back_for_100_random_routings():
    """Rows and experts are whole numbers, so that values and slopes are exact."""
    tokens, number, k = 64, 8, 2
    mesh = Mesh(np.array(jax.devices()[:4]), "expert")
    rows = jnp.arange(1.0, tokens + 1)[:, None]
    weights = jnp.arange(1.0, number + 1)[:, None, None]

    def local(x, ids, weights):
        with experts_split_over("expert"):
            apply = lambda weights, rows: rows * weights  # noqa: E731
            return zerojax.experts(x, jnp.ones(ids.shape), ids, weights, apply)

    over = P("expert")
    split = jax.shard_map(local, mesh=mesh, in_specs=over, out_specs=over, check_vma=False)

    @jax.jit
    def sent(ids):
        out, pull = jax.vjp(lambda x, weights: split(x, ids, weights), rows, weights)
        return out, pull(jnp.ones_like(out))

    for seed in range(100):
        random = np.random.default_rng(seed)
        skew = random.dirichlet(np.full(number, 0.1 + seed % 10))
        ids = random.choice(number, (tokens, k), p=skew)
        out, (of_rows, of_weights) = sent(jnp.asarray(ids, jnp.int32))
        wanted = (ids + 1).sum(-1)
        np.testing.assert_array_equal(out[:, 0], wanted * np.arange(1, tokens + 1))
        np.testing.assert_array_equal(of_rows[:, 0], wanted)
        hot = (ids[..., None] == np.arange(number)).sum(1)
        np.testing.assert_array_equal(of_weights[:, 0, 0], np.arange(1, tokens + 1) @ hot)


@pytest.mark.thorough
def test_evaluation_is_that_of_one_device():
    def sums(devices, **options):
        plan = plan_for(mixture(), devices=devices, **options)
        batch = jax.device_put(text_batch(0), plan.batch_sharding)
        found = build_evaluation(plan)(init_state(plan, 0), batch)
        return float(found["loss"]) / float(found["weight"])

    options = {"mesh": {"data": 2, "expert": 4}, "zero": 3, "persistence_threshold": 1}
    assert abs(sums(8, **options) - sums(1)) <= TOLERANCE


# --- where things lie -----------------------------------------------------------------------------


def test_experts_are_sharded_over_data_and_all_else_over_both():
    """Each device has 1 / 8 of every parameter at stage 1, and own experts only where it reads."""
    plan = plan_for(mixture(), mesh={"data": 2, "expert": 4}, zero=3, persistence_threshold=1)
    leaves = plan.placement.leaves
    gate = leaves["layers/0/experts/gate"]
    assert gate.stored_spec == P("expert", "data", None)
    assert gate.zero_axes == ("data",)
    assert leaves["layers/0/router/kernel"].stored_spec == P(("data", "expert"), None)
    for name, leaf in leaves.items():
        assert plan.placement.shard_elements(leaf) * 8 == np.prod(leaf.stored_shape), name
    shown = "\n".join(plan.reasons)
    assert "expert=4: each device has 2 of 8 experts, of 6 parameters" in shown


@pytest.mark.thorough
def test_a_state_goes_to_another_degree_bit_by_bit():
    """Portable arrays have all experts, whatever the degree; the run goes on as it would have."""
    options = {"zero": 3, "persistence_threshold": 1, "optimizer": fast()}
    run = run_of(mixture(), mesh={"data": 1, "expert": 8}, steps=3, **options)
    expected = jax.tree.map(np.asarray, to_portable_state(run.plan, run.state))
    assert expected["params"]["layers/0/experts/gate"].shape == (8, 16, 12)
    plan, state = run.plan, run.state
    for mesh in {"data": 4, "expert": 2}, {"data": 8}, {"data": 2, "expert": 4}:
        old, plan = plan, plan_for(mixture(), mesh=mesh, **options)
        state = reshard_state(old, plan, state)
        found = to_portable_state(plan, state)
        assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
    rest = advance(plan, state, range(3, STEPS))
    assert np.abs(rest.losses - on_one_device().losses[3:]).max() <= TOLERANCE


@pytest.mark.thorough
def test_a_run_goes_on_at_another_degree(tmp_path):
    """By command, from files: steps 1 and 2 with expert=8, 3 and 4 with expert=2."""

    def train(run, steps, data, expert):
        moe = ("moe.num_experts=8", "moe.expert_dim=24", "moe.balance_weight=0.1")
        words = (*(f"model.{each}" for each in ("num_layers=2", *moe)), f"mesh.data={data}")
        return train_here(tmp_path / run, steps, *words, f"mesh.expert={expert}")

    train("changed", 2, 1, 8)
    changed, alone = train("changed", 4, 4, 2), train("alone", 4, 8, 1)
    assert len(changed) == 4
    assert np.abs(np.array(changed) - np.array(alone)).max() <= TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("is_weight", [True, False])
def test_a_run_whose_router_gives_nan_ends_with_a_sentence(
    monkeypatch, tmp_path, capsys, is_weight
):
    """A weight of the router is NaN, or its result for one token of the batch."""
    monkeypatch.chdir(tmp_path)  # for the run's log

    def broken(rngs):
        model = Mixture(rngs, layers=1)
        if is_weight:
            router = model.layers[0].router.kernel
            router[...] = router[...].at[2, 3].set(jnp.nan)
        return model

    def loss(model, batch):
        if is_weight:
            return model.loss(batch)
        inner = model.layers[0].router
        marked = jnp.arange(len(batch["tokens"]))[:, None] == 0
        route = type(inner).__call__

        def spoiled(self, x, counts=None):
            gates, ids, routing = route(self, x, counts)
            return jnp.where(marked[..., None], jnp.nan, gates), ids, routing

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(inner), "__call__", spoiled)
            return model.loss(batch)

    leaf = "weights of 'layers/0/router/kernel'" if is_weight else "gradient of 'embed/embedding'"
    words = f"loss nan, gradient norm nan, first in the {leaf} at step 5: .*"
    with pytest.raises(FloatingPointError, match=words + "5 updates skipped.*before the first"):
        zerojax.train(
            broken,
            {"data": 2, "expert": 4},
            text_batch,
            loss=loss,
            precision="fp32",
            steps=9,
            log=zerojax.LogConfig(every=1),
        )
    assert "moe dropped 0" in capsys.readouterr().out


# --- refusals -------------------------------------------------------------------------------------


def refused(words, model=None, expert=2, **options):
    mesh = {"expert": expert, **options.pop("mesh", {})}
    with pytest.raises(ValueError, match=words) as caught:
        plan_for(model or mixture(), mesh=mesh, **options)
    assert "\n" not in str(caught.value)


def test_settings_that_are_not_proven_are_refused():
    refused("expert=3 .*does not divide the 8 devices", expert=3)
    refused("expert=4 does not divide the 6 experts", mixture(number=6), expert=4)
    for axis in ("stage", "context"):
        refused(f"expert=2 with {axis}=2 is not supported; use {axis}=1", mesh={axis: 2})
    refused("expert=2 with deterministic='mesh'", deterministic="mesh")
    refused("expert=2 with wire.weights=fp8", wire={"weights": "fp8"}, zero=3)
    coded = Precision(freeze_codes="int8")
    refused("expert=2 with freeze_codes='int8'", precision=coded)


def loss_of(change):
    def loss(model, batch):
        total, weight, _ = model.loss(batch)
        return total + change(model.layers[0].experts) * weight, weight

    return loss


class Undeclared(Mixture):
    expert_parameters = None


class DeclaresARouter(Mixture):
    expert_parameters = (*MoE.expert_parameters, "router/kernel$")


class DeclaresTwoOfThree(Mixture):
    expert_parameters = (r"experts/(gate|up)$",)


class Regression(nnx.Module):
    """Experts of one matrix each, called in ways that are refused."""

    expert_parameters = ("kernel$",)

    def __init__(self, rngs, way):
        self.way = way
        self.kernel = nnx.Param(rngs.params.normal((8, 12, 5)))
        self.other_kernel = nnx.Param(jnp.ones((8, 12, 5))) if way == "idle" else None

    def loss(self, batch):
        x = batch["tokens"][:, :12] * 0.1
        ids = batch["targets"][:, :2] % 8
        kernel = self.kernel[...]

        def run(x, kernel=kernel):
            apply = lambda w, rows: jnp.einsum("ecd,edf->ecf", rows, w)  # noqa: E731
            return zerojax.experts(x, jnp.ones(ids.shape), ids, kernel, apply)

        if self.way == "scaled":
            y = run(x, kernel * 2)
        elif self.way == "conditional":
            y = jax.lax.cond(x[0, 0] > 0, run, lambda x: x[:, :5], x)
        elif self.way == "mapped":
            y = jax.vmap(run, in_axes=(None, 0))(x, jnp.stack([kernel, kernel])).sum(0)
        else:
            y = run(x)
        if self.way == "constant":
            y = y + run(x, jnp.ones((8, 12, 5)))
        if self.other_kernel is not None:
            y = y + self.other_kernel[...].sum()
        return mean_squared_error(y, x[:, :5])


@pytest.mark.thorough
def test_what_a_program_does_besides_is_refused():
    """From the traced loss, not from names."""
    norm = loss_of(lambda experts: jnp.sum(experts.up[...] ** 2))
    refused(
        "layers/0/experts/up is declared .* only to zerojax.experts, or use expert=1", loss=norm
    )
    words = {"scaled": "goes into `mul`", "mapped": "kernel is declared in expert_parameters and "}
    for way in words:
        refused(words[way], lambda rngs, way=way: Regression(rngs, way))
    refused("never calls zerojax.experts", llama(MoEConfig()))


@pytest.mark.thorough
def test_an_evaluation_that_looks_at_all_experts_is_refused():
    plan = plan_for(mixture(), mesh={"expert": 2})
    norm = loss_of(lambda experts: jnp.sum(experts.up[...] ** 2))
    batch = jax.device_put(text_batch(0), plan.batch_sharding)
    with pytest.raises(ValueError, match="has only its own experts"):
        build_evaluation(plan, norm)(init_state(plan, 0), batch)
