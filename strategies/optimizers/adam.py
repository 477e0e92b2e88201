"""Adam."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack, final

import numpy as np

from collectives.arrays import Array
from strategies.optimizers.hyperparameters import require_real
from strategies.optimizers.optimizer import LearningRate, Optimizer, OptimizerOptions, UndecayedOptions
from strategies.optimizers.update_rule import UpdateRule


def Adam(  # noqa: N802  # named as the classes of other libraries, whose place it takes
    learning_rate: LearningRate = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    amsgrad: bool = False,
    **options: Unpack[OptimizerOptions],
) -> Optimizer:
    """Adam (Kingma and Ba, arXiv:1412.6980), in the form with epsilon outside the bias correction, as Keras has it.

    ``m += (1 - beta_1) * (g - m)``, ``v += (1 - beta_2) * (g*g - v)``,
    ``w -= learning_rate * sqrt(1 - beta_2**t) / (1 - beta_1**t) * m / (sqrt(v) + epsilon)``.

    Args:
        learning_rate: a number, or a function of the number of updates before this one.
        beta_1: decay of the first moment, from 0 to below 1.
        beta_2: decay of the second moment, likewise.
        epsilon: above 0; keeps the division finite.
        amsgrad: divide by the largest second moment so far (Reddi et al. 2018).
        options: what all optimizers have; see `Optimizer`.

    Raises:
        TypeError: what is no real number.
        ValueError: a number outside of its range.
    """
    options.setdefault("name", "Adam")
    return Optimizer(_rule("Adam", beta_1, beta_2, epsilon, amsgrad), learning_rate, **options)


def AdamW(  # noqa: N802  # as above
    learning_rate: LearningRate = 0.001,
    weight_decay: float = 0.004,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    amsgrad: bool = False,
    **options: Unpack[UndecayedOptions],
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101): ``w -= learning_rate * weight_decay * w`` first.

    Args:
        learning_rate: a number, or a function of the number of updates before this one.
        weight_decay: >= 0.
        beta_1: as in `Adam`.
        beta_2: as in `Adam`.
        epsilon: as in `Adam`.
        amsgrad: as in `Adam`.
        options: what all optimizers have; see `Optimizer`.

    Raises:
        TypeError: what is no real number.
        ValueError: a number outside of its range.
    """
    rule = _rule("AdamW", beta_1, beta_2, epsilon, amsgrad)
    options.setdefault("name", "AdamW")
    return Optimizer(rule, learning_rate, weight_decay=weight_decay, **options)


def _rule(where: str, beta_1: float, beta_2: float, epsilon: float, amsgrad: bool) -> AdamRule:
    require_real(where, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon)
    for what, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{where}: got {what}={beta}; need a number from 0 to below 1")
    if not epsilon > 0:
        raise ValueError(f"{where}: got epsilon={epsilon}; need a number above 0")
    return AdamRule(beta_1, beta_2, epsilon, amsgrad)


@final
@dataclass(frozen=True)
class AdamRule(UpdateRule):
    """The rule behind `Adam`."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    amsgrad: bool = False

    @property
    def slots(self) -> Mapping[str, float]:
        slots = {"momentum": 0.0, "velocity": 0.0}
        return {**slots, "velocity_hat": 0.0} if self.amsgrad else slots

    @property
    def num_scratch(self) -> int:
        return 1

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
        (work,) = scratch
        momentum, velocity = slots["momentum"], slots["velocity"]
        np.subtract(gradients, momentum, out=work)
        np.multiply(work, 1 - self.beta_1, out=work)
        np.add(momentum, work, out=momentum)
        np.multiply(gradients, gradients, out=work)
        np.subtract(work, velocity, out=work)
        np.multiply(work, 1 - self.beta_2, out=work)
        np.add(velocity, work, out=velocity)
        if self.amsgrad:
            largest = slots["velocity_hat"]
            np.maximum(largest, velocity, out=largest)
            velocity = largest
        np.sqrt(velocity, out=work)
        np.add(work, self.epsilon, out=work)
        np.divide(momentum, work, out=work)
        np.multiply(
            work, learning_rate * math.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step), out=work
        )
        np.subtract(parameters, work, out=parameters)
