"""Checkpoints in jobs that go on without the processes they lose: a save that loses one is made by those who are left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strategies as xd
from tests.elastic_jobs import ElasticJob, Rank, elastic_strategy


class Dying:
    """An object whose state is asked for in the middle of a save."""

    def __init__(self, die: Callable[[], object]) -> None:
        self._die = die

    def state(self) -> int:
        self._die()
        return 1

    def restore(self, state: int) -> None:
        assert state == 1


def _job(body: Callable[[Rank], Any], killed: int) -> list[Any]:
    with ElasticJob(3, body) as job:
        stories = job.finish()
        assert [number for number, story in enumerate(stories) if story.was_killed] == [killed]
        failures = [story.failure for story in stories if story.failure]
        assert not failures, failures[0]
        return [story.result for story in job.survivors]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_killed_while_states_are_collected_is_done_without(tmp_path: Path, victim: int) -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        with s.scope():
            v = xd.Variable(np.arange(3.0))
            total = xd.Variable(1.0, synchronization="ON_READ", aggregation="MEAN")
        dying = Dying(rank.die if rank.number == victim else lambda: None)
        manager = xd.CheckpointManager(xd.Checkpoint(v=v, total=total, dying=dying, step=5), tmp_path)
        path = manager.save()
        return path, manager.latest_checkpoint, s.num_workers, xd.load_checkpoint(path)["step"]

    path = str(tmp_path / "ckpt-1.safetensors")
    assert _job(body, victim) == [(path, path, 2, 5)] * 2


def test_a_chief_killed_before_its_file_is_complete_is_done_without(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        with s.scope():
            v = xd.Variable(np.arange(3.0))
        if rank.number == 0:
            sys.addaudithook(lambda event, _: rank.die() if event == "os.rename" else None)
        path = xd.Checkpoint(v=v, step=5).save(tmp_path / "ck")
        return path, s.worker_id, xd.load_checkpoint(path)["v"].tolist()

    path = str(tmp_path / "ck")
    assert _job(body, 0) == [(path, 0, [0.0, 1.0, 2.0]), (path, 1, [0.0, 1.0, 2.0])]


def test_a_process_killed_while_all_restore_is_done_without(tmp_path: Path) -> None:
    path = xd.Checkpoint(v=np.ones(3), dying=Dying(lambda: None), step=5).save(tmp_path / "ck")

    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        with s.scope():
            v = xd.Variable(np.zeros(3))
        checkpoint = xd.Checkpoint(v=v, dying=Dying(rank.die if rank.number == 2 else lambda: None), step=0)
        checkpoint.restore(path).assert_consumed()
        return s.num_workers, checkpoint.step, np.array(v).tolist()

    assert _job(body, 2) == [(2, 5, [1.0, 1.0, 1.0])] * 2


@pytest.mark.parametrize("kind", ["numbers", "metric", "nested", "iterator"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_checkpoint_without_variables_of_its_own_is_saved_and_restored_again_too(
    tmp_path: Path, kind: str, victim: int
) -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank)
        dying = Dying(lambda: rank.die() if rank.number == victim else None)
        objects: dict[str, Any] = {"a_dying": dying, "step": 5}
        with s.scope():
            if kind == "metric":
                objects["metric"] = xd.metrics.Mean("loss")
                objects["metric"].update(np.array([2.0]))
            elif kind == "nested":
                w, b = xd.Variable(np.ones(2)), xd.Variable(np.zeros(2))
                objects["layers"] = [{"w": w}, [b, {"optimizer": xd.SGD(0.1)}]]
            elif kind == "iterator":
                objects["it"] = iter(s.distribute_dataset(xd.from_arrays(np.arange(8.0)).batch(4)))
        checkpoint = xd.Checkpoint(**objects)
        path = checkpoint.save(tmp_path / "ck")
        checkpoint.step = 0
        checkpoint.restore(path)
        return path, checkpoint.step, s.num_workers

    assert _job(body, victim) == [(str(tmp_path / "ck"), 5, 2)] * 2


def test_a_newcomer_neither_saves_nor_restores_before_it_is_taken_in(tmp_path: Path) -> None:
    xd.CheckpointManager(xd.Checkpoint(v=np.full(2, 7.0), step=3), tmp_path).save(3)

    def body(rank: Rank) -> Any:
        if rank.number == 2:
            os.environ["XPDISTRIBUTE_RANK"] = "0"  # as the launcher numbers one in a lost one's place
        s = elastic_strategy(rank)
        with s.scope():
            v = xd.Variable(np.zeros(2), aggregation="SUM")
        checkpoint = xd.Checkpoint(v=v, step=0)
        manager = xd.CheckpointManager(checkpoint, tmp_path)
        manager.restore_or_initialize()
        refused = ""
        if s.num_workers == 1 or rank.number == 2:
            try:
                manager.save()
            except RuntimeError as error:
                refused = str(error)
        s.share_state(checkpoint)
        rank.tell("ready")
        deadline = time.monotonic() + 20.0
        s.take_in_newcomers()
        while s.num_workers < 3:
            assert time.monotonic() < deadline
            s.take_in_newcomers()
        s.run(lambda: v.assign_add(np.ones(2)))
        checkpoint.step += 1
        path = manager.save(1000)
        return refused, path, manager.latest_checkpoint, checkpoint.step, np.array(v).tolist()

    with ElasticJob(2, body) as job:
        job.until_told(0, "ready")
        job.join()
        stories = job.finish()
    failures = [story.failure for story in stories if story.failure]
    assert not failures, failures[0]
    results = [story.result for story in stories]
    assert results[0] == results[1]
    assert results[2][1:] == results[0][1:]
    assert results[0][1] == results[0][2] == str(tmp_path / "ckpt-1000.safetensors")
    assert "waits to be taken into the job" in results[2][0]
    assert results[0][0] == ""
    assert results[0][3:] == (4, [10.0, 10.0])


def test_random_streams_are_saved_and_the_common_one_stays_common_when_numbers_change(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        s = elastic_strategy(rank, 2)
        with s.scope():
            v, generators = xd.Variable(0.0), xd.ReplicaGenerators(3)

        def draw() -> Any:
            return np.array([[generators.common.random(), generators.replica().random()]])

        s.gather(s.run(draw), 0)
        if rank.number == 0:
            rank.die()
        xd.Checkpoint(v=v, generators=generators).save(tmp_path / "ck")
        drawn = s.gather(s.run(draw), 0)
        return drawn.tolist(), s.num_replicas_in_sync

    first, second = _job(body, 0)
    assert first == second
    drawn, num_replicas = first
    assert num_replicas == 4
    common, own = zip(*drawn, strict=True)
    assert len(set(common)) == 1
    assert len(set(own)) == 4
    # As many replicas in one process draw the same from there on.
    strategy = xd.MirroredStrategy([f"cpu:{number}" for number in range(4)])
    with strategy.scope():
        generators = xd.ReplicaGenerators(3)
    xd.Checkpoint(generators=generators).restore(tmp_path / "ck").expect_partial()
    there = strategy.run(lambda: np.array([[generators.common.random(), generators.replica().random()]]))
    assert strategy.gather(there, 0).tolist() == drawn
