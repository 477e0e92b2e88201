"""The question to all processes of a job: what are you doing?

It is asked when a process has waited too long or has seen that calls differ. Everybody gets the same answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, final

from xpdistribute.roster import Peer, Roster, field, number
from xpdistribute.wire import Message

PATIENCE = 1.5
"""Seconds that a process has to say what it is doing."""

_KEPT = 8


@final
class Inquiries:
    """Asks one at a time, and keeps the last reports for those who come to ask the same."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._open: _Inquiry | None = None
        self._num_asked = 0
        self._reports: deque[tuple[tuple[str, str], Message]] = deque(maxlen=_KEPT)

    def ask(self, peer: Peer, message: Message) -> None:
        """A process wants to know what all of them do, and says what it does itself."""
        request = {
            "kind": field(message, "kind", str),
            "about": field(message, "about", str),
            "waited": field(message, "waited", float),
            "state": field(message, "state", dict),
        }
        if peer.process is None:
            return
        about = (request["kind"], request["about"])
        known = next((report for key, report in self._reports if request["about"] and key == about), None)
        if known is not None:
            self._roster.send([peer], known)
            return
        if self._open is not None:
            self._open.answer(peer.process, request["state"])
        else:
            asked = [one for one in self._roster.members if one.connection is not None]
            self._num_asked += 1
            self._open = _Inquiry(
                self._num_asked, request, peer.process, map(number, asked), self._roster.now
            )
            question = {"type": "state_wanted", "id": self._num_asked, "about": request["about"]}
            self._roster.send((one for one in asked if one is not peer), question)
        self.settle()

    def answer(self, peer: Peer, message: Message) -> None:
        """A process says what it does."""
        asked, state = field(message, "id", int), field(message, "state", dict)
        if self._open is not None and asked == self._open.number and peer.process is not None:
            self._open.answer(peer.process, state)
            self.settle()

    def settle(self) -> None:
        """Report if nobody is waited for any more, or too long."""
        if self._open is None:
            return
        for peer in self._roster.members:
            if peer.connection is None:
                self._open.give_up_on(number(peer))
        if self._open.is_answered or self._open.deadline <= self._roster.now:
            self._conclude(self._open)

    def close(self) -> None:
        """Report what is known; later questions are about another make-up of the job."""
        if self._open is not None:
            self._conclude(self._open)
        self._reports.clear()

    @property
    def deadline(self) -> float | None:
        """When to settle at the latest."""
        return self._open.deadline if self._open is not None else None

    def _conclude(self, inquiry: _Inquiry) -> None:
        self._open = None
        members = self._roster.members
        report = inquiry.report({number(peer): self._unanswered(peer) for peer in members})
        self._reports.append((inquiry.about, report))
        self._roster.send(members, report)

    def _unanswered(self, peer: Peer) -> Message:
        known: Message = {"process": peer.process, "pid": peer.pid, "host": peer.host}
        if peer.connection is None:
            return {**known, "gone": peer.standing.value}
        return {**known, "silent": True, "unheard_seconds": round(self._roster.now - peer.heard, 1)}


@final
class _Inquiry:
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
