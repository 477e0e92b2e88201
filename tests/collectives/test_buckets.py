"""Packing arrays into buckets, and reducing them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import Buckets, Communicator, InProcessCommunicator, group_by_size

Array = np.ndarray[Any, Any]
F32: np.dtype[Any] = np.dtype(np.float32)
F64: np.dtype[Any] = np.dtype(np.float64)


def sizes(groups: list[list[Array]]) -> list[list[int]]:
    return [[array.size for array in group] for group in groups]


def test_without_a_size_there_is_one_group_in_the_order_given() -> None:
    assert sizes(group_by_size([np.zeros(n) for n in (1, 2, 3)])) == [[1, 2, 3]]


def test_a_group_is_closed_once_it_holds_more_than_the_size() -> None:
    arrays = [np.zeros(10, F32) for _ in range(6)]  # 40 bytes each
    assert sizes(group_by_size(arrays, 79)) == [[10, 10], [10, 10], [10, 10]]
    assert sizes(group_by_size(arrays, 80)) == [[10, 10, 10], [10, 10, 10]]
    assert sizes(group_by_size(arrays, 1)) == [[10]] * 6


def test_a_group_never_mixes_dtypes() -> None:
    arrays: list[Array] = [np.zeros(1, F32), np.zeros(2, F64), np.zeros(3, F64), np.zeros(4, F32)]
    assert sizes(group_by_size(arrays)) == [[1, 4], [2, 3]]
    assert sizes(group_by_size(arrays, 1000)) == [[4], [3, 2], [1]]


def test_no_arrays_make_no_group() -> None:
    assert group_by_size([]) == []


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes_per_pack: got -1; need bytes >= 0, 0 for no limit"):
        group_by_size([], -1)


def test_views_have_their_shapes_and_lie_in_the_buckets_apart() -> None:
    shapes, dtypes = [(2, 3), (), (4,), (0, 5)], [F32, F32, F64, F32]
    buckets = Buckets(shapes, dtypes)
    views = [buckets.view(index) for index in range(4)]
    assert [view.shape for view in views] == shapes
    assert [view.dtype for view in views] == dtypes
    for index, view in enumerate(views):
        view[...] = index
    for index, view in enumerate(views):
        np.testing.assert_array_equal(view, np.full(shapes[index], index))
        if view.size:
            assert sum(np.shares_memory(view, flat) for flat in buckets.flats) == 1


def test_as_many_dtypes_as_shapes_are_needed() -> None:
    with pytest.raises(ValueError, match="zip"):
        Buckets([(1,), (2,)], [F32])


def test_packing_copies_what_is_not_there_already() -> None:
    buckets = Buckets([(2, 2), (3,)], [F32, F32])
    buckets.view(1)[...] = [7, 8, 9]
    buckets.pack([np.arange(4.0, dtype=F32).reshape(2, 2).T, buckets.view(1)])
    np.testing.assert_array_equal(buckets.view(0), [[0, 2], [1, 3]])
    np.testing.assert_array_equal(buckets.view(1), [7, 8, 9])


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 50, 10_000])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_of_buckets_is_that_of_their_arrays(
    on_threads: Callable[..., list[Any]], size: int, bytes_per_pack: int
) -> None:
    shapes, dtypes = [(3, 2), (7,), (), (5,)], [F32, F32, F32, F64]

    def arrays(rank: int) -> list[Array]:
        return [
            np.full(shape, rank + i, dtype)
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]

    def body(communicator: Communicator) -> None:
        buckets = Buckets(shapes, dtypes, bytes_per_pack)
        buckets.pack(arrays(communicator.rank))
        buckets.all_reduce(communicator, "MEAN")
        for index, shape in enumerate(shapes):
            np.testing.assert_array_equal(buckets.view(index), np.full(shape, index + (size - 1) / 2))

    on_threads(InProcessCommunicator.group(size, 10), body)
