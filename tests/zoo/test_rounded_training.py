"""Quantization-aware training: kernels are rounded as exports round them, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.hugging_face_folders import write_folder
from tests.support.small_models import reference_model
from tests.support.trajectories import advance, plan_for, train_for
from tests.zoo.test_hugging_face import trained_model
from tests.zoo.test_quantized_export import WIDE, decoded, write_plain
from zerojax.config import LoraConfig
from zerojax.operators.rounded_weights import FORMATS, rounded, rounded_dot
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.training.hugging_face_export import to_hugging_face
from zerojax.zoo import GPT2Config, add_lora
from zerojax.zoo.hugging_face import from_hugging_face

TOKENS = np.random.default_rng(0).integers(0, 20, (8, 8), np.int32)
BATCH = {"tokens": TOKENS, "targets": np.roll(TOKENS, -1, 1)}


def kernel_of(dtype, shape=(4, 16, 24), seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    values[..., 5] = 0  # an output whose weights are all 0
    return values.astype(dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_numpy_and_compiled_programs_round_to_the_same_bits(name, dtype):
    """Also where XLA may leave out a rounding before: the kernel is a cast of float32 values."""
    wide = kernel_of(np.float32, (64, 24))
    wide[:, 7:15] = np.random.default_rng(1).integers(-254, 255, (64, 8)) / 254  # many ties
    compiled = jax.jit(lambda x: rounded(jnp, x.astype(dtype), name))(wide)
    plain = rounded(np, wide.astype(dtype), name)
    assert compiled.dtype == plain.dtype == dtype
    np.testing.assert_array_equal(np.asarray(compiled), plain)
    groups = plain.astype(np.float32).reshape(-1, FORMATS[name].group or 64, 24)
    values = [
        len(np.unique(np.abs(groups[i, :, j]))) for i in range(len(groups)) for j in range(24)
    ]
    assert max(values) <= FORMATS[name].largest + 1


@pytest.mark.parametrize("name", FORMATS)
def test_the_product_and_its_gradients_are_those_of_the_rounded_kernel(name):
    x, kernel = kernel_of(np.float32, (3, 5, 4, 16), seed=1), kernel_of(np.float32)
    fixed = rounded(np, kernel.reshape(64, 24), name).reshape(kernel.shape)

    def total(dot, kernel):
        product = lambda x, kernel: jnp.sum(jnp.sin(dot(x, kernel)))  # noqa: E731
        return jax.jit(jax.value_and_grad(product, argnums=(0, 1)))(x, kernel)

    found = total(lambda x, kernel: rounded_dot(x, kernel, name, 2), kernel)
    wanted = total(lambda x, kernel: jnp.tensordot(x, kernel, 2), fixed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted)


PLANS = {
    "3": {"zero": 3, "num_microbatches": 2},
    "tensor": {"zero": 1, "mesh": {"data": 4, "model": 2}},
    "stages": {"zero": 1, "mesh": {"data": 4, "stage": 2}, "num_microbatches": 4},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fake_int8", "fake_int4"])
@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_training_is_that_of_one_device(options, name):
    """The first step to rounding. Then a weight may be rounded to the next code, by sums in another
    order: up to 1e-3 of the loss."""
    model = reference_model("llama", matmul_dtype=name, mlp_dim=64)
    found, wanted = train_for(model, **options), train_for(model, devices=1, zero=0)
    np.testing.assert_allclose(found.losses[0], wanted.losses[0], rtol=2e-6)
    np.testing.assert_allclose(found.norms[0], wanted.norms[0], rtol=2e-5)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-3)
    plain = train_for(reference_model("llama", mlp_dim=64), devices=1, zero=0)
    assert abs(plain.losses - wanted.losses).max() > 1e-6
    assert name in " ".join(found.plan.reasons)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "dtype"), [("int8", None), ("int4", "bfloat16")])
def test_an_export_gives_back_the_weights_that_the_run_computed_with(name, dtype, tmp_path):
    """Bit for bit; and a model of the decoded weights gives the logits of the run."""
    folder = write_plain(tmp_path / "plain", WIDE)
    pretrained = from_hugging_face(folder).with_changes(matmul_dtype=f"fake_{name}")
    plan = plan_for(pretrained, batch=lambda index: BATCH, zero=3)
    run = advance(plan, init_state(plan), range(3), batch=lambda index: BATCH)
    trainer = TrainedBy(plan, run.state)
    to_hugging_face(trainer, tmp_path / "codes", quantize=name, dtype=dtype)
    values = decoded(tmp_path / "codes")
    own = to_hugging_face(trainer, tmp_path / "own", dtype=dtype)
    unrounded = decoded(own.folder)
    kernels = [n for n in values if n.startswith("model.layers.") and values[n].ndim == 2]
    assert len(kernels) == 21
    for kernel in kernels:
        weights = unrounded[kernel].astype(dtype or np.float32).T
        seen = jax.jit(lambda x: rounded(jnp, x, name))(weights).T
        decoded_to = values[kernel].astype(weights.dtype)
        np.testing.assert_array_equal(decoded_to, np.asarray(seen), err_msg=kernel)
    if dtype is None:
        write_plain(tmp_path / "decoded", WIDE, values)
        plain = trained_model(from_hugging_face(tmp_path / "decoded"))
        write_plain(tmp_path / "masters", WIDE, unrounded)
        rounding = from_hugging_face(tmp_path / "masters").with_changes(matmul_dtype=f"fake_{name}")
        logits = [jax.jit(x)(BATCH["tokens"]) for x in (plain, trained_model(rounding))]
        np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)


class TrainedBy:
    """A run as `to_hugging_face` takes it."""

    def __init__(self, plan, state):
        self.plan, self.state, self.num_steps = plan, state, 3


@pytest.mark.thorough
def test_stage_3_stores_no_rounded_kernels():
    """Temporaries grow by each further layer as without rounding, to 5 % of a layer's kernels."""

    def growth(name):
        sizes = {"embed_dim": 128, "mlp_dim": 512, "remat": "none"}
        bytes_of = []
        for layers in (2, 6):
            plan = plan_for(
                reference_model("llama", matmul_dtype=name, num_layers=layers, **sizes), zero=3
            )
            step = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile()
            bytes_of.append(step.memory_analysis().temp_size_in_bytes)
        return (bytes_of[1] - bytes_of[0]) / 4

    kernels = 4 * (128 * 128 * 3 + 3 * 128 * 512)
    assert growth("fake_int8") < growth(None) + 0.05 * kernels


def test_what_rounding_does_not_support_is_refused(tmp_path):
    with pytest.raises(ValueError, match="int4.*32 inputs.*24"):
        reference_model("gpt2", matmul_dtype="fake_int4", embed_dim=24)(nnx.Rngs(0))
    with pytest.raises(ValueError, match="'fake_int2' is unknown"):
        GPT2Config(matmul_dtype="fake_int2")
    pretrained = from_hugging_face(write_folder(tmp_path, "llama"))
    with pytest.raises(ValueError, match="adapters cannot be combined"):
        add_lora(pretrained.with_changes(matmul_dtype="fake_int8").to_model(), LoraConfig(rank=2))
