"""GPT-2 and Llama over pipeline stages give the losses of one device, whatever the schedule.

The rows are such that every two choices meet in one of them. Three of them, each with a
mesh, a ZeRO stage and a schedule of its own, take six steps; all others, marked slow, take twenty.
"""

import functools
from typing import Any

import pytest

from tests.support.pipeline_runs import UNEVEN, assert_equal_runs, train
from tests.support.small_models import reference_model
from tests.support.trajectories import Trajectory, train_for

QUICK = [
    ("llama", "data 2 stage 4", 0, "gpipe", "residuals", "uneven", 4, "full"),
    ("gpt2", "data 2 stage 2 model 2", 3, "zb_v", "input", "even", 2, "dots"),
    ("llama", "replica 2 data 2 stage 2", 1, "1f1b", "residuals", "even", 2, "none"),
]
"""(model, mesh, ZeRO stage, schedule, stash, layers, microbatches per stage, remat)."""

SLOW = [
    ("llama", "data 2 stage 2 model 2", 2, "zb_h1", "input", "even", 1, "none"),
    ("gpt2", "data 4 stage 2", 1, "interleaved(2)", "input", "uneven", 4, "none"),
    ("gpt2", "data 1 stage 4 model 2", 2, "1f1b_classic", "residuals", "uneven", 1, "dots"),
    ("gpt2 untied", "data 2 stage 2 model 2", 0, "1f1b_classic", "residuals", "uneven", 4, "none"),
    ("llama tied", "data 2 stage 2 model 2", 1, "gpipe", "input", "even", 4, "full"),
    (
        "gpt2 untied",
        "data 2 stage 2 model 2",
        3,
        "interleaved(2)",
        "residuals",
        "uneven",
        1,
        "dots",
    ),
    ("gpt2", "data 2 stage 2 model 2", 3, "1f1b", "input", "uneven", 1, "full"),
    ("llama tied", "data 2 stage 4", 0, "zb_v", "residuals", "even", 4, "none"),
    ("gpt2", "data 2 stage 4", 0, "zb_h1", "input", "even", 4, "full"),
    ("gpt2 untied", "data 2 stage 4", 1, "1f1b_classic", "input", "even", 1, "dots"),
    ("llama tied", "data 2 stage 4", 2, "1f1b", "input", "uneven", 4, "dots"),
    ("gpt2", "data 2 stage 4", 3, "interleaved(2)", "residuals", "even", 2, "none"),
    ("gpt2 untied", "data 4 stage 2", 0, "1f1b", "input", "even", 1, "full"),
    ("llama", "data 4 stage 2", 1, "1f1b_classic", "residuals", "uneven", 2, "none"),
    ("llama tied", "data 4 stage 2", 2, "zb_v", "residuals", "uneven", 1, "none"),
    ("llama tied", "data 4 stage 2", 3, "zb_h1", "residuals", "uneven", 2, "full"),
    ("llama", "data 4 stage 2", 3, "gpipe", "residuals", "even", 2, "dots"),
    ("llama tied", "data 1 stage 4 model 2", 0, "interleaved(2)", "residuals", "even", 2, "none"),
    ("gpt2 untied", "data 1 stage 4 model 2", 1, "zb_h1", "input", "even", 1, "full"),
    ("llama", "data 1 stage 4 model 2", 1, "zb_v", "input", "even", 2, "full"),
    ("gpt2 untied", "data 1 stage 4 model 2", 2, "gpipe", "residuals", "even", 4, "none"),
    ("llama", "data 1 stage 4 model 2", 3, "1f1b", "input", "even", 4, "full"),
    ("gpt2", "replica 2 data 2 stage 2", 0, "gpipe", "input", "uneven", 1, "dots"),
    ("gpt2", "replica 2 data 2 stage 2", 0, "zb_h1", "input", "even", 2, "dots"),
    ("gpt2 untied", "replica 2 data 2 stage 2", 2, "zb_v", "input", "uneven", 2, "full"),
    ("llama", "replica 2 data 2 stage 2", 2, "interleaved(2)", "input", "even", 4, "full"),
    ("llama tied", "replica 2 data 2 stage 2", 3, "1f1b_classic", "input", "even", 1, "full"),
]


CASES = [
    *((6, *row) for row in QUICK[:-1]),
    pytest.param(6, *QUICK[-1], marks=pytest.mark.slow),
    *(pytest.param(20, *row, marks=pytest.mark.slow) for row in SLOW),
]

LAYERS = 8


def model_of(name: str, **options: Any) -> Any:
    """A reference model of width 16, whose output map is tied or not as its name says."""
    name, _, tied = name.partition(" ")
    if tied:
        options["tie_embeddings"] = tied == "tied"
    return reference_model(name, num_layers=LAYERS, embed_dim=16, **options)


@functools.cache
def one_device(name: str) -> Trajectory:
    return train_for(model_of(name), devices=1)


def sizes_of(mesh: str) -> dict[str, int]:
    words = mesh.split()
    return {axis: int(size) for axis, size in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("steps", "name", "mesh", "zero", "schedule", "stash", "layers", "per_stage", "remat"), CASES
)
def test_the_losses_are_those_of_one_device(
    steps, name, mesh, zero, schedule, stash, layers, per_stage, remat
):
    """Also: no collective of the compiled step is in a conditional (`compile_step`)."""
    sizes = sizes_of(mesh)
    parts = sizes["stage"] * (2 if schedule in ("interleaved(2)", "zb_v") else 1)
    run = train(
        model_of(name, remat=remat),
        steps=steps,
        mesh=sizes,
        zero=zero,
        pipeline_schedule=schedule,
        stash=stash,
        partition=UNEVEN[parts] if layers == "uneven" else "uniform",
        num_microbatches=per_stage * sizes["stage"],
    )
    assert run.plan.pipeline is not None
    assert (-1 in run.plan.pipeline.rows) == (layers == "uneven")
    assert_equal_runs(run, one_device(name))
