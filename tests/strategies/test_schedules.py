"""Learning-rate schedules, against Keras's formulas written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strategies import SGD, MirroredStrategy, Variable, schedules

STEPS = range(40)


def values(schedule: Callable[[int], float]) -> list[float]:
    return [schedule(step) for step in STEPS]


def test_a_constant_is_always_the_same() -> None:
    assert values(schedules.constant(0.25)) == [0.25] * len(STEPS)


def test_a_boundary_is_the_last_step_of_its_value() -> None:
    schedule = schedules.piecewise_constant([2, 5], [1.0, 0.5, 0.1])
    assert [schedule(step) for step in range(8)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.1, 0.1]


def test_exponential_decay_is_smooth_or_in_steps() -> None:
    smooth = [0.3 * 0.5 ** (step / 10) for step in STEPS]
    assert values(schedules.exponential_decay(0.3, 10, 0.5)) == pytest.approx(smooth)
    stairs = [0.3 * 0.5 ** math.floor(step / 10) for step in STEPS]
    assert values(schedules.exponential_decay(0.3, 10, 0.5, staircase=True)) == pytest.approx(stairs)


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_a_cosine_ends_at_its_lowest_and_stays(alpha: float) -> None:
    expected = [
        0.3 * ((1 - alpha) * 0.5 * (1 + math.cos(math.pi * min(step, 25) / 25)) + alpha) for step in STEPS
    ]
    got = values(schedules.cosine_decay(0.3, 25, alpha))
    assert got == pytest.approx(expected)
    assert got[0] == 0.3
    assert got[25:] == pytest.approx([0.3 * alpha] * 15)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_a_polynomial_ends_at_its_lowest_and_stays_or_starts_again(power: float) -> None:
    ended = [(0.3 - 0.01) * (1 - min(step, 12) / 12) ** power + 0.01 for step in STEPS]
    assert values(schedules.polynomial_decay(0.3, 12, 0.01, power)) == pytest.approx(ended)
    lengths = [12 * max(1, math.ceil(step / 12)) for step in STEPS]
    cycled = [
        (0.3 - 0.01) * (1 - step / length) ** power + 0.01
        for step, length in zip(STEPS, lengths, strict=True)
    ]
    assert values(schedules.polynomial_decay(0.3, 12, 0.01, power, cycle=True)) == pytest.approx(cycled)


def test_warm_up_leads_to_the_first_value_of_what_follows() -> None:
    after = schedules.cosine_decay(0.4, 10)
    expected = [0.1 + (0.4 - 0.1) * step / 8 if step < 8 else after(step - 8) for step in STEPS]
    assert values(schedules.warm_up(after, 8, start=0.1)) == pytest.approx(expected)
    assert [schedules.warm_up(0.5, 2)(step) for step in range(4)] == [0, 0.25, 0.5, 0.5]


def test_the_learning_rate_grows_with_the_global_batch() -> None:
    assert schedules.scale_linearly(0.1, 1024, 256) == pytest.approx(0.4)
    assert schedules.scale_linearly(0.1, 64, 256) == pytest.approx(0.025)


def test_an_optimizer_asks_with_the_number_of_updates_before() -> None:
    asked: list[int] = []
    schedule = schedules.warm_up(schedules.exponential_decay(1.0, 1, 0.5), 2)

    def asking(step: int) -> float:
        asked.append(step)
        return schedule(step)

    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            w = Variable(np.zeros(1))
            optimizer = SGD(asking)
        for _ in range(5):
            strategy.run(lambda: optimizer.apply_gradients([(np.full(1, 0.5), w)]))
        assert asked == [0, 1, 2, 3, 4]  # once for all replicas
        np.testing.assert_allclose(w.read_value(), [-(0 + 0.5 + 1 + 0.5 + 0.25)])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: schedules.constant(-1), "learning_rate: got -1; need at least 0"),
        (lambda: schedules.piecewise_constant([1], [1.0]), "1 boundaries and 1 values; need one value more"),
        (lambda: schedules.piecewise_constant([5, 2], [1.0, 2, 3]), "need them ascending"),
        (lambda: schedules.piecewise_constant([2, 2], [1.0, 2, 3]), "got boundaries .*ascending"),
        (lambda: schedules.exponential_decay(0.1, 0, 0.5), "decay_steps: got 0; need at least 1"),
        (lambda: schedules.exponential_decay(0.1, 5, 0.0), "decay_rate=0.0; need a number above 0"),
        (lambda: schedules.cosine_decay(0.1, 5, -0.5), "alpha: got -0.5"),
        (lambda: schedules.polynomial_decay(0.1, 5, power=-1), "power: got -1"),
        (lambda: schedules.warm_up(0.1, 0), "num_steps: got 0; need at least 1"),
        (lambda: schedules.warm_up(-0.1, 5), "learning_rate: got -0.1"),
        (lambda: schedules.scale_linearly(0.1, 0, 5), "global_batch_size: got 0"),
    ],
)
def test_numbers_out_of_range_are_refused_when_a_schedule_is_made(
    make: Callable[[], Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make()
