"""One replica's gradients for one update, checked and ready to be brought together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from collectives.arrays import Array, as_array, describe
from collectives.indexed_slices import IndexedSlices, require_rows
from strategies.optimizers.gradient_memory import Segment, SideBySide, place_of
from variables.synchronization import cast
from variables.variable import Variable


@final
class Contribution:
    """What one replica brings to a meeting.

    Args:
        gradients: one for each variable of the update: an array, `IndexedSlices` or None.
        replica: whose.
    """

    __slots__ = ("_packed_for", "gradients", "lent", "missing", "replica", "rows", "sparse")

    def __init__(self, gradients: Sequence[Any], replica: int) -> None:
        self.gradients = gradients
        self.replica = replica
        self.lent: list[Array | SideBySide] = []
        self.rows: Mapping[int, IndexedSlices] = {}
        self._packed_for: tuple[Sequence[Segment], Sequence[int]] | None = None
        types = set(map(type, gradients))
        self.missing = _positions(gradients, type(None)) if type(None) in types else ()
        self.sparse = _positions(gradients, IndexedSlices) if IndexedSlices in types else ()

    def pack(
        self,
        segments: Sequence[Segment],
        sparse: Sequence[int],
        variables: Sequence[Variable],
        where: str,
    ) -> None:
        """Make ready what the update reads: flat arrays for each segment, and the rows of sparse gradients, each once.

        Raises:
            ValueError: a gradient of another shape than its variable's.
            IndexError: rows that there are not.
            TypeError: one that does not cast to its variable's dtype.
        """
        if self._packed_for is not None and self._packed_for[0] is segments and self._packed_for[1] is sparse:
            return
        self.lent = [self._flat(segment, variables, where) for segment in segments]
        self._packed_for = segments, sparse
        if sparse:
            self.rows = {
                position: checked_slices(self.gradients[position], variables[position], where)
                for position in sparse
            }

    def _flat(self, segment: Segment, variables: Sequence[Variable], where: str) -> Array | SideBySide:
        gradients = [self.gradients[position] for position in segment.order]
        flat = segment.flat(gradients)
        if flat is not None:
            return flat
        memory = segment.state.packed[self.replica]
        for position, gradient in zip(segment.order, gradients, strict=True):
            variable = variables[position]
            _put(gradient, variable, place_of(variable).view(memory), where)
        return segment.packed(self.replica)


def checked_slices(slices: IndexedSlices, variable: Variable, where: str) -> IndexedSlices:
    """Slices that fit the variable, in its dtype, every row once.

    Raises:
        ValueError: rows of another shape.
        IndexError: no such row.
        TypeError: a dtype that does not cast.
    """
    where = f"{where}: {variable.name}"
    if not variable.shape or slices.values.shape[1:] != variable.shape[1:]:
        raise ValueError(f"{where}: got {slices}; need rows of shape {variable.shape}")
    require_rows(slices.indices, variable.shape[0], where)
    slices = slices.merged()
    if slices.values.dtype == variable.dtype:
        return slices
    return IndexedSlices(cast(slices.values, variable.dtype, where), slices.indices, slices.dense_shape)


def _put(gradient: Any, variable: Variable, view: Array, where: str) -> None:
    """Write one gradient of any kind into a place."""
    if gradient is None:
        view[...] = 0
        return
    if isinstance(gradient, IndexedSlices):
        slices = checked_slices(gradient, variable, where)
        view[...] = 0
        view[slices.indices] = slices.values
        return
    array = as_array(gradient, f"{where}: {variable.name}")
    if array.shape != variable.shape:
        raise ValueError(f"{where}: {variable.name}: got {describe(array)}; need shape {variable.shape}")
    if not np.can_cast(array.dtype, variable.dtype, "same_kind"):
        raise TypeError(
            f"{where}: {variable.name}: got {describe(array)}; need what casts to {variable.dtype} safely"
        )
    np.copyto(view, array, casting="same_kind")


def _positions(gradients: Sequence[Any], kind: type) -> tuple[int, ...]:
    return tuple(position for position, gradient in enumerate(gradients) if type(gradient) is kind)
