"""Our own side of a group of ranks: how its processes are started, and what each of them gets to work with."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from benchmarks.rivals.rank_group import RankGroup, System
from benchmarks.rivals.systems import mpiexec
from collectives import CommunicationOptions, Communicator
from collectives.hierarchical import HierarchicalCommunicator
from collectives.link import Link
from collectives.processes import join
from strategies import MultiWorkerMirroredStrategy, OneDeviceStrategy, Strategy
from xpdistribute.hub import Hub

BACKENDS: Mapping[str, str] = {"shared_memory": "shared_memory", "hierarchical": "auto", "mpi": "mpi"}
"""From our names to those of `MultiWorkerMirroredStrategy`: for ``hierarchical`` the ranks believe to be on two hosts."""

TIMEOUT = 60.0
"""Seconds that a rank waits for others."""

_WITH_MPI = ("hierarchical", "mpi")
_BACKEND = "BENCHMARK_BACKEND"
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


@contextmanager
def ours(backend: str, ranks: int, timeout: float) -> Iterator[RankGroup]:
    """A group of ranks of ours, each with one BLAS thread; the suite holds their hub, as the launcher does otherwise.

    Args:
        backend: of `BACKENDS`.
        ranks: how many; one is a job of its own, without a hub.
        timeout: seconds that an answer of theirs may take.
    """
    environment = {**our_environment(), _BACKEND: backend}
    starter: list[str] = []
    if ranks > 1 and backend in _WITH_MPI:
        starter, more = mpiexec(sys.executable, ranks)
        environment.update(more)
    token = secrets.token_hex(16)
    with Hub(ranks, token).start() as hub:
        each: list[dict[str, str]] = [{}]
        if ranks > 1:
            environment.update(
                XPDISTRIBUTE_HUB=hub.address, XPDISTRIBUTE_TOKEN=token, XPDISTRIBUTE_SIZE=str(ranks)
            )
            if not starter:
                each = [{"XPDISTRIBUTE_RANK": str(rank)} for rank in range(ranks)]
        system = System(backend, sys.executable, _PROGRAM, environment, of_rank=each, starter=starter)
        with RankGroup(system, ranks, timeout) as group:
            yield group


def our_environment() -> dict[str, str]:
    """This process's, with our packages to be found from any folder, installed or not."""
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def prepare(rank: int, ranks: int) -> None:
    """Settle what this rank believes of its host, before it joins."""
    if os.environ[_BACKEND] == "hierarchical":
        os.environ["XPDISTRIBUTE_HOST"] = f"half{2 * rank // ranks}"


def communicators() -> Ends:
    """This rank's ends, once all ranks are there."""
    link = join(TIMEOUT).link(1, CommunicationOptions(timeout_seconds=TIMEOUT), _chosen())
    if link is None:
        raise RuntimeError("benchmark: got one rank; need several to communicate")
    return Ends(HierarchicalCommunicator.alone(link, TIMEOUT), link)


def strategy(ranks: int) -> Strategy:
    """What this rank trains with: beside others, or alone on one device."""
    if ranks == 1:
        return OneDeviceStrategy("cpu:0")
    options = CommunicationOptions(timeout_seconds=TIMEOUT)
    return MultiWorkerMirroredStrategy(communication_options=options, backend=_chosen())


def _chosen() -> str:
    return BACKENDS[os.environ[_BACKEND]]
