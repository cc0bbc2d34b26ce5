"""Formats a forecast as a page of text, including its offload section, or as a dictionary for
JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from zerojax.forecasting.forecast_numbers import (
    COMPILED,
    Estimate,
    Expected,
    ForecastNumbers,
    Memory,
    Offload,
    Traffic,
)
from zerojax.plan.expert_costs import expert_lines
from zerojax.plan.plan_page import CELL, ROLE, hiding_lines, moved_lines, tier_lines
from zerojax.plan.plan_page import WIDTH as INNER_WIDTH
from zerojax.tracing.trees import format_bytes, format_count

WIDTH = 100
BAR = 60
BYTE_UNITS = (("GiB", 2**30, 2), ("MiB", 2**20, 2), ("KiB", 2**10, 2), ("B", 1, 0))
TIME_UNITS = (("s", 1.0, 2), ("ms", 1e-3, 2), ("us", 1e-6, 2))
Rows = list[Sequence[str]]

VERDICTS = ("FITS", "DOES NOT FIT", "NOT DECIDED")
"""First words of the line that says whether a run fits."""


def forecast_page(forecast: ForecastNumbers) -> str:
    """Formats a forecast as one page of plain characters, at most 100 columns. The numbers of each
    table add up to its total."""
    sections = [
        _head(forecast),
        _memory(forecast.memory),
        _traffic(forecast.traffic, forecast.num_devices),
        _experts(forecast.plan["experts"]),
        offload_section(forecast),
        _time(forecast),
        _expected(forecast),
        _at_best(forecast),
        _after_warm_up(forecast),
        _notes(forecast),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def forecast_dict(forecast: ForecastNumbers) -> dict[str, Any]:
    """Returns every number of a forecast, unrounded, for JSON; times are in seconds, sizes in
    bytes."""
    return dataclasses.asdict(forecast)


def round_to_sum(parts: Sequence[float], digits: int) -> list[float]:
    """Rounds `parts` to `digits` decimals so that the rounded parts add up to the rounded sum.

    The parts with the largest remainders are rounded up (Hamilton's method), so each part differs
    from its exact value by less than one unit of the last digit.

    >>> round_to_sum([0.004, 0.004, 0.004], 2)
    [0.01, 0.0, 0.0]
    """
    scale = 10**digits
    total = round(sum(parts) * scale)
    # `// 1` rounds down negative parts as well, such as aliased bytes; `int` alone rounds to zero.
    floors = [int(part * scale // 1) for part in parts]
    # The smallest difference floor - exact is the largest remainder.
    by_remainder = sorted(range(len(parts)), key=lambda i: floors[i] - parts[i] * scale)
    for index in by_remainder[: total - sum(floors)]:
        floors[index] += 1
    return [floor / scale for floor in floors]


def _head(forecast: ForecastNumbers) -> list[str]:
    plan, gpu = forecast.plan, forecast.gpu
    parts = f" in {plan['num_microbatches']} microbatches" * (plan["num_microbatches"] > 1)
    axes = " x ".join(f"{name} {size}" for name, size in forecast.mesh.items() if size > 1)
    in_node = min(forecast.num_devices, gpu.node_devices)
    nodes = forecast.num_devices // in_node
    where = f" ({nodes} nodes of {in_node})" if nodes > 1 else ""
    return [
        f"{format_count(plan['num_parameters'])} parameters, zero={plan['zero']}, "
        f"{plan['precision']['compute_dtype']}, batch {plan['global_batch_size']}{parts}",
        f"{forecast.num_devices} x {gpu.title}{where}, mesh {axes or '1 device'}",
        *_pipeline(plan["pipeline"]),
        *_origin(forecast),
        "",
        *_verdict(forecast),
    ]


def _pipeline(pipeline: dict[str, Any] | None) -> list[str]:
    if pipeline is None:
        return []
    words = f"pipeline {pipeline['schedule']}, bubble {pipeline['bubble']:.1%}"
    larger = pipeline["bubble_of_more"]
    if larger is not None:
        words += f" ({larger:.1%} with {2 * pipeline['num_microbatches']} microbatches)"
    return _wrap(
        f"{words}, each tick takes {pipeline['balance']:.2f} times the mean stage, "
        f"{format_bytes(pipeline['message_bytes'])} to neighbours"
    )


def _origin(forecast: ForecastNumbers) -> list[str]:
    if forecast.source != COMPILED:
        return _wrap(f"formulas only: {forecast.why_formula or 'nothing was compiled'}")
    took = f"{forecast.seconds:.0f} s" if forecast.seconds else "0 s, from the cache"
    return _wrap(f"compiled for this card by {forecast.compiler} ({took}); nothing was run")


def _verdict(forecast: ForecastNumbers) -> list[str]:
    verdict = forecast.verdict
    # The order of `VERDICTS` is that of the keys here.
    word = dict(zip((True, False, None), VERDICTS, strict=True))[verdict.fits]
    more = " + activations" if verdict.fits is None else ""
    lines = [
        f"{word}: {format_bytes(verdict.needed)}{more} of {format_bytes(verdict.limit)} available "
        f"per GPU ({verdict.needed / verdict.limit:.0%})",
        _bar(verdict.needed, verdict.limit, forecast.gpu.memory_bytes),
    ]
    for reason in verdict.reasons:
        lines += _wrap(f"- {reason}", "  ", "    ")
    return lines


def _bar(needed: int, limit: int, card: int) -> str:
    """Draws the GPU's memory as a line of characters: # needed, . free for JAX, | JAX's limit, x
    needed beyond the limit."""
    # A step may need more than the whole card; the bar then shows what is needed.
    longest = max(card, needed)
    # Even the smallest step shows one character.
    used = max(1, round(BAR * needed / longest))
    end = round(BAR * limit / longest)
    cells = [
        ("#" if i < end else "x") if i < used else ("." if i < end else " ") for i in range(BAR)
    ]
    return f"  [{''.join(cells[:end])}|{''.join(cells[end:])}]"


def _memory(memory: Memory) -> list[str]:
    compiled = memory.peak is not None
    roles = list(memory.roles)
    sizes = [row.bytes or 0 for row in roles]
    formulas = [row.formula or 0 for row in roles]
    largest = max(memory.peak or 0, memory.formula_peak, 1)
    unit, scale, digits = _unit(largest, BYTE_UNITS)
    # The page must add up, also where the report of live buffers does not explain every byte.
    missing = (memory.peak or 0) - sum(sizes)
    if compiled and missing:
        sizes.append(missing)
    shown = round_to_sum([size / scale for size in sizes], digits)
    shown_formula = round_to_sum([size / scale for size in formulas], digits)
    rows: Rows = []
    for index, row in enumerate(roles):
        if not (row.bytes or row.formula):
            continue
        cells = [row.role]
        if compiled:
            cells.append("-" if row.bytes is None else f"{shown[index]:,.{digits}f}")
        cells.append("-" if row.formula is None else f"{shown_formula[index]:,.{digits}f}")
        rows.append(cells)
    if compiled and missing:
        rows.append(["not accounted for", f"{shown[-1]:,.{digits}f}", "-"])
    total = [f"{sum(shown):,.{digits}f}"] if compiled else []
    formula = f"{sum(shown_formula):,.{digits}f}"
    title = f"MEMORY, {unit} per device" + ", by role at the moment of the peak" * compiled
    header = ["", *(["compiled"] if compiled else []), "formula"]
    table = align_columns([header, *rows, ["peak" if compiled else "sum", *total, formula]], left=1)
    table.insert(-1, "  " + "-" * (len(table[-1]) - 2))
    return [title, *table, *_compiler_count(memory, scale, digits), *_memory_remarks(memory)]


def _compiler_count(memory: Memory, scale: float, digits: int) -> list[str]:
    """Formats a line with the terms from which the compiler computes the peak: arguments, outputs,
    aliased and temporary bytes."""
    if memory.peak is None:
        return []
    parts = [memory.arguments, memory.outputs, -(memory.aliased or 0), memory.temporary]
    shown = round_to_sum([(part or 0) / scale for part in parts], digits)
    texts = [f"{number:,.{digits}f}" for number in map(abs, shown)]
    return [
        f"  peak = arguments {texts[0]} + outputs {texts[1]} - aliased {texts[2]} "
        f"+ temporary {texts[3]}"
    ]


def _memory_remarks(memory: Memory) -> list[str]:
    host = format_bytes(memory.host) if memory.host else "none"
    buffers = [row for row in memory.roles if row.role == "pipeline buffers"]
    buffered = bool(buffers) and memory.peak is not None
    return [
        f"  between steps: state {format_bytes(memory.state)}, batch {format_bytes(memory.batch)}; "
        f"host memory: {host}",
        "  formulas exclude activations and buffers of the compiler",
        *_on_card(memory),
        *["  the compiled activations include the pipeline buffers"] * buffered,
    ]


def _on_card(memory: Memory) -> list[str]:
    if memory.on_card is None:
        return []
    return [f"  a GPU should count {format_bytes(memory.on_card)}, with gaps of its allocator"]


def _traffic(traffic: Traffic, num_devices: int) -> list[str]:
    if num_devices == 1:
        return ["TRAFFIC: none, there is one device"]
    title = "TRAFFIC, sent by one device per step"
    if traffic.wire_bytes is None:
        by_formula = [
            f"  {name} by formula: {format_bytes(sent)}, {sent / (traffic.unit or 1.0):.2f} units"
            for name, sent in _by_formula(traffic)
        ]
        return [title, *by_formula, *_traffic_remarks(traffic)]
    largest = max(traffic.wire_bytes, *(sent for _, sent in _by_formula(traffic)), 1)
    unit, scale, digits = _unit(largest, BYTE_UNITS)
    between = ["between nodes"] if traffic.network_bytes else []
    rows: Rows = [
        ["collective", "axis", "dtype", "times", "in loops", unit, "units", *between, "hidden"]
    ]
    # With one data shard the unit is 0 bytes, and so is what ZeRO sends.
    unit_bytes = traffic.unit or 1.0
    shown = round_to_sum([row.wire_bytes / scale for row in traffic.rows], digits)
    units = round_to_sum([row.wire_bytes / unit_bytes for row in traffic.rows], 2)
    network = round_to_sum([row.network_bytes / scale for row in traffic.rows], digits)
    for row, size, times_unit, crossing in zip(traffic.rows, shown, units, network, strict=True):
        rows.append(
            [
                row.kind,
                row.axis,
                row.dtype,
                f"{row.count:,}",
                str(row.loop_depth),
                f"{size:,.{digits}f}",
                f"{times_unit:.2f}",
                *(f"{crossing:,.{digits}f}" for _ in between),
                f"{row.hidden:.0%}",
            ]
        )
    blank = ["", "", "", ""]
    crossing_sum = [f"{sum(network):,.{digits}f}" for _ in between]
    in_all = [f"{sum(shown):,.{digits}f}", f"{sum(units):.2f}"]
    rows.append(["sum", *blank, *in_all, *crossing_sum, ""])
    for name, sent in _by_formula(traffic):
        size, in_units = f"{sent / scale:,.{digits}f}", f"{sent / unit_bytes:.2f}"
        rows.append([f"{name} by formula", *blank, size, in_units, *("" for _ in between), ""])
    table = align_columns(rows, left=3)
    return [title, *table, *_traffic_remarks(traffic)]


def _by_formula(traffic: Traffic) -> list[tuple[str, int]]:
    others = [
        ("messages", traffic.message_formula_bytes),
        ("attention", traffic.attention_traced_bytes),
        ("experts", traffic.exchange_formula_bytes),
        ("whole matrices", traffic.matrix_formula_bytes),
    ]
    return [("ZeRO", traffic.formula_bytes), *((name, sent) for name, sent in others if sent)]


def _traffic_remarks(traffic: Traffic) -> list[str]:
    lines = [f"  1 unit = 2 bytes x parameters x (N-1)/N = {format_bytes(traffic.unit)}"]
    if traffic.data_wire_bytes is not None and traffic.formula_bytes:
        ratio = traffic.data_wire_bytes / traffic.formula_bytes
        lines[0] += f"; the data axes send {ratio:.1%} of the formula"
    if traffic.message_wire_bytes is not None and traffic.message_formula_bytes:
        ratio = traffic.message_wire_bytes / traffic.message_formula_bytes
        lines.append(
            f"  permutes along stage are messages between neighbours: {ratio:.1%} of the formula"
        )
    if traffic.attention_wire_bytes is not None and traffic.attention_traced_bytes:
        ratio = traffic.attention_wire_bytes / traffic.attention_traced_bytes
        lines.append(f"  attention along context sends {ratio:.1%} of the formula")
    if traffic.network_bytes:
        lines.append("  between nodes: bytes that one device sends by its network card")
    if traffic.exchange_wire_bytes is not None and traffic.exchange_formula_bytes:
        ratio = traffic.exchange_wire_bytes / traffic.exchange_formula_bytes
        lines.append(f"  all-to-alls along expert send {ratio:.1%} of the formula")
    if traffic.matrix_wire_bytes is not None and traffic.matrix_formula_bytes:
        ratio = traffic.matrix_wire_bytes / traffic.matrix_formula_bytes
        lines.append(
            "  whole matrices, which the optimizer needs (all-to-alls in f32): "
            f"{ratio:.1%} of the formula"
        )
    if traffic.rows:
        lines += [
            "  hidden: share of the transfer time covered by concurrent matrix products, at "
            "peak rates"
        ]
    return lines


def _experts(costs: dict[str, Any] | None) -> list[str]:
    if costs is None:
        return []
    lines = [_wrap(f"- {line}", "  ", "    ") for line in expert_lines(costs)]
    return ["EXPERTS, by formula", *(line for wrapped in lines for line in wrapped)]


def _time(forecast: ForecastNumbers) -> list[str]:
    """Formats the expected and the shortest possible time of a step."""
    estimate, expected = forecast.estimate, forecast.estimate.expected
    # Without a time the columns still need a unit; this one is never printed with a number.
    unit, scale, digits = _unit(estimate.expected_seconds or 1e-6, TIME_UNITS)

    def row(name: str, time: Estimate | Expected, seconds: float | None) -> list[str]:
        return [name, "-" if seconds is None else f"{seconds / scale:,.{digits}f}", _rates(time)]

    rows: Rows = [["", unit, ""]]
    if expected is not None:
        rows.append(row("expected", expected, expected.seconds))
    else:
        rows.append(["expected", "-", _why_no_time(forecast)])
    rows.append(row("at best", estimate, estimate.step_seconds))
    title = "TIME of a step; computed, not measured"
    return [title, *align_columns(rows, left=1, last_left=True)]


def _why_no_time(forecast: ForecastNumbers) -> str:
    if forecast.source != COMPILED:
        return "not known: it is computed from the compiled program, and nothing was compiled"
    if forecast.estimate.compute_seconds is None:
        return "not known: the GPU has no published peak for this dtype"
    return "not known: the compiled program states no work that takes time"


def _expected(forecast: ForecastNumbers) -> list[str]:
    """Formats the sum of the expected time and its longest parts; [] if it is not known."""
    expected = forecast.estimate.expected
    if expected is None:
        return []
    unit, scale, digits = _unit(expected.seconds or 1e-6, TIME_UNITS)
    parts = [
        ("matrix products", expected.product_seconds, "kernels with products"),
        ("attention", expected.attention_seconds, "by a library, forward and backward"),
        ("device memory", expected.memory_seconds, "all other kernels, and copies on the device"),
        ("wire", expected.wire_seconds, "waiting for collectives that nothing hides"),
        ("host memory", expected.host_seconds, "waiting for copies that nothing hides"),
        ("files", expected.disk_seconds, "as far as nothing hides them"),
    ]
    shown = round_to_sum([seconds / scale for _, seconds, _ in parts], digits)
    rows: Rows = [
        [name, f"{number:,.{digits}f}", what]
        for (name, seconds, what), number in zip(parts, shown, strict=True)
        if seconds
    ]
    rows.append(["expected", f"{sum(shown):,.{digits}f}", "= their sum"])
    title = _wrap(f"EXPECTED, {unit}: the schedule replayed at {expected.source}")
    lines = [*title, *align_columns(rows, left=1, last_left=True)]
    longest: Rows = [[f"{item.seconds / scale:,.{digits}f}", item.what] for item in expected.items]
    if longest:
        shown_parts = align_columns(longest, left=0, last_left=True)
        # A line of the user's source can have any length.
        lines += ["  longest parts:", *(line[:WIDTH].rstrip() for line in shown_parts)]
    return lines


def _at_best(forecast: ForecastNumbers) -> list[str]:
    estimate, gpu = forecast.estimate, forecast.gpu
    times = [estimate.compute_seconds, estimate.memory_seconds, estimate.wire_seconds]
    unit, scale, digits = _unit(max((t for t in times if t), default=1e-6), TIME_UNITS)
    title = "AT BEST, by the roofline of published peaks: no step is faster"

    def cell(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds / scale:,.{digits}f}"

    repeated = _repeated(forecast) + _in_eight_bits(forecast)
    rows: Rows = [["", unit, ""]]
    rows.append(
        ["matrix products", cell(times[0]), f"{_si(estimate.flops)}FLOP on a device{repeated}"]
    )
    if estimate.hbm_bytes is not None:
        rate = f"at {_si(gpu.memory_bandwidth)}B/s"
        rows.append(["device memory", cell(times[1]), f"{_si(estimate.hbm_bytes)}B {rate}"])
    rows.append(["wire", cell(times[2]), _links(forecast)])
    rows += _step_rows(estimate, scale, digits)
    return [title, *align_columns(rows, left=1, last_left=True)]


def _after_warm_up(forecast: ForecastNumbers) -> list[str]:
    """Compares both programs of a 1-bit optimizer."""
    if forecast.compressed is None:
        return []
    programs = (forecast, forecast.compressed)
    sent = [
        # Without a compiler only the formula knows what a program sends.
        one.traffic.formula_bytes if one.traffic.wire_bytes is None else one.traffic.wire_bytes
        for one in programs
    ]
    network = [one.traffic.network_bytes or 0 for one in programs]
    peaks = [one.memory.peak for one in programs]
    rows: Rows = [
        ["", "warm-up", "after it"],
        ["sent by one device", *map(format_bytes, sent)],
    ]
    if any(network):
        rows.append(["of it between nodes", *map(format_bytes, network)])
    if all(peak is not None for peak in peaks):
        rows.append(["peak memory", *(format_bytes(peak or 0) for peak in peaks)])
    steps = [one.estimate.expected_seconds for one in programs]
    if None not in steps:
        unit, scale, digits = _unit(max(step or 0.0 for step in steps), TIME_UNITS)
        rows.append([f"step, {unit}", *(f"{(step or 0.0) / scale:,.{digits}f}" for step in steps)])
    title = "PROGRAMS: tables above are for the warm-up; after it the step sends signs of momentum"
    return [title, *align_columns(rows, left=1)]


def _repeated(forecast: ForecastNumbers) -> str:
    """Returns a phrase for the share of FLOPs that the model itself does not need (recomputation
    and idle pipeline slots); "" if there are none."""
    estimate = forecast.estimate
    again = 1 - estimate.model_flops / estimate.flops if estimate.flops else 0.0
    # A share up to this prints as 0 %.
    if not estimate.model_flops or again <= 0.005:
        return ""
    if forecast.plan["pipeline"] is None:
        return f", {again:.0%} of it recomputed"
    return f", {again:.0%} of it recomputation and idle slots"


def _in_eight_bits(forecast: ForecastNumbers) -> str:
    """Returns a phrase for the share of FLOPs that are products of 8-bit floats; "" if there are
    none."""
    share = forecast.estimate.eight_bits
    if not share:
        return ""
    own = forecast.gpu.fp8_flops is not None
    return f", {share:.0%} in 8 bits" + " at their own peak" * own


def _step_rows(estimate: Estimate, scale: float, digits: int) -> Rows:
    if estimate.step_seconds is None:
        return [["step", "-", "the GPU has no published peak for this dtype"]]
    exposed, offload_seconds = estimate.exposed_wire_seconds, estimate.offload_seconds
    # The rows must add up to the step, so what is left is the time in which the device is busy.
    busy = estimate.step_seconds - exposed - offload_seconds
    shown = round_to_sum([busy / scale, exposed / scale, offload_seconds / scale], digits)
    total = f"{sum(shown):,.{digits}f}"
    longer = "matrix products" if estimate.bound_by == "compute" else "device memory"
    if estimate.bound_by in ("wire", "link", "disk"):
        longer = (
            "the longer of products and device memory"
            if estimate.memory_seconds
            else "matrix products"
        )
    beside = "transfer time beyond the concurrent matrix products"
    if estimate.hbm_bytes is None:
        beside = "assumption: transfers are hidden as long as matrix products run"
    offload: Rows = []
    plus = ""
    if estimate.offload_seconds:
        plus = " + offload"
        words = "transfers of the update, and others that take longer than products"
        offload = [["offload", f"{shown[2]:,.{digits}f}", words]]
    return [
        ["wire not hidden", f"{shown[1]:,.{digits}f}", beside],
        *offload,
        ["step", total, f"= {longer} + wire not hidden{plus}; bound by {estimate.bound_by}"],
    ]


def _links(forecast: ForecastNumbers) -> str:
    gpu = forecast.gpu
    if forecast.num_devices == 1:
        return "one device"
    text = f"{_si(gpu.node_bandwidth)}B/s inside a node"
    if forecast.num_devices > gpu.node_devices:
        text += f", {_si(gpu.network_bandwidth)}B/s per GPU between nodes"
    return text


def _rates(time: Estimate | Expected) -> str:
    """Formats the rates that belong to a time of a step."""
    parts = []
    if time.mfu is not None:
        parts.append(f"MFU {time.mfu:.0%}")
    if time.tokens_per_second is not None:
        hours = 1e9 / time.tokens_per_second / 3600
        rate = format_count(time.tokens_per_second)
        parts.append(f"{rate} tokens/s, a billion in {hours:.3g} hours")
    return "; ".join(parts)


def _notes(forecast: ForecastNumbers) -> list[str]:
    gpu = forecast.gpu
    notes = list(forecast.remarks)
    # A source begins with the name of the field that it supports, which the page does not need.
    notes += [f"card: {source.partition(': ')[2] or source}" for source in gpu.sources]
    has_files = forecast.offload is not None and forecast.offload.machine_disk > 0
    # An assumed rate of a disk matters only if the run has files.
    assumed = [x for x in gpu.assumptions if has_files or not x.startswith("disk_gb_per_s:")]
    notes += [f"assumed: {assumption}" for assumption in assumed]
    notes += [
        f"compiler option {name} not used: {why}" for name, why in forecast.options_dropped.items()
    ]
    if forecast.num_devices > gpu.node_devices:
        notes.append(
            "between nodes, ring collectives use the network cards of all GPUs of a node at "
            "once, as in "
            "NCCL; all-to-alls send directly to each GPU of another node"
        )
    lines = ["NOTES"] if notes else []
    for note in notes:
        lines += _wrap(f"- {note}", "  ", "    ")
    return lines


def _unit(largest: float, units: Sequence[tuple[str, float, int]]) -> tuple[str, float, int]:
    """Chooses the largest of `units` that does not exceed the value; the last if all exceed it."""
    return next((unit for unit in units if largest >= unit[1]), units[-1])


def _si(value: float) -> str:
    """Formats a rate with a decimal unit prefix: `_si(3.35e12) == "3.35 T"`."""
    for limit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g} {prefix}"
    return f"{value:.4g} "


def align_columns(rows: Rows, *, left: int, last_left: bool = False) -> list[str]:
    """Pads the cells of a table so that columns have equal widths.

    Args:
      rows: cells of each row.
      left: number of first columns that are aligned left; the others are aligned right.
      last_left: whether the last column is aligned left, too.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width)
            if i < left or (last_left and i == len(row) - 1)
            else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _wrap(text: str, first: str = "", other: str = "  ") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=other)


def offload_section(forecast: ForecastNumbers) -> list[str]:
    """Formats the offload section: bytes in each memory, transferred bytes by formula and as
    compiled, and overlap; [] without offload."""
    offload = forecast.offload
    if offload is None:
        return []
    lines = [*tier_lines(offload.tiers), *_per_node(forecast, offload)]
    if offload.moved:
        lines += ["", *moved_lines(offload.moved), *_compiled(offload)]
    if offload.hiding is not None:
        estimate = forecast.estimate
        tokens, step = estimate.tokens_per_second, estimate.step_seconds
        # The number of tokens of a batch is not stored in the forecast, but their quotient is.
        lines += hiding_lines(offload.hiding, round(tokens * step) if tokens and step else None)
    return ["OFFLOAD, by formula", *(f"  {line}".rstrip() for line in lines)]


def _per_node(forecast: ForecastNumbers, offload: Offload) -> list[str]:
    """Formats a line with the host memory and disk space that a machine with several of these GPUs
    needs."""
    number = min(forecast.num_devices, forecast.gpu.node_devices)
    sizes = {"host memory": offload.machine_host, "disk": offload.machine_disk}
    needed = [f"{format_bytes(size)} of {words}" for words, size in sizes.items() if size]
    gpus = "one GPU" if number == 1 else f"{number} GPUs"
    return [f"  a machine with {gpus} needs {' and '.join(needed)}"] if needed else []


def _compiled(offload: Offload) -> list[str]:
    """Formats lines about the copies between host and device in the compiled program."""
    if offload.compiled_to_device is None or offload.compiled_to_host is None:
        return []
    sizes = (offload.compiled_to_device, offload.compiled_to_host)
    cells = "".join(f" {format_bytes(size):>{CELL}}" for size in sizes)
    lines = [f"  {'compiled':<{ROLE}}{cells}"]
    if offload.by_kernels:
        sentence = (
            f"{format_bytes(offload.by_kernels)} of these are copied by kernels, on the processors "
            "that also compute products"
        )
        lines += textwrap.wrap(sentence, INNER_WIDTH, initial_indent="  ", subsequent_indent="    ")
    if any(part.read for part in offload.moved):
        lines.append("  files are read and written outside the compiled program")
    return lines
