"""A variable whose rows are spread over several variables, such as a table too large for one device."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np

from collectives.arrays import Array, as_array, describe
from collectives.indexed_slices import IndexedSlices, require_rows
from variables.array_behaviour import ArrayBehaviour
from variables.partitioners import shard_sizes
from variables.replica_context import Context, current
from variables.variable import Variable, VariableSpec, Write, require_plain

_CACHED_BYTES = 1 << 19


@final
class ShardedVariable(Variable):
    """Several variables, one after the other along the first axis, as one.

    Shards may be of any length, also empty, and of any kind: what a read sees and how writes are aggregated is as
    their kind has it, shard by shard. Writes are cut and reach every shard; a call that does not fit is refused before
    anything is written.

    Arithmetic, NumPy's functions and indexing work as on the whole array. Only what is asked for is read by `sparse_read`,
    by slices, and by integers, arrays or masks on the first axis; all else puts the whole together. Either way the result is a new array. As in
    TensorFlow, iterating gives the shards.

    An optimizer cuts the variable's gradient, dense or sparse, likewise. A checkpoint holds it as one array, whatever
    the shards.

    Args:
        shards: at least one, in order; of one dtype, one shape but for the first axis, one strategy, and equal
            synchronization, aggregation and trainability.
        name: for error messages and checkpoints.

    Raises:
        TypeError: none, or what is no variable.
        ValueError: shards that do not fit together.
    """

    def __new__(cls, shards: Sequence[Variable], name: str | None = None) -> ShardedVariable:
        self = object.__new__(cls)
        self.shards = tuple(shards)
        self.name = "sharded_variable" if name is None else name
        _require_fitting(self.shards, f"ShardedVariable {self.name!r}")
        first = self.shards[0]
        *offsets, num_rows = itertools.accumulate((shard.shape[0] for shard in self.shards), initial=0)
        self.offsets = tuple(offsets)
        self._bounds = np.array([*offsets, num_rows])
        self.shape = (num_rows, *first.shape[1:])
        self.dtype = first.dtype
        self.trainable = first.trainable
        self.synchronization = first.synchronization
        self.aggregation = first.aggregation
        self.owner = first.owner
        return self

    shards: tuple[Variable, ...]
    """The variables it is made of, in order."""
    offsets: tuple[int, ...]
    """Of which row of the whole each shard's first is."""
    _bounds: Array

    @classmethod
    def cut(
        cls, spec: VariableSpec, name: str, num_shards: int, make: Callable[[VariableSpec, str], Variable]
    ) -> ShardedVariable:
        """A new one, from the initial value of the whole.

        Args:
            spec: of the whole.
            name: of the whole; shards are called ``name/part_0``, ``name/part_1``, ...
            num_shards: into shards whose lengths differ by at most one, the longer first.
            make: a shard of its spec and name.
        """
        whole = spec.initial_value
        bounds = itertools.accumulate(shard_sizes(len(whole), num_shards), initial=0)
        return cls(
            [
                make(replace(spec, initial_value=whole[start:stop]), f"{name}/part_{number}")
                for number, (start, stop) in enumerate(itertools.pairwise(bounds))
            ],
            name,
        )

    @property
    def variables(self) -> tuple[Variable, ...]:
        """TensorFlow's name for `shards`."""
        return self.shards

    @property
    def components(self) -> tuple[Variable, ...]:
        return tuple(component for shard in self.shards for component in shard.components)

    @property
    def size(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, counted once, however many copies its shards have."""
        return self.size * self.dtype.itemsize

    # ----------------------------------------------------------------- reading

    def sparse_read(self, ids: Any) -> Array:
        """Rows by their numbers, in the order asked; one that is asked for twice comes twice.

        Args:
            ids: integers from 0, any shape.

        Returns:
            A new array of shape ``(*ids.shape, *shape[1:])``.

        Raises:
            TypeError: ids that are no integers.
            IndexError: no such row.
        """
        where = f"{self.name}.sparse_read"
        ids = _ids(ids, where)
        require_rows(ids.reshape(-1), self.shape[0], where)
        return self._rows(ids.reshape(-1).astype(np.intp, copy=False)).reshape(ids.shape + self.shape[1:])

    # What follows would work as inherited, by way of the whole; it is here to leave most of a large table where it is.

    def __getitem__(self, index: Any) -> Any:
        parts = index if type(index) is tuple else (index,)
        num_new = next((i for i, part in enumerate(parts) if part is not None), len(parts))
        if num_new < len(parts):
            picked = self._pick(parts[num_new])
            if picked is not None:
                rows, place = picked
                return rows[(*parts[:num_new], place, *parts[num_new + 1 :])]
        return self.value()[index.value() if isinstance(index, ArrayBehaviour) else index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.shards)

    def _value_in(self, context: Context | None) -> Array:
        whole = np.concatenate([shard._value_in(context) for shard in self.shards])
        whole.flags.writeable = False  # as of every variable: what is written into it would be lost
        return whole

    def _pick(self, index: Any) -> tuple[Array, Any] | None:
        """The rows that an index on the first axis needs, and the index of the same meaning for them; or None."""
        if isinstance(index, slice):
            return self._slice(index), slice(None)
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            if not -self.shape[0] <= index < self.shape[0]:
                raise IndexError(
                    f"{self.name}: got index {index}; need one from {-self.shape[0]} to {self.shape[0] - 1}"
                )
            row = int(index) % self.shape[0]
            return self._slice(slice(row, row + 1)), 0
        if not isinstance(index, (list, np.ndarray, ArrayBehaviour)):
            return None
        array = np.asarray(index)
        if array.dtype.kind == "b" and array.shape == self.shape[:1]:
            array = np.flatnonzero(array)
        elif isinstance(index, list) and not index:
            array = array.astype(np.intp)
        if array.dtype.kind not in "iu" or not array.ndim:
            return None
        rows = array.reshape(-1).astype(np.intp)
        rows[rows < 0] += self.shape[0]  # NumPy's rule, where sparse_read refuses them
        require_rows(rows, self.shape[0], self.name)
        return self._rows(rows), np.arange(rows.size).reshape(array.shape)

    def _slice(self, rows: slice) -> Array:
        wanted = range(self.shape[0])[rows]
        ascending = wanted if wanted.step > 0 else wanted[::-1]
        context = current.get()
        pieces = [np.empty((0, *self.shape[1:]), self.dtype)]
        for shard, start, stop in zip(self.shards, self.offsets, self._bounds[1:], strict=True):
            own = ascending[bisect.bisect_left(ascending, start) : bisect.bisect_left(ascending, stop)]
            if own:
                pieces.append(shard._value_in(context)[own.start - start : own.stop - start : own.step])
        if wanted is not ascending:
            pieces = [piece[::-1] for piece in reversed(pieces)]
        return np.concatenate(pieces)

    def _rows(self, rows: Array) -> Array:
        """Rows by their numbers, of shape ``(num_rows,)`` and in range."""
        context = current.get()
        result = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for shard, offset, places in zip(self.shards, self.offsets, self._by_shard(rows), strict=True):
            local = rows[places] - offset
            if not len(local):
                continue
            values = shard._value_in(context)
            if isinstance(places, slice):
                _take(values, local, result[places])
                continue
            # By way of memory that stays in the cache: new pages for a large shard's rows take longer than the rows.
            length = max(1, _CACHED_BYTES // max(1, values.nbytes // len(values)))
            cached = np.empty((min(length, len(local)), *self.shape[1:]), self.dtype)
            for start in range(0, len(local), length):
                piece = slice(start, start + length)
                result[places[piece]] = _take(values, local[piece], cached[: len(local[piece])])
        return result

    def _by_shard(self, rows: Array) -> Sequence[slice | Array]:
        """For each shard, where among the given numbers those of its rows are, in the order in which they are there."""
        if not len(rows) or bool((rows[:-1] <= rows[1:]).all()):
            cuts = np.searchsorted(rows, self._bounds)
            return [slice(int(start), int(stop)) for start, stop in itertools.pairwise(cuts)]
        numbers = np.searchsorted(self._bounds[1:], rows, side="right")
        numbers = numbers.astype(np.min_scalar_type(len(self.shards)))  # short ones are sorted in linear time
        order = np.argsort(numbers, kind="stable")
        return np.split(order, np.cumsum(np.bincount(numbers, minlength=len(self.shards)))[:-1])

    # ----------------------------------------------------------------- writing

    def split(self, value: Any) -> list[Any]:
        """A value of the whole, cut into each shard's part.

        Args:
            value: an array of shape `shape`, whose parts are views; or `IndexedSlices`, whose rows keep their order, and whose parts
                are views if the indices ascend.

        Raises:
            ValueError: another shape.
            IndexError: slices of rows that there are not.
        """
        where = f"{self.name}.split"
        if isinstance(value, IndexedSlices):
            if value.values.shape[1:] != self.shape[1:]:
                raise ValueError(f"{where}: got rows of {describe(value.values)}; need {self.shape[1:]} each")
            require_rows(value.indices, self.shape[0], where)
            return self._cut(value)
        array = as_array(value, where)
        if array.shape != self.shape:
            raise ValueError(f"{where}: got {describe(array)}; need shape {self.shape}")
        return self._cut(array)

    def _cut(self, value: Any) -> list[Any]:
        if not isinstance(value, IndexedSlices):
            return [value[start:stop] for start, stop in itertools.pairwise(self._bounds)]
        rows = value.indices.astype(np.intp, copy=False)
        return [
            IndexedSlices(value.values[places], rows[places] - offset, shard.shape)
            for shard, offset, places in zip(self.shards, self.offsets, self._by_shard(rows), strict=True)
        ]

    def _write_in(
        self, context: Context | None, write: Write, value: Any, read_value: bool, already_identical: bool
    ) -> Any:
        require_plain(self, write, value)
        # Shards with nothing to do too: in a replica every write is a meeting, and replicas touch different rows.
        for shard, part in zip(self.shards, self._cut(value), strict=True):
            shard._write_in(context, write, part, False, already_identical)
        return self if read_value else None


def embedding_lookup(params: Any, ids: Any) -> Array:
    """Rows of a table by their numbers, in the order asked, sharded or not.

    The gradient with respect to the table is ``IndexedSlices(g.reshape(-1, *table.shape[1:]), ids.ravel(), table.shape)``.

    Args:
        params: a variable of any kind, or an array, of shape ``(num_rows, ...)``.
        ids: integers from 0, any shape.

    Returns:
        A new array of shape ``(*ids.shape, *params.shape[1:])``.

    Raises:
        TypeError: ids that are no integers.
        IndexError: no such row; negative ones don't count from the end.
        ValueError: a table without rows to number: of no axes.
    """
    if isinstance(params, ShardedVariable):
        return params.sparse_read(ids)
    where = "embedding_lookup"
    table = params.value() if isinstance(params, ArrayBehaviour) else as_array(params, where)
    if not table.ndim:
        raise ValueError(f"{where}: got {describe(table)}; need a table of at least one axis")
    ids = _ids(ids, where)
    require_rows(ids.reshape(-1), len(table), where)
    result: Array = np.take(table, ids.astype(np.intp, copy=False), axis=0)
    return result


def _take(values: Array, rows: Array, out: Array) -> Array:
    # They are in range: with "clip" NumPy writes into the result itself, not into a copy first.
    return np.take(values, rows, axis=0, out=out, mode="clip")


def _ids(ids: Any, where: str) -> Array:
    array = as_array(ids, where)
    if not array.size and array.dtype.kind == "f" and not isinstance(ids, np.ndarray):
        array = array.astype(np.intp)  # NumPy makes floats of an empty list
    if array.dtype.kind not in "iu":
        raise TypeError(f"{where}: got {describe(array)}; need integers")
    return array


def _require_fitting(shards: Sequence[Any], where: str) -> None:
    if not shards:
        raise TypeError(f"{where}: got no shards; need at least one variable")
    first = shards[0]
    wrong = [shard for shard in shards if not isinstance(shard, Variable)]
    if wrong:
        raise TypeError(f"{where}: got {type(wrong[0]).__name__} as a shard; need variables")
    for number, shard in enumerate(shards):
        if isinstance(shard, ShardedVariable):
            raise TypeError(f"{where}: got {shard!r} as shard {number}; need variables that are whole")
        if not shard.shape or shard.shape[1:] != first.shape[1:] or shard.dtype != first.dtype:
            raise ValueError(
                f"{where}: got {first!r} as shard 0 and {shard!r} as shard {number}; need one dtype, and shapes of at least one "
                "axis that differ on the first one only"
            )
        for what in ("owner", "trainable", "synchronization", "aggregation"):
            own, others = getattr(shard, what), getattr(first, what)
            if own is not others:
                raise ValueError(
                    f"{where}: got {what} {others!r} of shard 0 and {own!r} of shard {number}; need one and the same"
                )
    if len({id(shard) for shard in shards}) < len(shards):
        raise ValueError(f"{where}: got one variable as several shards; need each once")
