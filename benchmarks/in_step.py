"""An all_reduce inside a step, each replica with a result of its own: ours, the memory floor, and rivals by turns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from benchmarks.harness import Timing, by_turns, call
from benchmarks.memory_floor import floor_case
from benchmarks.setups import STRATEGIES, Settings, this_replica
from strategies import Strategy

OURS, FLOOR = "ours", "floor"


@final
@dataclass(frozen=True)
class InStep:
    """What came out.

    Args:
        timings: `OURS`, `FLOOR`, and the rivals by name.
        wrong: elements that differed from NumPy's.
    """

    timings: dict[str, Timing]
    wrong: int

    @property
    def ours(self) -> Timing:
        """Our time."""
        return self.timings[OURS]

    @property
    def share_of_floor(self) -> float:
        """Floor / ours: 1 would be as fast as the memory allows."""
        return self.timings[FLOOR].median / self.ours.median

    @property
    def rivals(self) -> dict[str, Timing]:
        """The others' times, by name."""
        return {name: timing for name, timing in self.timings.items() if name not in (OURS, FLOOR)}


def measure_in_step(strategy_name: str, replicas: int, num_bytes: int, settings: Settings) -> InStep:
    """Time ``run`` of a step that makes one all_reduce of ``num_bytes`` on each replica."""
    with closing(STRATEGIES[strategy_name](replicas)) as strategy:
        values = ones_and_twos(strategy, num_bytes)

        def step(value: Any) -> Any:
            return this_replica().all_reduce("SUM", value)

        def ours() -> Any:
            return strategy.run(step, args=(values,))

        cases = {OURS: call(ours), FLOOR: floor_case(max(4, num_bytes), replicas, settings.timeout)}
        if (
            settings.rival is not None
            and strategy_name == "Mirrored"
            and replicas <= settings.rival.num_devices
        ):
            for mode, ops in (
                ("function", "default"),
                ("function", "reduction_to_one_device"),
                ("eager", "default"),
            ):
                cases[f"{settings.rival.name} {mode}, {ops}"] = settings.rival.case(
                    "all_reduce", replicas=replicas, num_bytes=num_bytes, mode=mode, cross_device_ops=ops
                )
        wrong = wrong_sums(strategy, ours())
        timings = by_turns(cases, settings.effort)
        return InStep(timings, wrong + wrong_sums(strategy, ours()))


def ones_and_twos(strategy: Strategy, num_bytes: int) -> Any:
    """Replica r's float32 array of so many bytes holds r + 1 everywhere."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.full(max(1, num_bytes // 4), context.replica_id_in_sync_group + 1, np.float32)
    )


def wrong_sums(strategy: Strategy, result: Any) -> int:
    """How many elements of the replicas' results are not the sum of 1 .. replicas."""
    expected = sum(range(1, strategy.num_replicas_in_sync + 1))
    return sum(
        int(np.count_nonzero(np.asarray(value) != expected))
        for value in strategy.experimental_local_results(result)
    )


def checked(function: Callable[[], Any], strategy: Strategy, expected: object) -> int:
    """How many replicas' results are not ``expected``."""
    return sum(result != expected for result in strategy.experimental_local_results(function()))
