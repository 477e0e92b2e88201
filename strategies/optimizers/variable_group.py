"""Variables that an optimizer updates together, and how."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

from collectives.arrays import Array
from collectives.fork_safe_lock import ForkSafeLock
from collectives.indexed_slices import IndexedSlices
from collectives.rendezvous import Call
from strategies.optimizers.gradient_memory import GradientMemory, place_of
from strategies.optimizers.plan import Plan, Settings
from strategies.optimizers.sparse_rows import SparseRows, Table
from variables.journal import Journal
from variables.replica_context import Owner
from variables.sharded_variable import ShardedVariable
from variables.variable import Variable


@final
class VariableGroup:
    """One tuple of variables that are updated together, and the plans for it.

    Attributes:
        variables: in the caller's order, each shard that has rows by itself. "Positions" count these.
        link: to the other processes that update them too, if there are any.
        title: what they are called in messages.
        has_shards: whether some are shards, so that gradients are to be spread over them first.

    Args:
        settings: of the optimizer.
        memory: for gradients and slots.
        variables: in the caller's order.
        num_replicas: that have gradients.
        where: the method's name, for error messages.
        undecayed: ids of the variables without weight decay.
        strategy: whose replicas; kept so that its id stays its own.
    """

    def __init__(
        self,
        settings: Settings,
        memory: GradientMemory,
        variables: tuple[Variable, ...],
        num_replicas: int,
        where: str,
        undecayed: set[int],
        strategy: Owner | None,
    ) -> None:
        parts = [(part, whole) for whole, v in enumerate(variables) for part in _parts_with_rows(v)]
        self.variables = tuple(part for part, _ in parts)
        self._wholes = [whole for _, whole in parts]
        self._given = variables
        self.link = None if strategy is None else strategy.link
        self.has_shards = any(isinstance(variable, ShardedVariable) for variable in variables)
        self.num_replicas = num_replicas
        self.where = where
        self._settings = settings
        self._memory = memory
        self._undecayed = undecayed
        self._strategy = strategy
        self._plans: dict[tuple[tuple[int, ...], frozenset[int]], Plan] = {}
        self._warned: set[int] = set()
        self._mutex = ForkSafeLock()
        first, *others = [variable.name for variable in variables]
        self.title = title = f"of {first}" + (f" and {len(others)} more" if others else "")
        # Replicas meet only over the same variables; their ids stand for them.
        key = hash(tuple(map(id, variables)))
        self.call = Call("apply_gradients", (title, _Hidden(key)))
        self.between = Call("the middle of apply_gradients", (title, _Hidden(key)))
        self.end = Call("the end of apply_gradients", (title, _Hidden(key)))

    @property
    def journal(self) -> Journal | None:
        """Keeps what the step under way changes, where it may have to be made again."""
        return None if self._strategy is None else self._strategy.journal

    def arrays(self) -> Iterator[Array]:
        """All that an update of these variables changes: their copies and slots."""
        for variable in self.variables:
            state, place = self._memory.state_of(variable, self.num_replicas), place_of(variable)
            for whole in (*state.block.copies, *state.slots.values()):
                yield place.view(whole)

    def plan(self, sparse: tuple[int, ...], left_out: frozenset[int] = frozenset()) -> Plan:
        """How they are updated where the gradients at some positions are sparse, and some variables are left out."""
        key = (sparse, left_out)
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        with self._mutex:
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = self._make_plan(sparse, left_out)
            return plan

    def spread(self, gradients: Sequence[Any]) -> list[Any]:
        """A gradient for each position, from one for each variable in the caller's order."""
        spread: list[Any] = []
        for gradient, variable in zip(gradients, self._given, strict=True):
            if not isinstance(variable, ShardedVariable):
                spread.append(gradient)
            elif gradient is None:
                spread += [None for _ in _parts_with_rows(variable)]
            else:
                # Merged once, rows ascend, and the parts of shards are views.
                whole = gradient.merged() if isinstance(gradient, IndexedSlices) else gradient
                pairs = zip(variable.split(whole), variable.shards, strict=True)
                spread += [part for part, shard in pairs if len(shard)]
        return spread

    def warn_of_missing(self, positions: Iterable[int]) -> None:
        """Say once for each variable that it had no gradient on some replicas."""
        new = [position for position in sorted(positions) if position not in self._warned]
        if new:
            self._warned.update(new)
            names = ", ".join(self.variables[position].name for position in new)
            warnings.warn(
                f"{self.where}: {names} had no gradient on some replicas; they count as zero there",
                stacklevel=4,
            )

    def _make_plan(self, sparse: tuple[int, ...], left_out: frozenset[int]) -> Plan:
        settings = self._settings
        dense = [i for i in range(len(self.variables)) if i not in sparse and i not in left_out]
        chosen = [self.variables[i] for i in dense]
        some_undecayed = bool(settings.weight_decay) and any(id(v) in self._undecayed for v in chosen)
        apart = settings.tells_variables_apart or some_undecayed
        segments = [
            segment.at(dense) for segment in self._memory.segments(chosen, self.num_replicas, whole=apart)
        ]
        decays = [
            not some_undecayed or id(self.variables[s.order[0]]) not in self._undecayed for s in segments
        ]
        wholes = [self._wholes[segment.order[0]] for segment in segments]
        positions: dict[int, list[int]] = {}
        for position in sparse:
            positions.setdefault(self._wholes[position], []).append(position)
        rows = {tuple(own): self._rows([self.variables[p] for p in own]) for own in positions.values()}
        # What other processes bring too is reduced before the plan sees it.
        num_replicas = self.num_replicas if self.link is None else 1
        return Plan(settings, segments, decays, wholes, rows, num_replicas)

    def _rows(self, shards: Sequence[Variable]) -> SparseRows:
        tables = []
        for shard in shards:
            state, place = self._memory.state_of(shard, self.num_replicas), place_of(shard)
            slots: Mapping[str, Array] = state.slots
            tables.append(
                Table(
                    [place.view(copy) for copy in state.block.copies],
                    {name: place.view(slot) for name, slot in slots.items()},
                )
            )
        # An optimizer knows the shards of a variable only together, so all of them are decayed, or none.
        is_undecayed = id(shards[0]) in self._undecayed
        return SparseRows(tables, 0.0 if is_undecayed else self._settings.weight_decay)


@final
class _Hidden:
    """A value that takes part in comparisons but is not shown in messages."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hidden) and other._value == self._value

    def __hash__(self) -> int:
        return self._value

    def __str__(self) -> str:
        return ""


def parts_of(variable: Variable) -> tuple[Variable, ...]:
    """Its shards, or the variable itself."""
    return variable.shards if isinstance(variable, ShardedVariable) else (variable,)


def _parts_with_rows(variable: Variable) -> list[Variable]:
    """Of a sharded variable those shards that there is something to update in."""
    if not isinstance(variable, ShardedVariable):
        return [variable]
    return [shard for shard in variable.shards if len(shard)]
