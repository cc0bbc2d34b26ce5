"""Layer drop: steps equal those of a plain model with the kept layers, on any mesh and stage."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import zerojax
from tests.support.inputs_with_features import plan_inputs
from tests.support.refusals import refused
from zerojax.config import ConfigError, ModelConfig
from zerojax.features.layer_drop.dropped_layers import draw_scales
from zerojax.forecasting.hlo import find_collectives, find_in_branches, read_program
from zerojax.plan.counts import model_flops
from zerojax.plan.make import Plan, plan_of
from zerojax.plan.wire import wire_bytes
from zerojax.step.build import drawn
from zerojax.tracing.flops import count_program_flops
from zerojax.zoo import build_model

LAYERS, WIDTH, ROWS = 6, 16, 16
DROP = zerojax.LayerDropConfig(theta=0.3, gamma=50.0)
"""Keeps all layers in the first step, and 0.58 of them later."""


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(0.3 * jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, x: jax.Array, number: jax.Array) -> jax.Array:
        return x + jnp.sin(x @ self.kernel[...] + number)


def stack_of(rngs: nnx.Rngs) -> Layer:
    return nnx.vmap(Layer, in_axes=0)(rngs.split(LAYERS))


class Stacked(nnx.Module):
    """Residual layers in one scan, with a counter that goes from layer to layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Param(0.3 * jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
        self.layers = stack_of(rngs)
        self.last = nnx.Param(0.3 * jax.random.normal(rngs.params(), (WIDTH, 1)))

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(carry, layer):
            x, number = carry
            return layer(x, number), number + 1

        x, _ = run((batch["x"] @ self.first[...], jnp.int32(0)), self.layers)
        return self.errors(x, batch)

    def errors(self, x: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        errors = (x @ self.last[...])[:, 0] - batch["y"]
        return jnp.sum(errors**2), jnp.float32(errors.size)


class Listed(Stacked):
    """The same layers as a Python list."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        graph, state = nnx.split(self.layers)
        rows = [jax.tree.map(lambda x, row=row: x[row], state) for row in range(LAYERS)]
        self.layers = nnx.List([nnx.merge(graph, row) for row in rows])

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = batch["x"] @ self.first[...]
        for number, layer in enumerate(self.layers):
            x = layer(x, jnp.float32(number))
        return self.errors(x, batch)


class Summing(Stacked):
    """Layers that return a sum of their activations for each layer."""

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def layer(x, kernel):
            x = x + jnp.sin(x @ kernel)
            return x, jnp.sum(x)

        x, sums = lax.scan(layer, batch["x"], self.layers.kernel[...])
        return jnp.sum(x**2) + jnp.sum(sums), jnp.float32(x.shape[0])


class Counting(Stacked):
    """Layers that carry an integer, computed from their activations."""

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def layer(carry, kernel):
            x, count = carry
            x = x + jnp.sin(x @ kernel)
            return (x, count + jnp.sum(x > 0)), None

        (x, count), _ = lax.scan(layer, (batch["x"], 0), self.layers.kernel[...])
        return jnp.sum(x**2) + count, jnp.float32(x.shape[0])


class Referring(Stacked):
    """Layers that sum their activations in a reference."""

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total = jax.new_ref(jnp.float32(0))

        def layer(x, kernel):
            x = x + jnp.sin(x @ kernel)
            total[...] = total[...] + jnp.sum(x)
            return x, None

        x, _ = lax.scan(layer, batch["x"], self.layers.kernel[...])
        return jnp.sum(x**2) + total[...], jnp.float32(x.shape[0])


class Chunked(Stacked):
    """No layers, but a loss over chunks of a stacked head."""

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def chunk(total, head):
            return jnp.logaddexp(total, jax.nn.logsumexp(batch["x"] @ head, axis=1)), None

        start = jnp.full(batch["x"].shape[0], -1e30)
        total, _ = lax.scan(chunk, start, self.layers.kernel[...])
        return jnp.sum(total), jnp.float32(total.shape[0])


class Deeper(Stacked):
    """Two loops over layers."""

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        layer = lambda x, kernel: (x + jnp.sin(x @ kernel), None)  # noqa: E731
        x, _ = lax.scan(layer, batch["x"], self.layers.kernel[...])
        x, _ = lax.scan(layer, x, self.layers.kernel[...])
        return jnp.sum(x**2), jnp.float32(x.shape[0])


class Whole(Stacked):
    """Layers whose stack is read whole, before the loop."""

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        layer = lambda x, kernel: (x + jnp.sin(x @ kernel), None)  # noqa: E731
        x, _ = lax.scan(layer, batch["x"], self.layers.kernel[...])
        return self.errors(x, batch)


def batch_of(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": random.normal(size=ROWS).astype(np.float32)}


def plan_for(model=Stacked, mesh=None, *, drop=DROP, batch=None, **options) -> Plan:
    inputs = plan_inputs(
        model=model(nnx.Rngs(0)) if isinstance(model, type) else model,
        example_batch=batch_of(0) if batch is None else batch,
        optimizer=optax.sgd(0.01),
        layer_drop=drop,
        **options,
    )
    return plan_of(inputs, {"persistence_threshold": 0, **(mesh or {})})


def trained(plan: Plan, steps: int = 3):
    """(loss of each step, parameters, scales of each step)."""
    state, step = zerojax.init_state(plan), zerojax.build_step(plan)
    losses, scales = [], []
    for number in range(steps):
        scales.append(np.asarray(drawn(plan, state)["scales"]) if plan.features else None)
        state, metrics = step(state, zerojax.shard_batch(plan, batch_of(number)))
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state["params"]), scales


def plain_training(scales: list[np.ndarray], data_shards: int = 1):
    """One device, only the kept rows of the stack in each microbatch, by optax alone."""
    params = Stacked(nnx.Rngs(0))
    values = {name: getattr(params, name)[...] for name in ("first", "last")}
    values["layers/kernel"] = params.layers.kernel[...]
    examples = np.arange(ROWS).reshape(data_shards, len(scales[0]), -1)

    def loss_of(values, batch, scales):
        squares = 0.0
        for number, scale in enumerate(scales):
            mine = examples[:, number].ravel()
            x = batch["x"][mine] @ values["first"]
            for row in np.flatnonzero(scale):
                x = x + jnp.sin(x @ values["layers/kernel"][row] + row) * scale[row]
            squares += jnp.sum(((x @ values["last"])[:, 0] - batch["y"][mine]) ** 2)
        return squares / ROWS

    losses = []
    for number, scale in enumerate(scales):
        loss, grads = jax.value_and_grad(loss_of)(values, batch_of(number), scale)
        losses.append(float(loss))
        values = jax.tree.map(lambda x, g: x - 0.01 * g, values, grads)
    return losses, values


MESHES = [
    pytest.param({"zero": 1}, id="stage 1", marks=pytest.mark.thorough),
    pytest.param({"zero": 2}, id="stage 2", marks=pytest.mark.thorough),
    pytest.param({"zero": 3}, id="stage 3"),
    pytest.param({"zero": 3, "replica": 2}, id="replicas", marks=pytest.mark.thorough),
    pytest.param({"zero": 3, "data": 2, "replica": 4}, id="two", marks=pytest.mark.thorough),
]


@pytest.fixture(scope="module")
def at_stage_0():
    return trained(plan_for(mesh={"zero": 0}))


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_is_that_of_a_plain_model_with_the_kept_layers(mesh, at_stage_0):
    losses, params, scales = trained(plan_for(mesh=mesh))
    for one, other in zip(scales, at_stage_0[2], strict=True):
        np.testing.assert_array_equal(one, other, err_msg="the same layers on any mesh")
    assert (scales[0] > 0).all()
    assert sum(np.count_nonzero(scale == 0) for scale in scales[1:]) >= 2
    expected, values = plain_training(scales)
    # float32 sums over shards in another order, through 3 steps
    assert losses == pytest.approx(expected, rel=1e-5)
    assert at_stage_0[0] == pytest.approx(expected, rel=1e-5)
    for name, value in values.items():
        np.testing.assert_allclose(params[name], value, atol=1e-5, err_msg=name)


THOROUGH = pytest.mark.thorough


@pytest.mark.thorough
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        pytest.param({"zero": 3, "partition": [4, 2]}, Stacked, id="uneven, stage 3"),
        pytest.param({"zero": 1, "partition": [4, 2]}, Stacked, id="uneven", marks=THOROUGH),
        pytest.param({"zero": 2, "stash": "input"}, Listed, id="list", marks=THOROUGH),
        pytest.param(
            {"zero": 2, "pipeline_schedule": "interleaved", "partition": [2, 2, 1, 1]},
            Stacked,
            id="interleaved",
            marks=THOROUGH,
        ),
        pytest.param(
            {"zero": 3, "pipeline_schedule": "zb_h1"}, Stacked, id="zero bubble", marks=THOROUGH
        ),
        pytest.param(
            {"zero": 3, "stage": 4, "partition": [2, 2, 1, 1], "stash": "input"},
            Stacked,
            id="four stages",
            marks=THOROUGH,
        ),
    ],
)
def test_pipeline_stages_skip_the_same_layers(mesh, model):
    """Layers carry their number, which dropped layers count and rows of padding do not."""
    plan = plan_for(model, {"stage": 2, **mesh}, num_microbatches=4)
    losses, params, scales = trained(plan)
    assert all(scale.shape == (4, LAYERS) for scale in scales)
    assert sum(np.count_nonzero(scale == 0) for scale in scales[1:]) >= 8
    expected, values = plain_training(scales, plan.mesh.shape["data"])
    # float32 sums over shards and microbatches in another order, through 3 steps
    assert losses == pytest.approx(expected, rel=1e-5)
    rows = np.asarray(plan.pipeline.rows)
    (stack,) = plan.features["layer_drop"].stacks
    found = np.asarray(params[stack])
    assert not found[rows < 0].any()
    by_layer = found[rows >= 0][np.argsort(rows[rows >= 0])]
    np.testing.assert_allclose(by_layer, values["layers/kernel"], atol=1e-5)
    for name in ("first", "last"):
        np.testing.assert_allclose(params[name], values[name], atol=1e-5, err_msg=name)


def test_the_slowest_stage_is_expected_from_the_probabilities():
    plan = plan_for(mesh={"stage": 2, "partition": [4, 2]}, num_microbatches=4)
    drop = plan.features["layer_drop"]
    scales = draw_scales(jax.random.key(0), jnp.float32(DROP.theta), 20_000, LAYERS)
    kept = np.asarray(scales) > 0
    largest = np.maximum(kept[:, :4].sum(axis=1), kept[:, 4:].sum(axis=1))
    # 4 standard deviations of a mean of 20,000 draws
    assert drop.slowest() == pytest.approx(np.mean(largest) / 4, abs=np.std(largest) / 4 / 35)
    assert "slowest" in plan.table()


def test_layers_of_a_list_are_dropped_alike(at_stage_0):
    plan = plan_for(Listed, {"zero": 3})
    assert plan.features["layer_drop"].num_layers == LAYERS
    losses, _, scales = trained(plan)
    np.testing.assert_array_equal(scales, at_stage_0[2])
    assert losses == pytest.approx(at_stage_0[0], rel=1e-5)


@pytest.mark.thorough
def test_each_microbatch_draws_its_own_layers():
    plan = plan_for(mesh={"zero": 3}, num_microbatches=2)
    said = [line for line in plan.reasons if "data shards (8)" in line]
    assert len(said) == 1, "rows of a microbatch are others on another number of data shards"
    assert not any("data shards" in line for line in plan_for(mesh={"zero": 3}).reasons)
    _, _, scales = trained(plan, 4)
    assert scales[0].shape == (2, LAYERS)
    assert any((scale[0] != scale[1]).any() for scale in scales)
    one = draw_scales(jax.random.key(0), jnp.float32(0.5), 1, LAYERS)
    two = draw_scales(jax.random.key(0), jnp.float32(0.5), 2, LAYERS)
    np.testing.assert_array_equal(one[0], two[0], err_msg="a microbatch's draw is its own")


def test_theta_1_is_the_step_without_layer_drop():
    off, none = (plan_for(drop=drop) for drop in (zerojax.LayerDropConfig(), DROP))
    assert not off.features
    assert "layer_drop" in none.features
    plain = zerojax.make_plan(
        Stacked(nnx.Rngs(0)),
        {"persistence_threshold": 0},
        example_batch=batch_of(0),
        optimizer=optax.sgd(0.01),
    )
    (losses, params, _), (others, values, _) = trained(off), trained(plain)
    assert losses == others
    jax.tree.map(np.testing.assert_array_equal, params, values)


def test_draws_follow_the_probabilities():
    theta, layers = 0.5, 12
    scales = draw_scales(jax.random.key(3), jnp.float32(theta), 4000, layers)
    kept = np.mean(np.asarray(scales) > 0, axis=0)
    expected = 1 - np.arange(1, layers + 1) / layers * (1 - theta)
    # 4 standard deviations of a mean of 4000 draws
    np.testing.assert_allclose(kept, expected, atol=4 * 0.5 / 4000**0.5)
    np.testing.assert_allclose(np.max(scales, axis=0), 1 / expected, rtol=1e-6)
    config = zerojax.LayerDropConfig(theta=theta)
    assert np.mean(kept) == pytest.approx(config.kept(layers), rel=0.02)
    assert config.kept(layers, 0) == 1.0
    assert config.kept(layers, 1000) == pytest.approx(
        1 - (1 - (0.5 * np.exp(-1) + 0.5)) * 13 / 24, rel=1e-9
    )


def tiny_gpt(**options):
    config = ModelConfig(num_layers=LAYERS, num_heads=2, embed_dim=32, max_seq_len=32, **options)
    text = np.random.default_rng(0).integers(0, 32, (ROWS, 33), np.int32)
    return build_model(config, 32), {"tokens": text[:, :-1], "targets": text[:, 1:]}


def compiled(plan: Plan):
    traced = zerojax.build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    program = traced.lower().compile()
    return traced, program, read_program(program.as_text())


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}], ids=["plain", "dropout"])
def test_layers_are_gathered_and_reduced_in_branches_alone(options):
    model, batch = tiny_gpt(remat="full", **options)
    plan = plan_for(model, {"zero": 3}, batch=batch)
    _, _, program = compiled(plan)
    inside = {one.name: one for one in find_in_branches(program, 8)}
    kinds = sorted(one.kind for one in inside.values())
    assert kinds == ["all-gather", "all-gather", "reduce-scatter"]
    row = sum(
        leaf.shape[1] * leaf.shape[2] * 4
        for name, leaf in plan.placement.leaves.items()
        if name in plan.features["layer_drop"].stacks and len(leaf.shape) == 3
    )
    assert all(one.payload_bytes >= row for one in inside.values())
    others = [one for one in find_collectives(program, 8) if one.name not in inside]
    assert all(one.loop_depth == 0 for one in others), "no layer is gathered outside of its branch"
    outside = {
        n: leaf
        for n, leaf in plan.placement.leaves.items()
        if n not in plan.features["layer_drop"].stacks
    }
    largest = max(np.prod(leaf.shape) * 4 for leaf in outside.values())
    assert all(one.payload_bytes <= largest for one in others if one.kind == "all-gather")


@pytest.mark.thorough
def test_work_and_bytes_are_counted_as_expected():
    model, batch = tiny_gpt()
    drop = zerojax.LayerDropConfig(theta=0.5)
    counted = {}
    for config in (zerojax.LayerDropConfig(), drop):
        plan = plan_for(model, {"zero": 3}, drop=config, batch=batch)
        traced, _, program = compiled(plan)
        sent = [
            one.wire_bytes * one.times * (drop.kept(LAYERS) if one.in_branch else 1)
            for one in find_collectives(program, 8)
            if one.kind in ("all-gather", "reduce-scatter")
        ]
        counted[config] = (
            count_program_flops(traced.jaxpr),
            model_flops(plan),
            sum(sent),
            wire_bytes(plan),
        )
    steps, models, sent, formula = (
        after / before for before, after in zip(*counted.values(), strict=True)
    )
    layers = drop.kept(LAYERS)
    assert layers < models < 1
    assert steps == pytest.approx(models, rel=0.02)
    assert layers < formula < 1
    assert sent == pytest.approx(formula, rel=0.02)


@pytest.mark.thorough
def test_recomputed_layers_need_no_more_memory():
    """A dropped layer passes its input on; no weights are copied for the backward pass."""
    model, batch = tiny_gpt(remat="full")
    bytes_of = {}
    for config in (zerojax.LayerDropConfig(), DROP):
        plan = plan_for(model, {"zero": 0}, drop=config, batch=batch)
        _, program, _ = compiled(plan)
        bytes_of[config] = program.memory_analysis().temp_size_in_bytes
    plain, dropped = bytes_of.values()
    leaves = plan.placement.leaves
    layer = sum(
        4 * np.prod(leaves[name].shape) / LAYERS for name in plan.features["layer_drop"].stacks
    )
    assert dropped <= plain + layer, "gradients of one layer, not the weights of all"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "mesh", "words"),
    [
        (Summing, {"zero": 1}, ["float32[]"]),
        (Counting, {"zero": 1}, ["int32[]", "floating-point"]),
        (Referring, {"zero": 1}, ["reference", "carry"]),
        (Chunked, {"zero": 1}, ["constants", "activations"]),
        (Deeper, {"zero": 1}, ["2 such loops"]),
        (Whole, {"zero": 3}, ["layers/kernel", "zero=1"]),
        (Stacked, {"offload": {"opt_state": "host"}}, ["offload"]),
        (Stacked, {"offload": {"tile_bytes": 64}}, ["offload.tile_bytes=64"]),
        (Stacked, {"deterministic": "mesh"}, ["deterministic"]),
        (Stacked, {"unroll": True}, ["unroll=False"]),
    ],
    ids=[
        "rows",
        "integers",
        "reference",
        "chunks of a head",
        "two loops",
        "read whole",
        "offload",
        "tiles",
        "deterministic",
        "unroll",
    ],
)
def test_what_cannot_drop_layers_is_refused(model, mesh, words):
    refused(lambda: plan_for(model, mesh), words, error=ConfigError)


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"theta": 0.0}, "theta"), ({"theta": 1.5}, "theta"), ({"gamma": 0.1}, "theta")],
)
def test_settings_are_checked(settings, word):
    refused(lambda: zerojax.LayerDropConfig(**settings), word, error=ConfigError)
