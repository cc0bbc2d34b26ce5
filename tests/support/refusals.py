"""Refusals: the type of the error, the value that is wrong and the key words of the remedy.

Words are looked for one by one, in any order and sentence, so that a message can be reworded. A
test then applies the remedy with the words that it looked for, and sees that it works.
"""

import ast
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from tests.support.cli_complaints import fails

Words = str | Iterable[object]
"""Words separated by spaces, `"those in double quotes"` being one; or a list."""


def as_words(words: Words) -> list[str]:
    if isinstance(words, str):
        return [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', words)]
    return [str(word) for word in words]


def stands_in(word: str, message: str) -> bool:
    """Says whether a message has a word: not as a part of a longer name or number.

    Plain words may have a capital letter, as at the beginning of a sentence.
    """
    left = r"(?<!\w)" * word[0].isalnum() + r"(?<!\d\.)" * word[0].isdigit()
    right = r"(?!\w)" * word[-1].isalnum() + r"(?!\.\d)" * word[-1].isdigit()
    flags = re.IGNORECASE if word.isalpha() and word.islower() else 0
    spaced = r"\s+".join(map(re.escape, word.split()))
    return re.search(f"{left}{spaced}{right}", message, flags) is not None


def check_words(message: str, *words: Words) -> str:
    """Fails unless a message has all words; returns it."""
    missing = [word for each in words for word in as_words(each) if not stands_in(word, message)]
    assert not missing, f"{missing} missing in: {message}"
    return message


def refused(
    call: Callable[[], object],
    value: Words = (),
    remedy: Words = (),
    *,
    error: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> str:
    """Checks that a call is refused; returns the message.

    Args:
      call: what is to be refused.
      value: words of the message that say what is wrong: a name, a value, a limit.
      remedy: its words that say what to do: an option, a command, a number to use instead.
      error: the type of the exception.
    """
    with pytest.raises(error) as caught:
        call()
    return check_words(str(caught.value), value, remedy)


def complaint(
    capsys: pytest.CaptureFixture[str],
    words: Iterable[str],
    value: Words = (),
    remedy: Words = (),
    code: int = 2,
) -> str:
    """Checks that a command is refused with one line and an exit code; returns the line."""
    return check_words(fails(capsys, *words, code=code), value, remedy)


def code_in(message: str, start: str) -> str:
    """Returns the expression in a message that begins with a text, to be evaluated by a test."""
    begin = message.find(start)
    assert begin >= 0, f"{start!r} is not in: {message}"
    for end in range(begin + len(start), len(message) + 1):
        goes_on = re.match(r"[\w.(\[]*[\w(\[]|\s+[-+*/]+\s", message[end:])
        if not goes_on and not message[end - 1].isspace():
            try:
                ast.parse(message[begin:end], mode="eval")
            except SyntaxError:
                continue
            return message[begin:end]
    raise AssertionError(f"no expression begins with {start!r} in: {message}")


class Refusal(NamedTuple):
    """A row of a table."""

    bad: Any
    """What is refused."""
    value: Words
    remedy: Words
    good: Iterable[Any] = ()
    """What the remedy makes of it, one or more ways, each of which has to be taken."""
    error: type[Exception] | tuple[type[Exception], ...] = ValueError

    def check(self, take: Callable[[Any], object]) -> None:
        """Checks that `take` refuses what is bad and takes what is good."""
        refused(lambda: take(self.bad), self.value, self.remedy, error=self.error)
        for good in self.good:
            take(good)


def table(
    text: str, error: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> dict[str, Refusal]:
    """Reads rows `bad | value | remedy | good ; good`; indented lines go on with the row above.

    A `$` in what is good stands for each word of the remedy in turn.
    """
    rows = {}
    for line in re.sub(r"\n +", " ", text.strip()).splitlines():
        bad, value, remedy, goods = (part.strip() for part in re.split(r"\s\|(?=\s)", f"{line} "))
        good = [
            template.strip().replace("$", word)
            for template in goods.split(" ; ")
            for word in (as_words(remedy) if "$" in template else [""])
        ]
        assert bad not in rows, f"{bad!r} is there twice"
        rows[bad] = Refusal(bad, value, remedy, good, error)
    return rows
