"""The copies of one ON_READ variable in memory that other processes have mapped, so that they outlast the process that has them.

Beside each copy is what it was when the step under way began to change it, with the step's mark: of a process that is lost
in a step, which is made again without it, that part must not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from collectives.arrays import Array

_LINE = 64


@final
class LentCopies:
    """The copies that one process has.

    Attributes:
        memory: all of it, dtype uint8.

    Args:
        make: gives zeroed memory of so many bytes that others can map.
        num_copies: how many.
        shape: of each.
        dtype: likewise.
    """

    def __init__(
        self, make: Callable[[int], Array], num_copies: int, shape: Sequence[int], dtype: np.dtype[Any]
    ) -> None:
        self.memory = make(num_bytes_of(num_copies, shape, dtype))
        self._marks, self._before, self._now = _parts(self.memory, num_copies, shape, dtype)

    @property
    def copies(self) -> list[Array]:
        """The copies, flat."""
        return [copy.reshape(-1) for copy in self._now]

    def keep(self, copy: int, mark: int) -> Callable[[], None]:
        """Keep what a copy is before a step changes it; what is returned takes the change back.

        Args:
            copy: its number.
            mark: of the step; not 0.
        """
        np.copyto(self._before[copy], self._now[copy])
        # Whoever looks at this sees the mark only when what it stands for is complete.
        self._marks[copy][0] = mark
        return partial(self._take_back, copy)

    def forget_marks(self) -> None:
        """Nothing of what was kept is needed any more."""
        for mark in self._marks:
            mark[0] = 0

    def _take_back(self, copy: int) -> None:
        np.copyto(self._now[copy], self._before[copy])


def left_in(
    memory: Array, num_copies: int, shape: Sequence[int], dtype: np.dtype[Any], lost_step: int
) -> list[Array]:
    """The copies in the memory of a process that is gone, without what it did in a step that is made again.

    Args:
        memory: as it is mapped here.
        num_copies: how many it had.
        shape: of each.
        dtype: likewise.
        lost_step: the mark of that step; 0 if there is none.
    """
    marks, before, now = _parts(memory, num_copies, shape, dtype)
    return [
        old if lost_step and mark[0] == lost_step else new
        for mark, old, new in zip(marks, before, now, strict=True)
    ]


def num_bytes_of(num_copies: int, shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Of the memory of so many copies."""
    return num_copies * (_LINE + 2 * _row(shape, dtype))


def _row(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    return -(-max(1, math.prod(shape)) * dtype.itemsize // _LINE) * _LINE


def _parts(
    memory: Array, num_copies: int, shape: Sequence[int], dtype: np.dtype[Any]
) -> tuple[list[Array], list[Array], list[Array]]:
    row, size = _row(shape, dtype), math.prod(shape) * dtype.itemsize
    marks = [memory[_LINE * copy :][:8].view(np.int64) for copy in range(num_copies)]
    rows = [
        memory[_LINE * num_copies + row * number :][:size].view(dtype).reshape(shape)
        for number in range(2 * num_copies)
    ]
    return marks, rows[:num_copies], rows[num_copies:]
