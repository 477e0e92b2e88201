"""What each member of a group called last, and what it waits for now.

Every call leaves a record when it begins and completes it when it ends, in a ring for each member: cheap enough to be always
on. When a group hangs or its members disagree, the rings tell who called what; while a trace is being
taken they keep everything, and are its source.

The environment variable ``XPDISTRIBUTE_FLIGHT_RECORDER`` names a folder to which every failed collective writes the
rings as JSON; ``off`` keeps no records.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from collectives.calls import Call
from collectives.errors import in_words

ENVIRONMENT = "XPDISTRIBUTE_FLIGHT_RECORDER"
CAPACITY = 100
"""Records a member."""
_SHOWN = 5
"""Calls a member that stand in an error message."""

clock = time.perf_counter_ns
"""Nanoseconds, of all records and marks."""

Record = list[Any]
"""Step, number in the step, call, bytes or None, when it began, when it ended or 0. A list, as it is the cheapest object that
can be completed later."""
LEFT = 5
"""Where in a record it stands when the call ended."""

_numbers = itertools.count()


class Mark(NamedTuple):
    """Something that took time and is no collective; kept while a trace is being taken."""

    kind: str
    """``step``, ``span`` or ``apply_gradients``."""
    name: str
    step: int
    began: int
    ended: int
    args: Mapping[str, Any]


@final
@dataclass(frozen=True)
class RecordedCall:
    """One call of one member.

    Args:
        step: which step of the group's it was made in, from 0.
        number: of the collective in its step, the same for all members.
        call: what was called.
        num_bytes: that the member brought; None where that is not known.
        began: nanoseconds of ``time.perf_counter_ns``.
        ended: likewise; 0 if it has not.
        state: ``done``, ``waiting``, or ``failed``: it never ended, and is not waited for any more.
    """

    step: int
    number: int
    call: Call
    num_bytes: int | None
    began: int
    ended: int
    state: str

    @property
    def milliseconds(self) -> float:
        """How long it took, or has been waiting."""
        return ((self.ended or clock()) - self.began) / 1e6


@final
class FlightRecorder:
    """The last calls of the members of a group.

    Args:
        members: their numbers, as messages name them.
        noun: what a member is called, ``"rank"`` or ``"replica"``.
        capacity: records a member; None takes 100, or none where the environment says ``off``.
    """

    def __init__(self, members: Sequence[int], noun: str = "rank", capacity: int | None = None) -> None:
        if capacity is None:
            capacity = 0 if os.environ.get(ENVIRONMENT) == "off" else CAPACITY
        if capacity < 0:
            raise ValueError(f"FlightRecorder: got capacity={capacity}; need a number >= 0")
        self.members = tuple(members)
        self.noun = noun
        self.logs: list[deque[Record]] = [deque(maxlen=capacity) for _ in self.members]
        """By position of the member. Callers append to them themselves, which saves a call for each record."""
        self.marks: list[list[Mark]] | None = None
        """By position of the member, while a trace is being taken; None otherwise."""
        self.next_step = itertools.count().__next__
        self._capacity = capacity

    # ------------------------------------------------------------------ traces

    def keep_everything(self) -> None:
        """From now on forget no record, and keep marks.

        Raises:
            RuntimeError: it does so already.
        """
        if self.marks is not None:
            raise RuntimeError("trace: another trace is being taken; end that one first")
        self.logs = [deque(log) for log in self.logs]
        self.marks = [[] for _ in self.members]

    def keep_the_last(self) -> tuple[list[deque[Record]], list[list[Mark]]]:
        """Go back to keeping the last records only; what was kept since `keep_everything`, and before it in the rings."""
        logs, marks = self.logs, self.marks
        self.marks = None
        self.logs = [deque(log, maxlen=self._capacity) for log in logs]
        return logs, marks or [[] for _ in self.members]

    # ----------------------------------------------------------------- reports

    def calls(self, member: int) -> list[RecordedCall]:
        """A member's last calls, the newest last.

        Raises:
            ValueError: no such member.
        """
        if member not in self.members:
            raise ValueError(
                f"calls: got {self.noun} {member}; need one of {', '.join(map(str, self.members))}"
            )
        log = list(self.logs[self.members.index(member)])
        newest_step = max((other[-1][0] for other in self.logs if other), default=0)
        calls: list[RecordedCall] = []
        for record in log:
            step, number, call, num_bytes, began, ended = record
            # A call that never ended is still waited for if nothing has come after it, here or with the others.
            state = "done" if ended else "waiting" if record is log[-1] and step == newest_step else "failed"
            if call.is_continuation and calls and calls[-1].step == step:
                first = calls.pop()
                calls.append(
                    RecordedCall(step, first.number, first.call, first.num_bytes, first.began, ended, state)
                )
                continue
            calls.append(RecordedCall(step, number, call, num_bytes, began, ended, state))
        return calls

    def last_calls(self, count: int = _SHOWN) -> str:
        """Each member's last calls in words, the newest last."""
        lines = []
        for member in self.members:
            calls = self.calls(member)
            lines.append(f"  {self.noun} {member}:" + ("" if calls else " no call yet"))
            lines += [f"    {_in_words(call)}" for call in calls[max(0, len(calls) - count) :]]
        return f"the last calls of each {self.noun} (the newest last):\n" + "\n".join(lines)

    def dump(self, path: str | os.PathLike[str], failure: BaseException | None = None) -> None:
        """Write all that is kept as JSON, as a whole or not at all.

        Args:
            path: where; missing folders are made.
            failure: what is to stand in it as the reason.

        Raises:
            OSError: it can't be written.
        """
        import json  # noqa: PLC0415  # a dump is rare, and what it needs slow to import

        from collectives.whole_file import write_whole  # noqa: PLC0415  # likewise

        write_whole(path, json.dumps(self._as_json(failure), indent=1, ensure_ascii=False).encode())

    def report(self, failure: BaseException) -> str:
        """What an error message says of a failure; writes the file too, where the environment asks for one."""
        text = self.last_calls()
        folder = os.environ.get(ENVIRONMENT, "")
        if not folder or folder == "off":
            return text
        path = os.path.join(folder, f"flight_recorder_{os.getpid()}_{next(_numbers)}.json")
        try:
            self.dump(path, failure)
        except OSError as error:
            # The failure being reported matters more than that its file is missing.
            return f"{text}\n{ENVIRONMENT}={folder}: the flight recorder could not be written: {error}"
        return f"{text}\nall of them: {path}"

    def _as_json(self, failure: BaseException | None) -> dict[str, Any]:
        epoch = time.time_ns() - clock()
        return {
            "format": "xpdistribute flight recorder 1",
            "process_id": os.getpid(),
            "written": _utc(time.time_ns()),
            "failure": None if failure is None else in_words(failure),
            "calls": {
                f"{self.noun} {member}": [_call_as_json(call, epoch) for call in self.calls(member)]
                for member in self.members
            },
        }


def _in_words(recorded: RecordedCall) -> str:
    verb = {"done": "took", "waiting": "WAITING for", "failed": "failed after"}[recorded.state]
    took = "" if recorded.state == "failed" and not recorded.ended else f" {recorded.milliseconds:.3g} ms"
    verb = "failed" if not took else verb
    return f"step {recorded.step} seq {recorded.number} {recorded.call} {verb}{took}"


def _call_as_json(recorded: RecordedCall, epoch: int) -> dict[str, Any]:
    return {
        "step": recorded.step,
        "seq": recorded.number,
        "kind": recorded.call.kind,
        "name": recorded.call.name,
        "detail": recorded.call.words,
        "bytes": recorded.num_bytes if recorded.num_bytes is not None else recorded.call.num_bytes,
        "state": recorded.state,
        "began": _utc(recorded.began + epoch),
        "milliseconds": None if recorded.state == "failed" else round(recorded.milliseconds, 6),
    }


def _utc(nanoseconds: int) -> str:
    import datetime as dt  # noqa: PLC0415  # for dumps only

    at = dt.datetime.fromtimestamp(nanoseconds / 1e9, tz=dt.UTC)
    return at.isoformat(timespec="microseconds")
