"""Where the processes of one host wait for one another.

Each process has a page that all others have mapped. In it stands how many phases it has come to, and what it brings to
the latest two. A phase is passed when all have come to it; waiting for that spins a little, then yields the core, then sleeps until it
is woken. Between two processes on two cores that takes half a microsecond; with more processes than cores, where busy-polling
collapses, it still takes some tens.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from collectives.arrays import Array

LINE = 64
"""Bytes of a cache line: what two processes write lies in different ones."""
COUNT, SLEEPING, BELL, DATA = 0, LINE, 2 * LINE, 4 * LINE
"""Byte offsets in a page: phases come to; whether its owner sleeps; what it sleeps on; then what it brings, twice."""

_SPINS = 40
_YIELDS = 120
_YIELDS_ALONE = 2000
"""Where every process has a core: who sleeps is woken on the core of who wakes it, and the two would share that for long."""
_NAP = 0.002
"""Seconds of the first sleeps, should a bell be missed."""
_LONG_NAP = 0.05
"""Seconds of later ones: a process that waits long uses no processor time to speak of."""

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}.get(
    platform.machine()
)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_IS_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")
"""Whether the processor makes stores visible in program order."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall: Any = ctypes.CDLL(None, use_errno=True).syscall if sys.platform == "linux" else None


@final
class Flags:
    """The pages of all processes, seen from one of them.

    Args:
        process: which one.
        pages: by process, dtype uint8, zeroed at first, on a multiple of 64 bytes.
        look: called about every 0.1 ms while waiting long, with the phase; raises to end the wait.
    """

    def __init__(self, process: int, pages: Sequence[Array], look: Callable[[int, float], None]) -> None:
        self._pages = list(pages)
        self._look = look
        self._yields = _YIELDS_ALONE if len(pages) <= _num_cores() else _YIELDS
        views = [memoryview(page.data) for page in pages]
        words = [view[: DATA + LINE].cast("q") for view in views]
        self._counts = [word[COUNT // 8 : COUNT // 8 + 1] for word in words]
        self._mine = self._counts[process]
        self._others = [count for other, count in enumerate(self._counts) if other != process]
        self._sleeping = words[process][SLEEPING // 8 : SLEEPING // 8 + 1]
        self._others_sleeping = [
            (word[SLEEPING // 8 : SLEEPING // 8 + 1], page.ctypes.data + BELL, word)
            for other, (word, page) in enumerate(zip(words, pages, strict=True))
            if other != process
        ]
        self._bell = views[process][BELL : BELL + 8].cast("i")
        self._bell_address = pages[process].ctypes.data + BELL
        self._bells = [view[BELL : BELL + 8].cast("i") for o, view in enumerate(views) if o != process]
        self._fences = (threading.Lock(), threading.Lock())
        self.phase = 0

    def count(self, process: int) -> int:
        """How many phases a process has come to."""
        return self._counts[process][0]

    def arrive(self) -> int:
        """Come to the next phase; what was written before can be read by all who pass it. Its number."""
        self.phase = phase = self.phase + 1
        if not _IS_ORDERED:
            self.fence()
        self._mine[0] = phase
        for index, (sleeping, address, _) in enumerate(self._others_sleeping):
            if sleeping[0]:
                self._ring(index, address)
        return phase

    def wait(self, phase: int) -> None:
        """Wait until all have come to a phase."""
        for other in self._others:
            if other[0] >= phase:
                continue
            for _ in range(_SPINS):
                if other[0] >= phase:
                    break
            else:
                self._wait_long(other, phase)
        if not _IS_ORDERED:
            self.fence()

    def meet(self) -> None:
        """`arrive` and `wait`."""
        self.wait(self.arrive())

    def _wait_long(self, other: memoryview, phase: int) -> None:
        for _ in range(self._yields):
            os.sched_yield()
            if other[0] >= phase:
                return
        started = time.monotonic()
        nap = _NAP
        while True:
            waited = time.monotonic() - started
            self._look(phase, waited)
            if waited > 1.0:
                nap = _LONG_NAP
            rung = self._bell[0]
            self._sleeping[0] = 1
            try:
                if not _IS_ORDERED:
                    self.fence()
                if other[0] >= phase:
                    return
                self._sleep(rung, nap)
            finally:
                self._sleeping[0] = 0
            for _ in range(8):
                if other[0] >= phase:
                    return
                os.sched_yield()

    def _sleep(self, rung: int, seconds: float) -> None:
        if _SYS_FUTEX is None or _syscall is None:
            time.sleep(min(seconds, 0.0002))
            return
        timeout = _Timespec(0, int(seconds * 1e9))
        _syscall(
            ctypes.c_long(_SYS_FUTEX),
            ctypes.c_void_p(self._bell_address),
            ctypes.c_int(_FUTEX_WAIT),
            ctypes.c_int(rung),
            ctypes.byref(timeout),
            None,
            ctypes.c_int(0),
        )

    def _ring(self, index: int, address: int) -> None:
        bell = self._bells[index]
        bell[0] = (
            bell[0] + 1
        ) & 0x3FFFFFFF  # two who ring at once may count one: the sleeper wakes all the same
        if _SYS_FUTEX is not None and _syscall is not None:
            _syscall(
                ctypes.c_long(_SYS_FUTEX),
                ctypes.c_void_p(address),
                ctypes.c_int(_FUTEX_WAKE),
                ctypes.c_int(1),
                None,
                None,
                ctypes.c_int(0),
            )

    def fence(self) -> None:
        """Let what was written before be seen before what is written after, on every processor."""
        # An acquire after a release is ordered on every processor that Python runs on; one lock alone is not enough.
        for lock in self._fences:
            lock.acquire()
            lock.release()

    def close(self) -> None:
        """Let go of the pages."""
        for view in (*self._counts, *self._bells, self._bell):
            view.release()
        self._others_sleeping = []
        self._pages = []


def page_bytes(data_bytes: int) -> int:
    """The size of a page that holds so much of what a process brings to a phase, twice."""
    return int(np.ceil((DATA + 2 * data_bytes) / 4096)) * 4096


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
