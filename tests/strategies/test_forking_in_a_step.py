"""Processes that are forked in a step: they have one replica's thread, or none, and must not wait for the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import run_script

ROOT = Path(__file__).parents[2]
WORDS = "CollectiveAbortedError: run: this process was forked in a step, and has none of the threads of the step's other replicas"
BODY = """
import os, time
replicas, who, deed = {replicas}, {who}, {deed!r}
parent, start = os.getpid(), time.monotonic()

def step():
    replica = xd.get_replica_context()
    replica.all_reduce("SUM", 1.0)
    if replica.replica_id == who and os.getpid() == parent:
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            print("child", os.waitstatus_to_exitcode(status), time.monotonic() - start < 5.0, flush=True)
        elif deed == "exit":
            os._exit(7)
        elif deed == "return":
            return None
    return replica.all_reduce("SUM", np.ones(2))

result = s.run(step)
print("result", s.local_results(result)[0].tolist(), flush=True)
print("next", s.local_results(s.run(lambda: xd.all_reduce("SUM", 1.0)))[0], flush=True)
"""
ALONE = """
import numpy as np
import strategies as xd
s = xd.MirroredStrategy(
    [f"cpu:{{i}}" for i in range({replicas})], communication_options=xd.CommunicationOptions(timeout_seconds=20.0)
)
"""


def run(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore::DeprecationWarning", "-c", source],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )


@pytest.mark.parametrize("deed", ["meet", "return"])
@pytest.mark.parametrize(("replicas", "who"), [(2, 0), (2, 1), (3, 1), (3, 2)])
def test_the_child_raises_at_once_and_the_step_goes_on(replicas: int, who: int, deed: str) -> None:
    done = run((ALONE + BODY.replace("{deed!r}", repr(deed))).format(replicas=replicas, who=who))
    assert done.returncode == 0, done.stderr
    size = float(replicas)
    assert done.stdout.splitlines() == ["child 1 True", f"result [{size}, {size}]", f"next {size}"]
    assert WORDS in done.stderr


@pytest.mark.parametrize("who", [0, 1])
def test_a_child_that_ends_by_itself_may(who: int) -> None:
    done = run((ALONE + BODY.replace("{deed!r}", "'exit'")).format(replicas=2, who=who))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["child 7 True", "result [2.0, 2.0]", "next 2.0"]


def test_with_one_replica_there_is_nobody_to_wait_for() -> None:
    done = run((ALONE + BODY.replace("{deed!r}", "'meet'")).format(replicas=1, who=0))
    assert done.returncode == 0, done.stderr
    ends = ["result [1.0, 1.0]", "next 1.0"]
    assert done.stdout.splitlines() == [*ends, "child 0 True", *ends]  # the child's first


def test_a_fork_while_another_thread_is_in_a_step_leaves_the_child_a_strategy_that_works() -> None:
    done = run(
        ALONE.format(replicas=2)
        + """
import os, threading, time

inside = threading.Event()

def step():
    xd.all_reduce("SUM", 1.0)
    inside.set()
    time.sleep(0.5)
    return xd.all_reduce("SUM", 1.0)

thread = threading.Thread(target=lambda: print("parent", s.local_results(s.run(step))[0], flush=True))
thread.start()
inside.wait(5)
child = os.fork()
if child == 0:
    print("child", s.local_results(s.run(lambda: xd.all_reduce("SUM", 1.0)))[0], flush=True)
    os._exit(0)
os.waitpid(child, 0)
thread.join()
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["child 2.0", "parent 2.0"]


@pytest.mark.parametrize(("replicas", "who"), [(1, 0), (1, 1), (2, 0), (2, 3)])
def test_a_child_of_one_process_of_a_job_raises_at_once_and_the_job_goes_on(replicas: int, who: int) -> None:
    source = (
        f"s = xd.MultiWorkerMirroredStrategy(devices=['cpu:0', 'cpu:1'][:{replicas}],"
        " communication_options=xd.CommunicationOptions(timeout_seconds=20.0))\n"
    )
    ends = run_script(2, source + BODY.format(replicas=replicas, who=who, deed="meet"), timeout=15)
    total = 2.0 * replicas
    for process, end in enumerate(ends):
        assert end.status == 0, end.err
        own = ["child 1 True"] if process == who // replicas else []
        assert end.out.splitlines() == [*own, f"result [{total}, {total}]", f"next {total}"]
        assert ("CollectiveAbortedError" in end.err) == bool(own)
