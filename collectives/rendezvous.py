"""Where the threads of one group meet.

Each member comes to a meeting with a call (what it wants, in comparable form) and a value. The last to
come checks that all want the same, concludes the meeting for everybody, and lets the others go on, each
with its result. Waiting is done on one raw lock for each member: the cheapest wait that CPython has.

A meeting fails for all who wait in it as soon as it cannot be completed: a member raised, ended its step,
waits for something else, or did not come in time.
"""

from __future__ import annotations

import _thread
import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, final

from collectives.calls import Call as Call
from collectives.errors import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    in_words,
)
from collectives.flight_recorder import LEFT, FlightRecorder, Record, clock

LONGEST_TIMEOUT = _thread.TIMEOUT_MAX
"""Seconds: what the system's locks can wait."""

Conclude = Callable[[list[Any]], Sequence[Any]]
"""From every member's value, by member, to every member's result. Runs once, in the last to come."""


class Gate(Protocol):
    """What one member waits at. It is opened once for each wait, by another member or not at all."""

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds; whether it has been opened."""

    def open(self) -> None:
        """Let the member go on; does not wait."""

    def close(self) -> None:
        """Forget that it was opened, where nobody went through."""


@final
class ThreadGate:
    """A gate for a member with a thread of its own: one raw lock."""

    def __init__(self) -> None:
        lock = _thread.allocate_lock()
        lock.acquire()
        self.open = lock.release
        self._acquire = lock.acquire

    def wait(self, timeout: float) -> bool:
        """As `Gate.wait`."""
        return self._acquire(True, timeout)

    def close(self) -> None:
        """As `Gate.close`."""
        self._acquire(False)


@final
class Rendezvous:
    """The meeting point of a fixed number of threads, used over and over.

    Args:
        size: how many members.
        timeout: seconds that a member waits for the others.
        member: what a member is called in messages, ``"rank"`` or ``"replica"``.
        recorder: keeps the members' calls; None makes one.
    """

    def __init__(
        self, size: int, timeout: float, member: str = "rank", recorder: FlightRecorder | None = None
    ) -> None:
        self.size = size
        self.timeout = timeout
        self.recorder = recorder or FlightRecorder(range(size), member)
        self.step = 0
        self._member = member
        self._mutex = _thread.allocate_lock()
        self._gates: list[Gate] = [ThreadGate() for _ in range(size)]
        self._calls: list[Call | None] = [None] * size
        self._values: list[Any] = [None] * size
        self._results: list[Any] = [None] * size
        # Whoever turns a flag off, with the mutex held, opens that member's gate, once.
        self._waiting = [False] * size
        self._ended = [False] * size
        self._num_ended = 0
        self._arrived = 0
        self._sequence = 0
        self._concluding = False
        self._failure: BaseException | None = None
        self._mail: dict[tuple[int, int, int], deque[Any]] = {}

    # ------------------------------------------------------------------ a step

    def begin(self) -> None:
        """Forget the last step: nobody has ended, nothing has failed. Nobody may be inside."""
        self._ended = [False] * self.size
        self._num_ended = self._arrived = self._sequence = 0
        self.step = self.recorder.next_step()
        self._concluding = False
        if self._failure is not None:
            self._failure = None
            self._calls = [None] * self.size
            self._values = [None] * self.size
            self._results = [None] * self.size
            self._waiting = [False] * self.size
            # A member that was interrupted while it waited left its gate open behind it.
            for gate in self._gates:
                gate.close()
        if self._mail:
            self._mail.clear()

    def end(self, member: int) -> bool:
        """The member makes no more calls in this step. Whoever waits for it is told.

        Returns:
            Whether it was the last one.
        """
        with self._mutex:
            self._ended[member] = True
            self._num_ended += 1
            if self._num_ended == self.size:
                return True
            if self._failure is None and self._is_missed(member):
                self._fail(self._mismatch())
            return False

    @property
    def num_ended(self) -> int:
        """How many members have called `end` in this step."""
        return self._num_ended

    def has_ended(self, member: int) -> bool:
        """Whether the member has called `end` in this step."""
        return self._ended[member]

    def abort(self, failure: BaseException) -> None:
        """Fail whatever anybody waits for now or will wait for in this step. The first failure stays."""
        with self._mutex:
            self._fail(failure)

    def abandon(self, failure: BaseException, absent: Sequence[int]) -> None:
        """In a forked child: fail the step, and end it for the members whose threads are not in the child."""
        self._mutex = _thread.allocate_lock()  # one of those threads may have held it
        self.abort(failure)
        for member in absent:
            if not self._ended[member]:
                self.end(member)

    def give_up_on(self, member: int) -> CollectiveTimeoutError | None:
        """Fail the step because a member is late, if anybody waits for it; the failure, or None."""
        with self._mutex:
            if self._failure is not None or self._ended[member] or True not in self._waiting:
                return None
            waiter = self._waiting.index(True)
            call = self._calls[waiter]
            assert call is not None
            failure = self._late(waiter, call)
            self._fail(failure)
            return failure

    def set_gate(self, member: int, gate: Gate) -> None:
        """Let a member wait at another gate. It must not be waiting."""
        self._gates[member] = gate

    @property
    def failure(self) -> BaseException | None:
        """What went wrong first in this step."""
        return self._failure

    # ---------------------------------------------------------------- meetings

    def meet(
        self, member: int, call: Call, value: Any, conclude: Conclude, num_bytes: int | None = None
    ) -> Any:
        """Meet all others, and get this member's result.

        Args:
            member: who calls.
            call: what it calls.
            value: what it brings.
            conclude: makes everybody's results of everybody's values; the last to come calls its own.
            num_bytes: of what it brings, for the record, where the call does not say it.

        Raises:
            CollectiveMismatchError: some member calls something else, or has ended.
            CollectiveTimeoutError: some member did not come in time.
            CollectiveAbortedError: some member failed.
        """
        if self.size == 1:
            # Nobody to wait for or to tell of a failure, and no state: the default strategy's one replica
            # is every thread that asks, all at the same time.
            if self.recorder.marks is None:
                return conclude([value])[0]
            kept = self._record(member, call, num_bytes)
            self._sequence += 1
            result = conclude([value])[0]
            kept[LEFT] = clock()
            return result
        with self._mutex:
            if self._failure is not None:
                self._raise_failure(member, call)
            record: Record = [self.step, self._sequence, call, num_bytes, clock(), 0]
            self.recorder.logs[member].append(record)
            self._calls[member] = call
            self._values[member] = value
            if self._num_ended:
                self._fail(self._mismatch())
                self._raise_failure(member, call)
            self._arrived += 1
            last = self._arrived == self.size
            if last:
                self._arrived = 0
                self._concluding = True
            else:
                self._wait_or_fail(member)
        if not last:
            self._pass_gate(member, call)
            result = self._results[member]
            self._results[member] = None
        else:
            result = self._conclude(member, call, conclude)
        record[LEFT] = clock()
        return result

    def _conclude(self, member: int, call: Call, conclude: Conclude) -> Any:
        values = self._values
        self._values = [None] * self.size
        if self._calls.count(call) != self.size:
            self.abort(self._mismatch())
            self._raise_failure(member, call)
        try:
            results = list(conclude(values))
        except BaseException as failure:
            self.abort(failure)
            raise
        with self._mutex:
            self._concluding = False
            self._calls = [None] * self.size
            if not call.is_continuation:
                self._sequence += 1
            result, results[member] = results[member], None
            self._results = results
            self._open_all()
        return result

    def send(self, member: int, peer: int, tag: int, message: Any) -> None:
        """Leave a message for a peer; does not wait."""
        with self._mutex:
            call = Call("send", (peer, f"tag {tag}"))
            if self._failure is not None:
                self._raise_failure(member, call)
            self._record(member, call)[LEFT] = clock()
            self._mail.setdefault((member, peer, tag), deque()).append(message)
            if self._waiting[peer] and self._calls[peer] == _receiving(member, tag):
                self._open(peer)

    def receive(self, member: int, peer: int, tag: int) -> Any:
        """The peer's next message with this tag, waiting for it if need be. Raises as `meet`."""
        call = _receiving(peer, tag)
        with self._mutex:
            if self._failure is not None:
                self._raise_failure(member, call)
            record = self._record(member, call)
            letters = self._mail.setdefault((peer, member, tag), deque())
            if letters:
                record[LEFT] = clock()
                return letters.popleft()
            self._calls[member] = call
            if self._ended[peer]:
                self._fail(self._mismatch())
                self._raise_failure(member, call)
            self._wait_or_fail(member)
        self._pass_gate(member, call)
        self._calls[member] = None
        record[LEFT] = clock()
        return letters.popleft()

    def _record(self, member: int, call: Call, num_bytes: int | None = None) -> Record:
        record = [self.step, self._sequence, call, num_bytes, clock(), 0]
        self.recorder.logs[member].append(record)
        return record

    # ----------------------------------------------------------------- waiting

    def _is_missed(self, member: int) -> bool:
        # With the mutex held. Whether somebody waits for what this member, which has just ended, won't do.
        if self._arrived or self._num_ended + self._waiting.count(True) == self.size:
            return True
        for other, call in enumerate(self._calls):
            if self._waiting[other] and call is not None and call.kind == "recv" and call.detail[0] == member:
                return True
        return False

    def _wait_or_fail(self, member: int) -> None:
        # With the mutex held.
        self._waiting[member] = True
        if self._num_ended + self._waiting.count(True) == self.size:
            self._waiting[member] = False
            self._fail(self._mismatch())
            self._raise_failure(member, self._calls[member])

    def _pass_gate(self, member: int, call: Call) -> None:
        while not self._gates[member].wait(self.timeout):
            if self._give_up(member, call):
                break
        if self._failure is not None:
            self._raise_failure(member, call)

    def _give_up(self, member: int, call: Call) -> bool:
        """After a timeout: fail the meeting, unless it is being concluded or just was."""
        with self._mutex:
            if not self._waiting[member] or self._concluding:
                return False  # the gate is open, or its opener is at work: all have come
            self._waiting[member] = False
            self._fail(self._late(member, call))
            return True

    def _open(self, member: int) -> None:
        if self._waiting[member]:
            self._waiting[member] = False
            self._gates[member].open()

    def _open_all(self) -> None:
        for member in range(self.size):
            self._open(member)

    # ---------------------------------------------------------------- failures

    def _fail(self, failure: BaseException) -> None:
        # With the mutex held.
        if self._failure is None:
            self._failure = failure
        self._concluding = False
        self._open_all()

    def _raise_failure(self, member: int, call: Call | None) -> NoReturn:
        failure = self._failure
        assert failure is not None
        if isinstance(failure, CollectiveError):
            # One instance for each member, with notes of its own: they are raised in several threads at once.
            mine = copy.copy(failure)
            mine.__notes__ = list(getattr(failure, "__notes__", ()))
            raise mine
        raise CollectiveAbortedError(
            f"{call}: {self._named(member)} was released because another {self._member} failed with {in_words(failure)}"
        ) from failure

    def _named(self, member: int) -> str:
        """A member as messages name it: by its number among those of all processes."""
        return f"{self._member} {self.recorder.members[member]}"

    def _mismatch(self) -> CollectiveMismatchError:
        calls = [None if ended else str(call) for ended, call in zip(self._ended, self._calls, strict=True)]
        listed = "; ".join(
            f"{self._named(member)} "
            + (f"calls {self._calls[member]}" if self._calls[member] and not self._ended[member] else "")
            + ("has finished without another call" if self._ended[member] else "")
            + ("makes no call yet" if not self._calls[member] and not self._ended[member] else "")
            for member in range(self.size)
        )
        failure = CollectiveMismatchError(
            f"seq {self._sequence}: the calls do not fit together: {listed}; every {self._member} must make the same "
            "calls in the same order, with the same shapes and dtypes — look for a branch that only some take",
            calls,
        )
        failure.add_note(self.recorder.report(failure))
        return failure

    def _late(self, member: int, call: Call) -> CollectiveTimeoutError:
        missing = [other for other in range(self.size) if self._calls[other] is None]
        of_all = f" of {self.size}" if self.recorder.members[0] == 0 else ""
        waiting = "; ".join(f"{self._named(m)} in {c}" for m, c in enumerate(self._calls) if c is not None)
        failure = CollectiveTimeoutError(
            f"{call}: {self._named(member)}{of_all} waited {self.timeout:g} s for the others at seq "
            f"{self._sequence}; missing: {', '.join(map(self._named, missing)) or 'nobody'}; waiting: "
            f"{waiting}; did every {self._member} call it? — raise timeout_seconds if one is only slow",
            missing,
        )
        failure.add_note(self.recorder.report(failure))
        return failure


def _receiving(peer: int, tag: int) -> Call:
    return Call("recv", (peer, f"tag {tag}"))
