"""Finds chat templates in the folder of a tokenizer, and the special tokens that they use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.config.regular_files import UnreadableError, decode_text
from zerojax.data.tokenizer import SETTINGS_FILE, TEMPLATE_FILE, read_object

NAMED_TEMPLATES = "additional_chat_templates"
_DEFAULT = "default"
_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FoundTemplate:
    """Chat template with the variables that it uses.

    Attributes:
      source: Jinja source of the template.
      name: origin of the template, for messages.
      variables: special tokens that the template uses, such as `bos_token`.
    """

    source: str
    name: str
    variables: Mapping[str, str]

    @property
    def sha256(self) -> str:
        """sha256 of the source, hex."""
        return hashlib.sha256(self.source.encode("utf-8")).hexdigest()


def find_template(folder: Path | None, wanted: str | Path | None) -> FoundTemplate | None:
    """Finds the chat template that a user requested, or the default one; None if there is none.

    Args:
      folder: folder of the tokenizer's files; None if it has none.
      wanted: a file, or the name of one of the folder's templates; None requests the default one.

    Raises:
      ValueError: the folder has no template of this name, a template exceeds 1 MiB or is not UTF-8,
        or the tokenizer's settings are not a JSON object.
    """
    variables = {} if folder is None else special_variables(folder)
    path = None if wanted is None else user_path(wanted)
    if path is not None and path.is_file():
        return FoundTemplate(source=_read(path), name=str(path), variables=variables)
    known = {} if folder is None else _templates_of(folder)
    name = _DEFAULT if wanted is None else str(wanted)
    if name in known:
        return FoundTemplate(source=known[name], name=f"{name} of {folder}", variables=variables)
    if wanted is None:
        return None
    raise ValueError(
        f"template={str(wanted)!r} is neither a file nor a template of "
        f"{'the tokenizer' if folder is None else str(folder)} ({', '.join(known) or 'none'}); "
        "pass a file of Jinja, or one of these names"
    )


def special_variables(folder: Path) -> dict[str, str]:
    """Reads the special tokens that templates use, `{"bos_token": "<s>", ...}`, from
    tokenizer_config.json, else from special_tokens_map.json."""
    found: dict[str, str] = {}
    for file in (folder / SETTINGS_FILE, folder / "special_tokens_map.json"):
        about = read_object(file, "a tokenizer's settings") if file.is_file() else {}
        for name in _TOKENS:
            token: Any = about.get(f"{name}_token")
            token = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(token, str):
                found.setdefault(f"{name}_token", token)
    return found


def _templates_of(folder: Path) -> dict[str, str]:
    """Returns {name: source} of the chat templates in a folder. Template files take precedence over
    tokenizer_config.json, as in transformers."""
    settings = folder / SETTINGS_FILE
    about = read_object(settings, "a tokenizer's settings") if settings.is_file() else {}
    value = about.get("chat_template")
    found = {_DEFAULT: value} if isinstance(value, str) else {}
    for item in value if isinstance(value, list) else ():
        named = isinstance(item, Mapping) and isinstance(item.get("name"), str)
        if named and isinstance(item.get("template"), str):
            found[item["name"]] = item["template"]
    for file in sorted((folder / NAMED_TEMPLATES).glob("*.jinja")):
        found[file.stem] = _read(file)
    if (folder / TEMPLATE_FILE).is_file():
        found[_DEFAULT] = _read(folder / TEMPLATE_FILE)
    return found


def _read(file: Path) -> str:
    if file.stat().st_size > _MAX_BYTES:
        raise ValueError(
            f"{str(file)!r} has {file.stat().st_size} bytes, but a template may have at most "
            f"{_MAX_BYTES}; pass another with --template FILE"
        )
    try:
        return decode_text(file.read_bytes(), file)
    except UnreadableError as error:
        raise ValueError(f"{error}; or pass another template with --template FILE") from error
