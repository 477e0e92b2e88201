"""Copies, reads and checksums on several threads: one alone does not use all of memory's speed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

_SHARED_FROM = 16 << 20
"""Bytes; below, starting threads takes longer."""
_MOST_THREADS = 4


def share(work: Callable[[T], object], tasks: Sequence[T], num_bytes: int) -> None:
    """Do the tasks, on several threads where that pays.

    Plain threads, as executors refuse to work for a save that the end of the program waits for.

    Args:
        work: called with each task; does most of its work without the interpreter.
        tasks: independent of one another.
        num_bytes: that all of them read.

    Raises:
        Exception: the first one that a task raised.
    """
    left = iter(tasks)
    mutex = threading.Lock()
    failures: list[BaseException] = []

    def take() -> None:
        while not failures:
            with mutex:
                task = next(left, None)
            if task is None:
                return
            try:
                work(task)
            except BaseException as failure:  # noqa: BLE001  # raised below, on the caller's thread
                failures.append(failure)

    count = 1 if num_bytes <= _SHARED_FROM else min(_MOST_THREADS, os.cpu_count() or 1)
    others = [threading.Thread(target=take, name=f"checkpoint {i}", daemon=True) for i in range(1, count)]
    for other in others:
        other.start()
    take()
    for other in others:
        other.join()  # it waits for nobody
    if failures:
        raise failures[0]
