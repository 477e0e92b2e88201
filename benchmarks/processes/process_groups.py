"""Our own side of a group of ranks: how its processes are started, and what each of them gets to work with."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from benchmarks.rivals.rank_group import System
from collectives.communicator import Communicator
from collectives.hierarchical import HierarchicalCommunicator
from collectives.link import Link
from collectives.shared_memory.shared_memory_link import SharedMemoryLink

BACKENDS = ("shared_memory",)
"""The names of `communicators`."""

TIMEOUT = 60.0
"""Seconds that a rank waits for others."""

_PROGRAM = Path(__file__).with_name("our_rank.py")
_ROOT = Path(__file__).resolve().parents[2]


@final
@dataclass(frozen=True)
class Ends:
    """What a rank works with.

    Args:
        communicator: its end.
        link: what the communicator is made of, which hands memory out.
    """

    communicator: Communicator
    link: Link


def system(backend: str, ranks: int) -> System:  # noqa: ARG001  as many as the group has
    """How the ranks of a backend are started, each with one BLAS thread."""
    return System(backend, sys.executable, _PROGRAM, {**our_environment(), "BENCHMARK_BACKEND": backend})


def our_environment() -> dict[str, str]:
    """This process's, with our packages to be found from any folder, installed or not."""
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def communicators(environ: Mapping[str, str]) -> Ends:
    """This rank's ends, once all ranks are there.

    Args:
        environ: what `system` and the suite have set.
    """
    rank, ranks = int(environ["BENCHMARK_RANK"]), int(environ["BENCHMARK_RANKS"])
    exchange = _Exchange(Path(environ["BENCHMARK_FOLDER"]), rank, ranks)
    link = SharedMemoryLink(rank, [1] * ranks, exchange, timeout=TIMEOUT)
    return Ends(HierarchicalCommunicator.alone(link, TIMEOUT), link)


@final
class _Exchange:
    """Gives every rank's value, by rank, by way of files in a folder of all."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._folder = folder
        self._rank = rank
        self._ranks = ranks
        self._calls = 0

    def __call__(self, value: Any) -> list[Any]:
        self._calls += 1
        mine = self._file(self._rank)
        partial = mine.with_suffix(".partial")
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.rename(mine)
        deadline = time.monotonic() + TIMEOUT
        while not all(self._file(rank).exists() for rank in range(self._ranks)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"benchmark: rank {self._rank} waited {TIMEOUT:g} s for all to start")
            time.sleep(1e-3)
        return [json.loads(self._file(rank).read_text(encoding="utf-8")) for rank in range(self._ranks)]

    def _file(self, rank: int) -> Path:
        return self._folder / f"exchange {self._calls} {rank}"
