"""Reductions of arrays that don't lie in shared memory: each piece is copied in, reduced, and copied out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.reduce_op import ReduceOp
from collectives.reduction import Fold, fold
from collectives.shared_memory.meeting import Meeting

PIECE_BYTES = 1 << 20
"""Of each array that is copied at once: it stays in the cache."""

Rows = Sequence[Sequence[Array]]


@final
class Staging:
    """A reduction of arrays that don't lie in shared memory: each piece is copied in, reduced, and copied out.

    Args:
        process: which one.
        counts: how many members each process hosts.
        op: how to reduce.
        sources: as in `Link.fold`.
        targets: likewise.
    """

    def __init__(
        self, process: int, counts: Sequence[int], op: ReduceOp, sources: Rows, targets: Rows
    ) -> None:
        self._process = process
        self._counts = counts
        self._op = op
        self._sources = sources
        self._targets = targets
        self._results = [op.result_dtype(column.dtype) for column in sources[0]]
        widths = [max(c.itemsize, r.itemsize) for c, r in zip(sources[0], self._results, strict=True)]
        self._lengths = [max(1, PIECE_BYTES // width) for width in widths]

    @property
    def num_bytes(self) -> int:
        """Memory for pieces: a row for each of this process's members, then one for its part of the results."""
        return (len(self._sources) + 1) * PIECE_BYTES

    def run(self, meeting: Meeting, boxes: Sequence[Array]) -> None:
        """Reduce everything.

        Args:
            meeting: where the processes meet between copying and reducing.
            boxes: by process, its memory for pieces.
        """
        process, num_processes = self._process, len(self._counts)
        own = boxes[process]
        for column, first in enumerate(self._sources[0]):
            dtype, result, length = first.dtype, self._results[column], self._lengths[column]
            for at in range(0, first.size, length):
                stop = min(at + length, first.size)
                num = stop - at
                for number, row in enumerate(self._sources):
                    np.copyto(_part(own, number, dtype, 0, num), row[column][at:stop])
                meeting.meet()
                start, end = num * process // num_processes, num * (process + 1) // num_processes
                rows = [
                    _part(box, number, dtype, start, end)
                    for box, count in zip(boxes, self._counts, strict=True)
                    for number in range(count)
                ]
                fold(self._op, rows, [_part(own, len(self._sources), result, start, end)])
                meeting.meet()
                for other, (box, count) in enumerate(zip(boxes, self._counts, strict=True)):
                    start, end = num * other // num_processes, num * (other + 1) // num_processes
                    total = _part(box, count, result, start, end)
                    for target in self._targets:
                        _put(target[column][at + start : at + end], total)


def _part(box: Array, row: int, dtype: np.dtype[Any], start: int, stop: int) -> Array:
    base = row * PIECE_BYTES
    part: Array = box[base + start * dtype.itemsize : base + stop * dtype.itemsize].view(dtype)
    return part


def _put(target: Array, total: Array) -> None:
    """Copy a result to where it is wanted, which may be narrower."""
    if target.dtype == total.dtype:
        np.copyto(target, total)
    else:
        Fold(ReduceOp.MAX, [total], [target]).run()
