"""Loading the MPI library, and ending a process that uses it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.mpi_runner import ROOT, finish_ranks, run_ranks


def alone(text: str, **env: str) -> str:
    """The last line that a script writes to its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=ROOT,
        env={**os.environ, "OMPI_MCA_btl": "self", **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_a_missing_mpi4py_names_what_brings_it() -> None:
    line = alone("import sys; sys.modules['mpi4py'] = None\nfrom collectives.mpi.library import mpi; mpi()")
    assert line == (
        "ModuleNotFoundError: MPI: there is no mpi4py; need mpi4py — pip install 'xpdistribute[mpi]' brings mpi4py and Open MPI"
    )


def test_a_missing_library_names_what_brings_it() -> None:
    pytest.importorskip("mpi4py")
    line = alone("from collectives.mpi.library import mpi; mpi()", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "pip install 'xpdistribute[mpi]' brings mpi4py and Open MPI; MPI4PY_LIBMPI names another" in line


def test_a_starter_of_another_mpi_is_told_from_the_library() -> None:
    pytest.importorskip("mpi4py")
    line = alone("from collectives.mpi.library import world; world()", PMI_SIZE="4")
    assert "an mpiexec of MPICH's or Intel MPI's kind, or srun started 4 processes (PMI_SIZE)" in line
    assert "each is alone in its MPI library, " in line


def test_threads_must_be_allowed_to_call_it() -> None:
    pytest.importorskip("mpi4py")
    line = alone(
        "import mpi4py; mpi4py.rc.thread_level = 'single'\nfrom collectives.mpi.library import mpi; mpi()"
    )
    assert "was initialised so that not all threads may call it; need MPI_THREAD_MULTIPLE" in line


def test_a_finalised_one_is_refused() -> None:
    pytest.importorskip("mpi4py")
    line = alone("from mpi4py import MPI; MPI.Finalize()\nfrom collectives.mpi.library import mpi; mpi()")
    assert line.startswith("RuntimeError: MPI: it has been finalised; need a process that")


BEGIN = """
    import sys, time
    from collectives.calls import Call
    from collectives.mpi.library import world
    from collectives.mpi.mpi_link import MpiLink
    comm = world()
    link = MpiLink(comm, [1] * comm.size, timeout=60)
    """


def test_a_process_that_fails_ends_the_others_at_once() -> None:
    # Without our care it waits for them in MPI_Finalize, and they for it in the barrier.
    script = (
        BEGIN + "if comm.rank == 1: raise RuntimeError('out of coffee')\n    link.barrier(Call('barrier'))"
    )
    run = finish_ranks(3, script, timeout=20)
    assert run.returncode == 1, str(run)
    assert run.seconds < 8, str(run)
    assert "out of coffee" in run.errors[1]


def test_a_process_that_fails_ends_the_others_although_mpi4py_was_imported_first() -> None:
    script = (
        "    from mpi4py import MPI\n"
        + BEGIN
        + "if comm.rank == 1: raise RuntimeError('out of coffee')\n    link.barrier(Call('barrier'))"
    )
    run = finish_ranks(2, script, timeout=20)
    assert run.returncode == 1, str(run)
    assert run.seconds < 8, str(run)


def test_a_process_that_ends_well_waits_for_the_others_to_end() -> None:
    script = BEGIN + "link.barrier(Call('barrier')); time.sleep(comm.rank); print('done')"
    started = time.monotonic()
    assert run_ranks(2, script) == ["done\n", "done\n"]
    assert time.monotonic() - started < 10


def test_a_status_is_kept() -> None:
    run = finish_ranks(2, BEGIN + "link.barrier(Call('barrier')); sys.exit(3)")
    assert run.returncode == 3, str(run)


def test_a_caught_failure_does_not_keep_a_process_from_ending() -> None:
    script = (
        BEGIN.replace("timeout=60", "timeout=0.5")
        + """
    if comm.rank == 0:
        try:
            link.barrier(Call('barrier'))
        except RuntimeError as error:
            print(type(error).__name__)
    else:
        time.sleep(30)
    """
    )
    run = finish_ranks(2, script, timeout=20)
    assert run.outputs[0] == "CollectiveTimeoutError\n", str(run)
    assert run.seconds < 8, str(run)
