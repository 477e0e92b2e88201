"""What goes wrong in one process is told in all of them, with names, and ends the job only where it must."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import strategies as xd
from tests.jobs import run_in_job, run_script, strategy_of

SECONDS = 5.0
"""Until the others know of a failure; most of it is the start of Python on a busy machine."""


# ------------------------------------------------------------------------ mismatches


@pytest.mark.parametrize("num_local", [1, 2])
def test_different_calls_are_named_in_all_processes_and_the_strategy_goes_on(num_local: int) -> None:
    def body() -> list[str]:
        s = strategy_of(num_local)
        number = s.worker_id

        def reduce(value: Any, op: str = "SUM", name: str | None = None) -> Any:
            context = xd.get_replica_context()
            assert context is not None
            return context.all_reduce(op, value, name=name)

        def gather() -> Any:
            context = xd.get_replica_context()
            assert context is not None
            return context.all_gather(np.ones(2), 0)

        told = []
        for calls in (
            [lambda: reduce(np.ones(2)), lambda: reduce(np.ones(3))],
            [lambda: reduce(np.ones(2, "f4")), lambda: reduce(np.ones(2, "f8"))],
            [lambda: reduce(np.ones(2)), lambda: reduce(np.ones(2), "MAX")],
            [lambda: reduce(np.ones(2)), gather],
            [lambda: reduce(np.ones(2), name="a"), lambda: reduce(np.ones(2), name="b")],
            [lambda: reduce(np.ones(200_000)), lambda: reduce(np.ones(200_001))],
        ):
            with pytest.raises(xd.CollectiveMismatchError) as caught:
                s.run(calls[min(number, 1)])
            told.append(str(caught.value))
            total = s.reduce("SUM", s.run(lambda: reduce(np.ones(2))), None)
            assert total.tolist() == [s.num_replicas_in_sync**2] * 2
        return told

    first, *others = run_in_job(3, body)
    assert others == [first, first]
    for text, words in zip(
        first,
        [
            ("(2,)", "(3,)"),
            ("float32", "float64"),
            ("SUM", "MAX"),
            ("all_reduce", "all_gather"),
            ("'a'", "'b'"),
            ("(200000,)", "(200001,)"),
        ],
        strict=True,
    ):
        assert all(word in text for word in words), text
        assert re.search("process 0 calls .*process 1 calls .*process 2 calls", text), text


def test_other_mismatches_between_processes_are_named_too() -> None:
    def body() -> None:
        s = strategy_of(1)
        number = s.worker_id
        with s.scope():
            v = xd.Variable(np.zeros(2), name="v", aggregation="SUM")
            w = xd.Variable(np.zeros(2), name="w", aggregation="SUM")
        calls: list[tuple[Any, Any]] = [
            (lambda: s.reduce("SUM", np.ones(2), None), lambda: s.gather(np.ones(2), 0)),
            (lambda: s.reduce("SUM", np.ones(2), None), lambda: s.reduce("SUM", np.ones(3), None)),
            (lambda: s.gather(np.ones((2, 2)), 0), lambda: s.gather(np.ones((2, 2)), 1)),
            (lambda: s.gather(np.ones((2, 2)), 0), lambda: s.gather(np.ones((2, 3)), 0)),
            (
                lambda: s.run(lambda: v.assign_add(np.ones(2))),
                lambda: s.run(lambda: w.assign_add(np.ones(2))),
            ),
            (lambda: s.run(lambda: v.assign_add(np.ones(2))), lambda: s.run(lambda: v.assign(np.ones(2)))),
            (
                lambda: s.run(lambda: xd.SGD(1.0).apply_gradients([(np.ones(2), v)])),
                lambda: s.run(lambda: xd.SGD(1.0).apply_gradients([(np.ones(2), w)])),
            ),
            (lambda: xd.assert_replicas_equal(v), lambda: s.reduce("SUM", np.ones(2), None)),
        ]
        for pair in calls:
            with pytest.raises(xd.CollectiveMismatchError) as caught:
                pair[number]()
            assert "process 0 calls" in str(caught.value)
        with s.scope(), pytest.raises(xd.CollectiveMismatchError):
            xd.Variable(np.zeros(2 + number))
        xd.assert_replicas_equal([v, w])
        assert v.read_value().tolist() == w.read_value().tolist() == [0, 0]

    run_in_job(2, body)


def test_copies_of_processes_that_differ_are_found() -> None:
    """B17."""

    def body() -> str:
        s = strategy_of(2)
        with s.scope():
            same, v = xd.Variable(np.zeros(2)), xd.Variable(np.zeros((2, 2)), name="v")
        xd.assert_replicas_equal([same, v])
        if s.worker_id == 2:
            for component in v.components:
                component.assign(np.array([[0, 0], [5.0, 0]]))
        with pytest.raises(AssertionError) as caught:
            xd.assert_replicas_equal([same, v])
        if s.worker_id == 1:
            v.components[1].assign(np.ones((2, 2)))
        with pytest.raises(AssertionError, match="process 1: v: copies 0 and 1 differ in 4 of 4"):
            xd.assert_replicas_equal([same, v])
        xd.assert_replicas_equal(same)
        with pytest.raises(ValueError, match=r"same variables|need the same"):
            xd.assert_replicas_equal([same, v][: 1 + s.worker_id % 2])
        return str(caught.value)

    told = run_in_job(3, body)
    assert set(told) == {
        "v: the copies of processes 0 and 2 differ in 1 of 4 elements, first at (1, 0): 0.0 and 5.0; writes must reach all "
        "copies"
    }


def test_what_is_wrong_in_all_processes_alike_is_raised_as_itself_and_nothing_is_broken() -> None:
    def body() -> None:
        s = strategy_of(2)
        calls: list[Callable[[], Any]] = [
            lambda: s.reduce("SUM", np.ones(2), None),
            lambda: s.gather(s.run(lambda: np.float64(1)), 0),
            lambda: s.reduce("SUM", s.run(lambda: np.ones(2)), 3),
            lambda: s.reduce("MAX", s.run(lambda: np.ones(2)), (0, -2)),
            lambda: s.distribute_dataset(xd.from_arrays(np.arange(4)).shuffle().batch(2)),
            lambda: s.distribute_dataset(xd.from_arrays(np.arange(4)).batch(2), auto_shard_policy="FILE"),
        ]
        for wrong in calls:
            with pytest.raises(ValueError, match=r"need|axis"):
                wrong()
        with s.scope():
            narrow = xd.Variable(np.full(2, 100, "i1"), aggregation="SUM")
        with pytest.raises(OverflowError):
            s.run(lambda: narrow.assign(np.full(2, 100, "i1")))
        assert narrow.read_value().tolist() == [100, 100]
        assert s.reduce("SUM", s.run(lambda: np.ones(2)), None).tolist() == [4, 4]

    run_in_job(2, body)


# ------------------------------------------------------------------ a process that fails


def test_an_exception_in_one_process_reaches_the_others_with_its_text() -> None:
    """B30."""
    ended = run_script(
        3,
        """
def step(n):
    if s.worker_id == 1 and n == 2:
        raise KeyError("boom")
    return xd.get_replica_context().all_reduce("SUM", np.ones(3))
for n in range(5):
    s.run(step, (n,))
""",
    )
    assert [one.status for one in ended] == [1, 1, 1]
    assert max(one.seconds for one in ended) < SECONDS
    assert ended[1].err.rstrip().endswith("KeyError: 'boom'")
    for one in (ended[0], ended[2]):
        assert re.search(r"PeerFailedError: .*process 1 of 3 .*failed: KeyError: 'boom'", one.err), one.err
        assert 'File "<string>", line 9, in step' in one.err  # with its traceback


def test_a_failed_step_that_all_catch_leaves_the_strategy_usable() -> None:
    def body() -> None:
        s = xd.MultiWorkerMirroredStrategy()

        def step(fails: tuple[int, ...], meets: bool) -> Any:
            if s.worker_id in fails:
                raise KeyError("boom")
            return xd.all_reduce("SUM", 1.0) if meets else None

        for fails in ((1,), (0, 2), (0, 1, 2)):
            with pytest.raises(KeyError if s.worker_id in fails else xd.PeerFailedError, match="boom"):
                s.run(step, (fails, True))
            assert s.reduce("SUM", 1.0, None) == 3
        # Who has nothing more to do with the others in the step hears of it at the next collective.
        if s.worker_id == 1:
            with pytest.raises(KeyError):
                s.run(step, ((1,), False))
        else:
            s.run(step, ((1,), False))
            with pytest.raises(xd.PeerFailedError, match=r"process 1 of 3 .*boom"):
                s.reduce("SUM", 1.0, None)
        assert s.reduce("SUM", 1.0, None) == 3

    run_in_job(3, body)


@pytest.mark.parametrize("where", ["step", "dataset"])
def test_an_exception_whose_text_raises_is_raised_as_itself_and_named_in_the_others(where: str) -> None:
    class TextlessError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

        __repr__ = __str__

    def body() -> str:
        s = xd.MultiWorkerMirroredStrategy()

        def rows() -> Iterator[int]:
            if where == "dataset" and s.worker_id == 1:
                raise TextlessError
            yield 1

        def step(row: Any) -> None:
            if s.worker_id == 1:
                raise TextlessError
            xd.all_reduce("SUM", row)

        def train() -> None:
            for batch in s.distribute_datasets_from_function(lambda _: xd.from_generator(rows)):
                s.run(step, (batch,))

        with pytest.raises(TextlessError if s.worker_id == 1 else xd.CollectiveError) as caught:
            train()
        return "" if s.worker_id == 1 else str(caught.value)

    assert "TextlessError: <exception str() failed>" in run_in_job(2, body)[0]


def test_a_forked_child_takes_no_part_in_the_collectives_of_its_parent() -> None:
    def body() -> tuple[list[float], str]:
        s = xd.MultiWorkerMirroredStrategy()
        assert s.reduce("SUM", 1.0, None) == 2
        answer, told = os.pipe()
        child = os.fork() if s.worker_id == 1 else -1
        if child == 0:
            try:
                text = f"joined in {s.reduce('SUM', 1000.0, None)}"
            except xd.CollectiveError as error:
                text = str(error)
            os.write(told, text.encode())
            os._exit(0)
        os.close(told)
        with open(answer, "rb") as pipe:
            text = pipe.read().decode()
        if child > 0:
            os.waitpid(child, 0)
        return [float(s.reduce("SUM", 1.0, None)) for _ in range(2)], text

    (sums, _), (same, text) = run_in_job(2, body)
    assert sums == same == [2.0, 2.0]
    assert re.search("process 1: .*forked child", text), text


def test_an_exception_outside_of_steps_reaches_the_others_too() -> None:
    ended = run_script(
        2,
        """
if s.worker_id == 1:
    open("/no/such/file")
s.reduce("SUM", np.ones(2), None)
""",
    )
    assert [one.status for one in ended] == [1, 1]
    assert max(one.seconds for one in ended) < SECONDS
    assert "PeerFailedError" in ended[0].err
    assert "/no/such/file" in ended[0].err


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_that_ends_early_is_named_by_those_that_wait(status: int) -> None:
    ended = run_script(2, f"s.worker_id == 1 and sys.exit({status})\ns.reduce('SUM', np.ones(2), None)")
    assert ended[0].status == 1
    assert ended[1].status == status
    assert max(one.seconds for one in ended) < SECONDS
    assert re.search("PeerFailedError: process 1 of 2", ended[0].err), ended[0].err


def test_a_process_that_makes_one_step_more_than_the_others_is_told_that_they_have_ended() -> None:
    ended = run_script(
        2,
        """
for n in range(3 + s.worker_id):
    s.run(lambda: xd.get_replica_context().all_reduce("SUM", np.ones(3)))
print("done")
""",
    )
    assert [one.status for one in ended] == [0, 1]
    assert max(one.seconds for one in ended) < SECONDS
    assert ended[0].out == "done\n"
    assert re.search("process 0 of 2 .*has ended its program", ended[1].err), ended[1].err


def test_a_process_that_is_stuck_is_named_with_its_stack_in_all() -> None:
    ended = run_script(
        3,
        """
s = xd.MultiWorkerMirroredStrategy(communication_options=xd.CommunicationOptions(timeout_seconds=1.0))
def reads_a_slow_disk():
    time.sleep(3.0)
def step():
    if s.worker_id == 1:
        reads_a_slow_disk()
    return xd.get_replica_context().all_reduce("SUM", np.ones(3), name="gradients")
s.run(step)
""",
    )
    assert [one.status for one in ended] == [1, 1, 1]
    for one in ended:
        assert "CollectiveTimeoutError" in one.err, one.err
        assert "reads_a_slow_disk" in one.err, one.err
        assert "gradients" in one.err, one.err
        assert "process 1" in one.err, one.err


def test_a_killed_process_is_named_by_the_others() -> None:
    ended = run_script(
        2,
        """
import os, signal
if s.worker_id == 1:
    os.kill(os.getpid(), signal.SIGKILL)
s.reduce("SUM", np.ones(2), None)
""",
    )
    assert [one.status for one in ended] == [1, -9]
    assert max(one.seconds for one in ended) < SECONDS
    assert re.search("PeerFailedError: process 1 of 2 .*died", ended[0].err), ended[0].err


def test_a_job_ends_in_good_order_whoever_is_last() -> None:
    for late in (0, 1):
        ended = run_script(
            2,
            f"""
print(s.reduce("SUM", np.ones(2), None).tolist())
if s.worker_id == {late}:
    time.sleep(0.3)
""",
        )
        assert [(one.status, one.out, one.err) for one in ended] == [(0, "[2.0, 2.0]\n", "")] * 2
