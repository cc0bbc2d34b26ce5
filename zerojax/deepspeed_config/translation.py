"""Result of translating a ds_config: settings and one line per key; formats both as text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import optax

from zerojax.config import (
    ElasticityConfig,
    LogConfig,
    MeshConfig,
    OptimizerConfig,
)
from zerojax.config.attention_layouts import BlockLayout
from zerojax.config.display import printable, quoted
from zerojax.config.features import Features
from zerojax.config.late_dataclasses import dataclass
from zerojax.optim import Optimizer, Schedule, one_bit_of
from zerojax.optim.building import with_rate
from zerojax.optim.precision import Precision
from zerojax.optim.schedules import as_schedule
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.combinations import Combination, find_conflicts

Verdict = Literal["honoured", "mapped", "not needed", "compiler", "ignored", "refused"]
VERDICTS: dict[Verdict, str] = {
    "honoured": "has the same meaning as in DeepSpeed",
    "mapped": "supported through a different setting or mechanism",
    "not needed": "no effect: zerojax does this without a setting, or has no such mechanism",
    "compiler": "no effect: left to the compiler",
    "ignored": "no effect in DeepSpeed and in zerojax; a warning is printed",
    "refused": "not supported: the run would differ from what the file describes",
}

_WIDTH = 100
_LONGEST_KEY = 52


@dataclass(frozen=True)
class Line:
    """Translation of one key of a ds_config.

    Attributes:
      key: path of the key in the file, such as "zero_optimization.stage".
      value: value in the file, or the value that replaced "auto".
      verdict: how zerojax handles the key, one of `VERDICTS`.
      why: reason of the verdict, one sentence.
    """

    key: str
    value: Any
    verdict: Verdict
    why: str


@dataclass(frozen=True, kw_only=True)
class CallerValues:
    """Values that the caller passes beside a ds_config; they replace "auto" and must not contradict
    the file.

    Attributes:
      optimizer: an optax transformation, or an `OptimizerConfig` that replaces "auto" values.
      precision: "bf16", "fp16", "fp32" or a `Precision`.
      reduce_dtype: dtype of gradient reductions, which overrides that of `precision`.
      accumulate_dtype: dtype of gradient accumulation, which overrides that of `precision`.
      num_microbatches: number of microbatches (gradient_accumulation_steps).
      global_batch_size: rows of one step over all devices (train_batch_size).
      steps: number of steps of the run (total_num_steps of a schedule).
      default_steps: number of steps if neither the caller nor the file sets one.
      log: log settings; `log.every` corresponds to steps_per_print.
      hidden_size: width of the model, from which Hugging Face's rules compute "auto" bucket sizes.
    """

    optimizer: optax.GradientTransformation | OptimizerConfig | None = None
    precision: Precision | str | None = None
    reduce_dtype: str | None = None
    accumulate_dtype: str | None = None
    num_microbatches: int | None = None
    global_batch_size: int | None = None
    steps: int | None = None
    default_steps: int | None = None
    log: LogConfig | None = None
    hidden_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A ds_config translated into zerojax settings.

    Attributes:
      source: name of the file for messages.
      mesh: mesh axes, ZeRO stage, buckets and offload.
      optimizer: optimizer as `zerojax.train` takes it, including clipping.
      learning_rate: schedule over applied updates; None if it is inside the caller's optimizer.
      precision: dtypes of computation, parameters and communication.
      train_batch_size: rows of one step; None: the first batch determines it.
      micro_batch_size: rows of a micro-batch on one data shard; None: the first batch determines
        it.
      num_microbatches: number of micro-batches of a step (gradient_accumulation_steps).
      num_data_shards: number of data shards; None if the number of devices is not known.
      gradient_clipping: maximum global gradient norm; 0: no clipping.
      total_steps: length of the run according to the schedule; None if the file does not set it.
      log: log settings: how often metrics are reported, and where.
      steps_per_print: value of the key steps_per_print; None if the file does not set it.
      run_dir: folder of the run, if a monitor of the file names one; else None.
      elasticity: batch settings for a changing number of devices; may be disabled.
      features: settings of the optional features that the file has.
      rounding: rounding of weights that the model must have (`compression_keys.Rounding`); None:
        the file describes none.
      attention_layout: layout set by sparse_attention; None: dense attention.
      router: {key of expert_parallel: value} that the model's router must match.
      tag_validation: "WARN", "IGNORE" or "FAIL": action if processes pass different tags.
      resolved: content of the file with "auto" replaced where Hugging Face's rules give a value;
        batch sizes keep "auto".
      lines: one `Line` for every key of the file.
      warnings: sentences that are always shown.
      reasons: sentences on settings that are not in the file: defaults, and values that replaced
        "auto".
    """

    source: str
    mesh: MeshConfig
    optimizer: optax.GradientTransformation | OptimizerConfig
    learning_rate: Schedule | None
    precision: Precision
    train_batch_size: int | None
    micro_batch_size: int | None
    num_microbatches: int
    num_data_shards: int | None
    gradient_clipping: float
    total_steps: int | None
    log: LogConfig
    steps_per_print: int | None
    run_dir: Path | None
    elasticity: ElasticityConfig
    features: Features
    rounding: Any
    attention_layout: BlockLayout | None
    router: Mapping[str, Any]
    tag_validation: str
    resolved: Mapping[str, Any]
    lines: tuple[Line, ...]
    warnings: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def num_devices(self) -> int:
        """Number of devices of the run. If it is not known: the number for the file's
        data_parallel_size, else the smallest with two data shards, or with two nodes if the file
        sets the size of a node."""
        mesh = self.mesh
        if self.num_data_shards is not None:
            return self.num_data_shards * mesh.devices_per_shard
        data = mesh.data if mesh.data > 0 else 2 * (mesh.node or 1)
        return data * mesh.replica * mesh.expert * mesh.devices_per_shard

    @property
    def conflicts(self) -> tuple[str, ...]:
        """Sentences on settings that exclude each other, from the checks with which a plan begins.

        There are none while a key is refused, because a default is in the place of its value.
        """
        if any(line.verdict == "refused" for line in self.lines):
            return ()
        tx = self.optimizer
        combination = Combination(
            settings=self.mesh,
            mesh=make_abstract_mesh(self.mesh, self.num_devices),
            precision=self.precision,
            tx=with_rate(tx, as_schedule(0.0)) if isinstance(tx, OptimizerConfig) else tx,
            features=self.features,
            attention_layout=self.attention_layout,
            layer_norms=self.log.per_layer,
        )
        return tuple(str(error) for error in find_conflicts(combination))

    @property
    def zero_stage(self) -> int:
        return self.mesh.zero

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.num_microbatches


def explanation(translation: Translation) -> str:
    """Returns a translation as text: a line per key, settings that exclude each other, the
    settings of the run, warnings and reasons."""
    parts = [
        "\n".join(_keys(translation.lines)),
        "\n".join(_totals(translation.lines)),
    ]
    if conflicts := translation.conflicts:
        devices = f" on {translation.num_devices} devices"
        parts.append("\n".join([f"refused together{devices}", *_bullets(conflicts)]))
    parts.append("\n".join(_run(translation)))
    if translation.warnings:
        parts.append("\n".join(["warnings", *_bullets(translation.warnings)]))
    if translation.reasons:
        parts.append("\n".join(["not in the file", *_bullets(translation.reasons)]))
    return printable("\n\n".join(parts), is_page=True)


def _keys(lines: Iterable[Line]) -> Iterator[str]:
    for line in lines:
        head = f"{line.verdict:<10} {printable(line.key)} = {_value(line.value)}"
        yield head if len(head) <= _WIDTH else f"{head[: _WIDTH - 3]}..."
        yield from textwrap.wrap(
            line.why, _WIDTH, initial_indent=" " * 14, subsequent_indent=" " * 14
        )


def _totals(lines: Iterable[Line]) -> Iterator[str]:
    verdicts = [line.verdict for line in lines]
    for verdict, meaning in VERDICTS.items():
        yield f"{verdicts.count(verdict):>4} {verdict:<10} {meaning}"


def _run(translation: Translation) -> Iterator[str]:
    mesh, rows = translation.mesh, translation.train_batch_size
    shards = translation.num_data_shards
    data = shards // mesh.expert if shards else "all that are left"
    axes = {"data": data, "expert": mesh.expert, "context": mesh.context}
    axes |= {"stage": mesh.stage, "model": mesh.model}
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
    yield from _features(translation)
    yield f"  reports    every {translation.log.report_every} steps" + (
        " by zerojax.train; without steps_per_print the engine prints only skipped steps"
        if translation.steps_per_print is None
        else ""
    )
    yield "  model      not known here; `zerojax plan` says whether it supports these settings"


def _features(translation: Translation) -> Iterator[str]:
    """Yields a line for each feature that changes what the step computes."""
    lines = [line for settings in translation.features.given for line in settings.summary()]
    if translation.attention_layout is not None:
        layout = translation.attention_layout
        lines.append(("attention", f"{layout.mode}, blocks of {layout.block}"))
    if translation.rounding is not None:
        lines.append(("rounding", translation.rounding.describe()))
    yield from (f"  {title:<10} {text}" for title, text in lines)


def _optimizer(translation: Translation) -> str:
    tx = translation.optimizer
    if isinstance(tx, OptimizerConfig):
        name = f"{tx.name} (zerojax's own settings)"
    elif one_bit_of(tx) is not None:
        name = "1-bit Adam"
    else:
        name = tx.kernel if isinstance(tx, Optimizer) else "an optax transformation"
    clip = translation.gradient_clipping
    return f"{name}, gradients clipped to {clip:g}" if clip else f"{name}, no clipping"


def _number(value: int | None) -> str:
    return "open" if value is None else f"{value}"


def _value(value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = quoted(value)
    return text if len(text) <= _LONGEST_KEY else f"{text[: _LONGEST_KEY - 3]}..."


def _bullets(sentences: Iterable[str]) -> Iterator[str]:
    for sentence in sentences:
        yield textwrap.fill(sentence, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
