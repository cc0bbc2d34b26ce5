"""An MLP in chunks of tokens computes what it computes of all tokens, and never holds all of it.

Tolerances: sums of up to 100 products of float32, of sizes up to 30, in other orders.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.operators.test_attention import largest_array
from tests.support.small_models import reference_model
from tests.support.trajectories import TOLERANCE, plan_for, train_for
from zerojax.config import LoraConfig
from zerojax.forecasting import hlo
from zerojax.step.build import build_step
from zerojax.zoo import GPT2Config, add_lora
from zerojax.zoo.layers import Mlp, in_chunks

GELU = {"activation": "gelu_tanh", "gated": False, "use_bias": True}
SWIGLU = {"activation": "silu", "gated": True, "use_bias": False}
CLOSE = {"rtol": 2e-6, "atol": 1e-5}
TOKENS, WIDTH, HIDDEN = 50, 16, 64


def mlp_of(kind):
    return Mlp(WIDTH, HIDDEN, **kind, stddev=0.3, output_stddev=0.3, rngs=nnx.Rngs(0))


def drawn(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def both(kind, chunk, dtype=jnp.float32):
    """(out, gradients of parameters and of x), computed in a dtype."""
    graph, weights = nnx.split(mlp_of(kind))
    weights = jax.tree.map(lambda array: array.astype(dtype), weights)
    x, slope = drawn(1, 2, TOKENS, WIDTH).astype(dtype), drawn(2, 2, TOKENS, WIDTH).astype(dtype)

    def run(weights, x):
        mlp = nnx.merge(graph, weights)
        return mlp(x) if chunk is None else in_chunks(mlp, x, chunk)

    @jax.jit
    def differentiated(weights, x):
        out, pull = jax.vjp(run, weights, x)
        return out, pull(slope)

    return differentiated(weights, x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 64])
@pytest.mark.parametrize("kind", [GELU, SWIGLU], ids=["gelu", "swiglu"])
def test_values_and_gradients_are_those_of_all_tokens(kind, chunk):
    for found, expected in zip(
        *map(jax.tree.leaves, (both(kind, chunk), both(kind, None))), strict=True
    ):
        np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.thorough
def test_gradients_of_weights_are_summed_in_float32():
    """In bfloat16 chunks of one token lose no more than all tokens at once do."""
    exact = jax.tree.leaves(both(SWIGLU, None)[1][0])
    rounded = jax.tree.leaves(both(SWIGLU, None, jnp.bfloat16)[1][0])
    chunked = jax.tree.leaves(both(SWIGLU, 1, jnp.bfloat16)[1][0])
    for true, whole, parts in zip(exact, rounded, chunked, strict=True):
        assert parts.dtype == jnp.bfloat16
        lost = [float(jnp.linalg.norm(x.astype(jnp.float32) - true)) for x in (whole, parts)]
        assert lost[1] < 1.2 * lost[0]


def test_hidden_activations_of_all_tokens_are_never_held():
    tokens = 1024
    graph, weights = nnx.split(mlp_of(SWIGLU))
    x = jnp.ones((1, tokens, WIDTH))

    def loss(weights, x, chunk):
        mlp = nnx.merge(graph, weights)
        return jnp.sum((mlp(x) if chunk is None else in_chunks(mlp, x, chunk)) ** 2)

    def largest(chunk):
        gradient = jax.jit(jax.grad(functools.partial(loss, chunk=chunk)))
        return largest_array(gradient.lower(weights, x).compile())

    assert largest(64) == tokens * WIDTH
    assert largest(None) == tokens * HIDDEN


ROWS = {
    "0": {"zero": 0},
    "1": {"zero": 1, "num_microbatches": 2},
    "2-tensor parallel": {"zero": 2, "mesh": {"data": 4, "model": 2}},
    "3": {"zero": 3},
    "3-sequence": {"zero": 3, "mesh": {"data": 4, "model": 2}, "sequence_sharding": True},
    "3-context": {"zero": 3, "mesh": {"data": 4, "context": 2}},
    "1-stages": {"zero": 1, "mesh": {"data": 4, "stage": 2}, "num_microbatches": 2},
    "3-host": {"zero": 3, "offload": {"activations": "host"}},
}


@functools.cache
def one_device(name):
    return train_for(reference_model(name), devices=1)


@pytest.mark.thorough
@pytest.mark.parametrize("options", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_in_chunks_trains_as_one_device_without(name, options):
    remat = "full" if options["zero"] else "none"
    model = reference_model(name, mlp_chunk=3, remat=remat)
    found = train_for(model, persistence_threshold=0, **options)
    np.testing.assert_allclose(found.losses, one_device(name).losses, rtol=0, atol=TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize("sequence_sharding", [False, True])
def test_chunks_send_nothing_more(sequence_sharding):
    """Weights are gathered once for all chunks of a layer, and rows in parts are not moved."""
    sent, gathers = [], []
    for chunk in (None, 4):
        plan = plan_for(
            reference_model("llama", mlp_chunk=chunk, remat="full"),
            zero=3,
            mesh={"data": 4, "model": 2},
            sequence_sharding=sequence_sharding,
            persistence_threshold=0,
        )
        step = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile()
        program = hlo.read_program(step.as_text())
        found = hlo.find_collectives(program, 8)
        sent.append(sum(one.times * one.wire_bytes for one in found))
        over_data = [one for one in found if one.group == (0, 2, 4, 6)]
        gathers.append(sorted((x.kind, x.loop_depth, x.wire_bytes) for x in over_data))
    assert sent[1] < 1.02 * sent[0]
    assert gathers[0] == gathers[1]
    assert len(gathers[0]) > 5


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="use mlp_chunk=None or matmul_dtype=None"):
        GPT2Config(vocab_size=8, mlp_chunk=4, matmul_dtype="fp8")
    with pytest.raises(ValueError, match="mlp_chunk=0 must be a whole number of at least 1"):
        GPT2Config(vocab_size=8, mlp_chunk=0)
    adapted = add_lora(reference_model("gpt2", mlp_chunk=4), LoraConfig(rank=2))
    with pytest.raises(ValueError, match="targets=.'attention/'"):
        plan_for(adapted)
    on_attention = LoraConfig(rank=2, targets=("attention/",))
    plan_for(add_lora(reference_model("gpt2", mlp_chunk=4), on_attention))


def test_a_run_file_has_it():
    config = zerojax.config.load(zerojax.config.RunConfig, None, ["model.mlp_chunk=4096"])
    assert zerojax.zoo.as_decoder_config(config.model, 256).mlp_chunk == 4096
