"""Writes what belongs to docs/tutorial.md: its notebook, its pictures and its table.

    python tools/tutorial.py             # from the page and the recorded numbers
    python tools/tutorial.py --losses    # runs the page first and records its losses
    python tools/tutorial.py --memory    # compiles for H100 first and records the memory

The numbers are in docs/images/tutorial.json. Without options this file needs nothing but Python's
standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
NUMBERS = ROOT / "docs" / "images" / "tutorial.json"
MEMORY_PICTURE = ROOT / "docs" / "images" / "tutorial_memory.svg"
LOSS_PICTURE = ROOT / "docs" / "images" / "tutorial_loss.svg"
FENCE = re.compile(r"^```python\n(.*?)^```\n", flags=re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"(<!-- memory: begin -->\n).*?(<!-- memory: end -->)", flags=re.DOTALL)

GIB = 2**30
SETTINGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "zero=0": ("large", {"zero": 0}),
    "zero=3": ("large", {"zero": 3}),
    "zero=3, bfloat16 embeddings": ("half", {"zero": 3}),
    "and zerojax.attention": ("lean", {"zero": 3}),
    'and roll_remat="full"': ("lean", {"zero": 3, "roll_remat": "full"}),
}
"""Name in table and picture -> (name of the model in the page, settings of its plan)."""
COLORS = {
    "master weights": "#4c78a8",
    "optimizer state": "#9ecae9",
    "gathered weights": "#f58518",
    "gradients": "#e45756",
    "activations": "#54a24b",
    "other": "#bab0ac",
}
FONT = 'font-family="system-ui, sans-serif" font-size="13"'


def code_blocks(page: str) -> list[str]:
    """Returns the Python of a page, in order."""
    return FENCE.findall(page)


# --- The notebook ---------------------------------------------------------------------------------


def notebook(page: str) -> str:
    """Returns the page as a notebook: a cell for each block of Python and each text between."""
    parts = FENCE.split(page)
    cells = []
    for number, part in enumerate(parts):
        is_code = number % 2 == 1
        text = part.strip() if is_code else _as_markdown(part)
        if not text:
            continue
        cell: dict[str, Any] = {"cell_type": "code" if is_code else "markdown"}
        cell |= {"id": f"cell-{len(cells):02}", "metadata": {}}
        cell |= {"source": text.splitlines(keepends=True)}
        cells.append(cell | ({"execution_count": None, "outputs": []} if is_code else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    book = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def cells_of(book: str) -> list[str]:
    """Returns the code cells of a notebook, in order."""
    cells = json.loads(book)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def _as_markdown(text: str) -> str:
    """Returns the text of a page as it is read from the folder of the notebook."""
    text = re.sub(r"^<!--.*?-->\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\((?!https?:|#)([\w./#-]+)\)", r"](../docs/\1)", text).strip()


# --- Pictures and table ---------------------------------------------------------------------------


def memory_table(numbers: Mapping[str, Any]) -> str:
    """Returns the lines of the page's table."""
    lines = ["| settings | activations | all else | peak | of 59.3 GiB | tokens/s at best |"]
    lines.append("|---|---|---|---|---|---|")
    for name, row in numbers["memory"].items():
        peak, activations = row["peak"] / GIB, row["roles"]["activations"] / GIB
        verdict = "fits" if row["peak"] <= row["limit"] else "does not fit"
        speed = f"{row['tokens_per_second'] / 1000:,.0f} thousand"
        sizes = f"{activations:.1f} | {peak - activations:.1f} | {peak:.1f}"
        lines.append(f"| `{name}` | {sizes} | {verdict} | {speed} |")
    return (
        "".join(f"{line}\n" for line in lines)
        .replace("`and ", "and `")
        .replace("`zero=3, bfloat16 embeddings`", "`zero=3`, bfloat16 embeddings")
    )


def with_table(page: str, numbers: Mapping[str, Any]) -> str:
    """Returns the page with its table of memory."""
    table = memory_table(numbers)
    return TABLE.sub(lambda found: found[1] + table + found[2], page)


def memory_picture(numbers: Mapping[str, Any]) -> str:
    """Returns bars of memory by role, one for each setting, and the limit of the card."""
    rows = numbers["memory"]
    left, width, high, top = 230, 480, 26, 52
    most = max(row["peak"] for row in rows.values())
    bottom = top + 40 * len(rows)
    (limit,) = {row["limit"] for row in rows.values()}
    line = left + width * limit / most
    body = []
    for number, (role, color) in enumerate(COLORS.items()):
        x = 14 + 134 * number
        body.append(f'<rect x="{x}" y="12" width="12" height="12" fill="{color}"/>')
        body.append(_text(x + 17, 23, role))
    for number, (name, row) in enumerate(rows.items()):
        y, x = top + 40 * number, float(left)
        body.append(_text(left - 8, y + 18, name, "end"))
        for role, color in COLORS.items():
            length = width * row["roles"][role] / most
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{high}" fill="{color}"/>'
            )
            x += length
        beside = line + 6 if x < line < x + 50 else x + 6
        body.append(_text(beside, y + 18, f"{row['peak'] / GIB:.1f} GiB"))
    body.append(f'<path d="M{line:.1f} {top - 8}V{bottom}" stroke="#222" stroke-dasharray="4 3"/>')
    body.append(_text(line, bottom + 16, f"{limit / GIB:.1f} GiB for JAX", "middle"))
    return _svg(820, bottom + 28, "Memory of one H100 by role", body)


def loss_picture(numbers: Mapping[str, Any]) -> str:
    """Returns the curves of the own loop and of the run that moved."""
    loss, half = numbers["loss"], numbers["moved_after"]
    left, top, width, height = 50, 20, 690, 240
    most, least = max(loss["own"]), min(loss["own"])
    high, low = most + 0.1, float(int(least * 2)) / 2

    def place(step: int, value: float) -> tuple[float, float]:
        x = left + width * (step - 1) / (len(loss["own"]) - 1)
        return round(x, 1), round(top + height * (high - value) / (high - low), 1)

    body = []
    for i in range(int(2 * low), int(2 * high) + 1):
        y = place(1, i / 2)[1]
        body.append(f'<path d="M{left} {y}H{left + width}" stroke="#ddd"/>')
        body.append(_text(left - 6, y + 4, f"{i / 2:.1f}", "end"))
    for step in (1, *range(10, len(loss["own"]) + 1, 10)):
        body.append(_text(place(step, low)[0], top + height + 18, str(step), "middle"))
    curve = " ".join(
        f"{x},{y}" for x, y in (place(i, v) for i, v in enumerate(loss["own"], start=1))
    )
    body.append(f'<polyline points="{curve}" fill="none" stroke="#bbb" stroke-width="7"/>')
    for step, value in enumerate(loss["moved"], start=1):
        x, y = place(step, value)
        color = "#4c78a8" if step <= half else "#e45756"
        body.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>')
    names = {"own loop": "#bbb", "ZeRO-3 on 8 devices": "#4c78a8", "resumed on 4": "#e45756"}
    for number, (name, color) in enumerate(names.items()):
        y = top + 14 + 20 * number
        body.append(f'<rect x="{left + 480}" y="{y}" width="12" height="12" fill="{color}"/>')
        body.append(_text(left + 500, y + 11, name))
    body.append(_text(left + width / 2, top + height + 36, "step", "middle"))
    return _svg(760, top + height + 46, "Loss by step", body)


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def _svg(width: float, height: float, title: str, body: Sequence[str]) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT} role="img">'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([start, f"<title>{title}</title>", paper, *body, "</svg>", ""])


# --- Numbers --------------------------------------------------------------------------------------


def run_page(page: str) -> dict[str, Any]:
    """Runs the page's Python in a new folder and returns its names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with _new_folder():
        for block in code_blocks(page):
            exec(compile(block, str(PAGE), "exec"), names)
    return names


def losses_of(names: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the recorded form of the losses of a run of the page."""
    loss = {"own": names["own_losses"], "moved": names["losses"]}
    rounded = {name: [round(value, 4) for value in values] for name, values in loss.items()}
    return {"loss": rounded, "moved_after": names["STEPS"] // 2}


def compiled_memory(page: str, settings: Sequence[str] = tuple(SETTINGS)) -> dict[str, Any]:
    """Compiles the page's large model for 8 H100, and returns name -> recorded numbers."""
    import functools

    import jax.numpy as jnp

    import zerojax

    names: dict[str, Any] = {}
    for block in code_blocks(page):
        if any(word in block for word in ("class Block", "def plan_for_eight", "lean = ")):
            exec(compile(block, str(PAGE), "exec"), names)
    names["half"] = functools.partial(names["large"], dtype=jnp.bfloat16)
    found = {}
    for name in settings:
        model, options = SETTINGS[name]
        plan = names["plan_for_eight"](names[model], **options)
        forecast = zerojax.forecast(plan, gpu="h100", fast=True)
        sizes = {row.role: row.bytes for row in forecast.memory.roles}
        roles = {role: sizes.pop(role, 0) for role in COLORS if role != "other"}
        found[name] = {
            "roles": roles | {"other": sum(sizes.values())},
            "peak": forecast.memory.peak,
            "limit": forecast.verdict.limit,
            "tokens_per_second": round(forecast.estimate.tokens_per_second),
        }
        print(name, found[name], flush=True)
    return found


@contextlib.contextmanager
def _new_folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--losses", action="store_true", help="run the page and record its losses")
    parser.add_argument("--memory", action="store_true", help="compile and record the memory")
    args = parser.parse_args()
    page = PAGE.read_text()
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    if args.memory:
        numbers["memory"] = compiled_memory(page)
    if args.losses:
        numbers |= losses_of(run_page(page))
    NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
    page = with_table(page, numbers)
    PAGE.write_text(page)
    NOTEBOOK.write_text(notebook(page))
    MEMORY_PICTURE.write_text(memory_picture(numbers))
    LOSS_PICTURE.write_text(loss_picture(numbers))


if __name__ == "__main__":
    main()
