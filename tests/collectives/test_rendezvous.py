"""Meetings of threads: who gets what, who is told of a failure, and that no wake-up is lost."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from collectives import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
)
from collectives.rendezvous import Call, Rendezvous


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Threads take turns some hundred times more often than usual: every order of events comes up."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def in_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """The body's result for each member, or what it raised."""
    results: list[Any] = [None] * size

    def run(member: int) -> None:
        try:
            results[member] = body(member)
        except BaseException as error:  # noqa: BLE001  # it is the result
            results[member] = error

    threads = [threading.Thread(target=run, args=(member,)) for member in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not any(thread.is_alive() for thread in threads), "a member hangs"
    return results


def rotated(values: list[Any]) -> list[Any]:
    return values[1:] + values[:1]


# -------------------------------------------------------------------------------------------- meetings


def test_the_last_to_come_concludes_once_and_everybody_gets_a_result() -> None:
    meeting = Rendezvous(4, 10)
    concluded: list[list[Any]] = []

    def conclude(values: list[Any]) -> list[Any]:
        concluded.append(list(values))
        return rotated(values)

    assert in_threads(4, lambda member: meeting.meet(member, Call("x"), member * 10, conclude)) == [
        10,
        20,
        30,
        0,
    ]
    assert concluded == [[0, 10, 20, 30]]


def test_a_lone_member_meets_itself_from_many_threads_at_once(switching_often: None) -> None:
    # As in the default strategy, whose one replica is whoever asks.
    alone = Rendezvous(1, 10)

    def body(member: int) -> None:
        for turn in range(4000):
            assert alone.meet(0, Call("x", (member,)), (member, turn), list) == (member, turn)

    assert in_threads(8, body) == [None] * 8


def test_a_lone_member_is_not_locked_out_by_an_earlier_failure() -> None:
    alone = Rendezvous(1, 10)

    def fail(values: list[Any]) -> list[Any]:
        raise KeyError("first")

    with pytest.raises(KeyError):
        alone.meet(0, Call("x"), 0, fail)
    assert alone.meet(0, Call("x"), 1, list) == 1


def test_no_wake_up_is_lost_in_ten_thousand_meetings(switching_often: None) -> None:
    size = 5
    meeting = Rendezvous(size, 20)

    def body(member: int) -> None:
        naps = random.Random(member)
        for turn in range(2000):
            if naps.random() < 0.005:
                time.sleep(naps.random() * 0.001)
            got = meeting.meet(member, Call("x", (turn,)), (member, turn), rotated)
            assert got == ((member + 1) % size, turn)

    for _ in range(5):
        assert in_threads(size, body) == [None] * size


def test_meetings_and_messages_mix(switching_often: None) -> None:
    size = 4
    meeting = Rendezvous(size, 20)

    def body(member: int) -> None:
        choices = random.Random(7)  # the same choices on every member
        for turn in range(1500):
            kind = choices.randrange(3)
            if kind == 0:
                assert meeting.meet(member, Call("x"), member, rotated) == (member + 1) % size
            elif kind == 1:
                meeting.send(member, (member + 1) % size, turn, (member, turn))
                assert meeting.receive(member, (member - 1) % size, turn) == ((member - 1) % size, turn)
            else:
                source, target = choices.sample(range(size), 2)
                if member == source:
                    meeting.send(member, target, -1, turn)
                elif member == target:
                    assert meeting.receive(member, source, -1) == turn

    assert in_threads(size, body) == [None] * size


def test_failures_at_random_places_reach_everybody_and_the_next_step_is_right(switching_often: None) -> None:
    size = 4
    meeting = Rendezvous(size, 20)
    steps = 400
    # One barrier of the standard library's for the start of a step, as a strategy has.
    start = threading.Barrier(size, meeting.begin, 30)

    def body(member: int) -> list[str]:
        outcomes = []
        for step in range(steps):
            start.wait()
            plan = random.Random(step)
            guilty, where, calls = plan.randrange(size), plan.randrange(6), plan.randrange(1, 6)
            try:
                for call in range(calls):
                    if member == guilty and call == where:
                        raise KeyError(step)
                    assert meeting.meet(member, Call("x"), (step, call, member), rotated) == (
                        step,
                        call,
                        (member + 1) % size,
                    )
                outcomes.append("done")
            except KeyError as error:
                meeting.abort(error)
                outcomes.append("guilty")
            except CollectiveAbortedError as error:
                outcomes.append(f"aborted by {error.__cause__!r}")
            finally:
                meeting.end(member)
        return outcomes

    told = in_threads(size, body)
    for step in range(steps):
        plan = random.Random(step)
        guilty, where, calls = plan.randrange(size), plan.randrange(6), plan.randrange(1, 6)
        outcomes = [told[member][step] for member in range(size)]
        if where >= calls:
            assert outcomes == ["done"] * size
        else:
            assert outcomes[guilty] == "guilty"
            assert set(outcomes) == {"guilty", f"aborted by KeyError({step})"}


# ----------------------------------------------------------------------------------------- failures


def test_what_conclude_raises_is_raised_as_itself_in_one_and_as_the_cause_in_the_others() -> None:
    def fail(values: list[Any]) -> list[Any]:
        raise ZeroDivisionError("in the middle")

    meeting = Rendezvous(3, 10)
    errors = in_threads(3, lambda member: meeting.meet(member, Call("x"), member, fail))
    (itself,) = [error for error in errors if isinstance(error, ZeroDivisionError)]
    for error in errors:
        if error is not itself:
            assert isinstance(error, CollectiveAbortedError)
            assert error.__cause__ is itself
            assert "was released because another rank failed with ZeroDivisionError: in the middle" in str(
                error
            )


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def test_who_waits_is_released_also_by_an_error_that_has_no_words() -> None:
    def fail(values: list[Any]) -> list[Any]:
        raise UnspeakableError

    meeting = Rendezvous(3, 10)
    errors = in_threads(3, lambda member: meeting.meet(member, Call("x"), member, fail))
    assert sorted(type(error).__name__ for error in errors) == [
        "CollectiveAbortedError",
        "CollectiveAbortedError",
        "UnspeakableError",
    ]
    for error in errors:
        if isinstance(error, CollectiveAbortedError):
            assert str(error).endswith("another rank failed with UnspeakableError: <exception str() failed>")


def test_abort_releases_who_waits_and_who_comes_later() -> None:
    meeting = Rendezvous(3, 30)

    def body(member: int) -> None:
        if member == 2:
            time.sleep(0.05)
            meeting.abort(OSError("unplugged"))
        meeting.meet(member, Call("x"), None, list)

    began = time.monotonic()
    errors = in_threads(3, body)
    assert time.monotonic() - began < 5
    assert all(isinstance(error, CollectiveAbortedError) and "unplugged" in str(error) for error in errors)


def test_the_first_failure_stays() -> None:
    meeting = Rendezvous(2, 10)
    meeting.abort(KeyError("first"))
    meeting.abort(KeyError("second"))
    assert repr(meeting.failure) == "KeyError('first')"


def test_begin_forgets_a_failure_and_letters_that_nobody_took() -> None:
    meeting = Rendezvous(2, 0.05)
    meeting.send(0, 1, 0, "old")
    meeting.abort(KeyError("old"))
    meeting.begin()
    assert meeting.failure is None
    with pytest.raises(CollectiveTimeoutError):
        meeting.receive(1, 0, 0)


def test_a_timeout_names_who_is_missing_and_what_the_others_wait_in() -> None:
    meeting = Rendezvous(4, 0.1, "replica")

    def body(member: int) -> None:
        if member in (1, 3):
            time.sleep(0.3)
        else:
            time.sleep(member * 0.02)
        meeting.meet(member, Call("all_reduce", ("x",), "grads"), None, list)

    for error in in_threads(4, body):
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (1, 3)
        assert (
            "missing: replica 1, replica 3; waiting: replica 0 in all_reduce 'grads' x; replica 2 in"
            in str(error)
        )


def test_nobody_times_out_while_the_meeting_is_being_concluded() -> None:
    meeting = Rendezvous(3, 0.05)

    def slowly(values: list[Any]) -> list[Any]:
        time.sleep(0.3)
        return rotated(values)

    assert in_threads(3, lambda member: meeting.meet(member, Call("x"), member, slowly)) == [1, 2, 0]


def test_timeouts_that_race_with_the_last_to_come_leave_all_of_one_mind(switching_often: None) -> None:
    outcomes = set()
    for turn in range(60):
        meeting = Rendezvous(3, 0.01)

        def body(member: int, turn: int = turn, meeting: Rendezvous = meeting) -> Any:
            if member == 2:
                time.sleep(0.0085 + turn * 0.00005)
            return meeting.meet(member, Call("x"), member, rotated)

        results = in_threads(3, body)
        failed = [isinstance(result, CollectiveTimeoutError) for result in results]
        assert all(failed) or results == [1, 2, 0], results
        outcomes.add(all(failed))
    assert outcomes  # which of the two it is depends on the machine; never a mixture


# ------------------------------------------------------------------------------------------ the end


def test_a_member_that_ends_releases_those_who_wait_for_it() -> None:
    meeting = Rendezvous(3, 30, "replica")

    def body(member: int) -> None:
        if member == 1:
            time.sleep(0.05)
            meeting.end(member)
        else:
            meeting.meet(member, Call("barrier"), None, list)

    began = time.monotonic()
    errors = in_threads(3, body)
    assert time.monotonic() - began < 5
    for error in (errors[0], errors[2]):
        assert isinstance(error, CollectiveMismatchError)
        assert error.calls == ("barrier", None, "barrier")
        assert "replica 1 has finished without another call" in str(error)


def test_who_calls_after_a_member_has_ended_is_told_at_once() -> None:
    meeting = Rendezvous(2, 30)
    meeting.end(1)
    with pytest.raises(CollectiveMismatchError, match="rank 1 has finished without another call"):
        meeting.meet(0, Call("barrier"), None, list)


def test_a_receiver_is_told_that_its_sender_has_ended() -> None:
    meeting = Rendezvous(3, 30)

    def body(member: int) -> Any:
        if member == 0:
            return meeting.receive(0, 1, 0)
        time.sleep(0.05)
        if member == 2:
            time.sleep(0.2)  # still at work, so that nothing else is a dead end
        return meeting.end(member)

    began = time.monotonic()
    assert isinstance(in_threads(3, body)[0], CollectiveMismatchError)
    assert time.monotonic() - began < 5


def test_letters_outlive_their_sender() -> None:
    meeting = Rendezvous(2, 10)
    meeting.send(0, 1, 3, "news")
    meeting.end(0)
    assert meeting.receive(1, 0, 3) == "news"


def test_a_member_may_end_while_others_only_compute() -> None:
    meeting = Rendezvous(2, 10)
    assert not meeting.end(0)
    assert meeting.failure is None
    assert meeting.has_ended(0)
    assert not meeting.has_ended(1)
    assert meeting.num_ended == 1
    assert meeting.end(1), "the last one is told that it is"
    meeting.begin()
    assert meeting.num_ended == 0


def test_ending_at_once_after_a_meeting_disturbs_nobody_who_is_still_waking_up(switching_often: None) -> None:
    size = 6
    meeting = Rendezvous(size, 20)
    for _ in range(200):
        meeting.begin()

        def body(member: int) -> Any:
            result = meeting.meet(member, Call("x"), member, rotated)
            meeting.end(member)
            return result

        assert in_threads(size, body) == rotated(list(range(size)))
        assert meeting.num_ended == size


# ------------------------------------------------------------------------------------------- words


def test_calls_are_put_into_words() -> None:
    call = Call("all_reduce", ((np.dtype(np.float32), (2, 3)), "root 1"), "loss")
    assert str(call) == "all_reduce 'loss' float32 of shape (2, 3) root 1"
    assert str(Call("barrier")) == "barrier"


def test_functions_are_told_by_their_place_in_the_source() -> None:
    def merge() -> None: ...

    text = str(Call("merge_call", (merge.__code__,)))
    assert text.startswith(
        "merge_call of test_functions_are_told_by_their_place_in_the_source.<locals>.merge (line "
    )
    assert __file__ in text


def test_every_failure_of_a_group_is_a_collective_error() -> None:
    for kind in (CollectiveMismatchError, CollectiveTimeoutError, CollectiveAbortedError):
        assert issubclass(kind, CollectiveError)
        assert issubclass(kind, RuntimeError)
