"""Replaces passwords, keys and tokens in texts for logs and reports by `HIDDEN`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, TypeVar

HIDDEN = "[hidden]"
LEAST_LENGTH = 8
"""Minimum length of a variable's value that is hidden as a secret; hiding shorter values would only
damage texts."""

T = TypeVar("T")

_NOT_SECRET = ("PWD",)
"""Variables that hold no secret although their names match: the working folder, even if the folder
was renamed or removed."""
_SECRET_NAME = re.compile(
    r"(?i)(^|[_\-.])(api_?key|access_?key|secret_?key|private_?key|auth_?key|key_?id|secrets?|token"
    r"|auth_?token|passwords?|passwd|pwd|passphrase|credentials?|authorization|bearer|signature)$"
)
"""Pattern for names of settings and variables that hold secrets. It does not match `tokenizer`,
`tokens_per_step`, `max_seq_len` or a `key` of a mapping."""

_KNOWN_FORMS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w\-]{20,}"
    r"|sk-[A-Za-z0-9_\-]{20,}|xox[abprs]-[\w\-]{10,}|A[KS]IA[A-Z0-9]{16}|AIza[\w\-]{35}"
    r"|eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]{5,}|wandb_v1_\w{20,})"
)
"""Pattern for secrets of Hugging Face, GitHub, GitLab, OpenAI and similar services, Slack, AWS,
Google, JSON web tokens and Weights & Biases."""

_IN_ADDRESS = re.compile(r"(?P<start>\b[A-Za-z][\w+.\-]*://)(?P<who>[^\s/?#@]+)@")
_IN_QUERY = re.compile(
    r"(?i)(?P<name>[?&;](?:[\w.\-]*(?:token|key|secret|password|passwd|signature|credential)[\w.\-]*"
    r"|sig|sv|se))=(?P<value>[^&\s;\"'#]+)"
)
_ASSIGNED = re.compile(
    r"(?i)(?P<name>\b[\w.\-]*(?:api_?key|access_?key|secret|token|password|passwd|credentials?))"
    r"(?P<between>\s*[=:]\s*)(?P<value>[^\s,;&\"']+)"
)


def redact(value: T, environment: Mapping[str, str] | None = None) -> T:
    """Replaces secrets in a value by `HIDDEN`.

    Use it for texts that people read. Values that a program reads back must be written without
    redaction. Texts that name an existing file or folder are never changed.

    Args:
      value: text, or a JSON value of any depth.
      environment: environment variables. The values of variables with secret names are replaced in
        all texts; a variable with the path of a file or folder holds no secret. None: the variables
        of this process.
    """
    values = _secret_values(os.environ if environment is None else environment)
    return _redact(value, values)


def is_secret_name(name: str) -> bool:
    """Returns True if a setting or variable with this name holds a password, key or token."""
    return _SECRET_NAME.search(name) is not None


def _secret_values(environment: Mapping[str, str]) -> list[str]:
    """Returns the secrets in environment variables, longest first, so that a secret that contains
    another one is replaced as a whole."""
    found = {
        value
        for name, value in environment.items()
        if is_secret_name(name) and name not in _NOT_SECRET and len(value) >= LEAST_LENGTH
    }
    return sorted((value for value in found if not _is_path(value)), key=len, reverse=True)


def _is_path(text: str) -> bool:
    """Returns True if a text is the path of an existing file or folder."""
    try:
        return os.path.exists(os.path.expanduser(text))
    except (OSError, ValueError):  # the text is too long, or has a null character
        return False


def _redact(value: object, secrets: list[str]) -> Any:
    if isinstance(value, str):
        return value if _is_path(value) else _redact_text(value, secrets)
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if _holds_secret(name, inner) else _redact(inner, secrets)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)([_redact(inner, secrets) for inner in value])
    return value


def _holds_secret(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, str) and is_secret_name(name)


def _redact_text(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    text = _IN_ADDRESS.sub(rf"\g<start>{HIDDEN}@", text)
    text = _IN_QUERY.sub(rf"\g<name>={HIDDEN}", text)
    text = _ASSIGNED.sub(_hide_assigned, text)
    return _KNOWN_FORMS.sub(HIDDEN, text)


def _hide_assigned(match: re.Match[str]) -> str:
    """Replaces the value in a match of `password=...`. Does not change `token: 5`, nor a sentence
    about a token."""
    value = match["value"]
    if len(value) < LEAST_LENGTH or value.startswith(HIDDEN):
        return match[0]
    return f"{match['name']}{match['between']}{HIDDEN}"
