"""Collectives in the background. What each of them gives is the communicators' contract, which holds for them too."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import pytest

from collectives import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InProcessCommunicator,
    NonBlocking,
)

TIMEOUT = 20.0


@pytest.fixture
def pair() -> Iterator[list[NonBlocking]]:
    ends = [NonBlocking(end) for end in InProcessCommunicator.group(2, TIMEOUT)]
    yield ends
    for end in ends:
        end.close()


def test_a_rank_goes_on_at_once_and_its_handle_is_done_when_all_have_come(pair: list[NonBlocking]) -> None:
    first = pair[0].all_reduce(np.ones(3))
    time.sleep(0.05)
    assert not first.done()
    second = pair[1].all_reduce(np.full(3, 2.0))
    for handle in (first, second):
        np.testing.assert_array_equal(handle.result(TIMEOUT), np.full(3, 3.0))
    assert first.done()


def test_what_is_started_is_done_in_that_order_whatever_is_waited_for_first(pair: list[NonBlocking]) -> None:
    done: list[tuple[int, int]] = []
    handles: list[list[Future[Any]]] = []
    for rank, end in enumerate(pair):
        mine = [end.all_reduce(np.full(1000, float(n + rank))) for n in range(50)]
        for n, handle in enumerate(mine):
            handle.add_done_callback(lambda _, n=n, rank=rank: done.append((rank, n)))  # type: ignore[misc]
        handles.append(mine)
    for mine in handles:
        for n in (49, 0, 25, *range(50)):
            np.testing.assert_array_equal(mine[n].result(TIMEOUT), np.full(1000, 2.0 * n + 1))
    for rank in (0, 1):
        assert [n for one, n in done if one == rank] == list(range(50))


def test_different_collectives_may_be_under_way_together(pair: list[NonBlocking]) -> None:
    def start(end: NonBlocking) -> list[Future[Any]]:
        mine = np.arange(4.0) + 10 * end.rank
        return [
            end.all_gather(mine[:1]),
            end.reduce(mine, "MAX", root=1),
            end.barrier(),
            end.broadcast(mine, root=1),
            end.reduce_scatter(mine),
            end.all_to_all(mine),
            end.all_gather_object({"rank": end.rank}),
            end.all_reduce_coalesced([mine, mine.astype(np.int32)], "MIN"),
        ]

    of_all = [start(end) for end in pair]
    zero, one = ([handle.result(TIMEOUT) for handle in mine] for mine in of_all)
    np.testing.assert_array_equal(zero[0], [0.0, 10.0])
    assert zero[1] is None
    np.testing.assert_array_equal(one[1], [10.0, 11.0, 12.0, 13.0])
    assert zero[2] is None
    np.testing.assert_array_equal(zero[3], [10.0, 11.0, 12.0, 13.0])
    np.testing.assert_array_equal(zero[4], [10.0, 12.0])
    np.testing.assert_array_equal(one[4], [14.0, 16.0])
    np.testing.assert_array_equal(one[5], [2.0, 3.0, 12.0, 13.0])
    assert zero[6] == one[6] == [{"rank": 0}, {"rank": 1}]
    assert [array.dtype for array in zero[7]] == [np.float64, np.int32]
    np.testing.assert_array_equal(zero[7][1], np.arange(4))


def test_results_go_into_out_also_in_place(pair: list[NonBlocking]) -> None:
    arrays = [np.full(3, rank + 1.0) for rank in range(2)]
    handles = [end.all_reduce(array, out=array) for end, array in zip(pair, arrays, strict=True)]
    for handle, array in zip(handles, arrays, strict=True):
        assert handle.result(TIMEOUT) is array
        np.testing.assert_array_equal(array, np.full(3, 3.0))


def test_large_reductions_go_on_while_their_callers_compute(pair: list[NonBlocking]) -> None:
    arrays = [np.full(1 << 20, rank + 1.0) for rank in range(2)]
    matrix = np.random.default_rng(0).standard_normal((300, 300))
    handles = [pair[0].all_reduce(arrays[0])]
    matrix @ matrix
    assert not handles[0].done()  # the other one has not come, and this one has computed
    handles.append(pair[1].all_reduce(arrays[1]))
    deadline = time.monotonic() + TIMEOUT
    while not all(handle.done() for handle in handles):
        assert time.monotonic() < deadline
        matrix @ matrix
    for handle in handles:
        np.testing.assert_array_equal(handle.result(0), np.full(1 << 20, 3.0))


def test_wrong_arguments_are_told_by_the_handle_with_the_line_that_started_it(
    pair: list[NonBlocking],
) -> None:
    handle = pair[0].all_reduce(np.ones(3), "AVERAGE")
    with pytest.raises(ValueError, match="AVERAGE") as caught:
        handle.result(TIMEOUT)
    assert any("started by all_reduce" in note and __file__ in note for note in caught.value.__notes__)
    # Nobody has come to anything, so the group is as good as before.
    handles = [end.all_reduce(np.ones(1)) for end in pair]
    assert [float(handle.result(TIMEOUT)[0]) for handle in handles] == [2.0, 2.0]


def test_calls_that_differ_are_a_mismatch_on_all_ranks_and_so_is_what_was_started_after_them(
    pair: list[NonBlocking],
) -> None:
    handles: list[Future[Any]] = [pair[0].all_reduce(np.ones(3)), pair[1].all_gather(np.ones(3))]
    after: list[Future[Any]] = [end.barrier() for end in pair]
    for handle in (*handles, *after):
        with pytest.raises(CollectiveMismatchError, match="all_gather"):
            handle.result(TIMEOUT)


def test_a_rank_that_does_not_come_is_named_by_the_handles_of_the_others() -> None:
    ends = [NonBlocking(end) for end in InProcessCommunicator.group(2, 0.1)]
    handle = ends[0].all_reduce(np.ones(3))
    with pytest.raises(CollectiveTimeoutError, match="missing: rank 1"):
        handle.result(TIMEOUT)


def test_a_handle_can_be_waited_for_with_a_time_and_asked_again(pair: list[NonBlocking]) -> None:
    handle = pair[0].barrier()
    with pytest.raises(TimeoutError):
        handle.result(0.02)
    pair[1].barrier()
    assert handle.result(TIMEOUT) is None


def test_a_handle_cannot_be_cancelled_as_the_others_count_on_it(pair: list[NonBlocking]) -> None:
    handles = [pair[0].all_reduce(np.ones(2)), pair[0].all_reduce(np.ones(2))]
    assert not any(handle.cancel() for handle in handles)
    handles += [pair[1].all_reduce(np.ones(2)) for _ in range(2)]
    done, late = wait(handles, TIMEOUT)
    assert len(done) == 4
    assert not late


def test_what_was_started_goes_on_after_close_and_nothing_more_is_started(pair: list[NonBlocking]) -> None:
    handle = pair[0].all_reduce(np.ones(2))
    pair[0].close()
    pair[0].close()
    with pytest.raises(RuntimeError, match=r"all_reduce: this NonBlocking is closed; make a new one"):
        pair[0].all_reduce(np.ones(2))
    pair[1].all_reduce(np.ones(2))
    np.testing.assert_array_equal(handle.result(TIMEOUT), np.full(2, 2.0))


def test_its_thread_ends_when_nobody_can_start_anything_any_more() -> None:
    before = set(threading.enumerate())
    end = NonBlocking(InProcessCommunicator.group(1)[0])
    (thread,) = set(threading.enumerate()) - before
    np.testing.assert_array_equal(end.all_reduce(np.ones(1)).result(TIMEOUT), [1.0])
    del end
    gc.collect()
    thread.join(TIMEOUT)
    assert not thread.is_alive()


def test_arrays_are_let_go_when_the_handle_is() -> None:
    end = NonBlocking(InProcessCommunicator.group(1)[0])

    class Large(np.ndarray[Any, np.dtype[Any]]):
        """Can be watched."""

    array = np.ones(3).view(Large)
    gone = weakref.ref(array)
    handle = end.all_reduce(array)
    handle.result(TIMEOUT)
    del array, handle
    deadline = time.monotonic() + TIMEOUT
    while gone() is not None:
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)
    end.close()


def test_a_forked_child_which_has_no_such_thread_is_told_so() -> None:
    end = NonBlocking(InProcessCommunicator.group(1)[0])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            end.barrier()
        except CollectiveAbortedError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    told = os.read(reader, 1000).decode()
    os.close(reader)
    assert os.waitpid(child, 0)[1] == 0
    assert "barrier: this is a forked child" in told
    assert str(os.getpid()) in told
    end.close()


def test_coalesced_arrays_and_outs_may_come_from_generators() -> None:
    end = NonBlocking(InProcessCommunicator.group(1)[0])
    room = np.empty(2)
    arrays: Any = (array for array in [np.ones(2)])
    outs: Any = (out for out in [room])
    assert end.all_reduce_coalesced(arrays, outs=outs).result(TIMEOUT)[0] is room
    np.testing.assert_array_equal(room, np.ones(2))
    end.close()


def test_what_is_no_communicator_is_refused() -> None:
    nothing: Any = None
    with pytest.raises(TypeError, match=r"NonBlocking: got None; need a Communicator of its own"):
        NonBlocking(nothing)
