"""Which classes are taken for which."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from collectives.arrays import Array
from strategies.metrics.classes import class_pairs
from strategies.metrics.examples import require_integer
from strategies.metrics.metric import Comparison


@final
class ConfusionMatrix(Comparison):
    """How many examples, or how much weight, of each class (row) were taken for each class (column).

    ``y_true`` has class numbers, shape ``(...)``, or one-hot rows; ``y_pred`` has class numbers or scores,
    shape ``(..., num_classes)``. The result is float64 of shape ``(num_classes, num_classes)``; zeros at first.

    Args:
        num_classes: how many there are.
        name: for error messages and checkpoints.
    """

    def __init__(self, num_classes: int, *, name: str = "confusion_matrix") -> None:
        self._num_classes = require_integer(num_classes, 2, "ConfusionMatrix: got num_classes")
        super().__init__(name, (num_classes, num_classes))

    def _sums_of(self, y_true: Any, y_pred: Any, sample_weight: Any) -> Array:
        size = self._num_classes
        true, pred, weight = class_pairs(y_true, y_pred, sample_weight, size, self._where)
        return np.bincount(true * size + pred, weights=weight, minlength=size * size).reshape(size, size)

    def _value_of(self, sums: Array) -> Array:
        return sums
