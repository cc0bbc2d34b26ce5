"""What a page says of a run's events, of its processes, and of where its time went.

Knows records of metrics.jsonl; draws nothing but tables.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax.metrics.console import format_seconds
from zerojax.metrics.jsonl import Metrics
from zerojax.metrics.stopwatch import ACTIVITIES

MAX_EVENTS = 200
NAMES = {
    "data": "waiting for data",
    "step": "training steps",
    "save": "saving",
    "eval": "evaluating",
    "host": "callbacks, reports and the rest",
}
KINDS = {
    "loss_spike": "loss spike",
    "not_finite": "not finite",
    "slow_process": "slow process",
    "fast_again": "keeps up again",
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
    rows = [
        (
            f"{event['step']:,}",
            KINDS.get(event["event"], str(event["event"])),
            str(event.get("leaf") or event.get("host") or ""),
            str(event.get("text", "")),
        )
        for event in list(events)[: -MAX_EVENTS - 1 : -1]
    ]
    if not rows:
        return ""
    more = len(events) - len(rows)
    note = f"<p>and {more:,} earlier ones in metrics.jsonl</p>" if more else ""
    return _table(("step", "what", "where", ""), rows) + note


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    lines = [line(head, "th"), *(line(row, "td") for row in rows)]
    return f'<div class="settings"><div><table>{"".join(lines)}</table></div></div>'
