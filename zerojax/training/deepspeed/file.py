"""A ds_config as flat, typed values with DeepSpeed's defaults, and its warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerojax.training.deepspeed.keys import Notes, check, default_of
from zerojax.training.deepspeed.table import TABLE
from zerojax.training.deepspeed.table_zero import ALIASES

OLD_NAMES = {"bfloat16": "bf16"}
"""Names at the top of a file that DeepSpeed takes as well: {old: new}."""


class File:
    """The values of a file, by path.

    Args:
      values: the file, "auto" filled.
      notes: takes a line for each key.

    Attributes:
      nested: the file, with old names replaced.
    """

    def __init__(self, values: Mapping[str, Any], notes: Notes):
        self.notes = notes
        self.nested = _with_new_names(values, notes)
        self._values = check(self.nested, TABLE, notes)

    def __getitem__(self, path: str) -> Any:
        """The value in the file, or DeepSpeed's default."""
        return self._values[path] if path in self._values else default_of(TABLE, path)

    def has(self, path: str) -> bool:
        return path in self._values

    def optional(self, path: str) -> Any:
        """The value in the file; None where it is absent."""
        return self._values.get(path)


def _with_new_names(values: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """The file with names that DeepSpeed takes as well, or took once, as they are called now."""
    renamed = dict(values)
    for old, new in OLD_NAMES.items():
        if old in renamed and new not in renamed:
            renamed[new] = renamed.pop(old)
            notes.reasons.append(f"{old} is read as {new}")
    zero = renamed.get("zero_optimization")
    if isinstance(zero, bool):
        renamed["zero_optimization"] = {"stage": int(zero)}
        if "allgather_size" in renamed:
            renamed["zero_optimization"]["allgather_bucket_size"] = renamed["allgather_size"]
        notes.warnings.append(
            f"zero_optimization={zero} is an old form, read as stage {int(zero)}; write "
            f'"zero_optimization": {{"stage": {int(zero)}}}'
        )
    elif isinstance(zero, Mapping):
        renamed["zero_optimization"] = {ALIASES.get(key, key): zero[key] for key in zero}
    return renamed
