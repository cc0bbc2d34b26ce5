"""Finds the specification of a GPU by its name, by the device kind that the driver reports, or in a
file."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from zerojax.config.loader import read_text, read_yaml, user_path
from zerojax.config.regular_files import UnreadableError
from zerojax.hardware.gpus.card import MEASURED, CardError, Gpu, build_card, split_notes


def gpu_names() -> list[str]:
    """Returns the names of all GPU cards of this package, sorted."""
    return sorted(_cards())


def find_gpu(name_or_file: str, changes: Mapping[str, Any] | None = None) -> Gpu:
    """Finds the specification (card) of a GPU by name, device kind or file.

    Args:
      name_or_file: one of three texts: a card's name or alias ("h200"; case, spaces and underscores
        do not matter), a device kind as the driver reports it ("NVIDIA H100 80GB HBM3"), or the
        path of a YAML file in the format of this package's cards, which may begin with `base: NAME`
        to start from a known card.
      changes: {key of a card: value} that replaces the card's own, such as {"node_devices": 2}.

    Raises:
      ValueError: there is no such card or file, `changes` has a mistake, or the file has one, whose
        line the message states.
    """
    text = str(name_or_file).strip()
    named = named_gpu(text) or gpu_of_device(text)
    if named:
        return _changed(_with_base(_own_values()[named.name]), changes) if changes else named
    if user_path(text).suffix in (".yaml", ".yml") or user_path(text).is_file():
        return _read_card(text, changes or {})
    names = gpu_names()
    nearest = difflib.get_close_matches(_spelled(text), [*_aliases()], 1)
    hint = f"did you mean '{nearest[0]}'? " if nearest else ""
    raise ValueError(
        f"gpu={text!r} is not a known card; {hint}The cards are {', '.join(names)}. For another "
        "GPU give the path of a YAML file; it can be as short as `name: mine`, `base: h100` and "
        "the lines that differ, such as `memory_bytes: 85899345920`."
    )


def gpu_of_device(device_kind: str) -> Gpu | None:
    """Finds the card for a device kind such as "NVIDIA H100 80GB HBM3"; returns None if there is
    none.

    There is no card for a slice of a GPU (MIG), which has neither the memory nor the speed of the
    whole GPU.
    """
    kind = device_kind.upper()
    if re.search(r"\bMIG\b", kind):
        return None
    cards = _cards().values()
    return next((gpu for gpu in cards if any(re.search(p, kind) for p in gpu.device_kinds)), None)


def _spelled(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


def named_gpu(name: str) -> Gpu | None:
    """Returns the card of which `name` is the name or an alias (case, spaces and underscores do not
    matter); None if there is none."""
    found = _aliases().get(_spelled(name))
    return _cards()[found] if found else None


@functools.cache
def _aliases() -> dict[str, str]:
    return {
        _spelled(spelling): name
        for name, values in _own_values().items()
        for spelling in (name, *values.get("aliases", ()))
    }


@functools.cache
def _cards() -> Mapping[str, Gpu]:
    return {name: build_card(_with_base(values)) for name, values in _own_values().items()}


@functools.cache
def _own_values() -> Mapping[str, dict[str, Any]]:
    """Reads the files of this package's cards; returns {card name: keys and values of its file}."""
    folder = resources.files("zerojax.hardware.gpus").joinpath("cards")
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".yaml"))
    loaded = [_load(folder.joinpath(name).read_text("utf-8"), name)[0] for name in files]
    return {values["name"]: values for values in loaded}


def _changed(
    values: Mapping[str, Any], changes: Mapping[str, Any], stated: Iterable[str] = ()
) -> Gpu:
    """Builds a card with other values of some keys. What was measured at the former value of such a
    key is left out.

    Args:
      stated: other keys that the user stated.
    """
    kept, replaced = {**values, **changes}, {*changes}
    if isinstance(kept.get("measured"), Mapping) and "measured" not in changes:
        kept["measured"] = {
            key: rate
            for key, rate in kept["measured"].items()
            if key not in MEASURED or not replaced.intersection(MEASURED[key].published)
        }
        if not kept["measured"]:
            del kept["measured"]
            replaced.add("measured")
    sources = split_notes(kept.get("sources", {}))
    assumptions = split_notes(kept.get("assumptions", {}))
    kept["sources"] = {key: text for key, text in sources.items() if key not in replaced}
    kept["assumptions"] = {
        **{key: text for key, text in assumptions.items() if key not in replaced},
        **dict.fromkeys(changes.keys() - {"sources", "assumptions"}, "as given"),
    }
    return build_card(kept, {*changes, *stated})


def _read_card(path: str, changes: Mapping[str, Any]) -> Gpu:
    try:
        text = read_text(user_path(path))
    except (OSError, UnicodeDecodeError, UnreadableError) as error:
        raise ValueError(
            f"cannot read the GPU card {path!r}: {error}; give the path of a YAML file or one of "
            f"{', '.join(gpu_names())}"
        ) from None
    values, where = _load(text, path)
    try:
        whole = _with_base(values)
        return _changed(whole, changes, values) if changes else build_card(whole, values)
    except CardError as error:
        keys = [error.key[:length] for length in range(len(error.key), 0, -1)]
        place = next((where[key] for key in keys if key in where), path)
        if error.key and error.key[0] in changes:  # the file is right
            raise
        raise ValueError(f"{error} ({place})") from None


def _load(text: str, path: str) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """Reads a card's YAML text; returns its keys and values, and the file and line of each key."""
    values, where = read_yaml(text, path)
    if not isinstance(values, dict):
        raise ValueError(f"a GPU card has KEY: VALUE lines; got {values!r:.60} ({path}:1)")
    return values, where


def _with_base(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a card merged over the values of its `base` card, except the base's
    name, title, aliases, device kinds and measured rates. Keeps the base's notes on values that the
    card does not change."""
    own = {key: value for key, value in values.items() if key != "base"}
    if "base" not in values:
        return own
    known = _own_values()
    base = known.get(_aliases().get(_spelled(str(values["base"])), ""))
    if base is None:
        nearest = difflib.get_close_matches(_spelled(str(values["base"])), known, 1)
        hint = f"did you mean '{nearest[0]}'? " if nearest else ""
        message = f"{values['base']!r} is not a known card; {hint}The cards are {', '.join(known)}"
        raise CardError(message, "base")
    inherited = _with_base(base)
    for key in ("name", "title", "aliases", "device_kinds", "measured"):  # of that card alone
        inherited.pop(key, None)
    merged = {**inherited, **own}
    if "compiler" in inherited and isinstance(own.get("compiler", {}), dict):
        section = dict(inherited["compiler"])
        # The base's number for the compiler would otherwise have priority over the card's own
        # memory.
        if "memory_bytes" in own:
            section.pop("memory_bytes", None)
        merged["compiler"] = {**section, **own.get("compiler", {})}
    explained = {"measured", *own, *_keys_of(own.get("sources")), *_keys_of(own.get("assumptions"))}
    for notes in ("sources", "assumptions"):
        kept = split_notes(inherited.get(notes, {}))
        kept = {key: text for key, text in kept.items() if key not in explained}
        merged[notes] = {**kept, **split_notes(own.get(notes) or {})}
    return merged


def _keys_of(notes: object) -> set[str]:
    return {*split_notes(notes or {})}
