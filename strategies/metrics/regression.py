"""How far predicted numbers are off."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from strategies.metrics.examples import (
    as_real,
    in_one_axis,
    ratio,
    require_integer,
    require_same_shape,
    total,
    total_weight,
)
from strategies.metrics.metric import Comparison


class MeanError(Comparison):
    """A mean over all elements of ``y_true`` and ``y_pred``, which have equal shapes."""

    def __init__(self, name: str) -> None:
        """For the kinds: with the name for error messages and checkpoints."""
        super().__init__(name, (2,))

    @abstractmethod
    def _errors(self, differences: Array) -> Array:
        """What the mean is taken of, from the predictions minus the truth, shape ``(n,)``."""

    def _sums_of(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[float, float]:
        true, pred, weight = _number_pairs(y_true, y_pred, sample_weight, self._where)
        errors = self._errors(pred - true)
        return total(errors, weight), total_weight(errors, weight)

    def _value_of(self, sums: Array) -> float:
        return ratio(sums[0], sums[1])


@final
class MeanSquaredError(MeanError):
    """The mean of the squared errors of all elements."""

    def __init__(self, name: str = "mean_squared_error") -> None:
        super().__init__(name)

    def _errors(self, differences: Array) -> Array:
        return np.square(differences)


@final
class RootMeanSquaredError(MeanError):
    """The square root of the mean of the squared errors of all elements, also those of several outputs."""

    def __init__(self, name: str = "root_mean_squared_error") -> None:
        super().__init__(name)

    def _errors(self, differences: Array) -> Array:
        return np.square(differences)

    def _value_of(self, sums: Array) -> float:
        return math.sqrt(ratio(sums[0], sums[1]))


@final
class MeanAbsoluteError(MeanError):
    """The mean of the errors' absolute values, of all elements."""

    def __init__(self, name: str = "mean_absolute_error") -> None:
        super().__init__(name)

    def _errors(self, differences: Array) -> Array:
        return np.abs(differences)


_LOST = 1e-12
"""The share of the mean square below which a variance is mostly rounding: float64 keeps some four digits of it there."""


@final
class R2Score(Comparison):
    """The share of the truth's variance that the predictions explain: 1 is perfect, 0 as good as the mean.

    ``y_true`` and ``y_pred`` have shape ``(...)``, or ``(..., outputs)`` where there are several, of whose scores the result is
    the mean. It is nan for less than two examples, and where the truth does not vary.

    The variance comes from sums of squares. It is lost in rounding, and the result nan too, where the mean is a million times the
    standard deviation; say then with ``center`` roughly where the mean is.

    Args:
        outputs: how many numbers an example has; 1 also if they have no axis.
        center: what is subtracted from all numbers first.
        name: for error messages and checkpoints.
    """

    def __init__(self, outputs: int = 1, *, center: float = 0.0, name: str = "r2_score") -> None:
        self._outputs = require_integer(outputs, 1, "R2Score: got outputs")
        self._center = float(center)
        super().__init__(name, (5, outputs))

    def _sums_of(self, y_true: Any, y_pred: Any, sample_weight: Any) -> Array:
        where = self._where
        true, pred = as_real(y_true, where), as_real(y_pred, where)
        require_same_shape(true, pred, where)
        if self._outputs > 1 and true.shape[-1:] != (self._outputs,):
            raise ValueError(f"{where}: got shape {true.shape}; need (batch, {self._outputs}), all outputs")
        shape = true.shape if self._outputs == 1 else true.shape[:-1]
        (true, pred), weight = in_one_axis([true, pred], shape, sample_weight, where)
        n = len(true)
        true = true.astype(np.float64).reshape(n, self._outputs) - self._center
        errors = pred.astype(np.float64).reshape(n, self._outputs) - self._center - true
        each = np.ones(n) if weight is None else weight
        counts = [np.full(self._outputs, float(n)), np.full(self._outputs, each.sum())]
        return np.stack([*counts, each @ true, each @ np.square(true), each @ np.square(errors)])

    def _value_of(self, sums: Array) -> float:
        count, weight, true, square, error = sums
        if count[0] < 2 or not weight[0]:
            return math.nan
        variance = square - true * true / weight
        if not (variance > _LOST * square).all():
            return math.nan
        return float(np.mean(1 - error / variance))


def _number_pairs(
    y_true: Any, y_pred: Any, sample_weight: Any, where: str
) -> tuple[Array, Array, Array | None]:
    true, pred = as_real(y_true, where), as_real(y_pred, where)
    require_same_shape(true, pred, where)
    (true, pred), weight = in_one_axis([true, pred], pred.shape, sample_weight, where)
    # In float64 before anything is subtracted: unsigned integers would wrap around.
    return true.astype(np.float64), pred.astype(np.float64), weight
