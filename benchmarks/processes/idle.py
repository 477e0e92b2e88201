"""How much of a core does a rank use while it waits for another one in a barrier?"""

from __future__ import annotations

import numpy as np

from benchmarks.processes.contenders import Contenders
from benchmarks.report import Report
from benchmarks.setups import Settings

NAME = "processes_idle"


def run_idle(settings: Settings, report: Report) -> None:
    """Print the CPU time of waiting ranks as a share of the time that they wait."""
    seconds, rounds = (0.3, 1) if settings.quick else (2.0, 3)
    shares: dict[str, list[float]] = {}
    with Contenders(settings, report, settings.ranks, ("mpi4py", "gloo"), limit=False) as contenders:
        for _ in range(rounds):
            for name, group in (*contenders.ours.items(), *contenders.rivals.items()):
                report.working(name)
                shares.setdefault(name, []).extend(group.idle(seconds))
        report.record(NAME, {"seconds": seconds, "cpu_shares": shares, "wrong": contenders.num_wrong})
    report.line(f"# share of a core that a rank uses which waits {seconds:g} s in a barrier")
    titles = ["", "median %", "most %"]
    rows = [[name, f"{100 * np.median(each):.2f}", f"{100 * max(each):.2f}"] for name, each in shares.items()]
    report.table(titles, rows)
