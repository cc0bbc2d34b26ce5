"""Loads configurations from YAML files and KEY=VALUE text; each error states the file and line."""

import contextlib
import dataclasses
import difflib
import functools
import math
import numbers
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from zerojax.config.display import MAX_MESSAGE, cut, printable, quoted
from zerojax.config.regular_files import UnreadableError, open_text

T = TypeVar("T")
Key = tuple[str, ...]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, with plain values as in YAML 1.2; ten times as fast if PyYAML was built
    with its C library.

    YAML 1.1, and so PyYAML, reads 190:20:30 as a number in base 60, 017 as 15, 2024-01-01 as a
    date, 1e-3 as text, and yes, no, on and off as true or false everywhere. Here 190:20:30, 017 and
    dates are text, 1e-3 is a number, and yes, no, on and off are `YesNo`.
    """

    yaml_implicit_resolvers: typing.ClassVar[dict[Any, Any]] = {}
    """PyYAML would add those of YAML 1.1."""


class YesNo(str):
    """One of the words yes, no, on and off, not in quotes: true or false in a field of that type,
    and text in others.

    Raises:
      ValueError: it is another word; YAML can tag any word as one of these.
    """

    __slots__ = ()

    def __new__(cls, word: str) -> "YesNo":
        if word.lower() not in ("yes", "no", "on", "off"):
            raise ValueError(word)
        return super().__new__(cls, word)


_TAG = "tag:yaml.org,2002:"
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_PLAIN = {
    f"{_TAG}null": r"~|null|Null|NULL|",
    f"{_TAG}bool": r"true|True|TRUE|false|False|FALSE",
    "!yes_no": r"(?i:yes|no|on|off)",
    f"{_TAG}int": r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*|0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+)",
    f"{_TAG}float": rf"[-+]?(?:(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][-+]?[0-9]+)?"
    rf"|{_DIGITS}[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
    f"{_TAG}merge": "<<",
}
"""{tag: plain values, those without quotes, that have it}."""
for _tag, _pattern in _PLAIN.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})$"), None)
_Loader.add_constructor("!yes_no", lambda _, node: YesNo(node.value))
_Loader.add_constructor(f"{_TAG}int", lambda _, node: int(node.value, 0))
# Python reads infinity and NaN without the point that YAML writes before them.
_Loader.add_constructor(
    f"{_TAG}float", lambda _, node: float(re.sub(r"\.(?=inf|nan)", "", node.value.lower()))
)
_TAGS = {*_PLAIN, f"{_TAG}str"}
_KINDS = {yaml.MappingNode: f"{_TAG}map", yaml.SequenceNode: f"{_TAG}seq"}

MAX_CHARACTERS = 2**20
"""Largest number of characters of a configuration's text."""
MAX_DEPTH = 64
"""Largest depth of nested sections and lists."""
MAX_NODES = 100_000
"""Largest number of sections, lists and values in a text, in which each alias (*name) counts with
all values that it expands to."""
MAX_DIGITS = 100
"""Limit of an integer's digits; larger ones are not sizes, counts or seeds, and take Python
quadratic time."""
_COMMAND_LINE = "command line"
_MAX_NAME = 100
"""Limit of characters of a key that is compared with known ones or shown."""


class ConfigError(ValueError):
    """An invalid configuration; the message states the value, why it is not possible, and what to
    write instead.

    Args:
      message: the sentence, without the key in front.
      key: path of the field, outermost section first; empty if the error concerns no field.
      where: place of the value, "file.yaml:12" or "command line"; empty if the value came from
        Python.
    """

    def __init__(self, message: str, key: Key = (), where: str = ""):
        super().__init__(message, key, where)
        self.message, self.key, self.where = message, key, where

    def __str__(self) -> str:
        prefix = ".".join(cut(name, _MAX_NAME) for name in self.key) + ": " if self.key else ""
        if self.key and self.message.startswith(f"{self.key[-1]}="):  # the message names the field
            prefix = "".join(f"{cut(name, _MAX_NAME)}." for name in self.key[:-1])
        where = f" ({self.where})" if self.where else ""
        return printable(prefix + cut(self.message, MAX_MESSAGE) + where, is_page=True)


class NotYaml(ConfigError):
    """A text that is not valid YAML."""


class CommandText(str):
    """Text that was typed on the command line. It is converted to the type of its field once the
    field is known."""

    __slots__ = ()


def to_dict(config: object) -> dict[str, Any]:
    """Converts a configuration to dicts, lists, numbers and text that JSON can store; `from_dict`
    reverses it."""

    def plain(value: object) -> Any:
        if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return value

    return plain(config)


def from_dict(cls: type[T], values: Mapping[str, Any]) -> T:
    """Builds the dataclass `cls` from nested mappings.

    Raises:
      ConfigError: an unknown key (the message suggests the nearest known key), a missing key, or an
        invalid value.
    """
    _check_keys(cls, values)
    fields: tuple[dataclasses.Field, ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    for field in fields:
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if field.name not in values and not has_default:
            raise ConfigError(
                f"{cls.__name__} needs this key, which has no default; set it", (field.name,)
            )
    return cls(**values)


def load_dataclass(
    cls: type[T],
    path: str | Path | None,
    overrides: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    base: T | None = None,
) -> T:
    """Reads a YAML file, applies KEY=VALUE overrides, and builds `cls`.

    Args:
      cls: a dataclass whose fields may be dataclasses.
      path: path of the YAML file. None: start from `base`, or from the defaults if `base` is None.
      base: settings to start from if there is no file.
      overrides: texts such as "mesh.zero=3", or "zero=3" if only one field nearest to the top level
        has that name.
      defaults: values of fields that neither the file nor an override sets.

    Raises:
      ConfigError: the message states the key, the value, the nearest known key, and file:line.
    """
    values, where = dict[str, Any](), dict[Key, str]()
    if path is not None:
        values, where = _read(user_path(path))
    elif base is not None:
        values = to_dict(base)

    def build(chosen: Sequence[str], places: dict[Key, str]) -> T:
        _check_keys(cls, values)
        laid = dict(values)
        for override in chosen:
            _apply(cls, override, laid, places)
        return from_dict(cls, {**(defaults or {}), **laid})

    try:
        return build(overrides, where)
    except ConfigError as error:
        known = [where[key] for key in _prefixes(error.key) if key in where]
        place = next((x for x in (*known, error.where, str(path or "")) if x), "")
        if place != _COMMAND_LINE and (culprit := _culprit(build, overrides)) is not None:
            place = f"{_COMMAND_LINE}: {cut(culprit, _MAX_NAME)}"
        raise ConfigError(error.message, error.key, place) from None


def _culprit(build: Callable[..., Any], overrides: Sequence[str]) -> str | None:
    """Finds the override that makes a configuration invalid.

    Returns:
      The only override whose removal makes the configuration valid; all overrides if there is no
      single one; None if the configuration is invalid even without overrides.
    """

    def is_right(chosen: Sequence[str]) -> bool:
        try:
            build(chosen, {})
        except ConfigError:
            return False
        return True

    if not is_right(()):
        return None
    alone = (each for i, each in enumerate(overrides) if is_right(_without(overrides, i)))
    return next(alone, ", ".join(overrides))


def _without(items: Sequence[str], index: int) -> Sequence[str]:
    return [*items[:index], *items[index + 1 :]]


def coerce_fields(config: object) -> None:
    """Converts every field of a frozen dataclass to its declared type, in place; called in
    `__post_init__`.

    Raises:
      ConfigError: the message states the field, its type and the value.
    """
    for name, hint in _hints(type(config)).items():
        try:
            value = _convert(hint, getattr(config, name))
        except ConfigError as error:
            raise ConfigError(error.message, (name, *error.key), error.where) from None
        object.__setattr__(config, name, value)


def is_null(value: object) -> bool:
    """Returns whether `value` is None or a command-line text that means null."""
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


def _check_keys(cls: type, values: object, prefix: Key = (), root: type | None = None) -> None:
    root = root or cls
    if not isinstance(values, Mapping):
        known = ", ".join(_hints(cls))
        raise ConfigError(f"expected a section with the keys {known}; got {quoted(values)}", prefix)
    for name, value in values.items():
        field = _hints(cls).get(name)
        if field is None:
            hint = _nearest(str(name), cls, prefix, root)
            raise ConfigError(f"unknown key; {hint}", (*prefix, str(name)))
        is_section = dataclasses.is_dataclass(field) and not is_null(value)
        if is_section and not isinstance(value, field):  # type: ignore[arg-type]
            _check_keys(typing.cast(type, field), value, (*prefix, name), root)


def _nearest(name: str, cls: type, prefix: Key, root: type) -> str:
    """Returns the last part of the message for an unknown key: the key that was probably meant, or
    all known keys."""
    here = [*_hints(cls)]
    if match := _closest(name, here):
        return f"did you mean '{'.'.join((*prefix, match))}'?"
    by_name = {key[-1]: ".".join(key) for key in _leaves(root)}
    # A name that belongs to another section is mostly written right: log.spike is not mesh.pipe.
    if match := _closest(name, [*by_name], 0.85 if prefix else 0.6):
        return f"did you mean '{by_name[match]}'?"
    return f"known keys here: {', '.join(here)}"


def _closest(name: str, known: Sequence[str], likeness: float = 0.6) -> str | None:
    name = name[:_MAX_NAME]  # the time to compare two texts is the product of their lengths
    initials = [k for k in known if "".join(word[0] for word in k.split("_")) == name]
    return next(iter(initials + difflib.get_close_matches(name, known, 1, likeness)), None)


def resolve_key(cls: type, text: str) -> Key:
    """Returns the full key of an override. A text that is not a full key stands for the key nearest
    to the top level that ends in it.

    Raises:
      ConfigError: no key, or more than one, ends in the text.
    """
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
        raise ConfigError(f"ambiguous key; write {choices}", key, _COMMAND_LINE)
    for value in (prefix for prefix in _prefixes(key[:-1]) if prefix in leaves):
        name = ".".join(value)
        raise ConfigError(
            f"{name} is a single value, not a section; write {name}=VALUE", key, _COMMAND_LINE
        )
    section, prefix = cls, key[:-1]
    for name in prefix:
        field = _hints(section).get(name)
        if not dataclasses.is_dataclass(field):
            section, prefix = cls, ()
            break
        section = typing.cast(type, field)
    raise ConfigError(f"unknown key; {_nearest(key[-1], section, prefix, cls)}", key, _COMMAND_LINE)


def type_of_key(cls: type, key: Key) -> Any:
    """Returns the declared type of the setting with a full key."""
    for name in key[:-1]:
        cls = _hints(cls)[name]
    return _hints(cls)[key[-1]]


def _apply(cls: type, override: str, values: dict[str, Any], where: dict[Key, str]) -> None:
    text, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(
            f"override {quoted(override)} is not KEY=VALUE; an example is mesh.zero=3",
            where=_COMMAND_LINE,
        )
    key = resolve_key(cls, text.strip().removeprefix("--"))
    new: Any = CommandText(value)
    if key not in set(_leaves(cls)):
        new = parse_text(value)
        if not isinstance(new, dict) and new is not None:
            raise ConfigError(_section_hint(cls, key, value), key, _COMMAND_LINE)
    node = values
    for name in key[:-1]:
        # A copy, since `build` reads the same `values` again when it looks for a wrong override.
        node[name] = dict(node.get(name) or {})
        node = node[name]
    typed = new
    if isinstance(new, dict):
        new = {**(node.get(key[-1]) or {}), **new}
    node[key[-1]] = new
    for place in [place for place in where if place[: len(key)] == key]:
        if not isinstance(new, dict) or _is_set(typed, place[len(key) :]):
            del where[place]  # the file's line no longer applies
    where[key] = _COMMAND_LINE


def _is_set(values: object, key: Key) -> bool:
    """Returns whether nested dicts contain a key; True for an empty key."""
    for name in key:
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def _section_hint(cls: type, key: Key, value: str) -> str:
    leaves = [".".join(leaf) for leaf in _leaves(cls) if leaf[: len(key)] == key]
    others = [".".join(leaf) for leaf in _leaves(cls) if leaf[-1:] == key[-1:]]
    value = cut(value, _MAX_NAME)
    wanted = " or ".join(f"{other}={value}" for other in others)
    wanted = wanted or f"{leaves[0]}=VALUE"
    return f"this is a section ({', '.join(leaves)}), not a value; write {wanted}"


# Files


def user_path(value: str | os.PathLike[str]) -> Path:
    """Makes a path from user input, with `~` or `~name` at its start replaced by the home folder.

    `./~name` is the folder of that name; its path is absolute, because `Path` drops the `./`.

    Raises:
      ConfigError: the home folder does not exist, or the text contains a zero byte.
    """
    if "\0" in os.fspath(value):
        raise ConfigError(
            f"{quoted(str(value))} contains a zero byte, which paths cannot contain; remove it"
        )
    path = Path(value)
    if str(path).startswith("~") and not os.fspath(value).startswith("~"):
        return path.absolute()
    try:
        return path.expanduser()
    except RuntimeError:
        first = path.parts[0]
        raise ConfigError(
            f"{quoted(str(value))}: there is no home folder for {first}; write ./{first} for a "
            "folder of that name"
        ) from None


def _read(path: Path) -> tuple[dict[str, Any], dict[Key, str]]:
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigError(f"no config file at '{path}'; give the path of a YAML file") from None
    except UnreadableError as error:
        raise ConfigError(f"cannot read the config file: {error}; give a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file '{path}': {error}") from None
    values, where = read_yaml(text, str(path))
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"expected KEY: VALUE lines, got {quoted(values)}", where=f"{path}:1")
    return values or {}, where


def read_text(path: Path) -> str:
    """Reads a configuration file up to the limit of its length.

    Raises:
      ConfigError: the file is longer than `MAX_CHARACTERS`.
      OSError, UnicodeDecodeError, UnreadableError: the file cannot be read.
    """
    with open_text(path) as file:
        text = file.read(MAX_CHARACTERS + 1)
    check_length(text, str(path))
    return text


def check_length(text: str, source: str) -> None:
    """Raises if a configuration's text is longer than `MAX_CHARACTERS`."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"the text has more than {MAX_CHARACTERS:,} characters, too many for a "
            "configuration; give the path "
            "of a configuration file",
            where=source,
        )


def read_yaml(text: str, source: str) -> tuple[Any, dict[Key, str]]:
    """Parses a YAML text, and finds the line of each key.

    The length, the nesting depth and the expansion of aliases are checked before any value is
    built, because nine lines of aliases can expand to more values than fit into memory.

    Args:
      text: the YAML text.
      source: name of the text in messages and line references, such as the path of its file.

    Returns:
      (value, or None for an empty text, {key path: "source:line"}).

    Raises:
      ConfigError: the text is not YAML, exceeds a limit, or repeats a key.
    """
    where: dict[Key, str] = {}
    check_length(text, source)
    try:
        _check_events(text, source, _Loader)
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, where
        _check_scalars(node, source)
        _record_lines(node, (), source, where)
        return loader.construct_document(node), where
    except yaml.YAMLError as error:
        _check_depth_before(error, text, source)
        mark = getattr(error, "problem_mark", None)
        line = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error)
        raise NotYaml(f"not valid YAML: {problem}", where=line) from None


def _check_depth_before(error: yaml.YAMLError, text: str, source: str) -> None:
    """Raises if values are nested too deeply before the place of a syntax error.

    libyaml looks ahead and, in some versions, has its own depth limit, so its error can be at a
    later place than the first value that is nested too deeply. The parser written in Python does
    not look ahead.
    """
    mark = getattr(error, "problem_mark", None)
    before = text[: mark.index] if mark else text
    with contextlib.suppress(yaml.YAMLError):
        _check_events(before, source, yaml.SafeLoader)


def _check_events(text: str, source: str, loader: type) -> None:
    """Raises if the stream of YAML events exceeds the limits of nesting depth or of alias
    expansion."""
    weights: dict[str, tuple[int, int]] = {}  # {anchor: (number of nodes, levels below)}
    opened: list[tuple[str | None, int, int]] = []  # (anchor, nodes before, levels below so far)
    total = 0
    for event in yaml.parse(text, Loader=loader):
        anchor, below, before = None, 0, total
        if isinstance(event, yaml.ScalarEvent):
            anchor, total = event.anchor, total + 1
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, total, 0))
            total += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before, below = opened.pop()
            below += 1
        elif isinstance(event, yaml.AliasEvent):
            if any(name == event.anchor for name, _, _ in opened):
                problem = (
                    f"the alias *{event.anchor} is inside the value that it refers to; write the "
                    "values out"
                )
                raise ConfigError(problem, where=f"{source}:{event.start_mark.line + 1}")
            # The parser does not refuse an alias without an anchor; composing the values does.
            nodes, below = weights.get(event.anchor, (1, 0))
            total += nodes
        if anchor is not None:
            weights[anchor] = total - before, below
        if opened and below >= opened[-1][2]:
            opened[-1] = (*opened[-1][:2], below)
        if len(opened) + below > MAX_DEPTH or total > MAX_NODES:
            problem = f"values are nested more than {MAX_DEPTH} levels deep; use fewer levels"
            if total > MAX_NODES:
                problem = (
                    f"more than {MAX_NODES:,} values (each alias *name counts with all values "
                    "of its "
                    "expansion); use fewer aliases"
                )
            raise ConfigError(problem, where=f"{source}:{event.start_mark.line + 1}")


def _check_scalars(root: yaml.Node, source: str) -> None:
    """Raises for tags that a configuration cannot have, such as !!set, and for single values that
    cannot be converted, such as !!int x."""
    waiting: list[Any] = [root]
    seen = set()
    trial = _Loader("")
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        where = f"{source}:{node.start_mark.line + 1}"
        kind = _KINDS.get(type(node))
        if node.tag != kind if kind else node.tag not in _TAGS:
            raise NotYaml(f"the tag {quoted(node.tag)} is not supported; leave it out", where=where)
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif node.tag not in (f"{_TAG}str", f"{_TAG}merge"):
            try:
                is_readable = node.tag != f"{_TAG}int" or len(node.value) <= MAX_DIGITS
                trial.construct_object(node)
            except yaml.YAMLError:
                raise
            except Exception:  # its type depends on the value's tag
                is_readable = False
            if not is_readable:
                raise NotYaml(
                    f"{quoted(node.value)} is not a valid {node.tag.rpartition(':')[2]}; put it in "
                    "quotes if it is text",
                    where=where,
                )


def _record_lines(node: yaml.Node | None, key: Key, source: str, where: dict[Key, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[Any, str] = {}  # of values, since 1 and 0x1 are one key
    for name, value in node.value:
        line = f"{source}:{name.start_mark.line + 1}"
        if not isinstance(name, yaml.ScalarNode):
            raise ConfigError("a key must be a name, not a list or a section", key, line)
        child, plain = (*key, name.value), name.value
        if name.tag not in (f"{_TAG}str", f"{_TAG}merge"):
            plain = _Loader("").construct_object(name)
        if plain in lines:  # PyYAML would silently keep the last one
            first = lines[plain].rpartition(":")[2]
            raise ConfigError(
                f"the key appears twice, first on line {first}; keep one", child, line
            )
        where[child] = lines[plain] = line
        _record_lines(value, child, source, where)


def parse_text(text: str) -> Any:
    """Parses a text from the command line as YAML; returns the text itself if it is not valid YAML.

    Raises:
      ConfigError: the text exceeds the limits of `read_yaml`.
    """
    text = str(text)
    try:
        return read_yaml(text, _COMMAND_LINE)[0] if text else ""
    except NotYaml:
        return text
    except ConfigError as error:
        raise ConfigError(error.message, error.key, _COMMAND_LINE) from None


# Types


def _convert(hint: object, value: object) -> Any:
    """Converts `value` to the type `hint`; raises ConfigError with the expected type if it
    cannot."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value)
    if hint in (str, object):
        return _convert_text(value) if hint is str else value
    if hint is type(None):
        _expect(is_null(value), "nothing (null)", value)
        return None
    is_typed = False
    if isinstance(value, CommandText):
        value, is_typed = parse_text(value), True
        if origin is tuple and args[0] is str and isinstance(value, str):
            value = [value]  # freeze=embed/.* is a list of one item
    if dataclasses.is_dataclass(hint):
        value = {} if is_null(value) else value
        return value if isinstance(value, hint) else from_dict(hint, value)  # type: ignore[arg-type]
    if origin is typing.Literal:
        return _convert_literal(args, value)
    if origin is tuple:
        return _convert_tuple(args, value)
    if hint is bool:
        if isinstance(value, YesNo):
            return value.lower() in ("yes", "on")
        _expect(isinstance(value, bool), "true or false", value)
        return value
    return _convert_number(hint, value, is_typed=is_typed)


def _expect(holds: bool, wanted: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"expected {wanted}, got {quoted(value)} ({type(value).__name__})")


def _convert_union(args: tuple[Any, ...], value: object) -> Any:
    if type(None) in args and is_null(value):
        return None
    first_error: ConfigError | None = None
    for arg in args:
        if arg is not type(None):
            try:
                return _convert(arg, value)
            except ConfigError as error:
                # An error inside of a mapping says more than that a mapping is not a word.
                if first_error is None or len(error.key) > len(first_error.key):
                    first_error = error
    assert first_error is not None
    raise first_error


def _convert_text(value: object) -> str:
    wanted = "text (put it in quotes)" if isinstance(value, (int, float)) else "text"
    _expect(isinstance(value, (str, os.PathLike)), wanted, value)
    return str(value)


def _convert_literal(args: tuple[Any, ...], value: object) -> Any:
    value = value.lower() if isinstance(value, YesNo) else value
    if isinstance(value, bool) and value not in args:  # roll=False means off
        word = "on" if value else "off"
        value = word if word in args else value
    for choice in args:
        if type(choice) is type(value) and choice == value:
            return choice
    match = difflib.get_close_matches(quoted(value).strip("'"), [str(a) for a in args], 1)
    hint = f"; did you mean {match[0]!r}?" if match else ""
    raise ConfigError(f"{quoted(value)} is not one of {', '.join(map(str, args))}{hint}")


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
    """Converts a mapping {first: second}, which is another way to write a list of pairs; the key
    `first` locates errors."""
    pairs = []
    for pair in value.items():
        try:
            pairs.append(_convert_tuple(args, pair))
        except ConfigError as error:
            raise ConfigError(error.message, (str(pair[0]), *error.key), error.where) from None
    return tuple(pairs)


def _convert_number(hint: Any, value: Any, *, is_typed: bool = False) -> Any:
    """Converts a number to its type. Text is refused, unless it was typed on a command line."""
    wanted = "an integer" if hint is int else "a number"
    number = value
    if isinstance(value, str) and len(value) <= MAX_DIGITS:
        number = _float_or_none(value)
        if re.fullmatch(r"[-+]?0[0-9_]+", value):  # octal in YAML 1.1, decimal in YAML 1.2
            raise ConfigError(f"{quoted(value)} begins with 0; use {number:.0f}")
        if number is not None and not is_typed:
            shown = int(number) if number.is_integer() and hint is int else number
            raise ConfigError(f"{quoted(value)} is a string; use {shown}")
    _expect(isinstance(number, numbers.Real) and not isinstance(number, bool), wanted, value)
    _expect(not isinstance(number, int) or abs(number) < 10**MAX_DIGITS, wanted, value)
    if hint is float:
        _expect(math.isfinite(number), "a finite number", value)
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
