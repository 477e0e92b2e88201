"""How often predictions are right."""

from __future__ import annotations

from enum import Enum
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.reduce_op import parse_member
from strategies.metrics.classes import as_truth, require_one_hot
from strategies.metrics.examples import (
    as_real,
    in_one_axis,
    ratio,
    require_integer,
    total,
    total_weight,
)
from strategies.metrics.metric import Comparison


class AccuracyKind(Enum):
    """What truth and predictions are."""

    AUTO = "auto"
    """Told by their shapes and dtypes: SPARSE where ``y_pred`` has one axis more; of equal shapes, LABELS where ``y_pred`` is
    no floats, ONE_HOT where the last of several axes is longer than 1, else BINARY."""
    LABELS = "labels"
    """Values that are right if equal, shape ``(...)`` both."""
    SPARSE = "sparse"
    """Class numbers, shape ``(...)``, and scores, shape ``(..., classes)``."""
    ONE_HOT = "one_hot"
    """Rows with a single 1, or probabilities, and scores, shape ``(..., classes)`` both."""
    BINARY = "binary"
    """0 and 1, and scores that say 1 where above the threshold, shape ``(...)`` both; also several labels of
    an example, each for itself."""


@final
class Accuracy(Comparison):
    """The share of examples that are predicted right.

    Args:
        kind: an `AccuracyKind` or its name.
        threshold: of BINARY: scores above it say 1.
        name: for error messages and checkpoints.
    """

    def __init__(
        self,
        kind: AccuracyKind | str = AccuracyKind.AUTO,
        *,
        threshold: float = 0.5,
        name: str = "accuracy",
    ) -> None:
        self._kind = parse_member(AccuracyKind, kind, "kind")
        self._threshold = threshold
        super().__init__(name, (2,))

    def _sums_of(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[float, float]:
        where = self._where
        true, pred = as_real(y_true, where), as_real(y_pred, where)
        kind = self._kind if self._kind is not AccuracyKind.AUTO else _kind_of(true, pred)
        if kind is AccuracyKind.SPARSE and true.shape == (*pred.shape[:-1], 1):
            true = true[..., 0]
        shape = _examples_shape(kind, true, pred, where)
        (true, pred), weight = in_one_axis([true, pred], shape, sample_weight, where)
        if kind is AccuracyKind.SPARSE:
            right = _require_classes(true, pred.shape[1], where) == np.argmax(pred, axis=1)
        elif kind is AccuracyKind.ONE_HOT:
            right = np.argmax(require_one_hot(true, where), axis=1) == np.argmax(pred, axis=1)
        elif kind is AccuracyKind.BINARY:
            right = as_truth(true, where) == (pred > self._threshold)
        else:
            right = true == pred
        return total(right, weight), total_weight(right, weight)

    def _value_of(self, sums: Array) -> float:
        return ratio(sums[0], sums[1])


@final
class TopKAccuracy(Comparison):
    """The share of examples whose true class is among the k of the highest scores.

    Of equal scores all are among them if the first of them is, whatever their order, so ties count as right. A true class with a
    score of nan is wrong.

    ``y_true`` has class numbers, shape ``(...)``, or one-hot rows; ``y_pred`` has scores, shape ``(..., classes)``.

    Args:
        k: how many may be named.
        name: for error messages and checkpoints.
    """

    def __init__(self, k: int = 5, *, name: str | None = None) -> None:
        self._k = require_integer(k, 1, "TopKAccuracy: got k")
        super().__init__(name or f"top_{k}_accuracy", (2,))

    def _sums_of(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[float, float]:
        where = self._where
        true, pred = as_real(y_true, where), as_real(y_pred, where)
        kind = AccuracyKind.ONE_HOT if true.ndim == pred.ndim else AccuracyKind.SPARSE
        shape = _examples_shape(kind, true, pred, where)
        (true, pred), weight = in_one_axis([true, pred], shape, sample_weight, where)
        if kind is AccuracyKind.ONE_HOT:
            classes = np.argmax(require_one_hot(true, where), axis=1)
        else:
            classes = _require_classes(true, pred.shape[1], where).astype(np.int64)
        own = np.take_along_axis(pred, classes[:, None], axis=1)
        right = (np.count_nonzero(pred > own, axis=1) < self._k) & (own == own)[:, 0]
        return total(right, weight), total_weight(right, weight)

    def _value_of(self, sums: Array) -> float:
        return ratio(sums[0], sums[1])


def _kind_of(true: Array, pred: Array) -> AccuracyKind:
    if pred.ndim == true.ndim + 1 or (pred.ndim == true.ndim and true.shape[-1:] == (1,) != pred.shape[-1:]):
        return AccuracyKind.SPARSE
    if pred.dtype.kind in "biu":
        return AccuracyKind.LABELS
    return AccuracyKind.ONE_HOT if pred.ndim > 1 and pred.shape[-1] > 1 else AccuracyKind.BINARY


def _examples_shape(kind: AccuracyKind, true: Array, pred: Array, where: str) -> tuple[int, ...]:
    """The shape of the examples, once it is certain that truth and predictions have it."""
    in_rows = kind in (AccuracyKind.SPARSE, AccuracyKind.ONE_HOT)
    wanted = pred.shape[:-1] if kind is AccuracyKind.SPARSE else pred.shape
    if true.shape != wanted or (in_rows and (not pred.ndim or not pred.shape[-1])):
        need = {
            AccuracyKind.SPARSE: "class numbers, shape (batch,), and scores, shape (batch, classes)",
            AccuracyKind.ONE_HOT: "one-hot rows and scores of one shape, (batch, classes)",
        }.get(kind, "equal shapes")
        raise ValueError(
            f"{where}: got y_true of shape {true.shape}, y_pred of shape {pred.shape}; need {need}"
        )
    return pred.shape[:-1] if in_rows else pred.shape


def _require_classes(true: Array, num_classes: int, where: str) -> Array:
    wrong = ~((true >= 0) & (true < num_classes) & (true == np.floor(true)))
    if wrong.any():
        raise ValueError(
            f"{where}: got class {true[wrong].flat[0]}; need whole numbers from 0 to {num_classes - 1}, as y_pred has "
            f"{num_classes} scores — give examples that are to be left out the weight 0"
        )
    return true
