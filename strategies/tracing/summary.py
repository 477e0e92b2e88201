"""A trace in numbers: what share of the time went where, and which replica the others waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from strategies.tracing.timeline import Kind, Timeline, TracedCall

if TYPE_CHECKING:
    from rich.console import Group

_NS = 1e-9


@final
@dataclass(frozen=True)
class ReplicaTimes:
    """Where one replica's time in steps went, in seconds.

    The parts add up to the time in steps, which counts from when the first replica begins a step to when the last one ends
    it. What happens inside of merge functions counts as merging.

    Args:
        replica: whose.
        computing: all that is not one of the others.
        waiting: for other replicas, in collectives and at the beginning and end of steps.
        communicating: in collectives, once all had come.
        updating: in ``apply_gradients``, without the wait.
        merging: in merge calls, once all had come.
        held_up: what the other replicas waited for this one as the last to come, added up.
    """

    replica: int
    computing: float
    waiting: float
    communicating: float
    updating: float
    merging: float
    held_up: float

    @property
    def in_steps(self) -> float:
        """The sum of the parts."""
        return self.computing + self.waiting + self.communicating + self.updating + self.merging


@final
@dataclass(frozen=True)
class CallTimes:
    """One kind of collective.

    Args:
        kind: such as ``all_reduce``.
        count: how often the replicas met for it.
        num_bytes: that one replica brought, in all; None where not known.
        worked: seconds from when all had come, in all, the mean of the replicas.
        waited: seconds before that, likewise.
    """

    kind: str
    count: int
    num_bytes: int | None
    worked: float
    waited: float


@final
@dataclass(frozen=True)
class Summary:
    """A whole trace; seconds.

    Args:
        total: how long the trace took.
        in_steps: of that, in steps.
        num_steps: how many, without those inside of merge functions.
        replicas: where the time of each went.
        calls: the kinds of collectives, those that took longest first.
    """

    total: float
    in_steps: float
    num_steps: int
    replicas: tuple[ReplicaTimes, ...]
    calls: tuple[CallTimes, ...]

    @property
    def slowest(self) -> int | None:
        """The replica that the others waited for most; None where nobody waited."""
        most = max(self.replicas, key=lambda times: times.held_up, default=None)
        return most.replica if most is not None and most.held_up > 0 else None

    @classmethod
    def of(cls, timeline: Timeline) -> Summary:
        """Of all that a trace knows."""
        depths = {(step.replica, step.step): step.depth for step in timeline.steps}
        outer = [call for call in timeline.calls if not depths.get((call.replica, call.step), 0)]
        windows = timeline.windows()
        in_steps = sum(last - first for first, last, _ in windows) * _NS
        replicas = tuple(
            _times(timeline, index, outer, in_steps, depths) for index in range(len(timeline.replicas))
        )
        calls = sorted(_kinds(timeline), key=lambda kind: -(kind.worked + kind.waited))
        total = (timeline.ended - timeline.began) * _NS
        return cls(total, in_steps, len(windows), replicas, tuple(calls))

    def tables(self, title: str) -> Group:
        """The numbers as tables for a terminal."""
        from rich.console import Group  # noqa: PLC0415 - only where something is shown
        from rich.table import Table  # noqa: PLC0415

        def share(part: float, whole: float) -> str:
            return f"{part / whole:.1%}" if whole else "–"

        outside = share(self.total - self.in_steps, self.total)
        shares = Table(
            title=f"{title}: {self.num_steps} steps in {duration(self.total)}",
            caption=f"{share(self.in_steps, self.total)} of the time in steps, {outside} between them; shares are of the "
            "time in steps"
            + (
                f"\nthe others waited most for replica {self.slowest} (held up)"
                if self.slowest is not None
                else ""
            ),
            caption_justify="left",
        )
        shares.add_column("replica")
        for name in ("compute", "wait", "communicate", "update", "merge", "held up"):
            shares.add_column(name, justify="right")
        for times in self.replicas:
            parts = (
                times.computing,
                times.waiting,
                times.communicating,
                times.updating,
                times.merging,
                times.held_up,
            )
            style = "bold yellow" if times.replica == self.slowest else None
            shares.add_row(str(times.replica), *(share(part, times.in_steps) for part in parts), style=style)
        calls = Table(title="what the replicas did together")
        calls.add_column("call")
        for name in ("count", "bytes", "total", "mean", "mean wait"):
            calls.add_column(name, justify="right")
        for kind in self.calls:
            size = "–" if kind.num_bytes is None else byte_count(kind.num_bytes)
            mean, wait = kind.worked / kind.count, kind.waited / kind.count
            calls.add_row(
                kind.kind, f"{kind.count:,}", size, duration(kind.worked), duration(mean), duration(wait)
            )
        return Group(shares, calls)


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them, such as ``12.3 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return (
                f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
            )
    return f"{seconds * 1e6:.3g} µs"


def byte_count(num_bytes: int) -> str:
    """Bytes in the unit that suits them, such as ``1.5 MiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.4g} TiB"


def _times(
    timeline: Timeline,
    index: int,
    calls: Sequence[TracedCall],
    in_steps: float,
    depths: dict[tuple[int, int], int],
) -> ReplicaTimes:
    replica = timeline.replicas[index]
    mine = [call for call in calls if call.replica == replica]
    updates = [
        mark
        for mark in timeline.marks[index]
        if mark.kind == "apply_gradients" and not depths.get((replica, mark.step), 0)
    ]
    waiting = sum(call.waited for call in mine)
    held_up = sum(call.waited for call in calls if call.last == replica != call.replica)
    for first, last, steps in timeline.windows():
        slowest = max(steps, key=lambda step: step.ended).replica
        for step in steps:
            if step.replica == replica:
                waiting += step.began - first + last - step.ended
            elif slowest == replica:
                held_up += last - step.ended
    updating = sum(mark.ended - mark.began for mark in updates)
    by_step: dict[int, list[TracedCall]] = {}
    for call in mine:
        by_step.setdefault(call.step, []).append(call)
    for mark in updates:
        for call in by_step.get(mark.step, ()):
            if mark.began <= call.began and call.ended <= mark.ended:
                updating -= call.waited if call.kind is Kind.UPDATE else call.ended - call.began
    communicating = sum(call.worked for call in mine if call.kind is Kind.COMMUNICATE)
    merging = sum(call.worked for call in mine if call.kind is Kind.MERGE)
    rest = in_steps - (waiting + communicating + updating + merging) * _NS
    return ReplicaTimes(
        replica,
        max(0.0, rest),
        waiting * _NS,
        communicating * _NS,
        updating * _NS,
        merging * _NS,
        held_up * _NS,
    )


def _kinds(timeline: Timeline) -> list[CallTimes]:
    by_kind: dict[str, list[TracedCall]] = {}
    for call in timeline.calls:
        by_kind.setdefault(call.call.kind, []).append(call)
    size = max(1, len(timeline.replicas))
    found = []
    updates = [[mark for mark in marks if mark.kind == "apply_gradients"] for marks in timeline.marks]
    meetings = by_kind.pop("apply_gradients", [])
    if any(updates):
        waited = sum(call.waited for call in meetings)
        worked = sum(mark.ended - mark.began for mine in updates for mark in mine) - waited
        num_bytes = sum(mark.args["bytes"] for mark in updates[0])
        count = max(len(mine) for mine in updates)
        found.append(CallTimes("apply_gradients", count, num_bytes, worked * _NS / size, waited * _NS / size))
    for kind, calls in by_kind.items():
        # What replicas bring to all_gather may differ: the most that one brought.
        together = {(c.step, c.number): c for c in sorted(calls, key=lambda call: call.num_bytes or 0)}
        count = len(calls) if kind in ("send", "recv") else len(together)
        sizes = [call.num_bytes for call in together.values()]
        found.append(
            CallTimes(
                kind,
                count,
                None if None in sizes else sum(size for size in sizes if size is not None),
                sum(call.worked for call in calls) * _NS / size,
                sum(call.waited for call in calls) * _NS / size,
            )
        )
    return found
