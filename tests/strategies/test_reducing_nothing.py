"""``strategy.reduce`` along axes that have no elements, compared with what NumPy says of none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strategies as xd
from strategies.strategy import Strategy
from tests.jobs import run_in_job, strategy_of

MAKERS: dict[str, Callable[[], Strategy]] = {
    "1 replica": lambda: xd.OneDeviceStrategy("cpu:0"),
    "2 replicas": lambda: xd.MirroredStrategy(["cpu:0", "cpu:1"]),
}


def per_replica(strategy: Strategy, array: Any) -> Any:
    local = len(strategy.devices)
    return xd.PerReplica([array] * local)


def check_nothing(strategy: Strategy) -> str:
    """Asserts what none reduces to; what MAX says of it."""
    told = ""
    for op, numpy in (("MAX", np.max), ("MIN", np.min)):
        for shape, axes in (
            ((0, 3), 0),
            ((0, 3), -2),
            ((0, 3), (0, 1)),
            ((3, 0), (0, 1)),
            ((0,), 0),
            ((0, 0), 0),
        ):
            array = np.zeros(shape)
            with pytest.raises(ValueError, match="zero-size"):
                numpy(array, axis=axes)
            with pytest.raises(ValueError, match=r"no elements along axis .* on any replica") as caught:
                strategy.reduce(op, per_replica(strategy, array), axis=axes)
            told = str(caught.value)
        for array, axis in ((np.zeros((0, 3)), 1), (np.zeros((2, 0, 3)), 2)):
            result = strategy.reduce(op, per_replica(strategy, array), axis=axis)
            assert result.shape == numpy(array, axis=axis).shape
    nothing = per_replica(strategy, np.zeros((0, 3)))
    assert strategy.reduce("SUM", nothing, axis=0).tolist() == [0.0] * 3
    assert np.isnan(strategy.reduce("MEAN", nothing, axis=0)).all()
    with pytest.raises(np.exceptions.AxisError):
        strategy.reduce("MAX", nothing, axis=2)
    return told


@pytest.mark.parametrize("kind", MAKERS)
def test_the_largest_of_nothing_is_refused_where_numpy_refuses_it(kind: str) -> None:
    assert check_nothing(MAKERS[kind]()) == (
        "reduce: got float64 of shape (0, 0), with no elements along axis 0 on any replica, and MIN; need at least one element — leave out "
        "what is empty, or take SUM, which of none is 0"
    )


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_so_it_is_in_all_processes_and_they_go_on_together(num_replicas: int) -> None:
    def body() -> Any:
        strategy = strategy_of(num_replicas)
        told = check_nothing(strategy)
        return told, strategy.reduce("SUM", per_replica(strategy, np.ones(1)), axis=0)

    told = run_in_job(2, body)
    assert told[0] == told[1]
    assert told[0][1] == 2.0 * num_replicas


def test_a_replica_without_elements_counts_for_nothing_beside_others() -> None:
    strategy = MAKERS["2 replicas"]()
    some = xd.PerReplica([np.zeros((0, 2)), np.array([[-1.0, -3.0], [-2.0, -1.0]])])
    assert strategy.reduce("MAX", some, axis=0).tolist() == [-1.0, -1.0]
    assert strategy.reduce("MIN", some, axis=0).tolist() == [-2.0, -3.0]
    with pytest.raises(ValueError, match="need one shape"):
        strategy.reduce("MAX", some, axis=1)
