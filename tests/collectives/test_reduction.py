"""Folding arrays, chunk by chunk."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from collectives.reduce_op import ReduceOp
from collectives.reduction import CHUNK_BYTES, Fold, reduce_arrays

Array = np.ndarray[Any, Any]


def noise(seed: int, length: int = 1000) -> Array:
    return np.random.default_rng(seed).normal(size=length)


def test_reduced_arrays_are_new_and_in_their_shape() -> None:
    arrays = [np.arange(6.0).reshape(2, 3), np.ones((2, 3))]
    result = reduce_arrays(arrays, ReduceOp.SUM)
    np.testing.assert_array_equal(result, arrays[0] + 1)
    assert not any(np.shares_memory(result, array) for array in arrays)
    assert reduce_arrays([np.array(2.0)], ReduceOp.MEAN).shape == ()


def test_one_array_reduces_to_a_copy_of_it() -> None:
    array = np.arange(3.0)
    result = reduce_arrays([array], ReduceOp.PROD)
    np.testing.assert_array_equal(result, array)
    assert not np.shares_memory(result, array)


@pytest.mark.parametrize(
    "other", [np.ones(3), np.ones((2, 1)), np.ones(2, np.float32)], ids=["length", "axes", "dtype"]
)
def test_arrays_that_differ_are_refused_and_listed(other: Array) -> None:
    with pytest.raises(
        ValueError, match=r"reduce: got arrays that differ, replica 0: float64 of shape \(2,\); replica 1: "
    ):
        reduce_arrays([np.ones(2), other], ReduceOp.SUM)


def test_every_chunk_is_folded_once_by_whichever_thread_takes_it() -> None:
    length = 7 * CHUNK_BYTES // 8 + 5
    sources = [noise(seed, length) for seed in range(3)]
    targets = [np.zeros(length) for _ in range(2)]
    fold = Fold(ReduceOp.SUM, sources, targets)
    assert fold.num_chunks == 8
    done: list[int] = []
    threads = [threading.Thread(target=lambda: done.append(fold.run())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sum(done) == 8
    assert fold.run() == 0
    for target in targets:
        assert target.tobytes() == (sources[0] + sources[1] + sources[2]).tobytes()


@pytest.mark.parametrize("position", [0, 1, 2, 3])
@pytest.mark.parametrize("op", list(ReduceOp))
def test_a_target_may_be_any_one_of_the_sources(op: ReduceOp, position: int) -> None:
    sources = [noise(seed) for seed in range(4)]
    expected = sources[0].copy()
    for source in sources[1:]:
        expected = op.ufunc(expected, source)
    if op is ReduceOp.MEAN:
        expected = expected / 4
    Fold(op, sources, [sources[position]]).run()
    np.testing.assert_array_equal(sources[position], expected)


@pytest.mark.parametrize("op", list(ReduceOp))
def test_all_sources_may_be_targets_at_once(op: ReduceOp) -> None:
    sources = [noise(seed) for seed in range(4)]
    expected = reduce_arrays([source.copy() for source in sources], op)
    Fold(op, sources, sources).run()
    for source in sources:
        np.testing.assert_array_equal(source, expected)


def test_a_negative_overflow_and_one_of_unsigned_integers_are_found() -> None:
    with pytest.raises(OverflowError, match="from -200 to -200"):
        Fold(ReduceOp.SUM, [np.array([-100], np.int8)] * 2, [np.zeros(1, np.int8)]).run()
    with pytest.raises(OverflowError, match="uint8 from 0 to 255"):
        Fold(ReduceOp.PROD, [np.array([200], np.uint8)] * 2, [np.zeros(1, np.uint8)]).run()


@pytest.mark.parametrize(
    ("op", "dtype", "accumulator", "result"),
    [
        (ReduceOp.SUM, "b1", "i8", "i8"),
        (ReduceOp.SUM, "i1", "i8", "i8"),
        (ReduceOp.PROD, "u2", "u8", "u8"),
        (ReduceOp.SUM, "i4", "i4", "i4"),
        (ReduceOp.MEAN, "i4", "f8", "f8"),
        (ReduceOp.MEAN, "b1", "f8", "f8"),
        (ReduceOp.MAX, "i1", "i1", "i1"),
        (ReduceOp.MAX, "f2", "f2", "f2"),
        (ReduceOp.SUM, "f2", "f4", "f2"),
        (ReduceOp.MEAN, "f2", "f4", "f2"),
        (ReduceOp.MEAN, "c8", "c8", "c8"),
        (ReduceOp.SUM, "f4", "f4", "f4"),
    ],
)
def test_what_a_reduction_is_computed_in_and_comes_back_as(
    op: ReduceOp, dtype: str, accumulator: str, result: str
) -> None:
    assert op.accumulator_dtype(np.dtype(dtype)) == np.dtype(accumulator)
    assert op.result_dtype(np.dtype(dtype)) == np.dtype(result)
