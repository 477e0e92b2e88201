"""Truth and predictions about classes, in the forms that they come in: numbers, scores, one-hot rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.arrays import Array
from strategies.metrics.examples import as_real, in_one_axis, require_same_shape


def class_pairs(
    y_true: Any, y_pred: Any, sample_weight: Any, num_classes: int, where: str
) -> tuple[Array, Array, Array | None]:
    """The true and the predicted class of every example, and its weight.

    Args:
        y_true: class numbers, shape ``(...)``, or one-hot rows, ``(..., num_classes)``.
        y_pred: class numbers, shape ``(...)``, or scores, ``(..., num_classes)``, of which the largest counts.
        sample_weight: as metrics take it.
        num_classes: how many there are.
        where: for error messages.

    Returns:
        Two int64 arrays and None or a float64 one, shape ``(n,)`` each.

    Raises:
        ValueError: shapes that do not belong together; a number that is no class's.
    """
    true, pred = as_real(y_true, where), as_real(y_pred, where)
    both_in_rows = true.ndim == pred.ndim > 1 and true.shape[-1] == pred.shape[-1] == num_classes
    if both_in_rows and pred.dtype.kind in "biu":
        raise ValueError(
            f"{where}: got integers of shape {pred.shape} for {num_classes} classes, which may be class numbers or one-hot rows; "
            "need one axis for class numbers, floats for scores — flatten both, or take argmax(axis=-1) of both"
        )
    true_rows = true.ndim == pred.ndim + 1 or both_in_rows
    pred_rows = pred.ndim == true.ndim + 1 or both_in_rows
    shape = pred.shape[:-1] if pred_rows else pred.shape
    fits = shape == (true.shape[:-1] if true_rows else true.shape)
    fits = fits and (not true_rows or true.shape[-1] == num_classes)
    if not (fits and (not pred_rows or pred.shape[-1] == num_classes)):
        raise ValueError(
            f"{where}: got y_true of shape {true.shape}, y_pred of shape {pred.shape}; need class numbers, shape (batch,), or "
            f"scores of {num_classes} classes, shape (batch, {num_classes})"
        )
    (true, pred), weight = in_one_axis([true, pred], shape, sample_weight, where)
    if true_rows:
        true = np.argmax(require_one_hot(true, where), axis=1)
    if pred_rows:
        pred = np.argmax(pred, axis=1)
    return (
        _numbers(true, num_classes, "y_true", where),
        _numbers(pred, num_classes, "y_pred", where),
        weight,
    )


def binary_pairs(
    y_true: Any, y_pred: Any, sample_weight: Any, where: str
) -> tuple[Array, Array, Array | None]:
    """Truth of 0 and 1 as booleans, scores as they are, and weights, shape ``(n,)`` each.

    Raises:
        ValueError: other shapes than one for both, or truth that is neither 0 nor 1.
    """
    true, pred = as_real(y_true, where), as_real(y_pred, where)
    require_same_shape(true, pred, where)
    (true, pred), weight = in_one_axis([true, pred], pred.shape, sample_weight, where)
    return as_truth(true, where), pred, weight


def as_truth(y_true: Array, where: str) -> Array:
    """0 and 1 as booleans.

    Raises:
        ValueError: other values.
    """
    truth: Array = y_true.astype(np.bool_)
    if not (truth == y_true).all():
        stranger = y_true[truth != y_true].flat[0]
        raise ValueError(
            f"{where}: got {stranger} in y_true; need 0 and 1 — for more classes say how many, with num_classes or the like"
        )
    return truth


def require_one_hot(y_true: Array, where: str) -> Array:
    """The rows, shape ``(n, classes)``, if they add up to 1.

    Raises:
        ValueError: they don't.
    """
    sums = np.asarray(np.sum(y_true, axis=1, dtype=np.float64))
    wrong = ~(np.abs(sums - 1) <= 1e-2)
    if wrong.any():
        raise ValueError(
            f"{where}: got a row of y_true that adds up to {sums[wrong].flat[0]:g}; need 1, as one-hot rows and probabilities do — "
            "several labels at once need Accuracy('BINARY'), or Precision and its kin with a threshold"
        )
    return y_true


def _numbers(array: Array, num_classes: int, which: str, where: str) -> Array:
    if array.dtype == np.bool_:
        return array.astype(np.int64)
    with np.errstate(invalid="ignore"):  # what does not cast is found below
        numbers: Array = array.astype(np.int64)
    wrong = (numbers != array) | (numbers < 0) | (numbers >= num_classes)
    if wrong.any():
        raise ValueError(
            f"{where}: got {array[wrong].flat[0]} in {which}; need whole numbers from 0 to {num_classes - 1} — "
            "give examples that are to be left out the weight 0"
        )
    return numbers
