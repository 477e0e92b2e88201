"""When a variable's copies are brought together, and how."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from collectives.arrays import Array, as_array, is_host
from collectives.calls import Call
from collectives.indexed_slices import IndexedSlices, concatenate_slices
from collectives.link import Link
from collectives.linked import broadcast_over, fold_over, gather_slices_over
from collectives.reduce_op import ReduceOp
from collectives.reduction import Fold


class VariableSynchronization(Enum):
    """When the copies of a variable are brought together."""

    AUTO = 0
    """As the strategy thinks best: ON_WRITE."""
    NONE = 1
    """Never. No strategy accepts it."""
    ON_WRITE = 2
    """With every write, so that the copies are always equal."""
    ON_READ = 3
    """When read from outside the replicas; each replica writes to its own copy."""


class VariableAggregation(Enum):
    """How the replicas' values become one."""

    NONE = 0
    """They don't: a write in a replica, or a read across replicas, is an error."""
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
    """The value of replica 0 stands for all."""


_READ = Call("read")

_OPS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}


def aggregate(
    values: Sequence[Array], aggregation: VariableAggregation, link: Link | None = None, call: Call = _READ
) -> Array:
    """One value out of the replicas' values, in their shape and dtype.

    Args:
        values: of the replicas of this process.
        aggregation: how they become one.
        link: to the other processes, if there are any: all of them call it.
        call: what is called, for messages.

    Raises:
        OverflowError: an integer sum that its dtype does not hold.
    """
    op = _OPS.get(aggregation)
    if link is not None:
        if op is None:
            return broadcast_over(link, call, values[0])
        return fold_over(link, call, op, values, np.empty(values[0].shape, values[0].dtype))
    if op is None:
        return values[0]
    if not is_host(values[0]):
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total / len(values) if op is ReduceOp.MEAN else total
    result = np.empty(values[0].shape, values[0].dtype)
    Fold(op, [np.ascontiguousarray(value).reshape(-1) for value in values], [result.reshape(-1)]).run()
    return result


def aggregate_slices(
    values: Sequence[IndexedSlices],
    aggregation: VariableAggregation,
    link: Link | None = None,
    call: Call = _READ,
) -> IndexedSlices:
    """As `aggregate`, of sparse values: their rows one after the other."""
    op = _OPS.get(aggregation)
    if link is not None:
        values = gather_slices_over(link, call, values)
    return values[0] if op is None else concatenate_slices(values, op)


def cast(value: Any, dtype: np.dtype[Any], where: str) -> Array:
    """The value as an array of this dtype, without a copy where it is one.

    Raises:
        TypeError: no numbers, or the cast would lose more than precision, as floats to integers do.
        OverflowError: a Python integer that the dtype does not hold.
    """
    array = as_array(value, where)
    if array.dtype == dtype:
        return array
    # A Python number has no dtype of its own that could be wrong: what counts is whether it is kept.
    if isinstance(value, (bool, int, float, complex)) and dtype.kind in "biu":
        with np.errstate(invalid="ignore"):
            kept = array.astype(dtype)
        if kept == array:
            return kept
        if isinstance(value, int):
            raise OverflowError(
                f"{where}: got {value}; need what {dtype} holds — or a variable of a wider dtype"
            )
        raise TypeError(f"{where}: got {value}; need a whole number for {dtype} — round it")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(
            f"{where}: got {array.dtype}; need what casts to {dtype} safely — convert it with astype({dtype})"
        )
    return array.astype(dtype)
