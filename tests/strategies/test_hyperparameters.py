"""Numbers that optimizers and schedules are made with, given as something else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import strategies as xd
from strategies import schedules

NO_NUMBERS: list[Any] = ["0.9", "x", None, 0.9j, np.complex64(1), [0.1], np.array([0.1, 0.2]), {}, object()]
NUMBERS: list[Any] = [
    0.5,
    1,
    np.float32(0.5),
    np.float64(0.5),
    np.array(0.5),
    np.int64(1),
    ml_dtypes.bfloat16(0.5),
]
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": xd.SGD,
    "Adam": xd.Adam,
    "AdamW": xd.AdamW,
    "RMSprop": xd.RMSprop,
    "Adagrad": xd.Adagrad,
    "LAMB": xd.LAMB,
}
OF_ALL = ["weight_decay", "clipvalue", "clipnorm", "global_clipnorm"]
FLAGS = {"nesterov", "amsgrad", "centered", "options"}
CASES = sorted(
    {
        (kind, name)
        for kind, make in OPTIMIZERS.items()
        for name in [*inspect.signature(make).parameters, *OF_ALL]
        if name not in FLAGS
    }
)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_what_is_no_real_number_is_refused_by_its_name(kind: str, name: str) -> None:
    for value in NO_NUMBERS:
        if value is None and name in ("clipvalue", "clipnorm", "global_clipnorm"):
            continue  # no bound
        words = (
            rf"{name}(=|: got ){re.escape(repr(value))}, which is {type(value).__name__}; need a real number"
        )
        with pytest.raises(TypeError, match=words) as caught:
            OPTIMIZERS[kind](**{name: value})
        assert ("convert it by float()" in str(caught.value)) == isinstance(value, str)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_numbers_of_numpy_are_numbers(kind: str, name: str) -> None:
    for value in NUMBERS:
        if name in ("beta_1", "beta_2", "rho") and value >= 1:
            continue
        OPTIMIZERS[kind](**{name: value})


def test_a_learning_rate_may_be_a_function_and_is_refused_where_it_is_set() -> None:
    optimizer = xd.SGD(learning_rate=lambda step: 0.1)
    with pytest.raises(
        TypeError, match=r"SGD: got learning_rate='0\.1', which is str; need a real number, or a function"
    ):
        optimizer.learning_rate = "0.1"  # type: ignore[assignment]
    assert callable(optimizer.learning_rate)


@pytest.mark.parametrize(
    "make",
    [
        lambda bad: schedules.constant(bad),
        lambda bad: schedules.exponential_decay(bad, 10, 0.5),
        lambda bad: schedules.exponential_decay(0.1, bad, 0.5),
        lambda bad: schedules.exponential_decay(0.1, 10, bad),
        lambda bad: schedules.cosine_decay(0.1, 10, bad),
        lambda bad: schedules.polynomial_decay(0.1, 10, bad),
        lambda bad: schedules.polynomial_decay(0.1, 10, 0.1, bad),
        lambda bad: schedules.warm_up(0.1, bad),
        lambda bad: schedules.warm_up(0.1, 10, bad),
        lambda bad: schedules.piecewise_constant([1, 2], [0.1, bad, 0.3]),
        lambda bad: schedules.piecewise_constant([1, bad], [0.1, 0.2, 0.3]),
        lambda bad: schedules.scale_linearly(0.1, bad, 32),
        lambda bad: xd.LossScaleOptimizer(xd.SGD(), bad),
        lambda bad: xd.LossScaleOptimizer(xd.SGD(), 2.0, bad),
        lambda bad: xd.ExponentialMovingAverage([xd.Variable(1.0)], bad),
        lambda bad: xd.GradientAccumulator(bad),
        lambda bad: xd.clip_by_global_norm([np.ones(2)], bad),
    ],
    ids=[f"{number}" for number in range(17)],
)
def test_schedules_and_what_goes_around_optimizers_refuse_it_too(make: Callable[[Any], Any]) -> None:
    for bad in ("10", None, 1j):
        with pytest.raises(TypeError, match=rf"{re.escape(repr(bad))}, which is .*; need a real number"):
            make(bad)
