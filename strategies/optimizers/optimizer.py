"""Applies gradients: brings them together over the replicas and lets an update rule loose on flat memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any, final

import numpy as np

from collectives.arrays import Array, as_array, describe
from collectives.indexed_slices import IndexedSlices, require_rows
from collectives.reduce_op import ReduceOp, parse_member
from collectives.reduction import CHUNK_BYTES
from strategies.optimizers.gradient_memory import GradientMemory, Run, num_copies, place_of
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
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        # Each replica counts for itself, as no thread may change what another reads.
        self._iterations: dict[int, int] = {}
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
        context = current.get()
        replica = context.local_replica_id if isinstance(context, ReplicaContext) else 0
        return self._iterations.get(replica, 0)

    def gradient(self, variable: Variable) -> Array:
        """Where this replica's gradient of a variable lies, to be written into with ``out=``.

        A gradient that is there already is not copied by `apply_gradients`, which leaves the reduced one in it.

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
        """What the rule remembers of a variable, such as its momentum: the current replica's copy, or the first one.

        Raises:
            KeyError: the rule has no slot of that name.
        """
        context = current.get()
        replica = context.local_replica_id if isinstance(context, ReplicaContext) else 0
        replicas = 1 if variable.owner is None else variable.owner.num_replicas_in_sync
        with self._mutex:
            state = self._memory.state_of(variable, replicas)
        if name not in state.slots:
            raise KeyError(
                f"{self.name}.slot: got {name!r}; the slots are {', '.join(state.slots) or 'none'}"
            )
        copies = state.slots[name]
        return place_of(variable).view(copies[replica if replica < len(copies) else 0])

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
        plan = self._plan(variables)
        replica, num_replicas = plan.replica(), plan.num_replicas
        for run in plan.runs:
            self._pack(run, gradients, variables, replica)
        context = current.get()
        if isinstance(context, ReplicaContext) and num_replicas > 1:
            flats = [run.gradients(replica) for run in plan.runs]
            context.communicator.all_reduce_coalesced(flats, self._op, outs=flats)
        # With one copy for all replicas, the first one updates it while the others wait.
        if replica < plan.num_copies:
            self._update(plan, replica)
        self._iterations[replica] = self._iterations.get(replica, 0) + 1
        if plan.num_copies < num_replicas and isinstance(context, ReplicaContext):
            context.communicator.barrier()

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

    def _plan(self, variables: tuple[Variable, ...]) -> _Plan:
        """How these variables are updated, once it is certain that the caller may."""
        context = current.get()
        strategy = context.strategy if isinstance(context, ReplicaContext) else None
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
            plan = _Plan(
                runs, (strategy, variables), num_copies(variables[0]), num_replicas, self.rule.num_scratch
            )
            self._plans[key] = plan
            return plan

    def _pack(self, run: Run, gradients: Sequence[Any], variables: Sequence[Variable], replica: int) -> None:
        """Put the gradients of a run into their memory: in one operation, where they are what one expects."""
        memory = run.state.gradients[replica]
        mine = gradients if run.is_all_in_order else [gradients[index] for index in run.order]
        if run.expects(mine) and id(memory.base) not in set(map(id, map(_BASE, mine))):
            pieces: list[Array] = [memory] * (2 * len(mine))
            pieces[::2] = mine
            pieces[1::2] = run.padding
            np.concatenate(pieces, axis=None, out=run.gradients(replica))
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

    def _update(self, plan: _Plan, replica: int) -> None:
        step = self._iterations.get(replica, 0) + 1
        rate = self._learning_rate
        learning_rate = float(rate(step - 1) if callable(rate) else rate)
        for parameters, gradients, slots, scratch in plan.pieces(replica):
            self.rule.update(parameters, gradients, slots, scratch, step=step, learning_rate=learning_rate)


_BASE = attrgetter("base")
_Piece = tuple[Array, Array, dict[str, Array], list[Array]]


@final
class _Plan:
    """How one set of variables is updated.

    Args:
        runs: what of flat memory they take up.
        kept: the objects whose ids stand for the plan, so that they stay theirs.
        num_copies: of each variable.
        num_replicas: that have gradients.
        num_scratch: arrays that the rule works with.
    """

    def __init__(
        self, runs: list[Run], kept: object, num_copies: int, num_replicas: int, num_scratch: int
    ) -> None:
        self.runs = runs
        self.num_copies = num_copies
        self.num_replicas = num_replicas
        self._kept = kept
        self._num_scratch = num_scratch
        self._pieces: dict[int, list[_Piece]] = {}

    def replica(self) -> int:
        """The local replica that calls."""
        context = current.get()
        return context.local_replica_id if isinstance(context, ReplicaContext) else 0

    def pieces(self, copy: int) -> list[_Piece]:
        """One copy's memory in pieces that fit the cache with their slots, in the order in which they are updated."""
        pieces = self._pieces.get(copy)
        if pieces is None:
            pieces = self._pieces[copy] = [piece for run in self.runs for piece in self._cut(run, copy)]
        return pieces

    def _cut(self, run: Run, copy: int) -> Iterator[_Piece]:
        parameters, gradients, slots = run.parameters(copy), run.gradients(copy), run.slots(copy)
        length = max(1, CHUNK_BYTES // parameters.itemsize)
        scratch = [np.empty(min(length, parameters.size), parameters.dtype) for _ in range(self._num_scratch)]
        for start in range(0, parameters.size, length):
            part = slice(start, start + length)
            size = len(parameters[part])
            own_slots = {name: slot[part] for name, slot in slots.items()}
            yield parameters[part], gradients[part], own_slots, [work[:size] for work in scratch]


def _is_same_memory(array: Array, view: Array) -> bool:
    same_start = array.__array_interface__["data"][0] == view.__array_interface__["data"][0]
    return same_start and array.strides == view.strides and array.dtype == view.dtype
