"""Training steps with the Pallas kernels, in interpret mode, against those of XLA's fusions."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

import zerojax
from tests.support.marks import needs_kernels
from tests.support.recipe import CLIPPED, DECAYED, RECIPE
from zerojax.config import LossScale, ModelConfig
from zerojax.data import shard_batch
from zerojax.offload import slice_pipeline
from zerojax.optim import adam8bit_state
from zerojax.optim.precision import as_precision
from zerojax.placement import slices
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state

STEPS = 3
TOLERANCE = 2e-6
"""Relative to the largest element: the kernels divide and take roots to about two units in the last
place, and float32 has 1.2e-7."""
ZERO_3 = {"data": 2, "zero": 3, "persistence_threshold": 0}


class Model(nnx.Module):
    """Arrays that kernels take whole (128 divides them), with a tail, and smaller than a tile."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 9, rngs=rngs)

    def loss(self, batch: dict) -> jax.Array:
        return ((self.down(nnx.tanh(self.up(batch["x"]))) - batch["y"]) ** 2).mean()


def make_batch(number: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(number).normal(size=(8, 16)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :9])}


class Result(NamedTuple):
    losses: np.ndarray
    norms: np.ndarray
    skipped: list[int]
    state: Any
    plan: Any


def run(kernels: str, mesh: dict, optimizer: Any, precision: Any = "fp32", **more: Any) -> Result:
    size = mesh.get("data", 1) * mesh.get("stage", 1)
    axes = {name: mesh[name] for name in ("data", "stage") if name in mesh}
    options = {name: value for name, value in mesh.items() if name not in axes}
    plan = zerojax.make_plan(
        more.get("model", Model),
        zerojax.make_mesh(axes, devices=jax.devices()[:size]),
        example_batch=more.get("make_batch", make_batch)(0),
        optimizer=optimizer,
        precision=precision,
        kernels=kernels,
        num_microbatches=more.get("num_microbatches"),
        **options,
    )
    state, step, seen = init_state(plan, 0), build_step(plan), []
    for number in range(STEPS):
        state, metrics = step(state, shard_batch(plan, more.get("make_batch", make_batch)(number)))
        seen.append({name: float(x) for name, x in metrics.items()})
    result = jax.tree.map(np.asarray, to_portable_state(plan, state))
    columns = [np.array([row[name] for row in seen]) for name in ("loss", "grad_norm")]
    kept = {name: result[name] for name in ("params", "opt_state", "loss_scale")}
    return Result(*columns, [int(row["skipped"]) for row in seen], kept, plan)


def assert_close(ours: Result, theirs: Result, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=tolerance)
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=tolerance)
    assert ours.skipped == theirs.skipped
    named, structure = jax.tree_util.tree_flatten_with_path(theirs.state)
    for mine, (path, other) in zip(structure.flatten_up_to(ours.state), named, strict=True):
        limit = tolerance * max(np.abs(other).max(), 1e-8)
        np.testing.assert_allclose(mine, other, rtol=0, atol=limit, err_msg=str(path))


@pytest.mark.thorough
@needs_kernels
@pytest.mark.parametrize("stage", range(4))
def test_adamw_at_each_stage(stage: int) -> None:
    options = {"data": 2, "zero": stage, "persistence_threshold": 0}
    tx = zerojax.adamw(1e-2, **{**RECIPE, "clip_norm": 0.05})
    assert_close(run("interpret", options, tx), run("xla", options, tx))


OPTIMIZERS = {
    "lion": zerojax.lion(1e-3, **DECAYED),
    "sgd": zerojax.sgd(1e-2, momentum=0.9, **CLIPPED),
    "lamb": zerojax.lamb(1e-2, **DECAYED),
    "groups": zerojax.adamw(1e-2, **RECIPE, groups={"bias": {"weight_decay": 0.0}}),
    "ema": zerojax.with_ema(zerojax.adamw(1e-2, **RECIPE), 0.9),
    "lamb with ema": zerojax.with_ema(zerojax.lamb(1e-2, **DECAYED), 0.9),
}


@needs_kernels
@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers(name: str) -> None:
    tx = OPTIMIZERS[name]
    assert_close(run("interpret", ZERO_3, tx), run("xla", ZERO_3, tx))


MUON = {"weight_decay": 0.1, "adam_weight_decay": 0.1}


@needs_kernels
@pytest.mark.thorough
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_at_each_stage(stage: int) -> None:
    """Also as optax has it, by XLA. Two kernels are matrices, which ZeRO splits over 2 devices."""
    options = {"data": 2, "zero": stage, "persistence_threshold": 0}
    tx = zerojax.optim.muon(1e-2, dimensions=None, clip_norm=0.05, **MUON)
    plain = optax.chain(optax.clip_by_global_norm(0.05), optax.contrib.muon(1e-2, **MUON))
    ours = run("interpret", options, tx)
    for theirs in (run("xla", options, tx), run("xla", options, plain)):
        # Five rounds multiply what is small in a direction, and its rounding, by up to 3.4445^5.
        assert_close(ours, theirs, 10 * TOLERANCE)


@pytest.fixture
def codes_of_all_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One shard is a block of codes, the other ends in a short block; vectors keep float32."""
    monkeypatch.setattr(adam8bit_state, "SMALLEST_CODED", 512)


@needs_kernels
@pytest.mark.thorough
@pytest.mark.usefixtures("codes_of_all_matrices")
def test_adam_in_eight_bits() -> None:
    """Codes of moments may differ by one where the rounding falls on the edge; losses do not."""
    tx = zerojax.optim.adam8bit(1e-2, **RECIPE)
    ours, theirs = run("interpret", ZERO_3, tx), run("xla", ZERO_3, tx)
    moments = jax.tree.leaves(ours.plan.abstract_state["opt_state"])
    assert sum(x.dtype == np.int8 for x in moments) == 4
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-4)


@pytest.mark.thorough
@needs_kernels
@pytest.mark.parametrize(
    ("name", "stage"), [("adamw", 1), ("adamw", 3), ("lamb", 3), ("adam8bit", 1), ("muon", 3)]
)
@pytest.mark.usefixtures("codes_of_all_matrices")
def test_a_step_that_overflows_is_skipped_and_the_next_ones_are_not(name: str, stage: int) -> None:
    """In float16: gradients and loss scale meet in the kernel of the statistics first."""
    options = {"data": 2, "zero": stage, "persistence_threshold": 0}
    scaled = as_precision("fp16", loss_scale=LossScale(initial=2.0**17, hysteresis=1))
    more = {"dimensions": None} if name == "muon" else {}
    tx = getattr(zerojax.optim, name)(1e-2, **more)
    ours, theirs = run("interpret", options, tx, scaled), run("xla", options, tx, scaled)
    assert ours.skipped[0] == 1
    assert ours.skipped[-1] == 0
    np.testing.assert_array_equal(np.isfinite(ours.norms), np.isfinite(theirs.norms))
    finite = np.isfinite(theirs.norms)
    np.testing.assert_allclose(ours.norms[finite], theirs.norms[finite], rtol=TOLERANCE)
    assert ours.skipped == theirs.skipped
    for mine, other in zip(*(jax.tree.leaves(x.state) for x in (ours, theirs)), strict=True):
        # One step in float16's precision follows one update: 1e-3 of what it changes.
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@needs_kernels
@pytest.mark.thorough
def test_parameters_without_masters_are_rounded_by_the_same_bits() -> None:
    options = as_precision("bf16", param_dtype="bf16", moments_dtype="bf16")
    tx = zerojax.adamw(1e-2, **RECIPE)
    ours, theirs = run("interpret", ZERO_3, tx, options), run("xla", ZERO_3, tx, options)
    for name, other in theirs.state["params"].items():
        mine, other = (np.asarray(x, np.float32) for x in (ours.state["params"][name], other))
        # Stochastic rounding goes the other way only where a number falls between two rounded ones
        # that differ in the last digits of float32: a share of 2^-16 for each of a few steps.
        assert np.mean(mine != other) < 0.05, name
        np.testing.assert_allclose(mine, other, rtol=2**-7, atol=1e-3)


@needs_kernels
@pytest.mark.thorough
def test_a_pipeline() -> None:
    """Without biases: that of a key has the gradient 0, and what rounding leaves of it differs."""
    config = ModelConfig(name="llama", num_layers=2, num_heads=2, embed_dim=16, max_seq_len=8)

    def tokens(number: int) -> dict[str, np.ndarray]:
        drawn = np.random.default_rng(number).integers(0, 32, (8, 9), dtype=np.int32)
        return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}

    more = {
        "model": zerojax.zoo.build_model(config, 32),
        "make_batch": tokens,
        "num_microbatches": 2,
    }
    options, tx = {"data": 1, "stage": 2, "zero": 1}, zerojax.adamw(1e-2, **RECIPE)
    ours, theirs = (run(one, options, tx, **more) for one in ("interpret", "xla"))
    assert_close(ours, theirs)


@needs_kernels
@pytest.mark.thorough
@pytest.mark.parametrize("tiers", ["host", {"device": 0.5, "host": 0.5}], ids=["host", "shares"])
def test_slices_of_a_state(tiers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for each slice, some with a tail. The slices of the host lie on the device here: JAX
    0.12 lowers no kernel in interpret mode in a program with arrays in host memory."""
    monkeypatch.setattr(slices, "HOST_KIND", "device")
    for name in ("to_host", "to_device"):
        monkeypatch.setattr(slice_pipeline, name, lambda x: x)
    cut = {"opt_state": tiers, "slice_elements": 160, "min_elements": 100}
    options, tx = {**ZERO_3, "offload": cut}, zerojax.adamw(1e-2, **RECIPE)
    ours, theirs = run("interpret", options, tx), run("xla", options, tx)
    assert_close(ours, theirs)
    numbers = {name: leaf.num_slices for name, leaf in ours.plan.offload.leaves.items()}
    assert numbers == {"down/kernel": 2, "up/kernel": 4}


def plan_on(mesh: Any, kernels: str, optimizer: Any = None) -> Any:
    optimizer = optimizer or zerojax.adamw(1e-2, **RECIPE)
    return zerojax.make_plan(
        Model, mesh, example_batch=make_batch(0), optimizer=optimizer, kernels=kernels
    )


@needs_kernels
def test_an_optimizers_own_choice_counts_more() -> None:
    axes = ("replica", "data", "expert", "context", "stage", "model")
    mesh = AbstractMesh((1, 8, 1, 1, 1, 1), axes, axis_types=(AxisType.Auto,) * 6)
    chosen = plan_on(mesh, "mosaic_gpu").program.kernels
    assert {name: one.implementation for name, one in chosen.items()} == {
        "update": "mosaic_gpu",
        "statistics": "mosaic_gpu",
    }
    chosen = plan_on(mesh, "mosaic_gpu", zerojax.adamw(1e-2, impl="xla")).program.kernels
    assert chosen["update"].implementation == "xla"
    assert chosen["statistics"].implementation == "mosaic_gpu"


def test_auto_is_xla_where_no_kernel_can_run() -> None:
    chosen = plan_on({"data": 8}, "auto").program.kernels
    assert {one.implementation for one in chosen.values()} == {"xla"}
