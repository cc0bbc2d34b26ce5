"""Pruning: steps equal those of one device with NumPy's masks, on any mesh and after a resume."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.support.inputs_with_features import plan_inputs
from tests.support.refusals import refused
from tests.support.small_models import reference_model
from tests.support.trajectories import failing_at, text_batch
from zerojax.config import ConfigError, PruningConfig, PruningGroup
from zerojax.features.pruning.prune_masks import largest
from zerojax.forecasting.hlo import find_collectives, read_program
from zerojax.plan.make import Plan, plan_of
from zerojax.step.reshard import model_parts

LAYERS, WIDTH, ROWS, START = 3, 10, 16, 2


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 14, rngs=rngs)
        self.down = nnx.Linear(14, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.sin(self.up(x) + 0.1))


class Stacked(nnx.Module):
    """Layers in one scan."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.vmap(Layer, in_axes=0)(rngs.split(LAYERS))
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def loss(self, batch: dict[str, jax.Array]) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return jnp.mean((self.last(run(batch["x"], self.layers))[:, 0] - batch["y"]) ** 2)


class Listed(Stacked):
    """The same layers as a Python list."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        graph, state = nnx.split(self.layers)
        rows = [jax.tree.map(lambda x, row=row: x[row], state) for row in range(LAYERS)]
        self.layers = nnx.List([nnx.merge(graph, row) for row in rows])

    def loss(self, batch: dict[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        return jnp.mean((self.last(x)[:, 0] - batch["y"]) ** 2)


PRUNING = PruningConfig(
    groups=(
        PruningGroup(pattern="down/kernel", dense_ratio=0.3, start_step=START),
        PruningGroup(pattern="up/kernel", dense_ratio=0.5, unit="row", start_step=START),
    )
)


def batch_of(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, 0])}


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))


def plan_for(model=Stacked, mesh=None, *, pruning=PRUNING, **options) -> Plan:
    options = {"optimizer": optimizer(), "example_batch": batch_of(0), **options}
    inputs = plan_inputs(model=model(nnx.Rngs(0)), pruning=pruning, **options)
    return plan_of(inputs, {"persistence_threshold": 0, **(mesh or {})})


def trained(plan: Plan, steps: int = 4):
    """(loss of each step, gradient norm of each step, parameters by the user's names)."""
    state, step = zerojax.init_state(plan), zerojax.build_step(plan)
    found = []
    for number in range(steps):
        state, metrics = step(state, zerojax.shard_batch(plan, batch_of(number)))
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    params = jax.device_get(model_parts(plan, state)["params"])
    return (*np.array(found).T, params)


def numpys_mask(size: np.ndarray, dense_ratio: float) -> np.ndarray:
    """True for the largest entries, as DeepSpeed's sort has them."""
    order = np.argsort(-size.ravel(), kind="stable")
    mask = np.zeros(size.size, bool)
    mask[order[: int(np.ceil(dense_ratio * size.size))]] = True
    return mask.reshape(size.shape)


def masks_of(params) -> dict[str, np.ndarray]:
    kernel = np.abs(np.asarray(params["layers/down/kernel"]))
    rows = np.abs(np.asarray(params["layers/up/kernel"])).sum(1)
    kept = np.stack([numpys_mask(row, 0.5) for row in rows])
    return {
        "layers/down/kernel": np.stack([numpys_mask(one, 0.3) for one in kernel]),
        "layers/up/kernel": np.broadcast_to(kept[:, None], (LAYERS, WIDTH, 14)),
        "layers/up/bias": kept,
    }


@pytest.fixture(scope="module")
def plain():
    """One device, by optax: weights are multiplied by masks of the initial weights in the loss."""
    graph, state = nnx.split(Stacked(nnx.Rngs(0)))
    params = {"/".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(state)}
    masks, paths = masks_of(params), [path for path, _ in nnx.to_flat_state(state)]
    tx = optimizer()

    def loss_of(params, batch, hides):
        seen = {n: x * masks[n] if hides and n in masks else x for n, x in params.items()}
        flat = zip(paths, map(nnx.Param, seen.values()), strict=True)
        return nnx.merge(graph, nnx.from_flat_state(list(flat))).loss(batch)

    opt_state, found = tx.init(params), []
    for number in range(4):
        given = params, batch_of(number), number >= START
        loss, grads = jax.value_and_grad(loss_of)(*given)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        found.append((float(loss), float(optax.tree.norm(grads))))
    seen = {n: x * masks[n] if n in masks else x for n, x in params.items()}
    return (*np.array(found).T, seen)


PIPELINE = {"zero": 1, "stage": 2, "data": 4, "partition": (2, 1)}
MESHES = [
    pytest.param(Stacked, {"zero": 0}, id="stage 0", marks=pytest.mark.thorough),
    pytest.param(Stacked, {"zero": 1}, id="stage 1", marks=pytest.mark.thorough),
    pytest.param(Stacked, {"zero": 2}, id="stage 2", marks=pytest.mark.thorough),
    pytest.param(Stacked, {"zero": 3}, id="stage 3"),
    pytest.param(Listed, {"zero": 3}, id="list", marks=pytest.mark.thorough),
    pytest.param(Listed, PIPELINE, id="pipeline", marks=pytest.mark.thorough),
    pytest.param(Stacked, {"deterministic": "mesh"}, id="in place", marks=pytest.mark.thorough),
]


def stacked(params):
    """Layers of a list as rows of one array."""
    found = {name: x for name, x in params.items() if not name.startswith("layers/0")}
    for name in [name for name in params if name.startswith("layers/0/")]:
        rows = [f"layers/{row}/{name.removeprefix('layers/0/')}" for row in range(LAYERS)]
        found[f"layers/{name.removeprefix('layers/0/')}"] = np.stack([params[r] for r in rows])
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "mesh"), MESHES)
def test_steps_are_those_of_one_device_with_numpys_masks(model, mesh, plain):
    """To sums in another order; pruned weights are exactly 0, and no others."""
    options = {"num_microbatches": 2} if "stage" in mesh else {}
    if "deterministic" in mesh:
        options["optimizer"] = zerojax.adamw(1e-2, eps=1e-4, clip_norm=0.5)
    losses, norms, params = trained(plan_for(model, mesh, **options))
    np.testing.assert_allclose(losses, plain[0], rtol=1e-5)
    np.testing.assert_allclose(norms, plain[1], rtol=1e-4)
    params = stacked(params) if model is Listed else params
    for name, wanted in plain[2].items():
        np.testing.assert_allclose(params[name], wanted, rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_array_equal(params[name] == 0, wanted == 0, err_msg=name)
    assert (params["layers/down/kernel"] == 0).sum() == LAYERS * (140 - 42)
    assert (params["layers/up/bias"] == 0).sum() == LAYERS * 7


@pytest.mark.parametrize("ratio", [0.01, 0.4, 1.0])
def test_the_largest_units_are_those_of_a_sort_and_ties_go_to_the_first(ratio):
    sizes = np.random.default_rng(0).integers(0, 4, (2, 5, 7)).astype(np.float32) / 3
    index = np.broadcast_to(np.arange(35).reshape(5, 7), sizes.shape)
    number = int(np.ceil(ratio * 35))
    found = jax.jit(lambda x: largest(x, index, index >= 0, number, 1))(sizes)
    np.testing.assert_array_equal(found, [numpys_mask(one, ratio) for one in sizes])


@pytest.mark.thorough
def test_heads_and_their_average_are_zero_in_evaluations_and_resumed_runs(tmp_path):
    """Heads of the reference decoder; the average of the weights is pruned with them."""
    heads = PruningGroup(pattern="output/kernel", dense_ratio=0.5, unit="head", start_step=2)

    def train(batches=text_batch, **options):
        quiet = zerojax.LogConfig(every=1, console="quiet")
        tx = zerojax.with_ema(zerojax.adamw(1e-2), 0.9)
        settings = {"run_dir": None, "log": quiet, "optimizer": tx, "steps": 5}
        pruning = PruningConfig(groups=(heads,))
        mesh = {"zero": 3, "persistence_threshold": 0}
        model = reference_model("llama")
        return zerojax.train(model, mesh, batches, pruning=pruning, **settings, **options)

    whole = train()
    for weights in ("trained", "ema"):
        parts = model_parts(whole.plan, whole.state, weights=weights)
        kernel = np.asarray(parts["params"]["blocks/attention/output/kernel"])
        zeros = (kernel == 0).all((2, 3))
        assert kernel.shape[:2] == (2, 4)
        assert [*zeros.sum(1)] == [2, 2], "half of the heads of each layer"
        assert (kernel[~zeros] != 0).all()
    with pytest.raises(OSError, match="gone"):
        train(failing_at(3, text_batch), checkpoint=tmp_path)
    resumed = train(checkpoint=tmp_path)
    assert [one["step"] for one in resumed.history] == [4, 5]
    for one, other in zip(*(jax.tree.leaves(x.state) for x in (resumed, whole)), strict=True):
        np.testing.assert_array_equal(one, other)


class Convolving(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 6, kernel_size=(3,), rngs=rngs)

    def loss(self, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.sum(self.conv(batch["x"][..., None]), (1, 2)) - batch["y"]) ** 2)


@pytest.mark.thorough
def test_channels_are_pruned_with_their_biases():
    group = PruningGroup(pattern="conv/kernel", dense_ratio=0.4, unit="channel")
    first = np.abs(np.asarray(Convolving(nnx.Rngs(0)).conv.kernel[...])).sum((0, 1))
    kept = numpys_mask(first, 0.4)
    *_, params = trained(plan_for(Convolving, {"zero": 3}, pruning=PruningConfig(groups=(group,))))
    np.testing.assert_array_equal((params["conv/kernel"] != 0).all((0, 1)), kept)
    np.testing.assert_array_equal((params["conv/kernel"] == 0).all((0, 1)), ~kept)
    np.testing.assert_array_equal(params["conv/bias"] != 0, kept)


@pytest.mark.thorough
def test_masks_are_stored_in_shards_and_nothing_more_is_sent():
    found = []
    for pruning in (PruningConfig(), PRUNING):
        plan = plan_for(mesh={"zero": 3}, pruning=pruning, optimizer=zerojax.adamw(1e-2))
        step = zerojax.build_step(plan).trace(plan.abstract_state, plan.abstract_batch).lower()
        program = step.compile()
        sent = find_collectives(read_program(program.as_text()), 8)
        kinds = sorted((one.kind, one.wire_bytes, one.times) for one in sent)
        found.append((kinds, program.memory_analysis().argument_size_in_bytes, plan))
    assert found[0][0] == found[1][0]
    masks = found[1][2].abstract_state["masks"]
    shards = [int(np.prod(x.sharding.shard_shape(x.shape))) for x in masks.values()]
    assert found[1][1] - found[0][1] == sum(shards)
    assert sum(shards) < sum(int(np.prod(x.shape)) for x in masks.values()) / 3


@pytest.mark.parametrize(
    ("group", "mesh", "words"),
    [
        ({"pattern": "upper"}, {}, ["upper", "kernel"]),
        ({"pattern": "up/bias"}, {}, ["two dimensions", "bias"]),
        ({"pattern": "up/kernel", "unit": "head"}, {}, ["heads"]),
        ({"pattern": "up/kernel", "unit": "channel"}, {}, ["row"]),
        ({"pattern": "up/kernel"}, {"offload": {"opt_state": "host"}}, ["offload"]),
    ],
)
def test_what_cannot_be_pruned_is_refused(group, mesh, words):
    pruning = PruningConfig(groups=(PruningGroup(dense_ratio=0.5, **group),))
    tx = zerojax.adamw(1e-2)
    plan = lambda: plan_for(mesh=mesh, pruning=pruning, optimizer=tx)  # noqa: E731
    refused(plan, words, error=ConfigError)


def test_settings_are_checked():
    for settings in (
        {"dense_ratio": 0.0},
        {"dense_ratio": 1.5},
        {"start_step": -1},
        {"start_step": 2**31},
    ):
        given = {"pattern": "x", "dense_ratio": 0.5, **settings}
        refused(lambda g=given: PruningGroup(**g), [*settings], error=ConfigError)
    twice = PruningGroup(pattern="kernel", dense_ratio=0.5)
    pruning = PruningConfig(groups=(*PRUNING.groups, twice))
    refused(lambda: plan_for(pruning=pruning), ["one group"], error=ConfigError)
