"""Locks that a forked child finds open.

Another thread may hold a lock at the moment of a fork. It is not there in the child, which would wait for ever.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import final


@final
class ForkSafeLock:
    """A reentrant lock, made anew in a forked child. What it guards is short, so it has no time limit."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Open it, whoever holds it."""
        self._lock = threading.RLock()


_all: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_all):
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)
