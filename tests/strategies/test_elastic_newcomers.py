"""Processes that come later to an elastic job: which can be taken in, where, and with what."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest

import strategies as xd
from tests.elastic_jobs import ElasticJob, Rank, elastic_strategy
from tests.strategies.test_elastic import BATCH, FEATURES, Program, X, Y, check, wait_for_newcomers
from tests.strategies.test_elastic_programs import Keeping, failures_of, iterator_of


def test_a_state_without_a_variable_or_an_optimizer_is_refused_in_all_processes() -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        with s.scope():
            w, v = xd.Variable(np.zeros(FEATURES), name="w"), xd.Variable(0.0, name="forgotten")
            optimizer = xd.SGD(0.02)
        with pytest.raises(
            ValueError, match="share_state: got a state without forgotten, in which"
        ) as refused:
            s.share_state(xd.Checkpoint(w=w))
        s.share_state(xd.Checkpoint(w=w, models={"v": [v]}))

        def step() -> None:
            optimizer.apply_gradients([(np.ones(FEATURES), w)])

        with pytest.raises(ValueError, match="share_state: got a state without SGD"):
            s.run(step)
        return str(refused.value)

    with ElasticJob(2, body) as job:
        assert not (failures := failures_of(job)), failures[0]


def test_a_newcomer_with_another_program_fails_alone() -> None:
    """It has other variables, other shapes, or a state that lacks something."""

    def make(kind: str) -> Any:
        def body(rank: Rank) -> Any:
            is_new = rank.number == 2
            s = elastic_strategy(rank)
            with s.scope():
                w = xd.Variable(np.zeros(FEATURES + (is_new and kind == "shape")), name="w")
                others = [xd.Variable(0.0, name="more")] if is_new and kind == "more" else []
            second = elastic_strategy(rank) if is_new and kind == "strategies" else None
            state = xd.Checkpoint(w=w, others=others, it=iterator_of(s), step=0)
            if not (is_new and kind == "state"):
                state.best = 0.0
            s.share_state(state)

            def step(x: Any, y: Any) -> Any:
                return xd.all_reduce("SUM", float(len(x)))

            while state.step < 6:
                assert float(np.asarray(s.local_results(s.run(step, next(state.it)))[0])) == BATCH
                state.step += 1
                if state.step == 3:
                    rank.tell("waits")
                    wait_for_newcomers()
            assert second is None
            return s.num_workers

        return body

    said = {
        "shape": r"has w float64\[6\] that the others don't have, and lacks w float64\[5\]",
        "more": r"has more float64\[\] that the others don't have, and lacks nothing",
        "strategies": "has 2 strategies, the others have 1",
        "state": "lacks .*best",
    }
    for kind, words in said.items():
        with ElasticJob(2, make(kind)) as job:
            job.until_told(0, "waits")
            job.join()
            stories = job.finish()
        assert stories[2].failure is not None, kind
        with pytest.raises(ValueError, match=words):
            raise ValueError(stories[2].failure)
        assert [story.failure for story in stories[:2]] == [None, None], kind
        assert [story.result for story in stories[:2]] == [2, 2]


def test_without_share_state_the_others_go_on_and_a_newcomer_is_told_after_a_bounded_wait() -> None:
    def body(rank: Rank) -> Any:
        said: list[str] = []
        logging.getLogger("xpdistribute").addHandler(Keeping(said))
        is_new = rank.number == 2
        options = xd.CommunicationOptions(timeout_seconds=1.0 if is_new else 10.0)
        s = elastic_strategy(rank, communication_options=options)
        with s.scope():
            w = xd.Variable(0.0, name="w")
        it = iterator_of(s)
        if is_new:
            s.share_state(xd.Checkpoint(w=w, it=it))
        until = time.monotonic() + 2.5
        go_on = True
        while go_on:
            go_on = bool(s.run(lambda x, y: xd.all_reduce("MIN", float(time.monotonic() < until)), next(it)))
            rank.tell("step")
            time.sleep(0.005)
        return [text for text in said if "wait to be taken in" in text]

    with ElasticJob(2, body) as job:
        job.until_told(0, "step")
        job.join()
        stories = job.finish()
    assert "waited 1 s to be taken in" in (stories[2].failure or "")
    for story in stories[:2]:
        assert story.failure is None, story.failure
        (said,) = story.result
        assert "1 processes wait to be taken in, which needs strategy.share_state" in said


def test_a_newcomer_that_does_not_share_a_state_is_told_at_its_first_collective() -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        if rank.number == 2:
            return str(s.reduce("SUM", 1.0))
        rank.tell("ready")
        for _ in range(40):
            s.run(lambda: xd.all_reduce("SUM", 1.0))
            time.sleep(0.01)
        return s.num_workers

    with ElasticJob(2, body) as job:
        job.until_told(0, "ready")
        job.join()
        stories = job.finish()
    assert "need strategy.share_state(checkpoint)" in (stories[2].failure or "")
    assert [story.result for story in stories[:2]] == [2, 2]


def test_an_iterator_that_is_not_in_the_state_takes_in_nobody() -> None:
    def body(rank: Rank) -> Any:
        program = Program(rank)
        s = program.strategy
        evaluation = s.distribute_dataset(xd.from_arrays((X, Y)).batch(BATCH))

        def each() -> None:
            if program.state.step == 2 and rank.number < 2:
                wait_for_newcomers()
                for element in evaluation:
                    s.run(lambda x, y: None, element)
                rank.tell("workers after evaluation", s.num_workers)

        return program.train(5, each)

    with ElasticJob(2, body) as job:
        job.until_told(0, "step")
        job.join()
        stories = job.finish()
    check(stories, 5, 3)
    assert stories[0].all("workers after evaluation") == [2]


def test_loops_without_an_iterator_take_newcomers_in_where_they_say() -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        with s.scope():
            w = xd.Variable(0.0, name="w", aggregation="SUM")
        state = xd.Checkpoint(w=w, step=0)
        s.share_state(state)

        def step() -> None:
            w.assign_add(1.0)

        while state.step < 6:
            s.take_in_newcomers()
            s.run(step)
            state.step += 1
            if state.step == 3:
                rank.tell("waits")
                wait_for_newcomers()
        return float(w), s.num_workers

    with ElasticJob(2, body) as job:
        job.until_told(0, "waits")
        job.join()
        stories = job.finish()
    assert [story.failure for story in stories] == [None] * 3
    assert [story.result for story in stories] == [(3 * 2.0 + 3 * 3.0, 3)] * 3


def test_when_all_that_had_the_state_are_gone_a_newcomer_does_not_begin_anew() -> None:
    def body(rank: Rank) -> Any:
        program = Program(rank)

        def each() -> None:
            if program.state.step == 2:
                wait_for_newcomers()
                # The state is handed over in the third collective after the processes have found one another.
                rank.dies_at("meeting", 4, after=False)

        return program.train(50, each)

    with ElasticJob(1, body) as job:
        job.until_told(0, "step")
        job.join()
        stories = job.finish()
    assert stories[0].was_killed
    assert "all processes that had the state are gone" in (stories[1].failure or ""), stories[1]


def test_the_sums_of_the_lost_survive_until_they_are_begun_anew() -> None:
    """Also where those die who have inherited them, with newcomers, and where steps assign."""

    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank, 2)
        with s.scope():
            total = xd.Variable(np.zeros(3), name="t", synchronization="ON_READ", aggregation="SUM")
            mean = xd.Variable(0.0, name="m", synchronization="ON_READ", aggregation="MEAN")
        state = xd.Checkpoint(total=total, mean=mean, it=iterator_of(s), step=0)
        s.share_state(state)
        killed = {0: 1, 1: 3, 2: 5}

        def step(x: Any, y: Any) -> None:
            total.assign_add(np.full(3, float(len(x))))
            mean.assign(float(state.step))
            if killed.get(rank.number) == state.step:
                rank.die()
            xd.all_reduce("SUM", 1.0)

        reads = []
        while state.step < 8:
            if state.step == 2 and rank.number < 3:
                wait_for_newcomers()
            s.run(step, next(state.it))
            state.step += 1
            rank.tell("step", state.step)
            reads.append((total.read_value().tolist(), float(mean.read_value())))
        total.assign(np.full(3, 12.0))
        after = total.read_value().tolist()
        s.run(lambda: total.assign(np.ones(3)))
        return reads[-3:], after, total.read_value().tolist(), s.num_replicas_in_sync

    with ElasticJob(3, body) as job:
        job.until_told(1, "step")
        job.join()
        stories = job.finish()
    story = stories[3]
    assert story.failure is None, story.failure
    reads, after, ones, replicas = story.result
    assert reads == [([6.0 * BATCH] * 3, 5.0), ([7.0 * BATCH] * 3, 6.0), ([8.0 * BATCH] * 3, 7.0)]
    assert (after, ones, replicas) == ([12.0] * 3, [2.0] * 3, 2)
