"""What of an optimizer goes into a checkpoint, and back: its count of updates, learning rate and slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collectives.arrays import Array
from strategies.checkpoints.states import State
from strategies.optimizers.optimizer import Optimizer
from variables.variable import Variable


def numbers_of(optimizer: Optimizer) -> State:
    """All but the slots. A learning rate that is a function follows from the count and is the program's own."""
    rate = optimizer.learning_rate
    return {
        "iterations": optimizer.iterations,
        "learning_rate": None if callable(rate) else float(rate),
    }


def restore_numbers(optimizer: Optimizer, state: State) -> None:
    """Set what `numbers_of` gave.

    Raises:
        ValueError: the state is of something else.
    """
    if not isinstance(state, Mapping) or not {"iterations", "learning_rate"} <= set(state):
        raise ValueError(f"restore: got {state!r}; need iterations and learning_rate, the state of an optimizer")
    optimizer.iterations = int(state["iterations"])
    if state["learning_rate"] is not None and not callable(optimizer.learning_rate):
        optimizer.learning_rate = float(state["learning_rate"])


def slots_of(optimizer: Optimizer, variable: Variable) -> dict[str, Array]:
    """The slots of a variable by name, live; none if the optimizer has never updated it."""
    if not any(variable is known for known in optimizer.variables):
        return {}
    return new_slots_of(optimizer, variable)


def new_slots_of(optimizer: Optimizer, variable: Variable) -> dict[str, Array]:
    """The slots of a variable by name, live and writable, made if they aren't there yet."""
    return {name: optimizer.slot(variable, name) for name in optimizer.rule.slots}


def updated_by(optimizer: Optimizer) -> tuple[Any, ...]:
    """The variables that an optimizer keeps slots of."""
    return tuple(optimizer.variables)
