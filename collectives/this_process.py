"""The number of this process in the job that it has joined."""

from __future__ import annotations

import os
from collections.abc import Callable


def _zero() -> int:
    return 0


_number: Callable[[], int] = _zero


def process_number() -> int:
    """The number of this process; 0 before it has joined a job, and where it is alone."""
    return _number()


def set_process_number(number: Callable[[], int]) -> None:
    """Say what tells the number, which may change as long as the job lasts."""
    global _number
    _number = number


os.register_at_fork(after_in_child=lambda: set_process_number(_zero))
