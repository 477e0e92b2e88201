"""Stages over arrays in memory, which stay index arithmetic until a batch takes its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from strategies.datasets.elements import Element, Structure, unflatten
from strategies.datasets.row_order import Indices, RowOrder, blocks, take_rows
from strategies.datasets.stage import Stage, Traits, inner_epoch, repetitions


@final
@dataclass(frozen=True, eq=False)
class Table:
    """Arrays in memory that belong together row by row.

    Attributes:
        leaves: arrays of shape ``(rows, ...)``.
        structure: of the elements.
    """

    leaves: tuple[Any, ...]
    structure: Structure

    def batch(self, indices: Indices) -> Element:
        return unflatten(self.structure, [take_rows(leaf, indices) for leaf in self.leaves])

    def row(self, index: int) -> Element:
        return unflatten(self.structure, [leaf[index] for leaf in self.leaves])


@final
@dataclass(frozen=True, eq=False)
class Rows(Stage):
    """The rows of arrays in memory, one by one, in some order, some times (None: for ever)."""

    table: Table
    order: RowOrder
    known: Traits  # of one repetition
    times: int | None = 1

    @property
    def traits(self) -> Traits:
        return self.known.repeated(self.times)

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        for chunk in self.chunks(epoch, skip):
            for index in chunk if isinstance(chunk, range) else chunk.tolist():
                yield self.table.row(index)

    def chunks(self, epoch: int, skip: int) -> Iterator[Indices]:
        """The row numbers, repetition by repetition."""
        if not self.order.length:
            return
        first, rest = divmod(skip, self.order.length)
        for repetition in repetitions(first, self.times):
            yield self.order.indices(inner_epoch(epoch, repetition, self.times))[rest:]
            rest = 0


@final
@dataclass(frozen=True, eq=False)
class RowBatches(Stage):
    """Batches of rows in memory: slices of the arrays where the order is the stored one, otherwise one copy."""

    inner: Rows
    size: int
    drop_remainder: bool

    @property
    def traits(self) -> Traits:
        return self.inner.traits.batched(self.size, drop_remainder=self.drop_remainder)

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        chunks = self.inner.chunks(epoch, skip * self.size)
        return map(self.inner.table.batch, blocks(chunks, self.size, drop_remainder=self.drop_remainder))
