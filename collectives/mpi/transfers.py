"""Bytes on their way between processes that have agreed on what they do.

Everything is sent from one process to another and received into its place: a process can then stop waiting at any time, as it
can't inside a collective of MPI's, and what comes of it is as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.mpi.abandoning import abandon
from collectives.mpi.chunks import MESSAGE_BYTES, plan_chunks
from collectives.mpi.messages import Messages, PlainMessages
from collectives.mpi.waiting import Look, UnderWay


@final
class Transfers:
    """One process's sends and receives.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator that nobody else sends in with this tag.
        look: called while waiting.
        tag: of all messages.
        largest: bytes of one message.
        messages: how they are begun; None for where all processes live.
    """

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        look: Look,
        tag: int,
        largest: int = MESSAGE_BYTES,
        messages: Messages | None = None,
    ) -> None:
        self._mpi, self._look, self._tag = mpi, look, tag
        self._messages = PlainMessages(comm) if messages is None else messages
        self._process, self._size, self._largest = comm.rank, comm.size, largest
        self._receiving: dict[int, tuple[Any, Array]] = {}
        self._sending: dict[int, tuple[Any, Array]] = {}
        """Requests, and what MPI writes or reads for them: it must not be given back before they have ended."""

    def run(
        self, receives: Iterable[tuple[Array, int]] = (), sends: Iterable[tuple[Array, int]] = ()
    ) -> None:
        """Send and receive, and return when all of it has been done.

        Args:
            receives: where bytes go, and the process that they come from; flat arrays of any dtype. Of one process in the order in
                which it sends.
            sends: bytes, and the process that they go to.
        """
        receives, sends = list(receives), list(sends)
        requests = [request for array, peer in receives for request in self._receive(array, peer)]
        requests += [request for array, peer in sends for request in self.start_send(array, peer)]
        self.finish(requests, [peer for _, peer in (*receives, *sends)])

    def start_send(self, array: Array, peer: int) -> list[Any]:
        """The requests that send an array's bytes, to be given to `finish`; it must stay as it is until then."""
        return self._begin(self._messages.send, array, peer, self._sending)

    def _receive(self, array: Array, peer: int) -> list[Any]:
        return self._begin(self._messages.receive, array, peer, self._receiving)

    def _begin(
        self,
        start_one: Callable[..., Any],
        array: Array,
        peer: int,
        under_way: dict[int, tuple[Any, Array]],
    ) -> list[Any]:
        data = array.view(np.uint8)
        requests = []
        for start, length in plan_chunks(data.nbytes, self._largest):
            request = start_one([data[start : start + length], self._mpi.BYTE], peer, self._tag)
            under_way[id(request)] = request, data
            requests.append(request)
        return requests

    def broadcast(self, data: Array, root: int, piece_bytes: int) -> None:
        """Every process gets one process's bytes, along a binomial tree, in pieces so that all of it works at the same time.

        Args:
            data: in ``root``, what is sent; in the others, where it goes. Dtype uint8.
            root: the process.
            piece_bytes: how much is passed on at once.
        """
        number = (self._process - root) % self._size
        step, children = 1, []
        while step < self._size and not number & step:
            if number + step < self._size:
                children.append((number + step + root) % self._size)
            step *= 2
        parent = (number - step + root) % self._size
        children.reverse()  # those with the most to pass on come first
        under_way: list[Any] = []
        for start, length in plan_chunks(data.nbytes, min(piece_bytes, self._largest)):
            piece = data[start : start + length]
            if number:
                self.run(receives=[(piece, parent)])
            for child in children:
                under_way += self.start_send(piece, child)
        self.finish(under_way, children)

    def finish(self, requests: list[Any], peers: Sequence[int]) -> None:
        """Wait until what was started has been done.

        Args:
            requests: of `start_send`.
            peers: the processes that it depends on.
        """
        UnderWay(self._mpi, requests).wait(self._look, lambda: sorted(set(peers)))
        for request in requests:
            self._sending.pop(id(request), None)
            self._receiving.pop(id(request), None)
        self._messages.give_back(requests)

    def abandon(self, timeout: float) -> bool:
        """Have nothing under way any more that could write into arrays; whether that is so in time. See `abandon`."""
        receives = [request for request, _ in self._receiving.values()]
        if not abandon(self._mpi, receives, self._sending.values(), timeout):
            return False
        self._receiving.clear()
        self._sending.clear()
        return True
