"""The least that a reduction can take: every input byte read once, every output byte written once.

It is measured, not computed from a data sheet: each rank's thread copies its own input to its own output
with ``np.copyto``, all at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import Case, ranks_by_turns

Array = np.ndarray[Any, np.dtype[Any]]


def copy_floor(
    ins: Sequence[Array], outs: Sequence[Array], iterations: int, warm_up: int, timeout: float
) -> list[float]:
    """Seconds of each iteration of all ranks' copies.

    Args:
        ins: one array for each rank.
        outs: of the same sizes.
        iterations: how many are timed.
        warm_up: how many come before.
        timeout: seconds for the slowest rank.
    """

    def copy(source: Array, target: Array) -> Callable[[], object]:
        return lambda: np.copyto(target, source)

    together = threading.Barrier(len(ins), timeout=timeout)
    calls = [copy(source, target) for source, target in zip(ins, outs, strict=True)]
    return ranks_by_turns(calls, lambda rank: together.wait(), iterations, warm_up, timeout).seconds  # noqa: ARG005


def floor_case(num_bytes: int, ranks: int, timeout: float) -> Case:
    """The floor as a case that takes turns with others; every rank has ``num_bytes`` to read and to write."""
    ins = [np.full(num_bytes // 4, rank, np.float32) for rank in range(ranks)]
    outs = [np.full(num_bytes // 4, -1, np.float32) for _ in range(ranks)]
    return lambda iterations: copy_floor(ins, outs, iterations, 1, timeout)
