"""Tables of the HTML report: events, processes, and time per activity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerojax.config.display import as_html
from zerojax.training.metrics.console import format_seconds
from zerojax.training.metrics.metric_files import Metrics
from zerojax.training.metrics.stragglers import ACTIVITIES

MAX_EVENTS = 200
NAMES = {
    "data": "waiting for data",
    "step": "training steps",
    "save": "saving",
    "eval": "evaluating",
    "host": "start-up, callbacks, reports",
}
KINDS = {
    "loss_spike": "loss spike",
    "not_finite": "not finite",
    "slow_process": "slow process",
    "fast_again": "keeps up again",
    "failed": "run failed",
    "interrupted": "run interrupted",
}


def breakdown(metrics: Metrics) -> dict[str, float]:
    """Seconds by activity of the whole run, the time after its last reports included."""
    spent = dict.fromkeys(ACTIVITIES, 0.0)
    for record in [*metrics.train, *metrics.ends]:
        for activity in ACTIVITIES:
            spent[activity] += record.get(f"spent_{activity}") or 0.0
    return spent


def breakdown_table(metrics: Metrics) -> str:
    """Where the run's time went, as a table; nothing for a run that did not measure it."""
    spent = breakdown(metrics)
    total = sum(spent.values())
    if not total:
        return ""
    rows = [
        (NAMES[activity], format_seconds(seconds), f"{seconds / total:.1%}")
        for activity, seconds in sorted(spent.items(), key=lambda item: -item[1])
        if seconds
    ]
    return _table(("", "time", "share"), rows)


def events_table(events: Sequence[Mapping[str, Any]]) -> str:
    """Spikes, steps that were not finite, processes that were slow: the last ones, newest first."""
    groups = _in_a_row(events)
    rows = [
        (
            f"{group[0]['step']:,}" if len(group) == 1 else _span(group),
            KINDS.get(group[0]["event"], str(group[0]["event"])),
            _where(group[0]),
            str(group[0].get("text", "")),
        )
        for group in groups[: -MAX_EVENTS - 1 : -1]
    ]
    if not rows:
        return ""
    more = len(groups) - len(rows)
    note = f"<p>and {more:,} earlier ones in metrics.jsonl</p>" if more else ""
    return _events(("step", "event", "where", "message"), rows) + note


def ending(metrics: Metrics) -> tuple[str, str] | None:
    """("failed" or "interrupted", its message) where the run's last start ended so."""
    since = metrics.starts[-1]["time"] if metrics.starts else 0.0
    for event in reversed(metrics.events):
        if event["event"] in ("failed", "interrupted") and event["time"] >= since:
            return event["event"], str(event.get("text", ""))
    return None


def _in_a_row(events: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Events in order; neighbours of one kind and place are one group."""
    groups: list[list[Mapping[str, Any]]] = []
    for event in events:
        last = groups[-1][-1] if groups else None
        if last is not None and _kind(last) == _kind(event) == ("not_finite", _where(event)):
            groups[-1].append(event)
        else:
            groups.append([event])
    return groups


def _kind(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event["event"]), _where(event)


def _where(event: Mapping[str, Any]) -> str:
    return str(event.get("leaf") or event.get("host") or "")


def _span(group: Sequence[Mapping[str, Any]]) -> str:
    return f"{group[0]['step']:,} to {group[-1]['step']:,} ({len(group):,} steps)"


def _events(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f'<table class="events">{_lines(head, rows)}</table>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f'<div class="settings"><div><table>{_lines(head, rows)}</table></div></div>'


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{as_html(cell)}</{tag}>' for cell in cells)}</tr>"

    return "".join([line(head, "th"), *(line(row, "td") for row in rows)])
