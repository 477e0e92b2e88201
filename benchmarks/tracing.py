"""What does it cost to watch? A training step with and without a trace, and a collective with and without a record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from benchmarks.harness import Case, by_turns, call
from benchmarks.mlp import num_wrong, training_step
from benchmarks.report import Report
from benchmarks.setups import STRATEGIES, Settings, this_replica
from strategies import Strategy

_MEETINGS = 1000
"""Meetings an iteration: one alone takes less time than reading the clock."""
_BATCHES = (32, 256)


def run_tracing(settings: Settings, report: Report) -> None:
    """Print the microseconds of both, and the ratios."""
    _records(settings, report)
    report.line()
    _steps(settings, report)


def _records(settings: Settings, report: Report) -> None:
    report.working("records")
    # Of one replica, which keeps records only while a trace is taken: the difference is what a record costs.
    with closing(STRATEGIES["OneDevice"](1)) as strategy:

        def meet() -> float:
            barrier = this_replica().communicator.barrier
            begin = time.perf_counter_ns()
            for _ in range(_MEETINGS):
                barrier()
            return (time.perf_counter_ns() - begin) * 1e-9 / _MEETINGS

        def plain(iterations: int) -> list[float]:
            return [float(strategy.run(meet)) for _ in range(iterations)]

        def recorded(iterations: int) -> list[float]:
            seconds = []
            for _ in range(iterations):
                with strategy.trace():  # anew each time, so that memory for records is reused, as in the ring
                    seconds += plain(1)
            return seconds

        timings = by_turns({"plain": plain, "recorded": recorded}, settings.effort)
    added = timings["recorded"].median - timings["plain"].median
    report.line("# us that the flight recorder adds to a collective, for each replica")
    report.table(
        ["without p50", "with p50", "added"], [[*(t.median * 1e6 for t in timings.values()), added * 1e6]]
    )
    report.record(
        "tracing",
        {"what": "record", "added_us": added * 1e6, "wrong": 0, **timings["recorded"].describe()},
    )


def _steps(settings: Settings, report: Report) -> None:
    rows: list[list[object]] = []
    for batch in _BATCHES[: 1 if settings.quick else None]:
        report.working(f"steps with a batch of {batch}")
        with closing(STRATEGIES["Mirrored"](settings.ranks)) as strategy:
            step = training_step(strategy, batch)
            wrong = num_wrong(strategy, step, batch * strategy.num_replicas_in_sync)
            plain = call(step)

            def traced(
                iterations: int, strategy: Strategy = strategy, plain: Case = plain
            ) -> Sequence[float]:
                with strategy.trace():
                    return plain(iterations)

            timings = by_turns({"plain": plain, "traced": traced}, settings.effort)
        untraced, watched = timings["plain"], timings["traced"]
        ratio = watched.median / untraced.median
        rows.append(
            [
                settings.ranks,
                batch,
                untraced.minimum * 1e6,
                untraced.median * 1e6,
                watched.minimum * 1e6,
                watched.median * 1e6,
                ratio,
            ]
        )
        report.record(
            "tracing",
            {
                "what": "step",
                "replicas": settings.ranks,
                "batch": batch,
                "ratio": ratio,
                "wrong": wrong,
                "untraced": untraced.describe(),
                "traced": watched.describe(),
            },
        )
    report.line("# us a training step of the MLP 784-128-10, a batch a replica")
    report.table(["replicas", "batch", "untraced min", "p50", "traced min", "p50", "ratio"], rows)
