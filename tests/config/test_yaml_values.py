"""Plain values of YAML and of the command line are what was written, or are refused with a line."""

import dataclasses
from typing import Literal

import pytest

from tests.support.refusals import refused
from zerojax.config.loader import ConfigError, coerce_fields, load_dataclass, read_yaml


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values:
    """A field of each type."""

    whole: int = 0
    real: float = 0.0
    flag: bool = False
    text: str = ""
    choice: Literal["on", "off", "auto"] = "auto"
    maybe: int | Literal["auto"] | None = None
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        coerce_fields(self)


ACCEPTED = {
    "whole": {
        "1_000": 1000, "0x1F": 31, "0o17": 15, "0b101": 5, "-3": -3, "+4": 4, "1e5": 100_000,
        "2.0": 2, "0": 0,
    },
    "real": {
        "1e5": 1e5, "1e-3": 1e-3, ".5": 0.5, "5.": 5.0, "-1.5E+3": -1500.0, "1_000.5": 1000.5,
        ".5e3": 500.0, "3": 3.0, "007.5": 7.5,
    },
    "flag": {
        "true": True, "False": False, "yes": True, "No": False, "on": True, "OFF": False,
    },
    "text": {
        "190:20:30": "190:20:30", "1:30": "1:30", "12:30:45.5": "12:30:45.5", "017": "017",
        "2024-01-01": "2024-01-01", "2024-99-99": "2024-99-99", "no": "no", "Yes": "Yes",
        "on": "on", "y": "y", "=": "=",
        "1__0": "1__0", "0o8": "0o8", "'17'": "17", "1.2.3": "1.2.3",
    },
    "choice": {"on": "on", "true": "on", "false": "off", "OFF": "off", "'on'": "on"},
    "maybe": {"auto": "auto", "8": 8, "null": None, "~": None},
    "texts": {"[no, on, 017, 1:30]": ("no", "on", "017", "1:30")},
}  # fmt: skip
REFUSED = {
    "whole": {
        "190:20:30": "190:20:30 integer", "017": "017 17", "-010": "010 10", "08": "08 8",
        "2024-01-01": "2024-01-01 integer",
        ".inf": "inf integer", ".nan": "nan", "yes": "yes integer",
        "1__0": "1__0 integer", "1e400": "inf", "!!int 1:30": "1:30 quotes", "0x": "0x",
        "!!int 017": "017", "true": "True integer", "1.5": "1.5 integer",
        "=": "= integer",
    },
    "real": {
        "190:20:30.15": "190:20:30.15 number", ".inf": "inf finite", "-.inf": "finite",
        ".nan": "nan finite", "!!float 1:30": "1:30 quotes", "1e999": "inf finite", "off": "off",
    },
    "flag": {
        "!yes_no maybe": "maybe quotes", "y": "y true false", "1": "1 true false",
        "'yes '": "yes true false",
    },
    "text": {
        "5": "5 quotes", "true": "True quotes", "1e5": "quotes", "!!binary aGk=": "binary leave",
        "!!timestamp 2024-01-01": "timestamp leave", "!!set {a, b}": "set leave",
        "!!python/name:os.system ''": "python leave", "!!omap [a: 1]": "omap leave",
    },
    "choice": {"yes": "yes on off auto"},
    "maybe": {"yes": "yes", "010": "010 10"},
    "texts": {"no": "no list", "[5]": "5 quotes"},
}  # fmt: skip


def loaded(tmp_path, text, overrides=()):
    (tmp_path / "run.yaml").write_text(f"# a run\n{text}\n")
    return load_dataclass(Values, tmp_path / "run.yaml", overrides)


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_was_written_is_read(name, tmp_path):
    for written, expected in ACCEPTED[name].items():
        for values in (
            loaded(tmp_path, f"{name}: {written}"),
            loaded(tmp_path, "", [f"{name}={written}"]),
        ):
            found = getattr(values, name)
            if not (name == "text" and "'" in written):  # a shell's text keeps its quotes
                assert (found, type(found)) == (expected, type(expected)), written


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_field_can_hold_is_refused(name, tmp_path):
    for written, words in REFUSED[name].items():
        file = lambda w=written: loaded(tmp_path, f"{name}: {w}")  # noqa: E731
        refused(
            file, [name, "run.yaml:2"] if not written.startswith("!") else ["run.yaml:2"], words
        )
        if name not in ("text", "texts") and not written.startswith("!"):
            typed = lambda w=written: loaded(tmp_path, "", [f"{name}={w}"])  # noqa: E731
            refused(typed, [name, "command line"], error=ConfigError)


ALIASES = "\n".join(
    f"{{{i + 1}}}: &{{{i + 1}}} {{8}}" + ",".join([f"*{{{i}}}"] * 9) + "{9}" for i in range(7)
)
DOCUMENTS = {
    f"whole: {'9' * 101}": "int quotes run.yaml:2",
    "whole: 1\nreal: 2\nwhole: 3": "whole twice 2 keep run.yaml:4",
    "{1: a, 0x1: b}": "twice keep",
    "{true: a, True: b}": "twice keep",
    "base: &base {whole: 1}\n<<: *base": "base unknown run.yaml:2",
    "<<: 5": "run.yaml:2",
    "<<: {whole: 017}": "017 17 run.yaml",
    "<<: [{whole: 1}, {flag: maybe}]": "flag true",
    "whole: &a 1\nreal: *b": "alias run.yaml:3",
    "text: &a [*a]": "alias run.yaml:2",
    "whole: 1\n---\nwhole: 2": "run.yaml:3",
    "? [a]\n: 1": "key name run.yaml:2",
    "a: &a [x,x,x,x,x,x,x,x,x]\n" + ALIASES.format(*"abcdefgh", "[", "]"): "100,000 aliases",
    "a: &a {k: 1}\n" + ALIASES.format(*"abcdefgh", "{<<: [", "]}"): "100,000 aliases",
}


@pytest.mark.parametrize("text", DOCUMENTS)
def test_documents_that_are_refused(text, tmp_path):
    refused(lambda: loaded(tmp_path, text), DOCUMENTS[text], error=ConfigError)


def test_merged_keys_are_read_and_own_ones_win():
    text = "x: &x {a: 1, b: no}\ny: {<<: *x, a: 017}"
    assert read_yaml(text, "run.yaml")[0]["y"] == {"a": "017", "b": "no"}
