"""A text that comes in pieces has the ids of one call on the whole text, for every tokenizer."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.refusals import refused
from zerojax.data import HuggingFaceTokenizer, corpus, preparation, read_text, subwords
from zerojax.data.preparation import encode_document, encode_files
from zerojax.data.tokenizer import ByteTokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
models, normalizers = tokenizers.models, tokenizers.normalizers
splits, processors = tokenizers.pre_tokenizers, tokenizers.processors

PROSE = read_text()[:6000]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HOSTILE = {
    "prose": PROSE,
    "code": "def f(x):\n    return [x,\n        '½²', 'Ⅳ']\n\n\n}\n\t# <m> end\r\n\r\n" * 60,
    "spaces": ("word" + " " * 37 + "end\n" + "\n" * 41 + " \n" * 17 + "next\t\t\tone") * 30,
    "one run": "a" * 4001,
    "two runs": ("a" * 333 + " ") * 12,
    "chinese": "話說天下大勢,分久必合。合久必分!" * 200,
    "chinese lines": "　　話說天下大勢\n分久必合。\n" * 200,
    "marks": "e\u0301 \u0301\u0327\n\u0301x ﬁ ﷺ \u037a\n½ 日\ufeff \u200b\x00\n\x85y \u2028z " * 60,
    "added": "to be<m>or \n <m> \n not <sep>the whole\n<m><end> foo bar baz\n foo \n bar" * 60,
    "numbers": "12345 678\n90 1234567890\n" * 150,
}
SPECIAL = ("<unk>", "<s>", "<m>", "<end>")


def made(
    model: Any,
    trainer: Any,
    *,
    normalizer: Any = None,
    split: Any = None,
    after: Any = None,
    added: tuple[Any, ...] = (),
) -> Any:
    """Trains a tokenizer on all texts, line by line."""
    backend = tokenizers.Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if split is not None:
        backend.pre_tokenizer = split
    backend.train_from_iterator([x for text in HOSTILE.values() for x in text.split("\n")], trainer)
    if after is not None:
        backend.post_processor = after
    backend.add_tokens(list(added))
    return backend


def bpe(**options: Any) -> Any:
    alphabet = sorted(splits.ByteLevel.alphabet()) if "ByteLevel" in str(options) else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=[*alphabet, "a"],
    )
    fused = options.pop("fuse_unk", False)
    return made(models.BPE(unk_token="<unk>", fuse_unk=fused), trainer, **options)


def unigram(**options: Any) -> Any:
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False
    )
    return made(models.Unigram(), trainer, **options)


def wordpiece(**options: Any) -> Any:
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), show_progress=False
    )
    return made(models.WordPiece(unk_token="<unk>"), trainer, **options)


def wordlevel(**options: Any) -> Any:
    trainer = tokenizers.trainers.WordLevelTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), show_progress=False
    )
    return made(models.WordLevel(unk_token="<unk>"), trainer, **options)


def regex(pattern: str, behavior: str = "isolated", *, invert: bool = False) -> Any:
    return splits.Split(tokenizers.Regex(pattern), behavior, invert)


def split(pattern: str, **options: Any) -> Callable[[], Any]:
    """Returns a maker of a tokenizer of Llama 3's kind with another pattern."""
    behavior = {key: options.pop(key) for key in ("behavior", "invert") if key in options}
    steps = [regex(pattern, **behavior), splits.ByteLevel(False, use_regex=False)]
    return lambda: bpe(split=splits.Sequence(steps), **options)


def token(content: str, **options: Any) -> Any:
    return tokenizers.AddedToken(content, **options)


def begins_with_bos() -> Any:
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


def llama2(**options: Any) -> Any:
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return bpe(normalizer=normalizers.Sequence(steps), after=begins_with_bos(), **options)


def t5() -> Any:
    steps = [normalizers.Nmt(), normalizers.NFKC()]
    steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    return unigram(
        normalizer=normalizers.Sequence(steps),
        split=splits.Sequence([splits.WhitespaceSplit(), splits.Metaspace()]),
    )


def clip() -> Any:
    steps = [normalizers.NFC(), normalizers.Replace(tokenizers.Regex(r"\s+"), " ")]
    pattern = r"'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    return split(
        pattern,
        behavior="removed",
        invert=True,
        normalizer=normalizers.Sequence([*steps, normalizers.Lowercase()]),
    )()


# Tokenizers whose texts of lines are cut.
CUT: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: bpe(split=splits.ByteLevel(False)),
    "a space before": lambda: bpe(split=splits.ByteLevel(True), after=processors.ByteLevel()),
    "llama2": llama2,
    "llama2 of fused unknowns": lambda: llama2(fuse_unk=True),
    "metaspace first": lambda: bpe(split=splits.Metaspace(prepend_scheme="first", split=False)),
    "metaspace of words": lambda: bpe(split=splits.Metaspace(prepend_scheme="first")),
    "metaspace always": lambda: unigram(split=splits.Metaspace(prepend_scheme="always")),
    "t5": t5,
    "bert": lambda: wordpiece(
        normalizer=normalizers.BertNormalizer(), split=splits.BertPreTokenizer()
    ),
    "strip": lambda: wordpiece(
        normalizer=normalizers.Sequence([normalizers.Strip(), normalizers.NFD()]),
        split=splits.Whitespace(),
    ),
    "strip and bytes": lambda: bpe(normalizer=normalizers.Strip(), split=splits.ByteLevel(True)),
    "words": lambda: wordlevel(normalizer=normalizers.NFKC(), split=splits.Whitespace()),
    "llama3": split(LLAMA3, after=begins_with_bos()),
    "digits": lambda: bpe(split=splits.Sequence([splits.Digits(True), splits.ByteLevel(False)])),
    "punctuation": lambda: bpe(
        split=splits.Sequence([splits.Punctuation("contiguous"), splits.ByteLevel(False)])
    ),
    "deepseek": lambda: bpe(
        split=splits.Sequence(
            [regex(x) for x in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")]
            + [splits.ByteLevel(False, use_regex=False)]
        )
    ),
    "clip": clip,
    "merged": split(r"\s+", behavior="merged_with_next"),
    "contiguous": split(r"\p{N}|\p{P}", behavior="contiguous"),
    "text": lambda: bpe(
        split=splits.Sequence([splits.Split("-", "isolated"), splits.ByteLevel(True)])
    ),
    "added": split(LLAMA3, added=(token("<sep>"), token("foo", lstrip=True), token("\nthe"))),
}
# Tokenizers of which it is not known that a part of a text has the ids of the whole.
WHOLE: dict[str, Callable[[], Any]] = {
    "no words": lambda: unigram(split=splits.Metaspace(split=False)),
    "sees the end": split(r"a(?=[^b]*b)|\s+|\S"),
    "reaches far": split(r"[a-z][^z]*z|[\s\S]"),
    "eats spaces": split(LLAMA3, added=(token("be", rstrip=True), token("word", rstrip=True))),
    "added of words": split(LLAMA3, added=(token("foo bar"), token("whole\n<m>"), token("A\nB"))),
    "counts": lambda: bpe(split=splits.Sequence([splits.FixedLength(7), splits.ByteLevel(False)])),
    "letters become spaces": lambda: bpe(
        normalizer=normalizers.Replace("e", " "), split=splits.ByteLevel(True)
    ),
    "lines vanish": lambda: bpe(
        normalizer=normalizers.Replace(tokenizers.Regex("[ \n]"), ""), split=splits.ByteLevel(True)
    ),
    "sentences": split(r"[^.]+\.|."),
    "a line at the end": split(r"\w+\s*|\W"),
}


def both(maker: Callable[[], Any]) -> tuple[Any, HuggingFaceTokenizer]:
    """Returns a tokenizer of `tokenizers` and of zerojax, both of one file: in a file the scores of
    Unigram are rounded, which decides between equal sums."""
    content = maker().to_str()
    return tokenizers.Tokenizer.from_str(content), HuggingFaceTokenizer(json.loads(content))


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Notes the texts of each call of a tokenizer."""
    calls: list[list[str]] = []
    real = subwords._SubwordTokenizer._encodings
    monkeypatch.setattr(
        subwords._SubwordTokenizer,
        "_encodings",
        lambda own, texts, *args, **options: (
            calls.append(list(texts)) or real(own, texts, *args, **options)
        ),
    )
    return calls


def cut_by(sizes: itertools.cycle[int], text: str) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        size = next(sizes)
        pieces.append(text[at : at + size])
        at += size
    return pieces


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
def test_ids_of_pieces_are_those_of_the_whole_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a few characters, cut anywhere: in words, runs, added tokens and line ends."""
    backend, ours = both((CUT | WHOLE)[name])
    monkeypatch.setattr(subwords, "_BLOCK_PIECES", 4)
    calls = calls_of(monkeypatch)
    for kind, text in HOSTILE.items():
        expected = backend.encode(text, add_special_tokens=False).ids
        for size, pieces in ((23, [1, 2, 3, 50]), (150, [97])):
            monkeypatch.setattr(subwords, "PIECE_CHARACTERS", size)
            calls.clear()
            given = cut_by(itertools.cycle(pieces), text)
            found = np.concatenate(list(ours.encode_pieces(given)))
            np.testing.assert_array_equal(found, expected, err_msg=f"{kind} {size}")
            longest = max(len(each) for call in calls for each in call)
            if kind == "prose":
                assert (longest < len(text) / 4) == (name in CUT), longest
        assert ours.decode(found) == backend.decode(expected, skip_special_tokens=False)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_ids_of_random_pieces_of_random_texts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = random.Random(seed)
    monkeypatch.setattr(subwords, "_BLOCK_PIECES", 3)
    parts = [text[at : at + 9] for text in HOSTILE.values() for at in range(0, 400, 3)]
    for name, maker in (CUT | WHOLE).items():
        backend, ours = both(maker)
        for _ in range(20):
            text = "".join(draws.choices(parts, k=200))
            monkeypatch.setattr(subwords, "PIECE_CHARACTERS", draws.choice((11, 60, 200)))
            given = cut_by(itertools.cycle(draws.choices(range(1, 400), k=5)), text)
            found = np.concatenate(list(ours.encode_pieces(given)))
            expected = backend.encode(text, add_special_tokens=False).ids
            np.testing.assert_array_equal(found, expected, err_msg=f"{name}: {text!r}")


def whole_document(text: str, tokenizer: Any, size: int) -> np.ndarray:
    return np.concatenate(list(encode_document(cut_by(itertools.cycle([size]), text), tokenizer)))


def test_what_cannot_be_cut_is_encoded_at_once_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subwords, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(subwords, "MAX_WHOLE_CHARACTERS", 5000)
    text = HOSTILE["one run"]
    backend, ours = both(CUT["gpt2"])
    expected = backend.encode(text, add_special_tokens=False).ids
    assert whole_document(text, ours, 97).tolist() == expected
    refused(lambda: whole_document(text * 2, ours, 97), "5,000", "documents .jsonl text")
    # The remedy: documents, each shorter than the limit.
    assert whole_document(text, ours, 4001).tolist() == expected
    # Memory does not grow with the pieces before the refusal.
    read: list[int] = []
    endless = (read.append(1) or "a" * 1000 for _ in range(10**6))
    refused(lambda: list(ours.encode_pieces(endless)), "5,000", ".jsonl")
    assert len(read) < 20


def test_a_long_text_needs_no_more_memory_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call gets a block at most, and what is held does not grow."""
    monkeypatch.setattr(subwords, "PIECE_CHARACTERS", 200)
    monkeypatch.setattr(subwords, "_BLOCK_PIECES", 4)
    calls = calls_of(monkeypatch)
    _, ours = both(llama2)
    for _ in ours.encode_pieces(PROSE for _ in range(10)):
        pass
    assert len(calls) > 10 * len(PROSE) / 1600
    assert max(sum(map(len, call)) for call in calls) < 3000


class Words:
    """A user's tokenizer, which marks the start of a text and has no method `encode_pieces`."""

    vocab_size, separator = 3, np.zeros(0, np.int32)

    def encode(self, text: str) -> np.ndarray:
        return np.asarray([2, *([1] * len(text.split()))], np.int32)

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))

    def to_dict(self) -> dict[str, Any]:
        return {}


def test_a_users_tokenizer_gets_each_document_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one two three\n" * 50
    assert whole_document(text, Words(), 33).tolist() == [2, *[1] * 150]
    assert whole_document(text, ByteTokenizer(), 33).tolist() == list(text.encode())
    monkeypatch.setattr(preparation, "MAX_WHOLE_CHARACTERS", 500)
    refused(lambda: whole_document(text, Words(), 33), "500", "encode_pieces .jsonl")


@pytest.mark.parametrize("name", ["llama2", "a space before", "llama3", "no words"])
def test_files_have_the_ids_of_one_call(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `zerojax data prepare` and `train` read, with the separator between documents alone."""
    backend, ours = both((CUT | WHOLE)[name])
    monkeypatch.setattr(corpus, "PIECE_CHARACTERS", 300)
    monkeypatch.setattr(subwords, "PIECE_CHARACTERS", 100)
    for number, kind in enumerate(("prose", "spaces", "chinese")):
        (tmp_path / f"{number}.txt").write_bytes(HOSTILE[kind].encode())
    files = sorted(tmp_path.iterdir())
    found = np.concatenate([ids for _, ids in encode_files(files, ours)])
    texts = [
        backend.encode(HOSTILE[kind], add_special_tokens=False).ids
        for kind in ("prose", "spaces", "chinese")
    ]
    between = ours.separator.tolist()
    assert found.tolist() == [*texts[0], *between, *texts[1], *between, *texts[2]]


SLOW = {
    "groups": "(a+)+(a+)+(a+)+$",
    "twice": "(x+x+)+y|(a+a+)+b",
    "runs": r"a*a*a*a*a*a*a*a*\d",
}


@pytest.mark.parametrize("pattern", SLOW.values(), ids=SLOW)
@pytest.mark.parametrize("ask", ["encode", "encode_with_offsets", "encode_texts", "decode"])
def test_a_panic_of_rust_is_one_sentence(
    pattern: str, ask: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The package panics if a regular expression tries too many ways; a panic is no Exception."""
    text = "a" * 300 + "!"
    content = json.loads(bpe(split=splits.ByteLevel(False)).to_str())
    regex = {"Regex": pattern}
    good = HuggingFaceTokenizer(content)
    if ask == "decode":
        content["decoder"] = {
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": regex, "content": ""}],
        }
    else:
        content["pre_tokenizer"] = {
            "type": "Split",
            "pattern": regex,
            "behavior": "Isolated",
            "invert": False,
        }
    bad = HuggingFaceTokenizer(content)
    given = {"decode": good.encode(text), "encode": text}.get(ask, [text])
    capfd.readouterr()
    refused(lambda: getattr(bad, ask)(given), ask.split("_")[0], "simplify regular expressions")
    assert capfd.readouterr().err == ""
    getattr(good, ask)(given)


def test_other_errors_of_the_package_are_one_sentence() -> None:
    """It raises bare Exceptions, for example for a character that no token has."""
    content = json.loads(wordlevel(split=splits.Whitespace()).to_str())
    content["model"]["unk_token"] = "<none>"
    ours = HuggingFaceTokenizer(content)
    refused(lambda: ours.encode("unheard of"), "encode", "tokenizer.json published")
