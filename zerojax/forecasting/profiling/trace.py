"""Device time by operation, from the trace that jax.profiler writes."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zerojax.forecasting.hlo.matmuls import Matmuls
from zerojax.forecasting.hlo.program import Program

CONTAINERS = ("while", "call", "conditional", "async-start", "async-done")
"""What only runs other operations, which have their own events."""
_SUMMARY_LINES = ("XLA Modules", "Steps", "Framework Ops", "Framework Name Scope", "Source code")
"""Lines of a trace on which operations are shown a second time, in groups."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpTime:
    """One operation of a compiled program, over all traced steps and devices.

    Attributes:
      name: in the program, as in "fusion.12"; module: the program.
      seconds: sum of its events; count: of them; devices: how many had some.
      kind: "product", "collective", "copy" or "other"; "" before a program was read.
      flops: of one execution on one device, of its products.
      where: the operation in the traced model that it comes from.
    """

    name: str
    module: str
    seconds: float
    count: int
    devices: int
    kind: str = ""
    flops: float = 0.0
    where: str = ""


def newest_trace(folder: str | Path) -> Path | None:
    """The trace that was written last below a folder."""
    found = sorted(Path(folder).rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def read_trace(path: str | Path) -> list[OpTime]:
    """The operations in a trace, those with most time first.

    Raises:
      ValueError: it is none that jax.profiler writes.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"'{path}' is no trace of jax.profiler: {error}") from None
    hidden = set(_lines(events, _SUMMARY_LINES))
    seconds: dict[tuple[str, str], float] = {}
    counts: dict[tuple[str, str], int] = {}
    devices: dict[tuple[str, str], set[Any]] = {}
    for event in events:
        facts = event.get("args") or {}
        if event.get("ph") != "X" or "hlo_op" not in facts or _line(event) in hidden:
            continue
        key = str(facts.get("hlo_module", "")), str(facts["hlo_op"])
        seconds[key] = seconds.get(key, 0.0) + event.get("dur", 0.0) / 1e6
        counts[key] = counts.get(key, 0) + 1
        # Devices of a host share its process in a trace of a CPU; GPUs have one each.
        devices.setdefault(key, set()).add(facts.get("device_ordinal", event.get("pid")))
    ops = [
        OpTime(
            name=name,
            module=module,
            seconds=spent,
            count=counts[module, name],
            devices=len(devices[module, name]),
        )
        for (module, name), spent in seconds.items()
    ]
    return sorted(ops, key=lambda op: -op.seconds)


def _line(event: Any) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _lines(events: Iterable[Any], names: Sequence[str]) -> Iterable[tuple[Any, Any]]:
    for event in events:
        is_name = event.get("ph") == "M" and event.get("name") == "thread_name"
        if is_name and event["args"].get("name") in names:
            yield _line(event)


def with_programs(ops: Sequence[OpTime], program: Program) -> list[OpTime]:
    """The operations of one program with what its text says of them, without containers.

    Args:
      ops: of any programs; only those whose names the program has are kept.
    """
    matmuls, found = Matmuls(program), []
    known = {i.name: (c, i) for c in program.computations.values() for i in c.instructions}
    for op in ops:
        if op.name not in known:
            continue
        computation, instruction = known[op.name]
        opcode = instruction.opcode
        if opcode in CONTAINERS:
            continue
        flops = float(sum(matmuls.flops(computation, instruction)))
        found.append(
            dataclasses.replace(
                op,
                kind=_kind(opcode, flops),
                flops=flops,
                where=_short(instruction.op_name or ""),
            )
        )
    return found


def _kind(opcode: str, flops: float) -> str:
    if flops:
        return "product"
    kinds = ("all-", "reduce-scatter", "collective-", "ragged-all-", "send", "recv")
    if opcode.startswith(kinds):
        return "collective"
    return "copy" if opcode.startswith(("copy", "transpose", "bitcast")) else "other"


def _short(op_name: str) -> str:
    """The end of "jit(step)/shard_map/while/body/.../dot_general": the last few names."""
    noise = ("shard_map", "while", "body", "closed_call", "checkpoint", "jit(main)")
    parts = [part for part in op_name.split("/") if part not in noise]
    return "/".join(parts[-3:])
