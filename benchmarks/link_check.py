"""Do the ranks of this machine add up right, and how fast? Run by ``xpdistribute doctor --mpi``, in every rank.

Rank 0 prints one line of JSON: the number of ranks, how they exchange data, and for each size the median seconds of an
all-reduce with the bytes it is of. A wrong sum raises.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from collectives import CommunicationOptions, Communicator, ReduceOp
from collectives.hierarchical import HierarchicalCommunicator
from collectives.processes import join

SIZES = {4: 200, 1 << 20: 20, 64 << 20: 3}
"""Bytes, and how many times each is timed."""


def main() -> None:
    """Check and time all-reduces between the processes of this job."""
    backend = sys.argv[1] if len(sys.argv) > 1 else "auto"
    processes = join(timeout=60.0)
    link = processes.link(1, CommunicationOptions(timeout_seconds=60.0), backend)
    if link is None:
        raise SystemExit(
            "link_check: this process is alone; need several — xpdistribute doctor --mpi starts it in two"
        )
    communicator = HierarchicalCommunicator.alone(link, 60.0)
    told: dict[str, Any] = {
        "ranks": communicator.world_size,
        "link": type(link).__name__,
        "seconds": {str(size): _time(communicator, size, times) for size, times in SIZES.items()},
    }
    if backend != "shared_memory" and "mpi4py.MPI" in sys.modules:
        told["library"] = sys.modules["mpi4py.MPI"].Get_library_version().strip("\0 \n").splitlines()[0]
    if communicator.rank == 0:
        print(json.dumps(told), flush=True)
    communicator.barrier()


def _time(communicator: Communicator, num_bytes: int, times: int) -> float:
    rank, ranks = communicator.rank, communicator.world_size
    # Whole numbers small enough that float32 adds them up exactly, different at each place and rank.
    own = (np.arange(num_bytes // 4) % 1000 + rank).astype(np.float32)
    expected = (np.arange(num_bytes // 4) % 1000 * ranks + ranks * (ranks - 1) // 2).astype(np.float32)
    taken = []
    for _ in range(times):
        communicator.barrier()
        began = time.perf_counter()
        total = communicator.all_reduce(own, ReduceOp.SUM)
        taken.append(time.perf_counter() - began)
        if not np.array_equal(total, expected):
            place = int(np.flatnonzero(total != expected)[0])
            raise ArithmeticError(
                f"link_check: rank {rank} got {total[place]} at place {place} of {len(own)}; need {expected[place]}"
            )
    return statistics.median(taken)


if __name__ == "__main__":
    main()
