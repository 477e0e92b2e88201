"""Giving up what is under way after a failure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from collectives.mpi.library import keep
from collectives.mpi.waiting import have_ended


def abandon(mpi: Any, receives: Iterable[Any], sends: Iterable[tuple[Any, object]], timeout: float) -> bool:
    """Have nothing under way any more that could write into memory of this process; whether that is so in time.

    What is still being sent is left so, and its memory kept: it may take until the receiver calls MPI, or for ever if that has died and
    MPI doesn't know it. The receiver has given up as well, so that it does not matter what is in that memory by then.

    Args:
        mpi: the module ``mpi4py.MPI``.
        receives: their requests; ended where nothing has come yet, else the rest is waited for.
        sends: their requests, with what MPI reads for each.
        timeout: seconds that the receives have to end, well or not.
    """
    for request, memory in sends:
        if not have_ended(mpi, [request], 0.0):
            keep((request, memory))
    left = [request for request in receives if not have_ended(mpi, [request], 0.0)]
    for request in left:
        request.Cancel()
    return have_ended(mpi, left, timeout)
