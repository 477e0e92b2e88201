"""The limit that a C loop over shared memory sets: a program for ``rank.py``, around the compiled ``c_loops.c``."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

Loop = Callable[[int], tuple[list[int], list[int]]]

_rank, _ranks = int(os.environ["BENCHMARK_RANK"]), int(os.environ["BENCHMARK_RANKS"])
_loops = ctypes.CDLL(os.environ["BENCHMARK_C_LIBRARY"])
_shared = np.frombuffer(mmap.mmap(int(os.environ["BENCHMARK_MEMORY_FD"]), 0), np.uint8)
_PAGE = mmap.PAGESIZE
_APART = _PAGE + 192
"""Arrays that lie a power of two apart would compete for the same lines of the caches."""


def about() -> dict[str, Any]:
    """What was compiled, as the suite told. Each rank keeps to a core of its own, where there are enough.

    Ranks that spin and yield on one core may stay there for long, while another one is free: then they'd show no limit.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if _ranks <= len(cores):
            os.sched_setaffinity(0, {cores[_rank]})
    return {"compiler": os.environ["BENCHMARK_C_COMPILER"]}


def all_reduce(num_bytes: int) -> tuple[Loop, Any]:
    """Every rank's array lies in the shared memory."""
    count = max(1, num_bytes // 4)
    stride = -(-count * 4 // _PAGE) * _PAGE + _APART
    arrays = _shared[_PAGE:]
    mine = arrays[_rank * stride :][: count * 4].view(np.float32)
    mine[...] = 0

    def loop(iterations: int) -> tuple[list[int], list[int]]:
        return _noted(
            _loops.all_reduce_loop,
            iterations,
            ctypes.c_void_p(arrays.ctypes.data),
            ctypes.c_size_t(stride),
            _rank,
            _ranks,
            ctypes.c_size_t(count),
        )

    return loop, mine


def barrier() -> tuple[Loop, int]:
    """By flags in shared memory."""
    return lambda iterations: _noted(_loops.barrier_loop, iterations, _rank, _ranks), 0


def _noted(function: Any, iterations: int, *arguments: Any) -> tuple[list[int], list[int]]:
    times = np.zeros((2, iterations), np.int64)
    function(
        ctypes.c_void_p(_shared.ctypes.data),
        *arguments,
        iterations,
        ctypes.c_void_p(times[0].ctypes.data),
        ctypes.c_void_p(times[1].ctypes.data),
    )
    return times[0].tolist(), times[1].tolist()


CASES: dict[str, Any] = {}
LOOPS = {"all_reduce": all_reduce, "barrier": barrier}
