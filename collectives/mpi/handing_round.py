"""What the processes of a job tell one another by MPI before they have any other way, each waiting no longer than its time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collectives.errors import CollectiveTimeoutError
from collectives.mpi.library import keep, set_failed
from collectives.mpi.waiting import wait_until

_TAG = 31_207
_SPACE = 1 << 12
"""Bytes for what is said: a host's name, an address, a secret."""
_TO_SAY_SO = 2.0
"""Seconds that process 0 has to say first who is missing."""


def hand_round(
    comm: Any, mine: str, answer: Callable[[Sequence[str]], Sequence[str]], timeout: float
) -> list[str]:
    """What process 0 answers to what all have said, in every process. All call it at the same time.

    Args:
        comm: of all.
        mine: what this process says.
        answer: called in process 0, with what all have said, by process.
        timeout: seconds to wait for the others.

    Raises:
        CollectiveTimeoutError: some did not come in time.
    """
    if comm.rank == 0:
        others = range(1, comm.size)
        spaces = [bytearray(_SPACE) for _ in others]
        receives = [comm.Irecv(space, rank, _TAG) for rank, space in zip(others, spaces, strict=True)]
        _wait(comm, dict(zip(others, receives, strict=True)), spaces, timeout)
        told = list(answer([mine, *(str(_read(space)) for space in spaces)]))
        data = json.dumps(told).encode()
        _wait(comm, {rank: comm.Isend(data, rank, _TAG) for rank in others}, data, timeout)
        return told
    space, data = bytearray(_SPACE), json.dumps(mine).encode()
    sending, receiving = comm.Isend(data, 0, _TAG), comm.Irecv(space, 0, _TAG)
    _wait(comm, {0: receiving}, (space, data, sending), timeout + _TO_SAY_SO)
    sending.Wait()  # it has been answered
    return [str(one) for one in _read(space)]


def _wait(comm: Any, requests: Mapping[int, Any], memory: object, timeout: float) -> None:
    """Wait until what goes to or comes from each rank has done so."""

    def missing() -> list[int]:
        return [rank for rank, request in requests.items() if not request.Test()]

    def look(late: Sequence[int], waited: float) -> None:
        if waited > timeout:
            keep((requests, memory))
            set_failed()
            names = ", ".join(map(str, late[:8])) + (", ..." if len(late) > 8 else "")
            raise CollectiveTimeoutError(
                f"join: process {comm.rank} of {comm.size} waited {timeout:g} s for process {names}, which has initialised MPI; need "
                "every process to make its strategy — does one do something else first, or has it ended?",
                late,
            )

    wait_until(lambda: all(request.Test() for request in requests.values()), look, missing)


def _read(space: bytearray) -> Any:
    return json.loads(space.rstrip(b"\0"))
