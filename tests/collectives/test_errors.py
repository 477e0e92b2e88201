"""Errors in words: of any class, of any length."""

from __future__ import annotations

from collectives.errors import in_words, told_in_full


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def test_an_error_is_told_as_its_traceback_ends() -> None:
    assert in_words(ValueError("a", 1)) == "ValueError: ('a', 1)"


def test_an_error_whose_text_raises_is_told_by_its_type() -> None:
    assert in_words(UnspeakableError()) == "UnspeakableError: <exception str() failed>"
    assert told_in_full(UnspeakableError()).endswith("UnspeakableError: <exception str() failed>")


def test_an_endless_text_is_told_in_bounds_with_its_head_and_its_tail() -> None:
    error = ValueError("begins " + "x" * 50_000_000 + " ends")
    words, full = in_words(error), told_in_full(error)
    assert len(words) < 2100
    assert words.startswith("ValueError: begins x")
    assert words.endswith("x ends")
    assert " characters left out] ... " in words
    assert len(full) < 40_000
    assert full.splitlines()[-1] == words
