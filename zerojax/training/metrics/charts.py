"""Draws line charts as HTML and SVG, without scripts.

Curves are drawn in a box of 1000 x 1000 units that the page stretches. Labels are HTML beside the
box, so a chart fits any width.
"""

import math
from collections.abc import Callable, Sequence

from zerojax.config.display import as_html
from zerojax.config.late_dataclasses import dataclass

BOX = 1000
MAX_POINTS = 800
FEW_POINTS = 12
"""Maximum number of values of a curve for which each value is drawn as a dot."""

SMOOTHED_FROM = 40
"""Minimum number of points of a curve that is smoothed."""
LINE_WIDTH = 8
"""Width of a curve, in units of the box; curves that are nearer to each other coincide."""

UNLISTED = ("faint", "dim")
"""Styles of curves that are not in the legend."""

Points = list[tuple[float, float | None]]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve of a chart."""

    label: str
    points: Points
    """(step, value) in ascending order of steps; the value is None where it was not finite."""
    style: str
    """CSS class: "first" or "second"; "c0", "c1", ... for the runs of a comparison; "faint" for raw
    values drawn with their smoothed curve, and "dim" for one of many curves; the last two are not
    in the legend."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart: one or several curves over steps, on common axes."""

    title: str
    unit: str
    series: Sequence[Series]
    text: Callable[[float], str] = "{:.4g}".format
    """Function that formats a value for the axis and the legend."""
    from_zero: bool = False
    log_above: float = math.inf
    """The axis is logarithmic if the highest value divided by the lowest is at least this."""
    wide: bool = False
    axis: str = "step"
    """Name of the horizontal axis."""
    tick: Callable[[float], str] = "{:,.0f}".format
    """Function that formats a position on the horizontal axis."""


def thin(points: Points, limit: int = MAX_POINTS) -> Points:
    """Reduces a curve to about `limit` points. Keeps the lowest and highest point of each bucket of
    neighbouring points, and gaps.
    """
    if len(points) <= limit:
        return points
    buckets = limit // 2
    kept: set[tuple[float, float | None]] = {points[-1]}
    for i in range(buckets):
        bucket = points[len(points) * i // buckets : len(points) * (i + 1) // buckets]
        finite = [(value, step) for step, value in bucket if value is not None]
        lost = [point for point in bucket if point[1] is None]
        kept |= {*(lost if finite else lost[:1])}
        if finite:
            kept |= {(step, value) for value, step in (min(finite), max(finite))}
    return sorted(kept, key=lambda point: point[0])


def smooth(points: Points, *, half_width: int) -> Points:
    """Returns means of the values over a window centred on each point.

    The window shrinks at both ends. Unlike averages of past values, these means do not lag behind a
    falling curve.
    """
    smoothed: Points = []
    for i, (step, _) in enumerate(points):
        reach = min(half_width, i, len(points) - 1 - i)
        window = [v for _, v in points[i - reach : i + reach + 1] if v is not None]
        smoothed.append((step, sum(window) / len(window) if window else None))
    return smoothed


def smooth_long(points: Points) -> Points:
    """Returns means over a sixtieth of a curve on each side; a short curve is returned itself."""
    if len(points) < SMOOTHED_FROM:
        return points
    return smooth(points, half_width=max(2, len(points) // 60))


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about `count` round numbers in [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    # The tolerances keep a tick whose quotient is off by a rounding error.
    spacing = unit * next(m for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
    first = math.ceil(low / spacing - 1e-9)
    last = math.floor(high / spacing + 1e-9)
    return [round(i * spacing, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int = 7) -> list[float]:
    """Returns at most `count` round numbers in [low, high], about evenly spaced on a log scale."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 3), (1,)):
        ticks = [m * 10.0**power for power in powers for m in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= count:
            return inside
    return inside[:: -(-len(inside) // count)]


def draw(chart: Chart, steps: tuple[float, float]) -> str:
    """Returns the chart as an HTML `<figure>`; `steps` are the ends of the horizontal axis."""
    shown = [s for s in chart.series if any(value is not None for _, value in s.points)]
    low, high, log = _value_axis(chart, shown)
    first, last = steps
    scale = math.log if log else float

    def x(step: float) -> float:
        return BOX * (step - first) / ((last - first) or 1)

    def y(value: float) -> float:
        return BOX * (scale(high) - scale(value)) / (scale(high) - scale(low))

    rows = log_ticks(low, high) if log else nice_ticks(low, high)
    grid = "".join(f'<path d="M0 {y(t):.1f}H{BOX}"/>' for t in rows)
    left = "".join(
        f'<span style="top:{100 * y(t) / BOX:.2f}%">{as_html(chart.text(t))}</span>' for t in rows
    )
    below = "".join(
        f'<span style="left:{100 * x(t) / BOX:.2f}%"{_label_class(x(t))}>'
        f"{as_html(chart.tick(t))}</span>"
        for t in nice_ticks(first, last, 6)
    )
    lost_steps = sorted({step for s in shown for step, value in s.points if value is None})
    lost = "".join(f"M{x(step):.1f} 0v{BOX // 25}" for step in lost_steps)
    listed = [series for series in shown if series.style not in UNLISTED]
    same = {
        series.label: next((one.label for one in listed[:i] if _coincide(one, series, y)), None)
        for i, series in enumerate(listed)
    }
    dashed = {label for label, other in same.items() if other is not None}
    curves = "".join(
        f'<path class="curve {series.style}{" over" * (series.label in dashed)}"'
        f' d="{_path(series.points, x, y)}"/>'
        f'<path class="dots {series.style}" d="{_dots(series.points, x, y)}"/>'
        for series in shown
    )
    legend = "".join(_legend_entry(chart, series, same[series.label]) for series in listed)
    notes = [chart.unit, "log scale" if log else "", "red: not finite" if lost else ""]
    return f"""<figure class="chart{" wide" if chart.wide else ""}">
<figcaption><b>{as_html(chart.title)}</b> <i>{as_html(", ".join(filter(None, notes)))}</i>
<span class="legend">{legend}</span></figcaption>
<div class="frame"><div class="left">{left}</div>
<div class="plot"><svg viewBox="0 0 {BOX} {BOX}" preserveAspectRatio="none" role="img"
 aria-label="{as_html(chart.title)}"><g class="grid">{grid}</g>{curves}
<path class="lost" d="{lost}"/></svg>
<div class="cursor"></div></div><div class="below">{below}</div>
<div class="axis">{as_html(chart.axis)}</div></div>
</figure>
"""


def _coincide(one: Series, other: Series, y: Callable[[float], float]) -> bool:
    """Returns whether two curves cannot be told apart, so that the later one hides the other."""
    first = {step: value for step, value in one.points if value is not None}
    second = {step: value for step, value in other.points if value is not None}
    common = first.keys() & second.keys()
    if len(common) < 2 or 2 * len(common) < min(len(first), len(second)):
        return False
    return all(abs(y(first[step]) - y(second[step])) < LINE_WIDTH for step in common)


def _value_axis(chart: Chart, shown: Sequence[Series]) -> tuple[float, float, bool]:
    """Returns (lowest value, highest value, True if logarithmic) of the value axis."""
    values = [value for series in shown for _, value in series.points if value is not None]
    low, high = min(values), max(values)
    if low > 0 and high / low >= chart.log_above:
        margin = (high / low) ** 0.06
        return low / margin, high * margin, True
    if chart.from_zero:
        low = min(0.0, low)
    # The others are for a constant curve, which has no extent.
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return (low if chart.from_zero else low - margin), high + margin, False


def _label_class(place: float) -> str:
    """Returns the CSS class that keeps the first and last label inside the frame."""
    if 0.03 * BOX < place < 0.97 * BOX:
        return ""
    return ' class="start"' if place < BOX / 2 else ' class="end"'


def _path(points: Points, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Returns the SVG path of lines between neighbouring points, with a gap for a missing value."""
    parts, pen = [], "M"
    for step, value in points:
        if value is not None:
            parts.append(f"{pen}{x(step):.1f} {y(value):.1f}")
        pen = "M" if value is None else "L"
    return "".join(parts)


def _dots(points: Points, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Returns the SVG path of dots on isolated values, and on all values of a short curve."""
    values = [value for _, value in points]
    few = sum(value is not None for value in values) <= FEW_POINTS
    around = [None, *values, None]
    return "".join(
        f"M{x(step):.1f} {y(value):.1f}h0"
        for index, (step, value) in enumerate(points)
        if value is not None and (few or around[index] is around[index + 2] is None)
    )


def _legend_entry(chart: Chart, series: Series, same: str | None) -> str:
    """Returns the entry of a curve; `same` is the label of the curve that it lies on."""
    last = next(value for _, value in reversed(series.points) if value is not None)
    label = as_html(series.label)
    note = "" if same is None else f" (on the line of {as_html(same)})"
    return (
        f'<span class="entry {series.style}"><span class="swatch"></span>{label} '
        f'<output data-series="{label}">{as_html(chart.text(last))}</output>{note}</span>'
    )
