"""What a pipeline cannot do is refused when it is planned: the value, the limit, the remedy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support import small_models
from tests.support.refusals import complaint, refused, table
from tests.support.small_models import VOCAB, reference_model, regression_loss
from tests.support.trajectories import plan_for, regression_batch
from zerojax.models.losses import next_token
from zerojax.schedules import make_schedule

TWO = {"data": 4, "stage": 2}
FOUR = {"data": 2, "stage": 4}


def plan(model: Any = None, *, layers: int = 4, mesh: Any = TWO, **options: Any) -> Any:
    """A plan; of a GPT-2 unless told otherwise."""
    model = model or reference_model("gpt2", num_layers=layers)
    return plan_for(model, mesh=mesh, **{"num_microbatches": 4, **options})


def rows(number: int) -> Any:
    return lambda index: dict.fromkeys(("tokens", "targets"), np.zeros((number, 16), np.int32))


def scheduled(stages: int, microbatches: int) -> Any:
    return make_schedule("1f1b", stages=stages, microbatches=microbatches)


REFUSED = table(
    """
layers=8, mesh=FOUR, num_microbatches=2, pipeline_schedule="interleaved(2)"
  | microbatches=2 4 | 4 1f1b |
layers=8, mesh=FOUR, num_microbatches=6, pipeline_schedule="interleaved(2)", batch=rows(48)
  | microbatches=6 4 | 4 8 |
pipeline_schedule="gpipe(2)" | chunks=2 'gpipe' 1 | chunks=1 interleaved(2) |
layers=3 | 3 2 | 1 3 flops "[2, 1]" |
layers=6, pipeline_schedule="interleaved(2)" | 6 4 | 3 6 "[2, 2, 1, 1]" |
mesh={"stage": 8} | 8 4 | 4 |
mesh={"stage": 16}, layers=16 | stage=16 8 | 8 |
mesh={"data": 4, "stage": 4} | 16 8 | data=-1 |
mesh={"stage": 0} | stage 0 | 1 |
partition=[3, 2] | "[3, 2]" 5 4 | "[2, 2]" |
partition=[4] | "[4]" 1 2 | "[2, 2]" |
partition=[4, 0] | partition "[4, 0]" | 1 |
partition="flop" | 'flop' | 'flops' |
stash="inputs" | 'inputs' | 'input' |
pipeline_schedule="1f2b" | '1f2b' | '1f1b' |
pipeline_schedule=3 | pipeline_schedule 3 | 1f1b |
num_microbatches=3 | 32 4 3 12 | 24 36 |
num_microbatches=0 | num_microbatches=0 | 1 |
pipeline_schedule=scheduled(4, 4) | stages=2 4 | stages=4 |
pipeline_schedule=scheduled(2, 8) | microbatches=4 8 | microbatches=8 |
"""
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", REFUSED)
def test_a_plan_is_refused_with_value_limit_and_remedy(options):
    row = REFUSED[options]
    refused(lambda: plan(**eval(f"dict({options})")), row.value, row.remedy)


TABLES = {
    # the lines, and what is said of one of them: first the activation or gradient that is not there
    "F0,F0 F1,B0 B0,F1 .,B1 B1,.": '"mine.csv:1" "tick 0" "stage 1" F0 "stage 0" "tick 1"',
    "F0,. F1,F0 B0,B0+F1 .,B1 B1,.": '"mine.csv:3" "tick 2" "stage 0" B0 "stage 1" "tick 3"',
    "F0,. F1,B0 .,F0 B0,F1+B1 B1,.": '"mine.csv:2" "tick 1" "stage 1" B0 F0 "tick 2"',
    "F0,. F1,F0+B0 B0,F1+B1 B0,.": '"mine.csv:4" "tick 3" "stage 0" B0 twice "tick 2"',
    "F0,. F1,F0+B0 B0,F1+B1": 'mine.csv "stage 0" B1',
    "F0,. F1,F0+Q0": '"mine.csv:2" "stage 1" \'F0+Q0\' F B W',
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lines", TABLES)
def test_a_broken_table_is_refused_with_tick_and_operation(lines, tmp_path):
    path = tmp_path / "mine.csv"
    given = lambda: plan(pipeline_schedule=str(path), num_microbatches=2)  # noqa: E731
    refused(given, "mine.csv")
    path.write_text("\n".join([*lines.split(), ""]), encoding="utf-8")
    refused(given, TABLES[lines])


def test_the_same_table_without_the_mistake_is_planned(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("F0,.\nF1,F0+B0\nB0,F1+B1\nB1,.\n", encoding="utf-8")
    model = reference_model("gpt2", num_layers=4)
    plan = plan_for(model, mesh=TWO, pipeline_schedule=str(path), num_microbatches=2)
    assert plan.pipeline is not None
    assert plan.pipeline.schedule.num_ticks == 4


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
    functions = (small_models.init_functions, small_models.apply_functions)
    for given in (
        lambda: plan(Unrolled, roll="off"),
        lambda: plan(functions, loss=regression_loss, batch=regression_batch),
    ):
        refused(given, '"Python loop" unrolled', "jax.lax.scan zerojax.Stages flax.linen.scan")


def test_layers_that_cannot_be_rolled_are_named_with_the_first_difference():
    refused(lambda: plan(Unlike), 'layers "not rolled" layers/0..3')


def test_a_model_with_two_loops_is_told_what_to_do():
    value = "2 first/bias first/kernel second/bias second/kernel"
    refused(lambda: plan(TwoStacks), value, "one stage=1")


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("stage=2 num_microbatches=3", "3 30 33"),
        ("stage=4 mesh.pipeline_schedule=interleaved(2) num_microbatches=2", "2 4 1f1b"),
        ("stage=2 mesh.pipeline_schedule=no/such.csv", "no/such.csv"),
        ("stage=2 mesh.pipeline_schedule=TABLE", '"tick 0" "stage 1" F0 "stage 0"'),
    ],
)
def test_the_command_line_says_so_in_one_line(words, remedy, tmp_path, capsys):
    """Exit code 2 and no traceback (`complaint`)."""
    table = tmp_path / "mine.csv"
    table.write_text("F0,F0\nF1,B0\nB0,F1\n.,B1\nB1,.\n", encoding="utf-8")
    given = words.replace("TABLE", str(table)).split()
    complaint(capsys, [*TRAIN, f"run_dir={tmp_path / 'run'}", *given], "", remedy)
    assert not (tmp_path / "run").exists(), "a refused run leaves nothing behind"
