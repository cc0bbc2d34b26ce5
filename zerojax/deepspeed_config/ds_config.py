"""Reads a ds_config from JSON, hjson, base64 or a dict, and looks up its values and defaults."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerojax.config.display import quoted
from zerojax.config.loader import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_NODES,
    ConfigError,
    check_length,
    read_text,
    user_path,
)
from zerojax.config.regular_files import UnreadableError
from zerojax.deepspeed_config.key_schema import KeyNotes, check, default_of
from zerojax.deepspeed_config.keys_table import ALIASES, TABLE
from zerojax.runtime.bounded_json import depth_of

_PRINTS = "steps_per_print"
_NOT_FINITE = "is infinite or NaN; write a finite number"
OLD_NAMES = {"bfloat16": "bf16"}
"""{alternative top-level name that DeepSpeed accepts: current name}."""


class File:
    """Values of a ds_config, looked up by path such as "zero_optimization.stage".

    Args:
      values: content of the ds_config, after `Auto.fill`.
      notes: collects one line for each key.

    Attributes:
      nested: content of the ds_config, with old names replaced by current names.
    """

    def __init__(self, values: Mapping[str, Any], notes: KeyNotes):
        self.notes = notes
        self.nested = _with_new_names(values, notes)
        self._values = check(self.nested, TABLE, notes)

    def __getitem__(self, path: str) -> Any:
        """Returns the value at a path of the ds_config, or DeepSpeed's default if it is absent."""
        return self._values[path] if path in self._values else default_of(TABLE, path)

    def has(self, path: str) -> bool:
        return path in self._values

    def optional(self, path: str) -> Any:
        """Returns the value at a path of the ds_config; None if it is absent."""
        return self._values.get(path)


def _with_new_names(values: Mapping[str, Any], notes: KeyNotes) -> dict[str, Any]:
    """Returns a ds_config with alternative and old names replaced by current names."""
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
            f"zero_optimization={zero} is an old form of stage {int(zero)}; write "
            f'"zero_optimization": {{"stage": {int(zero)}}}'
        )
    elif isinstance(zero, Mapping):
        renamed["zero_optimization"] = {ALIASES.get(key, key): zero[key] for key in zero}
    return renamed


def read(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Reads a ds_config; returns its content and its name for messages.

    Args:
      source: path of a JSON or hjson file; its text; its urlsafe base64, as DeepSpeed's launcher
        passes it; or a dict, which is copied.

    Raises:
      ConfigError: the file cannot be read, the text is neither JSON nor hjson, a key occurs twice,
        a number is infinite or NaN, or the size, depth or digits exceed the limits.
    """
    if isinstance(source, Mapping):
        _check_nesting(source, "the dict")
        return _with_finite(copy.deepcopy(dict(source)), "the dict"), "the dict"
    path = user_path(source)
    if _is_file(path):
        try:
            return _parse(read_text(path), str(path)), str(path)
        except UnreadableError as error:
            raise ConfigError(f"cannot read {error}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
    text = str(source)
    if text.lstrip().startswith("{"):
        return _parse(text, "the text"), "the text"
    decoded = _from_base64(text)
    if decoded is None:
        raise ConfigError(
            f"{quoted(text)} is not a file, nor the base64 of a DeepSpeed configuration; give the "
            "path of a ds_config.json, or a MeshConfig"
        )
    return _parse(decoded, "the base64 text"), "the base64 text"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the base64 text of a whole file exceeds the maximum length of a file name
        return False


def _from_base64(text: str) -> str | None:
    """Decodes base64 text; returns None if the text is not base64 of a dict."""
    try:
        decoded = base64.b64decode(text.encode(), altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeError):
        return None
    return decoded if ":" in decoded else None


def _parse(text: str, name: str) -> dict[str, Any]:
    check_length(text, name)
    if depth_of(text.encode("utf-8", "replace")) > MAX_DEPTH:
        raise _too_deep(name)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=float,
        )
    except json.JSONDecodeError as error:
        value = _parse_hjson(text, name, error)
    except ConfigError as error:
        raise ConfigError(error.message, error.key, name) from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"expected {{key: value, ...}}, got {type(value).__name__}; a DeepSpeed configuration "
            'begins like {"train_batch_size": 32}',
            where=name,
        )
    _check_nesting(value, name)
    return _with_finite(value, name)


def _parse_hjson(text: str, name: str, error: json.JSONDecodeError) -> Any:
    where = f"{name}:{error.lineno}"
    try:
        import hjson  # an extra: only files with comments or unquoted words need it
    except ImportError:
        raise ConfigError(
            f"not valid JSON: {error.msg}; if it is hjson (comments, bare words), "
            "pip install 'zerojax[hjson]'",
            where=where,
        ) from None
    try:
        return hjson.loads(text, object_pairs_hook=_unique, parse_int=_integer, parse_float=_finite)
    except RecursionError:
        raise _too_deep(name) from None
    except ConfigError as refused:
        raise ConfigError(refused.message, refused.key, name) from None
    except ValueError as second:
        raise ConfigError(
            f"neither JSON ({error.msg}) nor hjson ({str(second).splitlines()[0]})", where=where
        ) from None


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the dict of a JSON object; raises for a repeated key, for which the module json would
    silently use the last value."""
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        values = [value for key, value in pairs if key == repeated[0]]
        raise ConfigError(
            f"the key appears {len(values)} times, with the values {quoted(values)}; keep one "
            "of them",
            (repeated[0],),
        )
    return dict(pairs)


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ConfigError(
            f"{quoted(text)} has {len(text):,} digits; write a number of at most {MAX_DIGITS}"
        )
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ConfigError(f"{quoted(text)} {_NOT_FINITE}")
    return float(text)


def _too_deep(name: str) -> ConfigError:
    problem = f"nested more than {MAX_DEPTH} levels deep, deeper than any key of DeepSpeed"
    return ConfigError(f"{problem}; use fewer levels", where=name)


def _with_finite(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Checks that all numbers of a ds_config are finite; an infinite `steps_per_print` becomes
    None.

    Accelerate writes an infinite `steps_per_print` to switch printing off.

    Raises:
      ConfigError: any other number is infinite or NaN.
    """
    if str(values.get(_PRINTS)).lower() in ("inf", "infinity"):
        values = {**values, _PRINTS: None}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), values)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [((*key, str(inner)), item) for inner, item in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(key, item) for item in value]
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{json.dumps(value)} {_NOT_FINITE}", key, name)
    return values


def _check_nesting(value: object, name: str) -> None:
    """Raises if a ds_config has too many values or levels, such as a dict that contains itself."""
    waiting = [(value, 0)]
    for _ in range(MAX_NODES):
        if not waiting:
            return
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise _too_deep(name)
        if isinstance(value, Mapping):
            waiting += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list | tuple):
            waiting += [(item, depth + 1) for item in value]
    raise ConfigError(f"more than {MAX_NODES:,} values; remove some", where=name)
