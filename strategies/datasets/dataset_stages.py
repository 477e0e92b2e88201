"""The stages that work element by element: the user's iterables, and what turns one stream into another.

A stage is a description and holds no position. Opening it gives the elements of one epoch from any
position on, and claims a one-shot source at once, not with the first element.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn, final

from collectives.fork_safe_lock import ForkSafeLock
from strategies.datasets.elements import Element, count_rows, flatten, stack, unflatten
from strategies.datasets.input_options import AutoShardPolicy
from strategies.datasets.prefetching import prefetched
from strategies.datasets.row_order import buffer_shuffled, generator
from strategies.datasets.stage import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Stage,
    Traits,
    inner_epoch,
    repetitions,
)


@final
class OneShot:
    """An iterator that can be handed out once."""

    def __init__(self, elements: Iterator[Element]) -> None:
        self._elements: Iterator[Element] | None = elements
        self._lock = ForkSafeLock()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "dataset: its source is a one-shot iterator, which can't be pickled or copied; need a source that can start over — pass the "
            "function that makes the generator, or a list"
        )

    def __call__(self) -> Iterator[Element]:
        with self._lock:
            elements, self._elements = self._elements, None
        if elements is None:
            raise RuntimeError(
                "dataset: its source is a one-shot iterator that has been iterated before; need a source that can "
                "start over — pass the function that makes the generator, or a list"
            )
        return elements


@final
@dataclass(frozen=True, eq=False)
class Generated(Stage):
    """What the user's iterable gives, unchanged."""

    source: Callable[[], Iterable[Element]]
    known: Traits

    @property
    def traits(self) -> Traits:
        return self.known

    def open(self, epoch: int, skip: int) -> Iterator[Element]:  # noqa: ARG002 - the user's epochs are his own
        elements = self.source()
        if not isinstance(elements, Iterable):
            raise TypeError(
                f"from_generator: the function returned {type(elements).__name__}; need an iterable of elements"
            )
        return itertools.islice(elements, skip, None)


@final
@dataclass(frozen=True, eq=False)
class Mapped(Stage):
    """A function of each element."""

    inner: Stage
    function: Callable[..., Element]

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, batch_size=None)

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        return self._results(self.inner.open(epoch, skip))

    # A generator, not map(): a StopIteration from the user's function must not pass for the end.
    def _results(self, elements: Iterator[Element]) -> Iterator[Element]:
        for element in elements:
            yield call(self.function, element)


@final
@dataclass(frozen=True, eq=False)
class Filtered(Stage):
    """The elements that a predicate holds of."""

    inner: Stage
    predicate: Callable[..., Any]

    @property
    def traits(self) -> Traits:
        known = self.inner.traits
        return known if known.cardinality == 0 else replace(known, cardinality=UNKNOWN_CARDINALITY)

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        return itertools.islice(self._chosen(self.inner.open(epoch, 0)), skip, None)

    def _chosen(self, elements: Iterator[Element]) -> Iterator[Element]:
        for element in elements:
            if call(self.predicate, element):
                yield element


@final
@dataclass(frozen=True, eq=False)
class Batched(Stage):
    """Elements stacked along a new first axis."""

    inner: Stage
    size: int
    drop_remainder: bool
    pad: bool

    @property
    def traits(self) -> Traits:
        return self.inner.traits.batched(self.size, drop_remainder=self.drop_remainder)

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        return self._batches(self.inner.open(epoch, skip * self.size))

    def _batches(self, elements: Iterator[Element]) -> Iterator[Element]:
        where = "padded_batch" if self.pad else "batch"
        while rows := list(itertools.islice(elements, self.size)):
            if self.drop_remainder and len(rows) < self.size:
                return
            yield stack(rows, pad=self.pad, where=where)


@final
@dataclass(frozen=True, eq=False)
class Unbatched(Stage):
    """The rows of the elements, one by one."""

    inner: Stage

    @property
    def traits(self) -> Traits:
        known = self.inner.traits
        endless_or_empty = known.cardinality in (INFINITE_CARDINALITY, 0)
        cardinality = known.cardinality if endless_or_empty else UNKNOWN_CARDINALITY
        return replace(known, cardinality=cardinality, batch_size=None)

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        return itertools.islice(self._rows(self.inner.open(epoch, 0)), skip, None)

    def _rows(self, elements: Iterator[Element]) -> Iterator[Element]:
        for element in elements:
            leaves, structure = flatten(element)
            for row in range(count_rows(leaves, structure, "unbatch", "these elements are no batches")):
                yield unflatten(structure, [leaf[row] for leaf in leaves])


@final
@dataclass(frozen=True, eq=False)
class Repeated(Stage):
    """A stream some times over (None: for ever), each time as a new epoch."""

    inner: Stage
    times: int | None

    @property
    def traits(self) -> Traits:
        return self.inner.traits.repeated(self.times)

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        known = self.traits
        if known.cardinality == 0:
            return iter(())
        length = self.inner.traits.cardinality
        if length < 0:
            return itertools.islice(self._elements(epoch, 0, self._open(epoch, 0, 0)), skip, None)
        first, rest = divmod(skip, length)
        if self.times is not None and first >= self.times:
            return iter(())
        return self._elements(epoch, first, self._open(epoch, first, rest))

    def _open(self, epoch: int, repetition: int, skip: int) -> Iterator[Element]:
        return self.inner.open(inner_epoch(epoch, repetition, self.times), skip)

    def _elements(self, epoch: int, first: int, elements: Iterator[Element]) -> Iterator[Element]:
        for repetition in repetitions(first, self.times):
            if repetition != first:
                elements = self._open(epoch, repetition, 0)
            empty = True
            for element in elements:
                yield element
                empty = False
            if empty:  # repeating nothing for ever would hang
                return


@final
@dataclass(frozen=True, eq=False)
class Sliced(Stage):
    """A part of a stream, by position: what `take`, `skip` and `shard` give."""

    inner: Stage
    part: slice

    @property
    def traits(self) -> Traits:
        return self.inner.traits.sliced(self.part)

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        step = self.part.step or 1
        start = (self.part.start or 0) + skip * step
        stop = None if self.part.stop is None else max(0, self.part.stop - start)
        return itertools.islice(self.inner.open(epoch, start), 0, stop, step)


@final
@dataclass(frozen=True, eq=False)
class Shuffled(Stage):
    """A stream drawn from a buffer (None: one that holds all of it)."""

    inner: Stage
    buffer_size: int | None
    seed: int
    unseeded: bool
    every_epoch: bool

    @property
    def traits(self) -> Traits:
        return self.inner.traits.shuffled(self.seed, unseeded=self.unseeded)

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        rng = generator(self.seed, epoch if self.every_epoch else 0)
        return itertools.islice(buffer_shuffled(self.inner.open(epoch, 0), self.buffer_size, rng), skip, None)


@final
@dataclass(frozen=True, eq=False)
class Prefetched(Stage):
    """A stream made ahead of its use, in a thread."""

    inner: Stage
    buffer_size: int

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        return prefetched(self.inner.open(epoch, skip), self.buffer_size)


@final
@dataclass(frozen=True, eq=False)
class WithPolicy(Stage):
    """A stream that says how workers are to share it."""

    inner: Stage
    auto_shard_policy: AutoShardPolicy

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, auto_shard_policy=self.auto_shard_policy)

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        return self.inner.open(epoch, skip)


def call(function: Callable[..., Any], element: Element) -> Any:
    """Call with an element; a plain tuple becomes separate arguments, a named tuple stays one."""
    return function(*element) if type(element) is tuple else function(element)
