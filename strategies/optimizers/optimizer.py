"""Applies gradients: checks them, puts them into flat memory and has them brought together and applied there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any, final

import numpy as np

from collectives.arrays import Array, as_array, describe
from collectives.indexed_slices import IndexedSlices, require_rows
from collectives.reduce_op import ReduceOp, parse_member
from strategies.optimizers.gradient_memory import GradientMemory, Run, place_of
from strategies.optimizers.plan import Plan
from strategies.optimizers.update_rule import UpdateRule
from variables.local_variable import LocalVariable
from variables.replica_context import ReplicaContext, ReplicaContextError, current
from variables.variable import Variable

LearningRate = float | Callable[[int], float]
"""A number, or a function of the number of updates before this one."""


class GradientAggregation(Enum):
    """How the replicas' gradients become one."""

    SUM = "sum"
    MEAN = "mean"

    @property
    def op(self) -> ReduceOp:
        """The same as a reduction."""
        return ReduceOp[self.name]


@final
class Optimizer:
    """Updates variables by gradients, the same on all replicas.

    Gradients are brought together in flat memory, one array for all variables that lie side by side, and updated there
    in a few operations, however many variables there are. `SGD`, `Adam` and the others make one.

    Args:
        rule: the algorithm.
        learning_rate: a number, or a function of the number of updates before this one.
        gradient_aggregation: how the replicas' gradients become one. With SUM, as in TensorFlow, losses are divided by the
            global batch size; with MEAN by the replica's.
        name: for error messages and checkpoints.
    """

    def __init__(
        self,
        rule: UpdateRule,
        learning_rate: LearningRate,
        *,
        gradient_aggregation: GradientAggregation | str = GradientAggregation.SUM,
        name: str = "optimizer",
    ) -> None:
        self.name = name
        self.rule = rule
        self._op = parse_member(GradientAggregation, gradient_aggregation, "gradient_aggregation").op
        self.learning_rate = learning_rate
        self._memory = GradientMemory(rule.slots)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._iterations = 0
        self._mutex = threading.Lock()

    @property
    def learning_rate(self) -> LearningRate:
        """The number, or the function; to be set between steps, on all replicas alike."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: LearningRate) -> None:
        if not callable(learning_rate) and not learning_rate >= 0:
            raise ValueError(
                f"{self.name}: got learning_rate={learning_rate}; need a number >= 0, or a function"
            )
        self._learning_rate = learning_rate

    @property
    def iterations(self) -> int:
        """How many updates there have been."""
        return self._iterations

    def gradient(self, variable: Variable) -> Array:
        """Where this replica's gradient of a variable lies, to be written into with ``out=``.

        A gradient that is there already is not copied by `apply_gradients`, which reads it only.

        Returns:
            A writable array of the variable's shape and dtype; the same memory at every call.

        Raises:
            ReplicaContextError: called across replicas.
            ValueError: a variable of another strategy.
        """
        replica, num_replicas = self._replica([variable], "gradient")
        with self._mutex:
            state = self._memory.state_of(variable, num_replicas)
        return place_of(variable).view(state.gradients[replica])

    def slot(self, variable: Variable, name: str) -> Array:
        """What the rule remembers of a variable, such as its momentum; one for all replicas.

        Raises:
            KeyError: the rule has no slot of that name.
        """
        num_replicas = 1 if variable.owner is None else variable.owner.num_replicas_in_sync
        with self._mutex:
            state = self._memory.state_of(variable, num_replicas)
        if name not in state.slots:
            raise KeyError(
                f"{self.name}.slot: got {name!r}; the slots are {', '.join(state.slots) or 'none'}"
            )
        return place_of(variable).view(state.slots[name])

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> None:
        """Bring the gradients together over the replicas, then update every copy of the variables.

        In a step all replicas call it, with the same variables in the same order. Outside of one it takes plain
        variables.

        Args:
            grads_and_vars: pairs of a gradient, of its variable's shape, and the variable. A gradient may be an array, a
                number, or `IndexedSlices`, whose rows of one index add up. A pair with None is left out, on all
                replicas.

        Raises:
            ValueError: no gradients; a gradient of another shape; a variable given twice, of another strategy, or made
                outside of the strategy's scope.
            TypeError: a gradient that does not cast to the variable's dtype.
            ReplicaContextError: called across replicas.
        """
        pairs = [pair for pair in grads_and_vars if pair[0] is not None]
        if not pairs:
            raise ValueError(
                f"{self.name}.apply_gradients: got no gradients; need at least one pair that is not None"
            )
        gradients, variables = zip(*pairs, strict=True)
        context = current.get()
        replica = context if isinstance(context, ReplicaContext) else None
        plan = self._plan(variables, replica)
        number = 0 if replica is None else replica.local_replica_id
        for run in plan.runs:
            self._pack(run, gradients, variables, number)
        if replica is None or plan.num_replicas == 1:
            self._begin_update(plan)
            plan.update(number)
            return

        def conclude(_: list[Any]) -> list[bool]:
            self._begin_update(plan)
            if not plan.is_shared:
                plan.update(number)
            return [plan.is_shared] * plan.num_replicas

        # The memory of all replicas is in this process, so reducing and updating are one walk through it.
        if replica.rendezvous.meet(number, plan.call, None, conclude):
            try:
                plan.update(number)
            except BaseException as failure:
                replica.rendezvous.abort(failure)
                raise
            replica.rendezvous.meet(number, plan.call_end, None, lambda values: values)

    # ------------------------------------------------------------------ pieces

    def _replica(self, variables: Sequence[Variable], method: str) -> tuple[int, int]:
        """Which replica calls, and how many there are, once it is certain that it may."""
        context = current.get()
        for variable in variables:
            if not isinstance(variable, Variable):
                raise TypeError(
                    f"{self.name}.{method}: got {type(variable).__name__}; need pairs (gradient, variable)"
                )
        if isinstance(context, ReplicaContext):
            for variable in variables:
                if variable.owner is not context.strategy:
                    where = "outside any scope" if variable.owner is None else f"under {variable.owner!r}"
                    raise ValueError(
                        f"{self.name}.{method}: {variable.name} was made {where}, but the step runs under "
                        f"{context.strategy!r}; make it in its scope: with strategy.scope(): Variable(...)"
                    )
            return context.local_replica_id, context.num_replicas_in_sync
        for variable in variables:
            if not isinstance(variable, LocalVariable):
                raise ReplicaContextError(
                    f"{self.name}.{method}: called across the replicas of {variable.owner!r}; it needs replica context — "
                    "call it in the function passed to strategy.run"
                )
        return 0, 1

    def _plan(self, variables: tuple[Variable, ...], replica: ReplicaContext | None) -> Plan:
        """How these variables are updated, once it is certain that the caller may."""
        strategy = None if replica is None else replica.strategy
        key = (id(strategy), *map(id, variables))
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        _, num_replicas = self._replica(variables, "apply_gradients")
        with self._mutex:
            if key in self._plans:
                return self._plans[key]
            if len(set(key)) < len(key):
                twice = next(variable.name for variable in variables if key.count(id(variable)) > 1)
                raise ValueError(
                    f"{self.name}.apply_gradients: got {twice} twice; need each variable once — add its gradients"
                )
            runs = self._memory.runs(variables, num_replicas)
            # It keeps the objects whose ids are its key, so that they stay theirs.
            plan = Plan(self.rule, self._op, runs, num_replicas, variables, strategy, self.name)
            self._plans[key] = plan
            return plan

    def _begin_update(self, plan: Plan) -> None:
        rate = self._learning_rate
        learning_rate = float(rate(self._iterations) if callable(rate) else rate)
        self._iterations += 1
        plan.begin(self._iterations, learning_rate)

    def _pack(self, run: Run, gradients: Sequence[Any], variables: Sequence[Variable], replica: int) -> None:
        """Put the gradients of a run into their memory: in one operation, where they are what one expects."""
        memory = run.state.gradients[replica]
        mine = gradients if run.is_all_in_order else [gradients[index] for index in run.order]
        if run.expects(mine) and id(memory.base) not in set(map(id, map(_BASE, mine))):
            pieces: list[Array] = [memory] * (2 * len(mine))
            pieces[::2] = mine
            pieces[1::2] = run.padding
            np.concatenate(pieces, axis=None, out=memory[run.start : run.stop])
            return
        for index, gradient in zip(run.order, mine, strict=True):
            variable = variables[index]
            self._pack_one(self._checked(gradient, variable), place_of(variable).view(memory))

    def _checked(self, gradient: Any, variable: Variable) -> Any:
        where = f"{self.name}.apply_gradients: {variable.name}"
        if isinstance(gradient, IndexedSlices):
            if not variable.shape or gradient.values.shape[1:] != variable.shape[1:]:
                raise ValueError(f"{where}: got {gradient}; need rows of shape {variable.shape}")
            require_rows(gradient.indices, variable.shape[0], where)
            return gradient
        array = as_array(gradient, where)
        if array.shape != variable.shape:
            raise ValueError(f"{where}: got {describe(array)}; need shape {variable.shape}")
        if not np.can_cast(array.dtype, variable.dtype, "same_kind"):
            raise TypeError(f"{where}: got {describe(array)}; need what casts to {variable.dtype} safely")
        return array

    def _pack_one(self, gradient: Any, view: Array) -> None:
        if isinstance(gradient, IndexedSlices):
            view[...] = 0
            np.add.at(view, gradient.indices, gradient.values)
        elif not _is_same_memory(gradient, view):
            # It may overlap its place otherwise, as a transposed view of it does; NumPy copes with that.
            np.copyto(view, gradient, casting="same_kind")


_BASE = attrgetter("base")


def _is_same_memory(array: Array, view: Array) -> bool:
    same_start = array.__array_interface__["data"][0] == view.__array_interface__["data"][0]
    return same_start and array.strides == view.strides and array.dtype == view.dtype
