"""How long does ``import strategies`` take beyond ``import numpy``? In fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Timing
from benchmarks.report import Report
from benchmarks.setups import Settings

_PROGRAM = """
import time
begin = time.perf_counter()
import numpy
between = time.perf_counter()
import strategies
print(between - begin, time.perf_counter() - between, strategies.MirroredStrategy.__name__)
"""
_REPOSITORY = Path(__file__).resolve().parents[1]
_TIMEOUT = 60


def run_import_time(settings: Settings, report: Report) -> None:
    """Print both imports' times, and the rival's."""
    with tempfile.TemporaryDirectory() as folder:
        # Compiled modules are kept, as an installation keeps them, whatever the environment says of that.
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        times = [_times(environment, report, number) for number in range(4 if settings.quick else 21)]
    numpy_timing, ours_timing = (
        Timing(column) for column in zip(*times[1:], strict=True)
    )  # the first compiles
    rows: list[list[object]] = [
        [name, timing.minimum * 1e3, timing.median * 1e3, timing.p95 * 1e3]
        for name, timing in (("numpy", numpy_timing), ("strategies, beyond numpy", ours_timing))
    ]
    report.line(f"# ms to import, in {len(times) - 1} fresh processes")
    report.table(["import", "min", "p50", "p95"], rows)
    row = {"numpy": numpy_timing.describe(), "strategies": ours_timing.describe(), "wrong": 0}
    if settings.rival is not None:
        theirs = float(settings.rival.about["import_seconds"])
        ratio = theirs / ours_timing.median
        report.line(
            f"# {settings.rival.name}, beyond numpy, in one process: {theirs * 1e3:.0f} ms, {ratio:.0f} times ours"
        )
        row.update({"rival_seconds": theirs, "ratio": ratio})
    report.record("import_time", row)


def _times(environment: dict[str, str], report: Report, number: int) -> tuple[float, float]:
    report.working(f"process {number}")
    # A folder without the source finds the installed package; from the repository, the one beside us.
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=_REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=_TIMEOUT,
    )
    numpy_seconds, ours, _ = ended.stdout.split()
    return float(numpy_seconds), float(ours)
