"""Refusals of chats: what a record may say, and the files, tokenizers and templates it needs."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.batches.test_chat_preparation import GOOD, lines, model, model_folder, prepared
from tests.support.chat_samples import TEMPLATES
from tests.support.refusals import Refusal, refused, table
from zerojax.cli import main
from zerojax.data.chats import prepare_chats, template_files
from zerojax.data.chats.chat_encoding import EncodedChat, check_asked
from zerojax.data.chats.conversations import MAX_MESSAGES, RecordError, chat_of, check_size
from zerojax.data.opening import open_texts

__all__ = ["model"]

ASK, TELL = GOOD["messages"]
SYSTEM = {"role": "system", "content": "Be short."}


def chat(*messages: Any, **more: Any) -> Any:
    return chat_of({"messages": list(messages), **more})


def pair(prompt: Any, completion: Any, **more: Any) -> Any:
    return chat_of({"prompt": prompt, "completion": completion, **more})


def said(role: str, name: str = "conversations") -> Any:
    return chat_of({name: [{"from": "human", "value": "Who?"}, {"from": role, "value": "I."}]})


def sized(*messages: Any, each: bool = False) -> None:
    check_size(chat(*messages), 200, each=each)


def asked(*marks: bool) -> None:
    ids, is_asked = np.arange(len(marks)), np.asarray(marks)
    check_asked(EncodedChat(ids=ids, asked=is_asked, num_seams=0), "generation")


RECORDS = table(
    """
chat(ASK, TELL, system=3) | system 3 | text | chat(ASK, TELL, system="3")
chat(SYSTEM, ASK, TELL, system="Be long.") | 'Be long.' 'Be short.' | remove
  | chat(SYSTEM, ASK, TELL) ; chat(ASK, TELL, system="Be long.")
pair("Who?", "I.", system="Be short.") | 'Be short.' | prompt messages
  | pair("Be short. Who?", "I.") ; pair([ASK], [TELL], system="Be short.")
pair("Who?", "") | empty | completion | pair("Who?", "I.")
pair("Who?", [TELL]) | prompt completion | text messages | pair("Who?", "I.") ; pair([ASK], [TELL])
chat(ASK, ASK) | user | 'assistant' | chat(ASK, {**ASK, "role": 'assistant'})
chat(ASK, {**TELL, "weight": 0}) | 0 | 1 | chat(ASK, {**TELL, "weight": $})
chat(ASK, {**TELL, "content": ""}) | 2 | answer | chat(ASK, {**TELL, "content": "an answer"})
chat(*[ASK, TELL] * MAX_MESSAGES) | messages | several | chat(*[ASK, TELL])
chat() | messages | two | chat(ASK, TELL)
said("gtp") | 'gtp' | gpt | said("$")
chat(ASK, {**TELL, "content": datetime.date(2026, 1, 2)}) | content | text
  | chat(ASK, {**TELL, "content": str(datetime.date(2026, 1, 2))})
chat({**ASK, "weight": 1}, TELL) | 'user' weight=1 | remove | chat(ASK, TELL)
chat(ASK, {**TELL, "train": 2}) | train=2 | true false | chat(ASK, {**TELL, "train": True})
chat(ASK, TELL, tools="{") | tools | list | chat(ASK, TELL, tools=[])
chat(ASK, TELL, tools={"a": 1}) | tools | list | chat(ASK, TELL, tools=[{"a": 1}])
asked(False, False) | token | leave generation | asked(False, True)
asked(True, True) | token | question generation | asked(False, True)
sized(*[ASK, TELL] * 4) | 200 | several | sized(ASK, TELL)
sized(*[ASK, TELL] * 2, each=True) | 200 | several | sized(ASK, TELL, each=True)
""",
    RecordError,
)
IMPORTED = {"MAX_MESSAGES": MAX_MESSAGES, "datetime": datetime}


@pytest.mark.parametrize("row", RECORDS)
def test_records(row):
    RECORDS[row].check(lambda call: eval(call, globals() | IMPORTED))


def test_folders_and_tokenizers_of_chats(tmp_path, model):
    pytest.importorskip("jinja2")
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "chats.txt").write_text("")
    file = lines(tmp_path / "rows.jsonl", GOOD)
    number = iter(range(99))

    def prepare(data: Path, tokenizer: Any = model, out: Path | None = None) -> None:
        prepare_chats(data, out or tmp_path / f"out{next(number)}", tokenizer=tokenizer)

    Refusal(folder, [folder, ".jsonl"], "file", [file]).check(prepare)
    own = lambda tokenizer: prepare(file, tokenizer)  # noqa: E731
    good = [model, model / "tokenizer.json"]
    Refusal("bpe:300", "tokenizer='bpe:300'", "tokenizer.json folder", good[:1]).check(own)

    class Plain:
        """Has no offsets."""

        encode = decode = to_dict = lambda self: None
        vocab_size, separator = 256, np.zeros(0, np.int32)

    Refusal(Plain(), "encode_with_offsets", "tokenizer.json", good[:1], TypeError).check(own)
    (tmp_path / "file").touch()
    out = lambda out: prepare(file, out=out)  # noqa: E731
    bad, good = tmp_path / "file" / "out", [tmp_path / "another"]
    Refusal(bad, [bad], "another", good, OSError).check(out)
    empty = lines(tmp_path / "none.jsonl")
    Refusal(empty, [empty], "one", [file]).check(prepare)


def test_templates_of_chats(tmp_path, model):
    pytest.importorskip("jinja2")
    file = lines(tmp_path / "rows.jsonl", GOOD)
    bare = model_folder(tmp_path / "bare", template=None)
    broken, large = tmp_path / "broken.jinja", tmp_path / "large.jinja"
    failing, good = tmp_path / "failing.jinja", tmp_path / "good.jinja"
    good.write_text(TEMPLATES["chatml"])
    broken.write_text("{% if %}")
    large.write_text("x" * (template_files._MAX_BYTES + 1))
    failing.write_text("{{ raise_exception('no') }}")
    words = ["data", "prepare", str(file), "--format", "chat"]

    def take(given: dict[str, Any]) -> None:
        number = len(list(tmp_path.glob("out*")))
        prepare_chats(file, tmp_path / f"out{number}", **{"tokenizer": bare, **given})

    right = [{"template": good}]
    Refusal({}, ["bare"], "--template --tokenizer", [*right, {"tokenizer": model}]).check(take)
    for bad, value in ((broken, "valid"), (large, str(template_files._MAX_BYTES)), (failing, "no")):
        Refusal({"template": bad}, value, "--template", right).check(take)
    Refusal({"template": "chatm"}, "'chatm'", "file", right).check(take)
    assert (
        main([*words, str(tmp_path / "cli"), "--tokenizer", str(bare), "--template", str(good)])
        == 0
    )


def test_a_tokenizer_of_another_model(tmp_path, model):
    pytest.importorskip("jinja2")
    make = lambda: prepared(tmp_path, model, GOOD)  # noqa: E731
    (model / "config.json").write_text('{"vocab_size": 300}')
    refused(make, "config.json 300", "tokenizer")
    (model / "config.json").write_text('{"vocab_size": 1000}')
    make()


def test_a_folder_of_chats_whose_tokenizer_was_changed(tmp_path, model):
    pytest.importorskip("jinja2")
    folder = prepared(tmp_path, model, GOOD, GOOD).folder
    for name in ("tokenizer.json", "chat_template.jinja"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole + b" ")
        remedy = 'restore "zerojax data prepare"'
        refused(lambda: open_texts(folder), [folder / name], remedy)
        (folder / name).write_bytes(whole)
        open_texts(folder)
    (folder / name).unlink()
    refused(lambda: open_texts(folder), [folder / name], "prepare")
    open_texts(prepared(tmp_path, model, GOOD, GOOD).folder)
