"""Wrong use, and steps that fail: what is said, and that the strategy can be used afterwards."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from strategies import (
    CentralStorageStrategy,
    CollectiveAbortedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationOptions,
    MirroredStrategy,
    NcclAllReduce,
    OneDeviceStrategy,
    ReplicaContextError,
    Strategy,
    get_replica_context,
)
from variables import PerReplica, ReplicaContext, Variable

WITHIN_A_SECOND = 1.5
"""Seconds: one, and some for a machine that is busy with other things."""


def cpus(count: int) -> list[str]:
    return [f"cpu:{index}" for index in range(count)]


def replica() -> ReplicaContext:
    context = get_replica_context()
    assert context is not None
    return context


def replica_id() -> int:
    return replica().replica_id_in_sync_group


def assert_usable(strategy: Strategy) -> None:
    """Three steps give what they should, at once."""
    size = strategy.num_replicas_in_sync
    for turn in range(3):
        total = strategy.run(lambda turn=turn: replica().all_reduce("SUM", float(replica_id() + turn)))
        expected = size * (size - 1) / 2 + turn * size
        assert set(strategy.experimental_local_results(total)) == {expected}


@pytest.fixture
def strategy() -> Iterator[MirroredStrategy]:
    with MirroredStrategy(cpus(4)) as made:
        yield made
        assert_usable(made)


# --------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize("kind", [MirroredStrategy, CentralStorageStrategy])
@pytest.mark.parametrize(
    ("devices", "error", "words"),
    [
        ([], ValueError, "got no devices; need at least one"),
        (["cpu:0", "cpu:0"], ValueError, "got cpu:0 more than once; each replica needs a device of its own"),
        (["cpu:0", "/device:CPU:0"], ValueError, "got cpu:0 more than once"),
        (["tpu:0"], ValueError, "Device: got 'tpu:0'; need a name such as 'cpu:0' or 'gpu:1'"),
        (["cpu:0", 1], TypeError, "Device: got 1; need a name"),
        (
            "cpu:0",
            TypeError,
            r"got devices='cpu:0'; need a list of names — write devices=\['cpu:0', 'cpu:1'\]",
        ),
        (2, TypeError, "got devices=2; need a list of names"),
    ],
    ids=["none", "repeated", "repeated_otherwise", "unknown", "number", "text", "count"],
)
def test_devices_have_to_be_known_and_each_another_one(
    kind: Callable[[Any], Strategy], devices: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        kind(devices)


def test_one_device_and_a_parameter_device_have_to_be_known_too() -> None:
    with pytest.raises(ValueError, match="Device: got 'disk:0'"):
        OneDeviceStrategy("disk:0")
    with pytest.raises(ValueError, match="Device: got 'disk:0'"):
        CentralStorageStrategy(["cpu:0", "cpu:1"], "disk:0")


def test_nccl_on_cpus_is_refused_when_the_strategy_is_made() -> None:
    with pytest.raises(
        RuntimeError, match="MirroredStrategy: NCCL was asked for, and the devices are cpu:0, cpu:1"
    ):
        MirroredStrategy(cpus(2), NcclAllReduce())
    with pytest.raises(RuntimeError, match="NCCL needs NVIDIA GPUs"):
        MirroredStrategy(cpus(2), communication_options=CommunicationOptions(implementation="NCCL"))
    wrong: Any = "ring"
    with pytest.raises(TypeError, match="got cross_device_ops='ring'; need one of"):
        MirroredStrategy(cpus(2), wrong)


# -------------------------------------------------------------------------------------------- contexts


def test_scopes_of_different_strategies_do_not_nest() -> None:
    outer, inner = MirroredStrategy(cpus(2)), MirroredStrategy(cpus(3))
    with outer.scope():
        words = r"MirroredStrategy\(\['cpu:0', 'cpu:1', 'cpu:2'\]\).scope: called in the scope of another strategy"
        with pytest.raises(ReplicaContextError, match=words), inner.scope():
            pass
        acts: list[Callable[[], Any]] = [
            lambda: inner.run(lambda: 1),
            lambda: inner.reduce("MEAN", PerReplica([1, 2, 3]), axis=None),
        ]
        for act in acts:
            with pytest.raises(ReplicaContextError, match="leave that scope first — strategies don't nest"):
                act()
        assert outer.run(lambda: 1) == 1
    assert inner.run(lambda: 1) == 1


def test_a_scope_can_be_entered_again_inside_itself_and_in_a_merge_function(
    strategy: MirroredStrategy,
) -> None:
    def merge(merged: Strategy) -> None:
        with merged.scope():
            Variable(1.0)

    with strategy.scope(), strategy.scope():
        Variable(1.0)
        strategy.run(lambda: replica().merge_call(merge))


@pytest.mark.parametrize("method", ["run", "scope", "reduce", "gather", "distribute_dataset", "reduce_to"])
def test_what_needs_all_replicas_is_refused_in_one(strategy: MirroredStrategy, method: str) -> None:
    value = PerReplica([np.ones(1)] * 4)
    acts: dict[str, Callable[[], Any]] = {
        "run": lambda: strategy.run(lambda: 1),
        "scope": lambda: strategy.scope().__enter__(),
        "reduce": lambda: strategy.reduce("SUM", value, axis=None),
        "gather": lambda: strategy.gather(value, axis=0),
        "distribute_dataset": lambda: strategy.distribute_dataset([np.ones(4)]),
        "reduce_to": lambda: strategy.reduce_to("SUM", value, "cpu:0"),
    }
    words = rf"MirroredStrategy.{method}: called inside replica \d of MirroredStrategy.*call it outside strategy.run"
    with pytest.raises(ReplicaContextError, match=words):
        strategy.run(acts[method])


def test_a_step_of_another_strategy_cannot_run_inside_a_step(strategy: MirroredStrategy) -> None:
    other = OneDeviceStrategy()
    with pytest.raises(ReplicaContextError, match=r"OneDeviceStrategy.run: called inside replica"):
        strategy.run(lambda: other.run(lambda: 1))


@pytest.mark.parametrize("args", [5, "ab", np.ones(2), None, {"x": 1}, PerReplica([1, 2, 3, 4])], ids=type)
def test_args_that_are_no_tuple_are_refused_with_how_to_write_one(
    strategy: MirroredStrategy, args: Any
) -> None:
    with pytest.raises(
        ValueError, match=r"run: got args=.*need a tuple or list — for one argument write args=\(x,\)"
    ):
        strategy.run(lambda x: x, args=args)
    with pytest.raises(ValueError, match="merge_call: got args=5; need a tuple or list"):
        strategy.run(lambda: replica().merge_call(lambda s: None, 5))  # type: ignore[arg-type]  # the point of the test


def test_wrong_arguments_of_the_step_are_its_type_error(strategy: MirroredStrategy) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        strategy.run(lambda x: x)


def test_a_per_replica_of_too_few_parts_is_an_error(strategy: MirroredStrategy) -> None:
    with pytest.raises((ValueError, IndexError)):
        strategy.run(lambda x: x, (PerReplica([1, 2]),))


# ------------------------------------------------------------------------ replicas that do not fit together


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.all_reduce("SUM", np.ones(2 + r.replica_id // 3)), r"replica 3 calls all_reduce SUM float64 of shape \(3,\)"),
        (lambda r: r.all_reduce("SUM", np.ones(2, "f4" if r.replica_id == 3 else "f8")), "replica 3 calls all_reduce SUM float32"),
        (lambda r: r.all_reduce("MAX" if r.replica_id == 3 else "SUM", 1.0), "replica 3 calls all_reduce MAX"),
        (lambda r: r.all_reduce("SUM", [1.0] * (1 + r.replica_id // 3)), r"replica 3 calls all_reduce '\[\*, \*\]' SUM"),
        (lambda r: r.all_gather(np.ones((2, 2 + r.replica_id // 3)), 0), r"replica 3 calls all_gather axis 0 float64 of shape \(-1, 3\)"),
        (lambda r: r.all_gather(np.ones(2), 0) if r.replica_id == 3 else r.all_reduce("SUM", 1.0), "replica 3 calls all_gather"),
        (lambda r: r.all_reduce("SUM", 1.0) if r.replica_id < 3 else None, "replica 3 has finished without another call"),
        (lambda r: r.all_reduce("SUM", 1.0) if r.replica_id else None, "replica 0 has finished without another call"),
        (lambda r: r.all_reduce("SUM", 1.0, name="b" if r.replica_id == 3 else "a"), "replica 3 calls all_reduce 'b'"),
    ],
    ids=["shape", "dtype", "op", "structure", "gathered_shape", "kind", "last_ends", "first_ends", "name"],
)  # fmt: skip
def test_calls_that_differ_are_a_mismatch_that_names_each_replica_and_its_call(
    strategy: MirroredStrategy, call: Callable[[ReplicaContext], Any], words: str
) -> None:
    began = time.monotonic()
    with pytest.raises(CollectiveMismatchError, match=words) as failure:
        strategy.run(lambda: call(replica()))
    assert time.monotonic() - began < WITHIN_A_SECOND
    assert len(failure.value.calls) == 4
    assert "every replica must make the same calls in the same order" in str(failure.value)


def test_results_of_different_shapes_cannot_be_reduced_and_are_listed(strategy: MirroredStrategy) -> None:
    result = strategy.run(lambda: np.ones(1 + replica_id()))
    with pytest.raises(
        ValueError, match=r"reduce: got arrays that differ, replica 0: float64 of shape \(1,\); replica 1"
    ):
        strategy.reduce("SUM", result, axis=None)


def test_a_fifth_call_that_one_replica_leaves_out_is_told_with_its_number(strategy: MirroredStrategy) -> None:
    def step() -> None:
        for _ in range(5 - (replica_id() == 2)):
            replica().all_reduce("SUM", 1.0)

    with pytest.raises(
        CollectiveMismatchError, match=r"seq 4: .*replica 2 has finished without another call"
    ):
        strategy.run(step)


# ----------------------------------------------------------------------------------- replicas that raise


class UsersError(Exception):
    """Of a kind that cannot be made from a message alone."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code)
        self.code = code
        self.reason = reason


@pytest.mark.parametrize("guilty", range(4))
@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_what_a_replica_raises_is_raised_as_itself_with_a_note_and_the_others_are_released(
    strategy: MirroredStrategy, guilty: int, place: str
) -> None:
    def fail_at(here: str) -> None:
        if here == place and replica_id() == guilty:
            raise UsersError(7, reason=place)

    released: list[int] = []

    def step() -> None:
        fail_at("before")
        try:
            replica().all_reduce("SUM", 1.0)
            fail_at("between")
            replica().all_reduce("SUM", 1.0)
        except CollectiveAbortedError as error:
            assert isinstance(error.__cause__, UsersError)  # noqa: PT017  # what the other replicas see
            released.append(replica_id())
            raise
        fail_at("after")

    for _ in range(10):
        released.clear()
        began = time.monotonic()
        with pytest.raises(UsersError) as failure:
            strategy.run(step)
        assert time.monotonic() - began < WITHIN_A_SECOND
        assert failure.value.reason == place
        assert failure.value.__notes__ == [f"in replica {guilty} of 4 (cpu:{guilty})"]
        assert guilty not in released
        if place != "after":
            assert sorted(released) == [other for other in range(4) if other != guilty]


def test_of_several_that_raise_at_once_one_is_raised(strategy: MirroredStrategy) -> None:
    def step() -> None:
        raise UsersError(replica_id(), reason="all of them")

    for _ in range(50):
        with pytest.raises(UsersError) as failure:
            strategy.run(step)
        assert failure.value.__notes__ == [f"in replica {failure.value.code} of 4 (cpu:{failure.value.code})"]


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt("typed"), GeneratorExit(), MemoryError()], ids=repr
)
@pytest.mark.parametrize("guilty", [0, 2])
def test_exceptions_of_every_kind_come_through(
    strategy: MirroredStrategy, guilty: int, error: BaseException
) -> None:
    def step() -> None:
        if replica_id() == guilty:
            raise error
        replica().all_reduce("SUM", 1.0)

    with pytest.raises(type(error)):
        strategy.run(step)


def test_what_a_merge_function_raises_is_raised_as_itself(strategy: MirroredStrategy) -> None:
    def merge(_: Strategy) -> None:
        raise UsersError(1, reason="merging")

    for _ in range(10):
        with pytest.raises(UsersError, match="1"):
            strategy.run(lambda: replica().merge_call(merge))


def test_a_replica_that_swallows_the_release_does_not_hide_the_failure(strategy: MirroredStrategy) -> None:
    def step() -> None:
        if replica_id() == 1:
            raise UsersError(1, reason="told")
        for _ in range(3):
            with pytest.raises(CollectiveError):
                replica().all_reduce("SUM", 1.0)

    with pytest.raises(UsersError):
        strategy.run(step)


def test_a_failed_step_leaves_variables_equal(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        variable = Variable(0.0, aggregation="SUM")

    def step() -> None:
        variable.assign_add(1.0)
        if replica_id() == 2:
            raise UsersError(1, reason="after the write")
        variable.assign_add(1.0)

    with pytest.raises(UsersError):
        strategy.run(step)
    assert [float(copy) for copy in variable.components] == [4, 4, 4, 4]


def test_a_raised_error_keeps_no_arguments_alive_once_it_is_dropped(strategy: MirroredStrategy) -> None:
    with pytest.raises(UsersError):
        strategy.run(lambda: (_ for _ in ()).throw(UsersError(1, reason="")))
    assert strategy.run(lambda: None) is None


# -------------------------------------------------------------------------------------- replicas that are late


@pytest.fixture
def impatient() -> Iterator[MirroredStrategy]:
    options = CommunicationOptions(timeout_seconds=0.2)
    with MirroredStrategy(cpus(3), communication_options=options) as made:
        yield made
        assert_usable(made)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    # That a replica was given up is logged, rightly; here it is on purpose.
    caplog.set_level(logging.CRITICAL, "xpdistribute")


@pytest.mark.parametrize("guilty", range(3))
def test_a_replica_that_sleeps_too_long_is_named_with_where_it_is(
    impatient: MirroredStrategy, guilty: int
) -> None:
    def step() -> None:
        if replica_id() == guilty:
            time.sleep(0.8)
        replica().all_reduce("SUM", 1.0)

    with pytest.raises(
        CollectiveTimeoutError, match=f"waited 0.2 s for the others at seq 0; missing: .*replica {guilty}"
    ) as failure:
        impatient.run(step)
    assert guilty in failure.value.missing
    if guilty:  # the caller's own replica has woken up by the time that the error is raised
        assert "time.sleep(0.8)" in "".join(failure.value.__notes__)


@pytest.mark.parametrize("guilty", range(3))
def test_a_replica_that_loops_for_ever_is_interrupted(impatient: MirroredStrategy, guilty: int) -> None:
    interrupted: list[str] = []

    def step() -> None:
        if replica_id() == guilty:
            try:
                while True:
                    pass
            except BaseException as error:
                interrupted.append(type(error).__name__)
                raise
        replica().all_reduce("SUM", 1.0)

    began = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=f"missing: .*replica {guilty}"):
        impatient.run(step)
    assert time.monotonic() - began < WITHIN_A_SECOND
    assert interrupted == ["ReplicaInterrupted"]


def test_a_slow_replica_that_nobody_waits_for_is_no_failure(impatient: MirroredStrategy) -> None:
    def step() -> int:
        time.sleep(0.5 if replica_id() == 1 else 0)
        return replica_id()

    assert impatient.run(step).values == (0, 1, 2)


def test_a_replica_given_up_writes_to_nothing_any_more_when_it_wakes(impatient: MirroredStrategy) -> None:
    with impatient.scope():
        variable = Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    woken = threading.Event()

    def step() -> None:
        if replica_id() == 1:
            try:
                time.sleep(1.2)
                variable.assign_add(100.0)
            finally:
                woken.set()
        replica().all_reduce("SUM", 1.0)

    with pytest.raises(CollectiveTimeoutError):
        impatient.run(step)
    assert_usable(impatient)
    assert woken.wait(5)
    assert_usable(impatient)
    assert variable.numpy() == 0


# --------------------------------------------------------------------------------------------- its end


@pytest.mark.parametrize("make", [lambda: MirroredStrategy(cpus(2)), lambda: CentralStorageStrategy(cpus(2)), OneDeviceStrategy, lambda: MirroredStrategy(["cpu:0"])], ids=["mirrored", "central", "one_device", "alone"])  # fmt: skip
@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_a_closed_strategy_runs_no_step_but_its_variables_can_be_read(
    make: Callable[[], Strategy], used: bool
) -> None:
    strategy = make()
    with strategy.scope():
        variable = Variable(3.0)
    if used:
        assert_usable(strategy)
    strategy.close()
    strategy.close()
    for step in (lambda: 1, lambda: replica().all_reduce("SUM", 1.0)):
        with pytest.raises(
            RuntimeError, match=r"Strategy\(\[.*\]\).run: called after close\(\); make a new strategy"
        ):
            strategy.run(step)
    assert variable.numpy() == 3
    num_replicas = strategy.num_replicas_in_sync
    assert strategy.reduce("SUM", PerReplica([1.0] * num_replicas), axis=None) == num_replicas


def test_leaving_its_block_closes_a_strategy() -> None:
    with MirroredStrategy(cpus(2)) as strategy:
        assert_usable(strategy)
    with pytest.raises(RuntimeError, match="called after close"):
        strategy.run(lambda: 1)


def test_closing_during_a_step_hangs_nobody() -> None:
    strategy = MirroredStrategy(cpus(3))
    assert_usable(strategy)
    started = threading.Event()
    outcome: list[Any] = []

    def run() -> None:
        def step() -> float:
            started.set()
            time.sleep(0.1)
            return float(replica().all_reduce("SUM", 1.0))

        try:
            outcome.append(strategy.run(step))
        except RuntimeError as error:
            outcome.append(error)

    runner = threading.Thread(target=run, daemon=True)
    runner.start()
    assert started.wait(5)
    strategy.close()
    runner.join(5)
    assert not runner.is_alive()
    assert len(outcome) == 1
    with pytest.raises(RuntimeError, match="called after close"):
        strategy.run(lambda: 1)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.run(None), "run: got fn=None; need a function"),
        (lambda s: s.run("step"), "run: got fn='step'; need a function"),
        (lambda s: s.run(lambda: 1, kwargs=[1]), r"run: got kwargs=\[1\]; need a dict"),
        (lambda s: s.run(lambda: 1, (), (2,)), r"run: got kwargs=\(2,\); need a dict"),
    ],
)
def test_a_step_or_kwargs_of_another_kind_are_refused(
    count: int, call: Callable[[MirroredStrategy], Any], words: str
) -> None:
    with MirroredStrategy(cpus(count)) as strategy:
        with pytest.raises(TypeError, match=words):
            call(strategy)
        sums = strategy.run(lambda: replica().all_reduce("SUM", 1.0))
        assert [float(part) for part in strategy.local_results(sums)] == [count] * count


@pytest.mark.parametrize("options", [5, {}, "timeout"])
def test_options_that_are_none_are_refused(options: Any) -> None:
    with pytest.raises(TypeError, match=r"MirroredStrategy: got communication_options=.*; need Commun"):
        MirroredStrategy(cpus(2), communication_options=options)
