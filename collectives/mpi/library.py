"""The MPI library: loaded when it is first needed, and left in good order.

mpi4py is imported here and nowhere else. A process that ends well waits for the others before `MPI_Finalize`, in which it
would burn a core; one that fails does not call it, so that mpiexec ends the others at once instead of all waiting for it for ever.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from collectives.mpi.siblings import wait_for_siblings
from collectives.mpi.waiting import wait_until

_EXTRA = "pip install 'xpdistribute[mpi]' brings mpi4py and Open MPI"
_STARTERS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec",
    "PMI_SIZE": "an mpiexec of MPICH's or Intel MPI's kind, or srun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""How many processes were started, and by whom."""
_TELL_AFTER, _LONGEST = 30.0, 24 * 3600.0
"""Seconds that a process that has ended waits for the others until it says so, and at most."""


class Outgoing(Protocol):
    """What may still be sending."""

    def close(self, timeout: float) -> None:
        """Wait until what was sent has been received, or until the timeout."""


class Ending(Protocol):
    """What is to be ended before MPI is."""

    @property
    def is_hopeless(self) -> bool:
        """Whether some process won't come to the end any more, in the ordinary way."""

    def close(self) -> None:
        """Finish what is under way."""


_loading = threading.Lock()
_module: Any = None
_is_ours = False
_TO_SEND = 30.0
"""Seconds that a process which ends waits until what it has sent is received."""
_outgoing: set[Outgoing] = set()
_links: weakref.WeakSet[Any] = weakref.WeakSet()
_failed = _leaves_alone = False
_kept: dict[int, object] = {}


def mpi(timeout: float = 300.0) -> Any:
    """The module ``mpi4py.MPI``, with MPI initialised.

    Args:
        timeout: seconds to wait for the other processes of this host before it is.

    Raises:
        CollectiveError: one of them does not come.
        ImportError: mpi4py or the MPI library is not there.
        RuntimeError: MPI can't be called by several threads, or has been finalised.
    """
    global _module, _is_ours
    with _loading:
        if _module is None:
            _is_ours = "mpi4py.MPI" not in sys.modules
            _module = _load(timeout)
            atexit.register(_at_exit)
    return _module


def is_loaded() -> bool:
    """Whether `mpi` has been called."""
    return _module is not None


def world(timeout: float = 300.0) -> Any:
    """The communicator of all processes that were started together.

    Args:
        timeout: as `mpi`.

    Raises:
        CollectiveError: as `mpi`.
        ImportError: likewise.
        RuntimeError: likewise; or several processes were started that this MPI knows nothing of.
    """
    module = mpi(timeout)
    comm = module.COMM_WORLD
    for variable, starter in _STARTERS.items():
        size = os.environ.get(variable, "")
        if comm.size == 1 and size.isdecimal() and int(size) > 1:
            raise RuntimeError(
                f"MPI: {starter} started {size} processes ({variable}), but each is alone in its MPI library, "
                f"{_version(module)}; need mpiexec and the library of one MPI — start with the mpiexec beside {sys.executable}, "
                "with `xpdistribute run`, or set MPI4PY_LIBMPI to the library that belongs to the other mpiexec"
            )
    return comm


def track(link: Ending) -> None:
    """Close a link when the process ends, if it is still there."""
    _links.add(link)


def keep_until_sent(outgoing: Outgoing) -> None:
    """Have something that still sends finish before MPI ends, also if nothing else refers to it any more."""
    _outgoing.add(outgoing)


def has_sent(outgoing: Outgoing) -> None:
    """It sends nothing any more."""
    _outgoing.discard(outgoing)


def set_failed() -> None:
    """Don't wait for the others when this process ends: nothing can be done with them any more."""
    global _failed
    _failed = True


def set_leaving_alone() -> None:
    """This process may end without the others, and they without it: its job goes on when some are lost.

    `MPI_Finalize` waits for all, those that have died too.
    """
    global _leaves_alone
    _leaves_alone = True


def keep(owner: object) -> None:
    """Keep memory that MPI may still read and write."""
    _kept[id(owner)] = owner


def let_go(owner: object) -> None:
    """MPI is done with it."""
    _kept.pop(id(owner), None)


def _load(timeout: float) -> Any:
    try:
        import mpi4py  # noqa: PLC0415  # an extra

        # Whoever fails must not wait in MPI_Finalize for the others, which wait for it.
        mpi4py.rc.finalize = False
        # Initialising it waits for all processes, where nothing can end the wait.
        mpi4py.rc.initialize = False
        from mpi4py import MPI  # noqa: PLC0415  # an extra
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"MPI: there is no {error.name}; need mpi4py — {_EXTRA}", name=error.name
        ) from error
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"MPI: mpi4py can't load the MPI library ({error}); need one that it finds — {_EXTRA}; MPI4PY_LIBMPI names "
            "another"
        ) from error
    if MPI.Is_finalized():
        raise RuntimeError("MPI: it has been finalised; need a process that has not called MPI.Finalize yet")
    if not MPI.Is_initialized():
        wait_for_siblings(timeout)
        level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
        MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}"))
        global _is_ours
        _is_ours = True
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            f"MPI: {_version(MPI)} was initialised so that not all threads may call it; need MPI_THREAD_MULTIPLE — "
            "don't change mpi4py.rc.thread_level, or use an MPI that is built with threads"
        )
    return MPI


def _version(module: Any) -> str:
    return str(module.Get_library_version()).split("\n")[0].rstrip("\0 ,")


def _at_exit() -> None:
    """Runs after almost everything else that is done at exit, as it was registered early."""
    module = _module
    if module.Is_finalized():
        return
    # The interpreter leaves the exception that ended it here; in an interactive one it says nothing.
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    has_raised = getattr(sys, "last_value", None) is not None and not is_interactive
    if has_raised or _failed or _leaves_alone:
        if not _is_ours:  # mpi4py would finalise MPI next, and wait
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1 if has_raised or not _leaves_alone else 0)
        return
    links = list(_links)
    for link in links:
        link.close()
    for outgoing in list(_outgoing):
        outgoing.close(_TO_SEND)
    if _meet_others(module, links):
        module.Finalize()


def _meet_others(module: Any, links: Sequence[Ending]) -> bool:
    """Wait for all processes to end; whether all have."""
    comm = module.COMM_WORLD
    if comm.size == 1:
        return True
    request = comm.Ibarrier()
    told = False

    def look(_missing: object, waited: float) -> None:
        nonlocal told
        if waited > _TELL_AFTER and not told:
            told = True
            print(  # noqa: T201  # there is nobody to raise to
                f"MPI: process {comm.rank} has ended and waits for the others to end",
                file=sys.stderr,
                flush=True,
            )
        if waited > _LONGEST or any(link.is_hopeless for link in links):
            raise _HopelessError

    try:
        wait_until(request.Test, look, list)
    except _HopelessError:
        return False
    return True


class _HopelessError(Exception):
    """There is nobody to wait for any more."""
