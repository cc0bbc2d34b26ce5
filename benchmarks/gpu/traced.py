"""Kernels and copies that ran on a GPU, from a trace of JAX's profiler.

Reads the file of a trace of any program.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from zerojax.forecasting.profiling import newest_trace

Kind = Literal["in", "out", "compute"]
Interval = tuple[float, float]

_KINDS: Mapping[str, Kind] = {"MemcpyH2D": "in", "MemcpyD2H": "out"}
"""Names that the profiler gives to copies."""


@dataclasses.dataclass(frozen=True)
class DeviceEvent:
    """One kernel or copy on a stream of the GPU.

    Attributes:
      start, duration: time in microseconds.
      kind: "in" for a copy from the host, "out" for a copy to it, otherwise "compute".
      name: name of the kernel or copy.
    """

    start: float
    duration: float
    kind: Kind
    name: str = ""

    @property
    def end(self) -> float:
        return self.start + self.duration


def device_events(folder: str) -> list[DeviceEvent]:
    """Returns the kernels and copies on a GPU's streams, from the newest trace in `folder`."""
    path = newest_trace(folder)
    if path is None:
        raise FileNotFoundError("the profiler wrote no trace")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    named = [event for event in events if event.get("ph") == "M"]
    gpus = {e["pid"] for e in named if "/device:GPU" in str(e.get("args", {}).get("name"))}
    streams = {
        (event["pid"], event["tid"])
        for event in named
        if event.get("name") == "thread_name" and event["args"]["name"].startswith("Stream")
    }
    return [
        DeviceEvent(
            event["ts"], event.get("dur", 0.0), _KINDS.get(event["name"], "compute"), event["name"]
        )
        for event in events
        if event.get("ph") == "X"
        and event["pid"] in gpus
        and (event["pid"], event["tid"]) in streams
    ]


def busy_ms(events: Sequence[DeviceEvent]) -> dict[str, float]:
    """Returns milliseconds in which the GPU was busy, by kind and by pairs of kinds.

    Keys: "span_ms" from the first start to the last end; "in_ms", "out_ms" and "compute_ms";
    "in_and_out_ms" with copies in both directions in progress; "copies_alone_ms" with a copy and no
    kernel; "idle_ms" with nothing.
    """
    kinds: dict[Kind, list[Interval]] = {
        kind: _union((e.start, e.end) for e in events if e.kind == kind)
        for kind in ("in", "out", "compute")
    }
    copies = _union([*kinds["in"], *kinds["out"]])
    every = _union([*copies, *kinds["compute"]])
    span = every[-1][1] - every[0][0] if every else 0.0
    times = {f"{kind}_ms": _length(intervals) for kind, intervals in kinds.items()}
    times["in_and_out_ms"] = times["in_ms"] + times["out_ms"] - _length(copies)
    times["copies_alone_ms"] = _length(every) - times["compute_ms"]
    times["idle_ms"] = span - _length(every)
    return {name: time / 1e3 for name, time in ({"span_ms": span} | times).items()}


def longest_kernels(events: Sequence[DeviceEvent], count: int = 25) -> list[dict[str, Any]]:
    """Returns the `count` kernels and copies that took most time: name, how often, milliseconds."""
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event.name, []).append(event.duration)
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    return [
        {"kernel": name[:120], "runs": len(found), "ms": sum(found) / 1e3}
        for name, found in ordered[:count]
    ]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns disjoint intervals in order that cover the same time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
