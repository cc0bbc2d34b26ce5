"""Cards of GPUs: found by any of their names, cited number by number, read from files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.gpu_cards import DATA_CENTER, WORKSTATION
from zerojax.hardware.gpus import find_gpu, gpu_names, gpu_of_device, target_text

ROOT = Path(__file__).resolve().parents[2]
HAVE_TARGET = [name for name in gpu_names() if find_gpu(name).target]


# Names


def test_the_cards_that_people_ask_for_are_there():
    assert {*DATA_CENTER, *WORKSTATION} <= set(HAVE_TARGET)
    assert gpu_names() == sorted(gpu_names())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("h200", "h200"),
        ("H200", "h200"),
        ("h100_sxm", "h100"),
        ("a100", "a100-80gb"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 141GB HBM3e", "h200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
    ],
)
def test_a_card_is_found_by_name_alias_and_device_kind(given, name):
    assert find_gpu(given).name == name


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", HAVE_TARGET)
def test_the_compilers_devices_lead_back_to_the_card(name):
    """A H800 is told to the compiler as the H100 that it is."""
    gpu = find_gpu(name)
    found = gpu_of_device(gpu.target.description)
    assert found is not None
    assert found.target == gpu.target


def test_no_device_kind_means_two_cards():
    kinds = [gpu.target.description for gpu in map(find_gpu, HAVE_TARGET)]
    kinds += ["NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 144G HBM3e", "NVIDIA GH200 480GB"]
    kinds += [
        "NVIDIA L40",
        "NVIDIA L4",
        "NVIDIA H20",
        "NVIDIA A40",
        "NVIDIA RTX 6000 Ada Generation",
    ]
    kinds += ["Tesla V100-SXM2-16GB", "Tesla V100-PCIE-32GB", "NVIDIA A800-SXM4-80GB", "Tesla T4"]
    for kind in kinds:
        patterns = [gpu.device_kinds for gpu in map(find_gpu, gpu_names())]
        matches = [p for ps in patterns for p in ps if re.search(p, kind.upper())]
        assert len(matches) == 1, kind


def test_names_and_aliases_are_unique():
    spellings = [s for gpu in map(find_gpu, gpu_names()) for s in (gpu.name, *gpu.aliases)]
    assert len(spellings) == len(set(spellings))


# Numbers


CARDS = [find_gpu(name) for name in gpu_names()]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("gpu", CARDS, ids=gpu_names())
def test_every_number_of_a_card_has_its_source_or_is_named_an_assumption(gpu):
    explained = {
        key.strip()
        for note in (*gpu.sources, *gpu.assumptions)
        for key in note.partition(": ")[0].split(",")
    }
    numbers = {"memory_gb", "memory_bytes", "memory_gb_per_s", "node_devices", "node_gb_per_s"}
    numbers |= {"network_gb_per_s", "host_gb_per_s"} | ({"compiler"} if gpu.target else set())
    numbers |= {"disk_gb_per_s"} if gpu.disk_bandwidth is not None else set()
    for precision in ("bf16", "fp16", "fp8", "fp32"):
        if getattr(gpu, f"{precision}_flops") is not None:
            numbers.add(f"{precision}_tflops")
    numbers |= {"measured"} if gpu.measured is not None else set()
    assert explained == numbers


@pytest.mark.sampled(8)
@pytest.mark.parametrize("gpu", CARDS, ids=gpu_names())
def test_the_numbers_of_a_card_agree_with_each_other(gpu):
    assert 0.9 < gpu.memory_bytes / (gpu.memory_gb * 2**30) <= 1  # sold in GB, built in GiB
    assert gpu.host_bandwidth <= gpu.memory_bandwidth / 8
    assert gpu.node_devices >= 8 or gpu.name.startswith("gh200")  # one module in a machine
    if gpu.bf16_flops:  # TF32 units do half the work of bf16 units on all of these
        assert gpu.bf16_flops / gpu.fp32_flops == pytest.approx(2, rel=0.02)
    if gpu.fp8_flops:
        assert gpu.fp8_flops / gpu.bf16_flops == pytest.approx(2, rel=0.02)
    if gpu.target:  # the driver's clock x bus width is near what the datasheet prints
        assert gpu.target.bytes_per_second / gpu.memory_bandwidth == pytest.approx(1, rel=0.06)


def test_h200_in_the_units_of_the_interface():
    gpu = find_gpu("h200")
    assert (gpu.bf16_flops, gpu.fp32_flops) == (989.5e12, 494.7e12)
    assert (gpu.memory_bandwidth, gpu.memory_bytes) == (4.8e12, 150109880320)
    assert (gpu.node_devices, gpu.node_bandwidth, gpu.network_bandwidth) == (8, 450e9, 50e9)
    assert gpu.host_bandwidth == 64e9
    assert gpu.title == "NVIDIA H200 SXM 141 GB"


# Files of one's own


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_can_start_from_a_card(tmp_path):
    path = write(
        tmp_path,
        "name: mine\nbase: h100\nmemory_bytes: 1000\nnetwork_gb_per_s: 25\ncompiler: {cores: 99}\n"
        "assumptions:\n  network_gb_per_s, memory_bytes: told by the operator\n",
    )
    mine, h100 = find_gpu(path), find_gpu("h100")
    assert (mine.name, mine.title, mine.memory_bytes) == ("mine", "mine", 1000)
    assert (mine.network_bandwidth, mine.bf16_flops) == (25e9, h100.bf16_flops)
    assert mine.target.cores == 99
    assert mine.target.description == h100.target.description
    assert mine.aliases == mine.device_kinds == ()
    own = "network_gb_per_s, memory_bytes: told by the operator"
    assert set(mine.assumptions) - set(h100.assumptions) == {own}
    assert not [note for note in mine.sources if "memory_bytes" in note]
    assert "core_count: 99" in target_text(mine)


@pytest.mark.parametrize("spelling", ["rtx4090", "RTX 4090", "rtx-4090"])
def test_a_file_can_start_from_a_card_by_any_of_its_names(spelling, tmp_path):
    mine = find_gpu(write(tmp_path, f"name: mine\nbase: {spelling}\n"))
    assert mine.memory_bytes == find_gpu("rtx-4090").memory_bytes


def test_a_stated_rate_takes_the_place_of_what_was_measured_at_the_published_one(tmp_path):
    own = "name: mine\nbase: h100\nmeasured: {product_tflops: 700, copy_gb_per_s: 3000}\n"
    changes = {"bf16_tflops": 500, "node_devices": 2}
    for gpu in (find_gpu("h100", changes), find_gpu(write(tmp_path, own), changes)):
        assert gpu.bf16_flops == 500e12
        assert gpu.measured.product_flops is None
        assert gpu.measured.copy_bandwidth in (3000e9, 3001e9)
        assert {*changes} <= {*gpu.stated}
    alone = find_gpu("rtx-4090", {"node_gb_per_s": 10})
    assert alone.measured is None
    assert not [note for note in alone.assumptions if note.startswith("measured")]


def test_a_file_can_correct_the_memory_that_the_compiler_is_told_of(tmp_path):
    assert "device_memory_size: 151397597184" in target_text(find_gpu("h200"))
    mine = find_gpu(write(tmp_path, "name: mine\nbase: h200\nmemory_bytes: 1000\n"))
    assert "device_memory_size: 1000\n" in target_text(mine)


WHOLE = """\
name: whole
memory_bytes: 1_000_000_000
memory_gb_per_s: 100
node_devices: 1
node_gb_per_s: 16
network_gb_per_s: 12.5
host_gb_per_s: 16
"""


def test_a_file_can_stand_alone(tmp_path):
    gpu = find_gpu(write(tmp_path, WHOLE))
    assert (gpu.bf16_flops, gpu.target, gpu.memory_gb) == (None, None, 1.0)
    assert gpu.network_bandwidth == 12.5e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            WHOLE + "node_devices: 8\n",
            r"node_devices: the key appears twice, first on line 4.*:8\)",
        ),
        (
            WHOLE.replace("_devices: 1", "_devices: 1.5"),
            r"node_devices: expected a whole.*1\.5.*:4",
        ),
        ("", r"a GPU card has KEY: VALUE lines; got None"),
        ("name: [\n", r"not valid YAML: .*mine\.yaml:2\)"),
        (WHOLE + "device_kinds: ['(']\n", r"device_kinds: '\(' is not a regular expression.*:8\)"),
        (WHOLE + "sources:\n  fp9: me\n", r"sources\.fp9: not a key of a GPU card.*:9\)"),
    ],
)
def test_a_bad_file_names_the_line_the_value_and_the_remedy(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        find_gpu(write(tmp_path, text))


def test_the_wheel_holds_the_cards():
    builders = pytest.importorskip("hatchling.builders.wheel", reason="comes with zerojax[test]")
    files = builders.WheelBuilder(str(ROOT)).recurse_included_files()
    shipped = {file.distribution_path for file in files}
    assert {f"zerojax/hardware/gpus/cards/{name}.yaml" for name in gpu_names()} <= shipped
