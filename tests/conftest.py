"""What each marker needs to run, and the rule that a test leaves nothing running."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import threading
from collections.abc import Iterator
from functools import cache
from multiprocessing.process import BaseProcess

import pytest

_TO_FINISH = 2.0
"""Seconds that a test's threads and processes have to end after it."""

_NEEDS = {
    "gpu": ("GPUs", "run it on a machine with as many, with xpdistribute[cuda12] or [cuda13] installed"),
    "mpi": ("MPI ranks", "install xpdistribute[mpi], then mpiexec -n {need} python -m pytest -m mpi"),
}


@cache
def _gpus() -> int:
    if importlib.util.find_spec("cupy") is None:
        return 0
    import cupy as cp

    try:
        return int(cp.cuda.runtime.getDeviceCount())
    except cp.cuda.runtime.CUDARuntimeError:  # CuPy without a driver
        return 0


def _mpi_ranks() -> int:
    if importlib.util.find_spec("mpi4py") is None:
        return 0
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)


def _needed(marker: pytest.Mark) -> int:
    if marker.name == "gpu":
        return int(marker.args[0] if marker.args else marker.kwargs.get("count", 1))
    return int(marker.args[0] if marker.args else marker.kwargs.get("ranks", 2))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    have = {"gpu": _gpus(), "mpi": _mpi_ranks()}
    for item in items:
        for resource, (what, how) in _NEEDS.items():
            marker = item.get_closest_marker(resource)
            if marker and have[resource] < (need := _needed(marker)):
                reason = f"needs {need} {what}, has {have[resource]}: {how.format(need=need)}"
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header() -> str:
    return f"cores: {os.cpu_count()}, gpus: {_gpus()}, mpi ranks: {_mpi_ranks()}"


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    """A test ends what it started. Daemon threads may idle on: they are how strategies keep replicas."""
    threads_before = set(threading.enumerate())
    processes_before = set(multiprocessing.active_children())
    yield
    threads = [t for t in threading.enumerate() if t not in threads_before and not t.daemon]
    processes = [p for p in multiprocessing.active_children() if p not in processes_before]
    started: list[threading.Thread | BaseProcess] = [*threads, *processes]
    for one in started:
        one.join(_TO_FINISH)
    left = [one.name for one in started if one.is_alive()]
    for process in processes:
        process.kill()  # or it would be there for the next test too
    assert not left, (
        f"still running {_TO_FINISH} s after the test: {', '.join(left)}; close or join it in the test"
    )
