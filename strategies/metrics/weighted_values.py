"""Means and sums of values as they come, such as losses."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from collectives.arrays import Array
from strategies.metrics.examples import as_real, in_one_axis, ratio, total, total_weight
from strategies.metrics.metric import Metric


@final
class Mean(Metric):
    """The weighted mean of all values: of a loss, each example's and not each batch's counts.

    Args:
        name: for error messages and checkpoints.
    """

    def __init__(self, name: str = "mean") -> None:
        super().__init__(name, (2,))

    def update(self, values: Any, sample_weight: Any = None) -> None:
        """Count values, as `Metric.update` says.

        Args:
            values: any shape; every element is an example. A number counts as one, so a batch's mean needs the batch's size
                as its weight.
            sample_weight: how much each counts, ``(batch,)`` or of any shape that the values' begins with; None means 1.
        """
        self._add(values, sample_weight)

    def _sums_of(self, values: Any, sample_weight: Any) -> tuple[float, float]:
        return _sum_and_weight(values, sample_weight, self._where)

    def _value_of(self, sums: Array) -> float:
        return ratio(sums[0], sums[1])


@final
class Sum(Metric):
    """The weighted sum of all values; 0 where there were none.

    Args:
        name: for error messages and checkpoints.
    """

    def __init__(self, name: str = "sum") -> None:
        super().__init__(name, ())

    def update(self, values: Any, sample_weight: Any = None) -> None:
        """Count values; the arguments are `Mean.update`'s."""
        self._add(values, sample_weight)

    def _sums_of(self, values: Any, sample_weight: Any) -> Array:
        return np.asarray(_sum_and_weight(values, sample_weight, self._where)[0])

    def _value_of(self, sums: Array) -> float:
        return float(sums)


def _sum_and_weight(values: Any, sample_weight: Any, where: str) -> tuple[float, float]:
    array = as_real(values, where)
    (flat,), weight = in_one_axis([array], array.shape, sample_weight, where)
    return total(flat, weight), total_weight(flat, weight)
