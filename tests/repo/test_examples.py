"""Every script of examples/ runs to its end, where it asserts what it shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


# These train several times, or for long; what they show has quick tests of its own.
LONG = {
    "01_two_lines",
    "03_zero_memory",
    "04_resume_on_another_mesh",
    "09_offload",
    "10_same_bits_anywhere",
    "11_linen_language_model",
    "12_bert_masked_language",
    "13_lora_smollm2",
    "15_bert_two_tasks",
    "16_t5_translation",
    "17_finetune_chats",
    "18_finetune_smollm2",
    "19_mixture_of_experts",
    "20_vision_transformer",
    "21_diffusion",
    "22_larger_than_memory",
}

# 135 million of them: optimizing the program pays.
REAL_WEIGHTS = {"13_lora_smollm2", "18_finetune_smollm2"}


def as_parameter(script):
    marks = [pytest.mark.slow] if script.stem in LONG else []
    return pytest.param(script, id=script.stem, marks=marks)


@pytest.mark.thorough
@pytest.mark.examples
@pytest.mark.parametrize("script", [as_parameter(script) for script in SCRIPTS])
def test_the_example_runs(script, tmp_path):
    variables = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        # As in conftest.py.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0" if script.stem in REAL_WEIGHTS else "1",
    }
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,  # what it writes, such as runs/, stays there
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900 if script.stem in REAL_WEIGHTS else 240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout


def test_every_example_is_short_and_asserts_something():
    for script in SCRIPTS:
        lines = script.read_text().splitlines()
        assert len(lines) < 120, script
        assert "assert" in lines[-1] + lines[-2], script


def test_the_examples_are_numbered_without_gaps():
    assert [path.name[:3] for path in SCRIPTS] == [f"{i:02}_" for i in range(1, len(SCRIPTS) + 1)]
