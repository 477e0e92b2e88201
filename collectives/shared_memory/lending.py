"""Bytes that processes let one another read for the length of a collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import numpy as np

from collectives.arrays import Array
from collectives.shared_memory.meeting import BODY_BYTES, Meeting
from collectives.shared_memory.segments import NOWHERE, Location, OwnSegments, PeerSegments

_KEPT_BYTES = 64 << 20
"""An outbox up to this size is kept for the next time."""
_ENTRY = 5
"""Words that say where one array is: its bytes, then its `Location`; a descriptor of `_INLINE` means in the page."""
_INLINE = -2


@final
class Lending:
    """One process's side.

    Args:
        meeting: where the processes meet.
        counts: how many members each process hosts.
        own: this process's memory.
        peers: by process, how its memory is reached.
    """

    def __init__(
        self, meeting: Meeting, counts: Sequence[int], own: OwnSegments, peers: Sequence[PeerSegments]
    ) -> None:
        self._meeting = meeting
        self._counts = counts
        self._own = own
        self._peers = peers
        self._outbox: Array = np.empty(0, np.uint8)

    def bring(self, arrays: Sequence[Array], turn: int) -> bool:
        """Bring the bytes of this process's members to the next phase; whether all of them stand in the page itself.

        Args:
            arrays: by member, dtype uint8.
            turn: the slot of the phase.
        """
        body = self._meeting.my_bodies[turn]
        at = start = -(-8 * _ENTRY * len(arrays) // 64) * 64
        entries = np.zeros((len(arrays), _ENTRY), np.int64)
        is_inline = start + sum(_padded(array.nbytes) for array in arrays) <= BODY_BYTES
        away: list[tuple[int, Array]] = []
        for number, array in enumerate(arrays):
            if is_inline:
                body[at : at + array.nbytes] = array
                entries[number] = (array.nbytes, _INLINE, 0, 0, at)
                at += _padded(array.nbytes)
                continue
            if not array.nbytes:
                entries[number] = (0, _INLINE, 0, 0, 0)
                continue
            location = self.locate(array)
            entries[number] = (array.nbytes, *location)
            if location == NOWHERE:
                away.append((number, array))
        if away:
            box = self.box(sum(_padded(array.nbytes) for _, array in away))
            descriptor, serial, num_bytes, _ = self.locate(box)
            at = 0
            for number, array in away:
                box[at : at + array.nbytes] = array
                entries[number] = (array.nbytes, descriptor, serial, num_bytes, at)
                at += _padded(array.nbytes)
        body[: entries.nbytes].view(np.int64)[:] = entries.reshape(-1)
        return is_inline

    def brought(self, turn: int) -> list[Array]:
        """All members' bytes, as they were brought to a phase that has been passed."""
        lent = []
        for process, (body, count) in enumerate(zip(self._meeting.bodies[turn], self._counts, strict=True)):
            entries = body[: 8 * _ENTRY * count].view(np.int64).reshape(count, _ENTRY).tolist()
            for length, descriptor, serial, num_bytes, offset in entries:
                if descriptor == _INLINE:
                    memory = body
                else:
                    memory = self.memory_of(process, descriptor, serial, num_bytes)
                lent.append(memory[offset : offset + length])
        return lent

    def locate(self, array: Array) -> Location:
        """Where an array starts in this process's shared memory, or `NOWHERE`."""
        return self._own.locate(array.__array_interface__["data"][0])

    def memory_of(self, process: int, descriptor: int, serial: int, num_bytes: int) -> Array:
        """One of another process's segments, or this one's, as it is mapped here."""
        return self._peers[process].bytes_at(descriptor, serial, num_bytes)

    def box(self, num_bytes: int) -> Array:
        """Shared memory of at least so many bytes, to bring things in; all have finished with what it held."""
        if len(self._outbox) < num_bytes or len(self._outbox) > max(num_bytes, _KEPT_BYTES):
            self._outbox = np.empty(0, np.uint8)  # given back before more is asked for
            size = (
                max(1 << 16, 1 << math.ceil(math.log2(num_bytes))) if num_bytes < _KEPT_BYTES else num_bytes
            )
            self._outbox = self._own.make(size)[0]
        return self._outbox


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
