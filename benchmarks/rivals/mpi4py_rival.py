"""mpi4py's side of the benchmarks between processes: a program for ``rank.py``, which mpiexec starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpi4py
import numpy as np
from mpi4py import MPI

Call = Callable[[], object]


def about() -> dict[str, Any]:
    """Which MPI this is."""
    return {"mpi4py": mpi4py.__version__, "MPI": MPI.Get_library_version().partition(",")[0]}


def all_reduce(num_bytes: int) -> tuple[Call, Any]:
    """``Allreduce`` in place; the message is described once, as the fastest way to call it is."""
    array = np.zeros(max(1, num_bytes // 4), np.float32)
    message, reduce = [array, MPI.FLOAT], MPI.COMM_WORLD.Allreduce
    return lambda: reduce(MPI.IN_PLACE, message), array


def barrier() -> tuple[Call, int]:
    """``Barrier``."""
    return MPI.COMM_WORLD.Barrier, 0


CASES = {"all_reduce": all_reduce, "barrier": barrier}
