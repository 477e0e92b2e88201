"""The examples with PyTorch, JAX and autograd learn to read, and on two replicas as on one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from strategies import MirroredStrategy, OneDeviceStrategy

pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra demo")

LIBRARIES = {"torch_cnn": "torch", "jax_mlp": "jax", "autograd_mlp": "autograd"}


def example(name: str) -> Any:
    library = LIBRARIES[name]
    pytest.importorskip(library, reason=f"needs {library}: make test-frameworks installs it")
    return import_module(f"examples.{name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_two_replicas_read_96_percent_of_the_test_set(name: str) -> None:
    module = example(name)
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        losses, accuracy = module.train(strategy, module.load("float32"))
    assert len(losses) == 12 * 23
    assert accuracy >= 0.96


# Steps of 479 examples leave two equal shares of 240 and 239: of unequal length.
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("torch_cnn", "float64", 1e-10),
        ("torch_cnn", "float32", 1e-4),
        ("jax_mlp", "float32", 1e-4),
        ("autograd_mlp", "float64", 1e-10),
        ("autograd_mlp", "float32", 1e-4),
    ],
)
def test_two_replicas_follow_the_loss_curve_of_one(name: str, dtype: str, tolerance: float) -> None:
    module = example(name)
    digits = module.load(dtype)
    with OneDeviceStrategy("cpu:0") as one, MirroredStrategy(["cpu:0", "cpu:1"]) as two:
        expected, expected_accuracy = module.train(one, digits, epochs=3, batch_size=479)
        losses, accuracy = module.train(two, digits, epochs=3, batch_size=479)
    assert len(losses) == 9
    np.testing.assert_allclose(losses, expected, rtol=tolerance)
    assert accuracy == pytest.approx(expected_accuracy, abs=1 / 360)
    assert losses[-1] < losses[0]
