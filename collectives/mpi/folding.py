"""Reductions by way of MPI.

Small arrays are brought to the meeting itself. Of large ones each process gets its slice of everybody's, folds it in the
order of the members, and sends the result to the others: as much is sent as by MPI's own reductions, whose order is theirs,
and which know neither half-precision floats nor our rules for narrow integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from collectives.mpi.agreement import DIFFERS, INLINE_BYTES
from collectives.mpi.meeting import NARROW, Meeting
from collectives.mpi.reducing import Piece, Rows, plan_pieces
from collectives.recycled_memory import RecycledMemory
from collectives.reduce_op import ReduceOp
from collectives.reduction import Fold, fold

_UNWANTED = 1
"""A flag: no member here wants the result."""
_ALIGNED = 16
"""Bytes on multiples of which arrays begin in what is brought to a meeting."""
_MANY = 1024
"""Calls whose arrays' places are remembered."""
_WANTING = b"xpdwants"
"""The digest of a meeting that follows from what all processes know."""


@final
class Folding:
    """One process's side.

    Args:
        meeting: where the processes meet.
        piece_bytes: how much of a large array is reduced at once.
    """

    def __init__(self, meeting: Meeting, piece_bytes: int) -> None:
        self._meeting, self._piece_bytes = meeting, piece_bytes
        self._process, self._num_processes = meeting.process, meeting.num_processes
        self._counts, self._starts, self._size = meeting.counts, meeting.starts, meeting.starts[-1]
        self._first = meeting.starts[meeting.process]
        self._memory = RecycledMemory(num_blocks=4)
        self._scratch_memory: Array = np.empty(0, np.uint8)
        self._small: dict[Call, Rows] = {}

    def fold(
        self,
        call: Call,
        op: ReduceOp,
        sources: Sequence[Sequence[Array]],
        targets: Sequence[Sequence[Array]],
    ) -> None:
        """As of `Link`."""
        self._meeting.begin(call)
        rows = self._small.get(call)
        if rows is None:
            rows = self._learn(call, op, sources)
        pair = rows.pair
        if pair is not None and targets and targets[0][0].dtype == pair[0].dtype:
            own, first, second, ufunc = pair
            own[...] = sources[0][0]
            flags = self._meeting.exchange(rows.digest, rows.num_bytes, 0)
            if not flags:
                ufunc(first, second, out=targets[0][0])
                return
        else:
            flags = _UNWANTED if not targets else NARROW if rows.are_narrow(targets[0]) else 0
            if not rows.is_small:
                self._fold_large(call, op, sources, targets, flags)
                return
            rows.bring(sources)
            flags = self._meeting.exchange(rows.digest, rows.num_bytes, flags)
        if flags & DIFFERS:
            self._meeting.raise_mismatch(call)
        if not rows.stays:
            rows.find(self._meeting.agreement.views(INLINE_BYTES))
        overflow = ""
        try:
            if len(targets) == 1 and len(rows.columns) == 1:
                fold(op, rows.columns[0], targets[0])
            elif targets:
                for column, members in enumerate(rows.columns):
                    fold(op, members, [target[column] for target in targets])
        except OverflowError as error:
            overflow = str(error)
        if flags & NARROW:
            self._meeting.conclude(overflow)

    def reduce_scatter(
        self, call: Call, op: ReduceOp, sources: Sequence[Array], targets: Sequence[Array]
    ) -> None:
        """As of `Link`."""
        self._meeting.begin(call)
        first = sources[0]
        flags = NARROW if _is_narrow(op, first, targets[0]) else 0
        num_bytes = len(sources) * first.nbytes
        overflow = ""
        if self._meeting.is_small(first.nbytes):
            body = self._meeting.agreement.body
            for number, source in enumerate(sources):
                body[number * first.nbytes : (number + 1) * first.nbytes] = source.reshape(-1).view(np.uint8)
            flags = self._meeting.come(call, num_bytes, flags)
            brought = [
                self._meeting.agreement.brought(p).view(first.dtype).reshape(self._counts[p], self._size, -1)
                for p in range(self._num_processes)
            ]
            rows = [member for process in brought for member in process]
            try:
                for number, target in enumerate(targets):
                    Fold(op, [row[self._first + number] for row in rows], [target]).run()
            except OverflowError as error:
                overflow = str(error)
        else:
            flags = self._meeting.come(call, 0, flags)
            length = max(1, self._piece_bytes // max(1, first.itemsize * self._size))
            for start in range(0, first.shape[1], length):
                try:
                    self._scatter_piece(op, [s[:, start : start + length] for s in sources], targets, start)
                except OverflowError as error:
                    overflow = str(error)
        if flags & NARROW:
            self._meeting.conclude(overflow)

    def is_small(self, sources: Sequence[Array]) -> bool:
        """Whether `fold` of such columns is one meeting, in which all bring all they have."""
        return self._meeting.is_small(sum(_padded(source.nbytes) for source in sources))

    def _learn(self, call: Call, op: ReduceOp, sources: Sequence[Sequence[Array]]) -> Rows:
        kinds = [(source.dtype, source.size) for source in sources[0]]
        num_bytes = sum(_padded(source.nbytes) for source in sources[0])
        digest, agreement = self._meeting.digest_of(call), self._meeting.agreement
        if self._meeting.is_small(num_bytes):
            views = agreement.views(INLINE_BYTES) if agreement.is_direct else None
            rows = Rows(op, digest, kinds, _ALIGNED, self._counts, self._process, agreement.body, views)
        else:
            rows = Rows(op, digest, kinds, _ALIGNED, self._counts, self._process, None, None)
        if len(self._small) >= _MANY:
            self._small.clear()
        self._small[call] = rows
        return rows

    def _fold_large(
        self,
        call: Call,
        op: ReduceOp,
        sources: Sequence[Sequence[Array]],
        targets: Sequence[Sequence[Array]],
        flags: int,
    ) -> None:
        wants = bool(targets)
        flags = self._meeting.come(call, 0, flags)
        wanting = list(range(self._num_processes))
        if flags & _UNWANTED:
            answers = self._meeting.texts(_WANTING, "yes" if wants else "")
            wanting = [p for p in wanting if answers[p]]
        overflow = ""
        for piece in plan_pieces(op, sources, targets, self._piece_bytes, self._memory):
            self._fold_piece(op, piece, wanting)
            try:
                piece.finish(op)
            except OverflowError as error:
                overflow = overflow or str(error)
        if flags & NARROW:
            self._meeting.conclude(overflow)

    def _fold_piece(self, op: ReduceOp, piece: Piece, wanting: Sequence[int]) -> None:
        length, others = len(piece.rows[0]), self._others_in_turn()
        slices = [
            slice(length * p // self._num_processes, length * (p + 1) // self._num_processes)
            for p in range(self._num_processes)
        ]
        mine = slices[self._process]
        rows = self._gather_rows([[row[part] for row in piece.rows] for part in slices])
        if piece.result is None:
            result = self._memory.empty((length,), op.result_dtype(rows[0].dtype))
        else:
            result = piece.result
        if mine.stop > mine.start:
            Fold(op, rows, [result[mine]]).run()
        self._meeting.run(
            [(result[slices[p]], p) for p in others] if self._process in wanting else [],
            [(result[mine], p) for p in others if p in wanting],
        )

    def _gather_rows(self, parts: Sequence[Sequence[Array]]) -> list[Array]:
        """Send each process its part of this process's rows; its own part of all rows, by member.

        Args:
            parts: for each process, of this process's members.
        """
        own = parts[self._process]
        length, others = len(own[0]), self._others_in_turn()
        scratch = self._scratch((self._size - len(own), length), own[0].dtype)
        rows: list[Array] = []
        receives, row = [], 0
        for p in range(self._num_processes):
            if p == self._process:
                rows += own
                continue
            places = list(scratch[row : row + self._counts[p]])
            row += self._counts[p]
            rows += places
            receives += [(place, p) for place in places]
        self._meeting.run(receives, [(part, p) for p in others for part in parts[p]])
        return rows

    def _scatter_piece(
        self, op: ReduceOp, blocks: Sequence[Array], targets: Sequence[Array], start: int
    ) -> None:
        length = blocks[0].shape[1]
        parts = [
            [block[self._starts[p] : self._starts[p + 1]].reshape(-1) for block in blocks]
            for p in range(self._num_processes)
        ]
        scratch = self._scratch((self._size, self._counts[self._process], length), blocks[0].dtype)
        receives = []
        for p in range(self._num_processes):
            for number, member in enumerate(range(self._starts[p], self._starts[p + 1])):
                if p == self._process:
                    scratch[member] = parts[p][number].reshape(-1, length)
                else:
                    receives.append((scratch[member].reshape(-1), p))
        self._meeting.run(receives, [(part, p) for p in self._others_in_turn() for part in parts[p]])
        for number, target in enumerate(targets):
            Fold(op, list(scratch[:, number]), [target[start : start + length]]).run()

    def _scratch(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Memory for what one piece brings; the same for the next one."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._scratch_memory.nbytes < num_bytes:
            self._scratch_memory = np.empty(num_bytes, np.uint8)
        return self._scratch_memory[:num_bytes].view(dtype).reshape(shape)

    def _others_in_turn(self) -> list[int]:
        """The other processes, beginning with the next, so that not all send to the same one at first."""
        return [
            (self._process + distance) % self._num_processes for distance in range(1, self._num_processes)
        ]


def _is_narrow(op: ReduceOp, source: Array, target: Array) -> bool:
    """Whether the result may not fit the target."""
    return op.result_dtype(source.dtype) != target.dtype


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
