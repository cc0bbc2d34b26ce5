"""What plans say, word for word, against the text in tests/golden/."""

import difflib

import pytest

from tests.golden import renew


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", renew.DEVICES)
@pytest.mark.parametrize("model", renew.MODELS)
def test_a_plan_says_what_it_said(model, devices):
    path = renew.FOLDER / renew.file_name(model, devices)
    expected = path.read_text(encoding="utf-8").splitlines()
    found = renew.file_text(model, devices).splitlines()
    changes = list(difflib.unified_diff(expected, found, path.name, "now", lineterm="", n=1))
    assert not changes, "\n".join(
        ["if this is meant: python -m tests.golden.renew, and commit the difference", *changes]
    )


def test_every_golden_file_is_compared():
    names = {renew.file_name(model, n) for model in renew.MODELS for n in renew.DEVICES}
    assert {path.name for path in renew.FOLDER.glob("*.txt")} == names
