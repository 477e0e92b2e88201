"""Rows of the same index as one: what sparse gradients cost most of their time for.

Indices are sorted together with the places of their rows, as one array of integers, which NumPy sorts many times faster
than it finds the order of another array. Each row is then read once, and added while its sum is in the cache.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from collectives.arrays import Array
from collectives.reduce_op import ReduceOp

_CACHED_BYTES = 1 << 18
"""Of sums that are worked on at a time."""

_SHORT = 16
"""Runs up to this number of rows are added one row of each run at a time, longer ones run by run."""


def merge_rows(values: Array, indices: Array) -> tuple[Array, Array]:
    """Rows with every index once, in ascending order; rows of one index are added in the order they had.

    Half precision is added in float32 and rounded at the end.

    Args:
        values: shape ``(num_rows, ...)``.
        indices: shape ``(num_rows,)``, integers.

    Returns:
        New arrays of shapes ``(num_different, ...)`` and ``(num_different,)``, in the dtypes given.
    """
    order, ordered = _sorted(indices)
    num_rows = len(order)
    if not num_rows:
        return values.copy(), indices.copy()
    is_first = np.empty(num_rows, np.bool_)
    is_first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    different = ordered[starts].astype(indices.dtype, copy=False)
    # Not -1, which there may be no elements to tell from.
    rows = values.reshape(num_rows, math.prod(values.shape[1:]))
    merged = np.empty((len(starts), rows.shape[1]), rows.dtype)
    np.take(rows, order[starts], axis=0, out=merged, mode="clip")
    if len(starts) < num_rows and merged.size:
        lengths = np.diff(starts, append=num_rows)
        if rows.shape[1] == 1:
            _add_elements(rows[:, 0], order, lengths, merged[:, 0])
        else:
            _add_runs(rows, order, starts, lengths, merged)
    return merged.reshape(len(starts), *values.shape[1:]), different


def _sorted(indices: Array) -> tuple[Array, Array]:
    """Where each index in ascending order comes from, equal ones in the order they had; and the sorted indices."""
    num_rows = len(indices)
    shift = num_rows.bit_length()
    if (
        num_rows
        and indices.dtype.kind in "iu"
        and indices.min() >= 0
        and int(indices.max()) < 1 << (63 - shift)
    ):
        packed = indices.astype(np.int64)  # a new one
        packed <<= shift
        packed |= np.arange(num_rows)
        packed.sort()
        return packed & ((1 << shift) - 1), packed >> shift
    order = np.argsort(indices, kind="stable")
    return order, indices[order]


def _add_elements(values: Array, order: Array, lengths: Array, merged: Array) -> None:
    sums = np.zeros(len(lengths), ReduceOp.SUM.accumulator_dtype(values.dtype))
    np.add.at(sums, np.repeat(np.arange(len(lengths)), lengths), values[order].astype(sums.dtype, copy=False))
    np.copyto(merged, sums, casting="unsafe")


def _add_runs(rows: Array, order: Array, starts: Array, lengths: Array, merged: Array) -> None:
    dtype: np.dtype[Any] = ReduceOp.SUM.accumulator_dtype(rows.dtype)
    row_bytes = rows.shape[1] * dtype.itemsize
    fitting = max(1, _CACHED_BYTES // row_bytes)
    short = np.flatnonzero((lengths > 1) & (lengths <= _SHORT))
    sums, added = (np.empty((min(fitting, len(short)), rows.shape[1]), dtype) for _ in range(2))
    for start in range(0, len(short), fitting):
        runs = short[start : start + fitting]
        # The longest first: those that have a next row are then side by side.
        runs = runs[np.argsort(-lengths[runs], kind="stable")]
        first, left = starts[runs], lengths[runs]
        total = sums[: len(runs)]
        total[...] = merged[runs]
        for number in range(1, int(left[0])):
            count = int(np.count_nonzero(left > number))
            part = _taken(rows, order[first[:count] + number], added[:count])
            np.add(total[:count], part, out=total[:count])
        merged[runs] = total
    length = min(fitting, int(lengths.max()))
    work, total = np.empty((1 + length, rows.shape[1]), dtype), np.empty(rows.shape[1], dtype)
    for run in np.flatnonzero(lengths > _SHORT):
        begin, stop = int(starts[run]), int(starts[run] + lengths[run])
        total[...] = merged[run]
        for start in range(begin + 1, stop, length):
            places = order[start : min(start + length, stop)]
            work[0] = total
            _taken(rows, places, work[1 : 1 + len(places)])
            np.add.reduce(work[: 1 + len(places)], axis=0, out=total)
        merged[run] = total


def _taken(rows: Array, places: Array, out: Array) -> Array:
    if rows.dtype == out.dtype:
        # They are in range: with "clip" NumPy writes into the result itself, not into a copy first.
        np.take(rows, places, axis=0, out=out, mode="clip")
    else:
        out[...] = rows[places]
    return out
