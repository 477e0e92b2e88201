"""How long does a barrier between processes take: with a core for each, and with four ranks and a busy program on two cores?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness import Effort, Timing
from benchmarks.processes.contenders import C, Contenders, Turn, describe, report_medians
from benchmarks.report import Report
from benchmarks.setups import Settings

NAME, CROWDED = "processes_barrier", "processes_crowded_barrier"

_RIVALS = ("mpi4py", "gloo")
_CROWD, _CORES = 4, 2
_LONG = Effort(rounds=9, iterations=450, most_iterations=90_000, seconds=3.0, warm_up=200)
"""Turns that are long beside the time for which a busy program keeps a core."""
_LONG_QUICK = Effort(rounds=2, iterations=100, most_iterations=5_000, seconds=0.2, warm_up=50)


def run_barrier(settings: Settings, report: Report) -> None:
    """Print the times of barriers of so many ranks as were asked for."""
    with Contenders(settings, report, settings.ranks, _RIVALS, limit=True) as contenders:
        rows = {f"barrier, {settings.ranks} ranks": contenders.measure(_turns(contenders))}
        _report(NAME, rows, contenders, settings, report)


def run_crowded_barrier(settings: Settings, report: Report) -> None:
    """Print the times of barriers where ranks lose their cores to one another and to others."""
    with (
        _on_cores(_CORES),
        # Without the C loop, which is no limit here: it would have to know when to give its core away.
        Contenders(settings, report, _CROWD, _RIVALS, limit=False) as contenders,
        _hog(),
    ):
        report.line(f"# {_CROWD} ranks and a busy program on {_CORES} cores")
        means, each = contenders.measure_turns(_turns(contenders), _LONG_QUICK if settings.quick else _LONG)
        rows = {"barrier, mean of a turn": means, "barrier, each": each}
        _report(CROWDED, rows, contenders, settings, report)


def _turns(contenders: Contenders) -> list[Turn]:
    groups = {**contenders.ours, **contenders.rivals}
    if contenders.limit is not None:
        groups[C] = contenders.limit
    return [Turn(column, group, "barrier", {}) for column, group in groups.items()]


def _report(
    name: str,
    rows: dict[str, dict[str, Timing]],
    contenders: Contenders,
    settings: Settings,
    report: Report,
) -> None:
    ours = settings.processes.backends
    wrong = contenders.num_wrong
    for what, timings in rows.items():
        report.record(name, {"what": what, **describe(timings, ours[0]), "wrong": wrong})
        wrong = 0
    report_medians(report, "measured", rows, ours)


@contextmanager
def _hog() -> Iterator[None]:
    """A program that wants a core all the time."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as hog:
        try:
            yield
        finally:
            hog.kill()


@contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """Processes that are started meanwhile have no more cores than that, where the system can say so."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
