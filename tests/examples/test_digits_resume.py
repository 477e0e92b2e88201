"""The demo goes on where it was: the same numbers as without an interruption."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra demo")
pytest.importorskip("matplotlib", reason="the plot is drawn by matplotlib, of the extra demo")

from examples.curves import History
from examples.digits import Digits, load, main, make_strategy, train
from strategies import CheckpointError


@pytest.fixture(scope="module")
def digits() -> Digits:
    whole = load()
    return Digits(whole.train_images[:300], whole.train_labels[:300], *whole[2:])


def trained(
    digits: Digits, epochs: int, folder: Path | None, *, replicas: int = 2, optimizer: str = "adam"
) -> History:
    with make_strategy("mirrored", replicas) as strategy:
        return train(
            strategy,
            digits,
            epochs=epochs,
            optimizer=optimizer,
            checkpoints=folder,
            resume=folder is not None,
        )


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_an_interrupted_training_follows_the_same_curve_to_the_last_bit(
    optimizer: str, digits: Digits, tmp_path: Path
) -> None:
    uninterrupted = trained(digits, 4, None, optimizer=optimizer)
    for epochs in (1, 3, 4):  # each time in new variables, a new optimizer and a new dataset
        resumed = trained(digits, epochs, tmp_path / "new", optimizer=optimizer)
    assert replace(resumed, seconds=0) == replace(uninterrupted, seconds=0)


def test_other_replicas_follow_the_same_curve_up_to_rounding(digits: Digits, tmp_path: Path) -> None:
    uninterrupted = trained(digits, 3, None)
    for epochs, replicas in ((1, 2), (2, 3), (3, 1)):
        resumed = trained(digits, epochs, tmp_path, replicas=replicas)
    np.testing.assert_allclose(resumed.losses, uninterrupted.losses, rtol=1e-7)
    assert resumed.num_examples == uninterrupted.num_examples


def test_after_an_epoch_that_fails_the_one_before_is_gone_on_from(digits: Digits, tmp_path: Path) -> None:
    class CrashError(Exception):
        pass

    def crash_late(history: History) -> None:
        if len(history.losses) == 8:  # of 5 an epoch
            raise CrashError

    with make_strategy("mirrored", 2) as strategy, pytest.raises(CrashError):
        train(strategy, digits, epochs=2, checkpoints=tmp_path, report=crash_late)
    resumed = trained(digits, 2, tmp_path)
    assert resumed.losses == trained(digits, 2, None).losses


def test_other_settings_are_refused(digits: Digits, tmp_path: Path) -> None:
    trained(digits, 1, tmp_path)
    with pytest.raises(CheckpointError, match=r"'optimizer': 'adam'.*this one has .*'optimizer': 'sgd'"):
        trained(digits, 2, tmp_path, optimizer="sgd")


def test_the_command_line_saves_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints"
    common = ["--quiet", "--plot", str(tmp_path / "p.png"), "--checkpoint-dir", str(folder)]
    main([*common, "--epochs", "1"])
    assert [path.name for path in folder.iterdir()] == ["ckpt-1.safetensors"]
    with pytest.raises(SystemExit):
        main([*common, "--epochs", "2"])
    assert "holds checkpoints of another run — add --resume" in re.sub(r"\s+", " ", capsys.readouterr().err)
    main([*common, "--epochs", "2", "--resume", "--replicas", "3"])
    assert sorted(path.name for path in folder.iterdir()) == ["ckpt-1.safetensors", "ckpt-2.safetensors"]
    with pytest.raises(SystemExit):
        main(["--resume"])
    assert "add --checkpoint-dir DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="the same are needed"):
        main([*common, "--epochs", "3", "--resume", "--batch-size", "32"])
