"""What programs are told when processes are lost or have come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class MembershipChange:
    """Processes were lost or have come.

    Attributes:
        lost: the numbers that the lost ones had before.
        num_joined: how many have come.
        worker_id: this process's number now.
        num_workers: how many processes there are now.
        num_replicas_in_sync: how many replicas they have together.
        seconds: from noticing it until it was possible to go on.
        reason: why, in words.
    """

    lost: tuple[int, ...]
    num_joined: int
    worker_id: int
    num_workers: int
    num_replicas_in_sync: int
    seconds: float
    reason: str
