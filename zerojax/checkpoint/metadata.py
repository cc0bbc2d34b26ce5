"""Metadata of a saved step: its checksums, valid values, and comparison with the wanted state.

The file is one readable JSON object. It is sealed: its last line is a checksum of all bytes before
it, and the object contains checksums of its values, so that an error can name the changed value.
All later formats will end in the same line. The seal detects accidental changes; the check of each
field also covers files that were changed on purpose.

Readers ignore unknown keys, so later versions may add keys. `format` increases only when an older
reader would misread the checkpoint, or when a newer reader may rely on more. Format 1 had neither
seal, checksums nor fingerprints. In format 2 the checkpoint contains all arrays.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import json
import math
import platform
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.checkpoint.errors import CheckpointError, DamagedError, MachineError, is_damage, reason
from zerojax.checkpoint.folders import list_steps, step_folder
from zerojax.config.display import quoted
from zerojax.config.features import FEATURES
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.regular_files import UnreadableError, open_regular
from zerojax.runtime.bounded_json import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_DIGITS,
    JsonError,
    inside,
    loads,
    read_bytes,
)

FORMAT = 3
"""Newest format that this version reads. It is written if frozen arrays of a checkpoint are in
another folder."""
_WHOLE = 2
"""Format that is written if the checkpoint contains all arrays; older versions can read it."""
FILE_NAME = "metadata.json"
_PACKAGES = ("zerojax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
SECTIONS = "sections"
_LAST_LINE = re.compile(rb',\n "checksum": "([0-9a-f]{8})"\n\}\n\Z')
_NAMED_BY_LEAF = ("config", "data_state")
_MOST = 3
_LARGEST = 2**48
"""Largest dimension of an array in elements, and largest array or file in bytes: 256 TiB."""
_SIZE = "(?:0|[1-9][0-9]{0,17})"
_ARRAY = re.compile(rf"([a-z][a-z0-9_]{{0,31}})\[({_SIZE}(?:,{_SIZE})*)?\]")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_MOST_DIMENSIONS = 32
_FIRST_LINES = re.compile(rb'\{\s*"format": \d+,\s*"step": \d+,\s*"run": "([0-9a-f]{16})",')
_FIRST_BYTES = 128
_NEIGHBOURS = 4
"""Number of the other saved steps, the nearest ones, whose runs are compared with a step's run."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Everything that a checkpoint stores except the arrays."""

    step: int
    """Number of batches consumed when the state was saved."""

    run: str = dataclasses.field(default_factory=str)
    """Number of the run that saved the step, drawn at its first save, 16 hexadecimal digits; "": it
    was not recorded. Second, so that `run_of` finds it in the first bytes."""

    arrays: dict[str, str]
    """{array name: dtype and unpadded shape, such as "float32[64,64]"}, sorted by name."""

    files: dict[str, int]
    """{path relative to the folder of the step: bytes} of every file that holds arrays; set last.
    """

    data_state: dict[str, Any]
    config: dict[str, Any]
    plan: dict[str, Any]

    versions: dict[str, str]
    """{package name: version} of the packages that wrote the checkpoint."""

    saved: str
    """Time of the save in UTC, as ISO 8601."""

    num_devices: int
    num_processes: int

    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    """{array name: fingerprint} (`fingerprint_math`), independent of the sharding; empty if no
    fingerprints were computed."""

    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    """{file: CRC-32 of its bytes as 8 hexadecimal digits}, for the same files as in `files`."""

    base: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Description (`BaseWeights.to_dict`) of the frozen arrays that the checkpoint does not store
    because a folder of pretrained weights holds them. {}: the checkpoint contains all arrays."""

    format: int = _WHOLE


def describe(leaf: jax.Array | jax.ShapeDtypeStruct) -> str:
    """Formats dtype and shape of an array or `ShapeDtypeStruct` as text.

    >>> describe(jax.ShapeDtypeStruct((2, 3), "float32"))
    'float32[2,3]'
    """
    return f"{leaf.dtype}[{','.join(str(size) for size in leaf.shape)}]"


def as_abstract(description: str) -> jax.ShapeDtypeStruct:
    """Parses a text that `describe` wrote into dtype and shape.

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
    base: dict[str, Any] | None = None,
    fingerprints: dict[str, str] | None = None,
) -> Metadata:
    """Builds the metadata of a state that is about to be saved.

    Args:
      step: number of batches consumed.
      leaves: {name: array}, including arrays that are not written.
      data_state: position of the data source, made of JSON values.
      config: configuration of the run, made of JSON values.
      plan: plan of the run, made of JSON values.
      base: description of the arrays that are not written (`Metadata.base`); None: all are written.
      fingerprints: {name: fingerprint} of the arrays that are not written.

    Raises:
      TypeError: `data_state`, `config` or `plan` contains a value that is not JSON; the message
        names the place.
    """
    states = {"data_state": data_state, "config": config, "plan": plan}
    for name, value in states.items():
        if not isinstance(value, dict):
            raise TypeError(f"{name} is a {type(value).__name__}; a checkpoint stores a dict")
        check_json(value, name)
    # The writer's thread reads them later, when a callback may have changed a state that it gave.
    states = copy.deepcopy(states)
    return Metadata(
        step=step,
        arrays={name: describe(leaves[name]) for name in sorted(leaves)},
        files={},
        **states,
        versions=_versions(),
        saved=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        num_devices=jax.device_count(),
        num_processes=jax.process_count(),
        fingerprints=fingerprints or {},
        base=base or {},
        format=FORMAT if base else _WHOLE,
    )


def write_metadata(folder: Path, metadata: Metadata) -> None:
    """Writes `metadata.json` into `folder`.

    Raises:
      CheckpointError: the file would be larger than the limit for reading (`MAX_BYTES`).
    """
    content = seal({"format": metadata.format} | dataclasses.asdict(metadata)).encode("utf-8")
    if len(content) > MAX_BYTES:
        raise CheckpointError(
            f"step {metadata.step} was not saved: its {FILE_NAME} would have {len(content)} bytes, "
            f"and the limit is {MAX_BYTES}; keep less in data_state, config and plan"
        )
    (folder / FILE_NAME).write_bytes(content)


def run_of(folder: Path) -> str:
    """Returns the number of the run that saved a step, "" if it is not known; reads only the first
    bytes of its metadata.

    Args:
      folder: folder of the step.
    """
    try:
        with open(open_regular(folder / FILE_NAME, follow=False), "rb") as file:
            found = _FIRST_LINES.match(file.read(_FIRST_BYTES))
    except (OSError, UnreadableError):
        return ""
    return "" if found is None else found[1].decode()


def read_metadata(folder: Path) -> Metadata:
    """Reads `metadata.json` of one saved step, and checks that it belongs into this folder.

    All readers of checkpoints call this function first, so that no copied or renamed folder is
    used as another step.

    Args:
      folder: folder of the step, whose name is the number of the step.

    Raises:
      DamagedError: the file is missing, not written by zerojax, changed after it was written, or
        belongs to another step or another run.
      MachineError: the file cannot be read now.
      CheckpointError: the file has a newer format.
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
                f"checkpoint {folder} cannot be read now: {reason(error)}; fix the cause and "
                "try again"
            ) from error
        raise _damaged(folder, f"cannot be read ({reason(error)})") from error
    if not isinstance(body, dict):
        raise _damaged(folder, "has no format number, so zerojax did not write this file")
    # Before the format is read: a damaged number must not look like a newer version.
    if is_sealed(content) and not is_unbroken(content):
        names = ", ".join(changed_values(body)) or "no value, but its text"
        raise _damaged(folder, f"was changed after it was written: {names}")
    number = body.get("format")
    # Not `isinstance`, for which True is an int.
    if type(number) is not int:
        raise _damaged(folder, "has no format number, so zerojax did not write this file")
    if number > FORMAT:
        versions = body.get("versions")
        writer = versions.get("zerojax", "unknown") if isinstance(versions, dict) else "unknown"
        raise CheckpointError(
            f"{folder} has checkpoint format {number}, written by zerojax"
            f" {quoted(writer).strip(chr(39))}; this zerojax"
            f" reads formats up to {FORMAT}; update zerojax"
        )
    known = dataclasses.fields(Metadata)
    needed = [field.name for field in known if field.default_factory is dataclasses.MISSING]
    missing = [name for name in needed if name not in body]
    if missing:
        raise _damaged(folder, f"lacks {missing[0]!r}: the file was edited")
    problem = problem_with(body)
    if problem is not None:
        raise _damaged(folder, f"was edited: {problem}")
    found = Metadata(**{field.name: body[field.name] for field in known if field.name in body})
    _check_place(folder, found)
    return found


def _check_place(folder: Path, found: Metadata) -> None:
    """Raises DamagedError if a step has the folder of another step, or is in another run's."""
    if folder.name != str(found.step):
        own = folder.with_name(str(found.step))
        remedy = "remove it" if own.exists() else f"rename it to {found.step}, or remove it"
        raise _damaged(
            folder,
            f"belongs to step {found.step}, not to step {folder.name}: the folder was copied or "
            f"renamed; {remedy}",
        )
    others = (step_folder(folder.parent, step) for step in list_steps(folder.parent))
    nearest = sorted(others, key=lambda other: abs(int(other.name) - found.step))[: _NEIGHBOURS + 1]
    runs = {other.name: run for other in nearest if (run := run_of(other))}
    votes = collections.Counter(runs.values()).most_common(2)
    if len(votes) < 2 or (found.run == votes[0][0] and votes[0][1] > votes[1][1]):
        return
    steps = ", ".join(sorted((name for name, run in runs.items() if run != found.run), key=int))
    raise _damaged(
        folder,
        f"belongs to another run than the neighbouring saved steps ({steps}): a folder of another "
        "run was copied here; remove it, or move it into a folder of its own",
    )


def _damaged(folder: Path, what: str) -> DamagedError:
    return DamagedError(f"checkpoint {folder} is damaged: {FILE_NAME} {what}")


def check_same_arrays(
    saved: Mapping[str, str], wanted: Mapping[str, Any], *, where: str, subset: bool
) -> None:
    """Raises if a checkpoint has other arrays than the wanted state; reads no array.

    Args:
      saved: {name: dtype and shape} of the checkpoint (`Metadata.arrays`).
      wanted: {name: any object with `.shape` and `.dtype`}.
      where: name of the checkpoint in the error message.
      subset: True: the checkpoint may hold more arrays than `wanted`.

    Raises:
      CheckpointError: the arrays differ. The message names the run's random key or the first
        differing array, both dtypes and shapes, the number of further differences, and the remedy.
    """
    described = {name: describe(leaf) for name, leaf in wanted.items()}
    names = described.keys() if subset else described.keys() | saved.keys()
    different = sorted(name for name in names if described.get(name) != saved.get(name))
    if not different:
        return
    # A model may also have arrays that are random keys.
    other_keys = "rng" in different and "rng" in described and "rng" in saved
    name = "rng" if other_keys else different[0]
    ours, theirs = described.get(name), saved.get(name)
    if theirs is None:
        what = f"{name!r} ({ours}) is not in the checkpoint"
    elif ours is None:
        what = f"the checkpoint holds {name!r} ({theirs}), which this run does not have"
    else:
        kind = "dtype" if theirs.split("[")[0] != ours.split("[")[0] else "shape"
        what = f"{kind} of {name!r}: the checkpoint has {theirs}, this run has {ours}"
    more = f" ({len(different) - 1} more leaves differ)" if len(different) > 1 else ""
    if (remedy := _remedy_of_frozen(name, saved, described)) is not None:
        raise CheckpointError(f"{where}: {what}{more}; {remedy}")
    if (remedy := _remedy_of_setting(different)) is not None:
        raise CheckpointError(f"{where}: {what}{more}; {remedy}")
    if other_keys:
        raise CheckpointError(
            f"{where}: {what}{more}: its random keys have another implementation; set "
            "jax_default_prng_impl as in the run that saved it (keys of shape [2]: threefry2x32, "
            "[4]: rbg or unsafe_rbg), or use another checkpoint folder"
        )
    raise CheckpointError(
        f"{where} was saved by another model or optimizer: {what}{more}; give the model and the "
        "optimizer that it was saved with (its metadata.json lists their arrays), or use another "
        "checkpoint folder"
    )


_CODED = {"uint8": "codes (nf4 or int8)"}
_SETTINGS = {
    **{x.keyword: re.compile(f"{x.part}/") for x in FEATURES if x.part is not None},
    "model.bit_schedule": re.compile(r"extras/(.*/)?(num_updates|step_count)$"),
}
"""{setting: names of the arrays that a state has only with this setting}."""


def _remedy_of_setting(different: Sequence[str]) -> str | None:
    """Returns the remedy if all arrays that differ belong to one setting; else None."""
    for setting, pattern in _SETTINGS.items():
        if all(pattern.match(name) for name in different):
            return (
                f"the run that saved it had another {setting}, or none: set it as it was there, or "
                "start a new run from its exported weights"
            )
    return None


def _remedy_of_frozen(name: str, saved: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """Returns the remedy for a parameter that is frozen in only one of checkpoint and run, or that
    is stored in another dtype.

    Args:
      name: name of an array that differs.
      saved: {name: dtype and shape} of the checkpoint.
      wanted: {name: dtype and shape} of this run.
    """
    role, _, rest = name.partition("/")
    roles = [
        next((found for found in ("frozen", "params") if f"{found}/{rest}" in arrays), None)
        for arrays in (saved, wanted)
    ]
    if role not in ("frozen", "params") or None in roles:
        return None
    if roles[0] != roles[1]:
        there, here = ("frozen" if found == "frozen" else "trained" for found in roles)
        return (
            f"it is {there} in the checkpoint and {here} in this run: freeze the same "
            "parameters as the run that "
            "saved it, or start a new run from its exported weights"
        )
    (dtype, shape), (own, own_shape) = (of[name].split("[") for of in (saved, wanted))
    if role == "params":
        return None
    if "uint8" in (dtype, own) and (dtype, shape) != (own, own_shape):
        theirs = "with other codes" if dtype == own else f"in {_CODED.get(dtype, dtype)}"
        return (
            f"the checkpoint stores this frozen parameter {theirs}: use the freeze_dtype of the "
            "run that saved "
            "it (freeze_dtype in its plan or run.json)"
        )
    if dtype == own or shape != own_shape:
        return None
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)
    return (
        f"the checkpoint stores this frozen parameter in {dtype}: set freeze_dtype={short} to "
        "continue"
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = packages.version(name)
        except packages.PackageNotFoundError:
            found[name] = "not installed"
    return found


def check_json(value: object, where: str, depth: int = 2) -> None:
    """Checks that a checkpoint can store a value, and that it is read again unchanged.

    Args:
      value: the value.
      where: the value's name for messages.
      depth: levels of lists and dicts of the file above the value.

    Raises:
      TypeError: it contains integer keys, arrays, non-finite numbers, text that is not Unicode,
        numbers with too many digits, or values that are nested too deeply.
    """
    if isinstance(value, dict | list | tuple) and depth > MAX_DEPTH:
        raise TypeError(f"{where[:80]}... is nested deeper than {MAX_DEPTH} levels; flatten it")
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
            check_json(item, f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]", depth + 1)
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
        raise TypeError(
            f"{where} has {quoted(text)}, which is not Unicode text; remove its lone surrogates"
        ) from None


def seal(body: Mapping[str, Any]) -> str:
    """Returns a JSON object as text with a seal: checksums of its values and of the whole text."""
    text = json.dumps({**body, SECTIONS: dict(_checksums(body))}, indent=1)
    # The checksum goes before the last brace, so that the file stays one JSON object.
    inside = text.removesuffix("\n}")
    return f'{inside},\n "checksum": "{_checksum(inside.encode())}"\n}}\n'


def is_sealed(content: bytes) -> bool:
    """Returns True if a file has a seal, or had one before it was damaged."""
    return _LAST_LINE.search(content) is not None or f'"{SECTIONS}": '.encode() in content


def is_unbroken(content: bytes) -> bool:
    """Returns True if the text of a sealed file matches the checksum in its last line."""
    last = _LAST_LINE.search(content)
    return last is not None and last[1].decode() == _checksum(content[: last.start()])


def changed_values(body: Mapping[str, Any]) -> list[str]:
    """Returns the names of at most three values, such as "config.seed", that do not match their
    checksums."""
    saved = body.get(SECTIONS)
    if not isinstance(saved, dict):
        return []
    now = dict(_checksums({name: x for name, x in body.items() if name != "checksum"}))
    names = sorted(name for name in now.keys() | saved.keys() if now.get(name) != saved.get(name))
    return names[:_MOST]


def _checksums(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (name, checksum) of each value. For `config` and `data_state`, yields each of their
    leaves instead, such as "config.seed"."""
    for name, value in body.items():
        if name == SECTIONS:
            continue
        parts = _leaves(name, value) if name in _NAMED_BY_LEAF else [(name, value)]
        for part, item in parts:
            yield part, _checksum(json.dumps(item, sort_keys=True).encode())


def _leaves(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, item in value.items():
        yield from _leaves(f"{name}.{key}", item)


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def problem_with(body: Mapping[str, Any]) -> str | None:
    """Returns a clause that describes the first invalid field of metadata, or None.

    Args:
      body: content of metadata.json; missing fields are not checked.
    """
    for name, is_right, kind in _FIELDS:
        if name in body and not is_right(body[name]):
            return f"{name!r} is {quoted(body[name])} instead of {kind}"
    for name, is_key, is_value, kind in _TABLES:
        if name not in body:
            continue
        if not isinstance(body[name], dict):
            return f"{name!r} is {quoted(body[name])} instead of an object"
        for key, value in body[name].items():
            if not is_key(key):
                return f"{name!r} has {quoted(key)}, which is not the {kind[0]}"
            if not is_value(value):
                return f"{name!r} has {quoted(value)} for {quoted(key)} instead of {kind[1]}"
    if (problem := _problem_with_base(body)) is not None:
        return problem
    for name, of in (("checksums", "files"), ("fingerprints", "arrays")):
        unknown = body.get(name, {}).keys() - body.get(of, {}).keys()
        if unknown:
            return f"{name!r} has {quoted(min(unknown))}, which {of!r} does not have"
    return None


def _problem_with_base(body: Mapping[str, Any]) -> str | None:
    base = body.get("base", {})
    if base == {}:
        return None
    if not isinstance(base, dict) or base.keys() != {"folder", "files", "arrays"}:
        return f"'base' is {quoted(base)} instead of an object with folder, files and arrays"
    folder, sizes, names = base["folder"], base["files"], base["arrays"]
    if not isinstance(folder, str) or not Path(folder).is_absolute() or "\0" in folder:
        return f"'base' has the folder {quoted(folder)}, which is not an absolute path"
    if not isinstance(sizes, dict) or not sizes:
        return f"'base' has the files {quoted(sizes)} instead of an object"
    for name, size in sizes.items():
        if not inside(name) or not _is_int(0)(size):
            return (
                f"'base' has {quoted(size)} for the file {quoted(name)}, which is not a size of a "
                "file in bytes"
            )
    for name in names if isinstance(names, list) and names else [names]:
        if not isinstance(name, str) or name not in body.get("arrays", {}):
            return f"'base' has the array {quoted(name)}, which 'arrays' does not have"
        if name not in body.get("fingerprints", {}):
            return f"'base' has the array {quoted(name)}, which has no fingerprint"
    return None


def is_array(description: object) -> bool:
    """Returns True if a text is a valid dtype and shape in the format of `describe`.

    >>> is_array("float32[2,3]"), is_array("float33[2]"), is_array("float32[-1]")
    (True, False, False)
    """
    found = _ARRAY.fullmatch(description) if isinstance(description, str) else None
    if found is None:
        return False
    shape = [int(size) for size in (found[2] or "").split(",") if size]
    try:
        dtype = jnp.dtype(found[1])
    except TypeError:
        return False
    # Objects, texts and times: dtypes of NumPy that no array of JAX has.
    if dtype.kind in "OSUMm" or not dtype.itemsize or len(shape) > _MOST_DIMENSIONS:
        return False
    # Zeros are multiplied as ones, so that the other dimensions stay within what NumPy supports.
    return math.prod(max(1, size) for size in shape) * dtype.itemsize <= _LARGEST


def _is_int(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= _LARGEST


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _matches(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


_FIELDS = (
    ("format", _is_int(1), "a number of 1 or more"),
    ("step", _is_int(0), "a whole number of 0 or more"),
    ("num_devices", _is_int(1), "a whole number of 1 or more"),
    ("num_processes", _is_int(1), "a whole number of 1 or more"),
    ("saved", _is_text, "a time"),
    ("run", lambda value: value == "" or _matches(_FINGERPRINT)(value), "the number of a run"),
    ("data_state", _is_object, "an object"),
    ("config", _is_object, "an object"),
    ("plan", _is_object, "an object"),
)
_TABLES = (
    ("versions", _is_text, _is_text, ("name", "a version")),
    ("arrays", _is_text, is_array, ("name", "a dtype and a shape")),
    ("files", inside, _is_int(0), ("name of a file inside the step's folder", "its bytes")),
    ("checksums", inside, _matches(_CHECKSUM), ("name of a file", "its checksum")),
    ("fingerprints", _is_text, _matches(_FINGERPRINT), ("name", "a fingerprint")),
)
