"""Checkpoints as bytes in memory: the file that would be written, and what a process that joins begins with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import strategies as xd


def _strategy(num_replicas: int) -> xd.MirroredStrategy:
    return xd.MirroredStrategy([f"cpu:{number}" for number in range(num_replicas)])


def test_the_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    variable = xd.Variable(np.arange(6.0).reshape(2, 3))
    checkpoint = xd.Checkpoint(variable=variable, step=3, rng=np.random.default_rng(1))
    path = checkpoint.save(tmp_path / "file.safetensors")
    assert checkpoint.to_bytes().tobytes() == Path(path).read_bytes()


def test_objects_take_their_values_back_from_bytes() -> None:
    strategy = _strategy(2)
    with strategy.scope():
        variable, optimizer = xd.Variable(np.ones(3, np.float32)), xd.optimizers.Adam(0.1)
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3, np.float32), variable)]))
    content = xd.Checkpoint(variable=variable, optimizer=optimizer, step=7).to_bytes()
    saved = np.array(variable)

    with _strategy(3).scope():
        other, other_optimizer = xd.Variable(np.zeros(3, np.float32)), xd.optimizers.Adam(0.5)
    restored = xd.Checkpoint(variable=other, optimizer=other_optimizer, step=0)
    restored.from_bytes(content).assert_consumed()
    np.testing.assert_array_equal(np.array(other), saved)
    assert (restored.step, other_optimizer.iterations, other_optimizer.learning_rate) == (7, 1, 0.1)


def test_bytes_hold_the_values_of_their_time() -> None:
    variable = xd.Variable(np.zeros(2))
    checkpoint = xd.Checkpoint(variable=variable)
    content = checkpoint.to_bytes()
    variable.assign([1.0, 2.0])
    checkpoint.from_bytes(content)
    np.testing.assert_array_equal(np.array(variable), [0.0, 0.0])


def test_the_bytes_of_a_file_are_taken_too(tmp_path: Path) -> None:
    path = xd.Checkpoint(step=4).save(tmp_path / "file.safetensors")
    checkpoint = xd.Checkpoint(step=0)
    checkpoint.from_bytes(Path(path).read_bytes())
    assert checkpoint.step == 4


def test_sums_over_replicas_stay_what_they_were_when_a_newcomer_takes_its_part() -> None:
    def make() -> tuple[xd.Variable, xd.Variable, xd.metrics.Mean, xd.Checkpoint]:
        total = xd.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        mean = xd.Variable(0.0, synchronization="ON_READ", aggregation="MEAN")
        metric = xd.metrics.Mean()
        return total, mean, metric, xd.Checkpoint(total=total, mean=mean, metric=metric)

    strategy = _strategy(2)
    with strategy.scope():
        total, mean, metric, checkpoint = make()

    def step() -> None:
        total.assign_add(3.0)
        mean.assign(5.0)
        metric.update(np.ones(4))

    strategy.run(step)
    with _strategy(1).scope():
        total, mean, metric, newcomer = make()
    newcomer.from_bytes(checkpoint.to_bytes(for_newcomer=True)).assert_consumed()
    assert (float(total), float(mean), metric.sums.value().tolist()) == (0.0, 5.0, [0.0, 0.0])
    newcomer.from_bytes(checkpoint.to_bytes()).assert_consumed()
    assert (float(total), float(mean), float(metric.result())) == (6.0, 5.0, 1.0)


def test_bytes_that_are_no_checkpoint_change_nothing() -> None:
    checkpoint = xd.Checkpoint(step=4)
    content = xd.Checkpoint(step=9).to_bytes().tobytes()
    for damaged in (
        b"",
        b"hello",
        content[:-1] if len(content) % 2 else content[:70],
        content.replace(b"9", b"8", 1),
    ):
        with pytest.raises(xd.CheckpointError, match="a checkpoint in memory"):
            checkpoint.from_bytes(damaged)
    assert checkpoint.step == 4


def test_bytes_of_other_variables_change_nothing() -> None:
    content = xd.Checkpoint(a=xd.Variable(np.ones(2)), step=9).to_bytes()
    checkpoint = xd.Checkpoint(a=xd.Variable(np.zeros(3)), step=4)
    with pytest.raises(xd.CheckpointMismatchError, match="a: the checkpoint has"):
        checkpoint.from_bytes(content)
    assert checkpoint.step == 4


def test_a_step_has_no_bytes() -> None:
    strategy = _strategy(2)
    with strategy.scope():
        checkpoint = xd.Checkpoint(variable=xd.Variable(1.0))
    with pytest.raises(xd.ReplicaContextError, match="to_bytes: called in a step"):
        strategy.run(checkpoint.to_bytes)
    with pytest.raises(xd.ReplicaContextError, match="from_bytes: called in a step"):
        strategy.run(checkpoint.from_bytes, args=(b"",))
