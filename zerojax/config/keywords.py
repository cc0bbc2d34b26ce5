"""Errors for misspelt keywords, with the nearest valid name."""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_MAX_NAME = 100


def names_keywords(
    *, also: Collection[str] = (), elsewhere: Mapping[str, str] | None = None
) -> Callable[[F], F]:
    """A decorator under which an unknown keyword is answered with the nearest known one.

    The function or class keeps its signature, for `inspect` and for type checkers; a class is
    returned as it is, with another `__init__`. A call has one frame more, which a `stacklevel`
    inside has to count.

    Args:
      also: keywords that stand in the place of `**options`.
      elsewhere: {keyword: what to write instead} of keywords that belong to another place.
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
    def call(*args: Any, **kwargs: Any) -> Any:
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
    """The sentence for a keyword that a function does not have.

    Args:
      name: of the function.
      known: its keywords.
      elsewhere: see `names_keywords`.
    """
    keyword = keyword[:_MAX_NAME]
    if keyword in elsewhere:
        hint = elsewhere[keyword]
    elif near := difflib.get_close_matches(keyword, known, 1, 0.6):
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"it has {', '.join(known)}"
    return f"{name} has no keyword {keyword!r}; {hint}"
