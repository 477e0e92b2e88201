"""What holds of every communicator holds over MPI."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.mpi_runner import run_ranks


@pytest.mark.parametrize(
    ("counts", "options"),
    [
        ("1+1", {}),
        ("2+1", {}),
        ("1+2+1", {"direct_up_to": 1, "piece_bytes": 4096, "largest_message": 1 << 14}),
    ],
    ids=["two_processes", "uneven_processes", "in_rounds_and_small_pieces"],
)
def test_the_contract_of_communicators(counts: str, options: dict[str, int]) -> None:
    run_contract(counts, options)


@pytest.mark.parametrize("counts", ["1+2+1", "1+1+1+1"])
def test_it_holds_where_processes_may_be_lost(counts: str) -> None:
    run_contract(counts, {}, ["--with-ft", "ulfm"])


def run_contract(counts: str, options: dict[str, int], mpiexec: Sequence[str] = ()) -> None:
    outputs = run_ranks(
        len(counts.split("+")),
        "tests.collectives.mpi.contract:main",
        arguments=[counts, repr(options)],
        timeout=60,
        options=mpiexec,
    )
    for output in outputs:
        passed = re.search(r"(\d+) passed", output)
        assert passed, output
        assert int(passed[1]) > 30
