"""Runs one function in every local replica at the same time.

The caller's own thread runs replica 0, and each other replica has a thread that is made once and kept. A thread is woken
through one raw lock, and the last replica to end its step opens one lock that the caller waits on. A step so short
that the caller has finished before another thread has even started is run for that replica by the
caller, which saves waiting for the switch.
"""

from __future__ import annotations

import _thread
import ctypes
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from typing import Any, final

from collectives.devices import Device
from collectives.errors import CollectiveError, CollectiveTimeoutError
from collectives.rendezvous import Rendezvous
from variables.replica_context import ReplicaContext, current

_POLL = 0.25
"""Seconds between looks at whether a replica that is waited for has been given up."""
_GRACE = 0.4
"""Seconds that replicas get to end by themselves, and once more when interrupted: Ctrl-C is through within a second."""

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
        self._desk = _Desk(self._size)
        self._started = False
        self.is_broken = False
        weakref.finalize(self, self._desk.close)

    def close(self) -> None:
        """End the threads."""
        self._desk.close()

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of the calls, each made in its replica, by local replica.

        Raises:
            Exception: what a replica raised first, with a note that names the replica.
        """
        if not self._started:
            self._start()
        rendezvous, desk = self._rendezvous, self._desk
        rendezvous.begin()
        results: list[Any] = [None] * self._size
        try:
            for replica in range(1, self._size):
                # A context can be entered by one thread at a time only.
                job = (copy_context(), self._execute, replica, calls[replica], results)
                desk.hand_out(replica, job)
            self._execute(0, calls[0], results)
            for replica in range(1, self._size):
                if desk.take(replica):
                    self._execute(replica, calls[replica], results)
            self._wait()
        except BaseException as interrupt:  # Ctrl-C, in this module's own code
            rendezvous.abort(interrupt)
            self._release_stuck(interrupt)
            raise
        failure = rendezvous.failure
        if failure is not None:
            self._raise(failure)
        return results

    def _execute(self, replica: int, call: Callable[[], Any], results: list[Any]) -> None:
        token = current.set(self._contexts[replica])
        try:
            self._thread_ids[replica] = _thread.get_ident()
            try:
                results[replica] = call()
            finally:
                with self._interrupting:
                    self._thread_ids[replica] = None
                _deliver_pending_exception()
        except BaseException as error:  # noqa: BLE001  # handed to the caller, which raises it
            self._errors[replica] = error
            _note(error, f"in replica {replica} of {self._size} ({self._devices[replica]})")
            self._rendezvous.abort(error)
            if isinstance(error, CollectiveTimeoutError):
                self._interrupt(error.missing)
        finally:
            current.reset(token)
            self._rendezvous.end(replica)

    # ----------------------------------------------------------------- waiting

    def _wait(self) -> None:
        """Until all replicas have ended, or a stuck one has been given up."""
        started = time.monotonic()
        report_after = self._rendezvous.timeout
        while not self._rendezvous.wait_until_all_ended(_POLL):
            failure = self._rendezvous.failure
            if isinstance(failure, CollectiveTimeoutError) or not isinstance(
                failure, (Exception, type(None))
            ):
                self._release_stuck(failure)
                return
            waited = time.monotonic() - started
            if waited > report_after:
                report_after *= 2
                _log.warning(
                    "run: replica 0 has ended and waited %.0f s for the others; %s",
                    waited,
                    self._whereabouts(),
                )

    def _release_stuck(self, failure: BaseException) -> None:
        """After a failure that other replicas may not notice: let them end, interrupt them, or give them up."""
        self.is_broken = True
        stuck = [replica for replica in range(self._size) if not self._rendezvous.has_ended(replica)]
        if isinstance(failure, CollectiveTimeoutError):
            _note(failure, self._whereabouts())
        elif self._rendezvous.wait_until_all_ended(_GRACE):
            self.is_broken = False
            return
        self._interrupt(stuck)
        if self._rendezvous.wait_until_all_ended(_GRACE):
            self.is_broken = False
            return
        self._desk.close()  # its thread ends when its call returns; the strategy makes new ones
        _log.error("run: gave up waiting for replicas that do not end; %s", self._whereabouts())

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
                stack = "".join(traceback.format_stack(frames[thread_id], limit=-4))
                reports.append(f"replica {replica} is at\n{stack.rstrip()}")
        return "; ".join(reports) or "no replica is running"

    def _raise(self, failure: BaseException) -> None:
        errors, self._errors = self._errors, [None] * self._size
        if isinstance(failure, CollectiveError):
            # The replicas raised copies, which know the line of the call.
            notes = getattr(failure, "__notes__", ())
            failure = next((error for error in errors if type(error) is type(failure)), failure)
            for note in notes:
                _note(failure, note)
        try:
            raise failure
        finally:
            del failure, errors  # the traceback holds this frame

    # ----------------------------------------------------------------- threads

    def _start(self) -> None:
        self._started = True
        for replica in range(1, self._size):
            thread = threading.Thread(
                target=_work, args=(self._desk, replica), name=f"xpdistribute-replica-{replica}", daemon=True
            )
            thread.start()


_Job = tuple[Context, Callable[..., None], int, Callable[[], Any], list[Any]]


@final
class _Desk:
    """Where the caller leaves each replica's job. Threads hold this alone, so that unused ones can end."""

    def __init__(self, size: int) -> None:
        self._is_closed = False
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

    def take(self, replica: int) -> bool:
        """Whether the job is the calling thread's to do now: one thread gets it."""
        return self._claims[replica].acquire(False)

    def next_job(self, replica: int) -> _Job | None:
        """Wait for the next job of this replica; None when there will be no more."""
        while True:
            self._bells[replica].acquire()
            if self._is_closed:
                return None
            if self._claims[replica].acquire(False):
                job, self._jobs[replica] = self._jobs[replica], None
                return job

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
        context, execute, number, call, results = job
        context.run(execute, number, call, results)
        del job, context, execute, call, results  # they hold the strategy, which may be dropped meanwhile


def _deliver_pending_exception() -> None:
    """An interrupt set a moment ago is raised at the start of a function: here, where it is caught."""


def _note(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
