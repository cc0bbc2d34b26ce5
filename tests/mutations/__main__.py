"""The command that runs the mutations; exit status 1 if any survives.

python -m tests.mutations [--only WORD] [--jobs N] [--journal FILE]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutations.table import MUTATIONS, Mutation
from tests.support.journal import append, passed_tests

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("zerojax", "pallas_kernels")
ALSO = ("tests", "configs", "docs", "examples", "benchmarks", "pyproject.toml", "README.md")
TIMEOUT = 900.0
"""Seconds for the tests of one mutation; a change that makes them hang is noticed as well."""


def find(mutation: Mutation, root: Path) -> Path:
    """The file that a mutation changes.

    Raises:
      LookupError: its text is not in exactly one place.
    """
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    found = [path for path in files for _ in range(path.read_text().count(mutation.old))]
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(root)) for path in found) or "nowhere"
        raise LookupError(f"{mutation.old!r} is in {places}; it must be in exactly one place")
    return found[0]


def survives(mutation: Mutation) -> bool:
    """Whether all named tests pass with the change."""
    with tempfile.TemporaryDirectory(prefix="zerojax-mutation-") as folder:
        root = Path(folder)
        for name in (*PACKAGES, *ALSO):
            source = ROOT / name
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, root / name, ignore=ignore)
            else:
                shutil.copy(source, root / name)
        path = find(mutation, root)
        path.write_text(path.read_text().replace(mutation.old, mutation.new))
        options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        command = [sys.executable, "-m", "pytest", *options, *mutation.tests.split()]
        variables = {**os.environ, "PYTHONPATH": folder}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)  # see Makefile
        try:
            result = subprocess.run(
                command, cwd=root, env=variables, capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return False
        if result.returncode not in (0, 1, 2):
            raise RuntimeError(f"{mutation.tests}: {result.stdout}{result.stderr}")
        return result.returncode == 0


def timed(mutation: Mutation) -> tuple[bool, float]:
    """`survives`, and the seconds it took."""
    began = time.monotonic()
    return survives(mutation), time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", default="", help="those whose text or tests contain this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time")
    parser.add_argument("--journal", type=Path, help="add results; leave out what was found before")
    parser.add_argument("--journal-part", default="", help="the name of this call in the journal")
    args = parser.parse_args()
    chosen = [one for one in MUTATIONS if args.only in one.old + one.tests]
    if args.journal:
        before = passed_tests(args.journal, args.journal_part)
        chosen = [one for one in chosen if one.old not in before]
    survivors = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for mutation, (survived, seconds) in zip(chosen, pool.map(timed, chosen), strict=True):
            print("SURVIVED" if survived else "found   ", mutation.old.strip().splitlines()[0])
            sys.stdout.flush()
            survivors += [mutation] if survived else []
            if args.journal:
                outcome = "failed" if survived else "passed"
                append(
                    args.journal,
                    part=args.journal_part,
                    test=mutation.old,
                    outcome=outcome,
                    seconds=seconds,
                )
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} found")
    for mutation in survivors:
        path = find(mutation, ROOT).relative_to(ROOT)
        print(
            f"{path}: {mutation.old!r} -> {mutation.new!r} is noticed by none of {mutation.tests}"
        )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
