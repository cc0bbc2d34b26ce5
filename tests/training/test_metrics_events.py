"""Event files are read by TensorBoard's own loader, without TensorBoard having written them."""

from __future__ import annotations

import math

import pytest

from zerojax.training.metrics.metric_files import EventWriter, crc32c


@pytest.fixture
def load():
    pytest.importorskip("tensorboard", reason="needs the tensorboard package to read the files")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder):
        accumulator = EventAccumulator(str(folder))
        accumulator.Reload()
        return {
            tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]
        }

    return read


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # RFC 3720, appendix B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_published_checksums(data, checksum):
    assert crc32c(data) == checksum


def test_scalars_come_back(tmp_path, load):
    writer = EventWriter(tmp_path / "run")
    for step in (1, 127, 128, 70_000):
        writer.scalars(step, {"train/loss": step / 2, "train/größe": -1.5})
    writer.close()
    assert load(tmp_path / "run") == {
        "train/loss": [(1, 0.5), (127, 63.5), (128, 64.0), (70_000, 35_000.0)],
        "train/größe": [(step, -1.5) for step in (1, 127, 128, 70_000)],
    }


def test_values_that_float32_does_not_hold(tmp_path, load):
    writer = EventWriter(tmp_path)
    writer.scalars(1, {"nan": math.nan, "inf": math.inf, "huge": 1e300, "low": -1e300})
    writer.close()
    read = {tag: values[0][1] for tag, values in load(tmp_path).items()}
    assert math.isnan(read["nan"])
    assert (read["inf"], read["huge"], read["low"]) == (math.inf, math.inf, -math.inf)


def test_a_file_can_be_read_while_it_is_written(tmp_path, load):
    writer = EventWriter(tmp_path)
    writer.scalars(1, {"loss": 2.0})
    assert load(tmp_path) == {"loss": [(1, 2.0)]}
    writer.close()


def test_repeated_steps_of_a_resumed_run_are_drawn_once(tmp_path, load):
    first = EventWriter(tmp_path)
    for step in (10, 20, 30):
        first.scalars(step, {"loss": 1.0})
    first.close()
    second = EventWriter(tmp_path, first_step=16)
    second.scalars(20, {"loss": 2.0})
    second.close()
    assert first.path != second.path
    assert load(tmp_path) == {"loss": [(10, 1.0), (20, 2.0)]}
