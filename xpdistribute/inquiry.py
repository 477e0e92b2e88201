"""One question to all processes of a job: what are you doing?

It is asked when a process has waited too long or has seen that calls differ. Everybody gets the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from xpdistribute.wire import Message

PATIENCE = 1.5
"""Seconds that a process has to say what it is doing."""


@final
class Inquiry:
    """A report in the making.

    Args:
        number: which one, counted from 1.
        request: of the process that asked first.
        reporter: that process.
        asked: the others that can answer.
        now: when it was asked.
    """

    def __init__(
        self, number: int, request: Message, reporter: int, asked: Iterable[int], now: float
    ) -> None:
        self.number = number
        self.deadline = now + PATIENCE
        self._request = request
        self._reporter = reporter
        self._open = set(asked) - {reporter}
        self._states: dict[int, Any] = {reporter: request["state"]}

    @property
    def about(self) -> tuple[str, str]:
        """What is asked about: a later request for the same gets the same report."""
        return self._request["kind"], self._request["about"]

    def answer(self, process: int, state: Any) -> None:
        """A process says what it does; its first answer counts."""
        self._states.setdefault(process, state)
        self._open.discard(process)

    def give_up_on(self, process: int) -> None:
        """A process is gone."""
        self._open.discard(process)

    @property
    def is_answered(self) -> bool:
        """Whether nobody is waited for any more."""
        return not self._open

    def report(self, others: dict[int, Any]) -> Message:
        """What everybody gets.

        Args:
            others: what to say of each process that did not answer, by process.
        """
        known = {**others, **self._states}
        return {
            "type": "report",
            "id": self.number,
            "kind": self._request["kind"],
            "about": self._request["about"],
            "waited": self._request["waited"],
            "reporter": self._reporter,
            "states": [known[process] for process in sorted(known)],
        }
