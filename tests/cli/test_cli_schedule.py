"""`zerojax schedule`: what it prints and writes, and that mistakes are one line without JAX."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.support.cli_complaints import fails
from zerojax.cli import main
from zerojax.schedules import SCHEDULES, make_schedule, read_csv

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--stages", "4", "--microbatches", "8"]


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command that must work prints."""
    assert main(["schedule", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(len(line) <= 100 for line in out.splitlines())
    return out


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    return fails(capsys, "schedule", *words)


def test_without_a_name_it_lists_the_names(capsys):
    out = output(capsys)
    assert [line.split()[0] for line in out.splitlines()[: len(SCHEDULES)]] == list(SCHEDULES)


def test_the_picture_and_the_numbers_of_1f1b(capsys):
    out = output(capsys, "1f1b", *SMALL)
    assert out.startswith("1f1b: 4 stages, 8 microbatches\n")
    assert "stage 3 F  .  .  .  0  1  2  3  4  5  6  7  .  .  .\n" in out
    assert "ticks      14\n" in out
    assert "bubble     27.3% of the time" in out
    assert "in flight  7 5 3 1 microbatches" in out


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_name_is_drawn(name, capsys):
    assert output(capsys, name, *SMALL).startswith(f"{name}: 4 stages, 8 microbatches\n")


def test_costs_change_the_bubble(capsys):
    assert "bubble     20.0%" in output(capsys, "zb_h1", *SMALL)
    # (p-1)(F+B) / (m(F+B+W) + (p-1)(F+B)) with F = B = 1 and W = 2
    assert "bubble     15.8%" in output(capsys, "zb_h1", *SMALL, "--costs", "1,1,2")


def test_chunks(capsys):
    assert "bubble     8.6%" in output(capsys, "interleaved", *SMALL, "--chunks", "4")
    assert "bubble     8.6%" in output(capsys, "interleaved(4)", *SMALL)


def test_files_are_written_and_a_csv_is_drawn_again(capsys, tmp_path):
    svg, table = tmp_path / "a.svg", tmp_path / "a.csv"
    first = output(capsys, "zb_v", *SMALL, "--svg", str(svg), "--csv", str(table))
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert read_csv(table) == make_schedule("zb_v", stages=4, microbatches=8)
    assert str(svg) in first
    assert str(table) in first
    assert output(capsys, str(table)) == first[: first.index("written")]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["1f1"], "did you mean '1f1b'?"),
        (["1f1b"], "needs the number of stages and of microbatches, such as"),
        (["1f1b", "--stages", "four"], "invalid int value: 'four'"),
        (["1f1b", "--stages", "0", "--microbatches", "8"], "stages=0 must be at least 1"),
        (["interleaved", "--stages", "4", "--microbatches", "6"], "use 4 or 8"),
        (["interleaved", "--stages", "4", "--microbatches", "2"], "fewer than the 4 stages"),
        (["1f1b", *SMALL, "--chunks", "2"], "use chunks=1 or interleaved(2)"),
        (["1f1b", *SMALL, "--costs", "1,2,x"], "such as --costs 1,1,1"),
        (["1f1b", *SMALL, "--costs", "1,2,nan"], "cost weight=nan"),
        (["1f1b", *SMALL, "--svg", "missing_folder/a.svg"], "missing_folder/a.svg: No such file"),
        (["missing.csv"], "missing.csv: No such file"),
    ],
)
def test_a_mistake_is_one_line(words, part, capsys):
    assert part in complaint(capsys, *words)


def test_a_mistake_in_a_table_names_file_line_and_operation(capsys, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("F0,.\nF1,F0+B0\nB1,F1+B1\nB0,.\n")
    text = complaint(capsys, str(path))
    assert (
        f"{path}:3: tick 2, stage 0: B1 needs the result of B1 of stage 1, which runs at tick 2"
        in text
    )
    assert "put B1 at tick 3 or later" in text


def test_neither_pictures_nor_mistakes_wait_for_jax():
    program = (
        "import sys; from zerojax.cli import main\n"
        "main(['schedule', '1f1b', '--stages', '2', '--microbatches', '2'])\n"
        "main(['schedule', 'nonsense'])\n"
        "sys.exit('jax' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, cwd=ROOT, timeout=60
    )
