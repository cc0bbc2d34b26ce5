"""Copies to and from host memory that hide behind products, read from compiled steps.

Each program is compiled for its card without a GPU, and its schedule is replayed at the rates of
that card: a transfer hides behind the work between its start and its wait. Expected times are
compared with those of the same step without offload.
"""

from __future__ import annotations

from typing import Any

import jax

import zerojax
from benchmarks.gpu.subjects import make_factory, make_optimizer, make_source
from benchmarks.gpu.workloads import choose_workload
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, save_so_far, write_record
from zerojax.forecasting.compiled_step import forecast_step
from zerojax.forecasting.hlo.host_copies import TO_DEVICE, TO_HOST

CARDS = ("h100", "h200")
TIERS: dict[str, tuple[dict[str, Any], float | None]] = {
    "none": ({}, None),
    "activations host": ({"activations": "host"}, 1.05),
    "params host": ({"params": "host"}, 1.15),
    "opt_state host": ({"opt_state": "host"}, 1.35),
    "opt_state host, in the forward pass": (
        {"opt_state": "host", "update_in_forward": True},
        1.35,
    ),
    "opt_state host, in the forward pass, 0.12 of it on the device": (
        {"opt_state": {"device": 0.12, "host": 0.88}, "update_in_forward": True},
        1.35,
    ),
    "opt_state host, delayed": ({"opt_state": "host", "delayed_update": True}, 1.10),
    "update in the backward pass": (
        {"params": "host", "opt_state": "host", "update_in_backward": True},
        1.10,
    ),
    "update in the backward pass, 0.12 of opt_state on the device": (
        {
            "params": "host",
            "opt_state": {"device": 0.12, "host": 0.88},
            "update_in_backward": True,
        },
        1.10,
    ),
}
"""{name: (offload settings, largest expected time relative to the step without offload)}."""
MEMORY_TRAFFIC = {"gpt2": ({"unroll": True}, 66.0), "llama": ({}, 170.0)}
"""{workload: (settings, largest number of GB of device memory read and written in a step)}."""


def main(argv: list[str] | None = None) -> None:
    """Compiles the programs and writes the record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    record = Record(name="overlap", rows=[])
    for card in CARDS[: 1 if arguments.smoke else None]:
        record = _with_tiers(record, card, arguments.smoke)
        save_so_far(record, arguments, load_before)
    for name, (settings, limit) in MEMORY_TRAFFIC.items():
        row = measure(CARDS[0], name, settings, smoke=arguments.smoke)
        goal = Goal(name=f"{name}: GB of memory traffic", value=row["memory_GB"], limit=limit)
        record = Record(name=record.name, rows=[*record.rows, row], goals=[*record.goals, goal])
    write_record(record, arguments, load_before)


def _with_tiers(record: Record, card: str, smoke: bool) -> Record:
    rows, goals = [*record.rows], [*record.goals]
    plain: dict[str, Any] = {}
    for name, (offload, limit) in TIERS.items():
        row = measure(card, "offload", {"offload": offload} if offload else {}, smoke=smoke)
        plain = plain or row
        row["expected / none"] = row["expected_ms"] / plain["expected_ms"]
        row["products / none"] = row["products_ms"] / plain["products_ms"]
        rows.append({"way": name} | row)
        if limit is not None:
            where = f"{name}, {card}"
            goals += [
                Goal(name=f"{where}: time / none", value=row["expected / none"], limit=limit),
                Goal(name=f"{where}: products / none", value=row["products / none"], limit=1.005),
            ]
    return Record(name=record.name, rows=rows, goals=goals)


def measure(card: str, workload: str, settings: dict[str, Any], *, smoke: bool) -> dict[str, Any]:
    """Compiles a step for a card and returns its row."""
    chosen = choose_workload(workload, smoke)
    # An update in the backward pass cannot wait for the norm of all gradients.
    updates = settings.get("offload", {}).get("update_in_backward")
    plan = zerojax.make_plan(
        make_factory(chosen),
        zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1]),
        example_batch=make_source(chosen, 4).batch(0),
        optimizer=make_optimizer(**({"clip_norm": None} if updates else {})),
        precision="bf16",
        **settings,
    )
    found = forecast_step(plan, gpu=card, fast=smoke)
    expected = found.forecast.estimate.expected
    assert found.facts is not None
    assert expected is not None
    copies = found.facts["host_copies"]
    return {
        "card": card,
        "workload": workload,
        "expected_ms": 1e3 * expected.seconds,
        "waiting_ms": 1e3 * expected.host_seconds,
        "products_ms": 1e3 * (expected.product_seconds + expected.attention_seconds),
        "memory_GB": found.facts["hbm_bytes"] / 1e9,
        "peak_GiB": found.forecast.memory.peak / 2**30,
        "in_GB": _moved(copies, TO_DEVICE),
        "out_GB": _moved(copies, TO_HOST),
        "both_ways_GB": sum(one["bytes"] * one["times"] for one in copies if one["opposite_bytes"])
        / 1e9,
    }


def _moved(copies: list[dict[str, Any]], direction: str) -> float:
    found = [one for one in copies if one["direction"] == direction]
    return sum(one["bytes"] * one["times"] for one in found) / 1e9


if __name__ == "__main__":
    main()
