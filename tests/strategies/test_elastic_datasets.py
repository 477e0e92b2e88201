"""Elastic jobs whose processes have data of their own: all make equally many steps, whoever is lost and comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strategies as xd
from tests.elastic_jobs import ElasticJob, Rank, elastic_strategy
from tests.strategies.test_elastic import wait_for_newcomers


def batches_of(rank: Rank, counts: list[int]) -> Any:
    """A function that makes as many batches as this process has; each row is the number of its process plus one."""

    def make(context: xd.InputContext) -> xd.Dataset:
        rows = np.full(2 * counts[rank.number], rank.number + 1.0)
        return xd.from_arrays(rows).batch(2)

    return make


def trained(rank: Rank, s: xd.MultiWorkerMirroredStrategy, dataset: Any, dies_at: int = -1) -> Any:
    """How many steps there were, and the sum over all rows of all processes in each."""

    def step(x: Any) -> Any:
        if rank.number == 1 and len(sums) == dies_at:
            rank.die()
        replica = xd.get_replica_context()
        assert replica is not None
        return replica.all_reduce("SUM", x.sum())

    sums: list[float] = []
    for x in dataset:
        sums.append(float(s.local_results(s.run(step, (x,)))[0]))
    return sums


def results(job: ElasticJob) -> list[Any]:
    stories = job.finish()
    assert not [story.failure for story in stories if story.failure]
    return [story.result for story in stories if not story.was_killed]


def test_processes_with_fewer_batches_get_empty_ones_until_all_have_ended() -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        dataset = s.distribute_datasets_from_function(batches_of(rank, [1, 3, 0]))
        assert len(dataset) == 3
        return [trained(rank, s, dataset), trained(rank, s, dataset)]

    with ElasticJob(3, body) as job:
        sums = [2 * 1.0 + 2 * 2.0, 2 * 2.0, 2 * 2.0]
        assert results(job) == [[sums, sums]] * 3


def test_on_uneven_stop_and_error_hold_in_elastic_jobs_too() -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        make = batches_of(rank, [2, 3])
        stopping = s.distribute_datasets_from_function(make, xd.InputOptions(on_uneven="stop"))
        failing = s.distribute_datasets_from_function(make, xd.InputOptions(on_uneven="error"))
        sums = trained(rank, s, stopping)
        with pytest.raises(ValueError, match=r"next: workers \[0\] of 2 have no data left, the others have"):
            trained(rank, s, failing)
        return sums

    with ElasticJob(2, body) as job:
        assert results(job) == [[2 * 1.0 + 2 * 2.0] * 2] * 2


def test_all_data_is_seen_by_each_worker_equally_often_with_policy_off() -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        rows = np.full(4 * (rank.number + 1), rank.number + 1.0)
        dataset = s.distribute_dataset(xd.from_arrays(rows).batch(4), auto_shard_policy="OFF")
        return trained(rank, s, dataset)

    with ElasticJob(2, body) as job:
        assert results(job) == [[2 * 1.0 + 2 * 2.0] * 2 + [2 * 2.0] * 2] * 2


def test_when_the_one_with_most_data_is_lost_the_others_end_with_theirs() -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        dataset = s.distribute_datasets_from_function(batches_of(rank, [1, 9, 3]))
        return trained(rank, s, dataset, dies_at=2)

    with ElasticJob(3, body) as job:
        sums = [2 * 1.0 + 2 * 2.0 + 2 * 3.0, 2 * 2.0 + 2 * 3.0, 2 * 3.0]
        assert results(job) == [sums] * 2


def test_a_loss_while_the_processes_agree_lets_the_others_agree_again() -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)

        def make(context: xd.InputContext) -> Any:
            for x in batches_of(rank, [2, 9, 3])(context):
                if rank.number == 1 and x is not None and rank.num_done == 2:
                    rank.die()
                rank.num_done += 1
                yield x

        return trained(rank, s, s.distribute_datasets_from_function(make))

    with ElasticJob(3, body) as job:
        sums = [2 * 1.0 + 2 * 2.0 + 2 * 3.0] * 2 + [2 * 3.0]
        assert results(job) == [sums] * 2


def test_a_newcomer_makes_as_many_steps_as_the_others_have_left() -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        state = xd.Checkpoint(step=0)
        dataset = s.distribute_datasets_from_function(batches_of(rank, [6, 6, 4]))
        s.share_state(state)

        def step(x: Any) -> Any:
            replica = xd.get_replica_context()
            assert replica is not None
            return replica.all_reduce("SUM", x.sum())

        sums: list[float] = []
        batches = iter(dataset)
        while True:
            if rank.number < 2 and state.step == 2:
                rank.tell("at two")
                wait_for_newcomers()
            s.take_in_newcomers()
            x = next(batches, None)
            if x is None:
                return sums
            sums.append(float(s.local_results(s.run(step, (x,)))[0]))
            state.step += 1

    with ElasticJob(2, body) as job:
        job.until_told(0, "at two")
        job.join()
        first, second, newcomer = results(job)
    assert first == second == [6.0, 6.0, 12.0, 12.0, 12.0, 12.0]
    assert newcomer == [12.0] * 4
