"""Metadata of a saved step, and its comparison with the state that is to be restored.

The file is one readable JSON object, sealed (see `seals`). Keys that a reader does not know are
ignored, so later versions may add some; `format` is raised only when an older reader would misread
the checkpoint, or when a newer one may rely on more. Format 1 had neither seal, checksums nor
fingerprints.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import platform
from collections.abc import Mapping
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.checkpoint import seals
from zerojax.checkpoint.errors import CheckpointError, DamagedError, MachineError, is_damage, reason
from zerojax.checkpoint.metadata_fields import problem_with
from zerojax.config.display import quoted
from zerojax.runtime.bounded_json import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_DIGITS,
    JsonError,
    loads,
    read_bytes,
)

FORMAT = 2
FILE_NAME = "metadata.json"
_PACKAGES = ("zerojax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metadata:
    """Everything of one checkpoint except the arrays."""

    step: int
    """Batches consumed when the state was saved."""

    arrays: dict[str, str]
    """Name -> dtype and unpadded shape, such as `"float32[64,64]"`, sorted by name."""

    files: dict[str, int]
    """Bytes of every file of the arrays, relative to the folder of the step; added last."""

    data_state: dict[str, Any]
    config: dict[str, Any]
    plan: dict[str, Any]

    versions: dict[str, str]
    """Package name -> version that wrote the checkpoint."""

    saved: str
    """Time of the save, ISO 8601, UTC."""

    num_devices: int
    num_processes: int

    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name of an array -> its fingerprint (`fingerprint_math`), however it was sharded; empty:
    none were taken."""

    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    """File -> CRC-32 of its bytes, 8 hexadecimal digits; the same files as in `files`."""

    format: int = FORMAT


def describe(leaf: Any) -> str:
    """dtype and shape of an array or `ShapeDtypeStruct`.

    >>> describe(jax.ShapeDtypeStruct((2, 3), "float32"))
    'float32[2,3]'
    """
    return f"{leaf.dtype}[{','.join(str(size) for size in leaf.shape)}]"


def as_abstract(description: str) -> jax.ShapeDtypeStruct:
    """The inverse of `describe`.

    >>> as_abstract("float32[2,3]")
    ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    dtype, _, sizes = description.removesuffix("]").partition("[")
    shape = tuple(int(size) for size in sizes.split(",") if size)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def make_metadata(
    step: int,
    leaves: Mapping[str, Any],
    *,
    data_state: dict[str, Any],
    config: dict[str, Any],
    plan: dict[str, Any],
) -> Metadata:
    """The metadata of a state that is about to be saved.

    Raises:
      TypeError: `data_state`, `config` or `plan` is not made of JSON values; names the place.
    """
    for name, value in (("data_state", data_state), ("config", config), ("plan", plan)):
        if not isinstance(value, dict):
            raise TypeError(f"{name} is a {type(value).__name__}; a checkpoint stores a dict")
        _check_json(value, name)
    return Metadata(
        step=step,
        arrays={name: describe(leaves[name]) for name in sorted(leaves)},
        files={},
        data_state=data_state,
        config=config,
        plan=plan,
        versions=_versions(),
        saved=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        num_devices=jax.device_count(),
        num_processes=jax.process_count(),
    )


def write_metadata(folder: Path, metadata: Metadata) -> None:
    """Writes `metadata.json` into `folder`.

    Raises:
      CheckpointError: it would be larger than what is read.
    """
    content = seals.seal({"format": FORMAT} | dataclasses.asdict(metadata)).encode("utf-8")
    if len(content) > MAX_BYTES:
        raise CheckpointError(
            f"step {metadata.step} was not saved: its {FILE_NAME} would have {len(content)} bytes,"
            f" and {MAX_BYTES} are read; keep less in data_state, config and plan"
        )
    (folder / FILE_NAME).write_bytes(content)


def read_metadata(folder: Path) -> Metadata:
    """Reads `metadata.json` of one saved step.

    Raises:
      DamagedError: no such file, not ours, or changed after it was written.
      MachineError: not readable now. CheckpointError: of a newer format.
    """
    try:
        content = read_bytes(folder / FILE_NAME, follow=False)
        body = loads(content)
    except FileNotFoundError:
        raise _damaged(folder, "is missing") from None
    except JsonError as error:
        raise _damaged(folder, error.what) from None
    except OSError as error:
        if not is_damage(error):
            raise MachineError(
                f"checkpoint {folder} cannot be read now: {reason(error)}"
            ) from error
        raise _damaged(folder, f"cannot be read ({reason(error)})") from error
    if not isinstance(body, dict):
        raise _damaged(folder, "has no format number, so zerojax did not write it")
    if seals.is_sealed(content) and not seals.is_unbroken(content):
        names = ", ".join(seals.changed_values(body)) or "no value, but its text"
        raise _damaged(folder, f"was changed after it was written: {names}")
    number = body.get("format")
    if type(number) is not int:
        raise _damaged(folder, "has no format number, so zerojax did not write it")
    if number > FORMAT:
        versions = body.get("versions")
        writer = versions.get("zerojax", "unknown") if isinstance(versions, dict) else "unknown"
        raise CheckpointError(
            f"{folder} has checkpoint format {number}, written by zerojax"
            f" {quoted(writer).strip(chr(39))}; this version"
            f" reads formats up to {FORMAT}; update zerojax"
        )
    known = dataclasses.fields(Metadata)
    needed = [field.name for field in known if field.default_factory is dataclasses.MISSING]
    missing = [name for name in needed if name not in body]
    if missing:
        raise _damaged(folder, f"lacks {missing[0]!r}: it was changed by hand")
    problem = problem_with(body)
    if problem is not None:
        raise _damaged(folder, f"was changed by hand: {problem}")
    return Metadata(**{field.name: body[field.name] for field in known if field.name in body})


def _damaged(folder: Path, what: str) -> DamagedError:
    return DamagedError(f"checkpoint {folder} is damaged: {FILE_NAME} {what}")


def check_same_arrays(
    saved: Mapping[str, str], wanted: Mapping[str, Any], *, where: str, subset: bool
) -> None:
    """Compares a saved state with the one asked for, before any array is read.

    Args:
      saved: `Metadata.arrays`.
      wanted: name -> anything with `.shape` and `.dtype`.
      where: the checkpoint, for the error text.
      subset: allow the checkpoint to hold more than what is wanted.

    Raises:
      CheckpointError: names the first differing leaf in name order, what both sides have, how many
        more differ, and what to do.
    """
    described = {name: describe(leaf) for name, leaf in wanted.items()}
    names = described.keys() if subset else described.keys() | saved.keys()
    different = sorted(name for name in names if described.get(name) != saved.get(name))
    if not different:
        return
    name = different[0]
    ours, theirs = described.get(name), saved.get(name)
    if theirs is None:
        what = f"{name!r} ({ours}) is not in the checkpoint"
    elif ours is None:
        what = f"the checkpoint holds {name!r} ({theirs}), which this run does not have"
    else:
        kind = "dtype" if theirs.split("[")[0] != ours.split("[")[0] else "shape"
        what = f"{kind} of {name!r}: the checkpoint has {theirs}, this run has {ours}"
    more = f" ({len(different) - 1} more leaves differ)" if len(different) > 1 else ""
    raise CheckpointError(
        f"{where} was saved by another model or optimizer: {what}{more}; give the model and the "
        "optimizer that it was saved with (its metadata.json lists their arrays), or use another "
        "checkpoint folder"
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = packages.version(name)
        except packages.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _check_json(value: Any, where: str, depth: int = 2) -> None:
    """Refuses what JSON would lose or change, and what would not be read again.

    These are integer keys, arrays, non-finite numbers; text that is not Unicode, numbers of too
    many digits, and what is nested too deeply.
    """
    if isinstance(value, dict | list | tuple) and depth > MAX_DEPTH:
        raise TypeError(f"{where[:80]}... is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        _check_text(value, where)
    elif type(value) is int and abs(value) >= 10 ** (MAX_DIGITS - 1):
        raise TypeError(f"{where} has {MAX_DIGITS} digits or more; store it as a string")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"{where} has the key {key!r} of type {type(key).__name__}; a checkpoint stores"
                    f" only string keys; use {str(key)!r}"
                )
            _check_text(key, where)
            _check_json(item, f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]", depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{where} is {value}, which JSON does not have; use None or a string")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(
            f"{where} is a {type(value).__name__}; a checkpoint stores None, bool, int, float, str,"
            " lists and dicts of these"
        )


def _check_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise TypeError(f"{where} has {quoted(text)}, which is not Unicode text") from None
