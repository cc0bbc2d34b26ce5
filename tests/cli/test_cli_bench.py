"""`zerojax bench`: the form of its tables, what it leaves behind and keeps, and its mistakes."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.support.cli_complaints import fails
from zerojax.checkpoint.store.rates import THREADS, DiskRates, measure_rates
from zerojax.cli import bench_commands, main
from zerojax.hardware import device_rates, gpus, local_devices
from zerojax.hardware.machine_rates import (
    MeasuredDevice,
    MeasuredDisk,
    MeasuredLink,
    MeasuredNode,
    disk_name,
    keep_rates,
    kept_rates,
    measured_disk,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ZEROJAX_CACHE", str(folder))
    return folder


@pytest.mark.thorough
def test_a_line_for_each_number_of_threads(tmp_path, capsys):
    assert main(["bench", "io", str(tmp_path), "--size", "64"]) == 0
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title == f"{tmp_path}: GB/s (10^9 bytes), best of three passes over 64 MiB"
    assert head.split() == ["threads", "write", "read", "read", "+", "write"]
    rows = [line.split() for line in lines[: len(THREADS)]]
    assert [int(row[0]) for row in rows] == list(THREADS)
    assert all(len(row) == 4 and min(map(float, row[1:])) > 0 for row in rows)
    best = max(float(row[3]) for row in rows)
    line = lines[len(THREADS)]
    assert re.fullmatch(rf"best: {best:.2f} GB/s read \+ write, with \d threads?", line)
    assert not list(tmp_path.iterdir())
    kept = measured_disk(tmp_path)
    assert kept is not None
    assert round(kept.both / 1e9, 2) == best
    assert lines[-1].startswith(f"stored for `zerojax plan`: {disk_name(tmp_path)}, in ")


def test_rates_as_json_keep_every_number(tmp_path, capsys, monkeypatch):
    rows = [DiskRates(1, True, 3.5, 2.5, 3.25), DiskRates(2, True, 3.0, 2.0, 4.75)]
    monkeypatch.setattr("zerojax.checkpoint.store.rates.measure_rates", lambda *_, **__: iter(rows))
    assert main(["bench", "io", str(tmp_path), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [row["num_threads"] for row in values["rates"]] == [1, 2]
    assert (values["best"]["both"], values["is_direct"]) == (4.75, True)


def test_rates_are_bytes_over_seconds(tmp_path, monkeypatch):
    """Each sweep takes a second by this clock: 4 buckets of 16 MiB, moved once or twice."""
    seconds = iter(range(1000))
    monkeypatch.setattr(
        "zerojax.checkpoint.store.rates.time.perf_counter", lambda: float(next(seconds))
    )
    (rates,) = measure_rates(tmp_path, num_bytes=1, threads=[2])
    assert (rates.write, rates.read, rates.both) == (64 * 2**20, 64 * 2**20, 128 * 2**20)
    assert rates.num_threads == 2


@pytest.mark.thorough
def test_a_file_system_without_direct_transfers_is_told_once(tmp_path, capsys, monkeypatch):
    real = os.open

    def refuse(path, flags, *mode, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert main(["bench", "io", str(tmp_path), "--size", "64"]) == 0
    assert capsys.readouterr().out.count("refuses O_DIRECT") == 1
    assert measured_disk(tmp_path) is None


def test_mistakes(tmp_path, capsys):
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.write_text("")
    assert f"{missing}: no such folder" in fails(capsys, "bench", "io", str(missing))
    assert f"{file}: not a folder" in fails(capsys, "bench", "io", str(file))
    assert "--size 0 is below 1" in fails(capsys, "bench", "io", str(tmp_path), "--size", "0")
    assert "--size 0 is below 1" in fails(capsys, "bench", "link", "--size", "0")


def test_a_full_disk_is_no_mistake_of_the_words(tmp_path, capsys, monkeypatch):
    class Disk:
        f_bavail, f_frsize = 256, 4096  # 1 MiB

    monkeypatch.setattr(os, "statvfs", lambda folder: Disk)
    assert main(["bench", "io", str(tmp_path), "--size", "64"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "64.1 MiB of disk are needed, 1.0 MiB are free" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_it_does_not_wait_for_jax(tmp_path):
    program = (
        "import sys; from zerojax.cli import main\n"
        f"main(['bench', 'io', {str(tmp_path)!r}, '--size', '64'])\n"
        "sys.exit('jax' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, cwd=ROOT, timeout=60
    )


# The link between host and device


@pytest.fixture
def thousandths(monkeypatch):
    """Each look at the clock is a thousandth of a second after the one before."""
    looks = itertools.count()
    monkeypatch.setattr(
        "zerojax.hardware.local_devices.time.perf_counter", lambda: next(looks) / 1000
    )


@pytest.mark.usefixtures("thousandths")
def test_on_a_cpu_the_link_is_said_to_be_none(capsys):
    assert main(["bench", "link", "--size", "1"]) == 0
    title, head, row, remark = capsys.readouterr().out.splitlines()
    assert title.startswith("cpu and pinned host memory: GB/s")
    assert head.split()[:3] == ["MiB", "to", "device"]
    assert row.split()[0] == "1"
    assert min(map(float, row.split()[1:])) > 0
    assert remark == bench_commands.REMARK
    assert kept_rates(MeasuredLink) == []


@pytest.mark.usefixtures("thousandths")
def test_a_link_is_kept_for_plans(capsys, monkeypatch):
    monkeypatch.setattr(local_devices, "shares_host_memory", lambda device: False)
    assert main(["bench", "link", "--size", "1", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    (link,) = kept_rates(MeasuredLink)
    assert (link.device_kind, link.both) == ("cpu", values["best"]["both"])
    assert values["is_one_memory"] is False


def test_a_link_is_bytes_over_the_best_time(monkeypatch):
    """By this clock the passes of each direction take 3, 2 and 1 seconds."""
    ends = iter([0, 3, 0, 2, 0, 1] * 3)
    monkeypatch.setattr(
        "zerojax.hardware.local_devices.time.perf_counter", lambda: float(next(ends))
    )
    rates = local_devices.measure_link(num_bytes=4096, repeats=3)
    assert (rates.to_device, rates.to_host, rates.both) == (4096, 4096, 8192)
    assert rates.num_bytes == 4096


def test_a_device_without_pinned_memory_is_refused():
    class Device:
        def addressable_memories(self):
            return []

    with pytest.raises(RuntimeError, match="no pinned host memory"):
        local_devices.measure_link(num_bytes=4, device=Device())


# Devices


def test_rates_of_a_cpu_are_measured_and_not_kept(capsys):
    assert main(["bench", "device", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert set(values["rates"]) == {"product_tflops", "copy_gb_per_s", "node_gb_per_s"}
    assert min(values["rates"].values()) > 0
    assert (values["num_devices"], values["kept"]) == (8, None)
    assert "cpu" in values["why_not_kept"]
    assert kept_rates(MeasuredDevice) == []


def test_device_rates_are_work_over_the_median_time(monkeypatch):
    """By this clock the three series take 6, 2 and 4 seconds, of two calls each."""
    ends = iter([0, 6, 0, 2, 0, 4] * 3)
    monkeypatch.setattr(device_rates.time, "perf_counter", lambda: float(next(ends)))
    assert device_rates.measure_product(16, repeats=2) == 2 * 16**3 / 2
    assert device_rates.measure_copy(4096, repeats=2) == 2 * 4096 / 2
    # Of four parts each device sends three.
    assert device_rates.measure_gather(4096, jax.devices()[:4], repeats=2) == 3 * 1024 / 2
    assert device_rates.measure_gather(4096, jax.devices()[:1]) is None


@pytest.mark.parametrize(("gib", "product", "copied"), [(75, 8192, 2**32), (1, 8192, 2**27)])
def test_what_is_measured_fits_into_memory(gib, product, copied):
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": gib * 2**30 + 100, "bytes_in_use": 100}

    found = device_rates.sizes_for(Device())
    assert (found.product, found.copied) == (product, copied)


@pytest.fixture
def measured(monkeypatch):
    """A device of the H200's card with these rates: TFLOP/s, and TB/s of memory and of links."""

    def use(product: float, copied: float, between: float | None) -> None:
        rates = {
            "measure_product": 1e12 * product,
            "measure_copy": 1e12 * copied,
            "measure_gather": None if between is None else 1e12 * between,
        }
        for name, rate in rates.items():
            monkeypatch.setattr(device_rates, name, lambda *_, rate=rate: rate)

    monkeypatch.setattr(gpus, "gpu_of_device", lambda kind: gpus.find_gpu("h200"))
    return use


def test_rates_of_a_card_are_kept_for_plans(measured, capsys):
    measured(700.0, 4.2, 0.3)
    assert main(["bench", "device"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["700", "4200", "300"]
    assert lines[1].endswith("0.71 of the published rate")
    (device,), (node,) = kept_rates(MeasuredDevice), kept_rates(MeasuredNode)
    assert (device.product_flops, device.copy_bandwidth) == (700e12, 4.2e12)
    assert (device.device_kind, node.bandwidth) == ("cpu", 300e9)


@pytest.mark.parametrize(
    ("rates", "word"), [((990.0, 4.2, None), "bf16_tflops"), ((700.0, 5.1, 0.3), "memory_gb")]
)
def test_rates_above_the_published_ones_are_not_kept(rates, word, measured, capsys):
    measured(*rates)
    assert main(["bench", "device"]) == 0
    assert word in capsys.readouterr().out.splitlines()[-1]
    assert kept_rates(MeasuredDevice) == kept_rates(MeasuredNode) == []


# What is kept


def test_what_is_kept_comes_back_newest_last(tmp_path, cache):
    old = MeasuredLink(device_kind="NVIDIA H200", to_device=1.0, to_host=2.0, both=3.0)
    new = MeasuredLink(device_kind="NVIDIA H200", to_device=5.0, to_host=6.0, both=7.0)
    disk = MeasuredDisk(disk=disk_name(tmp_path), write=1.0, read=2.0, both=3.0)
    for rates in (old, disk, new):
        assert keep_rates(rates) == cache / "rates.json"
    (link,) = kept_rates(MeasuredLink)
    assert link.to_host == 6.0
    found = measured_disk(tmp_path / "not" / "there")
    assert found is not None
    assert (found.read, len(found.date)) == (2.0, 10)


@pytest.mark.parametrize("text", ["", "[]", '{"NODE": []}', '{"NODE": {"links": {"a": {"x": 1}}}}'])
def test_a_damaged_file_is_no_measurement(text, cache):
    file = cache / "rates.json"
    file.write_text(text.replace("NODE", os.uname().nodename))
    assert kept_rates(MeasuredLink) == []
    assert measured_disk("/") is None


def test_without_a_cache_nothing_is_kept(monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", "off")
    disk = MeasuredDisk(disk="a", write=1.0, read=1.0, both=1.0)
    assert keep_rates(disk) is None
    assert measured_disk("/") is None
