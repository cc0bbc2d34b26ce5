"""Part "tune": the measurements of `zerojax tune`: kernels, attention, slices, steps.

Uses arrays of GPT-2's sizes (slices: of a Llama's). Each candidate is compared with the
implementation that it would replace, and both are timed in alternation; then whole steps are timed,
as planned, with XLA's fusions and with the kernels. The record has each choice in the form of a
user's cache (`tuned.json`).
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import zerojax
from benchmarks.gpu.collect import rows_of_cache
from benchmarks.gpu.subjects import make_factory, make_source
from benchmarks.gpu.workloads import LEARNING_RATE, Workload, choose_workload
from benchmarks.machine import load_average
from benchmarks.recipe import ADAMW, CLIPPED
from benchmarks.recording import Goal, Record, parse_arguments, save_so_far, write_record
from zerojax.plan.open_choices import NO_MORE_MEMORY, SIZES, open_calls
from zerojax.step.offload_variants import with_slices
from zerojax.training.tuning import (
    Answer,
    KeptChoices,
    Question,
    decide,
    time_steps,
    tuned_plan,
    variants_of,
)
from zerojax.training.tuning.attention_choices import attention_question
from zerojax.training.tuning.kept_choices import FILE
from zerojax.training.tuning.slice_choices import slice_question
from zerojax.training.tuning.tuned_plan import statistics_question, update_question

OPTIMIZERS = {
    "adamw": zerojax.adamw(LEARNING_RATE, **ADAMW),
    "lion": zerojax.lion(LEARNING_RATE, weight_decay=0.3, **CLIPPED),
    "sgd": zerojax.sgd(LEARNING_RATE, momentum=0.9, **CLIPPED),
    "lamb": zerojax.lamb(LEARNING_RATE, weight_decay=0.01, **CLIPPED),
    "adam8bit": zerojax.adam8bit(LEARNING_RATE, **ADAMW),
}
NOTES = [
    "a choice by itself: 8 updates in a program, on at most 24 arrays and 2 % of free memory",
    "whole step: a batch of zeros; where the kernel cannot run, XLA's alone",
]
TIMES = ("ways", "reference_ms", "other_ms")
SMOKE_ELEMENTS = 2**14
"""Size of the arrays of an update: an interpreted kernel takes about 20 ms per block."""
Ask = Callable[[], Question]


def main(argv: list[str] | None = None) -> None:
    """Writes the record; exits with an error if a kernel is wrong or fails."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    if arguments.smoke:
        tuned_plan.MAX_ELEMENTS = SMOKE_ELEMENTS
    rows: list[dict[str, Any]] = []
    kept: dict[str, Any] = {}
    for row in measure(arguments.smoke, kept):
        rows.append(row)
        save_so_far(Record(name="tune", rows=rows, notes=NOTES), arguments, load_before, kept=kept)
    refused = sum(bool(row.get("refused")) for row in rows)
    goal = Goal(name="what is wrong, fails or cannot be asked", value=refused, limit=0)
    record = Record(name="tune", rows=rows, goals=[goal], notes=NOTES)
    write_record(record, arguments, load_before, kept=kept)
    if refused:
        raise SystemExit("something is wrong, fails or cannot be asked: see the reasons")


def measure(smoke: bool, kept: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a row for each choice, then for each whole step.

    Args:
      smoke: use tiny sizes, and kernels in interpret mode.
      kept: dict to which the entries of the cache are added.
    """
    kernel = "interpret" if smoke else "mosaic_gpu"
    # An interpreted kernel takes seconds for each round.
    for what, ask in questions(smoke, ["adamw"] if smoke else [*OPTIMIZERS], kernel):
        yield choose(what, ask, kept)
    for step in time_steps(variants_of(make_plan(choose_workload("gpt2", smoke), "adamw"), kernel)):
        row = {"what": "whole step", "choice": step.name}
        failed = not math.isfinite(step.seconds)
        yield row | ({"refused": step.failure} if failed else {"ms": 1e3 * step.seconds})


def questions(smoke: bool, optimizers: Sequence[str], kernel: str) -> Iterator[tuple[str, Ask]]:
    """Yields (name of the choice, its measurement) for all choices at a start with these models."""
    workload = choose_workload("gpt2", smoke)
    plans = {name: make_plan(workload, name) for name in optimizers}
    first = plans["adamw"]
    yield "statistics", lambda: statistics_question(first, kernel)
    for name, plan in plans.items():
        yield f"update by {name}", lambda plan=plan: update_question(plan, kernel)
    for call in open_calls(first).values():
        planned = str(call.implementation)
        for other in NO_MORE_MEMORY[planned]:
            yield (
                f"attention by {other}",
                lambda call=call, one=planned, other=other: attention_question(
                    first, call, one, other
                ),
            )
    for size, plan, other in offloaded_plans(smoke):
        yield f"slices of {size:,}", lambda plan=plan, other=other: slice_question(plan, other)


def offloaded_plans(smoke: bool) -> Iterator[tuple[int, zerojax.Plan, zerojax.Plan]]:
    """Yields (elements per slice, plan with state on the host, the plan with such slices)."""
    small = {"min_elements": 2**8} if smoke else {}
    offload = {"opt_state": "host", **small}
    plan = make_plan(choose_workload("llama", smoke), "adamw", offload=offload)
    for size in (2**8,) if smoke else SIZES:
        yield size, plan, with_slices(plan, size)


def make_plan(workload: Workload, optimizer: str, **options: Any) -> zerojax.Plan:
    """Returns the plan of a step on one device."""
    return zerojax.make_plan(
        make_factory(workload),
        {"data": 1},
        example_batch=make_source(workload).batch(0),
        optimizer=OPTIMIZERS[optimizer],
        precision="bf16",
        zero=0,
        **options,
    )


def choose(what: str, ask: Ask, kept: dict[str, Any]) -> dict[str, Any]:
    """Measures one choice; returns its row with the selected implementation and both times.

    Args:
      what: name of the choice.
      ask: runs the measurement.
      kept: dict to which the entry of the cache is added.
    """
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        answer = decide(ask, KeptChoices(Path(folder)))
        seconds = time.perf_counter() - began
        path = Path(folder) / FILE
        cache = json.loads(path.read_text()) if path.is_file() else {}
    kept |= cache
    times = {name: row[name] for row in rows_of_cache(cache) for name in TIMES}
    row = {"what": what, "choice": answer.choice, "reason": answer.reason, **times}
    row["took_s"] = seconds
    return row | ({"refused": answer.reason} if is_refused(answer) else {})


def is_refused(answer: Answer) -> bool:
    """Returns whether a candidate was rejected for its result, or could not be measured at all.

    Noisy times and a missing GPU do not count.
    """
    words = ("results are wrong", "failed", "other bits", "nothing was measured")
    return any(word in answer.reason for word in words)


if __name__ == "__main__":
    main()
