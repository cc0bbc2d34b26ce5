"""Draws norms by layer as HTML: a map of colours over layers and steps, and a table of values."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax.config.display import as_html

MAX_COLUMNS = 96
"""Maximum number of steps that a map shows; of more steps, columns are means."""

MAX_LABELS = 64
"""Maximum number of layers of which each one has its name beside the map."""

NUM_LEVELS = 9
PANEL = {
    "gradient_norm": ("Gradients", "before clipping"),
    "update_norm": ("Updates", "change of the weights in the step"),
    "parameter_norm": ("Parameters", "after the step"),
}
"""{kind of norm: (its title, what it is of)}."""

Values = Sequence[float | None]


def layers_panel(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the HTML of the norms by layer; "" if the run did not record them.

    Args:
      records: records of metrics.jsonl of the kind "layers", by step.
    """
    if not records:
        return ""
    layers = [key.partition("/")[2] for key in records[-1] if key.startswith("gradient_norm/")]
    steps = [record["step"] for record in records]
    maps = "".join(
        _draw_map(
            *PANEL[kind],
            steps=steps,
            rows={x: [one.get(f"{kind}/{x}") for one in records] for x in layers},
        )
        for kind in PANEL
    )
    return f'<div class="heats">{maps}</div>{_table(records[-1], layers)}'


def _table(record: Mapping[str, Any], layers: Sequence[str]) -> str:
    """Returns an HTML table of the values of one report, which a reader opens by a click."""
    rows = []
    for layer in layers:
        gradient, update, parameter = (record.get(f"{kind}/{layer}") for kind in PANEL)
        ratio = update / parameter if parameter and update is not None else None
        cells = "".join(f"<td>{_text(x)}</td>" for x in (gradient, update, parameter, ratio))
        rows.append(f"<tr><td>{as_html(layer)}</td>{cells}</tr>")
    titles = ("layer", "gradient", "update", "parameter", "update / parameter")
    head = "".join(f"<th>{title}</th>" for title in titles)
    return (
        f"<details><summary>Norms at step {record['step']:,}</summary>"
        f'<table class="trials"><tr>{head}</tr>{"".join(rows)}</table></details>'
    )


def _text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _draw_map(title: str, unit: str, *, steps: Sequence[int], rows: Mapping[str, Values]) -> str:
    """Returns one map as an HTML `<figure>`: layers from top to bottom, steps from left to right.

    Each level of colour is one path of rectangles, so that a map of 48 layers takes about 20 kB.
    """
    columns = min(len(steps), MAX_COLUMNS)
    cells = {layer: _means(values, columns) for layer, values in rows.items()}
    positive = [x for values in cells.values() for x in values if x is not None and x > 0]
    low, high = min(positive, default=1.0), max(positive, default=1.0)
    paths = [""] * NUM_LEVELS
    lost = ""
    for y, values in enumerate(cells.values()):
        levels = [_level(value, low, high) for value in values]
        start = 0
        for x in range(1, columns + 1):
            if x < columns and levels[x] == levels[start]:
                continue
            box = f"M{start} {y}h{x - start}v1h-{x - start}z"
            level = levels[start]
            if level is None:
                lost += box
            elif level >= 0:
                paths[level] += box
            start = x
    drawn = "".join(
        f'<path class="h{level}" d="{path}"/>' for level, path in enumerate(paths) if path
    )
    each = -(-len(cells) // MAX_LABELS)
    names = "".join(
        f'<span title="{as_html(name)}">{as_html(name) if number % each == 0 else "&nbsp;"}</span>'
        for number, name in enumerate(cells)
    )
    swatches = "".join(f'<i class="h{level}"></i>' for level in range(NUM_LEVELS))
    red = "; red: not finite" if lost else ""
    small = ' class="heat small"' if each > 1 else ' class="heat"'
    return f"""<figure{small}><figcaption><b>{title}</b> <i>{unit}</i></figcaption>
<div class="map"><div class="names">{names}</div>
<svg viewBox="0 0 {columns} {len(cells)}" preserveAspectRatio="none" role="img"
 aria-label="{title} by layer and step">{drawn}<path class="bad" d="{lost}"/></svg>
<div class="ends"><span>step {steps[0]:,}</span><span>{steps[-1]:,}</span></div></div>
<div class="scale">{_text(low)} {swatches} {_text(high)}, log scale{red}</div></figure>
"""


def _level(value: float | None, low: float, high: float) -> int | None:
    """Returns the level of colour of a value; -1 for 0, which has no colour, and None for a value
    that was not finite.
    """
    if value is None:
        return None
    if value <= 0:
        return -1
    share = math.log(value / low) / math.log(high / low) if high > low else 1.0
    return min(NUM_LEVELS - 1, max(0, int(share * NUM_LEVELS)))


def _means(values: Values, columns: int) -> list[float | None]:
    """Returns `columns` means of neighbouring values; None where one of them was not finite."""
    means: list[float | None] = []
    for column in range(columns):
        first, end = (len(values) * i // columns for i in (column, column + 1))
        found = [value for value in values[first:end] if value is not None]
        means.append(sum(found) / (end - first) if len(found) == end - first else None)
    return means
