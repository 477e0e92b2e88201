"""Folding host arrays of one shape into one, in a fixed order, through memory once.

A fold walks the arrays in chunks that fit the cache: what is read is read once, and the result of a
chunk is copied to every place that wants it while it is still there. Chunks are independent of one
another and every element is folded in the order of the ranks, so the result is the same to the last
bit however many threads share the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, final

import numpy as np

from collectives.arrays import Array, describe, is_host
from collectives.reduce_op import ReduceOp

CHUNK_BYTES = 256 * 1024
"""Per array. The fastest of 16 KB to 4 MB for two to eight arrays on machines with 0.5 to 1 MB of L2."""


def reduce_arrays(arrays: Sequence[Array], op: ReduceOp, where: str = "reduce") -> Array:
    """The reduction of arrays of one shape and dtype, in the order given.

    Returns:
        A new array of that shape, of dtype ``op.result_dtype(dtype)``.

    Raises:
        ValueError: shapes or dtypes differ.
        TypeError: a dtype that this op has no meaning for.
    """
    first = arrays[0]
    for array in arrays[1:]:
        if array.shape != first.shape or array.dtype != first.dtype:
            listed = "; ".join(f"replica {i}: {describe(a)}" for i, a in enumerate(arrays))
            raise ValueError(f"{where}: got arrays that differ, {listed}; need one shape and dtype")
    op.require(first.dtype, where)
    if not is_host(first):
        return _reduce_on_device(arrays, op)
    result = np.empty(first.shape, op.result_dtype(first.dtype))
    fold = Fold(op, [np.ascontiguousarray(array).reshape(-1) for array in arrays], [result.reshape(-1)])
    fold.run()
    return result


def _reduce_on_device(arrays: Sequence[Array], op: ReduceOp) -> Array:
    # CuPy dispatches NumPy's functions; its ufuncs know no reduction order but the one written here.
    dtype = arrays[0].dtype
    total = arrays[0].astype(op.accumulator_dtype(dtype))
    for array in arrays[1:]:
        total = op.ufunc(total, array)
    if op is ReduceOp.MEAN:
        total = total / len(arrays)
    return total.astype(op.result_dtype(dtype), copy=False)


def fold(op: ReduceOp, sources: Sequence[Array], targets: Sequence[Array]) -> None:
    """All of a reduction in the calling thread. Arguments and errors as of `Fold`."""
    first, target = sources[0], targets[0]
    if (
        first.nbytes > CHUNK_BYTES
        or len(sources) != 2
        or target.dtype != first.dtype
        or op is ReduceOp.MEAN
        or op.accumulator_dtype(first.dtype) != first.dtype
    ):
        Fold(op, sources, targets).run()
    else:  # two arrays that fit the cache: by far the most frequent case
        op.ufunc(first, sources[1], out=target)
        for other in targets[1:]:
            np.copyto(other, target, casting="unsafe")


@final
class Fold:
    """One reduction of flat arrays into one or more flat targets, cut into chunks.

    Any number of threads may call `run`; each takes the next chunk until none is left.

    Args:
        op: how to reduce.
        sources: contiguous arrays of shape ``(n,)`` and one dtype.
        targets: contiguous arrays of shape ``(n,)`` that all get the result. A target may be the source of the
            same position, for a reduction in place; otherwise they do not overlap the sources.
    """

    def __init__(self, op: ReduceOp, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        first = sources[0]
        self._op = op
        self._sources = sources
        self._targets = targets
        self._accumulator = op.accumulator_dtype(first.dtype)
        target = targets[0]
        # Folding straight into the target needs its dtype to be the accumulator's, and sources that
        # are still to be read when the target is written must lie elsewhere.
        self._direct = (
            target.dtype == first.dtype == self._accumulator
            and all(t.dtype == target.dtype for t in targets)
            and not any(np.may_share_memory(target, source) for source in sources[2:])
        )
        length = max(1, CHUNK_BYTES // first.itemsize)
        self._slices = _chunks(first.size, length)

    @property
    def num_chunks(self) -> int:
        """How many chunks are left to take."""
        return len(self._slices)

    def run(self) -> int:
        """Fold chunks until none is left; how many this call did.

        Raises:
            OverflowError: an integer target is too narrow for the result.
        """
        slices, fold = self._slices, self._fold_direct if self._direct else self._fold_wide
        done = 0
        while True:
            try:
                chunk = slices.pop()  # atomic, so that threads can share the list
            except IndexError:
                return done
            fold(chunk)
            done += 1

    def _fold_direct(self, chunk: slice) -> None:
        sources, ufunc = self._sources, self._op.ufunc
        total = self._targets[0][chunk]
        if len(sources) == 1:
            np.copyto(total, sources[0][chunk])
        else:
            ufunc(sources[0][chunk], sources[1][chunk], out=total)
            for source in sources[2:]:
                ufunc(total, source[chunk], out=total)
        if self._op is ReduceOp.MEAN:
            np.divide(total, len(sources), out=total)
        for target in self._targets[1:]:
            np.copyto(target[chunk], total)

    def _fold_wide(self, chunk: slice) -> None:
        sources, ufunc = self._sources, self._op.ufunc
        total = sources[0][chunk].astype(self._accumulator)
        for source in sources[1:]:
            ufunc(total, source[chunk], out=total)
        if self._op is ReduceOp.MEAN:
            np.divide(total, len(sources), out=total)
        first = self._targets[0]
        if total.dtype.kind in "iu" and first.dtype.itemsize < total.itemsize:
            _require_fits(total, first.dtype, self._op)
        np.copyto(first[chunk], total, casting="unsafe")
        for target in self._targets[1:]:
            np.copyto(target[chunk], first[chunk])


@lru_cache(maxsize=64)
def _cut(size: int, length: int) -> tuple[slice, ...]:
    return tuple(slice(start, min(start + length, size)) for start in range(0, size, length))


def _chunks(size: int, length: int) -> list[slice]:
    # Taken from the end, so the list is turned round: memory is walked upwards.
    return list(_cut(size, length)[::-1])


def _require_fits(total: Array, dtype: np.dtype[Any], op: ReduceOp) -> None:
    low, high = total.min(), total.max()
    bounds: Any = np.iinfo(dtype) if dtype.kind in "iu" else np.iinfo(np.int8)
    if low < bounds.min or high > bounds.max:
        raise OverflowError(
            f"{op.name} into out={dtype}: the result reaches from {low} to {high}, {dtype} from {bounds.min} to "
            f"{bounds.max}; leave out= away to get {total.dtype}"
        )
