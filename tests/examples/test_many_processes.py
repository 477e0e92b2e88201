"""The examples in several processes: the demo learns the same, and the elastic one loses nothing when processes are killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="xpdistribute run needs mpiexec, of the extra mpi")

from examples.digits import load, make_strategy, train
from strategies import from_arrays

ROOT = Path(__file__).parents[2]

CURVE = """
import json, sys
from examples.digits import load, make_strategy, train

strategy = make_strategy("multi_worker", int(sys.argv[1]))
history = train(strategy, load(), epochs=2, batch_size=359)
if strategy.is_chief:
    print(json.dumps([strategy.num_replicas_in_sync, history.num_examples, history.test_accuracies, history.losses]))
"""


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xpdistribute", "run", "--timeout", "40", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_demo_follows_the_same_loss_curve_in_two_processes_as_in_one(
    replicas: int, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra demo")
    pytest.importorskip("matplotlib", reason="examples.curves draws with it")
    program = tmp_path / "curve.py"
    program.write_text(CURVE)
    done = launch(tmp_path, "-n", "2", str(program), str(replicas))
    assert done.returncode == 0, done.stderr
    num_replicas, num_examples, accuracies, losses = json.loads(done.stdout)
    with make_strategy("one_device", 1) as one:
        expected = train(one, load(), epochs=2, batch_size=359)
    assert num_replicas == 2 * replicas
    assert num_examples == expected.num_examples  # each was seen once, by one of the processes
    assert accuracies == expected.test_accuracies
    np.testing.assert_allclose(losses, expected.losses, rtol=0, atol=1e-9)


def test_the_demo_runs_as_the_readme_says_and_one_process_shows_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra demo")
    pytest.importorskip("matplotlib", reason="examples.curves draws with it")
    done = launch(
        tmp_path,
        "-n",
        "2",
        "--all-output",
        "-m",
        "examples.digits",
        "--strategy",
        "multi_worker",
        "--epochs",
        "1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1
    assert (tmp_path / "digits.png").exists()


def line_in_plain_numpy() -> tuple[np.ndarray, int]:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=600)
    y = 3 * x - 1 + rng.normal(scale=0.1, size=600)
    line, num_steps = np.zeros(2), 0
    for x_batch, y_batch in from_arrays((x, y)).shuffle(seed=0).repeat(5).batch(20):
        error = line[0] * x_batch + line[1] - y_batch
        line -= 0.1 * np.array([np.sum(error * x_batch), np.sum(error)]) / 20
        num_steps += 1
    return line, num_steps


ELASTIC = """
import json
from examples.elastic import fit, tell
from strategies import MultiWorkerMirroredStrategy

line, num_steps = fit(MultiWorkerMirroredStrategy(on_membership_change=tell), (20, 60), pause=0.02)
print("JSON", json.dumps([*line, num_steps]), flush=True)
"""


@pytest.mark.parametrize("replacements", [0, 3])
def test_the_line_is_the_same_when_processes_are_killed_on_the_way(replacements: int, tmp_path: Path) -> None:
    program = tmp_path / "line.py"
    program.write_text(ELASTIC)
    done = launch(
        tmp_path, "-n", "3", "--elastic", "--max-restarts", str(replacements), "--all-output", str(program)
    )
    assert done.returncode == 0, done.stderr
    expected, num_steps = line_in_plain_numpy()
    results = [json.loads(text) for text in re.findall(r"^JSON (.*)$", done.stdout, re.M)]
    assert len(results) == (3 if replacements else 1), done.stdout
    for slope, intercept, count in results:
        assert count == num_steps == 150
        np.testing.assert_allclose([slope, intercept], expected, rtol=1e-9)
    assert done.stdout.count("lost [1]") == 2
    assert done.stdout.count("came") == (2 if replacements else 0)


def test_the_elastic_example_is_a_program_for_one_process_too() -> None:
    from examples.elastic import fit
    from strategies import MultiWorkerMirroredStrategy

    with MultiWorkerMirroredStrategy() as strategy:
        line, num_steps = fit(strategy)
    expected, expected_steps = line_in_plain_numpy()
    assert num_steps == expected_steps
    np.testing.assert_allclose(line, expected, rtol=1e-9)
