"""The link between processes by way of MPI.

Before any data moves, all processes meet in an `Agreement`, to which small arrays are brought along.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, final

import numpy as np

from collectives.arrays import ALIGNMENT, Array
from collectives.calls import Call
from collectives.control.watch import Watch
from collectives.errors import CollectiveError
from collectives.link import Link
from collectives.mpi.chunks import MESSAGE_BYTES
from collectives.mpi.copying import Copying
from collectives.mpi.folding import Folding
from collectives.mpi.library import mpi as mpi_module
from collectives.mpi.library import track
from collectives.mpi.mailbox import Mailbox
from collectives.mpi.meeting import NARROW, Meeting
from collectives.mpi.transfers import Transfers
from collectives.reduce_op import ReduceOp

T = TypeVar("T")

PIECE_BYTES = 4 << 20
"""Of a large array, what is reduced at once. From 1 to 16 MB all are about as fast; a whole large array takes three times as long."""

_MAIL_TAG, _MORE_TAGS = 65, 20_000
_CLOSING = 5.0
"""Seconds that messages have to get to their receivers when the link is closed."""


@final
class MpiLink(Link):
    """One process's end. All processes of the communicator make it at the same time.

    Args:
        comm: of mpi4py; the link uses a duplicate of its own, unless it is told to own this one.
        counts: how many members each process hosts, by rank in ``comm``.
        timeout: seconds that a process waits for the others.
        watch: what is known of the other processes.
        numbers: what the watch calls the processes, by rank in ``comm``; None where it counts alike.
        name: what the link is called in reports.
        piece_bytes: how much of a large array is reduced at once.
        largest_message: bytes.
        direct_up_to: as of `Agreement`; None for what is fastest.
        owns_comm: nobody else uses ``comm``, and the link frees it.

    Raises:
        ValueError: not as many counts as processes, or not the same on all; a piece of no bytes.
        CollectiveTimeoutError: some process did not come.
    """

    def __init__(
        self,
        comm: Any,
        counts: Sequence[int],
        *,
        timeout: float,
        watch: Watch | None = None,
        numbers: Sequence[int] | None = None,
        name: str = "link",
        piece_bytes: int = PIECE_BYTES,
        largest_message: int = MESSAGE_BYTES,
        direct_up_to: int | None = None,
        owns_comm: bool = False,
    ) -> None:
        super().__init__(comm.rank, counts)
        if len(self.counts) != comm.size or min(self.counts, default=0) < 1:
            raise ValueError(
                f"MpiLink: got counts {list(counts)} for {comm.size} processes; need a number from 1 for each"
            )
        if piece_bytes < 1 or not timeout > 0:
            raise ValueError(f"MpiLink: got piece_bytes={piece_bytes}, timeout={timeout}; need both above 0")
        mpi = mpi_module()
        self._closed = False
        self._meeting = Meeting(
            mpi,
            comm,
            counts,
            timeout=timeout,
            watch=watch,
            numbers=range(comm.size) if numbers is None else numbers,
            name=name,
            largest=largest_message,
            direct_up_to=direct_up_to,
            owns_comm=owns_comm,
        )
        self._num_transfers = 0
        self._mailbox = Mailbox(mpi, self._meeting.comm, _MAIL_TAG, largest_message, self._meeting.messages)
        self._folding = Folding(self._meeting, piece_bytes)
        self._copying = Copying(self._meeting, piece_bytes)
        track(self)
        self._meeting.come(Call("the making of an MpiLink", (f"of {list(self.counts)} members",)), 0)

    def describe(self) -> Mapping[str, Any]:
        """What this process is doing, for reports: the number and the words of its collective, and whether it waits."""
        return self._meeting.describe()

    @property
    def is_hopeless(self) -> bool:
        """Whether some process has failed, so that nothing can be done together any more."""
        return self._meeting.is_hopeless

    # ------------------------------------------------------------- collectives

    def barrier(self, call: Call) -> None:
        self._meeting.begin(call)
        self._meeting.come(call, 0)

    def gather_objects(self, call: Call, values: Sequence[object]) -> list[object]:
        self._meeting.begin(call)
        blob = pickle.dumps(list(values), pickle.HIGHEST_PROTOCOL)
        return [value for one in self._meeting.all_bytes(call, blob) for value in pickle.loads(one)]

    def fold(
        self,
        call: Call,
        op: ReduceOp,
        sources: Sequence[Sequence[Array]],
        targets: Sequence[Sequence[Array]],
    ) -> None:
        self._folding.fold(call, op, sources, targets)

    def reduce_scatter(
        self, call: Call, op: ReduceOp, sources: Sequence[Array], targets: Sequence[Array]
    ) -> None:
        self._folding.reduce_scatter(call, op, sources, targets)

    def broadcast(self, call: Call, root: int, source: Array | None, targets: Sequence[Array]) -> None:
        self._copying.broadcast(call, root, source, targets)

    def all_gather(self, call: Call, arrays: Sequence[Array], use: Callable[[list[Array]], T]) -> T:
        return self._copying.all_gather(call, arrays, use)

    def all_to_all(self, call: Call, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        self._copying.all_to_all(call, sources, targets)

    # ---------------------------------------------------------- point to point

    def send(self, member: int, array: Array, peer: int, tag: int) -> None:
        self._meeting.require_working()
        self._mailbox.send(self.process_of(peer), member, array, peer, tag)

    def receive(self, member: int, peer: int, tag: int) -> Array:
        self._meeting.require_working()
        process = self.process_of(peer)
        where = f"recv from {peer} (tag {tag}): member {member}"

        def look(_missing: Sequence[int], waited: float) -> None:
            self._meeting.look_for(process, waited, where, f"did member {peer} send to it?")

        return self._mailbox.receive(process, member, peer, tag, look)

    # ------------------------------------------------------------------ others

    def memory(self, num_bytes: int) -> Array:
        block = np.zeros(num_bytes + ALIGNMENT, np.uint8)
        start = -block.ctypes.data % ALIGNMENT
        return block[start : start + num_bytes]

    def fail(self, error: CollectiveError) -> None:
        self._meeting.fail(error)

    def abandon(self, timeout: float) -> bool:
        """Have nothing under way any more, after a failure that no process goes on from; whether that was possible.

        Args:
            timeout: seconds that what is under way has to end.
        """
        return self._mailbox.abandon(timeout) and self._meeting.abandon(timeout)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._meeting.close():
            self._mailbox.close(_CLOSING)
            self._meeting.free()

    # ------------------------------------------- for a link that is built upon it

    def is_small(self, sources: Sequence[Array]) -> bool:
        """Whether `fold` of such columns is one meeting, in which all bring all they have."""
        return self._folding.is_small(sources)

    def agree(self, call: Call, *, narrow: bool) -> bool:
        """Meet the others, all of whom call this.

        Args:
            call: what is called.
            narrow: whether a target here is narrower than the result.

        Returns:
            Whether any is; then all call `conclude` at the end.
        """
        self._meeting.begin(call)
        return bool(self._meeting.come(call, 0, NARROW if narrow else 0) & NARROW)

    def conclude(self, overflow: str) -> None:
        """Raise OverflowError in all processes if any gives a reason to."""
        self._meeting.conclude(overflow)

    def transfers(self) -> Transfers:
        """A way to send between processes that have agreed on what they do; all take theirs in the same order."""
        self._num_transfers += 1
        return self._meeting.transfers(_MORE_TAGS + self._num_transfers)

    def naming_mpi_errors(self) -> AbstractContextManager[None]:
        """Make errors of MPI's to those of a link, which is broken then."""
        return self._meeting.naming_mpi_errors()
