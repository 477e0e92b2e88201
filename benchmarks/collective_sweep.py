"""How fast are the collectives between the threads of a process, over size?

Each rank is a thread with an end of an `InProcessCommunicator`, and calls back to back, as in nccl-tests;
its table comes out, or the one of the OSU micro-benchmarks. For all_reduce the memory floor is measured by
turns with it: what the machine's memory allows, and our share of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from benchmarks.collective_kinds import (
    KINDS,
    REDOPS,
    Array,
    Kind,
    num_wrong,
    numpy_dtype,
    steady_data,
    test_data,
)
from benchmarks.forms import Point, Run, Sweep, nccl_footer, nccl_header, nccl_line, osu_header, osu_line
from benchmarks.harness import Timing, on_threads, ranks_by_turns
from benchmarks.machine import cpu_model, package_version
from benchmarks.memory_floor import copy_floor
from benchmarks.report import Report
from collectives import InProcessCommunicator

ROUNDS = 2
"""How often out of place, in place and the floor take turns at one size."""


FLOOR_FROM = 1 << 20
"""Bytes. Below, caches and the hand-over between threads decide, and the floor is kept for JSON and plot only."""


@final
@dataclass(frozen=True)
class SweepOptions:
    """nccl-tests' flags.

    Args:
        min_bytes: -b.
        max_bytes: -e.
        factor: -f.
        iterations: -n.
        warm_up: -w.
        dtype: -d, by its nccl-tests' name.
        redop: -o, by its nccl-tests' name.
        check: -c.
        timeout: -T, seconds.
        ranks: -t.
        form: ``nccl`` or ``osu``.
        full: whether OSU's table has five columns instead of two.
    """

    min_bytes: int
    max_bytes: int
    factor: int
    iterations: int
    warm_up: int
    dtype: str
    redop: str
    check: bool
    timeout: float
    ranks: int
    form: str
    full: bool

    @property
    def sizes(self) -> list[int]:
        """Bytes, from the smallest to the largest."""
        sizes = [self.min_bytes]
        while sizes[-1] * self.factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.factor)
        return sizes


def run_sweep(name: str, options: SweepOptions, report: Report) -> None:
    """Measure one collective at all sizes, print its table and record its rows."""
    kind = KINDS[name]
    sweep = Sweep(
        program=f"{name}_perf",
        version=package_version(),
        ranks=options.ranks,
        min_bytes=options.min_bytes,
        max_bytes=options.max_bytes,
        factor=options.factor,
        warm_up=options.warm_up,
        iterations=options.iterations,
        check=options.check,
        processor=cpu_model(),
    )
    osu = options.form == "osu"
    for line in osu_header(name, options.full) if osu else nccl_header(sweep):
        report.line(line)
    points: list[Point] = []
    floors: list[tuple[Point, Timing]] = []
    for size in options.sizes:
        report.working(f"{size} B")
        point, floor = _measure(kind, size, options)
        if points and points[-1].num_bytes == point.num_bytes:
            continue  # too small to tell apart: every rank has at least one element
        report.line(osu_line(point, options.full) if osu else nccl_line(point))
        report.record(name, _row(name, options, point, floor))
        points.append(point)
        if floor is not None and size >= FLOOR_FROM:
            floors.append((point, floor))
    if osu:
        return
    for point, floor in floors:
        report.line(_floor_line(point, floor))
    for line in nccl_footer(points, options.check):
        report.line(line)


def _measure(kind: Kind, size: int, options: SweepOptions) -> tuple[Point, Timing | None]:
    ranks, op, dtype = options.ranks, REDOPS[options.redop], numpy_dtype(options.dtype)
    splits = kind.splits_input or kind.splits_output
    count = max(1, size // dtype.itemsize // (ranks if splits else 1))
    in_count, out_count = (
        count * (ranks if split else 1) for split in (kind.splits_input, kind.splits_output)
    )
    ends = InProcessCommunicator.group(ranks, options.timeout)

    outs = [steady_data(out_count, dtype, op) for _ in range(ranks)]
    ins = [test_data(in_count, dtype, op, rank) for rank in range(ranks)]
    ways: dict[str, list[tuple[Array, Array]]] = {"out_of_place": list(zip(ins, outs, strict=True))}
    if kind.in_place is not None:
        same = [steady_data(out_count, dtype, op) for _ in range(ranks)]
        ways["in_place"] = [(kind.in_place(out, rank, ranks), out) for rank, out in enumerate(same)]

    def calls(pairs: Sequence[tuple[Array, Array]]) -> list[Callable[[], object]]:
        def one(end: InProcessCommunicator, array: Array, out: Array) -> Callable[[], object]:
            return lambda: kind.call(end, array, out, op)

        return [one(end, array, out) for end, (array, out) in zip(ends, pairs, strict=True)]

    wrong: dict[str, int | None] = dict.fromkeys(ways)
    if options.check and "in_place" in ways:
        wrong["in_place"] = _check_in_place(kind, ways["in_place"], calls(ways["in_place"]), options)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    of_ranks: dict[str, list[float]] = {way: [0.0] * ranks for way in ways}
    floor: list[float] = []
    targets = [steady_data(out_count, dtype, op) for _ in range(ranks)] if kind.name == "all_reduce" else []
    rounds = min(ROUNDS, options.iterations)
    for turn in range(rounds):
        iterations = options.iterations // rounds + (options.iterations % rounds if turn == 0 else 0)
        for way, pairs in ways.items():
            timeline = ranks_by_turns(
                calls(pairs),
                lambda rank: ends[rank].barrier(),
                iterations,
                options.warm_up,
                options.timeout,
            )
            seconds[way] += timeline.seconds
            of_ranks[way] = [
                total + mean / rounds
                for total, mean in zip(of_ranks[way], timeline.rank_seconds, strict=True)
            ]
        if targets:
            floor += copy_floor(ins, targets, iterations, options.warm_up, options.timeout)
    if options.check:
        results = [
            num_wrong(out, expected)
            for rank, out in enumerate(outs)
            if (expected := kind.expected(ins, rank, op)) is not None
        ]
        wrong["out_of_place"] = sum(results)

    num_bytes = max(in_count, out_count) * dtype.itemsize
    runs = {}
    for way in ways:
        timing = Timing(tuple(seconds[way]))
        algbw = num_bytes / timing.mean * 1e-9
        busbw = algbw * kind.bus_factor(ranks)
        runs[way] = Run(timing, tuple(of_ranks[way]), algbw, busbw, wrong[way])
    point = Point(
        num_bytes=num_bytes,
        count=count,
        dtype=options.dtype,
        redop=options.redop if kind.reduces else "none",
        root=kind.root,
        out_of_place=runs["out_of_place"],
        in_place=runs.get("in_place"),
    )
    return point, Timing(tuple(floor)) if floor else None


def _check_in_place(
    kind: Kind,
    pairs: Sequence[tuple[Array, Array]],
    calls: Sequence[Callable[[], object]],
    options: SweepOptions,
) -> int:
    """Run once on numbers that differ, compare, and put the steady numbers back."""
    op, before = REDOPS[options.redop], [out.copy() for _, out in pairs]
    ins = []
    for rank, (array, _) in enumerate(pairs):
        array[...] = test_data(len(array), array.dtype, op, rank)
        ins.append(array.copy())
    on_threads(calls, options.timeout)
    wrong = 0
    for rank, (_, out) in enumerate(pairs):
        expected = kind.expected(ins, rank, op)
        wrong += 0 if expected is None else num_wrong(out, expected)
    for (_, out), steady in zip(pairs, before, strict=True):
        out[...] = steady
    return wrong


def _floor_line(point: Point, floor: Timing) -> str:
    ours = point.out_of_place.timing.median
    return (
        f"# Memory floor {point.num_bytes:>12d} B : {floor.median * 1e6:.1f} us, each input read once and each output "
        f"written once by np.copyto; out of place {ours * 1e6:.1f} us = {floor.median / ours:.2f} of the floor (medians)"
    )


def _row(name: str, options: SweepOptions, point: Point, floor: Timing | None) -> dict[str, object]:
    row: dict[str, object] = {
        "collective": name,
        "ranks": options.ranks,
        "size": point.num_bytes,
        "count": point.count,
        "type": point.dtype,
        "redop": point.redop,
        "root": point.root,
        "wrong": 0,
    }
    wrong = 0
    for way, run in (("out_of_place", point.out_of_place), ("in_place", point.in_place)):
        if run is None:
            row[way] = None
            continue
        wrong += run.wrong or 0
        row[way] = {**run.timing.describe(), "alg_bw": run.algbw, "bus_bw": run.busbw, "nwrong": run.wrong}
    if floor is not None:
        row["floor"] = floor.describe()
        row["share_of_floor"] = floor.median / point.out_of_place.timing.median
    return {**row, "wrong": wrong}
