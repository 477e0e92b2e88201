"""Do the ranks of this machine add up right, and how fast? Run by ``xpdistribute doctor --mpi``, in every rank.

Rank 0 prints one line of JSON: the number of ranks, and by each way to exchange data that the command line names, for each size
the median seconds of an all-reduce with the bytes it is of. They take turns, so that what else the machine does slows all of them
alike. A wrong sum raises.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from collectives import CommunicationOptions, Communicator, ReduceOp
from collectives.hierarchical import HierarchicalCommunicator
from collectives.processes import join

SIZES = {4: 201, 1 << 20: 21, 64 << 20: 5}
"""Bytes, and how many times each is timed."""


def main() -> None:
    """Check and time all-reduces between the processes of this job."""
    backends = sys.argv[1:] or ["auto"]
    processes = join(timeout=60.0)
    communicators: dict[str, Communicator] = {}
    links: dict[str, dict[str, Any]] = {}
    for backend in backends:
        link = processes.link(1, CommunicationOptions(timeout_seconds=60.0), backend)
        if link is None:
            raise SystemExit(
                "link_check: this process is alone; need several — xpdistribute doctor --mpi starts it in two"
            )
        communicators[backend] = HierarchicalCommunicator.alone(link, 60.0)
        links[backend] = {"link": type(link).__name__, "seconds": {}}
        if backend != "shared_memory" and "mpi4py.MPI" in sys.modules:
            library = sys.modules["mpi4py.MPI"].Get_library_version()
            links[backend]["library"] = library.strip("\0 \n").splitlines()[0]
    for size, times in SIZES.items():
        for backend, taken in _time(communicators, size, times).items():
            links[backend]["seconds"][str(size)] = taken
    one = communicators[backends[0]]
    if one.rank == 0:
        print(json.dumps({"ranks": one.world_size, "links": links}), flush=True)
    one.barrier()


def _time(communicators: Mapping[str, Communicator], num_bytes: int, times: int) -> dict[str, float]:
    one = next(iter(communicators.values()))
    rank, ranks = one.rank, one.world_size
    # Whole numbers small enough that float32 adds them up exactly, different at each place and rank.
    own = (np.arange(num_bytes // 4) % 1000 + rank).astype(np.float32)
    expected = (np.arange(num_bytes // 4) % 1000 * ranks + ranks * (ranks - 1) // 2).astype(np.float32)
    taken: dict[str, list[float]] = {name: [] for name in communicators}
    for name, communicator in [*communicators.items()] * times:
        communicator.barrier()
        began = time.perf_counter()
        total = communicator.all_reduce(own, ReduceOp.SUM)
        taken[name].append(time.perf_counter() - began)
        if not np.array_equal(total, expected):
            place = int(np.flatnonzero(total != expected)[0])
            raise ArithmeticError(
                f"link_check: rank {rank} got {total[place]} at place {place} of {len(own)}; need {expected[place]}"
            )
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


if __name__ == "__main__":
    main()
