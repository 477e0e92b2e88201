"""A link whose processes may change: what is built upon it stays, and talks to those who are left or have come."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar, final

from collectives.arrays import Array
from collectives.calls import Call
from collectives.errors import CollectiveError, PeerFailedError
from collectives.link import Link
from collectives.reduce_op import ReduceOp
from collectives.shared_memory.segments import own_segments

T = TypeVar("T")


@final
class RenewableLink(Link):
    """Passes everything on to a link that can be put in its place between two collectives.

    Attributes:
        num_calls: how many collectives there have been since it was made or renewed; alike in all processes.
        loss: what was raised by it since then because another process is gone; None if nothing was.

    Args:
        num_members: of this process.
        inner: the link; None in a process that has not been taken in yet, whose members are alone until then.
    """

    def __init__(self, num_members: int, inner: Link | None) -> None:
        super().__init__(0, (num_members,))
        self._inner = inner
        self.num_calls = 0
        self.loss: PeerFailedError | None = None
        if inner is not None:
            self.renew(inner)

    @property
    def is_connected(self) -> bool:
        """Whether this process has been taken in."""
        return self._inner is not None

    def renew(self, inner: Link) -> None:
        """Go on with another link."""
        before, self._inner = self._inner, inner
        self.process = inner.process
        self.counts = inner.counts
        self.starts = (0, *itertools.accumulate(inner.counts))
        self.num_calls, self.loss = 0, None
        if before is not None and before is not inner:
            before.close()

    def barrier(self, call: Call) -> None:
        self._counted(call, lambda inner: inner.barrier(call))

    def gather_objects(self, call: Call, values: Sequence[object]) -> list[object]:
        return self._counted(call, lambda inner: inner.gather_objects(call, values))

    def fold(
        self, call: Call, op: ReduceOp, sources: Sequence[Sequence[Array]], targets: Sequence[Sequence[Array]]
    ) -> None:
        # As `_counted`, without the function: steps wait for this.
        self.num_calls += 1
        try:
            self._now(call).fold(call, op, sources, targets)
        except PeerFailedError as error:
            self.loss = error
            raise

    def reduce_scatter(
        self, call: Call, op: ReduceOp, sources: Sequence[Array], targets: Sequence[Array]
    ) -> None:
        self._counted(call, lambda inner: inner.reduce_scatter(call, op, sources, targets))

    def broadcast(self, call: Call, root: int, source: Array | None, targets: Sequence[Array]) -> None:
        self._counted(call, lambda inner: inner.broadcast(call, root, source, targets))

    def all_gather(self, call: Call, arrays: Sequence[Array], use: Callable[[list[Array]], T]) -> T:
        return self._counted(call, lambda inner: inner.all_gather(call, arrays, use))

    def all_to_all(self, call: Call, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        self._counted(call, lambda inner: inner.all_to_all(call, sources, targets))

    def send(self, member: int, array: Array, peer: int, tag: int) -> None:
        try:
            self._now(Call("send")).send(member, array, peer, tag)
        except PeerFailedError as error:
            self.loss = error
            raise

    def receive(self, member: int, peer: int, tag: int) -> Array:
        try:
            return self._now(Call("recv")).receive(member, peer, tag)
        except PeerFailedError as error:
            self.loss = error
            raise

    def memory(self, num_bytes: int) -> Array:
        # Of the process, not of one link: what lies in it is lent over the next one too.
        return own_segments().make(num_bytes)[0]

    def fail(self, error: CollectiveError) -> None:
        if self._inner is not None:
            self._inner.fail(error)

    # No excuses: a job whose processes may change goes on without the one whose step has failed.

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def _counted(self, call: Call, work: Callable[[Link], T]) -> T:
        self.num_calls += 1
        try:
            return work(self._now(call))
        except PeerFailedError as error:
            self.loss = error
            raise

    def _now(self, call: Call) -> Link:
        if self._inner is None:
            raise RuntimeError(
                f"{call}: this process has come later and was not taken in yet; need strategy.share_state(checkpoint) before "
                "the first step, with all that it needs to go on where the others are"
            )
        return self._inner
