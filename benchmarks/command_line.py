"""The command line: which benchmarks, how long, against whom, and where the results go."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.adam import run_adam
from benchmarks.buckets import run_buckets
from benchmarks.checkpoint import run_checkpoint
from benchmarks.clipping import run_clipping
from benchmarks.collective_kinds import DTYPES, KINDS, REDOPS, numpy_dtype
from benchmarks.collective_sweep import SweepOptions, run_sweep
from benchmarks.import_time import run_import_time
from benchmarks.in_step import measure_in_step
from benchmarks.machine import describe_machine, header
from benchmarks.memory import run_memory
from benchmarks.overhead import run_overhead, size
from benchmarks.plot import IN_STEP, require_matplotlib, write_plot
from benchmarks.processes import all_reduce, barrier, gradients, idle, recovery, start_up
from benchmarks.processes.options import ProcessOptions
from benchmarks.processes.process_groups import BACKENDS
from benchmarks.processes.train import NAME as PROCESSES_TRAIN
from benchmarks.processes.train import run_train as run_processes_train
from benchmarks.report import Report
from benchmarks.rivals.rival import PROGRAMS, Rival, RivalError, find_rival_python
from benchmarks.rivals.systems import STARTERS, find_pythons
from benchmarks.setups import Settings, report_ratios
from benchmarks.sparse_adagrad import run_sparse_adagrad
from benchmarks.torch_step import run_torch_step
from benchmarks.tracing import run_tracing
from benchmarks.train import run_train

PROCESSES: dict[str, Callable[[Settings, Report], None]] = {
    all_reduce.NAME: all_reduce.run_all_reduce,
    barrier.NAME: barrier.run_barrier,
    barrier.CROWDED: barrier.run_crowded_barrier,
    gradients.NAME: gradients.run_gradients,
    PROCESSES_TRAIN: run_processes_train,
    start_up.NAME: start_up.run_start_up,
    idle.NAME: idle.run_idle,
    recovery.NAME: recovery.run_recovery,
}
"""Those between the processes of this machine."""

OF_PROCESSES = "processes"
"""All of them by one name."""

OTHERS: dict[str, Callable[[Settings, Report], None]] = {
    "overhead": run_overhead,
    "buckets": run_buckets,
    "train": run_train,
    "adam": run_adam,
    "clipping": run_clipping,
    "sparse_adagrad": run_sparse_adagrad,
    "torch_step": run_torch_step,
    "tracing": run_tracing,
    "memory": run_memory,
    "checkpoint": run_checkpoint,
    "import_time": run_import_time,
    **PROCESSES,
}
"""The benchmarks that are no sweep over sizes of one collective in nccl-tests' form."""

BESIDE = ("torch",)
"""Rivals that their benchmarks measure in this process, wherever they are installed; asked for, they must be."""

RIVALS = tuple(dict.fromkeys([*PROGRAMS, *STARTERS, *BESIDE]))
"""All that ``--against`` knows."""

NAMES = (*KINDS, *OTHERS)
"""All benchmarks, in the order in which they run."""

_HERE = NAMES if sys.platform == "linux" else tuple(name for name in NAMES if name not in PROCESSES)
"""Those that this system can run: processes share memory on Linux."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def run(arguments: Sequence[str]) -> int:
    """Run the benchmarks asked for.

    Returns:
        The exit status: 0, or 1 where a result was wrong or the rival failed.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    sweep = _sweep_options(parser, options)
    names = list(dict.fromkeys(_each(options.benchmarks))) or list(_HERE)
    about = describe_machine()
    with contextlib.ExitStack() as stack:
        try:
            if options.plot is not None:
                require_matplotlib()
            rival = _rival(stack, names, options)
            settings = Settings(
                options.quick, options.ranks, options.timeout, rival, _process_options(options)
            )
        except (RivalError, RuntimeError) as error:
            parser.error(str(error))
        report = Report(about if rival is None else {**about, "rival": rival.about})
        if sweep.form == "osu" and (others := [name for name in names if name not in KINDS]):
            parser.error(f"--format osu: got {', '.join(others)}; need collectives only: {', '.join(KINDS)}")
        for line in header(about, _most_ranks(names, options.ranks, quick=options.quick)):
            report.line(line)
        if any(name in PROCESSES for name in names):
            report.line(
                "# processes  of one rank each in the benchmarks that say so; those who wait for their turn use no CPU"
            )
        if rival is not None:
            report.line(rival.describe())
        failure = _run_each(names, sweep, settings, report)
        if rival is not None:
            report.record("rival", {"name": rival.name, "wrong": rival.num_wrong})
    if options.json is not None:
        report.write_json(options.json, _portable(options))
    if options.plot is not None and not write_plot(options.plot, report.rows, about):
        print(
            f"--plot: nothing to draw of {', '.join(names)}; need a collective or overhead", file=sys.stderr
        )
    if report.num_wrong:
        report.line(f"# WRONG: {report.num_wrong} results differ from NumPy's")
    if failure is not None:
        print(failure, file=sys.stderr)
    return int(report.num_wrong > 0 or failure is not None)


def _run_each(
    names: Sequence[str], sweep: SweepOptions, settings: Settings, report: Report
) -> RivalError | None:
    """Run the benchmarks; where the rival fails, end there and say why, so that what was measured is not lost."""
    with report.progress(names) as each:
        for name in each:
            report.line()
            try:
                if name in OTHERS:
                    report.line(f"# {name}")
                    OTHERS[name](settings, report)
                    continue
                if name == "all_reduce" and settings.rival is not None:
                    _in_step_against(settings.rival, sweep, settings, report)
                run_sweep(name, sweep, report)
            except RivalError as error:
                return error
    return None


def _each(benchmarks: Sequence[str]) -> list[str]:
    """The benchmarks' names, where one name may stand for several."""
    return [name for given in benchmarks for name in (PROCESSES if given == OF_PROCESSES else [given])]


def _rival(stack: contextlib.ExitStack, names: Sequence[str], options: argparse.Namespace) -> Rival | None:
    """The rival of the benchmarks that don't start processes of ours, started if it has a program."""
    if all(name in PROCESSES for name in names):
        return None
    rival = None
    for name in options.against:
        if name in BESIDE:
            find_rival_python(name, options.rival_python)
        elif name in PROGRAMS:
            python = find_rival_python(name, options.rival_python)
            rival = stack.enter_context(Rival(name, python, max(2, options.ranks)))
    return rival


def _process_options(options: argparse.Namespace) -> ProcessOptions:
    rivals = [name for name in options.against if name in STARTERS]
    return ProcessOptions(
        backends=options.backend,
        rivals=find_pythons(rivals, options.rival_python),
        min_bytes=options.minbytes or 4,
        max_bytes=options.maxbytes or 64 << 20,
    )


def make_parser() -> argparse.ArgumentParser:
    """The flags; those of one letter are nccl-tests' own."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="How fast xpdistribute is on this machine, with every result checked against NumPy.",
        epilog="Sizes take K, M and G, powers of 1024. Text goes to stdout, progress to stderr.",
    )
    parser.add_argument(
        "benchmarks",
        nargs="*",
        metavar="BENCHMARK",
        type=_benchmark,
        help=f"of {', '.join(NAMES)}; {OF_PROCESSES} for all between processes; all",
    )
    of_all = parser.add_argument_group("for all benchmarks")
    of_all.add_argument(
        "-t", "--ranks", type=_at_least(2), default=2, help="threads, or processes, one a rank (%(default)s)"
    )
    of_all.add_argument(
        "-T",
        "--timeout",
        type=_positive_seconds,
        default=60.0,
        metavar="S",
        help="seconds a rank waits (%(default)s)",
    )
    of_all.add_argument("-J", "--json", type=_file, metavar="FILE", help="write everything measured there")
    of_all.add_argument(
        "--plot", type=_file, metavar="FILE.png", help="draw collectives and overhead; needs matplotlib"
    )
    of_all.add_argument(
        "--quick", action="store_true", help="a smoke test of all tables in less than a minute"
    )
    of_all.add_argument(
        "--against",
        type=_some(RIVALS),
        default=[],
        metavar="RIVALS",
        help=f"of {', '.join(RIVALS)}: measure them by turns with ours, in their own processes; torch in this one",
    )
    of_all.add_argument(
        "--rival-python",
        metavar="PATH",
        help="the interpreter that has the rivals which this one lacks; or all of them, if it lacks none",
    )
    of_all.add_argument(
        "--backend",
        type=_some(tuple(BACKENDS)),
        default=["shared_memory"],
        metavar="BACKENDS",
        help=f"between processes, of {', '.join(BACKENDS)} (shared_memory)",
    )
    of_collectives = parser.add_argument_group("for the collectives, as nccl-tests")
    of_collectives.add_argument("-b", "--minbytes", type=_size, metavar="SIZE", help="smallest size (4)")
    of_collectives.add_argument(
        "-e", "--maxbytes", type=_size, metavar="SIZE", help="largest size (64M; quick 1M)"
    )
    of_collectives.add_argument(
        "-f", "--stepfactor", type=_at_least(2), help="from size to size (4; quick 64)"
    )
    of_collectives.add_argument("-n", "--iters", type=_at_least(1), help="iterations timed (50; quick 6)")
    of_collectives.add_argument(
        "-w", "--warmup_iters", type=_at_least(0), default=5, help="before those (%(default)s)"
    )
    of_collectives.add_argument(
        "-d", "--datatype", choices=list(DTYPES), default="float", help="(%(default)s)"
    )
    of_collectives.add_argument("-o", "--op", choices=list(REDOPS), default="sum", help="(%(default)s)")
    of_collectives.add_argument(
        "-c", "--check", type=int, choices=(0, 1), default=1, help="compare with NumPy (%(default)s)"
    )
    of_collectives.add_argument(
        "--format", choices=("nccl", "osu"), default="nccl", help="whose table (%(default)s)"
    )
    of_collectives.add_argument("--full", action="store_true", help="osu's five columns instead of two")
    return parser


def _sweep_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> SweepOptions:
    quick = options.quick
    smallest = 4 if options.minbytes is None else options.minbytes
    default_largest = max(smallest, (1 << 20) if quick else (64 << 20))
    largest = default_largest if options.maxbytes is None else options.maxbytes
    if largest < smallest:
        parser.error(f"-e: got {largest} bytes; need at least -b, {smallest} bytes")
    try:
        dtype = numpy_dtype(options.datatype)
    except ValueError as error:
        parser.error(str(error))
    if options.op == "avg" and np.issubdtype(dtype, np.integer):
        parser.error(
            f"-o avg -d {options.datatype}: the mean of integers is a double; need -d float or another float"
        )
    return SweepOptions(
        min_bytes=smallest,
        max_bytes=largest,
        factor=options.stepfactor or (64 if quick else 4),
        iterations=options.iters or (6 if quick else 50),
        warm_up=options.warmup_iters,
        dtype=options.datatype,
        redop=options.op,
        check=bool(options.check),
        timeout=options.timeout,
        ranks=options.ranks,
        form=options.format,
        full=options.full,
    )


def _in_step_against(rival: Rival, sweep: SweepOptions, settings: Settings, report: Report) -> None:
    """What users call, a step with one all_reduce, for all sizes; the table of ranks alone follows."""
    compared = []
    for num_bytes in sweep.sizes:
        report.working(f"in a step, {num_bytes} B")
        measured = measure_in_step("Mirrored", sweep.ranks, num_bytes, settings)
        compared += [
            (size(num_bytes), measured.ours, name, timing) for name, timing in measured.rivals.items()
        ]
        report.record(
            IN_STEP,
            {
                "size": num_bytes,
                "ranks": sweep.ranks,
                "timings": {name: timing.describe() for name, timing in measured.timings.items()},
                "share_of_floor": measured.share_of_floor,
                "wrong": measured.wrong,
            },
        )
    report.line(f"# run + all_reduce in a step, {sweep.ranks} replicas of Mirrored, against {rival.name}")
    report_ratios(report, "ours", compared)
    report.line()


def _most_ranks(names: Sequence[str], ranks: int, *, quick: bool) -> int:
    return max(ranks, 4) if "overhead" in names and not quick else ranks


def _portable(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments without places on this machine."""
    return {
        name: value for name, value in vars(options).items() if name not in ("json", "plot", "rival_python")
    }


def _benchmark(text: str) -> str:
    if text not in (*NAMES, OF_PROCESSES):
        raise argparse.ArgumentTypeError(
            f"got {text!r}; need one of {', '.join(NAMES)}, or {OF_PROCESSES} for those that begin so"
        )
    return text


def _some(of: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        given = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in given if name not in of]:
            raise argparse.ArgumentTypeError(
                f"got {', '.join(map(repr, unknown))}; need some of {', '.join(of)}, with commas between them"
            )
        return given

    return names


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text and text[-1].upper() in "KMG" else (text, "")
    if not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}; need bytes such as 8, 64K, 16M or 1G")
    return int(number) * _UNITS[unit]


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}; need a whole number from {least}")
        return int(text)

    return number


def _positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}; need seconds above 0")
    return seconds


def _file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}; need a file in a folder that exists")
    return path
