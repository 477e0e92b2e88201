"""Opens one checkpoint in all processes of a job, also in those that don't see the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from collectives.calls import Call
from strategies.checkpoints.file_format import CHUNK_BYTES, as_bytes
from strategies.checkpoints.file_reading import ArrayFile
from strategies.checkpoints.together import Together

_BYTES = Call("the bytes of a checkpoint")


def open_file(path: Path) -> ArrayFile:
    """The checkpoint at a path, with all its bytes verified. Errors as of `ArrayFile.open`."""
    file = ArrayFile.open(path)
    file.verify()
    return file


def open_together(path: Path, together: Together) -> ArrayFile:
    """The checkpoint that the chief sees at a path. All processes call it.

    Each reads the file itself, where it is the same one; where there is none, or another one, as on a disk that the
    hosts don't share, the chief sends it, and it is kept in memory until the last value has been taken.

    Raises:
        FileNotFoundError: the chief sees none.
        CheckpointError: what it sees is none of ours, or not whole.
    """
    if together.is_alone:
        return open_file(path)
    file: ArrayFile | None = None
    error: Exception | None = None
    identity: Any = None
    try:
        file = open_file(path)
        identity = file.identity()
    except Exception as wrong:  # noqa: BLE001  # the chief's is raised in all processes; what others lack is sent
        error = wrong
    seen = together.agree("restore: the file", identity, error if together.is_chief else None)
    lacking = [process for process, one in enumerate(seen) if one is None]
    others = [process for process, one in enumerate(seen) if one not in (None, seen[0])]
    if others:
        together.say(
            "restore: %s is another file in the processes %s; all take that of process 0", path, others
        )
    if not lacking and not others:
        assert file is not None
        return file
    received = _send(file, seen[0][0], together, needed=identity != seen[0])
    error = None
    try:
        if received is not None:
            file = ArrayFile(received, f"{path} (as process 0 sees it)")
            file.verify()
    except Exception as wrong:  # noqa: BLE001  # told to all
        error = wrong
    together.agree("restore: the chief's file", None, error)
    assert file is not None
    return file


def _send(file: ArrayFile | None, num_bytes: int, together: Together, *, needed: bool) -> int | None:
    """A file in memory with the chief's bytes; None where they are not needed."""
    received = os.memfd_create("checkpoint") if needed else None
    buffer = np.empty(min(num_bytes, CHUNK_BYTES), np.uint8)
    link = together.link()
    try:
        for start in range(0, num_bytes, CHUNK_BYTES):
            part = buffer[: num_bytes - start]
            if together.is_chief:
                assert file is not None
                file.read_bytes(as_bytes(part), start)
            link.broadcast(_BYTES, 0, part if together.is_chief else None, [part])
            if received is not None:
                left = as_bytes(part)
                while left:
                    left = left[os.write(received, left) :]
    except BaseException:
        if received is not None:
            os.close(received)
        raise
    finally:
        link.close()
    return received
