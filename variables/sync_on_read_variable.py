"""Variables that replicas change alone and that agree only when read."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from variables.flat_memory import FlatMemory, Place
from variables.local_variable import LocalVariable
from variables.mirrored_variable import make_copies
from variables.replica_context import Context, CrossReplicaContext, Owner, ReplicaContext
from variables.synchronization import VariableAggregation, aggregate
from variables.values import is_distributed
from variables.variable import Variable, VariableSpec, Write

_DENSE = (Write.ASSIGN, Write.ASSIGN_ADD, Write.ASSIGN_SUB)


@final
class SyncOnReadVariable(Variable):
    """One copy for each replica, aggregated when read across replicas (synchronization ON_READ).

    Writes in a replica cost no communication, so it suits what every step changes and few steps read: metrics, batch
    statistics, accumulated gradients. Every copy starts from the initial value.

    Args:
        spec: what it is to be.
        memory: of the devices that it has copies on.
        owner: the strategy that it is made under.
        name: what it is called.
        outlasts: whether what a process has added to a sum must not be lost with it.
    """

    def __new__(
        cls, spec: VariableSpec, memory: FlatMemory, owner: Owner, name: str, *, outlasts: bool = False
    ) -> SyncOnReadVariable:
        self = object.__new__(cls)
        self.owner = owner
        is_sum = spec.aggregation is VariableAggregation.SUM
        value = spec.initial_value
        place = memory.lent_place(value.shape, value.dtype) if outlasts and is_sum else None
        self.copies, self.place = make_copies(self, spec, memory, owner, name, place)
        self.inherited = None
        return self

    copies: tuple[LocalVariable, ...]
    place: Place
    inherited: Array | None
    """What processes that are gone had added to the sum, known alike to all processes; None for nothing."""

    @property
    def components(self) -> tuple[Variable, ...]:
        return self.copies

    def _value_in(self, context: Context | None) -> Array:
        self._require_own_context(context)
        own = self._own_copy(context)
        if own is not None:
            return own.live()
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{self.name}: read across replicas, each of which has a value of its own, and aggregation NONE says not "
                "how they become one; make it with aggregation='SUM', 'MEAN' or 'ONLY_FIRST_REPLICA', or take all values "
                "with strategy.experimental_local_results(variable)"
            )
        link = None if self.owner is None else self.owner.link
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA and link is None:
            return self.copies[0].live()
        if link is None or self.owner is None:
            return aggregate([copy.live() for copy in self.copies], self.aggregation)
        linked = link

        def read() -> Array:
            first, *others = [copy.live() for copy in self.copies]
            if self.inherited is not None and linked.process == 0:
                first = np.asarray(first + self.inherited)
            return aggregate([first, *others], self.aggregation, linked, Call("read", (), self.name))

        return self.owner.across(read)

    def _write_in(
        self, context: Context | None, write: Write, value: Any, read_value: bool, already_identical: bool
    ) -> Any:
        self._require_own_context(context)
        if write not in _DENSE:
            raise NotImplementedError(
                f"{self.name}.{write.value}: ON_READ variables have no scatter; "
                "use assign_add with a dense array — or synchronization=ON_WRITE"
            )
        own = self._own_copy(context)
        if own is not None:
            if write is Write.ASSIGN and self.inherited is not None:
                self._forget_inherited()
            return own._write_in(context, write, value, read_value, already_identical)
        if is_distributed(value):
            raise ValueError(
                f"{self.name}.{write.value}: got a {type(value).__name__} across replicas; need one array — "
                "write each replica's value in strategy.run"
            )
        self._write_across(write, value)
        return self._value_in(context) if read_value else None

    def _write_across(self, write: Write, value: Array) -> None:
        if self.aggregation is not VariableAggregation.SUM:
            for copy in self.copies:
                copy.apply(write, value)
        elif write is Write.ASSIGN:
            self._forget_inherited()
            # An equal share each; integers lose the rest, as they do in TensorFlow.
            whole = self.dtype.kind in "iu"
            num_copies = len(self.copies) if self.owner is None else self.owner.num_replicas_in_sync
            share = _whole_share(value, num_copies) if whole else value / num_copies
            for copy in self.copies:
                copy.apply(write, np.asarray(share).astype(self.dtype))
        elif self.owner is None or self.owner.link is None or self.owner.link.first == 0:
            # Once, so that the next read is exactly the old value and the change.
            self.copies[0].apply(write, value)

    def _forget_inherited(self) -> None:
        """All replicas begin again from a value of their own, as those that are gone would have done."""
        inherited, self.inherited = self.inherited, None
        journal = None if self.owner is None else self.owner.journal
        if inherited is not None and journal is not None:
            journal.keep_state(self, "inherited", lambda: lambda: setattr(self, "inherited", inherited))

    def _own_copy(self, context: Context | None) -> LocalVariable | None:
        if isinstance(context, ReplicaContext):
            return self.copies[context.local_replica_id]
        if isinstance(context, CrossReplicaContext) and context.updating is not None:
            return self.copies[context.updating]
        return None


def _whole_share(value: Array, num_copies: int) -> Array:
    """The value divided, towards zero, in integers: large ones have more digits than a float."""
    share, rest = np.divmod(value, num_copies)
    towards_zero: Array = share + ((rest != 0) & (value < 0))
    return towards_zero
