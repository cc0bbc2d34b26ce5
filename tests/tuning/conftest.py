"""Choices that a test keeps in a folder of its own."""

from pathlib import Path

import pytest

from zerojax.training.tuning import KeptChoices


@pytest.fixture
def kept(tmp_path: Path) -> KeptChoices:
    return KeptChoices(tmp_path)
