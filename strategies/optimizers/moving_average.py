"""Averages of weights over time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import final

import numpy as np

from collectives.arrays import Array
from collectives.rendezvous import Call
from strategies.optimizers.hyperparameters import require_real
from variables.replica_context import ReplicaContext, current
from variables.variable import Variable


@final
class ExponentialMovingAverage:
    """Averages that follow variables slowly (Polyak and Juditsky 1992): ``a = momentum * a + (1 - momentum) * w``.

    There is one average for all replicas, in the dtype of the variable.

    Args:
        variables: whose values are equal on all replicas.
        momentum: from 0 to below 1.
        num_updates_correction: whether momentum is at most ``(1 + n) / (10 + n)`` at the n-th update, so that early
            averages forget the initial values.

    Raises:
        TypeError: what is no real number.
        ValueError: a number outside of its range, or no variables.
    """

    def __init__(
        self, variables: Iterable[Variable], momentum: float = 0.99, *, num_updates_correction: bool = False
    ) -> None:
        self.variables = tuple(variables)
        require_real("ExponentialMovingAverage", momentum=momentum)
        if not self.variables or not 0 <= momentum < 1:
            raise ValueError(
                f"ExponentialMovingAverage: got momentum={momentum} of {len(self.variables)} variables; "
                "need a number from 0 to below 1, and at least one variable"
            )
        self.momentum = momentum
        self.num_updates = 0
        self._corrects = num_updates_correction
        self._averages = [variable.read_value() for variable in self.variables]

    def update(self) -> None:
        """Take in the variables' values now. In a step all replicas call it, after `apply_gradients`."""
        context = current.get()
        if isinstance(context, ReplicaContext) and context.num_replicas_in_sync > 1:
            call = Call("ExponentialMovingAverage.update", (f"of {self.variables[0].name}",))
            context.rendezvous.meet(context.local_replica_id, call, None, self._update_for_all)
        else:
            self._update_once()

    def average(self, variable: Variable) -> Array:
        """A variable's average: a copy.

        Raises:
            ValueError: it is not among the variables.
        """
        return self._averages[self._index(variable)].copy()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """A block in which the variables have their averages as values, for evaluation; not in a step."""
        values = [variable.read_value() for variable in self.variables]
        for variable, average in zip(self.variables, self._averages, strict=True):
            variable.assign(average, read_value=False)
        try:
            yield
        finally:
            for variable, value in zip(self.variables, values, strict=True):
                variable.assign(value, read_value=False)

    def state(self) -> dict[str, Array | int]:
        """What a checkpoint keeps: ``num_updates``, and the averages by number."""
        averages: dict[str, Array | int] = {
            f"average_{i}": average for i, average in enumerate(self._averages)
        }
        return {"num_updates": self.num_updates, **averages}

    def restore(self, state: dict[str, Array | int]) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: the state of other variables.
        """
        arrays = [np.asarray(state.get(f"average_{i}")) for i in range(len(self.variables))]
        if [a.shape for a in arrays] != [v.shape for v in self.variables]:
            raise ValueError(
                "ExponentialMovingAverage.restore: got averages of other shapes than the variables have"
            )
        self.num_updates = int(np.asarray(state["num_updates"]))
        for average, array in zip(self._averages, arrays, strict=True):
            average[...] = array

    def _index(self, variable: Variable) -> int:
        for index, known in enumerate(self.variables):
            if known is variable:
                return index
        raise ValueError(
            f"ExponentialMovingAverage.average: got {variable.name}; it is not among the variables"
        )

    def _update_for_all(self, values: list[None]) -> list[None]:
        self._update_once()
        return values

    def _update_once(self) -> None:
        context = current.get()
        journal = context.strategy.journal if isinstance(context, ReplicaContext) else None
        if journal is not None:
            journal.keep_state(self, "averages", self._keep)
        momentum = self.momentum
        if self._corrects:
            momentum = min(momentum, (1 + self.num_updates) / (10 + self.num_updates))
        for variable, average in zip(self.variables, self._averages, strict=True):
            np.add(average, (1 - momentum) * (variable.value() - average), out=average, casting="same_kind")
        self.num_updates += 1

    def _keep(self) -> Callable[[], None]:
        """Keep the averages as they are; what is returned puts them back."""
        num_updates, averages = self.num_updates, [average.copy() for average in self._averages]

        def put_back() -> None:
            self.num_updates = num_updates
            for average, before in zip(self._averages, averages, strict=True):
                np.copyto(average, before)

        return put_back
