"""Names and sizes of the arrays in pytrees; every module uses the same name for a parameter."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree

SEPARATOR = "/"
_ENDS_IN_NUMBER = re.compile(r"\d+$")


@dataclass(frozen=True)
class Unnamed:
    """Key in a JAX tree path that is not included in the name of a leaf.

    Attributes:
      place: description of the place in the tree, for messages.
    """

    place: str

    def __str__(self) -> str:
        return f".{self.place}"


def path_name(path: Sequence[Any]) -> str:
    """Returns the name of one leaf: its path parts joined by "/", without `Unnamed` parts.

    Args:
      path: keys of a JAX tree path (`DictKey`, `GetAttrKey`, ...) or plain strings and integers.

    Returns:
      For example `"blocks/attention/query/kernel"`.
    """
    parts = []
    for part in path:
        if isinstance(part, Unnamed):
            continue
        for attribute in ("key", "name", "idx"):
            if hasattr(part, attribute):
                part = getattr(part, attribute)
                break
        parts.append(str(part))
    return SEPARATOR.join(parts)


def layer_of(name: str) -> str | None:
    """Returns the part of a parameter's name that identifies its layer; None if it has no number.

    The part ends with the first path component that is a number ("encoder/layers/3/attn/q" is in
    "encoder/layers/3"). If there is none, it ends with the first component that ends in a number
    ("h_3/mlp/up" is in "h_3").
    """
    words = name.split(SEPARATOR)
    alone = (at for at, word in enumerate(words) if word.isdecimal())
    ending = (at for at, word in enumerate(words) if _ENDS_IN_NUMBER.search(word))
    at = next(alone, None)
    at = next(ending, None) if at is None else at
    return None if at is None else SEPARATOR.join(words[: at + 1])


def flatten_names(tree: Tree) -> dict[str, Any]:
    """Returns `{name: leaf}` of a pytree, in the order of its leaves.

    Raises:
      ValueError: two leaves have the same name (a key that itself contains "/").
    """
    if _is_plain(tree):
        return {name: tree[name] for name in sorted(tree)}
    flat: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = path_name(path)
        if name in flat:
            raise ValueError(
                f"two leaves are named {name!r}: a key of the tree contains {SEPARATOR!r}; "
                "rename this key"
            )
        flat[name] = leaf
    return flat


def _is_plain(tree: Tree) -> bool:
    """Returns True for a dict of leaves with texts as keys, whose names are its keys. The batches
    of most models are so, and are flattened at every step."""
    # JAX sorts the keys of a dict, but not those of an `OrderedDict`.
    is_dict = type(tree) is dict and all(type(key) is str for key in tree)
    return is_dict and jax.tree_util.all_leaves(tree.values())


def names_like(template: Tree) -> Tree:
    """Returns a tree of `template`'s structure with the name of each leaf in its place."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path), template)


def unflatten_like(template: Tree, flat: Mapping[str, Any]) -> Tree:
    """Builds a pytree of `template`'s structure from `{name: leaf}`, the inverse of
    `flatten_names`.
    """
    if _is_plain(template):
        return {name: flat[name] for name in sorted(template)}
    paths, treedef = jax.tree_util.tree_flatten_with_path(template)
    return jax.tree_util.tree_unflatten(treedef, [flat[path_name(path)] for path, _ in paths])


def num_elements(shape: Sequence[int]) -> int:
    """Returns the number of elements of an array of this shape (1 for a scalar)."""
    return math.prod(shape)


def num_bytes(tree: Tree) -> int:
    """Returns the bytes of all leaves of a tree of arrays or `ShapeDtypeStruct`s, unsharded."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def match_names(names: Iterable[str], patterns: Sequence[str], *, option: str) -> frozenset[str]:
    """Returns the names that match any of the regular expressions (`re.search`).

    Args:
      names: names of all parameters.
      patterns: regular expressions.
      option: name of the option that contains the patterns, for error messages.

    Raises:
      ValueError: a pattern is not a regular expression, or matches no name at all.
    """
    names = tuple(names)
    matched: set[str] = set()
    for pattern in patterns:
        try:
            matches = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise ValueError(
                f"{option}: {pattern!r} is not a regular expression: {error}"
            ) from None
        if not matches:
            near = difflib.get_close_matches(pattern, names, 4, 0.5) or names[:4]
            sample = ", ".join(near)
            raise ValueError(
                f"{option}: {pattern!r} matches none of the {len(names)} parameters"
                f" (such as {sample}); the names are listed by plan.table()"
            )
        matched |= matches
    return frozenset(matched)


def format_bytes(count: float) -> str:
    """Formats bytes in binary units: `format_bytes(1536) == "1.5 KiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_count(count: float) -> str:
    """Formats a count in decimal units: `format_count(3_487_232) == "3.49M"`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.2f}{unit}"
    return f"{count:.0f}"
