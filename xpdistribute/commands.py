"""All commands but ``run``: ``xpdistribute doctor``, ``xpdistribute bench``, and help about all of them."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from xpdistribute.doctor import CAPABILITIES, examine
from xpdistribute.link_probe import probe_links
from xpdistribute.packages import own_version
from xpdistribute.report import as_json, as_text, show


def run_command(given: Sequence[str]) -> int:
    """Run the command that the arguments ask for; the exit status."""
    if given[:1] == ["bench"]:
        return _bench(given[1:])
    options = _parser().parse_args(given)
    return _doctor(options.require, options.timeout, json=options.json, mpi=options.mpi)


def _bench(arguments: Sequence[str]) -> int:
    # Not imported above: it is to settle the BLAS threads first, then load NumPy.
    benchmarks = importlib.import_module("benchmarks.__main__")
    ours = Path(__file__).parents[1]
    if Path(str(benchmarks.__file__)).parents[1] != ours:
        print(
            f"xpdistribute bench: got {benchmarks.__file__}, which hides our package 'benchmarks'; need the one in {ours} — rename "
            "yours, or run it from another folder",
            file=sys.stderr,
        )
        return 1
    sys.argv = ["xpdistribute bench", *arguments]
    return int(benchmarks.main())


def _doctor(required: Sequence[str], timeout: float, *, json: bool, mpi: bool) -> int:
    report = examine(required, timeout)
    links = probe_links(timeout) if mpi else None
    if json:
        print(as_json(report, links))
    elif sys.stdout.isatty():
        show(report)
    else:
        print(as_text(report))
    if links is not None and not json:
        print("\n".join(["", "Between the ranks of this machine", *(f"  {line}" for line in links.lines())]))
    failures = [*report.failures, *(links.failures if links is not None else ())]
    for failure in failures:
        print(f"xpdistribute doctor: {failure}", file=sys.stderr)
    return int(bool(failures))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xpdistribute",
        description="tf.distribute's programming model for NumPy and CuPy arrays, without TensorFlow.",
    )
    parser.add_argument("--version", action="version", version=f"xpdistribute {own_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser(
        "run", help="start a program in several processes, on one host or many", add_help=False
    )
    commands.add_parser("bench", help="how fast it is here: the same as python -m benchmarks", add_help=False)
    doctor = commands.add_parser(
        "doctor",
        help="what is installed here, what is missing, and what would be slow",
        description="What is installed on this machine, what is missing, and what would be slow. Every package is imported "
        "in a process of its own, so that one that is broken or hangs is a line in the report.",
        epilog="Exits with 1 if something required is missing, or if the library itself can't be used.",
    )
    doctor.add_argument(
        "--require",
        type=_capabilities,
        action="extend",
        default=[],
        metavar="NAMES",
        help=f"fail unless these can be used, of {', '.join(CAPABILITIES)}; with commas, or repeated",
    )
    doctor.add_argument(
        "--mpi",
        action="store_true",
        help="also start ranks on this machine, and check and time an all-reduce between them",
    )
    doctor.add_argument("--json", action="store_true", help="for programs; has a number for its schema")
    doctor.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds that a package has for its import (%(default)g)",
    )
    return parser


def _capabilities(text: str) -> list[str]:
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in CAPABILITIES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"got {', '.join(unknown) or 'no names'}; need names of {', '.join(CAPABILITIES)}"
        )
    return names


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"got {text!r}; need seconds above 0")
    return seconds
