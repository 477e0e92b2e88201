"""The area under the curve of a binary classifier, from counts at fixed thresholds.

The exact area needs all scores in one place. Counts at thresholds are sums, need little memory and add up over replicas; where the
scores lie apart from one another by more than the thresholds do, the area is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.reduce_op import parse_member
from strategies.metrics.classes import binary_pairs
from strategies.metrics.examples import require_integer
from strategies.metrics.metric import Comparison


class Curve(Enum):
    """What is drawn over what, as the threshold falls."""

    ROC = "roc"
    """The share of positives found over the share of negatives taken for positive."""
    PR = "pr"
    """Precision over recall."""


class Summation(Enum):
    """How the area between two neighbouring thresholds is taken, as in Keras."""

    INTERPOLATION = "interpolation"
    """Trapezia for ROC; for PR, where straight lines are too high, the interpolation of Davis and Goadrich, The relationship
    between precision-recall and ROC curves, ICML 2006."""
    MINORING = "minoring"
    """The lower of the two heights: the area is at least this."""
    MAJORING = "majoring"
    """The higher one: the area is at most this."""


_BEYOND = 1e-7
"""How far the outermost thresholds lie outside of [0, 1], so that all scores lie between them; Keras's epsilon."""


@final
class AUC(Comparison):
    """The area under the ROC or the precision-recall curve, with the thresholds and formulas of ``tf.keras.metrics.AUC``.

    ``y_true`` has 0 and 1, ``y_pred`` scores from 0 to 1, of equal shapes. The result is nan where a class that the curve
    needs never came up.

    Args:
        num_thresholds: evenly spaced from 0 to 1. The area under ROC is off by at most the share of pairs of a positive and a
            negative that no threshold separates.
        curve: a `Curve` or its name.
        summation_method: a `Summation` or its name.
        thresholds: in place of ``num_thresholds``: those between 0 and 1, in any order; 0 and 1 are added.
        from_logits: whether ``y_pred`` are logits, of which the sigmoid is taken.
        name: for error messages and checkpoints.
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: Curve | str = Curve.ROC,
        summation_method: Summation | str = Summation.INTERPOLATION,
        *,
        thresholds: Sequence[float] | None = None,
        from_logits: bool = False,
        name: str = "auc",
    ) -> None:
        if thresholds is None:
            inner = np.linspace(0, 1, require_integer(num_thresholds, 2, "AUC: got num_thresholds"))[1:-1]
        else:
            inner = np.sort(np.asarray(thresholds, np.float64))
            if inner.ndim != 1 or not ((inner >= 0) & (inner <= 1)).all():
                raise ValueError(f"AUC: got thresholds={thresholds!r}; need a list of numbers from 0 to 1")
        self._thresholds = np.concatenate([[-_BEYOND], inner, [1 + _BEYOND]])
        self._curve = parse_member(Curve, curve, "curve")
        self._summation = parse_member(Summation, summation_method, "summation_method")
        self._from_logits = from_logits
        super().__init__(name, (2, len(self._thresholds) - 1))

    def _sums_of(self, y_true: Any, y_pred: Any, sample_weight: Any) -> Array:
        true, pred, weight = binary_pairs(y_true, y_pred, sample_weight, self._where)
        scores = pred.astype(np.float64)
        if self._from_logits:
            scores = 0.5 * (1 + np.tanh(0.5 * scores))  # the sigmoid, which does not overflow
        wrong = ~((scores >= 0) & (scores <= 1))
        if wrong.any():
            raise ValueError(
                f"{self._where}: got {scores[wrong].flat[0]} in y_pred; need scores from 0 to 1 — for logits make "
                "AUC(from_logits=True)"
            )
        # A score lies between the thresholds below it and the next one.
        gap = np.searchsorted(self._thresholds, scores, side="left") - 1
        size = len(self._thresholds) - 1
        sides = [
            np.bincount(gap[side], None if weight is None else weight[side], size) for side in (~true, true)
        ]
        return np.stack(sides)

    def _value_of(self, sums: Array) -> float:
        # Above each threshold, the lowest first: all that lies in the gaps from there on; nothing above the last.
        false_positives, true_positives = np.pad(np.cumsum(sums[:, ::-1], axis=1)[:, ::-1], ((0, 0), (0, 1)))
        negatives, positives = false_positives[0], true_positives[0]
        if not positives or (self._curve is Curve.ROC and not negatives):
            return math.nan
        recall = true_positives / positives
        if self._curve is Curve.ROC:
            return self._area(false_positives / negatives, recall)
        if self._summation is Summation.INTERPOLATION:
            return float(_interpolated_precision(true_positives, false_positives) / positives)
        return self._area(recall, _quotient(true_positives, true_positives + false_positives))

    def _area(self, x: Array, y: Array) -> float:
        """Under the points, of which the rightmost come first."""
        left, right = y[1:], y[:-1]
        heights = {
            Summation.INTERPOLATION: (left + right) / 2,
            Summation.MINORING: np.minimum(left, right),
            Summation.MAJORING: np.maximum(left, right),
        }[self._summation]
        return float(np.sum((x[:-1] - x[1:]) * heights))


def _interpolated_precision(true_positives: Array, false_positives: Array) -> float:
    """The integral of precision over true positives, which between two thresholds grow linearly with all positives.

    With TP = intercept + slope * P there, it is that of slope * (1 + intercept / P) over P.
    """
    found = true_positives + false_positives
    here, after = found[:-1], found[1:]
    gained = true_positives[:-1] - true_positives[1:]
    slope = _quotient(gained, here - after)
    intercept = true_positives[1:] - slope * after
    grows = (here > 0) & (after > 0)
    log_ratio = np.log(np.divide(here, after, out=np.ones_like(here), where=grows))
    return float(np.sum(slope * (gained + intercept * log_ratio)))


def _quotient(numerator: Array, denominator: Array) -> Array:
    """Elementwise; 0 where the denominator is."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)
