"""Kills processes during saves and flips bits in checkpoints; counts lost and undetected cases.

    python -m benchmarks.checkpoint_faults --kills 60 --flips 60

Training processes (`benchmarks.checkpoint_faults_run`) save every step. They are killed at random
moments, half of the time as one process, half as two of which one or both are killed, and started
again. The new process must resume from the newest checkpoint that the old one has noted, or a later
one, with exactly the bits that were noted before the save. Then single bits of a checkpoint are
flipped: a restore must detect each, name its file, and use the step before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.checkpoint_faults_run import DEVICES, plan_of
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, add_arguments, write_record
from zerojax.checkpoint import Checkpointer

ROOT = Path(__file__).resolve().parent.parent
LAYERS, SMOKE_LAYERS = 16, 2
LONGEST = 2.0
"""Seconds after its first save within which a process is killed; a save takes 0.2 s."""
PATIENCE = 300.0
COLUMNS = (
    *("trials", "noticed", "file named", "array named"),
    *("verify names it", "step before used"),
)
DEATH = 0.5
"""Maximum number of seconds by which the second of two processes outlives the first."""


def main(argv: list[str] | None = None) -> None:
    """Runs kills and flips, and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--flips", type=int, default=60)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args(argv)
    load_before = load_average()
    jax.config.update("jax_num_cpu_devices", 8)
    record = measure(arguments.kills, arguments.flips, arguments.seed, arguments.smoke)
    write_record(record, arguments, load_before, seed=arguments.seed)


def measure(kills: int, flips: int, seed: int, smoke: bool) -> Record:
    """Returns the record of all kills and all flips."""
    layers = SMOKE_LAYERS if smoke else LAYERS
    rows, survived, noticed = [], 0, 0
    with tempfile.TemporaryDirectory(prefix="zerojax-faults-") as folder:
        for count, share in ((1, (kills + 1) // 2), (2, kills // 2)):
            run = Run(Path(folder, f"run-{count}"), count, layers, random.Random(f"{seed} {count}"))
            row = run.kill_often(share)
            rows.append(row)
            survived += row["trials"] - row["lost"]
        for row in flip_often(Path(folder, "flips"), layers, flips, seed):
            rows.append(row)
            noticed += row["noticed"]
    size = 12 * layers * 256 * 256 / 2**20
    notes = [
        f"state: {size:.0f} MiB over {DEVICES} CPU devices, ZeRO-2, saved after every step while"
        f" the next one runs, which donates it; SIGKILL at most {LONGEST:g} s after the first save"
        " of a life",
        "lost: the next life did not go on from the newest step that was noted as saved, or a later"
        " one, or not with exactly the bits whose SHA-256 was noted before the save",
        "during a save: a partial or expired folder was left behind",
        "flips: half of them at a random byte of all bytes, half in a random file; restored onto 8,"
        " 2 and 1 devices in turn; 'step before used' compares all its values",
    ]
    goals = [
        Goal(name="kills without a loss", value=survived, limit=kills, at_least=True),
        Goal(name="flipped bits noticed", value=noticed, limit=flips, at_least=True),
    ]
    return Record(name="checkpoint_faults", rows=rows, goals=goals, notes=notes)


# --- kills ----------------------------------------------------------------------------------------


class Run:
    """A run of one or two processes that is started and killed repeatedly."""

    def __init__(self, folder: Path, count: int, layers: int, chance: random.Random) -> None:
        folder.mkdir(parents=True)
        self.folder, self.count, self.layers, self.chance = folder, count, layers, chance
        self.read = [0] * count
        self.digests: list[dict[int, str]] = [{} for _ in range(count)]
        self.saved = 0
        self.totals: Counter[str] = Counter()

    def kill_often(self, kills: int) -> dict[str, Any]:
        """Starts and kills the processes, and starts them once more to check the last state."""
        for number in range(kills):
            with self._alive(None) as processes:
                self._wait_for_a_save(processes)
                time.sleep(self.chance.uniform(0, LONGEST))
                self._kill(processes)
            self.totals["trials"] += 1
            left = [path.name for path in (self.folder / "checkpoints").iterdir()]
            self.totals["during a save"] += any("." in name for name in left)
            self._read_ledgers()
            print(f"  {self.count} processes, kill {number + 1}: saved {self.saved}", flush=True)
        if kills:
            with self._alive(0) as processes:
                for process in processes:
                    _end(process)
            self._read_ledgers()
        restored = self.totals["restored"] // self.count
        return {
            "what": f"kills, {self.count} process{'es' * (self.count > 1)}",
            "trials": self.totals["trials"],
            "during a save": self.totals["during a save"],
            "restored bit for bit": restored,
            "lost": self.totals["trials"] - restored,
            "saves": self.saved,
        }

    @contextlib.contextmanager
    def _alive(self, steps: int | None) -> Iterator[list[subprocess.Popen[str]]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"count": self.count, "port": port, "layers": self.layers, "steps": steps}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        processes = []
        try:
            for index in range(self.count):
                words = json.dumps({"folder": str(self.folder), "index": index, **common})
                command = [sys.executable, "-W", "error::RuntimeWarning", "-m"]
                with (self.folder / f"output-{index}").open("w") as output:
                    processes.append(
                        subprocess.Popen(
                            [*command, "benchmarks.checkpoint_faults_run", words],
                            env=environment,
                            stdout=output,
                            stderr=output,
                            text=True,
                        )
                    )
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def _wait_for_a_save(self, processes: list[subprocess.Popen[str]]) -> None:
        """Waits until the processes have noted a save; also checks their notes of the start."""
        before, deadline = self.saved, time.monotonic() + PATIENCE
        while self.saved <= before:
            for index, process in enumerate(processes):
                if process.poll() is not None:
                    output = (self.folder / f"output-{index}").read_text()
                    raise RuntimeError(f"process {index} ended by itself:\n{output}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no save within {PATIENCE:g} s")
            time.sleep(0.02)
            self._read_ledgers()

    def _kill(self, processes: list[subprocess.Popen[str]]) -> None:
        """Kills one process now, and the others at the same time (half of the cases) or later."""
        order = list(processes)
        self.chance.shuffle(order)
        together = self.chance.random() < 0.5
        pause = self.chance.uniform(0, DEATH)
        for number, process in enumerate(order):
            if number and not together:
                time.sleep(pause)
            process.send_signal(signal.SIGKILL)
        for process in order:
            process.wait()

    def _read_ledgers(self) -> None:
        """Reads the complete new lines of the ledgers."""
        for index in range(self.count):
            path = self.folder / f"ledger-{index}"
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            end = text.rfind("\n") + 1
            lines, self.read[index] = text[self.read[index] : end].splitlines(), end
            for line in lines:
                kind, step, *rest = line.split()
                self._take(kind, int(step), rest, self.digests[index])

    def _take(self, kind: str, step: int, rest: list[str], digests: dict[int, str]) -> None:
        if kind == "state":
            digests[step] = rest[0]
        elif kind == "saved":
            self.saved = max(self.saved, step)
        elif step >= self.saved and digests.get(step) == rest[0]:
            self.totals["restored"] += 1
        else:
            print(f"  LOST: restored {step}, saved was {self.saved}", flush=True)


def _end(process: subprocess.Popen[str]) -> None:
    if process.wait(timeout=PATIENCE):
        raise RuntimeError(f"a process failed with status {process.returncode} at its last start")


# --- flipped bits ---------------------------------------------------------------------------------


def flip_often(folder: Path, layers: int, flips: int, seed: int) -> list[dict[str, Any]]:
    """Flips single bits of the second of two checkpoints; returns a row for each kind of file."""
    folder.mkdir()
    words = {"folder": str(folder), "index": 0, "count": 1, "port": 0}
    command = [sys.executable, "-m", "benchmarks.checkpoint_faults_run"]
    subprocess.run(
        [*command, json.dumps({**words, "layers": layers, "steps": 2})],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=PATIENCE,
    )
    path, chance = folder / "checkpoints", random.Random(f"{seed} flips")
    expected = _values(plan_of(layers, 1), path, 1)
    plans = [plan_of(layers, devices) for devices in (8, 2, 1)]
    files = sorted(file for file in (path / "2").rglob("*") if file.stat().st_size)
    files = [file for file in files if file.is_file()]
    rows: dict[str, Counter[str]] = {}
    for number in range(flips):
        sizes = [file.stat().st_size for file in files]
        file = chance.choices(files, weights=sizes if number % 2 else None)[0]
        place, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
        _flip(file, place, bit)
        name = str(file.relative_to(path / "2"))
        found = _restore_damaged(plans[number % len(plans)], path, name, expected)
        large = file.stat().st_size > 2**20
        kind = file.name if file.name == "metadata.json" else "values" if large else "other files"
        row = rows.setdefault(kind, Counter())
        row.update(found)
        row["trials"] += 1
        _flip(file, place, bit)
        print(f"  flip {number + 1}: bit {bit} of byte {place} of {name}: {found}", flush=True)
    with Checkpointer(path) as checkpointer:
        if flips and not checkpointer.verify(2).is_good:
            raise RuntimeError("the flips were not undone")
    columns = (
        "trials",
        "noticed",
        "file named",
        "array named",
        "verify names it",
        "step before used",
    )
    return [
        {"what": f"flips, {kind}", **{column: row[column] for column in columns}}
        for kind, row in sorted(rows.items())
    ]


def _flip(file: Path, place: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ (1 << bit)]))


def _restore_damaged(
    plan: Any, path: Path, name: str, expected: dict[str, np.ndarray]
) -> Counter[str]:
    """Returns what a restore and a verification report of a checkpoint with this damaged file."""
    found: Counter[str] = Counter()
    with Checkpointer(path) as checkpointer, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        restored = checkpointer.restore(plan.abstract_portable)
        text = " ".join(str(one.message) for one in told)
        verification = checkpointer.verify(2)
    same = _flat(restored.state)
    found["noticed"] = int(restored.step == 1 and "is damaged" in text)
    found["file named"] = int(name in text)
    found["array named"] = int("differs from what was saved" in text)
    found["verify names it"] = int(any(one.file == name for one in verification.damages))
    found["step before used"] = int(
        restored.step == 1
        and all(np.array_equal(same[key], value) for key, value in expected.items())
    )
    return found


def _values(plan: Any, path: Path, step: int) -> dict[str, np.ndarray]:
    with Checkpointer(path) as checkpointer:
        return _flat(checkpointer.restore(plan.abstract_portable, step).state)


def _flat(state: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


if __name__ == "__main__":
    main()
