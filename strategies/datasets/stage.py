"""What every stage of a dataset offers, and what is known of a dataset without iterating it."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import final

from strategies.datasets.elements import Element
from strategies.datasets.input_options import AutoShardPolicy

INFINITE_CARDINALITY = -1
"""The cardinality of a dataset that never ends."""
UNKNOWN_CARDINALITY = -2
"""The cardinality of a dataset that must be iterated to be counted."""

_EPOCHS_OF_A_REPETITION = 32
"""Bits. An endless repetition is taken to start over less often than this."""


@final
@dataclass(frozen=True)
class Traits:
    """What is known of a dataset without iterating it.

    Attributes:
        cardinality: how many elements, or one of the two constants above.
        batch_size: rows of a full batch, or None if the elements are no batches or nobody can tell.
        shuffle_seeds: the seeds of its shuffles.
        unseeded: whether one of these seeds was drawn, so that another process has another order.
        one_shot: whether the source can be iterated once only.
        auto_shard_policy: how workers share it.
    """

    cardinality: int
    batch_size: int | None = None
    shuffle_seeds: tuple[int, ...] = ()
    unseeded: bool = False
    one_shot: bool = False
    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO

    def batched(self, size: int, *, drop_remainder: bool) -> Traits:
        cardinality = self.cardinality
        if cardinality > 0:
            cardinality = cardinality // size if drop_remainder else -(-cardinality // size)
        return replace(self, cardinality=cardinality, batch_size=size)

    def repeated(self, times: int | None) -> Traits:
        if times == 0 or self.cardinality == 0:
            return replace(self, cardinality=0)
        if times is None:
            return replace(self, cardinality=INFINITE_CARDINALITY)
        return replace(
            self, cardinality=self.cardinality * times if self.cardinality > 0 else self.cardinality
        )

    def sliced(self, part: slice) -> Traits:
        if self.cardinality >= 0:
            return replace(self, cardinality=len(range(self.cardinality)[part]))
        if part.stop is not None and self.cardinality == INFINITE_CARDINALITY:
            return replace(self, cardinality=len(range(part.stop)[part]))
        return replace(self, cardinality=0) if part.stop == 0 else self

    def shuffled(self, seed: int, *, unseeded: bool) -> Traits:
        seeds = (*self.shuffle_seeds, seed)
        return replace(self, shuffle_seeds=seeds, unseeded=self.unseeded or unseeded)


class Stage(ABC):
    """A description of a stream of elements."""

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """What is known of the stream."""

    @abstractmethod
    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        """The elements of an epoch.

        Args:
            epoch: which one, from 0; shuffles have an order for each.
            skip: how many elements to leave out. Where they can be told without being made, they are not
                made: a function that is mapped is not called for them.

        Raises:
            RuntimeError: a one-shot source, opened before.
        """


def repetitions(first: int, times: int | None) -> Iterable[int]:
    """The numbers of the repetitions from ``first`` on; without end if ``times`` is None."""
    return itertools.count(first) if times is None else range(first, times)


def inner_epoch(epoch: int, repetition: int, times: int | None) -> int:
    """The epoch of a repetition, counted on through all of them: iterating twice equals ``repeat(2)``."""
    return (epoch << _EPOCHS_OF_A_REPETITION) + repetition if times is None else epoch * times + repetition
