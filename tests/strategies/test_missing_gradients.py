"""Variables that get no gradient: on some replicas, on all, from time to time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from strategies import (
    SGD,
    Adam,
    CentralStorageStrategy,
    CommunicationOptions,
    FixedShardsPartitioner,
    MirroredStrategy,
    Optimizer,
    Variable,
    assert_replicas_equal,
    get_replica_context,
)


@pytest.fixture(params=[2, 3, 5], ids="{}_replicas".format)
def strategy(request: pytest.FixtureRequest) -> Iterator[MirroredStrategy]:
    options = CommunicationOptions(timeout_seconds=20)
    devices = [f"cpu:{i}" for i in range(request.param)]
    with MirroredStrategy(devices, communication_options=options) as strategy:
        yield strategy


def replica_id() -> int:
    replica = get_replica_context()
    assert replica is not None
    return replica.replica_id_in_sync_group


def test_none_on_some_replicas_counts_as_zero_with_one_warning_of_the_names(
    strategy: MirroredStrategy,
) -> None:
    with strategy.scope():
        a, b, c = (Variable(np.zeros(2), name=name) for name in ("a", "b", "c"))
        optimizer = SGD(1.0, name="opt")

    def step() -> None:
        is_first = replica_id() == 0
        gradients = [np.ones(2), np.ones(2) if is_first else None, np.ones(2) if not is_first else None]
        optimizer.apply_gradients(zip(gradients, (a, b, c), strict=True))

    with pytest.warns(UserWarning, match="had no gradient") as caught:
        strategy.run(step)
    expected = "opt.apply_gradients: b, c had no gradient on some replicas; they count as zero there"
    assert [str(warning.message) for warning in caught] == [expected]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.run(step)
    n = strategy.num_replicas_in_sync
    for variable, times in ((a, n), (b, 1), (c, n - 1)):
        np.testing.assert_array_equal(variable.read_value(), np.full(2, -2.0 * times))
    assert_replicas_equal([a, b, c])


def test_a_name_that_is_missing_later_is_warned_of_then() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            a, b = Variable(np.zeros(2), name="a"), Variable(np.zeros(2), name="b")
            optimizer = SGD(1.0)

        def step(missing: set[str]) -> None:
            pairs = [(None if v.name in missing and replica_id() else np.ones(2), v) for v in (a, b)]
            optimizer.apply_gradients(pairs)

        for missing, names in (({"a"}, "a"), ({"a", "b"}, "b")):
            with pytest.warns(UserWarning, match="had no gradient") as caught:
                strategy.run(step, (missing,))
            assert [str(w.message).split(": ")[1].split(" had")[0] for w in caught] == [names]


def test_a_mean_counts_replicas_without_a_gradient_too(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros(2))
        optimizer = SGD(1.0, gradient_aggregation="MEAN")
    n = strategy.num_replicas_in_sync
    with pytest.warns(UserWarning, match="had no gradient"):
        strategy.run(lambda: optimizer.apply_gradients([(None if replica_id() else np.full(2, 1.0 * n), w)]))
    np.testing.assert_allclose(w.read_value(), [-1, -1])


def test_none_everywhere_leaves_variable_and_slots_alone_without_a_warning(
    strategy: MirroredStrategy,
) -> None:
    with strategy.scope():
        a, b = Variable(np.zeros(2)), Variable(np.ones(2))
        optimizer = SGD(1.0, momentum=0.5, weight_decay=0.1)
        optimizer.build([a, b])
    share = np.ones(2) / strategy.num_replicas_in_sync
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.run(lambda: optimizer.apply_gradients([(share, a), (share, b)]))
        before, momentum = b.read_value(), optimizer.slot(b, "momentum").copy()
        strategy.run(lambda: optimizer.apply_gradients([(share, a), (None, b)]))
    np.testing.assert_array_equal(b.read_value(), before)
    np.testing.assert_array_equal(optimizer.slot(b, "momentum"), momentum)
    assert optimizer.iterations == 2


@pytest.mark.parametrize(
    "make", [lambda: SGD(1.0), lambda: Adam(0.1, global_clipnorm=1.0)], ids=["sgd", "clipped"]
)
def test_none_for_all_is_an_error_and_no_update(strategy: MirroredStrategy, make: Any) -> None:
    with strategy.scope():
        a, b = Variable(np.zeros(2)), Variable(np.zeros(2))
        optimizer: Optimizer = make()
    with pytest.raises(
        ValueError, match="got None for every variable on every replica; need at least one gradient"
    ):
        strategy.run(lambda: optimizer.apply_gradients([(None, a), (None, b)]))
    assert optimizer.iterations == 0
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), a), (None, b)]))
    assert optimizer.iterations == 1


def test_a_replica_without_any_gradient_takes_part_all_the_same(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        a, b = Variable(np.zeros(2), name="a"), Variable(np.zeros((200, 200)), name="b")
        optimizer = SGD(1.0)

    def step() -> None:
        if replica_id():
            optimizer.apply_gradients([(None, a), (None, b)])
        else:
            optimizer.apply_gradients([(np.ones(2), a), (np.ones((200, 200)), b)])

    with pytest.warns(UserWarning, match="a, b had no gradient"):
        strategy.run(step)
    np.testing.assert_array_equal(a.read_value(), [-1, -1])
    np.testing.assert_array_equal(b.read_value(), np.full((200, 200), -1.0))


def test_one_replicas_missing_gradient_does_not_hide_anothers_wrong_one() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            w = Variable(np.zeros(2), name="w")
            optimizer = SGD(1.0)
        with pytest.raises(ValueError, match=r"w: got float64 of shape \(3,\); need shape \(2,\)"):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(3) if replica_id() else None, w)]))
        np.testing.assert_array_equal(w.read_value(), [0, 0])


def test_a_sharded_variable_may_miss_its_gradient_on_some_replicas() -> None:
    strategy = CentralStorageStrategy(
        ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1"], variable_partitioner=FixedShardsPartitioner(2)
    )
    with strategy:
        with strategy.scope():
            table = Variable(np.zeros((5, 1)), name="table")
            optimizer = SGD(1.0)
        with pytest.warns(UserWarning, match="table/part_0, table/part_1 had no gradient"):
            strategy.run(
                lambda: optimizer.apply_gradients([(None if replica_id() else np.ones((5, 1)), table)])
            )
        np.testing.assert_array_equal(table.numpy(), np.full((5, 1), -1.0))
