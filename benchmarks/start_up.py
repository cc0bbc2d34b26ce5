"""Time before the first step: imports, planning, compilation.

Every sample is a fresh process; medians of five, in CPU seconds counted by the kernel.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, write_record

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 5
IMPORT_MARGIN = 0.25  # seconds of CPU time
SLOW_IMPORT_US = 5_000

PROGRAMS = {
    "python": "pass",
    "import zerojax": "import zerojax",
    "jax, flax.nnx, optax": "import jax, flax.nnx, optax",
    "every public name of zerojax": (
        "import zerojax; [getattr(zerojax, name) for name in zerojax.__all__]"
    ),
    "first step, bare jit": """
import jax, optax
from benchmarks import plain_jax, small_gpt
config = small_gpt.choose_config({smoke})
factory, source = small_gpt.make_factory(config), small_gpt.make_source(config)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
params = plain_jax.init_params(factory)
opt_state = jax.jit(tx.init)(params)
float(plain_jax.build_step(factory, tx)(params, opt_state, source.batch(0))[2])
""",
    "first step, zerojax.train": """
import optax, zerojax
from benchmarks import small_gpt
config = small_gpt.choose_config({smoke})
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
zerojax.train(small_gpt.make_factory(config), None, small_gpt.make_source(config), optimizer=tx,
              precision='fp32', steps=1, run_dir=None)
""",
}


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Returns one row per program; the programs alternate."""
    programs = {name: text.format(smoke=smoke) for name, text in PROGRAMS.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for repeat in range(1 if smoke else REPEATS + 1):
        for name, program in programs.items():
            seconds = run_program(program)
            if repeat or smoke:  # the first reads from the disk and writes bytecode
                taken[name].append(seconds)
    median = {
        name: {
            "cpu_s": statistics.median(cpu for cpu, _ in seconds),
            "wall_s": statistics.median(wall for _, wall in seconds),
        }
        for name, seconds in taken.items()
    }
    rows: list[dict[str, Any]] = [{"program": name} | values for name, values in median.items()]
    base = median["jax, flax.nnx, optax"]["cpu_s"]
    cpu = {name: values["cpu_s"] for name, values in median.items()}
    goals = [
        Goal(
            name="CPU s, every public name of zerojax - (jax, flax.nnx, optax)",
            value=cpu["every public name of zerojax"] - base,
            limit=IMPORT_MARGIN,
        ),
        Goal(
            name="CPU s, import zerojax - python",
            value=cpu["import zerojax"] - cpu["python"],
            limit=IMPORT_MARGIN,
        ),
    ]
    return Record(name="start_up", rows=rows, goals=goals, notes=slow_imports())


def run_program(program: str) -> tuple[float, float]:
    """Returns (CPU seconds, wall seconds) of a fresh Python process.

    Raises:
      RuntimeError: the program failed.
    """
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=_environment())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"status {process.returncode} of the program:\n{program}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - began


def slow_imports() -> list[str]:
    """Returns the slowest modules that zerojax imports in addition to jax, flax.nnx and optax."""
    program = "import jax, flax.nnx, optax; " + PROGRAMS["every public name of zerojax"]
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = re.findall(r"import time: +(\d+) \| +(\d+) \|( *)(\S+)", result.stderr)
    start = next(index for index, line in enumerate(lines) if line[3] == "zerojax")
    added = sorted(((int(own), name) for own, _, _, name in lines[start:]), reverse=True)
    ours = sum(own for own, name in added if name.split(".")[0] == "zerojax")
    notes = [
        f"-X importtime: zerojax adds {sum(own for own, _ in added) / 1e3:.0f} ms, of which "
        f"{ours / 1e3:.0f} ms are its own modules"
    ]
    slow = [f"{name} {own / 1e3:.0f} ms" for own, name in added if own >= SLOW_IMPORT_US]
    return notes + (["the slowest: " + ", ".join(slow)] if slow else [])


def _environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    main()
