"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack, final

import numpy as np

from collectives.arrays import Array
from strategies.optimizers.hyperparameters import require_real
from strategies.optimizers.optimizer import LearningRate, Optimizer, OptimizerOptions
from strategies.optimizers.update_rule import UpdateRule


def SGD(  # noqa: N802  # named as the classes of other libraries, whose place it takes
    learning_rate: LearningRate = 0.01,
    momentum: float = 0.0,
    nesterov: bool = False,
    **options: Unpack[OptimizerOptions],
) -> Optimizer:
    """Stochastic gradient descent: ``w -= learning_rate * g``.

    With momentum, ``m = momentum * m - learning_rate * g`` and ``w += m`` (Polyak 1964); with Nesterov's,
    ``w += momentum * m - learning_rate * g`` (Sutskever et al. 2013, as Keras has it).

    Args:
        learning_rate: a number, or a function of the number of updates before this one.
        momentum: from 0 to 1.
        nesterov: whether momentum is Nesterov's.
        options: what all optimizers have; see `Optimizer`.

    Raises:
        TypeError: what is no real number.
        ValueError: a momentum outside of its range, or Nesterov's without any.
    """
    require_real("SGD", momentum=momentum)
    if not 0 <= momentum <= 1:
        raise ValueError(f"SGD: got momentum={momentum}; need a number from 0 to 1")
    if nesterov and not momentum:
        raise ValueError("SGD: got nesterov=True without momentum; need momentum above 0, 0.9 for example")
    options.setdefault("name", "SGD")
    return Optimizer(SgdRule(momentum, nesterov), learning_rate, **options)


@final
@dataclass(frozen=True)
class SgdRule(UpdateRule):
    """The rule behind `SGD`."""

    momentum: float = 0.0
    nesterov: bool = False

    @property
    def slots(self) -> Mapping[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

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
        (change,) = scratch
        np.multiply(gradients, learning_rate, out=change)
        if not self.momentum:
            np.subtract(parameters, change, out=parameters)
            return
        velocity = slots["momentum"]
        np.multiply(velocity, self.momentum, out=velocity)
        np.subtract(velocity, change, out=velocity)
        if not self.nesterov:
            np.add(parameters, velocity, out=parameters)
            return
        np.subtract(parameters, change, out=parameters)
        np.multiply(velocity, self.momentum, out=change)
        np.add(parameters, change, out=parameters)
