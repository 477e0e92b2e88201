"""Every example runs, and its numbers are those of plain NumPy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from examples import custom_metrics, linear_regression, mlp
from strategies import CentralStorageStrategy, MirroredStrategy, OneDeviceStrategy, Strategy, from_arrays

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text())
NEEDS = {"digits": "matplotlib", "torch_cnn": "torch", "jax_mlp": "jax", "autograd_mlp": "autograd"}
"""What a program that trains on the digits needs beside them."""


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs_as_its_first_lines_say(program: str, tmp_path: Path) -> None:
    if program in NEEDS:
        pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra demo")
        pytest.importorskip(NEEDS[program], reason=f"needs {NEEDS[program]}, which is not installed")
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


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_tells_its_flags_and_refuses_others(program: str) -> None:
    if program in NEEDS:
        pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra demo")
        pytest.importorskip(NEEDS[program], reason=f"needs {NEEDS[program]}, which is not installed")
    for flag, status, stream in (("--help", 0, "stdout"), ("--no-such-flag", 2, "stderr")):
        done = subprocess.run(
            [sys.executable, "-m", f"examples.{program}", flag],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == status
        assert getattr(done, stream).startswith(f"usage: python -m examples.{program} [-h]")


def test_the_examples_are_all_run() -> None:
    assert PROGRAMS == [
        "autograd_mlp",
        "custom_metrics",
        "digits",
        "elastic",
        "jax_mlp",
        "linear_regression",
        "torch_cnn",
    ]


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
def test_the_metrics_of_uneven_batches_are_those_of_plain_numpy(
    make: Callable[[], Strategy],
) -> None:
    train_set, test_set = custom_metrics.scatter(600, seed=1), custom_metrics.scatter(97, seed=2)
    with make() as strategy:
        results = custom_metrics.run(strategy, train_set, test_set)

    weight, bias, smoothed_loss = np.zeros((2, 3)), np.zeros(3), np.log(3)
    for places, labels in from_arrays(tuple(train_set)).shuffle(seed=0).batch(32):
        probabilities = softmax(places @ weight + bias)
        loss = -np.log(probabilities[np.arange(len(labels)), labels]).mean()
        smoothed_loss = 0.95 * smoothed_loss + 0.05 * loss
        derivatives = (probabilities - np.eye(3)[labels]) / len(labels)
        weight -= 0.5 * places.T @ derivatives
        bias -= 0.5 * derivatives.sum(axis=0)
    probabilities = softmax(test_set.places @ weight + bias)
    confusion = np.zeros((3, 3), np.int64)
    for true, predicted in zip(test_set.labels, probabilities.argmax(axis=1), strict=True):
        confusion[true, predicted] += 1

    np.testing.assert_allclose(results.weight, weight, rtol=1e-9)
    np.testing.assert_allclose(results.bias, bias, rtol=1e-9)
    assert results.smoothed_loss == pytest.approx(smoothed_loss, rel=1e-9)
    np.testing.assert_array_equal(results.confusion, confusion)
    np.testing.assert_allclose(
        results.test_losses, -np.log(probabilities[np.arange(97), test_set.labels]), rtol=1e-9
    )
    assert confusion.trace() / 97 > 0.8


def softmax(logits: mlp.Floats) -> mlp.Floats:
    exponentials = np.exp(logits)
    probabilities: mlp.Floats = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probabilities
