"""What a step has changed so far, so that it can be taken back and made again without the processes that were lost in it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import final

import numpy as np

from collectives.arrays import Array
from variables.lent_copies import LentCopies


@final
class Journal:
    """The changes of one step.

    Attributes:
        mark: tells the step apart from others, alike in all processes; not 0.
        num_calls_at_update: how many collectives there had been before the first update; None if there was none.

    Args:
        count_calls: how many collectives there have been.
        copies_updates: whether what optimizers update is copied before. Not needed where no collective follows, as then
            nothing can be lost in the step any more; copies are as large as the model.
        note: told of the objects beside variables that the step changes.
    """

    def __init__(
        self,
        count_calls: Callable[[], int],
        *,
        copies_updates: bool,
        note: Callable[[object], object] = lambda _: None,
    ) -> None:
        self.mark = count_calls() + 1
        self.copies_updates = copies_updates
        self._count_calls = count_calls
        self._note = note
        self.num_calls_at_update: int | None = None
        self._kept: set[Hashable] = set()
        self._undo: list[Callable[[], object]] = []

    def keep(self, key: Hashable, array: Array) -> None:
        """Copy an array before it is changed, the first time.

        Args:
            key: tells what is changed apart, as long as the step lasts.
            array: what is changed.
        """
        if key not in self._kept:
            self._kept.add(key)
            self._undo.append(partial(np.copyto, array, array.copy()))

    def keep_lent(self, copies: LentCopies, copy: int) -> None:
        """As `keep`, of a copy that keeps what it was by itself.

        Args:
            copies: among which it is.
            copy: its number.
        """
        key = id(copies), copy
        if key not in self._kept:
            self._kept.add(key)
            self._undo.append(copies.keep(copy, self.mark))

    def keep_state(self, changed: object, key: Hashable, keep: Callable[[], Callable[[], object]]) -> None:
        """Note that an object beside variables is about to change.

        Args:
            changed: the object, which newcomers must be given too.
            key: which part of it.
            keep: called the first time in the step: keeps what the part is, and gives what puts that back.
        """
        key = id(changed), key
        if key not in self._kept:
            self._kept.add(key)
            self._note(changed)
            self._undo.append(keep())

    def keep_update(self, arrays: Iterable[Array], undo: Callable[[], object], optimizer: object) -> None:
        """Note that an optimizer is about to update.

        Args:
            arrays: what it changes; parameters and slots.
            undo: takes back what is no array, such as the count of updates.
            optimizer: which one.
        """
        self._note(optimizer)
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
