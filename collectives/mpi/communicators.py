"""Communicators for processes of which some may die, in an Open MPI that goes on then (``mpiexec --with-ft ulfm``).

They are made when MPI starts, while all live, one for each make-up that the job may get: what is under way in one is ended by
revoking it, and the next one takes its place, used by those that are left. Open MPI could make one then (Shrink), but
the process in which it is being made crashes when it is told of another death meanwhile, and it stands still now and then when
several die within milliseconds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, final

from collectives.errors import CollectiveTimeoutError, common
from collectives.mpi.library import is_loaded, mpi, set_leaving_alone, world

NUM_MADE = 64
"""For so many make-ups of the job; 64 take 50 ms and 1 MB."""
_TAGS_OF_EACH = 1 << 15
"""More than a link uses."""
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
                f"elastic job: {int(num_started) - num_processes - num_spares} of {num_started} processes died before they were connected by "
                f"MPI, which {what} need; need all of them for the start — start the job again"
            )
        )


@final
class Members:
    """Some of a communicator's processes, numbered anew, with tags of their own: as a communicator, for point-to-point.

    Args:
        comm: of mpi4py.
        ranks: theirs in it.
        rank: this process's place among them.
        number: of those that use the communicator at the same time, each with its own.

    Attributes:
        rank: this process's number.
        size: how many they are.
    """

    def __init__(self, comm: Any, ranks: Sequence[int], rank: int, number: int) -> None:
        self._comm, self._ranks = comm, tuple(ranks)
        self.rank, self.size = rank, len(self._ranks)
        self._first_tag = number * _TAGS_OF_EACH

    def Send_init(self, buffer: Any, dest: int, tag: int) -> Any:  # noqa: N802  # as mpi4py's
        """As of mpi4py."""
        return self._comm.Send_init(buffer, self._ranks[dest], self._first_tag + tag)

    def Ssend_init(self, buffer: Any, dest: int, tag: int) -> Any:  # noqa: N802  # likewise
        """As of mpi4py."""
        return self._comm.Ssend_init(buffer, self._ranks[dest], self._first_tag + tag)

    def Recv_init(self, buffer: Any, source: int, tag: int) -> Any:  # noqa: N802  # likewise
        """As of mpi4py."""
        return self._comm.Recv_init(buffer, self._ranks[source], self._first_tag + tag)

    def Improbe(self, source: int, tag: int, status: Any) -> Any:  # noqa: N802  # likewise
        """As of mpi4py."""
        return self._comm.Improbe(self._ranks[source], self._first_tag + tag, status)

    def Revoke(self) -> None:  # noqa: N802  # likewise
        """As of mpi4py: end what is under way in the whole communicator, of all that use it."""
        self._comm.Revoke()


_making = threading.Lock()
_made: list[Any] = []


def are_made() -> bool:
    """Whether this process has made them."""
    return bool(_made)


def make_communicators(timeout: float) -> None:
    """Make them, with all processes that were started, each of which calls this once; does nothing after that.

    Args:
        timeout: seconds to wait for the others.

    Raises:
        RuntimeError: MPI can't do it, as when a process has died already.
        CollectiveTimeoutError: some process does not come.
    """
    with _making:
        if _made:
            return
        comm = world(timeout)
        set_leaving_alone()
        made: list[Any] = []
        failed: list[BaseException] = []

        def make() -> None:
            try:
                made.extend(comm.Dup() for _ in range(NUM_MADE))
            except mpi().Exception as error:
                failed.append(error)

        # It can't be given up once it is begun.
        thread = threading.Thread(target=make, name="mpi-communicators", daemon=True)
        thread.start()
        thread.join(timeout)
        if failed:
            raise RuntimeError(
                f"elastic job: MPI could not connect all processes ({failed[0]}); did one die at the start? Need all of them for it — start "
                "the job again"
            ) from failed[0]
        if len(made) < NUM_MADE:
            raise CollectiveTimeoutError(
                f"elastic job: MPI waited {timeout:g} s for a process that does not come; did one die at the start, or does it do something "
                "else? Need all of them for it — start the job again"
            )
        for one in made:
            one.Set_errhandler(mpi().ERRORS_RETURN)
        _made.extend(made)


def communicator(make_up: int) -> Any:
    """The one for a make-up of the job, counted from 0; the same in all processes.

    Raises:
        RuntimeError: the job has changed too often.
    """
    if make_up >= len(_made):
        raise common(
            RuntimeError(
                f"elastic job: its processes have changed {make_up} times, and {NUM_MADE - 1} changes are possible where MPI connects them; need a "
                "new start of the job, from a checkpoint"
            )
        )
    return _made[make_up]
