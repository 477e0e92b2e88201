"""Variables with a copy on every device, all equal."""

from __future__ import annotations

from typing import Any, final

from collectives.arrays import Array
from collectives.rendezvous import Call
from variables.flat_memory import FlatMemory, Place
from variables.local_variable import LocalVariable
from variables.replica_context import Context, CrossReplicaContext, Owner, ReplicaContext
from variables.synchronization import aggregate, aggregate_slices
from variables.values import Mirrored, PerReplica, is_distributed
from variables.variable import (
    Variable,
    VariableSpec,
    Write,
    require_additive,
    require_aggregation,
    require_plain,
)


@final
class MirroredVariable(Variable):
    """Equal copies, kept equal by every write (synchronization ON_WRITE).

    Reads cost nothing; a write in a replica is a collective. It suits what every step reads: parameters.

    Args:
        spec: what it is to be.
        memory: of the devices that it has copies on.
        owner: the strategy that it is made under.
        name: what it is called.
    """

    def __new__(cls, spec: VariableSpec, memory: FlatMemory, owner: Owner, name: str) -> MirroredVariable:
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
        if context is None:
            return self.copies[0].live()
        if context.strategy is not self.owner:
            self._require_own_context(context)
        if type(context) is ReplicaContext:
            return self.copies[context.local_replica_id].live()
        return self.copies[context.updating or 0].live()

    def _write_in(
        self, context: Context | None, write: Write, value: Any, read_value: bool, already_identical: bool
    ) -> Any:
        self._require_own_context(context)
        require_additive(self, write)
        if isinstance(context, ReplicaContext):
            require_plain(self, write, value)
            self._write_in_replica(context, write, value, already_identical)
            return self.copies[context.local_replica_id].live() if read_value else None
        if isinstance(context, CrossReplicaContext) and context.updating is not None:
            copy = self.copies[context.updating]
            return copy._write_in(context, write, value, read_value, already_identical)
        self._write_across(write, value)
        return Mirrored([copy.live() for copy in self.copies]) if read_value else None

    def _write_in_replica(
        self, context: ReplicaContext, write: Write, value: Any, already_identical: bool
    ) -> None:
        if already_identical or context.num_replicas_in_sync == 1:
            self.copies[context.local_replica_id].apply(write, value)
            return
        require_aggregation(self, write, self._created_at)

        def conclude(values: list[Any]) -> list[None]:
            combine = aggregate if write in _DENSE else aggregate_slices
            self._apply_to_all(write, combine(values, self.aggregation, context.strategy.link, call))
            return [None] * len(values)

        context.require_own_thread(f"{self.name}.{write.value}")
        call = Call(write.value, (), self.name)
        context.rendezvous.meet(context.local_replica_id, call, value, conclude)

    def _write_across(self, write: Write, value: Any) -> None:
        if isinstance(value, PerReplica):
            raise ValueError(
                f"{self.name}.{write.value}: got a PerReplica, which would make the copies differ; need one array, or a "
                "Mirrored — reduce it first: strategy.reduce('MEAN', value, axis=None)"
            )
        if is_distributed(value):
            value = self._checked(write, value.values[0])  # one stands for all, as they are equal
        self._apply_to_all(write, value)

    def _apply_to_all(self, write: Write, value: Any) -> None:
        first, *others = self.copies
        try:
            for copy in self.copies:
                copy.apply(write, value)
        except BaseException:
            # A write that fails halfway, by an overflow that raises or Ctrl-C, must not leave copies that differ.
            for other in others:
                other.apply(Write.ASSIGN, first.memory)
            raise


_DENSE = (Write.ASSIGN, Write.ASSIGN_ADD, Write.ASSIGN_SUB)


def make_copies(
    variable: Variable,
    spec: VariableSpec,
    memory: FlatMemory,
    owner: Owner,
    name: str,
    place: Place | None = None,
) -> tuple[tuple[LocalVariable, ...], Place]:
    """A component for each device, all from the initial value, and the description of the whole from it."""
    value = spec.initial_value
    if place is None:
        place = memory.place(value.shape, value.dtype, trainable=spec.trainable)
    copies = []
    for number in range(len(place.block.devices)):
        own_name = name if number == 0 else f"{name}/replica_{number}"
        copy = LocalVariable(spec, place, number, name=own_name, owner=owner, distributed=variable)
        copy.memory[...] = value if copy.device.kind == "cpu" else copy.device.xp.asarray(value)
        copies.append(copy)
    variable.name = name
    variable.shape = place.shape
    variable.dtype = place.block.dtype
    variable.trainable = spec.trainable
    variable.synchronization = spec.synchronization
    variable.aggregation = spec.aggregation
    return tuple(copies), place
