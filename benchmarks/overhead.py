"""What does a call cost, for each strategy and number of replicas?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

from benchmarks.harness import Case, Timing, by_turns, call
from benchmarks.in_step import checked, measure_in_step, ones_and_twos, wrong_sums
from benchmarks.report import Report
from benchmarks.setups import STRATEGIES, Settings, report_ratios, this_replica
from strategies import Strategy

SMALL = (4, 1 << 10, 1 << 20)
LARGE = 64 << 20

Compared = list[tuple[str, Timing, str, Timing]]


def run_overhead(settings: Settings, report: Report) -> None:
    """Print microseconds a call, and the rival's ratios."""
    rows: list[list[object]] = []
    compared: Compared = []
    floors: list[str] = []

    def keep(
        strategy: str, replicas: int, what: str, timings: dict[str, Timing], wrong: int, **more: object
    ) -> None:
        ours = timings["ours"]
        rows.append([strategy, replicas, what, ours.minimum * 1e6, ours.median * 1e6, ours.p95 * 1e6])
        others = {name: timing for name, timing in timings.items() if name not in ("ours", "floor")}
        compared.extend(
            (f"{strategy} {replicas}: {what}", ours, name, other) for name, other in others.items()
        )
        report.record(
            "overhead",
            {
                "strategy": strategy,
                "replicas": replicas,
                "call": what,
                "wrong": wrong,
                **ours.describe(),
                **{f"{name} us": other.describe() for name, other in others.items()},
                **{f"ratio {name}": other.median / ours.median for name, other in others.items()},
                **more,
            },
        )

    for name, replicas in _strategies(settings):
        report.working(f"{name}, {replicas} replicas: calls")
        with closing(STRATEGIES[name](replicas)) as strategy:
            for what, (ours, wrong) in _calls(strategy).items():
                timings = by_turns(
                    {"ours": call(ours), **_rival_calls(settings, name, replicas, what)}, settings.effort
                )
                keep(name, replicas, what, timings, wrong())
            for num_bytes in (*SMALL, *_large(settings, name, replicas))[1:]:
                report.working(f"{name}, {replicas} replicas: reduce {size(num_bytes)}")
                values = ones_and_twos(strategy, num_bytes)

                def reduce(strategy: Strategy = strategy, values: Any = values) -> Any:
                    return strategy.reduce("SUM", values, axis=None)

                cases: dict[str, Case] = {"ours": call(reduce)}
                if (
                    settings.rival is not None
                    and name == "Mirrored"
                    and replicas <= settings.rival.num_devices
                ):
                    cases[f"{settings.rival.name} eager"] = settings.rival.case(
                        "reduce", replicas=replicas, num_bytes=num_bytes
                    )
                timings = by_turns(cases, settings.effort)
                keep(name, replicas, f"reduce {size(num_bytes)}", timings, wrong_sums(strategy, reduce()))
        for num_bytes in (*SMALL, *_large(settings, name, replicas)):
            what = f"run + all_reduce {size(num_bytes)}"
            report.working(f"{name}, {replicas} replicas: {what}")
            measured = measure_in_step(name, replicas, num_bytes, settings)
            keep(
                name,
                replicas,
                what,
                measured.timings,
                measured.wrong,
                floor_p50_us=measured.timings["floor"].median * 1e6,
                share_of_floor=measured.share_of_floor,
            )
            if num_bytes == LARGE:
                floor = measured.timings["floor"].median * 1e6
                floors.append(
                    f"# Memory floor of {name} {replicas}: {what}: {floor:.0f} us (np.copyto, each input read and each "
                    f"output written once); ours {measured.ours.median * 1e6:.0f} us = "
                    f"{measured.share_of_floor:.2f} of the floor (medians)"
                )
    report.line("# us a call")
    report.table(["strategy", "replicas", "call", "min", "p50", "p95"], rows)
    for line in floors:
        report.line(line)
    report_ratios(report, "ours", compared)
    if compared:
        report.line(
            "# TensorFlow leaves a step that returns nothing out of its graph: 'run, empty' under tf.function"
        )
        report.line("# runs no replica there; 'run, returns a number' is the least that its graph does run.")


def size(num_bytes: int) -> str:
    """In words: powers of 1024, as nccl-tests counts."""
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes // factor} {unit}"
    return f"{num_bytes} B"


def _strategies(settings: Settings) -> list[tuple[str, int]]:
    counts = [2] if settings.quick else sorted({2, 4, settings.ranks} - {1})
    return [("OneDevice", 1), *(("Mirrored", count) for count in counts), ("CentralStorage", 2)]


def _large(settings: Settings, name: str, replicas: int) -> tuple[int, ...]:
    return (LARGE,) if (name, replicas) == ("Mirrored", 2) and not settings.quick else ()


def _calls(strategy: Strategy) -> dict[str, tuple[Callable[[], Any], Callable[[], int]]]:
    """What is called, and what counts its wrong results, by name."""
    replicas = strategy.num_replicas_in_sync

    def empty() -> None:
        pass

    def number() -> float:
        return 1.0

    def merge(strategy: Strategy) -> int:
        return strategy.num_replicas_in_sync

    def merging() -> Any:
        return this_replica().merge_call(merge)

    def run(step: Callable[[], Any], expected: object) -> tuple[Callable[[], Any], Callable[[], int]]:
        def ours() -> Any:
            return strategy.run(step)

        return ours, lambda: checked(ours, strategy, expected)

    return {
        "run, empty": run(empty, None),
        "run, returns a number": run(number, 1.0),
        "run + merge_call": run(merging, replicas),
    }


def _rival_calls(settings: Settings, name: str, replicas: int, what: str) -> dict[str, Case]:
    rival = settings.rival
    # A collective of more replicas than the rival has devices never comes back from TensorFlow.
    if rival is None or name == "CentralStorage" or replicas > rival.num_devices:
        return {}
    case, details = {
        "run, empty": ("run", {"returns": "nothing"}),
        "run, returns a number": ("run", {"returns": "number"}),
        "run + merge_call": ("merge_call", {}),
    }[what]
    return {
        f"{rival.name} {mode}": rival.case(case, replicas=replicas, mode=mode, **details)
        for mode in ("eager", "function")
    }
