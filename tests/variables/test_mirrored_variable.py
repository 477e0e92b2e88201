"""Equal copies; the whole matrix of writes is in test_writes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatchError, IndexedSlices
from strategies import MirroredStrategy, get_replica_context
from variables import LocalVariable, Mirrored, MirroredVariable, PerReplica, Variable


@pytest.fixture
def strategy() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


def made(strategy: MirroredStrategy, initial: Any = 1.0, **kwargs: Any) -> Variable:
    with strategy.scope():
        return Variable(initial, name="w", **kwargs)


def replica_id() -> int:
    replica = get_replica_context()
    assert replica is not None
    return replica.replica_id_in_sync_group


def test_there_is_a_copy_on_every_device(strategy: MirroredStrategy) -> None:
    variable = made(strategy)
    assert isinstance(variable, MirroredVariable)
    assert [str(copy.device) for copy in variable.copies] == ["cpu:0", "cpu:1", "cpu:2"]
    assert strategy.experimental_local_results(variable) == variable.components
    assert all(copy.distributed is variable for copy in variable.copies)
    assert not np.shares_memory(variable.copies[0].value(), variable.copies[1].value())


def test_a_replica_reads_its_own_copy_itself(strategy: MirroredStrategy) -> None:
    variable = made(strategy, np.zeros(2))
    assert isinstance(variable, MirroredVariable)
    seen: dict[int, Any] = {}

    def step() -> None:
        seen[replica_id()] = variable.value()

    strategy.run(step)
    for replica, array in seen.items():
        assert np.shares_memory(array, variable.copies[replica].value())


def test_a_step_sees_its_own_writes(strategy: MirroredStrategy) -> None:
    variable = made(strategy, 0.0, aggregation="SUM")

    def step() -> list[float]:
        seen = []
        for _ in range(3):
            variable.assign_add(float(replica_id()))
            seen.append(float(variable))
        return seen

    for values in strategy.experimental_local_results(strategy.run(step)):
        assert values == [3, 6, 9]


def test_writes_of_different_methods_by_different_replicas_are_a_mismatch(strategy: MirroredStrategy) -> None:
    variable = made(strategy, 0.0, aggregation="SUM")

    def step() -> None:
        (variable.assign_add if replica_id() else variable.assign)(1.0)

    with pytest.raises(
        CollectiveMismatchError, match="replica 0 calls assign 'w'; replica 1 calls assign_add 'w'"
    ):
        strategy.run(step)
    assert [copy.numpy() for copy in variable.components] == [0, 0, 0]


def test_writes_to_different_variables_at_once_are_a_mismatch(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        first, second = (Variable(0.0, name=name, aggregation="SUM") for name in "ab")

    with pytest.raises(
        CollectiveMismatchError, match="replica 0 calls assign 'a'; replica 1 calls assign 'b'"
    ):
        strategy.run(lambda: (second if replica_id() else first).assign(1.0))


def test_what_is_already_identical_needs_neither_aggregation_nor_a_meeting(
    strategy: MirroredStrategy,
) -> None:
    variable = made(strategy, 0.0)
    strategy.run(lambda: variable.assign(5.0, already_identical=True))
    assert [copy.numpy() for copy in variable.components] == [5, 5, 5]


def test_an_integer_sum_that_overflows_raises_and_changes_nothing(strategy: MirroredStrategy) -> None:
    variable = made(strategy, np.zeros(2, np.int8), aggregation="SUM")
    with pytest.raises(OverflowError, match="SUM into out=int8: the result reaches from 300 to 300"):
        strategy.run(lambda: variable.assign(np.full(2, 100, np.int8)))
    assert all(copy.numpy().tolist() == [0, 0] for copy in variable.components)


def test_a_half_precision_sum_is_rounded_once(strategy: MirroredStrategy) -> None:
    variable = made(strategy, np.zeros(1, np.float16), aggregation="SUM")
    strategy.run(lambda: variable.assign([2048.0 if replica_id() == 0 else 1.0]))
    assert variable.numpy()[0] == 2050  # 2048 + 1 is 2048 in half precision


def test_replicas_scatter_different_numbers_of_rows(strategy: MirroredStrategy) -> None:
    variable = made(strategy, np.zeros((4, 1)), aggregation="SUM")
    strategy.run(
        lambda: variable.scatter_add(IndexedSlices(np.ones((replica_id(), 1)), np.arange(replica_id())))
    )
    for copy in variable.components:
        assert copy.numpy().tolist() == [[2], [1], [0], [0]]


def test_a_mirrored_is_written_copy_by_copy(strategy: MirroredStrategy) -> None:
    variable = made(strategy, np.zeros(2))
    variable.assign(Mirrored([np.full(2, 4.0)] * 3))
    assert all(copy.numpy().tolist() == [4, 4] for copy in variable.components)
    with pytest.raises(ValueError, match="need shape"):
        variable.assign(Mirrored([np.zeros(3)] * 3))


def test_a_per_replica_across_replicas_is_refused_as_the_copies_would_differ(
    strategy: MirroredStrategy,
) -> None:
    variable = made(strategy)
    with pytest.raises(
        ValueError,
        match=r"w\.assign: got a PerReplica, which would make the copies differ; .* reduce it first",
    ):
        variable.assign(PerReplica([1.0, 2.0, 3.0]))


def test_an_assigned_result_of_one_step_is_a_snapshot(strategy: MirroredStrategy) -> None:
    variable = made(strategy, np.zeros(2), aggregation="SUM")
    first = strategy.run(lambda: variable.assign_add(np.ones(2)))
    strategy.run(lambda: variable.assign_add(np.ones(2), read_value=False))
    assert all(part.tolist() == [3, 3] for part in first.values)


def test_the_copies_stay_equal_to_the_last_bit_through_many_steps(strategy: MirroredStrategy) -> None:
    variable = made(strategy, np.zeros(100, np.float32), aggregation="MEAN")
    expected = np.zeros(100, np.float32)
    for step in range(50):
        noise = [np.random.default_rng([step, r]).normal(size=100).astype(np.float32) for r in range(3)]
        strategy.run(partial(lambda noise: variable.assign_add(noise[replica_id()], read_value=False), noise))
        expected += (noise[0] + noise[1] + noise[2]) / np.float32(3)
    assert {copy.numpy().tobytes() for copy in variable.components} == {expected.tobytes()}


def test_results_regroup_into_the_variable_itself(strategy: MirroredStrategy) -> None:
    variable = made(strategy)
    assert strategy.run(lambda: variable) is variable
    assert isinstance(variable, MirroredVariable)
    own = strategy.run(lambda: variable.copies[replica_id()])
    assert own is variable
    assert all(isinstance(copy, LocalVariable) for copy in variable.copies)
