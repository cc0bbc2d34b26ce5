"""What a process of `zerojax env --cluster` reports, and which differences are named."""

import os
import stat
import sys
from pathlib import Path

import pytest

from tests.support.refusals import check_words
from zerojax.cli import cluster_facts
from zerojax.cli.cluster_facts import FolderProbe, Names, differences, folder_problems
from zerojax.runtime.redaction import HIDDEN

NAMES = Names(["a", "a", "b"])


def facts(**changes: dict[int, object]) -> list[dict]:
    """The facts of three processes, alike but for `changes`: {fact: {process: value}}."""
    alike = {
        "python": "3.13.0",
        "zerojax": "1",
        "sources": "abc",
        "packages": {"jax": "0.12", "flax": "0.12"},
        "driver": "580.1",
        "variables": {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "0"},
        "shared_memory_bytes": 2**34,
        "locked_memory_bytes": None,
        "topology": "GPU0 X",
        "no_topology": None,
        "has_nvidia": True,
        "is_cpu": False,
        "devices": "8 x H100",
    }
    rows = [{**alike, "process": process} for process in range(3)]
    for name, values in changes.items():
        for process, value in values.items():
            rows[process][name] = value
    return rows


def test_processes_that_are_alike_have_no_differences():
    assert differences(facts(), NAMES) == []
    assert cluster_facts.device_differences(facts(), NAMES) == []


CHANGES = {
    "python": ({2: "3.12.1"}, ["3.13.0", "3.12.1", "processes 0-1 (a)", "process 2 (b)"]),
    "zerojax": ({1: "2"}, ["zerojax", "'1'", "'2'", "process 1 (a)"]),
    "sources": ({2: "def"}, ["source", "abc", "def"]),
    "packages": ({2: {"jax": "0.11", "flax": "0.12"}}, ["jax", "0.12", "0.11", "process 2 (b)"]),
    "driver": ({2: None}, ["driver", "580.1", "none", "process 2 (b)"]),
    "locked_memory_bytes": ({1: 8 << 20}, ["ulimit -l", "unlimited", "8192 KiB", "process 1 (a)"]),
    "variables": ({2: {}}, ["NCCL_DEBUG", "WARN", "none", "process 2 (b)"]),
    "topology": ({2: "GPU0 Y"}, ["links", "process 2 (b)"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_difference_is_one_sentence(name):
    change, words = CHANGES[name]
    (sentence,) = differences(facts(**{name: change}), NAMES)
    check_words(sentence, words)


def test_a_package_that_one_process_lacks_is_named():
    (sentence,) = differences(facts(packages={1: {"jax": "0.12"}}), NAMES)
    check_words(sentence, ["package flax", "none", "process 1 (a)"])


def test_many_packages_are_some_sentences():
    packages = {f"p{number:02}": "1" for number in range(40)}
    found = differences(facts(packages=dict.fromkeys((0, 1), packages)), NAMES)
    assert len(found) == 9
    check_words(found[-1], ["more packages", "p39"])


def test_variables_of_one_process_may_differ():
    own = {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "3"}
    assert differences(facts(variables={1: own}), NAMES) == []


def test_processes_that_do_not_report_links_do_not_differ():
    assert differences(facts(topology={1: None}), NAMES) == []
    (sentence,) = differences(
        facts(topology={2: None}, no_topology={2: "nvidia-smi is not installed"}), NAMES
    )
    check_words(sentence, ["links", "process 2 (b)", "none"])


DEVICES = {
    "number": ({"devices": {2: "7 x H100"}}, ["7 x H100", "process 2 (b)"]),
    "unused card": ({"is_cpu": {1: True}}, ["CPU", "process 1 (a)", "zerojax[cuda]"]),
    "small shared memory": ({"shared_memory_bytes": {2: 2**26}}, ["/dev/shm", "64", "--shm-size"]),
}


@pytest.mark.parametrize("name", DEVICES)
def test_differences_of_devices(name):
    changes, words = DEVICES[name]
    (sentence,) = cluster_facts.device_differences(facts(**changes), NAMES)
    check_words(sentence, words)


def test_names_of_many_processes_stay_short():
    names = Names([f"host-{process // 8}" for process in range(800)])
    assert names.of([3]) == "process 3 (host-0)"
    assert names.of([0, 1, 2, 9]) == "processes 0-2, 9 (host-0, host-1)"
    assert len(names.of(range(800))) < 150
    assert "and 92 more" in names.of(range(800))


def test_variables_come_from_the_environment_and_from_nccls_files(tmp_path, monkeypatch):
    system, own = tmp_path / "nccl.conf", tmp_path / "own.conf"
    system.write_text("NCCL_DEBUG=INFO\nNCCL_NET=Socket\n# NCCL_ALGO=Ring\nPATH=/x\n")
    own.write_text("NCCL_NET = IB\n")
    monkeypatch.setattr(cluster_facts, "NCCL_FILES", (str(system), "~/.nccl.conf"))
    environment = {
        "NCCL_CONF_FILE": str(own),
        "NCCL_DEBUG": "WARN",
        "FI_PROVIDER": "efa",
        "ZEROJAX_CACHE": "off",
        "ZEROJAX_LAUNCH_TOKEN": "secret",
        "ZEROJAX_PROCESS_ID": "3",
        "HOME": "/home/me",
    }
    assert cluster_facts.set_variables(environment) == {
        "FI_PROVIDER": "efa",
        "NCCL_CONF_FILE": str(own),
        "NCCL_DEBUG": "WARN",
        "NCCL_NET": f"IB (in {own})",
        "ZEROJAX_CACHE": "off",
    }


def test_secrets_do_not_leave_the_process(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    monkeypatch.setenv("NCCL_NET_PLUGIN", "x-hunter2-hunter2")
    found = cluster_facts.collect_facts(0, is_first_of_host=False)
    assert found["variables"]["NCCL_NET_PLUGIN"] == f"x-{HIDDEN}"
    assert found["packages"]["jax"]
    assert "hunter2" not in repr(found)
    assert (found["topology"], found["no_topology"]) == (None, None)


def fake_nvidia_smi(folder: Path, program: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{program}\n")
    path.chmod(stat.S_IRWXU)


# Written like `nvidia-smi topo -m`: an underlined heading, tabs, a legend, names of cards.
TOPOLOGY = r"""
assert sys.argv[1:] == ["topo", "-m"]
print("\t\x1b[4mGPU0\tGPU1\tNIC0\x1b[0m")
print("GPU0\t X \tNV18\tPIX")
print("GPU1\tNV18\t X \tSYS\n")
print("Legend:\n\n  X    = Self\n  NV#  = a set of # links\n\nNIC Legend:\n\n  NIC0: mlx5_0\n")
"""


def test_the_table_of_links_has_no_escapes_and_no_legend(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, TOPOLOGY)
    monkeypatch.setenv("PATH", str(tmp_path))
    table, why = cluster_facts.describe_topology()
    assert why is None
    assert table.splitlines() == [
        "\tGPU0\tGPU1\tNIC0",
        "GPU0\t X \tNV18\tPIX",
        "GPU1\tNV18\t X \tSYS",
        "NIC0: mlx5_0",
    ]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (None, "not installed"),
        ("print('no driver', file=sys.stderr)\nsys.exit(9)", "failed: no driver"),
        ("time.sleep(60)", "failed"),
    ],
)
def test_why_there_is_no_table_of_links(program, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_facts, "_TOPOLOGY_SECONDS", 0.2)
    if program is not None:
        fake_nvidia_smi(tmp_path, program)
    monkeypatch.setenv("PATH", str(tmp_path))
    table, why = cluster_facts.describe_topology()
    assert table is None
    check_words(why, [reason])


# --- folders --------------------------------------------------------------------------------------


def probed(first: list[Path], second: list[Path]) -> list[str]:
    """The problems of the folders of two processes."""
    probes = [FolderProbe(list(map(str, folders))) for folders in (first, second)]
    rows = [probe.make_tokens() for probe in probes]
    seen = [probe.see(rows[0]) for probe in probes]
    for row, sees in zip(rows, seen, strict=True):
        for one, is_there in zip(row, sees, strict=True):
            one["sees_0"] = is_there
    for probe in probes:
        probe.remove()
    return folder_problems(rows, Names(["a", "b"]))


def test_a_folder_that_both_see_is_no_problem_and_stays_empty(tmp_path):
    assert probed([tmp_path], [tmp_path]) == []
    assert list(tmp_path.iterdir()) == []


def test_another_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_facts, "_VISIBLE_SECONDS", 0.1)
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    (sentence,) = probed([one], [other])
    check_words(sentence, [str(one), str(other), "process 1 (b)"], "mount")
    assert [*one.iterdir(), *other.iterdir()] == []


def test_a_missing_folder_and_a_file_are_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    missing, a_file = probed([tmp_path / "none", tmp_path / "file"], [tmp_path, tmp_path])
    check_words(missing, ["none", "does not exist", "process 0 (a)"])
    check_words(a_file, ["file", "not a folder", "process 0 (a)"])
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    probe = FolderProbe([str(tmp_path)])
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", refuse)  # root may write everywhere
        (row,) = probe.make_tokens()
    check_words(row["error"], ["cannot be written", "Permission denied"])
    assert row["name"] is None
    assert row["free"] > 0
    assert probe.see([row]) == [None]


def test_a_link_or_another_content_is_not_the_file_of_process_0(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_facts, "_VISIBLE_SECONDS", 0.1)
    probe = FolderProbe([str(tmp_path)])
    (tmp_path / "real").write_text("right")
    os.symlink(tmp_path / "real", tmp_path / "link")
    for name in ("link", "../real", "real"):
        content = "wrong" if name == "real" else "right"
        assert probe.see([{"name": name, "content": content}]) == [False]
    assert probe.see([{"name": "real", "content": "right"}]) == [True]
