"""Runs a test on every rank of every backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import pytest

from collectives import (
    Array,
    CheckedCommunicator,
    CollectiveError,
    Communicator,
    FlightRecorder,
    InProcessCommunicator,
    NonBlocking,
    ReduceOp,
    TracedCommunicator,
)
from collectives.host_staged import HostStagedCommunicator
from collectives.rendezvous import Rendezvous
from tests.processes import on_link

Body: TypeAlias = Callable[[Communicator], Any]
TIMEOUT = 20.0


def _in_process(world_size: int) -> Sequence[Communicator]:
    return InProcessCommunicator.group(world_size, TIMEOUT)


def _in_process_sharing(world_size: int) -> Sequence[Communicator]:
    """All ranks share the work of even the smallest collective."""
    rendezvous = Rendezvous(world_size, TIMEOUT)
    return [InProcessCommunicator(rank, rendezvous, shared_from=0) for rank in range(world_size)]


def _checked(world_size: int) -> Sequence[Communicator]:
    return [CheckedCommunicator(end) for end in _in_process(world_size)]


def _traced(world_size: int) -> Sequence[Communicator]:
    recorder = FlightRecorder(range(world_size))
    return [TracedCommunicator(end, recorder) for end in _in_process(world_size)]


def _in_background(world_size: int) -> Sequence[Communicator]:
    return [_Awaited(end) for end in _in_process(world_size)]


def _host_staged(world_size: int) -> Sequence[Communicator]:
    return [HostStagedCommunicator(end) for end in _in_process(world_size)]


@final
class _Awaited(Communicator):
    """Starts each collective in the background and waits for its handle."""

    def __init__(self, inner: Communicator) -> None:
        self._inner, self._background = inner, NonBlocking(inner)

    @property
    def rank(self) -> int:
        return self._background.rank

    @property
    def world_size(self) -> int:
        return self._background.world_size

    def barrier(self) -> None:
        self._background.barrier().result(TIMEOUT)

    def all_gather_object(self, value: object) -> list[object]:
        return self._background.all_gather_object(value).result(TIMEOUT)

    def _all_reduce(
        self, arrays: list[Array], op: ReduceOp, outs: Sequence[Array] | None, name: str | None
    ) -> list[Array]:
        if len(arrays) == 1:
            out = None if outs is None else outs[0]
            return [self._background.all_reduce(arrays[0], op, out=out, name=name).result(TIMEOUT)]
        return self._background.all_reduce_coalesced(arrays, op, outs=outs, name=name).result(TIMEOUT)

    def _reduce(self, array: Array, op: ReduceOp, root: int, out: Array | None) -> Array | None:
        return self._background.reduce(array, op, root, out=out).result(TIMEOUT)

    def _reduce_scatter(self, array: Array, op: ReduceOp, out: Array | None) -> Array:
        return self._background.reduce_scatter(array, op, out=out).result(TIMEOUT)

    def _broadcast(self, array: Array, root: int, out: Array | None) -> Array:
        return self._background.broadcast(array, root, out=out).result(TIMEOUT)

    def _all_gather(self, array: Array, axis: int, out: Array | None) -> Array:
        return self._background.all_gather(array, axis, out=out).result(TIMEOUT)

    def _all_to_all(self, array: Array, out: Array | None) -> Array:
        return self._background.all_to_all(array, out=out).result(TIMEOUT)

    # Point to point is no collective; nothing is under way here when it is called.
    def _send(self, array: Array, peer: int, tag: int) -> None:
        self._inner.send(array, peer, tag)

    def _recv(self, peer: int, tag: int) -> Array:
        return self._inner.recv(peer, tag)


def _in_processes(counts: Sequence[int], body: Body) -> list[Any]:
    return on_link(counts, body)


@pytest.fixture
def on_threads() -> Callable[[Sequence[Communicator], Body], list[Any]]:
    """Runs a function on every end of a group, each in a thread of its own; the results by rank."""
    return run_on_threads


@pytest.fixture(
    params=[
        *(pytest.param((_in_process, n), id=f"in_process-{n}") for n in range(1, 9)),
        *(pytest.param((_in_process_sharing, n), id=f"in_process_sharing-{n}") for n in (2, 3, 8)),
        *(pytest.param((_checked, n), id=f"checked-{n}") for n in (1, 3)),
        *(pytest.param((_traced, n), id=f"traced-{n}") for n in (1, 3)),
        *(pytest.param((_host_staged, n), id=f"host_staged-{n}") for n in (1, 3)),
        *(pytest.param((_in_background, n), id=f"in_background-{n}") for n in (1, 3)),
        *(
            pytest.param((_in_processes, counts), id=f"shared_memory-{'+'.join(map(str, counts))}")
            for counts in ((1,), (1, 1), (1, 1, 1), (2, 1))
        ),
    ]
)
def on_every_rank(request: pytest.FixtureRequest) -> Callable[[Body], list[Any]]:
    """Runs a function on every rank of a group of this backend; the results by rank."""
    make, world_size = request.param
    if make is _in_processes:
        return lambda body: on_link(world_size, body)
    return lambda body: run_on_threads(make(world_size), body)


@pytest.fixture(params=range(1, 9), ids=lambda n: f"{n}_ranks")
def on_ranks(request: pytest.FixtureRequest) -> Callable[[Body], list[Any]]:
    """As `on_every_rank`, on one backend only, for what depends on the numbers and not on the backend."""
    return lambda body: run_on_threads(_in_process(request.param), body)


def run_on_threads(ends: Sequence[Communicator], body: Body) -> list[Any]:
    results: list[Any] = [None] * len(ends)
    errors: list[BaseException | None] = [None] * len(ends)

    def run(rank: int) -> None:
        try:
            results[rank] = body(ends[rank])
        except BaseException as error:  # noqa: BLE001  # raised below, in the test's own thread
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    raised = [error for error in errors if error is not None]
    # What a rank did wrong tells more than that the others waited for it in vain.
    raised.sort(key=lambda error: isinstance(error, CollectiveError))
    if raised:
        raise raised[0]
    return results
