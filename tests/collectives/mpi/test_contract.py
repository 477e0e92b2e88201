"""What holds of every communicator holds over MPI."""

from __future__ import annotations

import re

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
    outputs = run_ranks(
        len(counts.split("+")),
        "tests.collectives.mpi.contract:main",
        arguments=[counts, repr(options)],
        timeout=60,
    )
    for output in outputs:
        passed = re.search(r"(\d+) passed", output)
        assert passed, output
        assert int(passed[1]) > 30
