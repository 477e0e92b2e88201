"""Writes a checkpoint's file: whole and on the disk, or not at all.

The bytes go to a partial file beside the target, from the memory in which they are, while a second thread computes
their checksums. Once they are on the disk, one rename makes the partial file the checkpoint. Whoever opens it sees
the old one or the new one, whenever the writer or the machine stops.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import mmap
import os
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from collectives.arrays import Array
from strategies.checkpoints.file_format import CHUNK_BYTES, SavedArray, as_bytes, header, in_file_order

_MOST_BUFFERS = 256
_ABANDONED_AFTER = 60.0
"""Seconds after which an unlocked partial file has no writer: the lock comes right after the file."""


def write_file(path: Path, arrays: Sequence[SavedArray], states: Mapping[str, Any]) -> None:
    """Write a checkpoint; folders that are missing are made.

    Args:
        path: what stood there is replaced, when the new file is complete.
        arrays: in any order.
        states: what is saved beside the arrays, in JSON's terms.

    Raises:
        OSError: it can't be written; what stood at ``path`` still does.
        ValueError: more names and states than the format allows.
    """
    if "\0" in str(path):
        raise ValueError(
            f"save: got {str(path)!r}, which no file can be called; need a path without the character 0"
        )
    try:
        _write_file(path, arrays, states)
    except OSError as error:
        if error.errno is None:
            raise
        num_bytes = sum(array.num_bytes for array in arrays)
        number = _kind(error.errno, path)
        what = f"save: {os.strerror(number)}; {_remedy(number, path, num_bytes)}"
        raise OSError(number, what, str(path)) from error


def _write_file(path: Path, arrays: Sequence[SavedArray], states: Mapping[str, Any]) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"save: got {str(path)!r}, which is a folder; need the path of a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.partial")
    file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        # Says that somebody is at work on this file, for as long as that is true, even if it is killed.
        fcntl.flock(file, fcntl.LOCK_EX)
        _write(file, in_file_order(arrays), states)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
    _sync_folder(path.parent)


def _kind(number: int, path: Path) -> int:
    """The number of an error, also of one that Python gives another: that of a file in the place of a folder."""
    return errno.ENOTDIR if number == errno.EEXIST and _file_above(path) else number


def _file_above(path: Path) -> Path | None:
    """What stands where a folder should, among those that a path leads through."""
    return next((folder for folder in path.parents if os.path.lexists(folder) and not folder.is_dir()), None)


def _remedy(number: int, path: Path, num_bytes: int) -> str:
    """What there is to be done about a file that can't be written."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"need room for {num_bytes:,} bytes beside what stood there before — free some, or save to another path"
    if number == errno.EFBIG:
        return f"need files of {num_bytes:,} bytes to be allowed — raise the limit (ulimit -f unlimited), or save to another path"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "need a folder that this user may write into — change its rights, or save to another path"
    if number == errno.ENOTDIR:
        return f"{_file_above(path)} is no folder; need one there — move it away, or save to another path"
    if number == errno.ENAMETOOLONG:
        return "need a shorter name"
    if number == errno.ENOENT:
        return f"need a folder, and {path.parent} can't be made — save to another path"
    return "need a path that can be written — save to another one"


def write_bytes(arrays: Sequence[SavedArray], states: Mapping[str, Any]) -> Array:
    """The bytes of the file that `write_file` would write: shape ``(n,)``, dtype uint8, in memory of their own."""
    file = os.memfd_create("checkpoint")
    try:
        _write(file, in_file_order(arrays), states)
        memory = mmap.mmap(file, 0)
    finally:
        os.close(file)
    return np.frombuffer(memory, np.uint8)


def _write(file: int, arrays: Sequence[SavedArray], states: Mapping[str, Any]) -> None:
    pieces = [[as_bytes(np.ascontiguousarray(piece)) for piece in array.pieces] for array in arrays]
    checksums: list[list[int]] = []
    # A plain thread: executors refuse to work for a save that the end of the program waits for.
    computing = threading.Thread(
        target=lambda: checksums.extend(map(_checksums, pieces)), name="checksums", daemon=True
    )
    computing.start()
    _write_all(file, [memoryview(header(arrays, None, states)), *(p for each in pieces for p in each)])
    computing.join()  # it waits for nobody
    by_name = {array.name: checksum for array, checksum in zip(arrays, checksums, strict=True)}
    os.lseek(file, 0, os.SEEK_SET)
    _write_all(file, [memoryview(header(arrays, by_name, states))])
    os.fsync(file)


def _checksums(pieces: Sequence[memoryview]) -> list[int]:
    """Of each `CHUNK_BYTES` of the whole that the pieces make up."""
    checksums: list[int] = []
    room = 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            if not room:
                checksums.append(0)
                room = CHUNK_BYTES
            part = piece[start : start + room]
            checksums[-1] = zlib.crc32(part, checksums[-1])
            start += len(part)
            room -= len(part)
    return checksums


def _write_all(file: int, buffers: Sequence[memoryview]) -> None:
    for batch in _batches(buffers):
        left = batch
        while left:
            written = os.writev(file, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if left:
                left[0] = left[0][written:]


def _batches(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Few system calls for many small buffers, and pieces of a large one: a call writes 2 GB at most."""
    batch: list[memoryview] = []
    size = 0
    for buffer in buffers:
        for start in range(0, len(buffer), CHUNK_BYTES):
            part = buffer[start : start + CHUNK_BYTES]
            if size + len(part) > CHUNK_BYTES or len(batch) == _MOST_BUFFERS:
                yield batch
                batch, size = [], 0
            batch.append(part)
            size += len(part)
    yield batch


def _sync_folder(folder: Path) -> None:
    """Put the rename itself on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _remove_abandoned(path: Path) -> None:
    """Remove what killed writers of this path have left."""
    for name in glob.glob(glob.escape(f"{path.parent}/.{path.name}.") + "*.partial"):
        try:
            file = os.open(name, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            if time.time() - os.fstat(file).st_mtime > _ABANDONED_AFTER:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name)
        except (BlockingIOError, FileNotFoundError):
            pass  # its writer lives, or somebody else has removed it
        finally:
            os.close(file)
