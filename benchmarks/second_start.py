"""The second start of a run relative to its first, with compiled programs stored in a folder.

A start is a process from its imports to the first step of `zerojax.train`; CPU seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

from benchmarks import first_step
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, add_arguments, write_record
from benchmarks.start_up import run_program
from zerojax.runtime.user_files import CACHE_VARIABLE

CASES = ((1, 1), (8, 1), (8, 3))
"""(number of devices, ZeRO stage) of each row."""
REPEATS = 3
LIMIT = 0.35

PROGRAM = """
import itertools, os
os.environ[{variable!r}] = {folder!r}
import jax
jax.config.update("jax_num_cpu_devices", {devices})
import zerojax
from benchmarks import first_step
from benchmarks.recipe import CLIPPED
factory, batch = first_step.models({smoke})[{name!r}]
tx = zerojax.adamw(3e-4, b2=0.95, weight_decay=0.01, **CLIPPED)
zerojax.train(factory, {{"data": {devices}, "zero": {zero}}}, batches=itertools.repeat(batch),
              optimizer=tx, precision="fp32", steps=1, run_dir=None,
              log=zerojax.LogConfig(console="quiet"))
"""


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="pairs of starts of each run")
    arguments = parser.parse_args(argv)
    load_before, smoke = load_average(), arguments.smoke
    repeats = 1 if smoke else arguments.repeats
    rows, goals = [], []
    imports = statistics.median(
        run_program("import zerojax, benchmarks.first_step")[0] for _ in range(repeats)
    )
    for name in first_step.models(smoke):
        for case in CASES[: 1 if smoke else None]:
            starts = [_two_starts(name, case, smoke) for _ in range(repeats)]
            first, second = (statistics.median(times) for times in zip(*starts, strict=True))
            row = {"model": name, "devices": case[0], "zero": case[1]}
            row |= {"first_cpu_s": first, "second_cpu_s": second, "imports_cpu_s": imports}
            rows.append({**row, "second/first": second / first})
            where = first_step.title(name, *case)
            goal = Goal(name=f"{where}: second / first start", value=second / first, limit=LIMIT)
            goals.append(goal)
    write_record(Record(name="second_start", rows=rows, goals=goals), arguments, load_before)


def _two_starts(name: str, case: tuple[int, int], smoke: bool) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        program = PROGRAM.format(
            variable=CACHE_VARIABLE,
            folder=folder,
            name=name,
            devices=case[0],
            zero=case[1],
            smoke=smoke,
        )
        return run_program(program)[0], run_program(program)[0]


if __name__ == "__main__":
    main()
