"""Short runs with `deterministic="mesh"`, and what of two runs differs in bits.

python -m tests.support.mesh_free_runs MODEL ZERO DEVICES DEVICES
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.support.trajectories import regression_batch
from zerojax.config import MeshConfig
from zerojax.models.losses import mean_squared_error
from zerojax.optim import adamw
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import Plan, make_plan
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state

STEPS = 20
SMALL = 40
"""persistence_threshold: far below the default, so that stage 3 gathers where it reads."""


class Layers(nnx.Module):
    """Scanned layers with dropout and batch statistics, sizes that 8 does not divide, and a scale
    of 3 elements that is read twice."""

    def __init__(self, rngs: nnx.Rngs, num_layers: int = 2, width: int = 24):
        self.first = nnx.Linear(12, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.blocks = nnx.vmap(lambda r: Layer(width, r), in_axes=0, out_axes=0)(
            rngs.split(num_layers)
        )
        self.scale = nnx.Param(jnp.ones((3,)))
        self.out = nnx.Linear(width, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def apply(layer: Layer, x: jax.Array) -> jax.Array:
            return layer(x)

        x = apply(self.blocks, self.norm(self.first(x) * jnp.mean(self.scale[...])))
        return self.out(x) * jnp.sum(self.scale[...] ** 2)

    def loss(self, batch: dict) -> Any:
        return mean_squared_error(self(batch["x"]), batch["y"])


class Layer(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jnp.tanh(self.linear(x)))


class Transformer(nnx.Module):
    """A layer of a user: attention, norm and MLP, with a softmax and biases of three shapes."""

    def __init__(self, rngs: nnx.Rngs, width: int = 32):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=width, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def loss(self, batch: dict) -> jax.Array:
        x = batch["x"] + self.attention(self.norms[0](batch["x"]))
        x = x + self.down(nnx.gelu(self.up(self.norms[1](x))))
        return jnp.mean(jnp.square(x - batch["y"]))


def sequence_batch(step: int) -> dict[str, np.ndarray]:
    """128 rows of 16 vectors, for `Transformer`."""
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=(128, 16, 32)).astype(np.float32) for name in ("x", "y")}


MODELS = {
    "layers": {"model": Layers, "batch": regression_batch},
    "transformer": {"model": Transformer, "batch": sequence_batch},
}


def plan_on(
    devices: int,
    model: Any = Layers,
    *,
    batch: Callable[[int], Any] = regression_batch,
    **options: Any,
) -> Plan:
    """A plan of clipped AdamW with a schedule, deterministic over meshes, on so many devices."""
    mesh = make_mesh(MeshConfig(), devices=jax.devices()[:devices])
    given = {
        "optimizer": adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, STEPS), clip_norm=0.5),
        "precision": "fp32",
        "persistence_threshold": SMALL,
        "deterministic": "mesh",
    }
    return make_plan(model, mesh, example_batch=batch(0), **{**given, **options})


def run(
    plan: Plan, *, steps: int = STEPS, batch: Callable[[int], Any] = regression_batch
) -> dict[str, np.ndarray]:
    """{name: every metric of every step, and every array of the last state in its true shape}."""
    state, step = init_state(plan, 0), build_step(plan)
    metrics: dict[str, list[Any]] = {}
    for index in range(steps):
        state, now = step(state, jax.device_put(batch(index), plan.batch_sharding))
        for name, value in now.items():
            metrics.setdefault(name, []).append(np.asarray(value))
    found = {f"metrics/{name}": np.stack(values) for name, values in metrics.items()}
    return found | arrays_of(to_portable_state(plan, state))


def arrays_of(state: Any) -> dict[str, np.ndarray]:
    """{path: array on the host}."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return {jax.tree_util.keystr(path): np.asarray(plain(leaf)) for path, leaf in leaves}


def differences(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    """Names of arrays of which any bit, the shape or the dtype differs."""
    assert one.keys() == other.keys()
    return [
        name
        for name, value in one.items()
        if value.dtype != other[name].dtype
        or value.shape != other[name].shape
        or value.tobytes() != other[name].tobytes()
    ]


def main(model: str, zero: str, first: str, second: str) -> None:
    """Prints what differs in bits between two numbers of devices."""
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    given: Any = MODELS[model]
    one, other = (
        run(plan_on(int(count), zero=int(zero), **given), steps=6, batch=given["batch"])
        for count in (first, second)
    )
    print("differences:", differences(one, other))


if __name__ == "__main__":
    main(*sys.argv[1:])
