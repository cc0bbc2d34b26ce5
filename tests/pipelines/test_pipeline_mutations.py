"""A table with one mistake in it must not pass: the equality tests of the executor would see it.

Each mistake is made in the columns that the executor reads, behind all checks of schedules.
"""

import dataclasses

import numpy as np
import pytest

from tests.pipelines.test_pipeline_executor import check, relative_error, run
from tests.support import pipeline_toy
from tests.support.pipeline_toy import Toy
from zerojax.schedules import lower, make_schedule

STAGES, MICROBATCHES = 4, 4
MIDDLE = 1
"""A stage that has neither the embedding nor the head."""


def cells_of(table, slot, stage):
    """(tick, stage) of the third and fourth operation of a stage in a slot."""
    ticks = np.flatnonzero(table.columns[f"{slot}_active"][:, stage])
    return (ticks[2], stage), (ticks[3], stage)


def other_microbatch(slot):
    """A stage works on its neighbour in time's microbatch."""

    def change(table, columns):
        here, there = cells_of(table, slot, MIDDLE)
        columns[f"{slot}_microbatch"][here] = columns[f"{slot}_microbatch"][there]

    return change


def one_slot_too_few(buffer, sizes):
    """The last two slots of a buffer are one."""

    def change(table, columns):
        last = getattr(table, sizes) - 1
        assert last > 0
        for name, column in columns.items():
            if name.endswith(f"_{buffer}") or f"receive_{buffer}" in name:
                column[column == last] = last - 1

    return change


def dropped(what, direction):
    """What arrives at a stage is thrown away."""

    def change(table, columns):
        column = columns[f"receive_{what}_{direction}"]
        spare = column.max()
        ticks = np.flatnonzero(column[:, MIDDLE] != spare)
        column[ticks[2], MIDDLE] = spare

    return change


def skipped(column, stage):
    """A stage idles in one tick in which it should work."""

    def change(table, columns):
        ticks = np.flatnonzero(columns[column][:, stage])
        columns[column][ticks[2], stage] = 0

    return change


def swapped_gradients(table, columns):
    """The backward pass of one microbatch starts from another one's gradient, on the last stage:
    with gpipe all of them wait there."""
    here, there = cells_of(table, "backward", STAGES - 1)
    columns["backward_gradient"][here], columns["backward_gradient"][there] = (
        columns["backward_gradient"][there],
        columns["backward_gradient"][here],
    )


def other_chunk(slot):
    """A stage uses the weights of its other chunk."""

    def change(table, columns):
        here, _ = cells_of(table, slot, MIDDLE)
        columns[f"{slot}_chunk"][here] = 1 - columns[f"{slot}_chunk"][here]

    return change


MISTAKES = {
    "a forward of another microbatch": ("1f1b", "residuals", other_microbatch("forward")),
    "a backward of another microbatch": ("1f1b", "input", other_microbatch("backward")),
    "a weight slot of another microbatch": ("zb_h1", "input", other_microbatch("weight")),
    "one slot too few for residuals": (
        "1f1b",
        "residuals",
        one_slot_too_few("residual", "num_residuals"),
    ),
    "one slot too few for inputs": ("1f1b", "input", one_slot_too_few("input", "num_inputs")),
    "one slot too few for gradients": (
        "zb_v",
        "residuals",
        one_slot_too_few("gradient", "num_gradients"),
    ),
    "a dropped gradient": ("1f1b", "residuals", dropped("gradient", "left")),
    "a dropped activation": ("gpipe", "residuals", dropped("activation", "right")),
    "a skipped backward": ("1f1b", "residuals", skipped("backward_active", MIDDLE)),
    "a skipped weight slot": ("zb_h1", "residuals", skipped("weight_active", MIDDLE)),
    "a skipped embedding": ("1f1b", "residuals", skipped("forward_first", 0)),
    "a skipped gradient of the embedding": ("1f1b", "residuals", skipped("backward_first", 0)),
    "a skipped head": ("1f1b", "residuals", skipped("forward_last", STAGES - 1)),
    "another gradient": ("gpipe", "residuals", swapped_gradients),
    "a forward of another chunk": ("interleaved", "residuals", other_chunk("forward")),
    "a backward of another chunk": ("interleaved", "residuals", other_chunk("backward")),
}
"""What is wrong: (schedule, stash, change of the columns)."""

QUICK = {"a backward of another microbatch", "a dropped gradient"}


def run_with(monkeypatch, name, stash, change):
    """The toy's results with a changed table, and those of one device."""

    def lower_wrongly(schedule, *, stash):
        table = lower(schedule, stash=stash)
        columns = {name: column.copy() for name, column in table.columns.items()}
        change(table, columns)
        differs = [n for n, c in columns.items() if (c != table.columns[n]).any()]
        assert bool(differs) == (change is not nothing)
        return dataclasses.replace(table, columns=columns)

    monkeypatch.setattr(pipeline_toy, "lower", lower_wrongly)
    schedule = make_schedule(name, stages=STAGES, microbatches=MICROBATCHES)
    parts = schedule.num_virtual_stages
    return run(Toy(), schedule, (8 // parts,) * parts, stash=stash)


def nothing(table, columns):
    """No mistake."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mistake", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in MISTAKES]
)
def test_a_mistake_in_the_table_shows(monkeypatch, mistake):
    """Far more than rounding does: a hundredth of the largest gradient, against 1e-6."""
    (sums, grads), (their_sums, their_grads) = run_with(monkeypatch, *MISTAKES[mistake])
    errors = relative_error(sums[0], their_sums[0]), relative_error(grads, their_grads)
    assert max(errors) > 1e-2


@pytest.mark.thorough
def test_without_a_mistake_all_is_equal(monkeypatch):
    """So it is the mistakes that show, and not the way in which they are made."""
    check(*run_with(monkeypatch, "1f1b", "residuals", nothing))
