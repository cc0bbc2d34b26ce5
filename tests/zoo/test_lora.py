"""Adapters: what they compute, what is trained of a model that has them, and on which meshes."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.marks import slow
from tests.support.small_models import VOCAB, reference_model
from tests.support.trajectories import TOLERANCE, plan_for, train_for
from zerojax.config import ConfigError, LoraConfig, ModelConfig, RunConfig, from_dict, load
from zerojax.models.losses import next_token
from zerojax.operators.marks import inner_programs
from zerojax.step.build import build_step
from zerojax.tracing import trees
from zerojax.training.loading import load_run
from zerojax.training.run_file import plan_from_config, run_from_config
from zerojax.zoo import Stages, add_lora, build_model, merge_lora
from zerojax.zoo.layers import Projection
from zerojax.zoo.lora import adapted_kernels, merged_kernel

LORA = LoraConfig(rank=3, alpha=12.0)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 9)), jnp.int32)
ROUNDING = 1e-5
"""|difference of logits| of float32 sums in another order, through adapters that change logits by
more than 0.1. Measured: 4e-7 with JAX 0.10, 2.8e-6 with 0.12."""


def sizes(name, **changes):
    kv_heads = {"num_kv_heads": 2} if name == "llama" else {}
    options = {"num_layers": 2, "num_heads": 4, "embed_dim": 32, "max_seq_len": 16, **kv_heads}
    return from_dict(ModelConfig, {"name": name, **options, **changes})


@functools.cache
def base(name):
    """A reference model as an instance; nobody writes to it."""
    return build_model(sizes(name), VOCAB)(nnx.Rngs(1))


def with_values(model, seed=3):
    """The same module with B away from zero, so that adapters do something."""
    random = np.random.default_rng(seed)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if trees.path_name(path).endswith("lora/b"):
            leaf[...] = jnp.asarray(random.normal(size=leaf.shape), jnp.float32)
    return model


def parameters(model):
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {trees.path_name(path): np.asarray(leaf[...]) for path, leaf in flat}


# --- what is computed -------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", [slow("gpt2"), "llama"])
def test_a_merged_model_computes_what_its_adapters_do(name):
    before = parameters(base(name))
    adapted = add_lora(base(name), LORA)
    plain = base(name)(TOKENS)
    # B is zero in new adapters: not a bit changes.
    np.testing.assert_array_equal(adapted(TOKENS), plain)
    apart = with_values(adapted)(TOKENS)
    merged = merge_lora(adapted)
    assert np.abs(apart - plain).max() > 0.1
    np.testing.assert_allclose(merged(TOKENS), apart, atol=ROUNDING)
    assert not adapted_kernels(parameters(merged))
    assert len(adapted_kernels(parameters(adapted))) == {"gpt2": 6, "llama": 7}[name]
    for known, value in parameters(base(name)).items():
        np.testing.assert_array_equal(value, before[known])


def test_a_kernel_is_merged_layer_by_layer_in_its_own_dtype():
    random = np.random.default_rng(0)
    kernel, a, b = (
        random.normal(size=shape).astype(np.float32)
        for shape in [(2, 4, 6, 5), (2, 4, 6, 3), (2, 3, 5)]
    )
    wanted = np.stack([kernel[i] + 0.5 * np.einsum("hdr,re->hde", a[i], b[i]) for i in (0, 1)])
    np.testing.assert_allclose(merged_kernel(kernel, a, b, 0.5), wanted, atol=1e-5)
    np.testing.assert_allclose(merged_kernel(kernel[0], a[0], b[0], 0.5), wanted[0], atol=1e-5)
    narrow = merged_kernel(jnp.asarray(kernel, jnp.bfloat16), a, b, 0.5)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(np.float32), wanted, rtol=0.02, atol=0.05)


def products(program):
    """(shape of the result) of every matrix product of a traced program, loop bodies once."""
    found = []
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            found.append(equation.outvars[0].aval.shape)
        for inner in inner_programs(equation.params):
            found += products(inner)
    return found


@pytest.mark.thorough
def test_the_product_of_a_and_b_is_never_made():
    adapted = add_lora(base("llama"), LORA)
    batch = {"tokens": TOKENS, "targets": TOKENS}
    graphdef, state = nnx.split(adapted)
    program = jax.make_jaxpr(lambda state: nnx.merge(graphdef, state).loss(batch))(state)
    found = products(program.jaxpr)
    kernels = {value.shape[1:] for name, value in parameters(adapted).items() if "/kernel" in name}
    assert sum(shape[-1] == LORA.rank for shape in found) == 7  # x A of each projection
    assert not kernels & set(found)


@pytest.mark.thorough
def test_the_step_makes_no_gradient_of_a_frozen_kernel():
    """One product less per projection than training everything, besides those of the adapter."""
    plan = plan_for(add_lora(reference_model("llama"), LORA), freeze=LORA.freeze)
    found = products(build_step(plan).trace(plan.abstract_state, plan.abstract_batch).jaxpr.jaxpr)
    kernels = {
        leaf.shape[1:]
        for name, leaf in plan.abstract_state["frozen"].items()
        if name.startswith("blocks/") and name.endswith("/kernel")
    }
    assert len(kernels) == 5
    # A gradient of a kernel has its shape, or that of its transpose.
    transposed = {shape[::-1] for shape in kernels} | {(*s[1:], s[0]) for s in kernels}
    assert not (kernels | transposed) & set(found)


@pytest.mark.thorough
def test_dropout_of_an_adapter_acts_in_training_and_nowhere_else():
    adapted = with_values(add_lora(base("gpt2"), LoraConfig(rank=3, dropout=0.5)))
    first, second = adapted(TOKENS), adapted(TOKENS)
    assert np.abs(first - second).max() > 1e-2
    # Merged there is no dropout left; generation, which extends a cache, must have none either.
    cache = adapted.init_cache(2, TOKENS.shape[1])
    hidden, _ = adapted.extend(TOKENS, cache, jnp.int32(0))
    wanted = merge_lora(adapted)(TOKENS)
    np.testing.assert_allclose(adapted.head(hidden), wanted, atol=ROUNDING)
    adapted.eval()
    np.testing.assert_allclose(adapted(TOKENS), wanted, atol=ROUNDING)


# --- what is trained --------------------------------------------------------------------------


@pytest.mark.thorough
def test_only_adapters_have_gradients_and_optimizer_state():
    plan = plan_for(add_lora(reference_model("gpt2"), LORA), freeze=LORA.freeze)
    state = plan.abstract_state
    assert all(name.endswith(("/lora/a", "/lora/b")) for name in state["params"])
    assert not any("lora" in name for name in state["frozen"])
    frozen = sum(math.prod(leaf.shape) for leaf in state["frozen"].values())
    layers, width, hidden = 2, 32, 128
    wanted = layers * LORA.rank * (4 * (width + width) + 2 * (width + hidden))
    assert sum(math.prod(leaf.shape) for leaf in state["params"].values()) == wanted
    moments = [leaf for leaf in jax.tree.leaves(state["opt_state"]) if leaf.ndim]
    assert sum(math.prod(leaf.shape) for leaf in moments) == 2 * wanted
    whole = plan_for(reference_model("gpt2"))
    assert trees.num_bytes(state["opt_state"]) < 0.2 * trees.num_bytes(
        whole.abstract_state["opt_state"]
    )
    for row, count in [("optimizer state", 8 * wanted), ("frozen", 4 * frozen)]:
        assert re.search(rf"{row} +{trees.format_bytes(count)}\n", plan.table())


@functools.cache
def on_one_device(name):
    model = add_lora(reference_model(name), LORA)
    return train_for(model, steps=6, devices=1, freeze=LORA.freeze)


MESHES = {
    "0": slow({"zero": 0}),
    "1-accumulate": slow({"zero": 1, "num_microbatches": 2}),
    "2-replica": slow({"zero": 2, "mesh": {"replica": 2}}),
    "3": slow({"zero": 3}),
    "3-tensor": {"zero": 3, "mesh": {"model": 2, "data": 4}},
    "1-pipeline": slow({"zero": 1, "mesh": {"stage": 2, "data": 4}, "num_microbatches": 4}),
    "3-pipeline-tensor": slow(
        {"zero": 3, "mesh": {"stage": 2, "model": 2, "data": 2}, "num_microbatches": 4}
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("options", MESHES.values(), ids=MESHES)
def test_any_mesh_trains_adapters_as_one_device_does(options):
    one = on_one_device("llama")
    model = add_lora(reference_model("llama"), LORA)
    many = train_for(model, steps=6, freeze=LORA.freeze, persistence_threshold=0, **options)
    np.testing.assert_allclose(many.losses, one.losses, atol=TOLERANCE, rtol=0)
    assert one.losses[4] < one.losses[0] - 1e-4  # the first batch again
    if "model" in options.get("mesh", {}):
        leaves = many.plan.placement.leaves
        for name, axis in [("query/lora/b", 2), ("output/lora/a", 1)]:
            assert leaves[f"blocks/attention/{name}"].axes[axis] == "model"
        assert leaves["blocks/mlp/down/lora/a"].axes[1] == "model"
        assert leaves["blocks/mlp/up/lora/b"].axes[2] == "model"


@pytest.mark.slow
def test_frozen_parameters_keep_every_bit():
    run = on_one_device("llama")
    before = build_model(sizes("llama"), VOCAB)
    start = train_for(add_lora(before, LORA), steps=0, devices=1, freeze=LORA.freeze)
    for name, value in start.state["frozen"].items():
        np.testing.assert_array_equal(run.state["frozen"][name], value)
    moved = [
        np.abs(np.asarray(run.state["params"][name]) - np.asarray(value)).max()
        for name, value in start.state["params"].items()
    ]
    assert min(moved) > 1e-4


@pytest.mark.slow
def test_adapters_beside_8_bit_products():
    """The kernel's product is of 8-bit floats, the adapter's is not."""
    model = add_lora(reference_model("gpt2", matmul_dtype="fp8"), LORA)
    one = train_for(model, steps=6, devices=1, freeze=LORA.freeze)
    many = train_for(model, steps=6, zero=3, persistence_threshold=0, freeze=LORA.freeze)
    np.testing.assert_allclose(
        many.losses, one.losses, atol=1e-4, rtol=0
    )  # as in test_fp8_training


class FlaxLora(nnx.Module):
    """Flax's own adapter, in a model that knows nothing of zerojax."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, 16, rngs=rngs)
        self.hidden = nnx.LoRALinear(16, 16, lora_rank=2, rngs=rngs)
        self.out = nnx.Linear(16, VOCAB, rngs=rngs)

    def loss(self, batch):
        x = self.embed(batch["tokens"])
        return next_token(self.out(x + self.hidden(x)), batch["targets"])


@pytest.mark.slow
def test_flax_adapters_train_alone_too():
    with pytest.raises(ValueError, match=r"none of zerojax's projections.*flax.nnx.LoRALinear"):
        add_lora(FlaxLora(nnx.Rngs(0)), LORA)
    freeze = (r"^(?!.*/lora_[ab]$)",)
    one = train_for(FlaxLora, steps=6, devices=1, freeze=freeze)
    many = train_for(FlaxLora, steps=6, zero=3, persistence_threshold=0, freeze=freeze)
    assert set(many.state["params"]) == {"hidden/lora/lora_a", "hidden/lora/lora_b"}
    np.testing.assert_allclose(many.losses, one.losses, atol=TOLERANCE, rtol=0)


# --- run files --------------------------------------------------------------------------------

RUN = [
    *("model.num_layers=2", "model.num_heads=2", "model.embed_dim=16", "model.max_seq_len=16"),
    *("data.seq_len=16", "global_batch_size=8", "steps=4", "precision=fp32", "eval_every=4"),
    *("eval_batches=1", "model.lora.rank=2", "optimizer.learning_rate=0.01"),
]


def test_a_run_file_freezes_all_but_adapters():
    plan = plan_from_config(load(RunConfig, None, RUN), 8)
    assert len(plan.abstract_state["params"]) == 12
    assert all("/lora/" in name for name in plan.abstract_state["params"])


@pytest.mark.slow
def test_a_run_is_read_back_with_its_adapters(tmp_path):
    config = load(RunConfig, None, [*RUN, f"run_dir={tmp_path / 'run'}"])
    run_from_config(config).close()
    model = load_run(tmp_path / "run").model
    assert model.blocks.mlp.up.lora is not None
    assert np.abs(parameters(model)["blocks/mlp/up/lora/b"]).max() > 0
    np.testing.assert_allclose(merge_lora(model)(TOKENS), model(TOKENS), atol=ROUNDING)


# --- mistakes ---------------------------------------------------------------------------------


@pytest.mark.thorough
def test_mistakes_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"LoraConfig.targets: 'q_proj' matches none of the 6"):
        add_lora(base("gpt2"), LoraConfig(rank=2, targets=("q_proj",)))
    with pytest.raises(ValueError, match=r"attention/key already has an adapter.*merge_lora"):
        add_lora(add_lora(base("gpt2"), LORA), LORA)
    with pytest.raises(ValueError, match=r"lm_head .*adapter.*'blocks/\.\*'"):
        add_lora(base("llama"), LoraConfig(rank=2, targets=(".*",)))
    with pytest.raises(ValueError, match=r"GPT2 has no adapters to merge; zerojax.add_lora"):
        merge_lora(base("gpt2"))
    with pytest.raises(ValueError, match=r"rank=0 means no adapters.*rank=8"):
        add_lora(base("gpt2"), LoraConfig())
    with pytest.raises(TypeError, match=r"cannot add adapters to a dict: pass an nnx.Module"):
        add_lora({}, LORA)
    with pytest.raises(TypeError, match=r"cannot add adapters to a tuple: pass an nnx.Module"):
        add_lora(lambda rngs: (1, 2), LORA)(nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"targets: \[\] selects no projection"):
        LoraConfig(rank=2, targets=())
    with pytest.raises(ConfigError, match=r"rank: -1 must be >= 0"):
        LoraConfig(rank=-1)


@pytest.mark.thorough
def test_a_model_of_the_same_projections_takes_adapters():
    """Not stacked, and stacked twice."""

    def layer(rngs):
        return Projection((4,), (4,), stddev=1.0, use_bias=True, rngs=rngs)

    rngs = nnx.Rngs(0)
    model = Stages(layer(rngs), layer, layer(rngs), num_layers=3, rngs=rngs)
    adapted = with_values(add_lora(model, LoraConfig(rank=2, targets=("",))))
    assert adapted.embed.lora.a.shape == (4, 2)
    assert adapted.blocks.lora.a.shape == (3, 4, 2)
    x = jnp.ones((2, 4))
    np.testing.assert_allclose(merge_lora(adapted)(x), adapted(x), rtol=1e-5)
    nested = nnx.vmap(lambda rngs: nnx.vmap(layer)(rngs.split(2)), in_axes=0)(rngs.split(3))
    twice = add_lora(nnx.Sequential(nested), LoraConfig(rank=2, targets=("",)))
    assert twice.layers[0].lora.b.shape == (3, 2, 2, 4)


def test_the_names_are_public():
    assert zerojax.add_lora is add_lora
    assert zerojax.LoraConfig(rank=4).scale == 4.0
