"""Updates some rows of a variable, and the same rows of its slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.indexed_slices import IndexedSlices, concatenate_slices
from collectives.reduce_op import ReduceOp
from collectives.reduction import CHUNK_BYTES
from strategies.optimizers.update_rule import UpdateRule


@final
@dataclass(frozen=True, eq=False)
class Table:
    """One variable that isn't sharded, or one shard.

    Args:
        copies: every copy of it, of its shape.
        slots: its slots, of its shape, by name.
    """

    copies: Sequence[Array]
    slots: dict[str, Array]


@final
class SparseRows:
    """The rows of one variable, in all its copies.

    Args:
        tables: its shards, or the variable itself.
        decay: what rows shrink by before each update, times the learning rate.
    """

    def __init__(self, tables: Sequence[Table], decay: float) -> None:
        self._tables = [
            Table(
                [_by_row(copy) for copy in t.copies], {name: _by_row(slot) for name, slot in t.slots.items()}
            )
            for t in tables
        ]
        self._decay = decay

    def update(
        self,
        rule: UpdateRule,
        values: Sequence[Array],
        indices: Sequence[Array],
        *,
        factor: float,
        bound: float | None,
        step: int,
        learning_rate: float,
    ) -> None:
        """Update the rows of these indices, each once; the others and their slots stay as they are.

        Args:
            rule: the algorithm.
            values: for each table, the gradient's rows, shape ``(num_rows, ...)``.
            indices: for each table, shape ``(num_rows,)``, all different.
            factor: what gradients are multiplied by first.
            bound: what their elements are clipped to then, to both sides; None for no bound.
            step: as in `UpdateRule.update`.
            learning_rate: likewise.
        """
        parts = [_Part(t, _by_row(v), i) for t, v, i in zip(self._tables, values, indices, strict=True)]
        if rule.needs_whole_variables:  # all rows that change at once
            pieces = [parts]
        else:
            pieces = [[piece] for part in parts for piece in part.cut()]
        if not any(len(part.indices) for part in parts):
            return
        width, dtype = parts[0].values.shape[1], parts[0].values.dtype
        longest = max(sum(len(part.indices) for part in piece) for piece in pieces)
        # One piece of memory for all pieces, which stays in the cache.
        work = [np.empty((longest, width), dtype) for _ in range(2 + len(rule.slots) + rule.num_scratch)]
        for piece in pieces:
            num_rows = sum(len(part.indices) for part in piece)
            parameters, gradients, *others = (array[:num_rows] for array in work)
            slots = dict(zip(rule.slots, others, strict=False))
            at = 0
            for part in piece:
                rows = slice(at, at + len(part.indices))
                part.read(
                    parameters[rows], gradients[rows], {name: slot[rows] for name, slot in slots.items()}
                )
                at = rows.stop
            if factor != 1.0:
                np.multiply(gradients, factor, out=gradients)
            if bound is not None:
                np.clip(gradients, -bound, bound, out=gradients)
            if self._decay:
                np.multiply(parameters, 1 - learning_rate * self._decay, out=parameters)
            rule.update(
                parameters.reshape(-1),
                gradients.reshape(-1),
                {name: slot.reshape(-1) for name, slot in slots.items()},
                [scratch.reshape(-1) for scratch in others[len(slots) :]],
                step=step,
                learning_rate=learning_rate,
            )
            at = 0
            for part in piece:
                rows = slice(at, at + len(part.indices))
                part.write(parameters[rows], {name: slot[rows] for name, slot in slots.items()})
                at = rows.stop


@final
@dataclass(frozen=True, eq=False)
class _Part:
    """Some rows of a table, and their gradients."""

    table: Table
    values: Array
    indices: Array

    def cut(self) -> list[_Part]:
        length = max(1, CHUNK_BYTES // max(1, self.values[:1].nbytes))
        starts = range(0, len(self.indices), length)
        return [
            _Part(self.table, self.values[start : start + length], self.indices[start : start + length])
            for start in starts
        ]

    def read(self, parameters: Array, gradients: Array, slots: dict[str, Array]) -> None:
        np.copyto(gradients, self.values)
        _take(self.table.copies[0], self.indices, parameters)
        for name, slot in slots.items():
            _take(self.table.slots[name], self.indices, slot)

    def write(self, parameters: Array, slots: dict[str, Array]) -> None:
        for copy in self.table.copies:
            copy[self.indices] = parameters
        for name, slot in slots.items():
            self.table.slots[name][self.indices] = slot


def reduced_slices(parts: Sequence[IndexedSlices], op: ReduceOp) -> IndexedSlices:
    """All replicas' slices as one, each row once, in ascending order; added and divided as dense gradients are."""
    if len(parts) == 1:
        return parts[0]
    total = concatenate_slices(parts, ReduceOp.SUM).merged()
    if op is ReduceOp.MEAN:
        values: Any = np.divide(total.values, len(parts)).astype(total.values.dtype, copy=False)
        return IndexedSlices(values, total.indices, total.dense_shape)
    return total


def _take(rows: Array, indices: Array, out: Array) -> None:
    if len(indices):  # from no rows none can be taken, not even none of them
        # They are in range: with "clip" NumPy writes into the result itself, not into a copy first.
        np.take(rows, indices, axis=0, out=out, mode="clip")


def _by_row(array: Array) -> Array:
    return array.reshape(
        len(array), math.prod(array.shape[1:])
    )  # not -1, which there may be no rows to tell from
