"""Our side of the benchmarks between processes: a program for ``rank.py``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gradient_lists import MODELS, num_elements
from benchmarks.machine import package_version
from benchmarks.mlp import num_wrong, training_step
from benchmarks.processes.process_groups import Ends, communicators, prepare, strategy
from benchmarks.rivals.rank import this_rank
from strategies import Strategy

Call = Callable[[], object]

_RANKS = int(os.environ["BENCHMARK_RANKS"])

_joined: list[Ends] = []
_strategies: list[Strategy] = []


def about() -> dict[str, Any]:
    """Join the group, if this is not all of it."""
    if _RANKS > 1:
        prepare(this_rank(), _RANKS)
        _joined.append(communicators())
    return {"xpdistribute": package_version(), "ranks": _RANKS}


def all_reduce(num_bytes: int, memory: str) -> tuple[Call, Any]:
    """``all_reduce`` in place.

    Args:
        num_bytes: of the array.
        memory: ``link`` for an array in memory that the link hands out, ``ordinary`` for one in NumPy's own.
    """
    array = _array(max(1, num_bytes // 4), memory)
    communicator = _joined[0].communicator
    return lambda: communicator.all_reduce(array, out=array), array


def gradients(model: str, memory: str) -> tuple[Call, Any]:
    """``all_reduce_coalesced`` in place of a model's gradients, which are views of one array."""
    shapes = MODELS[model]()
    array = _array(num_elements(shapes), memory)
    views, start = [], 0
    for shape in shapes:
        size = num_elements([shape])
        views.append(array[start : start + size].reshape(shape))
        start += size
    communicator = _joined[0].communicator
    return lambda: communicator.all_reduce_coalesced(views, outs=views), array


def barrier() -> tuple[Call, int]:
    """``barrier``."""
    return _joined[0].communicator.barrier, 0


def mlp(batch: int) -> tuple[Call, int]:
    """A training step of the MLP with SGD, ``batch`` examples a rank."""
    of_all = strategy(_RANKS)
    _strategies.append(of_all)
    step = training_step(of_all, batch)
    return step, num_wrong(of_all, step, batch * _RANKS)


def close() -> None:
    """Leave the group."""
    for each in _strategies:
        each.close()
    for ends in _joined:
        ends.link.close()


def _array(count: int, memory: str) -> Any:
    if memory == "link":
        return _joined[0].link.memory(count * 4).view(np.float32)
    return np.zeros(count, np.float32)


CASES = {"all_reduce": all_reduce, "gradients": gradients, "barrier": barrier, "mlp": mlp}
