from __future__ import annotations

import pytest

from xpdistribute.words import shortened


@pytest.mark.parametrize("text", ["", "short", "x" * 100])
def test_a_text_that_is_short_enough_stays_as_it_is(text: str) -> None:
    assert shortened(text, 100) == text


def test_of_a_long_text_head_and_tail_are_left_and_how_much_is_not() -> None:
    assert shortened("a" * 500 + "b" * 500, 100) == f"{'a' * 50} ... [900 characters left out] ... {'b' * 50}"


def test_a_text_that_was_cut_before_says_how_much_is_left_out_of_the_whole() -> None:
    whole = "a" * 5000 + "b" * 5000
    assert shortened(shortened(whole, 1000), 100) == shortened(whole, 100)
