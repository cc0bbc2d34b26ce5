"""Models whose layers are rolled: trained, saved and read back as if nobody had rolled them."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from pallas_kernels.choice import missing as kernels_missing
from tests.support import equal_trees
from tests.support.recipe import DECAYED, RECIPE
from tests.support.saved_states import restore, save
from zerojax import tracing
from zerojax.config.mesh import HOST_KIND
from zerojax.data import shard_batch
from zerojax.passes.update import build_norm, leaf_names
from zerojax.step import reshard
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import (
    from_portable_state,
    portable_to_read,
    reshard_state,
    to_portable_state,
)
from zerojax.step.trained_model import model_of

AXES = ("data", "stage", "model")
NUM_LAYERS, WIDTH, VOCAB = 6, 16, 32
STEPS = 3
LOSSES = 4e-6
"""Relative: a loss sums the batch's rows in another order on several devices."""
ZERO_3 = {"data": 4, "zero": 3, "persistence_threshold": 0}
RULES = (("up/kernel", (None, "model")), ("down/kernel", ("model", None)))
ADAMW = zerojax.adamw(1e-3, **RECIPE)
MESHES = {
    "zero 1": {"data": 4, "zero": 1},
    "zero 2": {"data": 4, "zero": 2},
    "zero 3": ZERO_3,
    "pipeline": {"data": 2, "stage": 2, "zero": 1},
    "pipeline, zero 3": {**ZERO_3, "data": 2, "stage": 2},
    "tensor parallel": {**ZERO_3, "data": 2, "model": 2, "rules": RULES},
    "moments on host": {**ZERO_3, "offload": {"opt_state": "host", "min_elements": 1}},
    "weights on host": {**ZERO_3, "offload": {"params": "host", "min_elements": 1}},
    "activations on host": {**ZERO_3, "offload": {"activations": "host"}},
}
DEAR = ("zero 2", "pipeline, zero 3", "weights on host", "activations on host")


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Listed(nnx.Module):
    """A model that calls a list of blocks."""

    def __init__(self, rngs: nnx.Rngs, checkpoints: bool = True):
        self.checkpoints = checkpoints
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(NUM_LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def loss(self, batch: Any) -> tuple[jax.Array, jax.Array]:
        x = self.embed(batch["tokens"])
        for layer in self.layers:
            x = nnx.remat(Block.__call__)(layer, x) if self.checkpoints else layer(x)
        logs = jax.nn.log_softmax(self.head(x))
        picked = jnp.take_along_axis(logs, batch["targets"][..., None], axis=-1)
        return -jnp.sum(picked), jnp.float32(batch["tokens"].size)


def batch() -> dict[str, np.ndarray]:
    tokens = np.arange(8 * 8, dtype=np.int32).reshape(8, 8)
    return {"tokens": tokens % VOCAB, "targets": (7 * tokens + 1) % VOCAB}


def plan_of(mesh: dict[str, Any], *, checkpoints: bool = True, **settings: Any) -> zerojax.Plan:
    """A plan of `Listed` on the first devices."""
    sizes = {axis: mesh.get(axis, 1) for axis in AXES}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    made = zerojax.make_mesh(zerojax.MeshConfig(**sizes), devices)
    options = {name: value for name, value in mesh.items() if name not in AXES}
    settings = {"optimizer": ADAMW, **settings}
    model = Listed(nnx.Rngs(0), checkpoints)
    return zerojax.make_plan(
        model, made, example_batch=batch(), precision="fp32", **options, **settings
    )


def train(plan: zerojax.Plan, steps: int = STEPS) -> tuple[Any, list[float]]:
    """(the state afterwards, the loss of every step)."""
    state, step, losses = init_state(plan), build_step(plan), []
    for _ in range(steps):
        state, metrics = step(state, shard_batch(plan, batch()))
        losses.append(float(metrics["loss"]))
    return state, losses


@functools.cache
def losses_on_one_device(optimizer: Any, freeze: str | tuple[str, ...] = ()) -> list[float]:
    """Of the model as it is written."""
    plan = plan_of({"zero": 0, "roll": "off"}, optimizer=optimizer, freeze=freeze)
    assert plan.stacks == {}
    return train(plan)[1]


def assert_same_bits(one: tuple[zerojax.Plan, Any], other: tuple[zerojax.Plan, Any]) -> None:
    """Two states under the user's names."""
    equal_trees.assert_same(to_portable_state(*one), to_portable_state(*other))


def assert_all_rolled(plan: zerojax.Plan) -> None:
    assert plan.stacks["layers/0..5/up/kernel"] == tuple(
        f"layers/{layer}/up/kernel" for layer in range(NUM_LAYERS)
    )
    assert "layers: layers/0..5 as one loop of 6 iterations" in plan.reasons


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "zero": 3},
        {"data": 2, "zero": 2, "roll_remat": "full"},
        {"data": 2, "stage": 2, "zero": 1},
        pytest.param(
            {"stage": 2, "pipeline_schedule": "interleaved(2)", "partition": [2, 2, 1, 1]},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=str,
)
def test_the_layer_whose_gradient_is_largest_or_not_finite_is_named(mesh: dict[str, Any]) -> None:
    """Gradients with an infinity, then with a large number, in one row of a stack."""
    plan = plan_of(mesh, persistence_threshold=0)
    stack, layer, names = "layers/0..5/down/kernel", 4, leaf_names(plan)
    stored = plan.placement.leaves[stack].layer_rows or range(NUM_LAYERS)
    norm = jax.jit(build_norm(plan))

    def read(number: float) -> Any:
        grads = {name: np.ones(x.shape, np.float32) for name, x in params.items()}
        grads[stack][list(stored).index(layer), 1, 2] = number
        placed = {name: jax.device_put(x, params[name].sharding) for name, x in grads.items()}
        return norm(placed, jnp.float32(0.5)), grads

    params = plan.abstract_state["params"]
    found, _ = read(np.inf)
    assert names[int(found.bad_leaf)] == f"layers/{layer}/down/kernel"
    assert not found.read_finite
    found, grads = read(100.0)
    assert int(found.bad_leaf) == -1
    assert names[int(found.largest_leaf)] == f"layers/{layer}/down/kernel"
    squares = sum(float(np.sum(np.square(0.5 * x.astype(np.float64)))) for x in grads.values())
    np.testing.assert_allclose(found.norm, np.sqrt(squares), rtol=1e-6)  # float32 sums
    rows = {row for name in params for row in plan.stacks.get(name, [name])}
    assert rows <= set(names)
    assert (set(names) - rows) <= plan.stacks.keys()  # rows without a layer


@pytest.mark.skipif(kernels_missing() is not None, reason=str(kernels_missing()))
def test_a_kernel_names_the_stack() -> None:
    plan = plan_of({"data": 2, "zero": 3, "kernels": "interpret"}, persistence_threshold=0)
    assert leaf_names(plan) == list(plan.abstract_state["params"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.thorough if n in DEAR else ()) for n in MESHES]
)
def test_losses_are_those_of_one_device_unrolled(name: str) -> None:
    plan = plan_of(MESHES[name])
    assert_all_rolled(plan)
    np.testing.assert_allclose(train(plan)[1], losses_on_one_device(ADAMW), rtol=LOSSES)


OPTIMIZERS = {
    "lamb of zerojax": zerojax.lamb(1e-3, **DECAYED),
    "lamb of zerojax, one ratio per array": zerojax.lamb(1e-3, **DECAYED, per_layer=False),
    "adamw of optax": optax.adamw(
        1e-3, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)),
    "lamb of optax": optax.lamb(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-2),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_with_any_optimizer(name: str) -> None:
    plan = plan_of(ZERO_3, optimizer=OPTIMIZERS[name])
    assert_all_rolled(plan)
    expected = losses_on_one_device(OPTIMIZERS[name])
    np.testing.assert_allclose(train(plan)[1], expected, rtol=LOSSES)


@pytest.mark.thorough
def test_a_frozen_list_is_rolled_and_stays() -> None:
    plan = plan_of(ZERO_3, freeze="layers/")
    assert_all_rolled(plan)
    state, losses = train(plan)
    np.testing.assert_allclose(losses, losses_on_one_device(ADAMW, "layers/"), rtol=LOSSES)
    new = to_portable_state(plan, init_state(plan))["frozen"]
    for name, x in to_portable_state(plan, state)["frozen"].items():
        np.testing.assert_array_equal(x, new[name])


def not_in_layer_4(path: Any, _: Any) -> bool:
    return [part.key for part in path[:2]] != ["layers", 4]


TOLD_APART = {
    "freeze": ({"freeze": "layers/2/"}, "3..5", "freeze treats down/bias of layers 0 and 2"),
    "groups": (
        {
            "optimizer": zerojax.adamw(
                1e-3, **RECIPE, groups={"layers/3/": {"learning_rate_factor": 0.1}}
            )
        },
        "0..2",
        "groups or mask treats down/bias of layers 0 and 3",
    ),
    "masks": (
        {
            "optimizer": optax.masked(
                optax.adam(1e-3), functools.partial(jax.tree.map_with_path, not_in_layer_4)
            )
        },
        "0..3",
        "groups or mask treats down/bias of layers 0 and 4",
    ),
    "rules": (
        {"mesh": {"model": 2, "rules": [("layers/5/up/bias", ["model"])]}},
        "0..4",
        "rule treats up/bias of layers 0 and 5",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", TOLD_APART)
def test_layers_that_are_told_apart_are_not_of_the_loop(name: str) -> None:
    """And fewer than four are no loop."""
    settings, run, other = TOLD_APART[name]
    mesh = {**ZERO_3, "data": 2, **settings.get("mesh", {})}
    plan = plan_of(mesh, **{key: x for key, x in settings.items() if key != "mesh"})
    [reason] = [line for line in plan.reasons if line.startswith("layers:")]
    assert f"layers/{run} " in reason
    assert other in reason
    assert ("not rolled" in reason) == (not plan.stacks) == (run in ("3..5", "0..2"))
    assert all(f"layers/{run}/" in stack for stack in plan.stacks)


def test_an_optimizer_that_codes_whole_arrays_leaves_layers_as_they_are() -> None:
    plan = plan_of(ZERO_3, optimizer=zerojax.optim.adam8bit(1e-3))
    assert plan.stacks == {}
    assert any("not rolled: adam8bit" in line for line in plan.reasons)


def test_off_leaves_layers_as_they_are() -> None:
    plan = plan_of({**ZERO_3, "roll": "off"})
    assert plan.stacks == {}
    assert not any(line.startswith("layers:") for line in plan.reasons)


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["full", "dots", "none"])
def test_remat_of_a_mesh_is_that_of_every_layer(remat: str) -> None:
    """Whether the model checkpoints its layers or not."""
    for checkpoints in (True, False):
        plan = plan_of({**ZERO_3, "roll_remat": remat}, checkpoints=checkpoints)
        assert any(line.endswith(f"6 iterations; roll_remat={remat}") for line in plan.reasons)
        np.testing.assert_allclose(train(plan)[1], losses_on_one_device(ADAMW), rtol=LOSSES)
        jaxpr = str(tracing.trace_model(*traced_arguments(plan)).jaxpr)
        policies = re.findall(r"policy=(\S+)", jaxpr)
        assert len(policies) == (remat != "none")
        assert all(("None" in policy) == (remat == "full") for policy in policies)


def traced_arguments(plan: zerojax.Plan) -> tuple[Any, ...]:
    params = plan.abstract_stored["params"]
    return plan.model, params, {}, plan.abstract_batch, plan.loss


@pytest.mark.thorough
def test_remat_makes_a_loop_of_layers_without_a_checkpoint() -> None:
    """At stages below 3, where such layers stay as they are without."""
    plan = plan_of({"data": 4, "zero": 1}, checkpoints=False)
    assert plan.stacks == {}
    assert any(
        "with roll_remat=full, or zero=3, a loop stores less" in line for line in plan.reasons
    )
    plan = plan_of({"data": 4, "zero": 1, "roll_remat": "full"}, checkpoints=False)
    assert plan.stacks
    np.testing.assert_allclose(train(plan)[1], losses_on_one_device(ADAMW), rtol=LOSSES)


def test_remat_without_a_loop_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"roll_remat=full applies to layers .* none do \(roll=off\)"
    ):
        plan_of({**ZERO_3, "roll": "off", "roll_remat": "full"})
    with pytest.raises(ValueError, match="not rolled: adam8bit"):
        plan_of({**ZERO_3, "roll_remat": "dots"}, optimizer=zerojax.optim.adam8bit(1e-3))


def test_a_pattern_that_freezes_nothing_is_refused_with_the_users_names() -> None:
    with pytest.raises(ValueError, match="freeze: 'layers/9/' matches none of the 39 parameters"):
        plan_of(ZERO_3, freeze="layers/9/")


@pytest.mark.thorough
def test_states_begin_with_the_same_bits() -> None:
    rolled, plain = plan_of(ZERO_3), plan_of({**ZERO_3, "roll": "off"})
    assert rolled.fingerprint == plain.fingerprint
    assert_same_bits((rolled, init_state(rolled, 3)), (plain, init_state(plain, 3)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [
        pytest.param("zero 3", ADAMW, id="zero 3"),
        pytest.param("pipeline", ADAMW, id="pipeline"),
        pytest.param("moments on host", ADAMW, id="host"),
        pytest.param("zero 3", OPTIMIZERS["adafactor"], id="adafactor"),
    ],
)
def test_a_checkpoint_is_read_unrolled_and_rolled_again(tmp_path, mesh, optimizer):
    rolled = plan_of(MESHES[mesh], optimizer=optimizer)
    plain = plan_of({**ZERO_3, "roll": "off"}, optimizer=optimizer)
    state, _ = train(rolled, steps=2)

    def save_and_read(folder: str, plan: Any, state: Any, other: Any) -> Any:
        save(tmp_path / folder, plan, state)
        return restore(tmp_path / folder, other)[0]

    by_name = save_and_read("rolled", rolled, state, plain)
    assert_same_bits((rolled, state), (plain, by_name))
    again = save_and_read("plain", plain, by_name, rolled)
    assert_same_bits((rolled, state), (rolled, again))
    assert jax.tree.structure(again) == jax.tree.structure(state)


def _kinds(tree: Any) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@pytest.mark.thorough
def test_rows_are_saved_and_read_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the device never holds the state twice, where pinned memory has room for it."""
    plan = plan_of(ZERO_3)
    row, single = "layers/3/up/kernel", "embed/embedding"
    saved = to_portable_state(plan, init_state(plan, 3), rows_on_host=True)
    for portable in (saved, portable_to_read(plan)):
        found = {name: _kinds(portable["params"][name]) for name in (row, single)}
        assert found == {row: {HOST_KIND}, single: _kinds(plan.abstract_stored["params"][single])}
    assert_same_bits((plan, from_portable_state(plan, saved)), (plan, init_state(plan, 3)))
    monkeypatch.setattr(reshard, "has_pinned_room", lambda *_, **__: False)
    assert portable_to_read(plan) is plan.abstract_portable


@pytest.mark.thorough
def test_a_state_moves_to_an_unrolled_plan_and_back() -> None:
    rolled, plain = plan_of(MESHES["pipeline"]), plan_of({"zero": 0, "roll": "off"})
    state, _ = train(rolled, steps=1)
    moved = reshard_state(rolled, plain, state)
    assert_same_bits((rolled, state), (plain, moved))
    assert_same_bits((rolled, reshard_state(plain, rolled, moved)), (plain, moved))


@pytest.mark.thorough
def test_the_users_model_comes_back_by_name() -> None:
    plan = plan_of(ZERO_3)
    state, _ = train(plan, steps=1)
    params = to_portable_state(plan, state)["params"]
    model = model_of(plan, state)
    np.testing.assert_array_equal(
        model.layers[3].up.kernel[...], np.asarray(params["layers/3/up/kernel"])
    )


def test_a_row_is_explained_under_its_own_name() -> None:
    plan = plan_of(ZERO_3)
    page = plan.explain("layers/3/up/kernel")
    assert page.startswith("layers/3/up/kernel: float32[16, 32]")
    assert "row        3 of layers/0..5/up/kernel" in page
    assert "params/layers/3/up/kernel" in page
    with pytest.raises(ValueError, match="did you mean 'layers/3/up/kernel'"):
        plan.explain("layers/3/up/kernl")
