"""What holds of every communicator, on MPI: the same tests, run by all ranks in step, each with its own ends of the group."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from collectives import CollectiveError, Communicator
from collectives.backends import make_link as link_of_backend
from collectives.control.channel import Channel
from collectives.hierarchical import HierarchicalCommunicator
from collectives.hosts_link import HostsLink
from collectives.link import Link
from collectives.mpi.agreeing_link import AgreeingLink
from collectives.mpi.communicators import survives_losses
from collectives.mpi.library import world
from collectives.mpi.mpi_link import MpiLink
from collectives.rendezvous import Rendezvous
from collectives.shared_memory.shared_memory_link import SharedMemoryLink
from tests.processes import TIMEOUT, run_on_threads
from xpdistribute.hub import Hub

TESTS = "tests/collectives/test_communicators.py"
_ANY = "in_process-1]"
"""Each test is there once for each backend; this is the one that is run here with another."""
_NEEDS_FORK = "test_no_rank_passes_a_barrier"


class _OnMpi:
    """Gives the tests' fixture another backend."""

    def __init__(self, counts: list[int], options: dict[str, Any]) -> None:
        self._comm = world()
        self._counts, self._options = counts, options
        # Those of an elastic job talk over a hub.
        self._channel = connect(self._comm) if survives_losses() else None

    @property
    def _hosts(self) -> list[str]:
        return [f"host{number // 2}" for number in range(len(self._counts))]

    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Any:
        if fixturedef.argname != "on_every_rank":
            return None
        fixturedef.cached_result = (self._on_every_rank, fixturedef.cache_key(request), None)
        return self._on_every_rank

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # The ranks of the one left out write into memory that they have by forking.
        items[:] = [
            item
            for item in items
            if _ANY in item.name
            and _NEEDS_FORK not in item.name
            and "on_every_rank" in getattr(item, "fixturenames", ())
        ]

    def _on_every_rank(self, body: Callable[[Communicator], Any]) -> list[Any]:
        channel = self._channel
        if channel is None:
            link = make_link(self._comm, self._counts, self._options)
        else:
            channel.regroup(None, False, TIMEOUT)  # takes back what has failed in the test before
            link = link_of_backend(channel, "auto", self._counts, self._hosts, "link", TIMEOUT)
            assert isinstance(link, AgreeingLink)
        local = self._counts[link.process]
        rendezvous = Rendezvous(local, TIMEOUT)
        ends: list[Communicator] = [
            HierarchicalCommunicator(number, rendezvous, link) for number in range(local)
        ]
        try:
            outcome: Any = run_on_threads(ends, body)
        except Exception as error:  # noqa: BLE001  # raised below, by all ranks alike
            error.add_note(traceback.format_exc())
            outcome = _that_travels(error)
        outcomes = self._comm.allgather(outcome)
        link.close()
        errors = [one for one in outcomes if isinstance(one, Exception)]
        errors.sort(key=lambda error: isinstance(error, CollectiveError))
        if errors:
            raise errors[0]
        return [result for results in outcomes for result in results]


def make_link(comm: Any, counts: list[int], options: dict[str, Any]) -> Link:
    """A link by MPI alone; or of several hosts, where this process has been told its own."""
    if "XPDISTRIBUTE_HOST" not in os.environ:
        return MpiLink(comm, counts, timeout=TIMEOUT, **options)
    hosts = comm.allgather(os.environ["XPDISTRIBUTE_HOST"])
    own = [process for process, host in enumerate(hosts) if host == hosts[comm.rank]]
    inside = comm.Split(own[0])
    between = MpiLink(comm, counts, timeout=TIMEOUT)
    shared = SharedMemoryLink(
        own.index(comm.rank), [counts[process] for process in own], inside.allgather, timeout=TIMEOUT
    )
    return HostsLink(shared, between, hosts, **options)


def connect(comm: Any) -> Channel:
    """A channel to an elastic job's hub, which is in process 0."""
    point = None
    if comm.rank == 0:
        hub = Hub(comm.size, "secret", elastic=True).start()
        point = hub.address
    address = comm.bcast(point, root=0)
    return Channel.connect(address, "secret", comm.rank, host="host")


def _that_travels(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # what can't be pickled is told in words
        return RuntimeError(traceback.format_exc())
    return error


def main() -> None:
    """Arguments: members by process, joined by ``+``; options of the link, as a dict."""
    counts, options = sys.argv[1:3]
    arguments = [TESTS, "-q", "-x", "-p", "no:cacheprovider", "-p", "no:cov"]
    plugin = _OnMpi([int(count) for count in counts.split("+")], eval(options))
    status = pytest.main(arguments, plugins=[plugin])
    sys.stdout.flush()
    if status != pytest.ExitCode.OK:
        os._exit(int(status))  # without waiting for ranks that may hang
