"""The longest sequence with which Llama 8B trains on 1 and 8 H100, compiled without a GPU.

Each row adds one setting to the row before, with one sequence per GPU, or one over 8 GPUs. The
length is found by doubling and then by bisection, to 1/16. A length fits if the compiled peak is
below the memory that JAX may use of a card. cuDNN's workspace is not counted, and no GPU has run
the steps. Needs the extra `plan`.

For comparison: Arctic Long Sequence Training, now part of DeepSpeed, reports 500 thousand tokens on
one H100 and 3.7 million on 8 with the same model (arXiv:2506.13996). These numbers were measured,
and used the whole memory of a card, of which JAX uses 75 % by default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import zerojax
from benchmarks.machine import load_average
from benchmarks.plans import CONFIGS, GIB
from benchmarks.recording import Goal, Record, parse_arguments, save_so_far, write_record
from zerojax.config import RunConfig, load
from zerojax.hardware import compile_client
from zerojax.hardware.compile_client import CompileError
from zerojax.training.run_file import plan_from_config

CONFIG = CONFIGS / "llama_8b_zero3_8xh100.yaml"
STORED = ("model.attention=xla", "model.loss_chunk=null")
FUSED = ("model.attention=auto", "model.loss_chunk=null")
CHUNKS = ("model.loss_chunk=4096", "model.mlp_chunk=4096")
OVER_8 = ("mesh.data=1", "mesh.context=8")
INPUTS_ON_HOST = ("mesh.offload.activations=host",)
STATE_ON_HOST = ("mesh.offload.opt_state=host", "mesh.offload.params=host")
START, UNIT = 4096, 1024
"""Tokens per device of `context`: start of the search, and unit that divides every length."""
ANCHORS = {1: 500_000, 8: 3_700_000}
"""Tokens that DeepSpeed reports (arXiv:2506.13996, abstract)."""
TENFOLD, MILLION = 10, 2**20


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table: settings on a number of GPUs.

    Attributes:
      words: settings in addition to those of the run file.
      context: number of GPUs over which a sequence is split.
    """

    means: str
    devices: int
    words: tuple[str, ...]
    context: int = 1

    def config(self, tokens: int) -> RunConfig:
        """Returns the settings: one sequence at a time per GPU, or per group of GPUs."""
        rows = self.devices // self.context
        length = (f"model.max_seq_len={tokens}", f"data.seq_len={tokens}")
        batch = (f"global_batch_size={rows}", "num_microbatches=1")
        return load(RunConfig, CONFIG, [*self.words, *length, *batch])


CASES = (
    Case("stored scores", 1, (*STORED, *STATE_ON_HOST)),
    Case("fused attention", 1, (*FUSED, *STATE_ON_HOST)),
    Case("+ loss and MLP in chunks", 1, (*CHUNKS, *STATE_ON_HOST)),
    Case("+ layers' inputs on the host", 1, (*CHUNKS, *STATE_ON_HOST, *INPUTS_ON_HOST)),
    Case("stored scores", 8, STORED),
    Case("fused attention", 8, FUSED),
    Case("+ loss and MLP in chunks", 8, CHUNKS),
    Case("+ context 8", 8, (*CHUNKS, *OVER_8), context=8),
    Case("+ layers' inputs on the host", 8, (*CHUNKS, *OVER_8, *INPUTS_ON_HOST), context=8),
)


def main(argv: list[str] | None = None) -> None:
    """Compiles the cases and writes the record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    record = Record(name="sequences", rows=[], notes=[_compiler()])
    if compile_client.missing() is None:
        for row in _rows(CASES[:1] if arguments.smoke else CASES, smoke=arguments.smoke):
            record = dataclasses.replace(record, rows=[*record.rows, row])
            save_so_far(record, arguments, load_before)
    goals = [] if arguments.smoke else goals_of(record.rows)
    write_record(dataclasses.replace(record, goals=goals), arguments, load_before)


def _rows(cases: tuple[Case, ...], *, smoke: bool) -> Iterator[dict[str, Any]]:
    for case in cases:
        unit = UNIT * case.context
        forecasts: dict[int, Any] = {}

        def fits(tokens: int, case: Case = case, forecasts: dict[int, Any] = forecasts) -> bool:
            forecasts[tokens] = _forecast(case, tokens)
            return forecasts[tokens] is not None and bool(forecasts[tokens].verdict.fits)

        most = START if smoke else 2**24
        tokens = longest(fits, start=START * case.context, unit=unit, most=most)
        yield _row(case, tokens, forecasts.get(tokens))


def longest(fits: Callable[[int], bool], *, start: int, unit: int, most: int) -> int:
    """Returns the largest multiple of `unit` up to `most` that fits, to 1/16; 0 if none fits.

    >>> longest(lambda tokens: tokens <= 100_000, start=4096, unit=1024, most=2**20)
    98304
    """
    good, bad = 0, start
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    if bad > most:
        return good
    while bad - good > max(unit, good // 16):
        middle = (good + bad) // 2 // unit * unit
        if middle in (good, bad):
            break
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _forecast(case: Case, tokens: int) -> Any:
    """Returns None if the compiler fails, as it does for arrays that no card could hold."""
    plan = plan_from_config(case.config(tokens), case.devices)
    try:
        return zerojax.forecast(plan, gpu="h100", devices=case.devices, fast=True)
    except CompileError as error:
        print(f"  {case.devices} x {case.means}, {tokens} tokens: {str(error)[:200]}", flush=True)
        return None


def _row(case: Case, tokens: int, found: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"devices": case.devices, "means": case.means, "tokens": tokens}
    if found is None:
        return row
    return {
        **row,
        "peak_GiB": found.memory.peak / GIB,
        "limit_GiB": found.verdict.limit / GIB,
        "host_GiB": found.memory.host / GIB,
        "roofline_s": found.estimate.step_seconds,
        "bound_by": found.estimate.bound_by,
        "roofline_mfu": found.estimate.mfu,
        "tokens_per_s": found.estimate.tokens_per_second,
        "of DeepSpeed's": tokens / ANCHORS[case.devices],
    }


def goals_of(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Returns goals of the longest sequence: 10 x stored scores; 2^20 tokens on 8 GPUs."""
    goals = []
    for devices in (1, 8):
        lengths = [row["tokens"] for row in rows if row["devices"] == devices]
        if lengths and lengths[0]:
            name = f"{devices} H100: longest / longest with stored scores"
            ratio = max(lengths) / lengths[0]
            goals.append(Goal(name=name, value=ratio, limit=TENFOLD, at_least=True))
        if lengths and devices == 8:
            name = "8 H100: tokens of the longest sequence"
            goals.append(Goal(name=name, value=max(lengths), limit=MILLION, at_least=True))
    return goals


def _compiler() -> str:
    return compile_client.missing() or (
        f"compiled with {compile_client.compiler_version(fast=True)}"
    )


if __name__ == "__main__":
    main()
