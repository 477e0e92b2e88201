"""Datasets that are sent to other processes, and what can't be."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import strategies as xd

ROWS = np.arange(24.0).reshape(12, 2)
Pair = namedtuple("Pair", "x y")  # as users write it


def doubled(x: Any) -> Any:
    return 2 * x


def is_large(x: Any) -> bool:
    return bool(x[0] > 5)


def counted() -> Iterator[Any]:
    yield from np.arange(5.0)


MAKERS: dict[str, Callable[[], xd.Dataset]] = {
    "rows": lambda: xd.from_arrays(ROWS),
    "structures": lambda: xd.from_arrays({"a": ROWS, "b": (ROWS[:, 0], Pair(ROWS, ROWS[:, 1]))}).batch(5),
    "batches": lambda: xd.from_arrays(ROWS).batch(5, drop_remainder=True),
    "shuffled": lambda: xd.from_arrays(ROWS).shuffle(100, seed=3).batch(4).repeat(2),
    "shuffled by a buffer": lambda: xd.from_arrays(ROWS).shuffle(3, seed=3).repeat(2).batch(4),
    "shuffled without a seed": lambda: xd.from_arrays(ROWS).shuffle(100).batch(4),
    "parts": lambda: xd.from_arrays(ROWS).skip(1).take(9).shard(2, 1).shuffle(9, seed=1),
    "functions": lambda: xd.from_arrays(ROWS).filter(is_large).map(doubled).batch(2).prefetch(2),
    "a list": lambda: xd.from_generator([np.ones(2), np.zeros(2)]).batch(2).unbatch(),
    "a generator": lambda: xd.from_generator(counted).shuffle(5, seed=1).padded_batch(2),
    "a policy": lambda: xd.from_arrays(ROWS).batch(4).with_options(auto_shard_policy="OFF"),
}


def elements(dataset: xd.Dataset) -> list[Any]:
    return [np.asarray(leaf).tolist() for element in dataset for leaf in flatten(element)]


def flatten(element: Any) -> list[Any]:
    if isinstance(element, dict):
        return [leaf for key in sorted(element) for leaf in flatten(element[key])]
    return [leaf for part in element for leaf in flatten(part)] if isinstance(element, tuple) else [element]


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_copy_gives_the_same_elements_in_every_epoch(kind: str, how: str) -> None:
    dataset = MAKERS[kind]()
    copied = pickle.loads(pickle.dumps(dataset)) if how == "pickle" else copy.deepcopy(dataset)
    assert (copied.cardinality, copied.global_batch_size) == (dataset.cardinality, dataset.global_batch_size)
    first = elements(dataset)
    assert first
    assert elements(copied) == first
    assert elements(copied) == elements(dataset)


def test_a_copy_goes_on_with_the_epochs_of_the_original() -> None:
    dataset = xd.from_arrays(ROWS).shuffle(100, seed=3)
    first = elements(dataset)
    copied = pickle.loads(pickle.dumps(dataset))
    second = elements(dataset)
    assert second != first
    assert elements(copied) == second


def test_what_is_a_position_or_belongs_to_this_process_says_so() -> None:
    strategy = xd.MirroredStrategy(["cpu:0", "cpu:1"])
    batches = xd.from_arrays(ROWS).batch(4)
    for thing, words in (
        (iter(batches), "DatasetIterator: it is a position in this process, and can't be pickled or copied"),
        (
            strategy.distribute_dataset(batches),
            "DistributedDataset: it belongs to the replicas of this process",
        ),
        (
            strategy.distribute_datasets_from_function(lambda context: batches),
            "DistributedDatasetFromFunction: it belongs to the replicas of this process",
        ),
        (
            xd.from_generator(iter([1.0])),
            "its source is a one-shot iterator, which can't be pickled or copied",
        ),
    ):
        for copies in (pickle.dumps, copy.deepcopy, copy.copy if "Distributed" in words else pickle.dumps):
            with pytest.raises(TypeError, match=words):
                copies(thing)
    assert len(elements(batches)) == 3
