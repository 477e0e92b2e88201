"""The threads under a strategy: races, interrupts, forks and their end."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strategies import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationOptions,
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    get_replica_context,
)
from variables import ReplicaContext, Variable


def cpus(count: int) -> list[str]:
    return [f"cpu:{index}" for index in range(count)]


def replica() -> ReplicaContext:
    context = get_replica_context()
    assert context is not None
    return context


def replica_id() -> int:
    return replica().replica_id_in_sync_group


def total(strategy: Strategy) -> set[Any]:
    return set(
        strategy.experimental_local_results(
            strategy.run(lambda: replica().all_reduce("SUM", replica_id() + 1.0))
        )
    )


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Threads take turns some hundred times more often than usual: every order of events comes up."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def replica_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("xpdistribute-replica")]


def assert_ending(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


# ------------------------------------------------------------------------------------------------ races


@pytest.mark.parametrize("size", [2, 3, 8])
def test_thousands_of_empty_steps_lose_no_wake_up(size: int, switching_often: None) -> None:
    with MirroredStrategy(cpus(size)) as strategy:
        for turn in range(1500):
            assert strategy.run(lambda turn=turn: turn) in (turn, turn)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_replica_runs_every_step_exactly_once(size: int, switching_often: None) -> None:
    counts = [0] * size

    def step() -> None:
        counts[replica_id()] += 1

    with MirroredStrategy(cpus(size)) as strategy:
        for turn in range(1, 800):
            strategy.run(step)
            assert counts == [turn] * size


@pytest.mark.parametrize("size", [2, 3, 8])
def test_failures_at_random_places_leave_the_next_step_right(size: int, switching_often: None) -> None:
    """Exceptions, mismatches and early ends in random replicas, with random naps, then a step that must be right."""
    with MirroredStrategy(cpus(size)) as strategy:
        with strategy.scope():
            variable = Variable(0, dtype=np.int64, aggregation="SUM")
        expected = 0
        for number in range(400):
            plan = random.Random(number)
            guilty = plan.sample(range(size), plan.randrange(1, size + 1))
            fault, where, calls = plan.choice(["raise", "mismatch", "end"]), plan.randrange(3), 3

            def step(
                number: int = number,
                guilty: list[int] = guilty,
                fault: str = fault,
                where: int = where,
                calls: int = calls,
            ) -> None:
                naps = random.Random(number * 100 + replica_id())
                for call in range(calls):
                    if naps.random() < 0.1:
                        time.sleep(naps.random() * 0.0005)
                    if call == where and replica_id() in guilty:
                        if fault == "raise":
                            raise KeyError(number)
                        if fault == "end":
                            return
                        replica().all_gather(np.ones(2), 0)
                    replica().all_reduce("SUM", np.ones(3))

            everybody = len(guilty) == size
            if everybody and fault in ("end", "mismatch"):
                strategy.run(step)
            else:
                with pytest.raises(KeyError if fault == "raise" else CollectiveMismatchError) as failure:
                    strategy.run(step)
                if fault == "raise":
                    assert failure.value.args == (number,)
            strategy.run(lambda: variable.assign_add(1, read_value=False))
            expected += size
            assert [int(copy) for copy in variable.components] == [expected] * size


def test_merges_and_inner_steps_race_with_nothing(switching_often: None) -> None:
    with MirroredStrategy(cpus(4)) as strategy:
        inner: list[Any] = []

        def merge(merged: Strategy, value: Any) -> Any:
            inner.append(merged.run(lambda: replica().all_reduce("SUM", 1.0)))
            return merged.reduce("SUM", value, axis=None)

        def step() -> float:
            replica().all_reduce("SUM", 1.0)
            return float(replica().merge_call(merge, (float(replica_id()),)))

        for _ in range(200):
            assert set(strategy.experimental_local_results(strategy.run(step))) == {6.0}
        assert len(inner) == 200
        assert {value for one in inner for value in strategy.experimental_local_results(one)} == {4.0}


def test_many_strategies_run_side_by_side(switching_often: None) -> None:
    wrong: list[Any] = []

    def work(size: int) -> None:
        with MirroredStrategy(cpus(size)) as strategy:
            for _ in range(100):
                seen = total(strategy)
                if seen != {size * (size + 1) / 2}:
                    wrong.append((size, seen))

    threads = [threading.Thread(target=work, args=(size,), daemon=True) for size in (1, 2, 3, 4, 5, 6)]
    for thread in threads:
        thread.start()
    assert_ending(threads)
    assert not wrong


@pytest.mark.parametrize("size", range(2, 9))
def test_the_first_steps_of_new_strategies_are_right(size: int) -> None:
    for _ in range(15):
        with MirroredStrategy(
            cpus(size), communication_options=CommunicationOptions(timeout_seconds=5)
        ) as strategy:
            for _ in range(8):
                result = strategy.run(lambda: [replica().all_reduce("SUM", 1.0) for _ in range(2)])
                assert [part.values for part in result] == [(size,) * size] * 2


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_step_whose_threads_could_not_be_started_leaves_the_next_one_right(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def run_out(thread: threading.Thread) -> None:
        if len(started) == failing:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def step() -> float:
        first = replica().all_reduce("SUM", 1.0)
        time.sleep(0.01)  # long enough to need the threads
        return float(first + replica().all_reduce("SUM", 1.0))

    with MirroredStrategy(cpus(4), communication_options=CommunicationOptions(timeout_seconds=2)) as strategy:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", run_out)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                strategy.run(step)
        for _ in range(5):
            assert strategy.run(step).values == (8, 8, 8, 8)


# ----------------------------------------------------------------------------------------- many callers


def test_one_strategy_serves_one_step_at_a_time_from_several_threads(switching_often: None) -> None:
    with MirroredStrategy(cpus(3)) as strategy:
        with strategy.scope():
            variable = Variable(0.0, aggregation="ONLY_FIRST_REPLICA")
        wrong: list[Any] = []

        def work(number: int) -> None:
            def step() -> tuple[float, float]:
                variable.assign(float(number))
                summed = replica().all_reduce("SUM", float(number))
                return float(summed), float(variable)

            for _ in range(150):
                for seen in strategy.experimental_local_results(strategy.run(step)):
                    if seen != (3.0 * number, float(number)):
                        wrong.append((number, seen))

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
        for thread in threads:
            thread.start()
        assert_ending(threads)
        assert not wrong


@pytest.mark.parametrize("make", [lambda o: MirroredStrategy(cpus(2), communication_options=o), lambda o: OneDeviceStrategy(communication_options=o)], ids=["mirrored", "one_device"])  # fmt: skip
def test_a_second_thread_waits_as_long_as_the_timeout_and_says_why_it_does_not_longer(make: Any) -> None:
    with make(CommunicationOptions(timeout_seconds=0.1)) as strategy:
        inside, go_on = threading.Event(), threading.Event()

        def step() -> None:
            inside.set()
            go_on.wait(10)

        first = threading.Thread(target=strategy.run, args=(step,), daemon=True)
        first.start()
        assert inside.wait(5)
        with pytest.raises(
            RuntimeError, match=r"run: another thread has been running a step on this strategy for over 0.1 s"
        ):
            strategy.run(lambda: 1)
        go_on.set()
        assert_ending([first])
        assert strategy.run(lambda: 1) == 1


def test_a_strategy_first_used_in_a_thread_that_has_ended_can_be_used_in_another(
    switching_often: None,
) -> None:
    with MirroredStrategy(cpus(3)) as strategy:
        for _ in range(20):
            seen: list[Any] = []
            thread = threading.Thread(target=lambda seen=seen: seen.append(total(strategy)), daemon=True)
            thread.start()
            assert_ending([thread])
            assert seen == [{6.0}]


# --------------------------------------------------------------------------------------------- their end


def test_close_ends_the_threads() -> None:
    before = set(replica_threads())
    strategy = MirroredStrategy(cpus(4))
    assert total(strategy) == {10.0}
    started = [thread for thread in replica_threads() if thread not in before]
    assert len(started) == 3
    assert all(thread.daemon for thread in started)
    strategy.close()
    assert_ending(started)


@pytest.mark.parametrize("steps", [0, 1, 50])
@pytest.mark.parametrize("kind", ["empty", "collective", "failing"])
def test_a_strategy_dropped_without_close_ends_its_threads(steps: int, kind: str) -> None:
    before = set(replica_threads())

    def step() -> None:
        if kind == "failing" and replica_id() == 1:
            raise KeyError
        if kind != "empty":
            replica().all_reduce("SUM", 1.0)

    for _ in range(5):
        strategy = MirroredStrategy(cpus(3))
        with strategy.scope():
            variable = Variable(np.zeros(10))
        for _ in range(steps):
            try:
                strategy.run(step)
            except KeyError:
                assert kind == "failing"
        dropped = weakref.ref(strategy)
        del strategy, variable
        gc.collect()
        assert dropped() is None, "something keeps the strategy alive"
    assert_ending([thread for thread in replica_threads() if thread not in before])


def test_arguments_and_results_are_not_kept_after_a_step() -> None:
    with MirroredStrategy(cpus(3)) as strategy:
        for _ in range(20):
            argument = np.ones(10)
            seen = weakref.ref(argument)
            result = strategy.run(lambda x: x + replica_id(), (argument,))
            results = [weakref.ref(part) for part in result.values]
            del argument, result
            gc.collect()
            assert seen() is None
            assert [one() for one in results] == [None] * 3


# ------------------------------------------------------------------------------------------------- fork


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "while_another_thread_runs_a_step"])
def test_a_forked_child_can_run_steps_and_the_parent_goes_on(busy: bool) -> None:
    with MirroredStrategy(cpus(3)) as strategy:
        with strategy.scope():
            variable = Variable(0.0, aggregation="SUM")
        assert total(strategy) == {6.0}
        inside, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            inside.set()
            go_on.wait(20)

        other = threading.Thread(target=strategy.run, args=(wait,), daemon=True)
        if busy:
            other.start()
            assert inside.wait(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks with threads
            child = os.fork()
        if child == 0:
            code = 1
            try:
                strategy.run(lambda: variable.assign_add(1.0, read_value=False))
                code = 0 if total(strategy) == {6.0} and variable.numpy() == 3 else 2
            finally:
                os._exit(code)
        go_on.set()
        deadline = time.monotonic() + 10
        status = os.waitpid(child, os.WNOHANG)
        while status == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
            status = os.waitpid(child, os.WNOHANG)
        assert os.waitstatus_to_exitcode(status[1]) == 0
        if busy:
            assert_ending([other])
        assert total(strategy) == {6.0}
        assert variable.numpy() == 0


# --------------------------------------------------------------------------------------------- Ctrl-C

_PROGRAM = '''
import os, signal, sys, threading, time
import numpy as np
from strategies import MirroredStrategy, get_replica_context

sent = []
def press():
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)

def loop():
    while True:
        pass

def step(place):
    context = get_replica_context()
    first = context.replica_id_in_sync_group == 0
    if place == "computing" and first:
        loop()
    if place == "sleeping" and first:
        time.sleep(30)
    if place == "waiting for a loop" and not first:
        loop()
    if place == "waiting for a sleeper" and context.replica_id_in_sync_group == 1:
        time.sleep(3)
    if place == "waiting at the end":
        return None if first else loop()
    if place == "waiting at the end for a sleeper":
        return time.sleep(0 if first else 3)
    if place == "merging":
        context.merge_call(lambda strategy: loop())
    if place == "merging a step":
        context.merge_call(lambda strategy: strategy.run(loop))
    return context.all_reduce("SUM", 1.0)

strategy = MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
assert strategy.run(step, ("",)).values == (3, 3, 3)
threading.Timer(0.2, press).start()
try:
    strategy.run(step, (sys.argv[1],))
except KeyboardInterrupt:
    print("took", time.monotonic() - sent[0])
for _ in range(3):
    assert strategy.run(step, ("",)).values == (3, 3, 3)
deadline = time.monotonic() + 5
def working():
    return [t for t in threading.enumerate() if t.name.startswith("xpdistribute")]
while len(working()) > (4 if sys.argv[1] == "merging a step" else 2) and time.monotonic() < deadline:
    time.sleep(0.01)
print("threads", len(working()))
strategy.close()
'''  # fmt: skip


@pytest.mark.parametrize(
    "place",
    [
        "computing",
        "sleeping",
        "waiting for a loop",
        "waiting for a sleeper",
        "waiting at the end",
        "waiting at the end for a sleeper",
        "merging",
        "merging a step",
    ],
)
def test_ctrl_c_ends_the_step_within_a_second_and_the_strategy_goes_on(place: str) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, place],
        capture_output=True,
        text=True,
        timeout=40,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    told = dict(line.split() for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert float(told["took"]) < 1.2  # a second, and some for a busy machine
    # Two for each level of steps: the inner one has replicas of its own.
    assert told["threads"] == ("4" if place == "merging a step" else "2")
    assert time.monotonic() - began < 20


def test_ctrl_c_at_random_moments_leaves_the_strategy_right() -> None:
    program = """
import os, random, signal, threading, time
from strategies import MirroredStrategy, get_replica_context

strategy = MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
def step():
    context = get_replica_context()
    return [context.all_reduce("SUM", float(context.replica_id_in_sync_group)) for _ in range(3)]

random.seed(1)
for turn in range(60):
    press = threading.Timer(random.random() * 0.01, os.kill, (os.getpid(), signal.SIGINT))
    try:
        press.start()
        while True:
            strategy.run(step)
    except KeyboardInterrupt:
        pass
    press.join()
    for result in strategy.run(step):
        assert result.values == (3, 3, 3), result
print("right")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=55,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.stdout.strip() == "right", done.stderr


def test_the_interpreter_ends_at_once_with_a_strategy_in_use() -> None:
    program = """
from strategies import MirroredStrategy
strategy = MirroredStrategy(["cpu:0", "cpu:1"])
strategy.run(lambda: None)
"""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 10


def test_collective_errors_are_one_class(switching_often: None) -> None:
    with MirroredStrategy(cpus(2)) as strategy:
        for _ in range(100):
            with pytest.raises(CollectiveError):
                strategy.run(lambda: replica().all_reduce("SUM", np.ones(1 + replica_id())))
        assert total(strategy) == {3.0}


def test_a_caller_stuck_in_the_operating_system_is_told_of_at_the_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told_after: list[float] = []

    def step() -> None:
        if replica_id() == 0:
            begin = time.monotonic()
            while not caplog.records and time.monotonic() - begin < 20:
                time.sleep(0.05)
            told_after.append(time.monotonic() - begin)
            time.sleep(0.2)  # an interrupt cannot reach it here
        replica().all_reduce("SUM", np.ones(3))

    options = CommunicationOptions(timeout_seconds=0.5)
    with MirroredStrategy(["cpu:0", "cpu:1"], communication_options=options) as strategy:
        with pytest.raises(CollectiveTimeoutError, match="missing: replica 0") as caught:
            strategy.run(step)
        assert total(strategy) == {3.0}
    assert "replica 0 is at" in caplog.text
    assert "in step" in caplog.text
    assert any("replica 0 is at" in note and "in step" in note for note in caught.value.__notes__)
    assert not told_after or told_after[0] < 10


def test_ctrl_c_stays_ctrl_c_after_a_timeout() -> None:
    program = """
import os, signal, threading
import numpy as np
from strategies import CommunicationOptions, MirroredStrategy, get_replica_context

options = CommunicationOptions(timeout_seconds=0.5)
strategy = MirroredStrategy(["cpu:0", "cpu:1"], communication_options=options)

def step():
    if get_replica_context().replica_id_in_sync_group == 0:
        threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        threading.Event().wait(30)
    get_replica_context().all_reduce("SUM", np.ones(3))

try:
    strategy.run(step)
except KeyboardInterrupt as interrupt:
    print("stopped by Ctrl-C after", type(interrupt.__cause__).__name__)
sums = strategy.run(lambda: get_replica_context().all_reduce("SUM", 1.0))
print([float(part) for part in strategy.local_results(sums)])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=25, check=True
    )
    assert ended.stdout.splitlines() == ["stopped by Ctrl-C after CollectiveTimeoutError", "[2.0, 2.0]"]
    assert "replica 0 is at" in ended.stderr
