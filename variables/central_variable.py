"""Variables with one copy, which all replicas share."""

from __future__ import annotations

from typing import Any, final

from collectives.arrays import Array
from collectives.rendezvous import Call
from variables.flat_memory import FlatMemory, Place
from variables.local_variable import LocalVariable
from variables.mirrored_variable import make_copies
from variables.replica_context import Context, CrossReplicaContext, Owner, ReplicaContext
from variables.synchronization import aggregate, aggregate_slices
from variables.variable import (
    Variable,
    VariableSpec,
    Write,
    require_additive,
    require_aggregation,
    require_plain,
)

_DENSE = (Write.ASSIGN, Write.ASSIGN_ADD, Write.ASSIGN_SUB)


@final
class CentralVariable(Variable):
    """One copy on the parameter device, read by all replicas; their writes are aggregated, then made once.

    Its synchronization has no effect: there is nothing to bring together.

    Args:
        spec: what it is to be.
        memory: of the parameter device.
        owner: the strategy that it is made under.
        name: what it is called.
    """

    def __new__(cls, spec: VariableSpec, memory: FlatMemory, owner: Owner, name: str) -> CentralVariable:
        self = object.__new__(cls)
        self.owner = owner
        self._created_at = spec.created_at
        self.copies, self.place = make_copies(self, spec, memory, owner, name)
        return self

    copies: tuple[LocalVariable, ...]
    place: Place
    _created_at: str

    @property
    def components(self) -> tuple[Variable, ...]:
        return self.copies

    def _value_in(self, context: Context | None) -> Array:
        self._require_own_context(context)
        return self.copies[0].live()

    def _write_in(
        self, context: Context | None, write: Write, value: Any, read_value: bool, already_identical: bool
    ) -> Any:
        self._require_own_context(context)
        require_additive(self, write)
        (copy,) = self.copies
        if not isinstance(context, ReplicaContext):
            inside = isinstance(context, CrossReplicaContext) and context.updating is not None
            copy._write_in(context, write, value, False, already_identical)
            return (copy if inside else self) if read_value else None
        require_plain(self, write, value)
        require_aggregation(self, write, self._created_at)

        def conclude(values: list[Any]) -> list[None]:
            combine = aggregate if write in _DENSE else aggregate_slices
            copy.apply(write, combine(values, self.aggregation))
            return [None] * len(values)

        context.require_own_thread(f"{self.name}.{write.value}")
        context.rendezvous.meet(context.local_replica_id, Call(write.value, (), self.name), value, conclude)
        return copy.live() if read_value else None
