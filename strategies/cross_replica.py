"""What is done to the components of distributed values from outside the replicas: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.array_libraries import library_of
from collectives.arrays import Array, as_array, describe, given_back
from collectives.communicator import require_axis_from_start
from collectives.indexed_slices import IndexedSlices, concatenate_slices
from collectives.reduce_op import ReduceOp
from collectives.reduction import reduce_arrays
from variables.central_variable import CentralVariable
from variables.local_variable import LocalVariable
from variables.mirrored_variable import MirroredVariable
from variables.replica_context import require_dense
from variables.sharded_variable import ShardedVariable
from variables.values import DistributedValues, Mirrored, require_components
from variables.variable import Variable

Axis = int | Sequence[int] | None


def components_of(value: Any) -> tuple[Any, ...] | None:
    """The value's components by local replica, or None if it is not distributed."""
    if isinstance(value, DistributedValues):
        return value.values
    if isinstance(value, Variable) and not isinstance(
        value, (LocalVariable, CentralVariable, ShardedVariable)
    ):
        return value.components
    return None


def reduce_leaf(op: ReduceOp, value: Any, axis: Axis, num_replicas: int) -> Any:
    """One array or number out of one leaf's components.

    Raises:
        ValueError: a value that is not distributed, or equal on all replicas, summed over them; shapes that differ.
        TypeError: an axis that is none; a dtype that ``op`` has no meaning for.
    """
    axes = axes_of(axis)
    if isinstance(value, DistributedValues):
        require_components(value, num_replicas, "reduce")
    components = components_of(value)
    if axes is None:
        equal = value.values[0] if isinstance(value, Mirrored) else value
        if components is None or isinstance(value, (Mirrored, MirroredVariable)):
            return reduce_equal(op, equal, num_replicas)
        return reduce_components(op, components)
    if components is None:
        components = (value,) * num_replicas
    total = _reduce_axes(op, [require_dense(component, "reduce") for component in components], axes)
    return _number_or_array(total, components[0])


def reduce_components(op: ReduceOp, components: Sequence[Any]) -> Any:
    """The elementwise reduction of the components: a new array, or a number where they are scalars."""
    if any(isinstance(component, IndexedSlices) for component in components):
        if not all(isinstance(component, IndexedSlices) for component in components):
            raise ValueError(
                "reduce: got IndexedSlices from some replicas, dense arrays from others; need one kind"
            )
        return concatenate_slices(components, op)
    result = reduce_arrays([as_array(component, "reduce") for component in components], op)
    return _number_or_array(result, components[0])


def gather_leaf(value: Any, axis: int) -> Any:
    """The components of one leaf one after the other along an axis; a plain value is itself.

    Raises:
        ValueError: scalars, no such axis, or components whose other axes or dtypes differ.
        NotImplementedError: sparse ones.
    """
    components = components_of(value)
    if components is None:
        array = require_dense(value, "gather")
        require_axis_from_start(array, axis, "gather")
        return value
    arrays = [require_dense(component, "gather") for component in components]
    first = arrays[0]
    for array in arrays:
        require_axis_from_start(array, axis, "gather")
        others = array.shape[:axis] + array.shape[axis + 1 :]
        if others != first.shape[:axis] + first.shape[axis + 1 :] or array.dtype != first.dtype:
            raise ValueError(
                f"gather: got {'; '.join(map(describe, arrays))}; need one dtype and shapes that differ on axis {axis} only"
            )
    return given_back(np.concatenate(arrays, axis=axis), components[0])


def reduce_equal(op: ReduceOp, value: Any, num_replicas: int) -> Any:
    """What one and the same value on all replicas reduces to; summing it is refused."""
    if num_replicas == 1 or op in (ReduceOp.MEAN, ReduceOp.MAX, ReduceOp.MIN):
        return value.read_value() if isinstance(value, Variable) else value
    raise ValueError(
        f"reduce: got {value!r}, which is one and the same on all {num_replicas} replicas, with {op.name}; need a PerReplica, "
        "as strategy.run returns — MEAN gives the value itself"
    )


def axes_of(axis: Axis) -> tuple[int, ...] | None:
    """The axes to reduce in each replica first; None for none."""
    if axis is None:
        return None
    axes = tuple(axis) if isinstance(axis, (list, tuple)) else (axis,)
    if not all(isinstance(a, (int, np.integer)) and not isinstance(a, bool) for a in axes):
        raise TypeError(f"reduce: got axis={axis!r}; need None, an integer or a tuple of integers")
    return tuple(int(a) for a in axes)


def require_axes(arrays: Sequence[Array], axes: Sequence[int]) -> None:
    """Check that arrays have the axes along which they are reduced.

    Raises:
        AxisError: one of NumPy's own.
    """
    for array in arrays:
        for axis in axes:
            if not -array.ndim <= axis < array.ndim:
                raise np.exceptions.AxisError(axis, array.ndim, "reduce")


def count_along(array: Array, axes: Sequence[int]) -> int:
    """How many elements become one by a reduction along these axes."""
    return int(np.prod([array.shape[axis] for axis in axes], dtype=np.int64))


def require_some(op: ReduceOp, array: Array, axes: Sequence[int], count: int) -> None:
    """Refuse the largest or smallest of no elements, which there is none of.

    Args:
        op: MAX or MIN.
        array: one of those that are reduced.
        axes: along which.
        count: elements along them, on all replicas together.

    Raises:
        ValueError: there are none.
    """
    if not count:
        listed = ", ".join(map(str, axes))
        raise ValueError(
            f"reduce: got {describe(array)}, with no elements along axis {listed} on any replica, and {op.name}; need at least one "
            "element — leave out what is empty, or take SUM, which of none is 0"
        )


def _number_or_array(result: Array, given: Any) -> Any:
    """A result in the library of what was given; NumPy's scalars as numbers."""
    return result[()] if result.ndim == 0 and library_of(given) is None else given_back(result, given)


def _reduce_axes(op: ReduceOp, arrays: Sequence[Array], axes: tuple[int, ...]) -> Array:
    require_axes(arrays, axes)
    dtype = arrays[0].dtype
    if any(array.dtype != dtype for array in arrays):
        listed = "; ".join(f"replica {i}: {describe(array)}" for i, array in enumerate(arrays))
        raise ValueError(f"reduce: got arrays that differ, {listed}; need one dtype")
    op.require(dtype, "reduce")
    wide, result_dtype = op.accumulator_dtype(dtype), op.result_dtype(dtype)
    counts = [count_along(array, axes) for array in arrays]
    if op in (ReduceOp.MAX, ReduceOp.MIN):
        require_some(op, arrays[0], axes, sum(counts))
        filled = [array for array, count in zip(arrays, counts, strict=True) if count] or arrays
        parts = [op.ufunc.reduce(array, axis=axes) for array in filled]
    else:
        parts = [op.ufunc.reduce(array, axis=axes, dtype=wide) for array in arrays]
    fold = ReduceOp.SUM if op is ReduceOp.MEAN else op
    total = reduce_arrays([np.asarray(part) for part in parts], fold)
    if op is ReduceOp.MEAN:
        # Elements count, not replicas; of none at all the mean is nan, as everywhere.
        with np.errstate(invalid="ignore", divide="ignore"):
            total = np.asarray(np.true_divide(total, sum(counts)))
    return total.astype(result_dtype, copy=False)
