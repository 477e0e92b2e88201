"""How one set of variables is updated, piece by piece.

The gradients of all replicas and all copies of the variables lie in this process, so a piece is reduced, updated and copied
while it is in the cache: each byte goes through memory once, and the update is computed once, not once for each
copy. All replicas' threads may take pieces; the pieces are independent of one another, so the numbers are the
same to the last bit whoever takes which.

Where gradients decide together over each (their norm, or whether any is not finite), there are two walks: one that
reduces, and one that updates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, final

import numpy as np

from collectives.arrays import Array
from collectives.indexed_slices import IndexedSlices
from collectives.reduce_op import ReduceOp
from collectives.reduction import CHUNK_BYTES, Fold
from strategies.optimizers.clipping import Clipping, clip_scale, sum_of_squares
from strategies.optimizers.gradient_memory import Segment, SideBySide
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
    def tells_variables_apart(self) -> bool:
        """Whether a piece may not hold more than one variable."""
        return self.rule.needs_whole_variables or self.clipping.norm is not None


@final
@dataclass(frozen=True)
class Update:
    """What is particular to one update.

    Args:
        step: its number, from 1.
        learning_rate: its learning rate.
        lent: by replica, the flat gradients of each segment.
        sparse: by the position of a sparse variable, its gradient, reduced.
        loss_scale: what the gradients were multiplied by; the update is then made only if all are finite. None if they
            were not multiplied, and are not looked at.
    """

    step: int
    learning_rate: float
    lent: Sequence[Sequence[Array | SideBySide]]
    sparse: Mapping[int, IndexedSlices] = field(default_factory=dict)
    loss_scale: LossScale | None = None


@final
@dataclass(frozen=True, eq=False)
class _Piece:
    """A part of flat memory that fits the cache together with all that belongs to it."""

    parameters: list[Array]
    slots: dict[str, Array]
    total: Array
    decay: float
    segment: int
    part: slice
    norm: int  # which of the norms that gradients are clipped by counts its gradients; or _ALONE


_ALONE = -1
"""The norm of one piece, which is all of its variable: it needs no first walk."""


@final
class Plan:
    """The update of one set of variables.

    Args:
        settings: of the optimizer.
        segments: the variables with dense gradients.
        decays: for each segment, whether weight decay applies to it.
        wholes: for each segment, a number that it shares with those of the other shards of its variable.
        sparse: the variables with sparse gradients, by the positions of their shards.
        num_replicas: that have gradients.
    """

    def __init__(
        self,
        settings: Settings,
        segments: Sequence[Segment],
        decays: Sequence[bool],
        wholes: Sequence[int],
        sparse: Mapping[tuple[int, ...], SparseRows],
        num_replicas: int,
    ) -> None:
        self.segments = segments
        self.sparse = [position for positions in sparse for position in positions]
        self._sparse = sparse
        self._rule = settings.rule
        self._op = settings.op
        self._clipping = settings.clipping
        num_arrays = 2 * num_replicas + 2 * len(settings.rule.slots)
        num_bytes = sum((s.stop - s.start) * s.state.block.dtype.itemsize for s in segments)
        self.is_shared = num_replicas > 1 and num_arrays * num_bytes >= _SHARED_FROM
        self._by_variable = settings.clipping.norm is not None
        is_whole = settings.rule.needs_whole_variables
        num_segments = Counter(wholes)
        units: dict[int, list[_Piece]] = {}
        for number, (segment, decaying, whole) in enumerate(zip(segments, decays, wholes, strict=True)):
            decay = settings.weight_decay if decaying else 0.0
            pieces = _cut(segment, number, decay, is_whole)
            if self._by_variable:
                norm = _ALONE if len(pieces) == num_segments[whole] == 1 else whole
                pieces = [replace(piece, norm=norm) for piece in pieces]
            for piece in pieces:
                # Together only where a rule wants whole variables, whose shards lie in several segments.
                units.setdefault(whole if is_whole else -1 - len(units), []).append(piece)
        # A first walk is needed for those norms that no piece can tell by itself.
        self._has_norms = settings.clipping.global_norm is not None or (
            self._by_variable and any(piece.norm != _ALONE for unit in units.values() for piece in unit)
        )
        self._units = list(units.values())[::-1]
        self._scratch: dict[tuple[int, np.dtype[Any]], list[Array]] = {}
        self._left: list[list[_Piece]] = []
        self._squares: dict[int, list[float]] = {}
        self._finite: list[bool] = []
        self._totals: dict[int, Array] = {}  # of the first walk, by the id of their piece
        self._scale = 1.0
        self._factors: dict[int, float] = {}
        self._update = _NONE
        self.has_two_walks = False

    def begin(self, update: Update) -> None:
        """Get ready for one update."""
        self._update = update
        self.has_two_walks = self._has_norms or update.loss_scale is not None
        self._scale, self._factors = 1.0, {}
        self._left = self._units.copy()
        if self.has_two_walks:
            self._squares, self._finite = {}, []
            self._totals.clear()  # of an update that was broken off
        else:
            self.update_sparse()

    def end(self) -> None:
        """Let go of the gradients."""
        self._update = _NONE
        self._totals.clear()

    def reduce(self, replica: int) -> None:
        """The first of two walks: bring gradients together, piece by piece until none is left."""
        self._walk(self._reduce_unit, replica)

    def decide(self) -> bool:
        """Between two walks: whether there is a second one."""
        update = self._update
        if update.loss_scale is not None:
            sparse = all(bool(np.isfinite(slices.values).all()) for slices in update.sparse.values())
            is_finite = sparse and all(self._finite)
            self._scale = 1 / update.loss_scale.loss_scale
            update.loss_scale.settle(is_finite)
            if not is_finite:
                self.end()
                return False
        if self._has_norms:
            self._decide_factors()
        self._left = self._units.copy()
        self.update_sparse()
        return True

    def _decide_factors(self) -> None:
        bound = self._clipping.norm or self._clipping.global_norm
        assert bound is not None
        if not self._by_variable:
            squares = self._squares.setdefault(0, [])
            squares += [sum_of_squares(slices.values) for slices in self._update.sparse.values()]
        for number, squares in self._squares.items():
            self._factors[number] = self._factor(squares, bound)

    def _factor(self, squares: Sequence[float], bound: float) -> float:
        """What to multiply gradients by whose squares, before anything else, add up to these sums."""
        norm = math.sqrt(math.fsum(squares)) * self._scale if all(map(math.isfinite, squares)) else math.nan
        return self._scale * clip_scale(norm, bound)

    def update(self, replica: int) -> None:
        """The only walk, or the second one: update piece by piece until none is left."""
        self._walk(self._update_unit, replica)

    def update_sparse(self) -> None:
        """Update the rows that have sparse gradients."""
        update, clipping = self._update, self._clipping
        for positions, rows in self._sparse.items():
            gradients = [update.sparse[position] for position in positions]
            factor = (
                self._factors.get(0, self._scale)
                if clipping.norm is None
                else self._factor([sum_of_squares(slices.values) for slices in gradients], clipping.norm)
            )
            rows.update(
                self._rule,
                [slices.values for slices in gradients],
                [slices.indices for slices in gradients],
                factor=factor,
                bound=clipping.value,
                step=update.step,
                learning_rate=update.learning_rate,
            )

    # ------------------------------------------------------------------ pieces

    def _walk(self, visit: Callable[[list[_Piece], int], None], replica: int) -> None:
        left = self._left
        while True:
            try:
                unit = left.pop()  # atomic, so that threads can share the list
            except IndexError:
                return
            visit(unit, replica)

    def _gradients(self, piece: _Piece) -> list[Array]:
        segment, part = piece.segment, piece.part
        gradients = []
        for lent in self._update.lent:
            own = lent[segment]
            gradients.append(own.joined() if type(own) is SideBySide else own[part])
        return gradients

    def _reduce_unit(self, unit: list[_Piece], replica: int) -> None:  # noqa: ARG002  # as _update_unit
        for piece in unit:
            if piece.norm == _ALONE and self._update.loss_scale is None:
                continue
            total = self._reduced(self._gradients(piece), piece.total)
            if type(self._update.lent[0][piece.segment]) is SideBySide and total is not piece.total:
                # Joined for this: kept until the second walk it would be memory asked of the system anew each time.
                np.copyto(piece.total, total)
                total = piece.total
            self._totals[id(piece)] = total
            if self._update.loss_scale is not None:
                self._finite.append(bool(np.isfinite(total).all()))
            if self._has_norms and piece.norm != _ALONE:
                self._squares.setdefault(piece.norm, []).append(sum_of_squares(total))

    def _update_unit(self, unit: list[_Piece], replica: int) -> None:
        if len(unit) == 1:
            (piece,) = unit
            parameters, *copies = piece.parameters
            room, *scratch = self._scratch_for(replica, parameters.size, parameters.dtype)
            try:
                self._update_flat(parameters, self._total(piece, room), piece.slots, scratch, piece.decay)
            finally:
                # Also where it fails halfway, by an overflow that raises or Ctrl-C: copies must not differ.
                for copy in copies:
                    np.copyto(copy, parameters)
            return
        self._update_shards(unit, replica)

    def _update_shards(self, unit: list[_Piece], replica: int) -> None:
        """Bring the shards of one variable together, update them as one, and spread them again."""
        parameters = np.concatenate([piece.parameters[0] for piece in unit])
        slots = {name: np.concatenate([piece.slots[name] for piece in unit]) for name in self._rule.slots}
        total, *scratch = self._scratch_for(replica, parameters.size, parameters.dtype)
        cuts = np.cumsum([piece.total.size for piece in unit])[:-1]
        for piece, room in zip(unit, np.split(total, cuts), strict=True):
            own = self._total(piece, room)
            if own is not room:
                np.copyto(room, own)
        self._update_flat(parameters, total, slots, scratch, unit[0].decay)
        new = {name: np.split(slot, cuts) for name, slot in slots.items()}
        for number, (piece, part) in enumerate(zip(unit, np.split(parameters, cuts), strict=True)):
            for copy in piece.parameters:
                np.copyto(copy, part)
            for name, slot in piece.slots.items():
                np.copyto(slot, new[name][number])

    def _update_flat(
        self, parameters: Array, total: Array, slots: dict[str, Array], scratch: list[Array], decay: float
    ) -> None:
        update = self._update
        if decay:
            np.multiply(parameters, 1 - update.learning_rate * decay, out=parameters)
        self._rule.update(
            parameters, total, slots, scratch, step=update.step, learning_rate=update.learning_rate
        )

    def _total(self, piece: _Piece, room: Array) -> Array:
        """A piece's gradients brought together and clipped; in the room given, or elsewhere."""
        total = self._totals.get(id(piece)) if self.has_two_walks else None
        if total is None:
            total = self._reduced(self._gradients(piece), room)
        clipping = self._clipping
        if self.has_two_walks or self._by_variable:
            if piece.norm == _ALONE:
                assert clipping.norm is not None
                factor = self._factor([sum_of_squares(total)], clipping.norm)
            else:
                factor = self._factors.get(piece.norm, self._scale)
            if factor != 1.0:
                total = np.multiply(total, factor, out=room)
        if clipping.value is not None:
            return np.clip(total, -clipping.value, clipping.value, out=room)
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

    def _scratch_for(self, replica: int, size: int, dtype: np.dtype[Any]) -> list[Array]:
        key = (replica, dtype)
        scratch = self._scratch.get(key)
        if scratch is None:
            sizes = (sum(p.total.size for p in unit) for unit in self._units if unit[0].total.dtype == dtype)
            length, count = max(sizes), self._rule.num_scratch + 1
            scratch = self._scratch[key] = [np.empty(length, dtype) for _ in range(count)]
        return scratch if scratch[0].size == size else [work[:size] for work in scratch]


_NONE = Update(0, 0.0, ())


def _cut(segment: Segment, number: int, decay: float, is_whole: bool) -> list[_Piece]:
    parameters, slots = segment.parameters(), segment.slots()
    totals = segment.packed(0)
    size = totals.size
    length = max(1, size if is_whole else CHUNK_BYTES // totals.itemsize)
    return [
        _Piece(
            [copy[part] for copy in parameters],
            {name: slot[part] for name, slot in slots.items()},
            totals[part],
            decay,
            number,
            part,
            0,
        )
        for part in (slice(start, min(start + length, size)) for start in range(0, size, length))
    ]
