"""The processes of a job, and how this one finds the others.

Joined once and kept: all strategies of a process talk over one channel, each by a link of its own.
"""

from __future__ import annotations

import os
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, final

from collectives.channel import Channel
from collectives.communication_options import DEFAULT_TIMEOUT, CommunicationOptions
from collectives.errors import CollectiveAbortedError, PeerFailedError
from collectives.link import Link
from collectives.renewable_link import RenewableLink
from collectives.shared_memory.segments import host_identity
from collectives.shared_memory.shared_memory_link import SharedMemoryLink
from collectives.this_process import set_process_number

BACKENDS = ("auto", "shared_memory", "mpi")
"""How processes exchange data; auto is shared memory inside a host and MPI between hosts."""


@final
class Processes:
    """A job's processes, seen from one of them.

    Attributes:
        channel: to the hub of the job; None where this process is alone.
        timeout: seconds that they wait for one another where no strategy says otherwise: those of the first one made.

    Args:
        channel: as the attribute.
        timeout: likewise.
    """

    def __init__(self, channel: Channel | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.channel = channel
        self.timeout = timeout
        self._num_links = 0
        self._kept: list[tuple[weakref.ref[RenewableLink], CommunicationOptions, int]] = []
        self._all: weakref.WeakSet[Link] = weakref.WeakSet()
        self._renewals: list[weakref.WeakMethod[Callable[[], None]]] = []

    @property
    def process(self) -> int:
        """The number of this one."""
        return 0 if self.channel is None else max(0, self.channel.process)

    @property
    def num_processes(self) -> int:
        """How many there are."""
        return 1 if self.channel is None else self.channel.num_processes

    def fail(self, error: BaseException) -> None:
        """Tell the other processes that this one has failed in a step, which they can't complete without it."""
        if self.channel is None:
            return
        if self.channel.elastic and isinstance(error, PeerFailedError):
            return  # the job may go on; if not, the error ends this process, which is told then
        for link in list(self._all):
            link.fail(
                CollectiveAbortedError(
                    f"process {self.process}: a step failed in it before, with {error!r}, and the others have been told; need a new "
                    "start of the job — xpdistribute run --max-restarts does it from the last checkpoint"
                )
            )
        # The last line is what the others name in their errors.
        text = "".join(traceback.format_exception(error)) + f"{type(error).__name__}: {error}"
        follows = error.process if isinstance(error, PeerFailedError) else None
        self.channel.publish_failure(text, follows)

    def link(self, num_members: int, options: CommunicationOptions, backend: str = "auto") -> Link | None:
        """A new link between all processes; all make theirs at the same time. None where this one is alone.

        Args:
            num_members: replicas of this process.
            options: with the time that processes wait for one another.
            backend: one of `BACKENDS`.

        Raises:
            ValueError: no such backend.
            RuntimeError: one that these processes can't use.
        """
        if backend not in BACKENDS:
            raise ValueError(f"backend: got {backend!r}; need one of {', '.join(BACKENDS)}")
        channel = self.channel
        if channel is None:
            return None
        if not channel.elastic:
            return self._new_link(num_members, options, backend)
        is_member = channel.process >= 0
        link = RenewableLink(
            num_members, self._new_link(num_members, options, backend) if is_member else None
        )
        self._kept.append((weakref.ref(link), options, num_members))
        return link

    def regroup(self, *, admit: bool, timeout: float) -> None:
        """Go on with the processes that are left, and with newcomers if all admit them. All call it at the same time.

        Every link is made anew between these processes; then those who asked for it by `on_renewal` are told.

        Raises:
            CollectiveError: it is not possible.
        """
        channel = self.channel
        assert channel is not None
        while True:
            channel.regroup(None, admit, timeout)
            self._num_links = 0
            try:
                self._kept = [kept for kept in self._kept if kept[0]() is not None]
                for reference, options, num_members in self._kept:
                    link = reference()
                    assert link is not None
                    link.renew(self._new_link(num_members, options, "auto"))
                break
            except PeerFailedError as error:
                if error.process not in channel.gone:
                    raise
                admit = False  # another one was lost meanwhile; newcomers wait for the next time
        for renewal in self._renewals:
            told = renewal()
            if told is not None:
                told()

    def on_renewal(self, told: Callable[[], None]) -> None:
        """Call a method after every `regroup`, as long as its object exists."""
        self._renewals.append(weakref.WeakMethod(told))

    def _new_link(self, num_members: int, options: CommunicationOptions, backend: str) -> Link:
        channel = self.channel
        assert channel is not None
        name = f"link {channel.epoch}.{self._num_links}"
        self._num_links += 1
        timeout = options.timeout
        told = channel.gather(name, [num_members, host_identity(), backend], timeout)
        counts, hosts = [one[0] for one in told], [one[1] for one in told]
        backends = {one[2] for one in told}
        if len(backends) > 1:
            raise ValueError(
                f"backend: the processes ask for different ones, {', '.join(sorted(backends))}; need one"
            )
        if backend == "auto":
            backend = "shared_memory" if len(set(hosts)) == 1 else "hosts"
        link = self._link_by(backend, counts, hosts, name, timeout)
        self._all.add(link)
        return link

    def _link_by(self, backend: str, counts: list[int], hosts: list[str], name: str, timeout: float) -> Link:
        channel = self.channel
        assert channel is not None
        if backend == "shared_memory":
            if len(set(hosts)) > 1:
                raise RuntimeError(
                    f"backend: got shared_memory for processes on {len(set(hosts))} hosts, {', '.join(sorted(set(hosts)))}; need one "
                    "host — backend='auto' uses MPI between hosts"
                )
            return SharedMemoryLink(
                channel.process,
                counts,
                _exchange(channel, name, timeout),
                timeout=timeout,
                watch=channel,
                name=name,
            )
        if backend == "mpi":
            from collectives.mpi.library import world  # noqa: PLC0415  # an extra
            from collectives.mpi.mpi_link import MpiLink  # noqa: PLC0415  # likewise

            comm = world()
            numbers = comm.allgather(channel.process)
            return MpiLink(
                comm,
                [counts[number] for number in numbers],
                timeout=timeout,
                watch=channel,
                numbers=numbers,
                name=name,
            )
        raise RuntimeError(f"backend: {backend} is not there")


def _exchange(channel: Channel, name: str, timeout: float) -> Callable[[Any], list[Any]]:
    turn = 0

    def exchange(value: Any) -> list[Any]:
        nonlocal turn
        turn += 1
        return channel.gather(f"{name}.{turn}", value, timeout)

    return exchange


_joining = threading.Lock()
_joined: Processes | None = None


def join(timeout: float = 300.0) -> Processes:
    """This process's job, joined if it has not been yet.

    Args:
        timeout: seconds to wait for the others.
    """
    global _joined
    with _joining:
        if _joined is None:
            _joined = processes = Processes(_connect(timeout), timeout)
            set_process_number(lambda: processes.process)
        return _joined


def joined() -> Processes | None:
    """The job that this process has joined; None before."""
    return _joined


def _connect(timeout: float) -> Channel | None:
    address = os.environ.get("XPDISTRIBUTE_HUB")
    if not address:
        return None
    rank = next(
        os.environ[v]
        for v in ("XPDISTRIBUTE_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
        if v in os.environ
    )
    joins = os.environ.get("XPDISTRIBUTE_JOIN") == "1"
    channel = Channel.connect(
        address,
        os.environ["XPDISTRIBUTE_TOKEN"],
        None if joins else int(rank),
        host=os.environ.get("XPDISTRIBUTE_HOST") or os.uname().nodename,
        size=None if joins else int(os.environ["XPDISTRIBUTE_SIZE"]),
        join=joins,
        timeout=timeout,
    )
    channel.install_hooks()
    return channel


def _after_fork() -> None:
    global _joined, _joining
    _joined, _joining = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
