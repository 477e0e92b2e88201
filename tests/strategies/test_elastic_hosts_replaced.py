"""Elastic jobs over several hosts: who is killed is replaced by a process that another one starts by MPI."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.test_elastic_launched import Launched, is_running

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi], which brings mpiexec"
)

HOSTS = """
import os, signal

rank = int(os.environ.get("XPDISTRIBUTE_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
os.environ["XPDISTRIBUTE_HOST"] = f"host{rank // 2}"
is_new = "XPDISTRIBUTE_JOIN" in os.environ


def is_first(deed):
    try:
        os.close(os.open(f"{os.path.dirname(__file__)}/{deed}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""Two ranks on each host that is none."""

Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts a job; none of its processes is left after the test."""
    jobs: list[Launched] = []

    def start(*arguments: str, seconds: float, deed: str = "") -> Launched:
        jobs.append(Launched(tmp_path, list(arguments), seconds, before=HOSTS + deed))
        return jobs[-1]

    yield start
    told = [path for job in jobs for path in job.told.iterdir()]
    for job in jobs:
        job.close()
    end = time.monotonic() + 3.0
    left = processes_with(tmp_path)
    while left and time.monotonic() < end:
        time.sleep(0.02)
        left = processes_with(tmp_path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert told
    assert left == []


def processes_with(path: Path) -> list[int]:
    """Those that have been started with something in a folder."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            try:
                command = (process / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended
            if str(path).encode() in command and is_running(int(process.name)):
                found.append(int(process.name))
    return found


def worker(job: Launched, number: int) -> int:
    """The process id of the one that has this number at first."""
    job.until(lambda: len(job.all("ready")) >= 4)
    time.sleep(0.2)
    return int(next(one["pid"] for one in job.all("ready")[:4] if one["worker"] == number))


def kill(job: Launched, pid: int, num_ready: int) -> float:
    """Kill a process, and wait until so many in all have been ready; the seconds until a step was made with the last."""
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    job.until(lambda: len(job.all("ready")) == num_ready)
    newest = job.all("ready")[-1]["pid"]
    job.until(lambda: any(one["pid"] == newest for one in job.all("step")))
    return float(next(one["at"] for one in job.all("step") if one["pid"] == newest)) - killed_at


def workers(ends: list[dict[str, Any]]) -> list[int]:
    return [end["workers"] for end in ends]


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_killed_rank_of_several_hosts_is_replaced_and_the_job_ends_as_if_nothing_had_been(
    launch: Launch, number: int
) -> None:
    job = launch("-n", "4", "--timeout", "40", seconds=4.5)
    assert kill(job, worker(job, number), 5) < 3.0
    assert workers(job.finish(20)) == [4] * 4
    joined = [one for one in job.all("change") if one["joined"]]
    assert [(one["joined"], one["workers"]) for one in joined] == [(1, 4)] * 4
    assert "another one is started in its place (1 of 3)" in job.log()
    assert "prterun" not in job.log()


@pytest.mark.slow
def test_others_may_be_lost_afterwards_also_those_that_have_come_later(launch: Launch) -> None:
    job = launch("-n", "4", "--timeout", "40", seconds=6.0)
    kill(job, worker(job, 1), 5)
    kill(job, job.all("ready")[-1]["pid"], 6)
    kill(job, worker(job, 0), 7)
    assert workers(job.finish(20)) == [4] * 4


@pytest.mark.slow
def test_a_replacement_that_dies_at_its_start_leaves_the_job_going_on(launch: Launch) -> None:
    deed = "is_new and die()\n"
    job = launch("-n", "4", "--max-restarts", "1", "--timeout", "40", seconds=5.0, deed=deed)
    os.kill(worker(job, 1), signal.SIGKILL)
    job.until(lambda: "it has been replaced 1 times, so the others go on without it" in job.log())
    # Also when another one is lost after that.
    os.kill(worker(job, 2), signal.SIGKILL)
    assert workers(job.finish(20)) == [2, 2]
    assert job.log().count("so the others go on without it") == 2


@pytest.mark.slow
def test_after_a_replacement_that_died_at_its_start_others_can_be_started(launch: Launch) -> None:
    deed = 'is_new and is_first("died") and die()\n'
    job = launch("-n", "4", "--timeout", "40", seconds=5.0, deed=deed)
    kill(job, worker(job, 1), 5)
    kill(job, worker(job, 0), 6)
    assert workers(job.finish(20)) == [4] * 4


@pytest.mark.slow
@pytest.mark.parametrize("who", ["is_new", "rank == 0", "rank == 1"])
def test_a_process_may_die_in_the_middle_of_the_connecting(launch: Launch, who: str) -> None:
    """The newcomer, the one that has started it, or another one."""
    deed = f"""
import collectives.mpi.newcomers as newcomers

connect = newcomers.connect_newcomers


def connect_or_die(process, spawners, num_survivors, *others):
    if num_survivors == 3 and {who} and is_first("died"):
        newcomers._talk_with_all = die
    return connect(process, spawners, num_survivors, *others)


newcomers.connect_newcomers = connect_or_die
"""
    job = launch("-n", "4", "--timeout", "40", seconds=6.0, deed=deed)
    os.kill(worker(job, 3), signal.SIGKILL)
    job.until(lambda: (job.told.parent / "died").exists())
    ends = job.finish(20)
    assert workers(ends) == [4] * 4


@pytest.mark.slow
def test_a_program_that_can_not_be_started_again_is_said_to_be_none(launch: Launch) -> None:
    deed = """
import json

told = json.loads(os.environ["XPDISTRIBUTE_REPLACEMENT"])
told["command"] = ["/nonexistent"]
os.environ["XPDISTRIBUTE_REPLACEMENT"] = json.dumps(told)
"""
    job = launch("-n", "4", "--max-restarts", "1", "--timeout", "40", seconds=4.0, deed=deed)
    os.kill(worker(job, 1), signal.SIGKILL)
    assert workers(job.finish(20)) == [3, 3, 3]


@pytest.mark.slow
def test_ranks_killed_at_random_are_replaced_and_leave_the_weights_of_an_undisturbed_run(
    launch: Launch,
) -> None:
    seconds = float(os.environ.get("XPDISTRIBUTE_TEST_KILL_SECONDS", "40"))
    seed = random.randrange(1 << 30)
    print("seed", seed)  # noqa: T201  # shown where it fails
    # It takes longer than a test may that hangs.
    faulthandler.dump_traceback_later(seconds + 80, exit=True, file=2)
    rng = random.Random(seed)
    job = launch("-n", "4", "--max-restarts", "1000", "--timeout", "120", seconds=seconds)
    worker(job, 0)
    end = time.monotonic() + seconds - 5.0
    num_kills = 0
    while time.monotonic() < end:
        # Two on each host: the sums of a host that is lost as a whole are lost with it.
        job.until(lambda: len(job.alive()) == 4, 20.0)
        kill(job, rng.choice(job.alive()), 5 + num_kills)
        num_kills += 1
        time.sleep(rng.uniform(0.0, 0.3))
    assert len(job.finish(60)) == 4
    assert num_kills > seconds / 8
