"""A replica's context where it does not belong: kept for later, in another thread, in another replica."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strategies as xd
from strategies.strategy import Strategy

USES: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda context: context.all_reduce("SUM", np.ones(2)),
    "all_gather": lambda context: context.all_gather(np.ones(2), 0),
    "merge_call": lambda context: context.merge_call(lambda strategy: None),
}
SIZES = [1, 2]


def strategy_of(size: int) -> xd.MirroredStrategy:
    options = xd.CommunicationOptions(timeout_seconds=30.0)
    return xd.MirroredStrategy([f"cpu:{i}" for i in range(size)], communication_options=options)


def works(strategy: Strategy) -> bool:
    """Whether steps come out right."""

    def step() -> Any:
        return xd.all_reduce("SUM", np.ones(2)).tolist()

    size = strategy.num_replicas_in_sync
    return all(one == [size, size] for one in strategy.local_results(strategy.run(step)))


def in_thread(work: Callable[[], Any]) -> BaseException | None:
    """What it raises in another thread."""
    caught: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            caught.append(None)
        except BaseException as error:  # noqa: BLE001  # it is the result
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert caught, "it hangs"
    return caught[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("use", USES)
def test_a_context_that_was_kept_is_refused_after_its_step(use: str, size: int) -> None:
    strategy = strategy_of(size)
    kept: list[Any] = []
    strategy.run(lambda: kept.append(xd.get_replica_context()))
    words = rf"{use}: called on the context of replica 0 of .*, which runs no step now; need that of the step that is running"
    with pytest.raises(xd.ReplicaContextError, match=words):
        USES[use](min(kept, key=lambda context: context.replica_id))
    with strategy.scope(), pytest.raises(xd.ReplicaContextError, match=use):
        USES[use](kept[0])
    assert isinstance(in_thread(lambda: USES[use](kept[0])), xd.ReplicaContextError)
    assert works(strategy)


@pytest.mark.parametrize("copies", [True, False], ids=["context copied", "context not copied"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("use", USES)
def test_a_context_is_refused_in_another_thread_than_the_replicas(use: str, size: int, copies: bool) -> None:
    strategy = strategy_of(size)

    def step() -> Any:
        context = xd.get_replica_context()
        copied = contextvars.copy_context() if copies else contextvars.Context()
        error = in_thread(lambda: copied.run(USES[use], context))
        xd.all_reduce("SUM", 1.0)
        return error

    for error in strategy.local_results(strategy.run(step)):
        assert isinstance(error, xd.ReplicaContextError)
        assert f"{use}: called for replica " in str(error)
        assert "in another thread than that which runs it" in str(error)
    assert works(strategy)


@pytest.mark.parametrize("deed", ["write", "make", "apply"])
def test_what_replicas_do_together_by_other_names_is_refused_in_another_thread_too(deed: str) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        v = xd.Variable(np.zeros(2), aggregation="SUM")
        sgd = xd.SGD(1.0)
    deeds: dict[str, Callable[[], Any]] = {
        "write": lambda: v.assign_add(np.ones(2)),
        "make": lambda: xd.Variable(1.0),
        "apply": lambda: sgd.apply_gradients([(np.ones(2), v)]),
    }

    def step() -> Any:
        copied = contextvars.copy_context()
        return in_thread(lambda: copied.run(deeds[deed]))

    for error in strategy.local_results(strategy.run(step)):
        assert isinstance(error, xd.ReplicaContextError), error
    assert v.numpy().tolist() == [0.0, 0.0]
    assert works(strategy)


def test_a_thread_that_outlives_its_step_does_not_disturb_a_later_one() -> None:
    strategy = strategy_of(2)
    threads: list[threading.Thread] = []
    caught: list[BaseException] = []

    def leaves_one_behind() -> None:
        context = xd.get_replica_context()
        assert context is not None

        def late() -> None:
            time.sleep(0.2)
            try:
                context.all_reduce("SUM", np.ones(2))
            except xd.ReplicaContextError as error:
                caught.append(error)

        thread = threading.Thread(target=contextvars.copy_context().run, args=(late,))
        threads.append(thread)
        thread.start()

    def slow() -> Any:
        time.sleep(0.5)
        return xd.all_reduce("SUM", np.full(2, 5.0)).tolist()

    strategy.run(leaves_one_behind)
    assert strategy.local_results(strategy.run(slow)) == ([10.0, 10.0],) * 2
    for thread in threads:
        thread.join()
    assert len(caught) == 2


def test_a_replica_is_refused_the_context_of_another_one() -> None:
    strategy = strategy_of(2)
    kept: list[Any] = [None, None]

    def step() -> Any:
        context = xd.get_replica_context()
        assert context is not None
        kept[context.replica_id] = context
        xd.all_reduce("SUM", 1.0)  # now both are there
        with pytest.raises(xd.ReplicaContextError, match=r"all_reduce: called .* replica "):
            kept[1 - context.replica_id].all_reduce("SUM", 1.0)
        return xd.all_reduce("SUM", 1.0)

    assert strategy.local_results(strategy.run(step)) == (2.0, 2.0)
    assert works(strategy)


def test_a_merge_function_is_refused_the_context_of_a_replica_that_waits_for_it() -> None:
    strategy = strategy_of(2)

    def step() -> Any:
        context = xd.get_replica_context()
        assert context is not None
        return context.merge_call(lambda _: context.all_reduce("SUM", 1.0))

    with pytest.raises(xd.ReplicaContextError, match="by code across replicas, such as a merge function"):
        strategy.run(step)
    assert works(strategy)


def test_the_default_strategys_context_is_good_anywhere() -> None:
    context = xd.get_replica_context()
    assert context is not None
    for use in USES.values():
        use(context)
        assert in_thread(lambda use=use: use(context)) is None  # type: ignore[misc]
