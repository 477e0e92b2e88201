"""Updates some rows of a variable, and the same rows of its slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import numpy as np

from collectives.arrays import Array
from collectives.indexed_slices import IndexedSlices, concatenate_slices
from collectives.reduce_op import ReduceOp
from collectives.reduction import CHUNK_BYTES
from strategies.optimizers.update_rule import UpdateRule


@final
class SparseRows:
    """The rows of one variable, in all its copies.

    Args:
        copies: every copy of the variable, of its shape.
        slots: its slots, of its shape, by name.
        decay: what the rows shrink by before each update, times the learning rate.
    """

    def __init__(self, copies: Sequence[Array], slots: dict[str, Array], decay: float) -> None:
        self._copies = [_by_row(copy) for copy in copies]
        self._slots = {name: _by_row(slot) for name, slot in slots.items()}
        self._decay = decay

    def update(
        self, rule: UpdateRule, values: Array, indices: Array, *, step: int, learning_rate: float
    ) -> None:
        """Update the rows of these indices, each once; the others and their slots stay as they are.

        Args:
            rule: the algorithm.
            values: the gradient's rows, shape ``(num_rows, ...)``.
            indices: shape ``(num_rows,)``, all different.
            step: as in `UpdateRule.update`.
            learning_rate: likewise.
        """
        first, *others = self._copies
        values = _by_row(values)
        # A rule that looks at a variable's norm gets all of its rows that change at once.
        length = (
            len(indices) if rule.needs_whole_variables else max(1, CHUNK_BYTES // max(1, first[:1].nbytes))
        )
        for start in range(0, len(indices), max(1, length)):
            rows = indices[start : start + length]
            parameters = first[rows]
            slots = {name: slot[rows] for name, slot in self._slots.items()}
            scratch = [np.empty(parameters.size, parameters.dtype) for _ in range(rule.num_scratch)]
            if self._decay:
                np.multiply(parameters, 1 - learning_rate * self._decay, out=parameters)
            rule.update(
                parameters.reshape(-1),
                values[start : start + length].reshape(-1),
                {name: slot.reshape(-1) for name, slot in slots.items()},
                scratch,
                step=step,
                learning_rate=learning_rate,
            )
            for copy in (first, *others):
                copy[rows] = parameters
            for name, slot in slots.items():
                self._slots[name][rows] = slot


def _by_row(array: Array) -> Array:
    return array.reshape(
        len(array), math.prod(array.shape[1:])
    )  # not -1, which there may be no rows to tell from


def reduced_slices(parts: Sequence[IndexedSlices], op: ReduceOp) -> IndexedSlices:
    """All replicas' slices as one, each row once, in ascending order."""
    return (parts[0] if len(parts) == 1 else concatenate_slices(parts, op)).merged()
