"""Compares the settings that `zerojax plan RUN --search` chooses with settings made by hand.

`hand_made_settings.yaml` lists what a user of other frameworks would try. A hand-made setting is
compiled unless formulas show that it does not fit, or that the choice meets the goal against it.
Forecasts are cached, so an interrupted benchmark continues where it was. Every time of a step is
the expected time of the compiled program; nothing here is a measurement of a GPU. Needs the extra
`plan`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import load_average
from benchmarks.plans import GIB, run_file
from benchmarks.recording import Goal, Record, add_arguments, save_so_far, write_record
from benchmarks.search import search_run
from zerojax.config import RunConfig, load
from zerojax.forecasting import forecast
from zerojax.forecasting.settings_search.candidates import Bounds, bounds_of, repeated
from zerojax.hardware import compile_client
from zerojax.hardware.compile_client import CompileError
from zerojax.hardware.gpus import find_gpu
from zerojax.plan.make import Plan
from zerojax.training.run_file import plan_from_config

SETTINGS = Path(__file__).resolve().parent / "hand_made_settings.yaml"
SMOKE = "tiny_shakespeare"
STEP_RATIO = 1.01
"""Largest step of the choice, as a multiple of the step of the best hand-made setting that fits."""
IMPOSSIBLE, TOO_LARGE, RULED_OUT, FITS = "impossible", "does not fit", "ruled out", "fits"
NOT_COMPILED = "not compiled"


@dataclasses.dataclass(frozen=True)
class HandMadeCase:
    """A run file, its GPUs, and the KEY=VALUE words of each hand-made setting."""

    config: str
    gpu: str
    devices: int
    settings: tuple[tuple[str, ...], ...]


def read_cases(*, smoke: bool) -> list[HandMadeCase]:
    """Reads the cases of `hand_made_settings.yaml`: those of the benchmark or of its smoke run."""
    found = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
    return [
        HandMadeCase(
            config=name,
            gpu=case["gpu"],
            devices=case["devices"],
            settings=tuple(
                (*shlex.split(case["base"]), *shlex.split(line)) for line in case["settings"]
            ),
        )
        for name, case in found.items()
        if (name == SMOKE) == smoke
    ]


def main(argv: list[str] | None = None) -> None:
    """Compares all cases and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="no compilation of a hand-made setting begins later; default: no limit",
    )
    arguments = parser.parse_args(argv)
    load_before, until = load_average(), time.monotonic() + 60 * arguments.minutes
    rows: list[dict[str, Any]] = []
    searches: dict[str, Any] = {}
    for case in read_cases(smoke=arguments.smoke):
        found = search_run(case.config, case.gpu, case.devices, is_cached=True)
        searches[case.config] = found
        for row in compare(case, found["chosen_step_s"], until):
            rows.append(row)
            save_so_far(_record(rows, searches), arguments, load_before, searches=searches)
    write_record(_record(rows, searches), arguments, load_before, searches=searches)


def compare(case: HandMadeCase, chosen: float, until: float) -> Iterator[dict[str, Any]]:
    """Yields one row per hand-made setting: those that need no compilation, then the others in the
    order of their bounds.

    Args:
      case: the hand-made settings.
      chosen: seconds per step of the settings that the search chose.
      until: time of `time.monotonic` after which nothing is compiled.
    """
    open_rows = []
    for words in case.settings:
        row = _row(case.config, words)
        try:
            plan = _plan(case, words)
            bounds = _bounds(plan, case)
        except ValueError as error:
            yield row | {"status": IMPOSSIBLE, "why": str(error).split("\n")[0]}
            continue
        row["bound_s"] = bounds.seconds
        if bounds.state > bounds.limit:
            yield row | {"status": TOO_LARGE, "why": f"state of {bounds.state / GIB:.1f} GiB"}
        elif bounds.seconds * STEP_RATIO >= chosen:
            yield row | {"status": RULED_OUT, "why": "bound of the step by formula"}
        else:
            open_rows.append((bounds.seconds, bounds.peak, row, words))
    for _, _, row, words in sorted(open_rows, key=lambda one: one[:2]):
        if time.monotonic() < until:
            yield row | _compiled(case, words)
        else:
            yield row | {"status": NOT_COMPILED, "why": "time limit of the benchmark"}


def _row(config: str, words: Sequence[str]) -> dict[str, Any]:
    settings = dict(word.split("=", 1) for word in words)
    return {
        "config": config,
        "setting": shlex.join(f"{key}={value}" for key, value in settings.items()),
        "status": None,
        "why": None,
        "bound_s": None,
        "peak_GiB": None,
        "step_s": None,
    }


def _plan(case: HandMadeCase, words: Sequence[str]) -> Plan:
    config = load(RunConfig, run_file(case.config), list(words))
    return plan_from_config(config, case.devices, gpu=find_gpu(case.gpu))


def _bounds(plan: Plan, case: HandMadeCase) -> Bounds:
    # What a pipeline recomputes is left out, as in the search: the bound is lower without it.
    repeat = repeated(plan) if plan.pipeline is None else 1.0
    return bounds_of(plan, find_gpu(case.gpu), repeat)


def _compiled(case: HandMadeCase, words: Sequence[str]) -> dict[str, Any]:
    plan = _plan(case, words)
    try:
        found = forecast(plan, gpu=case.gpu, devices=case.devices, fast=True)
    except CompileError as error:
        return {"status": IMPOSSIBLE, "why": str(error).split("\n")[0]}
    assert found.memory.peak is not None
    return {
        "status": FITS if found.verdict.fits else TOO_LARGE,
        "why": "compiled",
        "peak_GiB": found.memory.peak / GIB,
        "step_s": found.estimate.expected_seconds,
    }


def _record(rows: Sequence[Mapping[str, Any]], searches: Mapping[str, Any]) -> Record:
    goals = []
    for name, search in searches.items():
        steps = [
            row["step_s"] or row["bound_s"]
            for row in rows
            if row["config"] == name and row["status"] in (FITS, RULED_OUT, NOT_COMPILED)
        ]
        if steps:
            ratio = search["chosen_step_s"] / min(steps)
            text = f"{name}: step of the search / least step or bound made by hand"
            goals.append(Goal(name=text, value=ratio, limit=STEP_RATIO))
    version = compile_client.missing() or compile_client.compiler_version(fast=True)
    return Record(name="hand_made", rows=rows, goals=goals, notes=[f"compiled with {version}"])


if __name__ == "__main__":
    main()
