"""TensorBoard event files of scalars, written without TensorBoard or protobuf.

A file is a sequence of records: length (u64), its checksum, an Event message, its checksum, all
little-endian (tensorflow/core/lib/io/record_writer.h). The few message fields used here are from
tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

CRC32C_POLYNOMIAL = 0x82F63B78  # Castagnoli, bit-reversed (RFC 3720, appendix B.4)
MASK_DELTA = 0xA282EAD8  # record_writer.h masks checksums so that data may contain checksums


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (CRC32C_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum of `data`."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF)


# Protocol-buffer fields, each a key (number and wire type) and its payload.


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, payload: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(payload)) + payload


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # beyond float32
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(field << 3 | 5) + packed


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


class EventWriter:
    """Appends scalars to one new event file in `folder`; TensorBoard may read it meanwhile.

    Args:
      folder: made if missing.
      first_step: what older files of the folder say about this step and later ones is void, so that
        a resumed run does not draw its repeated steps twice.
    """

    def __init__(self, folder: str | Path, *, first_step: int = 0):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        stamp = f"{time.time():.6f}"
        name = f"events.out.tfevents.{stamp}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._file = self.path.open("ab")
        self._write(_bytes(3, b"brain.Event:2"))
        session_start = _bytes(7, _integer(1, 1))
        self._write(_integer(2, first_step) + session_start)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one number per tag, as in {"train/loss": 3.2}, and flushes."""
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items()
        )
        self._write(_integer(2, step) + _bytes(5, summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, body: bytes) -> None:
        event = _double(1, time.time()) + body
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked(length) + event + _masked(event))
        self._file.flush()
