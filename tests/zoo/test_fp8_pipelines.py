"""8-bit products over pipeline stages: losses and histories of one device, under every schedule.

A history is the gradient of what one stage computes of one microbatch; the largest of all is what a
step without a pipeline gives. So after one step it is that of the whole batch, layer by layer.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from tests.support.pipeline_runs import train
from tests.support.refusals import Refusal
from tests.support.small_models import VOCAB, linen_loss, reference_model
from tests.support.trajectories import plan_for, train_for
from tests.zoo.test_fp8_training import LOSS_TOLERANCE, check_same_histories
from zerojax.zoo import fp8

LAYERS = 4


def model_of(name="gpt2", **options):
    return reference_model(name, num_layers=LAYERS, embed_dim=16, matmul_dtype="fp8", **options)


@functools.cache
def one_device(steps, name="gpt2"):
    return train_for(model_of(name), steps=steps, devices=1)


CASES = [
    ("data 2 stage 2", 1, "1f1b", "residuals", (3, 1), 2, "none"),
    ("data 2 stage 2", 3, "zb_v", "residuals", (1, 1, 1, 1), 4, "dots"),
    ("data 4 stage 2", 3, "interleaved(2)", "input", (1, 1, 1, 1), 4, "none"),
    ("data 2 stage 4", 0, "1f1b", "input", (1, 1, 1, 1), 8, "full"),
    ("data 2 stage 2 model 2", 2, "zb_h1", "residuals", (2, 2), 4, "none"),
    ("data 2 stage 2", 1, "gpipe", "residuals", (1, 3), 4, "full"),
    ("replica 2 data 2 stage 2", 2, "1f1b_classic", "input", (2, 2), 2, "dots"),
    ("data 1 stage 2", 0, "zb_h1", "input", (3, 1), 2, "full"),
]
"""(mesh, ZeRO stage, schedule, stash, layers of each part, microbatches, remat)."""


def options_of(mesh, zero, schedule, stash, layers, microbatches, remat):
    words = mesh.split()
    sizes = {axis: int(size) for axis, size in zip(words[::2], words[1::2], strict=True)}
    return model_of(remat=remat), {
        "mesh": sizes,
        "devices": int(np.prod(list(sizes.values()))),
        "zero": zero,
        "pipeline_schedule": schedule,
        "stash": stash,
        "partition": layers,
        "num_microbatches": microbatches,
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_and_histories_are_those_of_one_device(case):
    model, options = options_of(*case)
    run = train(model, steps=6, **options)
    assert run.plan.pipeline is not None
    np.testing.assert_allclose(run.losses, one_device(6).losses, atol=LOSS_TOLERANCE, rtol=0)
    assert run.losses[-1] < run.losses[0] - 0.01
    check_same_histories(run.state["extras"], one_device(6).state["extras"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", [*CASES[:3], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[3:])]
)
def test_after_one_step_each_layer_has_the_largest_of_the_whole_batch(case):
    """Parameters are the same still, so only the order of float32 sums is free."""
    model, options = options_of(*case)
    found = train(model, steps=1, **options).state["extras"]
    wanted = one_device(1).state["extras"]
    assert found.keys() == wanted.keys()
    for name, history in found.items():
        np.testing.assert_allclose(history, wanted[name], rtol=1e-4, err_msg=name)
        newest = np.asarray(history)[:, :, 0]
        assert (newest > 0).all()
        assert len(np.unique(newest[:, fp8.OUTPUT_GRADIENT])) == LAYERS, "rows of other layers"


# --- state before and behind the layers -------------------------------------------------------


class LinenFp8Block(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x, _):
        dense = linen.Dense(self.width, dot_general_cls=linen.fp8_ops.Fp8DirectDotGeneralOp)
        return x + jnp.tanh(dense(x)), None


class LinenFp8Layers(linen.Module):
    """Flax's own 8-bit layers: one before the loop over layers, one in it, one behind it."""

    @linen.compact
    def __call__(self, tokens):
        dense = functools.partial(linen.Dense, dot_general_cls=linen.fp8_ops.Fp8DirectDotGeneralOp)
        x = dense(16, name="before")(linen.Embed(VOCAB - 3, 16)(tokens))
        scanned = linen.scan(
            LinenFp8Block,
            variable_axes={"params": 0, "_overwrite_with_gradient": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = scanned(16)(x, None)
        return dense(VOCAB - 3, name="behind")(x)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 2), ("zb_h1", 4)])
def test_state_of_embedding_and_head_is_that_of_one_device_too(schedule, microbatches):
    options = {"loss": linen_loss, "steps": 3}
    one = train_for(LinenFp8Layers(), devices=1, **options)
    many = train(
        LinenFp8Layers(),
        mesh={"data": 2, "stage": 2},
        devices=4,
        pipeline_schedule=schedule,
        num_microbatches=microbatches,
        **options,
    )
    overwritten = many.plan.model.overwritten
    for part in ("before", "ScanLinenFp8Block_0", "behind"):
        assert any(part in name for name in overwritten), (part, overwritten)
    for name in overwritten:
        np.testing.assert_allclose(many.state["extras"][name], one.state["extras"][name], rtol=1e-3)
    np.testing.assert_allclose(many.losses, one.losses, atol=LOSS_TOLERANCE, rtol=0)


@pytest.mark.thorough
def test_state_that_nothing_reads_becomes_zero_as_without_a_pipeline():
    """Its gradient is zero."""

    def with_idle_state(rngs):
        model = model_of()(rngs)
        model.idle = fp8.Overwritten(jnp.ones(3))
        return model

    one = train_for(with_idle_state, devices=1, steps=1)
    many = train(with_idle_state, mesh={"stage": 2}, devices=2, num_microbatches=2, steps=1)
    for run in (one, many):
        np.testing.assert_array_equal(run.state["extras"]["idle"], np.zeros(3))


# --- what cannot be cut -----------------------------------------------------------------------


class Shared(nnx.Module):
    """Layers that scale what they read by one history for all ("whole"), by that of the head too
    ("head"), or by their own ("apart")."""

    def __init__(self, rngs, way):
        self.embed = nnx.Embed(VOCAB - 3, 8, rngs=rngs)
        self.kernels = nnx.Param(jnp.ones((LAYERS, 8, 8)) / 8)
        self.output = nnx.Param(jnp.ones((8, VOCAB - 3)))
        one = (3, fp8.HISTORY_LENGTH)
        self.history = fp8.Overwritten(jnp.ones(one if way == "whole" else (LAYERS, *one)))
        self.of_head = fp8.Overwritten(jnp.ones(one))
        self.way = way

    def __call__(self, tokens):
        whole, history = self.way == "whole", self.history[...]

        def layer(x, row):
            kernel, mine = row
            return fp8.fp8_dot(x, kernel, history if whole else mine, 1), None

        rows = jnp.zeros((LAYERS, 1)) if whole else history
        x, _ = jax.lax.scan(layer, self.embed(tokens), (self.kernels[...], rows))
        last = history[0] if self.way == "head" else self.of_head[...]
        return fp8.fp8_dot(x, self.output[...], last, 1)


@pytest.mark.parametrize(
    ("way", "value", "remedy"),
    [
        ("whole", "history loop 4", "slice row stage=1"),
        ("head", 'history "by the layers" "after the layers"', "separate stage=1"),
    ],
)
def test_state_of_several_stages_is_refused(way, value, remedy):
    def plan(given):
        way, stages = given
        mesh = {"stage": stages, "data": 8 // stages}
        model = lambda rngs: Shared(rngs, way)  # noqa: E731
        plan_for(model, mesh=mesh, num_microbatches=2, loss=linen_loss)

    Refusal((way, 2), value, remedy, [("apart", 2), (way, 1)]).check(plan)
