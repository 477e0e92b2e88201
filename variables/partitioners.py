"""How many shards a variable is cut into, and how long they are.

TensorFlow's three partitioners, and what strategies do with them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

VariablePartitioner = Callable[[tuple[int, ...], np.dtype[Any]], Sequence[int]]
"""Gets a shape and a dtype, and returns the number of shards along every axis: a `Partitioner`, or any function."""


class Partitioner(ABC):
    """Decides on a number of shards by shape and dtype."""

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike, axis: int = 0) -> list[int]:
        """The number of shards along every axis: 1 but for ``axis``, where it is at most the axis' length.

        Args:
            shape: of the variable, at least one axis.
            dtype: of its elements.
            axis: the one to cut along, from the end where negative.

        Raises:
            ValueError: no such axis.
        """
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{type(self).__name__}: got axis {axis} for shape {tuple(shape)}; need one of its {len(shape)} axes"
            )
        counts = [1] * len(shape)
        length = shape[axis]
        if length:
            counts[axis] = min(length, self._count(length, math.prod(shape) // length, np.dtype(dtype)))
        return counts

    @abstractmethod
    def _count(self, length: int, slice_size: int, dtype: np.dtype[Any]) -> int:
        """How many shards, at least 1, for that many slices of that many elements each."""


@final
@dataclass(frozen=True)
class FixedShardsPartitioner(Partitioner):
    """The same number of shards for every variable.

    Called, it gives no more than there are rows, as in TensorFlow. A strategy makes that number all the same, the last
    ones empty, so that every server has its shard of every table.

    Attributes:
        num_shards: that number, at least 1.
    """

    num_shards: int

    def __post_init__(self) -> None:
        _require_positive(self, num_shards=self.num_shards)

    def _count(self, length: int, slice_size: int, dtype: np.dtype[Any]) -> int:  # noqa: ARG002  # fixed
        return self.num_shards


@final
@dataclass(frozen=True)
class MinSizePartitioner(Partitioner):
    """As many shards of about a size as the variable gives, up to a number: ``ceil(bytes / min_shard_bytes)``.

    Rounding up means that shards may be smaller than that size, as in TensorFlow.

    Attributes:
        min_shard_bytes: that size.
        max_shards: that number; 1 means that nothing is cut.
        bytes_per_string: what a string counts as.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _require_positive(
            self,
            min_shard_bytes=self.min_shard_bytes,
            max_shards=self.max_shards,
            bytes_per_string=self.bytes_per_string,
        )

    def _count(self, length: int, slice_size: int, dtype: np.dtype[Any]) -> int:
        num_bytes = length * slice_size * _itemsize(dtype, self.bytes_per_string)
        return min(self.max_shards, max(1, math.ceil(num_bytes / self.min_shard_bytes)))


@final
@dataclass(frozen=True)
class MaxSizePartitioner(Partitioner):
    """As few shards as hold the variable, none larger than a size; a single row may be.

    Attributes:
        max_shard_bytes: that size.
        max_shards: their largest number, at the cost of the size; None for no limit.
        bytes_per_string: what a string counts as.
    """

    max_shard_bytes: int
    max_shards: int | None = None
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _require_positive(self, max_shard_bytes=self.max_shard_bytes, bytes_per_string=self.bytes_per_string)
        if self.max_shards is not None:
            _require_positive(self, max_shards=self.max_shards)

    def _count(self, length: int, slice_size: int, dtype: np.dtype[Any]) -> int:
        slice_bytes = slice_size * _itemsize(dtype, self.bytes_per_string)
        slices_per_shard = max(1, self.max_shard_bytes // slice_bytes) if slice_bytes else length
        count = math.ceil(length / slices_per_shard)
        return count if self.max_shards is None else min(self.max_shards, count)


def num_shards_for(partitioner: VariablePartitioner, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """How many shards a strategy makes of a variable; 1 means a plain one.

    A number, and what has less than two rows, is not cut.

    Raises:
        ValueError: a partitioner that wants to cut along another axis than the first, or gives no number for every axis.
    """
    if not shape or shape[0] < 2:
        return 1
    if isinstance(partitioner, FixedShardsPartitioner):
        return partitioner.num_shards
    counts = list(partitioner(shape, dtype))
    if len(counts) != len(shape) or counts[0] < 1 or any(count != 1 for count in counts[1:]):
        raise ValueError(
            f"partitioner: got {counts} for shape {shape}; need a number of shards >= 1 for the first axis and 1 for each other"
        )
    return int(counts[0])


def shard_sizes(num_rows: int, num_shards: int) -> list[int]:
    """Rows of each shard: they differ by at most one, the larger first."""
    rows, larger = divmod(num_rows, num_shards)
    return [rows + 1] * larger + [rows] * (num_shards - larger)


def _itemsize(dtype: np.dtype[Any], bytes_per_string: int) -> int:
    return bytes_per_string if dtype.kind in "SUTO" else dtype.itemsize


def _require_positive(partitioner: Partitioner, **arguments: Any) -> None:
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(
                f"{type(partitioner).__name__}: got {name}={value!r}; need a whole number of at least 1"
            )
