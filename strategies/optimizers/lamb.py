"""LAMB."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack, final

import numpy as np

from collectives.arrays import Array
from strategies.optimizers.clipping import sum_of_squares
from strategies.optimizers.hyperparameters import require_real
from strategies.optimizers.optimizer import LearningRate, Optimizer, UndecayedOptions
from strategies.optimizers.update_rule import UpdateRule


def LAMB(  # noqa: N802  # named as the classes of other libraries, whose place it takes
    learning_rate: LearningRate = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    weight_decay: float = 0.0,
    **options: Unpack[UndecayedOptions],
) -> Optimizer:
    """LAMB (You et al., arXiv:1904.00962, algorithm 2): Adam's direction, scaled to each variable's norm, for large batches.

    ``r = m' / (sqrt(v') + epsilon) + weight_decay * w`` with bias-corrected moments, and
    ``w -= learning_rate * |w| / |r| * r``; a norm of zero counts as a ratio of one.

    Args:
        learning_rate: a number, or a function of the number of updates before this one.
        beta_1: decay of the first moment, from 0 to below 1.
        beta_2: decay of the second moment, likewise.
        epsilon: above 0; keeps the division finite.
        weight_decay: >= 0; part of the direction whose norm is taken.
        options: what all optimizers have; see `Optimizer`.

    Raises:
        TypeError: what is no real number.
        ValueError: a number outside of its range.
    """
    require_real("LAMB", beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, weight_decay=weight_decay)
    for what, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
        if not 0 <= beta < 1:
            raise ValueError(f"LAMB: got {what}={beta}; need a number from 0 to below 1")
    if not epsilon > 0 or not weight_decay >= 0:
        raise ValueError(
            f"LAMB: got epsilon={epsilon}, weight_decay={weight_decay}; need epsilon > 0, weight_decay >= 0"
        )
    rule = LambRule(beta_1, beta_2, epsilon, weight_decay)
    options.setdefault("name", "LAMB")
    return Optimizer(rule, learning_rate, **options)


@final
@dataclass(frozen=True)
class LambRule(UpdateRule):
    """The rule behind `LAMB`."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    weight_decay: float = 0.0

    @property
    def slots(self) -> Mapping[str, float]:
        return {"momentum": 0.0, "velocity": 0.0}

    @property
    def num_scratch(self) -> int:
        return 2

    @property
    def needs_whole_variables(self) -> bool:
        return True

    def update(
        self,
        parameters: Array,
        gradients: Array,
        slots: Mapping[str, Array],
        scratch: list[Array],
        *,
        step: int,
        learning_rate: float,
    ) -> None:
        direction, work = scratch
        momentum, velocity = slots["momentum"], slots["velocity"]
        np.subtract(gradients, momentum, out=work)
        np.multiply(work, 1 - self.beta_1, out=work)
        np.add(momentum, work, out=momentum)
        np.multiply(gradients, gradients, out=work)
        np.subtract(work, velocity, out=work)
        np.multiply(work, 1 - self.beta_2, out=work)
        np.add(velocity, work, out=velocity)
        np.divide(velocity, 1 - self.beta_2**step, out=work)
        np.sqrt(work, out=work)
        np.add(work, self.epsilon, out=work)
        np.divide(momentum, 1 - self.beta_1**step, out=direction)
        np.divide(direction, work, out=direction)
        if self.weight_decay:
            np.multiply(parameters, self.weight_decay, out=work)
            np.add(direction, work, out=direction)
        ratio = _norm(parameters) / (_norm(direction) or math.inf) or 1.0
        np.multiply(direction, learning_rate * ratio, out=direction)
        np.subtract(parameters, direction, out=parameters)


def _norm(array: Array) -> float:
    return math.sqrt(sum_of_squares(array))
