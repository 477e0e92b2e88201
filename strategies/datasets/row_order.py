"""In what order the rows of arrays in memory come.

An order is index arithmetic: no row is touched until a batch takes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar, final

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

Indices: TypeAlias = range | npt.NDArray[np.int64]
"""Row numbers. A range means that they can be taken as a slice, without a copy."""

_DRAWS_AT_ONCE = 1024


@final
@dataclass(frozen=True, eq=False)
class RowOrder:
    """A finite order of rows, one for each epoch.

    Attributes:
        length: how many rows it has, in every epoch.
        indices: the row numbers of an epoch.
        seeds: of the shuffles in it, outermost last.
    """

    length: int
    indices: Callable[[int], Indices]
    seeds: tuple[int, ...] = ()

    @classmethod
    def of_all(cls, length: int) -> RowOrder:
        """Every row once, as stored."""
        return cls(length, partial(_stored, length))

    def sliced(self, part: slice) -> RowOrder:
        """These of the rows, by their places in this order."""
        return RowOrder(len(range(self.length)[part]), partial(_sliced, self, part), self.seeds)

    def shuffled(self, buffer_size: int | None, seed: int, *, every_epoch: bool) -> RowOrder:
        """The same rows in a random order.

        Args:
            buffer_size: how many rows a row may be drawn from; None for all of them.
            seed: of the order.
            every_epoch: whether each epoch has its own order.
        """
        indices = partial(_shuffled, self, buffer_size, seed, every_epoch)
        return RowOrder(self.length, indices, (*self.seeds, seed))


# Functions of the module, so that orders can be pickled.


def _stored(length: int, _epoch: int) -> Indices:
    return range(length)


def _sliced(before: RowOrder, part: slice, epoch: int) -> Indices:
    return before.indices(epoch)[part]


def _shuffled(order: RowOrder, buffer_size: int | None, seed: int, every_epoch: bool, epoch: int) -> Indices:
    rng = generator(seed, epoch if every_epoch else 0)
    before = order.indices(epoch)
    if buffer_size is None or buffer_size >= order.length:
        places = rng.permutation(order.length)
        stored = isinstance(before, range) and before == range(order.length)
        return places if stored else np.asarray(before)[places]
    return np.fromiter(buffer_shuffled(before, buffer_size, rng), np.int64, order.length)


def generator(seed: int, epoch: int) -> np.random.Generator:
    """The random numbers of one shuffle in one epoch, the same in every run."""
    return np.random.default_rng([seed, epoch])


def buffer_shuffled(elements: Iterable[T], buffer_size: int | None, rng: np.random.Generator) -> Iterator[T]:
    """Draw again and again from a buffer that is filled up from ``elements``.

    Args:
        elements: in the order before.
        buffer_size: elements held at a time; None holds all of them.
        rng: where the draws come from.
    """
    rest = iter(elements)
    buffer = list(itertools.islice(rest, buffer_size))
    draws = itertools.chain.from_iterable(
        rng.integers(len(buffer), size=_DRAWS_AT_ONCE).tolist() for _ in itertools.repeat(None)
    )
    for element in rest:
        place = next(draws)
        yield buffer[place]
        buffer[place] = element
    for place in rng.permutation(len(buffer)).tolist():
        yield buffer[place]


def blocks(chunks: Iterable[Indices], size: int, *, drop_remainder: bool) -> Iterator[Indices]:
    """Cut a stream of row numbers into blocks of ``size``, across the borders of the chunks.

    A block within one chunk is a slice of it. The last block is short, or is left out.
    """
    left: Indices = range(0)
    for chunk in chunks:
        start = 0
        if len(left):
            start = min(size - len(left), len(chunk))
            left = np.concatenate([np.asarray(left), np.asarray(chunk[:start])])
            if len(left) < size:
                continue
            yield left
        full = start + (len(chunk) - start) // size * size
        for begin in range(start, full, size):
            yield chunk[begin : begin + size]
        left = chunk[full:]
    if len(left) and not drop_remainder:
        yield left


def take_rows(array: Any, indices: Indices) -> Any:
    """These rows of an array: a view where the indices are a range, otherwise a copy."""
    if isinstance(indices, range):
        return array[indices.start : indices.stop : indices.step]
    # take() is several times as fast as indexing for short rows; other libraries' arrays may mean something else by it.
    return array.take(indices, axis=0) if isinstance(array, np.ndarray) else array[indices]
