"""Rows of the same index as one, against a loop."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.indexed_slices import IndexedSlices
from collectives.row_merging import merge_rows

Array = np.ndarray[Any, Any]


def by_loop(values: Array, indices: Array) -> tuple[Array, Array]:
    different = np.unique(indices)
    sums = np.zeros((len(different), *values.shape[1:]), values.dtype)
    for row, index in zip(values, indices, strict=True):
        place = np.searchsorted(different, index)
        sums[place] = sums[place] + row
    return sums, different


@pytest.mark.parametrize("width", [(), (1,), (2,), (7,), (3, 5), (0,)], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 50, 3000])
@pytest.mark.parametrize("num_different", [1, 3, 200, 10**6])
def test_rows_are_added_in_the_order_they_had(
    num_rows: int, num_different: int, width: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(num_rows)
    indices = rng.integers(0, num_different, num_rows)
    values = rng.normal(size=(num_rows, *width)).astype(np.float32)
    before = values.copy()
    merged, different = merge_rows(values, indices)
    sums, expected = by_loop(values, indices)
    np.testing.assert_array_equal(different, expected)
    assert merged.dtype == np.float32
    assert merged.shape == sums.shape
    assert merged.tobytes() == sums.tobytes()
    np.testing.assert_array_equal(values, before)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_indices_keep_their_dtype_however_large_they_are(dtype: Any) -> None:
    largest = np.iinfo(dtype).max
    indices = np.array([largest, 0, 3, largest, 3, 3], dtype)
    merged, different = merge_rows(np.array([1.0, 2, 4, 8, 16, 32]), indices)
    assert different.dtype == dtype
    assert different.tolist() == [0, 3, largest]
    assert merged.tolist() == [2, 52, 9]


def test_negative_indices_are_indices_too() -> None:
    merged, different = merge_rows(np.array([1.0, 2, 4]), np.array([3, -5, 3]))
    assert (different.tolist(), merged.tolist()) == ([-5, 3], [2, 5])


@pytest.mark.parametrize("num_rows", [10, 1000])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("width", [1, 3])
def test_half_precision_is_added_in_float32(dtype: Any, num_rows: int, width: int) -> None:
    values = np.full((num_rows, width), 1.0, dtype)
    values[0] = 4096 if dtype is np.float16 else 512  # so large that adding ones one by one would be lost
    merged, _ = merge_rows(values, np.full(num_rows, 7))
    assert merged.dtype == dtype
    expected = np.full((1, width), float(values[0, 0]) + num_rows - 1).astype(dtype)
    np.testing.assert_array_equal(merged.astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.complex64, np.int8, np.bool_])
def test_any_dtype_is_added_in_its_own(dtype: Any) -> None:
    values = np.array([[1, 1], [0, 1], [1, 0], [1, 1]]).astype(dtype)
    merged, _ = merge_rows(values, np.array([2, 0, 2, 2]))
    expected = np.zeros((2, 2), dtype)
    np.add.at(expected, [1, 0, 1, 1], values)
    assert merged.dtype == dtype
    np.testing.assert_array_equal(merged, expected)


def test_rows_larger_than_the_cache_are_added_one_by_one() -> None:
    values = np.random.default_rng(0).normal(size=(40, 1 << 15))
    indices = np.array([0] * 20 + [1] * 2 + [2] + [0] * 17)
    merged, _ = merge_rows(values, indices)
    assert merged.tobytes() == by_loop(values, indices)[0].tobytes()


def test_rows_in_any_layout_are_merged() -> None:
    values = np.random.default_rng(0).normal(size=(6, 50, 4)).transpose(1, 2, 0)[::2]
    indices = np.random.default_rng(1).integers(0, 4, 25)
    merged, _ = merge_rows(values, indices)
    np.testing.assert_array_equal(merged, by_loop(values, indices)[0])


def test_what_is_merged_already_is_itself() -> None:
    slices = IndexedSlices(np.ones((3, 2)), [1, 4, 5], (9, 2))
    assert slices.merged() is slices
