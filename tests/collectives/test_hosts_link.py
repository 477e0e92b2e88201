"""Processes under mpiexec that believe to be on several hosts: functions without ``test`` in their names run in all of them."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from collectives import ReduceOp
from collectives.arrays import Array
from collectives.calls import Call
from collectives.hosts_link import HostsLink, by_host
from collectives.mpi.library import world
from tests.collectives.mpi.contract import make_link
from tests.collectives.mpi.test_mpi_link import DTYPES, left_fold, raised, values
from tests.mpi_runner import run_ranks

SMALL_PIECES = {"round_bytes": 300_000, "piece_bytes": 30_000}

GROUPS = {
    "two_hosts_of_two": ("1+1+1+1", "aabb"),
    "three_hosts": ("2+1+1", "abc"),
    "single_members": ("1+1", "ab"),
    "uneven_hosts": ("2+1+1", "aab"),
    "by_turns": ("1+1+1+1", "abab"),
    "one_host": ("1+1", "aa"),
}


def counts_of(text: str) -> list[int]:
    return [int(count) for count in text.split("+")]


def test_hosts_come_in_the_order_of_their_processes() -> None:
    assert by_host(["b", "a", "b", "c", "a"]) == [[0, 2], [1, 4], [3]]


@pytest.mark.parametrize("group", ["two_hosts_of_two", "uneven_hosts"])
def test_the_contract_of_communicators(group: str) -> None:
    counts, hosts = GROUPS[group]
    outputs = run_ranks(
        len(hosts),
        "tests.collectives.mpi.contract:main",
        hosts=hosts,
        arguments=[counts, repr(SMALL_PIECES)],
        timeout=60,
    )
    for output in outputs:
        passed = re.search(r"(\d+) passed", output)
        assert passed, output
        assert int(passed[1]) > 30


def reduce_everything() -> None:
    link = make_link(world(), counts_of(sys.argv[1]), eval(sys.argv[2]))
    own = slice(link.first, link.first + link.counts[link.process])
    for dtype in DTYPES[::2]:
        for op in ReduceOp:
            if np.dtype(dtype).kind == "c" and op in (ReduceOp.MAX, ReduceOp.MIN):
                continue
            columns = [values(dtype, link.size, length) for length in (0, 7, 3, 300_050, 1000)]
            expected = [left_fold(column, op) for column in columns]
            rows = [[column[member] for column in columns] for member in range(link.size)[own]]
            # In memory of the link's, and elsewhere; in place, and not.
            sources = [[_in_memory(link, row) if row.size > 5 else row for row in member] for member in rows]
            result = expected[0].dtype
            targets = sources
            if result != np.dtype(dtype):
                targets = [[np.empty(row.size, result) for row in member] for member in rows]
            link.fold(Call("fold", (op, str(np.dtype(dtype)))), op, sources, targets)
            for member in targets:
                for got, want in zip(member, expected, strict=True):
                    assert got.tobytes() == want.tobytes(), (op, dtype, len(want))


def _in_memory(link: object, array: Array) -> Array:
    assert isinstance(link, HostsLink)
    place: Array = link.memory(array.nbytes).view(array.dtype)
    place[:] = array
    return place


@pytest.mark.parametrize(
    ("group", "options"),
    [
        ("two_hosts_of_two", {}),
        ("three_hosts", SMALL_PIECES),
        ("uneven_hosts", {}),
        ("by_turns", {}),
        ("one_host", {}),
        ("single_members", {}),
    ],
)
def test_reductions_are_folds_in_the_order_of_the_members(group: str, options: dict[str, int]) -> None:
    counts, hosts = GROUPS[group]
    run_ranks(len(hosts), reduce_everything, hosts=hosts, arguments=[counts, repr(options)], timeout=50)


def reduce_for_one_and_too_much() -> None:
    link = make_link(world(), [1, 1, 1, 1], SMALL_PIECES)
    rows = values("f4", 4, 200_000)
    target = np.zeros(200_000, np.float32)
    link.fold(Call("reduce"), ReduceOp.SUM, [[rows[link.process]]], [[target]] if link.process == 1 else [])
    if link.process == 1:
        assert target.tobytes() == left_fold(rows, ReduceOp.SUM).tobytes()
    for _ in range(2):
        ones = np.ones(200_000, np.int8)
        ones[-1] = 100
        error = raised(
            OverflowError,
            lambda ones=ones: link.fold(Call("fold"), ReduceOp.SUM, [[ones]], [[ones]]),  # type: ignore[misc]  # bound at once
        )
        assert "int8 from -128 to 127" in str(error)
        ones = np.ones(200_000, np.int8)
        link.fold(Call("fold"), ReduceOp.SUM, [[ones]], [[ones]])
        assert (ones == 4).all()


def test_results_go_where_they_are_wanted_and_must_fit() -> None:
    run_ranks(4, reduce_for_one_and_too_much, hosts="aabb")
