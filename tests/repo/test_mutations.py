"""The table of mutations fits the source; `python -m tests.mutations` runs them."""

import ast
import functools

import pytest

from tests.mutations.__main__ import PACKAGES, ROOT, find
from tests.mutations.table import MUTATIONS


@functools.cache
def dump(text):
    return ast.dump(ast.parse(text))


def test_the_text_of_every_mutation_is_in_one_place():
    whole = "\0".join(path.read_text() for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    assert [one.old for one in MUTATIONS if whole.count(one.old) != 1] == []


@pytest.mark.thorough
def test_every_mutation_changes_one_place_of_valid_code():
    for mutation in MUTATIONS:
        path = find(mutation, ROOT)
        text = path.read_text()
        assert dump(text) != dump(text.replace(mutation.old, mutation.new)), mutation


def test_the_table_is_long_enough_and_its_tests_exist():
    assert len(MUTATIONS) >= 60
    assert len({mutation.old for mutation in MUTATIONS}) == len(MUTATIONS)
    files = {word for one in MUTATIONS for word in one.tests.split() if word.startswith("tests/")}
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []


def test_a_text_that_is_nowhere_is_refused():
    unknown = type(MUTATIONS[0])("no such line of code", "", "tests/parallel/test_step.py")
    with pytest.raises(LookupError, match="nowhere"):
        find(unknown, ROOT)
