"""Golden files of plans: what a compiled step sends and needs, and how two commits differ."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerojax.forecasting.program_rules.expecting import CheckedStep
from zerojax.forecasting.step_contents import SentArray
from zerojax.plan.counts import padded_elements
from zerojax.plan.make import Plan
from zerojax.plan.wire import leaf_transfers
from zerojax.runtime.user_files import replace_text
from zerojax.tracing.trees import format_bytes

FORMAT = 1
_DIGITS = 3
"""Decimals of times per step, which are fractions where a collective sends a part."""


def plan_record(step: CheckedStep) -> dict[str, Any]:
    """Returns what a golden file stores of a compiled step: plain values that JSON can store.

    Args:
      step: of `check_step`.
    """
    plan, contents = step.plan, step.contents
    return {
        "format": FORMAT,
        "compiler": "" if step.forecast is None else step.forecast.compiler,
        "gpu": "" if step.forecast is None else step.forecast.gpu.name,
        "mesh": {str(axis): size for axis, size in plan.mesh.shape.items() if size > 1},
        "zero": plan.zero,
        "num_microbatches": plan.num_microbatches,
        "peak_bytes": contents.peak,
        "wire_bytes": contents.wire_bytes,
        "collectives": _collectives(contents.sent),
        "parameters": _parameters(plan, contents.sent),
    }


def _collectives(sent: tuple[SentArray, ...]) -> dict[str, dict[str, int]]:
    """Returns {"all-gather over data, bf16": {"times": ..., "bytes": ...}} of one step."""
    rows: dict[str, dict[str, int]] = {}
    counted: dict[str, set[str]] = collections.defaultdict(set)
    for one in sent:
        key = f"{one.kind} over {one.axis}, {one.dtype}"
        row = rows.setdefault(key, {"times": 0, "bytes": 0})
        row["bytes"] += one.times * one.num_bytes
        if one.collective not in counted[key]:  # one collective may send several arrays
            counted[key].add(one.collective)
            row["times"] += one.times
    return dict(sorted(rows.items()))


def _parameters(plan: Plan, sent: tuple[SentArray, ...]) -> dict[str, dict[str, Any]]:
    gathers = _gathers(plan, sent)
    return {
        name: {
            "shape": list(leaf.shape),
            "layout": [_entry(entry) for entry in leaf.stored_spec],
            "gathered": gathers.get(name, {}),
            # A dimension may be split over several axes.
            "summed": _sums(plan, name),
        }
        for name, leaf in sorted(plan.placement.leaves.items())
    }


def _entry(entry: str | None) -> str | None:
    return "+".join(entry) if isinstance(entry, tuple) else entry


def _gathers(plan: Plan, sent: tuple[SentArray, ...]) -> dict[str, dict[str, Any]]:
    """Returns {parameter: {dtype: {"times", "bytes"}}} of the compiled gathers."""
    leaves, placement = plan.placement.leaves, plan.placement
    found: dict[str, dict[str, Any]] = {}
    for one in sent:
        names = [name for name in one.parameters if name in leaves]
        if one.kind != "all-gather" or not names:
            continue
        sizes = {name: padded_elements(placement, leaves[name]) for name in names}
        # One gather may send several parameters as one array; each gets its share by size.
        together = sum(sizes.values())
        for name, size in sizes.items():
            row = found.setdefault(name, {}).setdefault(one.dtype, {"times": 0.0, "bytes": 0})
            row["times"] += one.times * one.elements / together
            row["bytes"] += round(one.times * one.num_bytes * size / together)
    for rows in found.values():
        for row in rows.values():
            row["times"] = round(row["times"], _DIGITS)
    return found


def _sums(plan: Plan, name: str) -> dict[str, dict[str, Any]]:
    """Returns {"reduce-scatter over data, bfloat16": {"times", "bytes"}} of the plan."""
    rows: dict[str, dict[str, Any]] = {}
    for one in leaf_transfers(plan, plan.placement.leaves[name]):
        # Gathers are read from the compiled step, and sums from the plan: sums of a loop have no
        # names.
        if one.kind != "all-gather" and one.num_bytes:
            key = f"{one.kind} over {'+'.join(one.over)}, {one.dtype}"
            row = rows.setdefault(key, {"times": 0.0, "bytes": 0})
            row["times"] = round(row["times"] + one.times, _DIGITS)
            row["bytes"] += round(one.num_bytes)
    return rows


def compare_records(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Returns one line for each difference of two records, in words; [] if they are equal.

    Versions of the compiler are not compared.

    >>> old = {"zero": 2, "peak_bytes": 2**30, "collectives": {}, "parameters": {}}
    >>> compare_records({**old, "zero": 3, "peak_bytes": 2**31}, old)
    ['zero: 3, was 2', 'peak: 2.0 GiB, was 1.0 GiB']
    """
    return [*_settings(new, old), *_totals(new, old), *_differing_parameters(new, old)]


def _settings(new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[str]:
    for key in ("gpu", "mesh", "zero", "num_microbatches"):
        if new.get(key) != old.get(key):
            yield f"{key}: {_text(new.get(key))}, was {_text(old.get(key))}"


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return " x ".join(f"{axis} {size}" for axis, size in value.items()) or "1 device"
    return str(value) if value not in (None, "") else "none"


def _totals(new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[str]:
    for key, what in (("peak_bytes", "peak"), ("wire_bytes", "sent per device and step")):
        if new.get(key) != old.get(key):
            yield f"{what}: {_sizes(new.get(key), old.get(key))}"
    yield from _rows("", new["collectives"], old["collectives"])


def _sizes(new: int | None, old: int | None) -> str:
    """Returns both sizes, in bytes where they round to the same text."""
    shown = ["unknown" if size is None else format_bytes(size) for size in (new, old)]
    # A small change of a large size would print the same text twice.
    if shown[0] == shown[1]:
        shown = [f"{size:,} bytes" for size in (new, old)]
    return f"{shown[0]}, was {shown[1]}"


def _rows(
    start: str, new: Mapping[str, Any], old: Mapping[str, Any], verb: str = ""
) -> Iterator[str]:
    """Yields a line for each row of {"all-gather over data, bf16": {"times", "bytes"}}."""
    for key in dict.fromkeys([*new, *old]):
        if new.get(key) != old.get(key):
            rows = [new.get(key), old.get(key)]
            sizes = ["none" if row is None else format_bytes(row["bytes"]) for row in rows]
            if sizes[0] == sizes[1]:
                sizes = ["none" if row is None else f"{row['bytes']:,} bytes" for row in rows]
            texts = [
                size if row is None else f"{row['times']:g} times per step, {size}"
                for row, size in zip(rows, sizes, strict=True)
            ]
            yield f"{start}{verb}{key}: {texts[0]}, was {texts[1]}"


def _differing_parameters(new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[str]:
    ours, theirs = new["parameters"], old["parameters"]
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in theirs:
            yield f"{name}: new parameter {ours[name]['shape']}"
        elif name not in ours:
            yield f"{name}: no such parameter, was {theirs[name]['shape']}"
        else:
            yield from _parameter(name, ours[name], theirs[name])


def _parameter(name: str, new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[str]:
    for key in ("shape", "layout"):
        if new[key] != old[key]:
            yield f"{name}: {key} {new[key]}, was {old[key]}"
    times, before = (
        round(sum(row["times"] for row in one["gathered"].values()), _DIGITS) for one in (new, old)
    )
    # A change of the number explains the change of the bytes, so one line is enough.
    if times != before:
        yield f"{name}: gathered {times:g} times per step, was {before:g}"
    elif new["gathered"] != old["gathered"]:
        yield from _rows(f"{name}: ", new["gathered"], old["gathered"], "gathered in ")
    yield from _rows(f"{name}: ", new["summed"], old["summed"])


def check_golden(record: Mapping[str, Any], path: str | Path) -> list[str] | None:
    """Writes a golden file, or compares a record with it.

    Args:
      record: of `plan_record`.
      path: of the file.

    Returns:
      None if the file did not exist and was written; else the differences (`compare_records`).

    Raises:
      ValueError: the file is no golden file of this format.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        replace_text(path, json.dumps(record, indent=1) + "\n")
        return None
    try:
        old = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is no golden file: {error}; give another path, or delete it to write it anew"
        ) from None
    if not isinstance(old, dict) or old.get("format") != FORMAT:
        found = old.get("format") if isinstance(old, dict) else None
        raise ValueError(
            f"{path} has format {found}, and this zerojax reads {FORMAT}; delete it to write it "
            "anew"
        )
    return compare_records(record, old)
