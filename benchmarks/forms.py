"""The tables of nccl-tests and of the OSU micro-benchmarks, column for column.

Scripts read these tables by position: what we add to nccl-tests' columns stands to the right of them,
and lines that it does not have begin with ``#``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from benchmarks.harness import Timing


@final
@dataclass(frozen=True)
class Run:
    """One way, out of place or in place, in which a collective of one size was measured.

    Args:
        timing: of the iterations.
        rank_seconds: the mean duration of a call, for each rank.
        algbw: bytes a second, divided by 1e9.
        busbw: the same, times the factor that makes it comparable with the speed of the hardware.
        wrong: elements that differed from NumPy's, on all ranks; None where nothing was checked.
    """

    timing: Timing
    rank_seconds: tuple[float, ...]
    algbw: float
    busbw: float
    wrong: int | None


@final
@dataclass(frozen=True)
class Point:
    """One line of the table.

    Args:
        num_bytes: what nccl-tests calls the size: the larger of a rank's input and output.
        count: elements of a rank's smaller side.
        dtype: nccl-tests' name of it.
        redop: nccl-tests' name of the reduction, ``none`` without one.
        root: the rank; -1 without one.
        out_of_place: the result goes to another array than the input's.
        in_place: it goes where the input was; None where the collective has no such way.
    """

    num_bytes: int
    count: int
    dtype: str
    redop: str
    root: int
    out_of_place: Run
    in_place: Run | None


@final
@dataclass(frozen=True)
class Sweep:
    """What the header says.

    Args:
        program: such as ``all_reduce_perf``.
        version: of this project.
        ranks: how many threads.
        min_bytes: of the smallest size.
        max_bytes: of the largest.
        factor: from one size to the next.
        warm_up: iterations left out.
        iterations: iterations measured.
        check: whether results are checked.
        processor: its name.
    """

    program: str
    version: str
    ranks: int
    min_bytes: int
    max_bytes: int
    factor: int
    warm_up: int
    iterations: int
    check: bool
    processor: str


def nccl_header(sweep: Sweep) -> list[str]:
    """The lines from the version to the names of the columns."""
    first = f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  {'':>6}           out-of-place                       in-place          "
    both, added = ("time", "algbw", "busbw", "#wrong") * 2, ("p50", "p95", "p99", "min") * 2
    units = ("(us)", "(GB/s)", "(GB/s)", "") * 2
    return [
        f"# xpdistribute version {sweep.version}, in the form of nccl-tests",
        f"# Collective test starting: {sweep.program}",
        f"# nThread {sweep.ranks} nGpus 0 minBytes {sweep.min_bytes} maxBytes {sweep.max_bytes} "
        f"step: {sweep.factor}(factor) warmup iters: {sweep.warm_up} iters: {sweep.iterations} agg iters: 1 "
        f"validation: {int(sweep.check)} graph: 0",
        "#",
        "# Using devices",
        *(
            f"#  Rank {rank:2d} Group  0 Pid {os.getpid():6d} on {'localhost':>10} device {rank:2d} "
            f"[cpu:{rank}] {sweep.processor}"
            for rank in range(sweep.ranks)
        ),
        "#",
        f"{first}     out-of-place (us)                     in-place (us)",
        _columns("# %10s  %12s  %8s  %6s  %6s", ("size", "count", "type", "redop", "root"), both, added),
        _columns("# %10s  %12s  %8s  %6s  %6s", ("(B)", "(elements)", "", "", ""), units, ("(us)",) * 8),
    ]


def nccl_line(point: Point) -> str:
    """One size."""
    runs = (point.out_of_place, point.in_place)
    start = f"{point.num_bytes:12d}  {point.count:12d}  {point.dtype:>8}  {point.redop:>6}  {point.root:6d}"
    return start + "".join(_body(run) for run in runs) + "".join(_percentiles(run) for run in runs)


def nccl_footer(points: Sequence[Point], check: bool) -> list[str]:
    """The two lines that end a table: how much was wrong, and the mean over all of its bus bandwidths."""
    runs = [run for point in points for run in (point.out_of_place, point.in_place) if run is not None]
    wrong = sum(run.wrong or 0 for run in runs)
    mean = sum(run.busbw for run in runs) / len(runs)
    verdict = "FAILED" if wrong else "OK" if check else "(not checked)"
    return [
        f"# {'Out of bounds values':<20} : {wrong} {verdict}",
        f"# {'Avg bus bandwidth':<20} : {mean:g} ",
    ]


def osu_header(collective: str, full: bool) -> list[str]:
    """The title and the names of the columns."""
    titles = f"{'# Size':<10}{'Avg Latency(us)':>18}"
    if full:
        titles += f"{'Min Latency(us)':>18}{'Max Latency(us)':>18}{'Iterations':>12}"
    name = collective.replace("_", "").capitalize()
    return ["", f"# OSU xpdistribute in-process {name} Latency Test", titles]


def osu_line(point: Point, full: bool) -> str:
    """One size: the mean, least and greatest over ranks of a call's mean duration, out of place."""
    micros = [seconds * 1e6 for seconds in point.out_of_place.rank_seconds]
    line = f"{point.num_bytes:<10d}{sum(micros) / len(micros):18.2f}"
    if full:
        iterations = len(point.out_of_place.timing.seconds)
        line += f"{min(micros):18.2f}{max(micros):18.2f}{iterations:12d}"
    return line


def narrow(value: float, width: int) -> str:
    """A number in at most so many characters, as nccl-tests writes it: fewer decimals, then an exponent."""
    digits = len(str(int(value))) if value >= 1 else 0
    if digits < width - 2:
        return f"{value:{width}.2f}"
    if digits < width - 1:
        return f"{value:{width}.1f}"
    if digits < width + 1:
        return f"{value:{width}.0f}"
    return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"


def _columns(form: str, first: tuple[str, ...], both: tuple[str, ...], added: tuple[str, ...]) -> str:
    body = "".join(
        f"  {name:>7}" if position % 4 == 0 else f"  {name:>6}" for position, name in enumerate(both)
    )
    return form % first + body + "".join(f"  {name:>7}" for name in added)


def _body(run: Run | None) -> str:
    if run is None:
        return f"  {'N/A':>7}  {'N/A':>6}  {'N/A':>6}  {'N/A':>6}"
    wrong = "   N/A" if run.wrong is None else f"{run.wrong:6g}"
    return f"  {narrow(run.timing.mean * 1e6, 7)}  {narrow(run.algbw, 6)}  {narrow(run.busbw, 6)}  {wrong}"


def _percentiles(run: Run | None) -> str:
    if run is None:
        return f"  {'N/A':>7}" * 4
    timing = run.timing
    seconds = (timing.median, timing.p95, timing.percentile(99), timing.minimum)
    return "".join(f"  {narrow(value * 1e6, 7)}" for value in seconds)
