"""Products that a model computes in float32 although the plan computes in bfloat16."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support import small_models
from zerojax.operators.marks import mark_read
from zerojax.placement.device_mesh import make_mesh
from zerojax.tracing.wide_products import find_wide_products

WIDTH = 16
NARROW = jax.ShapeDtypeStruct((8, WIDTH), jnp.bfloat16)
SQUARE = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)


class Listener(nnx.Module):
    """An embedding, a layer and a head, as most people write them."""

    def __init__(self, rngs: nnx.Rngs, **embed: Any):
        self.embed = nnx.Embed(32, WIDTH, rngs=rngs, **embed)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 32, rngs=rngs)

    def loss(self, batch: Any) -> jax.Array:
        x = self.embed(batch["tokens"])
        return jnp.mean(self.head(self.up(self.norm(x))) ** 2)


class Looker(nnx.Module):
    """A convolution of an image, whose mean is the loss."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)

    def loss(self, batch: Any) -> jax.Array:
        return jnp.mean(self.conv(batch["image"]))


def lines_of(model: Any, batch: Any, *, precision: str = "bf16") -> list[str]:
    plan = zerojax.make_plan(
        model,
        make_mesh({"data": 2}, jax.devices()[:2]),
        example_batch=batch,
        precision=precision,
        zero=3,
    )
    return [line for line in plan.reasons if line.startswith("products:")]


@pytest.mark.thorough
def test_a_forecast_says_so_and_that_its_time_does_not_know():
    plan = zerojax.make_plan(
        Listener, zerojax.make_abstract_mesh({"data": 2}), example_batch=tokens(), precision="bf16"
    )
    forecast = zerojax.forecast(plan, gpu="h100", why_formula="of this test")
    (note,) = [line for line in forecast.remarks if line.startswith("products:")]
    assert "embed/embedding is cast to float32" in note
    assert re.search("TIME .* rate of bfloat16", note)


def tokens() -> dict[str, jax.ShapeDtypeStruct]:
    return {"tokens": jax.ShapeDtypeStruct((4, 8), jnp.int32)}


def test_the_plan_names_the_embedding_that_makes_all_products_float32():
    (line,) = lines_of(Listener, tokens())
    assert line.startswith("products: 100% of their FLOPs take float32 operands")
    assert "because parameter embed/embedding is cast to float32" in line
    assert "test_wide_products.py:" in line
    assert 'x = self.embed(batch["tokens"])' in line
    assert line.endswith("give that layer dtype=jnp.bfloat16, or cast what it returns")


def test_the_advised_dtype_makes_the_line_go():
    assert lines_of(lambda rngs: Listener(rngs, dtype=jnp.bfloat16), tokens()) == []


def test_a_plan_in_float32_says_nothing():
    assert lines_of(Listener, tokens(), precision="fp32") == []


class Caster(Looker):
    """Images are cast to float32 by the model."""

    def loss(self, batch: Any) -> jax.Array:
        return super().loss({"image": batch["image"].astype(jnp.float32) / 255})


def products_of_a_step(model: Any, batch: Any) -> tuple[set[str], list[str]]:
    """Returns dtypes of operands of a step's convolutions, and what the plan says of them."""
    mesh = make_mesh({"data": 2}, jax.devices()[:2])
    plan = zerojax.make_plan(model, mesh, example_batch=batch, precision="bf16", zero=0)
    arrays = zerojax.shard_batch(plan, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), batch))
    step = zerojax.build_step(plan).lower(zerojax.init_state(plan, seed=0), arrays)
    lines = [line for line in step.as_text().splitlines() if "stablehlo.convolution" in line]
    return set(re.findall(r"x(f32|bf16)>[,)]", " ".join(lines))), plan.reasons


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint8])
@pytest.mark.parametrize(("model", "used"), [(Looker, "bf16"), (Caster, "f32")])
def test_the_plan_says_of_images_what_the_step_computes(model, used, dtype):
    """A step casts floating-point arrays of a batch to the compute dtype."""
    batch = {"image": jax.ShapeDtypeStruct((4, 8, 8, 3), dtype)}
    dtypes, reasons = products_of_a_step(model, batch)
    assert dtypes == {used}
    assert any(line.startswith("products: 100%") for line in reasons) == (used == "f32")


def test_a_float32_batch_is_traced_in_the_compute_dtype():
    batch = {"x": jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)}

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.mean(model(batch["x"]))

    def model(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    mesh = make_mesh({"data": 2}, jax.devices()[:2])
    plan = zerojax.make_plan(model, mesh, example_batch=batch, loss=loss, precision="bf16")
    (product,) = [x for x in plan.traced.forward.eqns if x.primitive.name == "dot_general"]
    assert {x.aval.dtype for x in (*product.invars, *product.outvars)} == {jnp.dtype("bfloat16")}
    assert plan.abstract_batch["x"].dtype == jnp.float32


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_reference_models_compute_in_bfloat16(name: str):
    batch = {key: jax.ShapeDtypeStruct((4, 8), jnp.int32) for key in ("tokens", "targets")}
    assert lines_of(small_models.reference_model(name), batch) == []


def found_in(function: Any, *arguments: Any) -> Any:
    return find_wide_products(jax.make_jaxpr(function)(*arguments))


def test_the_share_counts_each_run_of_a_loop():
    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        def turn(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return (carry.astype(jnp.float32) @ w.astype(jnp.float32)).astype(jnp.bfloat16), None

        return jax.lax.scan(turn, x, None, length=3)[0] @ w

    found = found_in(looped, NARROW, SQUARE)
    assert found.share == 3 / 4
    assert found.cause.startswith("a value becomes float32 (")
    assert "carry.astype" in found.cause


def test_a_carry_that_turns_float32_later_is_followed_around_the_loop():
    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        def turn(carry: Any, _: None) -> tuple[Any, None]:
            wide, narrow = carry
            return (wide @ wide.T @ wide + narrow.astype(jnp.float32), narrow), None

        wide = jnp.zeros(x.shape)  # float32 from nothing that can be named
        return jax.lax.scan(turn, (wide, x), None, length=2)[0][0]

    found = found_in(looped, NARROW, SQUARE)
    assert found.share == 1
    assert "narrow.astype" in found.cause


def test_a_value_that_is_cast_back_is_narrow_again():
    def normed(x: jax.Array, w: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide / jnp.max(wide)).astype(jnp.bfloat16) @ w

    assert found_in(normed, NARROW, SQUARE) is None


def test_of_two_casts_with_one_back_between_the_second_is_the_cause():
    def model(x: jax.Array, w: jax.Array) -> jax.Array:
        back = (2 * x.astype(jnp.float32)).astype(jnp.bfloat16)
        return back.astype(jnp.float32) @ w.astype(jnp.float32)

    assert "back.astype" in found_in(model, NARROW, SQUARE).cause


def test_a_product_that_only_sums_in_float32_is_no_cause_by_itself():
    def summed(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    assert found_in(summed, NARROW, SQUARE) is None
    found = found_in(lambda x, w: summed(x, w) @ w.astype(jnp.float32), NARROW, SQUARE)
    assert found.share == 0.5
    assert "preferred_element_type" in found.cause


def test_the_first_of_two_parameters_that_are_cast_is_named():
    def model(first: jax.Array, second: jax.Array) -> jax.Array:
        first = mark_read(first, "a/kernel").astype(jnp.float32)
        second = mark_read(second, "b/kernel").astype(jnp.float32)
        return second.T @ first.T

    assert "parameter a/kernel is cast" in found_in(model, NARROW, SQUARE).cause


def test_products_that_no_result_depends_on_do_not_count():
    def wasteful(x: jax.Array, w: jax.Array) -> jax.Array:
        x.astype(jnp.float32) @ w.astype(jnp.float32)
        return x @ w

    assert found_in(wasteful, NARROW, SQUARE) is None
