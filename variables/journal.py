"""What a step has changed so far, so that it can be taken back and made again without the processes that were lost in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import final

import numpy as np

from collectives.arrays import Array


@final
class Journal:
    """The changes of one step.

    Attributes:
        num_calls_at_update: how many collectives there had been before the first update; None if there was none.

    Args:
        count_calls: how many collectives there have been.
        copies_updates: whether what optimizers update is copied before. Not needed where no collective follows, as then
            nothing can be lost in the step any more; copies are as large as the model.
    """

    def __init__(self, count_calls: Callable[[], int], *, copies_updates: bool) -> None:
        self.copies_updates = copies_updates
        self._count_calls = count_calls
        self.num_calls_at_update: int | None = None
        self._kept: set[int] = set()
        self._undo: list[Callable[[], object]] = []

    def keep(self, key: int, array: Array) -> None:
        """Copy an array before it is changed, the first time.

        Args:
            key: tells what is changed apart, as long as the step lasts.
            array: what is changed.
        """
        if key in self._kept:
            return
        self._kept.add(key)
        self._undo.append(partial(np.copyto, array, array.copy()))

    def keep_update(self, arrays: Iterable[Array], undo: Callable[[], object]) -> None:
        """Note that an optimizer is about to update.

        Args:
            arrays: what it changes; parameters and slots.
            undo: takes back what is no array, such as the count of updates.
        """
        if self.num_calls_at_update is None:
            self.num_calls_at_update = self._count_calls()
        if self.copies_updates:
            for array in arrays:
                self._undo.append(partial(np.copyto, array, array.copy()))
        self._undo.append(undo)

    @property
    def can_roll_back(self) -> bool:
        """Whether everything that was changed was kept."""
        return self.copies_updates or self.num_calls_at_update is None

    def roll_back(self) -> None:
        """Take all changes back, the last one first."""
        while self._undo:
            self._undo.pop()()
