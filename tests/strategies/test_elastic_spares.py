"""Elastic jobs over several hosts with spare processes: they take the places of those that are killed."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mpi_runner import SETTINGS
from tests.strategies.test_elastic_hosts import (
    LARGE,
    ROOT,
    SMALL,
    Launch,
    Launched,
    launch,
)
from tests.xpdistribute.test_launcher_hosts import AS_IF_BY_SSH, can_rename_host

__all__ = ["launch"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi], which brings mpiexec"
)


def waiting(job: Launched, number: int) -> list[int]:
    """Wait until so many spares wait for a place; their process ids."""
    end = time.monotonic() + 15.0
    while len(job.all("waits")) < number:
        assert time.monotonic() < end, f"it hangs: {job.log()}"
        time.sleep(0.01)
    return [one["pid"] for one in job.all("waits")]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_a_spare_takes_the_place_of_a_rank_that_is_killed(launch: Launch, elements: int) -> None:
    job = launch(elements=elements, seconds=1.2, options=("--spares", "1"))
    pids = job.until_ready(4)
    waiting(job, 1)
    kill(pids[2])
    ends = job.finish()
    assert [end["rank"] for end in ends] == [0, 1, 3, 4]
    assert {end["link"] for end in ends} == {"AgreeingLink"}
    assert [one["lost"] for one in job.all("change") if one["rank"] == 0] == [[2], []]
    assert [one["workers"] for one in job.all("change") if one["rank"] == 0] == [3, 4]
    assert "has died; a spare will take its place, 0 left" in job.log()
    # The lost step without it, and the next one with the spare.
    assert max(end["slowest"] for end in ends) < 3.0


def test_spares_take_the_places_of_a_whole_host(launch: Launch) -> None:
    job = launch(seconds=1.2, options=("--spares", "2"))
    pids = job.until_ready(4)
    waiting(job, 2)
    for pid in pids[2:]:
        kill(pid)
    assert [end["rank"] for end in job.finish()] == [0, 1, 4, 5]


def test_spares_that_are_not_needed_end_with_the_job_without_a_word(launch: Launch) -> None:
    job = launch(options=("--spares", "2"))
    assert [end["rank"] for end in job.finish()] == [0, 1, 2, 3]
    assert [one["rank"] for one in job.all("ready")] == [0, 1, 2, 3]
    assert job.log() == ""


def test_a_spare_that_has_taken_a_place_can_be_lost_as_well(launch: Launch) -> None:
    job = launch(seconds=1.5, options=("--spares", "2"))
    pids = job.until_ready(4)
    waiting(job, 2)
    kill(pids[1])
    spare = next(one["pid"] for one in job_ready(job, 5) if one["rank"] >= 4)
    time.sleep(0.1)
    kill(spare)
    ends = job.finish()
    assert len(ends) == 4
    assert {0, 2, 3} < {end["rank"] for end in ends}


def job_ready(job: Launched, number: int) -> list[dict[str, int]]:
    job.until_ready(number)
    return job.all("ready")


def test_a_spare_that_is_killed_while_it_waits_is_not_missed_and_not_used(launch: Launch) -> None:
    job = launch(seconds=1.2, options=("--spares", "1"))
    pids = job.until_ready(4)
    kill(waiting(job, 1)[0])
    time.sleep(0.2)
    kill(pids[2])
    assert [end["rank"] for end in job.finish()] == [0, 1, 3]
    assert "has died, 0 left" in job.log()
    assert "no spare is left, so the others go on without it" in job.log()


def test_what_a_spare_does_before_it_waits_keeps_nobody_from_computing(launch: Launch) -> None:
    job = launch(seconds=1.5, options=("--spares", "1"), deed="a spare is late")
    pids = job.until_ready(4)
    assert not job.all("waits")
    time.sleep(0.2)
    kill(pids[3])
    assert [end["rank"] for end in job.finish()] == [0, 1, 2, 4]


def test_a_spare_that_is_lost_before_mpi_starts_fails_the_job_in_words(launch: Launch) -> None:
    job = launch(options=("--spares", "1"), deed="a spare dies before MPI")
    assert job.wait(20) != 0
    assert "rank 4 of 5 ended before initialising MPI" in job.log()


def test_a_spare_that_can_not_start_mpi_fails_the_job_with_its_reason(launch: Launch, tmp_path: Path) -> None:
    job = launch(options=("--spares", "1"), deed="a spare can't load MPI")
    assert job.wait(20) != 0
    log = (tmp_path / "log").read_text()
    assert "spare process: it can't start MPI with the others: ImportError: MPI: mpi4py can't load" in log
    assert "rank 4 of 5 ended before initialising MPI" in log


def test_when_more_are_lost_than_there_are_spares_the_others_go_on_with_these(launch: Launch) -> None:
    job = launch(seconds=1.2, options=("--spares", "1"))
    pids = job.until_ready(4)
    waiting(job, 1)
    kill(pids[1])
    kill(pids[2])
    ends = job.finish()
    assert [end["rank"] for end in ends] == [0, 3, 4]
    assert "no spare is left" in job.log()


def test_spares_serve_a_job_on_one_host_too(launch: Launch) -> None:
    job = launch(per_host=8, seconds=1.5, options=("--spares", "1"))
    pids = job.until_ready(4)
    waiting(job, 1)
    kill(pids[2])
    ends = job.finish()
    assert [end["rank"] for end in ends] == [0, 1, 3, 4]
    assert {end["link"] for end in ends} == {"SharedMemoryLink"}


def test_a_spare_that_is_stopped_is_treated_as_dead(launch: Launch) -> None:
    job = launch(seconds=3.0, options=("--spares", "1", "--heartbeat", "1"))
    pids = job.until_ready(4)
    (spare,) = waiting(job, 1)
    os.kill(spare, signal.SIGSTOP)
    time.sleep(0.2)
    kill(pids[2])
    assert [end["rank"] for end in job.finish()] == [0, 1, 3]


@pytest.mark.skipif(not can_rename_host(), reason="may not give processes another host name (unshare -u)")
@pytest.mark.parametrize("victims", [[2], [2, 3]], ids=["a rank", "all of a host"])
def test_spares_serve_hosts_that_each_have_a_daemon_of_mpiexecs(
    launch: Launch, tmp_path: Path, victims: list[int]
) -> None:
    agent = tmp_path / "ssh"
    agent.write_text(AS_IF_BY_SSH)
    agent.chmod(0o700)
    job = launch(
        seconds=1.5,
        options=("-H", "nodea:2,nodeb:2,nodec:2", "--spares", "2"),
        environ={"XPDISTRIBUTE_ADDRESS": "127.0.0.1", "PRTE_MCA_plm_ssh_agent": str(agent)},
    )
    pids = job.until_ready(4)
    waiting(job, 2)
    for victim in victims:
        kill(pids[victim])
    ends = job.finish()
    assert len(ends) == 4
    assert not {end["rank"] for end in ends} & set(victims)


def test_when_all_have_failed_the_spares_end_too(launch: Launch) -> None:
    job = launch(seconds=5.0, options=("--spares", "1"), deed="all raise")
    assert job.wait(20) == 1
    assert "no coffee anywhere" in job.log()
    assert not job.all("end")


def test_an_interrupt_ends_spares_too(launch: Launch) -> None:
    job = launch(seconds=30.0, options=("--spares", "1"))
    job.until_ready(4)
    (spare,) = waiting(job, 1)
    job.process.send_signal(signal.SIGINT)
    assert job.wait(10) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(spare, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n", "2", "--spares", "1"], "--spares: got it without --elastic; need both"),
        (
            ["-n", "2", "--elastic", "--spares", "1", "--max-restarts", "2"],
            "got both --spares and --max-restarts",
        ),
        (["-H", "localhost:2", "--elastic", "--spares", "2"], "--spares: got 2, and the hosts have 2 slots"),
        (["-n", "2", "--elastic", "--spares", "-1"], "--spares: got '-1'; need a whole number from 0"),
    ],
)
def test_options_that_do_not_fit_spares_are_refused(tmp_path: Path, options: list[str], words: str) -> None:
    (tmp_path / "program.py").write_text("")
    run = subprocess.run(
        [sys.executable, "-m", "xpdistribute", "run", *options, str(tmp_path / "program.py")],
        env={**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert run.returncode == 2
    assert words in run.stderr


@pytest.mark.slow
def test_ranks_and_spares_killed_at_random_times_leave_the_weights_of_an_undisturbed_run(
    launch: Launch,
) -> None:
    seconds = float(os.environ.get("XPDISTRIBUTE_TEST_KILL_SECONDS", "40"))
    end = time.monotonic() + seconds
    num_jobs = 0
    while time.monotonic() < end:
        seed = random.randrange(1 << 30)
        print("seed", seed)  # noqa: T201  # shown where it fails
        rng = random.Random(seed)
        num_spares = rng.choice([1, 2, 3])
        job = launch(
            4,
            per_host=rng.choice([1, 2, 3]),
            seconds=2.5,
            elements=rng.choice([SMALL, LARGE]),
            options=("--spares", str(num_spares)),
        )
        pids = job.until_ready(4)
        spares = waiting(job, num_spares)  # who comes later may come too late for the end of the job
        pids += spares if rng.random() < 0.7 else []
        victims = rng.sample(pids, rng.choice([1, 2, 3]))
        for pid in victims:
            time.sleep(rng.choice([0.0, rng.uniform(0.0, 0.15), rng.uniform(0.0, 0.4)]))
            kill(pid)
        ends = job.finish()
        assert not {end["pid"] for end in ends} & set(victims)
        num_left = 4 + num_spares - len(victims)
        assert len(ends) == min(4, num_left), f"{victims} were killed, {ends} came to the end: {job.log()}"
        num_jobs += 1
    assert num_jobs > seconds / 10
