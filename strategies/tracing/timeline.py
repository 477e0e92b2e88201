"""What a trace has recorded, as intervals: pure functions from the records of a `FlightRecorder`.

A collective begins for a replica when it comes and ends when it has its result. Up to the moment at which the last replica
came it has waited; what follows is the work. Whatever is neither a collective nor an optimizer's update is computing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, final

from collectives.calls import Call
from collectives.flight_recorder import Mark, Record

_SHORTEST = 1_000
"""Nanoseconds from which a stretch of computing is worth an interval of its own."""
_POINT_TO_POINT = ("send", "recv")


class Kind(Enum):
    """What a replica does in an interval."""

    STEP = "step"
    COMPUTE = "compute"
    WAIT = "wait"
    COMMUNICATE = "communicate"
    UPDATE = "update"
    MERGE = "merge"
    SPAN = "span"


@final
@dataclass(frozen=True)
class TracedCall:
    """One collective of one replica; times in nanoseconds.

    Args:
        replica: whose.
        step: the step's number.
        number: of the collective in its step.
        call: what was called.
        num_bytes: that the replica brought; None where not known.
        began: when the replica came.
        all_came: when the last one came.
        ended: when the replica went on, or its step ended by an error.
        last: the replica that came last.
        is_complete: whether it ended as it should.
    """

    replica: int
    step: int
    number: int
    call: Call
    num_bytes: int | None
    began: int
    all_came: int
    ended: int
    last: int
    is_complete: bool

    @property
    def kind(self) -> Kind:
        """What the time after the wait goes into."""
        return {"merge_call": Kind.MERGE, "apply_gradients": Kind.UPDATE}.get(
            self.call.kind, Kind.COMMUNICATE
        )

    @property
    def waited(self) -> int:
        """Nanoseconds until the last replica came."""
        return self.all_came - self.began

    @property
    def worked(self) -> int:
        """Nanoseconds after that."""
        return self.ended - self.all_came


@final
@dataclass(frozen=True)
class TracedStep:
    """One step of one replica.

    Args:
        replica: whose.
        step: its number.
        name: of the function.
        depth: 0, or more inside a merge function.
        began: nanoseconds.
        ended: likewise.
    """

    replica: int
    step: int
    name: str
    depth: int
    began: int
    ended: int


@final
@dataclass(frozen=True)
class Interval:
    """What stands in a replica's track. Those of one track contain one another or don't touch."""

    replica: int
    kind: Kind
    name: str
    began: int
    ended: int
    depth: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Timeline:
    """All that a trace knows.

    Args:
        replicas: their numbers, in the order of the tracks.
        began: when the trace began, nanoseconds.
        ended: when it ended.
        steps: of all replicas.
        calls: of all replicas.
        marks: the optimizers' updates and the user's spans, by position of the replica.
    """

    replicas: tuple[int, ...]
    began: int
    ended: int
    steps: tuple[TracedStep, ...]
    calls: tuple[TracedCall, ...]
    marks: tuple[tuple[Mark, ...], ...]

    @classmethod
    def of(
        cls,
        replicas: Sequence[int],
        logs: Sequence[Iterable[Record]],
        marks: Sequence[Iterable[Mark]],
        began: int,
        ended: int,
    ) -> Timeline:
        """From raw records and marks, by position of the replica; what was recorded before ``began`` is left out."""
        steps = [
            TracedStep(replica, mark.step, mark.name, mark.args["depth"], mark.began, mark.ended)
            for replica, mine in zip(replicas, marks, strict=True)
            for mark in mine
            if mark.kind == "step"
        ]
        others = tuple(tuple(_described(mine)) for mine in marks)
        calls = _calls(replicas, logs, {(s.replica, s.step): s.ended for s in steps}, began, ended)
        return cls(tuple(replicas), began, ended, tuple(steps), tuple(calls), others)

    def intervals(self) -> list[Interval]:
        """Everything, by replica and time, the outer before the inner."""
        depths = {(step.replica, step.step): step.depth for step in self.steps}
        found = [*self._step_intervals(), *self._update_intervals(depths)]
        for call in self.calls:
            found += _call_intervals(call, depths.get((call.replica, call.step), 0))
        found += self._computing()
        order = {kind: number for number, kind in enumerate((Kind.STEP, Kind.SPAN, Kind.UPDATE, Kind.MERGE))}
        return sorted(found, key=lambda i: (i.replica, i.began, -i.ended, order.get(i.kind, len(order))))

    def _step_intervals(self) -> list[Interval]:
        found = []
        # As a user counts them: those inside of merge functions are part of an outer one.
        indices = {parts[0].step: index for index, (_, _, parts) in enumerate(self.windows())}
        for step in self.steps:
            index = indices.get(step.step)
            name = "step in a merge function" if index is None else f"step {index}"
            args = {"function": step.name, "flight_recorder_step": step.step}
            found.append(Interval(step.replica, Kind.STEP, name, step.began, step.ended, step.depth, args))
        for first, last, steps in self.windows():
            for step in steps:
                for name, began, ended in (
                    ("wait to begin", first, step.began),
                    ("wait for the others' end", step.ended, last),
                ):
                    if ended - began >= _SHORTEST:
                        found.append(Interval(step.replica, Kind.WAIT, name, began, ended, step.depth))
        return found

    def windows(self) -> list[tuple[int, int, list[TracedStep]]]:
        """Of every step outside of merge functions: when it began anywhere, when it ended everywhere, the replicas' parts."""
        by_number: dict[int, list[TracedStep]] = {}
        for step in self.steps:
            if not step.depth:
                by_number.setdefault(step.step, []).append(step)
        return [
            (min(s.began for s in steps), max(s.ended for s in steps), steps) for steps in by_number.values()
        ]

    def _update_intervals(self, depths: Mapping[tuple[int, int], int]) -> list[Interval]:
        found = []
        meetings: dict[tuple[int, int], list[TracedCall]] = {}
        for call in self.calls:
            if call.kind is Kind.UPDATE:
                meetings.setdefault((call.replica, call.step), []).append(call)
        for replica, marks in zip(self.replicas, self.marks, strict=True):
            for mark in marks:
                depth = depths.get((replica, mark.step), 0)
                if mark.kind == "span":
                    found.append(
                        Interval(replica, Kind.SPAN, mark.name, mark.began, mark.ended, depth, mark.args)
                    )
                    continue
                found.append(
                    Interval(
                        replica,
                        Kind.UPDATE,
                        f"apply_gradients {mark.name!r}",
                        mark.began,
                        mark.ended,
                        depth,
                        mark.args,
                    )
                )
                for call in meetings.get((replica, mark.step), ()):
                    if (
                        mark.began <= call.began
                        and call.ended <= mark.ended
                        and call.began - mark.began >= _SHORTEST
                    ):
                        found.append(
                            Interval(replica, Kind.UPDATE, "gather gradients", mark.began, call.began, depth)
                        )
                        break
        return found

    def _computing(self) -> list[Interval]:
        taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
        cuts: dict[tuple[int, int], list[int]] = {}
        for call in self.calls:
            taken.setdefault((call.replica, call.step), []).append((call.began, call.ended))
        for replica, marks in zip(self.replicas, self.marks, strict=True):
            for mark in marks:
                key = replica, mark.step
                if mark.kind == "span":
                    cuts.setdefault(key, []).extend((mark.began, mark.ended))
                else:
                    taken.setdefault(key, []).append((mark.began, mark.ended))
        found = []
        for step in self.steps:
            key = step.replica, step.step
            for began, ended in gaps(step.began, step.ended, taken.get(key, ()), cuts.get(key, ())):
                if ended - began >= _SHORTEST:
                    found.append(Interval(step.replica, Kind.COMPUTE, "compute", began, ended, step.depth))
        return found


def gaps(
    began: int, ended: int, taken: Iterable[tuple[int, int]], cuts: Iterable[int] = ()
) -> list[tuple[int, int]]:
    """What of a stretch of time is not taken, in pieces that no cut lies inside of."""
    free = []
    position = began
    for start, stop in sorted(taken):
        if start > position:
            free.append((position, min(start, ended)))
        position = max(position, stop)
    if position < ended:
        free.append((position, ended))
    pieces = []
    edges = sorted(set(cuts))
    for start, stop in free:
        inner = [edge for edge in edges if start < edge < stop]
        pieces += list(zip([start, *inner], [*inner, stop], strict=True))
    return pieces


@dataclass(slots=True)
class _Visit:
    """A replica's part of a meeting, and of those that continue it."""

    replica: int
    record: Record
    ended: int
    is_complete: bool


def _calls(
    replicas: Sequence[int],
    logs: Sequence[Iterable[Record]],
    ends: Mapping[tuple[int, int], int],
    began: int,
    ended: int,
) -> list[TracedCall]:
    visits: list[_Visit] = []
    for replica, log in zip(replicas, logs, strict=True):
        before: _Visit | None = None
        for record in log:
            step, _, call, _, came, left = record
            if came < began:
                continue
            # Who was released by a failure went on no later than its step ended.
            until = left or max(came, ends.get((replica, step), ended))
            if before is not None and call.is_continuation and before.record[0] == step:
                before.ended, before.is_complete = until, bool(left)
                continue
            before = _Visit(replica, record, until, bool(left))
            visits.append(before)
    # By step and number: how many came, and when and who was the last.
    meetings: dict[tuple[int, int], tuple[int, int, int]] = {}
    for visit in visits:
        step, number, call, _, came, _ = visit.record
        if call.kind not in _POINT_TO_POINT:
            count, latest, last = meetings.get((step, number), (0, -1, -1))
            later = (came, visit.replica) if came > latest else (latest, last)
            meetings[step, number] = (count + 1, *later)
    return [_traced_call(visit, meetings, len(replicas)) for visit in visits]


def _traced_call(
    visit: _Visit, meetings: Mapping[tuple[int, int], tuple[int, int, int]], size: int
) -> TracedCall:
    step, number, call, num_bytes, came, _ = visit.record
    if call.kind in _POINT_TO_POINT:
        all_came, last = came, visit.replica
    else:
        count, all_came, last = meetings[step, number]
        if count < size and not visit.is_complete:  # somebody never came
            all_came, last = visit.ended, visit.replica
    return TracedCall(
        visit.replica,
        step,
        number,
        call,
        call.num_bytes if num_bytes is None else num_bytes,
        came,
        min(all_came, visit.ended),
        visit.ended,
        last,
        visit.is_complete,
    )


def _call_intervals(call: TracedCall, depth: int) -> list[Interval]:
    is_update = call.kind is Kind.UPDATE
    named = f" {call.call.name!r}" if call.call.name is not None else ""
    name = "reduce and update" if is_update else f"{call.call.kind}{named}"
    args: dict[str, Any] = {
        "seq": call.number,
        "waited_us": call.waited / 1e3,
        "last": f"replica {call.last}",
    }
    if call.num_bytes is not None:
        args["bytes"] = call.num_bytes
    if call.call.arrays:
        args["dtype"] = ", ".join(sorted({str(dtype) for dtype, _ in call.call.arrays}))
        args["shapes"] = [list(shape) for _, shape in call.call.arrays]
    args["detail"] = " ".join(call.call.words[:8])
    operations = [part.name for part in call.call.detail if isinstance(part, Enum)]
    if operations:
        args["op"] = operations[0]
    if call.call.name is not None:
        args["name"] = call.call.name
    if not call.is_complete:
        args["failed"] = True
    found = [Interval(call.replica, call.kind, name, call.began, call.ended, depth, args)]
    if call.waited > 0:
        name = f"wait for replica {call.last}" if call.last != call.replica else "wait"
        found.append(Interval(call.replica, Kind.WAIT, name, call.began, call.all_came, depth))
    return found


def _described(marks: Iterable[Mark]) -> Iterator[Mark]:
    """The marks without the steps', and with what is to be said of variables instead of the variables themselves."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    for mark in marks:
        if mark.kind == "span":
            yield mark
        elif mark.kind == "apply_gradients":
            variables = mark.args["variables"]
            key = tuple(map(id, variables))
            if key not in known:
                known[key] = {
                    "variables": [variable.name for variable in variables],
                    "bytes": sum(variable.size * variable.dtype.itemsize for variable in variables),
                    "dtype": ", ".join(sorted({str(variable.dtype) for variable in variables})),
                }
            yield mark._replace(args=known[key])
