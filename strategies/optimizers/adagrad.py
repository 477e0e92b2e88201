"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack, final

import numpy as np

from collectives.arrays import Array
from strategies.optimizers.hyperparameters import require_real
from strategies.optimizers.optimizer import LearningRate, Optimizer, OptimizerOptions
from strategies.optimizers.update_rule import UpdateRule


def Adagrad(  # noqa: N802  # named as the classes of other libraries, whose place it takes
    learning_rate: LearningRate = 0.001,
    initial_accumulator_value: float = 0.1,
    epsilon: float = 1e-7,
    **options: Unpack[OptimizerOptions],
) -> Optimizer:
    """Adagrad (Duchi, Hazan and Singer 2011): steps shrink as an element's squared gradients add up.

    ``a += g*g``, ``w -= learning_rate * g / sqrt(a + epsilon)``. Rows without a sparse gradient stay as they are, which is
    exactly what a dense zero does.

    Args:
        learning_rate: a number, or a function of the number of updates before this one.
        initial_accumulator_value: what the sum of squares starts from, >= 0.
        epsilon: above 0; keeps the division finite.
        options: what all optimizers have; see `Optimizer`.

    Raises:
        TypeError: what is no real number.
        ValueError: a number outside of its range.
    """
    require_real("Adagrad", initial_accumulator_value=initial_accumulator_value, epsilon=epsilon)
    if not initial_accumulator_value >= 0:
        raise ValueError(
            f"Adagrad: got initial_accumulator_value={initial_accumulator_value}; need a number >= 0"
        )
    if not epsilon > 0:
        raise ValueError(f"Adagrad: got epsilon={epsilon}; need a number above 0")
    options.setdefault("name", "Adagrad")
    return Optimizer(AdagradRule(initial_accumulator_value, epsilon), learning_rate, **options)


@final
@dataclass(frozen=True)
class AdagradRule(UpdateRule):
    """The rule behind `Adagrad`."""

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    @property
    def slots(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}

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
        accumulator = slots["accumulator"]
        np.multiply(gradients, gradients, out=work)
        np.add(accumulator, work, out=accumulator)
        np.add(accumulator, self.epsilon, out=work)
        np.sqrt(work, out=work)
        np.divide(gradients, work, out=work)
        np.multiply(work, learning_rate, out=work)
        np.subtract(parameters, work, out=parameters)
