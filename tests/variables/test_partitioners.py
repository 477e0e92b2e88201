"""How many shards, and how long: by TensorFlow's formulas, written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from variables.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    num_shards_for,
    shard_sizes,
)

F32 = np.dtype(np.float32)


@pytest.mark.parametrize(
    ("shape", "counts"), [((10, 3), [4, 1]), ((3, 5), [3, 1]), ((4,), [4]), ((1, 8), [1, 1])]
)
def test_a_fixed_number_is_at_most_the_number_of_rows(shape: tuple[int, ...], counts: list[int]) -> None:
    assert FixedShardsPartitioner(4)(shape, np.float32) == counts


@pytest.mark.parametrize(
    ("shape", "dtype", "counts"),
    [
        ((10, 3), np.float32, [6, 1]),  # 120 bytes
        ((7,), np.float32, [2]),  # 28 bytes: two shards, both below 20
        ((3, 5), np.float64, [3, 1]),  # 120 bytes, 3 rows
        ((100, 16), np.float32, [10, 1]),  # 6400 bytes: the limit
        ((6, 1), np.int8, [1, 1]),
    ],
)
def test_a_smallest_size_is_rounded_up_to_one_more_shard(
    shape: tuple[int, ...], dtype: Any, counts: list[int]
) -> None:
    assert MinSizePartitioner(min_shard_bytes=20, max_shards=10)(shape, dtype) == counts


def test_a_smallest_size_cuts_nothing_without_a_number_of_shards() -> None:
    assert MinSizePartitioner()((1 << 20, 64), np.float32) == [1, 1]


@pytest.mark.parametrize(
    ("shape", "dtype", "counts"),
    [
        ((10, 3), np.float32, [4, 1]),  # three rows of 12 bytes a shard
        ((3, 5), np.float64, [3, 1]),  # a row of 40 bytes
        ((100, 16), np.float32, [100, 1]),  # a row is larger than a shard may be
        ((6, 1), np.int8, [1, 1]),
        ((4, 0), np.float32, [1, 1]),
    ],
)
def test_a_largest_size_holds_as_many_rows_as_fit_and_one_at_least(
    shape: tuple[int, ...], dtype: Any, counts: list[int]
) -> None:
    assert MaxSizePartitioner(max_shard_bytes=40)(shape, dtype) == counts


def test_a_largest_size_gives_way_to_a_largest_number() -> None:
    assert MaxSizePartitioner(max_shard_bytes=12, max_shards=3)((10, 3), np.float32) == [3, 1]


@pytest.mark.parametrize(
    ("partitioner", "counts"),
    [
        (FixedShardsPartitioner(3), [1, 3]),
        (MinSizePartitioner(min_shard_bytes=8, max_shards=5), [1, 5]),
        (MaxSizePartitioner(max_shard_bytes=20), [1, 6]),  # columns of 16 bytes
    ],
)
def test_any_axis_can_be_asked_about(partitioner: Partitioner, counts: list[int]) -> None:
    assert partitioner((4, 6), np.float32, axis=1) == counts
    assert partitioner((4, 6), np.float32, axis=-1) == counts


@pytest.mark.parametrize(
    "partitioner", [FixedShardsPartitioner(3), MinSizePartitioner(1, 9), MaxSizePartitioner(1)]
)
def test_an_axis_without_elements_is_one_shard(partitioner: Partitioner) -> None:
    assert partitioner((0, 4), np.float32) == [1, 1]


def test_strings_count_as_many_bytes_as_they_are_said_to_have() -> None:
    assert MaxSizePartitioner(max_shard_bytes=32)((10,), np.str_) == [5]
    assert MaxSizePartitioner(max_shard_bytes=32, bytes_per_string=4)((10,), np.str_) == [2]
    assert MinSizePartitioner(16, 8, bytes_per_string=8)((10,), "U7") == [5]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FixedShardsPartitioner(0), "FixedShardsPartitioner: got num_shards=0"),
        (lambda: FixedShardsPartitioner(2.5), "num_shards=2.5; need a whole number of at least 1"),  # type: ignore[arg-type]
        (lambda: FixedShardsPartitioner(True), "num_shards=True"),
        (lambda: MinSizePartitioner(min_shard_bytes=0), "min_shard_bytes=0"),
        (lambda: MinSizePartitioner(max_shards=-1), "max_shards=-1"),
        (lambda: MinSizePartitioner(bytes_per_string=0), "bytes_per_string=0"),
        (lambda: MaxSizePartitioner(0), "max_shard_bytes=0"),
        (lambda: MaxSizePartitioner(8, max_shards=0), "max_shards=0"),
        (lambda: MaxSizePartitioner(8, bytes_per_string=-1), "bytes_per_string=-1"),
        (lambda: FixedShardsPartitioner(2)((4, 6), np.float32, axis=2), "got axis 2 for shape \\(4, 6\\)"),
        (lambda: MinSizePartitioner()((), np.float32), "got axis 0 for shape \\(\\); need one of its 0 axes"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


# ------------------------------------------------------------------- what strategies make of it


def test_a_strategy_makes_a_fixed_number_even_if_some_are_empty() -> None:
    assert num_shards_for(FixedShardsPartitioner(4), (2, 1), F32) == 4
    assert shard_sizes(2, 4) == [1, 1, 0, 0]


@pytest.mark.parametrize("shape", [(), (1, 1000), (0, 3)])
def test_a_strategy_does_not_cut_what_has_less_than_two_rows(shape: tuple[int, ...]) -> None:
    assert num_shards_for(FixedShardsPartitioner(4), shape, F32) == 1


def test_a_function_will_do_for_a_partitioner() -> None:
    asked = []

    def halves(shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[int]:
        asked.append((shape, dtype))
        return [2, 1]

    assert num_shards_for(halves, (8, 3), F32) == 2
    assert asked == [((8, 3), F32)]


@pytest.mark.parametrize("counts", [[1, 2], [2], [0, 1], [2, 1, 1]])
def test_a_strategy_cuts_along_the_first_axis_only(counts: list[int]) -> None:
    with pytest.raises(
        ValueError, match=r"partitioner: got \[.*\] for shape \(8, 3\); need a number of shards >= 1 for"
    ):
        num_shards_for(lambda shape, dtype: counts, (8, 3), F32)


@pytest.mark.parametrize(
    ("num_rows", "num_shards", "sizes"),
    [(6, 4, [2, 2, 1, 1]), (10, 3, [4, 3, 3]), (6, 3, [2, 2, 2]), (0, 2, [0, 0]), (5, 1, [5])],
)
def test_shards_differ_by_one_row_at_most_and_the_larger_come_first(
    num_rows: int, num_shards: int, sizes: list[int]
) -> None:
    assert shard_sizes(num_rows, num_shards) == sizes
