"""Sparse gradients: some rows of an array, by their indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from collectives.arrays import Array, as_array, describe
from collectives.communicator import Communicator
from collectives.reduce_op import ReduceOp
from collectives.row_merging import merge_rows


@final
class IndexedSlices:
    """Rows of a larger array. An index may come more than once: its rows add up.

    Args:
        values: shape ``(num_rows, ...)``.
        indices: shape ``(num_rows,)``, integers.
        dense_shape: the shape of the whole array, where it is known.

    Raises:
        ValueError: shapes that do not fit together.
        TypeError: indices that are no integers.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | Array | None = None) -> None:
        self.values = as_array(values, "IndexedSlices: values")
        indices = as_array(indices, "IndexedSlices: indices")
        if indices.size == 0 and indices.dtype.kind == "f":
            indices = indices.astype(np.int64)  # NumPy makes floats of an empty list
        self.indices = indices
        self.dense_shape = None if dense_shape is None else np.asarray(dense_shape)
        if self.indices.dtype.kind not in "iu":
            raise TypeError(f"IndexedSlices: got indices {describe(self.indices)}; need integers")
        if self.indices.ndim != 1 or self.values.ndim == 0 or len(self.indices) != len(self.values):
            raise ValueError(
                f"IndexedSlices: got values {describe(self.values)} and indices {describe(self.indices)}; "
                "need as many indices as rows of values"
            )
        if self.dense_shape is not None and tuple(self.dense_shape[1:]) != self.values.shape[1:]:
            raise ValueError(
                f"IndexedSlices: got dense_shape {tuple(self.dense_shape.tolist())} for values {describe(self.values)}; "
                "need the same axes after the first"
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    def merged(self) -> IndexedSlices:
        """The same with every index once, in ascending order, and its rows summed in the order they had; itself if it is so."""
        indices = self.indices
        if len(indices) < 2 or bool((indices[1:] > indices[:-1]).all()):
            return self
        values, indices = merge_rows(self.values, indices)
        return IndexedSlices(values, indices, self.dense_shape)

    def __repr__(self) -> str:
        shape = None if self.dense_shape is None else tuple(int(n) for n in self.dense_shape)
        return f"IndexedSlices({describe(self.values)}, indices={self.indices.tolist()}, dense_shape={shape})"


def to_dense(slices: IndexedSlices | Array) -> Array:
    """The whole array, zero where there is no row; a dense array is itself.

    Raises:
        ValueError: no dense_shape; an index outside of it.
    """
    if not isinstance(slices, IndexedSlices):
        return slices
    if slices.dense_shape is None:
        raise ValueError(
            f"to_dense: got {slices}; need a dense_shape — IndexedSlices(values, indices, dense_shape)"
        )
    dense = np.zeros(tuple(slices.dense_shape), slices.values.dtype)
    require_rows(slices.indices, len(dense), "to_dense")
    slices = slices.merged()
    dense[slices.indices] = slices.values
    return dense


def require_rows(indices: Array, num_rows: int, where: str) -> None:
    """Refuse indices that are no rows; NumPy would count negative ones from the end.

    Raises:
        IndexError: some index is negative or too large.
    """
    if len(indices) and not (indices.min() >= 0 and indices.max() < num_rows):
        wrong = indices[(indices < 0) | (indices >= num_rows)]
        raise IndexError(f"{where}: got index {wrong[0]}; need one from 0 to {num_rows - 1}")


def concatenate_slices(parts: Sequence[IndexedSlices], op: ReduceOp) -> IndexedSlices:
    """The reduction of sparse arrays: all rows one after the other, by rank; nothing is merged.

    Args:
        parts: one for each rank, of one dtype and row shape; their numbers of rows may differ.
        op: SUM, or MEAN, which divides the values by the number of parts.

    Raises:
        TypeError: another reduction.
        ValueError: dtypes or row shapes that differ.
    """
    _require_sparse(op)
    kinds = {(part.values.dtype, part.values.shape[1:]) for part in parts}
    if len(kinds) > 1:
        raise ValueError(
            f"reduce: got slices that differ: {'; '.join(describe(part.values) for part in parts)}; "
            "need one dtype and the same axes after the first"
        )
    values = np.concatenate([part.values for part in parts])
    indices = np.concatenate([part.indices for part in parts])
    return IndexedSlices(_averaged(values, op, len(parts)), indices, parts[0].dense_shape)


def all_reduce_slices(communicator: Communicator, slices: IndexedSlices, op: ReduceOp) -> IndexedSlices:
    """`concatenate_slices` of all ranks' slices, on every rank. Raises as it does, and as `Communicator`."""
    _require_sparse(op)
    values = communicator.all_gather(slices.values)
    indices = communicator.all_gather(slices.indices)
    return IndexedSlices(_averaged(values, op, communicator.world_size), indices, slices.dense_shape)


def _averaged(values: Array, op: ReduceOp, num_parts: int) -> Array:
    if op is not ReduceOp.MEAN:
        return values
    return np.divide(values, num_parts).astype(op.result_dtype(values.dtype), copy=False)


def _require_sparse(op: ReduceOp) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise TypeError(
            f"reduce: {op.name} of IndexedSlices has no meaning; need SUM or MEAN — to_dense them first"
        )
