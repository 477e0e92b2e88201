"""How everything in the suite is timed: cases that take turns, and the statistics of their times.

A case runs some iterations and gives the seconds of each. Cases that are compared run by turns, a few
iterations each, round by round, so that whatever else the machine does falls on all of them alike.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np

T = TypeVar("T")

Case = Callable[[int], Sequence[float]]
"""Runs that many iterations and gives the seconds of each. It may give fewer, if it must stop."""


@final
@dataclass(frozen=True)
class Timing:
    """The seconds that each iteration took, warm-up left out."""

    seconds: tuple[float, ...]

    @property
    def minimum(self) -> float:
        """The shortest, in seconds."""
        return min(self.seconds)

    @property
    def mean(self) -> float:
        """In seconds."""
        return float(np.mean(self.seconds))

    @property
    def median(self) -> float:
        """In seconds."""
        return self.percentile(50)

    @property
    def p10(self) -> float:
        """In seconds."""
        return self.percentile(10)

    @property
    def p90(self) -> float:
        """In seconds."""
        return self.percentile(90)

    @property
    def p95(self) -> float:
        """In seconds."""
        return self.percentile(95)

    def percentile(self, percent: float) -> float:
        """In seconds, interpolated."""
        return float(np.percentile(self.seconds, percent))

    def describe(self) -> dict[str, float]:
        """For JSON: everything in microseconds."""
        return {
            "iterations": len(self.seconds),
            "min_us": self.minimum * 1e6,
            "mean_us": self.mean * 1e6,
            "p50_us": self.median * 1e6,
            "p95_us": self.p95 * 1e6,
            "p99_us": self.percentile(99) * 1e6,
        }


@final
@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        rounds: how often the cases take turns.
        iterations: of each case, in all rounds together, at least.
        most_iterations: the same, at most.
        seconds: about how long each case may take, as far as ``iterations`` allows.
        warm_up: iterations of each case that are thrown away at its start.
    """

    rounds: int = 5
    iterations: int = 20
    most_iterations: int = 2000
    seconds: float = 1.0
    warm_up: int = 3

    def iterations_a_round(self, seconds_each: float) -> int:
        """How many iterations of so many seconds make a round."""
        wanted = min(self.seconds / max(seconds_each, 1e-9), self.most_iterations)
        return max(1, -(-self.iterations // self.rounds), int(wanted / self.rounds))


def call(function: Callable[[], object]) -> Case:
    """The case that calls a function and drops its result."""

    def case(iterations: int) -> list[float]:
        now = time.perf_counter_ns
        nanoseconds = []
        for _ in range(iterations):
            begin = now()
            function()
            nanoseconds.append(now() - begin)
        return [taken * 1e-9 for taken in nanoseconds]

    return case


def by_turns(
    cases: Mapping[str, Case], effort: Effort, working: Callable[[str], None] | None = None
) -> dict[str, Timing]:
    """Measure cases side by side.

    Args:
        cases: by name.
        effort: how long.
        working: told the name of the case that is warmed up.

    Returns:
        The times by name. All cases have taken turns within the same seconds.
    """
    counts = {}
    for name, case in cases.items():
        if working is not None:
            working(name)
        warm = case(max(1, effort.warm_up))
        counts[name] = effort.iterations_a_round(min(warm))
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    with _quiet():
        for turn in range(effort.rounds):
            # Each second round goes backwards: nobody always comes after the same neighbour.
            for name in list(cases)[:: -1 if turn % 2 else 1]:
                seconds[name].extend(cases[name](counts[name]))
                gc.collect(0)
    return {name: Timing(tuple(times)) for name, times in seconds.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """No garbage collection of cycles while the clock runs."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def on_threads(functions: Sequence[Callable[[], T]], timeout: float) -> list[T]:
    """Call each function on a thread of its own, the first on the caller's, and give their results.

    Args:
        functions: what to call.
        timeout: seconds to wait for the other threads after the first function has ended.

    Raises:
        TimeoutError: a thread has not ended.
        BaseException: the first exception that one of them raised.
    """
    results: list[Any] = [None] * len(functions)
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as failure:  # noqa: BLE001  handed to the caller below
            failures.append(failure)

    threads = [
        threading.Thread(target=run, args=(index,), name=f"rank {index}", daemon=True)
        for index in range(1, len(functions))
    ]
    for thread in threads:
        thread.start()
    run(0)
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if failures:
        raise failures[0]
    late = [thread.name for thread in threads if thread.is_alive()]
    if late:
        raise TimeoutError(
            f"benchmark: {', '.join(late)} still ran after {timeout:g} s; need all ranks to end — raise -T"
        )
    return results


@final
@dataclass(frozen=True)
class Timeline:
    """When each rank began and ended each iteration.

    Args:
        begun: nanoseconds, shape ``(ranks, iterations)``.
        ended: the same.
    """

    begun: np.ndarray[Any, np.dtype[np.int64]]
    ended: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def seconds(self) -> list[float]:
        """From when all ranks had the result before to when all have this one, for each iteration.

        Ranks that call back to back overlap; the sum of these is the time of the whole run, whoever waits.
        """
        done = np.concatenate([[self.begun[:, 0].max()], self.ended.max(axis=0)])
        # Ranks that did not wait for one another may have ended out of order: no iteration takes less than 0.
        return [float(taken) * 1e-9 for taken in np.diff(np.maximum.accumulate(done))]

    @property
    def rank_seconds(self) -> list[float]:
        """The mean duration of a call, for each rank."""
        return [float(mean) * 1e-9 for mean in (self.ended - self.begun).mean(axis=1)]


def ranks_by_turns(
    calls: Sequence[Callable[[], object]],
    meet: Callable[[int], object],
    iterations: int,
    warm_up: int,
    timeout: float,
) -> Timeline:
    """Let every rank call its function back to back, on a thread each, and note when.

    Args:
        calls: one for each rank.
        meet: called by each rank with its number between warm-up and measurement; returns when all are there.
        iterations: how many calls are noted.
        warm_up: how many come before and are not.
        timeout: seconds for the slowest rank after the first has ended.
    """

    def rank(index: int) -> Callable[[], tuple[list[int], list[int]]]:
        def loop() -> tuple[list[int], list[int]]:
            function, now = calls[index], time.perf_counter_ns
            begun, ended = [0] * iterations, [0] * iterations
            for _ in range(warm_up):
                function()
            meet(index)
            for i in range(iterations):
                begun[i] = now()
                function()
                ended[i] = now()
            return begun, ended

        return loop

    with _quiet():
        noted = on_threads([rank(index) for index in range(len(calls))], timeout)
    return Timeline(
        np.array([begun for begun, _ in noted], np.int64), np.array([ended for _, ended in noted], np.int64)
    )
