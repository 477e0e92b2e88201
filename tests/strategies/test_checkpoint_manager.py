"""A folder of numbered checkpoints."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import numpy as np
import pytest

import strategies as xpd


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_latest_ones_are_kept_and_counted_on(tmp_path: Path) -> None:
    checkpoint = xpd.Checkpoint(step=0)
    manager = xpd.CheckpointManager(checkpoint, tmp_path / "new" / "folder", max_to_keep=2)
    assert (manager.latest_checkpoint, manager.checkpoints) == (None, [])
    for step in range(1, 13):
        checkpoint.step = step
        path = manager.save()
    assert names(tmp_path / "new" / "folder") == ["ckpt-11.safetensors", "ckpt-12.safetensors"]
    assert manager.latest_checkpoint == path == xpd.latest_checkpoint(tmp_path / "new" / "folder")
    again = xpd.CheckpointManager(checkpoint, tmp_path / "new" / "folder", max_to_keep=2)
    assert again.save().endswith("ckpt-13.safetensors")


def test_numbers_may_be_steps(tmp_path: Path) -> None:
    manager = xpd.CheckpointManager(xpd.Checkpoint(v=1), tmp_path, max_to_keep=None, checkpoint_name="run")
    for step in (900, 1000, 90):
        manager.save(step)
    assert [Path(path).name for path in manager.checkpoints] == [
        "run-90.safetensors",
        "run-900.safetensors",
        "run-1000.safetensors",
    ]
    manager.save(1000)
    assert len(manager.checkpoints) == 3


@pytest.mark.parametrize(
    ("best", "metrics", "kept"),
    [
        ("max", [0.5, 0.9, 0.7, 0.6, 0.8], [2, 5]),
        ("min", [0.5, 0.9, 0.1, 0.6, 0.8], [3, 5]),
        ("MAX", [0.1, 0.2, 0.3, 0.4, 0.4], [4, 5]),
        ("max", [0.9, 0.1, 0.1, 0.1, 0.1], [1, 5]),
    ],
)
def test_the_best_one_is_kept_beside_the_latest(
    best: str, metrics: list[float], kept: list[int], tmp_path: Path
) -> None:
    manager = xpd.CheckpointManager(xpd.Checkpoint(v=1), tmp_path, max_to_keep=2, best=best)
    for metric in metrics:
        manager.save(metric=metric)
    assert names(tmp_path) == [f"ckpt-{number}.safetensors" for number in kept]
    expected = (min if best == "min" else max)(enumerate(metrics, 1), key=lambda entry: (entry[1], entry[0]))[
        0
    ]
    # Made anew, it reads the metrics from the files.
    for each in (manager, xpd.CheckpointManager(xpd.Checkpoint(v=1), tmp_path, best=best)):
        assert each.best_checkpoint == str(tmp_path / f"ckpt-{expected}.safetensors")


def test_with_room_for_one_the_best_and_the_latest_are_kept(tmp_path: Path) -> None:
    manager = xpd.CheckpointManager(xpd.Checkpoint(v=1), tmp_path, max_to_keep=1, best="max")
    for metric in (0.1, 0.9, 0.5):
        manager.save(metric=metric)
    assert names(tmp_path) == ["ckpt-2.safetensors", "ckpt-3.safetensors"]


def test_no_metric_or_nan_is_refused_where_the_best_is_kept(tmp_path: Path) -> None:
    manager = xpd.CheckpointManager(xpd.Checkpoint(v=1), tmp_path, best="max")
    for metric in (None, float("nan")):
        with pytest.raises(ValueError, match="this manager keeps the best"):
            manager.save(metric=metric)
    assert manager.best_checkpoint is None
    with pytest.raises(ValueError, match="need CheckpointManager"):
        _ = xpd.CheckpointManager(xpd.Checkpoint(v=1), tmp_path).best_checkpoint


def test_a_run_begins_anew_or_goes_on(tmp_path: Path) -> None:
    v, called = xpd.Variable(0.0), []
    manager = xpd.CheckpointManager(xpd.Checkpoint(v=v), tmp_path)
    assert manager.restore_or_initialize(lambda: called.append(1)) is None
    v.assign(3.0)
    path = manager.save()
    v.assign(0.0)
    assert manager.restore_or_initialize(lambda: called.append(2)) == path
    assert (float(v), called) == (3.0, [1])


def test_a_damaged_latest_checkpoint_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    v = xpd.Variable(np.zeros(10))
    manager = xpd.CheckpointManager(xpd.Checkpoint(v=v), tmp_path)
    for number in (1.0, 2.0):
        v.assign(np.full(10, number))
        manager.save()
    latest = Path(str(manager.latest_checkpoint))
    latest.write_bytes(latest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"passed over a checkpoint: .*ckpt-2.safetensors"):
        restored = manager.restore_or_initialize()
    assert restored == str(tmp_path / "ckpt-1.safetensors")
    assert v.numpy().tolist() == [1.0] * 10
    (tmp_path / "ckpt-1.safetensors").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(xpd.CheckpointError, match="none of the 2 checkpoints"),
    ):
        manager.restore_or_initialize()


def test_a_checkpoint_of_another_model_is_an_error(tmp_path: Path) -> None:
    xpd.CheckpointManager(xpd.Checkpoint(v=xpd.Variable([1.0])), tmp_path).save()
    with pytest.raises(xpd.CheckpointMismatchError, match="v: the checkpoint has"):
        xpd.CheckpointManager(xpd.Checkpoint(v=xpd.Variable([1.0, 2.0])), tmp_path).restore_or_initialize()


def test_saves_in_the_background_are_numbered_and_removed_alike(tmp_path: Path) -> None:
    checkpoint = xpd.Checkpoint(v=xpd.Variable(np.zeros(100_000)))
    manager = xpd.CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    for _ in range(4):
        manager.save(blocking=False)
    checkpoint.wait()
    assert names(tmp_path) == ["ckpt-3.safetensors", "ckpt-4.safetensors"]


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    for name in ("ckpt-x.safetensors", "ckpt-1.safetensors.bak", "other-1.safetensors", "notes.txt"):
        (tmp_path / name).write_text("mine")
    manager = xpd.CheckpointManager(xpd.Checkpoint(v=1), tmp_path, max_to_keep=1)
    manager.save(), manager.save()
    assert len(names(tmp_path)) == 5
    assert manager.checkpoints == [str(tmp_path / "ckpt-2.safetensors")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_to_keep": 0}, "max_to_keep=0; need at least 1"),
        ({"checkpoint_name": "a/b"}, "without a folder"),
        ({"best": "most"}, "best"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        xpd.CheckpointManager(xpd.Checkpoint(v=1), tmp_path, **arguments)  # type: ignore[arg-type]


def test_restoring_the_latest_of_none_changes_nothing_and_warns_of_nothing(tmp_path: Path) -> None:
    checkpoint = xpd.Checkpoint(weights=np.ones(2), step=3)
    manager = xpd.CheckpointManager(checkpoint, tmp_path / "runs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status = checkpoint.restore(manager.latest_checkpoint)
        assert checkpoint.read(None).missing == ["step", "weights"]
        del status
        gc.collect()
    np.testing.assert_array_equal(checkpoint.weights, [1, 1])
    assert checkpoint.step == 3
    with pytest.raises(AssertionError, match=r"restore\(None\): no value for step, weights"):
        checkpoint.restore(None).assert_consumed()
