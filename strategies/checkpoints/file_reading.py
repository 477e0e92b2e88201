"""Reads a checkpoint's file, and believes nothing in it before it has been checked."""

from __future__ import annotations

import json
import os
import threading
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from collectives.arrays import Array
from strategies.checkpoints.errors import CheckpointError
from strategies.checkpoints.file_format import (
    CHUNK_BYTES,
    FORMAT,
    INDEX_CHECKSUM_KEY,
    INDEX_KEY,
    StoredArray,
    as_bytes,
    dtype_named,
    num_chunks,
    stored_as,
)
from strategies.checkpoints.states import references
from strategies.checkpoints.work_sharing import share

_SCRATCH_BYTES = 1 << 20
"""Fits the cache: what is only checked need not go to memory."""


@final
class ArrayFile:
    """An open checkpoint. It stays readable when its file is replaced or removed.

    Args:
        file: the descriptor of a file on the disk or in memory; closed with this object.
        source: where it came from, in words.

    Raises:
        CheckpointError: it is none of ours, or not whole.
        ModuleNotFoundError: safetensors, or ml_dtypes for bfloat16, is missing.
    """

    def __init__(self, file: int, source: str) -> None:
        self.source = source
        self._file = file
        weakref.finalize(self, os.close, file)
        self.arrays, self.states = self._parsed()

    @classmethod
    def open(cls, path: Path) -> Self:
        """The checkpoint at a path.

        Raises:
            FileNotFoundError: there is none.
            CheckpointError: a folder; otherwise as this class.
        """
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"restore: no checkpoint at {str(path)!r}; need the path that Checkpoint.save returned"
            ) from error
        if path.is_dir():
            os.close(file)
            raise CheckpointError(
                f"restore: got {str(path)!r}, which is a folder; need the path of a checkpoint in it — "
                "CheckpointManager(checkpoint, folder).latest_checkpoint"
            )
        return cls(file, str(path))

    @classmethod
    def of_bytes(cls, content: Any) -> Self:
        """The checkpoint that these bytes are, which are copied.

        Args:
            content: an object with the buffer protocol.
        """
        file = os.memfd_create("checkpoint")
        try:
            _write_all(file, memoryview(content).cast("B"))
        except BaseException:
            os.close(file)
            raise
        return cls(file, "a checkpoint in memory")

    arrays: Mapping[str, StoredArray]
    """By name."""
    states: Mapping[str, Any]
    """What was saved beside the arrays, in JSON's terms, by name."""

    def verify(self) -> None:
        """Compare all bytes with their checksums.

        Raises:
            CheckpointError: some differ.
        """
        scratch = threading.local()
        damaged: set[str] = set()

        def check(array: StoredArray, number: int) -> None:
            buffer = getattr(scratch, "buffer", None)
            if buffer is None:
                buffer = scratch.buffer = memoryview(bytearray(_SCRATCH_BYTES))
            start = array.start + number * CHUNK_BYTES
            stop = min(start + CHUNK_BYTES, array.start + array.num_bytes)
            checksum = 0
            while start < stop:
                part = buffer[: min(_SCRATCH_BYTES, stop - start)]
                self.read_bytes(part, start)
                checksum = zlib.crc32(part, checksum)
                start += len(part)
            if checksum != array.checksums[number]:
                damaged.add(array.name)

        chunks = [(array, number) for array in self.arrays.values() for number in range(len(array.checksums))]
        share(lambda chunk: check(*chunk), chunks, sum(array.num_bytes for array in self.arrays.values()))
        if damaged:
            raise self._damaged(f"the checksum of {', '.join(sorted(damaged))} is wrong")

    def identity(self) -> list[int]:
        """What tells it from other checkpoints: its size, and a checksum over the checksums of all there is in it."""
        size = os.fstat(self._file).st_size
        header = bytearray(8 + int.from_bytes(os.pread(self._file, 8, 0), "little"))
        self.read_bytes(memoryview(header), 0)
        return [size, zlib.crc32(header)]

    def read(self, name: str) -> Array:
        """An array, in new memory."""
        stored = self.arrays[name]
        array = np.empty(stored.shape, stored.dtype)
        self.read_into([(name, 0, [array])])
        return array

    def read_into(self, targets: Iterable[tuple[str, int, Sequence[Array]]]) -> None:
        """Fill arrays.

        Args:
            targets: the name in the file, how many bytes of that array to skip, and the equally large arrays to
                fill, C-contiguous and in host memory.
        """
        tasks = []
        total = 0
        for name, skip, arrays in targets:
            views = [as_bytes(array) for array in arrays]
            size = len(views[0])
            total += size
            start = self.arrays[name].start + skip
            for begin in range(0, size, CHUNK_BYTES):
                tasks.append((start + begin, [view[begin : begin + CHUNK_BYTES] for view in views]))

        def fill(task: tuple[int, list[memoryview]]) -> None:
            start, (first, *others) = task
            self.read_bytes(first, start)
            for other in others:
                other[:] = first

        share(fill, tasks, total)

    def read_bytes(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer with the file's bytes from ``start`` on."""
        while buffer:
            count = os.preadv(self._file, [buffer], start)
            if not count:
                raise self._damaged("the file has become shorter")
            buffer = buffer[count:]
            start += count

    # ------------------------------------------------------------------ pieces

    def _parsed(self) -> tuple[dict[str, StoredArray], dict[str, Any]]:
        try:
            # Of the extra `checkpoint`. Its parser has been tried with all that a hostile header can be.
            from safetensors import SafetensorError, safe_open  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "restore: reading checkpoints needs safetensors; pip install safetensors"
            ) from error
        try:
            # The same file as ours, also if another has taken its name since.
            with safe_open(f"/dev/fd/{self._file}", framework="numpy") as opened:
                metadata = opened.metadata() or {}
                names = list(opened.offset_keys())
                seen = {
                    name: (piece.get_dtype(), list(piece.get_shape()))
                    for name in names
                    for piece in [opened.get_slice(name)]
                }
        except (SafetensorError, OSError, ValueError) as error:
            raise self._damaged(f"no whole safetensors file ({error})") from error
        index = metadata.get(INDEX_KEY)
        if index is None:
            raise CheckpointError(
                f"restore: {self.source!r} is a safetensors file of another program; need one that Checkpoint.save "
                "wrote — read it with safetensors.numpy.load_file, and assign its arrays"
            )
        if f"{zlib.crc32(index.encode()):08x}" != metadata.get(INDEX_CHECKSUM_KEY):
            raise self._damaged("the checksum of its index is wrong")
        try:
            return self._understood(json.loads(index), names, seen)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise self._damaged(f"its index makes no sense ({error!r})") from error

    def _understood(
        self, index: Any, names: Sequence[str], seen: Mapping[str, tuple[str, list[int]]]
    ) -> tuple[dict[str, StoredArray], dict[str, Any]]:
        if index["format"] != FORMAT:
            raise CheckpointError(
                f"restore: {self.source!r} has format {index['format']!r}; need {FORMAT} — "
                "update xpdistribute, or save again with the version here"
            )
        described = index["arrays"]
        if set(described) != set(names):
            raise self._damaged("its index and its header name different arrays")
        start = 8 + int.from_bytes(os.pread(self._file, 8, 0), "little")
        arrays = {}
        for name in names:
            about = described[name]
            if (seen[name][0], seen[name][1]) != stored_as(about["dtype"], about["shape"]):
                raise self._damaged(f"its index and its header describe {name} differently")
            array = StoredArray(
                name,
                tuple(about["shape"]),
                dtype_named(about["dtype"]),
                start,
                tuple(int(checksum, 16) for checksum in about["crc32"]),
            )
            if len(array.checksums) != num_chunks(array.num_bytes):
                raise self._damaged(f"it has too few or too many checksums of {name}")
            arrays[name] = array
            start += array.num_bytes
        states = index["states"]
        if not isinstance(states, dict):
            raise self._damaged("its states are none")
        if not {name for state in states.values() for name in references(state)} <= set(arrays):
            raise self._damaged("its states speak of arrays that it doesn't have")
        return arrays, states

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"restore: {self.source!r} can't be used: {what}; need a whole file as Checkpoint.save wrote it — "
            "take an earlier checkpoint"
        )


def _write_all(file: int, content: memoryview) -> None:
    while content:
        content = content[os.write(file, content) :]
