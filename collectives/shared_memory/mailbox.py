"""Messages from one process of a host to another.

A message is a segment of its own. The sender writes where it is into a ring of entries in its mail page, one ring for each
receiver, and keeps the message until the receiver has counted it. Receivers copy messages as soon as they look.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from collectives.arrays import Array
from collectives.link import Link
from collectives.shared_memory.meeting import Meeting
from collectives.shared_memory.segments import OwnSegments, PeerSegments

_ENTRIES = 64
"""Messages to one receiver that may be on their way."""
_WORDS = 8
"""Of an entry: its number, the segment's descriptor, serial and bytes, the lengths of its head and of its data."""
_COUNTED = 0
"""Where in a ring's first words the receiver's count of this sender stands: rings and counts lie in the owner's page."""
_RING_BYTES = 8 * _WORDS * _ENTRIES


def mail_bytes(num_processes: int) -> int:
    """Of the memory that each process needs."""
    return num_processes * (64 + _RING_BYTES)


@final
class Mailbox:
    """One process's mail.

    Args:
        link: whose.
        meeting: which knows how long to wait, and of the others.
        own: this process's memory.
        peers: the processes' memory.
        mails: by process, `mail_bytes` of it, zeroed at first.
    """

    def __init__(
        self,
        link: Link,
        meeting: Meeting,
        own: OwnSegments,
        peers: Sequence[PeerSegments],
        mails: Sequence[Array],
    ) -> None:
        self._link = link
        self._meeting = meeting
        self._own = own
        num = link.num_processes
        ring = _RING_BYTES
        # For each other process: 64 bytes that count what was received from it, and a ring of what was sent to it.
        self._memory = mails[link.process]
        self._peers = peers
        pages = mails
        me = link.process

        def counts_of(page: Array, other: int) -> Array:
            return page[64 * other : 64 * other + 64].view(np.int64)

        def ring_of(page: Array, other: int) -> Array:
            start = 64 * num + ring * other
            return page[start : start + ring].view(np.int64).reshape(_ENTRIES, _WORDS)

        self._received = [counts_of(self._memory, p) for p in range(num)]
        self._counted = [counts_of(page, me) for page in pages]
        self._outgoing = [ring_of(self._memory, p) for p in range(num)]
        self._incoming = [ring_of(page, me) for page in pages]
        self._sent = [0] * num
        self._kept: list[deque[tuple[int, Array]]] = [deque() for _ in range(num)]
        self._send_locks = [threading.Lock() for _ in range(num)]
        self._receive_lock = threading.Lock()
        self._letters: dict[tuple[int, int, int], deque[Array]] = {}

    def send(self, member: int, array: Array, peer: int, tag: int) -> None:
        """As `Link.send`."""
        link = self._link
        process = link.process_of(peer)
        array = np.asarray(array, order="C")
        head = pickle.dumps((member, peer, tag, array.dtype, array.shape), pickle.HIGHEST_PROTOCOL)
        start = -(-len(head) // 64) * 64
        message, _ = self._own.make(start + array.nbytes)
        message[: len(head)] = np.frombuffer(head, np.uint8)
        if array.nbytes:
            message[start:] = array.reshape(-1).view(np.uint8)
        location = self._own.locate(message.ctypes.data)
        with self._send_locks[process]:
            number = self._sent[process] + 1
            self._await(
                lambda: number - int(self._counted[process][_COUNTED]) <= _ENTRIES, process, f"send to {peer}"
            )
            entry = self._outgoing[process][number % _ENTRIES]
            entry[1:7] = (*location[:3], len(head), start, array.nbytes)
            self._meeting.flags.fence()
            entry[0] = number
            self._sent[process] = number
            kept = self._kept[process]
            kept.append((number, message))
            counted = int(self._counted[process][_COUNTED])
            while kept and kept[0][0] <= counted:
                kept.popleft()

    def receive(self, member: int, peer: int, tag: int) -> Array:
        """As `Link.receive`."""
        process = self._link.process_of(peer)
        key = (peer, member, tag)
        found: list[Array] = []

        def look() -> bool:
            with self._receive_lock:
                self._take_in(process)
                letters = self._letters.get(key)
                if letters and not found:
                    found.append(letters.popleft())
            return bool(found)

        self._await(look, process, f"recv from {peer} tag {tag}")
        return found[0]

    def close(self) -> None:
        """Give back what is kept."""
        for kept in self._kept:
            kept.clear()

    def _take_in(self, process: int) -> None:
        """Copy all that has come from one process."""
        counts = self._received[process]
        while True:
            number = int(counts[_COUNTED]) + 1
            entry = self._incoming[process][number % _ENTRIES]
            if int(entry[0]) != number:
                return
            self._meeting.flags.fence()
            descriptor, _, num_bytes, head_length, start, length = (int(word) for word in entry[1:7])
            memory = self._peers[process].open(descriptor, num_bytes)
            member, peer, tag, dtype, shape = pickle.loads(memory[:head_length].data)
            array = np.empty(shape, dtype)
            if length:
                array.reshape(-1).view(np.uint8)[:] = memory[start : start + length]
            self._letters.setdefault((member, peer, tag), deque()).append(array)
            counts[_COUNTED] = number

    def _await(self, is_there: Callable[[], bool], process: int, where: str) -> None:
        started = time.monotonic()
        turns = 0
        while not is_there():
            turns += 1
            if turns < 200:
                os.sched_yield()
                continue
            self._meeting.look_for(process, time.monotonic() - started, where)
            time.sleep(0.0002 if turns < 2000 else 0.002)
