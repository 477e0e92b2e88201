"""How the processes of a job exchange data: in shared memory inside a host, by way of MPI between hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from collectives.control.channel import Channel
from collectives.link import Link
from collectives.shared_memory.shared_memory_link import SharedMemoryLink

if TYPE_CHECKING:
    from collectives.control.watch import Watch
    from collectives.hosts_link import HostsLink
    from collectives.mpi.mpi_link import MpiLink

BACKENDS = ("auto", "shared_memory", "mpi")
"""What can be asked for; auto is shared memory inside a host and MPI between hosts."""


def make_link(
    channel: Channel,
    backend: str,
    counts: Sequence[int],
    hosts: Sequence[str],
    name: str,
    timeout: float,
    number: int = 0,
) -> Link:
    """A link between all processes of a job; all make theirs at the same time.

    Args:
        channel: to the job's hub.
        backend: one of `BACKENDS`, the same on all.
        counts: how many members each process hosts.
        hosts: by process, what `host_identity` says.
        name: tells this link apart, the same on all.
        timeout: seconds that processes wait for one another.
        number: of this link among those of the job's present make-up, the same on all.

    Raises:
        RuntimeError: a backend that these processes can't use.
        PeerFailedError: another process is gone.
    """
    num_hosts, names = len(set(hosts)), _names(hosts)
    if backend == "auto":
        backend = "shared_memory" if num_hosts == 1 else "hosts"
    if backend == "shared_memory":
        if num_hosts > 1:
            raise RuntimeError(
                f"backend: got shared_memory for processes on {num_hosts} hosts, {names}; need one host — backend='auto' uses MPI "
                "between hosts"
            )
        return SharedMemoryLink(
            channel.process,
            counts,
            _exchange(channel, name, timeout),
            timeout=timeout,
            watch=channel,
            name=name,
        )
    why = f"the hosts {names} need" if backend == "hosts" else "was asked for"
    if channel.elastic:
        from collectives.mpi.communicators import require_survival  # noqa: PLC0415  # an extra

        what = f"processes on {names}" if backend == "hosts" else "backend='mpi'"
        require_survival(what, channel.num_processes, channel.num_spares)
        return _agreeing(channel, why, counts, hosts if backend == "hosts" else None, name, number, timeout)
    from collectives.mpi.library import world  # noqa: PLC0415  # an extra
    from collectives.mpi.mpi_link import MpiLink  # noqa: PLC0415  # likewise

    comm = world(timeout)
    _require_one_numbering(comm, channel, why)
    between = MpiLink(comm, counts, timeout=timeout, watch=channel, name=name)
    return between if backend == "mpi" else _over_hosts(between, channel, hosts, name, channel, timeout)


def _names(hosts: Sequence[str]) -> str:
    """What people call these hosts."""
    names = [identity.partition("/")[0] for identity in sorted(set(hosts))]
    return ", ".join(
        name
        if names.count(name) == 1
        else f"{name} ({names.count(name)} containers or users, which share no memory)"
        for name in dict.fromkeys(names)
    )


def _agreeing(
    channel: Channel,
    why: str,
    counts: Sequence[int],
    hosts: Sequence[str] | None,
    name: str,
    number: int,
    timeout: float,
) -> Link:
    """A link of an elastic job, for which a loss in a collective must be one on all processes or on none."""
    from collectives.mpi import communicators  # noqa: PLC0415  # an extra
    from collectives.mpi.agreeing_link import Abandonable, AgreeingLink  # noqa: PLC0415  # likewise
    from collectives.mpi.library import world  # noqa: PLC0415  # likewise
    from collectives.mpi.mpi_link import MpiLink  # noqa: PLC0415  # likewise

    if not communicators.is_made():
        channel.call_spares()
        communicators.make_communicator(timeout)
    ranks = channel.gather(f"{name} in MPI", communicators.own_rank(), timeout)
    if len(set(ranks)) < len(ranks):
        _require_one_numbering(world(), channel, why)  # each is alone in an MPI of its own
    own = communicators.members(ranks, channel.process, channel.epoch, number)

    def make(comm: communicators.Members, watch: Watch) -> tuple[Link, Abandonable]:
        between = MpiLink(
            comm, counts, timeout=timeout, watch=watch, name=name, owns_comm=True, direct_up_to=comm.size
        )
        if hosts is None:
            return between, between
        over_hosts = _over_hosts(between, channel, hosts, name, watch, timeout)
        return over_hosts, over_hosts

    return AgreeingLink(own, make, counts, watch=channel, name=name, timeout=timeout)


def _over_hosts(
    between: MpiLink, channel: Channel, hosts: Sequence[str], name: str, watch: Watch, timeout: float
) -> HostsLink:
    from collectives.hosts_link import HostsLink  # noqa: PLC0415  # an extra

    own = [number for number, host in enumerate(hosts) if host == hosts[channel.process]]
    gather = _exchange(channel, name, timeout)
    shared = SharedMemoryLink(
        own.index(channel.process),
        [between.counts[number] for number in own],
        lambda value: [told for number, told in enumerate(gather(value)) if number in own],
        timeout=timeout,
        watch=watch,
        numbers=own,
        name=name,
    )
    return HostsLink(shared, between, hosts, watch=watch, name=name)


def _require_one_numbering(comm: Any, channel: Channel, why: str) -> None:
    if (comm.rank, comm.size) != (channel.process, channel.num_processes):
        raise RuntimeError(
            f"backend: this is process {channel.process} of {channel.num_processes}, and rank {comm.rank} of {comm.size} in MPI, "
            f"which {why}; need one numbering — start the program with xpdistribute run, mpiexec, or srun --mpi=pmix"
        )


def _exchange(channel: Channel, name: str, timeout: float) -> Callable[[Any], list[Any]]:
    turn = 0

    def exchange(value: Any) -> list[Any]:
        nonlocal turn
        turn += 1
        return channel.gather(f"{name}.{turn}", value, timeout)

    return exchange
