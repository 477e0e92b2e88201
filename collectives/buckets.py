"""Which arrays travel together.

Many small messages cost more than one large one, and one huge one cannot overlap with anything: arrays are packed
into buckets of a chosen size, flat, one dtype each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, final

import numpy as np

from collectives.arrays import Array
from collectives.communicator import Communicator
from collectives.reduce_op import ReduceOp


class _Sized(Protocol):
    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


A = TypeVar("A", bound=_Sized)


def group_by_size(arrays: Sequence[A], bytes_per_pack: int = 0) -> list[list[A]]:
    """Arrays in groups of about that many bytes, as ``tf.distribute`` packs gradients.

    The order is reversed (backpropagation makes the last layer's gradient first), and a group is closed once it
    holds *more* than ``bytes_per_pack``, so groups overshoot. Where TensorFlow mixes dtypes in a group and fails, a
    change of dtype closes the group.

    Args:
        arrays: anything with a dtype and a shape.
        bytes_per_pack: 0 puts all of one dtype into one group, in the order given.

    Raises:
        ValueError: a negative size.
    """
    if bytes_per_pack < 0:
        raise ValueError(f"bytes_per_pack: got {bytes_per_pack}; need bytes >= 0, 0 for no limit")
    if bytes_per_pack == 0:
        by_dtype: dict[np.dtype[Any], list[A]] = {}
        for array in arrays:
            by_dtype.setdefault(array.dtype, []).append(array)
        return list(by_dtype.values())
    groups: list[list[A]] = []
    num_bytes = 0
    for array in reversed(arrays):
        if not groups or num_bytes > bytes_per_pack or groups[-1][0].dtype != array.dtype:
            groups.append([])
            num_bytes = 0
        groups[-1].append(array)
        num_bytes += math.prod(array.shape) * array.dtype.itemsize
    return groups


@final
class Buckets:
    """Flat memory for arrays of given shapes, and the all-reduce over it.

    `view` hands out the places; what is written there needs no packing. ``pack`` copies arrays in otherwise.

    Args:
        shapes: of the arrays, in order.
        dtypes: as many.
        bytes_per_pack: as in `group_by_size`.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]], bytes_per_pack: int = 0
    ) -> None:
        places = [
            _Place(i, tuple(s), np.dtype(d)) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        self._views: list[Array] = [np.empty(0)] * len(places)
        self.flats: list[Array] = []
        for group in group_by_size(places, bytes_per_pack):
            flat = np.zeros(sum(math.prod(place.shape) for place in group), group[0].dtype)
            self.flats.append(flat)
            start = 0
            for place in group:
                stop = start + math.prod(place.shape)
                self._views[place.index] = flat[start:stop].reshape(place.shape)
                start = stop

    def view(self, index: int) -> Array:
        """The place of the array of that number, in the bucket."""
        return self._views[index]

    def pack(self, arrays: Sequence[Array]) -> None:
        """Copy arrays into their places; those that lie there already are left alone."""
        for array, view in zip(arrays, self._views, strict=True):
            if array is not view:
                np.copyto(view, array)

    def all_reduce(self, communicator: Communicator, op: ReduceOp | str = ReduceOp.SUM) -> None:
        """All-reduce every bucket in place. Raises as `Communicator.all_reduce`."""
        communicator.all_reduce_coalesced(self.flats, op, outs=self.flats)


@final
class _Place:
    def __init__(self, index: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.index = index
        self.shape = shape
        self.dtype = dtype
