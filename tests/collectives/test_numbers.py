"""Every dtype, reduction and memory layout, on one to eight ranks, against plain NumPy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives import CollectiveAbortedError, Communicator, InProcessCommunicator

Array = np.ndarray[Any, Any]
OnRanks = Callable[[Callable[[Communicator], Any]], list[Any]]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
FLOATS = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
COMPLEX = [np.dtype(np.complex64), np.dtype(np.complex128)]
DTYPES = [np.dtype(bool), *INTEGERS, *FLOATS, *COMPLEX]
FOLDS: dict[str, Callable[..., Array]] = {
    "SUM": np.sum,
    "MEAN": np.mean,
    "PROD": np.prod,
    "MAX": np.max,
    "MIN": np.min,
}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def as_numpy(arrays: list[Array], op: str) -> Array:
    """What NumPy gives for the stacked arrays, in the dtype that the documentation promises."""
    dtype = arrays[0].dtype
    stacked = np.stack(arrays)
    if dtype in (np.float16, BFLOAT16):
        return FOLDS[op](stacked.astype(np.float32), axis=0).astype(dtype)
    if op in ("MAX", "MIN"):
        return FOLDS[op](stacked, axis=0)
    if dtype.kind in "iu" and dtype.itemsize >= 4 and op != "MEAN":
        return FOLDS[op](stacked, axis=0, dtype=dtype)
    return np.asarray(FOLDS[op](stacked, axis=0))


def values(dtype: np.dtype[Any], rank: int, shape: tuple[int, ...]) -> Array:
    """Small whole numbers, so that every order of adding and multiplying gives the same."""
    random = np.random.default_rng([rank, len(shape)])
    whole = random.integers(0 if dtype.kind in "bu" else -3, 2 if dtype.kind == "b" else 4, shape)
    if dtype.kind == "c":
        return np.asarray(whole + 1j * random.integers(-2, 3, shape)).astype(dtype)
    return np.asarray(whole).astype(dtype)


def read_only(array: Array) -> Array:
    array = array.copy()
    array.flags.writeable = False
    return array


def unaligned(array: Array) -> Array:
    raw = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    raw[...] = array
    return raw


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "C": np.ascontiguousarray,
    "Fortran": np.asfortranarray,
    "strided": lambda a: np.repeat(np.repeat(a, 2, 0), 3, 1)[::2, ::3],
    "reversed": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "transposed": lambda a: a.T.copy().T,
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "read_only": read_only,
    "unaligned": unaligned,
}


@every_dtype
@pytest.mark.parametrize("op", FOLDS)
def test_a_reduction_is_numpys_in_every_memory_layout(
    on_ranks: OnRanks, dtype: np.dtype[Any], op: str
) -> None:
    if dtype.kind == "c" and op in ("MAX", "MIN"):
        return  # refused, as test_communicators tests

    def body(communicator: Communicator) -> list[bytes]:
        size, rank = communicator.world_size, communicator.rank
        results = []
        for layout in LAYOUTS.values():
            arrays = [layout(values(dtype, r, (3, 5))) for r in range(size)]
            result = communicator.all_reduce(arrays[rank], op)
            expected = as_numpy(arrays, op)
            assert result.dtype == expected.dtype
            assert result.flags.c_contiguous
            assert result.flags.writeable
            if op == "MEAN":
                np.testing.assert_allclose(
                    result.astype(np.complex128), expected.astype(np.complex128), rtol=1e-6
                )
            else:
                np.testing.assert_array_equal(result, expected)
            np.testing.assert_array_equal(arrays[rank], layout(values(dtype, rank, (3, 5))))
            results.append(result.tobytes())
        return results

    results = on_ranks(body)
    assert all(result == results[0] for result in results), "the ranks' results differ"


@every_dtype
def test_scalars_and_empty_arrays_keep_their_shape(on_ranks: OnRanks, dtype: np.dtype[Any]) -> None:
    def body(communicator: Communicator) -> None:
        size = communicator.world_size
        for shape in ((), (0,), (3, 0, 2), (1,), (1, 1, 1, 1)):
            for op in ("SUM", "MEAN", "PROD"):
                expected = as_numpy([values(dtype, r, shape) for r in range(size)], op)
                result = communicator.all_reduce(values(dtype, communicator.rank, shape), op)
                assert isinstance(result, np.ndarray)
                assert result.shape == shape
                assert result.dtype == expected.dtype
                np.testing.assert_allclose(
                    result.astype(np.complex128), expected.astype(np.complex128), rtol=1e-2
                )

    on_ranks(body)


@every_dtype
def test_out_may_have_any_memory_layout(on_ranks: OnRanks, dtype: np.dtype[Any]) -> None:
    def body(communicator: Communicator) -> None:
        size, rank = communicator.world_size, communicator.rank
        expected = as_numpy([values(dtype, r, (4, 6)) for r in range(size)], "SUM")
        outs = [
            np.zeros((4, 6), expected.dtype),
            np.zeros((6, 4), expected.dtype).T,
            np.zeros((8, 6), expected.dtype)[::2],
            np.zeros((4, 6), expected.dtype)[::-1, ::-1],
            unaligned(np.zeros((4, 6), expected.dtype)),
        ]
        for out in outs:
            assert communicator.all_reduce(values(dtype, rank, (4, 6)), out=out) is out
            np.testing.assert_array_equal(out, expected)

    on_ranks(body)


@every_dtype
def test_arrays_that_are_not_contiguous_are_reduced_in_place(on_ranks: OnRanks, dtype: np.dtype[Any]) -> None:
    if dtype.kind == "b":
        return  # the sum of booleans has another dtype

    def body(communicator: Communicator) -> None:
        size, rank = communicator.world_size, communicator.rank
        expected = as_numpy([values(dtype, r, (4, 6)) for r in range(size)], "SUM")
        for layout in (np.asfortranarray, LAYOUTS["strided"], LAYOUTS["reversed"], unaligned):
            array = layout(values(dtype, rank, (4, 6)))
            assert communicator.all_reduce(array, out=array) is array
            np.testing.assert_array_equal(array, expected)

    on_ranks(body)


# ---------------------------------------------------------------------------------- to the last bit


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
@pytest.mark.parametrize("op", ["SUM", "MEAN", "PROD"])
def test_floats_are_folded_in_the_order_of_the_ranks(
    on_ranks: OnRanks, dtype: np.dtype[Any], op: str
) -> None:
    narrow = dtype in (np.float16, BFLOAT16)
    accumulator = np.dtype(np.float32) if narrow else dtype

    def body(communicator: Communicator) -> bytes:
        size = communicator.world_size
        noise = [np.random.default_rng(r).normal(1, 0.5, 999).astype(dtype) for r in range(size)]
        total = noise[0].astype(accumulator)
        for other in noise[1:]:
            total = total * other.astype(accumulator) if op == "PROD" else total + other.astype(accumulator)
        if op == "MEAN":
            total = total / accumulator.type(size)
        result = communicator.all_reduce(noise[communicator.rank], op)
        assert result.tobytes() == total.astype(dtype).tobytes()
        return result.tobytes()

    assert len(set(on_ranks(body))) == 1


def test_results_are_the_same_to_the_last_bit_whoever_comes_last(on_ranks: OnRanks) -> None:
    def body(communicator: Communicator) -> set[bytes]:
        noise = np.random.default_rng(communicator.rank).normal(size=257).astype(np.float32)
        seen = set()
        for turn in range(4 * communicator.world_size):
            if turn % communicator.world_size == communicator.rank:
                threading.Event().wait(0.0005)
            seen.add(communicator.all_reduce(noise, "MEAN").tobytes())
        return seen

    assert len(set.union(*on_ranks(body))) == 1


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int8)], ids=str)
def test_sharing_the_work_changes_no_bit(
    on_threads: Callable[..., list[Any]], size: int, dtype: np.dtype[Any]
) -> None:
    # Above 4 MB in all the ranks share the work; the odd length leaves a short last chunk.
    length = (5 << 20) // size // dtype.itemsize + 13
    noise = [(100 * np.random.default_rng(r).random(length)).astype(dtype) for r in range(size)]

    def body(communicator: Communicator) -> tuple[Array, Array, Array, Array | None]:
        mine = noise[communicator.rank]
        in_place = mine.copy()
        if dtype.kind == "f":
            communicator.all_reduce(in_place, "MEAN", out=in_place)
        scattered = communicator.reduce_scatter(mine[: len(mine) // size * size])
        return communicator.all_reduce(mine), in_place, scattered, communicator.reduce(mine, root=size - 1)

    results = on_threads(InProcessCommunicator.group(size, 20), body)
    total: Any = noise[0].astype(np.float32 if dtype.kind == "f" else np.int64)
    for other in noise[1:]:
        total = total + other
    expected = total.astype(dtype) if dtype.kind == "f" else total
    block = length // size
    for rank, (reduced, in_place, scattered, rooted) in enumerate(results):
        assert reduced.tobytes() == expected.tobytes()
        assert scattered.tobytes() == expected[rank * block : (rank + 1) * block].tobytes()
        assert rooted is None if rank < size - 1 else rooted.tobytes() == expected.tobytes()
        if dtype.kind == "f":
            assert in_place.tobytes() == (total / np.float32(size)).astype(dtype).tobytes()


@pytest.mark.parametrize("size", [2, 5])
def test_large_copies_share_the_work_too(on_threads: Callable[..., list[Any]], size: int) -> None:
    length = (6 << 20) // 8 // size // size * size
    arrays = [np.arange(length, dtype=np.int64) + (rank << 32) for rank in range(size)]

    def body(communicator: Communicator) -> tuple[Array, Array, Array]:
        mine = arrays[communicator.rank]
        return (
            communicator.broadcast(mine, size - 1),
            communicator.all_gather(mine),
            communicator.all_to_all(mine),
        )

    block = length // size
    for rank, (copied, gathered, exchanged) in enumerate(
        on_threads(InProcessCommunicator.group(size, 20), body)
    ):
        np.testing.assert_array_equal(copied, arrays[-1])
        np.testing.assert_array_equal(gathered, np.concatenate(arrays))
        expected = np.concatenate([a[rank * block : (rank + 1) * block] for a in arrays])
        np.testing.assert_array_equal(exchanged, expected)


# ------------------------------------------------------------------------------- the ends of a range


def test_half_precision_sums_that_fit_do_not_overflow_on_the_way(on_ranks: OnRanks) -> None:
    # https://github.com/tensorflow/tensorflow/issues/102046
    def body(communicator: Communicator) -> None:
        size, rank = communicator.world_size, communicator.rank
        if size < 3:
            return
        large = np.array([40000 if rank < 2 else -40000 if rank == 2 else 0], np.float16)
        assert communicator.all_reduce(large)[0] == np.float16(40000)
        assert communicator.all_reduce(np.array([60000], np.float16), "MEAN")[0] == np.float16(60000)

    on_ranks(body)


def test_half_precision_adds_small_numbers_that_its_own_sum_would_lose(on_ranks: OnRanks) -> None:
    def body(communicator: Communicator) -> None:
        size, rank = communicator.world_size, communicator.rank
        for dtype, one in ((np.dtype(np.float16), 2048), (BFLOAT16, 256)):
            mine = np.array([one if rank == 0 else 1]).astype(dtype)
            # Added one by one in its own type, the ones would vanish.
            expected = np.array([one + size - 1], np.float32).astype(dtype)
            assert communicator.all_reduce(mine)[0] == expected[0]

    on_ranks(body)


def test_big_endian_half_precision_accumulates_in_single_precision_too(on_ranks: OnRanks) -> None:
    def body(communicator: Communicator) -> None:
        size, rank = communicator.world_size, communicator.rank
        result = communicator.all_reduce(np.array([2048 if rank == 0 else 1], ">f2"))
        assert result[0] == np.float32(2048 + size - 1).astype(np.float16)

    on_ranks(body)


@pytest.mark.parametrize("dtype", [dtype for dtype in INTEGERS if dtype.itemsize <= 2], ids=str)
def test_sums_of_narrow_integers_come_back_wide(on_ranks: OnRanks, dtype: np.dtype[Any]) -> None:
    top = np.iinfo(dtype).max

    def body(communicator: Communicator) -> None:
        total = communicator.all_reduce(np.full(3, top, dtype))
        assert total.dtype == (np.uint64 if dtype.kind == "u" else np.int64)
        assert total.tolist() == [communicator.world_size * int(top)] * 3

    on_ranks(body)


@pytest.mark.parametrize("dtype", [dtype for dtype in INTEGERS if dtype.itemsize <= 2], ids=str)
def test_out_keeps_narrow_integers_narrow_and_what_does_not_fit_raises(
    on_ranks: OnRanks, dtype: np.dtype[Any]
) -> None:
    top = int(np.iinfo(dtype).max)

    def fits(communicator: Communicator) -> None:
        mine = np.array([top // communicator.world_size, 1], dtype)
        communicator.all_reduce(mine, out=mine)
        size = communicator.world_size
        assert mine.tolist() == [top // size * size, size]

    def too_large(communicator: Communicator) -> None:
        mine = np.array([top, 1], dtype)
        if communicator.world_size == 1:
            return
        with pytest.raises(
            (OverflowError, CollectiveAbortedError), match=f"to {communicator.world_size * top}, {dtype}"
        ):
            communicator.all_reduce(mine, out=mine)

    on_ranks(fits)
    on_ranks(too_large)


@pytest.mark.parametrize("dtype", [dtype for dtype in INTEGERS if dtype.itemsize == 8], ids=str)
def test_large_integers_keep_every_digit(on_ranks: OnRanks, dtype: np.dtype[Any]) -> None:
    def body(communicator: Communicator) -> None:
        mine = np.array([2**60 + communicator.rank], dtype)
        size = communicator.world_size
        assert int(communicator.all_reduce(mine, "MAX")[0]) == 2**60 + size - 1
        assert int(communicator.all_reduce(mine // 8)[0]) == sum((2**60 + r) // 8 for r in range(size))

    on_ranks(body)


def test_the_mean_of_integers_is_a_float_as_numpys_is(on_ranks: OnRanks) -> None:
    def body(communicator: Communicator) -> None:
        mean = communicator.all_reduce(np.array([communicator.rank, -communicator.rank]), "MEAN")
        assert mean.dtype == np.float64
        half = (communicator.world_size - 1) / 2
        assert mean.tolist() == [half, -half]

    on_ranks(body)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinity_pass_through(on_ranks: OnRanks, dtype: np.dtype[Any]) -> None:
    def body(communicator: Communicator) -> None:
        first = communicator.rank == 0
        mine = np.array([np.nan, np.inf, -np.inf, np.inf] if first else [1, 1, 1, -np.inf]).astype(dtype)
        alone = communicator.world_size == 1
        with np.errstate(invalid="ignore"):
            for op in ("SUM", "MEAN"):
                expected = [np.nan, np.inf, -np.inf, np.inf if alone else np.nan]
                np.testing.assert_array_equal(communicator.all_reduce(mine, op).astype(float), expected)
            largest = [np.nan, np.inf, -np.inf if alone else 1, np.inf]
            np.testing.assert_array_equal(communicator.all_reduce(mine, "MAX").astype(float), largest)
            smallest = [np.nan, np.inf if alone else 1, -np.inf, np.inf if alone else -np.inf]
            np.testing.assert_array_equal(communicator.all_reduce(mine, "MIN").astype(float), smallest)

    on_ranks(body)


def test_other_byte_orders_and_long_doubles_are_numbers_too(on_ranks: OnRanks) -> None:
    def body(communicator: Communicator) -> None:
        size = communicator.world_size
        for name in (">i2", ">i4", ">i8", ">f4", ">f8", ">c8", "longdouble", "clongdouble"):
            for op, expected in (("SUM", size), ("MEAN", 1), ("PROD", 1)):
                result = communicator.all_reduce(np.ones(3, name), op)
                np.testing.assert_array_equal(result, np.full(3, expected))

    on_ranks(body)


@pytest.mark.parametrize("length", [100, 300_000])
def test_out_may_overlap_the_array_in_part(on_ranks: OnRanks, length: int) -> None:
    def body(communicator: Communicator) -> None:
        memory = np.arange(length + 1.0)
        communicator.all_reduce(memory[:-1], out=memory[1:])
        np.testing.assert_array_equal(memory[1:], communicator.world_size * np.arange(float(length)))

    on_ranks(body)


def test_lists_and_numbers_are_arrays_too(on_ranks: OnRanks) -> None:
    def body(communicator: Communicator) -> None:
        anything: Any = [[1, 2], [3, 4]]
        total = communicator.all_reduce(anything)
        np.testing.assert_array_equal(total, communicator.world_size * np.array(anything))
        ragged: Any = [[1], [2, 3]]
        with pytest.raises(TypeError, match="all_reduce: got list, which is no array"):
            communicator.all_reduce(ragged)

    on_ranks(body)
