"""Runs every test of a commit, in hours: `make test-all`.

All tiers on the newest and on the oldest supported Python, the programs of GPUs, and the mutations.
It works in a clone of its own, so that the working tree can change meanwhile. Results are written
as they come to .pytest_cache/test-all/COMMIT/: journal.jsonl (one line for each test) and
report.txt (failures, slowest files), which is also printed. `--continue` skips the tests of the
same commit that passed before an interruption; `--commit` names another commit than HEAD, so that a
run that takes longer than the work on the next commit can be continued.

This file needs nothing but Python's standard library.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / ".pytest_cache" / "test-all"
NEWEST, OLDEST = ".venv", ".venv-oldest"
VERSIONS = {NEWEST: "3.13 3.12 3.14 3.11", OLDEST: "3.11 3.12 3.13 3.14"}
"""Of Python, the preferred one first."""
NUM_SLOWEST = 25


@dataclasses.dataclass(frozen=True)
class Part:
    """Tests that run in one call of pytest.

    Attributes:
      name: of the part, in the journal and the report.
      venv: the environment, NEWEST or OLDEST.
      markers: pytest's `-m`; None for the mutations.
    """

    name: str
    venv: str
    markers: str | None


_NO_GPU = "not gpu and not gpu_programs"
PARTS = (
    Part("quick", NEWEST, f"not slow and not thorough and {_NO_GPU}"),
    Part("thorough", NEWEST, f"thorough and not slow and {_NO_GPU}"),
    Part("programs of GPUs", NEWEST, "gpu_programs"),
    Part("slow", NEWEST, f"slow and {_NO_GPU}"),
    Part("quick, oldest Python", OLDEST, f"not slow and not thorough and {_NO_GPU}"),
    Part("thorough, oldest Python", OLDEST, f"thorough and not slow and {_NO_GPU}"),
    Part("mutations", NEWEST, None),
    Part("slow, oldest Python", OLDEST, f"slow and {_NO_GPU}"),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/test_all.py", description=__doc__)
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="see above")
    parser.add_argument("--commit", metavar="REV", default="HEAD", help="default: %(default)s")
    parser.add_argument("--only", metavar="PART", help=", ".join(part.name for part in PARTS))
    args = parser.parse_args()
    parts = [part for part in PARTS if args.only in (None, part.name)]
    if not parts:
        parser.error(f"--only {args.only}: no such part")
    commit = _git("rev-parse", "--verify", f"{args.commit}^{{commit}}")
    if _git("status", "--porcelain"):
        print("test-all: changes that are not committed are not tested", flush=True)
    run = RUNS / commit[:12]
    journal = run / "journal.jsonl"
    _prepare(run, commit, journal, goes_on=args.goes_on)
    unfinished = []
    try:
        for part in parts:
            print(f"\n== {part.name}", flush=True)
            if not _run(part, run / "tree", journal):
                unfinished.append(part.name)
    except KeyboardInterrupt:
        unfinished.append(f"{part.name}: interrupted")
    report, passed = _report(journal, unfinished)
    (run / "report.txt").write_text(report)
    print(report, flush=True)
    return 0 if passed else 1


def _git(*words: str) -> str:
    result = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return result.stdout.strip()


def _prepare(run: Path, commit: str, journal: Path, *, goes_on: bool) -> None:
    """Makes the clone of `commit` and its two environments; removes other commits' clones."""
    for other in RUNS.glob("*/tree"):
        if other.parent != run:
            shutil.rmtree(other)
    tree = run / "tree"
    if not goes_on:
        journal.unlink(missing_ok=True)
    run.mkdir(parents=True, exist_ok=True)
    if not tree.exists():
        subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
        subprocess.run(["git", "checkout", "-q", "--detach", commit], cwd=tree, check=True)
    for venv, versions in VERSIONS.items():
        command = ["sh", "tools/setup.sh", venv, "test,plan,docs", versions]
        subprocess.run(command, cwd=tree, check=True)


def _run(part: Part, tree: Path, journal: Path) -> bool:
    """Runs a part. Returns False if it ended before all of its tests had a result."""
    python = str(tree / part.venv / "bin" / "python")
    # With "=": pytest would take a file that exists for a place of tests.
    words = [f"--journal={journal}", f"--journal-part={part.name}"]
    if part.markers is None:
        command = [python, "-m", "tests.mutations", *words]
    else:
        command = [python, "-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal"]
        command += ["-m", part.markers, "--tb=short", *words]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    status = subprocess.run(command, cwd=tree, env=variables, check=False).returncode
    return status in (0, 1, 5)  # all passed, some failed, none was left to run


def _report(journal: Path, unfinished: Sequence[str]) -> tuple[str, bool]:
    """Returns the report of all results of this commit, and whether everything passed."""
    results: dict[tuple[str, str], dict[str, Any]] = {}
    if journal.exists():
        for line in journal.read_text().splitlines():
            result = json.loads(line)
            results[result["part"], result["test"]] = result
    seconds: collections.Counter[tuple[str, str]] = collections.Counter()
    counts: dict[str, collections.Counter[str]] = {}
    failed = []
    for (part, test), result in results.items():
        counts.setdefault(part, collections.Counter())[result["outcome"]] += 1
        seconds[test.partition("::")[0], part] += result["seconds"]
        if result["outcome"] == "failed":
            failed.append(f"{part}: {test.strip().splitlines()[0]}")
    lines = ["", "== slowest files"]
    lines += [
        f"{total:8.0f} s  {file} ({part})"
        for (file, part), total in seconds.most_common(NUM_SLOWEST)
    ]
    lines += ["", "== results"]
    for part, outcomes in counts.items():
        numbers = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
        lines.append(f"{part}: {numbers}")
    lines += [f"not finished: {name}" for name in unfinished]
    lines += ["", f"== {len(failed)} failed", *failed, ""]
    return "\n".join(lines), not failed and not unfinished


if __name__ == "__main__":
    sys.exit(main())
