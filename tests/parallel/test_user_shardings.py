"""Models and callers with meshes and shardings of their own train as without them: losses of one
device, and the collectives of the same rules given by hand."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.forecasting.hlo import find_collectives, read_program

MESH = {"data": 2, "model": 4}
RULES = (("up/kernel", (None, "model")), ("down/kernel", ("model", None)))
TABLE = (("batch", "data"), ("mlp", "model"), ("embed", "fsdp"))
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 9), dtype=np.int32)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
STEPS = 3
NEAR = 2e-6
"""Other orders of float32 sums; losses are about 3."""


def mesh(kind: AxisType, *names: str) -> Mesh:
    sizes = (2, 4) if len(names) == 2 else (8,)
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


doubled.defvjp(lambda x: (doubled(x), ()), lambda _, g: (2 * lax.stop_gradient(g),))


def nothing(x: jax.Array, spec: P) -> jax.Array:
    return x


def constrained(x: jax.Array, spec: P) -> jax.Array:
    return lax.with_sharding_constraint(x, spec)


def on_mesh(x: jax.Array, spec: P) -> jax.Array:
    everywhere = NamedSharding(mesh(AxisType.Auto, "data", "model"), P(None, "data", spec[-1]))
    return lax.with_sharding_constraint(x, everywhere)


def resharded(x: jax.Array, spec: P) -> jax.Array:
    return jax.sharding.reshard(x, spec)


class Layer(nnx.Module):
    """An MLP with custom derivatives, whose results `shard` gives a sharding."""

    def __init__(self, rngs: nnx.Rngs, shard: Callable[..., Any]) -> None:
        self.shard = shard
        self.up = nnx.Linear(16, 64, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(64, 16, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.shard(nnx.silu(self.up(x)), P("data", None, "model"))
        return x + self.shard(doubled(self.down(hidden)), P("data", None, None))


class Shaped(nnx.Module):
    """Layers in a list, or in a scan with checkpoints."""

    def __init__(self, rngs: nnx.Rngs, shard: Callable[..., Any], scans: bool = False) -> None:
        self.scans, self.shard, self.embed = scans, shard, nnx.Embed(32, 16, rngs=rngs)
        stacked = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Layer(rngs, shard)))
        self.layers = stacked(rngs) if scans else nnx.List([Layer(rngs, shard) for _ in range(3)])

    def loss(self, batch: Any) -> Any:
        x = self.shard(self.embed(batch["tokens"]), P("data", None, None))
        if self.scans:
            step = nnx.remat(lambda x, layer: layer(x))
            x = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        else:
            for layer in self.layers:
                x = layer(x)
        return zerojax.losses.next_token(x @ self.embed.embedding[...].T, batch["targets"])


class NamedLayer(linen.Module):
    """A layer as in models with logical axes: names of parameters and of activations."""

    names: bool

    @linen.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        def dense(width: int, names: tuple[str, str], name: str) -> linen.Dense:
            draw = linen.initializers.lecun_normal()
            draw = linen.with_logical_partitioning(draw, names) if self.names else draw
            return linen.Dense(width, use_bias=False, kernel_init=draw, name=name)

        hidden = linen.relu(dense(64, ("embed", "mlp"), "up")(x))
        if self.names:
            hidden = linen.with_logical_constraint(hidden, ("batch", "length", "mlp"))
        return x + dense(16, ("mlp", "embed"), "down")(hidden), None


class Named(linen.Module):
    names: bool = True

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = linen.Embed(32, 16)(tokens)
        layers = linen.scan(
            NamedLayer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={linen.PARTITION_NAME: "layers"},
        )
        x, _ = layers(self.names, name="layers")(x, None)
        return linen.Dense(32)(x)


def next_token(model: Any, batch: Any) -> Any:
    return zerojax.losses.next_token(model(batch["tokens"]), batch["targets"])


def planned(model: Any, on: Any = MESH, **options: Any) -> zerojax.Plan:
    given = {"example_batch": BATCH, "optimizer": optax.adamw(1e-2), "precision": "fp32", **options}
    return zerojax.make_plan(model, on, **given)


def trained(plan: zerojax.Plan) -> list[float]:
    state, step = zerojax.init_state(plan, seed=0), zerojax.build_step(plan)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, zerojax.shard_batch(plan, BATCH))
        losses.append(float(metrics["loss"]))
    return losses


def on_one(model: Any, **options: Any) -> list[float]:
    device = zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1])
    return trained(planned(model, device, **options))


def sent(plan: zerojax.Plan) -> list[Any]:
    """Returns the collectives of the compiled step."""
    lowered = zerojax.build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    found = find_collectives(read_program(lowered.compile().as_text()), 8)
    return sorted((one.kind, one.group, one.wire_bytes, one.times) for one in found)


def shaped(shard: Callable[..., Any], scans: bool = False) -> Callable[[nnx.Rngs], nnx.Module]:
    return lambda rngs: Shaped(rngs, shard, scans)


CASES = {
    "spec without a mesh": (constrained, None),
    "spec on the user's mesh": (constrained, (AxisType.Auto, "data", "model")),
    "spec, mesh with other axes": (constrained, (AxisType.Auto, "fsdp")),
    "named sharding over tokens": (on_mesh, None),
    "reshard on an Explicit mesh": (resharded, (AxisType.Explicit, "data", "model")),
    "an Explicit mesh alone": (nothing, (AxisType.Explicit, "data", "model")),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("scans", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_shardings_of_the_model_change_no_loss(case, scans, zero):
    shard, own = CASES[case]
    with contextlib.nullcontext() if own is None else jax.set_mesh(mesh(*own)):
        losses = trained(planned(shaped(shard, scans), zero=zero, rules=RULES))
    np.testing.assert_allclose(losses, on_one(shaped(nothing, scans)), rtol=NEAR)


def test_names_of_dimensions_are_rules():
    by_hand = planned(Named(names=False), loss=next_token, zero=2, rules=RULES)
    with linen.logical_axis_rules(TABLE):
        plan = planned(Named(), loss=next_token, zero=2)
    assert trained(plan) == trained(by_hand)
    np.testing.assert_allclose(trained(plan), on_one(Named(False), loss=next_token), rtol=NEAR)
    assert sent(plan) == sent(by_hand)


def test_a_table_in_the_options_names_what_is_split():
    draw = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))

    def model(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(16, 64, kernel_init=draw, rngs=rngs)

    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)  # noqa: E731
    given = {"loss": loss, "example_batch": {"x": np.ones((8, 16), np.float32)}}
    plan = planned(model, **given, logical_axis_rules={"mlp": ["tensor", "model"]})
    assert plan.placement.leaves["kernel"].axes == (None, "model")
    assert "mlp (1" in "\n".join(plan.reasons)
    moved = plan.remake(zerojax.make_mesh({"data": 4, "model": 2}))
    assert moved.settings.rules == plan.settings.rules
    without = planned(model, **given)
    assert without.settings.rules is None
    assert "logical_axis_rules={embed: model}" in "\n".join(without.reasons)


@pytest.mark.parametrize(
    ("table", "about", "remedy"),
    [
        ({"embed": None, "mlp": "data"}, "data of the table: ZeRO shards", ["{embed: model}"]),
        ({"embed": "tp", "mlp": "tp"}, "tp of the table: zerojax has no", ["{embed: model, mlp: "]),
        ({"embed": "fsdp", "mlp": "tp"}, "fsdp, tp of the", ["{embed: model} or", "{mlp: model}"]),
    ],
)
def test_names_of_no_axis_are_advised_together(table, about, remedy):
    draw = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    plan = planned(
        lambda rngs: nnx.Linear(16, 64, kernel_init=draw, rngs=rngs),
        loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        example_batch={"x": np.ones((8, 16), np.float32)},
        logical_axis_rules=table,
    )
    reason = next(reason for reason in plan.reasons if "names dimensions" in reason)
    assert all(f"logical_axis_rules={words}" in reason for words in remedy), reason
    assert about in reason
    assert ("ZeRO" in reason) == ("ZeRO" in about), reason


def test_train_leaves_the_users_mesh_alone():
    with jax.set_mesh(mesh(AxisType.Explicit, "x", "y")):
        trainer = zerojax.train(shaped(nothing), MESH, [BATCH] * 2, steps=2, run_dir=None)
        assert np.isfinite(trainer.evaluate([BATCH])["loss"])
        own = jax.sharding.get_abstract_mesh()
    assert own.axis_names == ("x", "y")
