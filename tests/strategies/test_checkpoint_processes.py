"""Checkpoints of jobs of several processes: real ones, which find one another by a hub, fail and are killed."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strategies as xd
from collectives import CollectiveTimeoutError, PeerFailedError
from tests.jobs import run_in_job, run_script, strategy_of

SHORT = 1.0
"""Seconds to wait for somebody who doesn't come."""


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """The kind and the text of what a call raises; nothing if it doesn't."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  # compared by the test
        return type(error).__name__, str(error)
    return "", ""


class Written:
    """The files under a folder that this process opens for writing, renames or removes."""

    def __init__(self, folder: Path) -> None:
        self.names: list[str] = []

        def hear(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and str(args[0]).startswith(str(folder)):
                if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                    self.names.append(f"{args[0]}")
            elif event in ("os.rename", "os.remove") and str(args[0]).startswith(str(folder)):
                self.names.append(f"{args[0]}")

        sys.addaudithook(hear)


# ------------------------------------------------------------------------ saving


def test_all_save_and_only_the_chief_writes(tmp_path: Path) -> None:
    """B57."""
    path = tmp_path / "folder" / "ck"

    def save() -> tuple[str, list[str], float]:
        s, written = strategy_of(1), Written(tmp_path)
        with s.scope():
            v = xd.Variable(np.arange(3.0))
            total = xd.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        s.run(lambda: total.assign_add(1.0 + s.worker_id))
        checkpoint = xd.Checkpoint(v=v, total=total, step=4)
        saved = checkpoint.save(path)
        there = xd.load_checkpoint(saved)  # at once, in every process
        return saved, written.names, float(there["total"])

    (first, by_chief, total), (second, by_other, other_total) = run_in_job(2, save)
    assert first == second == str(path)
    assert by_chief
    assert not by_other
    assert total == other_total == 3.0
    assert os.listdir(path.parent) == ["ck"]
    values = xd.load_checkpoint(path)
    np.testing.assert_array_equal(values["v"], [0.0, 1.0, 2.0])
    assert values["step"] == 4


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "in the background"])
def test_a_write_that_fails_raises_the_same_in_all_processes(tmp_path: Path, blocking: bool) -> None:
    path = xd.Checkpoint(x=np.zeros(100_000), step=1).save(tmp_path / "ck")

    def save() -> tuple[str, str, int]:
        s = strategy_of(1)
        if s.is_chief:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        checkpoint = xd.Checkpoint(x=np.ones(100_000), step=2)

        def save_it() -> None:
            pending = checkpoint.save(path, blocking=blocking)
            if isinstance(pending, xd.PendingSave):
                pending.wait()

        kind, text = error_of(save_it)
        if s.is_chief:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        step = int(xd.load_checkpoint(path)["step"])
        checkpoint.save(path)  # and all can go on together
        return kind, text, step

    first, second = run_in_job(2, save)
    text = (
        f"[Errno {errno.EFBIG}] save: {os.strerror(errno.EFBIG)}; need files of 800,000 bytes to be allowed — raise the limit "
        f"(ulimit -f unlimited), or save to another path: {str(path)!r}"
    )
    assert first == second == ("OSError", text, 1)
    assert xd.load_checkpoint(path)["step"] == 2


def test_a_background_save_that_nobody_waited_for_is_told_of_by_the_next_one_in_all_processes(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()

    def save() -> tuple[str, str]:
        s = strategy_of(1)
        checkpoint = xd.Checkpoint(step=1)
        pending = checkpoint.save(tmp_path / "file" / "ck", blocking=False)
        if s.is_chief:  # is told now; the other one by the next save, and then both
            assert isinstance(pending, xd.PendingSave)
            error_of(pending.wait)
        raised = error_of(lambda: checkpoint.save(tmp_path / "ck"))
        checkpoint.save(tmp_path / "ck")
        return raised

    first, second = run_in_job(2, save)
    assert first == second
    assert first[0] == "NotADirectoryError"
    assert f"{tmp_path / 'file'} is no folder; need one there" in first[1]


def test_a_background_save_holds_the_values_of_its_time_and_ends_in_all_processes(tmp_path: Path) -> None:
    def save() -> tuple[str, bool, list[float]]:
        s = strategy_of(1)
        with s.scope():
            v = xd.Variable(np.zeros(1000), aggregation="MEAN")
        checkpoint = xd.Checkpoint(v=v)
        pending = checkpoint.save(tmp_path / "ck", blocking=False)
        assert isinstance(pending, xd.PendingSave)
        s.run(lambda: v.assign(np.ones(1000)))
        if s.worker_id:
            time.sleep(0.2)  # waiting is no collective
        path = pending.wait(10.0)
        return path, pending.done, xd.load_checkpoint(path)["v"].tolist()

    for path, done, values in run_in_job(2, save):
        assert (path, done, set(values)) == (str(tmp_path / "ck"), True, {0.0})


def test_different_paths_are_refused_in_all_processes(tmp_path: Path) -> None:
    def save() -> tuple[tuple[str, str], list[str]]:
        s = strategy_of(1)
        raised = error_of(lambda: xd.Checkpoint(step=1).save(tmp_path / f"ck{s.worker_id}"))
        return raised, os.listdir(tmp_path)

    for (kind, text), there in run_in_job(2, save):
        assert kind == "ValueError"
        assert f"path: got '{tmp_path}/ck0' in process 0, '{tmp_path}/ck1' in process 1" in text
        assert not there


def test_a_save_in_one_process_only_names_who_did_not_come(tmp_path: Path) -> None:
    def save() -> tuple[tuple[str, str], float]:
        s = strategy_of(1, SHORT)
        checkpoint = xd.Checkpoint(step=s.worker_id)
        start = time.monotonic()
        raised = ("", "")
        if s.is_chief:
            raised = error_of(lambda: checkpoint.save(tmp_path / "ck"))
        else:
            time.sleep(SHORT + 0.5)
        seconds = time.monotonic() - start
        checkpoint.save(tmp_path / "later")  # all can still go on together
        return raised, seconds

    ((kind, text), seconds), _ = run_in_job(2, save)
    assert kind == CollectiveTimeoutError.__name__
    assert "for process 1 (pid" in text
    assert "every one must call it" in text
    assert SHORT <= seconds < SHORT + 3.0
    assert os.listdir(tmp_path) == ["later"]


def test_who_saves_while_others_restore_is_told_so(tmp_path: Path) -> None:
    path = xd.Checkpoint(step=1).save(tmp_path / "ck")

    def call() -> tuple[str, str]:
        s = strategy_of(1)
        checkpoint = xd.Checkpoint(step=0)
        return error_of(lambda: checkpoint.save(path) if s.is_chief else checkpoint.restore(path))

    for kind, text in run_in_job(2, call):
        assert kind == "ValueError"
        assert "got save in process 0, restore in process 1" in text


def test_other_objects_in_one_process_are_named_in_all(tmp_path: Path) -> None:
    def save() -> tuple[str, str]:
        s = strategy_of(1)
        more = {"best": 0.5} if s.worker_id == 1 else {}
        return error_of(lambda: xd.Checkpoint(step=1, **more).save(tmp_path / "ck"))

    for kind, text in run_in_job(3, save):
        assert kind == "ValueError"
        assert "the checkpoint of process 1 has best, that of process 0 does not" in text


def test_a_step_is_no_place_to_save_in(tmp_path: Path) -> None:
    def save() -> tuple[str, str]:
        s = strategy_of(1)
        checkpoint = xd.Checkpoint(step=1)
        return error_of(lambda: s.run(lambda: checkpoint.save(tmp_path / "ck")))

    for kind, text in run_in_job(2, save):
        assert kind in ("ReplicaContextError", "PeerFailedError")
        assert "save: called in a step" in text
    assert not os.listdir(tmp_path)


def test_a_variable_without_a_value_across_replicas_is_refused_in_all_processes(tmp_path: Path) -> None:
    def save() -> tuple[str, str]:
        s = strategy_of(2)
        with s.scope():
            v = xd.Variable(0.0, synchronization="ON_READ", aggregation="NONE", name="v")
        return error_of(lambda: xd.Checkpoint(v=v).save(tmp_path / "ck"))

    first, second = run_in_job(2, save)
    assert first == second
    assert first[0] == "ValueError"


def test_a_chief_that_is_killed_before_the_file_is_complete_leaves_the_old_one_whole(tmp_path: Path) -> None:
    path = xd.Checkpoint(x=np.zeros(1000), step=1).save(tmp_path / "ck")
    ended = run_script(
        2,
        """
import os, signal
checkpoint = xd.Checkpoint(x=np.ones(1000), step=2)
if s.is_chief:
    sys.addaudithook(lambda event, args: os.kill(os.getpid(), signal.SIGKILL) if event == "os.rename" else None)
try:
    checkpoint.save(sys.argv[1])
except xd.CollectiveError as error:
    print(type(error).__name__, error)
""",
        args=[path],
    )
    assert ended[0].status == -signal.SIGKILL
    assert ended[1].out.startswith(PeerFailedError.__name__)
    assert "process 0 of 2" in ended[1].out
    assert ended[1].seconds < 10.0
    values = xd.load_checkpoint(path)
    assert values["step"] == 1
    np.testing.assert_array_equal(values["x"], np.zeros(1000))


# --------------------------------------------------------------------- restoring


def _train(s: xd.Strategy, steps: range, restore: Path | None, save: Path | None) -> Any:
    """Adam on a sum over all replicas, so that the number of replicas doesn't matter."""
    with s.scope():
        v = xd.Variable(np.linspace(-1, 1, 5))
        count = xd.Variable(0, synchronization="ON_READ", aggregation="SUM")
        optimizer = xd.optimizers.Adam(0.5 if restore else 0.01)
        metric = xd.metrics.Mean()
    dataset = s.distribute_dataset(xd.from_arrays(np.arange(48.0)).batch(12))
    batches = iter(dataset)
    checkpoint = xd.Checkpoint(v=v, count=count, optimizer=optimizer, metric=metric, batches=batches, step=0)
    status = None if restore is None else checkpoint.restore(restore)

    def step(rows: Any) -> None:
        gradient = np.full(5, np.sum(rows, dtype=np.float64)) * np.arange(5)
        optimizer.apply_gradients([(gradient, v)])
        count.assign_add(len(rows))
        metric.update(rows)

    for _ in steps:
        s.run(step, args=(next(batches),))
        checkpoint.step += 1
    if status is not None:
        status.assert_consumed()
    if save is not None:
        checkpoint.save(save)
    return (
        np.array(v).tolist(),
        int(count),
        float(metric.result()),
        checkpoint.step,
        optimizer.learning_rate,
        optimizer.iterations,
    )


def _mirrored(num_replicas: int) -> xd.Strategy:
    return xd.MirroredStrategy([f"cpu:{number}" for number in range(num_replicas)])


def test_a_run_goes_on_bit_for_bit_in_other_numbers_of_processes_and_replicas(tmp_path: Path) -> None:
    """B59 and B61."""
    undisturbed = _train(_mirrored(4), range(4), None, None)
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    first = run_in_job(2, lambda: _train(strategy_of(2), range(1), None, a))
    assert first[0] == first[1]
    _train(_mirrored(3), range(1), a, b)
    run_in_job(3, lambda: _train(strategy_of(1), range(1), b, c))
    ends = run_in_job(2, lambda: _train(strategy_of(1), range(1), c, None))
    assert ends[0] == ends[1] == undisturbed


def test_what_a_process_does_not_see_the_chief_sends(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=3_000_000)  # more than one piece
    xd.Checkpoint(v=values, step=5).save(tmp_path / "0" / "ck")
    xd.Checkpoint(v=values + 1, step=6).save(tmp_path / "2" / "ck")  # left there by another run
    (tmp_path / "1").mkdir()

    def restore() -> tuple[bool, int, list[str]]:
        s = strategy_of(1)
        os.chdir(tmp_path / str(s.worker_id))  # as the same path on different hosts
        checkpoint = xd.Checkpoint(v=np.zeros(3_000_000), step=0)
        checkpoint.restore("ck").assert_consumed()
        return np.array_equal(checkpoint.v, values), checkpoint.step, os.listdir()

    results = run_in_job(3, restore)
    assert [result[:2] for result in results] == [(True, 5)] * 3
    assert [result[2] for result in results] == [["ck"], [], ["ck"]]


def test_no_checkpoint_and_a_damaged_one_are_told_of_in_all_processes(tmp_path: Path) -> None:
    path = Path(xd.Checkpoint(v=np.arange(1000.0), step=5).save(tmp_path / "ck"))
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    (tmp_path / "damaged").write_bytes(content)

    def restore() -> list[tuple[str, str]]:
        strategy_of(1)
        checkpoint = xd.Checkpoint(v=np.zeros(1000), step=0)
        raised = [error_of(partial(checkpoint.restore, tmp_path / name)) for name in ("none", "damaged")]
        assert checkpoint.step == 0
        checkpoint.restore(path)
        assert checkpoint.step == 5
        return raised

    first, second = run_in_job(2, restore)
    assert first == second
    assert [kind for kind, _ in first] == ["FileNotFoundError", "CheckpointError"]
    assert "the checksum of v is wrong" in first[1][1]


def test_none_restores_nothing_and_must_be_so_in_all_processes(tmp_path: Path) -> None:
    path = xd.Checkpoint(step=5).save(tmp_path / "ck")

    def restore() -> tuple[list[str], tuple[str, str]]:
        s = strategy_of(1)
        checkpoint = xd.Checkpoint(step=1)
        missing = checkpoint.restore(None).missing
        raised = error_of(lambda: checkpoint.restore(path if s.is_chief else None))
        assert checkpoint.step == 1
        return missing, raised

    for missing, (kind, text) in run_in_job(2, restore):
        assert missing == ["step"]
        assert (kind, "None in process 1" in text) == ("ValueError", True)


def test_a_variable_that_does_not_fit_in_one_process_changes_nothing_in_any(tmp_path: Path) -> None:
    path = xd.Checkpoint(v=np.ones(3), w=np.ones(2), step=5).save(tmp_path / "ck")

    def restore() -> tuple[tuple[str, str], float, int]:
        s = strategy_of(1)
        checkpoint = xd.Checkpoint(v=np.zeros(3), w=np.zeros(2 + (s.worker_id == 1)), step=0)
        raised = error_of(lambda: checkpoint.restore(path))
        return raised, float(checkpoint.v.sum()), checkpoint.step

    results = run_in_job(2, restore)
    assert results[0] == results[1]
    (kind, text), total, step = results[0]
    assert kind == "CheckpointMismatchError"
    assert "w: the checkpoint has float64" in text
    assert (total, step) == (0.0, 0)


class Picky:
    """Refuses a state in one process."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def state(self) -> int:
        return 3

    def restore(self, state: int) -> None:
        if self.refuses and state == 4:
            raise ValueError(f"picky: got {state}; need another")


class Four(Picky):
    def state(self) -> int:
        return 4


def test_a_state_that_one_process_refuses_is_taken_back_in_all(tmp_path: Path) -> None:
    path = xd.Checkpoint(a=5, picky=Four(False), v=np.ones(2)).save(tmp_path / "ck")

    def restore() -> tuple[tuple[str, str], int, float]:
        s = strategy_of(1)
        checkpoint = xd.Checkpoint(a=0, picky=Picky(s.worker_id == 1), v=np.zeros(2))
        raised = error_of(lambda: checkpoint.restore(path))
        return raised, checkpoint.a, float(checkpoint.v.sum())

    assert run_in_job(2, restore) == [(("ValueError", "picky: got 4; need another"), 0, 0.0)] * 2


# ----------------------------------------------------------------- random numbers


def test_generators_that_differ_between_processes_each_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> bool:
        s = strategy_of(1)
        rng, old = np.random.default_rng(s.worker_id), np.random.RandomState(s.worker_id)
        rng.random(3), old.rand(3)
        checkpoint = xd.Checkpoint(rng=rng, old=old, step=s.worker_id + 1)
        path = checkpoint.save(tmp_path / "ck")
        expected = rng.random(), old.rand()
        checkpoint.restore(path).assert_consumed()
        assert checkpoint.step == 1  # one step for all: the chief's
        return (rng.random(), old.rand()) == expected

    assert run_in_job(2, draw) == [True, True]
    states = xd.load_checkpoint(tmp_path / "ck")["rng"]
    assert len(states) == 2
    assert states[0] != states[1]
    alone = np.random.default_rng(0)
    xd.Checkpoint(rng=alone).read(tmp_path / "ck")
    assert alone.random() == np.random.default_rng(0).random(4)[3]


def _draws(s: xd.Strategy, checkpoint: Path, *, save: bool) -> list[float]:
    with s.scope():
        generators = xd.ReplicaGenerators(7)

    def draw() -> Any:
        return np.array([generators.replica().random(), generators.common.random()])

    def gathered() -> list[float]:
        drawn: list[float] = s.gather(s.run(draw), 0).tolist()
        return [*drawn, float(generators.across.random())]

    if save:
        gathered()
        xd.Checkpoint(generators=generators).save(checkpoint)
    else:
        xd.Checkpoint(generators=generators).restore(checkpoint).assert_consumed()
    return gathered()


def test_replicas_draw_the_same_numbers_in_any_processes(tmp_path: Path) -> None:
    by_jobs = run_in_job(2, lambda: _draws(strategy_of(2), tmp_path / "ck", save=True))
    in_one = _draws(_mirrored(4), tmp_path / "ck", save=False)
    by_four = run_in_job(4, lambda: _draws(strategy_of(1), tmp_path / "ck", save=False))
    assert by_jobs == [in_one] * 2
    assert by_four == [in_one] * 4
    assert len(set(in_one[:8:2])) == 4
    assert len(set(in_one[1:8:2])) == 1


# ----------------------------------------------------------------------- managers


def test_the_latest_checkpoint_is_what_the_chief_finds(tmp_path: Path) -> None:
    """B61."""

    def manage() -> Any:
        s = strategy_of(1)
        own = tmp_path / str(s.worker_id)  # as where hosts don't share a disk
        own.mkdir()
        os.chdir(own)
        if s.worker_id:
            (own / "cks").mkdir()
            (own / "cks" / "ckpt-99.safetensors").touch()
        checkpoint = xd.Checkpoint(step=0)
        manager = xd.CheckpointManager(checkpoint, "cks", max_to_keep=2)
        told = [manager.latest_checkpoint, xd.latest_checkpoint("cks")]
        for step in range(1, 5):
            checkpoint.step = step
            pending = manager.save(blocking=step % 2 == 0)
            told.append(manager.latest_checkpoint)
            assert pending == told[-1] or isinstance(pending, xd.PendingSave)
        checkpoint.step = -1
        again = xd.CheckpointManager(checkpoint, "cks")
        assert again.restore_or_initialize() == told[-1]
        return told, manager.checkpoints, checkpoint.step, sorted(os.listdir("cks"))

    (first, second) = run_in_job(2, manage)
    assert first[:3] == second[:3]
    names = [None, None, *(f"cks/ckpt-{number}.safetensors" for number in range(1, 5))]
    assert first[0] == names
    assert first[1] == names[-2:]
    assert first[2] == 4
    assert first[3] == ["ckpt-3.safetensors", "ckpt-4.safetensors"]
    assert second[3] == ["ckpt-99.safetensors"]


def test_only_the_chief_removes_old_files(tmp_path: Path) -> None:
    def manage() -> list[str]:
        strategy_of(1)
        written = Written(tmp_path)
        manager = xd.CheckpointManager(xd.Checkpoint(step=0), tmp_path, max_to_keep=1)
        for _ in range(3):
            manager.save()
        return written.names

    chief, other = run_in_job(2, manage)
    assert str(tmp_path / "ckpt-1.safetensors") in chief
    assert not other
    assert os.listdir(tmp_path) == ["ckpt-3.safetensors"]


def test_the_best_checkpoint_goes_by_the_metric_of_the_chief(tmp_path: Path) -> None:
    def manage() -> tuple[Any, tuple[str, str]]:
        s = strategy_of(1)
        manager = xd.CheckpointManager(xd.Checkpoint(step=0), tmp_path, max_to_keep=2, best="max")
        for metric in (0.5, 0.9, 0.1, 0.2):
            manager.save(metric=metric if s.is_chief else -metric)
        best, kept = manager.best_checkpoint, manager.checkpoints
        raised = error_of(lambda: manager.save(metric=0.3 if s.is_chief else float("nan")))
        return (best, kept), raised

    first, second = run_in_job(2, manage)
    assert first == second
    (best, kept), (kind, text) = first
    assert best == str(tmp_path / "ckpt-2.safetensors")
    assert kept == [best, str(tmp_path / "ckpt-4.safetensors")]
    assert (kind, "got metric=nan" in text) == ("ValueError", True)


def test_processes_at_different_steps_are_told_so(tmp_path: Path) -> None:
    def manage() -> tuple[str, str]:
        s = strategy_of(1)
        manager = xd.CheckpointManager(xd.Checkpoint(step=0), tmp_path)
        return error_of(lambda: manager.save(100 + s.worker_id))

    for kind, text in run_in_job(2, manage):
        assert kind == "ValueError"
        assert "got number 100 in process 0, 101 in process 1" in text
    assert not os.listdir(tmp_path)


def test_a_damaged_latest_checkpoint_is_passed_over_in_all_processes(tmp_path: Path) -> None:
    checkpoint = xd.Checkpoint(step=1)
    manager = xd.CheckpointManager(checkpoint, tmp_path)
    manager.save()
    (tmp_path / "ckpt-2.safetensors").write_bytes(b"no")

    def restore() -> tuple[str | None, int]:
        strategy_of(1)
        checkpoint = xd.Checkpoint(step=0)
        with pytest.warns(UserWarning, match="passed over"):
            path = xd.CheckpointManager(checkpoint, tmp_path).restore_or_initialize()
        return path, checkpoint.step

    assert run_in_job(2, restore) == [(str(tmp_path / "ckpt-1.safetensors"), 1)] * 2


def test_a_manager_made_before_the_job_is_joined_serves_it_too(tmp_path: Path) -> None:
    def manage() -> list[str]:
        checkpoint = xd.Checkpoint(step=0)
        manager = xd.CheckpointManager(checkpoint, tmp_path)
        strategy_of(1)
        assert manager.latest_checkpoint is None
        manager.save()
        return manager.checkpoints

    assert run_in_job(2, manage) == [[str(tmp_path / "ckpt-1.safetensors")]] * 2
