"""Layers whose weights wait in host memory train as they do when everything is on the device.

Losses, norms and weights are compared with a run of the same plan without offload. Both compute
the same products, but a layer is a program of its own here and is computed again from its input in
the backward pass, so kernels are fused otherwise; gradients of one microbatch are reduced before
they are added up, also at stages 0 and 1. So runs are equal up to rounding: `TOLERANCE`.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.pipeline_runs import function_model, linen_model, small
from tests.support.recipe import RECIPE
from tests.support.small_models import VOCAB, Recurrent, UserText, reference_model, regression_loss
from tests.support.trajectories import (
    STEPS,
    TOLERANCE,
    Trajectory,
    plan_for,
    regression_batch,
    text_batch,
    train_for,
)
from zerojax.models.losses import next_token
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state

STREAMED = {"params": "host", "opt_state": "host", "min_elements": 30, "slice_elements": 60}
"""Weights of layers, masters and moments on the host; a layer is several slices."""
DROPOUT = {"layers": 3, "width": 16, "rate": 0.2, "rate_behind": 0.2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train."""

    zero: int
    model: int = 1
    microbatches: int = 1
    clip_norm: float | None = None
    precision: str = "fp32"
    more: tuple[tuple[str, Any], ...] = ()
    is_slow: bool = True

    def __str__(self) -> str:
        name = f"zero{self.zero}-model{self.model}-m{self.microbatches}-clip{self.clip_norm}"
        return "-".join([name, self.precision, *(f"{k}_{v}" for k, v in self.more)])


HOST_INPUTS = (("activations", "host"),)
IN_BACKWARD = (("update_in_backward", True),)
ON_DEVICE = (("opt_state", "device"),)
IN_SHARES = (("opt_state", {"device": 0.05, "host": 0.95}),)
ROWS = [
    Row(zero=3, model=2, microbatches=4, clip_norm=0.05, more=HOST_INPUTS, is_slow=False),
    Row(zero=1, model=2, more=IN_BACKWARD),
    *(Row(zero=zero, microbatches=m) for zero in range(4) for m in (1, 4)),
    *(Row(zero=zero, model=2, clip_norm=0.05, more=ON_DEVICE) for zero in range(4)),
    *(Row(zero=zero, more=IN_BACKWARD) for zero in range(4)),
    Row(zero=3, model=2, more=(*IN_BACKWARD, *HOST_INPUTS, *ON_DEVICE)),
    Row(zero=1, more=(*IN_BACKWARD, *IN_SHARES)),
]


def rows():
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(row, marks=marks[row.is_slow], id=str(row)) for row in ROWS]


def make_optimizer(clip_norm: float | None = None) -> Any:
    """AdamW whose eps keeps rounding noise from becoming full updates."""
    return zerojax.adamw(1e-2, eps=1e-5, **{**RECIPE, "clip_norm": clip_norm})


def both(model: Any, offload: dict[str, Any], **options: Any) -> tuple[Trajectory, Trajectory]:
    """(streamed, with everything on the device)."""
    options = {"optimizer": make_optimizer(), "persistence_threshold": 50, **options}
    streamed = train_for(model, offload={**STREAMED, **offload}, **options)
    return streamed, train_for(model, **options)


def assert_equal(run: Trajectory, expected: Trajectory, tolerance: float = TOLERANCE) -> None:
    """Losses, relative norms and weights are the same up to `tolerance`, while layers stream."""
    assert_streams(run)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=tolerance)
    np.testing.assert_allclose(run.norms, expected.norms, rtol=4 * tolerance)
    mine, other = (to_portable_state(one.plan, one.state)["params"] for one in (run, expected))
    for name, value in mine.items():
        # A step of AdamW is 1e-2 for each weight, whatever its gradient: hundreds of tolerances.
        np.testing.assert_allclose(value, other[name], rtol=0, atol=100 * tolerance, err_msg=name)
    fell = expected.losses[0] - expected.losses[-1]
    assert fell > 0.01, f"the loss fell by {fell}: equality is cheap when nothing is learnt"


def assert_streams(run: Trajectory) -> None:
    """The weights of layers, and nothing else of `params`, are in host memory."""
    layout = run.plan.offload
    assert layout is not None
    on_host = {n for n, x in run.state["params"].items() if x.sharding.memory_kind == "pinned_host"}
    assert on_host == layout.streamed
    assert on_host
    assert len(on_host) < len(run.state["params"])


@pytest.mark.thorough
@pytest.mark.parametrize("row", rows())
def test_layers_from_the_host_train_as_on_the_device(row):
    run, expected = both(
        small(**DROPOUT),
        dict(row.more),
        mesh={"model": row.model, "data": 4 // row.model},
        devices=4,
        zero=row.zero,
        num_microbatches=row.microbatches,
        optimizer=make_optimizer(row.clip_norm),
        steps=STEPS if row.is_slow else 6,
    )
    assert_equal(run, expected)


# Other models


class Shared(nnx.Module):
    """Every layer also reads a parameter that is not stacked, and adds to what travels along."""

    def __init__(self, rngs: nnx.Rngs, width: int = 12) -> None:
        self.embed = nnx.Embed(VOCAB - 3, width, rngs=rngs)
        self.shared = nnx.Linear(width, width, rngs=rngs)
        make = lambda rngs: nnx.Linear(width, width, rngs=rngs)  # noqa: E731
        self.blocks = nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(3))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        kernel = self.shared.kernel[...]

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def apply(block: nnx.Linear, carry: Any) -> Any:
            x, total, count = carry
            y = jnp.tanh(block(x) + x @ kernel)
            return x + y, total + jnp.mean(y * y), count + 1

        start = self.embed(tokens), jnp.float32(0), jnp.int32(0)
        x, total, count = apply(self.blocks, start)
        return self.embed.attend(x) + total / count

    def loss(self, batch: dict) -> Any:
        return next_token(self(batch["tokens"]), batch["targets"])


MODELS = {
    # Dimensions that no mesh divides, so that shards are padded; a tied head; attention of flax.
    "nnx": lambda: (UserText, {}),
    "linen": linen_model,
    # Reads all its parameters before the loop.
    "functions": lambda: (
        function_model()[0],
        {"loss": regression_loss, "batch": regression_batch},
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "zero"),
    [
        ("functions", 2),
        *(pytest.param(kind, 3, marks=pytest.mark.slow) for kind in MODELS),
        *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in MODELS),
    ],
)
def test_any_model_with_a_loop_over_layers_streams(kind, zero):
    model, options = MODELS[kind]()
    run, expected = both(model, {}, devices=4, zero=zero, steps=6, **options)
    assert_equal(run, expected)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_reference_models_stream(precision, remat):
    """A loss in bfloat16 has 8 bits, so sums in another order differ by 1/256 of what they add."""
    model = reference_model("llama", remat=remat, dropout=0.1)
    run, expected = both(model, {}, mesh={"model": 2, "data": 2}, devices=4, precision=precision)
    assert_streams(run)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=2e-3)
    assert expected.losses[0] - expected.losses[-1] > 0.02


OTHERS = {
    "a frozen stack": (small(layers=3), {"freeze": ("blocks/linear/bias",)}),
    "replicas": (small(layers=3), {"mesh": {"replica": 2, "data": 2}, "num_microbatches": 2}),
    # The head's table is tied to the embedding's, and a parameter of one row is in every layer.
    "a shared parameter": (Shared, {"steps": 6}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "options"), OTHERS.values(), ids=OTHERS)
def test_other_models_and_meshes_stream(model, options):
    run, expected = both(model, {}, devices=4, zero=3, **options)
    assert_equal(run, expected)
    assert run.state["frozen"].keys() == set(options.get("freeze", ()))


# What else a run does


def streamed_plan(model: Any, *, in_backward: bool = False, **options: Any) -> Any:
    """A plan on two devices at stage 3."""
    offload = {**STREAMED, "update_in_backward": in_backward}
    options = {"optimizer": make_optimizer(), "persistence_threshold": 50, **options}
    return plan_for(model, devices=2, zero=3, offload=offload, **options)


@pytest.mark.thorough
def test_evaluation_streams_and_changes_nothing():
    """Dropout is off; a batch in one piece gives the sums that the device tier gives."""
    model = small(**DROPOUT)
    plan, plain = streamed_plan(model), plan_for(model, devices=2, zero=3, persistence_threshold=50)
    state, other = init_state(plan, 0), init_state(plain, 0)
    batch = jax.device_put(text_batch(0), plan.batch_sharding)
    evaluate = build_evaluation(plan)
    found, expected = evaluate(state, batch), build_evaluation(plain)(other, batch)
    assert float(found["weight"]) == float(expected["weight"])
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-6)
    again = evaluate(state, batch)
    assert float(again["loss"]) == float(found["loss"])


class Gated(nnx.Module):
    """Layers with a matrix `gate` of zeros, whose gradient is as large as a batch says."""

    def __init__(self, rngs: nnx.Rngs, width: int = 12) -> None:
        self.embed = nnx.Embed(VOCAB - 3, width, rngs=rngs)

        def make(rngs: nnx.Rngs) -> Any:
            gate = nnx.Linear(width, width, use_bias=False, rngs=rngs)
            gate.kernel[...] = jnp.zeros((width, width))
            return nnx.Dict(linear=nnx.Linear(width, width, rngs=rngs), gate=gate)

        self.blocks = nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(3))

    def loss(self, batch: dict) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry, 0), out_axes=nnx.Carry)
        def apply(block: Any, x: jax.Array, factor: jax.Array) -> jax.Array:
            return x + jnp.tanh(block["linear"](x)) + factor[:, None, None] * block["gate"](x)

        x = apply(self.blocks, self.embed(batch["tokens"]), batch["factors"].T)
        return next_token(self.embed.attend(x), batch["targets"])


def gated_batch(index: int, factor: float = 1.0) -> dict[str, np.ndarray]:
    """A text batch with the factor of the second layer."""
    factors = np.ones((32, 3), np.float32)
    factors[:, 1] = factor
    return {**text_batch(index), "factors": factors}


@pytest.mark.thorough
def test_an_update_in_backward_leaves_out_the_layer_whose_gradient_is_not_finite():
    """The loss is finite, since the gates are 0; the squares of one layer's gradient are not."""
    plan = streamed_plan(Gated, in_backward=True, batch=gated_batch)
    step, state = build_step(plan), init_state(plan, 0)
    before = jax.tree.map(np.asarray, to_portable_state(plan, state)["params"])
    spoilt = jax.device_put(gated_batch(0, 1e30), plan.batch_sharding)
    state, metrics = step(state, spoilt)
    after = jax.tree.map(np.asarray, to_portable_state(plan, state)["params"])
    assert plan.offload.streamed == {"blocks/gate/kernel", "blocks/linear/kernel"}
    for name in plan.offload.streamed:
        moved = np.any(after[name] != before[name], axis=(1, 2))
        assert moved.tolist() == [True, False, True], name
        assert np.all(np.isfinite(after[name]))
    assert list(plan.abstract_state["params"])[int(metrics["bad_leaf"])] == "blocks/gate/kernel"
    assert not np.isfinite(metrics["grad_norm"])
    assert int(metrics["skipped"]) == 0
    state, metrics = step(state, jax.device_put(gated_batch(1), plan.batch_sharding))
    assert int(metrics["bad_leaf"]) == -1


@pytest.mark.thorough
@pytest.mark.parametrize("in_backward", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_loss_that_is_not_finite_changes_nothing(in_backward):
    given = lambda index: {**text_batch(index), "weights": np.ones((32, 16), np.float32)}  # noqa: E731
    plan = streamed_plan(small(layers=3), in_backward=in_backward, batch=given)
    step, state = build_step(plan), init_state(plan, 0)
    state, _ = step(state, jax.device_put(given(0), plan.batch_sharding))
    before = jax.tree.map(np.asarray, to_portable_state(plan, state))
    bad = given(1)
    bad["weights"] = np.full((32, 16), np.inf, np.float32)
    state, metrics = step(state, jax.device_put(bad, plan.batch_sharding))
    assert int(metrics["skipped"]) == 1
    after = jax.tree.map(np.asarray, to_portable_state(plan, state))
    for part in ("params", "opt_state"):
        for old, new in zip(
            jax.tree.leaves(before[part]), jax.tree.leaves(after[part]), strict=True
        ):
            assert old.tobytes() == new.tobytes()


@pytest.mark.thorough
@pytest.mark.parametrize("in_backward", [False, True])
def test_layers_without_a_large_array_stay_on_the_device(in_backward):
    offload = {**STREAMED, "min_elements": 10_000, "update_in_backward": in_backward}
    options = {"optimizer": make_optimizer(), "devices": 2, "zero": 3, "steps": 3}
    run = train_for(small(layers=3), offload=offload, **options)
    assert not run.plan.offload.streamed
    expected = train_for(small(layers=3), **options)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=TOLERANCE)


# What is refused


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (small(layers=4), {"mesh": {"stage": 2}}, "cannot be combined with .*stage=2"),
        (
            Recurrent,
            {"loss": regression_loss, "batch": regression_batch},
            "needs layers that pipeline",
        ),
        (reference_model("gpt2", matmul_dtype="fp8"), {}, "cannot be combined with 8-bit products"),
    ],
    ids=["stages", "no layer loop", "8-bit products"],
)
def test_a_model_that_cannot_stream_is_refused(model, options, message):
    with pytest.raises(ValueError, match=message) as refusal:
        plan_for(model, devices=2, offload=STREAMED, optimizer=make_optimizer(), **options)
    assert "on the device" in str(refusal.value), "the remedy is missing"


@pytest.mark.parametrize(
    ("offload", "options", "message"),
    [
        ({}, {"num_microbatches": 2}, "num_microbatches=2 cannot be accumulated"),
        ({}, {"optimizer": make_optimizer(1.0)}, "clipped to clip_norm=1; use clip_norm=None"),
        ({}, {"precision": "fp16"}, "use precision bf16 or fp32"),
    ],
    ids=["microbatches", "clipping", "float16"],
)
def test_what_an_update_in_backward_cannot_do_is_refused(offload, options, message):
    given = {**STREAMED, "update_in_backward": True, **offload}
    options = {"optimizer": make_optimizer(), **options}
    with pytest.raises(ValueError, match=message):
        plan_for(small(layers=4), devices=2, zero=1, offload=given, **options)


def test_a_share_of_the_device_is_for_parameters_outside_of_the_layers():
    def plan(shares):
        given = {**STREAMED, "update_in_backward": True, "opt_state": shares}
        options = {"optimizer": make_optimizer(), "offload": given}
        return plan_for(small(layers=4), devices=2, zero=1, **options)

    with pytest.raises(ValueError, match="same memory") as refusal:
        plan({"device": 0.95, "host": 0.05})
    device, host = re.findall(r"(?:device|host): ([\d.]+)", str(refusal.value))
    for name, leaf in plan({"device": float(device), "host": float(host)}).offload.leaves.items():
        tiers = {tier for tier, count in leaf.counts.items() if count}
        assert tiers == {"host" if name.startswith("blocks/") else "device"}
