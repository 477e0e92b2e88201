"""What a process that waits for others looks at, and asks when it has waited too long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from collectives.control.descriptions import Descriptions
from collectives.control.hang_report import HangReport
from collectives.control.votes import Votes
from collectives.errors import PeerFailedError


class Watch(Protocol):
    """What is known of the other processes by way of something else than the data: a `Channel`.

    Attributes:
        failure: why nothing can be done together any more; None while all is well.
        gone: the processes that have failed or died, each with what to raise where it is waited for; replaced, never changed.
        left: the processes that have ended in good order.
        votes: what processes have said of collectives of which nothing else told them how they went.
        descriptions: asked, in another thread, when somebody wants to know what this process is doing; links add themselves.
    """

    failure: BaseException | None
    gone: Mapping[int, PeerFailedError]
    left: frozenset[int]
    votes: Votes
    descriptions: Descriptions

    def ended(self, process: int) -> PeerFailedError:
        """What to raise where a process that has `left` is waited for."""

    def explain(self, kind: str, about: str, waited: float) -> HangReport:
        """What every process is doing, as one report that all get alike."""
