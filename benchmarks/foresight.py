"""Predicted beside measured time and memory, for every program that was measured on a GPU.

Each program is compiled for its card without a GPU. The facts of the compiled program are kept in
`foresight/`, so that a test can compute the prediction again whenever the code changes, without a
compiler. Measurements are read from the results of `benchmarks/gpu/run.sh`; they are of another
version of JAX than the prediction where the notes say so. Where a run wrote a prediction before it
timed the program, this prediction is shown beside that of today.

The kept facts are of the programs that the cards ran. Since then offload, loops over layers and the
loss have changed, so the programs of today are not comparable before a card has run them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax

import zerojax
from benchmarks.gpu.offload import TIERS
from benchmarks.gpu.subjects import make_factory, make_optimizer, make_source
from benchmarks.gpu.workloads import choose_workload
from benchmarks.machine import load_average
from benchmarks.recording import RESULTS, Goal, Record, parse_arguments, write_record
from zerojax.forecasting.compiled_step import forecast_step
from zerojax.forecasting.forecast_numbers import ALLOCATOR_BYTES
from zerojax.hardware import compile_client

FOLDER = RESULTS / "foresight"
WITHIN, MEMORY_WITHIN = 0.10, 0.02
"""Largest relative difference of a predicted time, and of predicted memory."""
KEPT = ("timeline", "places", "host_copies", "collectives")
"""Facts that the prediction reads."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A program that was measured.

    Attributes:
      card: card's name, in the name of the file with its results.
      part: part of the results; way: its row.
      workload: name of the workload.
      settings: settings of the plan.
    """

    card: str
    part: str
    way: str
    workload: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        words = f"{self.card} {self.part} {self.way}".replace(",", "").replace("zerojax.train", "")
        return "_".join(words.split())

    @functools.cached_property
    def row(self) -> dict[str, Any] | None:
        """Measured row; None if this way was left out on this card."""
        rows = [one for one in self._record["rows"] if one.get("way") == self.way]
        return next((one for one in rows if one.get("step_ms")), None)

    @property
    def foreseen(self) -> dict[str, Any] | None:
        """Prediction that the run wrote before it timed the program; None if it wrote none."""
        found = self._record.get("predictions", {}).get(self.way)
        return found if found and "expected_ms" in found else None

    @functools.cached_property
    def _record(self) -> dict[str, Any]:
        path = RESULTS / f"gpu_{self.card}.json"
        return json.loads(path.read_text())["parts"][self.part]


def programs() -> list[Measured]:
    """Returns every program that was measured as a whole step of zerojax."""
    found = []
    for card in ("h100", "h200"):
        found.append(Measured(card, "gpt2", "zerojax.train", "gpt2"))
        found.append(Measured(card, "gpt2", "zerojax.train, unroll", "gpt2", {"unroll": True}))
        found.append(Measured(card, "llama", "zerojax.train", "llama"))
        found += [
            Measured(card, "offload", way, "offload", {"offload": tiers} if tiers else {})
            for way, tiers in TIERS.items()
            if "nvme" not in tiers.values()
        ]
    return [one for one in found if one.row is not None]


def main(argv: list[str] | None = None) -> None:
    """Compiles the programs and writes the record and the facts."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Returns a row per program; a smoke run compiles the first at tiny sizes and keeps nothing."""
    rows = [predict(one, smoke) for one in programs()[: 1 if smoke else None]]
    goals = []
    for row in rows:
        name = f"{row['program']}: predicted / measured"
        goals += [
            Goal(name=name, value=row["predicted / measured"], limit=1 + WITHIN),
            Goal(name=name, value=row["predicted / measured"], limit=1 - WITHIN, at_least=True),
        ]
    rows += [] if smoke else memory_rows()
    notes = [
        f"compiled with {compile_client.compiler_version(fast=False)}, measured with JAX 0.11.2",
        "memory: compiled on the card itself, plus the gaps of its allocator",
    ]
    return Record(name="foresight", rows=rows, goals=goals, notes=notes)


def memory_rows() -> list[dict[str, Any]]:
    """Returns a row for each program whose peak a card counted."""
    rows = []
    for card in ("h100", "h200"):
        parts = json.loads((RESULTS / f"gpu_{card}.json").read_text())["parts"]
        for row in parts["memory"]["rows"]:
            if row["measured/predicted"] is None:
                continue  # hidden by the peak of an earlier program
            predicted = row["predicted_MB"] + ALLOCATOR_BYTES / 1e6
            rows.append(
                {
                    "program": f"{card} memory {row['case']}",
                    "measured_MB": row["measured_MB"],
                    "predicted_MB": predicted,
                    "predicted / measured": predicted / row["measured_MB"],
                }
            )
    return rows


def predict(one: Measured, smoke: bool) -> dict[str, Any]:
    """Predicts one program, and keeps the facts of its compiled step."""
    workload = choose_workload(one.workload, smoke)
    offload = one.settings.get("offload", {})
    # An update in the backward pass cannot wait for the norm of all gradients.
    clip = {"clip_norm": None} if offload.get("update_in_backward") else {}
    plan = zerojax.make_plan(
        make_factory(workload),
        zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1]),
        example_batch=make_source(workload, 4).batch(0),
        optimizer=make_optimizer(**clip),
        precision="bf16",
        **one.settings,
    )
    found = forecast_step(plan, gpu=one.card, fast=smoke)
    if found.facts is not None and not smoke:
        keep(one.name, found.facts)
    estimate = found.forecast.estimate
    return row_of(one, estimate.expected_seconds or 0.0, estimate.step_seconds or 0.0)


def row_of(one: Measured, expected: float, least: float) -> dict[str, Any]:
    """Returns the row of a program.

    Args:
      one: the program.
      expected: predicted seconds of a step.
      least: seconds of a step by the roofline.
    """
    assert one.row is not None
    measured = one.row["step_ms"]
    row = {
        "program": one.name,
        "measured_ms": measured,
        "predicted_ms": 1e3 * expected,
        "at_best_ms": 1e3 * least,
        "predicted / measured": 1e3 * expected / measured,
        "at best / measured": 1e3 * least / measured,
    }
    if one.foreseen is not None:
        row |= {
            "foreseen_ms": one.foreseen["expected_ms"],
            "foreseen / measured": one.foreseen["expected_ms"] / measured,
            "foreseen by": f"{one.foreseen['commit'] or 'unknown commit'}, jax "
            f"{one.foreseen['jax']}, {one.foreseen['source']}",
        }
    return row


def keep(name: str, facts: dict[str, Any]) -> Path:
    """Writes the facts that a prediction reads."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({key: facts[key] for key in KEPT}, separators=(",", ":")) + "\n")
    return path


if __name__ == "__main__":
    main()
