"""Datasets of several workers: who sees what, and that all make the same number of steps however uneven the data is."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import strategies as xd
from tests.jobs import run_in_job, strategy_of


def num_meetings(s: xd.Strategy) -> int:
    """How many collectives this process has taken part in, between processes."""
    link: Any = s.link
    return int(link.describe()["seq"])


def shares(s: xd.Strategy, dataset: Any, limit: int = 50) -> list[list[Any]]:
    """By step, what each local replica gets."""
    return [
        [np.asarray(part).tolist() for part in s.local_results(e)]
        for e, _ in zip(dataset, range(limit), strict=False)
    ]


def test_policies_say_what_each_worker_sees() -> None:
    """B27."""

    def body() -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            s = strategy_of(1)
            data = xd.from_arrays(np.arange(8)).batch(4)
            return {
                policy: shares(s, s.distribute_dataset(data, auto_shard_policy=policy))
                for policy in ("DATA", "AUTO", "OFF")
            }

    first, second = run_in_job(2, body)
    assert first["DATA"] == first["AUTO"] == [[[0, 1]], [[4, 5]]]
    assert second["DATA"] == second["AUTO"] == [[[2, 3]], [[6, 7]]]
    assert first["OFF"] == second["OFF"] == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]


def test_with_one_worker_every_policy_means_the_same_and_is_silent() -> None:
    """B27, of a job of one process."""

    def body() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            s = strategy_of(2)
            data = xd.from_arrays(np.arange(4)).batch(4)
            return [
                shares(s, s.distribute_dataset(data, auto_shard_policy=policy))
                for policy in ("DATA", "AUTO", "OFF", "FILE")
            ]

    assert run_in_job(1, body) == [[[[[0, 1], [2, 3]]]] * 4]


def test_equally_long_data_costs_no_communication() -> None:
    def body() -> None:
        s = strategy_of(2)
        data = xd.from_arrays(np.arange(100)).shuffle(seed=1).batch(10)
        for distributed in (
            s.distribute_dataset(data),
            s.distribute_dataset(data.with_options(auto_shard_policy="OFF")),
            s.distribute_datasets_from_function(lambda c: data.shard(2, c.input_pipeline_id)),
        ):
            before = num_meetings(s)
            for _ in range(2):
                assert len(shares(s, distributed)) == len(distributed)
            if s.worker_id == 0:
                next(iter(distributed))  # nobody needs to come
            assert num_meetings(s) == before

    run_in_job(2, body)


class Row(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize("num_local", [1, 2])
def test_workers_without_data_get_empty_batches_until_all_are_out(num_local: int) -> None:
    def body() -> Any:
        s = strategy_of(num_local)
        number = s.worker_id

        def make(context: xd.InputContext) -> Any:
            assert (context.num_input_pipelines, context.input_pipeline_id) == (3, number)
            assert context.num_replicas_in_sync == 3 * num_local
            for _ in range(number * num_local * 2):  # worker 0 has none at all
                yield Row(np.full((2, 3), number, "f2"), {"y": np.arange(2, dtype="u1")})

        distributed = s.distribute_datasets_from_function(lambda c: xd.from_generator(lambda: make(c)))
        seen = []
        for _ in range(2):
            steps = 0
            for element in distributed:
                assert isinstance(element, Row)
                for x, y in zip(s.local_results(element.x), s.local_results(element.y["y"]), strict=True):
                    rows = 2 if steps < 2 * number else 0
                    assert (x.shape, x.dtype, y.shape, y.dtype) == (
                        (rows, 3),
                        np.dtype("f2"),
                        (rows,),
                        np.dtype("u1"),
                    )
                total = s.reduce("SUM", s.run(lambda e: e.x.astype("f4"), (element,)), 0)
                mean = s.reduce("MEAN", s.run(lambda e: e.x.astype("f4"), (element,)), 0)
                workers = [w for w in range(3) if steps < 2 * w]
                assert total.tolist() == [2.0 * num_local * sum(workers)] * 3
                assert mean.tolist() == [sum(workers) / len(workers)] * 3
                steps += 1
            seen.append(steps)
        with pytest.raises(StopIteration):
            next(_exhausted(distributed))
        return seen

    assert run_in_job(3, body) == [[4, 4]] * 3


def _exhausted(dataset: Any) -> Iterator[Any]:
    iterator: Iterator[Any] = iter(dataset)
    for _ in iterator:
        pass
    return iterator


@pytest.mark.parametrize("lengths", [(4, 2), (2, 4), (0, 3), (3, 0)], ids="{0[0]}_and_{0[1]}".format)
@pytest.mark.parametrize("known", [True, False])
def test_data_of_different_lengths_ends_as_on_uneven_says(lengths: tuple[int, int], known: bool) -> None:
    """B25."""

    def body() -> Any:
        s = strategy_of(1)
        own = lengths[s.worker_id]

        def make(_: xd.InputContext) -> Any:
            data = xd.from_arrays(np.arange(own)).batch(1)
            return data if known else data.filter(lambda _: True)

        told: dict[str, Any] = {}
        for choice in ("continue", "stop", "error"):
            options = xd.InputOptions(on_uneven=choice)
            distributed = s.distribute_datasets_from_function(make, options)
            seen = []
            try:
                for element in distributed:
                    seen.append(s.local_results(element)[0].tolist())
            except ValueError as error:
                told["error text"] = str(error)
            told[choice] = seen
            told[f"{choice} length"] = distributed.cardinality
        return told

    expected = [
        {
            "continue": [[n] if n < own else [] for n in range(max(lengths))],
            "stop": [[n] for n in range(min(lengths))],
            "error": [[n] for n in range(min(lengths))],
        }
        for own in lengths
    ]
    told = run_in_job(2, body)
    short = int(lengths[1] < lengths[0])
    for one, theirs in zip(told, expected, strict=True):
        assert {key: one[key] for key in theirs} == theirs
        assert f"workers [{short}] of 2 have no data left" in one["error text"]
        assert one["continue length"] == (max(lengths) if known else xd.UNKNOWN_CARDINALITY)
        assert one["stop length"] == (min(lengths) if known else xd.UNKNOWN_CARDINALITY)


def test_one_process_stops_or_fails_where_a_replica_would_get_nothing() -> None:
    """B25, of replicas in one process."""
    with xd.MirroredStrategy(["cpu:0", "cpu:1"]) as s:
        data = xd.from_arrays(np.arange(5)).batch(4)
        assert shares(s, s.distribute_dataset(data)) == [[[0, 1], [2, 3]], [[4], []]]
        stop = s.distribute_dataset(data, xd.InputOptions(on_uneven="stop"))
        assert shares(s, stop) == [[[0, 1], [2, 3]]]
        refuse = iter(s.distribute_dataset(data, xd.InputOptions(on_uneven=xd.OnUneven.ERROR)))
        next(refuse)
        with pytest.raises(ValueError, match="a batch of 1 rows for 2 replicas and on_uneven='error'; need"):
            next(refuse)
        dealt = s.distribute_datasets_from_function(
            lambda _: xd.from_arrays(np.arange(3)).batch(1), xd.InputOptions(on_uneven="stop")
        )
        assert (len(dealt), shares(s, dealt)) == (1, [[[0], [1]]])
        with pytest.raises(ValueError, match="1 of 2 replicas, and on_uneven is 'error'"):
            shares(
                s,
                s.distribute_datasets_from_function(
                    lambda _: xd.from_arrays(np.arange(3)).batch(1), xd.InputOptions(on_uneven="error")
                ),
            )
    with pytest.raises(ValueError, match=r"on_uneven: got 'wait'"):
        xd.InputOptions(on_uneven="wait")


def test_a_position_is_restored_where_a_worker_was_already_out_of_data() -> None:
    def body() -> Any:
        s = strategy_of(1)
        own = (2, 5)[s.worker_id]

        def make() -> Any:
            return s.distribute_datasets_from_function(lambda _: xd.from_arrays(np.arange(own)).batch(1))

        iterator = iter(make())
        for _ in range(3):
            next(iterator)
        state = iterator.state()
        rest = [s.local_results(e)[0].tolist() for e in iterator]
        again = iter(make())
        again.restore(state)
        assert [s.local_results(e)[0].tolist() for e in again] == rest
        return state["step"], rest

    assert run_in_job(2, body) == [(3, [[], []]), (3, [[3], [4]])]


def test_a_worker_that_fails_to_make_an_element_is_named_and_all_can_go_on() -> None:
    def body() -> str:
        s = strategy_of(2)
        number = s.worker_id
        fails = [True]

        def make(_: xd.InputContext) -> Any:
            def checked(x: Any) -> Any:
                if number == 1 and x[0] == 2 and fails:
                    raise OSError("disk on fire")
                return x

            return xd.from_arrays(np.arange(8 - 4 * number)).batch(2).map(checked)

        iterator = iter(s.distribute_datasets_from_function(make))
        kind: Any = OSError if number == 1 else xd.CollectiveError
        with pytest.raises(kind) as caught:
            next(iterator)
        fails.clear()
        assert len(list(iterator)) == 2
        return str(caught.value)

    first, second = run_in_job(2, body)
    assert "worker 1 failed to make its next element: OSError: disk on fire" in first
    assert second == "disk on fire"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda n: xd.from_arrays(np.arange(2 + n)), "scalars have no empty form"),
        (lambda n: xd.from_arrays(np.arange(2 * n)), "scalars have no empty form"),
        (lambda n: xd.from_arrays(np.arange(2 * n)).batch(1).map(unpicklable), "can't be sent"),
    ],
    ids=["scalars", "scalars on one worker only", "what can't be pickled"],
)
def test_what_has_no_empty_form_is_refused_on_all(make: Callable[[int], Any], words: str) -> None:
    def body() -> None:
        s = strategy_of(1)
        distributed = s.distribute_datasets_from_function(lambda c: make(c.input_pipeline_id))
        with pytest.raises((ValueError, xd.CollectiveError), match=words):
            for _ in distributed:
                pass
        assert s.reduce("SUM", np.ones(1), None) == 2

    run_in_job(2, body)


def unpicklable(x: Any) -> Any:
    class Local(NamedTuple):
        x: Any

    return Local(x)


def test_different_data_or_policies_on_the_workers_are_noticed() -> None:
    def body() -> tuple[int, str]:
        s = strategy_of(1)
        number = s.worker_id
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            distributed = s.distribute_dataset(xd.from_arrays(np.arange(8 + 8 * number)).batch(4))
        assert len(shares(s, distributed)) == 4
        with pytest.raises(ValueError, match=r"worker 0 has policy OFF.*worker 1 has policy DATA"):
            s.distribute_dataset(
                xd.from_arrays(np.arange(8)).batch(4), auto_shard_policy="DATA" if number else "OFF"
            )
        with pytest.raises(ValueError, match=r"on_uneven STOP.*need the same"):
            s.distribute_datasets_from_function(
                lambda _: xd.from_arrays(np.arange(2)),
                xd.InputOptions(on_uneven="stop" if number else "error"),
            )
        return len(caught), "".join(str(w.message) for w in caught)

    (count, text), (none, _) = run_in_job(2, body)
    assert (count, none) == (1, 0)
    assert "the workers' datasets have 2, 4 steps" in text


def test_a_different_number_of_replicas_on_each_worker_shares_by_replica() -> None:
    def body() -> Any:
        s = strategy_of(1 if int(os.environ["XPDISTRIBUTE_RANK"]) == 0 else 2)
        return shares(s, s.distribute_dataset(xd.from_arrays(np.arange(7)).batch(7)))

    assert run_in_job(2, body) == [[[[0, 1, 2]]], [[[3, 4], [5, 6]]]]
