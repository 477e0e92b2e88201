"""What only `InProcessCommunicator` promises."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Communicator,
    InProcessCommunicator,
)
from collectives.rendezvous import Rendezvous

OnThreads = Callable[..., list[Any]]


def errors_of(
    on_threads: OnThreads, ends: list[InProcessCommunicator], body: Callable[[Communicator], Any]
) -> list[Any]:
    """What each rank raises, by rank; None for one that doesn't."""

    def catching(communicator: Communicator) -> BaseException | None:
        try:
            body(communicator)
        except Exception as error:  # noqa: BLE001  # it is the result
            return error
        return None

    return on_threads(ends, catching)


# ------------------------------------------------------------------------------------ making a group


@pytest.mark.parametrize(("world_size", "timeout"), [(0, 1.0), (-1, 1.0), (2, 0.0), (2, -1.0), (2, math.nan)])
def test_a_group_needs_ranks_and_time(world_size: int, timeout: float) -> None:
    with pytest.raises(ValueError, match=f"group: got world_size={world_size}, timeout={timeout}"):
        InProcessCommunicator.group(world_size, timeout)


@pytest.mark.parametrize("timeout", [math.inf, 1e300])
def test_a_group_does_not_wait_longer_than_the_system_can(timeout: float) -> None:
    with pytest.raises(ValueError, match="group: got world_size=2, timeout="):
        InProcessCommunicator.group(2, timeout)


def test_a_group_of_one_needs_no_thread() -> None:
    (alone,) = InProcessCommunicator.group(1, timeout=1e-9)
    for _ in range(3):
        assert alone.all_reduce(np.ones(2)).tolist() == [1, 1]
        alone.barrier()


def test_a_group_of_one_goes_on_after_a_failure() -> None:
    (alone,) = InProcessCommunicator.group(1)
    with pytest.raises(ValueError, match="all_gather: got out="):
        alone.all_gather(np.ones(2), out=np.ones(3))
    assert alone.all_gather(np.ones(2)).tolist() == [1, 1]


# -------------------------------------------------------------------------------------------- timeouts


def test_a_missing_rank_times_out_and_is_named() -> None:
    first, _, third = InProcessCommunicator.group(3, timeout=0.05)

    def wait_in_vain() -> None:
        with pytest.raises(CollectiveError):
            third.all_reduce(np.ones(1))

    waiting = threading.Thread(target=wait_in_vain)
    waiting.start()
    with pytest.raises(
        CollectiveTimeoutError,
        match=r"all_reduce SUM float64 of shape \(1,\): rank [02] of 3 waited 0.05 s for the others at seq 0; "
        "missing: .*rank 1; .*did every rank call it",
    ) as failure:
        first.all_reduce(np.ones(1))
    waiting.join()
    assert 1 in failure.value.missing


def test_the_error_counts_the_collectives_before_it_and_names_the_users_name() -> None:
    def five_times(end: Communicator) -> None:
        for _ in range(5):
            end.barrier()

    ends = InProcessCommunicator.group(2, timeout=0.1)
    other = threading.Thread(target=five_times, args=(ends[1],))
    other.start()
    five_times(ends[0])
    other.join()
    with pytest.raises(CollectiveTimeoutError, match=r"^all_reduce 'loss' SUM .* at seq 5; missing: rank 1;"):
        ends[0].all_reduce(np.ones(1), name="loss")


@pytest.mark.parametrize(
    "kind",
    ["reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier", "all_gather_object"],
)
def test_every_collective_times_out(kind: str) -> None:
    first, _ = InProcessCommunicator.group(2, timeout=0.02)
    arguments = () if kind == "barrier" else (np.ones(2),)
    with pytest.raises(CollectiveTimeoutError, match=f"^{kind}.* rank 0 of 2 waited 0.02 s"):
        getattr(first, kind)(*arguments)


def test_recv_times_out_too() -> None:
    first, _ = InProcessCommunicator.group(2, timeout=0.02)
    with pytest.raises(CollectiveTimeoutError, match=r"^recv 1 tag 5: rank 0 of 2 waited 0.02 s") as failure:
        first.recv(1, tag=5)
    assert failure.value.missing == (1,)


def test_a_late_rank_is_told_of_the_timeout_at_once() -> None:
    first, late = InProcessCommunicator.group(2, timeout=0.05)
    with pytest.raises(CollectiveTimeoutError):
        first.barrier()
    began = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="missing: rank 1"):
        late.barrier()
    assert time.monotonic() - began < 0.04


def test_a_slow_rank_is_waited_for_up_to_the_timeout(on_threads: OnThreads) -> None:
    def body(communicator: Communicator) -> float:
        if communicator.rank == 1:
            time.sleep(0.1)
        return float(communicator.all_reduce(np.ones(())))

    assert on_threads(InProcessCommunicator.group(3, timeout=10), body) == [3, 3, 3]


# ------------------------------------------------------------------------------------------ mismatches


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda end: end.all_reduce(np.ones(3)), r"rank 2 calls all_reduce SUM float64 of shape \(3,\)"),
        (
            lambda end: end.all_reduce(np.ones(2, np.float32)),
            r"rank 2 calls all_reduce SUM float32 of shape \(2,\)",
        ),
        (lambda end: end.all_reduce(np.ones(2), "MAX"), "rank 2 calls all_reduce MAX"),
        (lambda end: end.all_reduce(np.ones(2), name="b"), "rank 2 calls all_reduce 'b' SUM"),
        (lambda end: end.all_reduce_coalesced([np.ones(2)] * 2), r"\(2,\) float64 of shape \(2,\)"),
        (lambda end: end.reduce(np.ones(2)), "rank 2 calls reduce SUM .* root 0"),
        (lambda end: end.barrier(), "rank 2 calls barrier"),
    ],
    ids=["shape", "dtype", "op", "name", "number", "kind", "barrier"],
)
def test_ranks_that_disagree_all_raise_and_each_one_and_its_call_are_named(
    on_threads: OnThreads, odd: Callable[[Communicator], Any], words: str
) -> None:
    def body(communicator: Communicator) -> None:
        if communicator.rank == 2:
            odd(communicator)
        else:
            communicator.all_reduce(np.ones(2))

    for error in errors_of(on_threads, InProcessCommunicator.group(4, timeout=10), body):
        assert isinstance(error, CollectiveMismatchError)
        assert error.calls[0] == error.calls[1] == error.calls[3] == "all_reduce SUM float64 of shape (2,)"
        error_matches = pytest.raises(CollectiveMismatchError, match=words)
        with error_matches:
            raise error
        assert "rank 0 calls all_reduce SUM float64 of shape (2,)" in str(error)


def test_roots_that_differ_are_a_mismatch(on_threads: OnThreads) -> None:
    errors = errors_of(
        on_threads,
        InProcessCommunicator.group(2, timeout=10),
        lambda end: end.broadcast(np.ones(1), root=end.rank),
    )
    assert all(isinstance(error, CollectiveMismatchError) for error in errors)
    assert errors[0].calls == (
        "broadcast float64 of shape (1,) root 0",
        "broadcast float64 of shape (1,) root 1",
    )


def test_other_axes_that_differ_are_a_mismatch_of_all_gather(on_threads: OnThreads) -> None:
    errors = errors_of(
        on_threads,
        InProcessCommunicator.group(2, timeout=10),
        lambda end: end.all_gather(np.ones((2, 2 + end.rank))),
    )
    assert all(isinstance(error, CollectiveMismatchError) for error in errors)


def test_a_broken_group_says_so_again(on_threads: OnThreads) -> None:
    ends = InProcessCommunicator.group(2, timeout=10)
    errors_of(on_threads, ends, lambda end: end.all_reduce(np.ones(1 + end.rank)))
    for end in ends:
        for _ in range(2):
            with pytest.raises(CollectiveMismatchError):
                end.barrier()


def test_each_rank_gets_an_error_object_of_its_own(on_threads: OnThreads) -> None:
    errors = errors_of(
        on_threads,
        InProcessCommunicator.group(3, timeout=10),
        lambda end: end.all_reduce(np.ones(1 + end.rank)),
    )
    assert len({id(error) for error in errors}) == 3


# ---------------------------------------------------------------------------------------- dead ends


def test_ranks_that_wait_for_one_anothers_messages_are_a_dead_end_found_at_once(
    on_threads: OnThreads,
) -> None:
    began = time.monotonic()
    errors = errors_of(
        on_threads,
        InProcessCommunicator.group(3, timeout=30),
        lambda end: end.recv((end.rank + 1) % 3),
    )
    assert time.monotonic() - began < 5
    assert all(isinstance(error, CollectiveMismatchError) for error in errors)
    assert errors[0].calls == ("recv 1 tag 0", "recv 2 tag 0", "recv 0 tag 0")


def test_a_message_awaited_while_its_sender_waits_at_a_barrier_is_a_dead_end(on_threads: OnThreads) -> None:
    def body(communicator: Communicator) -> None:
        if communicator.rank == 0:
            communicator.recv(1)
        else:
            communicator.barrier()

    errors = errors_of(on_threads, InProcessCommunicator.group(3, timeout=30), body)
    assert all(isinstance(error, CollectiveMismatchError) for error in errors)


def test_a_message_with_another_tag_does_not_wake_its_receiver(on_threads: OnThreads) -> None:
    def body(communicator: Communicator) -> int | None:
        if communicator.rank == 1:
            for tag in range(20):
                communicator.send(np.array(tag), 0, tag)
            return None
        return int(communicator.recv(1, tag=19))

    assert on_threads(InProcessCommunicator.group(2, timeout=10), body)[0] == 19


# ---------------------------------------------------------------------------- failures inside, sharing


@pytest.mark.parametrize("shared_from", [0, math.inf], ids=["sharing", "alone"])
def test_an_overflow_reaches_every_rank(on_threads: OnThreads, shared_from: float) -> None:
    rendezvous = Rendezvous(3, 10)
    ends = [InProcessCommunicator(rank, rendezvous, shared_from) for rank in range(3)]

    def body(communicator: Communicator) -> None:
        mine = np.full(1000, 100, np.int8)
        communicator.all_reduce(mine, out=mine)

    errors = errors_of(on_threads, ends, body)
    assert sum(isinstance(error, OverflowError) for error in errors) >= 1
    others = [error for error in errors if not isinstance(error, OverflowError)]
    assert all(isinstance(error, CollectiveAbortedError) for error in others)
    assert all(isinstance(error.__cause__, OverflowError) for error in others)


@pytest.mark.parametrize("shared_from", [0, math.inf], ids=["sharing", "alone"])
def test_an_out_of_all_gather_that_does_not_fit_the_whole_reaches_every_rank(
    on_threads: OnThreads, shared_from: float
) -> None:
    rendezvous = Rendezvous(2, 10)
    ends = [InProcessCommunicator(rank, rendezvous, shared_from) for rank in range(2)]
    errors = errors_of(
        on_threads, ends, lambda end: end.all_gather(np.ones(2), out=np.ones(3) if end.rank else None)
    )
    assert any(
        isinstance(error, ValueError) and "need float64 of shape (4,)" in str(error) for error in errors
    )
    assert all(isinstance(error, (ValueError, CollectiveAbortedError)) for error in errors)


def test_large_results_are_not_overwritten_while_they_are_held(on_threads: OnThreads) -> None:
    def body(communicator: Communicator) -> None:
        held = []
        for turn in range(6):
            held.append(communicator.all_reduce(np.full(1 << 18, float(turn))))
            held.append(communicator.broadcast(np.full(1 << 18, 100.0 + turn)))
        for turn in range(6):
            assert (held[2 * turn] == 2.0 * turn).all()
            assert (held[2 * turn + 1] == 100.0 + turn).all()

    on_threads(InProcessCommunicator.group(2, timeout=10), body)
