"""What the benchmarks share: the settings of a run, and the strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from benchmarks.harness import Effort, Timing
from benchmarks.processes.options import ProcessOptions
from benchmarks.report import Report
from benchmarks.rivals.rival import Rival
from strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    ReplicaContext,
    Strategy,
    get_replica_context,
)

STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "OneDevice": lambda replicas: OneDeviceStrategy("cpu:0"),  # noqa: ARG005  always one
    "Mirrored": lambda replicas: MirroredStrategy(cpus(replicas)),
    "CentralStorage": lambda replicas: CentralStorageStrategy(
        compute_devices=cpus(replicas), parameter_device="cpu:0"
    ),
}
"""From the number of replicas to a new strategy."""


@final
@dataclass(frozen=True)
class Settings:
    """What the command line chose for all benchmarks.

    Args:
        quick: a smoke test: the same tables from fewer and smaller measurements.
        ranks: the number of replicas where a benchmark does not try several.
        timeout: seconds that a rank waits for the others.
        rival: measured by turns with ours, if any.
        processes: for the benchmarks between processes.
    """

    quick: bool
    ranks: int
    timeout: float
    rival: Rival | None
    processes: ProcessOptions

    @property
    def effort(self) -> Effort:
        """How long to measure a case."""
        if self.quick:
            return Effort(rounds=2, iterations=4, most_iterations=200, seconds=0.05, warm_up=2)
        return Effort()

    @property
    def replica_counts(self) -> list[int]:
        """1, 2, and ``ranks`` if that is another number."""
        return sorted({1, 2, self.ranks})


def cpus(count: int) -> list[str]:
    """The names of that many logical CPU devices."""
    return [f"cpu:{index}" for index in range(count)]


def this_replica() -> ReplicaContext:
    """The context of the replica that calls, in a step."""
    context = get_replica_context()
    assert context is not None
    return context


def report_ratios(report: Report, ours: str, compared: Sequence[tuple[str, Timing, str, Timing]]) -> None:
    """Print how many times longer others take.

    Args:
        report: where to.
        ours: what the second column is called.
        compared: what was measured, our timing, the other's name, and its timing.
    """
    if not compared:
        return
    report.line()
    report.table(
        ["measured", f"{ours} p50_us", "rival", "p50_us", "ratio"],
        [
            [what, mine.median * 1e6, rival, theirs.median * 1e6, theirs.median / mine.median]
            for what, mine, rival, theirs in compared
        ],
    )
