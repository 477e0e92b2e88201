"""Every example runs, and its numbers are those of plain NumPy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from examples import custom_metrics, linear_regression
from strategies import CentralStorageStrategy, MirroredStrategy, OneDeviceStrategy, Strategy

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs_as_its_first_lines_say(program: str, tmp_path: Path) -> None:
    if program == "digits":
        pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra demo")
        pytest.importorskip("matplotlib", reason="the plot is drawn by matplotlib, of the extra demo")
    assert f"python -m examples.{program}" in (ROOT / "examples" / f"{program}.py").read_text()
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{program}"],
        cwd=tmp_path,  # where the plot is left
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr


def test_the_examples_are_all_run() -> None:
    assert PROGRAMS == ["custom_metrics", "digits", "linear_regression"]


def test_the_straight_line_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    linear_regression.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "y = 3.00 x -1.00"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: OneDeviceStrategy("cpu:0"), id="one_device"),
        pytest.param(lambda: MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]), id="mirrored"),
        pytest.param(
            lambda: CentralStorageStrategy(compute_devices=["cpu:0", "cpu:1"], parameter_device="cpu:0"),
            id="central_storage",
        ),
    ],
)
def test_the_metrics_of_an_uneven_test_set_are_those_of_plain_numpy(
    make: Callable[[], Strategy],
) -> None:
    test_set = custom_metrics.scatter(97, seed=2)
    with make() as strategy:
        results = custom_metrics.run(strategy, custom_metrics.scatter(600, seed=1), test_set)

    logits = test_set.places @ results.weight + results.bias
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    losses = -np.log(probabilities[np.arange(97), test_set.labels])
    confusion = np.zeros((3, 3), np.int64)
    for true, predicted in zip(test_set.labels, logits.argmax(axis=1), strict=True):
        confusion[true, predicted] += 1
    np.testing.assert_array_equal(results.confusion, confusion)
    np.testing.assert_allclose(results.test_losses, losses, rtol=1e-12)
    assert confusion.trace() / 97 > 0.8
