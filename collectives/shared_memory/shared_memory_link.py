"""The link between the processes of one host, which read one another's memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, final

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from collectives.control.watch import Watch
from collectives.errors import CollectiveError
from collectives.link import Link
from collectives.reduce_op import ReduceOp
from collectives.reduction import Fold
from collectives.shared_memory.folding import Folding
from collectives.shared_memory.lending import Lending
from collectives.shared_memory.mailbox import Mailbox, mail_bytes
from collectives.shared_memory.meeting import NUMBER, PAGE_BYTES, Meeting
from collectives.shared_memory.segments import open_all, own_segments

T = TypeVar("T")

Exchange = Callable[[Any], list[Any]]
"""Gives every process's value, by process; used while the link is made."""


@final
class SharedMemoryLink(Link):
    """One process's end. All of them are made at the same time.

    Args:
        process: which end.
        counts: how many members each process hosts.
        exchange: hands round what the processes need to find one another's memory.
        timeout: seconds that a process waits for the others.
        watch: what is known of the other processes.
        numbers: by process, what the watch calls it; None where it counts alike.
        name: what the link is called in reports.

    Raises:
        RuntimeError: no such memory on this system, or processes that can't share it.
        OSError: no memory left.
    """

    def __init__(
        self,
        process: int,
        counts: Sequence[int],
        exchange: Exchange,
        *,
        timeout: float,
        watch: Watch | None = None,
        numbers: Sequence[int] | None = None,
        name: str = "link",
    ) -> None:
        super().__init__(process, counts)
        self._own = own_segments()
        page, mail = self._own.make(PAGE_BYTES), self._own.make(mail_bytes(len(counts)))
        self._peers, (pages, mails) = open_all(process, [page, mail], exchange)
        self._meeting = Meeting(
            process,
            pages,
            timeout=timeout,
            watch=watch,
            numbers=range(len(self.counts)) if numbers is None else numbers,
            name=name,
        )
        self._lending = Lending(self._meeting, self.counts, self._own, self._peers)
        self._folding = Folding(process, self.counts, self._meeting, self._lending, self._own)
        self._mailbox = Mailbox(self, self._meeting, self._own, self._peers, mails)

    def describe(self) -> Mapping[str, Any]:
        """What this process is doing, for reports: the number and the words of its collective, and whether it waits."""
        return self._meeting.describe()

    def barrier(self, call: Call) -> None:
        turn = self._meeting.begin(call)
        self._meeting.come(turn, self._meeting.digest_of(call))

    def gather_objects(self, call: Call, values: Sequence[object]) -> list[object]:
        def use(blobs: list[Array]) -> list[object]:
            return [value for p in self.starts[:-1] for value in pickle.loads(blobs[p].data)]

        blob = np.frombuffer(pickle.dumps(list(values), pickle.HIGHEST_PROTOCOL), np.uint8)
        # One for all members of a process; the others bring nothing.
        nothing = blob[:0]
        return self.all_gather(call, [blob, *(nothing for _ in values[1:])], use)

    def fold(
        self, call: Call, op: ReduceOp, sources: Sequence[Sequence[Array]], targets: Sequence[Sequence[Array]]
    ) -> None:
        self._folding.fold(call, op, sources, targets)

    def reduce_scatter(
        self, call: Call, op: ReduceOp, sources: Sequence[Array], targets: Sequence[Array]
    ) -> None:
        dtype, shape = sources[0].dtype, sources[0].shape

        def use(rows: list[Array]) -> None:
            blocks = [row.view(dtype).reshape(shape) for row in rows]
            for number, target in enumerate(targets, start=self.first):
                Fold(op, [block[number] for block in blocks], [target]).run()

        self.all_gather(call, [_as_bytes(source) for source in sources], use)

    def broadcast(self, call: Call, root: int, source: Array | None, targets: Sequence[Array]) -> None:
        def use(arrays: list[Array]) -> None:
            for target in targets:
                if target is not source:
                    np.copyto(target, arrays[root])

        nothing = np.empty(0, np.uint8)
        brought = [nothing] * self.counts[self.process]
        if source is not None:
            brought[root - self.first] = source
        self.all_gather(call, brought, use)

    def all_to_all(self, call: Call, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        shape = sources[0].shape

        def use(arrays: list[Array]) -> None:
            for number, target in enumerate(targets, start=self.first):
                for peer, array in enumerate(arrays):
                    np.copyto(target[peer], array.reshape(shape)[number])

        self.all_gather(call, [source.reshape(-1) for source in sources], use)

    def all_gather(self, call: Call, arrays: Sequence[Array], use: Callable[[list[Array]], T]) -> T:
        meeting = self._meeting
        turn = meeting.begin(call)
        meeting.my_heads[turn][NUMBER] = self._lending.bring(arrays, turn)
        meeting.come(turn, meeting.digest_of(call))
        if all(head[NUMBER] for head in meeting.heads[turn]):
            # Nobody can write over what stands in the pages before all have come to the phase after the next.
            return use(self._lending.brought(turn))
        # Memory of others is opened in it: that of one who has died can't be, and then nobody may go on.
        return meeting.working(lambda: use(self._lending.brought(turn)))

    def send(self, member: int, array: Array, peer: int, tag: int) -> None:
        self._meeting.require_working()
        self._mailbox.send(member, array, peer, tag)

    def receive(self, member: int, peer: int, tag: int) -> Array:
        self._meeting.require_working()
        return self._mailbox.receive(member, peer, tag)

    def memory(self, num_bytes: int) -> Array:
        return self._own.make(num_bytes)[0]

    def fail(self, error: CollectiveError) -> None:
        self._meeting.fail(error)

    def excuse(self, text: str, seconds: float) -> bool:
        return self._meeting.excuse(text, seconds)

    def close(self) -> None:
        self._meeting.fail(CollectiveError("shared memory: called after close(); make a new strategy"))
        self._folding.close()
        self._mailbox.close()
        for peer in self._peers:
            peer.close()


def _as_bytes(array: Array) -> Array:
    flat: Array = array.reshape(-1).view(np.uint8)
    return flat
