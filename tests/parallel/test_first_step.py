"""What a user waits for before the first step: sizes of programs and numbers of questions."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from zerojax import build_step, make_mesh, make_plan
from zerojax.models.adapt import as_model
from zerojax.tracing.rolling import equality, map_rows
from zerojax.tracing.trees import path_name

WIDTH = 8
BATCH = {"x": np.ones((8, WIDTH), np.float32), "y": np.zeros((8, WIDTH), np.float32)}


class Layers(nnx.Module):
    """A list of layers, of which each draws two arrays and keeps a stream."""

    def __init__(self, number: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(number)])
        self.drop, self.rngs = nnx.Dropout(0.5, rngs=rngs), rngs

    def loss(self, batch: Any) -> Any:
        x = batch["x"]
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return jnp.sum((self.drop(x) - batch["y"]) ** 2), jnp.float32(x.shape[0])


def make_layers(number: int) -> Any:
    return lambda rngs: Layers(number, rngs)


def largest_join(devices: int, zero: int, **more: Any) -> tuple[int, str]:
    """Returns (elements of the largest array that a step joins from others, the step's program)."""
    mesh = make_mesh({"data": devices}, devices=jax.devices()[:devices])
    plan = make_plan(make_layers(3), mesh, example_batch=BATCH, zero=zero, precision="fp32", **more)
    program = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).as_text()
    joined = re.findall(r"stablehlo\.concatenate.*-> tensor<([\dx]+)x\w+>", program)
    sizes = [int(np.prod([int(size) for size in shape.split("x")])) for shape in joined]
    return max(sizes, default=0), program


@pytest.mark.parametrize("deterministic", [None, pytest.param("mesh", marks=pytest.mark.thorough)])
def test_one_device_packs_no_arrays(deterministic: str | None) -> None:
    more = {} if deterministic is None else {"deterministic": deterministic, "virtual_shards": 2}
    size, program = largest_join(1, 1, **more)
    assert size < WIDTH * WIDTH  # numbers of each parameter at most
    assert "all_reduce" not in program
    assert "all_to_all" not in program


def test_several_devices_pack_the_arrays_of_a_layer() -> None:
    size, program = largest_join(4, 2, persistence_threshold=0)
    assert size >= WIDTH * WIDTH + WIDTH  # a matrix and its bias
    assert "reduce_scatter" in program


def test_draws_of_a_factory_ask_no_traced_array_for_its_sharding(monkeypatch) -> None:
    asked = []

    def note(tracer: Any) -> Any:
        asked.append(tracer)
        raise AttributeError("sharding")

    monkeypatch.setattr(jax.core.Tracer, "sharding", property(note))
    as_model(make_layers(5))
    assert not asked


def test_a_factory_draws_what_it_draws_without_zerojax() -> None:
    model, key = as_model(make_layers(3)), jax.random.key(7)
    params, extras = jax.jit(lambda key: model.init(key, BATCH, None))(key)
    plain = jax.jit(lambda key: nnx.split(Layers(3, nnx.Rngs(key))))(key)[1]
    wanted = {path_name(path): leaf.get_value() for path, leaf in nnx.to_flat_state(plain)}
    for name, value in {**params, **extras}.items():
        expected = wanted.pop(name)
        if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
            expected = jax.random.key_data(expected)
        assert np.array_equal(value, expected), name
    assert not wanted
    kinds = {type(node) for _, node in nnx.iter_graph(model.template)}
    assert [kind for kind in kinds if issubclass(kind, nnx.RngStream)] == [nnx.RngStream]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        optax.chain(optax.adaptive_grad_clip(0.1), optax.lion(1e-3)),
        optax.lamb(1e-3),
    ],
    ids=["adamw", "lion", "lamb"],
)
def test_updates_of_rows_are_no_more_equations_for_more_rows(tx: Any) -> None:
    def left_over(rows: int) -> list[Any]:
        structs = {str(row): jax.ShapeDtypeStruct((WIDTH, 4), jnp.float32) for row in range(rows)}
        state = jax.eval_shape(tx.init, structs)
        closed, shapes = jax.make_jaxpr(tx.update, return_shape=True)(structs, state, structs)
        inputs = jax.tree.leaves((structs, state, structs))
        groups = _of_rows(inputs, rows)
        mapped = map_rows(closed, groups, _of_rows(jax.tree.leaves(shapes), rows))
        equations = enumerate(mapped.closed.jaxpr.eqns)
        return [e for number, e in equations if number not in mapped.skipped]

    few, many = (Counter(map(_kind_of, left_over(rows))) for rows in (3, 6))
    assert {kind for kind in many if many[kind] > few[kind]} <= {("add", ())}  # a sum over rows


def _kind_of(equation: Any) -> tuple[str, tuple[int, ...]]:
    return equation.primitive.name, equation.outvars[0].aval.shape


def _of_rows(leaves: list[Any], rows: int) -> list[tuple[int, ...]]:
    """Positions of arrays, as many in one group as there are rows: they stand side by side."""
    arrays = [at for at, leaf in enumerate(leaves) if leaf.shape]
    return [tuple(arrays[at : at + rows]) for at in range(0, len(arrays), rows)]


def test_an_equation_becomes_a_function_without_a_trace(monkeypatch) -> None:
    closed = jax.make_jaxpr(lambda x: x + 1)(jnp.float32(1))
    (equation,) = closed.jaxpr.eqns
    equality.equation_function(equation, closed.jaxpr.invars)
    monkeypatch.setattr(jax, "make_jaxpr", None)
    (result,) = equality.equation_function(equation, closed.jaxpr.invars)(jnp.float32(2))
    assert result == 3
