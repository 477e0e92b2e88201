"""Plain mpiexec, without our launcher, and a process that does not come to where MPI is initialised, or to its strategy."""

from __future__ import annotations

import pytest

from collectives.mpi.siblings import wait_for_siblings
from tests.mpi_runner import finish_ranks, run_ranks

JOIN = """
    import os, sys, time
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    if rank == 1:
        {body}
    import strategies as xd
    start = time.monotonic()
    try:
        strategy = xd.MultiWorkerMirroredStrategy(
            communication_options=xd.CommunicationOptions(timeout_seconds=3.0)
        )
    except xd.CollectiveError as error:
        print(f"{{type(error).__name__}}: {{error}} after {{time.monotonic() - start:.1f}} s", flush=True)
        raise
    print(strategy.num_replicas_in_sync)
"""


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ("os._exit(0)", ()),
        ("os._exit(0)", ("--with-ft", "ulfm")),
        ("os.kill(os.getpid(), 9)", ("--with-ft", "ulfm")),
    ],
)
def test_a_process_that_ends_before_it_initialises_mpi_is_named_at_once(
    body: str, options: tuple[str, ...]
) -> None:
    # Where it ends with another status than 0, mpiexec without ULFM ends the others.
    run = finish_ranks(3, JOIN.format(body=body), timeout=20, options=options)
    assert run.returncode != 0, str(run)
    assert run.seconds < 8.0, str(run)
    printed = run.outputs[0] + run.outputs[2]
    assert (
        "PeerFailedError: MPI: rank 1 of 3 ended before initialising MPI, which waits for all; " in printed
    ), str(run)


def test_a_process_that_does_something_else_is_named_with_its_pid() -> None:
    run = finish_ranks(2, JOIN.format(body="print(os.getpid(), flush=True); time.sleep(1000)"), timeout=20)
    assert run.returncode != 0, str(run)
    pid = run.outputs[1].strip()
    assert (
        f"CollectiveTimeoutError: MPI: waited 3 s for rank 1 (pid {pid}) to initialise MPI; "
        in run.outputs[0]
    )


@pytest.mark.parametrize("then", ["time.sleep(1000)", "sys.exit(0)"])
def test_a_process_that_initialises_mpi_and_makes_no_strategy_is_named(then: str) -> None:
    run = finish_ranks(3, JOIN.format(body=f"from mpi4py import MPI; {then}"), timeout=20)
    assert run.returncode != 0, str(run)
    assert (
        "CollectiveTimeoutError: join: process 0 of 3 waited 3 s for process 1, which has initialised MPI; "
        in run.outputs[0]
    ), str(run)


def test_slow_processes_and_ones_with_mpi_of_their_own_are_waited_for() -> None:
    body = "time.sleep(2.0)\n    elif rank == 2:\n        from mpi4py import MPI"
    assert run_ranks(3, JOIN.format(body=body), timeout=20) == ["3\n"] * 3


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OMPI_COMM_WORLD_RANK": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        # One process on each of two hosts.
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    ],
)
def test_nobody_is_waited_for_who_is_not_on_this_host(environ: dict[str, str]) -> None:
    wait_for_siblings(0.0, environ)
