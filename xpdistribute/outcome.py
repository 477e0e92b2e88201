"""How a job has ended, and whose fault it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from xpdistribute.mpiexec_words import Ending
from xpdistribute.output import Output
from xpdistribute.rank_processes import RankProcesses

if TYPE_CHECKING:
    from xpdistribute.membership import Membership


class Culprit(NamedTuple):
    """The rank that ended the job.

    Args:
        rank: its number; None where nobody knows.
        pid: likewise.
        host: likewise.
        status: as a shell would give it; None where nobody knows.
        text: what it said last.
    """

    rank: int | None
    pid: int | None
    host: str | None
    status: int | None
    text: str


class Result(NamedTuple):
    """How an attempt has ended.

    Args:
        status: for the launcher to exit with.
        culprit: the rank that failed first, if one did.
        signal: that told the launcher to end, if one did.
        is_late: whether the time was over.
        has_started: whether any rank had.
    """

    status: int
    culprit: Culprit | None = None
    signal: int | None = None
    is_late: bool = False
    has_started: bool = True


def find_culprit(
    status: int,
    processes: RankProcesses,
    members: Membership | None,
    endings: Sequence[Ending],
    output: Output,
    *,
    is_local: bool,
) -> Culprit | None:
    """The rank that ended the job; None if none did, or nobody knows.

    Args:
        status: of the job, as far as it is known.
        processes: of this machine.
        members: what the hub has told, if anything.
        endings: what mpiexec has told.
        output: with the ranks' last words.
        is_local: whether all ranks are on this machine.
    """
    if not status:
        return None
    pids = processes.pids()
    first = None if members is None else members.loss
    if first is not None and first.process is not None:
        # The hub knows whose failure the others only followed, though these may have ended earlier.
        own = processes.statuses.get(first.process)
        if own is None:
            own = status if first.has_died or status > 1 else 1
        text = output.last_words(first.process) if first.has_died else first.text
        return Culprit(first.process, first.pid or pids.get(first.process), first.host or None, own, text)
    if processes.first_failed is not None:
        rank = processes.first_failed
        words = output.last_words(rank)
        return Culprit(rank, pids.get(rank), own_host(), processes.statuses[rank], words)
    if not endings:
        return None
    ending = _completed(endings[0], pids)
    text = "" if ending.rank is None else output.last_words(ending.rank)
    host = own_host() if is_local else None
    return Culprit(ending.rank, ending.pid, host, ending.status, text)


def who(culprit: Culprit) -> str:
    """Which rank it is, in words."""
    where = [f"pid {culprit.pid}"] if culprit.pid else []
    if culprit.host:
        where.append(f"host {culprit.host}")
    name = "a rank" if culprit.rank is None else f"rank {culprit.rank}"
    return f"{name} ({', '.join(where)})" if where else name


def how(culprit: Culprit) -> str:
    """How it has ended, in words."""
    status = culprit.status
    if status is None:
        return "has failed"
    if status > 128:
        try:
            return f"was killed by {signal.Signals(status - 128).name}"
        except ValueError:
            return f"ended with status {status}"
    return f"ended with status {status}"


def _completed(ending: Ending, pids: Mapping[int, int]) -> Ending:
    """With the rank that a process id belongs to, and the other way round."""
    if ending.rank is None:
        return ending._replace(rank=next((rank for rank, pid in pids.items() if pid == ending.pid), None))
    return ending if ending.pid is not None else ending._replace(pid=pids.get(ending.rank))


def own_host() -> str:
    """What a process of this machine calls its host."""
    return os.environ.get("XPDISTRIBUTE_HOST") or os.uname().nodename
