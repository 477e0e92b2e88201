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
        is_shown: whether that is the last on the screen anyway.
    """

    rank: int | None
    pid: int | None
    host: str | None
    status: int | None
    text: str
    is_shown: bool = False


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
    ended = _completed(endings[0], pids) if endings and not is_local else None
    if ended is not None and ended.rank is not None and ended.status and _has_left(members, ended.rank):
        # It raised SystemExit, of which the hub knows the goodbye only; the others have failed or been ended because of it.
        return Culprit(ended.rank, ended.pid, None, ended.status, output.last_words(ended.rank))
    if first is not None and first.process is not None:
        # The hub knows whose failure the others only followed, though these may have ended earlier.
        own = processes.statuses.get(first.process)
        if own is None:
            own = status if first.has_died or status > 1 else 1
        is_last = first.pid in (0, pids.get(first.process)) or not is_local
        words = output.last_words(first.process) if is_last else ""  # else of the one in its place
        # A traceback that was published from within a step lacks the program's own lines around it. Its status is said anyway,
        # and what it gave to sys.exit is printed.
        said = _last_line(first.text).removeprefix("it ended with: ")
        has_only_ended = first.has_died or first.text == f"it ended with status {own}"
        has_printed = has_only_ended or bool(said and said in words)
        text = words if has_printed else first.text
        is_shown = has_printed and output.has_shown_last(first.process, text)
        return Culprit(
            first.process, first.pid or pids.get(first.process), first.host or None, own, text, is_shown
        )
    if processes.first_failed is not None:
        rank = processes.first_failed
        words = output.last_words(rank)
        status, is_shown = processes.statuses[rank], output.has_shown_last(rank, words)
        return Culprit(rank, pids.get(rank), own_host(), status, words, is_shown)
    if not endings:
        return None
    ending = _completed(endings[0], pids)
    text = "" if ending.rank is None else output.last_words(ending.rank)
    host = own_host() if is_local else None
    is_shown = ending.rank is not None and output.has_shown_last(ending.rank, text)
    return Culprit(ending.rank, ending.pid, host, ending.status, text, is_shown)


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


def _has_left(members: Membership | None, rank: int) -> bool:
    return members is not None and rank in members.have_left


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def own_host() -> str:
    """What a process of this machine calls its host."""
    return os.environ.get("XPDISTRIBUTE_HOST") or os.uname().nodename
