"""What can go wrong between ranks.

CollectiveError(RuntimeError)
├── CollectiveMismatchError   the ranks made different calls, or passed arrays that do not fit together
├── CollectiveTimeoutError    a rank did not come in time
├── CollectiveAbortedError    another rank failed while this one waited for it
└── PeerFailedError           another process of the job raised, ended or died
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TypeVar

from xpdistribute.words import MOST_OF_A_LINE, shortened

E = TypeVar("E", bound=BaseException)


class CollectiveError(RuntimeError):
    """A collective could not be completed. Every rank that took part raises it."""


class CollectiveMismatchError(CollectiveError):
    """The ranks' calls do not fit together. Raised on every rank.

    Attributes:
        calls: what each rank called, in words, by rank; None for a rank that ended without calling.
    """

    def __init__(self, message: str, calls: Sequence[str | None] = ()) -> None:
        super().__init__(message)
        self.calls = tuple(calls)


class CollectiveTimeoutError(CollectiveError):
    """Some rank did not call the collective before the group's timeout.

    Attributes:
        missing: the ranks that did not come.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class CollectiveAbortedError(CollectiveError):
    """This rank was released from a collective because another rank failed; that failure is the cause."""


class PeerFailedError(CollectiveError):
    """Another process of the job failed, ended too early or died, so that nothing can be done together any more.

    Attributes:
        process: its number.
        text: what it said last, such as its traceback; empty if it could say nothing.
    """

    def __init__(self, message: str, process: int = -1, text: str = "") -> None:
        super().__init__(message)
        self.process = process
        self.text = text


def common(error: E) -> E:
    """Mark an error as one that every process raises at the same call, so that they can go on together after it."""
    error.__dict__["_xpdistribute_common"] = True
    return error


def not_common(error: E) -> E:
    """Take back what `common` says: the processes that raise it at the same call are not all."""
    error.__dict__.pop("_xpdistribute_common", None)
    return error


def is_common(error: BaseException) -> bool:
    """Whether every process raises it at the same call."""
    return bool(error.__dict__.get("_xpdistribute_common"))


def in_words(error: BaseException) -> str:
    """The type and the text of an error, as its traceback ends, in bounds; also of one whose ``str`` raises."""
    try:
        return shortened(f"{type(error).__name__}: {error}", MOST_OF_A_LINE)
    except Exception:  # noqa: BLE001  # a user's own class; what is being reported matters more than its text
        return f"{type(error).__name__}: <exception str() failed>"


def told_in_full(error: BaseException) -> str:
    """What the other processes are told of an error: its traceback, and in the last line the error, which they name in theirs.

    In bounds, however long its own text is.
    """
    text = shortened("".join(traceback.format_exception(error)).rstrip())
    last = in_words(error)
    return text if text.endswith(last) else f"{text}\n{last}"  # it has notes, which stand last
