"""What is only copied between processes, by way of MPI: small arrays with the meeting itself, large ones after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, final

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from collectives.mpi.agreement import INLINE_BYTES
from collectives.mpi.meeting import Meeting
from collectives.recycled_memory import RecycledMemory

T = TypeVar("T")


@final
class Copying:
    """One process's side.

    Args:
        meeting: where the processes meet.
        piece_bytes: how much of an array is passed on at once.
    """

    def __init__(self, meeting: Meeting, piece_bytes: int) -> None:
        self._meeting, self._piece_bytes = meeting, piece_bytes
        self._process, self._num_processes = meeting.process, meeting.num_processes
        self._counts, self._starts, self._size = meeting.counts, meeting.starts, meeting.starts[-1]
        self._first = meeting.starts[meeting.process]
        self._memory = RecycledMemory(num_blocks=4)

    def broadcast(self, call: Call, root: int, source: Array | None, targets: Sequence[Array]) -> None:
        """As of `Link`."""
        self._meeting.begin(call)
        process = self._meeting.process_of(root)
        num_bytes = targets[0].nbytes
        if num_bytes <= INLINE_BYTES and self._meeting.agreement.is_direct:
            if source is not None:
                self._meeting.agreement.body[:num_bytes] = source
            self._meeting.come(call, 0 if source is None else num_bytes)
            data = self._meeting.agreement.brought(process)
        else:
            self._meeting.come(call, 0)
            data = targets[0] if source is None else source
            self._meeting.broadcast(data, process, self._piece_bytes)
        for target in targets:
            if target is not data:
                np.copyto(target, data)

    def all_gather(self, call: Call, arrays: Sequence[Array], use: Callable[[list[Array]], T]) -> T:
        """As of `Link`."""
        self._meeting.begin(call)
        lengths = np.array([array.nbytes for array in arrays], np.int64)
        head, content = lengths.nbytes, int(lengths.sum())
        is_inline = head + content <= INLINE_BYTES
        body = self._meeting.agreement.body
        body[:head] = lengths.view(np.uint8)
        if is_inline and content:
            body[head : head + content] = np.concatenate(arrays)
        self._meeting.come(call, head + content if is_inline else head)
        found: list[list[Array]] = []
        receives, sends = [], []
        for p in range(self._num_processes):
            brought = self._meeting.agreement.brought(p)
            head = 8 * self._counts[p]
            lengths = brought[:head].view(np.int64)
            if p == self._process:
                found.append(list(arrays))
            elif len(brought) == head:  # they come by themselves, if there is anything
                places = [self._memory.empty((int(length),), np.dtype(np.uint8)) for length in lengths]
                receives += [(place, p) for place in places]
                found.append(places)
            else:
                found.append(np.split(brought[head:], np.cumsum(lengths)[:-1]))
        if not is_inline:
            # Not all to the same process at the same time.
            for distance in range(1, self._num_processes):
                peer = (self._process + distance) % self._num_processes
                sends += [(array, peer) for array in arrays]
        self._meeting.run(receives, sends)
        return use([array for process in found for array in process])

    def all_to_all(self, call: Call, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        """As of `Link`."""
        self._meeting.begin(call)
        first = sources[0]
        if self._meeting.is_small(first.nbytes):
            body = self._meeting.agreement.body
            for number, source in enumerate(sources):
                body[number * first.nbytes : (number + 1) * first.nbytes] = source.reshape(-1)
            self._meeting.come(call, len(sources) * first.nbytes)
            for p in range(self._num_processes):
                brought = self._meeting.agreement.brought(p).reshape(self._counts[p], self._size, -1)
                for number, target in enumerate(targets):
                    target[self._starts[p] : self._starts[p + 1]] = brought[:, self._first + number]
            return
        self._meeting.come(call, 0)
        receives, sends = [], []
        for distance in range(self._num_processes):
            p = (self._process + distance) % self._num_processes
            members = range(self._starts[p], self._starts[p + 1])
            if p == self._process:
                for number, source in enumerate(sources):
                    for other, target in enumerate(targets):
                        target[self._first + number] = source[self._first + other]
                continue
            receives += [(target[member], p) for member in members for target in targets]
            sends += [(source[member], p) for source in sources for member in members]
        self._meeting.run(receives, sends)
