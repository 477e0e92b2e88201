"""Jobs that lose processes and go on: killed at every place where that can happen, with weights as if nothing had."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import strategies as xd
from collectives.processes import joined
from tests.elastic_jobs import ElasticJob, Rank, Story, elastic_strategy

ROWS, FEATURES, BATCH = 96, 5, 24
_rng = np.random.default_rng(3)
X = _rng.normal(size=(ROWS, FEATURES))
Y = X @ _rng.normal(size=FEATURES) + 0.1 * _rng.normal(size=ROWS)

Weights = npt.NDArray[np.float64]


def batch(step: int) -> tuple[Weights, Weights]:
    begin = step * BATCH % ROWS
    return X[begin : begin + BATCH], Y[begin : begin + BATCH]


def gradient(w: Weights, x: Weights, y: Weights) -> Weights:
    return 2 * x.T @ (x @ w - y) / BATCH


def undisturbed(num_steps: int) -> Weights:
    """SGD with momentum, in plain NumPy, in one process."""
    w, velocity = np.zeros(FEATURES), np.zeros(FEATURES)
    for step in range(num_steps):
        velocity = 0.9 * velocity - 0.02 * gradient(w, *batch(step))
        w = w + velocity
    return w


def undisturbed_adam(num_steps: int) -> tuple[Weights, Weights, Weights]:
    """Adam in plain NumPy: the weights and both moments."""
    w, m, v = np.zeros(FEATURES), np.zeros(FEATURES), np.zeros(FEATURES)
    for step in range(num_steps):
        g = gradient(w, *batch(step))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        rate = 0.01 * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        w = w - rate * m / (np.sqrt(v) + 1e-7)
    return w, m, v


class Program:
    """Linear regression by SGD with momentum, as users write it, with places where a process can be made to die."""

    def __init__(self, rank: Rank, num_replicas: int = 1, **arguments: Any) -> None:
        self.rank = rank
        self.strategy = s = elastic_strategy(rank, num_replicas, **arguments)
        with s.scope():
            self.w = xd.Variable(np.zeros(FEATURES), name="w")
            self.seen = xd.Variable(
                0, dtype=np.int64, name="seen", synchronization="ON_READ", aggregation="SUM"
            )
            self.optimizer = xd.SGD(0.02, momentum=0.9)
        self.iterator = iter(s.distribute_dataset(xd.from_arrays((X, Y)).batch(BATCH).repeat()))
        self.state = xd.Checkpoint(
            w=self.w, seen=self.seen, optimizer=self.optimizer, iterator=self.iterator, step=0
        )
        s.share_state(self.state)
        rank.tell("ready", s.num_workers)
        self.in_step: Callable[[], object] = lambda: None

    def step(self, x: Weights, y: Weights) -> float:
        self.seen.assign_add(len(x))
        self.in_step()
        loss = np.sum((x @ self.w - y) ** 2)
        self.optimizer.apply_gradients([(gradient(self.w.value(), x, y), self.w)])
        return float(loss)

    def train_step(self) -> Any:
        loss = self.strategy.run(self.step, next(self.iterator))
        self.state.step += 1
        return loss

    def train(self, num_steps: int, each: Callable[[], object] = lambda: None) -> dict[str, Any]:
        while self.state.step < num_steps:
            self.train_step()
            self.rank.tell("step", self.state.step)
            each()
        return self.result()

    def result(self) -> dict[str, Any]:
        return {
            "w": np.array(self.w),
            "seen": int(self.seen.read_value()),
            "iterations": self.optimizer.iterations,
            "workers": self.strategy.num_workers,
            "worker": self.strategy.worker_id,
        }


def check(stories: list[Story], num_steps: int, workers: int, lost: int | None = None) -> list[Story]:
    """All who were not killed have ended well, with what an undisturbed run has.

    ``workers`` is how many there were at the end as they know it, ``lost`` how many were killed.
    """
    failures = [story.failure for story in stories if story.failure]
    assert not failures, failures[0]
    ended = [story for story in stories if not story.was_killed]
    assert len(ended) == (workers if lost is None else len(stories) - lost)
    expected = undisturbed(num_steps)
    for story in ended:
        np.testing.assert_allclose(story.result["w"], expected, rtol=1e-12)
        assert story.result["iterations"] == num_steps
        assert story.result["workers"] == workers
        np.testing.assert_array_equal(story.result["w"], ended[0].result["w"])
    assert len({story.result["worker"] for story in ended}) == len(ended)
    return ended


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_process_killed_in_a_step_is_done_without_and_the_step_is_made_once(
    victim: int, num_replicas: int
) -> None:
    def body(rank: Rank) -> Any:
        program = Program(rank, num_replicas)

        def in_step() -> None:
            if rank.number == victim and program.state.step == 3:
                rank.die()

        program.in_step = in_step
        return program.train(8)

    with ElasticJob(3, body) as job:
        stories = job.finish()
    died = stories[victim].when("dies")
    for story in check(stories, 8, 2):
        (change,) = story.all("change")
        assert (change.lost, change.num_joined, change.num_workers) == ((victim,), 0, 2)
        assert change.num_replicas_in_sync == 2 * num_replicas
        assert change.worker_id == story.result["worker"]
        assert f"process {victim} of 3" in change.reason
        assert story.when("change") - died < 1.0
        assert story.result["seen"] == 8 * BATCH


@pytest.mark.slow
@pytest.mark.parametrize("what", ["meeting", "message"])
def test_wherever_a_process_is_killed_the_others_go_on_and_every_step_counts_once(what: str) -> None:
    """At each of the meetings of a program that does everything that processes do together, and at each word to the hub."""

    def make(number: int, after: bool) -> Callable[[Rank], Any]:
        def body(rank: Rank) -> Any:
            if rank.number == 1:
                rank.dies_at(what, number, after=after)
            program = Program(rank)
            s = program.strategy

            def each() -> None:
                if program.state.step == 2:
                    # Large enough for two meetings, in memory that is shared and in memory that is not.
                    total = s.reduce("SUM", np.full(20_000, 1.0), None)
                    assert total[0] == s.num_workers
                    assert len(s.gather(np.ones((7_000, 1)), 0)) == 7_000 * s.num_workers
                    assert program.seen.read_value() == 2 * BATCH
                    with s.scope():
                        program.state.late = xd.Variable(np.full(9_000, 7.0), name="late")

            return program.train(4, each)

        return body

    number, is_last = 0, False
    while not is_last:
        number += 1
        for after in (False, True):
            with ElasticJob(3, make(number, after)) as job:
                stories = job.finish()
            # After the last of it the others have nothing left to notice it by.
            is_last = stories[0].result is not None and stories[0].result["workers"] == 3
            for story in check(stories, 4, 3 if is_last else 2, lost=None if stories[1].result else 1):
                assert story.result["seen"] == 4 * BATCH
    assert number > (20 if what == "meeting" else 3)


def wait_for_newcomers(seconds: float = 10.0) -> None:
    """In a process of the job: go on when one waits to be taken in, or none has come for so long."""
    processes = joined()
    assert processes is not None
    assert processes.channel is not None
    until = time.monotonic() + seconds
    while not processes.channel.newcomers and time.monotonic() < until:
        time.sleep(0.001)


def test_a_process_that_comes_later_gets_the_state_of_the_others_and_trains_with_them() -> None:
    def body(rank: Rank) -> Any:
        program = Program(rank)
        rank.tell("begins", (program.state.step, np.array(program.w), program.optimizer.iterations))

        def each() -> None:
            if program.state.step == 3 and rank.number < 2:
                wait_for_newcomers()

        return program.train(9, each)

    with ElasticJob(2, body) as job:
        job.until_told(0, "step")
        job.join()
        stories = job.finish()
    newcomer = stories[2]
    step, weights, iterations = newcomer.all("begins")[0]
    assert (step, iterations) == (3, 3)
    np.testing.assert_allclose(weights, undisturbed(3), rtol=1e-12)
    check(stories, 9, 3)
    for number, story in enumerate(stories):
        (change,) = story.all("change")
        assert (change.lost, change.num_joined, change.num_workers, change.worker_id) == ((), 1, 3, number)
        assert story.result["seen"] == 9 * BATCH
    assert newcomer.all("step") == [4, 5, 6, 7, 8, 9]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["meeting", "message"])
@pytest.mark.parametrize("victim", [0, 1, 3], ids=["the chief", "a survivor", "the newcomer"])
def test_wherever_a_process_is_killed_in_taking_in_another_one_the_others_go_on(
    victim: int, what: str
) -> None:
    """The newcomer begins to count when it is started; the others when it is there."""

    def make(number: int, after: bool) -> Callable[[Rank], Any]:
        def body(rank: Rank) -> Any:
            if rank.number == victim == 3:
                rank.dies_at(what, number, after=after)
            program = Program(rank)

            def each() -> None:
                if program.state.step == 2 and rank.number < 3:
                    wait_for_newcomers(0.5)  # it may be killed before
                    if rank.number == victim:
                        rank.dies_at(what, number, after=after)

            return program.train(5, each)

        return body

    number, is_last = 0, False
    while not is_last:
        number += 1
        for after in (False, True):
            with ElasticJob(3, make(number, after)) as job:
                job.until_told(0, "step")
                job.join()
                stories = job.finish()
            is_last = stories[2].result is not None and stories[2].result["workers"] == 4
            for story in check(stories, 5, 4 if is_last else 3, lost=None if stories[victim].result else 1):
                assert story.result["seen"] == 5 * BATCH
    assert number > (8 if what == "meeting" else 3)


# ------------------------------------------------------------------ groups beside the strategy


def test_groups_beside_the_strategy_go_on_among_those_that_are_left() -> None:
    def body(rank: Rank) -> Any:
        program = Program(rank)
        group, background = xd.process_group(), xd.NonBlocking(xd.process_group())

        def in_step() -> None:
            if rank.number == 1 and program.state.step == 3:
                rank.die()

        program.in_step = in_step
        result = program.train(8)
        total = background.all_reduce(np.full(1000, group.rank + 1.0)).result(10)
        return {**result, "sum": float(total[0]), "ranks": group.all_gather_object(group.rank)}

    with ElasticJob(3, body) as job:
        for story in check(job.finish(), 8, 2):
            assert story.result["sum"] == 3.0
            assert story.result["ranks"] == [0, 1]


def test_a_group_that_not_all_have_any_more_is_given_up_at_a_loss_and_the_job_goes_on() -> None:
    def body(rank: Rank) -> Any:
        program = Program(rank)
        group: xd.Communicator | None = xd.process_group()
        if rank.number:
            group = None  # as an interpreter that collects it earlier
            gc.collect()

        def in_step() -> None:
            if rank.number == 1 and program.state.step == 3:
                rank.die()

        program.in_step = in_step
        result = program.train(8)
        said = ""
        if group is not None:
            with pytest.raises(xd.CollectiveAbortedError) as caught:
                group.barrier()
            said = str(caught.value)
        return {**result, "said": said}

    with ElasticJob(3, body) as job:
        first, _ = check(job.finish(), 8, 2)
    assert "another process has this group no more" in first.result["said"]
