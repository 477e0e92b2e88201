"""The plain variable: one array in one place.

It is what there is outside strategies and on one device, and what the copies of distributed variables are.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np

from collectives.arrays import Array, is_host
from collectives.devices import Device
from collectives.fork_safe_lock import ForkSafeLock
from variables.flat_memory import FlatMemory, Place
from variables.lent_copies import LentCopies
from variables.replica_context import Context, Owner, ReplicaContext
from variables.variable import Variable, VariableSpec, Write, require_plain

_HOST = Device("cpu")


@final
class LocalVariable(Variable):
    """One array, the same for whoever reads or writes it.

    Args:
        spec: what it is to be.
        place: where it lies.
        copy: on which of the place's devices.
        owner: the strategy that it was made under.
        distributed: of which variable it is a component.
    """

    def __new__(
        cls,
        spec: VariableSpec,
        place: Place,
        copy: int = 0,
        *,
        name: str | None = None,
        owner: Owner | None = None,
        distributed: Variable | None = None,
    ) -> LocalVariable:
        self = object.__new__(cls)
        self.name = name if name is not None else spec.name or "variable"
        self.shape = place.shape
        self.dtype = place.block.dtype
        self.trainable = spec.trainable
        self.synchronization = spec.synchronization
        self.aggregation = spec.aggregation
        self.owner = owner
        self.distributed = distributed
        self.place = place
        self.device = place.block.devices[copy]
        self.memory = place.view(place.block.copies[copy])
        self.lent = place.block.lent
        self._number = copy
        self._read_only = self.memory.view()
        if is_host(self.memory):
            self._read_only.flags.writeable = False
        self._mutex = _mutexes[id(self) // 64 % len(_mutexes)]
        return self

    place: Place
    device: Device
    memory: Array
    """Its array itself, writable: for the code that updates all copies alike."""
    lent: LentCopies | None
    """The copies that it is one of, where other processes have them mapped."""
    _number: int
    _read_only: Array
    _mutex: Any

    @classmethod
    def alone(cls, spec: VariableSpec) -> LocalVariable:
        """A variable that belongs to no strategy, on the CPU."""
        return cls.made(spec, _alone, None)

    @classmethod
    def made(
        cls, spec: VariableSpec, memory: FlatMemory, owner: Owner | None, name: str | None = None
    ) -> LocalVariable:
        """A new variable on the one device of this memory, with its initial value."""
        value = spec.initial_value
        place = memory.place(value.shape, value.dtype, trainable=spec.trainable)
        self = cls(spec, place, name=name, owner=owner)
        self.memory[...] = value if self.device.kind == "cpu" else self.device.xp.asarray(value)
        return self

    @property
    def components(self) -> tuple[Variable, ...]:
        return (self,)

    def apply(self, write: Write, value: Any) -> None:
        """Change this array alone, by a value that has been checked."""
        if isinstance(value, np.ndarray) and not is_host(self.memory):
            value = self.device.place(value)
        journal = None if self.owner is None else self.owner.journal
        if journal is not None and self.lent is not None:
            journal.keep_lent(self.lent, self._number)
        elif journal is not None:
            journal.keep(id(self), self.memory)
        # Outside a strategy all replicas share one plain variable, and an addition is a read and a write.
        with self._mutex:
            write.apply(self.memory, value)

    def live(self) -> Array:
        """This array, read-only, whatever the context."""
        return self._read_only

    def _overlaps(self, array: Array) -> bool:
        return is_host(array) == is_host(self.memory) and bool(
            self.device.xp.may_share_memory(array, self.memory)
        )

    # Whoever reads or writes it, it is the same one array.
    def _value_in(self, context: Context | None) -> Array:  # noqa: ARG002
        return self._read_only

    def _write_in(
        self,
        context: Context | None,
        write: Write,
        value: Any,
        read_value: bool,
        already_identical: bool,  # noqa: ARG002  # as above
    ) -> Any:
        require_plain(self, write, value)
        self.apply(write, value)
        if not read_value:
            return None
        # As other kinds do, so that a step returns the same on any strategy; components are returned as themselves.
        in_step = isinstance(context, ReplicaContext) and self.distributed is None
        return self._read_only if in_step else self


_alone = FlatMemory([_HOST])
_mutexes = tuple(ForkSafeLock() for _ in range(64))
"""Shared by the variables, of which there may be many more."""
