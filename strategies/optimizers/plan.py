"""How one set of variables is updated, piece by piece.

The gradients of all replicas and all copies of the variables lie in this process, so a piece is reduced, updated and copied
while it is in the cache: each byte goes through memory once, and the update is computed once, not once for each
copy. All replicas' threads may take pieces; the pieces are independent of one another, so the numbers are the
same to the last bit whoever takes which.

Where all gradients decide together over each (their global norm, or whether any is not finite), there are two walks:
one that reduces, and one that updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import numpy as np

from collectives.arrays import Array
from collectives.indexed_slices import IndexedSlices
from collectives.reduce_op import ReduceOp
from collectives.reduction import CHUNK_BYTES, Fold
from strategies.optimizers.clipping import Clipping, clip_scale, sum_of_squares
from strategies.optimizers.gradient_memory import Segment
from strategies.optimizers.sparse_rows import SparseRows
from strategies.optimizers.update_rule import UpdateRule

_SHARED_FROM = 4 << 20
"""Bytes read and written in an update from which the replicas share it; below, waking them takes longer."""


class LossScale(Protocol):
    """What gradients were multiplied by, and what becomes of that."""

    @property
    def loss_scale(self) -> float:
        """The number now."""

    def settle(self, is_finite: bool) -> None:
        """Take in whether all gradients were finite; called once for all replicas, before the update."""


@final
@dataclass(frozen=True)
class Settings:
    """What is the same for all of an optimizer's updates.

    Args:
        rule: the algorithm.
        op: how the replicas' gradients become one.
        clipping: bounds on them.
        weight_decay: what parameters shrink by before each update, times the learning rate.
    """

    rule: UpdateRule
    op: ReduceOp
    clipping: Clipping
    weight_decay: float

    @property
    def needs_whole_variables(self) -> bool:
        """Whether pieces are whole variables."""
        return self.rule.needs_whole_variables or self.clipping.norm is not None


@final
@dataclass(frozen=True)
class Update:
    """What is particular to one update.

    Args:
        step: its number, from 1.
        learning_rate: its learning rate.
        lent: by replica, the flat gradients of the large variables, in the order of the plan.
        sparse: by sparse variable, its gradient, reduced.
        loss_scale: what the gradients were multiplied by; the update is then made only if all are finite. None if they
            were not multiplied, and are not looked at.
    """

    step: int
    learning_rate: float
    lent: Sequence[Sequence[Array]]
    sparse: Mapping[int, IndexedSlices] = field(default_factory=dict)
    loss_scale: LossScale | None = None


@final
@dataclass(frozen=True, eq=False)
class _Piece:
    """A part of flat memory that fits the cache together with all that belongs to it."""

    parameters: list[Array]
    packed: list[Array]
    slots: dict[str, Array]
    total: Array
    decay: float
    large: int  # the number among the large variables whose gradients it is a part of, or -1
    part: slice


@final
class Plan:
    """The update of one set of variables.

    Args:
        settings: of the optimizer.
        segments: the variables with dense gradients.
        decays: for each segment, whether weight decay applies to it.
        sparse: the variables with sparse gradients, by their positions.
        num_replicas: that have gradients.
    """

    def __init__(
        self,
        settings: Settings,
        segments: Sequence[Segment],
        decays: Sequence[bool],
        sparse: Mapping[int, SparseRows],
        num_replicas: int,
    ) -> None:
        self.segments = segments
        self.sparse = sparse
        self._settings = settings
        self._rule = settings.rule
        self._op = settings.op
        self._clipping = settings.clipping
        num_arrays = 2 * num_replicas + 2 * len(settings.rule.slots)
        num_bytes = sum((s.stop - s.start) * s.state.block.dtype.itemsize for s in segments)
        self.is_shared = num_replicas > 1 and num_arrays * num_bytes >= _SHARED_FROM
        self._pieces: list[_Piece] = []
        num_large = 0
        for segment, decaying in zip(segments, decays, strict=True):
            decay = settings.weight_decay if decaying else 0.0
            self._pieces += _cut(segment, num_large, decay, settings.needs_whole_variables)
            num_large += segment.is_large
        self._scratch: dict[tuple[int, np.dtype[Any]], list[Array]] = {}
        self._left: list[_Piece] = []
        self._squares: list[float] = []
        self._finite: list[bool] = []
        self._factor = 1.0
        self._update = Update(0, 0.0, ())
        self.has_two_walks = False

    def begin(self, update: Update) -> None:
        """Get ready for one update."""
        self._update = update
        self.has_two_walks = self._clipping.global_norm is not None or update.loss_scale is not None
        self._factor = 1.0
        self._left = self._pieces[::-1]
        if self.has_two_walks:
            self._squares, self._finite = [], []
        else:
            self.update_sparse()

    def reduce(self, replica: int) -> None:
        """The first of two walks: bring gradients together, piece by piece until none is left."""
        self._walk(self._reduce_piece, replica)

    def decide(self) -> bool:
        """Between two walks: whether there is a second one."""
        update, bound = self._update, self._clipping.global_norm
        if update.loss_scale is not None:
            sparse = all(bool(np.isfinite(slices.values).all()) for slices in update.sparse.values())
            is_finite = sparse and all(self._finite)
            self._factor = 1 / update.loss_scale.loss_scale
            update.loss_scale.settle(is_finite)
            if not is_finite:
                return False
        if bound is not None:
            squares = math.fsum([*self._squares, *(sum_of_squares(s.values) for s in update.sparse.values())])
            self._factor *= clip_scale(math.sqrt(squares) * self._factor, bound)
        self._left = self._pieces[::-1]
        self.update_sparse()
        return True

    def update(self, replica: int) -> None:
        """The only walk, or the second one: update piece by piece until none is left."""
        self._walk(self._update_piece, replica)

    def update_sparse(self) -> None:
        """Update the rows that have sparse gradients."""
        for position, slices in self._update.sparse.items():
            values = slices.values
            if self._factor != 1.0:
                values = values * values.dtype.type(self._factor)
            values = self._clipped(values, np.empty_like(values))
            self.sparse[position].update(
                self._rule,
                values,
                slices.indices,
                step=self._update.step,
                learning_rate=self._update.learning_rate,
            )

    # ------------------------------------------------------------------ pieces

    def _walk(self, visit: Callable[[_Piece, int], None], replica: int) -> None:
        left = self._left
        while True:
            try:
                piece = left.pop()  # atomic, so that threads can share the list
            except IndexError:
                return
            visit(piece, replica)

    def _gradients(self, piece: _Piece) -> list[Array]:
        if piece.large < 0:
            return piece.packed
        return [lent[piece.large][piece.part] for lent in self._update.lent]

    def _reduce_piece(self, piece: _Piece, replica: int) -> None:  # noqa: ARG002  # as _update_piece
        gradients = self._gradients(piece)
        # The sums go where the first replica's gradients are, or would be if they weren't read elsewhere.
        total = self._reduced(gradients, piece.total)
        if (
            total is not piece.total
            and total.__array_interface__["data"] != piece.total.__array_interface__["data"]
        ):
            np.copyto(piece.total, total)
        if self._update.loss_scale is not None:
            self._finite.append(bool(np.isfinite(piece.total).all()))
        if self._clipping.global_norm is not None:
            self._squares.append(sum_of_squares(piece.total))

    def _update_piece(self, piece: _Piece, replica: int) -> None:
        parameters, *copies = piece.parameters
        room, *scratch = self._scratch_for(replica, parameters)
        total = piece.total if self.has_two_walks else self._reduced(self._gradients(piece), room)
        if self._factor != 1.0:
            total = np.multiply(total, self._factor, out=room)
        total = self._clipped(total, room)
        update = self._update
        if piece.decay:
            np.multiply(parameters, 1 - update.learning_rate * piece.decay, out=parameters)
        self._rule.update(
            parameters, total, piece.slots, scratch, step=update.step, learning_rate=update.learning_rate
        )
        for copy in copies:
            np.copyto(copy, parameters)

    def _clipped(self, total: Array, room: Array) -> Array:
        clipping = self._clipping
        if clipping.value is not None:
            return np.clip(total, -clipping.value, clipping.value, out=room)
        if clipping.norm is not None:
            scale = clip_scale(math.sqrt(sum_of_squares(total)), clipping.norm)
            return total if scale == 1.0 else np.multiply(total, scale, out=room)
        return total

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


def _cut(segment: Segment, num_large: int, decay: float, whole: bool) -> list[_Piece]:
    parameters, slots = segment.parameters(), segment.slots()
    gradients = [segment.gradients(replica) for replica in range(len(segment.state.gradients))]
    size = parameters[0].size
    length = max(1, size if whole else CHUNK_BYTES // parameters[0].itemsize)
    return [
        _Piece(
            [copy[part] for copy in parameters],
            [gradient[part] for gradient in gradients],
            {name: slot[part] for name, slot in slots.items()},
            gradients[0][part],
            decay,
            num_large if segment.is_large else -1,
            part,
        )
        for part in (slice(start, min(start + length, size)) for start in range(0, size, length))
    ]
