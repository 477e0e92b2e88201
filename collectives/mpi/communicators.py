"""Messages between processes of which some may die, in an Open MPI that goes on then (``mpiexec --with-ft ulfm``).

Of what such an MPI offers only this is used: that messages between the living go on, and that those to and from the dead fail. All
that a job ever sends goes through one communicator, made when MPI starts, with other tags in each make-up that the job
gets. Open MPI could make a communicator of those that are left (Shrink), but a process in which it does crashes when it is told of another
death meanwhile, and its agreements stand still now and then when several die within milliseconds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, final

from collectives.errors import CollectiveTimeoutError, common
from collectives.mpi.library import is_loaded, mpi, set_leaving_alone, world

_TAGS_OF_EACH = 1 << 15
"""More than a link uses."""
_LINKS = 256
"""In each make-up of the job. Of make-ups as many are possible as there are tags left for: 256 in Open MPI."""
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
        first_tag: of theirs.

    Attributes:
        rank: this process's number.
        size: how many they are.
    """

    def __init__(self, comm: Any, ranks: Sequence[int], rank: int, first_tag: int) -> None:
        self._comm, self._ranks = comm, tuple(ranks)
        self.rank, self.size = rank, len(self._ranks)
        self._first_tag = first_tag

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


_making = threading.Lock()
_comm: Any = None


def is_made() -> bool:
    """Whether this process has made the communicator."""
    return _comm is not None


def make_communicator(timeout: float) -> None:
    """Make it, with all processes that were started, each of which calls this once; does nothing after that.

    Args:
        timeout: seconds to wait for the others.

    Raises:
        RuntimeError: MPI can't do it, as when a process has died already.
        CollectiveTimeoutError: some process does not come.
    """
    global _comm
    with _making:
        if _comm is not None:
            return
        comm = world(timeout)
        set_leaving_alone()
        made: list[Any] = []
        failed: list[BaseException] = []

        def make() -> None:
            try:
                made.append(comm.Dup())
            except mpi().Exception as error:
                failed.append(error)

        # It can't be given up once it is begun.
        thread = threading.Thread(target=make, name="mpi-communicator", daemon=True)
        thread.start()
        thread.join(timeout)
        if failed:
            raise RuntimeError(
                f"elastic job: MPI could not connect all processes ({failed[0]}); did one die at the start? Need all of them for it — start "
                "the job again"
            ) from failed[0]
        if not made:
            raise CollectiveTimeoutError(
                f"elastic job: MPI waited {timeout:g} s for a process that does not come; did one die at the start, or does it do something "
                "else? Need all of them for it — start the job again"
            )
        made[0].Set_errhandler(mpi().ERRORS_RETURN)
        _comm = made[0]


def own_rank() -> int:
    """This process's number among all that were started, whatever it is in the job by now."""
    return int(_comm.rank)


def members(ranks: Sequence[int], rank: int, make_up: int, number: int) -> Members:
    """What a link sends through.

    Args:
        ranks: by process, its `own_rank`.
        rank: this process.
        make_up: of the job, counted from 0; the same in all processes, as what follows.
        number: of the link in this make-up.

    Raises:
        RuntimeError: the job has changed too often, or has too many links.
    """
    index = make_up * _LINKS + number
    most = (int(_comm.Get_attr(mpi().TAG_UB)) + 1) // _TAGS_OF_EACH
    if index >= most or number >= _LINKS:
        raise common(
            RuntimeError(
                f"elastic job: its processes have changed {make_up} times, and it has {number + 1} strategies and groups; where MPI connects "
                f"hosts, up to {most // _LINKS - 1} changes and {_LINKS} of these are possible; need a new start of the job, from a checkpoint"
            )
        )
    return Members(_comm, ranks, rank, index * _TAGS_OF_EACH)
