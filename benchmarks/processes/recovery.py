"""How long after kill -9 of a rank is the lost step done by the others, and how long until another rank has taken its place?"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

import numpy as np

from benchmarks.processes.elastic_rank import INPUTS, OUTPUTS
from benchmarks.processes.process_groups import our_environment
from benchmarks.report import Report
from benchmarks.rivals.rival import RivalError
from benchmarks.setups import Settings

NAME = "processes_recovery"

_LARGEST_ERROR = 1e-9
_TO_COME = 30.0
"""Seconds that each thing may take that is waited for."""


def run_recovery(settings: Settings, report: Report) -> None:
    """Print the times from the kill, over several kills, the chief's among them."""
    ranks = max(3, settings.ranks)
    num_kills = 2 if settings.quick else 10
    left: list[float] = []
    replaced: list[float] = []
    with _job(ranks, num_kills) as job:
        pids = {job.next("ready")["pid"] for _ in range(ranks)}
        for kill in range(num_kills):
            report.working(f"kill {kill + 1} of {num_kills}")
            time.sleep(0.5)
            # In turn: process ids rise with age, and the oldest that is left is the chief.
            victim = sorted(pids)[kill % ranks]
            pids.remove(victim)
            at = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            done = [job.next("done") for _ in range(ranks - 1)]
            left.append(max(one["at"] for one in done) - at)
            pids.add(job.next("ready")["pid"])
            joined = [job.next("done") for _ in range(ranks)]
            replaced.append(max(one["at"] for one in joined) - at)
        errors = job.end()
    wrong = sum(error > _LARGEST_ERROR for error in errors) + (len(errors) != ranks)
    rows = {"the lost step is done": left, "another rank is in, and the next step done": replaced}
    about = f"{ranks} ranks, {INPUTS} x {OUTPUTS} float64, momentum"
    report.record(NAME, {"what": about, "ranks": ranks, "kills": num_kills, "seconds": rows, "wrong": wrong})
    report.line(f"# {about}; after kill -9 of one, {num_kills} times, until on all ranks")
    report.table(
        ["until", "median ms", "least ms", "most ms"],
        [
            [what, *(f"{1e3 * value:.1f}" for value in (np.median(times), min(times), max(times)))]
            for what, times in rows.items()
        ],
    )


@final
class _Job:
    """An elastic job, and what its ranks tell."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, ranks: int) -> None:
        self._process = process
        self._folder = folder
        self._ranks = ranks
        self._told: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._kept: list[dict[str, Any]] = []
        self._words: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def next(self, what: str) -> dict[str, Any]:
        """The next thing of that name that a rank tells.

        Raises:
            RivalError: none does.
        """
        for number, one in enumerate(self._kept):
            if one["what"] == what:
                return self._kept.pop(number)
        until = time.monotonic() + _TO_COME
        while True:
            try:
                one_more = self._told.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                one_more = None
            if one_more is None:
                raise RivalError(f"elastic job: nobody told {what!r}: {' '.join(self._words[-40:])}")
            if one_more["what"] == what:
                return one_more
            self._kept.append(one_more)

    def end(self) -> list[float]:
        """End it; how far each rank's weights are from those of NumPy."""
        (self._folder / "stop").touch()
        return [float(self.next("end")["error"]) for _ in range(self._ranks)]

    def close(self) -> None:
        """Once the job has ended: give back its pipe."""
        self._reader.join(_TO_COME)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._told.put(json.loads(line))
            except json.JSONDecodeError:
                self._words.append(line.strip())
        self._told.put(None)


@contextmanager
def _job(ranks: int, num_kills: int) -> Iterator[_Job]:
    environment: Mapping[str, str] = our_environment()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "xpdistribute", "run", "--elastic", "--all-output"),
            *(
                "-n",
                str(ranks),
                "--max-restarts",
                str(num_kills),
                "-m",
                "benchmarks.processes.elastic_rank",
                folder,
            ),
        ]
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        job = _Job(process, Path(folder), ranks)
        try:
            yield job
            process.wait(_TO_COME)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
            if process.poll() is None:
                process.kill()
                process.wait()
            job.close()
