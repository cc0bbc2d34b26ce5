"""Commands that must fail as bad input."""

import pytest

from zerojax.cli import main


def fails(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """Runs a command that must fail, as bad input unless told otherwise; returns its one line."""
    try:
        ended = main(words)
    except SystemExit as exit_:
        ended = exit_.code
    out, err = capsys.readouterr()
    assert ended == code
    assert out == ""
    assert err.startswith("zerojax: error: ")
    assert len(err.splitlines()) == 1
    return err
