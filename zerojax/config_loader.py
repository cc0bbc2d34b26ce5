"""How text becomes a configuration, and the sentence for each mistake in it.

Knows dataclasses, YAML and KEY=VALUE; never which fields exist nor what they mean.
"""

import dataclasses
import difflib
import functools
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")
Key = tuple[str, ...]

# The safe loader, in C where PyYAML was built with it: ten times as fast.
_SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ConfigError(ValueError):
    """A mistake in a configuration: what was given, why it cannot be, what to write instead.

    Args:
      message: the sentence, without the key in front.
      key: path of the field, outermost first; empty when the mistake has no field.
      where: "file.yaml:12" or "command line"; empty when the value came from Python.
    """

    def __init__(self, message: str, key: Key = (), where: str = ""):
        super().__init__(message, key, where)
        self.message, self.key, self.where = message, key, where

    def __str__(self) -> str:
        prefix = ".".join(self.key) + ": " if self.key else ""
        return prefix + self.message + (f" ({self.where})" if self.where else "")


class CommandText(str):
    """Text typed on the command line: its type is not decided until the field is known."""

    __slots__ = ()


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as JSON-able dicts, lists, numbers and text; `from_dict` undoes it."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return value

    return plain(config)


def from_dict(cls: type[T], values: Mapping[str, Any]) -> T:
    """Builds the dataclass `cls` from nested mappings.

    Raises:
      ConfigError: an unknown or missing key (the nearest known one is named), or a wrong value.
    """
    _check_keys(cls, values)
    fields: tuple[dataclasses.Field, ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    for field in fields:
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if field.name not in values and not has_default:
            raise ConfigError(f"{cls.__name__} needs this key and it has no default", (field.name,))
    return cls(**values)


def load_dataclass(
    cls: type[T],
    path: str | Path | None,
    overrides: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
) -> T:
    """Reads a YAML file, lays KEY=VALUE overrides over it, and builds `cls`.

    Args:
      cls: a dataclass whose fields may be dataclasses.
      path: YAML file; None starts from the defaults.
      overrides: "mesh.zero=3", or "zero=3" where one field nearest to the top has that name.
      defaults: values used where neither the file nor an override says anything.

    Raises:
      ConfigError: with the key, the value, the nearest known key, and file:line.
    """
    values, where = (dict[str, Any](), dict[Key, str]()) if path is None else _read(Path(path))
    try:
        _check_keys(cls, values)
        for override in overrides:
            _apply(cls, override, values, where)
        return from_dict(cls, {**(defaults or {}), **values})
    except ConfigError as error:
        known = [where[key] for key in _prefixes(error.key) if key in where]
        found = [*known, error.where, str(path or "")]
        raise ConfigError(error.message, error.key, next(filter(None, found), "")) from None


def coerce_fields(config: Any) -> None:
    """Gives every field of a frozen dataclass its declared type, in place, from __post_init__.

    Raises:
      ConfigError: naming the field, the type it wants and the value it got.
    """
    for name, hint in _hints(type(config)).items():
        try:
            value = _convert(hint, getattr(config, name))
        except ConfigError as error:
            raise ConfigError(error.message, (name, *error.key), error.where) from None
        object.__setattr__(config, name, value)


def is_null(value: Any) -> bool:
    """Whether `value` is None, or the text for it on a command line."""
    typed = isinstance(value, CommandText) and value.lower() in ("none", "null", "~")
    return value is None or typed


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _prefixes(key: Key) -> Iterator[Key]:
    return (key[:length] for length in range(len(key), 0, -1))


# Keys


def _leaves(cls: type, prefix: Key = ()) -> Iterator[Key]:
    for name, hint in _hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _leaves(typing.cast(type, hint), (*prefix, name))
        else:
            yield (*prefix, name)


def _check_keys(cls: type, values: Any, prefix: Key = (), root: type | None = None) -> None:
    root = root or cls
    if not isinstance(values, Mapping):
        known = ", ".join(_hints(cls))
        raise ConfigError(f"expected a section with the keys {known}; got {values!r}", prefix)
    for name, value in values.items():
        field = _hints(cls).get(name)
        if field is None:
            hint = _nearest(str(name), cls, prefix, root)
            raise ConfigError(f"unknown key; {hint}", (*prefix, str(name)))
        is_section = dataclasses.is_dataclass(field) and not is_null(value)
        if is_section and not isinstance(value, field):  # type: ignore[arg-type]
            _check_keys(typing.cast(type, field), value, (*prefix, name), root)


def _nearest(name: str, cls: type, prefix: Key, root: type) -> str:
    """The end of an unknown-key sentence: the key that was probably meant, or all there are."""
    here = [*_hints(cls)]
    if match := _closest(name, here):
        return f"did you mean '{'.'.join((*prefix, match))}'?"
    by_name = {key[-1]: ".".join(key) for key in _leaves(root)}
    if match := _closest(name, [*by_name]):
        return f"did you mean '{by_name[match]}'?"
    return f"known keys here: {', '.join(here)}"


def _closest(name: str, known: Sequence[str]) -> str | None:
    initials = [k for k in known if "".join(word[0] for word in k.split("_")) == name]
    return next(iter(initials + difflib.get_close_matches(name, known, 1, 0.6)), None)


def _resolve(cls: type, text: str) -> Key:
    """The full key an override means: itself, or the one nearest to the top that ends in it."""
    key = tuple(text.split("."))
    leaves = [*_leaves(cls)]
    if key in leaves or any(leaf[: len(key)] == key for leaf in leaves):
        return key
    matches = [leaf for leaf in leaves if leaf[-len(key) :] == key]
    if not matches:  # a section that is nested in another
        sections = dict.fromkeys(prefix for leaf in leaves for prefix in _prefixes(leaf[:-1]))
        matches = [section for section in sections if section[-len(key) :] == key]
    matches = [match for match in matches if len(match) == min(map(len, matches))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        choices = " or ".join(".".join(match) for match in matches)
        raise ConfigError(f"ambiguous key; write {choices}", key, "command line")
    raise ConfigError(f"unknown key; {_nearest(key[-1], cls, (), cls)}", key, "command line")


def _apply(cls: type, override: str, values: dict[str, Any], where: dict[Key, str]) -> None:
    text, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r} is not KEY=VALUE; an example is mesh.zero=3")
    key = _resolve(cls, text.strip().removeprefix("--"))
    new: Any = CommandText(value)
    if key not in set(_leaves(cls)):
        new = parse_text(value)
        if not isinstance(new, dict) and new is not None:
            raise ConfigError(_section_hint(cls, key, value), key, "command line")
    node = values
    for name in key[:-1]:
        node[name] = dict(node.get(name) or {})
        node = node[name]
    if isinstance(new, dict):
        new = {**(node.get(key[-1]) or {}), **new}
    node[key[-1]] = new
    where[key] = "command line"


def _section_hint(cls: type, key: Key, value: str) -> str:
    leaves = [".".join(leaf) for leaf in _leaves(cls) if leaf[: len(key)] == key]
    others = [".".join(leaf) for leaf in _leaves(cls) if leaf[-1:] == key[-1:]]
    wanted = " or ".join(f"{other}={value}" for other in others)
    wanted = wanted or f"{leaves[0]}=VALUE"
    return f"this is a section ({', '.join(leaves)}), not a value; write {wanted}"


# Files


def _read(path: Path) -> tuple[dict[str, Any], dict[Key, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no config file at '{path}'; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file '{path}': {error}") from None
    values, where = read_yaml(text, str(path))
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"expected KEY: VALUE lines, got {values!r:.60}", where=f"{path}:1")
    return values or {}, where


def read_yaml(text: str, source: str) -> tuple[Any, dict[Key, str]]:
    """The value of a YAML text (None if there is none), and where each of its keys stands.

    Args:
      source: what the text is called in messages and places, such as its file's path.

    Returns:
      (value, {key path: "source:line"}).

    Raises:
      ConfigError: not YAML, or a key that is given twice.
    """
    where: dict[Key, str] = {}
    loader = _SAFE_LOADER(text)
    try:
        node = loader.get_single_node()
        _record_lines(node, (), source, where)
        return (loader.construct_document(node) if node else None), where
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"not valid YAML: {problem}", where=line) from None


def _record_lines(node: yaml.Node | None, key: Key, source: str, where: dict[Key, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        child = (*key, str(name.value))
        line = f"{source}:{name.start_mark.line + 1}"
        if child in where:  # PyYAML would silently keep the last one
            first = where[child].rpartition(":")[2]
            raise ConfigError(f"given twice, first on line {first}; keep one", child, line)
        where[child] = line
        _record_lines(value, child, source, where)


def parse_text(text: str) -> Any:
    """What a text typed on a command line means in YAML; itself where it means nothing."""
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text


# Types


def _convert(hint: Any, value: Any) -> Any:
    """`value` as the type `hint`, or a ConfigError that says what was expected."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value)
    if hint in (str, object):
        return _convert_text(value) if hint is str else value
    if hint is type(None):
        _expect(is_null(value), "nothing (null)", value)
        return None
    if isinstance(value, CommandText):
        value = parse_text(value)
        if origin is tuple and args[0] is str and isinstance(value, str):
            value = [value]  # freeze=embed/.* is a list of one
    if dataclasses.is_dataclass(hint):
        value = {} if is_null(value) else value
        return value if isinstance(value, hint) else from_dict(hint, value)  # type: ignore[arg-type]
    if origin is typing.Literal:
        return _convert_literal(args, value)
    if origin is tuple:
        return _convert_tuple(args, value)
    if hint is bool:
        _expect(isinstance(value, bool), "true or false", value)
        return value
    return _convert_number(hint, value)


def _expect(holds: bool, wanted: str, value: Any) -> None:
    if not holds:
        raise ConfigError(f"expected {wanted}, got {value!r} ({type(value).__name__})")


def _convert_union(args: tuple[Any, ...], value: Any) -> Any:
    if type(None) in args and is_null(value):
        return None
    first_error: ConfigError | None = None
    for arg in args:
        if arg is not type(None):
            try:
                return _convert(arg, value)
            except ConfigError as error:
                first_error = first_error or error
    assert first_error is not None
    raise first_error


def _convert_text(value: Any) -> str:
    wanted = "text (put it in quotes)" if isinstance(value, (int, float)) else "text"
    _expect(isinstance(value, (str, os.PathLike)), wanted, value)
    return str(value)


def _convert_literal(args: tuple[Any, ...], value: Any) -> Any:
    for choice in args:
        if type(choice) is type(value) and choice == value:
            return choice
    match = difflib.get_close_matches(str(value), [str(a) for a in args], 1)
    hint = f"; did you mean {match[0]!r}?" if match else ""
    raise ConfigError(f"{value!r} is not one of {', '.join(map(str, args))}{hint}")


def _convert_tuple(args: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    of_pairs = typing.get_origin(args[0]) is tuple
    if of_pairs and isinstance(value, Mapping):
        return _convert_mapping(typing.get_args(args[0]), value)
    wanted = "a mapping or a list of pairs" if of_pairs else "a list"
    _expect(isinstance(value, (list, tuple)), wanted, value)
    items = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
    _expect(len(items) == len(value), f"a list of {len(items)} items", value)
    return tuple(_convert(hint, item) for hint, item in zip(items, value, strict=True))


def _convert_mapping(args: tuple[Any, ...], value: Mapping[Any, Any]) -> tuple[Any, ...]:
    """A list of pairs may also be written {first: second}; mistakes are then placed at `first`."""
    pairs = []
    for pair in value.items():
        try:
            pairs.append(_convert_tuple(args, pair))
        except ConfigError as error:
            raise ConfigError(error.message, (str(pair[0]), *error.key), error.where) from None
    return tuple(pairs)


def _convert_number(hint: Any, value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text and 5e8 as text; both are numbers to everyone else."""
    wanted = "an integer" if hint is int else "a number"
    number = value
    if isinstance(value, str):
        try:
            number = int(value) if hint is int else float(value)
        except ValueError:
            number = _float_or_none(value)
    _expect(isinstance(number, numbers.Real) and not isinstance(number, bool), wanted, value)
    if hint is float:
        _expect(not math.isnan(number), wanted, value)
        return float(number)
    if isinstance(number, float):
        _expect(number.is_integer(), wanted, value)
        return int(number)
    return operator.index(number)


def _float_or_none(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
