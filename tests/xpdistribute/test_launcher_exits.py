"""``xpdistribute run`` of programs that end early, each in another way: the one that does is the culprit, and the others hear of it."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys, time
import numpy as np
import strategies as xd

rank = int(os.environ.get("XPDISTRIBUTE_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
strategy = xd.MultiWorkerMirroredStrategy()

def step():
    return xd.get_replica_context().all_reduce("sum", np.ones(3))

strategy.run(step)
if rank == 1:
    {body}
try:
    strategy.run(step)
except BaseException as error:
    if rank != 1:
        print(f"rank {{rank}} heard: {{type(error).__name__}}: {{error}}", file=sys.stderr)
    raise
"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi], which brings mpiexec"
)


def run(folder: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A job of three in which rank 1 does something after the first of two steps."""
    program = folder / "train.py"
    program.write_text(PROGRAM.format(body=body))
    return subprocess.run(
        [sys.executable, "-m", "xpdistribute", "run", "-n", "3", *options, str(program)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("raise SystemExit(3)", 3, "failed: it ended with status 3"),
        ("raise SystemExit('no data')", 1, "failed: it ended with status 1"),
        ("sys.exit(3)", 3, "failed: it ended with status 3"),
        ("sys.exit('no data')", 1, "failed: it ended with: no data"),
        ("os._exit(3)", 3, "died: its connection closed"),
    ],
)
def test_who_ends_with_a_status_while_others_need_it_is_the_culprit(
    tmp_path: Path, body: str, status: int, words: str
) -> None:
    done = run(tmp_path, body)
    assert done.returncode == status, done.stderr
    heard = set(re.findall(r"rank (\d) heard: PeerFailedError: process 1 of 3 .*" + words, done.stderr))
    assert heard == {"0", "2"}, done.stderr
    last = done.stderr[done.stderr.rindex("xpdistribute run:") :]
    assert re.match(rf"xpdistribute run: rank 1 \(pid \d+, host \S+\) ended with status {status}; ", last), (
        last
    )
    if "no data" in body:
        assert last.endswith("What it said last:\nno data\n")
    else:
        assert last.endswith("; the others were ended\n")


def test_who_ends_with_status_0_too_early_is_named_by_who_needs_it(tmp_path: Path) -> None:
    done = run(tmp_path, "raise SystemExit(0)")
    assert done.returncode == 1
    assert re.search(r"heard: PeerFailedError: process 1 of 3 .* has ended its program", done.stderr)


def test_a_status_at_the_end_that_nobody_needs_to_hear_of_is_the_jobs(tmp_path: Path) -> None:
    done = run(tmp_path, "strategy.run(step); raise SystemExit(7)")
    assert done.returncode == 7
    assert "heard" not in done.stderr
    assert re.search(r"rank 1 \(pid \d+, host \S+\) ended with status 7", done.stderr)


def test_an_elastic_job_goes_on_without_one_that_raises_system_exit(tmp_path: Path) -> None:
    done = run(tmp_path, "raise SystemExit(3)", "--elastic", "--max-restarts=0")
    assert done.returncode == 0, done.stderr
    assert re.search(r"rank 1 \(.*\) has failed \(it ended with status 3\); .* go on without it", done.stderr)


def test_elastic_processes_that_end_well_in_any_order_end_the_job_well(tmp_path: Path) -> None:
    done = run(tmp_path, "strategy.run(step); raise SystemExit(0)", "--elastic")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError('no ' + 'x' * 50_000_000 + ' data')",
        "sys.exit('no ' + 'x' * 50_000_000 + ' data')",
        "def step(): raise ValueError('no ' + 'x' * 50_000_000 + ' data')",
    ],
    ids=["raise", "sys.exit", "in a step"],
)
def test_an_endless_text_of_an_error_is_cut_wherever_it_comes(tmp_path: Path, body: str) -> None:
    done = run(tmp_path, body)
    assert done.returncode == 1
    assert len(done.stderr) < 500_000
    assert len(re.findall(r"x \.\.\. \[49\d{6} characters left out\] \.\.\. x+ data", done.stderr)) >= 3
    assert re.search(r"heard: PeerFailedError: .*process 1 .*no x", done.stderr)
    last = done.stderr[done.stderr.rindex("xpdistribute run:") :]
    assert re.match(r"xpdistribute run: rank 1 \(.*\) ended with status 1", last), last[:300]


def test_output_that_nobody_reads_any_more_ends_the_job_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text("while True:\n    print('a line', flush=True)\n")
    with subprocess.Popen(
        [sys.executable, "-m", "xpdistribute", "run", "-n", "2", str(tmp_path / "talks.py")],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            assert job.stdout is not None
            assert job.stderr is not None
            assert job.stdout.readline() == "a line\n"
            job.stdout.close()
            assert job.wait(20) == 128 + signal.SIGPIPE
            assert job.stderr.read() == ""
        finally:
            job.kill()
