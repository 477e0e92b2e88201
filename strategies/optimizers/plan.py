"""How one set of variables is updated, piece by piece.

The gradients of all replicas and all copies of the variables lie in this process, so a piece is reduced, updated and copied
while it is in the cache: each byte goes through memory once, and the update is computed once, not once for each
copy. All replicas' threads may take pieces; the pieces are independent of one another, so the numbers are the
same to the last bit whoever takes which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.reduce_op import ReduceOp
from collectives.reduction import CHUNK_BYTES, Fold
from collectives.rendezvous import Call
from strategies.optimizers.gradient_memory import Run
from strategies.optimizers.update_rule import UpdateRule
from variables.variable import Variable

_SHARED_FROM = 4 << 20
"""Bytes read and written in an update from which the replicas share it; below, waking them takes longer."""


@final
@dataclass(frozen=True, eq=False)
class _Piece:
    """A part of flat memory that fits the cache together with all that belongs to it."""

    parameters: list[Array]
    gradients: list[Array]
    slots: dict[str, Array]


@final
class Plan:
    """The update of one set of variables.

    Args:
        rule: the algorithm.
        op: how the replicas' gradients become one.
        runs: what of flat memory the variables take up.
        num_replicas: that have gradients.
        variables: the variables.
        strategy: the strategy whose replicas they are.
        name: of the optimizer.
    """

    def __init__(
        self,
        rule: UpdateRule,
        op: ReduceOp,
        runs: list[Run],
        num_replicas: int,
        variables: Sequence[Variable],
        strategy: Any,
        name: str,
    ) -> None:
        self.runs = runs
        self.num_replicas = num_replicas
        self._rule = rule
        self._op = op
        self._kept = (variables, strategy)
        first, *others = [variable.name for variable in variables]
        title = f"of {first}" + (f" and {len(others)} more" if others else "")
        self.call = Call("apply_gradients", (title, id(self)), name)
        self.call_end = Call("the end of apply_gradients", (title, id(self)), name)
        num_arrays = 2 * num_replicas + 2 * len(rule.slots)
        num_bytes = sum((run.stop - run.start) * run.state.block.dtype.itemsize for run in runs)
        self.is_shared = num_replicas > 1 and num_arrays * num_bytes >= _SHARED_FROM
        self._pieces = [piece for run in runs for piece in _cut(run)]
        self._scratch: dict[tuple[int, np.dtype[Any]], list[Array]] = {}
        self._left: list[_Piece] = []
        self._step = 0
        self._learning_rate = 0.0

    def begin(self, step: int, learning_rate: float) -> None:
        """Get ready for one update: the ``step``-th."""
        self._step = step
        self._learning_rate = learning_rate
        self._left = self._pieces[::-1]

    def update(self, replica: int) -> None:
        """Take pieces and update them until none is left."""
        left = self._left
        while True:
            try:
                piece = left.pop()  # atomic, so that threads can share the list
            except IndexError:
                return
            self._update(piece, replica)

    def _update(self, piece: _Piece, replica: int) -> None:
        parameters, *copies = piece.parameters
        total, *scratch = self._scratch_for(replica, parameters)
        total = self._reduced(piece.gradients, total)
        self._rule.update(
            parameters, total, piece.slots, scratch, step=self._step, learning_rate=self._learning_rate
        )
        for copy in copies:
            np.copyto(copy, parameters)

    def _reduced(self, gradients: list[Array], total: Array) -> Array:
        if len(gradients) == 1:
            return gradients[0]
        if self._op.accumulator_dtype(total.dtype) != total.dtype:
            Fold(self._op, gradients, [total]).run()
            return total
        np.add(gradients[0], gradients[1], out=total)
        for gradient in gradients[2:]:
            np.add(total, gradient, out=total)
        if self._op is ReduceOp.MEAN:
            np.divide(total, len(gradients), out=total)
        return total

    def _scratch_for(self, replica: int, parameters: Array) -> list[Array]:
        key = (replica, parameters.dtype)
        scratch = self._scratch.get(key)
        if scratch is None:
            length = max(
                p.parameters[0].size for p in self._pieces if p.parameters[0].dtype == parameters.dtype
            )
            count = self._rule.num_scratch + 1
            scratch = self._scratch[key] = [np.empty(length, parameters.dtype) for _ in range(count)]
        size = parameters.size
        return scratch if scratch[0].size == size else [work[:size] for work in scratch]


def _cut(run: Run) -> list[_Piece]:
    parameters, gradients, slots = run.parameters(), run.gradients(), run.slots()
    length = max(1, CHUNK_BYTES // parameters[0].itemsize)
    return [
        _Piece(
            [copy[start : start + length] for copy in parameters],
            [gradient[start : start + length] for gradient in gradients],
            {name: slot[start : start + length] for name, slot in slots.items()},
        )
        for start in range(0, parameters[0].size, length)
    ]
