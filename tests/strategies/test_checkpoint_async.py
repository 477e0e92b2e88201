"""Saving while training goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strategies as xpd


def started(checkpoint: xpd.Checkpoint, path: Path) -> xpd.PendingSave:
    saving = checkpoint.save(path, blocking=False)
    assert isinstance(saving, xpd.PendingSave)
    return saving


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    with xpd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            v = xpd.Variable(np.zeros(3_000_000))
            total = xpd.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
            optimizer = xpd.SGD(0.1, momentum=0.9)
        history: list[float] = []
        checkpoint = xpd.Checkpoint(v=v, total=total, optimizer=optimizer, history=history, step=0)

        def step() -> None:
            optimizer.apply_gradients([(np.ones(v.shape), v)])
            total.assign_add(1.0)

        strategy.run(step)
        expected = v.numpy()
        saving = started(checkpoint, tmp_path / "c")
        for _ in range(5):
            strategy.run(step)
            history.append(1.0)
            checkpoint.step += 1
        assert saving.wait() == str(tmp_path / "c")
        assert saving.done
    values = xpd.load_checkpoint(tmp_path / "c")
    assert (values["v"] == expected).all()
    assert (values["optimizer/momentum/v"] == expected).all()
    assert (values["total"], values["history"], values["step"]) == (2.0, [], 0)
    assert values["optimizer"]["iterations"] == 1


def test_one_save_after_another_keeps_its_own_state(tmp_path: Path) -> None:
    v = xpd.Variable(np.zeros(500_000))
    checkpoint = xpd.Checkpoint(v=v)
    for number in range(5):
        v.assign(np.full(v.shape, float(number)))
        checkpoint.save(tmp_path / str(number), blocking=False)
    checkpoint.wait()
    for number in range(5):
        assert np.unique(xpd.load_checkpoint(tmp_path / str(number))["v"]).tolist() == [number]


def test_restoring_waits_for_the_save_under_way(tmp_path: Path) -> None:
    v = xpd.Variable(np.ones(2_000_000))
    checkpoint = xpd.Checkpoint(v=v)
    saving = started(checkpoint, tmp_path / "c")
    v.assign(np.zeros(v.shape))
    checkpoint.restore(tmp_path / "c").assert_consumed()
    assert saving.done
    assert v.numpy().all()


def test_an_error_is_raised_by_wait_and_then_forgotten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    checkpoint = xpd.Checkpoint(v=xpd.Variable(1.0))
    saving = started(checkpoint, tmp_path / "file" / "c")
    with pytest.raises(OSError, match="file"):
        saving.wait()
    assert checkpoint.save(tmp_path / "good")


def test_an_error_that_nobody_waited_for_is_raised_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    checkpoint = xpd.Checkpoint(v=xpd.Variable(1.0))
    checkpoint.save(tmp_path / "file" / "c", blocking=False)
    with pytest.raises(OSError, match="file"):
        checkpoint.save(tmp_path / "good")
    assert not (tmp_path / "good").exists()
    checkpoint.save(tmp_path / "good")


def test_what_is_wrong_with_the_objects_is_raised_at_once(tmp_path: Path) -> None:
    with xpd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            v = xpd.Variable(0.0, synchronization="ON_READ")
        with pytest.raises(ValueError, match="aggregation"):
            xpd.Checkpoint(v=v).save(tmp_path / "c", blocking=False)


def test_waiting_has_an_end_and_the_save_goes_on(tmp_path: Path) -> None:
    go_on = threading.Event()
    checkpoint = xpd.Checkpoint(v=xpd.Variable(1.0))
    saving = checkpoint.save(tmp_path / "c", blocking=False, then=lambda: go_on.wait(10))
    assert isinstance(saving, xpd.PendingSave)
    with pytest.raises(TimeoutError, match=r"still being written after 0.05 s"):
        saving.wait(0.05)
    assert not saving.done
    go_on.set()
    saving.wait(10)


def test_a_program_that_ends_lets_the_save_finish(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np, strategies as xpd\n"
        "v = xpd.Variable(np.ones(3_000_000))\n"
        "xpd.Checkpoint(v=v).save(sys.argv[1], blocking=False)\n"
    )
    path = tmp_path / "c"
    subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert xpd.load_checkpoint(path)["v"].all()


def test_the_step_stands_still_for_the_copy_only(tmp_path: Path) -> None:
    written = threading.Event()
    v = xpd.Variable(np.ones(1000))
    begin = time.monotonic()
    saving: Any = xpd.Checkpoint(v=v).save(tmp_path / "c", blocking=False, then=lambda: written.wait(5))
    assert time.monotonic() - begin < 2
    assert not saving.done
    v.assign(np.zeros(1000))
    written.set()
    saving.wait(10)
    assert xpd.load_checkpoint(tmp_path / "c")["v"].all()


def test_a_relative_path_means_the_folder_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    saving = started(xpd.Checkpoint(v=xpd.Variable(np.ones(1_000_000))), Path("c"))
    os.chdir(tmp_path / "elsewhere")
    assert saving.wait(10) == "c"
    assert (tmp_path / "c").is_file()
