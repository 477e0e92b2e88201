"""How long does the launcher take to run a script that does nothing on several ranks, against mpiexec alone?"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.harness import Effort, by_turns, call
from benchmarks.processes.contenders import describe, report_medians
from benchmarks.processes.process_groups import our_environment
from benchmarks.report import Report
from benchmarks.rivals.rival import RivalError
from benchmarks.rivals.systems import mpiexec
from benchmarks.setups import Settings

NAME = "processes_start_up"

_OURS, _THEIRS, _AS_IT_COMES = "xpdistribute run", "mpiexec", "mpiexec as it comes"
"""The second with the settings that make starting quick, which ours sets by itself; the third only with leave to run as root."""
_SCRIPTS = {"empty script": "", "script that imports mpi4py.MPI": "from mpi4py import MPI\n"}


def run_start_up(settings: Settings, report: Report) -> None:
    """Print the time from the command to its end."""
    try:
        starter, more = mpiexec(sys.executable, settings.ranks)
    except RivalError as error:
        report.line(f"# left out: {error}")
        return
    environment = our_environment()
    ours = [sys.executable, "-m", "xpdistribute", "run", "-n", str(settings.ranks)]
    effort = (
        Effort(rounds=2, iterations=2, warm_up=1, seconds=0)
        if settings.quick
        else Effort(rounds=7, iterations=14, warm_up=1, seconds=0)
    )
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (what, text) in enumerate(_SCRIPTS.items()):
            script = Path(folder, f"script{number}.py")
            script.write_text(text, encoding="utf-8")
            rows[what] = by_turns(
                {
                    _OURS: call(_command([*ours, str(script)], environment)),
                    _THEIRS: call(_command([*starter, sys.executable, str(script)], {**environment, **more})),
                    _AS_IT_COMES: call(
                        _command([*starter, sys.executable, str(script)], {**environment, **_root_only(more)})
                    ),
                },
                effort,
                report.working,
            )
            report.record(
                NAME, {"what": what, "ranks": settings.ranks, **describe(rows[what], _OURS), "wrong": 0}
            )
    report_medians(report, f"{settings.ranks} ranks", rows, [_OURS])


def _root_only(more: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in more.items() if "RUN_AS_ROOT" in name}


def _command(command: list[str], environment: Mapping[str, str]) -> Callable[[], None]:
    def run() -> None:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=dict(environment),
            check=False,
            timeout=60,
        )
        if ended.returncode:
            words = " ".join(ended.stderr.split()[-60:])
            raise RivalError(f"{' '.join(command[:4])}: ended with status {ended.returncode}: {words}")

    return run
