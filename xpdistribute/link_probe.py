"""Whether the ranks of this machine can be started and add up right, and how fast: what ``doctor --mpi`` adds to the report.

The ranks run `benchmarks.link_check`; here is only what starts them and puts their numbers in words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from xpdistribute.host import find_cores
from xpdistribute.mpiexec import find_mpiexec
from xpdistribute.packages import OURS

LINKS = {"shared_memory": "shared memory", "mpi": "MPI"}
"""How the ranks of a host can exchange data, and what it is called."""

_MOST_RANKS = 4
_UNITS = ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (float("inf"), 1.0, "s"))


@final
@dataclass(frozen=True)
class LinkReport:
    """What came of it.

    Args:
        ranks: how many were started.
        mpiexec: with which program, in words; None if there is none.
        measured: by link, what rank 0 has told: ``seconds`` by the bytes of an all-reduce, and ``library``.
        failures: what went wrong, in sentences.
        load: how many processes wanted to compute before it began; None where the system does not say.
    """

    ranks: int
    mpiexec: str | None
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    load: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether what else the machine did has slowed it down."""
        return self.load is not None and self.load + self.ranks > find_cores().logical + 0.5

    def lines(self) -> list[str]:
        """In plain lines."""
        lines = [f"{self.ranks} ranks, started by {self.mpiexec or 'nothing'}"]
        for link, told in self.measured.items():
            seconds = {int(size): taken for size, taken in told["seconds"].items()}
            speeds = ", ".join(f"{_size(size)} in {_time(taken)}" for size, taken in seconds.items())
            library = f" ({told['library'].partition(',')[0]})" if "library" in told else ""
            lines.append(f"all-reduce by {LINKS[link]}{library}, results right: {speeds}")
        if self.is_busy and self.measured:
            lines.append(
                f"the machine was busy before (a load of {self.load:.1f} on {find_cores().logical} cores): it is faster when it is idle"
            )
        return lines

    def as_fields(self) -> dict[str, Any]:
        """For the report's JSON."""
        return {
            "ranks": self.ranks,
            "mpiexec": self.mpiexec,
            "all_reduce": self.measured,
            "load": self.load,
            "failures": list(self.failures),
        }


def probe_links(timeout: float) -> LinkReport:
    """Start ranks on this machine, which exchange data in each of the ways by turns.

    Args:
        timeout: seconds that they have.
    """
    ranks = min(_MOST_RANKS, max(2, find_cores().available))
    try:
        mpiexec = find_mpiexec(os.environ)
    except ValueError as error:
        return LinkReport(ranks, None, failures=(f"--mpi: {error}",))
    try:
        load = os.getloadavg()[0]
    except OSError:
        load = None
    failures = []
    # In the same processes, where they take turns. If that can't be, by one after the other, as one may be fine.
    measured = _run(ranks, list(LINKS), timeout)
    if isinstance(measured, str):
        measured = {}
        for link, name in LINKS.items():
            told = _run(ranks, [link], timeout)
            if isinstance(told, str):
                failures.append(f"--mpi: {ranks} ranks by {name}: {told}")
            else:
                measured.update(told)
    return LinkReport(ranks, f"{mpiexec} ({mpiexec.path})", measured, tuple(failures), load)


def _run(ranks: int, links: Sequence[str], timeout: float) -> dict[str, dict[str, Any]] | str:
    """What rank 0 has told, by link, or why it has not."""
    command = [sys.executable, "-m", "xpdistribute", "run", "-n", str(ranks), "--timeout", f"{timeout:g}"]
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(OURS))))
    try:
        done = subprocess.run(
            [*command, "-m", "benchmarks.link_check", *links],
            # Our own packages are found where this one is, also if it was not installed.
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout + 10,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"nothing came within {timeout + 10:g} s"
    if done.returncode:
        return f"status {done.returncode}: {_last(done.stderr.splitlines())}"
    for line in done.stdout.splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict) and "links" in told:
            return {link: {"ranks": told["ranks"], **one} for link, one in told["links"].items()}
    return f"no numbers came: {_last(done.stdout.splitlines())}"


def _last(lines: Sequence[str]) -> str:
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "it said nothing")


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes} B"


def _time(seconds: float) -> str:
    factor, unit = next((factor, unit) for limit, factor, unit in _UNITS if seconds < limit)
    return f"{seconds * factor:.3g} {unit}"
