"""Chats from files of records to folders of texts: masks, counts, and faults in one sentence."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import functools
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.chat_samples import BOS, CHATS, EOS, TEMPLATES, unmarked
from tests.support.refusals import complaint, refused
from zerojax.cli import main
from zerojax.data import as_source
from zerojax.data.chats import (
    chat_encoding,
    chat_preparation,
    prepare_chats,
    template_process,
)
from zerojax.data.chats.chat_template import Limits
from zerojax.data.opening import open_texts
from zerojax.data.text_set import verify_text_set
from zerojax.data.tokenizer import load_tokenizer, tokenizer_from_dict

pytest.importorskip("jinja2", reason="needs the package jinja2: pip install jinja2")
pytest.importorskip("tokenizers", reason="needs the package tokenizers: pip install tokenizers")

ASK, TELL = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}
GOOD = {"messages": [ASK, TELL]}


@functools.cache
def content_of_tokenizer() -> dict:
    file = Path(__file__).parents[1] / "data" / "chats.json"
    return json.loads(file.read_text())["tokenizers"]["byte_level"]


def model_folder(folder: Path, template: str | None = TEMPLATES["chatml"], **settings) -> Path:
    """A model's folder, as far as chats need one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content_of_tokenizer()))
    settings = {"bos_token": BOS, "eos_token": {"content": EOS}, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def model(tmp_path) -> Path:
    return model_folder(tmp_path / "model")


def lines(file: Path, *rows) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def write_table(file: Path, rows: list[dict]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the package pyarrow")
    columns = dict.fromkeys(key for row in rows for key in row)  # pyarrow takes the first row's
    table = pyarrow.Table.from_pylist([{**columns, **row} for row in rows])
    if file.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, file)
    else:
        with pyarrow.ipc.new_stream(str(file), table.schema) as writer:
            writer.write_table(table)
    return file


def prepared(tmp_path, model, *rows, **options):
    number = len(list(tmp_path.glob("out*")))
    data = lines(tmp_path / "chats.jsonl", *rows)
    return prepare_chats(data, tmp_path / f"out{number}", tokenizer=model, **options)


def answers_of(made) -> list[list[str]]:
    """The answers of each text, decoded."""
    texts, validation = open_texts(made.folder)
    tokenizer = load_tokenizer(made.folder)
    found = []
    for part in filter(None, (texts, validation)):
        for start, end in zip(part.offsets[:-1].tolist(), part.offsets[1:].tolist(), strict=True):
            asked = part.asked(np.arange(start, end))
            cuts = np.flatnonzero(np.diff(asked)) + 1
            runs = zip(np.split(part.tokens[start:end], cuts), np.split(asked, cuts), strict=True)
            found.append([tokenizer.decode(ids) for ids, mine in runs if mine[0]])
    return found


# --- what comes out -------------------------------------------------------------------------------


@pytest.mark.parametrize("with_marks", [True, False])
def test_the_answers_are_asked_for(tmp_path, with_marks):
    template = TEMPLATES["chatml"] if with_marks else unmarked(TEMPLATES["chatml"])
    model = model_folder(tmp_path / "model", template)
    rows = [
        CHATS["two"],
        {"conversations": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}]},
        {"prompt": [*CHATS["one"]["messages"], ASK], "completion": [TELL]},
        {"prompt": "One, two,", "completion": " three"},
    ]
    made = prepared(tmp_path, model, *rows)
    assert answers_of(made) == [
        ["It is 4.<|im_end|>", " 6, of course\n<|im_end|>"],
        ["B<|im_end|>"],
        ["I.<|im_end|>"],
        [f" three{EOS}"],
    ]
    assert (made.num_records, made.num_texts, made.skipped, made.num_seams) == (4, 4, 0, 0)
    assert made.way == ("marks" if with_marks else "renderings")
    texts, validation = open_texts(made.folder)
    assert validation is None
    assert (texts.num_texts, texts.num_tokens) == (4, made.num_tokens)
    assert made.longest == texts.lengths.max()
    assert made.num_asked == np.unpackbits(texts.mask).sum()
    verify_text_set(made.folder)


def test_a_pair_of_texts_has_the_tokenizers_own_frame_once(tmp_path, model):
    rows = [
        {"prompt": "One, two, ", "completion": "three"},
        {"prompt": f"{BOS}One, two, ", "completion": f"three{EOS}"},
    ]
    texts, _ = open_texts(prepared(tmp_path, model, *rows).folder)
    first, second = np.split(texts.tokens, texts.offsets[1:-1])
    assert first.tolist() == second.tolist()
    tokenizer = load_tokenizer(model)
    ends = [tokenizer.id_of(BOS), tokenizer.id_of(EOS)]
    assert first[[0, -1]].tolist() == ends
    assert [first.tolist().count(end) for end in ends] == [1, 1]
    asked = texts.asked(np.arange(len(first)))
    assert not asked[0]
    assert asked[-1]


def test_answers_that_begin_inside_of_a_token_are_counted(tmp_path, model):
    rows = [{"prompt": f"One,{x}", "completion": f"{y}three"} for x, y in (("", " "), (" ", ""))]
    made = prepared(tmp_path, model, *rows)
    assert answers_of(made) == [[f" three{EOS}"]] * 2, "the text is encoded as a whole"
    assert made.num_seams == 1


def test_each_answer_can_be_a_text_of_its_own(tmp_path):
    """What was thought is then in each of them, which a whole chat would have lost."""
    model = model_folder(tmp_path / "model", unmarked(TEMPLATES["thinking"]))
    made = prepared(tmp_path, model, CHATS["thoughts"], CHATS["one"], answers="each")
    assert answers_of(made) == [
        ["<think>\n2, 3: none divides it\n</think>\n\nYes.<|im_end|>"],
        ["<think>\n3 does\n</think>\n\nNo.<|im_end|>"],
        ["It is 4.<|im_end|>"],  # the empty thought is no part of an answer
    ]
    assert (made.num_records, made.num_texts) == (2, 3)


def calling(tool: str, **arguments: Any) -> dict:
    """A chat with a call of the only tool."""
    parameters = {"type": "object", "properties": {x: {"type": "string"} for x in arguments}}
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    return {
        "messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": tool, "parameters": parameters}}],
    }


@pytest.mark.parametrize("with_marks", [True, False])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_an_answer_of_weight_0_has_no_loss(tmp_path, with_marks, mark):
    template = TEMPLATES["chatml"] if with_marks else unmarked(TEMPLATES["chatml"])
    model = model_folder(tmp_path / "model", template)
    left, kept = {**TELL, **mark}, {"role": "assistant", "content": "Yes.", "weight": 1}
    told = [{"from": "gpt", "value": "A"}, {"from": "gpt", "value": "B", **mark}]
    rows = [
        {"messages": [ASK, left, ASK, {**kept, "train": True}, ASK, left]},
        {"prompt": [ASK, kept, ASK], "completion": [kept, ASK, left]},
        {"conversations": [{"from": "human", "value": "Q"}, *told]},
    ]
    wanted = [["Yes.<|im_end|>"], ["Yes.<|im_end|>"], ["A<|im_end|>"]]
    for answers in ("all", "each"):
        assert answers_of(prepared(tmp_path, model, *rows, answers=answers)) == wanted
    plain = {"messages": [ASK, TELL, ASK, {"role": "assistant", "content": "Yes."}, ASK, TELL]}
    one, other = (open_texts(prepared(tmp_path, model, x).folder)[0] for x in (rows[0], plain))
    assert one.tokens.tolist() == other.tokens.tolist(), "the text has all of them"


def test_a_system_beside_the_messages_is_the_first_of_them(tmp_path, model):
    system = {"role": "system", "content": "Be brief."}
    told = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}]
    rows = [
        {"messages": [system, ASK, TELL]},
        {"system": "Be brief.", "messages": [ASK, TELL]},
        {"system": "Be brief.", "messages": [system, ASK, TELL]},
        {"system": "Be brief.", "conversations": told},
        {"system": "Be brief.", "prompt": [ASK], "completion": [TELL]},
    ]
    made = prepared(tmp_path, model, *rows)
    texts, _ = open_texts(made.folder)
    first, *others = np.split(texts.tokens, texts.offsets[1:-1])
    assert "Be brief." in load_tokenizer(model).decode(first)
    assert [other.tolist() for other in others] == [first.tolist()] * 4
    assert answers_of(made) == [["I.<|im_end|>"]] * 5


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_the_same_folder_from_every_kind_of_file(tmp_path, name):
    """A table gives all objects of a column the same keys, which the file of lines does not."""
    model = model_folder(tmp_path / "model", TEMPLATES["thinking"])
    rows = [CHATS[name] for name in ("one", "two", "letters", "open", "thoughts")]
    rows += [calling("look", at="x", times=["y", None]), calling("find", what={"deep": 1})]
    first = prepared(tmp_path, model, *rows, date="2026-01-02")
    file = write_table(tmp_path / name, rows)
    second = prepare_chats(file, tmp_path / "y", tokenizer=model, date="2026-01-02")
    one, other = (open_texts(made.folder)[0] for made in (first, second))
    text = load_tokenizer(model).decode(one.tokens)
    assert '"arguments": {"at": "x", "times": ["y", null]}' in text
    assert load_tokenizer(model).decode(other.tokens) == text
    for array in ("tokens", "offsets", "mask"):
        np.testing.assert_array_equal(getattr(one, array), getattr(other, array), array)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_table_without_chats_is_refused_with_its_columns(tmp_path, model, name):
    for row, keys in (({}, "[]"), ({"prompt": "x"}, "['prompt']"), ({"messages": None}, "[]")):
        file = write_table(tmp_path / name, [{"question": "x", "reply": "y", **row}])
        columns = sorted(["question", "reply", *row])
        with pytest.raises(ValueError, match=re.escape(f"keys {keys} of the columns {columns}; ")):
            prepare_chats(file, tmp_path / "y", tokenizer=model)


FOREIGN = {
    "time": datetime.datetime(2026, 1, 2),
    "date": datetime.date(2026, 1, 2),
    "decimal": decimal.Decimal("1.5"),
    "bytes": b"x",
    "nan": float("nan"),
    "nested": {"source": "web", "times": [datetime.time(1, 2)]},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_json_cannot_hold_is_left_out_or_refused_by_name(tmp_path, kind):
    """Left out where no template reads it, and refused where one may."""
    model = model_folder(tmp_path / "model", TEMPLATES["thinking"])
    value = FOREIGN[kind]
    rows = [{"messages": [{**ASK, "extra": value}, {**TELL, "extra": value}]}]
    file = write_table(tmp_path / "x.parquet", rows)
    made = prepare_chats(file, tmp_path / "x", tokenizer=model)
    assert answers_of(made) == answers_of(prepared(tmp_path, model, GOOD))
    call, tool = calling("a", at=value)["messages"], [{"name": "a", "at": value}]
    bad = {
        r"entry 2 of messages: tool_calls\[0\]\.function\.arguments\.at": {"messages": call},
        "entry 1 of messages: content": {"messages": [{**x, "content": value} for x in call]},
        "entry 2 of messages: weight": {"messages": [ASK, {**TELL, "weight": value}]},
        r"the tools\[0\]\.at": {"messages": [ASK, TELL], "tools": tool},
    }
    for number, (where, row) in enumerate(bad.items()):
        file = write_table(tmp_path / f"{number}.parquet", [row])
        with pytest.raises(ValueError, match=f"{file}:1: {where}.* is .*, which JSON cannot hold"):
            prepare_chats(file, tmp_path / f"y{number}", tokenizer=model)
    file = write_table(file, [GOOD, row])
    made = prepare_chats(file, tmp_path / "z", tokenizer=model, bad="skip")
    assert (made.num_texts, made.skipped) == (1, 1)


def test_a_null_in_a_line_is_the_users_own(tmp_path):
    model = model_folder(tmp_path / "model", TEMPLATES["thinking"])
    texts, _ = open_texts(prepared(tmp_path, model, calling("look", at=None)).folder)
    assert '"arguments": {"at": null}' in load_tokenizer(model).decode(texts.tokens)


def test_the_sidecar_has_the_checksums_of_tokenizer_and_template(tmp_path, model):
    made = prepared(tmp_path, model, GOOD, date="2026-01-02T03:04:05")
    about = json.loads((made.folder / "texts.json").read_text())
    for name in ("tokenizer.json", "chat_template.jinja"):
        digest = hashlib.sha256((made.folder / name).read_bytes()).hexdigest()
        assert about["sha256"][name] == digest
    assert (made.folder / "chat_template.jinja").read_text() == TEMPLATES["chatml"]
    assert about["date"] == "2026-01-02T03:04:05"
    assert about["answers"] == "all"
    _, _, tokenizer = as_source(made.folder, seq_len=64, global_batch_size=1, validation_fraction=0)
    assert tokenizer.to_dict() == load_tokenizer(model).to_dict()
    (made.folder / "chat_template.jinja").write_text("changed")
    with pytest.raises(
        ValueError, match="chat_template.jinja' is not the file that the texts were"
    ):
        open_texts(made.folder)


def test_the_date_of_a_template_is_chosen(tmp_path):
    model = model_folder(tmp_path / "model", TEMPLATES["headers"])
    made = prepared(tmp_path, model, GOOD, date="2024-02-29")
    texts, _ = open_texts(made.folder)
    assert "Today: 29 Feb 2024\n" in load_tokenizer(model).decode(texts.tokens)


def test_the_last_texts_validate(tmp_path, model):
    made = prepared(tmp_path, model, *[GOOD] * 10, validation_fraction=0.25)
    assert made.num_validation_texts == 2
    texts, validation = open_texts(made.folder)
    assert (texts.num_texts, validation.num_texts) == (8, 2)
    made = prepared(tmp_path, model, GOOD, validation_fraction=0.9)
    assert made.num_validation_texts == 0, "one text is left to train on"


@pytest.mark.parametrize("rows", [1, 3])
def test_batches_change_nothing(tmp_path, model, monkeypatch, rows):
    chats = [CHATS[name] for name in ("one", "two", "letters", "thoughts", "open")]
    chats.insert(2, {"prompt": "One, two, ", "completion": "three"})
    whole = open_texts(prepared(tmp_path, model, *chats).folder)[0]
    monkeypatch.setattr(chat_preparation, "_BATCH_CHATS", rows)
    made = open_texts(prepared(tmp_path, model, *chats).folder)[0]
    assert made.tokens.tolist() == whole.tokens.tolist()
    assert made.mask.tolist() == whole.mask.tolist()


# --- templates ------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_where_a_template_is_found(tmp_path):
    """A file goes before the settings; a name chooses another."""
    listed = [
        {"name": "default", "template": TEMPLATES["turns"]},
        {"name": "short", "template": TEMPLATES["headers"]},
    ]
    model = model_folder(tmp_path / "model", None, chat_template=listed)
    folder = model / "additional_chat_templates"
    folder.mkdir()
    (folder / "long.jinja").write_text(TEMPLATES["thinking"])
    own = tmp_path / "own.jinja"
    own.write_text(TEMPLATES["chatml"])
    found = {
        wanted: prepared(tmp_path, model, GOOD, template=wanted).folder
        for wanted in (None, "default", "short", "long", own)
    }
    sources = {x: (y / "chat_template.jinja").read_text() for x, y in found.items()}
    assert sources[None] == sources["default"] == TEMPLATES["turns"]
    assert sources["short"] == TEMPLATES["headers"]
    assert sources["long"] == TEMPLATES["thinking"]
    assert sources[own] == TEMPLATES["chatml"]
    with pytest.raises(
        ValueError, match=r"template='none' is neither a file .* \(default, short, long\)"
    ):
        prepared(tmp_path, model, GOOD, template="none")
    (model / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    made = prepared(tmp_path, model / "tokenizer.json", GOOD).folder
    assert (made / "chat_template.jinja").read_text() == TEMPLATES["chatml"]


def test_a_missing_template_matters_to_chats_alone(tmp_path):
    model = model_folder(tmp_path / "model", None)
    with pytest.raises(
        ValueError, match=r"chats.jsonl:1: a chat needs a template, but .*--template FILE"
    ):
        prepared(tmp_path, model, GOOD)
    made = prepared(tmp_path, model, {"prompt": "One, two, ", "completion": "three"})
    assert made.way == "pairs"
    assert not (made.folder / "chat_template.jinja").exists()


def test_special_tokens_of_older_folders(tmp_path):
    model = model_folder(tmp_path / "model", TEMPLATES["turns"], bos_token=None)
    (model / "special_tokens_map.json").write_text(json.dumps({"bos_token": BOS}))
    texts, _ = open_texts(prepared(tmp_path, model, GOOD).folder)
    assert texts.tokens[0] == load_tokenizer(model).id_of(BOS)


def test_bytes_will_do_with_a_template(tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text(unmarked(TEMPLATES["chatml"]))
    made = prepared(tmp_path, "bytes", CHATS["letters"], template=own)
    assert answers_of(made)[0][0] == "Ωμέγα 🙂🙂 naïve<|im_end|>\n"


# --- faults ---------------------------------------------------------------------------------------

BAD = [
    ({"messages": []}, "the list of messages is empty; leave the row out, or write at least two"),
    ({"messages": "x"}, r"the messages are 'x', which is not a list; a chat is \{"),
    ({"messages": [ASK, "x"]}, "entry 2 of messages is 'x', which is not an object"),
    ({"messages": [{"content": "x"}]}, "entry 1 of messages has no role"),
    ({"messages": [ASK]}, r"no message has role 'assistant' \(the roles are user\)"),
    ({"messages": [ASK, {"role": "assistant"}]}, "entry 2 of messages has the content None"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, TELL]},
        "must be text, or a list of .* images and sounds are not trained on",
    ),
    (
        {"conversations": [{"from": "bot", "value": "x"}]},
        "'bot' for the key 'from'; known values are human, user",
    ),
    ({"prompt": "x", "completion": ""}, "the completion is empty; leave the row out"),
    ({"prompt": "x", "completion": [TELL]}, "make both text, or both lists of messages"),
    ({"prompt": [ASK], "completion": [ASK]}, "no message has role 'assistant'"),
    (
        {"prompt": "", "completion": f"{EOS}"},
        "every token of the text is part|no token of the chat",
    ),
    ({"chosen": "x", "rejected": "y"}, r"the row has the keys \['chosen', 'rejected'\]; a chat is"),
    ([1], r"\[1\] is not an object; a chat is"),
    ({"messages": [ASK, TELL], "tools": "{"}, "the text of tools is not valid JSON"),
    ({"messages": [ASK, TELL], "tools": 1}, "the key tools is 1; make it a list of objects"),
    ({"messages": [ASK, {**TELL, "weight": 0.5}]}, "has weight=0.5; only 0 or 1 is supported"),
    ({"messages": [ASK, {**TELL, "weight": True}]}, "has weight=True; only 0 or 1 is supported"),
    ({"messages": [ASK, {**TELL, "train": 0}]}, "has train=0; only true or false is supported"),
    ({"messages": [{**ASK, "train": True}, TELL]}, "entry 1 .* of role 'user', has train=True"),
    ({"messages": [ASK, {**TELL, "weight": 0}]}, "every answer has weight 0 or train false"),
    (
        {"messages": [ASK, {**TELL, "content": ""}]},
        "message 2, of the assistant, is empty; leave the row out, or write an answer",
    ),
    (
        {"prompt": [ASK], "completion": [{**TELL, "content": [{"type": "text", "text": ""}]}]},
        "message 2, of the assistant, is empty",
    ),
    ({"conversations": [{"from": "gpt", "value": ""}]}, "message 1, of the assistant, is empty"),
    ({"system": 1, "messages": [ASK, TELL]}, "system is 1, .*make it text"),
    (
        {"system": "A", "messages": [{"role": "system", "content": "B"}, ASK, TELL]},
        "system is 'A', but the first message, with role system, has the content 'B'; remove one",
    ),
    ({"system": "A", "prompt": "x", "completion": "y"}, "write it into the prompt, or"),
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("row", "why"), BAD)
def test_a_bad_row_is_one_sentence_or_left_out(tmp_path, model, row, why):
    if isinstance(row, dict) and row.get("completion") == EOS:
        model = "bytes"  # with no token around a text
    template = tmp_path / "t.jinja"
    template.write_text(unmarked(TEMPLATES["chatml"]))
    with pytest.raises(ValueError, match=f"chats.jsonl:2: .*({why})") as caught:
        prepared(tmp_path, model, GOOD, row, GOOD, template=template)
    assert str(caught.value).endswith("or leave such rows out with --bad skip")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out0").iterdir()), "nothing is left"
    made = prepared(tmp_path, model, GOOD, row, GOOD, template=template, bad="skip")
    assert (made.num_records, made.num_texts, made.skipped) == (3, 2, 1)
    assert made.reasons[0].startswith(f"{tmp_path}/chats.jsonl:2: ")


def test_an_answer_without_text_may_have_other_parts(tmp_path):
    """A call or a thought; and what has no loss may be empty."""
    model = model_folder(tmp_path / "model", TEMPLATES["thinking"])
    empty = {"role": "assistant", "content": ""}
    call = calling("look")["messages"][1] | {"content": ""}
    rows = [
        {"messages": [ASK, call]},
        {"messages": [ASK, {**empty, "thinking": "Hm."}]},
        {"messages": [ASK, {**empty, "weight": 0}, ASK, TELL]},
        {"prompt": [ASK, empty, ASK], "completion": [TELL]},
    ]
    assert prepared(tmp_path, model, *rows).num_texts == 4


def test_a_turn_that_cannot_be_told_apart_is_named_with_remedies(tmp_path):
    model = model_folder(tmp_path / "model", unmarked(TEMPLATES["thinking"]))
    why = (
        r"chats.jsonl:1: message 2, of the assistant, is rendered differently once messages "
        r"follow it, .* template with \{% generation %\} marks \(--template FILE\), or make "
        r"one text per answer \(--answers each\); or leave such rows out with --bad skip"
    )
    with pytest.raises(ValueError, match=why):
        prepared(tmp_path, model, CHATS["thoughts"])
    marked = tmp_path / "marked.jinja"
    marked.write_text(TEMPLATES["thinking"])
    assert prepared(tmp_path, model, CHATS["thoughts"], template=marked).num_texts == 1
    made = prepared(tmp_path, model, CHATS["thoughts"], CHATS["one"], bad="skip")
    assert (made.num_texts, made.skipped) == (1, 1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("{{ raise_exception('no') }}", r"\(no\); fix the row, or pass"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0.2 s"),
    ],
)
def test_a_template_that_fails_at_a_row_is_one_sentence(tmp_path, model, code, why):
    template = tmp_path / "t.jinja"
    harm = f"{{% if messages[0].content == 'Bad' %}}{code}{{% endif %}}"
    template.write_text(harm + TEMPLATES["chatml"])
    bad = {"messages": [{"role": "user", "content": "Bad"}, TELL]}
    options = {"template": template, "limits": Limits(seconds=0.2)}
    with pytest.raises(ValueError, match=f"chats.jsonl:2: .*{why}"):
        prepared(tmp_path, model, GOOD, bad, GOOD, **options)
    made = prepared(tmp_path, model, GOOD, bad, GOOD, bad="skip", **options)
    assert (made.num_texts, made.skipped) == (2, 1)


def test_a_mask_of_all_zeros_or_all_ones_is_refused_whatever_is_skipped(tmp_path, model):
    """Marks around nothing, and a template that writes the answers alone."""
    template = tmp_path / "t.jinja"
    marks = "{% generation %}{% endgeneration %}"
    template.write_text("{% for m in messages %}{{ m.content }}\n" + marks + "{% endfor %}")
    why = r"no token of the chat is part.*\(line 2: {% generation %}"
    with pytest.raises(ValueError, match=f"none of its 2 rows can be trained on; .*{why}"):
        prepared(tmp_path, model, GOOD, GOOD, template=template, bad="skip")
    template.write_text("{% generation %}{{ messages[-1].content }}{% endgeneration %}")
    why = r"every token of the text is part.*--format text.*\(line 1: {% generation %}"
    with pytest.raises(ValueError, match=f"2 rows can .*{why}"):
        prepared(tmp_path, model, GOOD, GOOD, template=template, bad="skip")


@pytest.mark.parametrize("answers", ["all", "each"])
def test_what_is_found_when_texts_are_read_names_its_row(tmp_path, model, answers):
    """Also where rows were left out, or gave several texts."""
    twice = {"messages": [ASK, TELL, ASK, TELL]}
    long = {"messages": [ASK, {"role": "assistant", "content": "I. " * 40}]}
    made = prepared(tmp_path, model, twice, {}, long, GOOD, bad="skip", answers=answers)
    number = 3 if answers == "each" else 2
    place = rf"{made.folder}.*text {number} \(.*chats.jsonl:3\)"
    sizes = {"seq_len": 40, "global_batch_size": 1, "validation_fraction": 0}
    with pytest.raises(ValueError, match=f"longer than a row .*{place[len(str(made.folder)) :]}"):
        as_source(made.folder, **sizes)
    source = as_source(made.folder, **{**sizes, "seq_len": 400})[0]
    largest = int(source.texts.tokens[: source.texts.offsets[number - 1]].max())
    source = dataclasses.replace(source, vocab_size=largest + 1)
    inside = source.texts.part(number - 1, number).offsets
    tokens = np.array(source.texts.tokens)
    tokens[inside[0] + 1] = largest + 1
    texts = dataclasses.replace(source.texts, tokens=tokens)
    with pytest.raises(ValueError, match=f"{place} holds token id {largest + 1}, outside"):
        dataclasses.replace(source, texts=texts).rows(0, source.num_rows)


def test_an_empty_file_is_one_sentence(tmp_path, model):
    with pytest.raises(ValueError, match=r"chats.jsonl has no rows; pass at least one"):
        prepared(tmp_path, model)


def test_the_tokenizer_of_another_model_is_found(tmp_path, model):
    """The model beside the tokenizer has fewer rows than it has ids."""
    (model / "config.json").write_text(json.dumps({"vocab_size": 300}))
    letters = {"prompt": "x", "completion": "y"}
    why = r"chats.jsonl:2: token id \d+ is outside the vocabulary \[0, 300\) of .*config.json; use"
    with pytest.raises(ValueError, match=why):
        prepared(tmp_path, model, letters, GOOD)
    assert prepared(tmp_path, model, letters).vocab_size == 300
    (model / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    assert prepared(tmp_path, model, GOOD).vocab_size == load_tokenizer(model).vocab_size


def test_other_faults_are_one_sentence(tmp_path, model):
    for options, why in (
        ({"bad": "ignore"}, "bad='ignore' is not one of refuse, skip"),
        ({"answers": "last"}, "answers='last'.* all.* each"),
        ({"validation_fraction": 1}, "validation_fraction=1: it must be at least 0 and below 1"),
    ):
        with pytest.raises(ValueError, match=why):
            prepared(tmp_path, model, GOOD, **options)
    with pytest.raises(ValueError, match="'bpe:400' has to be trained, .*tokenizer of the model"):
        prepared(tmp_path, "bpe:400", GOOD)

    class Bare:
        vocab_size, separator = 9, np.zeros(0, np.int32)
        encode = decode = to_dict = lambda self, *_: {}

    with pytest.raises(TypeError, match="has no method encode_with_offsets, which chats need"):
        prepared(tmp_path, Bare(), GOOD)
    made = prepared(tmp_path, model, GOOD)
    with pytest.raises(ValueError, match="already holds token files; choose another folder"):
        prepare_chats(tmp_path / "chats.jsonl", made.folder, tokenizer=model)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="could not write texts into .*choose another folder"):
        prepare_chats(tmp_path / "chats.jsonl", tmp_path / "file" / "x", tokenizer=model)
    large = tmp_path / "large.jinja"
    large.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(ValueError, match="has 1048577 bytes, .* at most 1048576"):
        prepared(tmp_path, model, GOOD, template=large)
    large.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8 .*pass another template with --template"):
        prepared(tmp_path, model, GOOD, template=large)


def test_without_jinja_the_command_that_installs_it_is_named(tmp_path, model, monkeypatch):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "jinja2.py").write_text("raise ImportError('hidden')")
    monkeypatch.setenv("PYTHONPATH", str(hidden))
    with pytest.raises(ImportError, match=r"run `pip install 'zerojax\[chat\]'`"):
        prepared(tmp_path, model, GOOD)


# --- the command ----------------------------------------------------------------------------------


def test_the_command_says_what_came_out(tmp_path, model, capsys):
    data = lines(tmp_path / "chats.jsonl", *[GOOD] * 19, {"messages": [ASK]}, CHATS["two"])
    words = ["data", "prepare", str(data), str(tmp_path / "out"), "--format", "chat"]
    words += ["--tokenizer", str(model)]
    complaint(capsys, words, "chats.jsonl:20 'assistant'", '"--bad skip"')
    assert main([*words, "--bad", "skip"]) == 0
    said = capsys.readouterr().out
    assert "20 texts of 403 tokens from 21 rows, 1 of them to validate with; the longest" in said
    assert " are answers, marked by the template" in said
    assert f"skipped rows: 1, such as\n  {data}:20: no message" in said
    assert f"next: zerojax train CONFIG.yaml data.path={tmp_path}/out" in said


def test_options_of_chats_belong_to_chats(tmp_path, capsys):
    file = tmp_path / "book.txt"
    file.write_text("text " * 99)
    words = ["data", "prepare", str(file), str(tmp_path / "out"), "--answers", "each"]
    complaint(capsys, words, "--answers chats", '"--format chat"')
    assert main(words[:-2]) == 0


@pytest.mark.thorough
def test_zerojax_needs_none_of_the_extras():
    """Nothing of them is imported with it."""
    code = (
        "import zerojax, zerojax.data, zerojax.data.chats, sys; "
        "print([x for x in ('jinja2', 'pyarrow', 'tokenizers') if x in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_tokenizers_agree_on_offsets():
    """Bytes, a trained BPE and a model's file give the characters of each token."""
    text = "Aé 🙂 b"
    for tokenizer in (
        tokenizer_from_dict({"kind": "bytes"}),
        tokenizer_from_dict({"kind": "bpe", "json": content_of_tokenizer()}),
        tokenizer_from_dict(content_of_tokenizer()),
    ):
        [(ids, offsets)] = tokenizer.encode_with_offsets([text])
        assert ids.tolist() == tokenizer.encode(text).tolist()
        assert offsets.shape == (len(ids), 2)
        assert {i for start, end in offsets.tolist() for i in range(start, end)} == set(
            range(len(text))
        )


def test_a_row_at_which_the_tokenizer_fails_is_named_or_left_out(tmp_path, model, capfd):
    """A Rust panic, by a regular expression that tries too many ways, is no Exception."""
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(z+)+(z+)+$"}, "behavior": "Isolated"}
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{**split, "invert": False}, content["pre_tokenizer"]],
    }
    file.write_text(json.dumps(content))
    bad = {"messages": [{"role": "user", "content": "z" * 300 + "!"}, TELL]}
    data = lines(tmp_path / "c.jsonl", GOOD, bad, GOOD)
    words = ["data", "prepare", str(data), "--format", "chat", "--tokenizer", str(model)]
    complaint(capfd, [*words, str(tmp_path / "no")], "c.jsonl:2", "regular expressions --bad skip")
    made = prepare_chats(data, tmp_path / "out", tokenizer=model, bad="skip")
    assert (made.num_texts, made.skipped) == (2, 1)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x"


@pytest.mark.parametrize("bad", ["refuse", "skip"])
def test_a_template_that_loops_is_refused_at_its_first_chats(bad, tmp_path, model, monkeypatch):
    """Not after the limit of time of each chat of a batch."""
    ended = []
    real = template_process.TemplateProcess._why_it_ended
    monkeypatch.setattr(
        template_process.TemplateProcess,
        "_why_it_ended",
        lambda own: ended.append(1) or real(own),
    )
    data = lines(tmp_path / "c.jsonl", *[GOOD] * 300)
    (tmp_path / "loops.jinja").write_text(LOOPS)
    options = {"template": str(tmp_path / "loops.jinja"), "limits": Limits(seconds=0.3), "bad": bad}
    make = lambda **other: prepare_chats(  # noqa: E731
        data, tmp_path / "out", tokenizer=model, **{**options, **other}
    )
    row = {"refuse": 1, "skip": 2}[bad]
    refused(make, f"c.jsonl:{row} 0.3", "--template")
    assert len(ended) == row
    assert make(template=None).num_texts == 300


def test_a_chat_of_some_long_rendering_is_left_out_alone(tmp_path, model):
    """Once a chat was rendered, it is the row, and not the template, that is at fault."""
    loops = LOOPS.replace("x", "{% endif %}") + TEMPLATES["chatml"]
    (tmp_path / "t.jinja").write_text("{% if 'slow' in messages[0].content %}" + loops)
    slow = {"messages": [{"role": "user", "content": "slow"}, TELL]}
    data = lines(tmp_path / "c.jsonl", GOOD, slow, slow, slow, GOOD)
    options = {"template": str(tmp_path / "t.jinja"), "limits": Limits(seconds=0.3)}
    made = prepare_chats(data, tmp_path / "out", tokenizer=model, bad="skip", **options)
    assert (made.num_texts, made.skipped) == (2, 3)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "value", "remedy"),
    [
        ({"messages": [ASK, TELL] * 100_000}, "200,000 10,000", "several chats"),
        ({"messages": [ASK, {**TELL, "content": "a" * 3_000_000}]}, "2,000,000", "several chats"),
        ({"prompt": "q", "completion": "a" * 3_000_000}, "3,000,001 2,000,000", "several chats"),
    ],
)
def test_a_chat_that_is_too_long_is_refused_before_it_is_rendered(
    suffix, row, value, remedy, tmp_path, model, monkeypatch
):
    monkeypatch.setattr(
        chat_preparation, "TemplateProcess", lambda *a, **b: pytest.fail("was rendered")
    )
    data = tmp_path / f"c.{suffix}"
    if suffix == "jsonl":
        lines(data, row)
    else:
        write_table(data, [row])
    refused(lambda: prepare_chats(data, tmp_path / "out", tokenizer=model), f"c.{suffix}:1", value)
    with pytest.raises(ValueError, match=remedy):
        prepare_chats(data, tmp_path / "out", tokenizer=model)


def test_texts_of_each_answer_of_a_long_chat_are_limited_together(tmp_path, model):
    long = {"messages": [ASK, {**TELL, "content": "a" * 2000}] * 100}
    data = lines(tmp_path / "c.jsonl", long)
    call = functools.partial(prepare_chats, data, tmp_path / "out", tokenizer=model)
    refused(lambda: call(answers="each"), "2,000,000", "several chats")
    assert call().num_texts == 1


def test_a_row_of_any_length_is_not_read_beyond_the_limit(tmp_path, model, monkeypatch):
    monkeypatch.setattr(chat_preparation, "_MAX_ROW_BYTES", 10_000)
    data = tmp_path / "c.jsonl"
    for content in (b"[" * 20_000, b" " * 20_000, b'{"a": "' + b"b" * 20_000):
        data.write_bytes(json.dumps(GOOD).encode() + b"\n" + content)
        call = functools.partial(prepare_chats, data, tmp_path / "out", tokenizer=model)
        refused(call, "c.jsonl:2 10,000", "fix")


def test_tokens_of_answers_are_those_that_cover_a_part_of_them():
    """For many answers in one text, also of tokens that cover no character."""
    generator = np.random.default_rng(4)
    for _ in range(200):
        starts = np.sort(generator.integers(0, 60, 40))
        offsets = np.stack([starts, starts + generator.integers(0, 3, 40)], axis=1)
        offsets[:, 1] = np.maximum.accumulate(offsets[:, 1])
        bounds = np.sort(generator.choice(60, 8, replace=False)).tolist()
        answers = tuple(zip(bounds[::2], bounds[1::2], strict=True))
        marked = chat_encoding.MarkedText(text="x" * 63, answers=answers)
        found = chat_encoding._encoded(marked, np.arange(40), offsets)
        asked, seams = np.zeros(40, bool), 0
        for start, end in answers:
            mine = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
            if mine.size:
                asked[mine[0] : mine[-1] + 1] = True
                seams += int(offsets[mine[0], 0] < start)
        np.testing.assert_array_equal(found.asked, asked)
        assert found.num_seams == seams
