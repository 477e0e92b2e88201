"""Large results without the price of fresh memory.

The system hands out big blocks page by page, zeroed, at first touch, which takes longer than reducing into
them. A recycled block is handed out again once nobody holds a view of it any more.
"""

from __future__ import annotations

import math
import sys
from typing import Any, final

import numpy as np

from collectives.arrays import Array

RECYCLED_FROM = 1 << 20
"""Bytes. Smaller arrays come from the allocator's own free lists, touched already."""


@final
class RecycledMemory:
    """One thread's source of large arrays.

    Args:
        num_blocks: how many blocks it keeps at most. A result that the caller still holds is never touched.
    """

    def __init__(self, num_blocks: int = 2) -> None:
        self._num_blocks = num_blocks
        self._blocks: list[Array] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array in C order with arbitrary content, as ``numpy.empty`` gives."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < RECYCLED_FROM:
            return np.empty(shape, dtype)
        block = self._free_block(num_bytes)
        return block[:num_bytes].view(dtype).reshape(shape)

    def _free_block(self, num_bytes: int) -> Array:
        for index, block_bytes in enumerate([block.nbytes for block in self._blocks]):
            if num_bytes <= block_bytes <= 2 * num_bytes and _references(self._blocks, index) == _UNUSED:
                block = self._blocks.pop(index)
                self._blocks.append(block)  # the longest unused is dropped first
                return block
        block = np.empty(num_bytes, np.uint8)
        self._blocks.append(block)
        del self._blocks[: -self._num_blocks]
        return block


def _references(blocks: list[Array], index: int) -> int:
    """How many references there are to a block, with those that the asking makes.

    A view keeps the array that owns its memory as its base, so the references to the owner count all views, and the
    views of views.
    """
    return sys.getrefcount(blocks[index])


_UNUSED = _references([np.empty(0)], 0)
