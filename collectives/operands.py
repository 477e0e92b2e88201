"""What goes into a reduction and where its result goes, as flat memory."""

from __future__ import annotations

import numpy as np

from collectives.arrays import Array
from collectives.recycled_memory import RecycledMemory
from collectives.reduce_op import ReduceOp


def flat_operands(
    array: Array, op: ReduceOp, out: Array | None, memory: RecycledMemory
) -> tuple[Array, Array, Array]:
    """What to fold, the result in its shape, and the flat memory that it is folded into.

    Args:
        array: any layout.
        op: how it is reduced.
        out: where the result is wanted; None takes new memory.
        memory: which gives that.
    """
    if out is array and array.flags.c_contiguous:
        flat = array.reshape(-1)
        return flat, array, flat
    source = np.ascontiguousarray(array).reshape(-1)
    if out is None:
        out = memory.empty(array.shape, op.result_dtype(array.dtype))
    elif np.may_share_memory(source, out) and not _is_same_memory(source, out):
        # Folding goes chunk by chunk, and would read what it has written.
        source = source.copy()
    target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
    return source, out, target.reshape(-1)


def copy_back(target: Array, result: Array) -> None:
    """Bring a result that was folded elsewhere to an ``out`` that is not contiguous."""
    if not result.flags.c_contiguous:
        result[...] = target.reshape(result.shape)


def apart_from(array: Array, out: Array | None) -> Array:
    """The array, or a copy of it where it would be written over while other ranks still read it."""
    return array if out is None or not np.may_share_memory(array, out) else array.copy()


def _is_same_memory(source: Array, out: Array) -> bool:
    """Whether each element of the one, contiguous, lies where that of the other does."""
    start, other = source.__array_interface__["data"][0], out.__array_interface__["data"][0]
    return bool(out.flags.c_contiguous and start == other and source.dtype == out.dtype)
