"""Batch sizes of a ramp: those of Megatron, whose rows are counted exactly."""

from __future__ import annotations

import pytest

from tests.support.refusals import refused
from zerojax.config import BatchRamp, BatchRampConfig, RunConfig, from_dict


def megatrons_rows(start: int, increment: int, ramp_rows: int, final: int, steps: int) -> list[int]:
    """`RampupBatchsizeNumMicroBatchesCalculator.update` of megatron/core, step by step."""
    per_increment = ramp_rows / ((final - start) // increment)
    consumed, found = 0, []
    for _ in range(steps):
        rows = final
        if consumed <= ramp_rows:
            rows = start + int(consumed / per_increment) * increment
        found.append(rows)
        consumed += rows
    return found


def ramp_of(start: int, increment: int, ramp_rows: int, final: int) -> BatchRamp:
    config = BatchRampConfig(start=start, increment=increment, ramp_rows=ramp_rows)
    return BatchRamp(config=config, final=final)


@pytest.mark.parametrize(
    "settings",
    [
        (32, 32, 100_000, 256),
        (16, 16, 6 * 1000, 112),
        (8, 8, 64, 32),
        (8, 8, 30, 64),  # some sizes have no step
        (4, 12, 1, 16),  # one step
        (192, 192, 50_000, 1536),
    ],
    ids=str,
)
def test_sizes_are_those_of_megatron(settings):
    ramp = ramp_of(*settings)
    expected = megatrons_rows(*settings, steps=3000)
    assert [ramp.rows(step) for step in range(1, 3001)] == expected
    assert ramp.rungs == tuple(sorted({*expected}))
    assert [ramp.rows_before(step) for step in (1, 2, 3, 2999)] == [
        sum(expected[: step - 1]) for step in (1, 2, 3, 2999)
    ]


def test_spans_and_next_sizes_agree_with_the_sizes_of_steps():
    ramp = ramp_of(8, 8, 200, 48)
    for after, until in [(0, 40), (0, 1), (3, 9), (17, 17), (30, 40)]:
        flat = [rows for rows, count in ramp.spans(after, until) for _ in range(count)]
        assert flat == [ramp.rows(step) for step in range(after + 1, until + 1)]
    for rows, first in zip(ramp.rungs, ramp.first_steps, strict=True):
        assert ramp.rows(first) == rows
        assert first == 1 or ramp.rows(first - 1) < rows
        above = ramp.first_step_above(rows)
        assert (above is None) == (rows == 48)


@pytest.mark.parametrize(
    ("settings", "value", "remedy", "good"),
    [
        ((8, 5, 100, 32), "5 8 32", "8", (8, 8, 100, 32)),
        ((8, 2, 100, 32), "2 13 8", "4", (8, 4, 100, 32)),
        ((32, 8, 100, 32), "32", "lower", (24, 8, 100, 32)),
        ((0, 8, 100, 32), "0", "1", (8, 8, 100, 32)),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings, value, remedy, good):
    refused(lambda: ramp_of(*settings), value, remedy)
    ramp_of(*good)


def test_settings_of_a_ramp_come_together():
    refused(lambda: BatchRampConfig(start=8), "start 8", "increment")
    refused(lambda: BatchRampConfig(increment=8, ramp_rows=9), "increment 8", "start")
    assert BatchRampConfig().is_off


def test_a_run_file_checks_its_ramp():
    ramp = {"start": 8, "increment": 8, "ramp_rows": 64}
    whole = from_dict(RunConfig, {"global_batch_size": 32, "batch_ramp": ramp})
    assert whole.batch_ramp.start == 8
    settings = {"global_batch_size": 30, "batch_ramp": ramp}
    refused(lambda: from_dict(RunConfig, settings), "increment 22", "22")
    elastic = {"enabled": True, "max_global_batch_size": 64, "micro_batch_sizes": [2, 4]}
    settings = {"batch_ramp": ramp, "elasticity": elastic}
    refused(lambda: from_dict(RunConfig, settings), "elasticity", "leave")
