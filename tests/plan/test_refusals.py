"""The check of refusals fails where it has to, and leaves the wording free."""

import pytest

from tests.support.refusals import Refusal, check_words, code_in, refused, stands_in, table

MESSAGE = "zero=4 is not valid; use 0, 1.5 or f(x)[0] + 12. Free some space, or call f(y).z now"


@pytest.mark.parametrize("word", ["zero=4", "4", "0", "1.5", "12", "free", "some  space", "f(y).z"])
def test_words_that_stand_in_a_message(word):
    assert stands_in(word, MESSAGE)


@pytest.mark.parametrize("word", ["ero=4", "1", "5", "2", "vali", "USE", "space some", "zero=5"])
def test_words_that_do_not(word):
    assert not stands_in(word, MESSAGE)


def refuse(message: str = MESSAGE) -> None:
    raise ValueError(message)


def test_a_refusal_has_its_type_value_and_remedy():
    assert refused(refuse, "zero=4", '0 "some space"') == MESSAGE
    with pytest.raises(AssertionError, match="zero=5"):
        refused(refuse, "zero=5", "0")
    with pytest.raises(AssertionError, match="13"):
        refused(refuse, "zero=4", "0 13")
    with pytest.raises(ValueError, match="zero=4"):
        refused(refuse, error=TypeError)
    with pytest.raises(pytest.fail.Exception):
        refused(lambda: None)
    check_words("Use 1.5 or 0 (free space!); zero=4 cannot be", "zero=4", "0 1.5 free")


def test_a_row_is_refused_and_its_remedies_are_taken():
    taken = []

    def take(number: str) -> None:
        taken.append(number)
        if number == "4":
            refuse()

    row = table("4 | zero=4 | 0 1.5 | $ ; zero=$\n5 | a |\n  | b ; c")
    assert row["5"] == Refusal("5", "a", "", ["b", "c"])
    row["4"].check(take)
    assert taken == ["4", "0", "1.5", "zero=0", "zero=1.5"]
    with pytest.raises(ValueError, match="zero=4"):
        Refusal("4", "zero=4", "", ["4"]).check(take)


def test_code_in_a_message():
    assert code_in(MESSAGE, "f(x)") == "f(x)[0] + 12"
    assert code_in(MESSAGE, "f(y)") == "f(y).z"
    with pytest.raises(AssertionError, match="g"):
        code_in(MESSAGE, "g(")
