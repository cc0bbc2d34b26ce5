"""Settings that exclude each other: the page, and the one list of checks behind it."""

from __future__ import annotations

import pytest

from tools import combinations_page
from zerojax.plan.combinations import check_combination


def test_the_page_is_computed():
    assert combinations_page.PAGE.read_text() == combinations_page.page()


@pytest.mark.parametrize("name", combinations_page.SETTINGS)
def test_each_setting_of_the_page_is_possible_alone(name):
    check_combination(combinations_page.combination(combinations_page.SETTINGS[name]))
