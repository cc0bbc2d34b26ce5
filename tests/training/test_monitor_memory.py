"""Too little memory: what allocators say, what is made of it, and a run that has none."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.support.small_models import reference_model
from zerojax.cli.complaints import explain as complain
from zerojax.forecasting.out_of_memory import (
    cheapest_remedies,
    explaining_memory,
    find_activity,
    find_memory_request,
    largest_arrays,
)
from zerojax.runtime.memory import TRAINING_STEP, allocating_for, purpose_of
from zerojax.step import trained_model
from zerojax.training import checkpointing
from zerojax.training.evaluation import mean_loss
from zerojax.training.reporting import Reports
from zerojax.training.trainer import Trainer

TESTS = Path(__file__).parents[1]
MIB, GIB = 2**20, 2**30

# --- messages -------------------------------------------------------------------------------------

RECORDED = [
    # XLA on CPU in a limited address space, JAX 0.10.2 and 0.12.
    ("RESOURCE_EXHAUSTED: Out of memory allocating 3200000000 bytes.", 3_200_000_000),
    # https://github.com/jax-ml/jax/issues/13428, shortened after the statistics
    (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.\n"
        "BufferAssignment OOM Debugging.\nBufferAssignment stats:\n"
        "             parameter allocation:    6.00MiB\n"
        "             constant allocation:         0B\n"
        "        maybe_live_out allocation:    6.00MiB\n"
        "     preallocated temp allocation:         0B\n"
        "                 total allocation:   12.00MiB\n",
        6_291_456,
    ),
    # https://github.com/patrick-kidger/equinox/issues/737
    (
        "RESOURCE_EXHAUSTED: Failed to allocate request for 6.27GiB (6727663616B) on device "
        "ordinal 0",
        6_727_663_616,
    ),
    # https://github.com/google-deepmind/jax_privacy/issues/10
    (
        "RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on device "
        "ordinal 0",
        184_549_376,
    ),
    # https://github.com/LargeWorldModel/LWM/issues/60
    (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 21.95G of 15.48G hbm.\n Exceeded hbm capacity by 6.47G.",
        round(21.95 * GIB),
    ),
]


@pytest.mark.parametrize(("text", "size"), RECORDED)
def test_recorded_messages_are_understood(text, size):
    asked = find_memory_request(RuntimeError(text))
    assert asked is not None
    assert asked.size == size
    assert asked.by_compiler == ("TPU" in text)
    assert asked.text == text.splitlines()[0]


def test_numpy_and_python_say_it_with_memory_error():
    # What NumPy raises for np.ones((1000, 10**9)) without overcommit.
    asked = find_memory_request(
        MemoryError(
            "Unable to allocate 7.28 TiB for an array with shape (1000, 1000000000) and data type "
            "float64"
        )
    )
    assert asked is not None
    assert asked.size == round(7.28 * 2**40)
    assert asked.on_host
    empty = find_memory_request(MemoryError())
    assert empty is not None
    assert (empty.size, empty.text) == (None, "")


@pytest.mark.parametrize(
    "text",
    [
        "INTERNAL: CUDNN_STATUS_EXECUTION_FAILED",
        "RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Queries'",
        "shapes (3,) and (4,) do not match",
    ],
)
def test_other_errors_are_none_of_it(text):
    assert find_memory_request(RuntimeError(text)) is None


# --- what is made of them -------------------------------------------------------------------------


def make_plan(**settings):
    tokens = jax.ShapeDtypeStruct((64, 16), jnp.int32)
    return zerojax.make_plan(
        reference_model("gpt2"),
        zerojax.make_mesh({"data": 8}),
        example_batch={"tokens": tokens, "targets": tokens},
        **settings,
    )


FAR = {name: jnp.full((64, 16), 10**6) for name in ("tokens", "targets")}
"""Ids that no model has."""


def page_of(plan, text, folder=None, state=None):
    """The page that an error with this text leaves, and the error."""
    error = RuntimeError(text)
    with (
        pytest.raises(RuntimeError) as raised,
        explaining_memory(lambda: (plan, state, 0, None), folder),
    ):
        raise error
    assert raised.value is error, "the error itself stays"
    return error.__notes__[0], error


def test_the_page_says_what_was_asked_what_the_plan_said_and_what_to_set(tmp_path):
    text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes."
    page, error = page_of(make_plan(zero=1), text, tmp_path)
    first, *lines = page.splitlines()
    asked = "4.0 GiB (4,294,967,296 bytes) were requested at once"
    assert first == f"out of memory in the run: {asked}"
    assert "master weights" in page
    assert f"pprof -top {tmp_path / 'memory.prof'}" in lines[-1]
    assert (tmp_path / "memory.prof").stat().st_size > 0
    assert len(lines) < 40
    assert max(map(len, lines)) <= 100 + len(str(tmp_path))
    sentence, is_bad_input = complain(error)
    assert (sentence, is_bad_input) == (page, False), "the command line shows the page"


def test_an_error_about_something_else_leaves_as_it_came():
    with (
        pytest.raises(ValueError, match="other") as raised,
        explaining_memory(lambda: pytest.fail("nobody asks"), None),
    ):
        raise ValueError("other")
    assert not hasattr(raised.value, "__notes__")


def test_the_cheapest_that_suffice_come_first():
    sizes = {
        "master weights": 8 * GIB,
        "optimizer state": 8 * GIB,
        "gathered weights": 2 * GIB,
        "gradients": 4 * GIB,
        "activations": 20 * GIB,
    }
    plan = make_plan(zero=0)
    words = [remedy.words for remedy in cheapest_remedies(plan, sizes, 9 * GIB)]
    assert words == ["mesh.zero=1", "num_microbatches=2", "model.remat=full"]
    savings = [remedy.saving for remedy in cheapest_remedies(plan, sizes, 9 * GIB)]
    assert savings[0] == 16 * GIB * 7 / 8
    assert all(saving >= 9 * GIB for saving in savings)
    little = [
        remedy.words for remedy in cheapest_remedies(plan, {**sizes, "activations": MIB}, 9 * GIB)
    ]
    assert little == ["mesh.zero=1"], "what saves nearly nothing is left out"


def test_where_nothing_suffices_the_cheapest_come_first():
    sizes = {"optimizer state": 8 * GIB, "gathered weights": 4 * GIB, "activations": 2 * GIB}
    words = [remedy.words for remedy in cheapest_remedies(make_plan(zero=0), sizes, 90 * GIB)]
    assert words == ["num_microbatches=8", "mesh.zero=3", "model.remat=full"]


@pytest.mark.thorough
def test_what_lives_has_the_names_of_the_state():
    plan = make_plan(zero=1)
    state = zerojax.init_state(plan)
    held = jnp.zeros((1 << 20,), jnp.int8)
    found = largest_arrays(state, count=1000)
    names = {one.name: one for one in found}
    assert names["params/token_embedding/embedding"].size == 64 * 32 * 4 / 8
    assert names["int8[1048576]"].size == held.size
    sizes = [one.size for one in found]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("purpose", "failing"),
    [
        ("the training step", lambda: Trainer._step_on_devices(None, None)),
        ("the training step", lambda: Reports(1).follow(None, 1, {})),
        ("the training step", lambda: failing_reports().wait(None)),
        ("the training step", lambda: failing_reports().settle(None)),
        ("the training step", lambda: failing_reports().read(None, None)),
        ("an evaluation", lambda: mean_loss(None, None, None, None, None, 1)),
        ("placing a batch on the devices", lambda: zerojax.shard_batch(None, {})),
        # The innermost block counts.
        ("placing a batch on the devices", lambda: mean_loss(None, make_plan(), 0, [FAR], None, 1)),
        ("restoring a checkpoint", lambda: checkpointing.restore_state(None, None)),
        (
            "saving a checkpoint",
            lambda: checkpointing.save_state(None, make_plan(), None, step=1, about={}),
        ),
        ("handing over the model", lambda: trained_model.model_of(make_plan(), {})),
        ("making the first state", lambda: checkpointing.first_state(None, 0, None)),
        ("making the first state", lambda: zerojax.init_state(None)),
        ("moving the state to another plan", lambda: zerojax.reshard_state(None, None, {})),
    ],
)
def test_an_error_says_what_the_memory_was_for(purpose, failing):
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError, RuntimeError)) as raised:
        failing()
    assert purpose_of(raised.value) == purpose


def failing_reports():
    """Reports that wait for a step whose metrics are not arrays."""
    reports = Reports(1)
    reports._under_way.append((1, {"loss": None}))
    reports.hold(types.SimpleNamespace(learning_rate=None), 2, {"loss": None})
    return reports


@pytest.mark.parametrize(("filtering", "activity"), [("off", "compiling the"), ("auto", "the")])
def test_a_step_that_could_not_be_compiled_is_told_from_one_that_ran(filtering, activity):
    """By the frames of JAX's compiler, which JAX leaves out unless told otherwise."""
    step = jax.jit(lambda x: x, compiler_options={"xla_no_such_option": True})
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", filtering)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError) as raised, allocating_for(TRAINING_STEP):
            step(1.0)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    asked = find_memory_request(MemoryError("0 bytes"))
    assert find_activity(raised.value, asked) == f"{activity} training step"
    compiled = dataclasses.replace(asked, by_compiler=True)
    assert find_activity(raised.value, compiled) == "compiling the training step"


# --- a run that has too little --------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.multihost
def test_a_run_in_too_little_address_space_says_what_to_set(tmp_path):
    process = subprocess.run(
        [sys.executable, str(TESTS / "support" / "out_of_memory_process.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), "JAX_TRACEBACK_FILTERING": "off"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    printed = process.stdout
    started = "JaxRuntimeError\nout of memory in the training step (number "
    assert started in printed, printed
    assert "bytes) were requested at once" in printed, printed + process.stderr
    assert "by ulimit -v" in printed
    assert "activations" in printed.partition("the compiler's report")[2]
    assert "  num_microbatches=" in printed
    assert ", enough: " in printed
    assert (tmp_path / "memory.prof").exists()
