"""The processes of this host that the same mpiexec has started, as /proc shows them.

MPI tells nothing before all have initialised it, and waits inside its library, for ever, for one that does not. Open MPI's mpiexec
ends the others if that one ended with another status than 0, or after they had begun, and otherwise goes on as if nothing were missing.
So processes wait for one another here before, where the wait has an end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import final

from collectives.errors import CollectiveTimeoutError, PeerFailedError

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_JOB = "PMIX_NAMESPACE"
"""Tells those that were started together from those that they spawn by MPI, which have ranks of their own."""
_TO_START = 1.0
"""Seconds in which one that is not there may still be started: mpiexec starts one after another."""
_FIRST_NAP, _LAST_NAP = 0.002, 0.05


def wait_for_siblings(timeout: float, environ: Mapping[str, str] | None = None) -> None:
    """Wait until all processes of this host have loaded the MPI library. Those that can't be seen are not waited for.

    Args:
        timeout: seconds.
        environ: of this process; None for its own.

    Raises:
        PeerFailedError: one has ended before.
        CollectiveTimeoutError: one does something else.
    """
    siblings = Siblings(os.environ if environ is None else environ)
    start, nap = time.monotonic(), _FIRST_NAP
    absent_since: float | None = None
    while (there := siblings.look()) is not None and not siblings.have_come:
        now = time.monotonic()
        if len(there) >= siblings.local_size:
            absent_since = None
        elif absent_since is None:
            absent_since = now
        elif now - absent_since > _TO_START:
            who = siblings.absent(there)
            raise PeerFailedError(
                f"MPI: {who} ended before initialising MPI, which waits for all; need every process that mpiexec has started to come "
                "here — did one fail at an import, or end early? Its output says more"
            )
        if now - start > timeout:
            late = {rank: pid for rank, pid in there.items() if rank not in siblings.come}
            names = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in sorted(late.items())[:8])
            raise CollectiveTimeoutError(
                f"MPI: waited {timeout:g} s for {names or 'processes of this host'} to initialise MPI; need every process that mpiexec "
                "has started to come here — does one do something else first, or not use the library?",
                sorted(late),
            )
        time.sleep(nap)
        nap = min(1.5 * nap, _LAST_NAP)


@final
class Siblings:
    """What is known of them.

    Args:
        environ: of this process.

    Attributes:
        local_size: how many mpiexec has started on this host; 0 where it does not say.
        come: the ranks that have been seen with the MPI library.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.local_size = _number(environ, _LOCAL_SIZES)
        self.come: set[int] = set()
        self._rank_name = next((name for name in _RANKS if environ.get(name, "").isdecimal()), "")
        self._size = _number(environ, _SIZES)
        self._job = environ.get(_JOB, "")
        self._daemon: int | None = None

    @property
    def have_come(self) -> bool:
        """Whether all of them have."""
        return len(self.come) >= self.local_size

    def look(self) -> dict[int, int] | None:
        """The process id of each that is there, by rank; None where they can't be seen."""
        if not self._rank_name or self.local_size < 2:
            return None
        parents = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
        if self._daemon is None:
            self._daemon = self._find_daemon(parents)
        if self._daemon == 0:
            return None  # it is outside of this container, and so may the others be
        found: dict[int, int] = {}
        for pid in sorted(parents):
            if self._daemon in _ancestors(pid, parents):
                variables = _environ(pid) or {}
                rank = variables.get(self._rank_name, "")
                if rank.isdecimal() and variables.get(_JOB, "") == self._job:
                    found.setdefault(int(rank), pid)
                    # A rank may be a shell, and the program what that has started.
                    if int(rank) not in self.come and _has_mpi(pid):
                        self.come.add(int(rank))
        return found

    def absent(self, there: Mapping[int, int]) -> str:
        """Who is not, in words."""
        if self.local_size < self._size:
            return f"{self.local_size - len(there)} of the {self.local_size} processes of this host"
        absent = sorted(set(range(self._size)) - there.keys())
        names = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        return f"{'rank' if len(absent) == 1 else 'ranks'} {names} of {self._size}"

    def _find_daemon(self, parents: Mapping[int, int]) -> int:
        """The process that has started them: the nearest that has no rank; 0 where it can't be seen."""
        pid = os.getpid()
        while (variables := _environ(pid)) is not None and self._rank_name in variables:
            pid = parents.get(pid, 0)
        return pid


def _has_mpi(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return b"/libmpi" in file.read()
    except OSError:  # it has ended meanwhile
        return False


def _ancestors(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    while (parent := parents.get(pid, 0)) > 0:
        yield parent
        pid = parent


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:  # not Linux
        return []


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in (b"Z", b"X") else int(parent)


def _environ(pid: int) -> dict[str, str] | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    return dict(pair.partition("=")[::2] for pair in text.split("\0"))


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    return next((int(value) for name in names if (value := environ.get(name, "")).isdecimal()), 0)
