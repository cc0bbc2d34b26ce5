"""Attention that stores its scores is found by its structure, and nothing else is."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import zerojax
from zerojax.tracing.stored_scores import count_attention_kernels, find_stored_scores

B, T, H, D = 2, 24, 3, 8
QUERY = jax.ShapeDtypeStruct((B, T, H, D), jnp.float32)


def plain(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5
    scores = jnp.where(jnp.tri(T, dtype=bool)[None, None], scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def in_a_loop(q, k, v):
    return lax.scan(lambda x, _: (jax.checkpoint(plain)(x, k, v), None), q, length=3)[0]


def unnormalised(q, k, v):
    """Divides after the second product, in bfloat16, with heads in the batch's dimension."""
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(B * H, T, D).astype(jnp.bfloat16) for x in (q, k, v))
    weights = jnp.exp(q @ k.transpose(0, 2, 1))
    return (weights @ v / weights.sum(-1)[..., None]).astype(jnp.float32)


ATTENTION = {
    "by einsum": (plain, (B, H, T, T), "float32"),
    "in a loop": (in_a_loop, (B, H, T, T), "float32"),
    "unnormalised": (unnormalised, (B * H, T, T), "bfloat16"),
    "jax.nn": (jax.nn.dot_product_attention, (B, H, T, T), "float32"),
    "flax": (nnx.dot_product_attention, (B, H, T, T), "float32"),
    "zerojax, stored": (
        lambda q, k, v: zerojax.attention(q, k, v, implementation="xla"),
        (B, H, T, T),
        "float32",
    ),
    "vmapped rows": (
        jax.vmap(lambda q, k, v: jax.nn.softmax(q[:, 0] @ k[:, 0].T) @ v[:, 0]),
        (B, T, T),
        "float32",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ATTENTION)
def test_scores_are_found_once_with_their_line(name):
    function, shape, dtype = ATTENTION[name]
    step = jax.grad(lambda *inputs: jnp.sum(function(*inputs)))
    (found,) = find_stored_scores(jax.make_jaxpr(step)(QUERY, QUERY, QUERY).jaxpr)
    assert sorted(size for size in found.shape if size > 1) == sorted(shape)
    assert found.dtype == dtype
    assert found.num_bytes == B * H ** ("vmapped" not in name) * T * T * (2 if "b" in dtype else 4)
    assert "test_stored_scores.py:" in str(found.line)


def experts(x, up, down):
    hidden = jax.nn.softplus(jnp.einsum("ebd,edf->ebf", x, up))
    return jnp.einsum("ebf,efd->ebd", hidden, down)


def cross_entropy(x, w, _):
    return jax.nn.log_softmax(x @ w) @ w.T


@pytest.mark.parametrize(
    ("function", "shapes"),
    [(experts, [(4, 6, 8), (4, 8, 12), (4, 12, 8)]), (cross_entropy, [(6, 8), (8, 12), (1,)])],
)
def test_other_products_around_exponentials_are_no_attention(function, shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    step = jax.grad(lambda *inputs: jnp.sum(function(*inputs)), argnums=(0, 1))
    program = jax.make_jaxpr(step)(*arrays)
    assert find_stored_scores(program.jaxpr) == ()
    assert count_attention_kernels(program.jaxpr) == 0


def test_tiles_of_chunks_are_stored_scores_and_smaller():
    def chunked(q, k, v):
        return zerojax.attention(q, k, v, implementation="chunked")

    query = jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)
    found = find_stored_scores(jax.make_jaxpr(chunked)(query, query, query).jaxpr)
    assert found
    assert max(one.num_bytes for one in found) < 4 * 4096**2
