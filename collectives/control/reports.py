"""Reports of what hangs, as the hub has put them together, and what this process tells for them."""

from __future__ import annotations

import os
from typing import Any, final

from collectives.control.descriptions import Descriptions
from collectives.control.hang_report import TIMEOUT, HangReport, stacks_now
from collectives.errors import in_words
from xpdistribute.wire import Message, encode

_KEPT = 8


@final
class Reports:
    """Those of one process, in the job's present make-up.

    Attributes:
        latest: the last one that came, None if there was none.

    Args:
        host: what it calls its host.
    """

    def __init__(self, host: str) -> None:
        self.latest: HangReport | None = None
        self._host = host
        self._kept: dict[tuple[str, str], HangReport] = {}

    def answer(self, kind: str, about: str) -> HangReport | None:
        """The report that answers a question already; None if one has to be asked for."""
        known = self._kept.get((kind, about))
        if known is not None and about:
            return known
        # Nothing comes after a timeout.
        return self.latest if self.latest is not None and self.latest.kind == TIMEOUT else None

    def take(self, message: Message) -> HangReport:
        """One has come."""
        report = HangReport(
            message["id"],
            message["kind"],
            message["about"],
            message["waited"],
            message["reporter"],
            tuple(message["states"]),
        )
        while len(self._kept) >= _KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[report.kind, report.about] = self.latest = report
        return report

    def clear(self) -> None:
        """The job has another make-up."""
        self._kept.clear()
        self.latest = None

    def own_state(self, descriptions: Descriptions, about: str) -> dict[str, Any]:
        """What this process is doing, as far as what is asked about goes."""
        try:
            state = dict(descriptions.about(about))
            encode(state)
        except Exception as error:  # noqa: BLE001  # told in the report, in place of the description
            state = {"describe_failed": in_words(error)}
        stack, frame = stacks_now()
        return {**state, "stack": stack, "frame": frame, "pid": os.getpid(), "host": self._host}
