"""Templates in the sandbox: the text, tokens and masks of transformers, and no harm."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.chat_samples import BOS, CHATS, EOS, SPECIAL, TEMPLATES, unmarked
from zerojax.data.chats.chat_encoding import MarkedText, encode_marked, without_frame
from zerojax.data.chats.chat_template import ChatTemplate, Limits, TurnError
from zerojax.data.chats.template_process import TemplateProcess
from zerojax.data.tokenizer import tokenizer_from_dict

pytest.importorskip("jinja2", reason="needs the package jinja2: pip install jinja2")
pytest.importorskip("tokenizers", reason="needs the package tokenizers: pip install tokenizers")

FIXTURE = json.loads((Path(__file__).parents[1] / "data" / "chats.json").read_text())
VARIABLES = {"bos_token": BOS, "eos_token": EOS}
CASES = [case for case in FIXTURE["cases"] if "error" not in case]
FAILING = [case for case in FIXTURE["cases"] if "error" in case]


@functools.cache
def tokenizer_of(name: str):
    return tokenizer_from_dict(FIXTURE["tokenizers"][name])


@functools.cache
def template_of(name: str, *, with_marks: bool = True) -> ChatTemplate:
    source = TEMPLATES[name] if with_marks else unmarked(TEMPLATES[name])
    return ChatTemplate(source, variables=VARIABLES, now=FIXTURE["date"])


def named(case: dict) -> str:
    return f"{case['tokenizer']}-{case['template']}-{case['chat']}"


def encoded(case: dict, text: str, answers) -> tuple[list[int], list[int]]:
    [made] = encode_marked(
        tokenizer_of(case["tokenizer"]), [MarkedText(text=text, answers=tuple(answers))]
    )
    return made.ids.tolist(), made.asked.astype(int).tolist()


# --- as transformers ------------------------------------------------------------------------------


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_text_tokens_and_mask_are_those_of_transformers(case):
    chat = CHATS[case["chat"]]
    text, answers = template_of(case["template"]).answers(chat["messages"], chat.get("tools"))
    assert text == case["text"]
    ids, mask = encoded(case, text, answers)
    assert ids == case["ids"]
    assert mask == case["mask"]
    assert 0 < sum(mask) < len(mask)


def found_by_renderings(case: dict) -> bool:
    """Whether what comes before an answer tells its place: not where thoughts are dropped later."""
    return case["template"] != "thinking" or case["chat"] == "one"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", [x for x in CASES if found_by_renderings(x)], ids=named)
def test_without_marks_answers_are_found_by_rendering_what_comes_before(case):
    chat = CHATS[case["chat"]]
    template = template_of(case["template"], with_marks=False)
    assert not template.has_markers
    text, answers = template.answers(chat["messages"], chat.get("tools"))
    assert text == case["text"]
    _, mask = encoded(case, text, without_frame(text, answers, SPECIAL))
    expected = np.array(case["mask"])
    if case["template"] == "thinking" and case["chat"] == "one":
        # Marks count the empty thought, which is part of the request here.
        thought = text[: answers[0][0]] + "<think>\n\n</think>\n\n"
        ids, _ = encoded(case, thought, ())
        expected[: len(ids)] = 0
    assert mask == expected.tolist()


@pytest.mark.parametrize("case", FAILING, ids=named)
def test_what_transformers_refuses_is_refused_with_the_same_words(case):
    chat = CHATS[case["chat"]]
    with pytest.raises(Exception, match=f"^{re.escape(case['error'])}$"):
        template_of(case["template"]).answers(chat["messages"], chat.get("tools"))


def test_every_template_is_among_the_cases():
    assert {case["template"] for case in CASES} == set(TEMPLATES)
    assert {case["chat"] for case in CASES} == set(CHATS)
    assert {case["tokenizer"] for case in CASES} == {"byte_level", "pieces"}
    assert len(FAILING) == 6


def test_the_first_token_is_there_once():
    """The template writes it, and the tokenizer's own template, which would, is left aside."""
    tokenizer = tokenizer_of("byte_level")
    assert tokenizer.prefix.tolist() == [0]
    for case in CASES:
        assert case["ids"].count(0) == (case["template"] in ("headers", "turns"))


# --- turns ----------------------------------------------------------------------------------------


def test_an_answer_that_is_written_in_another_way_later_is_named():
    """What was thought is dropped once a question follows."""
    template = template_of("thinking", with_marks=False)
    with pytest.raises(TurnError, match="^message 2, of the assistant, is rendered differently"):
        template.answers(CHATS["thoughts"]["messages"])
    text, answers = template.answers(CHATS["thoughts"]["messages"], turns=[3])
    assert text[slice(*answers[0])] == "<think>\n3 does\n</think>\n\nNo.<|im_end|>\n"
    assert len(answers) == 1


def test_an_answer_to_nothing_is_named():
    with pytest.raises(TurnError, match="message 1 is the assistant's, with no question"):
        template_of("chatml", with_marks=False).answers(CHATS["one"]["messages"][1:])


def test_a_request_that_the_answer_does_not_follow_is_named():
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT{% endif %}"
    )
    with pytest.raises(TurnError, match="message 2, of the assistant, does not begin with"):
        template.answers(CHATS["one"]["messages"])


@pytest.mark.parametrize("with_marks", [True, False])
def test_answers_of_the_question_are_not_asked_for(with_marks):
    template = template_of("chatml", with_marks=with_marks)
    text, answers = template.answers(CHATS["two"]["messages"], turns=[3])
    assert [text[slice(*one)].rstrip("\n") for one in answers] == [" 6, of course\n<|im_end|>"]


def test_marks_that_do_not_fit_the_turns_of_a_question_are_refused():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    with pytest.raises(TurnError, match="4 marks for 2 answers"):
        ChatTemplate(source).answers(CHATS["two"]["messages"], turns=[3])


def test_the_frame_of_an_answer_is_left_out():
    text = "Q<think>\n\n</think>\n\nA<|im_end|>\n"
    [place] = without_frame(text, [(1, len(text))], SPECIAL)
    assert text[slice(*place)] == "A<|im_end|>"
    # White space that no special token precedes may be the answer itself.
    text = "Q: A \n"
    assert without_frame(text, [(3, 6)], SPECIAL) == ((3, 6),)
    # A thought without an answer stays.
    text = "Q<think></think>"
    assert without_frame(text, [(1, len(text))], SPECIAL) == ((1, len(text)),)


def test_a_token_with_characters_of_both_sides_counts_and_is_counted():
    tokenizer = tokenizer_of("byte_level")
    text = "The sky"
    _, offsets = tokenizer.encode_with_offsets([text])[0]
    [*_, index] = np.flatnonzero(np.diff(offsets, axis=1)[:, 0] > 1)
    place = int(offsets[index, 0]) + 1, int(offsets[index, 1])
    [made] = encode_marked(tokenizer, [MarkedText(text=text, answers=(place,))])
    assert np.flatnonzero(made.asked).tolist() == [index]
    assert made.num_seams == 1


# --- a stranger's code ----------------------------------------------------------------------------

CHAT = {"messages": CHATS["one"]["messages"]}
LIMITS = Limits(seconds=60, characters=100_000, megabytes=64)
SHORT = dataclasses.replace(LIMITS, seconds=0.3)


def answered(source: str, limits: Limits) -> list:
    """What a template answers to two chats, the second of which is never harmed by the first."""
    with TemplateProcess(source, limits=limits) as process:
        process.send([CHAT, {"messages": [{"role": "assistant", "content": "x"}]}])
        return list(process.receive())


@pytest.mark.parametrize(
    ("code", "why"),
    [
        pytest.param(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "more than 0.3 s",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "{{ (messages | length + 10**9) ** (10**9) }}",
            "more than 0.3 s of processor time",
            marks=pytest.mark.thorough,
        ),
        ("{{ 'x' * 10**9 }}{{ messages[0].content * 10**9 }}", "more memory than the limit"),
        ("{% for a in range(9999) %}{{ 'x' * 1000 }}{% endfor %}", "more than 100000 characters"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "infinite recursion"),
        ("{{ raise_exception('two\nlines') }}", "^two lines$"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe"),
        (
            "{% set n = namespace(a=1) %}{% set n.__class__ = 1 %}",
            "not a valid name for a namespace",
        ),
        ("{{ namespace(_Namespace__attrs=1) }}", "not a valid name for a namespace"),
    ],
)
def test_a_template_that_does_harm_is_one_sentence(code, why):
    """Only the first of two chats runs into it."""
    source = f"{{% if messages[0].role == 'user' %}}{code}{{% endif %}}fine"
    first, second = answered(source, SHORT if "0.3 s" in why else LIMITS)
    assert first.error is not None
    assert re.search(why, first.error), first.error
    assert "\n" not in first.error
    assert second.turn == "message 1 is the assistant's, with no question before it"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for %}", r"the chat template is not a valid chat template \(Expected an expression"),
        pytest.param(
            "{{ 9 ** 99999999 }}",
            r"chat template.*more than 0.3 s",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_template_that_is_none_is_one_sentence(source, why):
    with pytest.raises(ValueError, match=why):
        TemplateProcess(source, limits=SHORT if "0.3 s" in why else LIMITS)


@pytest.mark.thorough
def test_a_process_that_ends_otherwise_is_one_sentence():
    with TemplateProcess("fine") as process:
        process._process.kill()
        process._process.wait()
        process.send([CHAT])
        [found] = process.receive()
        assert found.error == "the rendering process ended (signal 9)"
        process.send([CHAT])
        assert next(process.receive()).text == "fine", "a new one goes on"


def test_the_process_is_gone_afterwards():
    with TemplateProcess("fine") as process:
        number = process._process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_the_program_of_the_process_imports_nothing_of_zerojax():
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "print([x for x in sys.modules if x.split('.')[0] in ('zerojax', 'jax', 'numpy')])"
    )
    program = Path(sys.modules[ChatTemplate.__module__].__file__)
    found = subprocess.run(
        [sys.executable, "-P", "-c", code, str(program)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
