"""Collectives between the processes of a job without a strategy: real processes, by shared memory and by MPI."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest

import strategies as xd
from tests.jobs import TIMEOUT, run_in_job, run_script, strategy_of
from tests.mpi_runner import run_ranks

OPTIONS = xd.CommunicationOptions(timeout_seconds=TIMEOUT)


def calls(group: xd.Communicator) -> dict[str, Any]:
    """One of each, and what it gives here."""
    rank, size = group.rank, group.world_size
    mine = np.arange(2.0 * size) + 100 * rank
    peer = (rank + 1) % size
    group.send(mine, peer, tag=3)
    group.barrier()
    return {
        "place": (rank, size),
        "sum": group.all_reduce(mine),
        "max": group.reduce(mine, "MAX", root=size - 1),
        "block": group.reduce_scatter(mine),
        "from 1": group.broadcast(mine, root=1),
        "all": group.all_gather(mine[: rank + 1]),
        "turned": group.all_to_all(mine),
        "objects": group.all_gather_object({"rank": rank}),
        "letter": group.recv((rank - 1) % size, tag=3),
    }


def require_right(told: dict[str, Any], rank: int, size: int) -> None:
    of_all = np.stack([np.arange(2.0 * size) + 100 * r for r in range(size)])
    assert told["place"] == (rank, size)
    np.testing.assert_array_equal(told["sum"], of_all.sum(axis=0))
    if rank == size - 1:
        np.testing.assert_array_equal(told["max"], of_all.max(axis=0))
    else:
        assert told["max"] is None
    np.testing.assert_array_equal(told["block"], of_all.sum(axis=0)[2 * rank : 2 * rank + 2])
    np.testing.assert_array_equal(told["from 1"], of_all[1])
    np.testing.assert_array_equal(told["all"], np.concatenate([of_all[r][: r + 1] for r in range(size)]))
    np.testing.assert_array_equal(told["turned"], of_all[:, 2 * rank : 2 * rank + 2].reshape(-1))
    assert told["objects"] == [{"rank": r} for r in range(size)]
    np.testing.assert_array_equal(told["letter"], of_all[(rank - 1) % size])


@pytest.mark.parametrize("size", [2, 3])
def test_the_processes_of_a_job_are_ranks_of_a_group(size: int) -> None:
    for rank, told in enumerate(run_in_job(size, lambda: calls(xd.process_group(OPTIONS)))):
        require_right(told, rank, size)


def _by_mpi() -> None:
    group = xd.process_group(OPTIONS, backend="mpi")
    require_right(calls(group), group.rank, 3)
    background = xd.NonBlocking(xd.process_group(OPTIONS, backend="mpi"))
    handles = [background.all_reduce(np.full(100_000, n + group.rank, np.float32)) for n in range(5)]
    assert group.all_reduce(np.ones(1)).tolist() == [3.0]
    for n, handle in enumerate(handles):
        np.testing.assert_array_equal(handle.result(TIMEOUT), np.full(100_000, 3 * n + 3, np.float32))
    sys.stdout.write("right\n")


def test_they_are_also_where_mpi_carries_the_data() -> None:
    assert run_ranks(3, _by_mpi) == ["right\n"] * 3


def test_a_process_alone_is_a_group_of_one() -> None:
    group = xd.process_group(OPTIONS)
    assert (group.rank, group.world_size) == (0, 1)
    np.testing.assert_array_equal(group.all_reduce(np.arange(3.0)), np.arange(3.0))
    assert group.all_gather_object("only") == ["only"]


def test_options_that_are_none_are_refused() -> None:
    seconds: Any = 3
    with pytest.raises(TypeError, match="communication_options=3; need CommunicationOptions, or None"):
        xd.process_group(seconds)


def test_groups_and_strategies_are_apart_from_one_another_also_in_threads_of_their_own() -> None:
    def body() -> tuple[list[float], list[float], float]:
        first, second = xd.process_group(OPTIONS), xd.process_group(OPTIONS)
        with strategy_of(1) as strategy:
            sums: list[float] = []
            sequence = [float(first.rank + n) for n in range(200)]

            def in_thread() -> None:
                sums.extend(float(first.all_reduce(np.array(n))) for n in sequence)

            thread = threading.Thread(target=in_thread)
            thread.start()
            others = [float(second.all_reduce(np.array(2.0 * n))) for n in sequence]
            losses = [strategy.run(lambda n=n: xd.all_reduce("SUM", np.float64(n))) for n in range(100)]
            thread.join(TIMEOUT)
            return sums, others, float(losses[-1])

    for sums, others, last in run_in_job(2, body):
        assert sums == [2.0 * n + 1 for n in range(200)]
        assert others == [4.0 * n + 2 for n in range(200)]
        assert last == 198.0


def test_collectives_in_the_background_are_right_while_training_steps_go_on() -> None:
    def body() -> bool:
        with strategy_of(1) as strategy, strategy.scope():
            w = xd.Variable(np.zeros(50_000))
            optimizer = xd.SGD(learning_rate=1.0)
            background = xd.NonBlocking(xd.process_group(OPTIONS))
            handles = []
            for n in range(30):
                handles.append(background.all_reduce(np.full(50_000, n + background.rank)))
                strategy.run(lambda: optimizer.apply_gradients([(np.full(50_000, -1.0), w)]))
            for n, handle in enumerate(handles):
                np.testing.assert_array_equal(handle.result(TIMEOUT), np.full(50_000, 2 * n + 1))
            np.testing.assert_array_equal(np.asarray(w), np.full(50_000, 60.0))
            return True

    assert run_in_job(2, body) == [True, True]


def test_a_timeout_names_what_the_late_process_does_in_that_group_and_where_it_is() -> None:
    source = """
group, other = (xd.process_group(xd.CommunicationOptions(timeout_seconds=t)) for t in (1.0, 9.0))
def late():
    other.barrier()
if group.rank == 0:
    group.all_reduce(np.ones(7))
else:
    late()
"""
    first, second = run_script(2, source)
    assert (first.status, second.status) == (1, 1)
    said = "all_reduce SUM float64 of shape (7,): process 1 did not come within 1 s at seq 1, where process 0 waits"
    assert f"CollectiveTimeoutError: {said}" in first.err
    # The other group's barrier, in which it waits, is not this group's affair; where it is, is.
    assert "it is in no collective, at seq 0, but in File" in first.err
    assert " in late" in first.err
    assert f"failed: CollectiveTimeoutError: {said}" in second.err


def test_a_rank_that_raises_is_named_by_the_handles_of_the_others() -> None:
    source = """
background = xd.NonBlocking(xd.process_group(xd.CommunicationOptions(timeout_seconds=10.0)))
if background.rank == 1:
    raise ValueError("wrong data in file 7")
background.all_reduce(np.ones(3)).result(20)
"""
    first, second = run_script(2, source)
    assert (first.status, second.status) == (1, 1)
    assert "PeerFailedError" in first.err
    assert "wrong data in file 7" in first.err
    assert "started by all_reduce" in first.err
    assert first.seconds < 5.0


def test_a_program_that_ends_with_something_under_way_ends_at_once() -> None:
    source = """
background = xd.NonBlocking(xd.process_group())
if background.rank == 0:
    background.all_reduce(np.ones(3))
s.run(lambda: xd.all_reduce("SUM", np.ones(1)))
"""
    for ended in run_script(2, source):
        assert ended.status == 0, ended.err
        assert ended.seconds < 10.0


def test_an_unknown_backend_is_refused_in_every_process() -> None:
    with pytest.raises(ValueError, match="backend: got 'ucx'; need one of auto, shared_memory, mpi"):
        xd.process_group(OPTIONS, backend="ucx")


def test_a_program_that_ends_while_others_wait_for_it_in_the_background_is_named() -> None:
    source = """
group, background = (xd.process_group(xd.CommunicationOptions(timeout_seconds=10.0)) for _ in range(2))
background = xd.NonBlocking(background)
handles = [background.all_reduce(np.full(200_000, n, np.float32)) for n in range(40)]
if group.rank == 1:
    handles[5].result(10)
else:
    more = [background.all_reduce(np.full(200_000, n, np.float32)) for n in range(40, 45)]
    more[-1].result(20)
"""
    for _ in range(3):
        first, second = run_script(2, source)
        assert second.status == 0, second.err
        assert first.status == 1
        assert "PeerFailedError: " in first.err
        assert "process 1 of 2" in first.err
