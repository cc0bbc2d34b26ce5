"""Bit widths by schedule: the widths are DeepSpeed's, and a step computes with the width of its
number, on any mesh and after a resume."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.support.refusals import refused
from tests.support.small_models import reference_model
from tests.support.trajectories import failing_at, plan_for, text_batch, train_for
from zerojax.config import BitScheduleConfig, ConfigError, ModelConfig
from zerojax.operators.rounded_weights import FORMATS, rounded
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.initialization import init_state
from zerojax.zoo import GPT2Config
from zerojax.zoo.bit_widths import levels_after
from zerojax.zoo.hugging_face import UnsupportedError

SCHEDULE = BitScheduleConfig(start_step=2, start_bits=6, period=2)
"""With 4 bits at the end: none in steps 1 and 2, then 6, 5, 5, 4, 4, ... bits."""


def widths_of_deepspeed(start_bits: int, target_bits: int, period: int, calls: int) -> list[int]:
    """The width of each call of DeepSpeed's quantizer (0.19.6), by its recurrence."""
    found = []
    for call in range(1, calls + 1):
        if start_bits != target_bits and call >= period:
            period, start_bits = 2 * period, start_bits - 1
        found.append(start_bits)
    return found


@pytest.mark.parametrize(("first", "period"), [(8, 1), (6, 3), (4, 5), (16, 2)])
def test_widths_are_those_of_deepspeed_in_traced_and_plain_numbers(first, period):
    schedule, calls = BitScheduleConfig(start_step=3, start_bits=first, period=period), 70
    plain = [schedule.bits_after(number, 4) for number in range(3 + calls)]
    assert plain == [None] * 3 + widths_of_deepspeed(first, 4, period, calls)
    levels = jax.jit(jax.vmap(lambda number: levels_after(number, schedule, 4)))
    largest = np.asarray(levels(jnp.arange(3 + calls)))[:, 0]
    assert [*largest] == [0 if bits is None else 2 ** (bits - 1) - 1 for bits in plain]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_at_the_target_the_bits_are_those_of_the_export(name, dtype):
    kernel = np.random.default_rng(0).standard_normal((64, 24)).astype(dtype)
    schedule = BitScheduleConfig(start_step=1, start_bits=16, period=1)

    def width(number):
        levels = levels_after(number, schedule, FORMATS[name].bits)
        return rounded(jnp, jnp.asarray(kernel), name, levels)

    compiled = jax.jit(width)
    np.testing.assert_array_equal(compiled(2**30), rounded(np, kernel, name))
    assert (np.asarray(compiled(1)) != rounded(np, kernel, name)).any()


PLANS = {
    "3": {"zero": 3, "num_microbatches": 2},
    "2": {"zero": 2},
    "tensor": {"zero": 1, "mesh": {"data": 4, "model": 2}},
    "stages": {"zero": 1, "mesh": {"data": 4, "stage": 2}, "num_microbatches": 4},
}


@pytest.mark.thorough
@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_training_is_that_of_one_device(options):
    """To rounding, until a sum in another order rounds a weight to the next code (1e-3)."""
    model = reference_model("llama", matmul_dtype="fake_int4", mlp_dim=64, bit_schedule=SCHEDULE)
    found = train_for(model, steps=8, **options)
    wanted = train_for(model, steps=8, devices=1, zero=0)
    np.testing.assert_allclose(found.losses[:3], wanted.losses[:3], rtol=2e-6)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-3)
    assert "step 3" in " ".join(found.plan.reasons)
    plain = train_for(reference_model("llama", mlp_dim=64), steps=3, devices=1, zero=0)
    np.testing.assert_allclose(wanted.losses[:2], plain.losses[:2], rtol=2e-6)
    assert abs(wanted.losses[2] - plain.losses[2]) > 1e-6


@pytest.mark.thorough
def test_a_step_computes_with_the_width_of_its_number_and_ends_at_the_formats():
    """Weights after 1, 2 and 8 updates give the loss of plain, 6-bit and fake_int4 models."""
    sizes = {"mlp_dim": 64, "matmul_dtype": "fake_int4"}
    scheduled = plan_for(reference_model("llama", bit_schedule=SCHEDULE, **sizes), zero=3)
    evaluate = build_evaluation(scheduled)
    six = BitScheduleConfig(start_bits=6, period=100)
    others = {
        1: reference_model("llama", mlp_dim=64),
        2: reference_model("llama", bit_schedule=six, **sizes),
        8: reference_model("llama", **sizes),
    }
    state, batch = init_state(scheduled), jax.device_put(text_batch(9), scheduled.batch_sharding)
    step = build_step(scheduled)
    for number in range(1, 9):
        state, _ = step(state, batch)
        if number in others:
            other = plan_for(others[number], zero=3)
            given = init_state(other)
            given["params"] = state["params"]
            found, wanted = evaluate(state, batch), build_evaluation(other)(given, batch)
            np.testing.assert_array_equal(found["loss"], wanted["loss"])


@pytest.mark.thorough
def test_a_resumed_run_goes_on_with_its_width(tmp_path):
    model = reference_model("gpt2", matmul_dtype="fake_int8", bit_schedule=SCHEDULE_8)

    def trained(batches=text_batch, **options):
        quiet = zerojax.LogConfig(every=1, console="quiet")
        settings = {"run_dir": None, "log": quiet, "optimizer": optax.adamw(1e-2), "steps": 5}
        return zerojax.train(model, {"zero": 3}, batches, **{**settings, **options})

    run = tmp_path / "run"
    whole = trained(run_dir=run, checkpoint=run)
    whole.close()
    with pytest.raises(OSError, match="gone"):
        trained(failing_at(3, text_batch), checkpoint=tmp_path / "resumed")
    resumed = trained(checkpoint=tmp_path / "resumed")
    assert [one["step"] for one in resumed.history] == [4, 5]
    wanted = [one["loss"] for one in whole.history][3:]
    assert [one["loss"] for one in resumed.history] == wanted
    model = zerojax.load_run(run).to_model()
    assert model.config.bit_schedule == SCHEDULE_8
    np.testing.assert_array_equal(model.blocks.mlp.up.num_updates[...], [5, 5])


@pytest.mark.thorough
def test_codes_are_exported_only_with_the_width_of_the_run(tmp_path):
    model = reference_model("llama", matmul_dtype="fake_int8", bit_schedule=SCHEDULE_8)
    settings = {"steps": 2, "run_dir": tmp_path / "run", "checkpoint": tmp_path / "run"}
    trainer = zerojax.train(model, {"zero": 3}, text_batch, **settings)
    for source in (trainer, tmp_path / "run"):
        export = lambda source=source: zerojax.to_hugging_face(  # noqa: E731
            source, tmp_path / "codes", quantize="int8"
        )
        refused(export, "2 9 bits 4 bit_schedule", error=UnsupportedError)
        assert not (tmp_path / "codes").exists()
    assert zerojax.to_hugging_face(trainer, tmp_path / "plain").num_arrays > 0
    trainer.close()
    trainer = zerojax.train(model, {"zero": 3}, text_batch, **{**settings, "steps": 4})
    for number, source in enumerate((trainer, tmp_path / "run")):
        zerojax.to_hugging_face(source, tmp_path / f"codes {number}", quantize="int8")


def test_the_plan_tells_the_widths_of_all_steps():
    assert [SCHEDULE_8.bits_after(n, 8) for n in range(5)] == [None, 10, 9, 9, 8]
    line = SCHEDULE_8.describe(8)
    for words in ("not rounded from step 1", "10 bits from step 2", "9 bits from step 3"):
        assert words in line
    assert "8 bits from step 5" in line


SCHEDULE_8 = BitScheduleConfig(start_step=1, start_bits=10, period=2)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"start_step": -1}, "start_step"),
        ({"start_step": 2**31}, "start_step"),
        ({"start_bits": 8}, "period"),
        ({"period": 8}, "start_bits"),
        ({"start_bits": 17, "period": 1}, "16"),
        ({"start_bits": 1, "period": 1}, "start_bits"),
    ],
)
def test_settings_are_checked(settings, word):
    refused(lambda: BitScheduleConfig(**settings), word, error=ConfigError)


def test_a_schedule_without_rounding_or_below_its_end_is_refused():
    for dtype in (None, "fp8"):
        refused(lambda d=dtype: GPT2Config(matmul_dtype=d, bit_schedule=SCHEDULE), "fake_int8")
    schedule = BitScheduleConfig(start_bits=6, period=1)
    refused(lambda: GPT2Config(matmul_dtype="fake_int8", bit_schedule=schedule), "8 bits")
    section = {"matmul_dtype": "fake_int4", "bit_schedule": {"start_bits": 8, "period": 4}}
    assert ModelConfig(**section).bit_schedule == BitScheduleConfig(start_bits=8, period=4)
