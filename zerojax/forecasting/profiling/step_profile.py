"""Reads the device time of each operation from a profiler trace; formats the profile of a training
step as text and JSON."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerojax.config.late_dataclasses import dataclass
from zerojax.forecasting.hlo.costs import Matmuls
from zerojax.forecasting.hlo.program import Program
from zerojax.forecasting.profiling.parameter_flops import ParameterFlops
from zerojax.tracing.trees import format_bytes, format_count

TOP = 15

CONTAINERS = ("while", "call", "conditional", "async-start", "async-done")
"""Operations that only run other operations, which have their own events."""
_SUMMARY_LINES = ("XLA Modules", "Steps", "Framework Ops", "Framework Name Scope", "Source code")
"""Lines of a trace that repeat operations in groups."""


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Measurements of some steps of a run on the devices of one process.

    Attributes:
      steps: number of measured steps, and of traced steps.
      devices: number of devices of the run.
      device_kind: name of this kind of device, as JAX reports it.
      step_seconds: seconds of one step without the trace.
      spent: {"data", "step", "save", "eval" or "host": seconds over all measured steps}.
      save_seconds: seconds until the run continues after starting a save of the whole state; None:
        not measured.
      tokens_per_second: tokens per second of the whole run.
      tflops: TFLOP per second of one device, without recomputation.
      mfu: `tflops` as a share of the device's peak.
      memory: peak, limit and source of the memory, as a run reports them.
      ops: operations of the step, with their time.
      traced_steps, traced_devices: numbers of steps and devices that the sums of `ops` cover.
      flops: FLOPs of each parameter's products.
      counted_flops: FLOPs of the whole step, the sum of `flops`.
      trace: path of the trace file.
    """

    steps: int
    devices: int
    device_kind: str
    step_seconds: float
    spent: Mapping[str, float]
    save_seconds: float | None
    tokens_per_second: float | None
    tflops: float | None
    mfu: float | None
    memory: Mapping[str, Any]
    ops: Sequence[OpTime]
    traced_steps: int
    traced_devices: int
    flops: Sequence[ParameterFlops]
    counted_flops: float
    trace: Path | None


def profile_dict(profile: StepProfile) -> dict[str, Any]:
    """Returns every number of a step profile, unrounded, for JSON."""
    trace = None if profile.trace is None else str(profile.trace)
    return {**dataclasses.asdict(profile), "trace": trace}


def draw(profile: StepProfile) -> str:
    """Formats a step profile as a page of text, at most 100 columns."""
    parts = [_speed(profile), _wall_clock(profile), _top_ops(profile), _flops(profile)]
    if profile.trace is not None:
        parts.append(
            f"Trace of {profile.traced_steps} steps: {profile.trace}\n"
            "  open it at https://ui.perfetto.dev (it stays in the browser), or with XProf:\n"
            f"  pip install xprof; xprof --logdir {_log_folder(profile.trace)}"
        )
    return "\n\n".join(parts)


def _log_folder(trace: Path) -> Path:
    """Returns the folder that contains plugins/profile/DATE/HOST.trace.json.gz, which profiling
    tools take as their log folder."""
    # A trace that was moved may lie in no such folders.
    return trace.parents[3] if len(trace.parents) > 3 else trace.parent


def _speed(profile: StepProfile) -> str:
    words = [f"{profile.step_seconds * 1e3:.4g} ms per step"]
    if profile.tokens_per_second is not None:
        words.append(f"{profile.tokens_per_second:,.0f} tokens/s")
    if profile.tflops is not None:
        words.append(f"{profile.tflops:.4g} TFLOP/s per device")
    if profile.mfu is not None:
        words.append(f"MFU {profile.mfu:.1%}")
    else:
        words.append(f"MFU unknown: no published peak for '{profile.device_kind}'")
    peak = profile.memory.get("peak")
    if peak:
        words.append(f"peak memory {format_bytes(peak)} ({profile.memory.get('source')})")
    head = f"{profile.steps} steps on {profile.devices} x {profile.device_kind}"
    return "\n".join([head, *(f"  {word}" for word in words)])


def _wall_clock(profile: StepProfile) -> str:
    total = sum(profile.spent.values())
    names = {
        "data": "waiting for data",
        "step": "dispatching steps and waiting for them",
        "save": "saving",
        "eval": "evaluating",
        "host": "reports, callbacks and the training loop",
    }
    lines = ["Wall clock, per step"]
    for key, seconds in profile.spent.items():
        # Times of what every run does are shown even if they are 0.
        if seconds or key in ("data", "step", "save"):
            share = seconds / total if total else 0.0
            lines.append(f"  {seconds / profile.steps * 1e3:>10.3f} ms {share:>6.1%}  {names[key]}")
    if profile.save_seconds is not None:
        lines.append(
            f"  {profile.save_seconds * 1e3:>10.3f} ms         one save, until training continues"
        )
    return "\n".join(lines)


def _top_ops(profile: StepProfile) -> str:
    total = sum(op.seconds for op in profile.ops)
    if not total:
        return "Top operations: the trace has no operations of this step"
    each = profile.traced_steps * profile.traced_devices
    lines = [
        # Sums are over all traced steps and devices, and the page is about one of each.
        f"Top operations, per step and device ({total / each * 1e3:.4g} ms in all)",
        f"  {'ms':>9} {'share':>6} {'times':>6} {'TFLOP/s':>8}  {'kind':<10} operation, from where",
    ]
    for op in profile.ops[:TOP]:
        rate = op.flops * op.count / op.seconds / 1e12 if op.flops and op.seconds else None
        lines.append(
            f"  {op.seconds / each * 1e3:>9.4f} {op.seconds / total:>6.1%} {op.count / each:>6.4g} "
            f"{'' if rate is None else format(rate, '.4g'):>8}  {op.kind:<10} {op.name}"
            # Names of operations can be long, and the page has 100 columns.
            f"{', ' + op.where if op.where else ''}"[:100]
        )
    rest = profile.ops[TOP:]
    if rest:
        seconds = sum(op.seconds for op in rest)
        lines.append(f"  {seconds / each * 1e3:>9.4f} {seconds / total:>6.1%}  {len(rest)} others")
    kinds = {op.kind: 0.0 for op in profile.ops}
    for op in profile.ops:
        kinds[op.kind] += op.seconds
    shares = (f"{kind or 'other'} {seconds / total:.1%}" for kind, seconds in kinds.items())
    lines.append(f"  of it: {', '.join(shares)}")
    return "\n".join(lines)


def _flops(profile: StepProfile) -> str:
    counted = profile.counted_flops
    if not counted:
        return "FLOPs of one step by parameter: no matrix products"
    lines = [
        f"FLOPs of one step by parameter ({format_count(counted)} of products, on all devices)",
        f"  {'forward':>8} {'backward':>8} {'again':>8} {'share':>6}",
    ]
    for row in profile.flops:
        columns = (row.forward, row.backward, row.recomputed)
        numbers = " ".join(f"{format_count(value) if value else '-':>8}" for value in columns)
        lines.append(f"  {numbers} {row.total / counted:>6.1%}  {row.name}")
    sums = [
        sum(getattr(r, k) for r in profile.flops) for k in ("forward", "backward", "recomputed")
    ]
    numbers = " ".join(f"{format_count(value) if value else '-':>8}" for value in sums)
    lines.append(f"  {numbers} {sum(sums) / counted:>6.1%}  total")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class OpTime:
    """Time of one operation of a compiled program, summed over all traced steps and devices.

    Attributes:
      name: name of the operation in the program, such as "fusion.12".
      module: name of the program.
      seconds: summed duration of its trace events.
      count: number of its trace events.
      devices: number of devices with such events.
      kind: "product", "collective", "copy" or "other"; "" before a program was read.
      flops: FLOPs of its products in one execution on one device.
      where: name of the operation in the traced model.
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
    """Returns the path of the trace file (*.trace.json.gz) below a folder that was changed last;
    None if there is none."""
    found = sorted(Path(folder).rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def read_trace(path: str | Path) -> list[OpTime]:
    """Reads the operations in a trace file; the operations with the most time come first.

    Raises:
      ValueError: the file is not a trace of jax.profiler.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"'{path}' is not a readable trace of jax.profiler (a file *.trace.json.gz): {error}"
        ) from None
    hidden = set(_lines(events, _SUMMARY_LINES))
    seconds: dict[tuple[str, str], float] = {}
    counts: dict[tuple[str, str], int] = {}
    devices: dict[tuple[str, str], set[Any]] = {}
    for event in events:
        facts = event.get("args") or {}
        # "X" are events with a duration; summaries would count each operation a second time.
        if event.get("ph") != "X" or "hlo_op" not in facts or _line(event) in hidden:
            continue
        key = str(facts.get("hlo_module", "")), str(facts["hlo_op"])
        # Durations are in microseconds.
        seconds[key] = seconds.get(key, 0.0) + event.get("dur", 0.0) / 1e6
        counts[key] = counts.get(key, 0) + 1
        # In a CPU trace the devices of a host share its process; GPUs have one each.
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


def _line(event: Mapping[str, Any]) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _lines(events: Iterable[Any], names: Sequence[str]) -> Iterable[tuple[Any, Any]]:
    for event in events:
        is_name = event.get("ph") == "M" and event.get("name") == "thread_name"
        if is_name and event["args"].get("name") in names:
            yield _line(event)


def with_programs(ops: Sequence[OpTime], program: Program) -> list[OpTime]:
    """Adds kind, FLOPs and origin to the timed operations of one program.

    Args:
      ops: operations of any programs. Operations whose names are not in `program`, and operations
        that only run other operations, are dropped. Names of modules are not compared.
      program: the compiled program.
    """
    matmuls, found = Matmuls(program), []
    # Names are unique in a program, also between computations.
    known = {i.name: (c, i) for c in program.computations.values() for i in c.instructions}
    for op in ops:
        if op.name not in known:
            continue
        computation, instruction = known[op.name]
        opcode = instruction.opcode
        # Their time is that of the operations inside, which have events of their own.
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
    """Returns the last three parts of a name such as
    "jit(step)/shard_map/while/body/.../dot_general", without parts such as "while" that name no
    operation of the model."""
    noise = ("shard_map", "while", "body", "closed_call", "checkpoint", "jit(main)")
    parts = [part for part in op_name.split("/") if part not in noise]
    return "/".join(parts[-3:])
