"""Own copies, aggregated when read; the whole matrix of writes is in test_writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strategies import MirroredStrategy, get_replica_context
from variables import SyncOnReadVariable, Variable


@pytest.fixture
def strategy() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


def made(strategy: MirroredStrategy, initial: Any = 0.0, **kwargs: Any) -> Variable:
    with strategy.scope():
        return Variable(initial, name="metric", synchronization="ON_READ", **kwargs)


def replica_id() -> int:
    replica = get_replica_context()
    assert replica is not None
    return replica.replica_id_in_sync_group


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("SUM", 6.0), ("MEAN", 2.0), ("ONLY_FIRST_REPLICA", 1.0)]
)
def test_a_read_across_replicas_aggregates(
    strategy: MirroredStrategy, aggregation: str, expected: float
) -> None:
    variable = made(strategy, aggregation=aggregation)
    assert isinstance(variable, SyncOnReadVariable)
    strategy.run(lambda: variable.assign_add(replica_id() + 1.0) and None)
    for read in (variable.value, variable.read_value, variable.numpy, lambda: variable + 0):
        assert read() == expected
        with strategy.scope():
            assert read() == expected
        inside: list[Any] = []

        def merge(_: object, read: Any = read, inside: list[Any] = inside) -> None:
            inside.append(read())

        strategy.run(lambda merge=merge: get_replica_context().merge_call(merge))  # type: ignore[union-attr]  # in a step
        assert inside == [expected]


def test_without_an_aggregation_a_read_across_replicas_says_what_to_do(strategy: MirroredStrategy) -> None:
    variable = made(strategy)
    with pytest.raises(
        ValueError, match=r"metric: read across replicas.*experimental_local_results\(variable\)"
    ):
        variable.value()
    assert [float(one) for one in strategy.experimental_local_results(variable)] == [0, 0, 0]


def test_a_replica_reads_its_own_copy(strategy: MirroredStrategy) -> None:
    variable = made(strategy)

    def step() -> float:
        variable.assign(float(replica_id()))
        return float(variable) * 10

    assert strategy.experimental_local_results(strategy.run(step)) == (0, 10, 20)


def test_every_copy_starts_from_the_initial_value(strategy: MirroredStrategy) -> None:
    assert made(strategy, 2.0, aggregation="SUM").numpy() == 6
    assert made(strategy, 2.0, aggregation="MEAN").numpy() == 2


def test_replicas_need_not_write_equally_often(strategy: MirroredStrategy) -> None:
    variable = made(strategy, aggregation="SUM")

    def step() -> None:
        for _ in range(replica_id()):
            variable.assign_add(1.0)

    strategy.run(step)
    assert variable.numpy() == 3


def test_a_sum_is_assigned_in_equal_shares_and_added_to_once(strategy: MirroredStrategy) -> None:
    variable = made(strategy, aggregation="SUM")
    variable.assign(6.0)
    assert [float(one) for one in variable.components] == [2, 2, 2]
    assert variable.assign_add(1.0) == 7
    assert variable.assign_sub(3.0) == 4
    assert variable.numpy() == 4


def test_integers_lose_the_rest_of_an_equal_share(strategy: MirroredStrategy) -> None:
    variable = made(strategy, 0, dtype=np.int64, aggregation="SUM")
    variable.assign(-7)
    assert [int(one) for one in variable.components] == [-2, -2, -2]


def test_a_read_aggregate_is_the_callers_own_array(strategy: MirroredStrategy) -> None:
    variable = made(strategy, np.ones(2), aggregation="SUM")
    read = variable.read_value()
    read[...] = 0
    assert variable.numpy().tolist() == [3, 3]


def test_a_large_integer_sum_of_a_narrow_dtype_raises_when_read(strategy: MirroredStrategy) -> None:
    variable = made(strategy, 100, dtype=np.int8, aggregation="SUM")
    with pytest.raises(OverflowError, match="the result reaches from 300 to 300, int8 from -128 to 127"):
        variable.numpy()


def test_it_can_be_reduced_as_any_distributed_value(strategy: MirroredStrategy) -> None:
    variable = made(strategy, aggregation="NONE")
    strategy.run(lambda: variable.assign(float(replica_id())) and None)
    assert strategy.reduce("SUM", variable, axis=None) == 3
    assert strategy.reduce("MAX", variable, axis=None) == 2


def test_reading_it_in_a_step_after_all_reduce_is_how_replicas_agree(strategy: MirroredStrategy) -> None:
    variable = made(strategy, np.zeros(2))

    def step() -> Any:
        variable.assign(np.full(2, float(replica_id())))
        context = get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", variable)

    for part in strategy.experimental_local_results(strategy.run(step)):
        assert part.tolist() == [3, 3]
