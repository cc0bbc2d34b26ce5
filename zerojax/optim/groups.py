"""Groups of parameters, chosen by name, with their own weight decay and learning rate."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.config import ParameterGroup
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import from_dict
from zerojax.config.tree_types import Tree
from zerojax.tracing import trees

Groups = tuple[tuple[str, ParameterGroup], ...]

_VECTOR_NAMES = (
    *("bias", "scale", "sinks"),
    *("gate_bias", "up_bias", "down_bias", "logit_bias"),  # of experts and routers
)


def is_matrix(name: str, ndim: int) -> bool:
    """Returns whether weight decay applies to a parameter: it has two or more dimensions, and its
    name is not that of a bias, a scale or attention sinks.

    The name is needed because biases of stacked layers have two dimensions as well.
    """
    return ndim >= 2 and name.rsplit(trees.SEPARATOR, 1)[-1] not in _VECTOR_NAMES


def decay_mask(params: Tree) -> Tree:
    """Returns a tree of booleans: True where weight decay applies (see `is_matrix`)."""
    flat = {name: is_matrix(name, jnp.ndim(x)) for name, x in trees.flatten_names(params).items()}
    return trees.unflatten_like(params, flat)


class LeafSettings(NamedTuple):
    """Settings of one parameter.

    Attributes:
      learning_rate_factor: factor of the optimizer's learning rate.
      weight_decay: weight decay; 0 for parameters that the mask excludes.
    """

    learning_rate_factor: float
    weight_decay: jax.Array | float


@dataclass(frozen=True, kw_only=True)
class Decay:
    """Rules that give each parameter its weight decay and learning rate.

    Attributes:
      weight_decay: weight decay of parameters whose group sets no other value.
      mask: mask of decaying parameters, as in optax: a tree of booleans, a prefix of such a tree, a
        function from the parameters to either, or None for all. It applies within groups as well.
      groups: pairs (regular expression on names, settings); a parameter belongs to the first that
        matches.
      stacks: {stack of layers: names of its rows}; mask and groups see each row as a separate
        parameter, and all rows of a stack get the same settings.
    """

    weight_decay: jax.Array | float
    mask: Tree
    groups: Groups
    stacks: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def stored_mask(self) -> Any:
        """Weight-decay mask for the stored parameters, in which layers are stacked in one array."""
        if not self.stacks or self.mask is None:
            return self.mask
        return lambda params: _of_stored(params, self._decaying(self._as_rows(params)), self.stacks)

    def settings(self, params: Tree) -> dict[str, LeafSettings]:
        """Returns {name: `LeafSettings`} for a tree of parameters, arrays or structs.

        Raises:
          ValueError: the mask does not fit the parameters, or a group changes no parameter.
        """
        if not jax.tree.leaves(params):  # optax calls this on a state without parameters
            return {}
        if not self.stacks or not isinstance(params, Mapping):
            return self._settings(params)
        return _of_stored(params, self._settings(self._as_rows(params)), self.stacks)

    def _as_rows(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns structs of parameters in which the rows of each stack are separate parameters."""
        rows: dict[str, Any] = {}
        for name, x in params.items():
            shape = x.shape[1:] if name in self.stacks else x.shape
            struct = jax.ShapeDtypeStruct(shape, x.dtype)
            rows |= dict.fromkeys(self.stacks.get(name, (name,)), struct)
        return rows

    def _settings(self, params: Tree) -> dict[str, LeafSettings]:
        decays = self._decaying(params)
        pattern_of = assign_groups(decays, [pattern for pattern, _ in self.groups])
        for pattern, group in self.groups:
            members = [name for name in pattern_of if pattern_of[name] == pattern]
            if group.weight_decay and not any(decays[name] for name in members):
                raise ValueError(
                    f"groups: {pattern!r} sets weight_decay={group.weight_decay:g}, but the mask "
                    f"excludes all of its {len(members)} parameters (such as {members[0]!r}) from "
                    "decay; pass another mask, or mask=None to let all parameters decay"
                )
        groups: dict[str | None, ParameterGroup] = {None: ParameterGroup(), **dict(self.groups)}

        def settings_of(name: str) -> LeafSettings:
            group = groups[pattern_of.get(name)]
            own = self.weight_decay if group.weight_decay is None else group.weight_decay
            return LeafSettings(group.learning_rate_factor, own if decays[name] else 0.0)

        return {name: settings_of(name) for name in decays}

    def _decaying(self, params: Tree) -> dict[str, bool]:
        """Broadcasts the mask to all parameters: {name: whether it decays}."""
        if self.mask is None:
            return dict.fromkeys(trees.flatten_names(params), True)
        mask = self.mask(params) if callable(self.mask) else self.mask
        spread = lambda decays, part: jax.tree.map(lambda _: bool(decays), part)  # noqa: E731
        try:
            return trees.flatten_names(jax.tree.map(spread, mask, params))
        except (ValueError, KeyError):
            wanted, given = [*trees.flatten_names(params)], [*trees.flatten_names(mask)]
            raise ValueError(
                f"mask: its entries ({', '.join(given[:4])}) match neither the parameter names "
                f"({', '.join(wanted[:4])}) nor a prefix of their tree; pass a function of the "
                "parameters, such as zerojax.optim.decay_mask, or None to let all parameters decay"
            ) from None


def _of_stored(
    params: Mapping[str, Any], of_rows: Mapping[str, Any], stacks: Mapping[str, tuple[str, ...]]
) -> dict[str, Any]:
    """Converts {name of a row: value} to {stored name: value}, sorted by name; a stack takes the
    value of its first row.
    """
    # JAX flattens dicts in sorted order, and `fused._spread` relies on the order of the leaves.
    return {name: of_rows[stacks.get(name, (name,))[0]] for name in sorted(params)}


def as_groups(groups: Mapping[str, Any] | Iterable[tuple[str, Any]] | None) -> Groups:
    """Builds groups from {regular expression: {"learning_rate_factor": 0.1, "weight_decay": 0.0}}.

    Raises:
      ValueError: a setting is unknown (the message names the nearest one), a value is wrong, or a
        pattern is not a regular expression.
    """
    pairs: Any = groups.items() if isinstance(groups, Mapping) else groups or ()
    checked = []
    for pattern, group in pairs:
        try:
            re.compile(pattern)
            own = group if isinstance(group, ParameterGroup) else from_dict(ParameterGroup, group)
        except re.error as error:
            raise ValueError(f"groups: {pattern!r} is not a regular expression: {error}") from None
        except ValueError as error:
            raise ValueError(f"groups: {pattern!r}: {error}") from None
        checked.append((pattern, own))
    return tuple(checked)


def assign_groups(names: Iterable[str], patterns: Iterable[str]) -> dict[str, str]:
    """Returns {name: first pattern that `re.search` finds in it}, without unmatched names.

    Raises:
      ValueError: a pattern matches no name, or only names that an earlier pattern matches.
    """
    names = tuple(names)
    pattern_of: dict[str, str] = {}
    for pattern in patterns:
        matched = [name for name in names if re.search(pattern, name)]
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise ValueError(
                f"groups: {pattern!r} matches none of the {len(names)} trained parameters; similar "
                f"names are {', '.join(near)}; correct the pattern or remove it"
            )
        left = [name for name in matched if name not in pattern_of]
        if not left:
            raise ValueError(
                f"groups: the {len(matched)} parameters that {pattern!r} matches already belong "
                "to earlier "
                f"groups ({matched[0]!r} to {pattern_of[matched[0]]!r}); put this group first"
            )
        pattern_of |= dict.fromkeys(left, pattern)
    return pattern_of
