"""A position in a dataset: takes elements, can be saved, and can be put back where it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, final

from collectives.fork_safe_lock import ForkSafeLock
from strategies.datasets.elements import Element
from strategies.datasets.stage import Stage


@final
class OutOfRangeError(StopIteration):
    """`DatasetIterator.get_next` was called past the last element."""


@final
class OptionalElement:
    """An element, or the news that there is none left."""

    def __init__(self, elements: tuple[()] | tuple[Element]) -> None:
        self._elements = elements

    def has_value(self) -> bool:
        """Whether there is an element."""
        return bool(self._elements)

    def get_value(self) -> Element:
        """The element.

        Raises:
            ValueError: there is none.
        """
        for element in self._elements:
            return element
        raise ValueError("get_value: the dataset is exhausted; need an element — ask has_value() first")

    def __repr__(self) -> str:
        return f"OptionalElement({', '.join(map(repr, self._elements))})"


@final
class Epochs:
    """Counts the iterations of one dataset."""

    def __init__(self) -> None:
        self._next = 0
        self._lock = ForkSafeLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _epochs_from, (self._next,)  # a lock is this process's own

    def begin(self) -> int:
        """The number of a new iteration, from 0."""
        with self._lock:
            epoch = self._next
            self._next += 1
            return epoch

    def go_on_after(self, epoch: int) -> None:
        """Number the next iteration as if ``epoch`` had been the last."""
        with self._lock:
            self._next = epoch + 1


def _epochs_from(number: int) -> Epochs:
    epochs = Epochs()
    epochs.go_on_after(number - 1)
    return epochs


@final
class DatasetIterator:
    """Iterates over one epoch.

    Several threads may share it: each element goes to one of them. When making an element fails, the
    position stays, and the next call tries that element again.
    """

    def __init__(
        self, stage: Stage, epochs: Epochs, *, before_next: Callable[[object], None] | None = None
    ) -> None:
        """Starts an epoch.

        Args:
            stage: what to iterate.
            epochs: the count that this epoch belongs to.
            before_next: called before each element, with this iterator, to refuse where that would be wrong.
        """
        self._stage = stage
        self._epochs = epochs
        self._before_next = before_next
        self._epoch = epochs.begin()
        self._step = 0
        self._elements: Iterator[Element] | None = stage.open(self._epoch, 0)
        # Reentrant: a function of the pipeline that asks for the next element gets an error, not a deadlock.
        self._lock = ForkSafeLock()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "DatasetIterator: it is a position in this process, and can't be pickled or copied; need the dataset, and state() with "
            "restore() for the position"
        )

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Element:
        if self._before_next is not None:
            self._before_next(self)
        with self._lock:
            if self._elements is None:
                self._elements = self._stage.open(self._epoch, self._step)
            try:
                element = next(self._elements)
            except StopIteration:
                raise
            except BaseException:
                self._elements = None  # a generator that raised is spent, and would look exhausted
                raise
            self._step += 1
            return element

    def get_next(self) -> Element:
        """The next element.

        Raises:
            OutOfRangeError: there is none.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(
                f"get_next: the dataset is exhausted after {self._step} steps; need a new epoch — call iter() on it"
            ) from None

    def get_next_as_optional(self) -> OptionalElement:
        """The next element, or a value-less optional at the end."""
        try:
            return OptionalElement((next(self),))
        except StopIteration:
            return OptionalElement(())

    def state(self) -> dict[str, Any]:
        """The position, as plain values that a checkpoint can hold.

        ``step`` counts the elements handed out in this epoch, not those that a prefetch has made ahead.
        """
        with self._lock:
            return {
                "epoch": self._epoch,
                "step": self._step,
                "shuffle_seeds": list(self._stage.traits.shuffle_seeds),
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state` gave, here or in another process.

        The elements from there on are those that would have come then, if the dataset is made in the same
        way and its functions depend on their arguments only. Rows in memory are skipped without being
        touched; what a generator gives is made again and dropped. The next iteration of the dataset gets
        the epoch after the restored one.

        Args:
            state: ``epoch``, ``step`` and ``shuffle_seeds``.

        Raises:
            ValueError: no position, or one in another shuffled order.
            RuntimeError: the source is a one-shot iterator that is already further on.
        """
        try:
            epoch, step = int(state["epoch"]), int(state["step"])
            seeds = tuple(int(seed) for seed in state["shuffle_seeds"])
        except (KeyError, TypeError, ValueError):
            epoch, step, seeds = -1, -1, ()
        if epoch < 0 or step < 0:
            raise ValueError(
                f"restore: got {state!r}; need epoch, step and shuffle_seeds as state() gives them"
            )
        known = self._stage.traits
        if seeds != known.shuffle_seeds:
            raise ValueError(
                f"restore: the position was saved under shuffle seeds {list(seeds)}, this dataset has "
                f"{list(known.shuffle_seeds)}; need the same order of elements — pass seed= to shuffle()"
            )
        with self._lock:
            if known.one_shot and self._elements is not None and step >= self._step:
                # It can't be opened again, only followed further.
                for _ in itertools.islice(self._elements, step - self._step):
                    pass
            else:
                self._elements = None  # ends a prefetch thread before the next one starts
                self._elements = self._stage.open(epoch, step)
            self._epoch, self._step = epoch, step
            self._epochs.go_on_after(epoch)
