"""Averages of weights over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strategies import (
    SGD,
    CentralStorageStrategy,
    ExponentialMovingAverage,
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    Variable,
    assert_replicas_equal,
)

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "one_device": OneDeviceStrategy,
    "mirrored_2": lambda: MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored_5": lambda: MirroredStrategy([f"cpu:{i}" for i in range(5)]),
    "central_3": lambda: CentralStorageStrategy([f"cpu:{i}" for i in range(3)]),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Any:
    with STRATEGIES[request.param]() as strategy:
        yield strategy


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("where", ["in the step", "between steps"])
def test_averages_follow_the_formula_once_for_all_replicas(
    strategy: Strategy, where: str, corrects: bool
) -> None:
    with strategy.scope():
        w, b = Variable(np.array([1.0, 2.0])), Variable(np.float64(3))
        optimizer = SGD(1.0)
        averages = ExponentialMovingAverage([w, b], 0.8, num_updates_correction=corrects)
    share = 1 / strategy.num_replicas_in_sync

    def step(number: int) -> None:
        optimizer.apply_gradients([(np.array([share, -share * number]), w), (share, b)])
        if where == "in the step":
            averages.update()

    expected_w, expected_b, now_w, now_b = np.array([1.0, 2.0]), 3.0, np.array([1.0, 2.0]), 3.0
    for number in range(4):
        strategy.run(step, (number,))
        if where == "between steps":
            averages.update()
        now_w, now_b = now_w - [1, -number], now_b - 1
        momentum = min(0.8, (1 + number) / (10 + number)) if corrects else 0.8
        expected_w = momentum * expected_w + (1 - momentum) * now_w
        expected_b = momentum * expected_b + (1 - momentum) * now_b
    np.testing.assert_allclose(averages.average(w), expected_w)
    np.testing.assert_allclose(averages.average(b), expected_b)
    assert averages.num_updates == 4


def test_averages_stand_in_for_the_values_in_a_block_and_only_there(strategy: Strategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros(3, np.float32))
        averages = ExponentialMovingAverage([w], 0.5)
    w.assign(np.full(3, 4, np.float32))
    averages.update()
    with averages.swapped():
        np.testing.assert_array_equal(w.read_value(), [2, 2, 2])
        assert_replicas_equal(w)
    np.testing.assert_array_equal(w.read_value(), [4, 4, 4])
    with pytest.raises(KeyError), averages.swapped():
        raise KeyError("evaluation failed")
    np.testing.assert_array_equal(w.read_value(), [4, 4, 4])
    assert_replicas_equal(w)


def test_an_average_is_a_copy_in_the_variables_dtype() -> None:
    w = Variable(np.ones(2, np.float16))
    averages = ExponentialMovingAverage([w], 0.9)
    average = averages.average(w)
    assert average.dtype == np.float16
    average[:] = 100
    np.testing.assert_array_equal(averages.average(w), [1, 1])


def test_the_state_goes_on_where_it_was(strategy: Strategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros(2))
        first = ExponentialMovingAverage([w], 0.9, num_updates_correction=True)
    for value in (1.0, 2.0):
        w.assign(np.full(2, value))
        first.update()
    state = first.state()
    second = ExponentialMovingAverage([w], 0.9, num_updates_correction=True)
    second.restore(state)
    for averages in (first, second):
        averages.update()
    assert second.num_updates == 3
    np.testing.assert_array_equal(second.average(w), first.average(w))


def test_a_state_of_other_variables_is_refused() -> None:
    first = ExponentialMovingAverage([Variable(np.zeros(2))])
    second = ExponentialMovingAverage([Variable(np.zeros(3))])
    with pytest.raises(ValueError, match="got averages of other shapes than the variables have"):
        second.restore(first.state())


def test_a_variable_that_is_not_averaged_is_named() -> None:
    averages = ExponentialMovingAverage([Variable(np.zeros(2))])
    with pytest.raises(ValueError, match="got stranger; it is not among the variables"):
        averages.average(Variable(np.zeros(2), name="stranger"))


@pytest.mark.parametrize("momentum", [-0.1, 1.0, np.nan])
def test_a_momentum_out_of_range_is_refused(momentum: float) -> None:
    with pytest.raises(ValueError, match="need a number from 0 to below 1"):
        ExponentialMovingAverage([Variable(0.0)], momentum)


def test_no_variables_are_refused() -> None:
    with pytest.raises(ValueError, match="of 0 variables"):
        ExponentialMovingAverage([])
