"""RMSprop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack, final

import numpy as np

from collectives.arrays import Array
from strategies.optimizers.hyperparameters import require_real
from strategies.optimizers.optimizer import LearningRate, Optimizer, OptimizerOptions
from strategies.optimizers.update_rule import UpdateRule


def RMSprop(  # noqa: N802  # named as the classes of other libraries, whose place it takes
    learning_rate: LearningRate = 0.001,
    rho: float = 0.9,
    momentum: float = 0.0,
    epsilon: float = 1e-7,
    centered: bool = False,
    **options: Unpack[OptimizerOptions],
) -> Optimizer:
    """RMSprop (Tieleman and Hinton 2012; centered as in Graves, arXiv:1308.0850), in Keras's form.

    ``v = rho * v + (1 - rho) * g*g``, and the change is ``learning_rate * g / sqrt(v + epsilon)``; centered, the square of the
    mean gradient ``a = rho * a + (1 - rho) * g`` is taken off ``v`` in the root. With momentum, ``m = momentum * m + change``
    and ``w -= m``.

    Args:
        learning_rate: a number, or a function of the number of updates before this one.
        rho: decay of the mean square, from 0 to below 1.
        momentum: from 0 to 1.
        epsilon: above 0; keeps the division finite.
        centered: whether to divide by an estimate of the variance instead of the mean square.
        options: what all optimizers have; see `Optimizer`.

    Raises:
        TypeError: what is no real number.
        ValueError: a number outside of its range.
    """
    require_real("RMSprop", rho=rho, momentum=momentum, epsilon=epsilon)
    if not 0 <= rho < 1:
        raise ValueError(f"RMSprop: got rho={rho}; need a number from 0 to below 1")
    if not 0 <= momentum <= 1:
        raise ValueError(f"RMSprop: got momentum={momentum}; need a number from 0 to 1")
    if not epsilon > 0:
        raise ValueError(f"RMSprop: got epsilon={epsilon}; need a number above 0")
    rule = RmspropRule(rho, momentum, epsilon, centered)
    options.setdefault("name", "RMSprop")
    return Optimizer(rule, learning_rate, **options)


@final
@dataclass(frozen=True)
class RmspropRule(UpdateRule):
    """The rule behind `RMSprop`."""

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False

    @property
    def slots(self) -> Mapping[str, float]:
        slots = {"velocity": 0.0}
        if self.momentum:
            slots["momentum"] = 0.0
        if self.centered:
            slots["average_gradient"] = 0.0
        return slots

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
        step: int,  # noqa: ARG002  # part of the interface
        learning_rate: float,
    ) -> None:
        (work,) = scratch
        velocity = slots["velocity"]
        np.multiply(gradients, gradients, out=work)
        np.multiply(work, 1 - self.rho, out=work)
        np.multiply(velocity, self.rho, out=velocity)
        np.add(velocity, work, out=velocity)
        if self.centered:
            mean = slots["average_gradient"]
            np.multiply(mean, self.rho, out=mean)
            np.multiply(gradients, 1 - self.rho, out=work)
            np.add(mean, work, out=mean)
            np.multiply(mean, mean, out=work)
            np.subtract(velocity, work, out=work)
            np.add(work, self.epsilon, out=work)
        else:
            np.add(velocity, self.epsilon, out=work)
        np.sqrt(work, out=work)
        np.divide(gradients, work, out=work)
        np.multiply(work, learning_rate, out=work)
        if self.momentum:
            change = slots["momentum"]
            np.multiply(change, self.momentum, out=change)
            np.add(change, work, out=change)
            np.subtract(parameters, change, out=parameters)
        else:
            np.subtract(parameters, work, out=parameters)
