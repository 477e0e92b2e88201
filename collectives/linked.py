"""Reducing and gathering values that a process holds for its members, by way of its link: pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from collectives.indexed_slices import IndexedSlices
from collectives.link import Link
from collectives.reduce_op import ReduceOp


def fold_over(link: Link, call: Call, op: ReduceOp, arrays: Sequence[Array], result: Array) -> Array:
    """Reduce arrays of one shape and dtype over all members.

    Args:
        link: to the other processes.
        call: what is called; it is told apart by dtype and shape too.
        op: how to reduce.
        arrays: of this process's members.
        result: where it goes, contiguous.

    Returns:
        ``result``.
    """
    first = arrays[0]
    call = Call(call.kind, (*call.detail, op, (first.dtype, first.shape)), call.name)
    sources = [[np.ascontiguousarray(array).reshape(-1)] for array in arrays]
    link.fold(call, op, sources, [[result.reshape(-1)]])
    return result


def broadcast_over(link: Link, call: Call, array: Array, root: int = 0) -> Array:
    """One member's array, of the same shape and dtype on all: a new array.

    Args:
        link: to the other processes.
        call: what is called.
        array: in the process that hosts ``root`` that member's, elsewhere any of the kind.
        root: the member.
    """
    call = Call(call.kind, (*call.detail, (array.dtype, array.shape), f"root {root}"), call.name)
    result = np.empty(array.shape, array.dtype)
    is_here = link.process_of(root) == link.process
    source = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if is_here else None
    link.broadcast(call, root, source, [result.reshape(-1).view(np.uint8)])
    return result


def gather_over(link: Link, call: Call, arrays: Sequence[Array]) -> list[Array]:
    """All members' arrays, by member: new arrays. They agree in dtype and in all axes but the first.

    Args:
        link: to the other processes.
        call: what is called.
        arrays: of this process's members, at least one axis.
    """
    first = arrays[0]
    rows = first.shape[1:]
    call = Call(call.kind, (*call.detail, (first.dtype, (-1, *rows))), call.name)
    row_bytes = math.prod(rows) * first.dtype.itemsize
    if not row_bytes:  # only their owner can tell how many there are
        lengths = link.gather_objects(call, [len(array) for array in arrays])
        return [np.empty((length, *rows), first.dtype) for length in lengths]
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    return link.all_gather(
        call, flat, lambda blobs: [blob.view(first.dtype).reshape(-1, *rows).copy() for blob in blobs]
    )


def gather_slices_over(link: Link, call: Call, parts: Sequence[IndexedSlices]) -> list[IndexedSlices]:
    """All members' sparse arrays, by member.

    Args:
        link: to the other processes.
        call: what is called.
        parts: of this process's members, of one dtype and row shape.
    """
    values = gather_over(link, Call(f"{call.kind} values", call.detail, call.name), [p.values for p in parts])
    indices = [np.asarray(part.indices, np.int64) for part in parts]
    all_indices = gather_over(link, Call(f"{call.kind} indices", call.detail, call.name), indices)
    return [
        IndexedSlices(rows, numbers.astype(parts[0].indices.dtype, copy=False), parts[0].dense_shape)
        for rows, numbers in zip(values, all_indices, strict=True)
    ]
