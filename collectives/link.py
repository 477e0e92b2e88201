"""What the processes of a job do together: the interface of every backend between processes.

A process hosts one or more members of a group, its replicas. A `Link` is the process's end: it brings all members' arrays
together, whichever process they are in, and leaves what the members of one process do among themselves to them. The
`Communicator` that a replica has is made of a meeting place inside the process and a link between processes.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from collectives.arrays import Array
from collectives.calls import Call
from collectives.errors import CollectiveError
from collectives.reduce_op import ReduceOp

T = TypeVar("T")


class Link(ABC):
    """One process's end of a group of processes.

    Members are numbered through by process: those of process 0 first. Every process makes the same calls in the same order,
    one at a time (`send` and `receive` aside, which several threads may call at once). ``call`` says what the members want, in
    a form that is compared across processes before any data moves. Arrays are C-contiguous NumPy arrays; what is only
    copied comes as bytes, shape ``(n,)``, dtype uint8.

    Every method may raise `CollectiveMismatchError` (the processes' calls differ: all of them raise it, and the link stays usable),
    and `CollectiveTimeoutError` or `PeerFailedError`, after which the link is broken and raises the same again.

    Numbers: reductions are done in the order of the members, so the result is equal to the last bit on all of them, and
    to that of as many members in one process.

    Args:
        process: which end, in ``range(len(counts))``.
        counts: how many members each process hosts, by process.
    """

    def __init__(self, process: int, counts: Sequence[int]) -> None:
        self.process = process
        self.counts = tuple(counts)
        self.starts = (0, *itertools.accumulate(self.counts))

    @property
    def num_processes(self) -> int:
        """How many processes the group has."""
        return len(self.counts)

    @property
    def is_connected(self) -> bool:
        """Whether there are others yet: a newcomer of an elastic job is alone until it is taken in."""
        return True

    @property
    def size(self) -> int:
        """How many members the group has."""
        return self.starts[-1]

    @property
    def first(self) -> int:
        """The number of this process's first member; its others follow."""
        return self.starts[self.process]

    def process_of(self, member: int) -> int:
        """The process that hosts a member."""
        return next(p for p, stop in enumerate(self.starts[1:]) if member < stop)

    @abstractmethod
    def barrier(self, call: Call) -> None:
        """Go on when every process has come."""

    @abstractmethod
    def gather_objects(self, call: Call, values: Sequence[object]) -> list[object]:
        """Every member's value, by member. For small things, which are pickled: the processes of a job trust each other.

        Args:
            call: what is called.
            values: of this process's members.
        """

    @abstractmethod
    def fold(
        self,
        call: Call,
        op: ReduceOp,
        sources: Sequence[Sequence[Array]],
        targets: Sequence[Sequence[Array]],
    ) -> None:
        """Reduce over all members, several columns at once.

        Args:
            call: what is called.
            op: how to reduce.
            sources: by member of this process, by column: flat arrays, shape ``(n,)``, the same lengths and dtypes on all members.
            targets: for each member of this process that wants the result, by column: flat arrays of the result's dtype, or of a
                narrower integer one. One may be the source of its member and column; otherwise they don't overlap the
                sources. Empty where no member here wants it.

        Raises:
            OverflowError: an integer target is too narrow for the result; on every process.
        """

    @abstractmethod
    def reduce_scatter(
        self, call: Call, op: ReduceOp, sources: Sequence[Array], targets: Sequence[Array]
    ) -> None:
        """Reduce over all members; each gets its own block.

        Args:
            call: what is called.
            op: how to reduce.
            sources: by member of this process, shape ``(size, block)``.
            targets: by member of this process, shape ``(block,)``, as in `fold`; they don't overlap the sources.
        """

    @abstractmethod
    def broadcast(self, call: Call, root: int, source: Array | None, targets: Sequence[Array]) -> None:
        """Every member gets one member's bytes.

        Args:
            call: what is called.
            root: the member whose bytes they are.
            source: them, in the process that hosts ``root``; None in the others.
            targets: of this process's members, all of one length; one may be the source.
        """

    @abstractmethod
    def all_gather(self, call: Call, arrays: Sequence[Array], use: Callable[[list[Array]], T]) -> T:
        """Look at every member's bytes.

        Args:
            call: what is called.
            arrays: of this process's members, bytes of any lengths.
            use: called with all members' bytes, by member, which it must not keep nor change; its result is returned.
        """

    @abstractmethod
    def all_to_all(self, call: Call, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        """Member r gets the r-th block of every member's bytes, by member.

        Args:
            call: what is called.
            sources: by member of this process, bytes of shape ``(size, block)``, the same on all members.
            targets: likewise; they don't overlap the sources.
        """

    @abstractmethod
    def send(self, member: int, array: Array, peer: int, tag: int) -> None:
        """Send an array of any shape and of any dtype but objects to a member of another process; it may be changed afterwards.

        Args:
            member: who sends, a member of this process.
            array: what.
            peer: who receives, a member of another process.
            tag: tells messages to one peer apart; those of one tag come in order.
        """

    @abstractmethod
    def receive(self, member: int, peer: int, tag: int) -> Array:
        """The next array that ``peer`` sends to ``member`` with this tag, waiting for it if need be; a new array."""

    @abstractmethod
    def memory(self, num_bytes: int) -> Array:
        """Zeroed memory that starts on a multiple of 64 bytes, shape ``(num_bytes,)``, dtype uint8.

        Sources and targets that lie in it cost no copy. It lives as long as arrays refer to it.
        """

    @abstractmethod
    def fail(self, error: CollectiveError) -> None:
        """Let every later call in this process raise this: it has left a collective before its end, so the order is lost."""

    def excuse(self, text: str, seconds: float) -> bool:  # noqa: ARG002
        """Come to the next collective as one whose step has failed, so that it fails for all and the order is kept.

        The others raise a `PeerFailedError` at that collective, or have failed likewise.

        Args:
            text: what has failed, in words.
            seconds: to wait for the others.

        Returns:
            Whether all have come, so that all can go on together; a link that can't do it says no.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Give back what the link holds; not a collective. Calling it again does nothing."""
