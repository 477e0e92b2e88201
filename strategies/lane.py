"""The caller's thread, and the replicas that it hosts.

It hosts replica 0, and, in short steps, every replica that no other thread has begun by the time that it would have to wait:
waking a thread takes longer than a small step. Hosted replicas take turns as greenlets, and a wait is a switch between
them.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable
from contextvars import Context
from typing import final

from greenlet import getcurrent, greenlet

from collectives.rendezvous import Rendezvous, ThreadGate

_BY_THREAD = ("torch", "cupy", "jax", "tensorflow")
"""Libraries that keep state by thread, such as PyTorch's no_grad: replicas must not share one with them around."""


@final
class Lane:
    """The caller's thread during the steps of one crew.

    Args:
        rendezvous: where the replicas meet.
        take: the context to begin a replica in, which is then the caller's to run; None if another thread has begun it.
        execute: runs a replica's step, and never raises.
    """

    def __init__(
        self, rendezvous: Rendezvous, take: Callable[[int], Context | None], execute: Callable[[int], None]
    ) -> None:
        size = rendezvous.size
        self._rendezvous = rendezvous
        self._take = take
        self._execute = execute
        self._bell = _thread.allocate_lock()
        self._bell.acquire()
        self._opened = [False] * size
        self._thread_gates = [ThreadGate() for _ in range(size)]
        self._hosted: list[int] = []
        self._suspended: dict[int, greenlet] = {}
        self._untaken: list[int] = []
        self._shares_thread = True
        self._root: greenlet | None = None
        self._stacks: dict[int, greenlet] = {}
        rendezvous.set_gate(0, _LaneGate(self, 0))

    def begin(self, shares: bool) -> None:
        """Before each step, in the caller's thread.

        Args:
            shares: whether it takes what other threads have not begun when it would have to wait in a meeting.
        """
        self._main = root = getcurrent()
        while root.parent is not None:
            root = root.parent
        if root is not self._root:
            # Stacks of another thread can't run in this one. Its root tells, as threads' numbers are used again.
            self._root = root
            self._stacks = {}
        self._shares_thread = shares and not any(name in sys.modules for name in _BY_THREAD)
        self._untaken = list(range(self._rendezvous.size - 1, 0, -1))
        if self._hosted:
            for replica in self._hosted:
                self._rendezvous.set_gate(replica, self._thread_gates[replica])
            self._hosted.clear()

    def end(self) -> None:
        """After each step: keep nothing of it."""
        for replica in self._hosted:
            if replica in self._stacks:
                self._stacks[replica].gr_context = None

    def wake(self) -> None:
        """Let the thread look around, if it sleeps. Any thread may call it."""
        if self._bell.locked():
            try:
                self._bell.release()
            except RuntimeError:  # another thread was quicker
                return

    def sleep(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until something has happened."""
        return self._bell.acquire(True, timeout)

    def advance(self) -> bool:
        """Run some hosted replica, which can go on or has not begun, until it waits or ends; whether there was one."""
        for replica, fiber in self._suspended.items():
            if self._opened[replica]:
                fiber.switch()
                return True
        # While the last one runs there is nobody else to wait for, so it needs no stack of its own.
        alone = self._rendezvous.num_ended == self._rendezvous.size - 1
        if not (self._shares_thread or alone):
            return False
        while self._untaken:
            replica = self._untaken.pop()
            context = self._take(replica)
            if context is not None:
                self._host(replica, context, alone)
                return True
        return False

    def wait(self, replica: int, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for a hosted replica's gate, while the others run; whether it was opened."""
        opened, suspended = self._opened, self._suspended
        while not opened[replica]:
            suspended[replica] = getcurrent()
            try:
                advanced = self.advance()
            finally:
                del suspended[replica]
            if not advanced and not self.sleep(timeout):
                break
        was_opened, opened[replica] = opened[replica], False
        return was_opened

    def open(self, replica: int) -> None:
        """Open a hosted replica's gate."""
        self._opened[replica] = True
        self.wake()

    def close(self, replica: int) -> None:
        """Close a hosted replica's gate."""
        self._opened[replica] = False

    def _host(self, replica: int, context: Context, alone: bool) -> None:
        self._hosted.append(replica)
        self._rendezvous.set_gate(replica, _LaneGate(self, replica))
        if alone:
            context.run(self._execute, replica)
            return
        try:
            fiber = self._stacks.get(replica)
            if fiber is None or fiber.dead:  # Ctrl-C may have ended one
                fiber = self._stacks[replica] = greenlet(_run_tasks, getcurrent())
                fiber.switch()  # to its wait for a task and back here
            # When the replica ends, the caller's own stack goes on, which then looks for what can run.
            fiber.parent = self._main
            fiber.gr_context = context
        except BaseException as failure:  # out of memory, say: the others must not wait for this replica
            self._rendezvous.abort(failure)
            self._rendezvous.end(replica)
            raise
        fiber.switch((self._execute, replica))


def _run_tasks() -> None:
    """The life of a hosted replica's stack, which is kept for later steps: making one takes longer than a small step."""
    while True:
        parent = getcurrent().parent
        assert parent is not None
        # Nothing but this frame may hold a task: it holds the strategy, which may be dropped while the stack is idle.
        execute, replica = parent.switch()
        execute(replica)
        del execute, parent


@final
class _LaneGate:
    """The gate of one hosted replica."""

    def __init__(self, lane: Lane, replica: int) -> None:
        self._lane = lane
        self._replica = replica

    def wait(self, timeout: float) -> bool:
        return self._lane.wait(self._replica, timeout)

    def open(self) -> None:
        self._lane.open(self._replica)

    def close(self) -> None:
        self._lane.close(self._replica)
