"""Who is compared in a benchmark between processes, and the tables of what came out."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from benchmarks.harness import Case, Effort, Timing, by_turns
from benchmarks.processes.process_groups import ours
from benchmarks.report import Report
from benchmarks.rivals.rank_group import RankGroup
from benchmarks.rivals.rival import RivalError
from benchmarks.rivals.systems import STARTERS, c_loops, compile_c_loops
from benchmarks.setups import Settings

C = "C loop"
"""The column of the limit."""


class Turn(NamedTuple):
    """What is measured by turns with others."""

    column: str
    """What it is called."""
    group: RankGroup
    case: str
    details: Mapping[str, Any]


@final
class Contenders:
    """Groups of ranks that take turns: all of ours, the rivals asked for, and the limit. Leaving the context ends them.

    Args:
        settings: who was asked for.
        report: told who it is, or why the limit is left out.
        ranks: of each group.
        rivals: those that have what is measured.
        limit: whether the C loop has it.
    """

    def __init__(
        self, settings: Settings, report: Report, ranks: int, rivals: Collection[str], *, limit: bool
    ) -> None:
        self._settings = settings
        self._report = report
        self._resources = ExitStack()
        self.rivals: dict[str, RankGroup] = {}
        self.limit: RankGroup | None = None
        try:
            self.ours = {
                backend: self._resources.enter_context(ours(backend, ranks, settings.timeout))
                for backend in settings.processes.backends
            }
            for name, python in settings.processes.rivals.items():
                if name in rivals:
                    self.rivals[name] = self._started(STARTERS[name](python, ranks), ranks)
            if limit:
                self.limit = self._start_limit(ranks)
        except BaseException:
            self.close()
            raise
        for group in self._groups:
            report.line(f"# {group.name:<14} {group.describe()}")

    @property
    def num_wrong(self) -> int:
        """What differed from NumPy's, of all groups so far."""
        return sum(group.num_wrong for group in self._groups)

    def measure(self, turns: Sequence[Turn]) -> dict[str, Timing]:
        """Times by column; the groups give back the memory of what they measured."""
        cases = {turn.column: turn.group.case(turn.case, **turn.details) for turn in turns}
        return self._measure(turns, cases, self._settings.processes.effort(quick=self._settings.quick))

    def measure_turns(
        self, turns: Sequence[Turn], effort: Effort
    ) -> tuple[dict[str, Timing], dict[str, Timing]]:
        """The means of the iterations of each turn, and the iterations themselves.

        Where ranks lose their cores now and then, that is where the time goes, and most iterations don't show it.
        """
        seconds: dict[str, list[list[float]]] = {turn.column: [] for turn in turns}
        cases = {
            turn.column: _mean(turn.group.case(turn.case, **turn.details), seconds[turn.column])
            for turn in turns
        }
        means = self._measure(turns, cases, effort)
        # The first of each is the warm-up.
        return means, {column: Timing(tuple(chain(*each[1:]))) for column, each in seconds.items()}

    def _measure(self, turns: Sequence[Turn], cases: Mapping[str, Case], effort: Effort) -> dict[str, Timing]:
        timings = by_turns(cases, effort, self._report.working)
        for group in {id(turn.group): turn.group for turn in turns}.values():
            group.forget()
        return timings

    def close(self) -> None:
        """End all groups."""
        self._resources.close()

    def __enter__(self) -> Contenders:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def _groups(self) -> list[RankGroup]:
        return [*self.ours.values(), *self.rivals.values(), *([] if self.limit is None else [self.limit])]

    def _started(self, system: Any, ranks: int) -> RankGroup:
        self._report.working(f"starting {system.name}")
        return self._resources.enter_context(RankGroup(system, ranks, self._settings.timeout))

    def _start_limit(self, ranks: int) -> RankGroup | None:
        folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory()))
        try:
            library, compiler = compile_c_loops(folder)
        except RivalError as error:
            self._report.line(f"# {C} is left out: {error}")
            return None
        return self._started(c_loops(library, compiler, ranks), ranks)


def report_medians(
    report: Report, what: str, rows: Mapping[str, Mapping[str, Timing]], ours: Sequence[str]
) -> None:
    """Print medians with their spread, and how many times longer the others take than each of ours.

    Args:
        report: where to.
        what: the title of the rows' names.
        rows: times by column, by row.
        ours: which columns are ours, those that the others are compared with.
    """
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    report.line("# us: median [10 % .. 90 %]")
    report.table(
        [what, *columns],
        [
            [name, *(_spread(row[column]) if column in row else "-" for column in columns)]
            for name, row in rows.items()
        ],
    )
    for mine in ours:
        # "shared_memory, ordinary" is compared with "shared_memory", but with no other way of ours.
        others = [c for c in columns if c != mine and c.partition(", ")[0] not in {*ours} - {mine}]
        if not others:
            continue
        report.line()
        report.line(f"# ratios of medians: others / {mine}")
        report.table(
            [what, *others],
            [
                [name, *(_ratio(row.get(other), row.get(mine)) for other in others)]
                for name, row in rows.items()
            ],
        )


def describe(timings: Mapping[str, Timing], ours: str) -> dict[str, Any]:
    """For JSON: all times, and the others' medians as multiples of ours."""
    return {
        "timings": {
            column: {**timing.describe(), "p10_us": timing.p10 * 1e6, "p90_us": timing.p90 * 1e6}
            for column, timing in timings.items()
        },
        "ratios": {
            column: timing.median / timings[ours].median
            for column, timing in timings.items()
            if column != ours
        },
    }


def _mean(case: Case, turns: list[list[float]]) -> Case:
    """The case that gives the mean only, and notes the iterations."""

    def mean(iterations: int) -> list[float]:
        turns.append(list(case(iterations)))
        return [float(np.mean(turns[-1]))]

    return mean


def _spread(timing: Timing) -> str:
    low, median, high = (_micros(seconds) for seconds in (timing.p10, timing.median, timing.p90))
    return f"{median} [{low} .. {high}]"


def _micros(seconds: float) -> str:
    micros = seconds * 1e6
    return f"{micros:.0f}" if micros >= 1000 else f"{micros:.4g}" if micros >= 1 else f"{micros:.2f}"


def _ratio(theirs: Timing | None, ours: Timing | None) -> str:
    if theirs is None or ours is None:
        return "-"
    ratio = theirs.median / ours.median
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x"
