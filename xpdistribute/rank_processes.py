"""The processes of a job on this machine: mpiexec, the ranks that it has started, and those that the launcher starts itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import final

from xpdistribute.process_identity import identify
from xpdistribute.rank_files import RankFiles


@final
class RankProcesses:
    """What is known of them, and how they are started and ended.

    Args:
        files: where the ranks leave their ids and statuses.
    """

    def __init__(self, files: RankFiles) -> None:
        self.statuses: dict[int, int] = {}
        """By rank, of those that have ended and were not replaced: 128 + N for signal N."""
        self.ended_at: dict[int, float] = {}
        """By rank: when they have ended."""
        self.first_failed: int | None = None
        """The first rank that has ended with another status than 0."""
        self.newcomers: dict[int, int] = {}
        """The shells of those that were started in place of others, by rank."""
        self.mpiexec = 0
        """The process id of mpiexec; 0 before it is started."""
        self.mpiexec_status: int | None = None
        """How it has ended; None if it has not."""
        self._files = files
        self._children: dict[int, str] = {}  # shells of newcomers that have not ended, with their identities
        self._identities: dict[int, str] = {}  # of ranks, by process id

    def start_mpiexec(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> None:
        """Start mpiexec in a process group of its own.

        Args:
            command: with all its arguments.
            environment: its own and the ranks'.
            descriptors: which of this process's descriptors are to be its 0, 1 and 2.
        """
        actions = [(os.POSIX_SPAWN_DUP2, ours, its) for its, ours in descriptors.items()]
        self.mpiexec = _spawn(command, environment, actions)

    def start_newcomer(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process in the place of a rank that is dead."""
        pid = _spawn(command, environment, ())
        self._children[pid] = identify(pid)
        self.statuses.pop(rank, None)
        self.newcomers[rank] = pid

    @property
    def has_newcomers(self) -> bool:
        """Whether a process that the launcher has started itself has not ended."""
        return bool(self._children)

    def pids(self) -> dict[int, int]:
        """The process id of each rank that has started, by rank."""
        return {rank: pid for rank, (pid, _) in self._files.pids().items()}

    def rank_of(self, pid: int) -> int | None:
        """The rank of a process; None for one that is not on this machine, or not the last in its place."""
        return next((rank for rank, own in self.pids().items() if own == pid), None)

    def reap(self) -> None:
        """Take in which children have ended."""
        if self.mpiexec and self.mpiexec_status is None:
            ended, status = os.waitpid(self.mpiexec, os.WNOHANG)
            if ended:
                self.mpiexec_status = _status(status)
        for pid in list(self._children):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._children[pid]

    def take_ended(self) -> bool:
        """Take in which ranks have ended; whether one has failed."""
        has_failed = False
        for rank, status, group in self._files.read_ended():
            if self.newcomers.get(rank, group) != group:
                continue  # the one that has been replaced
            self.statuses[rank] = status
            self.ended_at[rank] = time.monotonic()
            if status:
                has_failed = True
                if self.first_failed is None:
                    self.first_failed = rank
        return has_failed

    def signal_ranks(self, number: int) -> None:
        """Send a signal to every rank that has not ended; SIGKILL also to what it has started."""
        for rank, (pid, group) in self._files.pids().items():
            if rank in self.statuses:
                continue  # by now its number may be another process's
            if pid not in self._identities:
                self._identities[pid] = identify(pid)
            send(pid, number, self._identities[pid], group)

    def signal_mpiexec(self, number: int) -> None:
        """Send a signal to mpiexec, if it has not ended."""
        if self.mpiexec and self.mpiexec_status is None:
            os.kill(self.mpiexec, number)

    def kill_newcomers(self) -> None:
        """End what the launcher has started itself."""
        for pid, identity in self._children.items():
            send(pid, signal.SIGKILL, identity, pid)

    def kill_newcomer(self, rank: int) -> None:
        """End the process that was started in the place of a rank."""
        shell = self.newcomers[rank]
        if shell in self._children:
            send(shell, signal.SIGKILL, self._children[shell], shell)
            self.statuses[rank] = 128 + signal.SIGKILL
            self.ended_at[rank] = float("inf")  # that is no failure

    def kill_all(self) -> None:
        """End whatever is left, and wait for it."""
        self.signal_ranks(signal.SIGKILL)
        self.kill_newcomers()
        self.signal_mpiexec(signal.SIGKILL)
        if self.mpiexec and self.mpiexec_status is None:
            self.mpiexec_status = _status(os.waitpid(self.mpiexec, 0)[1])
        for pid in list(self._children):
            os.waitpid(pid, 0)
            del self._children[pid]


def send(pid: int, number: int, identity: str, group: int = 0) -> None:
    """Send a signal to the process that `identify` named; SIGKILL goes to all of its process group, if that is ``group``."""
    if identify(pid) != identity:
        return
    try:
        if number == signal.SIGKILL and group and os.getpgid(pid) == group:
            os.killpg(group, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _spawn(command: Sequence[str], environment: Mapping[str, str], actions: Sequence[tuple[int, ...]]) -> int:
    return os.posix_spawn(
        command[0],
        list(command),
        environment,
        file_actions=actions,
        setpgroup=0,
        setsigmask=(),
        setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE),
    )


def _status(wait_status: int) -> int:
    code = os.waitstatus_to_exitcode(wait_status)
    return 128 - code if code < 0 else code
