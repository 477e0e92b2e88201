"""What of a reduction goes together: small arrays side by side, large ones cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.mpi.chunks import plan_chunks
from collectives.recycled_memory import RecycledMemory
from collectives.reduce_op import ReduceOp
from collectives.reduction import Fold

PACKED_BELOW = 256 << 10
"""Bytes. Copying a smaller array beside others costs less than messages of its own."""


@final
class Rows:
    """Where the arrays of small reductions lie in what the processes bring to a meeting, as views that are made once.

    Attributes:
        digest: of the call that it is for.
        pair: where there is one array of each of two members, to be folded as it is, by far the most frequent case: the place to
            bring it to, both arrays, and the function that folds them.

    Args:
        op: how they are reduced.
        digest: as the attribute.
        kinds: dtype and length, by column.
        aligned: bytes on multiples of which each array begins.
        counts: members, by process.
        process: this one.
        body: where it writes what it brings; None for arrays that are too large for that.
        views: what the processes bring, by process; None if that is not always the same memory: `find` is called then.
    """

    def __init__(
        self,
        op: ReduceOp,
        digest: bytes,
        kinds: Sequence[tuple[np.dtype[Any], int]],
        aligned: int,
        counts: Sequence[int],
        process: int,
        body: Array | None,
        views: Sequence[Array] | None,
    ) -> None:
        self._kinds, self._counts = list(kinds), list(counts)
        self._results = [op.result_dtype(dtype) for dtype, _ in kinds]
        self.digest = digest
        self._starts, end = [], 0
        for dtype, length in kinds:
            self._starts.append(end)
            end += -(-dtype.itemsize * length // aligned) * aligned
        self._row_bytes = end
        self.num_bytes = counts[process] * end
        self.is_small = body is not None
        self.stays = views is not None
        self._own = [] if body is None else self._members(body, counts[process])
        self.columns: list[list[Array]] = []
        """Of all members, by column, by member."""
        self.pair: tuple[Array, Array, Array, np.ufunc] | None = None
        if views is not None:
            self.find(views)
            if len(kinds) == 1 and list(counts) == [1, 1] and op is not ReduceOp.MEAN:
                ((dtype, _),) = kinds
                if op.accumulator_dtype(dtype) == dtype:
                    self.pair = (self._own[0][0], *self.columns[0], op.ufunc)  # type: ignore[assignment]  # they are two

    def are_narrow(self, target: Sequence[Array]) -> bool:
        """Whether the results may not fit a member's targets."""
        return any(column.dtype != dtype for column, dtype in zip(target, self._results, strict=True))

    def bring(self, sources: Sequence[Sequence[Array]]) -> None:
        """Write this process's members' arrays."""
        for member, columns in zip(self._own, sources, strict=True):
            for place, source in zip(member, columns, strict=True):
                place[...] = source

    def find(self, views: Sequence[Array]) -> None:
        """Look at what the processes have brought."""
        members = [
            member
            for view, count in zip(views, self._counts, strict=True)
            for member in self._members(view, count)
        ]
        self.columns = [[member[column] for member in members] for column in range(len(self._kinds))]

    def _members(self, body: Array, count: int) -> list[list[Array]]:
        return [
            [self._place(body, member, column) for column in range(len(self._kinds))]
            for member in range(count)
        ]

    def _place(self, body: Array, member: int, column: int) -> Array:
        dtype, length = self._kinds[column]
        start = member * self._row_bytes + self._starts[column]
        return body[start : start + dtype.itemsize * length].view(dtype)


@final
@dataclass(frozen=True)
class Piece:
    """What is reduced at once.

    Args:
        rows: of this process's members, flat.
        result: where the result goes, of the result's dtype; None where nobody here wants it.
        copies: afterwards, what goes where: a part of the result, and its targets.
    """

    rows: list[Array]
    result: Array | None
    copies: list[tuple[Array, list[Array]]] = field(default_factory=list)

    def finish(self, op: ReduceOp) -> None:
        """Copy the result to where else it goes.

        Raises:
            OverflowError: a target is too narrow for it.
        """
        for part, targets in self.copies:
            if targets[0].dtype == part.dtype:
                for target in targets:
                    np.copyto(target, part)
            else:
                Fold(op, [part], targets).run()


def plan_pieces(
    op: ReduceOp,
    sources: Sequence[Sequence[Array]],
    targets: Sequence[Sequence[Array]],
    piece_bytes: int,
    memory: RecycledMemory,
) -> Iterator[Piece]:
    """The pieces of a reduction of several columns, the same on all processes.

    Args:
        op: how to reduce.
        sources: as of `Link.fold`.
        targets: likewise.
        piece_bytes: how large a piece is.
        memory: for what is neither source nor target.
    """
    waiting: dict[np.dtype[Any], list[int]] = {}
    for column, first in enumerate(sources[0]):
        if first.nbytes >= min(PACKED_BELOW, piece_bytes):
            for start, length in plan_chunks(first.size, max(1, piece_bytes // first.itemsize)):
                part = slice(start, start + length)
                rows = [member[column][part] for member in sources]
                yield _piece(op, rows, [target[column][part] for target in targets], memory)
        elif first.size:
            packed = waiting.setdefault(first.dtype, [])
            packed.append(column)
            if sum(sources[0][c].nbytes for c in packed) >= piece_bytes:
                yield _pack(op, sources, targets, waiting.pop(first.dtype), memory)
    for packed in waiting.values():
        yield _pack(op, sources, targets, packed, memory)


def _piece(op: ReduceOp, rows: list[Array], targets: list[Array], memory: RecycledMemory) -> Piece:
    if not targets:
        return Piece(rows, None)
    dtype = op.result_dtype(rows[0].dtype)
    if targets[0].dtype == dtype:
        return Piece(rows, targets[0], [(targets[0], targets[1:])] if targets[1:] else [])
    result = memory.empty((len(rows[0]),), dtype)
    return Piece(rows, result, [(result, targets)])


def _pack(
    op: ReduceOp,
    sources: Sequence[Sequence[Array]],
    targets: Sequence[Sequence[Array]],
    columns: list[int],
    memory: RecycledMemory,
) -> Piece:
    if len(columns) == 1:
        (column,) = columns
        return _piece(op, [m[column] for m in sources], [target[column] for target in targets], memory)
    lengths = [sources[0][column].size for column in columns]
    dtype = sources[0][columns[0]].dtype
    rows = [memory.empty((sum(lengths),), dtype) for _ in sources]
    for row, member in zip(rows, sources, strict=True):
        np.concatenate([member[column] for column in columns], out=row)
    if not targets:
        return Piece(rows, None)
    result = memory.empty((sum(lengths),), op.result_dtype(dtype))
    parts = np.split(result, np.cumsum(lengths)[:-1])
    copies = [
        (part, [target[column] for target in targets]) for part, column in zip(parts, columns, strict=True)
    ]
    return Piece(rows, result, copies)
