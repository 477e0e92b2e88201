"""What `Strategy.run` gives the replicas, and what it gives back."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from collectives import IndexedSlices
from strategies import (
    CentralStorageStrategy,
    HierarchicalCopyAllReduce,
    MirroredStrategy,
    OneDeviceStrategy,
    ReductionToOneDevice,
    Strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from variables import Mirrored, PerReplica, ReplicaContext, Variable

Array = np.ndarray[Any, Any]


class Pair(NamedTuple):
    x: Any
    y: Any


def cpus(count: int) -> list[str]:
    return [f"cpu:{index}" for index in range(count)]


def replica() -> ReplicaContext:
    context = get_replica_context()
    assert context is not None
    return context


def replica_id() -> int:
    return replica().replica_id_in_sync_group


@pytest.fixture
def strategy() -> Iterator[MirroredStrategy]:
    with MirroredStrategy(cpus(3)) as made:
        yield made


@pytest.fixture(params=["one_device", "mirrored_1", "mirrored_4", "central_3"])
def any_strategy(request: pytest.FixtureRequest) -> Iterator[Strategy]:
    made: Strategy
    if request.param == "one_device":
        made = OneDeviceStrategy("cpu:0")
    elif request.param.startswith("mirrored"):
        made = MirroredStrategy(cpus(int(request.param[-1])))
    else:
        made = CentralStorageStrategy(cpus(3), "cpu:0")
    with made:
        yield made


# ----------------------------------------------------------------------------- what the replicas get


def test_every_replica_runs_the_step_once(any_strategy: Strategy) -> None:
    ran: list[int] = []
    any_strategy.run(lambda: ran.append(replica_id()))
    assert sorted(ran) == list(range(any_strategy.num_replicas_in_sync))


def test_a_replica_knows_who_it_is_and_where(any_strategy: Strategy) -> None:
    def step() -> tuple[Any, ...]:
        assert not in_cross_replica_context()
        assert has_strategy()
        assert get_strategy() is any_strategy
        return replica().replica_id, replica().num_replicas_in_sync, replica().strategy is any_strategy

    size = any_strategy.num_replicas_in_sync
    by_replica = any_strategy.experimental_local_results(any_strategy.run(step))
    assert list(by_replica) == [(rank, size, True) for rank in range(size)]
    assert not has_strategy()


def test_of_every_per_replica_a_replica_gets_its_own_part_at_any_depth(strategy: MirroredStrategy) -> None:
    seen: dict[int, Any] = {}

    def step(*args: Any, **kwargs: Any) -> None:
        seen[replica_id()] = (args, kwargs)

    own = PerReplica(["a", "b", "c"])
    strategy.run(
        step,
        (own, 5, [Pair(own, {"deep": (own,)})]),
        {"key": own, "plain": None, "same": Mirrored([7, 7, 7])},
    )
    for rank, letter in enumerate("abc"):
        args = (letter, 5, [Pair(letter, {"deep": (letter,)})])
        assert seen[rank] == (args, {"key": letter, "plain": None, "same": 7})


def test_arguments_are_passed_themselves_not_copies(any_strategy: Strategy) -> None:
    array, seen = np.ones(3), list[Any]()
    any_strategy.run(lambda x: seen.append(x is array), (array,))
    assert all(seen)


def test_args_may_be_a_list_and_kwargs_may_be_none(any_strategy: Strategy) -> None:
    any_strategy.run(lambda x, y: None, [1, 2])
    any_strategy.run(lambda x, y: None, (1,), {"y": 2})
    any_strategy.run(lambda: None, (), None)


def test_context_variables_of_the_caller_reach_every_replica(strategy: MirroredStrategy) -> None:
    setting: ContextVar[str] = ContextVar("setting", default="unset")
    token = setting.set("by the caller")
    try:
        for _ in range(20):
            assert strategy.run(setting.get) == "by the caller"
    finally:
        setting.reset(token)
    assert strategy.run(setting.get) == "unset"


def test_a_replica_sees_its_own_context_variables_only(strategy: MirroredStrategy) -> None:
    setting: ContextVar[int] = ContextVar("setting", default=-1)

    def step() -> tuple[int, int]:
        setting.set(replica_id())
        replica().all_reduce("SUM", 1.0)
        first = setting.get()
        replica().all_reduce("SUM", 1.0)
        return first, setting.get()

    for _ in range(20):
        assert strategy.experimental_local_results(strategy.run(step)) == tuple((r, r) for r in range(3))


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_numpys_error_state_reaches_every_replica(strategy: MirroredStrategy, guilty: int) -> None:
    def step() -> Any:
        return np.ones(1) / np.full(1, 0.0 if replica_id() == guilty else 1.0)

    with np.errstate(divide="raise"), pytest.raises(FloatingPointError, match="divide by zero"):
        strategy.run(step)
    with np.errstate(divide="ignore"):
        assert np.isinf(strategy.run(step).values[guilty])


def test_replicas_run_at_the_same_time(strategy: MirroredStrategy) -> None:
    # They could not meet at a barrier that knows nothing of strategies, otherwise.
    barrier = threading.Barrier(3)
    for _ in range(10):
        strategy.run(lambda: barrier.wait(2))


def test_replicas_run_at_the_same_time_after_a_collective_too(strategy: MirroredStrategy) -> None:
    barrier = threading.Barrier(3)

    def step() -> None:
        replica().all_reduce("SUM", 1.0)
        barrier.wait(2)
        replica().all_reduce("SUM", 1.0)

    strategy.run(step)


def test_short_steps_come_to_run_in_the_callers_thread_and_long_ones_do_not(
    strategy: MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("torch", "jax", "tensorflow", "cupy"):  # other tests may have loaded them
        monkeypatch.delitem(sys.modules, library, raising=False)

    def short() -> int:
        replica().all_reduce("SUM", 1.0)
        return threading.get_ident()

    def long() -> int:
        time.sleep(0.002)
        return short()

    def threads(step: Callable[[], int]) -> set[int]:
        return set(strategy.local_results(strategy.run(step)))

    with monkeypatch.context() as busy:  # on a busy machine even short steps take long
        busy.setattr("strategies.pace._SHORT", 60.0)
        shared = [len(threads(short)) for _ in range(100)]
    assert 1 in shared, "no short step ran in one thread"
    assert [len(threads(long)) for _ in range(50)] == [3] * 50
    assert threads(long) >= {threading.get_ident()}


def test_replicas_have_threads_of_their_own_where_a_library_keeps_state_by_thread(
    strategy: MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))

    def step() -> int:
        replica().all_reduce("SUM", 1.0)
        return threading.get_ident()

    for _ in range(300):
        assert len(set(strategy.local_results(strategy.run(step)))) == 3


def test_what_releases_the_interpreter_overlaps_after_a_collective_too(strategy: MirroredStrategy) -> None:
    def step() -> None:
        replica().all_reduce("SUM", 1.0)
        time.sleep(0.05)

    strategy.run(step)
    began = time.monotonic()
    for _ in range(4):
        strategy.run(step)
    assert time.monotonic() - began < 4 * 0.1, "the replicas slept one after the other"


# ------------------------------------------------------------------------------------ what comes back


@pytest.mark.parametrize(
    "structure", [[1, (2, None)], {"b": 1, "a": 2}, Pair(1, [2]), (), [], {"x": {}}], ids=repr
)
def test_results_keep_their_structure(strategy: MirroredStrategy, structure: Any) -> None:
    result = strategy.run(lambda: structure)
    assert result == structure
    assert type(result) is type(structure)


def test_leaves_that_differ_are_per_replica_and_one_object_is_itself(strategy: MirroredStrategy) -> None:
    shared = np.ones(2)
    result = strategy.run(lambda: {"own": float(replica_id()) + 0.5, "shared": shared, "none": None})
    assert isinstance(result["own"], PerReplica)
    assert result["own"].values == (0.5, 1.5, 2.5)
    assert result["shared"] is shared
    assert result["none"] is None


def test_with_one_replica_results_are_bare() -> None:
    for strategy in (OneDeviceStrategy(), MirroredStrategy(["cpu:0"]), CentralStorageStrategy(["cpu:0"])):
        assert strategy.run(lambda: [1.5, {"a": None}]) == [1.5, {"a": None}]


def test_results_that_differ_in_structure_are_an_error_and_the_strategy_goes_on(
    strategy: MirroredStrategy,
) -> None:
    with pytest.raises(ValueError, match=r"results differ in structure: replica 0 has .*, replica 1 has"):
        strategy.run(lambda: [1] * (1 + replica_id()))
    assert strategy.run(lambda: 5) == 5


VIEWS: dict[str, Callable[[Any], Any]] = {
    "value": lambda w: w.value(),
    "slice": lambda w: w[1:],
    "transposed": lambda w: w.T,
    "element axis": lambda w: w[0],
    "asarray": np.asarray,
    "diagonal": lambda w: w.diagonal(),
    "reshaped": lambda w: w.reshape(-1),
    "nested": lambda w: {"a": [w.value()]},
    "written": lambda w: w.assign_add(np.zeros((2, 2))),
    "sparse": lambda w: IndexedSlices(w.value(), [0, 1]),
    "broadcast": lambda w: np.broadcast_to(w.value(), (3, 2, 2)),
    "DLPack": np.from_dlpack,
    "DLPack of a part": lambda w: np.from_dlpack(w.value()[1:]),
    "buffer": lambda w: np.frombuffer(w.value()),
    "memoryview": lambda w: np.asarray(memoryview(w.value())[1:]),
    "strides": lambda w: np.lib.stride_tricks.as_strided(w.value(), (3, 2), (8, 8)),
    "backwards": lambda w: w.value()[::-1, ::-1],
    "other dtype": lambda w: w.value().view("i8"),
    "subclass": lambda w: w.value().view(np.recarray),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_results_that_are_part_of_a_variable_do_not_change_with_it(
    any_strategy: Strategy, view: Callable[[Any], Any]
) -> None:
    with any_strategy.scope():
        variable = Variable(np.arange(4.0).reshape(2, 2), aggregation="SUM")
    result = any_strategy.run(partial(view, variable))

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            return [plain(component) for component in leaf.values]
        if isinstance(leaf, dict):
            return plain(leaf["a"][0])
        return np.array(leaf.values if isinstance(leaf, IndexedSlices) else leaf)

    if result is variable:  # what a write to a plain variable returns
        return
    before = plain(result)
    variable.assign_add(np.full((2, 2), 100.0))
    np.testing.assert_array_equal(plain(result), before)


def test_a_variable_that_a_step_returns_is_the_variable(any_strategy: Strategy) -> None:
    with any_strategy.scope():
        variable = Variable(1.0)
    assert any_strategy.run(lambda: variable) is variable
    assert any_strategy.run(lambda: [variable])[0] is variable


# ------------------------------------------------------------------------------------------ merging


def test_a_merge_function_is_called_once_with_all_replicas_arguments(strategy: MirroredStrategy) -> None:
    calls: list[Any] = []
    shared = object()

    def merge(merged: Strategy, own: Any, same: Any, *, key: Any) -> Any:
        assert in_cross_replica_context()
        assert get_replica_context() is None
        calls.append((merged is strategy, own.values, same is shared, key.values))
        return PerReplica([10, 20, 30]), "for all"

    def step() -> Any:
        return replica().merge_call(merge, (replica_id(), shared), {"key": -replica_id()})

    result = strategy.run(step)
    assert calls == [(True, (0, 1, 2), True, (0, -1, -2))]
    assert result[0].values == (10, 20, 30)
    assert result[1] == "for all"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_can_run_inside_a_merge_function(any_strategy: Strategy, depth: int) -> None:
    size = any_strategy.num_replicas_in_sync

    def step(left: int) -> float:
        total = float(replica().all_reduce("SUM", 1.0))
        if left:
            replica().merge_call(lambda strategy: inner.append(strategy.run(step, (left - 1,))))
        return total + float(replica().all_reduce("SUM", 1.0))

    inner: list[Any] = []
    for _ in range(3):
        inner.clear()
        result = any_strategy.run(step, (depth,))
        for one in (result, *inner):
            assert set(any_strategy.experimental_local_results(one)) == {2.0 * size}
        assert len(inner) == depth


def test_a_failure_in_an_inner_step_is_that_of_the_outer_one(strategy: MirroredStrategy) -> None:
    def inner() -> None:
        if replica_id() == 1:
            raise KeyError("inner")
        replica().all_reduce("SUM", 1.0)

    def step() -> None:
        replica().merge_call(lambda merged: merged.run(inner) and None)

    for _ in range(5):
        with pytest.raises(KeyError, match="inner"):
            strategy.run(step)
        assert strategy.reduce("SUM", strategy.run(replica_id), axis=None) == 3


def test_merge_functions_of_different_code_are_a_mismatch(strategy: MirroredStrategy) -> None:
    def first(_: Strategy) -> None: ...

    def second(_: Strategy) -> None: ...

    for functions in ((first, second), (max, min), (np.add, np.multiply), (first, max)):
        with pytest.raises(Exception, match="the calls do not fit together: replica 0 calls merge_call"):
            strategy.run(
                lambda functions=functions: replica().merge_call(functions[replica_id() % 2], (1.0,))
            )
    assert strategy.run(lambda: 1) == 1


# ------------------------------------------------------------------------------- against plain NumPy


@pytest.mark.parametrize("size", range(2, 9))
def test_random_steps_give_what_numpy_gives(size: int) -> None:
    """Random collectives with random shapes, sparse ones and merges among them, in random order."""
    ops: dict[str, Callable[..., Array]] = {"SUM": np.sum, "MEAN": np.mean, "MAX": np.max, "MIN": np.min}
    ways = [None, ReductionToOneDevice(), HierarchicalCopyAllReduce(size)]
    with MirroredStrategy(cpus(size), ways[size % 3]) as strategy:
        for number in range(200 // 7 + 1):
            plan = random.Random(1000 * size + number)
            calls = [
                plan.choice(["all_reduce", "nested", "all_gather", "merge", "sparse", "nap"])
                for _ in range(6)
            ]
            op, shape = plan.choice(list(ops)), (plan.randrange(4), plan.randrange(1, 4))
            data = (
                np.random.default_rng([size, number])
                .integers(-9, 9, (size, len(calls), *shape))
                .astype(float)
            )

            def step(calls: list[str] = calls, op: str = op, data: Array = data) -> list[Any]:
                me, seen = replica_id(), list[Any]()
                for index, call in enumerate(calls):
                    mine = data[me, index]
                    if call == "all_reduce":
                        seen.append(replica().all_reduce(op, mine))
                    elif call == "nested":
                        both = replica().all_reduce(op, {"a": mine, "b": [mine * 2, float(me)]})
                        seen.append(both["a"] + both["b"][0] / 2 + both["b"][1])
                    elif call == "all_gather":
                        seen.append(replica().all_gather(mine[:, : 1 + me % mine.shape[1]], axis=1))
                    elif call == "merge":
                        seen.append(replica().merge_call(lambda s, x: s.reduce(op, x, axis=None), (mine,)))
                    elif call == "sparse":
                        rows = IndexedSlices(mine, np.arange(len(mine)), mine.shape)
                        seen.append(replica().all_reduce("SUM", rows).values)
                    elif me % 2:
                        time.sleep(0.0002)
                return seen

            expected: list[Any] = []
            for index, call in enumerate(calls):
                every = data[:, index]
                if call in ("all_reduce", "merge"):
                    expected.append(ops[op](every, axis=0))
                elif call == "nested":
                    expected.append(2 * ops[op](every, axis=0) + ops[op](np.arange(float(size))))
                elif call == "all_gather":
                    width = every.shape[2]
                    expected.append(
                        np.concatenate([e[:, : 1 + r % width] for r, e in enumerate(every)], axis=1)
                    )
                elif call == "sparse":
                    expected.append(np.concatenate(list(every)))
            result = [strategy.experimental_local_results(leaf) for leaf in strategy.run(step)]
            for rank in range(size):
                seen = [leaf[rank] if len(leaf) > 1 else leaf[0] for leaf in result]
                assert len(seen) == len(expected)
                for one, other in zip(seen, expected, strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-14, atol=1e-12)
