"""Dynamic loss scaling: all replicas skip an update, or none does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from strategies import (
    SGD,
    Adam,
    Checkpoint,
    CommunicationOptions,
    IndexedSlices,
    LossScaleOptimizer,
    MirroredStrategy,
    PerReplica,
    Variable,
    assert_replicas_equal,
    get_replica_context,
)


@pytest.fixture(params=[1, 2, 3, 5], ids="{}_replicas".format)
def strategy(request: pytest.FixtureRequest) -> Iterator[MirroredStrategy]:
    options = CommunicationOptions(timeout_seconds=20)
    devices = [f"cpu:{i}" for i in range(request.param)]
    with MirroredStrategy(devices, communication_options=options) as strategy:
        yield strategy


def replica_id() -> int:
    replica = get_replica_context()
    assert replica is not None
    return replica.replica_id_in_sync_group


def test_one_replica_that_overflows_makes_all_skip() -> None:
    """B72."""
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            v = Variable(np.array([1.0]))
            optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=8.0)
        gradients = PerReplica([np.array([8.0]), np.array([np.inf])])
        made = strategy.run(lambda g: optimizer.apply_gradients([(g, v)]), (gradients,))
        assert made is False
        np.testing.assert_array_equal(v.read_value(), [1.0])
        assert (optimizer.loss_scale, optimizer.skipped_steps, optimizer.iterations) == (4.0, 1, 0)
        assert_replicas_equal(v)


@pytest.mark.parametrize("shape", [(3,), (500, 500)], ids=["small", "shared"])
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_an_update_is_skipped_wherever_and_whatever_is_not_finite(
    strategy: MirroredStrategy, wrong: float, shape: tuple[int, ...]
) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        w, other = Variable(np.ones(shape)), Variable(np.ones(2))
        optimizer = LossScaleOptimizer(Adam(0.1), initial_scale=16.0)

    def step(where: int) -> bool:
        gradient = np.ones(shape)
        if replica_id() == where:
            gradient.flat[-1] = wrong
        return optimizer.apply_gradients([(np.ones(2), other), (gradient, w)])

    for number in range(n):
        made = strategy.run(step, (number,))
        assert made is False
    np.testing.assert_array_equal(w.read_value(), np.ones(shape))
    np.testing.assert_array_equal(other.read_value(), [1, 1])
    np.testing.assert_array_equal(optimizer.inner_optimizer.slot(other, "momentum"), [0, 0])
    assert optimizer.loss_scale == 16.0 / 2**n
    assert optimizer.skipped_steps == n
    made = strategy.run(step, (n,))
    assert made is True
    assert optimizer.iterations == 1
    assert_replicas_equal([w, other])


def test_gradients_are_divided_by_the_scale_they_were_multiplied_by(strategy: MirroredStrategy) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        w, table = Variable(np.zeros(2)), Variable(np.zeros((3, 1)))
        optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=4.0, dynamic_growth_steps=2)

    def step() -> None:
        g = optimizer.scale_loss(np.array([1.0, 2.0]))
        slices = IndexedSlices(optimizer.scale_loss(np.array([[3.0], [1.0]])), [2, 2], (3, 1))
        optimizer.apply_gradients([(g, w), (slices, table)])

    for _ in range(3):  # the scale doubles on the way
        strategy.run(step)
    np.testing.assert_array_equal(w.read_value(), [-3 * n, -6 * n])
    np.testing.assert_array_equal(table.read_value(), [[0], [0], [-12 * n]])
    assert optimizer.loss_scale == 8.0


def test_the_scale_doubles_after_enough_updates_in_a_row() -> None:
    w = Variable(np.zeros(1))
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=2.0, dynamic_growth_steps=3)
    scales = []
    for value in (1, 1, np.nan, 1, 1, 1, 1, 1, 1):
        optimizer.apply_gradients([(np.array([value]), w)])
        scales.append(optimizer.loss_scale)
    assert scales == [2, 2, 1, 1, 1, 2, 2, 2, 4]
    assert (optimizer.skipped_steps, optimizer.iterations) == (1, 8)


def test_a_loss_that_is_never_finite_does_not_bring_the_scale_to_zero() -> None:
    w = Variable(np.zeros(1))
    optimizer = LossScaleOptimizer(SGD(1.0))
    for _ in range(100):
        assert not optimizer.apply_gradients([(np.array([np.nan]), w)])
    assert optimizer.loss_scale == 2.0**-24
    np.testing.assert_array_equal(w.read_value(), [0])


def test_sparse_gradients_decide_too_and_none_does_not() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            table, unused = Variable(np.zeros((3, 1))), Variable(np.zeros(1))
            optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=2.0)

        def step(value: float) -> bool:
            own = IndexedSlices(np.array([[value if replica_id() else 2.0]]), [1], (3, 1))
            return optimizer.apply_gradients([(own, table), (None, unused)])

        strategy.run(step, (np.inf,))
        np.testing.assert_array_equal(table.read_value(), np.zeros((3, 1)))
        strategy.run(step, (4.0,))
        np.testing.assert_array_equal(table.read_value(), [[0], [-6], [0]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clipvalue": 2.0}, [-2, -2]),
        ({"clipnorm": 2.5}, [-1.5, -2]),
        ({"global_clipnorm": 2.5}, [-1.5, -2]),
        ({"global_clipnorm": 6.0}, [-3, -4]),
    ],
    ids=str,
)
def test_bounds_are_those_of_gradients_divided_by_the_scale(
    options: dict[str, Any], expected: list[float]
) -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            w = Variable(np.zeros(2))
            optimizer = LossScaleOptimizer(SGD(1.0, **options), initial_scale=1024.0)
        share = np.array([3.0, 4.0]) * 1024 / 2
        strategy.run(lambda: optimizer.apply_gradients([(share, w)]))
        np.testing.assert_allclose(w.read_value(), expected)


def test_half_precision_gradients_too_small_by_themselves_arrive() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            w = Variable(np.zeros(1, np.float32))
            optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=2.0**15)
        true = 2.0**-26  # zero in float16
        strategy.run(
            lambda: optimizer.apply_gradients([(np.array([true * optimizer.loss_scale], np.float16), w)])
        )
        np.testing.assert_array_equal(w.read_value(), [np.float32(-2 * true)])


def test_the_scale_and_its_counts_are_restored(tmp_path: Any) -> None:
    def build() -> tuple[Variable, LossScaleOptimizer]:
        return Variable(np.zeros(1), name="w"), LossScaleOptimizer(
            Adam(0.1), initial_scale=8.0, dynamic_growth_steps=3
        )

    def steps(w: Variable, optimizer: LossScaleOptimizer, values: list[float]) -> None:
        for value in values:
            optimizer.apply_gradients([(np.array([value]), w)])

    w, optimizer = build()
    steps(w, optimizer, [1, np.inf, 1, 1])
    path = Checkpoint(w=w, optimizer=optimizer).save(str(tmp_path / "saved"))
    again, restored = build()
    Checkpoint(w=again, optimizer=restored).restore(path).assert_consumed()
    assert (restored.loss_scale, restored.skipped_steps, restored.iterations) == (4.0, 1, 3)
    for each in ((w, optimizer), (again, restored)):
        steps(*each, [2, 3])
    assert restored.loss_scale == optimizer.loss_scale == 8.0  # one more update made it three in a row
    np.testing.assert_array_equal(again.read_value(), w.read_value())


@pytest.mark.parametrize(
    "options", [{"initial_scale": 0.0}, {"dynamic_growth_steps": 0}, {"initial_scale": -1.0}]
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"LossScaleOptimizer: got initial_scale=.*need both above 0"):
        LossScaleOptimizer(SGD(1.0), **options)
