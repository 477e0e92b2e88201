"""Several micro-batches for one update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from collectives.arrays import Array, as_array
from collectives.indexed_slices import to_dense
from collectives.reduce_op import ReduceOp
from strategies.optimizers.optimizer import GradientAggregation
from variables.replica_context import ReplicaContext, ReplicaContextError, current


@final
class GradientAccumulator:
    """Adds up each replica's gradients and brings them together only at the end of every ``every`` micro-batches.

    It counts by itself, so the last micro-batch is the one that is synchronised, whatever the number in the epoch.

    Args:
        every: micro-batches for one update.
        reduce: how the replicas' sums become one, SUM or MEAN.

    Raises:
        ValueError: a number below 1; an unknown reduction.
    """

    def __init__(self, every: int, reduce: GradientAggregation | str = GradientAggregation.SUM) -> None:
        if every < 1:
            raise ValueError(f"GradientAccumulator: got every={every}; need at least 1")
        self.every = every
        self._op = ReduceOp.parse(reduce.name if isinstance(reduce, GradientAggregation) else reduce)
        if self._op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ValueError(f"GradientAccumulator: got reduce={reduce!r}; need SUM or MEAN")
        self._states: dict[int, _State] = {}

    def step(self, gradients: Sequence[Any], weight: float | None = None) -> list[Array] | None:
        """Take in the gradients of one micro-batch; in a step, all replicas call it alike.

        Args:
            gradients: arrays or `IndexedSlices`, of the same shapes every time.
            weight: of this micro-batch, such as its number of examples; the result is then the weighted mean over all
                micro-batches and replicas. Give it always or never.

        Returns:
            After the last of ``every`` micro-batches the gradients brought together; None before.

        Raises:
            ValueError: other shapes than before; weights that are negative, or given only sometimes.
        """
        context = current.get()
        replica = context if isinstance(context, ReplicaContext) else None
        if context is not None and replica is None:
            raise ReplicaContextError(
                "GradientAccumulator.step: called across replicas; call it in the function passed to strategy.run"
            )
        state = self._states.setdefault(0 if replica is None else replica.local_replica_id, _State())
        state.add(
            [as_array(to_dense(gradient), "GradientAccumulator.step") for gradient in gradients], weight
        )
        if state.count < self.every:
            return None
        sums, total = state.take()
        if weight is None:
            if replica is None:
                return sums
            return replica.communicator.all_reduce_coalesced(sums, self._op, name="accumulated gradients")
        parts = [*sums, np.array(total)]
        if replica is not None:
            parts = replica.communicator.all_reduce_coalesced(parts, name="accumulated gradients")
        *sums, weights = parts
        if not weights:
            raise ValueError(
                "GradientAccumulator.step: the weights of all micro-batches are 0; need one above 0"
            )
        return [(part / weights).astype(part.dtype, copy=False) for part in sums]

    @property
    def is_accumulating(self) -> bool:
        """Whether the calling replica is between two updates."""
        context = current.get()
        state = self._states.get(context.local_replica_id if isinstance(context, ReplicaContext) else 0)
        return state is not None and state.count > 0

    def reset(self) -> None:
        """Forget what has been added up, on all replicas; not in a step."""
        self._states.clear()


@final
class _State:
    """One replica's sums."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[Array] = []
        self._weights: list[float | None] = []

    def add(self, gradients: list[Array], weight: float | None) -> None:
        if weight is not None and not weight >= 0:
            raise ValueError(f"GradientAccumulator.step: got weight={weight}; need a number >= 0")
        if self._weights and (self._weights[0] is None) != (weight is None):
            raise ValueError(
                "GradientAccumulator.step: got a weight for some micro-batches only; give it always or never"
            )
        scaled = (
            gradients
            if weight is None
            else [g * g.dtype.type(weight) if g.dtype.kind in "fcV" else g * weight for g in gradients]
        )
        if not self.count:
            self._sums = [np.array(gradient) for gradient in scaled]
        else:
            if [g.shape for g in scaled] != [s.shape for s in self._sums]:
                raise ValueError(
                    f"GradientAccumulator.step: got shapes {[g.shape for g in scaled]}; need those of the micro-batches "
                    f"before, {[s.shape for s in self._sums]}"
                )
            for sum_, gradient in zip(self._sums, scaled, strict=True):
                np.add(sum_, gradient, out=sum_)
        self._weights.append(weight)
        self.count += 1

    def take(self) -> tuple[list[Array], float]:
        sums, total = self._sums, sum(weight or 0.0 for weight in self._weights)
        self.count, self._sums, self._weights = 0, [], []
        return sums, total
