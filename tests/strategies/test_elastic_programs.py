"""What programs of elastic jobs do beside plain training: other optimizers, state of their own, mistakes."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strategies as xd
from strategies.checkpoints.optimizer_state import slots_of
from strategies.metrics import Accuracy, AccuracyKind, Mean
from tests.elastic_jobs import ElasticJob, Rank, elastic_strategy
from tests.strategies.test_elastic import (
    BATCH,
    FEATURES,
    Program,
    X,
    Y,
    check,
    gradient,
    undisturbed,
    undisturbed_adam,
    wait_for_newcomers,
)


def iterator_of(strategy: xd.MultiWorkerMirroredStrategy) -> Any:
    return iter(strategy.distribute_dataset(xd.from_arrays((X, Y)).batch(BATCH).repeat()))


def failures_of(job: ElasticJob) -> list[str]:
    return [story.failure for story in job.finish() if story.failure]


@pytest.mark.parametrize("victims", [(0, 1), (1, 2), (0, 1, 2)], ids=str)
def test_several_may_be_killed_at_the_same_time(victims: tuple[int, ...]) -> None:
    def body(rank: Rank) -> Any:
        program = Program(rank)

        def in_step() -> None:
            if rank.number in victims and program.state.step == 2:
                rank.die()

        program.in_step = in_step
        return program.train(5)

    with ElasticJob(4, body) as job:
        stories = job.finish()
    for story in check(stories, 5, 4 - len(victims)):
        assert story.result["seen"] == 5 * BATCH
        lost = [number for change in story.all("change") for number in change.lost]
        assert len(lost) == len(victims)


def test_adam_and_its_slots_are_as_if_nothing_had_been_lost_also_in_a_newcomer() -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        with s.scope():
            w = xd.Variable(np.zeros(FEATURES), name="w")
            adam = xd.Adam(0.01, epsilon=1e-7)
        state = xd.Checkpoint(w=w, adam=adam, it=iterator_of(s), step=0)
        s.share_state(state)

        def step(x: Any, y: Any) -> None:
            g = gradient(w.value(), x, y)
            if rank.number == 1 and state.step == 3:
                rank.die()
            adam.apply_gradients([(g, w)])

        while state.step < 10:
            s.run(step, next(state.it))
            state.step += 1
            rank.tell("step", state.step)
            if state.step == 5 and rank.number < 3:
                wait_for_newcomers()
        return (
            np.array(w),
            [np.array(slots_of(adam, slot, w)[0]) for slot in adam.rule.slots],
            adam.iterations,
        )

    with ElasticJob(3, body) as job:
        job.until(lambda: job.stories[1].was_killed)
        job.join()
        stories = job.finish()
    expected, m, v = undisturbed_adam(10)
    ended = [story for story in stories if not story.was_killed]
    assert [story.failure for story in ended] == [None] * 3
    for story in ended:
        weights, slots, iterations = story.result
        np.testing.assert_allclose(weights, expected, rtol=1e-9)
        np.testing.assert_allclose(slots[0], m, rtol=1e-9)
        np.testing.assert_allclose(slots[1], v, rtol=1e-9)
        assert iterations == 10
        np.testing.assert_array_equal(weights, ended[0].result[0])


def test_a_step_with_two_optimizers_and_an_assignment_after_them_is_taken_back_as_a_whole() -> None:
    """The second optimizer's collective comes after the first one's update."""

    def make(kill_in: int) -> Any:
        def body(rank: Rank) -> Any:
            s = elastic_strategy(rank)
            with s.scope():
                w, v = xd.Variable(np.zeros(FEATURES), name="w"), xd.Variable(np.zeros(FEATURES), name="v")
                total = xd.Variable(0.0, name="total", aggregation="SUM")
                first, second = xd.SGD(0.02, momentum=0.9), xd.SGD(0.02, momentum=0.9)
            state = xd.Checkpoint(
                w=w, v=v, total=total, first=first, second=second, it=iterator_of(s), step=0
            )
            s.share_state(state)

            def step(x: Any, y: Any) -> None:
                first.apply_gradients([(gradient(w.value(), x, y), w)])
                if rank.number == 2 and state.step == kill_in:
                    rank.die()
                second.apply_gradients([(gradient(v.value(), x, y), v)])
                total.assign_add(float(len(x)))

            while state.step < 6:
                s.run(step, next(state.it))
                state.step += 1
            return np.array(w), np.array(v), float(total), first.iterations, second.iterations

        return body

    expected = undisturbed(6)
    for kill_in in (0, 1, 4):
        with ElasticJob(3, make(kill_in)) as job:
            stories = job.finish()
        for story in stories[:2]:
            assert story.failure is None, story.failure
            w, v, total, *iterations = story.result
            np.testing.assert_allclose(w, expected, rtol=1e-12)
            np.testing.assert_allclose(v, expected, rtol=1e-12)
            assert (total, iterations) == (6 * BATCH, [6, 6])


def test_what_steps_keep_beside_variables_is_taken_back_too() -> None:
    """Sums of gradients, averages, the scale of a loss, random streams."""
    num_steps = 6

    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        with s.scope():
            w = xd.Variable(np.zeros(FEATURES), name="w")
            optimizer = xd.LossScaleOptimizer(xd.SGD(0.02, momentum=0.9), 8.0, dynamic_growth_steps=2)
            average = xd.ExponentialMovingAverage([w], 0.5)
            draws = xd.ReplicaGenerators(5)
        accumulator = xd.GradientAccumulator(2, reduce=None)
        state = xd.Checkpoint(
            w=w,
            optimizer=optimizer,
            average=average,
            draws=draws,
            accumulator=accumulator,
            it=iterator_of(s),
            step=0,
        )
        s.share_state(state)

        def step(x: Any, y: Any) -> float:
            drawn = draws.common.random()
            scaled = optimizer.scale_loss(gradient(w.value(), x, y))
            accumulator.step([0.5 * scaled])
            sums = accumulator.step([0.5 * scaled])
            if rank.number == 0 and state.step == 3:
                rank.die()
            assert sums is not None
            optimizer.apply_gradients([(sums[0], w)])
            average.update()
            xd.all_reduce("SUM", 1.0)
            return float(drawn)

        drawn = []
        while state.step < num_steps:
            drawn.append(s.run(step, next(state.it)))
            state.step += 1
        return (
            np.array(w),
            average.average(w),
            optimizer.loss_scale,
            optimizer.iterations,
            drawn,
            accumulator.state()["replicas"],
        )

    with ElasticJob(3, body) as job:
        stories = job.finish()
    averages = np.zeros(FEATURES)
    for done in range(1, num_steps + 1):
        averages = averages + 0.5 * (undisturbed(done) - averages)
    for story in stories[1:]:
        assert story.failure is None, story.failure
        w, average, scale, iterations, drawn, sums = story.result
        np.testing.assert_allclose(w, undisturbed(num_steps), rtol=1e-12)
        np.testing.assert_allclose(average, averages, rtol=1e-12)
        assert (scale, iterations) == (8.0 * 2**3, num_steps)
        assert len(set(drawn)) == num_steps
        assert drawn == stories[1].result[4]
        assert all(one["count"] == 0 for one in sums.values())


def test_a_step_that_catches_the_error_of_a_lost_process_is_made_again_all_the_same() -> None:
    def body(rank: Rank) -> Any:
        program = Program(rank)
        plain = program.step

        def in_step() -> None:
            if rank.number == 2 and program.state.step in (2, 4):
                rank.die()

        program.in_step = in_step

        def swallows(x: Any, y: Any) -> Any:
            try:
                return plain(x, y)
            except Exception as error:
                rank.tell("caught", type(error).__name__)
                if program.state.step == 2:
                    return None
                raise ValueError("of the user's") from error

        program.step = swallows  # type: ignore[method-assign]
        return program.train(6)

    with ElasticJob(3, body, replaces=False) as job:
        stories = job.finish()
    for story in check(stories, 6, 2):
        assert story.all("caught") == ["PeerFailedError"]
        assert story.result["seen"] == 6 * BATCH


def test_arguments_that_are_no_shares_of_a_batch_are_done_without_and_that_is_said() -> None:
    def body(rank: Rank) -> Any:
        said: list[str] = []
        logging.getLogger("xpdistribute").addHandler(Keeping(said))
        s = elastic_strategy(rank)
        done = 0

        def step(own: Any) -> Any:
            if rank.number == 1 and done in (1, 3):
                rank.die()
            return xd.all_reduce("SUM", float(own))

        totals = []
        for done in range(4):  # noqa: B007  # the step looks at it
            values = s.distribute_values_from_function(lambda _: 10.0**rank.number)
            totals.append(float(np.asarray(s.local_results(s.run(step, (values,)))[0])))
        return totals, [text for text in said if "made again without" in text]

    with ElasticJob(3, body) as job:
        stories = job.finish()
    for number in (0, 2):
        assert stories[number].failure is None, stories[number].failure
        totals, said = stories[number].result
        assert totals == [111.0, 101.0, 101.0, 101.0]
        assert len(said) == 1  # of two times that it happened


class Keeping(logging.Handler):
    """Keeps what this process says in its log."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def test_with_fewer_than_min_workers_all_that_are_left_raise_with_the_state_of_the_last_step(
    tmp_path: Path,
) -> None:
    def body(rank: Rank) -> Any:
        program = Program(rank, min_workers=2)

        def in_step() -> None:
            if (rank.number == 0 and program.state.step == 2) or (
                rank.number == 1 and program.state.step == 4
            ):
                rank.die()

        program.in_step = in_step
        with pytest.raises(xd.PeerFailedError, match="1 of 2 processes are left, and min_workers is 2"):
            program.train(8)
        program.state.save(tmp_path / "last.safetensors")
        return np.array(program.w), program.state.step

    with ElasticJob(3, body) as job:
        stories = job.finish()
    assert stories[2].failure is None, stories[2].failure
    weights, step = stories[2].result
    assert step == 4
    np.testing.assert_allclose(weights, undisturbed(4), rtol=1e-12)
    np.testing.assert_array_equal(xd.load_checkpoint(tmp_path / "last.safetensors")["w"], weights)


@pytest.mark.parametrize("number", [-1, 0, 3])
def test_min_workers_must_be_possible(number: int) -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(ValueError, match=f"min_workers={number}; need a number from 1 to .* 2"):
            elastic_strategy(rank, min_workers=number)

    with ElasticJob(2, body) as job:
        assert failures_of(job) == []


def test_processes_of_several_hosts_are_refused_when_an_elastic_strategy_is_made() -> None:
    def body(rank: Rank) -> None:
        os.environ["XPDISTRIBUTE_HOST"] = f"host{rank.number}"
        with pytest.raises(
            RuntimeError, match=r"elastic job: got processes on host0.*host1.*; need processes of one host"
        ):
            elastic_strategy(rank)

    with ElasticJob(2, body) as job:
        assert failures_of(job) == []


def test_a_stopped_process_is_treated_as_dead_and_killed() -> None:
    def body(rank: Rank) -> Any:
        program = Program(rank)
        return program.train(
            8, lambda: time.sleep(1.5 if program.state.step == 3 and rank.number == 1 else 0)
        )

    with ElasticJob(3, body, heartbeat_seconds=0.6) as job:
        job.until(lambda: len(job.stories[1].all("step")) == 3)
        at = job.kill(1, 19)  # SIGSTOP
        stories = job.finish()
    assert stories[1].was_killed
    for story in check(stories, 8, 2):
        (change,) = story.all("change")
        assert change.lost == (1,)
        assert "is treated as dead: nothing was heard of it for 0.6 s" in change.reason
        assert 0.3 < story.when("change") - at < 2.5
        assert story.result["seen"] == 8 * BATCH


@pytest.mark.parametrize("victim", [0, 1])
def test_a_checkpoint_is_saved_although_a_process_dies_in_it(victim: int, tmp_path: Path) -> None:
    def make(number: int) -> Any:
        def body(rank: Rank) -> Any:
            program = Program(rank)
            manager = xd.CheckpointManager(program.state, tmp_path / str(number), max_to_keep=None)

            def each() -> None:
                if program.state.step == 2:
                    if rank.number == victim:
                        rank.dies_at("message", number, after=number % 2 == 0)
                    manager.save()

            return program.train(4, each)

        return body

    for number in range(1, 7):
        with ElasticJob(3, make(number)) as job:
            stories = job.finish()
        other = stories[1 - victim].result
        # Killed when it says goodbye, nobody misses it.
        workers = 3 if other is None else other["workers"]
        for story in check(stories, 4, workers, lost=int(stories[victim].was_killed)):
            assert story.result["seen"] == 4 * BATCH
        # Where the chief had written it before another one died, it is there once more under the next number.
        saved = list((tmp_path / str(number)).glob("*"))
        assert 1 <= len(saved) <= 2
        for path in saved:
            found = xd.load_checkpoint(path)
            assert (found["step"], int(found["seen"])) == (2, 2 * BATCH)
            np.testing.assert_allclose(found["w"], undisturbed(2), rtol=1e-12)


def test_a_loss_in_a_merge_function_or_a_step_inside_it_lets_the_outer_step_be_made_again() -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank, 2)
        with s.scope():
            w = xd.Variable(0.0, name="w", aggregation="SUM")
        state = xd.Checkpoint(w=w, it=iterator_of(s), step=0)
        s.share_state(state)

        def inner() -> Any:
            return xd.all_reduce("SUM", 1.0)

        def merged(strategy: Any, value: Any) -> Any:
            total = strategy.reduce("SUM", value, axis=None)
            if rank.number == 1 and state.step == 2:
                rank.die()
            inside = strategy.run(inner)
            if rank.number == 2 and state.step == 4:
                rank.die()
            return xd.PerReplica([float(total)] * 2), inside

        def step(x: Any, y: Any) -> Any:
            replica = xd.get_replica_context()
            assert replica is not None
            total, inside = replica.merge_call(merged, (float(len(x)),))
            w.assign_add(float(total) * 0 + 1.0)
            return float(np.asarray(total)), float(np.asarray(inside))

        results = []
        while state.step < 6:
            total, inside = s.run(step, next(state.it))
            results.append((total.values[0], inside.values[0]))
            state.step += 1
        return results, float(w)

    with ElasticJob(3, body) as job:
        stories = job.finish()
    assert stories[0].failure is None, stories[0].failure
    results, made = stories[0].result
    assert results == [(BATCH, 6.0)] * 2 + [(BATCH, 4.0)] * 2 + [(BATCH, 2.0)] * 2
    assert made == 2 * 6.0 + 2 * 4.0 + 2 * 2.0


def test_a_step_that_makes_a_collective_after_its_update_only_now_and_then_keeps_copies_once_it_has() -> None:
    """The first time that it does so and loses a process, it can't be made again, and says so; from then on it can."""

    def make(kill_in: int) -> Any:
        def body(rank: Rank) -> Any:
            program = Program(rank)
            plain = program.step

            def sometimes(x: Any, y: Any) -> Any:
                loss = plain(x, y)
                if program.state.step in (2, 5):
                    if rank.number == 0 and program.state.step == kill_in:
                        rank.die()
                    xd.all_reduce("SUM", 1.0)
                return loss

            program.step = sometimes  # type: ignore[method-assign]
            return program.train(8)

        return body

    with ElasticJob(3, make(5)) as job:
        check(job.finish(), 8, 2)
    with ElasticJob(3, make(2)) as job:
        stories = job.finish()
    for story in stories[1:]:
        assert "it can't be made again" in (story.failure or "")


def test_metrics_count_every_example_once_whoever_dies() -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        with s.scope():
            accuracy, mean = Accuracy(AccuracyKind.BINARY), Mean()
        state = xd.Checkpoint(accuracy=accuracy, mean=mean, it=iterator_of(s), step=0)
        s.share_state(state)

        def step(x: Any, y: Any) -> None:
            mean.update_state(y)
            accuracy.update_state((y > 0).astype(float), (x[:, 0] > 0).astype(float))
            if (rank.number, state.step) in ((0, 1), (1, 3)):
                rank.die()
            xd.all_reduce("SUM", 1.0)

        while state.step < 4:
            s.run(step, next(state.it))
            state.step += 1
        return float(mean.result()), float(accuracy.result())

    with ElasticJob(3, body) as job:
        stories = job.finish()
    assert stories[2].failure is None, stories[2].failure
    mean, accuracy = stories[2].result
    np.testing.assert_allclose(mean, np.mean(Y), rtol=1e-6)
    np.testing.assert_allclose(accuracy, np.mean((Y > 0) == (X[:, 0] > 0)), rtol=1e-6)


def test_a_process_that_waits_for_a_message_of_one_that_waits_for_the_lost_goes_on_too() -> None:
    """A ring, in which process 1 hears of the loss by its own message and 2 only by way of 1."""

    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        done = 0

        def step() -> Any:
            replica = xd.get_replica_context()
            assert replica is not None
            me, size, link = (
                replica.replica_id_in_sync_group,
                replica.num_replicas_in_sync,
                replica.communicator,
            )
            if rank.number == 0 and done == 2:
                rank.die()
            if me == 0:
                link.send(np.array([1.0]), 1)
                total = link.recv(size - 1)
            else:
                total = link.recv(me - 1)
                link.send(total + 1.0, (me + 1) % size)
            return float(link.all_reduce(total, "MAX")[0])

        totals = []
        for done in range(4):  # noqa: B007  # the step looks at it
            began = time.monotonic()
            totals.append(s.run(step))
            rank.tell("took", time.monotonic() - began)
        return totals

    with ElasticJob(3, body) as job:
        stories = job.finish()
    for story in stories[1:]:
        assert story.failure is None, story.failure
        assert story.result == [3.0, 3.0, 2.0, 2.0]
        assert max(story.all("took")) < 4.0


def test_a_job_with_two_strategies_goes_on_with_both_whichever_loses_a_process() -> None:
    def body(rank: Rank) -> Any:
        program = Program(rank)
        other = elastic_strategy(rank, 2)
        with other.scope():
            count = xd.Variable(0.0, name="count", synchronization="ON_READ", aggregation="SUM")
        state = xd.Checkpoint(count=count)
        other.share_state(state)

        def evaluate() -> None:
            count.assign_add(1.0)
            if rank.number == 1 and program.state.step == 4:
                rank.die()
            xd.all_reduce("SUM", 1.0)

        def each() -> None:
            if program.state.step in (2, 4):
                other.run(evaluate)

        def in_step() -> None:
            if rank.number == 2 and program.state.step == 5:
                rank.die()

        program.in_step = in_step
        return {**program.train(8, each), "count": float(count.read_value())}

    with ElasticJob(3, body) as job:
        stories = job.finish()
    (left,) = check(stories, 8, 1)
    assert left.result["seen"] == 8 * BATCH
    assert left.result["count"] == 6.0 + 4.0
