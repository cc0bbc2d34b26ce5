"""Muon on mixtures: each expert's matrix is orthogonalised by itself, and routers are Adam's.

The comparison is `optax.contrib.muon` on one device, which gets every matrix as an array of its
own.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon

import zerojax
from tests.optim.test_muon_owners import ADAM, params_of
from tests.parallel.test_expert_axis import mixture
from tests.support.small_models import reference_model
from tests.support.trajectories import plan_for, regression_batch, train_for
from tests.zoo.test_moe import llama
from zerojax.optim import muon_dimensions
from zerojax.plan.muon_matrices import classes_of_plan
from zerojax.zoo.lora import add_lora

STEPS = 4
SPLIT = {"persistence_threshold": 20}
EXPERTS = r"experts/(gate|up|down)$"
OURS = zerojax.muon(0.02, adam_learning_rate=ADAM, clip_norm=1.0)
# One layer: the numbers are about experts, and a layer's names are in the stack all the same.
MODELS = {"own": lambda: mixture(layers=1), "stacked": lambda: llama(num_layers=2)}


def of(plan):
    """{parameter: dimensions of its matrices} of the plan's optimizer, and its lines."""
    found = plan.tx.matrices(plan.abstract_state["params"])
    return found, "\n".join(reason for reason in plan.reasons if reason.startswith("muon"))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_products_say_of_zerojaxs_models_what_their_names_say(name):
    plan = plan_for(reference_model(name), optimizer=zerojax.muon(0.02))
    named = muon_dimensions(plan.abstract_state["params"])
    assert of(plan)[0] == {name: dims for name, dims in named.items() if dims is not None}


@pytest.mark.parametrize("products", ["batched", "loop"])
def test_experts_of_a_users_model_are_matrices_and_its_routers_adams(products):
    plan = plan_for(mixture(products=products), optimizer=zerojax.muon(0.02))
    found, lines = of(plan)
    assert found.keys() == {n for n in plan.placement.leaves if re.search(EXPERTS, n)}
    assert set(found.values()) == {MuonDimensionNumbers(1, 2)}
    assert "each expert's matrix of layers/*/experts/down, layers/*/experts/gate, layers" in lines
    assert "layers/*/router/kernel (router)" in lines.partition("Adam updates")[2]
    assert "embed/embedding (table), head/bias, head/kernel (head)" in lines
    assert "each expert's matrix of layers/*/experts/down" in " ".join(plan.table().split())


def test_stacked_experts_are_matrices_by_their_products_and_by_their_names():
    plan = plan_for(llama(), optimizer=zerojax.muon(0.02))
    found, lines = of(plan)
    named = muon_dimensions(plan.abstract_state["params"])
    assert found == {name: dims for name, dims in named.items() if dims is not None}
    assert found["blocks/mlp/experts/down"] == MuonDimensionNumbers(2, 3)
    assert "blocks/mlp/router/kernel" not in found
    assert "blocks/mlp/router/kernel (router)" in lines
    # Names that match routers and experts, too, change nothing.
    wide = functools.partial(muon_dimensions, kernels="^blocks/(mlp|attention)/")
    assert of(plan_for(llama(), optimizer=zerojax.muon(0.02, dimensions=wide)))[0] == found


def test_deepspeeds_rule_has_each_experts_matrix_and_routers():
    """As its `set_optimizer_flags`: all matrices but embeddings and heads; the plan says so."""
    own = zerojax.muon(0.02, dimensions=zerojax.optim.matrices_by_shape)
    found, lines = of(plan_for(llama(), optimizer=own))
    assert found["blocks/mlp/experts/up"] == MuonDimensionNumbers(2, 3)
    assert "blocks/mlp/router/kernel" in found
    assert "muon orthogonalizes the router blocks/mlp/router/kernel" in lines
    mixed = of(plan_for(mixture(), optimizer=own))[0]
    assert mixed["layers/0/experts/up"] == MuonDimensionNumbers(1, 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"stage": 2}, {"model": 2}, {"expert": 2}], ids=str)
def test_matrices_are_the_same_on_every_mesh(mesh):
    plan = plan_for(llama(num_layers=4), optimizer=zerojax.muon(0.02), mesh=mesh, zero=1)
    named = muon_dimensions(plan.abstract_state["params"])
    assert of(plan)[0] == {name: dims for name, dims in named.items() if dims is not None}


def test_adapters_are_matrices():
    lora = zerojax.LoraConfig(rank=4)
    model = add_lora(reference_model("llama"), lora)
    plan = plan_for(model, optimizer=zerojax.muon(0.02), freeze=lora.freeze)
    found, _ = of(plan)
    trained = {name for name, leaf in plan.placement.leaves.items() if not leaf.frozen}
    assert found.keys() == trained
    assert {dims.reduction_axis for name, dims in found.items() if "mlp" in name} == {1}


def test_a_plan_says_where_a_split_is_wrong():
    lines = "\n".join(plan_for(mixture(), optimizer=muon(0.02)).reasons)
    assert "muon leaves the experts' matrices layers/*/experts/down" in lines
    assert "muon orthogonalizes the router layers/*/router/kernel" in lines
    other = {"layers/0/experts/up": MuonDimensionNumbers(0, 2)}
    own = zerojax.muon(0.02, dimensions=lambda params: _stated(params, other))
    lines = "\n".join(plan_for(mixture(), optimizer=own).reasons)
    assert "treats layers/*/experts/up as matrices with rows 0 and columns 2" in lines
    assert "uses rows (1,) and columns (2,)" in lines


def _stated(params, dims):
    named = zerojax.tracing.trees.flatten_names(params)
    return zerojax.tracing.trees.unflatten_like(params, {n: dims.get(n) for n in named})


# Other stacks of matrices


class Heads(nnx.Module):
    """Heads that are multiplied one by one; a name like zerojax's would mislead."""

    def __init__(self, rngs, *, names_like_ours):
        draw = lambda *shape: nnx.Param(jax.random.normal(rngs.params(), shape) * 0.3)  # noqa: E731
        self.first = nnx.Linear(12, 12, rngs=rngs)
        stacks = {"into": draw(3, 4, 6), "out": draw(3, 6, 4)}
        if names_like_ours:
            self.blocks = nnx.Dict({name: nnx.Dict(kernel=x) for name, x in stacks.items()})
        else:
            self.heads = nnx.Dict(stacks)
        self.last = nnx.Linear(12, 5, rngs=rngs)

    def loss(self, batch):
        x = jnp.tanh(self.first(batch["x"])).reshape(-1, 3, 4)
        if hasattr(self, "blocks"):
            into, out = (self.blocks[name]["kernel"][...] for name in ("into", "out"))
        else:
            into, out = self.heads["into"][...], self.heads["out"][...]
        each = lambda x, into, out: jnp.tanh(x @ into) @ out  # noqa: E731
        x = jax.vmap(each, (1, 0, 0), 1)(x, into, out).reshape(-1, 12)
        return jnp.mean((self.last(x) - batch["y"]) ** 2)


@pytest.mark.parametrize("names_like_ours", [False, True])
def test_matrices_of_mapped_heads_count_one_by_one(names_like_ours):
    plan = plan_for(
        lambda rngs: Heads(rngs, names_like_ours=names_like_ours),
        optimizer=zerojax.muon(0.02),
        batch=regression_batch,
    )
    found, lines = of(plan)
    stacks = {n for n in plan.placement.leaves if n.startswith(("blocks", "heads"))}
    assert {name: found[name] for name in stacks} == dict.fromkeys(
        stacks, MuonDimensionNumbers(1, 2)
    )
    if names_like_ours:
        assert "muon leaves first/kernel to Adam" in lines
    else:
        assert found.keys() == {*stacks, "first/kernel"}
    assert "last/kernel (head)" in lines


class Odd(nnx.Module):
    """Experts with arrays of two or three dimensions each, which no product has as they are."""

    expert_parameters = (r"^weights$",)

    def __init__(self, rngs, *, sides=(12, 3, 4)):
        self.router = nnx.Linear(12, 4, rngs=rngs)
        self.weights = nnx.Param(jax.random.normal(rngs.params(), (4, *sides)))
        self.last = nnx.Linear(12, 5, rngs=rngs)

    def loss(self, batch):
        x = batch["x"]
        gates, ids = jax.lax.top_k(jax.nn.softmax(self.router(x)), 2)

        def apply(weights, rows):
            weights = jnp.tanh(weights).reshape(4, 12, 12)
            return jnp.einsum("ecd,edh->ech", rows, weights)

        x = x + zerojax.experts(x, gates, ids, self.weights[...], apply)
        return jnp.mean((self.last(x) - batch["y"]) ** 2)


def test_a_matrix_that_is_used_in_two_ways_is_adams_and_named():
    def apply(params, x):
        heads = jnp.einsum(
            "bhd,hde->bhe", jnp.tanh(x @ params["in"]).reshape(-1, 3, 4), params["w"]
        )
        whole = heads.reshape(-1, 12) @ params["w"].reshape(12, 4)
        return jnp.tanh(whole) @ params["mid"] @ params["out"]

    sizes = {"in": (12, 12), "w": (3, 4, 4), "mid": (4, 4), "out": (4, 5)}
    init = lambda key: {n: 0.3 * jax.random.normal(key, shape) for n, shape in sizes.items()}  # noqa: E731
    plan = plan_for(
        (init, apply),
        optimizer=zerojax.muon(0.02),
        batch=regression_batch,
        loss=lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
    )
    found, lines = of(plan)
    assert found.keys() == {"in", "mid"}
    assert "muon leaves w to Adam" in lines


def test_experts_whose_rows_cannot_be_told_are_refused():
    with pytest.raises(ValueError, match="expert of weights has 3 dimensions, .*pass dimensions="):
        plan_for(Odd, optimizer=zerojax.muon(0.02), batch=regression_batch)
    stated = zerojax.muon(
        0.02, dimensions=lambda p: _stated(p, {"weights": MuonDimensionNumbers(1, (2, 3))})
    )
    plan = plan_for(Odd, optimizer=stated, batch=regression_batch)
    assert of(plan)[0] == {"weights": MuonDimensionNumbers(1, (2, 3))}
    plan = plan_for(
        lambda rngs: Odd(rngs, sides=(12, 12)), optimizer=zerojax.muon(0.02), batch=regression_batch
    )
    found, lines = of(plan)
    assert found == {"weights": MuonDimensionNumbers(1, 2)}
    assert "the dimensions of weights by names and shapes" in lines


# Numbers


def matrices_apart(dims):
    """optax's Muon of parameters whose matrices are 2-D arrays of their own."""

    def apart(tree):
        found = {}
        for name, x in tree.items():
            if dims.get(name) is None:
                found[name] = x
                continue
            sides = [np.atleast_1d(side).tolist() for side in dims[name]]
            counted = [dim for dim in range(x.ndim) if dim not in (*sides[0], *sides[1])]
            moved = x.transpose(*counted, *sides[0], *sides[1])
            size = [int(np.prod([x.shape[dim] for dim in side])) for side in sides]
            for number, matrix in enumerate(moved.reshape(-1, *size)):
                found[f"{name}:{number}"] = matrix
        return found

    def together(tree, like):
        found = {}
        for name, x in like.items():
            if dims.get(name) is None:
                found[name] = tree[name]
                continue
            sides = [np.atleast_1d(side).tolist() for side in dims[name]]
            order = [dim for dim in range(x.ndim) if dim not in (*sides[0], *sides[1])]
            order += [*sides[0], *sides[1]]
            count = sum(key.startswith(f"{name}:") for key in tree)
            whole = jnp.stack([tree[f"{name}:{number}"] for number in range(count)])
            whole = whole.reshape([x.shape[dim] for dim in order])
            found[name] = whole.transpose(np.argsort(order).tolist())
        return found

    def numbers(tree):
        return {name: MuonDimensionNumbers() if ":" in name else None for name in tree}

    plain = optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(0.02, adam_learning_rate=ADAM, muon_weight_dimension_numbers=numbers),
    )

    def update(grads, state, params):
        moved, state = plain.update(apart(grads), state, apart(params))
        return together(moved, params), state

    return optax.GradientTransformation(lambda params: plain.init(apart(params)), update)


@functools.cache
def expected(name):
    """The dimensions are written out here: what the plan finds is checked against them."""
    plan = plan_for(MODELS[name](), optimizer=OURS)
    dims = {}
    for leaf, x in plan.abstract_state["params"].items():
        if re.search(EXPERTS, leaf):
            dims[leaf] = MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)
        elif re.search(r"^blocks/attention/.*kernel$", leaf):
            joins = "/output/" in leaf
            dims[leaf] = MuonDimensionNumbers(*(((1, 2), 3) if joins else (1, (2, 3))))
    flat = functools.partial(train_for, MODELS[name](), devices=1, steps=STEPS)
    return params_of(flat(optimizer=_by_name(matrices_apart(dims))))


def _by_name(tx):
    """The transformation for the nested tree that optimizers of users get."""
    names, rebuilt = zerojax.tracing.trees.flatten_names, zerojax.tracing.trees.unflatten_like

    def update(grads, state, params):
        moved, state = tx.update(names(grads), state, names(params))
        return rebuilt(grads, moved), state

    return optax.GradientTransformation(lambda params: tx.init(names(params)), update)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "zero", "mesh"),
    [
        *(("own", zero, {"data": 2, "expert": 4}) for zero in range(4)),
        *(("stacked", zero, {"data": 4, "expert": 2}) for zero in range(4)),
        *(("stacked", zero, {"data": 8}) for zero in (1, 3)),
        ("stacked", 2, {"data": 2, "expert": 2, "model": 2}),
    ],
)
def test_each_experts_matrix_is_that_of_optax_on_one_device(name, zero, mesh):
    run = train_for(MODELS[name](), zero=zero, mesh=mesh, optimizer=OURS, steps=STEPS, **SPLIT)
    if zero:
        experts = [
            one for one in classes_of_plan(run.plan) if any("experts" in n for n in one.counts)
        ]
        assert experts
        assert all(one.exchanges for one in experts)
    wanted = expected(name)
    for leaf, value in params_of(run).items():
        # As in `test_muon_owners`: five rounds multiply rounding by up to 485, times the rate.
        np.testing.assert_allclose(value, wanted[leaf], atol=1e-5, err_msg=leaf)
