"""Refusals of single values: of generation, ramps, sweeps and layouts of attention; of texts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import Refusal, refused, table
from zerojax.config import (
    BatchRampConfig,
    ConfigError,
    CurriculumConfig,
    MeshConfig,
    RunConfig,
    checks,
    load,
)
from zerojax.config.attention_layouts import layout_of_mode
from zerojax.config.batch_ramp import BatchRamp
from zerojax.config.generation_limits import check_generation
from zerojax.config.loader import MAX_CHARACTERS, user_path
from zerojax.config.sweep_settings import SweepAxis


def generation(num_tokens: Any = 4, **options: Any) -> None:
    check_generation(num_tokens=num_tokens, **options)


def ramp(final: int = 32, **options: int) -> None:
    sizes = {"start": 8, "increment": 8, "ramp_rows": 64, **options}
    BatchRamp(config=BatchRampConfig(**sizes), final=final)


def curriculum(**options: int) -> CurriculumConfig:
    return CurriculumConfig(type="seqlen", total_steps=9, **options)


def rolled(*kinds: str) -> MeshConfig:
    return MeshConfig(roll_remat=tuple(("a", kind) for kind in kinds))


VALUES = table(
    """
generation(16, context=16) | num_tokens=16 max_seq_len=16 | 15 | generation($, context=16)
generation(seed=1.5) | seed=1.5 | 0 | generation(seed=$)
generation(seed=2**64) | 64 | 0 9223372036854775807 | generation(seed=$)
generation(top_p="x") | top_p='x' str | number | generation(top_p=0.5)
generation(top_p=0.0) | top_p=0.0 | None temperature=0
  | generation(top_p=None) ; generation(temperature=0)
generation(repetition_penalty=0) | repetition_penalty=0 | 1.0 | generation(repetition_penalty=$)
generation(temperature=1e-60) | temperature=1e-60 float32 | 1.2e-38 3.4e+38
  | generation(temperature=$)
generation(num_ids=9, vocab_size=8) | num_ids=9 8 | None | generation(num_ids=$, vocab_size=8)
generation(end_tokens=2) | end_tokens=2 | "[2]" "[]" | generation(end_tokens=$)
generation(pad_token=1.5) | pad_token=1.5 | integer | generation(pad_token=1)
generation(pad_token=9, vocab_size=8) | pad_token=9 8 | 7 | generation(pad_token=$, vocab_size=8)
generation(cache="int4") | cache='int4' | 'int8' None | generation(cache=$)
generation(quantize="int4") | quantize='int4' | 'int8' 'fp8' None | generation(quantize=$)
checks.check_whole_number("steps", 9, 1, 8) | steps=9 8 | 8
  | checks.check_whole_number("steps", $, 1, 8)
curriculum().last_length | null | max_length | curriculum(max_length=64).last_length
rolled("full", "none") | roll_remat 'a' | one | rolled("full") ; rolled("none")
ramp(increment=7) | 7 24 32 | 8 | ramp(increment=$)
ramp(increment=1, final=1032) | 1 1025 8 | 256 | ramp(increment=$, final=1032)
ramp(final=8) | 8 | lower leave | ramp(final=8, start=4, increment=4)
SweepAxis(low=1) | low high | high list | SweepAxis(low=1, high=2) ; SweepAxis(values=(1, 2))
SweepAxis() | list | "{low: 1e-4, high: 1e-2}" | SweepAxis(low=1e-4, high=1e-2)
SweepAxis(values=(1, 2), scale="log") | scale log | leave | SweepAxis(values=(1, 2))
SweepAxis(low=2, high=1) | low 2.0 1 | below | SweepAxis(low=0.5, high=1)
SweepAxis(low=0, high=1, scale="log") | low 0 | raise linear
  | SweepAxis(low=0.1, high=1, scale="log") ; SweepAxis(low=0, high=1, scale="linear")
layout_of_mode({"mode": "fixed", "blok": 16}) | fixed blok | block
  | layout_of_mode({"mode": "fixed", "block": 16})
layout_of_mode("fixed") | 'fixed' | "{mode: fixed, block: 16}"
  | layout_of_mode({"mode": "fixed", "block": 16})
""",
    (ValueError, TypeError),
)


NAMES = globals() | {"SweepAxis": SweepAxis, "layout_of_mode": layout_of_mode, "checks": checks}


@pytest.mark.parametrize("row", VALUES)
def test_values(row):
    VALUES[row].check(lambda call: eval(call, NAMES))


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Refusal("run\0s", "zero", "remove", ["runs"], ConfigError).check(user_path)
    Refusal("~nobody1/a", "~nobody1", "./~nobody1", ["./~nobody1/a"], ConfigError).check(user_path)


@pytest.mark.parametrize(
    ("text", "value", "remedy", "good"),
    [
        ("steps: !!set {3}", "set", "leave", "steps: 3"),
        (f"run_dir: {'1' * 5000}", "int", "quotes", f'run_dir: "{"1" * 5000}"'),
        (f"run_dir: {'a' * MAX_CHARACTERS}", f"{MAX_CHARACTERS:,}", "path", "run_dir: a"),
    ],
    ids=["tag", "digits", "long"],
)
def test_texts_of_settings(text, value, remedy, good, tmp_path):
    def read(text: str) -> None:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        load(RunConfig, path)

    Refusal(text, value, remedy, [good], ConfigError).check(read)


def test_a_file_in_utf_16(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("steps: 3", encoding="utf-16")
    command = "iconv -f UTF-16 -t UTF-8 run.yaml > NEW_FILE"
    message = refused(lambda: load(RunConfig, Path("run.yaml")), "UTF-16", error=ConfigError)
    assert command in message
    subprocess.run(command, shell=True, check=True)
    assert load(RunConfig, Path("NEW_FILE")).steps == 3
