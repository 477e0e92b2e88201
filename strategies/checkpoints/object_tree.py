"""Finds what is to be saved in the objects that a checkpoint was given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import numpy as np

from strategies.checkpoints.entries import (
    ArrayEntry,
    MemoryEntry,
    StateEntry,
    VariableEntry,
    data_entry,
    parts_of,
)
from strategies.checkpoints.optimizer_state import (
    known_variables,
    numbers_of,
    restore_numbers,
    restore_scale,
    scale_of,
    slots_of,
)
from strategies.checkpoints.random_states import is_random_source, random_state, restore_random_state
from strategies.checkpoints.states import Stateful, StatefulTogether, is_data
from strategies.optimizers.loss_scale import LossScaleOptimizer
from strategies.optimizers.optimizer import Optimizer
from variables.values import DistributedValues
from variables.variable import Variable


class Group(ABC):
    """Something with objects by name, as a checkpoint is."""

    @property
    @abstractmethod
    def objects(self) -> dict[str, Any]:
        """The objects, by name."""


@final
@dataclass
class ObjectTree:
    """The entries of all objects, by the names that they have in the file.

    Attributes:
        variables: by name.
        optimizers: by name.
        arrays: the entries of variables and of users' arrays.
        states: the entries of all that is no array, of optimizers their numbers.
        groups: the nested groups, by name.
    """

    variables: dict[str, Variable] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    arrays: dict[str, ArrayEntry] = field(default_factory=dict)
    states: dict[str, StateEntry] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)

    @classmethod
    def of(cls, objects: Mapping[str, Any], prefix: str = "", only: str | None = None) -> ObjectTree:
        """The tree of objects by name.

        Args:
            objects: by name.
            prefix: stands before all names.
            only: the name of the one object that is looked at; None for all.

        Raises:
            TypeError: an object of a kind that can't be saved.
            ValueError: two objects of one name; an object that contains itself.
        """
        tree = cls()
        for key in objects if only is None else [only]:
            tree._add(f"{prefix}{key}", objects[key], objects, key, ())
        return tree

    def joined_with(self, other: ObjectTree) -> ObjectTree:
        """The tree of both's objects."""
        return ObjectTree(
            self.variables | other.variables,
            self.optimizers | other.optimizers,
            self.arrays | other.arrays,
            self.states | other.states,
            self.groups | other.groups,
        )

    def present_slots(self, *, require_all: bool) -> dict[str, ArrayEntry]:
        """The entries of the slots that there are, of the variables in this tree.

        Args:
            require_all: refuse slots of other variables, which would have no name in a file.

        Raises:
            ValueError: there are some.
        """
        entries: dict[str, ArrayEntry] = {}
        for name, optimizer in self.optimizers.items():
            known = known_variables(optimizer)
            for variable_name, variable in self.variables.items():
                parts = [known.pop(id(part), None) for part in parts_of(variable)]
                if any(part is not None for part in parts):
                    for slot in optimizer.rule.slots:
                        entries |= _slot_entries(f"{name}/{slot}/{variable_name}", optimizer, slot, variable)
            if require_all and known and optimizer.rule.slots:
                left = ", ".join(sorted(variable.name for variable in known.values()))
                raise ValueError(
                    f"save: {name} has slots of {left}, which this checkpoint doesn't hold; need all variables that an "
                    "optimizer updates — Checkpoint(weights=[...], optimizer=optimizer)"
                )
        return entries

    def slots_among(self, names: Collection[str]) -> dict[str, ArrayEntry]:
        """The entries of the slots of these names, made if they aren't there yet; other names are left out."""
        entries: dict[str, ArrayEntry] = {}
        for name, optimizer in self.optimizers.items():
            for slot in optimizer.rule.slots:
                for variable_name, variable in self.variables.items():
                    entry_name = f"{name}/{slot}/{variable_name}"
                    if entry_name in names or f"{entry_name}/part_0" in names:
                        entries |= _slot_entries(entry_name, optimizer, slot, variable)
        return entries

    # ------------------------------------------------------------------ pieces

    def _add(self, name: str, value: Any, holder: Any, key: Any, above: tuple[int, ...]) -> None:
        if id(value) in above:
            raise ValueError(f"checkpoint: {name} contains itself; need a tree of objects")
        if name in self.arrays or name in self.states or name in self.groups or name == "__metadata__":
            raise ValueError(f"checkpoint: got two objects that are called {name}; need a name for each")
        if isinstance(value, Variable):
            self.variables[name] = value
            self.arrays[name] = VariableEntry(name, value)
        elif isinstance(value, Optimizer):
            self.optimizers[name] = value
            numbers = partial(numbers_of, value)
            restore = partial(restore_numbers, value)
            self.states[name] = StateEntry(name, numbers, restore, numbers, is_common=True)
        elif isinstance(value, LossScaleOptimizer):
            scale = partial(scale_of, value)
            restore = partial(restore_scale, value)
            self.states[name] = StateEntry(name, scale, restore, scale, is_common=True)
            self._add(f"{name}/inner_optimizer", value.inner_optimizer, value, "inner_optimizer", above)
        elif is_random_source(value):
            draws = partial(random_state, value)
            self.states[name] = StateEntry(name, draws, partial(restore_random_state, value), draws)
        elif isinstance(value, Group):
            self.groups[name] = value
            self._add_all(name, value.objects.items(), value.objects, (*above, id(value)))
        elif is_data(value):
            self.states[name] = data_entry(name, holder, key)
        elif isinstance(value, Mapping):
            self._add_all(name, value.items(), value, (*above, id(value)))
        elif isinstance(value, (list, tuple)):
            self._add_all(name, enumerate(value), value, (*above, id(value)))
        elif isinstance(value, DistributedValues):
            self._add_all(name, enumerate(value.values), value.values, (*above, id(value)))
        elif _is_array(value):
            self.arrays[name] = MemoryEntry(name, [value])
        elif isinstance(value, Stateful):
            begin = value.state_for_newcomer if isinstance(value, StatefulTogether) else value.state
            self.states[name] = StateEntry(name, value.state, value.restore, begin)
        elif _has_variables(value):
            self._add(name, value.variables, holder, key, (*above, id(value)))
        else:
            raise TypeError(
                f"checkpoint: {name} is {type(value).__name__}; need variables, optimizers, iterators, random generators, "
                "arrays, numbers, strings, or lists and dicts of them — or give its class the methods state() and "
                "restore(state)"
            )

    def _add_all(
        self, name: str, items: Iterable[tuple[Any, Any]], holder: Any, above: tuple[int, ...]
    ) -> None:
        for key, value in items:
            self._add(f"{name}/{key}", value, holder, key, above)


def _slot_entries(name: str, optimizer: Optimizer, slot: str, variable: Variable) -> dict[str, ArrayEntry]:
    """The entry of one slot of one variable."""
    memory = slots_of(optimizer, slot, variable)
    if all(array.shape == part.shape for array, part in zip(memory, parts_of(variable), strict=True)):
        return {name: MemoryEntry(name, memory)}
    # Of another shape than the variable, it belongs to its shard and to no other way to cut the whole.
    names = [f"{name}/part_{number}" for number in range(len(memory))]
    return {part: MemoryEntry(part, [array]) for part, array in zip(names, memory, strict=True)}


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) or type(value).__module__.partition(".")[0] == "cupy"


def _has_variables(value: Any) -> bool:
    """Whether this is a layer or a model, say, that tells its variables, in order or by name."""
    variables = getattr(value, "variables", None)
    if isinstance(variables, Mapping):
        variables = list(variables.values())
    return isinstance(variables, (list, tuple)) and all(isinstance(one, Variable) for one in variables)
