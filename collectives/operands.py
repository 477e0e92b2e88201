"""What goes into a reduction and where its result goes, as flat memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def all_operands(
    arrays: Sequence[Array], op: ReduceOp, outs: Sequence[Array] | None, memory: RecycledMemory
) -> tuple[tuple[Any, ...], list[Array], list[Array], list[Array]]:
    """What must agree between the ranks, then sources, results and targets, as of `flat_operands`, of several arrays.

    Args:
        arrays: any layouts.
        op: how they are reduced.
        outs: where the results are wanted; None takes new memory.
        memory: which gives that.
    """
    detail: list[Any] = [op]
    sources, results, targets = [], [], []
    for index, array in enumerate(arrays):
        source, result, target = flat_operands(array, op, None if outs is None else outs[index], memory)
        sources.append(source)
        results.append(result)
        targets.append(target)
        detail.append((array.dtype, array.shape))
        if result.dtype != op.result_dtype(array.dtype):
            detail.append(f"into {result.dtype}")
    return tuple(detail), sources, results, targets


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
