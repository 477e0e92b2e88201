"""One copy for all replicas; the whole matrix of writes is in test_writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strategies import CentralStorageStrategy, get_replica_context
from variables import CentralVariable, LocalVariable, PerReplica, Variable


@pytest.fixture
def strategy() -> CentralStorageStrategy:
    return CentralStorageStrategy(["cpu:0", "cpu:1", "cpu:2"], "cpu:5")


def replica_id() -> int:
    replica = get_replica_context()
    assert replica is not None
    return replica.replica_id_in_sync_group


def test_it_lies_once_on_the_parameter_device(strategy: CentralStorageStrategy) -> None:
    with strategy.scope():
        variable = Variable(np.zeros(2), name="w")
    assert isinstance(variable, CentralVariable)
    (component,) = variable.components
    assert isinstance(component, LocalVariable)
    assert str(component.device) == "cpu:5"
    assert component.distributed is variable
    assert strategy.experimental_local_results(variable) == (variable,)


def test_all_replicas_read_the_same_array(strategy: CentralStorageStrategy) -> None:
    with strategy.scope():
        variable = Variable(np.zeros(2))
    seen: list[Any] = []
    strategy.run(lambda: seen.append(variable.value()))
    assert all(array is seen[0] for array in seen)


@pytest.mark.parametrize(("aggregation", "added"), [("SUM", 6.0), ("MEAN", 2.0), ("ONLY_FIRST_REPLICA", 1.0)])
def test_replicas_writes_are_aggregated_and_made_once(
    strategy: CentralStorageStrategy, aggregation: str, added: float
) -> None:
    with strategy.scope():
        variable = Variable(10.0, aggregation=aggregation)
    strategy.run(lambda: variable.assign_add(replica_id() + 1.0) and None)
    assert variable.numpy() == 10 + added


def test_one_compute_device_makes_plain_variables() -> None:
    strategy = CentralStorageStrategy(["cpu:1"])
    assert str(strategy.parameter_device) == "cpu:1"
    with strategy.scope():
        variable = Variable(1.0)
    assert isinstance(variable, LocalVariable)
    strategy.run(lambda: variable.assign_add(1.0) and None)
    assert variable.numpy() == 2


def test_an_update_gets_the_component_once_and_no_per_replica(strategy: CentralStorageStrategy) -> None:
    with strategy.scope():
        variable = Variable(1.0, name="w")
    calls: list[Any] = []
    strategy.update(variable, calls.append)
    assert calls == [*variable.components]
    with pytest.raises(
        ValueError, match="update: got a PerReplica for w, which has one component; reduce it first"
    ):
        strategy.update(variable, lambda component, part: None, (PerReplica([1, 2, 3]),))


def test_assigning_across_replicas_returns_the_variable(strategy: CentralStorageStrategy) -> None:
    with strategy.scope():
        variable = Variable(1.0)
    assert variable.assign(3.0) is variable
    assert variable.assign_add(3.0).numpy() == 6
