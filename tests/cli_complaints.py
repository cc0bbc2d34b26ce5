"""Commands that must fail as bad input."""

from __future__ import annotations

import pytest

from zerojax.cli import main


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Runs a command that must fail as bad input; returns its one line of complaint."""
    try:
        code = main(words)
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("zerojax: error: ")
    assert len(err.splitlines()) == 1
    return err
