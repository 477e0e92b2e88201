"""Applies gradients: brings the replicas' together and lets an update rule loose on flat memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, TypedDict, final

from collectives.arrays import Array
from collectives.flight_recorder import Mark, clock
from collectives.fork_safe_lock import ForkSafeLock
from collectives.reduce_op import ReduceOp, parse_member
from strategies.optimizers.clipping import Clipping
from strategies.optimizers.contribution import Contribution
from strategies.optimizers.exchange import Exchange
from strategies.optimizers.gradient_memory import GradientMemory, place_of
from strategies.optimizers.hyperparameters import require_real
from strategies.optimizers.no_sync import require_sync
from strategies.optimizers.plan import LossScale, Plan, Settings, Update
from strategies.optimizers.sparse_rows import reduced_slices
from strategies.optimizers.update_rule import UpdateRule
from strategies.optimizers.variable_group import VariableGroup, parts_of
from variables.local_variable import LocalVariable
from variables.replica_context import ReplicaContext, ReplicaContextError, current
from variables.variable import Variable

_MANY_HANDED = 100_000
"""Gradients' places that are remembered, one for each variable and replica."""

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


class UndecayedOptions(TypedDict, total=False):
    """What all optimizers take by keyword, but for the weight decay; `Optimizer` says what it means."""

    gradient_aggregation: GradientAggregation | str
    clipvalue: float | None
    clipnorm: float | None
    global_clipnorm: float | None
    name: str


class OptimizerOptions(UndecayedOptions, total=False):
    """What most optimizers take by keyword."""

    weight_decay: float


@final
class Optimizer:
    """Updates variables by gradients, the same on all replicas.

    Small variables are brought together in flat memory and updated as one array; large ones are read where they are.
    Slots exist once, whatever the number of replicas. `SGD`, `Adam` and the others make one.

    Args:
        rule: the algorithm.
        learning_rate: a number, or a function of the number of updates before this one.
        gradient_aggregation: how the replicas' gradients become one. With SUM, as in TensorFlow, losses are divided by the
            global batch size; with MEAN by the replica's.
        weight_decay: before each update, parameters are multiplied by ``1 - learning_rate * weight_decay``; of variables with
            sparse gradients only the rows that are updated.
        clipvalue: bound on each element of the gradients. As the other bounds, of which only one may be given, it applies to
            the replicas' gradients brought together, not to each replica's.
        clipnorm: bound on the norm of each variable's gradient; of a sharded variable, that of all its shards together.
        global_clipnorm: bound on the norm of all gradients together.
        name: for error messages and checkpoints.

    Raises:
        TypeError: what is no real number.
        ValueError: a number outside of its range.
    """

    def __init__(
        self,
        rule: UpdateRule,
        learning_rate: LearningRate,
        *,
        gradient_aggregation: GradientAggregation | str = GradientAggregation.SUM,
        weight_decay: float = 0.0,
        clipvalue: float | None = None,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
        name: str = "optimizer",
    ) -> None:
        require_real(name, weight_decay=weight_decay)
        if not weight_decay >= 0:
            raise ValueError(f"{name}: got weight_decay={weight_decay}; need a number >= 0")
        op = parse_member(GradientAggregation, gradient_aggregation, "gradient_aggregation").op
        self.name = name
        self.rule = rule
        self.iterations = 0
        self.learning_rate = learning_rate
        self._settings = Settings(rule, op, Clipping(clipvalue, clipnorm, global_clipnorm), weight_decay)
        self._memory = GradientMemory(rule.slots)
        self._undecayed: set[int] = set()
        self._known: dict[int, Variable] = {}
        self._groups: dict[tuple[int, ...], VariableGroup] = {}
        self._exchanges: dict[VariableGroup, Exchange] = {}
        # The second and third keep the ids in the key their own.
        self._handed: dict[tuple[int, int], tuple[Array, Variable, object]] = {}
        self._mutex = ForkSafeLock()

    iterations: int
    """How many updates there have been."""

    @property
    def learning_rate(self) -> LearningRate:
        """The number, or the function; to be set between steps."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: LearningRate) -> None:
        if not callable(learning_rate):
            require_real(self.name, ", or a function", learning_rate=learning_rate)
        if not callable(learning_rate) and not 0 <= float(learning_rate) < math.inf:
            raise ValueError(
                f"{self.name}: got learning_rate={learning_rate!r}; need a finite number >= 0, or a function"
            )
        self._learning_rate = learning_rate

    # --------------------------------------------------------------- variables

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Those that it updates, a sharded one as its shards: set by `build`, or by the first update."""
        return tuple(self._known.values())

    @property
    def variables_with_slots(self) -> tuple[Variable, ...]:
        """Those that there are slots of, made by an update or by `slot`: what a checkpoint holds."""
        return tuple(self._memory.variables.values())

    def build(self, variables: Iterable[Variable]) -> None:
        """Say which variables there are to update, before the first update or, to add some, later.

        Args:
            variables: all, or more of them; sharded ones too.
        """
        with self._mutex:
            for variable in variables:
                for part in parts_of(variable):
                    self._known[id(part)] = part

    def exclude_from_weight_decay(self, variables: Iterable[Variable]) -> None:
        """Spare variables, such as biases, the weight decay. To be called before the first update.

        Raises:
            RuntimeError: there have been updates.
        """
        if self._groups:
            raise RuntimeError(
                f"{self.name}.exclude_from_weight_decay: called after updates; call it before the first"
            )
        for variable in variables:
            self._undecayed.update(map(id, parts_of(variable)))
            self.build([variable])

    def gradient(self, variable: Variable) -> Array:
        """Where this replica's gradient of a variable lies, to be written into with ``out=``.

        A gradient that is there already is not copied by `apply_gradients`. What stands there afterwards is arbitrary.

        Returns:
            A writable array of the variable's shape and dtype; the same memory at every call.

        Raises:
            ReplicaContextError: called across replicas.
            ValueError: a variable of another strategy.
            TypeError: a sharded variable, whose gradients lie with its shards.
        """
        context = current.get()
        handed = self._handed.get((id(variable), id(context)))
        if handed is not None:
            return handed[0]
        replica = self._require_replica([variable], "gradient")
        with self._mutex:
            state = self._memory.state_of(variable, 1 if replica is None else replica.rendezvous.size)
        view = place_of(variable).view(state.gradients[0 if replica is None else replica.local_replica_id])
        if len(self._handed) >= _MANY_HANDED:  # contexts that are made anew again and again
            self._handed.clear()
        self._handed[id(variable), id(context)] = (view, variable, context)
        return view

    def slot(self, variable: Variable, name: str) -> Array:
        """What the rule remembers of a variable, such as its momentum; one for all replicas, and writable.

        Raises:
            KeyError: the rule has no slot of that name.
            TypeError: a sharded variable, whose slots lie with its shards.
        """
        if name not in self.rule.slots:
            raise KeyError(
                f"{self.name}.slot: got {name!r}; the slots are {', '.join(self.rule.slots) or 'none'}"
            )
        num_replicas = 1 if variable.owner is None else variable.owner.num_replicas_in_sync
        if variable.owner is not None and variable.owner.link is not None:
            link = variable.owner.link
            num_replicas = link.counts[link.process]
        with self._mutex:
            state = self._memory.state_of(variable, num_replicas)
        return place_of(variable).view(state.slots[name])

    # ----------------------------------------------------------------- updates

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> None:
        """Bring the gradients together over the replicas, then update every copy of the variables.

        In a step all replicas call it, with the same variables in the same order. Outside of one it takes plain
        variables.

        Args:
            grads_and_vars: pairs of a gradient, of its variable's shape, and the variable. A gradient may be an array, a
                number, or `IndexedSlices`: rows of one index add up, and only rows that have a gradient, and their slots,
                are updated. None on all replicas leaves the variable alone; None on some counts as zero, with a warning
                the first time.

        Raises:
            ValueError: no gradients; a gradient of another shape; a variable given twice, of another strategy, made
                outside of the strategy's scope, or unknown: not among those of the first update or of `build`.
            TypeError: a gradient that does not cast to the variable's dtype.
            ReplicaContextError: called across replicas.
            RuntimeError: called in a block of `GradientAccumulator.no_sync`.
        """
        self.apply_scaled_gradients(grads_and_vars, None)

    def apply_scaled_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Variable]], loss_scale: LossScale | None
    ) -> bool:
        """`apply_gradients` of gradients that were multiplied by a loss scale, unless any of them is not finite.

        Args:
            grads_and_vars: as in `apply_gradients`.
            loss_scale: the scale, which learns what has become of it; None if there was none.

        Returns:
            Whether the update was made, the same on all replicas.
        """
        require_sync(f"{self.name}.apply_gradients")
        columns = tuple(zip(*grads_and_vars, strict=True))
        if not columns:
            raise ValueError(
                f"{self.name}.apply_gradients: got no gradients; need pairs (gradient, variable)"
            )
        gradients, variables = columns
        context = current.get()
        replica = context if isinstance(context, ReplicaContext) else None
        if replica is not None:
            replica.require_own_thread(f"{self.name}.apply_gradients")
        key = (0 if replica is None else id(replica.strategy), *map(id, variables))
        group = self._groups.get(key)
        if group is None:
            group = self._new_group(key, variables, replica)
        if group.has_shards:
            gradients = tuple(group.spread(gradients))
        marks = None if replica is None else replica.rendezvous.recorder.marks
        if replica is None or marks is None:
            return self._apply(group, gradients, replica, loss_scale)
        began, step = clock(), replica.rendezvous.step
        is_made = self._apply(group, gradients, replica, loss_scale)
        mark = Mark("apply_gradients", self.name, step, began, clock(), {"variables": variables})
        marks[replica.local_replica_id].append(mark)
        return is_made

    def _apply(
        self,
        group: VariableGroup,
        gradients: Sequence[Any],
        replica: ReplicaContext | None,
        loss_scale: LossScale | None,
    ) -> bool:
        number = 0 if replica is None else replica.local_replica_id
        contribution = Contribution(gradients, number)
        if not contribution.missing:
            plan = group.plan(contribution.sparse)
            contribution.pack(plan.segments, plan.sparse, group.variables, group.where)
        if replica is not None and group.link is not None:
            exchange = self._exchanges.get(group)
            if exchange is None:
                exchange = self._exchanges[group] = Exchange(group.link, self._settings.op)

            def conclude_across(contributions: list[Contribution]) -> list[bool]:
                is_made = self._update_across(group, exchange, contributions, loss_scale)
                return [is_made] * len(contributions)

            is_done: bool = replica.rendezvous.meet(number, group.call, contribution, conclude_across)
            return is_done
        if replica is None or group.num_replicas == 1:
            plan = self._begin(group, [contribution], loss_scale)
            return self._run(plan, number)

        def conclude(contributions: list[Contribution]) -> list[tuple[Plan, bool]]:
            plan = self._begin(group, contributions, loss_scale)
            is_made = plan.is_shared or self._run(plan, number)
            return [(plan, is_made)] * len(contributions)

        # The memory of all replicas is in this process, so reducing and updating are one walk through it, or two.
        plan, is_made = replica.rendezvous.meet(number, group.call, contribution, conclude)
        return self._share(plan, replica, group) if plan.is_shared else is_made

    def _update_across(
        self,
        group: VariableGroup,
        exchange: Exchange,
        contributions: Sequence[Contribution],
        loss_scale: LossScale | None,
    ) -> bool:
        """An update of this process's copies, of the gradients of all processes."""
        plan, lent, sparse = exchange.bring_together(group, contributions)
        journal = group.journal
        if journal is not None:
            journal.keep_update(
                group.arrays(), self._undo(loss_scale), self if loss_scale is None else loss_scale
            )
        plan.begin(Update(self.iterations + 1, self._rate(), [lent], sparse, loss_scale))
        return self._run(plan, 0)

    def _undo(self, loss_scale: LossScale | None) -> Callable[[], None]:
        """Takes back what an update changes beside arrays."""
        iterations = self.iterations
        scale = None if loss_scale is None else dict(vars(loss_scale))

        def undo() -> None:
            self.iterations = iterations
            if loss_scale is not None and scale is not None:
                vars(loss_scale).update(scale)

        return undo

    def _rate(self) -> float:
        rate = self._learning_rate
        return float(rate(self.iterations) if callable(rate) else rate)

    def _share(self, plan: Plan, replica: ReplicaContext, group: VariableGroup) -> bool:
        """Take part in an update that all replicas' threads make together."""
        meet, number = replica.rendezvous.meet, replica.local_replica_id
        try:
            if plan.has_two_walks:
                plan.reduce(number)
                size = group.num_replicas
                if not meet(number, group.between, None, lambda _: [plan.decide()] * size):
                    return False
            plan.update(number)
        except BaseException as failure:
            replica.rendezvous.abort(failure)
            raise

        def finish(values: list[None]) -> list[None]:
            plan.end()
            self.iterations += 1
            return values

        meet(number, group.end, None, finish)
        return True

    def _run(self, plan: Plan, replica: int) -> bool:
        """All of an update in the calling thread."""
        if plan.has_two_walks:
            plan.reduce(replica)
            if not plan.decide():
                return False
        plan.update(replica)
        plan.end()
        self.iterations += 1
        return True

    def _begin(
        self, group: VariableGroup, contributions: Sequence[Contribution], loss_scale: LossScale | None
    ) -> Plan:
        first = contributions[0]
        if any(c.missing or c.sparse != first.sparse for c in contributions):
            plan = self._reconcile(group, contributions)
        else:
            plan = group.plan(first.sparse)
        update = Update(
            self.iterations + 1,
            self._rate(),
            [contribution.lent for contribution in contributions],
            {
                position: reduced_slices([c.rows[position] for c in contributions], self._settings.op)
                for position in plan.sparse
            },
            loss_scale,
        )
        plan.begin(update)
        return plan

    def _reconcile(self, group: VariableGroup, contributions: Sequence[Contribution]) -> Plan:
        """Where replicas have gradients of different kinds, or none: agree on what is updated, and how."""
        everywhere = set.intersection(*(set(c.missing) for c in contributions))
        somewhere = set.union(*(set(c.missing) for c in contributions)) - everywhere
        if len(everywhere) == len(group.variables):
            raise ValueError(
                f"{group.where}: got None for every variable on every replica; need at least one gradient"
            )
        group.warn_of_missing(somewhere)
        sparse = set.intersection(*(set(c.sparse) for c in contributions))
        plan = group.plan(tuple(sorted(sparse)), frozenset(everywhere))
        for contribution in contributions:
            contribution.pack(plan.segments, plan.sparse, group.variables, group.where)
        return plan

    # ------------------------------------------------------------------ checks

    def _new_group(
        self, key: tuple[int, ...], variables: tuple[Variable, ...], replica: ReplicaContext | None
    ) -> VariableGroup:
        """What is to be known about these variables, once it is certain that they may be updated here."""
        self._require_replica(variables, "apply_gradients")
        with self._mutex:
            if key in self._groups:
                return self._groups[key]
            where = f"{self.name}.apply_gradients"
            parts = [part for variable in variables for part in parts_of(variable)]
            ids = list(map(id, parts))
            if len(set(ids)) < len(ids):
                twice = next(part.name for part in parts if ids.count(id(part)) > 1)
                raise ValueError(f"{where}: got {twice} twice; need each variable once — add its gradients")
            if not self._known:
                self.build(variables)
            for variable in parts:
                if id(variable) not in self._known:
                    raise ValueError(
                        f"{where}: {variable.name} is not among the variables of the first update; "
                        f"name them all before: {self.name}.build(variables)"
                    )
            num_replicas = 1 if replica is None else replica.rendezvous.size
            strategy = None if replica is None else replica.strategy
            group = VariableGroup(
                self._settings, self._memory, variables, num_replicas, where, self._undecayed, strategy
            )
            self._groups[key] = group
            return group

    def _require_replica(self, variables: Sequence[Variable], method: str) -> ReplicaContext | None:
        """The replica that calls, or None for plain variables outside of steps."""
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
            return context
        for variable in variables:
            if not all(isinstance(part, LocalVariable) for part in parts_of(variable)):
                raise ReplicaContextError(
                    f"{self.name}.{method}: called across the replicas of {variable.owner!r}; it needs replica context — "
                    "call it in the function passed to strategy.run"
                )
        return None
