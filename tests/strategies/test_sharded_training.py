"""Optimizers and sharded variables: the same numbers as with the table in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from strategies import (
    SGD,
    Adagrad,
    Adam,
    CentralStorageStrategy,
    FixedShardsPartitioner,
    IndexedSlices,
    MirroredStrategy,
    OneDeviceStrategy,
    Optimizer,
    PerReplica,
    ShardedVariable,
    Variable,
    assert_replicas_equal,
    embedding_lookup,
    global_norm,
)

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: SGD(0.5),
    "nesterov": lambda: SGD(0.5, momentum=0.9, nesterov=True),
    "adam": lambda: Adam(0.1),
    "adagrad": lambda: Adagrad(0.1),
}
WHOLE = np.random.default_rng(0).normal(size=(11, 3))


def central(num_replicas: int, num_shards: int | None) -> CentralStorageStrategy:
    return CentralStorageStrategy(
        [f"cpu:{index}" for index in range(num_replicas)],
        ["cpu:0", "cpu:1"],
        variable_partitioner=FixedShardsPartitioner(num_shards) if num_shards else None,
    )


@pytest.fixture
def plain() -> Iterator[CentralStorageStrategy]:
    with central(2, None) as strategy:
        yield strategy


def train(strategy: CentralStorageStrategy, make: Callable[[], Optimizer], gradients: list[Any]) -> Any:
    """The weights and the slots after a step for each pair of the replicas' gradients."""
    with strategy.scope():
        before = Variable(np.ones(5))
        table = Variable(WHOLE)
        after = Variable(np.zeros((3, 3)), name="after")
        optimizer = make()

    def step(gradient: Any) -> None:
        optimizer.apply_gradients([(np.ones(5), before), (gradient, table), (np.ones((3, 3)), after)])

    for pair in gradients:
        strategy.run(step, (PerReplica(pair),))
    slots = [[optimizer.slot(part, name) for part in parts_of(table)] for name in optimizer.rule.slots]
    return [variable.numpy() for variable in (before, table, after)], [np.concatenate(slot) for slot in slots]


def dense() -> list[Any]:
    rng = np.random.default_rng(1)
    return [[rng.normal(size=WHOLE.shape) for _ in range(2)] for _ in range(4)]


def sparse() -> list[Any]:
    rng = np.random.default_rng(2)
    ids = [[[10, 0, 5, 0], [3, 5, 5, 9]], [[0, 1, 2, 3], [10, 10, 10, 10]], [[], [7]]]
    return [
        [IndexedSlices(rng.normal(size=(len(rows), 3)), rows, WHOLE.shape) for rows in pair] for pair in ids
    ]


@pytest.mark.parametrize("gradients", [dense, sparse], ids=["dense", "sparse"])
@pytest.mark.parametrize("num_shards", [2, 4, 14])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_table_in_shards_is_updated_to_the_same_bits_as_in_one_piece(
    name: str, num_shards: int, gradients: Callable[[], list[Any]], plain: CentralStorageStrategy
) -> None:
    with central(2, num_shards) as strategy:
        got = train(strategy, OPTIMIZERS[name], gradients())
    expected = train(plain, OPTIMIZERS[name], gradients())
    for ours, theirs in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        assert ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()


def test_embeddings_are_trained_as_by_a_loop_over_one_array() -> None:
    ids = np.random.default_rng(3).integers(0, 11, (6, 4))
    target = np.random.default_rng(4).normal(size=(6, 3))

    def gradient(table: Any, ids: Any, target: Any) -> IndexedSlices:
        error = embedding_lookup(table, ids).sum(axis=1) - target  # (batch, 3)
        rows = np.repeat(error[:, None], ids.shape[1], axis=1)
        return IndexedSlices(rows.reshape(-1, 3), ids.reshape(-1), table.shape)

    expected = WHOLE.copy()
    for _ in range(5):
        found = gradient(expected, ids, target)
        np.add.at(expected, found.indices, -0.05 * found.values)

    with central(2, 3) as strategy:
        with strategy.scope():
            table = Variable(WHOLE)
            optimizer = SGD(0.05)
        for batch in strategy.distribute_dataset([(ids, target)] * 5):
            strategy.run(
                lambda ids, target: optimizer.apply_gradients([(gradient(table, ids, target), table)]), batch
            )
    np.testing.assert_allclose(table, expected, rtol=1e-12)


def test_one_replica_and_no_strategy_will_do() -> None:
    with central(1, 3) as strategy:
        with strategy.scope():
            table = Variable(WHOLE)
        strategy.run(lambda: SGD(0.5).apply_gradients([(WHOLE, table)]))
    np.testing.assert_array_equal(table, WHOLE * 0.5)

    alone = ShardedVariable([Variable(WHOLE[:7]), Variable(WHOLE[7:])])
    SGD(0.5).apply_gradients([(WHOLE, alone)])
    np.testing.assert_array_equal(alone, WHOLE * 0.5)


def test_shards_that_are_mirrored_are_updated_on_every_device() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            table = ShardedVariable([Variable(WHOLE[:7]), Variable(WHOLE[7:])])
            optimizer = SGD(0.25)
        strategy.run(lambda: optimizer.apply_gradients([(WHOLE, table)]))
        assert_replicas_equal(table)
    np.testing.assert_array_equal(table, WHOLE * 0.5)


def test_a_shard_without_rows_does_not_keep_the_next_variable_from_its_slots() -> None:
    with OneDeviceStrategy("cpu:0") as strategy:
        with strategy.scope():
            empty = Variable(np.zeros((0, 2)))
            table = ShardedVariable([empty, Variable(np.ones((2, 2)))])
            optimizer = Adagrad(1.0, initial_accumulator_value=3.0)
        assert optimizer.slot(empty, "accumulator").shape == (0, 2)
        strategy.run(lambda: optimizer.apply_gradients([(np.ones((2, 2)), table)]))
    np.testing.assert_array_equal(optimizer.slot(table.shards[1], "accumulator"), np.full((2, 2), 4.0))
    np.testing.assert_allclose(table, np.full((2, 2), 1 - 1 / 2), rtol=1e-6)


def test_clipping_by_the_global_norm_does_not_depend_on_the_shards(plain: CentralStorageStrategy) -> None:
    def clipped() -> Optimizer:
        return SGD(1.0, global_clipnorm=0.5)

    with central(2, 4) as strategy:
        (_, got, _), _ = train(strategy, clipped, dense())
    (_, expected, _), _ = train(plain, clipped, dense())
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_a_global_norm_counts_every_element_once() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, strategy.scope():
        table = ShardedVariable([Variable([3.0]), Variable([0.0, 4.0])])
        assert global_norm([table, Variable(12.0)]) == 13


def test_a_pair_without_a_gradient_leaves_the_table_alone() -> None:
    with central(2, 3) as strategy:
        with strategy.scope():
            table, other = Variable(WHOLE), Variable(np.ones(2))
            optimizer = SGD(1.0)
        strategy.run(lambda: optimizer.apply_gradients([(None, table), (np.ones(2), other)]))
    np.testing.assert_array_equal(table, WHOLE)
    np.testing.assert_array_equal(other, [-1, -1])


@pytest.mark.parametrize(
    ("gradient", "error", "said"),
    [
        (WHOLE[:10], ValueError, r"emb.split: got float64 of shape \(10, 3\); need shape \(11, 3\)"),
        (
            IndexedSlices(np.ones((1, 4)), [0]),
            ValueError,
            r"emb.split: got rows of float64 of shape \(1, 4\)",
        ),
        (IndexedSlices(np.ones((1, 3)), [11]), IndexError, "emb.split: got index 11; need one from 0 to 10"),
        (WHOLE * 1j, TypeError, "SGD.apply_gradients: emb/part_0: got complex128"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(gradient: Any, error: type[Exception], said: str) -> None:
    with central(1, 3) as strategy:
        with strategy.scope():
            table = Variable(WHOLE, name="emb")
        with pytest.raises(error, match=said):
            strategy.run(lambda: SGD(1.0).apply_gradients([(gradient, table)]))
    np.testing.assert_array_equal(table, WHOLE)


def test_gradients_and_slots_lie_with_the_shards() -> None:
    with central(1, 3) as strategy:
        with strategy.scope():
            table = Variable(WHOLE, name="emb")
            optimizer = SGD(1.0, momentum=0.5)
        wanted = "got emb, which lies in 3 pieces; need one of its shards: for shard in emb.shards"
        with pytest.raises(TypeError, match=wanted):
            strategy.run(lambda: optimizer.gradient(table))
        with pytest.raises(TypeError, match=wanted):
            optimizer.slot(table, "momentum")

        def step() -> None:
            shards = parts_of(table)
            for shard, part in zip(shards, split(table, WHOLE), strict=True):
                np.copyto(optimizer.gradient(shard), part)
            optimizer.apply_gradients([(optimizer.gradient(shard), shard) for shard in shards])

        strategy.run(step)
    np.testing.assert_array_equal(table, np.zeros_like(WHOLE))


def parts_of(variable: Variable) -> tuple[Variable, ...]:
    """Its shards, or the variable itself."""
    return variable.shards if isinstance(variable, ShardedVariable) else (variable,)


def split(table: Variable, value: Any) -> list[Any]:
    assert isinstance(table, ShardedVariable)
    return table.split(value)
