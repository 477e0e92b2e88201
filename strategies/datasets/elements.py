"""Elements of a dataset: nested tuples, lists, dicts and named tuples with arrays for leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import optree

from collectives.arrays import Array

Element: TypeAlias = Any
"""A nested structure of arrays; what leaves and structure are is optree's word, with None as a leaf."""

Structure: TypeAlias = optree.PyTreeSpec


def flatten(element: Element) -> tuple[list[Any], Structure]:
    """The leaves, and the structure that `unflatten` puts them back into."""
    leaves, structure = optree.tree_flatten(element, none_is_leaf=True)
    return leaves, structure


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Element:
    """The element of this structure with these leaves."""
    return optree.tree_unflatten(structure, leaves)


def leaf_name(structure: Structure, index: int) -> str:
    """Where a leaf stands, as in ``element['image'][0]``."""
    return structure.accessors()[index].codify("element")


def count_rows(leaves: Sequence[Any], structure: Structure, where: str, remedy: str) -> int:
    """The length of the first axis, which all leaves must share.

    Args:
        leaves: arrays of shape ``(rows, ...)``.
        structure: names the leaves in messages.
        where: the caller's name, for messages.
        remedy: what to do about a leaf without a first axis, for the message.

    Raises:
        IndexError: a leaf is a scalar.
        TypeError: a leaf is no array.
        ValueError: leaves of different lengths, or none at all.
    """
    rows = -1
    for index, leaf in enumerate(leaves):
        shape = getattr(leaf, "shape", () if isinstance(leaf, (bool, int, float, complex)) else None)
        if shape is None:
            raise TypeError(
                f"{where}: {leaf_name(structure, index)} is {type(leaf).__name__}; need an array — {remedy}"
            )
        if not shape:
            raise IndexError(
                f"{where}: {leaf_name(structure, index)} is the scalar {leaf!r}; need a first axis — {remedy}"
            )
        if shape[0] != rows and index:
            raise ValueError(
                f"{where}: {leaf_name(structure, 0)} has {rows} rows and {leaf_name(structure, index)} has "
                f"{shape[0]}; need one length of the first axis for all — check that they belong together"
            )
        rows = shape[0]
    if not leaves:
        raise ValueError(
            f"{where}: got {unflatten(structure, [])!r}, which holds no array; need at least one"
        )
    return int(rows)


def stack(rows: Sequence[Element], *, pad: bool, where: str) -> Element:
    """One element whose leaves have a new first axis, ``(len(rows), ...)``.

    Args:
        rows: elements of one structure, at least one.
        pad: fill up with zeros to the longest along each axis, instead of refusing unequal shapes.
        where: the caller's name, for messages.

    Raises:
        TypeError: a leaf is no array.
        ValueError: structures or shapes that differ.
    """
    leaves, structure = flatten(rows[0])
    columns = [[leaf] for leaf in leaves]
    for row in rows[1:]:
        leaves, other = flatten(row)
        if other != structure:
            raise ValueError(
                f"{where}: got elements of structure {structure} and {other}; need one structure — make them "
                "alike with map()"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    stack_column = _padded if pad else _stacked
    return unflatten(structure, [stack_column(c, structure, i, where) for i, c in enumerate(columns)])


def _stacked(column: list[Any], structure: Structure, index: int, where: str) -> Array:
    arrays = _arrays(column, structure, index, where)
    try:
        return np.stack(arrays)
    except ValueError:
        shapes = ", ".join(str(shape) for shape in sorted({array.shape for array in arrays}))
        raise ValueError(
            f"{where}: rows of {leaf_name(structure, index)} have shapes {shapes}; need one shape — call "
            "padded_batch(), or make them alike with map()"
        ) from None


def _padded(column: list[Any], structure: Structure, index: int, where: str) -> Array:
    arrays = _arrays(column, structure, index, where)
    if len({array.ndim for array in arrays}) > 1:
        raise ValueError(
            f"{where}: rows of {leaf_name(structure, index)} have {sorted({a.ndim for a in arrays})} axes; need "
            "one number of axes — make them alike with map()"
        )
    longest = tuple(max(lengths) for lengths in zip(*(array.shape for array in arrays), strict=True))
    batch = np.zeros((len(arrays), *longest), np.result_type(*(array.dtype for array in arrays)))
    for row, array in enumerate(arrays):
        corner: tuple[int | slice, ...] = (row, *(slice(length) for length in array.shape))
        batch[corner] = array
    return batch


def _arrays(column: list[Any], structure: Structure, index: int, where: str) -> list[Array]:
    arrays = [leaf if hasattr(leaf, "shape") else np.asarray(leaf) for leaf in column]
    for array, leaf in zip(arrays, column, strict=True):
        if array is not leaf and array.dtype == object:
            raise TypeError(
                f"{where}: {leaf_name(structure, index)} is {type(leaf).__name__}; need an array or a number "
                "— convert it with map()"
            )
    return arrays
