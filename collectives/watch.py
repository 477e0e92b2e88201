"""What a process that waits for others looks at, and asks when it has waited too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from collectives.errors import CollectiveError


class Watch(Protocol):
    """What is known of the other processes, by way of something else than the data: a `Channel`."""

    describe: Callable[[], Mapping[str, Any]]
    """Called, in another thread, when other processes ask what this one is doing."""

    @property
    def gone(self) -> Mapping[int, CollectiveError]:
        """The processes that have failed, ended or died, and what to raise where one of them is waited for."""

    def explain(self, kind: str, where: str, timeout: float) -> CollectiveError:
        """What every process is doing, as one error that all processes get alike.

        Args:
            kind: ``"timeout"`` or ``"mismatch"``.
            where: the call that this process makes.
            timeout: seconds that this process has waited.
        """
