"""A warning for programs that the launcher has started in several processes, each of which trains as if it were alone."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

_RANKS = ("XPDISTRIBUTE_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")

_has_warned = False


def is_one_of_several() -> bool:
    """Whether the launcher has started this process with others."""
    size = os.environ.get("XPDISTRIBUTE_SIZE", "")
    return size.isdecimal() and int(size) > 1


def warn_if_unjoined(kind: str) -> None:
    """Warn, in the first process and once, if the processes have not come together in any way by the first step.

    Args:
        kind: of the strategy that makes it.
    """
    global _has_warned
    rank = next((os.environ[name] for name in _RANKS if os.environ.get(name)), "0")
    if _has_warned or rank != "0" or _have_come_together():
        return
    _has_warned = True
    warnings.warn(
        f"{kind}: the program runs in {os.environ['XPDISTRIBUTE_SIZE']} processes, and each of them trains on its own and writes the same "
        "files, as this strategy knows of no others; need MultiWorkerMirroredStrategy for training together — or start one "
        "process, without xpdistribute run",
        stacklevel=3,
    )


def _have_come_together() -> bool:
    """By our own hub, by MPI, which mpi4py starts when it is imported, or by torch."""
    processes: Any = sys.modules.get("collectives.processes")
    if processes is not None and processes.joined() is not None:
        return True
    torch: Any = sys.modules.get("torch.distributed")
    return "mpi4py.MPI" in sys.modules or (
        torch is not None and bool(torch.is_available() and torch.is_initialized())
    )
