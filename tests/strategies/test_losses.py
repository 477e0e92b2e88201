"""Losses of a batch that is spread over replicas, against the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    compute_average_loss,
    from_arrays,
    scale_regularization_loss,
)
from variables import PerReplica, ReplicaContextError


def mirrored(size: int = 2) -> MirroredStrategy:
    return MirroredStrategy([f"cpu:{i}" for i in range(size)])


def reduced(strategy: Strategy, *losses: Any, **settings: Any) -> Any:
    part = strategy.run(lambda loss: compute_average_loss(loss, **settings), (PerReplica(losses),))
    return strategy.reduce("SUM", part)


def test_b01_the_sum_of_the_parts_is_the_mean_over_the_global_batch() -> None:
    whole = np.array([1.0, 3.0, 5.0, 7.0])
    with mirrored() as strategy, OneDeviceStrategy() as one:
        assert reduced(strategy, whole[:2], whole[2:], global_batch_size=4) == 4.0
        assert reduced(strategy, whole[:2], whole[2:]) == 4.0
        assert one.run(compute_average_loss, (whole,)) == 4.0
    assert compute_average_loss(whole) == 4.0


def test_b22_an_empty_share_adds_nothing() -> None:
    with mirrored() as strategy:
        assert reduced(strategy, np.array([2.0, 6.0, 1.0]), np.zeros(0)) == 3.0
        assert reduced(strategy, np.array([2.0]), np.zeros(0), global_batch_size=1) == 2.0
        assert reduced(strategy, np.zeros(0), np.zeros(0)) == 0.0
        batches = strategy.distribute_dataset(from_arrays(np.arange(5.0)).batch(4))
        parts = [strategy.reduce("SUM", strategy.run(compute_average_loss, (batch,))) for batch in batches]
        assert parts == [1.5, 4.0]


def test_weights_count_for_examples_and_do_not_change_what_is_divided_by() -> None:
    with mirrored() as strategy:
        losses = PerReplica([np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[5.0, 6.0]])])
        weights = PerReplica([np.array([1.0, 0.0]), np.array([2.0])])
        part = strategy.run(compute_average_loss, (losses, weights))
        assert strategy.reduce("SUM", part) == pytest.approx((1 + 2 + 2 * (5 + 6)) / 3)


def test_half_precision_is_added_up_in_float32_and_integers_take_fractional_weights() -> None:
    half = np.full(1000, 100, np.float16)  # whose sum float16 can't hold
    with mirrored() as strategy:
        part = strategy.run(lambda: compute_average_loss(half))
        assert [p.dtype for p in strategy.local_results(part)] == [np.float16] * 2
        assert strategy.reduce("SUM", part) == 100
        part = strategy.run(lambda: scale_regularization_loss(half))
        assert [float(p) for p in strategy.local_results(part)] == [np.float16(50000)] * 2
    assert compute_average_loss(np.array([1, 3]), sample_weight=[0.5, 1.5]) == 2.5


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        (3.0, {}, "got a scalar; need one loss for each example"),
        ([1.0], {"global_batch_size": 0}, "got global_batch_size=0; need a number above 0"),
    ],
)
def test_what_is_no_batch_is_refused(loss: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_average_loss(loss, **settings)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "one_device": OneDeviceStrategy,
    "mirrored_2": mirrored,
    "mirrored_5": lambda: mirrored(5),
    "central_2": lambda: CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_regularization_loss_counts_once_in_the_sum_over_replicas(kind: str) -> None:
    with STRATEGIES[kind]() as strategy:
        part = strategy.run(lambda: scale_regularization_loss(np.array([[1.0, 2.0], [3.0, 4.0]])))
        assert np.sum(strategy.local_results(part)) == pytest.approx(10)
        assert np.sum(
            strategy.local_results(strategy.run(scale_regularization_loss, (0.5,)))
        ) == pytest.approx(0.5)


def test_a_regularization_loss_is_whole_in_plain_code_and_refused_across_replicas() -> None:
    assert scale_regularization_loss([1.0, 2.0]) == 3.0
    refused = pytest.raises(ReplicaContextError, match="scale_regularization_loss: called across replicas")
    with mirrored() as strategy, strategy.scope(), refused:
        scale_regularization_loss(1.0)
