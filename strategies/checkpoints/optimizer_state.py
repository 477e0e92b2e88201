"""What of an optimizer goes into a checkpoint, and back: its count of updates, learning rate and slots."""

from __future__ import annotations

from collections.abc import Mapping

from collectives.arrays import Array
from strategies.checkpoints.states import State
from strategies.optimizers.loss_scale import LossScaleOptimizer
from strategies.optimizers.optimizer import Optimizer
from variables.sharded_variable import ShardedVariable
from variables.variable import Variable


def numbers_of(optimizer: Optimizer) -> State:
    """All but the slots. A learning rate that is a function follows from the count, and is the program's own."""
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
        raise ValueError(
            f"restore: got {state!r}; need iterations and learning_rate, the state of an optimizer"
        )
    optimizer.iterations = int(state["iterations"])
    if state["learning_rate"] is not None and not callable(optimizer.learning_rate):
        optimizer.learning_rate = float(state["learning_rate"])


_SCALE = ("loss_scale", "updates_since_change", "skipped_steps")


def scale_of(optimizer: LossScaleOptimizer) -> State:
    """The loss scale and what its next change depends on; the inner optimizer has a state of its own."""
    return {name: getattr(optimizer, name) for name in _SCALE}


def restore_scale(optimizer: LossScaleOptimizer, state: State) -> None:
    """Set what `scale_of` gave.

    Raises:
        ValueError: the state is of something else.
    """
    if not isinstance(state, Mapping) or not set(_SCALE) <= set(state):
        raise ValueError(
            f"restore: got {state!r}; need {', '.join(_SCALE)}, the state of a LossScaleOptimizer"
        )
    optimizer.loss_scale = float(state["loss_scale"])
    optimizer.updates_since_change = int(state["updates_since_change"])
    optimizer.skipped_steps = int(state["skipped_steps"])


def known_variables(optimizer: Optimizer) -> dict[int, Variable]:
    """The variables that an optimizer keeps slots of, by id; of a sharded one, its shards."""
    return {id(variable): variable for variable in optimizer.variables_with_slots}


def slots_of(optimizer: Optimizer, slot: str, variable: Variable) -> list[Array]:
    """A slot of a variable, live and writable, made if it isn't there yet.

    Returns:
        The arrays of the shards, in order; of a variable that isn't sharded there is one.
    """
    parts = variable.shards if isinstance(variable, ShardedVariable) else (variable,)
    return [optimizer.slot(part, slot) for part in parts]
