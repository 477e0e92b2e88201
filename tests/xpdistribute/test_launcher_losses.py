"""``xpdistribute run`` of training that loses processes: who is blamed, whose output is seen, who is started in their place."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINING = """
import os, signal, sys, time
import numpy as np
import strategies as xd

rank = int(os.environ.get("XPDISTRIBUTE_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
is_new = "XPDISTRIBUTE_JOIN" in os.environ
strategy = xd.MultiWorkerMirroredStrategy({arguments})

def step():
    return xd.get_replica_context().all_reduce("sum", np.ones(3))

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once, whatever other processes print
    sys.stdout.flush()

for i in range({steps}):
    {body}
    strategy.run(step)
    time.sleep(0.05)
say("end", rank, strategy.num_replicas_in_sync)
"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi], which brings mpiexec"
)


def train(
    folder: Path, body: str, *options: str, steps: int = 20, arguments: str = ""
) -> subprocess.CompletedProcess[str]:
    """A job of training in which each process does something before each step."""
    program = folder / "train.py"
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ").strip()
    program.write_text(TRAINING.format(body=body, steps=steps, arguments=arguments))
    return subprocess.run(
        [sys.executable, "-m", "xpdistribute", "run", *options, str(program)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_job_goes_on_well_for_long_after_it_has_lost_a_process(tmp_path: Path) -> None:
    # Process 2 has got the number of the one that is dead when the launcher sees that this one has ended.
    done = train(
        tmp_path,
        "if i == 3 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
        *("-n", "3", "--elastic", "--max-restarts", "0", "--all-output"),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["end 0 2", "end 2 2"]
    assert done.stderr.count("going on with 2 of 3 processes") == 1, done.stderr


def test_when_the_chief_dies_the_next_one_is_heard(tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        if i == 4 and rank == 0: os.kill(os.getpid(), signal.SIGKILL)
        say(f"{rank}:{i}")
        """,
        *("-n", "3", "--elastic", "--max-restarts", "0"),
        steps=10,
    )
    assert done.returncode == 0, done.stderr
    # What rank 1 said before it became process 0 is not seen: that is what rank 0 has said. In between it may be.
    lines = [line for line in done.stdout.splitlines() if line != "1:4"]
    assert lines == [*(f"0:{i}" for i in range(4)), *(f"1:{i}" for i in range(5, 10)), "end 1 2"]


def test_when_all_fail_together_nobody_is_started_in_their_place(tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        if is_new: say("new")
        if i == 3: raise ValueError("the same in all")
        """,
        *("-n", "3", "--elastic", "--all-output"),
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "is started in its place" not in done.stderr
    assert "all processes of the job have ended" not in done.stderr
    assert re.search(r"xpdistribute run: rank \d \(pid \d+, host \S+\) ended with status 1", done.stderr)


def test_newcomers_for_whom_nobody_is_left_go_without_a_word(tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        if rank == 1 and i == 3: os.kill(os.getpid(), signal.SIGKILL)
        if i == 3: last = time.monotonic()
        if i > 3 and time.monotonic() - last > 0.45: raise ValueError("the same in all")
        """,
        *("-n", "3", "--elastic"),
        steps=400,
    )
    assert done.returncode == 1
    assert "is started in its place (1 of 3)" in done.stderr
    assert "all processes of the job have ended" not in done.stderr, done.stderr
    said = done.stderr[done.stderr.rindex("xpdistribute run:") :]
    assert re.match(r"xpdistribute run: rank [02] \(pid", said), said


def test_who_fails_because_of_another_is_not_blamed(tmp_path: Path) -> None:
    done = train(
        tmp_path,
        "if i == 3 and rank == 1: raise ValueError('the reason')",
        *("-n", "3", "--elastic"),
        arguments="min_workers=3",
    )
    assert done.returncode == 1
    said = done.stderr[done.stderr.rindex("xpdistribute run:") :]
    assert re.match(r"xpdistribute run: rank 1 \(pid \d+, host \S+\) ended with status 1", said), done.stderr
    assert said.rstrip().endswith("ValueError: the reason")


def test_a_traceback_is_not_printed_again_right_after_itself(tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        if rank == 1:
            def step(): raise ValueError("in the step")
        else:
            time.sleep(20)
        """,
        *("-n", "2"),
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == done.stderr.count("ValueError: in the step") == 1, done.stderr
    assert "    strategy.run(step)\n" in done.stderr
    assert done.stderr.rstrip().endswith("ended with status 1; the others were ended")


def test_a_traceback_comes_again_at_the_end_with_the_programs_own_lines(tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        if rank == 1:
            def step(): raise ValueError("in the step")
            import atexit
            atexit.register(time.sleep, 1.0)  # after its traceback: mpiexec ends the others when it is gone
        else:
            try:
                strategy.run(step)
            except xd.PeerFailedError:
                time.sleep(0.2)
                sys.exit("rank 0 has heard of it")
        """,
        *("-n", "2"),
    )
    assert done.returncode == 1
    said = done.stderr[done.stderr.index("rank 0 has heard of it") :]
    assert "xpdistribute run: rank 1" in said
    assert "ended with status 1; the others were ended. What it said last:\n" in said
    assert "    strategy.run(step)\n" in said
    assert said.rstrip().endswith("ValueError: in the step")


UNJOINED = """
import os
import numpy as np
import strategies as xd
{first}
for strategy in (xd.MirroredStrategy(["cpu:0", "cpu:1"]), xd.OneDeviceStrategy("cpu:0")):
    for _ in range(2):
        strategy.run(lambda: None)
"""


@pytest.mark.parametrize(
    ("first", "processes", "warns"),
    [
        ("", 2, True),
        ("", 1, False),
        ("xd.MultiWorkerMirroredStrategy()", 2, False),
        ("import mpi4py.MPI", 2, False),
    ],
    ids=["forgotten", "one process", "joined", "MPI"],
)
def test_processes_that_each_train_alone_are_told_once(
    tmp_path: Path, first: str, processes: int, *, warns: bool
) -> None:
    program = tmp_path / "train.py"
    program.write_text(UNJOINED.format(first=first))
    done = subprocess.run(
        [sys.executable, "-m", "xpdistribute", "run", "-n", str(processes), str(program)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr.count(
            "MirroredStrategy: the program runs in 2 processes, and each of them trains on its own"
        )
        == warns
    )
    assert done.stderr.count("trains on its own") == warns
    if warns:
        assert f"{program}:8: UserWarning" in done.stderr  # the line of the first step
