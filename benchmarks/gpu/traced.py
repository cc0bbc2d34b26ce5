"""What ran on a GPU, one by one, as the profiler of JAX has seen it.

Reads the trace's file; knows nothing of what was traced.
"""

from __future__ import annotations

import gzip
import json

from zerojax.forecasting.profiling import newest_trace


def device_events(folder: str) -> list[tuple[float, float]]:
    """(start, duration) in microseconds of what ran on a GPU's streams, from a trace."""
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
        (event["ts"], event.get("dur", 0.0))
        for event in events
        if event.get("ph") == "X"
        and event["pid"] in gpus
        and (event["pid"], event["tid"]) in streams
    ]
