"""Random run files end in a plan or in one sentence, within seconds and without a traceback."""

from __future__ import annotations

import dataclasses
import math
import random
import signal
import traceback
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

import zerojax
from tests.support.refusals import stands_in
from zerojax.config import ConfigError, RunConfig
from zerojax.config.run import load
from zerojax.plan.rung_plans import with_rungs
from zerojax.training.run_file import plan_from_config

DEVICES, SECONDS = 8, 30
PARTS, FILES_PER_PART = 8, 40
SMALL = {
    "model": {"num_layers": 2, "num_heads": 2, "embed_dim": 16, "max_seq_len": 32},
    "data": {"seq_len": 16},
    "global_batch_size": 16,
    "steps": 3,
}
"""What a file sets first, so that most plans take a second."""
ODD: list[Any] = [
    None, True, "", "auto", "no", "x/y", "\u202e", "1e3", 0, -1, 1, 3, 7, 2**31, 2**63, 10**30, 0.5,
    -0.5, 1e-30, 1e300, math.inf, -math.inf, math.nan, [], [1], ["a"], [[]],
    [["a", [None, "model"]]], {}, {"a": 1}, {"zero": 3}, {1: 2},
]  # fmt: skip
"""Values of all types, for fields of any type."""


def drawn(draw: random.Random, hint: Any) -> Any:
    """A value of a field's type, at times a wrong one."""
    if draw.random() < 0.15:
        return draw.choice(ODD)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return drawn(draw, draw.choice(args))
    if origin is typing.Literal:
        return draw.choice(args)
    if dataclasses.is_dataclass(hint):
        return section(draw, typing.cast(type, hint), draw.randint(0, 2))
    if origin is tuple:
        number = draw.randint(0, 3) if args[-1] is Ellipsis else len(args)
        return [drawn(draw, args[0 if args[-1] is Ellipsis else i]) for i in range(number)]
    if hint is bool:
        return draw.random() < 0.5
    if hint is int:
        return draw.choice([0, 1, 2, 3, 4, 8, 16, 64, 1000, 2**20, -1])
    if hint is float:
        return draw.choice([0.0, 1e-5, 1e-3, 0.1, 0.5, 0.9, 1.0, 2.0, 100.0, -0.1])
    if hint is str:
        return draw.choice(["bytes", ".*", "kernel", "(", "data", "a b", "bpe:300", "none"])
    return None


def section(draw: random.Random, cls: type, number: int) -> dict[str, Any]:
    """Some keys of a section; one in twenty is misspelt."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    found = {}
    for name in draw.sample(names, min(number, len(names))):
        found[name + "s" * (draw.random() < 0.05)] = drawn(draw, hints[name])
    return found


def joined(first: Any, second: Any) -> Any:
    """Two nested sections; the second one's values win."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second
    return first | {name: joined(first.get(name), value) for name, value in second.items()}


def run_file(draw: random.Random) -> dict[str, Any]:
    hints, values = typing.get_type_hints(RunConfig), dict(SMALL)
    for name in draw.sample([*hints], draw.randint(1, 3)):
        values = joined(values, {name: drawn(draw, hints[name])})
    if draw.random() < 0.4:  # settings that meet
        values = joined(values, {"mesh": section(draw, hints["mesh"], draw.randint(1, 3))})
    return values


def check_refusal(error: Exception) -> None:
    """The error is one of ours, raised in our code, in one sentence with a key or a name."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    assert Path(last).is_relative_to(Path(zerojax.__file__).parent), f"raised in {last}"
    assert isinstance(error, ValueError | TypeError | OSError | ImportError)
    message = str(error)
    assert message.strip()
    assert len(message) < 4000
    assert "\u202e" not in message
    if isinstance(error, ConfigError) and error.key:
        assert stands_in(error.key[-1], message)


def check_file(path: Path) -> str:
    """Loads and plans one file; returns how it ended."""
    try:
        config = load(RunConfig, path)
    except ConfigError as error:
        check_refusal(error)
        return "not loaded"
    try:
        with_rungs(plan_from_config(config, DEVICES))
    except Exception as error:
        check_refusal(error)
        return "not planned"
    return "planned"


def too_long(*_: Any) -> None:
    raise TimeoutError(f"no answer after {SECONDS} s")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("part", range(PARTS))
def test_random_run_files_end_in_a_plan_or_in_a_sentence(part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, too_long)
    ends = []
    try:
        for seed in range(part * FILES_PER_PART, (part + 1) * FILES_PER_PART):
            path = tmp_path / f"{seed}.yaml"
            path.write_text(yaml.safe_dump(run_file(random.Random(seed))))
            signal.alarm(SECONDS)
            try:
                ends.append(check_file(path))
            except BaseException as error:
                error.add_note(f"run file of seed {seed}:\n{path.read_text()}")
                raise
            finally:
                signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert {"planned", "not loaded"} <= {*ends}


WORDS = [
    "190:20:30", "017", "1_000", "yes", "1e400", "-.inf", ".nan", "2024-01-01", "{", "[1,", "*a",
    "&a [*a]", "!!int x", "!!set {a}", "\x00", "{<<: 3}", "[[[]]]", "~", "", "a=b", "9" * 200,
    "{a: 1, a: 2}", "'",
]  # fmt: skip


@pytest.mark.thorough
def test_random_words_of_a_command_end_in_settings_or_in_a_sentence():
    ends = set()
    for seed in range(1500):
        draw = random.Random(seed)
        hint: Any = RunConfig
        key: list[str] = []
        while dataclasses.is_dataclass(hint) and (not key or draw.random() < 0.9):
            hints = typing.get_type_hints(hint)
            key.append(draw.choice([*hints]))
            hint = hints[key[-1]]
        value = draw.choice(WORDS) if draw.random() < 0.7 else str(drawn(draw, hint))
        words = [f"{'.'.join(key[draw.randint(0, 1) * (len(key) - 1) :])}={value}"]
        try:
            load(RunConfig, None, words)
            ends.add("loaded")
        except ConfigError as error:
            check_refusal(error)
            ends.add("refused")
        except BaseException as error:
            error.add_note(f"words of seed {seed}: {words}")
            raise
    assert ends == {"loaded", "refused"}
