"""Configurations made to hang, to crash or to fill the screen are refused in one short sentence."""

from __future__ import annotations

import base64
import itertools
import random
from pathlib import Path

import pytest
import yaml

from zerojax import deepspeed_config as deepspeed
from zerojax.config import ConfigError, RunConfig, load, loader
from zerojax.config.display import MAX_VALUE, printable, quoted
from zerojax.config.loader import MAX_CHARACTERS, MAX_DEPTH, NotYaml, parse_text, read_yaml

LONGEST = 5000
"""Characters of any message."""

LEVELS = "abcdefgh"
FIELDS = "xyzuvwpq"


def aliases(as_lists: bool) -> str:
    """Eight lines that stand for 8^8 values."""
    lines = ["a: &a " + (str([1] * 8) if as_lists else "{" + ": 1, ".join(FIELDS) + ": 1}")]
    for before, name in itertools.pairwise(LEVELS):
        items = [f"*{before}"] * 8
        inner = ", ".join(items if as_lists else map("{}: {}".format, FIELDS, items))
        lines.append(f"{name}: &{name} " + (f"[{inner}]" if as_lists else f"{{{inner}}}"))
    return "\n".join(lines)


YAML = {
    "mappings of aliases": (aliases(as_lists=False), "each alias"),
    "lists of aliases": (aliases(as_lists=True), "each alias"),
    "merged aliases": (aliases(as_lists=False).replace("x: ", "<<: "), "each alias"),
    "an alias of itself": ("model: &a\n  x: *a", r"\*a is inside the value"),
    "lists in lists": ("[" * 100_000, "nested more than 64 levels deep"),
    "sections in sections": ("{a: " * 50_000, "nested more than 64 levels deep"),
    "indented": ("".join(" " * i + "a:\n" for i in range(200)), "deep; .*:65"),
    "depth by an alias": (
        f"a: &a {'[' * 40}{']' * 40}\nb: {'[' * 40}*a{']' * 40}",
        "nested more than 64 levels deep",
    ),
    "a long list in one message": (
        f"steps: [{'[x, y], ' * 3_000}]",
        r"got \[\['x', 'y'\], .*\.\.\.",
    ),
    "5,000 digits": ("steps: " + "9" * 5000, "is not a valid int"),
    "a long text": ("steps: " + "x" * 200_000, r"got 'xxx.*\.\.\. \(str\)"),
    "a long key": (
        "? " + "x" * 200_000 + "\n: 1",
        r"xxx\.\.\. \(200,000 characters\): unknown key",
    ),
    "a date that is none": ("steps: 2024-99-99", "got '2024-99-99'"),
    "a tag that does not fit": ("steps: !!bool maybe", "'maybe' is not a valid"),
    "a list as a key": ("? [a]\n: 1", "a key must be a name"),
    "more than a configuration": (
        "#" * (MAX_CHARACTERS + 1),
        "characters, too many for a configuration",
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", YAML)
def test_yaml_beyond_the_bounds_is_refused(case, tmp_path):
    text, words = YAML[case]
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load(RunConfig, path)
    assert len(str(caught.value)) < LONGEST + len(str(path))
    assert str(path) in str(caught.value)


def test_the_depth_is_refused_whatever_bound_the_parser_has(monkeypatch):
    class Bounded(yaml.CSafeLoader):
        """Fails at once, as a parser that looks far ahead does."""

        def check_event(self, *_):
            mark = yaml.Mark("x", 1000, 0, 1000, None, None)
            raise yaml.scanner.ScannerError(None, None, "too deep for this parser", mark)

    monkeypatch.setattr(loader, "_Loader", Bounded)
    with pytest.raises(ConfigError, match=f"more than {MAX_DEPTH} levels deep"):
        read_yaml("[" * 2000, "x")
    with pytest.raises(NotYaml, match="too deep for this parser"):
        read_yaml("[" * (MAX_DEPTH - 1), "x")


def test_yaml_within_the_bounds_is_read():
    deep = "[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1)
    text = f"a: &a {{x: [1, 2], y: &b 3}}\nb: {{<<: *a, z: *b}}\nc: [*a, *a]\nd: {deep}"
    value, where = read_yaml(text, "x")
    assert value["b"] == {"x": [1, 2], "y": 3, "z": 3}
    assert value["c"] == [value["a"]] * 2
    assert where["c",] == "x:3"


def test_a_device_is_read_no_further_than_a_configuration():
    with pytest.raises(ConfigError, match="more than 1,048,576 characters"):
        load(RunConfig, Path("/dev/zero"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps=" + "[" * 100_000, "nested more than 64 levels deep"),
        ("steps=" + "9" * 5000, "expected an integer, got '999"),
        ("learning_rate=" + "9" * 5000, "expected a number, got '999"),
        ("mesh={a: &a [*a]}", "is inside the value"),
        ("mesh={zero: 1, zero: 2}", "zero: the key appears twice"),
        ("x" * 100_000 + "=1", "unknown key"),
        ("x" * 100_000, "is not KEY=VALUE"),
        ("mesh=" + "x" * 100_000, "this is a section"),
        ("steps=\x1b[2J", r"got '\\x1b\[2J'"),
        ("\x1b[2J=1", r"^\\x1b\[2J: unknown key"),
    ],
)
def test_a_word_of_the_command_line_beyond_the_bounds_is_refused(override, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load(RunConfig, None, [override])
    assert len(str(caught.value)) < LONGEST


def test_a_word_that_yaml_does_not_read_is_a_text():
    assert [parse_text(text) for text in ("2024-99-99", "a: [", "")] == ["2024-99-99", "a: [", ""]


DS_CONFIG = {
    "5,000 digits": (
        '{"train_batch_size": ' + "9" * 5000 + "}",
        "5,000 digits; write a number of at most 100",
    ),
    "beyond a float": ('{"gradient_clipping": 1e999}', "'1e999' is infinite or NaN"),
    "lists in lists": ('{"a": ' + "[" * 100_000, "nested more than 64 levels deep"),
    "objects in objects": ('{"a": ' * 50_000, "nested more than 64 levels deep"),
    "a long key": ('{"fp16": {"' + "k" * 200_000 + '": 1}}', "unknown key"),
    "a long value": ('{"fp16": "' + "k" * 200_000 + '"}', "expected a section"),
    "a long list": ('{"train_batch_size": [' + "1," * 30_000 + "1]}", "expected an integer"),
    "a long value twice": ('{"a": "' + "x" * 200_000 + '", "a": 1}', "appears 2 times"),
    "control characters": (
        '{"fp16": {"\\u001b[2J": 1}}',
        r"fp16.\\x1b\[2J=1: unknown key",
    ),
    "more than a configuration": (
        '{"a": "' + "x" * MAX_CHARACTERS + '"}',
        "too many for a configuration",
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("form", ["text", "file", "base64", "hjson"])
@pytest.mark.parametrize("case", DS_CONFIG)
def test_a_ds_config_beyond_the_bounds_is_refused(case, form, tmp_path):
    source, words = DS_CONFIG[case]
    if form == "base64":
        source = base64.urlsafe_b64encode(source.encode()).decode()
    elif form != "text":
        if form == "hjson":
            pytest.importorskip("hjson", reason="the extra hjson is not installed")
            source = "# a comment\n" + source
        (tmp_path / "x.json").write_text(source)
        source = tmp_path / "x.json"
    with pytest.raises(ConfigError, match=words) as caught:
        deepspeed.translate(source)
    assert len(str(caught.value)) < LONGEST


def test_a_dict_that_holds_itself_or_too_much_is_refused():
    inside: dict = {}
    inside["a"] = inside
    shared: object = 1
    for _ in range(40):
        shared = [shared, shared]
    for values, words in (
        (inside, "nested more than 64 levels deep"),
        ({"a": shared}, "more than 100,000 values"),
        ({"train_batch_size": 10**5000}, "expected an integer, got an integer of 16,610 bits"),
    ):
        with pytest.raises(ConfigError, match=words):
            deepspeed.translate(values)


PIECES = b"*o|&o |!!int |[|{|\x1b|\xff|? |- |1-1-99|\n".split(b"|")


def test_changed_bytes_of_a_configuration_end_in_a_configuration_or_one_sentence(tmp_path):
    good = (
        b"mesh: {zero: 2, data: -1}\noptimizer: &o {learning_rate: 1e-3, eps: 1.0e-8}\nsteps: 9\n"
    )
    draw = random.Random(5)
    path = tmp_path / "x.yaml"
    messages = []
    for _ in range(300):
        changed = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(changed))
            changed[at : at + draw.randint(0, 2)] = draw.choice(PIECES)
        path.write_bytes(changed)
        try:
            load(RunConfig, path)
        except ConfigError as error:
            messages.append(str(error))
    assert 100 < len(messages) < 300
    assert not [message for message in messages if "\x1b" in message]


class TestDisplay:
    def test_control_characters_are_escapes(self):
        assert printable("a\x1b[2Jb\n\u202ec\ud800\x9b\x7f") == r"a\x1b[2Jb\n\u202ec\ud800\x9b\x7f"
        assert printable("a\n\tb\x1b\r", is_page=True) == "a\n\tb\\x1b\\r"
        assert printable("é 日本 ≥ →") == "é 日本 ≥ →"
        assert printable(Path("a\x07")) == r"a\x07"

    @pytest.mark.parametrize(
        "value",
        [
            1,
            "a'b",
            [1, ["x"]],
            {},
            {"a": (1,), 2: None},
            (),
            (1, 2),
            set(),
            {3},
            frozenset(),
            1.5,
            b"x",
        ],
    )
    def test_a_small_value_is_its_repr(self, value):
        assert quoted(value) == repr(value)

    def test_a_large_value_is_its_beginning(self):
        nested: list = []
        nested.append(nested)
        shared: object = "x"
        for _ in range(60):
            shared = [shared] * 9
        for value in ("x" * 10**6, [1] * 10**6, shared, nested, 10**5000, {"\x1b": "\x1b" * 99}):
            text = quoted(value)
            assert len(text) <= MAX_VALUE + 3
            assert "\x1b" not in text
        assert quoted(nested) == "[[[[...]]]]"
        assert quoted(10**5000) == "an integer of 16,610 bits"
