"""How a collective went, where the library that moves the data can't get its processes to agree on that.

Each process that can't find out says by way of the hub whether its own part succeeded. The hub passes everything on in one order, and
also that a process is gone, so that all conclude the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final


@dataclass(frozen=True)
class Vote:
    """Of one process.

    Attributes:
        number: of the agreement, from 1, as all count them.
        succeeded: whether the process's part of the collective did.
    """

    number: int
    succeeded: bool


@final
class Votes:
    """What has been said since the job got the make-up that it has.

    Args:
        send: tells the other processes of a link's name and a vote.
    """

    def __init__(self, send: Callable[[str, Vote], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._by_link: dict[str, dict[int, list[Vote]]] = {}

    def cast(self, link: str, process: int, vote: Vote) -> None:
        """Say how this process's part went, to all and for good.

        Raises:
            CollectiveError: the hub is gone.
        """
        self.take(link, process, vote)
        self._send(link, vote)

    def take(self, link: str, process: int, vote: Vote) -> None:
        """Another process has said it."""
        with self._lock:
            self._by_link.setdefault(link, {}).setdefault(process, []).append(vote)

    def outcome(self, link: str, number: int, live: Collection[int]) -> bool | None:
        """Whether a collective succeeded everywhere; None if that can't be known yet.

        Args:
            link: the name that all processes call it by.
            number: of the agreement.
            live: the processes that are not known to be gone.
        """
        by_process = self._said_of(link)
        said = [vote for votes in by_process.values() for vote in votes]
        if any(vote.number == number and not vote.succeeded for vote in said):
            return False
        if any(vote.number > number for vote in said):
            return True  # nobody makes the next call after one that failed
        agreed = {
            process for process, votes in by_process.items() if any(vote.number == number for vote in votes)
        }
        return True if live and agreed.issuperset(live) else None

    def are_in(self, link: str, number: int, live: Collection[int]) -> bool:
        """Whether all that live have done their parts, of this collective or of later ones too."""
        by_process = self._said_of(link)
        return all(any(vote.number >= number for vote in by_process.get(process, ())) for process in live)

    def _said_of(self, link: str) -> dict[int, list[Vote]]:
        with self._lock:
            return {process: list(votes) for process, votes in self._by_link.get(link, {}).items()}

    def clear(self) -> None:
        """The job has another make-up, and its links are made anew."""
        with self._lock:
            self._by_link.clear()
