"""The communicator of the processes that are left, in an Open MPI that goes on when one dies (``mpiexec --with-ft ulfm``)."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from collectives.errors import CollectiveTimeoutError, common
from collectives.mpi.library import is_loaded, mpi, set_leaving_alone, world

_SWITCH = "OMPI_MCA_mpi_ft_enable"
"""Set by ``--with-ft ulfm`` for every process."""


def survives_losses() -> bool:
    """Whether this MPI goes on when a process dies."""
    return os.environ.get(_SWITCH, "").lower() in ("1", "true", "yes")


def require_survival(what: str, num_processes: int, num_spares: int = 0) -> None:
    """Refuse what an elastic job can't do with this MPI.

    Args:
        what: the job has that needs MPI.
        num_processes: how many are left.
        num_spares: how many more were started as spares.

    Raises:
        RuntimeError: it does; in all processes of the job.
    """
    if not survives_losses():
        raise common(
            RuntimeError(
                f"elastic job: got {what}; need processes of one host, or an MPI that goes on when one dies — start it with xpdistribute run "
                "--elastic or Open MPI's mpiexec --with-ft ulfm; or without --elastic, to start again from a checkpoint: --max-restarts"
            )
        )

    num_started = os.environ.get("OMPI_COMM_WORLD_SIZE", "")
    if not is_loaded() and num_started.isdecimal() and int(num_started) != num_processes + num_spares:
        # MPI_Init waits for all that were started, for ever.
        raise common(
            RuntimeError(
                f"elastic job: {int(num_started) - num_processes - num_spares} of {num_started} processes died before they were connected by MPI, which {what} "
                "need; need all of them for the start — start the job again"
            )
        )


def survivors(timeout: float, number: int | None = None, *, has_spares: bool = False) -> Any:
    """A new communicator of all processes of MPI's that live, in the order of their ranks. All call it at the same time.

    Args:
        timeout: seconds to wait for the others.
        number: of this process among those that compute, whose order it is with spares; None in a spare.
        has_spares: whether the job was started with processes that do not compute until they take the place of others; these come
            too, and are left out.

    Returns:
        The communicator; in a spare, that of the spares, or None.

    Raises:
        RuntimeError: MPI can't do it.
        CollectiveTimeoutError: some process lives and does not come.
    """
    comm = world()
    set_leaving_alone()
    found: list[Any] = []
    failed: list[BaseException] = []

    def shrink() -> None:
        try:
            found.append(_without_spares(comm, number) if has_spares else comm.Shrink())
        except mpi().Exception as error:
            failed.append(error)

    # It can't be given up once it is begun, and the form that can be asked whether it is done, Ishrink, fails in Open MPI
    # 5.0 when there is a loss.
    thread = threading.Thread(target=shrink, name="mpi-shrink", daemon=True)
    thread.start()
    thread.join(timeout)
    if failed:
        raise RuntimeError(
            f"elastic job: MPI can't go on without the processes that died: {failed[0]}"
        ) from failed[0]
    if not found:
        raise CollectiveTimeoutError(
            f"elastic job: MPI waited {timeout:g} s for a process that is gone for the others but lives, or does not come; is one "
            "stopped, or does it linger after a failure? — end it"
        )
    found[0].Set_errhandler(mpi().ERRORS_RETURN)
    return found[0]


def _without_spares(comm: Any, number: int | None) -> Any:
    """As `survivors`. Split is no match for a death in the middle of it: all agree how it went, and do it again if need be."""
    is_spare = number is None
    while True:
        whole = comm.Shrink()
        whole.Set_errhandler(mpi().ERRORS_RETURN)
        # Who revokes it must know that all have it: see `AgreeingLink`.
        _agree(whole, succeeded=True)
        part = None
        try:
            part = whole.Split(1 if is_spare else 0, whole.rank if number is None else number)
        except mpi().Exception:
            whole.Revoke()  # others may wait in it for this process
        if _agree(whole, succeeded=part is not None):
            return part


def _agree(comm: Any, *, succeeded: bool) -> bool:
    """Whether all live processes have succeeded; the same on all."""
    flag = np.array([succeeded], np.int32)
    try:
        comm.Iagree(flag).Wait()
    except mpi().Exception as error:
        # Some process has died; what was agreed on holds all the same.
        if error.Get_error_class() != mpi().ERR_PROC_FAILED:
            raise
    return bool(flag[0])
