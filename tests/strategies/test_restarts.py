"""Training that fails goes on from its last checkpoint: in the process where it can, else when the job is started again."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import strategies as xd
from tests.jobs import run_in_job, strategy_of

ROOT = Path(__file__).parents[2]


def test_a_function_that_fails_goes_on_from_the_last_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = xd.Checkpoint(step=0, done=[])
    manager = xd.CheckpointManager(checkpoint, tmp_path)
    given: list[str | None] = []

    def train(latest: str | None) -> str:
        given.append(latest)
        while checkpoint.step < 6:
            if checkpoint.step == 3 and len(given) == 1:
                checkpoint.step = 100  # is taken back
                raise OSError("the disk was gone for a moment")
            checkpoint.step += 1
            if checkpoint.step % 2 == 0:
                manager.save()
        return "good"

    with caplog.at_level(logging.WARNING, "xpdistribute"):
        assert xd.run_with_restarts(train, manager) == "good"
    first = str(tmp_path / "ckpt-1.safetensors")
    assert given == [None, first]
    assert checkpoint.step == 6
    [record] = caplog.records
    assert record.getMessage() == (
        f"run_with_restarts: restart 1, after OSError: the disk was gone for a moment; it resumes at {first}"
    )


def test_a_function_that_fails_with_an_error_that_has_no_words_goes_on_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

        __repr__ = __str__

    manager = xd.CheckpointManager(xd.Checkpoint(step=0), tmp_path)
    manager.save()
    given: list[str | None] = []

    def train(latest: str | None) -> str:
        given.append(latest)
        if len(given) == 1:
            raise UnspeakableError
        return "good"

    with caplog.at_level(logging.WARNING, "xpdistribute"):
        assert xd.run_with_restarts(train, manager) == "good"
    assert "after UnspeakableError: <exception str() failed>; it resumes at" in caplog.text


def test_the_last_error_is_raised_after_so_many_restarts(tmp_path: Path) -> None:
    manager = xd.CheckpointManager(xd.Checkpoint(step=0), tmp_path)
    calls = 0

    def train(latest: str | None) -> None:
        nonlocal calls
        del latest
        calls += 1
        manager.save()
        raise ValueError(f"number {calls}")

    with pytest.raises(ValueError, match="number 3") as caught:
        xd.run_with_restarts(train, manager, max_restarts=2)
    assert "restarted 2 times already" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="number 4"):
        xd.run_with_restarts(train, manager, max_restarts=0)


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    checkpoint = xd.Checkpoint(step=0)
    calls = 0

    def train(latest: str | None) -> None:
        nonlocal calls
        assert latest is None
        calls += 1
        raise ValueError("early")

    with pytest.raises(ValueError, match="early") as caught:
        xd.run_with_restarts(train, xd.CheckpointManager(checkpoint, tmp_path))
    assert calls == 1
    assert "no checkpoint yet to go back to" in "".join(caught.value.__notes__)


def test_objects_that_the_checkpoint_has_no_value_for_are_not_gone_on_with(tmp_path: Path) -> None:
    v, optimizer = xd.Variable(np.zeros(2)), xd.optimizers.Adam(0.1)
    manager = xd.CheckpointManager(xd.Checkpoint(v=v, optimizer=optimizer), tmp_path)

    def train(latest: str | None) -> None:
        del latest
        manager.save()  # before there are slots
        optimizer.apply_gradients([(np.ones(2), v)])
        raise ValueError("after the first update")

    with (
        pytest.raises(ValueError, match="after the first update") as caught,
        pytest.warns(xd.PartialRestoreWarning),
    ):
        xd.run_with_restarts(train, manager)
    assert "has no value for optimizer/" in "".join(caught.value.__notes__)


def test_with_a_folder_the_function_makes_its_objects_anew(tmp_path: Path) -> None:
    calls = 0

    def train(latest: str | None) -> int:
        nonlocal calls
        calls += 1
        checkpoint = xd.Checkpoint(step=0)
        checkpoint.restore(latest).expect_partial()
        manager = xd.CheckpointManager(checkpoint, tmp_path)
        while checkpoint.step < 4:
            if calls <= checkpoint.step:
                raise RuntimeError("again")
            checkpoint.step += 1
            manager.save()
        return int(checkpoint.step)

    assert xd.run_with_restarts(train, tmp_path) == 4
    assert calls == 4


def test_what_ends_a_program_is_no_failure(tmp_path: Path) -> None:
    def train(latest: str | None) -> None:
        del latest
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        xd.run_with_restarts(train, tmp_path)


def test_wrong_counts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got max_restarts=-1; need 0 or more"):
        xd.run_with_restarts(lambda latest: latest, tmp_path, -1)
    monkeypatch.setenv("XPDISTRIBUTE_RESTART", "x")
    with pytest.raises(ValueError, match="XPDISTRIBUTE_RESTART: got 'x'"):
        xd.run_with_restarts(lambda latest: latest, tmp_path)


def test_restarts_by_the_launcher_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XPDISTRIBUTE_RESTART", "2")
    calls = 0

    def train(latest: str | None) -> None:
        nonlocal calls
        del latest
        calls += 1
        raise ValueError("again")

    with pytest.raises(ValueError, match="again") as caught:
        xd.run_with_restarts(train, tmp_path, max_restarts=3)
    assert calls == 2
    assert "restarted 3 times already, 2 of them by the launcher" in "".join(caught.value.__notes__)


def test_what_all_processes_raise_alike_they_survive_together(tmp_path: Path) -> None:
    def run() -> tuple[int, int]:
        s = strategy_of(1)
        calls = 0
        checkpoint = xd.Checkpoint(step=0)
        manager = xd.CheckpointManager(checkpoint, tmp_path)

        def train(latest: str | None) -> None:
            nonlocal calls
            del latest
            calls += 1
            while checkpoint.step < 4:
                checkpoint.step += 1
                manager.save()
                if checkpoint.step == 2 and calls == 1:
                    (tmp_path / "file").touch()
                    checkpoint.save(tmp_path / "file" / "more")  # fails in the chief

        xd.run_with_restarts(train, manager)
        del s
        return calls, checkpoint.step

    assert run_in_job(2, run) == [(2, 4)] * 2


def test_a_step_that_fails_in_one_process_is_tried_again_by_all(tmp_path: Path) -> None:
    def run() -> tuple[str, int]:
        s = strategy_of(1)
        with s.scope():
            v = xd.Variable(0.0, aggregation="SUM")
        checkpoint = xd.Checkpoint(v=v)
        manager = xd.CheckpointManager(checkpoint, tmp_path)
        calls = 0

        def step() -> None:
            if s.worker_id:
                raise ValueError("only here")
            v.assign_add(1.0)

        def train(latest: str | None) -> None:
            nonlocal calls
            del latest
            calls += 1
            manager.save()
            s.run(step)

        try:
            xd.run_with_restarts(train, manager)
        except Exception as error:  # noqa: BLE001  # compared below
            return f"{type(error).__name__} {error} {error.__notes__}", calls
        return "", calls

    told = run_in_job(2, run)
    assert [calls for _, calls in told] == [4, 4]
    assert "ValueError only here" in told[1][0]
    assert "PeerFailedError" in told[0][0]
    assert all("restarted 3 times already" in text for text, _ in told)


def test_what_one_process_raises_alone_outside_of_steps_is_not_tried_again(tmp_path: Path) -> None:
    def run() -> tuple[str, int]:
        s = strategy_of(1)
        with s.scope():
            v = xd.Variable(0.0, aggregation="SUM")
        manager = xd.CheckpointManager(xd.Checkpoint(v=v), tmp_path)
        calls = 0

        def train(latest: str | None) -> None:
            nonlocal calls
            del latest
            calls += 1
            manager.save()
            s.run(lambda: v.assign_add(1.0))
            if s.worker_id:
                raise ValueError("only here")

        try:
            xd.run_with_restarts(train, manager)
        except Exception as error:  # noqa: BLE001  # compared below
            return f"{type(error).__name__} {error} {error.__notes__}", calls
        return "", calls

    told = run_in_job(2, run)
    assert told[0] == ("", 1)
    assert told[1][1] == 1
    assert "xpdistribute run --max-restarts" in told[1][0]


_TRAIN = """
import os, signal, sys
import numpy as np
import strategies as xd

s = xd.MultiWorkerMirroredStrategy(communication_options=xd.CommunicationOptions(timeout_seconds=10.0))
with s.scope():
    v = xd.Variable(np.zeros(3))
    optimizer = xd.optimizers.Adam(0.1)
checkpoint = xd.Checkpoint(v=v, optimizer=optimizer, step=0)
manager = xd.CheckpointManager(checkpoint, sys.argv[1])

def step(number):
    if number == 5 and s.worker_id == 1 and os.environ.get("XPDISTRIBUTE_RESTART") == "0" and len(sys.argv) > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.apply_gradients([(np.arange(3.0) + number, v)])

def train(latest):
    while checkpoint.step < 8:
        s.run(step, args=(checkpoint.step,))
        checkpoint.step += 1
        if checkpoint.step % 2 == 0:
            manager.save(checkpoint.step)
    return v.numpy().tolist()

print("result", xd.run_with_restarts(train, manager))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi], which brings mpiexec"
)
def test_a_killed_worker_has_the_job_started_again_at_the_last_checkpoint(tmp_path: Path) -> None:
    """B78."""
    script = tmp_path / "train.py"
    script.write_text(_TRAIN)

    def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "xpdistribute",
                "run",
                "-n",
                "2",
                "--max-restarts",
                "1",
                str(script),
                *arguments,
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
        )

    undisturbed = launch(str(tmp_path / "a"))
    assert undisturbed.returncode == 0, undisturbed.stderr
    killed = launch(str(tmp_path / "b"), "kill")
    assert killed.returncode == 0, killed.stderr
    assert killed.stdout == undisturbed.stdout
    assert killed.stdout.startswith("result [")
    [told] = re.findall("run_with_restarts: restart .*", killed.stderr)
    assert (
        told
        == f"run_with_restarts: restart 1, the job was started again; it resumes at {tmp_path}/b/ckpt-4.safetensors"
    )
