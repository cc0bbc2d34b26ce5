"""The reference models against their equations written out, and what ZeRO needs of them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config import ModelConfig
from zerojax.tracing.stacking import scan_blocks, stack_blocks
from zerojax.zoo import (
    GPT2,
    GPT2Config,
    Llama,
    LlamaConfig,
    as_decoder_config,
    build_model,
    tensor_parallel_rules,
)
from zerojax.zoo.layers import activation_rules

VOCAB, SEQ, LAYERS, HEADS, WIDTH = 29, 12, 2, 4, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_seq_len": 16,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "embed_dim": WIDTH,
}
GPT2_TINY = GPT2Config(**SIZES)
LLAMA_TINY = LlamaConfig(**SIZES, num_kv_heads=2, mlp_dim=40)
CONFIGS = {
    "gpt2": GPT2_TINY,
    "gpt2-untied": dataclasses.replace(GPT2_TINY, tie_embeddings=False, mlp_dim=40),
    "llama": LLAMA_TINY,
    "llama-tied": dataclasses.replace(LLAMA_TINY, tie_embeddings=True, num_kv_heads=1),
}
both = pytest.mark.parametrize("config", [GPT2_TINY, LLAMA_TINY], ids=["gpt2", "llama"])


def kind_of(config: GPT2Config | LlamaConfig) -> type[GPT2] | type[Llama]:
    return GPT2 if isinstance(config, GPT2Config) else Llama


def abstract(config: GPT2Config | LlamaConfig) -> Any:
    return nnx.eval_shape(lambda: kind_of(config)(config, rngs=nnx.Rngs(0)))


@functools.cache
def initial(config: GPT2Config | LlamaConfig) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(kind_of(config)(config, rngs=nnx.Rngs(0)))


def build(config: GPT2Config | LlamaConfig) -> Any:
    """A new model with the initial values of the package."""
    return nnx.merge(*initial(config), copy=True)


def parameters(model: nnx.Module) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): variable.get_raw_value() for path, variable in flat}


def parameter_shapes(config: GPT2Config | LlamaConfig) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in parameters(abstract(config)).items()}


@functools.cache
def lively(config: GPT2Config | LlamaConfig) -> tuple[nnx.GraphDef, dict[str, jax.Array]]:
    """A model whose every parameter matters: norms and biases are not at their start of 1 and 0."""
    generator = np.random.default_rng(1)
    model = abstract(config)
    values = {
        name: jnp.asarray(
            0.2 * generator.standard_normal(value.shape) + name.endswith("scale"), value.dtype
        )
        for name, value in parameters(model).items()
    }
    return nnx.split(model)[0], values


def merge(graphdef: nnx.GraphDef, values: dict[str, jax.Array]) -> Any:
    state = nnx.from_flat_state([(tuple(k.split("/")), nnx.Param(v)) for k, v in values.items()])
    return nnx.merge(graphdef, state)


@pytest.fixture(scope="module")
def batch() -> dict[str, jax.Array]:
    tokens = jax.random.randint(jax.random.key(2), (2, SEQ + 1), 0, VOCAB, jnp.int32)
    weights = jnp.ones((2, SEQ)).at[1, 7:].set(0.0)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


# --- the equations, written again without Flax, scan or fused attention --------------------------


def reference_norm(x: jax.Array, p: dict[str, jax.Array], name: str) -> jax.Array:
    if f"{name}/bias" in p:
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p[f"{name}/scale"][None, None]
    return x + p[f"{name}/bias"][None, None] if f"{name}/bias" in p else x


def reference_rope(x: jax.Array, theta: float) -> jax.Array:
    """As a multiplication of complex numbers, feature i with i + d / 2."""
    half = x.shape[-1] // 2
    turn = np.arange(x.shape[1])[:, None] * np.power(theta, -np.arange(half) / half)[None]
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turn)[None, :, None, :]
    return jnp.concatenate([turned.real, turned.imag], -1).astype(jnp.float32)


def reference_attention(x: jax.Array, p: dict[str, jax.Array], theta: float | None) -> jax.Array:
    mixed = {}
    for part in ("query", "key", "value"):
        y = jnp.einsum("bse,ehd->bshd", x, p[f"attention/{part}/kernel"])
        if f"attention/{part}/bias" in p:
            y = y + p[f"attention/{part}/bias"][None, None]
        mixed[part] = reference_rope(y, theta) if theta and part != "value" else y
    query, head_dim = mixed["query"], mixed["query"].shape[-1]
    group = query.shape[2] // mixed["key"].shape[2]
    heads = []
    for head in range(query.shape[2]):
        key, value = mixed["key"][:, :, head // group], mixed["value"][:, :, head // group]
        scores = jnp.einsum("btd,bsd->bts", query[:, :, head], key) / math.sqrt(head_dim)
        scores = jnp.where(np.tril(np.ones(scores.shape[1:], bool))[None], scores, -1e30)
        exponent = jnp.exp(scores - scores.max(-1, keepdims=True))
        heads.append(exponent / exponent.sum(-1, keepdims=True) @ value)
    return jnp.einsum("hbsd,hde->bse", jnp.stack(heads), p["attention/output/kernel"])


def reference_mlp(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    up = x @ p["mlp/up/kernel"]
    if "mlp/gate/kernel" in p:
        gate = x @ p["mlp/gate/kernel"]
        return (gate / (1 + jnp.exp(-gate)) * up) @ p["mlp/down/kernel"]
    up = up + p["mlp/up/bias"][None, None]
    gelu = 0.5 * up * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return gelu @ p["mlp/down/kernel"] + p["mlp/down/bias"][None, None]


def reference_logits(
    p: dict[str, jax.Array], tokens: jax.Array, config: GPT2Config | LlamaConfig
) -> jax.Array:
    x = p["token_embedding/embedding"][tokens]
    if isinstance(config, GPT2Config):
        x = x + p["position_embedding/embedding"][None, : tokens.shape[1]]
    theta = None if isinstance(config, GPT2Config) else config.rope_theta
    for i in range(config.num_layers):
        layer = {k.removeprefix("blocks/"): v[i] for k, v in p.items() if k.startswith("blocks/")}
        x = x + reference_attention(reference_norm(x, layer, "attention_norm"), layer, theta)
        if "attention/output/bias" in layer:
            x = x + layer["attention/output/bias"][None, None]
        x = x + reference_mlp(reference_norm(x, layer, "mlp_norm"), layer)
    x = reference_norm(x, p, "final_norm")
    return x @ (p["lm_head/kernel"] if "lm_head/kernel" in p else p["token_embedding/embedding"].T)


def reference_loss(p: Any, batch: Any, config: Any) -> tuple[jax.Array, jax.Array]:
    logits = reference_logits(p, batch["tokens"], config)
    probabilities = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    hit = jnp.take_along_axis(probabilities, batch["targets"][..., None], -1)[..., 0]
    return -(jnp.log(hit) * batch["weights"]).sum() / batch["weights"].sum(), logits


def model_loss(p: Any, batch: Any, graphdef: Any) -> tuple[jax.Array, jax.Array]:
    model = merge(graphdef, p)
    loss_sum, weight = model.loss(batch)
    return loss_sum / weight, model(batch["tokens"])


@pytest.mark.thorough
@both
def test_logits_and_gradients_equal_the_written_out_equations(config, batch):
    graphdef, values = lively(config)

    @jax.jit
    def both_ways(values):
        ours = functools.partial(model_loss, batch=batch, graphdef=graphdef)
        plain = functools.partial(reference_loss, batch=batch, config=config)
        return [jax.value_and_grad(f, has_aux=True)(values) for f in (ours, plain)]

    ((loss, logits), grads), ((plain_loss, plain_logits), plain_grads) = both_ways(values)
    assert logits.shape == (2, SEQ, VOCAB)
    # 1e-5: float32 sums of up to 64 terms in another order, through two layers; logits are O(1).
    np.testing.assert_allclose(logits, plain_logits, rtol=0, atol=1e-5)
    np.testing.assert_allclose(loss, plain_loss, rtol=0, atol=2e-6)
    assert grads.keys() == plain_grads.keys()
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, plain_grads[name], rtol=0, atol=5e-6, err_msg=name)
        if "key/bias" not in name:  # the softmax does not see it: its true gradient is 0
            assert jnp.abs(grad).max() > 1e-4, f"{name} has no influence"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2-untied", "llama-tied"])
def test_logits_of_the_other_output_equal_the_written_out_equations(name, batch):
    graphdef, values = lively(CONFIGS[name])
    plain = jax.jit(reference_logits, static_argnums=2)(values, batch["tokens"], CONFIGS[name])
    ours = jax.jit(lambda v: merge(graphdef, v)(batch["tokens"]))(values)
    # As above.
    np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_loss_in_chunks_is_the_loss_of_the_logits(config, batch):
    """24 positions in chunks of 5, the last of which is filled up."""
    (plain, whole), (chunked, cut) = (
        jax.jit(jax.value_and_grad(lambda v, g=graphdef: merge(g, v).loss(batch)[0]))(values)
        for graphdef, values in (
            lively(dataclasses.replace(config, loss_chunk=chunk)) for chunk in (None, 5)
        )
    )
    np.testing.assert_allclose(chunked, plain, rtol=2e-6)
    for name, grad in cut.items():
        # As above, and of the sum over 19 tokens instead of their mean.
        np.testing.assert_allclose(grad, whole[name], rtol=0, atol=19 * 5e-6, err_msg=name)


# --- remat ---------------------------------------------------------------------------------------


def residual_bytes(config: GPT2Config | LlamaConfig, batch: dict[str, jax.Array]) -> int:
    """Bytes that the backward pass is handed, from shapes alone."""
    graphdef, values = lively(config)

    def backward(values):
        return jax.vjp(lambda v: model_loss(v, batch, graphdef)[0], values)[1]

    leaves = jax.tree.leaves(jax.eval_shape(backward, values))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.sampled(1)
@both
def test_remat_hands_less_to_the_backward_pass(config, batch):
    sizes = {
        remat: residual_bytes(dataclasses.replace(config, remat=remat), batch)
        for remat in ("none", "dots", "full")
    }
    assert sizes["full"] < sizes["dots"] < sizes["none"]


@pytest.mark.thorough
def test_remat_does_not_change_the_gradients(batch):
    results = {}
    for remat in ("none", "dots", "full"):
        graphdef, values = lively(dataclasses.replace(GPT2_TINY, remat=remat))
        function = functools.partial(model_loss, batch=batch, graphdef=graphdef)
        results[remat] = jax.jit(jax.grad(lambda v, f=function: f(v)[0]))(values)
    for remat in ("dots", "full"):
        for name, grad in results[remat].items():
            # The same arithmetic, fused in another way by the compiler.
            np.testing.assert_allclose(grad, results["none"][name], rtol=0, atol=2e-6, err_msg=name)


# --- parameters that gather when they are read ---------------------------------------------------

READS: list[tuple[str, tuple[int, ...]]] = []


class _GatheringMixin:
    """Stands for a ZeRO-3 parameter: stored one element longer in its last dimension than it is."""

    __slots__ = ()

    def get_value(self, *, index=...):
        stored = object.__getattribute__(self, "_raw_value")
        name = object.__getattribute__(self, "_var_metadata")["stored_name"]
        READS.append((name, stored.shape))
        return stored[..., :-1][index]

    def __getattr__(self, name):
        metadata = object.__getattribute__(self, "_var_metadata")
        if name in metadata:
            return metadata[name]
        raise AssertionError(f"{metadata['stored_name']}.{name} reads past get_value")


GatheringParam = type("GatheringParam", (_GatheringMixin, nnx.Param), {"__slots__": ()})


@pytest.fixture
def reads() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    READS.clear()
    yield READS
    READS.clear()


def gathering(config: GPT2Config | LlamaConfig) -> tuple[Any, Any, dict[str, jax.Array]]:
    """(graphdef, template of the state, stored values) of a model that gathers at each reading."""
    _, values = lively(config)
    model = abstract(config)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        object.__setattr__(variable, "__class__", GatheringParam)
        variable.set_metadata(stored_name="/".join(map(str, path)))
    graphdef, state = nnx.split(model)
    stored = {
        name: jnp.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, 1)])
        for name, value in values.items()
    }
    return graphdef, dict(nnx.to_flat_state(state)), stored


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("remat", "loss_chunk"), [("none", None), ("full", None), ("dots", None), ("full", 5)]
)
@both
def test_each_layer_gathers_its_own_slice_inside_the_scan(config, remat, loss_chunk, batch, reads):
    """And the head, in chunks or not, is read once."""
    config = dataclasses.replace(config, remat=remat, loss_chunk=loss_chunk)
    graphdef, template, stored = gathering(config)

    def loss(stored):
        state = nnx.from_flat_state(
            [(path, v.replace(stored["/".join(map(str, path))])) for path, v in template.items()]
        )
        loss_sum, weight = nnx.merge(graphdef, state).loss(batch)
        return loss_sum / weight

    residuals = jax.eval_shape(lambda s: jax.vjp(loss, s)[1], stored)
    shapes = {name: value.shape for name, value in stored.items()}
    for name, shape in reads:
        assert shape == (shapes[name][1:] if name.startswith("blocks/") else shapes[name])
    counts = {name: sum(1 for read, _ in reads if read == name) for name in shapes}
    twice = {"token_embedding/embedding"} if config.tie_embeddings else set()
    assert counts == {name: 2 if name in twice else 1 for name in shapes}

    gathered = {(*s[:-1], s[-1] - 1) for n, s in shapes.items() if n.endswith("/kernel")}
    kept = {leaf.shape for leaf in jax.tree.leaves(residuals) if len(leaf.shape) > 2}
    stacked = {shape for shape in gathered if shape[0] == LAYERS and len(shape) > 2}
    assert bool(kept & stacked) == (remat == "none"), "gathered weights became residuals"

    if remat == "full":
        values = lively(config)[1]
        loss_sum, weight = jax.jit(lambda v: merge(lively(config)[0], v).loss(batch))(values)
        # The same arithmetic, fused in another way by the compiler.
        np.testing.assert_allclose(jax.jit(loss)(stored), loss_sum / weight, rtol=0, atol=2e-6)


# --- precision -----------------------------------------------------------------------------------


@pytest.mark.thorough
@both
def test_activations_follow_the_parameters_to_bf16_and_the_loss_stays_float32(config, batch):
    graphdef, values = lively(config)
    assert {value.dtype for value in parameters(abstract(config)).values()} == {
        jnp.dtype("float32")
    }
    inner = []

    @jax.jit
    def run(values):
        model = merge(graphdef, values)
        x = model.embed(batch["tokens"])
        y = scan_blocks(model.blocks, x, remat="none")
        inner.append((x.dtype, y.dtype, model.head(y).dtype))
        return model.loss(batch)

    full, weight = run(values)
    half, half_weight = run({name: v.astype(jnp.bfloat16) for name, v in values.items()})
    assert inner == [(jnp.float32,) * 3, (jnp.bfloat16,) * 3]
    assert full.dtype == half.dtype == weight.dtype == jnp.float32
    assert weight == half_weight == 19
    # bf16 has 8 significant bits: 2^-8 = 0.4 % for each of some ten roundings in a row.
    np.testing.assert_allclose(half, full, rtol=0.02)
    assert half != full


def test_norms_and_attention_do_not_lose_large_bf16_activations():
    """In bf16, 256 + 1 is 256: the mean square of such values would be wrong by whole units."""
    model = merge(*lively(GPT2_TINY))
    x = (256 + jnp.arange(WIDTH, dtype=jnp.float32) * 2)[None, None].astype(jnp.bfloat16)
    wide = x.astype(jnp.float32)
    expected = (wide - wide.mean()) / jnp.sqrt(wide.var() + 1e-5)
    model.final_norm.scale.set_value(jnp.ones(WIDTH))
    model.final_norm.bias.set_value(jnp.zeros(WIDTH))
    # One rounding of the result to bf16: 2^-9 relative.
    np.testing.assert_allclose(model.final_norm(x).astype(jnp.float32), expected, rtol=2**-8)
    assert model.final_norm(x).dtype == jnp.bfloat16


# --- depth, dropout, start -----------------------------------------------------------------------


@pytest.mark.sampled(1)
@both
def test_the_program_does_not_grow_with_depth(config, batch):
    def lines(num_layers: int) -> int:
        deep = dataclasses.replace(config, num_layers=num_layers, remat="full", dropout=0.1)
        graphdef, state = nnx.split(abstract(deep))
        params, rest = nnx.split_state(state, nnx.Param, ...)

        def loss(params, rest):
            return nnx.merge(graphdef, params, rest, copy=True).loss(batch)[0]

        return str(jax.make_jaxpr(jax.grad(loss))(params, rest)).count("\n")

    assert lines(2) == lines(7)


class _NoisyLayer(nnx.Module):
    """Writes its dropout mask as one binary digit, so that the sum over layers tells all masks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * x + (self.dropout(jnp.ones_like(x)) > 0)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_each_layer_and_each_call_draws_its_own_dropout_mask(remat):
    layers = stack_blocks(_NoisyLayer, 4, rngs=nnx.Rngs(0))
    x = jnp.zeros((1, 8, 64))
    first, second = (np.asarray(scan_blocks(layers, x, remat=remat)) for _ in range(2))
    masks = [np.asarray(total).astype(int) >> i & 1 for total in (first, second) for i in range(4)]
    for i, mask in enumerate(masks):
        # 512 fair coins: 0.5 +- 5 x 0.022.
        assert abs(mask.mean() - 0.5) < 0.11
        for other in masks[:i]:
            assert abs((mask == other).mean() - 0.5) < 0.11


@pytest.mark.thorough
@both
def test_dropout_acts_in_training_only(config, batch):
    plain = build(config)
    noisy = build(dataclasses.replace(config, dropout=0.3))
    assert not jax.tree.leaves(nnx.state(plain, nnx.Not(nnx.Param)))
    nnx.update(noisy, nnx.state(plain, nnx.Param))
    graphdef, state = nnx.split(noisy)

    @jax.jit
    def train(state):
        model = nnx.merge(graphdef, state)
        return model.loss(batch)[0], nnx.state(model)

    first, later = train(state)
    assert first != train(later)[0]
    assert first == train(state)[0]
    noisy.eval()
    # Not a rounding apart: the two programs are the same.
    noisy_logits, plain_logits = (
        jax.jit(lambda tokens, m=m: m(tokens))(batch["tokens"]) for m in (noisy, plain)
    )
    np.testing.assert_array_equal(noisy_logits, plain_logits)


@pytest.mark.thorough
@both
def test_initial_values_are_small_scaled_with_depth_and_differ_by_layer(config, batch):
    wide = dataclasses.replace(config, embed_dim=64, mlp_dim=128)
    model = build(wide)
    for name, value in parameters(model).items():
        if name.endswith("bias"):
            assert not value.any()
        elif name.endswith("scale"):
            assert (value == 1).all()
        else:
            scaled = re.search(r"attention/output|mlp/down", name)
            expected = 0.02 / math.sqrt(2 * LAYERS) if scaled else 0.02
            # At least 1024 draws: the standard deviation is known to 1 / sqrt(2048) = 2.2 %.
            assert float(value.std()) == pytest.approx(expected, rel=0.09), name
        if name.startswith("blocks/") and name.endswith("kernel"):
            assert not np.allclose(value[0], value[1])
    loss_sum, weight = jax.jit(lambda batch: model.loss(batch))(batch)
    assert float(loss_sum / weight) == pytest.approx(math.log(VOCAB), abs=0.15)


# --- names, counts, tensor parallelism -----------------------------------------------------------


def test_parameter_names_and_shapes():
    head_dim = WIDTH // HEADS
    assert parameter_shapes(GPT2_TINY) == {
        "token_embedding/embedding": (VOCAB, WIDTH),
        "position_embedding/embedding": (16, WIDTH),
        "blocks/attention_norm/scale": (LAYERS, WIDTH),
        "blocks/attention_norm/bias": (LAYERS, WIDTH),
        "blocks/attention/query/kernel": (LAYERS, WIDTH, HEADS, head_dim),
        "blocks/attention/query/bias": (LAYERS, HEADS, head_dim),
        "blocks/attention/key/kernel": (LAYERS, WIDTH, HEADS, head_dim),
        "blocks/attention/key/bias": (LAYERS, HEADS, head_dim),
        "blocks/attention/value/kernel": (LAYERS, WIDTH, HEADS, head_dim),
        "blocks/attention/value/bias": (LAYERS, HEADS, head_dim),
        "blocks/attention/output/kernel": (LAYERS, HEADS, head_dim, WIDTH),
        "blocks/attention/output/bias": (LAYERS, WIDTH),
        "blocks/mlp_norm/scale": (LAYERS, WIDTH),
        "blocks/mlp_norm/bias": (LAYERS, WIDTH),
        "blocks/mlp/up/kernel": (LAYERS, WIDTH, 4 * WIDTH),
        "blocks/mlp/up/bias": (LAYERS, 4 * WIDTH),
        "blocks/mlp/down/kernel": (LAYERS, 4 * WIDTH, WIDTH),
        "blocks/mlp/down/bias": (LAYERS, WIDTH),
        "final_norm/scale": (WIDTH,),
        "final_norm/bias": (WIDTH,),
    }
    assert parameter_shapes(LLAMA_TINY) == {
        "token_embedding/embedding": (VOCAB, WIDTH),
        "blocks/attention_norm/scale": (LAYERS, WIDTH),
        "blocks/attention/query/kernel": (LAYERS, WIDTH, HEADS, head_dim),
        "blocks/attention/key/kernel": (LAYERS, WIDTH, 2, head_dim),
        "blocks/attention/value/kernel": (LAYERS, WIDTH, 2, head_dim),
        "blocks/attention/output/kernel": (LAYERS, HEADS, head_dim, WIDTH),
        "blocks/mlp_norm/scale": (LAYERS, WIDTH),
        "blocks/mlp/gate/kernel": (LAYERS, WIDTH, 40),
        "blocks/mlp/up/kernel": (LAYERS, WIDTH, 40),
        "blocks/mlp/down/kernel": (LAYERS, 40, WIDTH),
        "final_norm/scale": (WIDTH,),
        "lm_head/kernel": (WIDTH, VOCAB),
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_num_parameters_counts_what_is_there(config):
    assert config.num_parameters == sum(map(math.prod, parameter_shapes(config).values()))


def test_num_parameters_of_published_models():
    assert GPT2Config().num_parameters == 124_439_808  # GPT-2 small
    llama2_7b = LlamaConfig(
        vocab_size=32000, num_layers=32, num_heads=32, embed_dim=4096, mlp_dim=11008
    )
    assert llama2_7b.num_parameters == 6_738_415_616
    llama3_8b = LlamaConfig(
        vocab_size=128256,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        embed_dim=4096,
        mlp_dim=14336,
        rope_theta=500000.0,
    )
    assert llama3_8b.num_parameters == 8_030_261_248


def sharding_spec(name: str, ndim: int, rules: Any) -> P:
    for pattern, axes in rules:
        if re.search(pattern, name):
            return P(*[None] * (ndim - len(axes)), *axes)
    return P()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tensor_parallel_rules_split_every_matrix_and_keep_the_loss(name, batch):
    config = dataclasses.replace(CONFIGS[name], vocab_size=32)
    graphdef, values = lively(config)
    rules = tensor_parallel_rules(name)
    assert rules == merge(graphdef, values).tensor_parallel_rules
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    specs = {key: sharding_spec(key, value.ndim, rules) for key, value in values.items()}
    whole = {key for key, spec in specs.items() if "model" not in spec}
    assert {key.split("/")[-2] for key in whole} <= {
        "attention_norm",
        "mlp_norm",
        "final_norm",
        "position_embedding",
        "output",
        "down",
    }
    assert not any(key.endswith("kernel") for key in whole)

    def loss(values):
        with activation_rules({"sequence": "model"}):
            return merge(graphdef, values).loss(batch)[0]

    shardings = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
    with jax.set_mesh(mesh):
        split = jax.jit(loss)(jax.device_put(values, shardings))
    # The same sums over 19 tokens of about 3.5 nats, in another order.
    whole = jax.jit(lambda values: merge(graphdef, values).loss(batch)[0])(values)
    np.testing.assert_allclose(split, whole, rtol=2e-6)


# --- from the run's configuration ----------------------------------------------------------------


def test_build_model_takes_what_the_run_is_told():
    told = ModelConfig(name="llama", num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=24)
    model = nnx.eval_shape(lambda: build_model(told, 50)(nnx.Rngs(0)))
    assert isinstance(model, Llama)
    assert model.config == LlamaConfig(
        vocab_size=50,
        max_seq_len=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=24,
        mlp_dim=128,  # 64, rounded up to whole tiles
        loss_chunk="auto",
    )
    assert model.lm_head is not None
    told = ModelConfig(
        name="gpt2", vocab_size=64, dropout=0.1, remat="dots", norm_eps=1e-6, loss_chunk=None
    )
    assert as_decoder_config(told, 50) == GPT2Config(
        vocab_size=64,
        max_seq_len=256,
        num_layers=4,
        num_heads=4,
        embed_dim=256,
        mlp_dim=1024,
        dropout=0.1,
        norm_eps=1e-6,
        remat="dots",
    )
    assert as_decoder_config(ModelConfig(tie_embeddings=False), 50).tie_embeddings is False


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: build_model(ModelConfig(vocab_size=40), 50),
            r"vocab_size=40 .* 50 tokens; use 50",
        ),
        (lambda: build_model(ModelConfig(num_kv_heads=2), 50), "num_kv_heads=2: gpt2 has one"),
        (lambda: tensor_parallel_rules("bert"), "'bert' has no .*; use one of gpt2, llama"),
        (lambda: GPT2Config(embed_dim=100, num_heads=12), "embed_dim=100 .* use embed_dim=108"),
        (lambda: GPT2Config(num_layers=0), "num_layers=0 must be a whole number of at least 1"),
        (lambda: GPT2Config(dropout=1.0), r"dropout=1.0 is not in \[0, 1\)"),
        (
            lambda: GPT2Config(remat="some"),
            "remat='some' is unknown; use one of none, full, attention, dots",
        ),
        (lambda: LlamaConfig(**SIZES, num_kv_heads=3), "num_heads=4 .* num_kv_heads=3"),
        (lambda: LlamaConfig(**SIZES | {"embed_dim": 12}), "12 / num_heads=4 = 3 is odd"),
        (lambda: LlamaConfig(**SIZES, rope_theta=0.5), "rope_theta=0.5 must be above 1"),
        (lambda: GPT2Config(loss_chunk=0), "loss_chunk=0 must be a whole number of at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_an_array_exists(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_tokens_of_the_wrong_kind_are_refused():
    model = abstract(GPT2_TINY)
    with pytest.raises(ValueError, match="length 17, but the model takes at most max_seq_len=16"):
        model(jnp.zeros((1, 17), jnp.int32))
    with pytest.raises(ValueError, match=r"shape \(5,\), but must be \[batch, seq\]"):
        model(jnp.zeros((5,), jnp.int32))
    with pytest.raises(TypeError, match="tokens are float32, but must be integers"):
        model(jnp.zeros((1, 5)))


def test_a_token_outside_the_table_makes_the_loss_nan_rather_than_plausible():
    model = merge(*lively(GPT2_TINY))
    tokens = jnp.array([[1, VOCAB, 2]])
    logits = jax.jit(lambda tokens: model(tokens))(tokens)
    assert jnp.isnan(logits[0, 1]).all()
