"""What users pass to metrics, checked and brought into one form: examples in one axis, and their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays import Array, as_array, describe, is_narrow_float


def as_real(value: Any, where: str) -> Array:
    """The value as an array of real numbers.

    Raises:
        TypeError: it holds other things.
    """
    array = as_array(value, where)
    if array.dtype.kind not in "biuf" and not is_narrow_float(array.dtype):
        raise TypeError(
            f"{where}: got {describe(array)}; need real numbers"
            + (" — take real and imaginary parts one by one" if array.dtype.kind == "c" else "")
        )
    return array


def in_one_axis(
    arrays: Sequence[Array], shape: tuple[int, ...], sample_weight: Any, where: str
) -> tuple[list[Array], Array | None]:
    """The arrays with their examples in one axis, without those of weight 0.

    Args:
        arrays: each of shape ``(*shape, ...)``.
        shape: the examples'.
        sample_weight: None, a number, or of a shape that broadcasts against ``shape`` from the first axis on.
        where: for error messages.

    Returns:
        The arrays, each of shape ``(n, ...)``, and the weights, float64 of shape ``(n,)``, or None where all count alike.
    """
    n = math.prod(shape)
    flat = [array.reshape((n, *array.shape[len(shape) :])) for array in arrays]
    if sample_weight is None:
        return flat, None
    weight = as_real(sample_weight, where).astype(np.float64)
    if not (weight >= 0).all():
        raise ValueError(f"{where}: got a sample_weight below 0 or nan; need weights >= 0")
    from_first = weight.reshape(weight.shape + (1,) * (len(shape) - weight.ndim))
    try:
        each = np.broadcast_to(from_first, shape).reshape(n)
    except ValueError:
        raise ValueError(
            f"{where}: got sample_weight of shape {weight.shape} for examples of shape {shape}; need {shape[:1]}, or "
            "another beginning of it"
        ) from None
    counts = each > 0
    if not counts.all():
        return [array[counts] for array in flat], each[counts]
    return flat, each


def require_same_shape(y_true: Array, y_pred: Array, where: str) -> None:
    """Refuse to broadcast one against the other, as ``(n,)`` against ``(n, 1)`` would compare all with all.

    Raises:
        ValueError: the shapes differ.
    """
    if y_true.shape != y_pred.shape:
        raise ValueError(
            f"{where}: got y_true of shape {y_true.shape}, y_pred of shape {y_pred.shape}; need equal shapes — reshape one"
        )


def total(values: Array, weight: Array | None) -> float:
    """The weighted sum of values of shape ``(n,)``, in float64."""
    if weight is None:
        return float(np.sum(values, dtype=np.float64))
    return float(np.sum(values.astype(np.float64, copy=False) * weight))


def total_weight(values: Array, weight: Array | None) -> float:
    """How much all of them count."""
    return float(len(values) if weight is None else weight.sum())


def require_integer(value: Any, least: int, where: str) -> int:
    """The value, if it is an integer of at least that much.

    Args:
        value: what was passed.
        least: the smallest that will do.
        where: class and argument, for the error message.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{where}={value!r}; need an integer of {least} or more")
    return int(value)


def ratio(numerator: float, denominator: float) -> float:
    """Their quotient; nan where nothing was counted."""
    return float(numerator / denominator) if denominator else math.nan
