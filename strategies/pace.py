"""Which way to run a step is faster, learned from how long it took."""

from __future__ import annotations

from typing import final

_SHORT = 3e-4
"""Seconds. A longer step with all replicas in their own threads can only lose by sharing one."""
_LOOK_AGAIN = 256
"""Every so many short steps the slower way is tried again."""
_WEIGHT = 0.2
"""Of the newest time in the running mean."""


@final
class Pace:
    """The times of one step function, with each replica in a thread of its own and with one thread for all."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._apart: float | None = None
        self._together: float | None = None

    def together(self) -> bool:
        """Whether the next step should have the caller's thread take what other threads have not begun."""
        self._num_steps += 1
        apart, together = self._apart, self._together
        if apart is None or apart > _SHORT:
            return False
        if together is None:
            return True
        return (together < apart) ^ (self._num_steps % _LOOK_AGAIN == 0)

    def learn(self, seconds: float, together: bool) -> None:
        """Take in how long a step took."""
        if together:
            old = self._together
            self._together = seconds if old is None else old + _WEIGHT * (seconds - old)
        else:
            old = self._apart
            self._apart = seconds if old is None else old + _WEIGHT * (seconds - old)
