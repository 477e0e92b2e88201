"""Where all processes meet before anything is done: small messages that each brings with a digest of its call.

Up to eight processes send to one another directly, in requests that are set up once: half a microsecond between two processes of
a host. More pass on in a logarithmic number of rounds whether all digests are equal so far, and exchange the rest
afterwards. Nobody leaves before all have come, and nobody is inside MPI while it waits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.mpi.abandoning import abandon
from collectives.mpi.waiting import Look, have_ended, wait_until

INLINE_BYTES = 128 * 1024
"""What a process can bring. Beyond, sending each process only its part costs less than sending everything to all."""
DIRECT_UP_TO = 8
"""Processes."""

DIFFERS = 0x80
"""The flag that says that two processes' digests differ."""

HEAD_BYTES = 16
_HEAD = struct.Struct("<8sIB3x")
_SPINS = 15
"""Of the fast path, about 2 us; then the core is offered to others, as the other process may be waiting for this very one."""


@final
class Agreement:
    """One process's end of the exchange.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator that nobody else sends in with these tags.
        look: called while waiting.
        tag: the first of 64 tags.
        direct_up_to: processes that send to one another directly.
    """

    def __init__(self, mpi: Any, comm: Any, look: Look, tag: int, direct_up_to: int = DIRECT_UP_TO) -> None:
        self._mpi, self._comm, self._look, self._tag = mpi, comm, look, tag
        self._process, self._size = comm.rank, comm.size
        self._is_direct: bool = self._size <= direct_up_to
        self._pages = [
            np.zeros(
                HEAD_BYTES + INLINE_BYTES if self._is_direct or p == self._process else HEAD_BYTES, np.uint8
            )
            for p in range(self._size)
        ]
        self._heads = [page.data for page in self._pages]
        self._own_head = self._heads[self._process]
        self._sends: dict[int, list[Any]] = {}
        self._in_rounds: list[Any] = []
        self._bodies = [page[HEAD_BYTES:] for page in self._pages]
        self._others = [p for p in range(self._size) if p != self._process] if self._is_direct else []
        self._receives = [comm.Recv_init([self._pages[p], mpi.BYTE], p, tag) for p in self._others]
        self._other_heads = [self._heads[p] for p in self._others]
        self.body = self._bodies[self._process]
        """Where this process writes what it brings, before `exchange`."""

    def views(self, length: int) -> list[Array]:
        """What the processes bring if all bring so many bytes: lent, and overwritten by the next exchange.

        They stay the same memory, so that views of them can be kept, as long as there are few processes.
        """
        return [body[:length] for body in self._bodies]

    @property
    def is_direct(self) -> bool:
        """Whether `views` stay the same memory from exchange to exchange."""
        return self._is_direct

    def exchange(self, digest: bytes, length: int, flags: int = 0) -> int:
        """Come, and wait for the others.

        Args:
            digest: 8 bytes that must be equal.
            length: how much of `body` counts.
            flags: up to 7 bits.

        Returns:
            The flags of all processes, of each bit whether any has set it; with `DIFFERS` their digests are not equal, and nothing
            else counts.
        """
        if not self._is_direct:
            return self._exchange_in_rounds(digest, length, flags)
        _HEAD.pack_into(self._own_head, 0, digest, length, flags)
        receives = self._receives
        if len(receives) == 1:  # between two: fewer lists
            receive = receives[0]
            (send,) = self._requests(length)
            receive.Start()
            send.Start()
            for _ in range(_SPINS):
                if receive.Test():
                    break
            else:
                wait_until(receive.Test, self._look, lambda: self._others)
            if not send.Test():
                wait_until(send.Test, self._look, lambda: self._others)
        elif receives:
            requests = [*receives, *self._requests(length)]
            self._mpi.Prequest.Startall(requests)
            test = self._mpi.Request.Testall
            if not test(requests):
                wait_until(lambda: test(requests), self._look, self._missing)
        for head in self._other_heads:
            other, _, others_flags = _HEAD.unpack_from(head)
            flags |= others_flags
            if other != digest:
                flags |= DIFFERS
        return flags

    def length_of(self, process: int) -> int:
        """How much the process has brought."""
        _, length, _ = _HEAD.unpack_from(self._heads[process])
        return int(length)

    def brought(self, process: int) -> Array:
        """What the process has brought, as `views`."""
        return self._bodies[process][: self.length_of(process)]

    def abandon(self, timeout: float) -> bool:
        """Have nothing under way any more that could write into arrays; whether that is so in time. See `abandon`."""
        sends = [(request, self._pages) for requests in self._sends.values() for request in requests]
        if not abandon(self._mpi, self._receives, sends, timeout):
            return False
        return have_ended(self._mpi, self._in_rounds, timeout)  # collectives, too, which can't be ended

    def close(self) -> None:
        """Give the requests back; nobody may be waiting."""
        for request in self._all_requests():
            request.Free()
        self._receives, self._sends = [], {}

    def _all_requests(self) -> list[Any]:
        return [*self._receives, *(request for requests in self._sends.values() for request in requests)]

    def _requests(self, length: int) -> list[Any]:
        # A request has a fixed length: few of them, and little sent in vain.
        grain = 64 if length <= 4096 else 4096
        rounded = min(-(-length // grain) * grain, INLINE_BYTES)
        requests = self._sends.get(rounded)
        if requests is None:
            page = self._pages[self._process][: HEAD_BYTES + rounded]
            requests = [self._comm.Send_init([page, self._mpi.BYTE], p, self._tag) for p in self._others]
            self._sends[rounded] = requests
        return requests

    def _missing(self) -> Sequence[int]:
        return [
            p for p, receive in zip(self._others, self._receives, strict=True) if not receive.Get_status()
        ]

    # ------------------------------------------------------ many processes

    def _exchange_in_rounds(self, digest: bytes, length: int, flags: int) -> int:
        mpi, comm, size = self._mpi, self._comm, self._size
        own_flags, distance, round_number = flags, 1, 1
        incoming = bytearray(HEAD_BYTES)
        # After each round the flags are of twice as many processes: this one, and those before it.
        while distance < size:
            source, target = (self._process - distance) % size, (self._process + distance) % size
            outgoing = _HEAD.pack(digest, 0, flags)
            requests = [
                comm.Irecv([incoming, mpi.BYTE], source, self._tag + round_number),
                comm.Isend([outgoing, mpi.BYTE], target, self._tag + round_number),
            ]
            self._finish(requests, [source])
            other, _, others_flags = _HEAD.unpack_from(incoming)
            flags |= others_flags
            if other != digest:
                flags |= DIFFERS
            distance *= 2
            round_number += 1
        if not flags & DIFFERS:
            self._exchange_bodies(digest, length, own_flags)
        return flags

    def _exchange_bodies(self, digest: bytes, length: int, flags: int) -> None:
        mpi, comm = self._mpi, self._comm
        _HEAD.pack_into(self._own_head, 0, digest, length, flags)
        heads = np.zeros((self._size, HEAD_BYTES), np.uint8)
        own = np.frombuffer(bytes(self._own_head[:HEAD_BYTES]), np.uint8)
        self._finish([comm.Iallgather([own, mpi.BYTE], [heads, mpi.BYTE])], range(self._size))
        self._heads = [head.data for head in heads]
        self._heads[self._process] = self._own_head
        lengths = [self.length_of(p) for p in range(self._size)]
        # Each begins on a multiple of 16 bytes, so that its numbers are aligned.
        places = [-(-length // 16) * 16 for length in lengths]
        starts = [sum(places[:p]) for p in range(self._size)]
        bodies = np.zeros(sum(places), np.uint8)
        if sum(lengths):
            sent = self.body[:length].copy()
            request = comm.Iallgatherv([sent, mpi.BYTE], [bodies, lengths, starts, mpi.BYTE])
            self._finish([request], range(self._size))
        self._bodies = [bodies[start : start + n] for start, n in zip(starts, lengths, strict=True)]

    def _finish(self, requests: list[Any], missing: Sequence[int]) -> None:
        test = self._mpi.Request.Testall
        self._in_rounds = requests
        wait_until(lambda: test(requests), self._look, lambda: [p for p in missing if p != self._process])
