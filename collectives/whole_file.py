"""Writes a file as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Put a file in place in one instant: whoever opens the path sees all of the old content or all of the new.

    Args:
        path: where; missing folders are made.
        content: all of it.

    Raises:
        OSError: it can't be written; what was there before is still there.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, as a rename is one instant only within one file system.
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(beside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise
