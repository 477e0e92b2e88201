"""What a checkpoint holds, one entry for each object: what of it is saved, and how it takes that back.

Entries say where memory lies and what fits; they read and write no file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from collectives.arrays import Array, describe_kind, is_host
from strategies.checkpoints.file_format import SavedArray, StoredArray, require_storable
from strategies.checkpoints.states import State
from variables.central_variable import CentralVariable
from variables.local_variable import LocalVariable
from variables.mirrored_variable import MirroredVariable
from variables.replica_context import current
from variables.sharded_variable import ShardedVariable
from variables.sync_on_read_variable import SyncOnReadVariable
from variables.synchronization import VariableAggregation
from variables.variable import Variable


@final
@dataclass
class Filling:
    """A part of an array of the file, and the memory that it goes to.

    Attributes:
        name: in the file.
        skip: bytes of the array that come before.
        targets: equally large arrays in host memory, C-contiguous and writable.
    """

    name: str
    skip: int
    targets: list[Array]


@final
@dataclass
class Filled:
    """What is to be done once the arrays have been read: `Filling` can't reach all memory itself."""

    fillings: list[Filling] = field(default_factory=list)
    writes: list[tuple[Variable, Array]] = field(default_factory=list)
    copies: list[tuple[Array, Array]] = field(default_factory=list)
    """Arrays on devices or with gaps, and the arrays that they are to be equal to."""

    def finish(self) -> None:
        """Write what has been read to where it could not be read to."""
        with _across_replicas():
            for variable, value in self.writes:
                variable.assign(value, read_value=False)
        for array, value in self.copies:
            if is_host(array):
                np.copyto(array, value)
            else:
                array.set(value)  # type: ignore[attr-defined]  # CuPy's way from the host


class ArrayEntry(ABC):
    """Something that is one array in the file."""

    name: str

    @abstractmethod
    def save(self) -> SavedArray:
        """What is to be written: memory, not copies, as far as that has the saved value."""

    def save_for_newcomer(self) -> SavedArray:
        """What a process that joins is to begin with; not a collective."""
        return self.save()

    @abstractmethod
    def mismatch(self, stored: StoredArray) -> str | None:
        """Why an array of the file can't be this one's value, or None."""

    @abstractmethod
    def fill(self, into: Filled) -> None:
        """Note where the value goes to."""


@final
@dataclass(frozen=True)
class VariableEntry(ArrayEntry):
    """A variable of any kind, by its logical value: its copies and shards are not in the file."""

    name: str
    variable: Variable

    def save(self) -> SavedArray:
        with _across_replicas():
            return self._saved([part.value() for part in parts_of(self.variable)])

    def save_for_newcomer(self) -> SavedArray:
        with _across_replicas():
            return self._saved([_part_of_newcomer(part) for part in parts_of(self.variable)])

    def _saved(self, values: Sequence[Any]) -> SavedArray:
        require_storable(self.variable.dtype, f"save: {self.name}")
        pieces = [_on_host(value) for value in values]
        return SavedArray(self.name, self.variable.shape, self.variable.dtype, pieces)

    def mismatch(self, stored: StoredArray) -> str | None:
        return _mismatch(stored, self.variable.shape, self.variable.dtype, "the variable")

    def fill(self, into: Filled) -> None:
        skip = 0
        for part in parts_of(self.variable):
            memory = _equal_copies(part)
            if memory is None:
                # Its own rules say what its copies become: equal shares of a sum, for one.
                value = np.empty(part.shape, part.dtype)
                into.writes.append((part, value))
                memory = [value]
            into.fillings.append(Filling(self.name, skip, memory))
            skip += part.dtype.itemsize * int(np.prod(part.shape))


@final
@dataclass(frozen=True)
class MemoryEntry(ArrayEntry):
    """Arrays that are filled in place, one after the other: a user's array, or an optimizer's slots."""

    name: str
    memory: Sequence[Array]

    def save(self) -> SavedArray:
        dtype = self.memory[0].dtype.newbyteorder("=")
        require_storable(dtype, f"save: {self.name}")
        pieces = [_on_host(array).astype(dtype, copy=False) for array in self.memory]
        return SavedArray(self.name, self._shape, dtype, pieces)

    def mismatch(self, stored: StoredArray) -> str | None:
        if is_host(self.memory[0]) and not self.memory[0].flags.writeable:
            return f"{self.name}: the array is read-only"
        return _mismatch(stored, self._shape, self.memory[0].dtype.newbyteorder("="), "the array")

    def fill(self, into: Filled) -> None:
        skip = 0
        for array in self.memory:
            target = array
            if not is_host(array) or not array.flags.c_contiguous or not array.dtype.isnative:
                target = np.empty(array.shape, array.dtype.newbyteorder("="))
                into.copies.append((array, target))
            into.fillings.append(Filling(self.name, skip, [target]))
            skip += array.nbytes

    @property
    def _shape(self) -> tuple[int, ...]:
        first = self.memory[0]
        if len(self.memory) == 1:
            return first.shape
        return (sum(array.shape[0] for array in self.memory), *first.shape[1:])


@final
@dataclass(frozen=True)
class StateEntry:
    """Something that is a state in the file.

    Attributes:
        name: in the file.
        save: gives the state.
        restore: goes to a state.
        save_for_newcomer: gives the state that a process which joins is to begin with, not a collective.
        is_common: whether all processes of a job should have the same one; otherwise each may have its own.
    """

    name: str
    save: Callable[[], State]
    restore: Callable[[State], object]
    save_for_newcomer: Callable[[], State]
    is_common: bool = False


def data_entry(name: str, holder: Any, key: Any) -> StateEntry:
    """The entry of a plain value, or of lists and dicts of them. A new value is put where the old one was found.

    Args:
        name: in the file.
        holder: the list, tuple or dict that it was found in.
        key: where in that.
    """

    def restore(state: State) -> None:
        held = holder[key]
        # The program may hold the same list or dict under a name of its own.
        if isinstance(held, list) and isinstance(state, list):
            held[:] = state
        elif isinstance(held, dict) and isinstance(state, dict):
            held.clear()
            held.update(state)
        elif isinstance(holder, tuple):
            if held != state:
                raise ValueError(f"restore: {name}: a tuple can't take {state!r}; need a list or a dict")
        else:
            holder[key] = tuple(state) if isinstance(held, tuple) and isinstance(state, list) else state

    def save() -> State:
        return deepcopy(holder[key])

    return StateEntry(name, save, restore, save, is_common=True)


def _on_host(array: Any) -> Array:
    # A CuPy array has no implicit way to the host.
    host: Array = array if is_host(array) else array.get()
    return host


def parts_of(variable: Variable) -> tuple[Variable, ...]:
    """A sharded variable's shards, or the variable itself."""
    return variable.shards if isinstance(variable, ShardedVariable) else (variable,)


def _part_of_newcomer(variable: Variable) -> Array:
    if not isinstance(variable, SyncOnReadVariable):
        return variable.value()
    own = variable.copies[0].memory
    # The replicas that are there keep their parts of a sum; a further one must not add to it.
    return np.zeros(own.shape, own.dtype) if variable.aggregation is VariableAggregation.SUM else own


def _equal_copies(variable: Variable) -> list[Array] | None:
    """The memory of a variable's copies, if all of them hold its value and can be read into."""
    if not isinstance(variable, (LocalVariable, MirroredVariable, CentralVariable)):
        return None
    memory = [copy.memory for copy in variable.components if isinstance(copy, LocalVariable)]
    return memory if all(map(is_host, memory)) else None


def _mismatch(stored: StoredArray, shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> str | None:
    if stored.shape == shape and stored.dtype == dtype:
        return None
    return (
        f"{stored.name}: the checkpoint has {describe_kind(stored.dtype, stored.shape)}, "
        f"{what} is {describe_kind(dtype, shape)}"
    )


@contextmanager
def _across_replicas() -> Iterator[None]:
    """See variables as from outside all scopes: a checkpoint may hold those of several strategies."""
    token = current.set(None)
    try:
        yield
    finally:
        current.reset(token)
