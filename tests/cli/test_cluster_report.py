"""`zerojax env --cluster` in one process, and its options; several: test_cluster_processes.py."""

import json
import os

import pytest

from tests.support.refusals import complaint
from zerojax.cli import cluster_facts, cluster_report, main
from zerojax.hardware.collective_rates import GATHER, CollectiveTimes


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("ZEROJAX_JOIN_SECONDS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "")  # so that both are as before afterwards
    monkeypatch.setenv("PATH", "")  # no nvidia-smi


def test_one_process_reports_its_devices_folders_and_rates(tmp_path, capfd):
    assert main(["env", "--cluster", "--size", "1", "--folder", str(tmp_path)]) == 0
    out, _ = capfd.readouterr()
    for text in (
        "links of the cards, process 0 (",
        "not known, nvidia-smi is not installed",
        "  JAX_PLATFORMS = cpu\n",
        "process  host",
        "8 x cpu",
        f"  {tmp_path}: written by 1 of 1 processes",
        "network: 8 devices of 1 process, float32",
        "\nall-gather  1 ",
        "\nall-reduce  1 ",
        "\nno differences\n",
    ):
        assert text in out, text
    assert list(tmp_path.iterdir()) == []


def test_json_has_everything_and_a_missing_folder_is_exit_code_1(tmp_path, capfd):
    missing = tmp_path / "none"
    words = ["env", "--cluster", "--json", "--size", "1", "--folder", str(missing)]
    assert main(words) == 1
    found = json.loads(capfd.readouterr().out)
    (process,) = found["processes"]
    assert process["devices"] == "8 x cpu"
    assert process["packages"]["jax"]
    assert [times["kind"] for (times,) in found["collectives"]] == ["all-gather", "all-reduce"]
    ((folder,),) = found["folders"]
    assert folder["path"] == str(missing)
    (difference,) = found["differences"]
    assert "does not exist" in difference


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--folder", "runs"], ["--folder runs"]),
        (["--timeout", "5"], ["--timeout 5"]),
        (["--size", "5", "--json"], ["--size 5"]),
    ],
)
def test_options_of_a_cluster_need_it(words, value, capsys):
    complaint(capsys, ["env", *words], value, "--cluster")


@pytest.mark.parametrize(
    ("words", "value", "remedy"),
    [
        (["--timeout", "0"], ["--timeout 0", "1 second"], "1 or more"),
        (["--size", "-3"], ["--size -3", "1 MiB"], "1 or more"),
    ],
)
def test_values_out_of_range_are_refused(words, value, remedy, capsys):
    complaint(capsys, ["env", "--cluster", *words], value, remedy)


def test_a_group_that_is_described_incompletely_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("ZEROJAX_NUM_PROCESSES", "2")
    complaint(capsys, ["env", "--cluster"], "ZEROJAX_COORDINATOR", "set")


def test_what_libraries_print_does_not_reach_standard_output(capfd):
    with cluster_report._other_output():
        os.write(1, b"[Gloo] Rank 0\n")
    print("{}")
    out, err = capfd.readouterr()
    assert (out, err) == ("{}\n", "[Gloo] Rank 0\n")


def test_the_slowest_process_counts_and_a_wrong_result_is_a_problem():
    def times(seconds: float, *, is_right: bool = True) -> CollectiveTimes:
        return CollectiveTimes(
            kind=GATHER,
            num_bytes=2**20,
            num_devices=4,
            seconds=seconds,
            longest=2 * seconds,
            is_right=is_right,
        )

    measured = [[times(0.001), times(0.002, is_right=False)]]
    page = cluster_report._format_network(measured, 2)
    row = next(line for line in page.splitlines() if line.startswith("all-gather"))
    assert row.split() == [
        "all-gather",
        "1",
        "2.000",
        "0.52",
        "0.39",
        "1.000",
        "to",
        "2.000",
        "4.000",
    ]
    (problem,) = cluster_report._network_problems(measured, cluster_facts.Names(["a", "b"]))
    assert "all-gather of 1 MiB has a wrong result on process 1 (b)" in problem


def test_names_from_other_hosts_cannot_move_the_cursor():
    row = {"process": 0, "topology": "GPU0\x1b[2J", "no_topology": None}
    names = cluster_facts.Names(["evil\x1b[2J"])
    page = cluster_report._format_topologies([row], names)
    assert "\x1b" not in page
