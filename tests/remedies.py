"""What is said where something is refused, in calls and in commands."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from zerojax.cli import main

REFUSALS = (ValueError, TypeError, OSError, RuntimeError, ImportError)


def told(given: Callable[[], object], pattern: str) -> tuple[str, ...]:
    """What a pattern finds in the sentence with which something is refused."""
    with pytest.raises(REFUSALS) as caught:
        given()
    found = re.search(pattern, str(caught.value))
    assert found, str(caught.value)
    return found.groups()


def complained(capsys: pytest.CaptureFixture[str], pattern: str, *words: str) -> tuple[str, ...]:
    """What a pattern finds in the complaint of a command."""
    assert main(words) != 0
    sentence = capsys.readouterr().err
    found = re.search(pattern, sentence)
    assert found, sentence
    return found.groups()
