"""One replica's gradients for one update, checked and ready to be brought together."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, final

import numpy as np

from collectives.arrays import Array, as_array, describe
from collectives.indexed_slices import IndexedSlices, require_rows
from strategies.optimizers.gradient_memory import Segment, place_of
from variables.synchronization import cast
from variables.variable import Variable


@final
class Contribution:
    """What one replica brings to a meeting.

    Args:
        gradients: one for each variable of the update: an array, `IndexedSlices` or None.
        replica: whose.
        in_place: whether some of them may lie in the optimizer's own memory.
    """

    __slots__ = ("_in_place", "gradients", "lent", "missing", "replica", "sparse")

    def __init__(self, gradients: Sequence[Any], replica: int, in_place: bool) -> None:
        self.gradients = gradients
        self.replica = replica
        self._in_place = in_place
        self.lent: list[Array] = []
        types = set(map(type, gradients))
        self.missing = _positions(gradients, type(None)) if type(None) in types else ()
        self.sparse = _positions(gradients, IndexedSlices) if IndexedSlices in types else ()

    def pack(self, segments: Sequence[Segment], variables: Sequence[Variable], where: str) -> None:
        """Put small gradients side by side into flat memory, and lend the large ones as they are.

        Raises:
            ValueError: a gradient of another shape than its variable's.
            TypeError: one that does not cast to its variable's dtype.
        """
        self.lent = []
        for segment in segments:
            if segment.is_large:
                self.lent.append(self._lend(segment, variables, where))
            else:
                self._pack_small(segment, variables, where)

    def _lend(self, segment: Segment, variables: Sequence[Variable], where: str) -> Array:
        (position,) = segment.order
        gradient = self.gradients[position]
        is_plain = segment.has_arrays([gradient]) and gradient.dtype == segment.state.block.dtype
        if is_plain and gradient.flags.c_contiguous:
            flat: Array = gradient.reshape(-1)
            return flat
        place = segment.gradients(self.replica)
        _put(gradient, variables[position], place.reshape(segment.shapes[0]), where)
        return place

    def _pack_small(self, segment: Segment, variables: Sequence[Variable], where: str) -> None:
        memory = segment.state.gradients[self.replica]
        gradients = [self.gradients[position] for position in segment.order]
        # Gradients that were written into their places must not be moved over one another.
        if segment.has_arrays(gradients) and not (self._in_place and _any_within(gradients, memory)):
            pieces: list[Array] = [memory] * (2 * len(gradients))
            pieces[::2] = gradients
            pieces[1::2] = segment.padding
            try:
                np.concatenate(pieces, axis=None, out=segment.gradients(self.replica))
                return
            except TypeError:  # a dtype that does not cast, which is named below
                pieces.clear()
        for position, gradient in zip(segment.order, gradients, strict=True):
            variable = variables[position]
            _put(gradient, variable, place_of(variable).view(memory), where)


def checked_slices(slices: IndexedSlices, variable: Variable, where: str) -> IndexedSlices:
    """Slices that fit the variable, in its dtype.

    Raises:
        ValueError: rows of another shape.
        IndexError: no such row.
        TypeError: a dtype that does not cast.
    """
    where = f"{where}: {variable.name}"
    if not variable.shape or slices.values.shape[1:] != variable.shape[1:]:
        raise ValueError(f"{where}: got {slices}; need rows of shape {variable.shape}")
    require_rows(slices.indices, variable.shape[0], where)
    if slices.values.dtype == variable.dtype:
        return slices
    return IndexedSlices(cast(slices.values, variable.dtype, where), slices.indices, slices.dense_shape)


def _put(gradient: Any, variable: Variable, view: Array, where: str) -> None:
    """Write one gradient of any kind into its place, unless it is there already."""
    if gradient is None:
        view[...] = 0
        return
    if isinstance(gradient, IndexedSlices):
        slices = checked_slices(gradient, variable, where)
        view[...] = 0
        np.add.at(view, slices.indices, slices.values)
        return
    array = as_array(gradient, f"{where}: {variable.name}")
    if array.shape != variable.shape:
        raise ValueError(f"{where}: {variable.name}: got {describe(array)}; need shape {variable.shape}")
    if not np.can_cast(array.dtype, variable.dtype, "same_kind"):
        raise TypeError(
            f"{where}: {variable.name}: got {describe(array)}; need what casts to {variable.dtype} safely"
        )
    if not _is_same_memory(array, view):
        # It may overlap its place otherwise, as a transposed view of it does; NumPy copes with that.
        np.copyto(view, array, casting="same_kind")


def _positions(gradients: Sequence[Any], kind: type) -> tuple[int, ...]:
    return tuple(position for position, gradient in enumerate(gradients) if type(gradient) is kind)


def _is_same_memory(array: Array, view: Array) -> bool:
    same_start = array.__array_interface__["data"][0] == view.__array_interface__["data"][0]
    return same_start and array.strides == view.strides and array.dtype == view.dtype


def _any_within(gradients: Sequence[Array], memory: Array) -> bool:
    return id(memory.base) in set(map(id, map(_BASE, gradients)))


_BASE = attrgetter("base")
