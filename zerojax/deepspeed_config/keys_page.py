"""Formats the list of all ds_config keys as text or Markdown: default, verdict and reason."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from zerojax.deepspeed_config.key_schema import AbsentFeature, Key, Table
from zerojax.deepspeed_config.keys_table import TABLE
from zerojax.deepspeed_config.optimizer_keys import OPTIMIZERS
from zerojax.deepspeed_config.translation import VERDICTS
from zerojax.optim import DEEPSPEED_SCHEDULES

_WIDTH, _INDENT = 100, " " * 14
_HEAD = """\
# The keys of a ds_config

This page lists every key that DeepSpeed 0.19 reads, its default in DeepSpeed's code, and what
zerojax does with it. `zerojax deepspeed keys --markdown` prints this page.
`zerojax deepspeed explain FILE` prints the same for the keys and values of one file.

Other keys:

- Inside a section, an unknown key is refused, with the nearest known key.
- At the top level, an unknown key that looks like a misspelt one is refused in the same way.
- Any other unknown key at the top level, such as a comment, has no effect, and a warning is
  printed.

The verdicts:

{verdicts}

| key | default | verdict | meaning in zerojax |
|---|---|---|---|
"""


def entries() -> Iterator[tuple[str, Any, str, str]]:
    """Yields (key, default, verdict, reason) of every known key of a ds_config."""
    yield from _entries(TABLE, "")
    for name, table in OPTIMIZERS.items():
        yield from _entries(table, f"optimizer.params ({name}) ")
    for name in DEEPSPEED_SCHEDULES:
        why = "parameters of this schedule; the formula is DeepSpeed's"
        yield f"scheduler.params ({name})", None, "honoured", why


def _entries(table: Table, prefix: str) -> Iterator[tuple[str, Any, str, str]]:
    for name, entry in table.items():
        path = f"{prefix}{name}"
        if isinstance(entry, Key):
            refused = ""
            if entry.only is not None:
                taken = ", ".join(json.dumps(value) for value in entry.only)
                refused = f"; other values than {taken} are refused: {entry.otherwise}"
            yield path, entry.default, entry.verdict, f"{entry.why}{refused}"
        elif isinstance(entry, AbsentFeature):
            yield path, None, "refused", f"if it is on: {entry.why}"
        else:
            yield from _entries(entry, f"{path}.")


def keys_page(word: str | None = None) -> str:
    """Returns text with a paragraph for each ds_config key that mentions `word`; None: all keys."""
    blocks = []
    for key, default, verdict, why in entries():
        if word is not None and word.lower() not in f"{key} {why}".lower():
            continue
        head = f"{verdict:<10} {key}{_default(default)}"
        body = textwrap.wrap(why, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
        blocks.append("\n".join([head, *body]))
    return "\n".join(blocks) if blocks else f"no key of DeepSpeed mentions {word!r}"


def _default(default: object) -> str:
    return "" if default is None else f" (default {json.dumps(default)})"


def keys_markdown() -> str:
    """Returns the Markdown page docs/ds_config_keys.md, which lists all ds_config keys."""
    verdicts = "\n".join(f"- **{verdict}**: {meaning}" for verdict, meaning in VERDICTS.items())
    rows = [
        f"| `{key}` | {'' if default is None else f'`{json.dumps(default)}`'} | {verdict} | {why} |"
        for key, default, verdict, why in entries()
    ]
    return _HEAD.format(verdicts=verdicts) + "\n".join(rows) + "\n"
