"""Finds the places of a text that no step of a `tokenizers` tokenizer reaches across.

A barrier is a place after a visible character and before a space or a line end. Whether one is kept
apart from its surroundings is decided from the tokenizer.json: each normalizer, pre-tokenizer and
added token is of a known kind, and no string that a pattern matches, or a part of it, has such a
character followed by the space. Then what is left of a barrier depends on the text to its right by
at most one character, and the other way round. What is not known is not cut.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zerojax.config.late_dataclasses import dataclass

LETTER, SIGN, SPACE, LINE = "a", "!", " ", "\n"
"""Classes of characters: letters and decimal digits; punctuation and symbols; and two characters.
Any other character is in no class, and no barrier is beside it."""
_EVERY = frozenset((LETTER, SIGN, SPACE, LINE))
_LEFT, _RIGHT = (frozenset((LETTER, SIGN)), frozenset((LETTER,))), (SPACE, LINE)
_OLD = unicodedata.ucd_3_2_0
"""An old version of Unicode, whose letters are letters for every library."""
_LINE_BYTE = "<0x0A>"
_OWN_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pattern of the pre-tokenizer ByteLevel (that of GPT-2)."""
_MAX_SOURCE, _MAX_GROUPS = 10_000, 100
_SPOT = re.compile(r"(?<=\S)(?=[ \n])")
# Pre-tokenizers that decide at each place from the characters beside it.
_LOCAL_SPLITS = frozenset(
    [
        "Whitespace",
        "WhitespaceSplit",
        "BertPreTokenizer",
        "Punctuation",
        "Digits",
        "CharDelimiterSplit",
        "Metaspace",
    ]
)
_LOCAL_NORMALIZERS = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "Prepend")
)
# Normalizers that make line ends spaces.
_BLURRING = frozenset(("BertNormalizer", "Precompiled", "Nmt"))
_MODELS = frozenset(("BPE", "Unigram", "WordPiece", "WordLevel"))
_PLAIN_PROCESSORS = frozenset(("BertProcessing", "RobertaProcessing", "ByteLevel"))


class _UnknownError(Exception):
    """Raised for a part of a tokenizer of which it is not known how far it reaches."""


@dataclass(frozen=True)
class Atom:
    """One character of a pattern, with its quantifier.

    Attributes:
      classes: classes of which it matches some character.
      is_repeated: whether it may match more than one character.
      is_unbounded: whether it may match any number of characters.
    """

    classes: frozenset[str]
    is_repeated: bool = False
    is_unbounded: bool = False


Pattern = Sequence[Sequence[Atom]]
"""Alternatives of a pattern, each a sequence of atoms that may match in this order."""


@dataclass(frozen=True)
class Barriers:
    """Barriers of a tokenizer.

    Attributes:
      left: classes of the characters that may precede each of the two characters, a space and a
        line end; a character that is missing makes no barrier.
      splits_lines: whether each line end is a token, or several, of its own, whatever is beside it.
    """

    left: Mapping[str, frozenset[str]]
    splits_lines: bool

    def find(self, text: str, start: int, stop: int) -> Iterator[int]:
        """Yields the barriers of `text` in [start, stop), ascending."""
        for spot in _SPOT.finditer(text, start, stop):
            at = spot.start()
            if at and _class_of(text[at - 1]) in self.left.get(text[at], ()):
                yield at


@functools.lru_cache(maxsize=4096)
def _class_of(character: str) -> str | None:
    """Returns the class of a character for barriers; None if a normalizer may change its class."""
    decomposed = character + unicodedata.normalize("NFKD", character)
    kinds = {_OLD.category(each) for each in decomposed}
    kinds = {kind for kind in kinds if kind[0] != "M"}
    if kinds and all(kind[0] == "L" or kind == "Nd" for kind in kinds):
        return LETTER
    is_sign = kinds and all(kind[0] in "LNPS" for kind in kinds)
    return SIGN if is_sign and character not in "\ufffd▁" else None


def barriers_of(content: Mapping[str, Any], tokens: Iterable[str]) -> Barriers | None:
    """Returns the barriers of a tokenizer; None if it is not known that it has any.

    Args:
      content: content of its tokenizer.json.
      tokens: texts of all tokens of its model.
    """
    left: dict[str, frozenset[str]] = {}
    kept: set[str] = set()
    for right in _RIGHT:
        for classes in _LEFT:
            try:
                now = _seen_by_the_model(content, classes, right)
            except _UnknownError:
                continue
            left[right] = classes
            kept |= {right} if now == right else set()
            break
    steps = list(_steps(content.get("pre_tokenizer"), "pretokenizers"))
    if not left or any(_splits_words(step) for step in steps):
        return Barriers(left, splits_lines=False) if left else None
    # The model gets all words at once, so only a character of which no longer token exists is kept
    # apart from others. Unigram sums scores over the whole text, which rounds differently.
    is_alone = LINE in kept and content["model"]["type"] == "BPE"
    if not is_alone or any(
        (LINE in token and token != LINE) or (_LINE_BYTE in token and token != _LINE_BYTE)
        for token in tokens
    ):
        return None
    return Barriers({LINE: left[LINE]}, splits_lines=True)


def _splits_words(step: Mapping[str, Any]) -> bool:
    """Returns whether a pre-tokenizer makes several words of a text."""
    if step["type"] == "Metaspace":
        return step.get("split", True)
    return step["type"] != "ByteLevel" or step.get("use_regex", True)


def is_slow_pattern(content: Mapping[str, Any]) -> bool:
    """Returns whether a tokenizer has a regular expression whose search may try very many ways: one
    that is not understood, or that repeats a class of characters in more than two places."""
    return any(_is_slow(regex) for regex in _regexes(content))


def _is_slow(regex: str) -> bool:
    try:
        alternatives = _Parser(regex).alternatives()
    except _UnknownError:
        return True
    return any(
        sum(atom.is_unbounded and name in atom.classes for atom in atoms) > 2
        for atoms in alternatives
        for name in _EVERY
    )


def _regexes(part: object) -> Iterator[str]:
    for key, value in part.items() if isinstance(part, Mapping) else ():
        if key == "Regex" and isinstance(value, str):
            yield value
        elif key != "model":
            yield from _regexes(value)
    for value in part if isinstance(part, list) else ():
        yield from _regexes(value)


def _seen_by_the_model(content: Mapping[str, Any], left: frozenset[str], right: str) -> str | None:
    """Follows a place between a character of a class in `left` and the character `right` through
    all steps of a tokenizer.

    Returns:
      The character after it in the text that the model gets; None if it is another one.

    Raises:
      _UnknownError: a step may reach across.
    """
    model = content["model"]
    if model.get("dropout") or model.get("type") not in (
        "BPE",
        "Unigram",
        "WordPiece",
        "WordLevel",
    ):
        raise _UnknownError
    now: str | None = right
    added = content.get("added_tokens") or ()
    _check_added(added, left, right)
    for step in _steps(content.get("normalizer"), "normalizers"):
        now = _normalized(step, left, now)
    _check_added((token for token in added if token.get("normalized")), left, now)
    for step in _steps(content.get("pre_tokenizer"), "pretokenizers"):
        now = _split(step, left, now)
    for step in _steps(content.get("post_processor"), "processors"):
        single = [item for item in step.get("single", ()) if "Sequence" in item]
        is_template = step["type"] == "TemplateProcessing" and len(single) == 1
        if not is_template and step["type"] not in _PLAIN_PROCESSORS:
            raise _UnknownError
    return now


def _steps(part: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    if part is not None and part.get("type") == "Sequence":
        for each in part[name]:
            yield from _steps(each, name)
    elif part is not None:
        yield part


def _normalized(step: Mapping[str, Any], left: frozenset[str], now: str | None) -> str | None:
    """Returns the character at a place after a normalizer, as in `_seen_by_the_model`."""
    kind = step["type"]
    if kind in _LOCAL_NORMALIZERS:
        return now
    if kind in _BLURRING:
        return None if now is None else SPACE
    if kind != "Replace":
        raise _UnknownError
    pattern = _pattern_of(step["pattern"])
    _check_pattern(pattern, left, now)
    matched = {name for atoms in pattern for atom in atoms for name in atom.classes}
    if matched & left:
        raise _UnknownError
    if now not in matched:
        return now
    return SPACE if step["content"] == SPACE else None


def _split(step: Mapping[str, Any], left: frozenset[str], now: str | None) -> str | None:
    """Returns the character at a place after a pre-tokenizer, as in `_seen_by_the_model`."""
    kind = step["type"]
    if kind == "ByteLevel":
        if step.get("use_regex", True):
            _check_pattern(_Parser(_OWN_SPLIT).alternatives(), left, now)
        return None
    if kind == "Split":
        _check_pattern(_pattern_of(step["pattern"]), left, now)
        return now
    if kind not in _LOCAL_SPLITS:
        raise _UnknownError
    return None if kind == "Metaspace" and now == SPACE else now


def _check_added(
    tokens: Iterable[Mapping[str, Any]], left: frozenset[str], now: str | None
) -> None:
    """Checks that no added token reaches across a place, by its text or by the spaces it takes."""
    for token in tokens:
        # A normalizer may make a space of any white character of the token's text.
        atoms = [Atom(_SPACES) if c.isspace() else Atom(_classes_of(c)) for c in token["content"]]
        _check_pattern([atoms], left, now)
        if token.get("rstrip") and atoms and atoms[-1].classes & left:
            raise _UnknownError


def _check_pattern(pattern: Pattern, left: frozenset[str], now: str | None) -> None:
    """Raises _UnknownError if a pattern can match a character of `left` and later the character
    `now`, or if `now` is not known (None)."""
    if now is None:
        raise _UnknownError
    for atoms in pattern:
        is_after = False
        for atom in atoms:
            has_left = bool(atom.classes & left)
            if now in atom.classes and (is_after or (has_left and atom.is_repeated)):
                raise _UnknownError
            is_after |= has_left


def _pattern_of(value: Mapping[str, Any]) -> Pattern:
    if isinstance(value.get("String"), str):
        return [_literal(value["String"])]
    return _Parser(value["Regex"]).alternatives()


def _literal(text: str) -> list[Atom]:
    return [Atom(_classes_of(character)) for character in text]


def _classes_of(character: str) -> frozenset[str]:
    """Returns the classes that a character of a pattern may have."""
    if character in _RIGHT:
        return frozenset((character,))
    if unicodedata.category(character)[0] in "LN":
        return _VISIBLE  # of numbers, ½ is a sign here
    return frozenset() if character.isspace() else frozenset((SIGN,))


_SPACES, _VISIBLE = frozenset(_RIGHT), frozenset((LETTER, SIGN))
# Of each class: the characters that it matches some of, and those that it matches all of.
_CLASSES = {
    "s": (_SPACES, _SPACES),
    "S": (_VISIBLE, _VISIBLE),
    "w": (_VISIBLE, frozenset((LETTER,))),
    "W": (frozenset((SIGN, SPACE, LINE)), _SPACES),
    "d": (frozenset((LETTER,)), frozenset()),
    "D": (_EVERY, _SPACES),
    "n": (frozenset((LINE,)), frozenset((LINE,))),
    "r": (frozenset(), frozenset()),
    "t": (frozenset(), frozenset()),
}
_GROUP = re.compile(r"\?(?:(?P<plain>:|>|i:)|(?P<ahead>=|!)|(?P<behind><=|<!))")
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})[?+]?")
_PROPERTY = re.compile(r"\{(L|M|N|P|S)(?:[a-z&])?\}")


class _Parser:
    """Reads the part of Oniguruma's regular expressions that tokenizers use.

    A place inside an alternative that stands in a longer sequence, and each turn of a repeated
    group, is read as if all followed one another, which allows more than the pattern does.
    """

    def __init__(self, source: str):
        self._source, self._at = source, 0

    def alternatives(self) -> list[list[Atom]]:
        """Returns the alternatives of the whole pattern.

        Raises:
          _UnknownError: it has something that is not read here.
        """
        if len(self._source) > _MAX_SOURCE or self._source.count("(") > _MAX_GROUPS:
            raise _UnknownError
        if self._source.startswith("(?i)"):
            self._at = 4
        found = self._alternatives()
        if self._at < len(self._source):
            raise _UnknownError
        return found

    def _alternatives(self) -> list[list[Atom]]:
        found: list[list[Atom]] = [[]]
        while self._at < len(self._source) and self._source[self._at] != ")":
            if self._take("|"):
                found.append([])
            elif self._source[self._at] == "(":
                inner = self._group()
                is_all = self._at == len(self._source) and found == [[]]
                if is_all:
                    return inner
                found[-1] += self._quantified([atom for atoms in inner for atom in atoms])
            elif self._take("^", "$", r"\b", r"\B"):
                pass  # looks at the characters beside its place
            else:
                found[-1] += self._quantified([Atom(self._one())])
        return found

    def _take(self, *texts: str) -> bool:
        for text in texts:
            if self._source.startswith(text, self._at):
                self._at += len(text)
                return True
        return False

    def _group(self) -> list[list[Atom]]:
        start = self._at + 1
        kind = _GROUP.match(self._source, start)
        if kind is None and self._source.startswith("?", start):
            raise _UnknownError
        self._at = start if kind is None else kind.end()
        inner = self._alternatives()
        if not self._take(")"):
            raise _UnknownError
        if kind is None or kind["plain"]:
            return inner
        is_one = all(len(atoms) == 1 and not atoms[0].is_repeated for atoms in inner)
        if not is_one and kind["behind"]:
            raise _UnknownError
        # A look at one character is allowed; a longer one counts as what it reads.
        return [[]] if is_one else inner

    def _quantified(self, atoms: list[Atom]) -> list[Atom]:
        """Reads the quantifiers after some atoms, and returns the atoms with them."""
        while found := _QUANTIFIER.match(self._source, self._at):
            self._at = found.end()
            most = None
            if found[0][0] == "?":
                most = 1
            elif found[0][0] == "{" and (found[3] or not found[2]):
                most = int(found[3] or found[1] or 0)
            if most == 1:
                continue
            changed = [
                Atom(a.classes, is_repeated=True, is_unbounded=a.is_unbounded or most is None)
                for a in atoms
            ]
            if len(atoms) == 1 and not atoms[0].is_repeated:
                atoms = changed
            else:  # three turns show each order of two atoms, and are slow if one is unbounded
                atoms = (changed if most is None else atoms) * 3
                if len(atoms) > _MAX_SOURCE:
                    raise _UnknownError
        return atoms

    def _one(self) -> frozenset[str]:
        """Reads one character or class outside of brackets."""
        if self._take("["):
            return self._bracket()
        if self._take("."):
            return _EVERY
        if self._source[self._at] in "*+?{":
            raise _UnknownError
        return self._item()[0]

    def _item(self) -> tuple[frozenset[str], frozenset[str], str]:
        """Reads a character or an escape; returns (classes of which it matches some character,
        classes of which it matches all, its text)."""
        if self._at >= len(self._source):
            raise _UnknownError
        if not self._take("\\"):
            character = self._source[self._at]
            self._at += 1
            classes = _classes_of(character)
            return classes, classes & _SPACES, character
        name = self._source[self._at : self._at + 1]
        self._at += 1
        if name == "p" and (found := _PROPERTY.match(self._source, self._at)):
            self._at = found.end()
            kinds = {"L": _VISIBLE, "N": _VISIBLE, "P": {SIGN}, "S": {SIGN}, "M": set()}
            return frozenset(kinds[found[1]]), frozenset(), f"p{found[0]}"
        if name in _CLASSES:
            return (*_CLASSES[name], f"\\{name}")
        if not name or name.isalnum():
            raise _UnknownError
        classes = _classes_of(name)
        return classes, classes & _SPACES, name

    def _bracket(self) -> frozenset[str]:
        """Reads a class in brackets; its opening bracket is read already."""
        is_negated = self._take("^")
        some, every, names = set(), set(), set()
        while not self._take("]"):
            if self._source.startswith(("[", "&&"), self._at):
                raise _UnknownError
            classes, covered, name = self._item()
            if self._source.startswith("-", self._at) and not self._source.startswith(
                "-]", self._at
            ):
                self._at += 1
                last = self._item()[2]
                if len(name) > 1 or len(last) > 1:
                    raise _UnknownError
                inside = {each for each in _RIGHT if name <= each <= last}
                classes, covered = _VISIBLE | inside, frozenset(inside)
            some |= classes
            every |= covered
            names.add(name)
        if "p{L}" in names and names & {"p{N}", "p{Nd}", "\\d"}:
            every.add(LETTER)
        if names >= {"p{L}", "p{N}", "p{P}", "p{S}"}:
            every.add(SIGN)
        return _EVERY - every if is_negated else frozenset(some)
