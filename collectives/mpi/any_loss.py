"""What a process that waits knows of the others, where the loss of any ends every wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from collectives.control.hang_report import HangReport
from collectives.control.watch import Watch
from collectives.errors import PeerFailedError


@final
class AnyLoss:
    """A `Watch` for links whose processes agree afterwards whether a collective has succeeded.

    Otherwise a process waits on as long as the one that it waits for lives; but that one may have given up, as it waited for
    one who is gone.

    Args:
        watch: what is known.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.gone: Mapping[int, PeerFailedError] = {}  # so that none counts as one who is not waited for
        self.votes = watch.votes
        self.descriptions = watch.descriptions

    @property
    def failure(self) -> BaseException | None:
        """Why nothing can be done together any more, or who is gone."""
        return self._watch.failure

    @failure.setter
    def failure(self, failure: BaseException | None) -> None:
        self._watch.failure = failure

    @property
    def left(self) -> frozenset[int]:
        """As of the other watch."""
        return self._watch.left

    @left.setter
    def left(self, left: frozenset[int]) -> None:
        self._watch.left = left

    def ended(self, process: int) -> PeerFailedError:
        """As of the other watch."""
        return self._watch.ended(process)

    def explain(self, kind: str, about: str, waited: float) -> HangReport:
        """As of the other watch."""
        return self._watch.explain(kind, about, waited)
