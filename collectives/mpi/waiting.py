"""How a process waits for messages: without ever being inside MPI for long, where nothing could end the wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

_SPINS = 20
_YIELDS = 300
"""How often the core is offered to others before sleeping: about 0.1 ms where nobody wants it."""
_FIRST_NAP, _LAST_NAP, _LAST_TRANSFER_NAP = 20e-6, 1e-3, 100e-6
"""Seconds. A process that sleeps for the last of them uses 3 % of a core; while data is on its way, MPI moves it only when it is
called."""
_LOOK_EVERY = 1e-3
"""Seconds between two looks at what is known of the others."""

Look = Callable[[Sequence[int], float], None]
"""Given the processes that are still missing and the seconds waited; raises to end the wait."""

_yield_core = getattr(os, "sched_yield", None) or (lambda: time.sleep(0))


def wait_until(is_done: Callable[[], bool], look: Look, missing: Callable[[], Sequence[int]]) -> None:
    """Ask again and again until it is done.

    Args:
        is_done: asks MPI, which moves what is on its way then.
        look: called now and then.
        missing: the processes that it is waited for.
    """
    _wait(is_done, look, missing, lambda: 0, _LAST_NAP)


@final
class UnderWay:
    """Data that is on its way: sends and receives of which each is done for itself.

    Args:
        mpi: the module ``mpi4py.MPI``.
        requests: theirs.
    """

    def __init__(self, mpi: Any, requests: list[Any]) -> None:
        self._test_all, self._test_some = mpi.Request.Testall, mpi.Request.Testsome
        self._requests = requests
        self._num_done = 0

    def is_done(self) -> bool:
        """Whether all of it has arrived; moves it on."""
        return bool(self._test_all(self._requests))

    def wait(self, look: Look, missing: Callable[[], Sequence[int]]) -> None:
        """Wait until it is; what ``look`` is told is how long nothing has arrived."""
        for _ in range(_SPINS):
            if self.is_done():
                return
        _wait(self._move, look, missing, lambda: self._num_done, _LAST_TRANSFER_NAP)

    def _move(self) -> bool:
        done = self._test_some(self._requests)
        if done is None:  # there is none left
            return True
        self._num_done += len(done)
        return self.is_done() if done else False


def have_ended(mpi: Any, requests: Iterable[Any], timeout: float) -> bool:
    """Wait until each of several requests has ended, well or not; whether they all have in time.

    Args:
        mpi: the module ``mpi4py.MPI``.
        requests: which.
        timeout: seconds.
    """
    deadline = time.monotonic() + timeout
    left, nap = [request for request in requests if not _has_ended(mpi, request)], _FIRST_NAP
    while left and time.monotonic() < deadline:
        time.sleep(nap)
        nap = min(1.2 * nap, _LAST_NAP)
        left = [request for request in left if not _has_ended(mpi, request)]
    return not left


def _has_ended(mpi: Any, request: Any) -> bool:
    try:
        return bool(request.Test())
    except mpi.Exception:
        return True


def _wait(
    is_done: Callable[[], bool],
    look: Look,
    missing: Callable[[], Sequence[int]],
    progress: Callable[[], int],
    longest: float,
) -> None:
    for _ in range(_YIELDS):
        if is_done():
            return
        _yield_core()
    started = looked = time.monotonic()
    nap, so_far = _FIRST_NAP, progress()
    while not is_done():
        now = time.monotonic()
        if progress() != so_far:
            started, so_far = now, progress()
        if now - looked > _LOOK_EVERY:
            looked = now
            look(missing(), now - started)
        time.sleep(nap)
        nap = min(1.2 * nap, longest)
