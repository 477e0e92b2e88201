"""Sparse arrays: some rows of a larger one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import Communicator, IndexedSlices, InProcessCommunicator, ReduceOp, to_dense
from collectives.indexed_slices import all_reduce_slices, concatenate_slices, require_rows


def test_values_and_indices_are_kept_without_a_copy() -> None:
    values, indices = np.ones((2, 3)), np.array([4, 0])
    slices = IndexedSlices(values, indices, (5, 3))
    assert slices.values is values
    assert slices.indices is indices
    assert slices.dtype == np.float64
    assert slices.dense_shape is not None
    assert tuple(slices.dense_shape) == (5, 3)


def test_lists_will_do_and_no_rows_too() -> None:
    assert IndexedSlices([[1.0]], [3]).indices.tolist() == [3]
    empty = IndexedSlices(np.empty((0, 2)), [])
    assert empty.indices.dtype == np.int64
    assert to_dense(IndexedSlices(np.empty((0, 2)), [], (3, 2))).tolist() == [[0, 0]] * 3


@pytest.mark.parametrize(
    ("values", "indices", "shape", "words"),
    [
        (np.ones((2, 3)), [0], None, "need as many indices as rows of values"),
        (np.ones(()), [0], None, "need as many indices as rows of values"),
        (np.ones((1, 3)), [[0]], None, "need as many indices as rows of values"),
        (np.ones((1, 3)), [0], (5, 2), r"got dense_shape \(5, 2\) for values float64 of shape \(1, 3\)"),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused(
    values: Any, indices: Any, shape: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        IndexedSlices(values, indices, shape)


def test_indices_are_integers() -> None:
    with pytest.raises(TypeError, match="IndexedSlices: got indices float64 of shape"):
        IndexedSlices(np.ones(1), [0.0])


def test_to_dense_adds_up_rows_that_come_more_than_once() -> None:
    slices = IndexedSlices([[1.0, 2], [10, 20], [100, 200]], [2, 0, 2], (4, 2))
    np.testing.assert_array_equal(to_dense(slices), [[10, 20], [0, 0], [101, 202], [0, 0]])


def test_to_dense_of_a_dense_array_is_itself() -> None:
    array = np.ones(3)
    assert to_dense(array) is array


def test_to_dense_needs_to_know_the_shape_and_rows_inside_it() -> None:
    with pytest.raises(ValueError, match="need a dense_shape"):
        to_dense(IndexedSlices(np.ones(1), [0]))
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"to_dense: got index {index}; need one from 0 to 2"):
            to_dense(IndexedSlices(np.ones(1), [index], (3,)))


def test_rows_are_checked_also_for_unsigned_indices() -> None:
    require_rows(np.array([0, 2], np.uint8), 3, "x")
    require_rows(np.array([], np.int64), 0, "x")
    with pytest.raises(IndexError, match="x: got index 3; need one from 0 to 2"):
        require_rows(np.array([1, 3], np.uint8), 3, "x")


def test_merged_has_every_index_once_in_order() -> None:
    merged = IndexedSlices([1.0, 2, 4, 8], [5, 1, 5, 0], (9,)).merged()
    assert merged.indices.tolist() == [0, 1, 5]
    assert merged.values.tolist() == [8, 2, 5]
    assert merged.dense_shape is not None
    assert tuple(merged.dense_shape) == (9,)


def test_merged_sorts_where_nothing_comes_twice() -> None:
    merged = IndexedSlices([[1.0], [2], [4]], [5, 1, 3]).merged()
    assert merged.indices.tolist() == [1, 3, 5]
    assert merged.values.tolist() == [[2], [4], [1]]


def test_merging_changes_nothing_of_the_dense_array() -> None:
    random = np.random.default_rng(0)
    slices = IndexedSlices(random.integers(0, 9, (50, 2)), random.integers(0, 10, 50), (10, 2))
    np.testing.assert_array_equal(to_dense(slices.merged()), to_dense(slices))


def test_its_words_tell_rows_and_shape() -> None:
    assert repr(IndexedSlices(np.ones((1, 2)), [3], (4, 2))) == (
        "IndexedSlices(float64 of shape (1, 2), indices=[3], dense_shape=(4, 2))"
    )


# -------------------------------------------------------------------------------------- reductions


def of_rank(rank: int) -> IndexedSlices:
    """As many rows as the rank's number, all for row 1 and on."""
    return IndexedSlices(np.full((rank, 2), rank + 1.0), np.arange(rank) + 1, (9, 2))


def test_the_sum_is_all_rows_one_after_the_other() -> None:
    total = concatenate_slices([of_rank(2), of_rank(1)], ReduceOp.SUM)
    assert total.indices.tolist() == [1, 2, 1]
    assert total.values.tolist() == [[3, 3], [3, 3], [2, 2]]


def test_the_mean_divides_by_the_number_of_parts_not_of_rows() -> None:
    mean = concatenate_slices([of_rank(2), of_rank(1)], ReduceOp.MEAN)
    assert mean.values.tolist() == [[1.5, 1.5], [1.5, 1.5], [1, 1]]
    half = concatenate_slices([IndexedSlices(np.ones((1, 1), np.float32), [0])] * 2, ReduceOp.MEAN)
    assert half.values.dtype == np.float32


@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PROD])
def test_other_reductions_of_sparse_arrays_have_no_meaning(op: ReduceOp) -> None:
    with pytest.raises(
        TypeError, match=f"reduce: {op.name} of IndexedSlices has no meaning; need SUM or MEAN"
    ):
        concatenate_slices([of_rank(1)], op)


@pytest.mark.parametrize(
    "other",
    [IndexedSlices(np.ones((1, 3)), [0]), IndexedSlices(np.ones((1, 2), np.float32), [0])],
    ids=["rows", "dtype"],
)
def test_parts_that_differ_are_refused(other: IndexedSlices) -> None:
    with pytest.raises(ValueError, match="reduce: got slices that differ: float64 of shape"):
        concatenate_slices([of_rank(1), other], ReduceOp.SUM)


@pytest.mark.parametrize("size", range(1, 9))
def test_all_reduce_gives_every_rank_the_same_rows(on_threads: Callable[..., list[Any]], size: int) -> None:
    dense = sum(to_dense(of_rank(rank)) for rank in range(size))

    def body(communicator: Communicator) -> None:
        total = all_reduce_slices(communicator, of_rank(communicator.rank), ReduceOp.SUM)
        assert len(total.indices) == size * (size - 1) // 2
        np.testing.assert_array_equal(to_dense(total), dense)
        mean = all_reduce_slices(communicator, of_rank(communicator.rank), ReduceOp.MEAN)
        np.testing.assert_allclose(to_dense(mean), dense / size)

    on_threads(InProcessCommunicator.group(size, 10), body)
