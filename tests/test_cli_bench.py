"""`zerojax bench io`: the form of its table, what it leaves behind, and its mistakes."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli_complaints import fails
from zerojax.cli import main
from zerojax.store.rates import THREADS, measure_rates

ROOT = Path(__file__).resolve().parent.parent


def test_a_line_for_each_number_of_threads(tmp_path, capsys):
    assert main(["bench", "io", str(tmp_path), "--size", "64"]) == 0
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title == f"{tmp_path}: GB/s (10^9 bytes), best of three passes over 64 MiB"
    assert head.split() == ["threads", "write", "read", "read", "+", "write"]
    rows = [line.split() for line in lines[: len(THREADS)]]
    assert [int(row[0]) for row in rows] == list(THREADS)
    assert all(len(row) == 4 and min(map(float, row[1:])) > 0 for row in rows)
    best = max(float(row[3]) for row in rows)
    assert re.fullmatch(rf"best: {best:.2f} GB/s read \+ write, with \d threads?", lines[-1])
    assert not list(tmp_path.iterdir())


def test_rates_are_bytes_over_seconds(tmp_path, monkeypatch):
    """Each sweep takes a second by this clock: 4 buckets of 16 MiB, moved once or twice."""
    seconds = iter(range(1000))
    monkeypatch.setattr("zerojax.store.rates.time.perf_counter", lambda: float(next(seconds)))
    (rates,) = measure_rates(tmp_path, num_bytes=1, threads=[2])
    assert (rates.write, rates.read, rates.both) == (64 * 2**20, 64 * 2**20, 128 * 2**20)
    assert rates.num_threads == 2


def test_a_file_system_without_direct_transfers_is_told_once(tmp_path, capsys, monkeypatch):
    real = os.open

    def refuse(path, flags, *mode, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert main(["bench", "io", str(tmp_path), "--size", "64"]) == 0
    assert capsys.readouterr().out.count("refuses O_DIRECT") == 1


def test_mistakes(tmp_path, capsys):
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.write_text("")
    assert f"{missing}: no such folder" in fails(capsys, "bench", "io", str(missing))
    assert f"{file}: not a folder" in fails(capsys, "bench", "io", str(file))
    assert "--size 0: at least 1" in fails(capsys, "bench", "io", str(tmp_path), "--size", "0")


def test_a_full_disk_is_no_mistake_of_the_words(tmp_path, capsys, monkeypatch):
    class Disk:
        f_bavail, f_frsize = 256, 4096  # 1 MiB

    monkeypatch.setattr(os, "statvfs", lambda folder: Disk)
    assert main(["bench", "io", str(tmp_path), "--size", "64"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "needs 64.1 MiB of disk, 1.0 MiB are free" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["bench"], ["bench", "io"]])
def test_help_fits(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*words, "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: zerojax {' '.join(words)}")
    assert all(len(line) <= 100 for line in out.splitlines())


def test_it_does_not_wait_for_jax(tmp_path):
    program = (
        "import sys; from zerojax.cli import main\n"
        f"main(['bench', 'io', {str(tmp_path)!r}, '--size', '64'])\n"
        "sys.exit('jax' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, cwd=ROOT, timeout=60
    )
