"""Kills a run with layers in durable files, in the pass and in the update; counts lost steps.

    python -m benchmarks.paged_faults --kills 90

A training process (`benchmarks.paged_faults_run`) is killed by SIGKILL at random moments and
started again: a third of the times while layers are read and gradients are written, a third while
the optimizer state is updated, and a third in runs that update layers during the backward pass. The
next process must resume after the last step that was noted as
complete, and all losses must be bit-equal to those of a run without kills.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import load_average
from benchmarks.paged_faults_run import LAYERS, WIDTH
from benchmarks.recording import Goal, Record, add_arguments, write_record

ROOT = Path(__file__).resolve().parent.parent
PASS, SWEEP, STEP = "pass", "sweep", "step with updates in the backward pass"
LONGEST = {PASS: 0.12, SWEEP: 0.12, STEP: 0.24}
"""Seconds after the start of a part of a step within which the process is killed."""
PATIENCE = 240.0
FOR_EVER = 10**6


def main(argv: list[str] | None = None) -> None:
    """Runs the kills and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--kills", type=int, default=90)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args(argv)
    load_before = load_average()
    record = measure(arguments.kills, random.Random(arguments.seed))
    write_record(record, arguments, load_before, seed=arguments.seed)


def measure(kills: int, chance: random.Random) -> Record:
    """Kills runs in all parts of a step, then compares losses with runs without kills."""
    third = kills // 3
    rows, alike, steps = [], 0, 0
    for wanted in ({PASS: kills - 2 * third, SWEEP: third}, {STEP: third}):
        done, lost, losses, wrong = _kills(wanted, chance)
        rows += [
            {"what": f"kills in the {part}", "trials": done[part], "lost": lost[part]}
            for part in done
        ]
        alike, steps = alike + len(losses) - wrong, steps + len(losses)
    trials = sum(row["trials"] for row in rows)
    kept = trials - sum(row["lost"] for row in rows)
    rows.append({"what": "losses of all lives", "trials": steps, "lost": steps - alike})
    goals = [
        Goal(name="kills without a loss", value=kept, limit=trials, at_least=True),
        Goal(name="losses as without kills", value=alike, limit=steps, at_least=True),
    ]
    size = 16 * LAYERS * WIDTH * WIDTH / 2**20
    notes = [
        f"{size:.0f} MiB of weights, gradients and state of {LAYERS} layers in files, two CPU"
        " devices, ZeRO-3, clipping; SIGKILL at most"
        f" {LONGEST[PASS]:g} s after a part of a step began ({LONGEST[STEP]:g} s after the last"
        " step, with updates in the backward pass); the part is that of the last note",
        "lost: the next life did not go on behind the last step that was noted as whole; losses:"
        " not the bits of a run without kills",
    ]
    return Record(name="paged_faults", rows=rows, goals=goals, notes=notes)


def _kills(
    wanted: dict[str, int], chance: random.Random
) -> tuple[dict[str, int], dict[str, int], list[tuple[int, str]], int]:
    """Kills a run as often as wanted in each part, and compares it with a run without kills.

    Returns:
      ({part: kills}, {part: kills after which a step was lost}, (step, loss) of all lives, number
      of wrong losses).
    """
    in_backward = STEP in wanted
    done, lost = dict.fromkeys(wanted, 0), dict.fromkeys(wanted, 0)
    losses: list[tuple[int, str]] = []
    with tempfile.TemporaryDirectory(prefix="zerojax-faults-", dir=".") as folder:
        killed, whole = Path(folder, "killed"), Path(folder, "whole")
        ended = next(iter(wanted))
        while any(done[part] < wanted[part] for part in wanted):
            part = max(wanted, key=lambda name: wanted[name] - done[name])
            lines = _life(killed, part, chance.uniform(0, LONGEST[part]))
            lost[ended] += not _goes_on(losses, _steps(lines))
            losses += _steps(lines)
            ended = STEP if in_backward else SWEEP if lines[-1] == SWEEP else PASS
            done[ended] += 1
            print(f"  kill {sum(done.values())} in the {ended}: step {losses[-1][0]}", flush=True)
        last = losses[-1][0] + 5
        steps = _steps(_end(killed, last, in_backward))
        lost[ended] += not _goes_on(losses, steps)
        losses += steps
        expected = dict(_steps(_end(whole, last, in_backward)))
    return done, lost, losses, sum(expected[step] != loss for step, loss in losses)


def _goes_on(before: list[tuple[int, str]], steps: list[tuple[int, str]]) -> bool:
    """Returns whether a process resumed after the last noted step.

    The next two steps may be complete without having been noted.
    """
    last = before[-1][0] if before else 0
    return last < steps[0][0] <= last + 3


def _life(folder: Path, part: str, delay: float) -> list[str]:
    """Kills a process `delay` seconds after `part` of its second step, or a later one, began.

    Returns:
      The lines that the process noted.
    """
    before = len(_lines(folder))
    process = _start(folder, FOR_EVER, part == STEP)
    deadline = time.monotonic() + PATIENCE
    while True:
        lines = _lines(folder)[before:]
        if _steps(lines) and (part == STEP or (lines[-1] == SWEEP) == (part == SWEEP)):
            break
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"the run did not train: {process.communicate()[1]}")
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    process.communicate()
    return _lines(folder)[before:]


def _end(folder: Path, steps: int, in_backward: bool) -> list[str]:
    """Returns the lines of a process that trains until `steps`."""
    before = len(_lines(folder))
    process = _start(folder, steps, in_backward)
    _, errors = process.communicate(timeout=PATIENCE)
    if process.returncode:
        raise RuntimeError(errors)
    return _lines(folder)[before:]


def _start(folder: Path, steps: int, in_backward: bool) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    words = [str(folder.resolve()), str(steps), *["in_backward"] * in_backward]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.paged_faults_run", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _lines(folder: Path) -> list[str]:
    """Returns the complete lines that were noted, without a line that a kill cut off."""
    path = folder / "ledger"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _steps(lines: list[str]) -> list[tuple[int, str]]:
    """Returns (number, loss) of the steps that are noted in `lines`."""
    parts = [line.split() for line in lines if line.startswith("step ")]
    return [(int(number), loss) for _, number, loss in parts]


if __name__ == "__main__":
    main()
