"""Variables lie side by side in flat blocks of memory.

One block holds many variables of one dtype, in the same layout on every device, so that whole blocks can be reduced and
updated with a few operations however many variables there are. Gradients and optimizer slots get
blocks of the same layout.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import weakref
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from collectives.arrays import ALIGNMENT, Array
from collectives.devices import Device
from collectives.fork_safe_lock import ForkSafeLock
from collectives.link import Link
from variables.lent_copies import LentCopies

_FIRST_BLOCK_BYTES = 1 << 16
_LARGEST_BLOCK_BYTES = 1 << 26
"""Blocks double up to here. What is not used costs address space only: the system gives pages when touched."""


@final
class Block:
    """Memory of one dtype and layout on several devices.

    Args:
        dtype: of every element.
        capacity: elements.
        devices: where; a device may come only once.
        link: to the other processes that read memory of this layout, if there are any.
        lent: the copies, if they are there already, in memory that other processes have mapped.
    """

    def __init__(
        self,
        dtype: np.dtype[Any],
        capacity: int,
        devices: Sequence[Device],
        link: Link | None = None,
        lent: LentCopies | None = None,
    ) -> None:
        self._link = link
        self.lent = lent
        self.dtype = dtype
        self.capacity = capacity
        self.devices = tuple(devices)
        self.used = 0
        self.copies = (
            [self.like(number) for number in range(len(self.devices))] if lent is None else lent.copies
        )

    def like(self, device: int = 0) -> Array:
        """New memory of this layout on the device of that number, of shape ``(capacity,)``, zeroed."""
        return _zeros(self.devices[device], self.capacity, self.dtype)

    def lendable(self, device: int = 0) -> Array:
        """As `like`, where other processes can read it without a copy."""
        if self._link is None or self.devices[device].kind != "cpu":
            return self.like(device)
        memory: Array = self._link.memory(self.capacity * self.dtype.itemsize).view(self.dtype)
        return memory

    def follows(self, first: Place, second: Place) -> bool:
        """Whether nothing but padding lies between two places of this block, in this order."""
        return second.start == first.start + _padded(first.stop - first.start, self.dtype)


@final
class Place:
    """Where one variable lies: a range of elements of a block, the same on every device."""

    __slots__ = ("block", "shape", "start", "stop")

    def __init__(self, block: Block, start: int, shape: tuple[int, ...]) -> None:
        self.block = block
        self.start = start
        self.stop = start + math.prod(shape)
        self.shape = shape

    def view(self, flat: Array) -> Array:
        """The variable's part of one device's memory of the block's layout."""
        return flat[self.start : self.stop].reshape(self.shape)


@final
class FlatMemory:
    """Places variables into blocks, for one set of devices.

    Args:
        devices: where every variable has a copy.
        link: to the other processes that have copies too, if there are any.
    """

    def __init__(self, devices: Sequence[Device], link: Link | None = None) -> None:
        self._devices = tuple(devices)
        self._link = link
        self._open: dict[tuple[np.dtype[Any], bool], Block] = {}
        # Threads that make variables at the same time must not get one place.
        self._mutex = ForkSafeLock()

    def place(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, trainable: bool) -> Place:
        """A place for a new variable, zeroed. Trainable ones lie apart, so that optimizers meet no others between."""
        needed = _padded(math.prod(shape), dtype)
        with self._mutex:
            block = self._block_with_room(needed, dtype, trainable)
            place = Place(block, block.used, shape)
            block.used += needed
        return place

    def lent_place(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Place | None:
        """A place for a new variable whose copies other processes can map; None where devices or processes don't allow it."""
        if self._link is None or any(device.kind != "cpu" for device in self._devices):
            return None
        lent = LentCopies(self._link.memory, len(self._devices), shape, dtype)
        whole = lent.memory.base
        _note_owner(whole if isinstance(whole, np.ndarray) else lent.memory)
        block = Block(dtype, math.prod(shape), self._devices, self._link, lent)
        block.used = block.capacity
        return Place(block, 0, shape)

    def _block_with_room(self, needed: int, dtype: np.dtype[Any], trainable: bool) -> Block:
        block = self._open.get((dtype, trainable))
        if block is None or block.used + needed > block.capacity:
            largest = _LARGEST_BLOCK_BYTES // dtype.itemsize
            usual = (
                _FIRST_BLOCK_BYTES // dtype.itemsize if block is None else min(2 * block.capacity, largest)
            )
            new = Block(dtype, max(usual, needed), self._devices, self._link)
            if block is None or new.capacity - needed >= block.capacity - block.used:
                self._open[dtype, trainable] = new
            block = new
        return block


_owners: dict[int, tuple[weakref.ref[Array], int]] = {}
"""The arrays that own the blocks' memory, and where that ends, by where it starts."""
_starts: list[int] = []
"""Where blocks start, in ascending order."""


def is_variable_memory(array: Array) -> bool:
    """Whether the array lies in a block, however it came about, so that it changes as the variables there do."""
    if array.base is None or not _starts:
        return False
    address = array.__array_interface__["data"][0]
    before = bisect.bisect_right(_starts, address) - 1
    if before < 0:
        return False
    owner = _owners.get(_starts[before])
    return owner is not None and address < owner[1]


def _note_owner(memory: Array) -> None:
    start = memory.ctypes.data

    def forget(_: object) -> None:
        _owners.pop(start, None)
        with contextlib.suppress(ValueError):
            _starts.remove(start)

    _owners[start] = (weakref.ref(memory, forget), start + memory.nbytes)
    bisect.insort(_starts, start)


def _padded(size: int, dtype: np.dtype[Any]) -> int:
    # Every variable starts on an aligned address: other libraries share it without a copy then.
    unit = max(1, ALIGNMENT // dtype.itemsize)
    return -(-size // unit) * unit


def _zeros(device: Device, size: int, dtype: np.dtype[Any]) -> Array:
    if device.kind != "cpu":
        with device.xp.cuda.Device(device.index):
            return device.xp.zeros(size, dtype)  # type: ignore[no-any-return]
    unit = max(1, ALIGNMENT // dtype.itemsize)
    # Zeroed by the system, page by page, when first touched.
    memory: Array = np.zeros(size + unit, dtype)
    start = (-memory.ctypes.data % ALIGNMENT) // dtype.itemsize
    _note_owner(memory)
    return memory[start : start + size]
