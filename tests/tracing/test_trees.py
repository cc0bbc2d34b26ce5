"""Names of arrays, and counts for people."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.tracing.trees import (
    flatten_names,
    format_bytes,
    format_count,
    match_names,
    num_bytes,
    num_elements,
    path_name,
    unflatten_like,
)


class Moments(NamedTuple):
    mean: object
    square: object


TREE = {"a": {"b": [1, 2]}, "m": Moments({"x": 3}, 4)}


def test_names_join_keys_attributes_and_positions():
    assert flatten_names(TREE) == {"a/b/0": 1, "a/b/1": 2, "m/mean/x": 3, "m/square": 4}
    assert path_name(("blocks", 0, "kernel")) == "blocks/0/kernel"


def test_unflatten_is_the_inverse():
    doubled = {name: 2 * leaf for name, leaf in flatten_names(TREE).items()}
    assert unflatten_like(TREE, doubled) == jax.tree.map(lambda leaf: 2 * leaf, TREE)


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(
        ValueError, match="two leaves are named 'a/b': a key of the tree contains '/'"
    ):
        flatten_names({"a": {"b": 1}, "a/b": 2})


def test_patterns_select_names():
    names = ["block/0/kernel", "block/0/bias", "head/kernel"]
    assert match_names(names, ["^block", "head"], option="freeze") == frozenset(names)
    assert match_names(names, ["bias$"], option="freeze") == {"block/0/bias"}


def test_patterns_that_match_nothing_or_are_none_are_refused():
    with pytest.raises(ValueError) as caught:
        match_names(["head/kernel"], ["haed"], option="freeze")
    assert str(caught.value) == (
        "freeze: 'haed' matches none of the 1 parameters (such as head/kernel); the names are "
        "listed by plan.table()"
    )
    with pytest.raises(ValueError, match=r"freeze: '\(' is not a regular expression: missing \)"):
        match_names(["head/kernel"], ["("], option="freeze")


def test_sizes():
    assert num_elements((3, 4)) == 12
    assert num_elements(()) == 1
    tree = {"a": np.zeros(3, np.float32), "b": jax.ShapeDtypeStruct((2, 2), jnp.bfloat16)}
    assert num_bytes(tree) == 20


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (12, "12 B"),
        (1536, "1.5 KiB"),
        (-2048, "-2.0 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**60, "1048576.0 TiB"),
    ],
)
def test_bytes_for_people(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999"), (3_487_232, "3.49M"), (124e6, "124.00M"), (1.5e12, "1.50T")]
)
def test_counts_for_people(count, text):
    assert format_count(count) == text
