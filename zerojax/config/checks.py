"""Checks of option values and of keyword names; each error states the value and the limit that it
breaks.

The error for a misspelled keyword suggests the nearest valid name. Warnings are reported at a line
of the user's code instead of a line of this package.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import re
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from zerojax.config.display import quoted
from zerojax.config.loader import ConfigError, user_path

F = TypeVar("F", bound=Callable[..., Any])
MAX_SIZE = 2**31 - 1
"""Limit of a dimension, a batch or a run's steps: devices index and count with 32 bits."""
MAX_LAYERS = 10_000
MAX_CPU_DEVICES = 1024
"""Largest number of virtual CPU devices: JAX starts this many in two seconds, and needs ten times
as long for 4,096."""
_MAX_NAME = 100
_NOT_THE_USERS = ("zerojax", "jax", "flax", "contextlib", "functools")
"""Packages whose frames are skipped in the search for the user's line that led to a warning."""


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning whose reported location is the line of the user's code that led to it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _module_of(frame) in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def _module_of(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def refuse(name: str, value: object, reason: str) -> None:
    """Raises a ConfigError for the field `name`; its message is the value followed by `reason`."""
    raise ConfigError(f"{quoted(value)} {reason}", (name,))


def check_whole_number(name: str, value: object, limit: int, most: int | None = None) -> None:
    """Raises if the argument `value` is not an integer from `limit` to `most`. None is accepted."""
    if value is None:
        return
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        kind = type(value).__name__
        raise TypeError(
            f"{name}={quoted(value)} is a {kind}; give a whole number of at least {limit}"
        )
    if value < limit:
        raise ValueError(f"{name}={value} is below {limit}; give at least {limit}")
    if most is not None and int(value) > most:
        raise ValueError(f"{name}={quoted(value)} is above {most}; give at most {most}")


def check_folder(name: str, value: str | None) -> None:
    """Raises if `value` is a URL, because only folders of a file system can be used. None is
    accepted."""
    if value is not None and "://" in value:
        refuse(
            name,
            value,
            "is a URL; only folders of a mounted file system work: mount the bucket, or copy the "
            "finished run to it",
        )


def expand_folders(config: object, *names: str) -> None:
    """Replaces a leading `~` by the home folder in the fields `names` of a frozen dataclass; None
    stays None."""
    for name in names:
        value = getattr(config, name)
        if value is not None:
            path = user_path(value)
            object.__setattr__(config, name, str(path) if value.startswith("~") else value)


def as_patterns(name: str, value: Any) -> tuple[str, ...]:
    """Converts one or several regular expressions to a tuple.

    Raises:
      TypeError: an item that is not text.
    """
    patterns = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else value
    patterns = tuple(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{name}={quoted(value)}: {quoted(pattern)} is not text; use a regular expression "
                "in quotes, or a list of them"
            )
    return patterns


def check_kind(name: str, value: Any, kinds: Any, wanted: str) -> None:
    """Raises if the argument `value` has none of the types in `kinds`. None is accepted."""
    if value is not None and not isinstance(value, kinds):
        raise TypeError(f"{name} is a {type(value).__name__}; give {wanted}")


def check_at_least(config: object, limit: int, *names: str) -> None:
    """Raises if a field named in `names` is below `limit`. A field that is None is accepted."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= limit:
            refuse(name, value, f"must be >= {limit}")


def check_size(config: object, *names: str, least: int = 1, most: int = MAX_SIZE) -> None:
    """Raises if a field named in `names` is below `least` or above `most`. None is accepted."""
    check_at_least(config, least, *names)
    for name in names:
        value = getattr(config, name)
        if value is not None and value > most:
            refuse(name, value, f"is above {most}, the largest allowed value; use a smaller number")


def check_positive(config: object, *names: str) -> None:
    """Raises if a field named in `names` is 0 or below. A field that is None is accepted."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            refuse(name, value, "must be above 0")


def check_finite(config: Any) -> None:
    """Raises if a field of a dataclass is an infinite number or NaN, because run files cannot store
    these values."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            refuse(field.name, value, "is infinite or NaN; use a finite number")


def check_fraction(config: object, *names: str, below_one: bool = False) -> None:
    """Raises if a field named in `names` is outside of [0, 1], or of [0, 1) with `below_one`. None
    is accepted."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (0 <= value < 1 or (value == 1 and not below_one)):
            refuse(name, value, "must be in [0, 1)" if below_one else "must be in [0, 1]")


def check_regex(name: str, pattern: str) -> None:
    """Raises if `pattern` is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        refuse(name, pattern, f"is not a regular expression: {error}")


def names_keywords(
    *, also: Collection[str] = (), elsewhere: Mapping[str, str] | None = None
) -> Callable[[F], F]:
    """Returns a decorator that makes errors about unknown keywords suggest the nearest valid
    keyword.

    The decorated function or class keeps its signature for `inspect` and type checkers. A class
    stays the same object; only its `__init__` is replaced.

    Args:
      also: valid keywords that the signature does not name, because they are part of `**options`.
      elsewhere: {keyword: what to write instead}, for keywords that a user may expect here but that
        another function or section has.
    """

    def decorate(target: F) -> F:
        if isinstance(target, type):
            checked = _checked(target.__init__, target.__name__, also, elsewhere or {})
            type.__setattr__(target, "__init__", checked)
            return target
        return _checked(target, target.__name__, also, elsewhere or {})

    return decorate


def _checked(
    function: Callable[..., Any],
    name: str,
    also: Collection[str],
    elsewhere: Mapping[str, str],
) -> Any:
    parameters = inspect.signature(function).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [p.name for p in parameters if p.kind in by_name and p.name != "self"]
    known += also
    accepted = frozenset(known)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        for keyword in kwargs:
            if keyword not in accepted:
                raise TypeError(unknown_keyword(name, keyword, known, elsewhere))
        return function(*args, **kwargs)

    return call


def unknown_keyword(
    name: str,
    keyword: str,
    known: Collection[str],
    elsewhere: Mapping[str, str] = types.MappingProxyType({}),
) -> str:
    """Returns the error message for a keyword that a function does not have.

    Args:
      name: name of the function.
      keyword: the unknown keyword.
      known: valid keywords of the function.
      elsewhere: {keyword: what to write instead}, for keywords that another function or section
        has.
    """
    keyword = keyword[:_MAX_NAME]
    if keyword in elsewhere:
        hint = elsewhere[keyword]
    elif near := difflib.get_close_matches(keyword, known, 1, 0.6):
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"it has {', '.join(known)}"
    return f"{name} has no keyword {keyword!r}; {hint}"
