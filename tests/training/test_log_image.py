"""Images of a run: in TensorBoard, as PNG in the run folder, and in the report."""

import io
import re

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from tests.support.refusals import refused
from tests.training.test_layer_norms import Listed, loss, rows
from tests.training.test_metrics_report import make_run
from zerojax.config import LogConfig
from zerojax.training.entry import train
from zerojax.training.metrics import RunLog, write_report
from zerojax.training.metrics.images import as_pixels, encode_png, image_file

RANDOM = np.random.default_rng(0)


def image_of(channels, height=5, width=7):
    return RANDOM.integers(0, 256, (height, width, channels), np.uint8)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_another_program_reads_the_pixels(channels, mode):
    pixels = image_of(channels)
    with Image.open(io.BytesIO(encode_png(pixels))) as read:
        assert read.mode == mode
        np.testing.assert_array_equal(np.asarray(read).reshape(pixels.shape), pixels)


def test_floats_are_rounded_and_clipped_and_that_is_said():
    pixels, note = as_pixels("x", jnp.array([[0.0, 0.5, 1.0]], jnp.bfloat16))
    assert (pixels.shape, pixels.ravel().tolist(), note) == ((1, 3, 1), [0, 128, 255], None)
    pixels, note = as_pixels("x", np.array([[-1.0, 2.0]]))
    assert pixels.ravel().tolist() == [0, 255]
    assert "-1 to 2" in note
    pixels, note = as_pixels("x", np.array([[np.nan, 1.0]]))
    assert pixels.ravel().tolist() == [0, 255]
    assert note is not None


@pytest.mark.parametrize(
    ("image", "value", "remedy"),
    [
        (np.zeros((2, 4, 4, 3)), ["(2, 4, 4, 3)"], "one by one"),
        (np.zeros((3, 8, 8)), ["(3, 8, 8)"], "transpose"),
        (np.zeros((8, 5000)), ["(8, 5000)", "4096"], "smaller"),
        (np.zeros((0, 8)), ["(0, 8)"], "4096"),
        (np.zeros((8, 8), np.int32), "int32 uint8", "image.astype('uint8')"),
    ],
)
def test_what_is_no_image_is_refused(image, value, remedy):
    refused(lambda: as_pixels("x", image), value, remedy)


def test_no_name_leads_out_of_the_folder():
    assert re.fullmatch(r"images/_a_b_c-\w{6}/3\.png", image_file("../a b/../c", 3))
    assert re.fullmatch(r"images/_-\w{6}/3\.png", image_file("..", 3))
    assert len({image_file(name, 3) for name in ("a/b", "a b", "a_b")}) == 3
    refused(lambda: image_file("", 3), "0 100", "samples")


def test_an_image_is_in_tensorboard_the_folder_and_the_report(tmp_path):
    make_run(tmp_path, steps=3)
    pixels, said = image_of(3), io.StringIO()
    log = RunLog(tmp_path, LogConfig(console="lines"), total_steps=3, stream=said)
    log.start("plan", [], "table", {}, {})
    path = log.write_image(2, "samples/digits", pixels)
    log.write_image(3, "samples/digits", pixels.astype(np.float64) * 2)
    log.write_image(3, "samples/digits", pixels.astype(np.float64) * 2)
    log.close()
    with Image.open(path) as read:
        np.testing.assert_array_equal(np.asarray(read), pixels)
    assert said.getvalue().count("clipped") == 1
    page = write_report(tmp_path).read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "<h3>samples/digits</h3>" in page
    assert "images/samples_" not in page  # neither an event nor a missing file
    path.unlink()
    file = image_file("samples/digits", 2)
    assert f"{file} cannot be read" in write_report(tmp_path).read_text()

    pytest.importorskip("tensorboard", reason="needs the tensorboard package to read the files")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    first, *_ = accumulator.Images("samples/digits")
    assert (first.step, first.height, first.width) == (2, 5, 7)
    with Image.open(io.BytesIO(first.encoded_image_string)) as read:
        np.testing.assert_array_equal(np.asarray(read), pixels)


def test_a_callback_writes_an_image_only_while_the_run_trains(tmp_path):
    def draw(trainer, metrics):
        trainer.log_image("weights", jnp.full((4, 4), 0.5), step=metrics["step"])

    trainer = train(
        Listed,
        None,
        rows,
        loss=loss,
        steps=2,
        run_dir=tmp_path,
        callbacks=[draw],
        log=LogConfig(every=1, console="quiet"),
    )
    assert sorted(x.name for x in (tmp_path / "images/weights").iterdir()) == ["1.png", "2.png"]
    message = refused(lambda: draw(trainer, {"step": 3}), error=RuntimeError)
    assert "in a callback" in message
