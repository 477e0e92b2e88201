"""What `SharedMemoryLink` promises beyond the contract of communicators: memory, order, failures."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatchError, CollectiveTimeoutError, Communicator, ReduceOp
from collectives.calls import Call
from collectives.hierarchical import HierarchicalCommunicator
from collectives.shared_memory.shared_memory_link import SharedMemoryLink
from tests.processes import ProcessDiedError, on_link, run_in_processes

Exchange = Callable[[Any], list[Any]]


def test_arrays_in_the_links_memory_are_reduced_in_place_like_any_other() -> None:
    def body(process: int, exchange: Exchange) -> None:
        link = SharedMemoryLink(process, (1, 1, 1), exchange, timeout=20)
        communicator = HierarchicalCommunicator.alone(link)
        for size in (10, 10_000, 1_000_003):
            shared = link.memory(8 * size).view(np.float64)
            shared[:] = np.arange(size) * (process + 1)
            ordinary = shared.copy()
            communicator.all_reduce(shared, out=shared)
            communicator.all_reduce(ordinary, out=ordinary)
            np.testing.assert_array_equal(shared, np.arange(size) * 6.0)
            np.testing.assert_array_equal(ordinary, shared)

    run_in_processes(3, body)


def test_memory_is_zeroed_aligned_and_given_back() -> None:
    def body(process: int, exchange: Exchange) -> None:
        link = SharedMemoryLink(process, (1, 1), exchange, timeout=20)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            memory = link.memory(100_000)
            assert memory.ctypes.data % 64 == 0
            assert not memory.any()
            memory[:] = 1
            part = memory[10:20]
            del memory
            assert part.all()  # lives as long as anything refers to it
        del part
        assert len(os.listdir("/proc/self/fd")) == before

    run_in_processes(2, body)


def test_memory_that_took_the_place_of_other_memory_is_not_mistaken_for_it() -> None:
    def body(process: int, exchange: Exchange) -> None:
        link = SharedMemoryLink(process, (1, 1), exchange, timeout=20)
        communicator = HierarchicalCommunicator.alone(link)
        for turn in range(20):  # the system gives the same addresses again
            array = link.memory(400_000).view(np.float32)
            array[:] = turn + process
            communicator.all_reduce(array, out=array)
            np.testing.assert_array_equal(array, np.full(100_000, 2 * turn + 1, np.float32))
            del array

    run_in_processes(2, body)


def test_only_some_processes_arrays_may_lie_in_shared_memory() -> None:
    def body(process: int, exchange: Exchange) -> None:
        link = SharedMemoryLink(process, (1, 1), exchange, timeout=20)
        communicator = HierarchicalCommunicator.alone(link)
        ordinary = np.full(300_000, 1.0 + process)
        array = link.memory(ordinary.nbytes).view(np.float64) if process else ordinary
        array[:] = ordinary
        communicator.all_reduce(array, "MEAN", out=array)
        np.testing.assert_array_equal(array, np.full(300_000, 1.5))

    run_in_processes(2, body)


def test_a_process_may_bring_only_empty_arrays_beside_large_ones() -> None:
    def body(communicator: Communicator) -> None:
        rows = 0 if communicator.rank != 1 else 200_000
        gathered = communicator.all_gather(np.full((rows, 2), communicator.rank, np.float32))
        assert gathered.shape == (200_000, 2)
        assert (gathered == 1).all()

    on_link((2, 1), body)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
def test_sums_are_those_of_one_process_to_the_last_bit(dtype: type) -> None:
    def values(rank: int) -> Any:
        return np.random.default_rng(rank).normal(size=70_001).astype(dtype)

    def body(communicator: Communicator) -> Any:
        return communicator.all_reduce(values(communicator.rank))

    wide = np.float32 if dtype is np.float16 else dtype
    total = values(0).astype(wide)
    for rank in range(1, 5):
        total = total + values(rank)
    for result in on_link((2, 1, 2), body):
        assert result.tobytes() == total.astype(dtype).tobytes()


def test_an_overflow_is_raised_in_all_processes_and_leaves_the_link_usable() -> None:
    def body(communicator: Communicator) -> None:
        for size in (3, 100_000):
            # Only in the last element, so that one process finds it.
            array = np.zeros(size, np.int8)
            array[-1] = 100
            with pytest.raises(OverflowError, match="200"):
                communicator.all_reduce(array, out=array)
        assert communicator.all_reduce(np.ones(2)).tolist() == [2.0, 2.0]

    on_link((1, 1), body)


def test_different_calls_are_told_apart_whatever_way_their_data_would_go() -> None:
    def body(communicator: Communicator) -> None:
        first = communicator.rank == 0
        pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
            (communicator.barrier, lambda: communicator.all_reduce(np.ones(3))),
            (lambda: communicator.all_reduce(np.ones(3)), lambda: communicator.all_reduce(np.ones(100_000))),
            (
                lambda: communicator.all_reduce(np.ones(100_000)),
                lambda: communicator.all_gather(np.ones(100_000)),
            ),
            (lambda: communicator.all_gather_object(1), lambda: communicator.broadcast(np.ones(9))),
        ]
        for one, other in pairs:
            with pytest.raises(CollectiveMismatchError, match=r"process 0 calls .*process 1 calls"):
                (one if first else other)()
            assert communicator.all_reduce(np.ones(())) == 2

    on_link((1, 1), body)


def test_who_does_not_come_is_named_after_the_timeout_and_the_link_stays_broken() -> None:
    def body(process: int, exchange: Exchange) -> None:
        link = SharedMemoryLink(process, (1, 1), exchange, timeout=0.3)
        communicator = HierarchicalCommunicator.alone(link)
        if process == 0:
            for _ in range(2):
                with pytest.raises(CollectiveTimeoutError, match=r"barrier: .*missing: process 1") as raised:
                    communicator.barrier()
                assert raised.value.missing == (1,)
        exchange(None)

    run_in_processes(2, body)


def test_a_waiting_process_uses_no_processor_time_to_speak_of() -> None:
    def body(process: int, exchange: Exchange) -> float:
        link = SharedMemoryLink(process, (1, 1), exchange, timeout=20)
        call = Call("barrier")
        link.barrier(call)
        if process == 1:
            time.sleep(2.0)
        began, clock = time.process_time(), time.monotonic()
        link.barrier(call)
        return (time.process_time() - began) / max(1e-9, time.monotonic() - clock)

    share, _ = run_in_processes(2, body)
    assert share < 0.2  # 0.01 on a machine that has nothing else to do


def test_nothing_is_left_behind_by_processes_that_are_killed() -> None:
    before = set(os.listdir("/dev/shm"))

    def body(process: int, exchange: Exchange) -> None:
        link = SharedMemoryLink(process, (1, 1), exchange, timeout=20)
        link.memory(1 << 20)[:] = 1
        link.barrier(Call("barrier"))
        os.kill(os.getpid(), signal.SIGKILL)

    results = run_in_processes(2, body)
    assert all(isinstance(result, ProcessDiedError) for result in results)
    assert set(os.listdir("/dev/shm")) <= before


def test_more_processes_than_cores_still_meet() -> None:
    def body(communicator: Communicator) -> None:
        for turn in range(200):
            assert communicator.all_reduce(np.array(turn + communicator.rank), ReduceOp.MAX) == turn + 5

    on_link((1,) * 6, body)
