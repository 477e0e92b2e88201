"""What is done to distributed values from outside the replicas where those are in several processes.

Every process calls it, each with its own replicas' components. A value that is not distributed counts as the component of
a process's only replica, as `run` returns bare values there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.array_libraries import library_of
from collectives.arrays import Array, as_array, given_back
from collectives.calls import Call
from collectives.communicator import require_axis_from_start
from collectives.indexed_slices import IndexedSlices, concatenate_slices
from collectives.link import Link
from collectives.linked import fold_over, gather_over, gather_slices_over
from collectives.reduce_op import ReduceOp
from strategies.cross_replica import (
    Axis,
    axes_of,
    components_of,
    count_along,
    reduce_equal,
    require_axes,
    require_some,
)
from variables.mirrored_variable import MirroredVariable
from variables.replica_context import require_dense
from variables.values import Mirrored

_REDUCE, _GATHER = Call("strategy.reduce"), Call("strategy.gather")


def reduce_linked(link: Link, op: ReduceOp, value: Any, axis: Axis) -> Any:
    """One array or number out of one leaf's components in all processes. Errors as of `reduce_leaf`."""
    axes = axes_of(axis)
    if axes is None and isinstance(value, (Mirrored, MirroredVariable)):
        return reduce_equal(op, value.values[0] if isinstance(value, Mirrored) else value, link.size)
    components = _own_components(link, value, "reduce")
    if axes is None and any(isinstance(component, IndexedSlices) for component in components):
        if not all(isinstance(component, IndexedSlices) for component in components):
            raise ValueError(
                "reduce: got IndexedSlices from some replicas, dense arrays from others; need one kind"
            )
        return concatenate_slices(gather_slices_over(link, _REDUCE, components), op)
    if axes is None:
        arrays = [as_array(component, "reduce") for component in components]
        _require_one_kind(arrays)
        op.require(arrays[0].dtype, "reduce")
        total = fold_over(
            link, _REDUCE, op, arrays, np.empty(arrays[0].shape, op.result_dtype(arrays[0].dtype))
        )
    else:
        total = _reduce_axes(link, op, [require_dense(c, "reduce") for c in components], axes)
    given = components[0]
    return total[()] if total.ndim == 0 and library_of(given) is None else given_back(total, given)


def gather_linked(link: Link, value: Any, axis: int) -> Any:
    """All processes' components of one leaf one after the other along an axis. Errors as of `gather_leaf`."""
    components = _own_components(link, value, "gather")
    arrays = [require_dense(component, "gather") for component in components]
    for array in arrays:
        require_axis_from_start(array, axis, "gather")
    call = Call(_GATHER.kind, (f"axis {axis}",))
    joined = gather_over(link, call, [np.moveaxis(array, axis, 0) for array in arrays])
    return given_back(
        np.concatenate([np.moveaxis(part, 0, axis) for part in joined], axis=axis), components[0]
    )


def _reduce_axes(link: Link, op: ReduceOp, arrays: Sequence[Array], axes: tuple[int, ...]) -> Array:
    require_axes(arrays, axes)
    dtype = arrays[0].dtype
    op.require(dtype, "reduce")
    wide, result_dtype = op.accumulator_dtype(dtype), op.result_dtype(dtype)
    counts = [count_along(array, axes) for array in arrays]
    told: list[Any] = link.gather_objects(Call(_REDUCE.kind, (op, f"of {dtype} along axes {axes}")), counts)
    total_count = sum(told)
    if op in (ReduceOp.MAX, ReduceOp.MIN):
        require_some(op, arrays[0], axes, total_count)
        # What is empty must not count, and has no maximum: the other end of the dtype's range stands for it.
        parts = [
            op.ufunc.reduce(array, axis=axes) if count or not total_count else _neutral(op, array, axes)
            for array, count in zip(arrays, counts, strict=True)
        ]
    else:
        parts = [op.ufunc.reduce(array, axis=axes, dtype=wide) for array in arrays]
    fold = ReduceOp.SUM if op is ReduceOp.MEAN else op
    partial = [np.asarray(part) for part in parts]
    result = np.empty(partial[0].shape, fold.result_dtype(partial[0].dtype))
    total = fold_over(link, _REDUCE, fold, partial, result)
    if op is ReduceOp.MEAN:
        with np.errstate(invalid="ignore", divide="ignore"):
            total = np.asarray(np.true_divide(total, total_count))
    return total.astype(result_dtype, copy=False)


def _neutral(op: ReduceOp, array: Array, axes: tuple[int, ...]) -> Array:
    kept = [n for a, n in enumerate(array.shape) if a not in {axis % array.ndim for axis in axes}]
    dtype = array.dtype
    if dtype.kind == "b":
        worst: Any = op is ReduceOp.MIN
    elif dtype.kind in "iu":
        worst = np.iinfo(dtype).min if op is ReduceOp.MAX else np.iinfo(dtype).max
    else:
        worst = -np.inf if op is ReduceOp.MAX else np.inf
    return np.full(kept, worst, dtype)


def _own_components(link: Link, value: Any, where: str) -> Sequence[Any]:
    components = components_of(value)
    num_local = link.counts[link.process]
    if components is None:
        if num_local > 1:
            raise ValueError(
                f"{where}: got {type(value).__name__}, one value for this process's {num_local} replicas; need a PerReplica — run gives "
                "one and the same object as itself if all replicas return it: return an array of each, such as np.array(...)"
            )
        return (value,)
    if len(components) != num_local:
        raise ValueError(
            f"{where}: got a value with {len(components)} components; need one for each of this process's {num_local} replicas"
        )
    return components


def _require_one_kind(arrays: Sequence[Array]) -> None:
    first = arrays[0]
    for number, array in enumerate(arrays):
        if array.shape != first.shape or array.dtype != first.dtype:
            raise ValueError(
                f"reduce: got {first.dtype} of shape {first.shape} from local replica 0, {array.dtype} of shape {array.shape} "
                f"from {number}; need one shape and dtype"
            )
