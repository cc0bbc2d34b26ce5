"""Two processes of two devices generate together: each gets all tokens, those of one device."""

import json
from pathlib import Path

import jax
import pytest

from tests.support.generation_process import PROMPTS, rows_of
from tests.support.process_groups import run_group

pytestmark = pytest.mark.multihost

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_get_the_tokens_of_one_device(tmp_path):
    words = ["-m", "tests.support.generation_process", str(tmp_path)]
    run_group([words] * 2, folder=ROOT, join=True)
    expected = rows_of(jax.devices()[:1], 0)
    for number in range(2):
        assert json.loads((tmp_path / f"{number}.json").read_text()) == expected
    assert len(expected) == len(PROMPTS)
