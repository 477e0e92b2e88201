"""Runs one function in every local replica at the same time.

The caller's own thread runs replica 0, and each other replica has a thread that is made once and kept, woken through one raw
lock. A replica whose thread has not begun by the time that the caller would have to wait is run by the caller too
(see `Lane`), so that steps too short for the switch to another thread don't wait for it.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextvars import Context, copy_context
from typing import Any, final

from collectives.devices import Device
from collectives.errors import CollectiveAbortedError, CollectiveError, CollectiveTimeoutError
from collectives.rendezvous import Rendezvous
from strategies.lane import Lane
from strategies.pace import Pace
from variables.replica_context import ReplicaContext, current

_POLL = 0.25
"""Seconds between looks at whether a replica that is waited for has been given up."""
_GRACE = 0.2
"""Seconds that replicas get to end by themselves, and once more when interrupted: Ctrl-C is through within a second."""

_MANY_STEPS = 256
"""Different step functions whose times are kept at once."""

_log = logging.getLogger("xpdistribute")


class ReplicaInterrupted(BaseException):
    """Raised inside a replica that is stuck in Python code, when the step it belongs to has failed."""


@final
class ReplicaThreads:
    """The threads of a strategy's local replicas.

    Args:
        contexts: the replicas, by local replica id.
        devices: as many.
        rendezvous: where they meet.
    """

    def __init__(
        self, contexts: Sequence[ReplicaContext], devices: Sequence[Device], rendezvous: Rendezvous
    ) -> None:
        self._contexts = contexts
        self._devices = devices
        self._rendezvous = rendezvous
        self._size = len(contexts)
        self._errors: list[BaseException | None] = [None] * self._size
        self._thread_ids: list[int | None] = [None] * self._size
        self._interrupting = _thread.allocate_lock()
        self._calls: Sequence[Callable[[], Any]] = ()
        self._results: list[Any] = []
        self._paces: dict[Hashable, Pace] = {}
        self._desk = _Desk(self._size, rendezvous.timeout, weakref.WeakMethod(self._overdue))
        self._lane = Lane(rendezvous, self._desk.take, self._execute)
        self._threads: dict[int, threading.Thread] = {}
        self._all_started = False
        self._caller = -1
        self._is_in_child = False
        self.is_broken = False
        weakref.finalize(self, self._desk.close)

    def close(self) -> None:
        """End the threads."""
        self._desk.close()

    @property
    def is_running(self) -> bool:
        """Whether a step is under way."""
        return bool(self._calls)

    def abandon_in_child(self) -> None:
        """In a forked child: end the step that is under way, as the threads of its other replicas are not in the child."""
        if not self.is_running:
            return
        self._is_in_child = self.is_broken = True
        self._interrupting = _thread.allocate_lock()
        here, replicas = _thread.get_ident(), range(self._size)
        absent = [replica for replica in replicas if self._thread_ids[replica] != here]
        for replica in absent:
            if not self._rendezvous.has_ended(replica):
                self._desk.take(replica)
        self._rendezvous.abandon(
            CollectiveAbortedError(
                "run: this process was forked in a step, and has none of the threads of the step's other replicas; need them for whatever "
                "replicas do together, and to end the step — let a child compute only what needs no strategy and end by os._exit(), "
                "or start it by 'spawn'"
            ),
            absent,
        )

    def run(self, calls: Sequence[Callable[[], Any]], step: Hashable) -> list[Any]:
        """The results of the calls, each made in its replica, by local replica.

        Args:
            calls: one for each replica.
            step: what they are calls of; steps that are equal are expected to take equally long.

        Raises:
            Exception: what a replica raised first, with a note that names the replica.
        """
        if not self._all_started:
            self._start()
        rendezvous, lane, outside = self._rendezvous, self._lane, current.get()
        self._caller = _thread.get_ident()
        rendezvous.begin()
        pace = self._paces.get(step)
        if pace is None:
            if len(self._paces) >= _MANY_STEPS:  # a program that makes its steps by the dozen
                self._paces.clear()
            pace = self._paces[step] = Pace()
        together = pace.together()
        lane.begin(together)
        started = time.perf_counter()
        self._calls, self._results, self._errors = calls, [None] * self._size, [None] * self._size
        try:
            for replica in range(1, self._size):
                # A context can be entered by one thread at a time only.
                self._desk.hand_out(replica, (copy_context(), self._execute))
            self._execute(0)
            while rendezvous.num_ended < self._size:
                if not lane.advance() and not self._wait():
                    break
        except BaseException as interrupt:  # Ctrl-C, in this module's own code
            self.is_broken = True
            current.set(outside)
            rendezvous.abort(interrupt)
            self._release_stuck(interrupt)
            raise
        finally:
            self._calls = ()
        lane.end()
        failure = rendezvous.failure
        if failure is not None:
            self._raise(failure)
        pace.learn(time.perf_counter() - started, together)
        results, self._results, self._calls = self._results, [], ()
        return results

    def _execute(self, replica: int) -> None:
        results, context = self._results, self._contexts[replica]
        token = current.set(context)
        try:
            self._thread_ids[replica] = context.thread = _thread.get_ident()
            try:
                results[replica] = self._calls[replica]()
            finally:
                with self._interrupting:
                    self._thread_ids[replica] = None
                _deliver_pending_exception()
        except BaseException as error:  # noqa: BLE001  # handed to the caller, which raises it
            self._errors[replica] = error
            number, count = context.replica_id_in_sync_group, context.num_replicas_in_sync
            _note(error, f"in replica {number} of {count} ({self._devices[replica]})")
            self._rendezvous.abort(error)
            if isinstance(error, CollectiveTimeoutError):
                self._report_caller(error)
                self._interrupt(error.missing)
        finally:
            context.thread = None
            current.reset(token)
            if self._rendezvous.end(replica):
                self._lane.wake()
            if self._is_in_child and _thread.get_ident() != self._caller:
                _end_child(self._errors[replica] or self._rendezvous.failure)

    # ----------------------------------------------------------------- waiting

    def _wait(self) -> bool:
        """Until something has happened; False once a stuck replica has been given up."""
        started = time.monotonic()
        report_after = self._rendezvous.timeout
        while not self._lane.sleep(_POLL):
            failure = self._rendezvous.failure
            waited = time.monotonic() - started
            if failure is not None and (_is_silent(failure) or waited > self._rendezvous.timeout):
                self._release_stuck(failure)
                return False
            if waited > report_after:
                report_after *= 2
                _log.warning(
                    "run: waited %.0f s for replicas that have not ended; %s", waited, self._whereabouts()
                )
        return True

    def _release_stuck(self, failure: BaseException) -> None:
        """After a failure that other replicas may not notice: let them end, interrupt them, or give them up."""
        self.is_broken = True
        for replica in range(1, self._size):
            if self._desk.take(replica) is not None:  # nobody has begun it, and nobody shall
                self._rendezvous.end(replica)
        if isinstance(failure, CollectiveTimeoutError):
            if not self._all_end_within(0):
                _note(failure, self._whereabouts())
        elif self._all_end_within(_GRACE):
            self.is_broken = False
            return
        self._interrupt([replica for replica in range(self._size) if not self._rendezvous.has_ended(replica)])
        if self._all_end_within(_GRACE):
            self.is_broken = False
            return
        self._desk.close()  # its thread ends when its call returns; the strategy makes new ones
        if any(thread_id is not None for thread_id in self._thread_ids):
            _log.error("run: gave up waiting for replicas that do not end; %s", self._whereabouts())

    def _report_caller(self, failure: CollectiveTimeoutError) -> None:
        """Say at once where replica 0 is stuck: its thread is the caller's, so `run` can't raise before its call ends."""
        if 0 not in failure.missing or self._thread_ids[0] in (None, _thread.get_ident()):
            return
        where = self._whereabouts()
        _note(self._rendezvous.failure or failure, where)
        _log.error("run: %s; %s; it raises when replica 0's call ends", failure, where)

    def _all_end_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._rendezvous.num_ended < self._size:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if not self._lane.advance():
                self._lane.sleep(left)
        return True

    def _overdue(self, replica: int) -> None:
        """The thread of a replica that the caller has taken has heard nothing for a long time."""
        if self._rendezvous.has_ended(replica):
            return
        failure = self._rendezvous.give_up_on(replica)
        if failure is None:
            _log.warning("run: replica %d has not ended for a long time; %s", replica, self._whereabouts())
            return
        _note(failure, self._whereabouts())
        self._interrupt([replica])

    def _interrupt(self, replicas: Sequence[int]) -> None:
        for replica in replicas:
            with self._interrupting:
                thread_id = self._thread_ids[replica]
                if thread_id is not None and thread_id != _thread.get_ident():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread_id), ctypes.py_object(ReplicaInterrupted)
                    )

    def _whereabouts(self) -> str:
        frames = sys._current_frames()
        reports = []
        for replica, thread_id in enumerate(self._thread_ids):
            if thread_id in frames and not self._rendezvous.has_ended(replica):
                stack = "".join(traceback.format_stack(frames[thread_id], limit=4))
                reports.append(f"replica {replica} is at\n{stack.rstrip()}")
        return "; ".join(reports) or "no replica is running"

    def _raise(self, failure: BaseException) -> None:
        # A replica that was given up may still end, and leave its error.
        errors, self._errors = self._errors, [None] * self._size
        self._results, self._calls = [], ()
        if isinstance(failure, CollectiveError):
            # The replicas raised copies, which know the line of the call.
            notes = getattr(failure, "__notes__", ())
            failure = next((error for error in errors if type(error) is type(failure)), failure)
            for note in notes:
                _note(failure, note)
        interrupt = _ctrl_c(errors[0]) if isinstance(failure, CollectiveTimeoutError) else None
        try:
            if interrupt is not None:
                raise interrupt from failure  # or a program that tries again after a timeout could not be stopped
            raise failure
        finally:
            del failure, errors, interrupt  # the traceback holds this frame

    # ----------------------------------------------------------------- threads

    def _start(self) -> None:
        for replica in range(1, self._size):
            if replica not in self._threads:
                name = f"xpdistribute-replica-{replica}"
                self._threads[replica] = threading.Thread(
                    target=_work, args=(self._desk, replica), name=name, daemon=True
                )
        for thread in self._threads.values():
            if thread.ident is None:  # else an attempt that was interrupted has started it
                thread.start()
        self._all_started = True


_Job = tuple[Context, Callable[[int], None]]


@final
class _Desk:
    """Where the caller leaves each replica's job. Threads hold this alone, so that unused ones can end.

    Args:
        size: how many replicas.
        timeout: seconds after which a thread whose job the caller has taken asks how it is getting on.
        overdue: called then, in that thread, with the replica.
    """

    def __init__(self, size: int, timeout: float, overdue: weakref.WeakMethod[Callable[[int], None]]) -> None:
        self._is_closed = False
        self._timeout = timeout
        self._overdue = overdue
        self._jobs: list[_Job | None] = [None] * size
        self._bells = [_thread.allocate_lock() for _ in range(size)]
        self._claims = [_thread.allocate_lock() for _ in range(size)]
        for lock in (*self._bells, *self._claims):
            lock.acquire()

    def hand_out(self, replica: int, job: _Job) -> None:
        self._jobs[replica] = job
        self._claims[replica].release()
        # A bell that is open still has the thread on its way, which will find this job.
        bell = self._bells[replica]
        if bell.locked():
            bell.release()

    def take(self, replica: int) -> Context | None:
        """The context of a job that is the calling thread's to do now, as one thread gets it; otherwise None."""
        if not self._claims[replica].acquire(False):
            return None
        job, self._jobs[replica] = self._jobs[replica], None
        assert job is not None
        return job[0]

    def next_job(self, replica: int) -> _Job | None:
        """Wait for the next job of this replica; None when there will be no more."""
        bell, claim = self._bells[replica], self._claims[replica]
        bell.acquire()
        while True:
            if claim.acquire(False):
                job, self._jobs[replica] = self._jobs[replica], None
                return job
            if self._is_closed:
                return None
            # The caller has taken it. Should that replica get stuck, its thread is the one that is free to say so.
            if not bell.acquire(True, self._timeout):
                overdue = self._overdue()
                if overdue is not None:
                    overdue(replica)
                del overdue  # it holds the strategy
                bell.acquire()

    def close(self) -> None:
        self._is_closed = True
        for bell in self._bells:
            if bell.locked():
                bell.release()


def _work(desk: _Desk, replica: int) -> None:
    while True:
        job = desk.next_job(replica)
        if job is None:
            return
        context, execute = job
        context.run(execute, replica)
        del job, context, execute  # they hold the strategy, which may be dropped meanwhile


def _end_child(error: BaseException | None) -> None:
    """End a process that was forked in a replica's own thread: there is no caller in it who could be told."""
    if error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # it is closed
                stream.flush()
    os._exit(1)


def _ctrl_c(error: BaseException | None) -> KeyboardInterrupt | None:
    """What the user pressed, also where our own interrupt, and what that broke, came right on top of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


def _is_silent(failure: BaseException) -> bool:
    """Whether it leaves replicas running that won't notice it: one that did not come, or Ctrl-C."""
    return isinstance(failure, CollectiveTimeoutError) or not isinstance(failure, Exception)


def _deliver_pending_exception() -> None:
    """An interrupt set a moment ago is raised at the start of a function: here, where it is caught."""


def _note(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
