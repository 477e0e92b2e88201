"""A checkpoint that is being written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import final

import numpy as np

from collectives.arrays import ALIGNMENT, Array
from collectives.errors import CollectiveError
from strategies.checkpoints.file_format import CHUNK_BYTES, SavedArray
from strategies.checkpoints.work_sharing import share

_TO_END = 3600.0
"""Seconds that a save may take, for whoever only wants it to be over."""
_TO_START = 60.0
"""Seconds that the thread waits for the word to begin, which comes at once."""


@final
class PendingSave:
    """A save that goes on in a thread of its own. The program does not exit before it has ended.

    Each process of a job has one, which ends when the chief has written the file; waiting for it is no collective.

    Args:
        path: of the checkpoint.
        write: writes it; in other processes than the chief, waits for that.
    """

    def __init__(self, path: str, write: Callable[[], None]) -> None:
        self._path = path
        self._error: BaseException | None = None
        self._is_told = False

        go = threading.Event()

        def run() -> None:
            go.wait(_TO_START)
            try:
                write()
            except BaseException as error:  # noqa: BLE001  # raised by wait(), or by the next save
                self._error = error

        self._thread = threading.Thread(target=run, name=f"save {path}")
        self._thread.start()
        # Not before: the new thread would hold the interpreter, and the step stand still for it.
        go.set()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float = 600.0) -> str:
        """Wait until the checkpoint is on the disk.

        Args:
            timeout: seconds.

        Returns:
            Its path.

        Raises:
            TimeoutError: it is still being written; it goes on.
            OSError: it could not be written; what stood at the path still does.
            PeerFailedError: another process failed before all had heard of it; the file may be there.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"save: {self._path!r} is still being written after {timeout:g} s; need a faster disk, or more time — "
                "call wait(timeout=...) again"
            )
        self._is_told = True
        if self._error is not None:
            raise self._error
        return self._path

    def settle(self) -> None:
        """Before the next save: wait, and raise what went wrong unless it has been raised before.

        That processes could not agree any more is not raised here: what they do together next says so.
        """
        if self._is_told and self.done:
            return
        with suppress(CollectiveError):
            self.wait()

    def outlast(self) -> None:
        """Wait until it has ended, well or not."""
        self._thread.join(_TO_END)


@final
class Snapshot:
    """Memory that states are copied into before they change again; kept, as new memory is slow to touch first."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, arrays: Sequence[SavedArray]) -> list[SavedArray]:
        """The same arrays, of copies. They hold until the next call."""
        needed = sum(_padded(piece.nbytes) for array in arrays for piece in array.pieces)
        if self._memory.nbytes < needed:
            self._memory = np.empty(0, np.uint8)  # let go of the old before there is a new
            self._memory = np.empty(needed, np.uint8)
        start = 0
        copies = []
        tasks: list[tuple[Array, Array]] = []
        for array in arrays:
            pieces = []
            for piece in array.pieces:
                pieces.append(self._part(start, piece))
                tasks += _halves(pieces[-1], piece)
                start += _padded(piece.nbytes)
            copies.append(replace(array, pieces=pieces))
        share(lambda task: np.copyto(*task), tasks, needed)
        return copies

    def _part(self, start: int, like: Array) -> Array:
        part: Array = self._memory[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
        return part


def _halves(copy: Array, piece: Array) -> list[tuple[Array, Array]]:
    """What is to be copied, in parts small enough for threads to share."""
    if piece.nbytes <= CHUNK_BYTES or not piece.ndim or len(piece) < 2:
        return [(copy, piece)]
    middle = len(piece) // 2
    return _halves(copy[:middle], piece[:middle]) + _halves(copy[middle:], piece[middle:])


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
