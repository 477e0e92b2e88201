"""Several micro-batches for one update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import numpy as np

from collectives.arrays import Array, as_array
from collectives.indexed_slices import IndexedSlices, all_reduce_slices
from collectives.reduce_op import ReduceOp
from strategies.optimizers.hyperparameters import require_real
from strategies.optimizers.no_sync import no_sync, require_sync
from strategies.optimizers.optimizer import GradientAggregation
from variables.replica_context import ReplicaContext, ReplicaContextError, current


@final
class GradientAccumulator:
    """Adds up each replica's gradients and brings them together only at the end of every ``every`` micro-batches.

    It counts by itself, so the last micro-batch is the one that is synchronised, whatever the number in the epoch.

    What it gives is the same on all replicas, so an optimizer that is to apply it takes
    ``gradient_aggregation="MEAN"``, which leaves equal gradients as they are. With ``reduce=None`` it leaves bringing
    together to the optimizer, which does so along with the update.

    A `Checkpoint` takes it, so that a run can be resumed between two updates.

    Args:
        every: micro-batches for one update.
        reduce: how the replicas' sums become one, SUM or MEAN; None for each replica's own sums.

    Raises:
        ValueError: a number below 1; an unknown reduction.
    """

    def __init__(
        self, every: int, reduce: GradientAggregation | str | None = GradientAggregation.SUM
    ) -> None:
        require_real("GradientAccumulator", every=every)
        if every < 1:
            raise ValueError(f"GradientAccumulator: got every={every}; need at least 1")
        self.every = every
        self._op = _op_of(reduce)
        self._states: dict[int, _State] = {}
        self._restored_replicas = 0

    def step(self, gradients: Sequence[Any], weight: float | None = None) -> list[Any] | None:
        """Take in the gradients of one micro-batch; in a step, all replicas call it alike.

        Args:
            gradients: arrays or `IndexedSlices`, of the same kinds and shapes every time.
            weight: of this micro-batch, such as its number of examples; the result is then the weighted mean over all
                micro-batches and replicas. Give it always or never.

        Returns:
            After the last of ``every`` micro-batches the gradients brought together, arrays or `IndexedSlices` with every row
            once; None before.

        Raises:
            ValueError: other kinds or shapes than before; weights that are negative, given only sometimes, given where
                nothing is brought together, or all 0.
            RuntimeError: the last micro-batch came in a block of `no_sync`.
            ReplicaContextError: called across replicas.
        """
        context = current.get()
        replica = context if isinstance(context, ReplicaContext) else None
        if context is not None and replica is None:
            raise ReplicaContextError(
                "GradientAccumulator.step: called across replicas; call it in the function passed to strategy.run"
            )
        if weight is not None and self._op is None:
            raise ValueError(
                f"GradientAccumulator.step: got weight={weight} and reduce=None; need the weights of all replicas "
                "for a mean — reduce='SUM'"
            )
        if self._restored_replicas:
            self._require_as_many(1 if replica is None else replica.num_replicas_in_sync)
        number = 0 if replica is None else replica.local_replica_id
        state = self._states.setdefault(number, _State())
        journal = None if replica is None else replica.strategy.journal
        if journal is not None:
            journal.keep_state(self, number, state.keep)
        if state.count + 1 == self.every and self._op is not None:
            require_sync(f"GradientAccumulator.step, micro-batch {self.every} of {self.every}")
        state.add([_checked(gradient) for gradient in gradients], weight, in_place=journal is None)
        if state.count < self.every:
            return None
        sums, total = state.take()
        op = self._op if weight is None else ReduceOp.SUM
        if replica is not None and op is not None:
            sums, total = _brought_together(replica, sums, total if weight is not None else None, op)
        if weight is None:
            return sums
        if not total:
            raise ValueError(
                "GradientAccumulator.step: the weights of all micro-batches are 0; need one above 0"
            )
        return [_divided(part, total) for part in sums]

    @staticmethod
    def no_sync() -> AbstractContextManager[None]:
        """A block that promises to bring nothing together: all but the last of some micro-batches.

        Which micro-batch is the last is counted, not taken from this block. It finds mistakes in programs that mean to do it
        themselves: in it, `step` of the last micro-batch and every optimizer's ``apply_gradients`` raise a RuntimeError on
        the replica that calls them. It holds in a step, or around one.
        """
        return no_sync()

    @property
    def is_accumulating(self) -> bool:
        """Whether the calling replica is between two updates."""
        context = current.get()
        state = self._states.get(context.local_replica_id if isinstance(context, ReplicaContext) else 0)
        return state is not None and state.count > 0

    def reset(self) -> None:
        """Forget what has been added up, on all replicas; not in a step."""
        self._states.clear()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: each replica's micro-batches so far, and their sums; not in a step."""
        return {
            "every": self.every,
            "replicas": {str(replica): state.describe() for replica, state in self._states.items()},
        }

    def state_for_newcomer(self) -> dict[str, Any]:
        """What a process that joins is to begin with: as many micro-batches, and nothing added up, as the others have their own sums."""
        state = self.state()
        for described in state["replicas"].values():
            described["sums"] = [
                {**part, "values": part["values"][:0], "indices": part["indices"][:0]}
                if isinstance(part, dict)
                else np.zeros_like(part)
                for part in described["sums"]
            ]
            described["weights"] = [None if weight is None else 0.0 for weight in described["weights"]]
        return {**state, "is_for_newcomer": True}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave.

        Between two updates the sums belong to replicas: `step` raises a ValueError unless there are as
        many again. After an update any number may go on.

        Raises:
            ValueError: the state of an accumulator with another ``every``.
        """
        if state["every"] != self.every:
            raise ValueError(
                f"GradientAccumulator.restore: got the state of every={state['every']}; need every={self.every}"
            )
        states = {int(replica): _State.of(described) for replica, described in state["replicas"].items()}
        self._states = {replica: s for replica, s in states.items() if s.count}
        self._restored_replicas = 0 if state.get("is_for_newcomer") else len(self._states)

    def _require_as_many(self, num_replicas: int) -> None:
        if any(state.count for state in self._states.values()) and self._restored_replicas != num_replicas:
            raise ValueError(
                f"GradientAccumulator.step: restored sums of {self._restored_replicas} replicas between two updates, and "
                f"there are {num_replicas}; restore into as many, or save after an update, or forget them — reset()"
            )
        self._restored_replicas = 0


@final
class _State:
    """One replica's sums; of sparse gradients the rows one after the other."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[Any] = []
        self._weights: list[float | None] = []

    def keep(self) -> Callable[[], None]:
        """Keep what there is, if nothing is added in place; what is returned puts it back."""
        count, sums, weights = self.count, list(self._sums), list(self._weights)

        def put_back() -> None:
            self.count, self._sums, self._weights = count, sums, weights

        return put_back

    def add(self, gradients: list[Any], weight: float | None, *, in_place: bool) -> None:
        if weight is not None and not weight >= 0:
            raise ValueError(f"GradientAccumulator.step: got weight={weight}; need a number >= 0")
        if self._weights and (self._weights[0] is None) != (weight is None):
            raise ValueError(
                "GradientAccumulator.step: got a weight for some micro-batches only; give it always or never"
            )
        if self.count and [_form(g) for g in gradients] != [_form(s) for s in self._sums]:
            raise ValueError(
                f"GradientAccumulator.step: got {', '.join(map(_form, gradients))}; need those of the micro-batches before, "
                f"{', '.join(map(_form, self._sums))}"
            )
        scaled = gradients if weight is None else [_multiplied(gradient, weight) for gradient in gradients]
        if self.count:
            self._sums = [_added(s, g, in_place) for s, g in zip(self._sums, scaled, strict=True)]
        else:
            self._sums = [_copied(gradient) for gradient in scaled]
        self._weights.append(weight)
        self.count += 1

    def describe(self) -> dict[str, Any]:
        """As data, which later micro-batches leave alone."""
        return {
            "count": self.count,
            "sums": [
                {
                    "values": np.array(s.values),
                    "indices": np.array(s.indices),
                    "dense_shape": None if s.dense_shape is None else s.dense_shape.tolist(),
                }
                if isinstance(s, IndexedSlices)
                else np.array(s)
                for s in self._sums
            ],
            "weights": list(self._weights),
        }

    @staticmethod
    def of(described: dict[str, Any]) -> _State:
        """The one that was described."""
        state = _State()
        state.count, state._weights = int(described["count"]), list(described["weights"])
        state._sums = [
            IndexedSlices(np.array(s["values"]), np.array(s["indices"]), s["dense_shape"])
            if isinstance(s, dict)
            else np.array(s)
            for s in described["sums"]
        ]
        return state

    def take(self) -> tuple[list[Any], float]:
        sums = [s.merged() if isinstance(s, IndexedSlices) else s for s in self._sums]
        total = sum(weight or 0.0 for weight in self._weights)
        self.count, self._sums, self._weights = 0, [], []
        return sums, total


def _brought_together(
    replica: ReplicaContext, sums: list[Any], total: float | None, op: ReduceOp
) -> tuple[list[Any], float]:
    communicator = replica.communicator
    dense = [part for part in sums if not isinstance(part, IndexedSlices)]
    if total is not None:
        dense.append(np.array(total, np.float64))
    if dense:
        dense = communicator.all_reduce_coalesced(dense, op, name="accumulated gradients")
    weights = 0.0 if total is None else float(dense.pop())
    rest = iter(dense)
    return [
        all_reduce_slices(communicator, part, op).merged() if isinstance(part, IndexedSlices) else next(rest)
        for part in sums
    ], weights


def _op_of(reduce: GradientAggregation | str | None) -> ReduceOp | None:
    if reduce is None:
        return None
    op = ReduceOp.parse(reduce.name if isinstance(reduce, GradientAggregation) else reduce)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(f"GradientAccumulator: got reduce={reduce!r}; need SUM, MEAN or None")
    return op


def _checked(gradient: Any) -> Any:
    return gradient if isinstance(gradient, IndexedSlices) else as_array(gradient, "GradientAccumulator.step")


def _form(gradient: Any) -> str:
    if isinstance(gradient, IndexedSlices):
        return f"rows of shape {gradient.values.shape[1:]}"
    return f"shape {gradient.shape}"


def _copied(gradient: Any) -> Any:
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(np.array(gradient.values), np.array(gradient.indices), gradient.dense_shape)
    return np.array(gradient)


def _added(total: Any, gradient: Any, in_place: bool) -> Any:
    if isinstance(total, IndexedSlices):
        values = np.concatenate([total.values, gradient.values])
        return IndexedSlices(values, np.concatenate([total.indices, gradient.indices]), total.dense_shape)
    return np.add(total, gradient, out=total if in_place else None)


def _multiplied(gradient: Any, weight: float) -> Any:
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(_scaled(gradient.values, weight), gradient.indices, gradient.dense_shape)
    return _scaled(gradient, weight)


def _scaled(array: Array, weight: float) -> Array:
    is_inexact = array.dtype.kind in "fcV"
    return array * array.dtype.type(weight) if is_inexact else array * weight


def _divided(gradient: Any, weights: float) -> Any:
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(_divided(gradient.values, weights), gradient.indices, gradient.dense_shape)
    return (gradient / weights).astype(gradient.dtype, copy=False)
