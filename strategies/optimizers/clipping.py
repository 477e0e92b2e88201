"""Keeping gradients within bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from collectives.arrays import Array, as_array
from collectives.indexed_slices import IndexedSlices
from strategies.optimizers.hyperparameters import require_real
from variables.values import Mirrored, PerReplica


@final
@dataclass(frozen=True)
class Clipping:
    """Bounds on the gradients of an optimizer, applied once they have been brought together; None where there is none.

    Args:
        value: of each element, to both sides.
        norm: of each variable's gradient.
        global_norm: of all gradients together.

    Raises:
        TypeError: a bound that is no real number.
        ValueError: a bound that is not above 0, or more than one.
    """

    value: float | None = None
    norm: float | None = None
    global_norm: float | None = None

    def __post_init__(self) -> None:
        bounds = {"clipvalue": self.value, "clipnorm": self.norm, "global_clipnorm": self.global_norm}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        for name, bound in given.items():
            require_real("", **{name: bound})
            if not bound > 0:
                raise ValueError(f"{name}: got {bound}; need a number above 0, or None")
        if len(given) > 1:
            raise ValueError(
                f"got {' and '.join(given)}; need one of them — they would clip one after another"
            )


def global_norm(gradients: Iterable[Any]) -> float:
    """The square root of the sum of all squares, each element of the model counted once.

    Args:
        gradients: arrays, numbers, variables, `IndexedSlices` (rows of one index add up first) or `Mirrored` values, which count
            once however many copies there are; None is left out.

    Raises:
        ValueError: a `PerReplica`, whose components are different gradients.
    """
    squares: list[float] = []
    small: dict[np.dtype[Any], list[Array]] = {}
    for gradient in gradients:
        if type(gradient) is np.ndarray and gradient.nbytes < _SMALL_BYTES and gradient.dtype in _JOINED:
            small.setdefault(gradient.dtype, []).append(gradient)
        elif gradient is not None:
            squares.append(sum_of_squares(_dense_values(gradient)))
    for dtype, arrays in small.items():
        # Small ones side by side: a call for each would take longer than copying them.
        for start in range(0, len(arrays), _JOINED_AT_ONCE):
            pieces: list[Any] = arrays[start : start + _JOINED_AT_ONCE]
            try:
                joined = b"".join(pieces)
            except TypeError:  # some are not contiguous
                pieces = [np.ascontiguousarray(piece) for piece in pieces]
                joined = b"".join(pieces)
            squares.append(sum_of_squares(np.frombuffer(joined, dtype)))
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else _not_finite(squares)


def clip_by_global_norm(gradients: Iterable[Any], clip_norm: float) -> tuple[list[Any], float]:
    """Gradients scaled so that their `global_norm` is at most ``clip_norm``.

    To clip what replicas have computed, bring it together first with ``all_reduce("SUM", gradients)``, and apply it by an optimizer
    with ``gradient_aggregation="MEAN"``, as one with SUM would add up the replicas' equal gradients again; the ``global_clipnorm`` of
    an optimizer does so by itself.

    Args:
        gradients: as in `global_norm`.
        clip_norm: above 0.

    Returns:
        New gradients of the same kinds, and the norm they had. Where the norm is not finite, they are all nan.

    Raises:
        TypeError: a bound that is no real number.
        ValueError: a bound that is not above 0; a `PerReplica`.
    """
    require_real("clip_by_global_norm", clip_norm=clip_norm)
    if not clip_norm > 0:
        raise ValueError(f"clip_by_global_norm: got clip_norm={clip_norm}; need a number above 0")
    gradients = list(gradients)
    norm = global_norm(gradients)
    scale = clip_scale(norm, clip_norm)
    return [_scaled(gradient, scale) for gradient in gradients], norm


def clip_scale(norm: float, bound: float) -> float:
    """What to multiply by to bring a norm down to the bound: at most 1; nan if the norm is not finite."""
    if not math.isfinite(norm):
        return math.nan
    return bound / norm if norm > bound else 1.0


def sum_of_squares(array: Array) -> float:
    """Of the elements' absolute values, in float64 or, for half precision, from float32."""
    if not array.size:
        return 0.0
    flat = array.reshape(-1)
    if flat.dtype.itemsize <= 2 or flat.dtype.kind in "iu":
        flat = flat.astype(np.float64)
    total = float(np.vdot(flat, flat).real)
    if math.isinf(total) or not total:  # the squares may leave the range of float32 where the norm does not
        wide = flat.astype(np.complex128 if flat.dtype.kind == "c" else np.float64)
        total = float(np.vdot(wide, wide).real)
    return total


_JOINED = (np.dtype(np.float32), np.dtype(np.float64))
_SMALL_BYTES, _JOINED_AT_ONCE = 1 << 13, 15
"""Together less than what memory is asked of the operating system for, each time, and what fits the cache."""


def _not_finite(squares: list[float]) -> float:
    return math.nan if any(map(math.isnan, squares)) else math.inf


def _dense_values(gradient: Any) -> Array:
    if isinstance(gradient, PerReplica):
        raise ValueError(
            "global_norm: got a PerReplica, whose components are different gradients; "
            "bring them together first: strategy.reduce('SUM', gradient, axis=None)"
        )
    if isinstance(gradient, Mirrored):
        gradient = gradient.values[0]
    if isinstance(gradient, IndexedSlices):
        return gradient.merged().values
    return as_array(gradient, "global_norm")


def _scaled(gradient: Any, scale: float) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, Mirrored):
        return Mirrored([_scaled(component, scale) for component in gradient.values])
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(gradient.values * scale, gradient.indices, gradient.dense_shape)
    return as_array(gradient, "clip_by_global_norm") * scale
