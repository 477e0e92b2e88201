"""Sparse gradients: the same numbers as dense ones where a rule allows, and rows without a gradient left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from strategies import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    CommunicationOptions,
    IndexedSlices,
    MirroredStrategy,
    Optimizer,
    RMSprop,
    Strategy,
    Variable,
    assert_replicas_equal,
    get_replica_context,
    to_dense,
)

Array = np.ndarray[Any, Any]
SHAPE = (9, 4)
WHOLE = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


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


def random_slices(rng: np.random.Generator, num_rows: int, dtype: Any = np.float32) -> IndexedSlices:
    return IndexedSlices(
        rng.normal(size=(num_rows, SHAPE[1])).astype(dtype), rng.integers(0, SHAPE[0], num_rows), SHAPE
    )


def train(strategy: Strategy, make: Callable[[], Optimizer], steps: list[list[Any]]) -> tuple[Array, Any]:
    """The table after some steps, each given by the replicas' gradients, and the slots."""
    with strategy.scope():
        table = Variable(WHOLE)
        optimizer = make()
    for own in steps:
        strategy.run(lambda: optimizer.apply_gradients([(own[replica_id()], table)]))  # noqa: B023  # called at once
    assert_replicas_equal(table)
    return table.read_value(), {name: optimizer.slot(table, name).copy() for name in optimizer.rule.slots}


EXACT: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: SGD(0.1),
    "sgd_mean": lambda: SGD(0.1, gradient_aggregation="MEAN"),
    "adagrad": lambda: Adagrad(0.1),
    "adagrad_clipped": lambda: Adagrad(0.1, clipvalue=0.5),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_rule_that_ignores_zeros_gives_the_same_bits_as_with_dense_gradients(
    strategy: Strategy, name: str
) -> None:
    rng = np.random.default_rng(1)
    steps: list[list[Any]] = [
        [random_slices(rng, int(rng.integers(0, 20))) for _ in range(strategy.num_replicas_in_sync)]
        for _ in range(5)
    ]
    sparse, sparse_slots = train(strategy, EXACT[name], steps)
    dense, dense_slots = train(strategy, EXACT[name], [[to_dense(s) for s in own] for own in steps])
    assert sparse.tobytes() == dense.tobytes()
    for slot, values in sparse_slots.items():
        assert values.tobytes() == dense_slots[slot].tobytes()


LAZY: dict[str, Callable[[], Optimizer]] = {
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "nesterov": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: Adam(0.1),
    "amsgrad": lambda: Adam(0.1, amsgrad=True),
    "adamw": lambda: AdamW(0.1, weight_decay=0.2),
    "rmsprop": lambda: RMSprop(0.1, momentum=0.5, centered=True),
    "decayed": lambda: SGD(0.1, weight_decay=0.2),
}


@pytest.mark.parametrize("name", LAZY)
def test_rows_without_a_gradient_and_their_slots_stay_and_the_others_change_as_by_themselves(
    strategy: Strategy, name: str
) -> None:
    rng = np.random.default_rng(2)
    n = strategy.num_replicas_in_sync
    touched = [1, 4, 8]
    steps: list[list[Any]] = [
        [IndexedSlices(rng.normal(size=(3, 4)).astype(np.float32), touched, SHAPE) for _ in range(n)]
        for _ in range(4)
    ]
    table, slots = train(strategy, LAZY[name], steps)
    dense, dense_slots = train(strategy, LAZY[name], [[to_dense(s) for s in own] for own in steps])
    np.testing.assert_array_equal(table[touched], dense[touched])
    rest = [0, 2, 3, 5, 6, 7]
    np.testing.assert_array_equal(table[rest], WHOLE[rest])
    for slot, values in slots.items():
        np.testing.assert_array_equal(values[touched], dense_slots[slot][touched])
        np.testing.assert_array_equal(values[rest], np.zeros((6, 4)))


def test_a_rows_slots_wait_for_its_next_gradient() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            table = Variable(np.zeros((2, 1)))
            optimizer = SGD(1.0, momentum=0.5)
        for row in (0, 1, 1, 0):
            one = IndexedSlices([[0.5]], [row], (2, 1))
            strategy.run(lambda: optimizer.apply_gradients([(one, table)]))  # noqa: B023  # called at once
        # Row 0: momentum -1, two steps of rest, then -1.5; as a dense gradient of zero would not have it.
        np.testing.assert_array_equal(table.read_value(), [[-2.5], [-2.5]])


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_rows_of_one_index_are_summed_first_within_and_between_replicas(name: str) -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            table = Variable(np.zeros((3, 1)))
            optimizer = SGD(1.0) if name == "sgd" else Adagrad(2.0, 7.0, epsilon=1e-12)
        own = [IndexedSlices([[3.0], [4.0]], [0, 0], (3, 1)), IndexedSlices([[-4.0]], [0], (3, 1))]
        strategy.run(lambda: optimizer.apply_gradients([(own[replica_id()], table)]))
        expected = -3.0 if name == "sgd" else -1.5  # -2 * 3 / sqrt(7 + 3 * 3)
        np.testing.assert_allclose(table.read_value(), np.array([[expected], [0], [0]]))


def test_replicas_may_have_sparse_dense_and_no_gradients_of_one_variable() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        with strategy.scope():
            table = Variable(np.zeros((3, 2)), name="table")
            optimizer = SGD(1.0)
        slices = IndexedSlices(np.array([[1.0, 2], [3, 4]]), [2, 2], (3, 2))
        own = [slices, np.full((3, 2), 10.0), None]
        with pytest.warns(UserWarning, match="table had no gradient on some replicas"):
            strategy.run(lambda: optimizer.apply_gradients([(own[replica_id()], table)]))
        np.testing.assert_array_equal(table.read_value(), [[-10, -10], [-10, -10], [-14, -16]])
        assert_replicas_equal(table)


def test_sparse_gradients_on_some_replicas_and_none_on_others_count_as_zero() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            table = Variable(np.zeros((3, 2)), name="table")
            optimizer = SGD(1.0)
        own = [IndexedSlices(np.array([[1.0, 2]]), [1], (3, 2)), None]
        with pytest.warns(UserWarning, match="table had no gradient"):
            strategy.run(lambda: optimizer.apply_gradients([(own[replica_id()], table)]))
        np.testing.assert_array_equal(table.read_value(), [[0, 0], [-1, -2], [0, 0]])


def test_no_rows_on_any_replica_change_nothing_but_the_count(strategy: Strategy) -> None:
    empty = [IndexedSlices(np.empty((0, 4), np.float32), [], SHAPE)] * strategy.num_replicas_in_sync
    with strategy.scope():
        table = Variable(WHOLE)
        optimizer = Adam(0.1)
    strategy.run(lambda: optimizer.apply_gradients([(empty[0], table)]))
    np.testing.assert_array_equal(table.read_value(), WHOLE)
    assert optimizer.iterations == 1


def test_no_rows_on_some_replicas_are_no_contribution() -> None:
    own = [IndexedSlices(np.empty((0, 4), np.float32), [], SHAPE), IndexedSlices(WHOLE[:1], [3], SHAPE)]
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        table, _ = train(strategy, lambda: SGD(1.0), [own])
    np.testing.assert_array_equal(table[3], WHOLE[3] - WHOLE[0])


@pytest.mark.parametrize("index_dtype", [np.int8, np.int32, np.int64, np.uint64])
def test_indices_of_any_integer_dtype_and_values_of_another_float_will_do(index_dtype: Any) -> None:
    values = np.random.default_rng(4).normal(size=(30, 4))
    indices = np.random.default_rng(5).integers(0, 9, 30).astype(index_dtype)
    own: list[Any] = [IndexedSlices(values, indices, SHAPE)]
    with MirroredStrategy(["cpu:0"]) as strategy:
        table, _ = train(strategy, lambda: SGD(1.0), [own])
    expected = WHOLE.astype(np.float64)
    np.subtract.at(expected, indices.astype(np.int64), values)
    np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row_shape", [(), (2, 3), (0,)], ids=["scalars", "matrices", "nothing"])
def test_rows_may_have_any_shape(row_shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(6)
    start, values = rng.normal(size=(5, *row_shape)), rng.normal(size=(8, *row_shape))
    indices = rng.integers(0, 5, 8)
    expected = start.copy()
    np.subtract.at(expected, indices, values)
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            table = Variable(start)
            optimizer = SGD(1.0)
        halves = IndexedSlices(values / 2, indices)
        strategy.run(lambda: optimizer.apply_gradients([(halves, table)]))
        np.testing.assert_allclose(table.read_value(), expected)


def test_a_large_table_with_few_popular_rows_gets_what_numpy_gives() -> None:
    rng = np.random.default_rng(7)
    table = rng.normal(size=(5000, 16)).astype(np.float32)
    indices = np.minimum(rng.zipf(1.3, 40_000) * 7 % 5000, 4999)
    values = rng.normal(size=(40_000, 16)).astype(np.float32)
    expected, gradient = table.astype(np.float64), np.zeros((5000, 16))
    np.add.at(gradient, indices, values)
    expected -= 0.1 * gradient / np.sqrt(0.1 + gradient**2 + 1e-7)
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            variable = Variable(table)
            optimizer = Adagrad(0.1)
        halves = [
            IndexedSlices(values[:25_000], indices[:25_000]),
            IndexedSlices(values[25_000:], indices[25_000:]),
        ]
        strategy.run(lambda: optimizer.apply_gradients([(halves[replica_id()], variable)]))
        np.testing.assert_allclose(variable.read_value(), expected, rtol=1e-3, atol=1e-4)
        assert_replicas_equal(variable)
