"""Encodes images of a run as PNG, names their files, and shows them in the report of the run."""

import base64
import hashlib
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.config.display import as_html
from zerojax.config.regular_files import UnreadableError, open_regular

IMAGE = "image"
"""Name of the events that record an image."""

FOLDER = "images"
SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOR_TYPES = {1: 0, 3: 2, 4: 6}
"""{number of channels: PNG's number for grey, RGB, or RGB with opacity}."""

MAX_SIDE = 4096
MAX_NAME = 100
MAX_SHOWN = 6
"""Maximum number of images of one name in a report."""

MAX_NAMES = 20
MAX_BYTES = 1 << 20
"""Maximum bytes of an image that a report contains; the files of larger ones are named."""


def image_file(name: str, step: int) -> str:
    """Returns the path of an image relative to the run folder, such as "images/digits/500.png".

    Raises:
      ValueError: the name is empty or too long.
    """
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(
            f"an image's name has {len(name)} letters, not 1 to {MAX_NAME}; name it, for example, "
            "'samples'"
        )
    folder = re.sub(r"[^\w-]+", "_", name)
    if folder != name:  # "a/b" and "a b" are two images
        folder += "-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{FOLDER}/{folder}/{step}.png"


def as_pixels(name: str, image: object) -> tuple[np.ndarray, str | None]:
    """Returns (uint8 [height, width, 1, 3 or 4], what was changed or None).

    Args:
      name: name of the image, for messages.
      image: [height, width] or [height, width, 1, 3 or 4]; uint8, or floats, which are clipped to
        [0, 1].

    Raises:
      ValueError: the shape or the dtype is another one.
    """
    array = np.asarray(image)
    shape = array.shape
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[-1] not in COLOR_TYPES:
        raise ValueError(
            f"image {name!r} has the shape {shape}, but an image is [height, width, channels] with "
            "1, 3 or 4 channels; pass the images of a batch one by one, or transpose it"
        )
    if min(array.shape) == 0 or max(shape) > MAX_SIDE:
        raise ValueError(
            f"image {name!r} has the shape {shape}, but a side has 1 to {MAX_SIDE} pixels; pass a "
            "smaller image, such as image[::2, ::2]"
        )
    if array.dtype == np.uint8:
        return array, None
    if "float" not in array.dtype.name:
        raise ValueError(
            f"image {name!r} has the dtype {array.dtype.name}, but an image has uint8, or floats "
            "in [0, 1]; convert it, for example by image.astype('uint8')"
        )
    array = array.astype(np.float32)
    low, high = float(array.min()), float(array.max())  # NaN if one pixel is
    note = None
    if not (low >= 0 and high <= 1):
        note = (
            f"image {name!r} has values from {low:.3g} to {high:.3g}; they are clipped to [0, 1], "
            "and NaN is drawn as 0"
        )
    array = np.clip(np.nan_to_num(array, nan=0.0), 0, 1)
    return np.round(array * 255).astype(np.uint8), note


def encode_png(pixels: np.ndarray) -> bytes:
    """Returns a PNG file (ISO/IEC 15948) of pixels, uint8 [height, width, 1, 3 or 4]."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, COLOR_TYPES[channels], 0, 0, 0)
    rows = pixels.reshape(height, width * channels)
    lines = np.pad(rows, ((0, 0), (1, 0)))  # a line begins with its filter, 0: none
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")
    return SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def images_panel(run_dir: Path, events: Sequence[Mapping[str, Any]]) -> str:
    """Returns the HTML of the newest images of each name; "" if the run has none.

    Args:
      run_dir: the run folder.
      events: records of metrics.jsonl of the kind "event".
    """
    by_name: dict[str, list[int]] = {}
    for event in events:
        name = event.get("image")
        if event["event"] == IMAGE and isinstance(name, str) and 0 < len(name) <= MAX_NAME:
            by_name.setdefault(name, []).append(event["step"])
    shown = []
    for name, steps in [*by_name.items()][:MAX_NAMES]:
        newest = sorted({*steps})[-MAX_SHOWN:]
        figures = "".join(_figure(run_dir, name, step) for step in newest)
        shown.append(f'<h3>{as_html(name)}</h3><div class="images">{figures}</div>')
    return "".join(shown)


def _figure(run_dir: Path, name: str, step: int) -> str:
    file = image_file(name, step)
    try:
        with open(open_regular(run_dir / file, follow=False), "rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except (OSError, UnreadableError):
        picture = f"{file} cannot be read"
    else:
        if len(content) > MAX_BYTES or not content.startswith(SIGNATURE):
            picture = f"see {file}"
        else:
            data = base64.b64encode(content).decode()
            return (
                f'<figure><img alt="{as_html(name)}" src="data:image/png;base64,{data}">'
                f"<figcaption>step {step:,}</figcaption></figure>"
            )
    return f"<figure>{as_html(picture)}<figcaption>step {step:,}</figcaption></figure>"
