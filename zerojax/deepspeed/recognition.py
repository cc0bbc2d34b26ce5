"""Distinction of a DeepSpeed dict from the fields of a `MeshConfig`.

No name is in both (`tests/test_deepspeed.py`).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from zerojax.config import ConfigError, MeshConfig
from zerojax.deepspeed.file import OLD_NAMES
from zerojax.deepspeed.table import TABLE

DEEPSPEED_KEYS = frozenset(TABLE) | frozenset(OLD_NAMES)
MESH_KEYS = frozenset(field.name for field in dataclasses.fields(MeshConfig))
_MAX_NAME, _MAX_NAMES = 100, 100
"""How much of a dict without a known key is compared with known names."""


def is_deepspeed(values: Mapping[str, Any]) -> bool:
    """Whether a dict has the keys of a ds_config; by the nearest name where it has none of either.

    Raises:
      ConfigError: it has keys of both.
    """
    of_deepspeed = [key for key in values if key in DEEPSPEED_KEYS]
    of_mesh = [key for key in values if key in MESH_KEYS]
    if of_deepspeed and of_mesh:
        mesh = ", ".join(of_mesh)
        raise ConfigError(
            f"{mesh} belongs to a MeshConfig, and {', '.join(of_deepspeed)} to a DeepSpeed "
            "configuration; a dict is one of the two: "
            f"take {mesh} out (zero=N is written as zero_optimization: {{stage: N}}), or give the "
            "rest as keywords"
        )
    if of_deepspeed or of_mesh:
        return bool(of_deepspeed)
    names = [str(key)[:_MAX_NAME] for key in values][:_MAX_NAMES]
    return _likeness(names, DEEPSPEED_KEYS) > _likeness(names, MESH_KEYS)


def _likeness(names: list[str], known: frozenset[str]) -> float:
    """How near the nearest of the names is to one that is known; 0: none is."""
    return max(
        (
            difflib.SequenceMatcher(None, name, match[0]).ratio()
            for name in names
            if (match := difflib.get_close_matches(name, sorted(known), 1))
        ),
        default=0.0,
    )
