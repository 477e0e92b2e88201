"""The end of a strategy: not in the middle of a step, and after it nothing but reading."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strategies as xd
from strategies.strategy import Strategy

KINDS: dict[str, Callable[[], Strategy]] = {
    "one device": lambda: xd.OneDeviceStrategy("cpu:0"),
    "mirrored, 1": lambda: xd.MirroredStrategy(["cpu:0"]),
    "mirrored, 3": lambda: xd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
    "central": lambda: xd.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_a_strategy_is_not_closed_in_its_own_step(kind: str) -> None:
    strategy = KINDS[kind]()
    words = (
        r"\.close: called in a step of this strategy; need it to have ended — call it after run has returned"
    )

    def leaves_its_block() -> None:
        with strategy:
            pass

    for step in (
        strategy.close,
        leaves_its_block,
        lambda: xd.get_replica_context().merge_call(lambda s: s.close()),  # type: ignore[union-attr]
    ):
        with pytest.raises(RuntimeError, match=words):
            strategy.run(step)
    assert set(strategy.local_results(strategy.run(lambda: 1))) == {1}


def test_a_strategy_may_be_closed_in_the_scope_and_in_the_step_of_another_one() -> None:
    one, other = xd.OneDeviceStrategy("cpu:0"), xd.OneDeviceStrategy("cpu:0")
    third = xd.OneDeviceStrategy("cpu:0")
    with other.scope():
        one.close()
    with third.scope():
        third.close()
    other.run(lambda: one.close())
    assert one.is_closed
    assert third.is_closed
    assert not other.is_closed


def test_a_step_that_another_thread_closes_the_strategy_in_ends_well() -> None:
    strategy = KINDS["mirrored, 3"]()

    def step() -> Any:
        if xd.get_replica_context().replica_id == 1:  # type: ignore[union-attr]
            thread = threading.Thread(target=strategy.close)
            thread.start()
            thread.join(20)
        return xd.all_reduce("SUM", 1.0)

    assert strategy.local_results(strategy.run(step)) == (3.0,) * 3
    with pytest.raises(RuntimeError, match=r"run: called after close\(\)"):
        strategy.run(step)


@kinds
def test_after_close_variables_are_read_and_all_else_is_refused_in_one_way(kind: str) -> None:
    strategy = KINDS[kind]()
    with strategy.scope():
        v = xd.Variable(np.arange(3.0), name="v", aggregation="SUM")
        total = xd.Variable(1.0, name="total", synchronization="ON_READ", aggregation="SUM")
    before = float(total.numpy())
    strategy.close()
    strategy.close()
    deeds: list[tuple[Callable[[], Any], str]] = [
        (lambda: strategy.run(lambda: None), r"\.run: called after close\(\); make a new strategy"),
        (lambda: strategy.scope().__enter__(), r"\.scope: called after close\(\); make a new strategy"),
        (
            lambda: v.assign(np.ones(3)),
            r"v\.assign: called after close\(\) of .*, whose variables can only be",
        ),
        (lambda: v.assign_add(np.ones(3)), r"v\.assign_add: called after close\(\)"),
        (lambda: total.assign(2.0), r"total\.assign: called after close\(\)"),
        (
            lambda: strategy.update(v, lambda c: c.assign(np.ones(3))),
            r"\.assign: called after close\(\)",
        ),
    ]
    for deed, words in deeds:
        with pytest.raises(RuntimeError, match=words):
            deed()
    assert v.numpy().tolist() == [0.0, 1.0, 2.0]
    assert v.read_value().tolist() == [0.0, 1.0, 2.0]
    assert float(total.numpy()) == before
    assert len(strategy.local_results(v)) == (strategy.num_replicas_in_sync if kind != "central" else 1)


def test_a_sharded_variable_of_a_closed_strategy_is_read_only_too() -> None:
    strategy = KINDS["mirrored, 3"]()
    with strategy.scope():
        parts = [xd.Variable(np.ones((2, 2)), aggregation="SUM") for _ in range(2)]
    v = xd.ShardedVariable(parts)
    strategy.close()
    with pytest.raises(RuntimeError, match=r"assign: called after close\(\)"):
        v.assign(np.zeros((4, 2)))
    assert v.numpy().tolist() == [[1.0, 1.0]] * 4


def test_a_checkpoint_of_a_closed_strategy_can_be_saved(tmp_path: Any) -> None:
    strategy = KINDS["mirrored, 3"]()
    with strategy.scope():
        v = xd.Variable(np.arange(3.0))
    strategy.close()
    path = xd.Checkpoint(v=v).save(tmp_path / "ck")
    assert xd.load_checkpoint(path)["v"].tolist() == [0.0, 1.0, 2.0]
