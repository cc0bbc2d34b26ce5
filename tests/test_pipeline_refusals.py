"""What a pipeline cannot do is refused when it is planned: the value, the limit, the remedy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import small_models
from tests.cli_complaints import fails
from tests.small_models import VOCAB, reference_model, regression_loss
from tests.trajectories import plan_for, regression_batch
from zerojax.models.losses import next_token
from zerojax.plan.schedules import make_schedule

TWO = {"data": 4, "stage": 2}
FOUR = {"data": 2, "stage": 4}


def refused(model: Any = None, *, layers: int = 4, mesh: Any = TWO, **options: Any) -> str:
    """The text of the error with which a plan is refused; a GPT-2 unless told otherwise."""
    model = model or reference_model("gpt2", num_layers=layers)
    with pytest.raises((ValueError, OSError)) as caught:
        plan_for(model, mesh=mesh, **{"num_microbatches": 4, **options})
    return str(caught.value)


def rows(number: int) -> dict[str, Any]:
    batch = lambda index: dict.fromkeys(  # noqa: E731
        ("tokens", "targets"), np.zeros((number, 16), np.int32)
    )
    return {"batch": batch}


REFUSED = {
    "fewer microbatches than interleaved sends at once": (
        {
            "layers": 8,
            "mesh": FOUR,
            "num_microbatches": 2,
            "pipeline_schedule": "interleaved(2)",
        },
        ["microbatches=2", "the 4 stages", "use 4 microbatches or 1f1b"],
    ),
    "microbatches that interleaved cannot group": (
        {
            "layers": 8,
            "mesh": FOUR,
            "num_microbatches": 6,
            "pipeline_schedule": "interleaved(2)",
            **rows(48),
        },
        ["microbatches=6", "divisible by the 4 stages", "use 4 or 8"],
    ),
    "chunks for a schedule that has none": (
        {"pipeline_schedule": "gpipe(2)"},
        ["chunks=2", "'gpipe' has 1", "use chunks=1 or interleaved(2)"],
    ),
    "stages that do not divide the layers": (
        {"layers": 3},
        ["3 layers", "2 parts", "use 1 or 3 parts", 'partition="flops"', "partition=[2, 1]"],
    ),
    "chunks that do not divide the layers": (
        {"layers": 6, "pipeline_schedule": "interleaved(2)"},
        ["6 layers", "4 parts (stages x chunks)", "use 3 or 6 parts", "[2, 2, 1, 1]"],
    ),
    "more stages than layers": (
        {"mesh": {"stage": 8}},
        ["8 parts", "4 layers", "at most 4 parts"],
    ),
    "more stages than devices": (
        {"mesh": {"stage": 16}, "layers": 16},
        ["stage=16", "8 devices", "whose product divides 8"],
    ),
    "stages times data beyond the devices": (
        {"mesh": {"data": 4, "stage": 4}},
        ["needs 16 devices, found 8", "data=-1"],
    ),
    "no stages": ({"mesh": {"stage": 0}}, ["stage: 0", ">= 1"]),
    "a partition that does not add up": (
        {"partition": [3, 2]},
        ["partition=[3, 2] has 5 layers", "the model has 4", "such as [2, 2]"],
    ),
    "a partition of too few": (
        {"partition": [4]},
        ["partition=[4] has 1 entries", "2 parts", "such as [2, 2]"],
    ),
    "a partition with an empty stage": (
        {"partition": [4, 0]},
        ["partition: [4, 0]", "at least 1 layer"],
    ),
    "an unknown partition": ({"partition": "flop"}, ["'flop'", "did you mean 'flops'?"]),
    "an unknown stash": ({"stash": "inputs"}, ["'inputs'", "did you mean 'input'?"]),
    "an unknown schedule": ({"pipeline_schedule": "1f2b"}, ["'1f2b'", "did you mean '1f1b'?"]),
    "something that is not a schedule": (
        {"pipeline_schedule": 3},
        ["pipeline_schedule: 3", "a name such as 1f1b"],
    ),
    "a file that is not there": ({"pipeline_schedule": "no/such.csv"}, ["no/such.csv"]),
    "a batch that does not divide": (
        {"num_microbatches": 3},
        ["batch size 32", "data shards (4) x num_microbatches (3) = 12", "use 24 or 36"],
    ),
    "no microbatches": ({"num_microbatches": 0}, ["num_microbatches=0", "at least 1"]),
    "a table for other stages": (
        {"pipeline_schedule": make_schedule("1f1b", stages=4, microbatches=4)},
        ["stages=2", "has 4", "use stages=4 or another table"],
    ),
    "a table for other microbatches": (
        {"pipeline_schedule": make_schedule("1f1b", stages=2, microbatches=8)},
        ["microbatches=4", "has 8", "use microbatches=8 or another table"],
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("what", REFUSED)
def test_a_plan_is_refused_with_value_limit_and_remedy(what):
    options, words = REFUSED[what]
    text = refused(**options)
    for word in words:
        assert word in text


# Tables of one's own


TABLES = {
    "a forward before its activation is there": (
        ["F0,F0", "F1,B0", "B0,F1", ".,B1", "B1,."],
        ":1: tick 0, stage 1: F0 needs F0 of stage 0, which is at tick 0, whose activation arrives "
        "one tick later; put F0 at tick 1 or later",
    ),
    "a backward before its gradient is there": (
        ["F0,.", "F1,F0", "B0,B0+F1", ".,B1", "B1,."],
        ":3: tick 2, stage 0: B0 needs B0 of stage 1, which is at tick 2, whose gradient arrives "
        "one tick later; put B0 at tick 3 or later",
    ),
    "a backward before its own forward": (
        ["F0,.", "F1,B0", ".,F0", "B0,F1+B1", "B1,."],
        ":2: tick 1, stage 1: B0 needs F0 of stage 1, which is at tick 2, in the slot before; put "
        "B0 at tick 2 or later",
    ),
    "an operation twice": (
        ["F0,.", "F1,F0+B0", "B0,F1+B1", "B0,."],
        ":4: tick 3, stage 0: B0 is there twice, first at tick 2; every operation runs exactly "
        "once, remove one",
    ),
    "an operation that is missing": (
        ["F0,.", "F1,F0+B0", "B0,F1+B1"],
        ": stage 0 never does B1: the table has microbatches 0 to 1 and chunks 0 to 0, and every "
        "stage does F and B once for each; add it",
    ),
    "a cell that is none": (
        ["F0,.", "F1,F0+Q0"],
        ":2: stage 1: 'F0+Q0' is not a cell; write F, B or W, the microbatch",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", TABLES)
def test_a_broken_table_is_refused_with_tick_and_operation(what, tmp_path):
    lines, text = TABLES[what]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert f"{path}{text}" in refused(pipeline_schedule=str(path), num_microbatches=2)


def test_the_same_table_without_the_mistake_is_planned(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("F0,.\nF1,F0+B0\nB0,F1+B1\nB1,.\n", encoding="utf-8")
    model = reference_model("gpt2", num_layers=4)
    plan = plan_for(model, mesh=TWO, pipeline_schedule=str(path), num_microbatches=2)
    assert plan.pipeline is not None
    assert plan.pipeline.schedule.num_ticks == 4


# Models


class Unrolled(nnx.Module):
    """Layers that a Python loop calls."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])

    def loss(self, batch: dict) -> Any:
        x = self.embed(batch["tokens"])
        for layer in self.layers:
            x = layer(x)
        return next_token(self.embed.attend(x), batch["targets"])


class Unlike(Unrolled):
    """Each layer with an activation of its own."""

    def loss(self, batch: dict) -> Any:
        x = self.embed(batch["tokens"])
        for layer, act in zip(self.layers, (jnp.sin, jnp.tanh, jnp.cos, jnp.exp), strict=True):
            x = act(layer(x))
        return next_token(self.embed.attend(x), batch["targets"])


class TwoStacks(nnx.Module):
    """An encoder and a decoder: two loops over layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, 8, rngs=rngs)
        make = lambda rngs: nnx.Linear(8, 8, rngs=rngs)  # noqa: E731
        stack = nnx.vmap(make, in_axes=0, out_axes=0)
        self.first, self.second = stack(rngs.split(4)), stack(rngs.split(4))

    def loss(self, batch: dict) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def apply(layer: nnx.Linear, x: jax.Array) -> jax.Array:
            return x + layer(x)

        x = apply(self.second, apply(self.first, self.embed(batch["tokens"])))
        return next_token(self.embed.attend(x), batch["targets"])


def test_a_model_without_a_loop_over_layers_is_told_what_to_do():
    for text in (
        refused(Unrolled, roll="off"),
        refused(
            (small_models.init_functions, small_models.apply_functions),
            loss=regression_loss,
            batch=regression_batch,
        ),
    ):
        assert "need a model whose layers run in one jax.lax.scan over stacked parameters" in text
        assert "use zerojax.Stages(embed, block, head), flax.linen.scan, or stack" in text
        assert "Found no loop in the loss: layers that a Python loop calls are unrolled" in text


def test_layers_that_cannot_be_rolled_are_named_with_the_first_difference():
    text = refused(Unlike)
    assert "Found no loop in the loss" in text
    assert "In this model layers: not rolled: layers/0..3 are not one loop" in text


def test_a_model_with_two_loops_is_told_what_to_do():
    text = refused(TwoStacks)
    assert "Found 2 such loops" in text
    assert "first/bias, first/kernel" in text
    assert "second/bias, second/kernel" in text
    assert "Put all layers into one loop, or train without pipeline stages (stage=1)" in text


# The command line

TRAIN = (
    "train",
    "num_layers=4",
    "num_heads=2",
    "embed_dim=16",
    "max_seq_len=16",
    "seq_len=16",
    "global_batch_size=32",
    "num_microbatches=4",
    "steps=2",
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["stage=2", "mesh.pipeline_schedule=1f2b"], "did you mean '1f1b'"),
        (["stage=2", "num_layers=3"], "partition=[2, 1]"),
        (["stage=8"], "at most 4 parts"),
        (["stage=16"], "whose product divides 8"),
        (["stage=2", "num_microbatches=3"], "use 30 or 33"),
        (
            ["stage=4", "mesh.pipeline_schedule=interleaved(2)", "num_microbatches=2"],
            "use 4 microbatches or 1f1b",
        ),
        (["stage=2", "partition=[3, 2]"], "such as [2, 2]"),
        (["stage=2", "stash=inputs"], "did you mean 'input'"),
        (["stage=2", "mesh.pipeline_schedule=no/such.csv"], "no/such.csv"),
        (["stage=2", "mesh.pipeline_schedule=TABLE"], "tick 0, stage 1: F0 needs F0 of stage 0"),
    ],
)
def test_the_command_line_says_so_in_one_line(words, part, tmp_path, capsys):
    """Exit code 2 and no traceback (`fails`)."""
    table = tmp_path / "mine.csv"
    table.write_text("F0,F0\nF1,B0\nB0,F1\n.,B1\nB1,.\n", encoding="utf-8")
    given = [word.replace("TABLE", str(table)) for word in words]
    assert part in fails(capsys, *TRAIN, f"run_dir={tmp_path / 'run'}", *given)
    assert not (tmp_path / "run").exists(), "a refused run leaves nothing behind"
