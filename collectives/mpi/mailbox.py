"""Messages between single members, in any number of threads.

A message is announced to the process it goes to; small ones come with the announcement. `send` copies and returns, so that
two members may send to one another before either receives, however large the messages; a thread sees to it that what has been
sent gets there while the sender computes.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.mpi.abandoning import abandon
from collectives.mpi.chunks import MESSAGE_BYTES, plan_chunks
from collectives.mpi.library import has_sent, keep_until_sent
from collectives.mpi.messages import Messages, PlainMessages
from collectives.mpi.waiting import Look, UnderWay, have_ended, wait_until

_WITH_ANNOUNCEMENT = 2048
"""Bytes of an array that comes with its announcement; both fit what MPI sends without asking."""
_NUM_TAGS = 1 << 14
"""Messages of one process to another that can be under way at once, each with a tag of its own."""
_NAP = 0.0005
_SPINS = 20

_Letter = tuple[np.dtype[Any], tuple[int, ...], int, bytes]
"""Dtype, shape, tag of the bytes, and the bytes themselves where they came with the announcement."""


@final
class Mailbox:
    """One process's letters, in and out.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator that nobody else sends in with these tags.
        tag: the first of 2 ** 14 + 1 tags.
        largest: bytes of one message.
        messages: how they are begun; None for where all processes live.
    """

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        tag: int,
        largest: int = MESSAGE_BYTES,
        messages: Messages | None = None,
    ) -> None:
        self._mpi, self._comm, self._largest = mpi, comm, largest
        self._messages = PlainMessages(comm) if messages is None else messages
        self._announcements, self._first_tag = tag, tag + 1
        self._letters: dict[tuple[int, int, int], deque[_Letter]] = {}
        self._reading = threading.Lock()
        self._sending = threading.Lock()
        self._numbers: dict[int, int] = {}
        self._under_way: list[tuple[list[Any], Any]] = []
        self._courier: threading.Thread | None = None
        self._unreceived: list[tuple[list[Any], Array]] = []
        self._closing = False

    def send(self, process: int, member: int, array: Array, peer: int, tag: int) -> None:
        """Send an array to a member of another process; it may be changed afterwards."""
        data = np.array(array, order="C").reshape(-1).view(np.uint8)
        with self._sending:
            number = self._numbers.get(process, 0)
            self._numbers[process] = number + 1
            is_small = data.nbytes <= _WITH_ANNOUNCEMENT
            data_tag = self._first_tag + number % _NUM_TAGS
            letter = (array.dtype, array.shape, data_tag, data.tobytes() if is_small else b"")
            announcement = pickle.dumps((member, peer, tag, letter))
            byte = self._mpi.BYTE
            requests = [self._messages.send([announcement, byte], process, self._announcements)]
            if not is_small:
                requests += [
                    self._messages.send([data[start : start + length], byte], process, data_tag)
                    for start, length in plan_chunks(data.nbytes, self._largest)
                ]
            for _ in range(_SPINS):
                if self._mpi.Request.Testall(requests):
                    self._messages.give_back(requests)
                    return
            self._under_way.append((requests, (announcement, data)))
            if self._courier is None:
                self._courier = threading.Thread(target=self._carry, name="mpi-courier", daemon=True)
                keep_until_sent(self)
                self._courier.start()

    def receive(self, process: int, member: int, peer: int, tag: int, look: Look) -> Array:
        """The next array of a member of another process; a new one."""
        key = (peer, member, tag)
        found: list[_Letter] = []

        def is_there() -> bool:
            with self._reading:
                self._read(process)
                letters = self._letters.get(key)
                if letters:
                    found.append(letters.popleft())
            return bool(found)

        def missing() -> Sequence[int]:
            return [process]

        if not is_there():
            wait_until(is_there, look, missing)
        dtype, shape, data_tag, content = found[0]
        array = np.empty(shape, dtype)
        data = array.reshape(-1).view(np.uint8)
        if content or not data.nbytes:
            data[:] = np.frombuffer(content, np.uint8)
            return array
        requests = [
            self._messages.receive([data[start : start + length], self._mpi.BYTE], process, data_tag)
            for start, length in plan_chunks(data.nbytes, self._largest)
        ]
        try:
            UnderWay(self._mpi, requests).wait(look, missing)
        except BaseException:
            self._unreceived.append((requests, array))  # MPI may still write into it
            raise
        self._messages.give_back(requests)
        return array

    def _read(self, process: int) -> None:
        """Take in what the process has announced."""
        while (
            message := self._comm.Improbe(process, self._announcements, status := self._mpi.Status())
        ) is not None:
            text = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([text, self._mpi.BYTE])
            member, peer, tag, letter = pickle.loads(text)
            self._letters.setdefault((member, peer, tag), deque()).append(letter)

    def _carry(self) -> None:
        # MPI moves what is under way only when it is called.
        while True:
            with self._sending:
                self._under_way = [sent for sent in self._under_way if not self._is_over(sent[0])]
                if not self._under_way or self._closing:
                    self._courier = None
                    has_sent(self)
                    return
            time.sleep(_NAP)

    def _is_over(self, requests: list[Any]) -> bool:
        try:
            if not self._mpi.Request.Testall(requests):
                return False
        except self._mpi.Exception:
            # The receiver is gone, which whoever waits for it is told. The bytes stay if MPI is not done with all of them.
            return have_ended(self._mpi, requests, 0.0)
        self._messages.give_back(requests)
        return True

    def abandon(self, timeout: float) -> bool:
        """Have nothing under way any more that could write into arrays; whether that is so in time. See `abandon`."""
        with self._sending, self._reading:
            self._closing = True
            receives = [one for requests, _ in self._unreceived for one in requests]
            sends = [(one, memory) for requests, memory in self._under_way for one in requests]
            if not abandon(self._mpi, receives, sends, timeout):
                return False
            self._under_way, self._unreceived = [], []
            return True

    def close(self, timeout: float) -> None:
        """Wait until what was sent has been received, or until the timeout, and keep what MPI may still read."""
        give_up = time.monotonic() + timeout
        while (courier := self._courier) is not None and courier.is_alive() and time.monotonic() < give_up:
            courier.join(0.01)
        self._closing = True
        if (courier := self._courier) is not None:
            courier.join(1.0)
