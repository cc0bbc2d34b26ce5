"""Expected tokens per second of each GPU from 64 to 512 H100, for 70B and 1T parameters.

Every GPU computes the same number of sequences per step, as many at a time as fit in memory. This
number is estimated from two compiled peaks, and the estimate is compiled. Expected times and
roofline bounds of compiled programs; nothing here is a measurement of a GPU. Needs the extra
`plan`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import zerojax
from benchmarks.machine import load_average
from benchmarks.plans import CONFIGS, GIB, expected_columns
from benchmarks.recording import Goal, Record, parse_arguments, save_so_far, write_record
from zerojax.config import RunConfig, load
from zerojax.hardware import compile_client
from zerojax.training.run_file import plan_from_config

GPU = "h100"
NUMBERS = (64, 128, 256, 512)
SEQUENCES = 12
"""Number of sequences per step of a group of GPUs that share layers; microbatches divide it."""
AT_A_TIME = (1, 2, 3, 4, 6, 12)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
      name: name in the table.
      file: run file of the model, changed by `words`.
      group: number of GPUs that share a sequence.
    """

    name: str
    file: str
    words: tuple[str, ...] = ()
    group: int = 1


_LARGE = "gpt_1t_files_8xh200"
_DEVICE = ("params=device", "activations=device")
_IN_NODES = ("model=8", "sequence_sharding=true", *(f"offload.{word}" for word in _DEVICE))
CASES = (
    Case("70B", "llama_70b_zero3_64xh200", ("model.remat=full",)),
    Case("1T", _LARGE, tuple(f"mesh.{word}" for word in _IN_NODES), 8),
)


def main(argv: list[str] | None = None) -> None:
    """Compiles the cases and writes the record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    rows: list[dict[str, Any]] = []
    for case in CASES[:1] if arguments.smoke else CASES:
        peaks = _Peaks()
        for number in NUMBERS[:1] if arguments.smoke else NUMBERS:
            rows += _rows(case, number, peaks, smoke=arguments.smoke)
            save_so_far(_record(rows), arguments, load_before)
    write_record(_record(rows), arguments, load_before)


def _record(rows: list[dict[str, Any]]) -> Record:
    _compare(rows)
    goals = [
        Goal(
            name=f"{row['model']} on {row['gpus']}: compiled peak / what JAX may take",
            value=row["peak_GiB"] / row["limit_GiB"],
            limit=1.0,
        )
        for row in rows
        if row["peak_GiB"] is not None
    ]
    version = compile_client.missing() or compile_client.compiler_version(fast=True)
    return Record(name="scaling", rows=rows, goals=goals, notes=[f"compiled with {version}"])


def _compare(rows: list[dict[str, Any]]) -> None:
    """Adds to each row a GPU's rate relative to that on the fewest GPUs for the model."""
    first: dict[str, float] = {}
    for row in rows:
        rate = row["tokens_per_s_per_gpu"]
        if rate is not None:
            row["relative"] = rate / first.setdefault(row["model"], rate)


@dataclasses.dataclass
class _Peaks:
    """Compiled peaks of a model on the fewest GPUs that hold it, to estimate peaks on more GPUs."""

    state: float = 0.0
    one: float = 0.0
    each: float = 0.0

    def guess(self, state: float, at_a_time: int) -> float:
        """Estimates the peak for another size of the state; gradients take a third of it."""
        return self.one + (at_a_time - 1) * self.each - 4 / 3 * (self.state - state)


def _rows(case: Case, number: int, peaks: _Peaks, *, smoke: bool) -> list[dict[str, Any]]:
    """Returns the row of the most sequences at a time that fit; a smoke run compiles nothing.

    For the fewest GPUs that hold the model, there are also rows with fewer sequences.
    """
    alone = _forecast(case, number, 1, "the state alone")
    state, limit = alone.memory.state, alone.verdict.limit
    rows: list[dict[str, Any]] = []
    if smoke or state > limit:
        return [_describe(case, number, alone)]
    if not peaks.one:
        few = {count: _forecast(case, number, count) for count in AT_A_TIME[:2]}
        one, two = (forecast.memory.peak for forecast in few.values())
        if one > limit:
            return [_describe(case, number, alone)]
        peaks.state, peaks.one, peaks.each = state, one, two - one
        rows = [_describe(case, number, x, count) for count, x in few.items()]
    guessed = [count for count in AT_A_TIME if peaks.guess(state, count) <= limit]
    for count in reversed(guessed or AT_A_TIME[:1]):
        forecast = _forecast(case, number, count)
        if forecast.memory.peak <= limit:
            return [
                *(x for x in rows if x["sequences_at_a_time"] < count),
                _describe(case, number, forecast, count),
            ]
    return [_describe(case, number, alone)]


def _forecast(case: Case, number: int, at_a_time: int, why_formula: str | None = None) -> Any:
    words = [
        "model.attention=auto",
        f"global_batch_size={SEQUENCES * number // case.group}",
        f"num_microbatches={SEQUENCES // at_a_time}",
        *case.words,
    ]
    config = load(RunConfig, CONFIGS / f"{case.file}.yaml", words)
    plan = plan_from_config(config, number)
    return zerojax.forecast(plan, gpu=GPU, devices=number, fast=True, why_formula=why_formula)


def _describe(case: Case, number: int, forecast: Any, at_a_time: int | None = None) -> dict:
    """Returns a row of the table; without `at_a_time` it says that the model does not fit."""
    estimate, fits = forecast.estimate, at_a_time is not None
    time = estimate.expected if fits else None
    return {
        "model": case.name,
        "gpus": number,
        "sequences_at_a_time": at_a_time,
        "state_GiB": forecast.memory.state / GIB,
        "peak_GiB": forecast.memory.peak / GIB if fits else None,
        "limit_GiB": forecast.verdict.limit / GIB,
        "machine_host_GiB": forecast.offload.machine_host / GIB if forecast.offload else None,
        **expected_columns(time),
        "roofline_s": estimate.step_seconds if fits else None,
        "compute_s": estimate.compute_seconds if fits else None,
        "memory_s": estimate.memory_seconds if fits else None,
        "exposed_wire_s": estimate.exposed_wire_seconds if fits else None,
        "offload_s": estimate.offload_seconds if fits else None,
        "bound_by": estimate.bound_by if fits else None,
        "roofline_mfu": estimate.mfu if fits else None,
        "tokens_per_s_per_gpu": time and time.tokens_per_second / number,
        "relative": None,
    }


if __name__ == "__main__":
    main()
