"""Answers of `zerojax plan RUN --search` to four usual questions: a model, and the GPUs at hand.

The first answer, for two consumer cards in one machine, is compared with 20 settings made by hand,
which are compiled unless formulas show that they do not fit or are slower. Every time is the
expected time of a compiled program (docs/plan.md); nothing here is a measurement of a GPU. Needs
the extra `plan`.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from typing import Any

from benchmarks.hand_made import FITS, HandMadeCase, compare
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, save_so_far, write_record
from benchmarks.search import search_run
from zerojax.hardware import compile_client

STEP_RATIO = 1.01
"""Largest step of the answer, as a multiple of the best setting made by hand that fits."""
SECONDS_LIMIT = 60.0
"""Longest search of the first question."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A model and GPUs.

    Attributes:
      text: the question in a few words.
      file: name of a run file in `configs` or `benchmarks/run_files`.
      gpu, devices: the GPUs.
      words: KEY=VALUE words beside the run file.
      budget: seconds of the search.
    """

    text: str
    file: str
    gpu: str
    devices: int
    words: tuple[str, ...] = ()
    budget: float = 150.0


QUESTIONS = (
    Question("3.2B on two RTX 4090", "llama_3b", "rtx-4090", 2, budget=55.0),
    Question("1.2B on one H200", "llama_1b_zero1_8xh100", "h200", 1, ("global_batch_size=8",)),
    Question("6.7B on eight H100", "llama_7b_zero2_8xh100", "h100", 8),
    Question("32.5B on eight A100 40 GB", "llama_30b", "a100-40gb", 8),
)
SMOKE = (Question("tiny", "tiny_shakespeare", "h100", 1),)
_OFFLOADED = "opt_state=host remat={} zero={} num_microbatches={}"
BY_HAND = (
    *(_OFFLOADED.format("full", zero, number) for zero in (1, 2, 3) for number in (4, 8, 16, 32)),
    *(_OFFLOADED.format("attention", zero, 32) for zero in (1, 2, 3)),
    *(_OFFLOADED.format("dots", zero, 32) for zero in (2, 3)),
    *(f"{_OFFLOADED.format('full', 0, number)} mesh.model=2" for number in (16, 32)),
    f"{_OFFLOADED.format('full', 3, 8)} params=host",
)
"""Settings of the first question that somebody would try who knows that the optimizer's state does
not fit on the cards."""


def main(argv: list[str] | None = None) -> None:
    """Answers all questions and writes the record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before, rows = load_average(), list[dict[str, Any]]()
    questions = SMOKE if arguments.smoke else QUESTIONS
    for question in questions:
        found = search_run(
            question.file, question.gpu, question.devices, question.words, budget=question.budget
        )
        rows.append({"question": question.text, "words": " ".join(question.words), **found})
        save_so_far(_record(rows, []), arguments, load_before)
    first = questions[0]
    settings = tuple(tuple(shlex.split(line)) for line in BY_HAND[: 1 if arguments.smoke else None])
    case = HandMadeCase(first.file, first.gpu, first.devices, settings)
    by_hand = []
    for row in compare(case, rows[0]["chosen_step_s"] or math.inf, math.inf):
        by_hand.append(row)
        save_so_far(_record(rows, by_hand), arguments, load_before, by_hand=by_hand)
    write_record(_record(rows, by_hand), arguments, load_before, by_hand=by_hand)


def _record(rows: list[dict[str, Any]], by_hand: list[dict[str, Any]]) -> Record:
    first, goals = rows[0], []
    goals.append(
        Goal(
            name=f"{first['question']}: seconds of the search",
            value=first["wall_s"],
            limit=SECONDS_LIMIT,
        )
    )
    steps = [row["step_s"] for row in by_hand if row["status"] == FITS]
    if steps and first["chosen_step_s"]:
        text = f"{first['question']}: expected step / least one made by hand"
        goals.append(Goal(name=text, value=first["chosen_step_s"] / min(steps), limit=STEP_RATIO))
    version = compile_client.missing() or compile_client.compiler_version(fast=True)
    return Record(name="questions", rows=rows, goals=goals, notes=[f"compiled with {version}"])


if __name__ == "__main__":
    main()
