"""Datasets: streams of nested arrays, described once and iterated as often as one likes.

The part of tf.data's vocabulary that training loops use, on one machine and in NumPy. A dataset over
arrays in memory stays index arithmetic up to `Dataset.batch`, so that shuffling and batching cost one
indexing operation for each array and batch, and batching in stored order costs no copy at all.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, final

import numpy as np

from strategies.datasets.dataset_iterator import DatasetIterator, Epochs
from strategies.datasets.dataset_stages import (
    Batched,
    Filtered,
    Generated,
    Mapped,
    OneShot,
    Prefetched,
    Repeated,
    Shuffled,
    Sliced,
    Unbatched,
    WithPolicy,
)
from strategies.datasets.elements import Element, count_rows, flatten
from strategies.datasets.input_options import AutoShardPolicy
from strategies.datasets.row_order import RowOrder
from strategies.datasets.row_stages import RowBatches, Rows, Table
from strategies.datasets.stage import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Stage, Traits


@final
class Dataset:
    """A description of a stream of elements, which are nested tuples, lists and dicts of arrays.

    Immutable: every method gives a new dataset. Iterating starts from the beginning each time. Each
    iteration is an epoch, counted by the dataset object, and a seeded shuffle has an order of its own for
    each epoch, the same in every run: so make the dataset once, before the loop over epochs.

    It can be pickled where the functions in it can, with its arrays and the number of its next epoch.
    """

    def __init__(self, stage: Stage) -> None:
        """A dataset of this description; `from_arrays` and `from_generator` are the usual ways to get one."""
        self._stage = stage
        self._epochs = Epochs()

    @staticmethod
    def from_tensor_slices(tensors: Element) -> Dataset:
        """TensorFlow's name for `from_arrays`."""
        return from_arrays(tensors)

    @staticmethod
    def from_generator(generator: Callable[[], Iterable[Element]] | Iterable[Element]) -> Dataset:
        """The same as the function `from_generator`."""
        return from_generator(generator)

    @staticmethod
    def range(*bounds: int) -> Dataset:
        """The integers of ``numpy.arange(*bounds)``, as int64 scalars."""
        return from_arrays(np.arange(*bounds, dtype=np.int64))

    @property
    def stage(self) -> Stage:
        """The description, for what is built upon datasets."""
        return self._stage

    @property
    def cardinality(self) -> int:
        """How many elements, or `INFINITE_CARDINALITY` (-1), or `UNKNOWN_CARDINALITY` (-2)."""
        return self._stage.traits.cardinality

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full batch; None if the elements are no batches, or a function has made them since."""
        return self._stage.traits.batch_size

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self._stage, self._epochs)

    def __len__(self) -> int:
        return length(self.cardinality, "Dataset")

    def __bool__(self) -> bool:
        return True  # not by length, which may be unknown

    def __repr__(self) -> str:
        return f"Dataset(cardinality={self.cardinality}, global_batch_size={self.global_batch_size})"

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Stack consecutive elements along a new first axis.

        Batches of arrays in memory in their stored order are views: they lend the arrays' memory.

        Args:
            batch_size: rows of a batch. What is distributed later is the global batch.
            drop_remainder: leave out a short last batch.

        Raises:
            ValueError: a size below 1; while iterating, rows of different shapes or structures.
        """
        size = _count(batch_size, "batch: batch_size", 1)
        if isinstance(self._stage, Rows):
            return Dataset(RowBatches(self._stage, size, drop_remainder))
        return Dataset(Batched(self._stage, size, drop_remainder, pad=False))

    def padded_batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """As `batch`, for rows of unequal shapes: filled up with zeros to the longest in the batch.

        Raises:
            ValueError: a size below 1; while iterating, rows with different numbers of axes.
        """
        size = _count(batch_size, "padded_batch: batch_size", 1)
        if isinstance(self._stage, Rows):
            return Dataset(RowBatches(self._stage, size, drop_remainder))
        return Dataset(Batched(self._stage, size, drop_remainder, pad=True))

    def unbatch(self) -> Dataset:
        """The rows of the elements, one by one."""
        return Dataset(Unbatched(self._stage))

    def repeat(self, count: int | None = None) -> Dataset:
        """The elements ``count`` times over, without end by default (None or -1).

        Each time is an epoch for the shuffles before. Before `batch`, batches go on across the border of
        two epochs. An empty dataset stays empty.

        Raises:
            ValueError: ``count`` is below -1.
        """
        times = _limit(count, "repeat")
        if isinstance(self._stage, Rows) and self._stage.times == 1:
            return Dataset(Rows(self._stage.table, self._stage.order, self._stage.known, times))
        return Dataset(Repeated(self._stage, times))

    def take(self, count: int) -> Dataset:
        """The first ``count`` elements, or all there are; all with -1.

        Raises:
            ValueError: ``count`` is below -1.
        """
        return self._sliced(slice(_limit(count, "take")))

    def skip(self, count: int) -> Dataset:
        """What comes after the first ``count`` elements; nothing with -1.

        Raises:
            ValueError: ``count`` is below -1.
        """
        first = _limit(count, "skip")
        return self._sliced(slice(0) if first is None else slice(first, None))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Every ``num_shards``-th element, beginning with number ``index``.

        Raises:
            ValueError: no shards, or an index that is not below their number.
        """
        num = _count(num_shards, "shard: num_shards", 1)
        first = _count(index, "shard: index", 0)
        if first >= num:
            raise ValueError(f"shard: got index {first} of {num} shards; need an index below {num}")
        return self._sliced(slice(first, None, num))

    def map(self, function: Callable[..., Element]) -> Dataset:
        """``function`` of each element, called while iterating; tuples come as separate arguments.

        It should depend on its arguments only: restoring a position doesn't call it for what is skipped.
        """
        return Dataset(Mapped(self._stage, _function(function, "map")))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """The elements of which ``predicate`` is true; tuples come as separate arguments."""
        return Dataset(Filtered(self._stage, _function(predicate, "filter")))

    def shuffle(
        self, buffer_size: int | None = None, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Dataset:
        """The elements in random order.

        Args:
            buffer_size: draw each element from a buffer of so many; by default from all of them, which
                for arrays in memory is a permutation of row numbers, and for others holds them all.
            seed: gives the same orders in every run. Without one, another process has other orders, and a
                saved position or several workers are refused.
            reshuffle_each_iteration: a new order for each epoch.

        Raises:
            ValueError: a buffer below 1, a negative seed, or an endless dataset without a buffer.
        """
        size = None if buffer_size is None else _count(buffer_size, "shuffle: buffer_size", 1)
        number = int.from_bytes(os.urandom(7), "little") if seed is None else _count(seed, "shuffle: seed", 0)
        stage, unseeded = self._stage, seed is None
        if isinstance(stage, Rows) and stage.times == 1:
            order = stage.order.shuffled(size, number, every_epoch=reshuffle_each_iteration)
            return Dataset(Rows(stage.table, order, stage.known.shuffled(number, unseeded=unseeded)))
        if size is None and self.cardinality == INFINITE_CARDINALITY:
            raise ValueError(
                "shuffle: got an endless dataset and no buffer_size; need a buffer that can be filled — pass "
                "buffer_size, or shuffle before repeat()"
            )
        return Dataset(Shuffled(stage, size, number, unseeded, every_epoch=reshuffle_each_iteration))

    def prefetch(self, buffer_size: int = 1) -> Dataset:
        """The same elements, made up to ``buffer_size`` ahead by a thread in the background.

        Worth it where making a batch takes long and lets others run meanwhile: reading files, big copies.
        Nothing is prefetched unless asked for. The thread ends with its iterator.

        Raises:
            ValueError: a size below 1.
        """
        return Dataset(Prefetched(self._stage, _count(buffer_size, "prefetch: buffer_size", 1)))

    def with_options(self, *, auto_shard_policy: AutoShardPolicy | str) -> Dataset:
        """The same elements, with a say in how several workers share them; one worker has them all anyway.

        Raises:
            ValueError: no such policy.
        """
        return Dataset(WithPolicy(self._stage, AutoShardPolicy.parse(auto_shard_policy)))

    def _sliced(self, part: slice) -> Dataset:
        stage = self._stage
        if isinstance(stage, Rows) and stage.times == 1:
            return Dataset(Rows(stage.table, stage.order.sliced(part), stage.known.sliced(part)))
        return Dataset(Sliced(stage, part))


def from_arrays(arrays: Element) -> Dataset:
    """A dataset of the rows of arrays in memory.

    The arrays are lent, not copied: leave them as they are while the dataset is in use.

    Args:
        arrays: an array, or a nested structure of arrays, of shape ``(rows, ...)`` each. Lists and tuples
            are structure, not arrays.

    Raises:
        IndexError: a scalar.
        TypeError: a leaf that is no array.
        ValueError: arrays of different lengths.
    """
    leaves, structure = flatten(arrays)
    num_rows = count_rows(leaves, structure, "from_arrays", "make it an array with numpy.asarray()")
    return Dataset(Rows(Table(tuple(leaves), structure), RowOrder.of_all(num_rows), Traits(num_rows)))


def from_generator(source: Callable[[], Iterable[Element]] | Iterable[Element]) -> Dataset:
    """A dataset of what an iterable gives.

    Args:
        source: a function without arguments that gives a new iterable for each epoch; or an iterable that
            can start over, such as a list; or an iterator, which gives one epoch: iterating again is a
            RuntimeError then.

    Raises:
        TypeError: ``source`` is none of these, or is a single element.
    """
    if isinstance(source, Iterator):
        return Dataset(Generated(OneShot(source), Traits(UNKNOWN_CARDINALITY, one_shot=True)))
    if isinstance(source, (str, bytes, Mapping)) or hasattr(source, "shape"):
        raise TypeError(
            f"from_generator: got {type(source).__name__}, which is a single element; need an iterable of elements "
            "— slice arrays in memory with from_arrays()"
        )
    if isinstance(source, Iterable):
        # Not len(): a loader may have the method and yet not know.
        cardinality = (
            operator.length_hint(source, UNKNOWN_CARDINALITY)
            if isinstance(source, Sized)
            else UNKNOWN_CARDINALITY
        )
        return Dataset(Generated(partial(_itself, source), Traits(cardinality)))
    if callable(source):
        return Dataset(Generated(source, Traits(UNKNOWN_CARDINALITY)))
    raise TypeError(
        f"from_generator: got {type(source).__name__}; need an iterable, or a function that gives a new one"
    )


def _itself(source: Iterable[Element]) -> Iterable[Element]:
    return source


def length(cardinality: int, where: str) -> int:
    """The number that ``len`` gives for a cardinality.

    Raises:
        TypeError: infinite or unknown.
    """
    if cardinality < 0:
        what = "has no end" if cardinality == INFINITE_CARDINALITY else "must be iterated to be counted"
        raise TypeError(
            f"len: this {where} {what}; need a known number of elements — look at cardinality first"
        )
    return cardinality


def _count(value: Any, where: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{where}: got {value!r}; need an integer") from None
    if number < least:
        raise ValueError(f"{where}: got {number}; need at least {least}")
    return number


def _limit(count: Any, method: str) -> int | None:
    """A count of elements, or None where -1 or None says that there is no limit."""
    if count is None and method != "repeat":
        raise TypeError(f"{method}: count: got None; need an integer, -1 for all")
    number = None if count is None else _count(count, f"{method}: count", -1)
    return None if number == -1 else number


def _function(function: Any, method: str) -> Callable[..., Any]:
    if not callable(function):
        raise TypeError(f"{method}: got {type(function).__name__}; need a function of one element")
    return function  # type: ignore[no-any-return]  # callable() doesn't say what it returns
