"""Finds the Python lines that traced an instruction, from the tables at the head of an HLO text.

An instruction has `stack_frame_id=N`: a frame with a file, a line and the frame that called it.
Texts of older compilers have `source_file="..." source_line=N` in the instruction instead.
Source: StackFrameIndexProto in OpenXLA's xla/service/hlo.proto.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence

Frame = tuple[str, int]
"""(file, line)."""

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_NAME = re.compile(r'(\d+) "(.*)"$')
_ROW = re.compile(r"(\d+) \{(.*)\}$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_PLACE = re.compile(r'source_file\W"((?:[^"\\]|\\.)*)" source_line\W(\d+)')


class SourceFrames:
    """The stack frames of one HLO text.

    Args:
      lines: of the text before its first computation; tables other than those of frames are
        ignored.
    """

    def __init__(self, lines: Sequence[str]):
        self._lines = lines
        self._stacks: dict[int, list[Frame]] = {}

    @functools.cached_property
    def _tables(self) -> dict[str, dict[int, str]]:
        """Table -> {number: name, or the text of the fields}."""
        tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        current = None
        for line in map(str.strip, self._lines):
            if line in tables:
                current = line
            elif current and (row := _NAME.match(line) or _ROW.match(line)):
                tables[current][int(row[1])] = row[2]
        return tables

    def of(self, attributes: str) -> list[Frame]:
        """Returns the frames of an instruction, innermost first; [] if the text has none.

        Args:
          attributes: text of the instruction's attributes.
        """
        found = _FRAME.search(attributes)
        if found is not None:
            number = int(found[1])
            # Many instructions have the same frame, and a stack is many tables deep.
            if number not in self._stacks:
                self._stacks[number] = list(self._stack(number))
            return self._stacks[number]
        place = _PLACE.search(attributes)
        return [(place[1], int(place[2]))] if place else []

    def _stack(self, number: int) -> Iterator[Frame]:
        # Number 0 is in no table, so it ends the stack.
        while number in self._tables["StackFrames"]:
            frame = _fields(self._tables["StackFrames"][number])
            place = _fields(self._tables["FileLocations"].get(frame.get("file_location_id", 0), ""))
            file = self._tables["FileNames"].get(place.get("file_name_id", 0))
            if file is not None:
                yield file, place.get("line", 0)
            # Printed with 1 added, as 0 means none: the outermost frame has 1.
            parent = frame.get("parent_frame_id", 1) - 1
            # A frame comes after its caller in the table; a text that says otherwise must not loop
            # forever.
            number = parent if parent < number else 0


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(text)}
