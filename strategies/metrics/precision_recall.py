"""How many of those found are right, and how many of the right ones are found."""

from __future__ import annotations

from abc import abstractmethod
from enum import Enum
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.reduce_op import parse_member
from strategies.metrics.classes import as_truth, binary_pairs, class_pairs
from strategies.metrics.examples import as_real, in_one_axis, require_integer, require_same_shape
from strategies.metrics.metric import Comparison


class Average(Enum):
    """How the classes' scores become one, as in scikit-learn."""

    MACRO = "macro"
    """Their mean. Every class counts, also one that never came up."""
    MICRO = "micro"
    """The score of all classes' counts added up."""
    WEIGHTED = "weighted"
    """Their mean, each by how many examples are of the class."""
    NONE = "none"
    """They don't: an array of shape ``(num_classes,)``."""


class ClassScore(Comparison):
    """A score from counts of those that are of a class, are taken for it, and both.

    * Without ``num_classes`` there are two classes: ``y_true`` has 0 and 1, ``y_pred`` scores that say 1 where above
      the threshold, or 0 and 1 themselves; equal shapes.
    * With ``num_classes``, each example is of one class: ``y_true`` has class numbers, shape ``(...)``, or one-hot
      rows; ``y_pred`` has class numbers or scores, shape ``(..., num_classes)``, of which the largest counts.
    * With ``num_classes`` and a threshold, each example may have several labels: ``y_true`` has 0 and 1, ``y_pred`` scores,
      shape ``(..., num_classes)`` both.
    """

    _usual_name: str

    def __init__(
        self,
        num_classes: int | None = None,
        *,
        average: Average | str = Average.MACRO,
        threshold: float | None = None,
        zero_division: float = 0.0,
        name: str | None = None,
    ) -> None:
        """Makes a score with nothing counted.

        Args:
            num_classes: how many there are; None means two, of which the score of class 1 counts.
            average: with ``num_classes``, an `Average` or its name.
            threshold: scores above it say 1. None means 0.5 without ``num_classes``, and the largest score with it.
            zero_division: the score of a class without examples to divide by: 0, 1, or nan, which leaves the class out of
                averages.
            name: for error messages and checkpoints.
        """
        kind = type(self).__name__
        self._num_classes = (
            None if num_classes is None else require_integer(num_classes, 2, f"{kind}: got num_classes")
        )
        self._average = parse_member(Average, average, "average")
        self._threshold = 0.5 if threshold is None and num_classes is None else threshold
        self._zero_division = float(zero_division)
        super().__init__(name or self._usual_name, (3, num_classes or 1))

    @abstractmethod
    def _parts(self, both: Array, taken: Array, actual: Array) -> tuple[Array, Array]:
        """Numerator and denominator of the score."""

    def _sums_of(self, y_true: Any, y_pred: Any, sample_weight: Any) -> Array:
        size = self._num_classes
        if size is not None and self._threshold is None:
            true, pred, weight = class_pairs(y_true, y_pred, sample_weight, size, self._where)
            right = true == pred
            return np.stack(
                [
                    np.bincount(true[right], None if weight is None else weight[right], size),
                    np.bincount(pred, weight, size),
                    np.bincount(true, weight, size),
                ]
            )
        if size is None:
            true, pred, weight = binary_pairs(y_true, y_pred, sample_weight, self._where)
            true, pred = true[:, None], pred[:, None]
        else:
            true, pred, weight = self._label_rows(y_true, y_pred, sample_weight, size)
        taken = pred > self._threshold
        each = np.ones(len(pred)) if weight is None else weight
        return np.stack([each @ (true & taken), each @ taken, each @ true])

    def _label_rows(
        self, y_true: Any, y_pred: Any, sample_weight: Any, size: int
    ) -> tuple[Array, Array, Array | None]:
        true, pred = as_real(y_true, self._where), as_real(y_pred, self._where)
        require_same_shape(true, pred, self._where)
        if pred.shape[-1:] != (size,):
            raise ValueError(
                f"{self._where}: got y_pred of shape {pred.shape}; need (batch, {size}), a score for each label"
            )
        (true, pred), weight = in_one_axis([true, pred], pred.shape[:-1], sample_weight, self._where)
        return as_truth(true, self._where), pred, weight

    def _value_of(self, sums: Array) -> Any:
        by_class = self._scores(*sums)
        if self._num_classes is None:
            return float(by_class[0])
        if self._average is Average.NONE:
            return by_class
        if self._average is Average.MICRO:
            return float(self._scores(*sums.sum(axis=1, keepdims=True))[0])
        weight = sums[2] if self._average is Average.WEIGHTED else np.ones(len(by_class))
        kept = ~np.isnan(by_class)
        if not kept.any() or not weight[kept].sum():
            return self._zero_division
        return float(np.average(by_class[kept], weights=weight[kept]))

    def _scores(self, both: Array, taken: Array, actual: Array) -> Array:
        numerator, denominator = self._parts(both, taken, actual)
        scores = np.full(denominator.shape, self._zero_division)
        np.divide(numerator, denominator, out=scores, where=denominator > 0)
        return scores


@final
class Precision(ClassScore):
    """Of the examples that were taken for a class, the share that are of it."""

    _usual_name = "precision"

    def _parts(self, both: Array, taken: Array, actual: Array) -> tuple[Array, Array]:  # noqa: ARG002
        return both, taken


@final
class Recall(ClassScore):
    """Of the examples that are of a class, the share that were taken for it."""

    _usual_name = "recall"

    def _parts(self, both: Array, taken: Array, actual: Array) -> tuple[Array, Array]:  # noqa: ARG002
        return both, actual


@final
class F1Score(ClassScore):
    """The harmonic mean of precision and recall."""

    _usual_name = "f1_score"

    def _parts(self, both: Array, taken: Array, actual: Array) -> tuple[Array, Array]:
        return 2 * both, taken + actual
