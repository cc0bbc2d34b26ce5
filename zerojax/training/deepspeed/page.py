"""Text page of a translated ds_config: each key and the resulting run."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from zerojax.config import OptimizerConfig
from zerojax.config.display import printable, quoted
from zerojax.optim import Optimizer
from zerojax.training.deepspeed.result import VERDICTS, Line, Translation

_WIDTH = 100
_LONGEST_KEY = 52


def explanation(translation: Translation) -> str:
    """The page: a line per key, what the run will be, warnings and reasons."""
    parts = [
        "\n".join(_keys(translation.lines)),
        "\n".join(_totals(translation.lines)),
        "\n".join(_run(translation)),
    ]
    if translation.warnings:
        parts.append("\n".join(["warnings", *_bullets(translation.warnings)]))
    if translation.reasons:
        parts.append("\n".join(["not in the file", *_bullets(translation.reasons)]))
    return printable("\n\n".join(parts), is_page=True)


def _keys(lines: Iterable[Line]) -> Iterator[str]:
    for line in lines:
        head = f"{line.verdict:<9} {printable(line.key)} = {_value(line.value)}"
        yield head if len(head) <= _WIDTH else f"{head[: _WIDTH - 3]}..."
        yield from textwrap.wrap(
            line.why, _WIDTH, initial_indent=" " * 14, subsequent_indent=" " * 14
        )


def _totals(lines: Iterable[Line]) -> Iterator[str]:
    verdicts = [line.verdict for line in lines]
    for verdict, meaning in VERDICTS.items():
        yield f"{verdicts.count(verdict):>4} {verdict:<9} {meaning}"


def _run(translation: Translation) -> Iterator[str]:
    mesh, rows = translation.mesh, translation.train_batch_size
    data = translation.num_data_shards or "all that are left"
    axes = {"data": data, "stage": mesh.stage, "model": mesh.model}
    sizes = ", ".join(f"{name}={size}" for name, size in axes.items() if size != 1)
    yield "the run"
    copies = f" in {mesh.replica} replicas" if mesh.replica > 1 else ""
    yield f"  mesh       {sizes or 'data=1'}{copies}, zero={mesh.zero}"
    yield (
        f"  batch      rows of a step: {_number(rows)}; of a data shard at once: "
        f"{_number(translation.micro_batch_size)}; microbatches: {translation.num_microbatches}"
    )
    yield f"  precision  {translation.precision.describe()}"
    yield f"  update     {_optimizer(translation)}"
    if not mesh.offload.is_off:
        shares = ", ".join(f"{tier} {share:.0%}" for tier, share in mesh.offload.shares.items())
        yield (
            f"  offload    optimizer state: {shares}; weights: {mesh.offload.params}; "
            f"activations: {mesh.offload.activations}"
        )
    yield f"  reports    every {translation.log.every} steps"


def _optimizer(translation: Translation) -> str:
    tx = translation.optimizer
    if isinstance(tx, OptimizerConfig):
        name = f"{tx.name} (zerojax's own settings)"
    else:
        name = tx.kernel if isinstance(tx, Optimizer) else "an optax transformation"
    clip = translation.gradient_clipping
    return f"{name}, gradients clipped to {clip:g}" if clip else f"{name}, no clipping"


def _number(value: int | None) -> str:
    return "open" if value is None else f"{value}"


def _value(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = quoted(value)
    return text if len(text) <= _LONGEST_KEY else f"{text[: _LONGEST_KEY - 3]}..."


def _bullets(sentences: Iterable[str]) -> Iterator[str]:
    for sentence in sentences:
        yield textwrap.fill(sentence, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
