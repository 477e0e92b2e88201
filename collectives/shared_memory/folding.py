"""Reductions between processes that read one another's memory.

What lies in shared memory is never copied: each process reduces its part of everybody's arrays, in place, so every byte is
read once. What does not is copied by way of it in pieces that stay in the cache. Small arrays travel in the page where the
processes meet, and every process reduces all of them: that costs one meeting.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from collectives.errors import common
from collectives.reduce_op import ReduceOp
from collectives.reduction import CHUNK_BYTES, Fold, fold
from collectives.shared_memory.lending import Lending
from collectives.shared_memory.meeting import BODY_BYTES, NUMBER, Meeting
from collectives.shared_memory.segments import NOWHERE, OwnSegments
from collectives.shared_memory.staging import Staging

_MANY = 256
"""Kinds of calls, and places of arrays, that are remembered."""
_WORDS = BODY_BYTES // 8
_PLACE = 4
"""Words of a `Location`."""

Rows = Sequence[Sequence[Array]]


@final
class Folding:
    """One process's side.

    Args:
        process: which one.
        counts: how many members each process hosts.
        meeting: where they meet.
        lending: how memory is reached.
        own: this process's.
    """

    def __init__(
        self, process: int, counts: Sequence[int], meeting: Meeting, lending: Lending, own: OwnSegments
    ) -> None:
        self._process = process
        self._counts = counts
        self._most = max(counts)
        self._meeting = meeting
        self._lending = lending
        self._own = own
        self._kinds: dict[Call, _Small | _Large] = {}
        self._last_call: Call | None = None
        self._last_kind: _Small | _Large | None = None
        self._num_placings = 0

    def fold(self, call: Call, op: ReduceOp, sources: Rows, targets: Rows) -> None:
        """As `Link.fold`."""
        # Told apart by identity first: the hash of a call takes as long as a small reduction.
        kind = self._last_kind if call is self._last_call else self._kinds.get(call)
        if kind is None:
            kind = self._learn(call, sources[0])
        self._last_call, self._last_kind = call, kind
        if type(kind) is _Small:
            self._fold_small(kind, call, op, sources, targets)
        else:
            assert type(kind) is _Large
            self._fold_large(kind, call, op, sources, targets)

    def close(self) -> None:
        """Forget everything."""
        self._kinds.clear()
        self._last_call = self._last_kind = None

    def _learn(self, call: Call, columns: Sequence[Array]) -> _Small | _Large:
        if len(self._kinds) >= _MANY:
            self._kinds.clear()
        digest = self._meeting.digest_of(call)
        kind: _Small | _Large
        if sum(column.nbytes + 8 for column in columns) * self._most <= BODY_BYTES:
            kind = self._learn_small(digest, columns)
        else:
            kind = _Large(digest)
        self._kinds[call] = kind
        return kind

    # ------------------------------------------------------------ small arrays

    def _learn_small(self, digest: int, columns: Sequence[Array]) -> _Small:
        offsets = []
        stride = 0
        for column in columns:
            offsets.append(stride)
            stride += -(-column.nbytes // 8) * 8
        rows = [
            [
                [
                    body[number * stride + offset :][: column.nbytes].view(column.dtype)
                    for column, offset in zip(columns, offsets, strict=True)
                ]
                for body, count in zip(bodies, self._counts, strict=True)
                for number in range(count)
            ]
            for bodies in self._meeting.bodies
        ]
        first = sum(self._counts[: self._process])
        own = slice(first, first + self._counts[self._process])
        return _Small(
            digest,
            [[view for row in turn[own] for view in row] for turn in rows],
            [[list(column) for column in zip(*turn, strict=True)] for turn in rows],
        )

    def _fold_small(self, kind: _Small, call: Call, op: ReduceOp, sources: Rows, targets: Rows) -> None:
        turn = self._meeting.begin(call)
        mine = kind.mine[turn]
        if len(mine) == 1:
            np.copyto(mine[0], sources[0][0])
        else:
            brought = sources[0] if len(sources) == 1 else [column for row in sources for column in row]
            for view, array in zip(mine, brought, strict=True):
                np.copyto(view, array)
        self._meeting.come(turn, kind.digest)
        if targets:
            columns = kind.rows[turn]
            try:
                if len(columns) == 1 and len(targets) == 1:
                    fold(op, columns[0], targets[0])
                    return
                for number, rows in enumerate(columns):
                    fold(op, rows, [target[number] for target in targets])
            except OverflowError as error:
                # All have the same numbers, and targets of one dtype: what is too large here is so in all processes.
                raise common(error) from None

    # ------------------------------------------------------------ large arrays

    def _fold_large(self, kind: _Large, call: Call, op: ReduceOp, sources: Rows, targets: Rows) -> None:
        """In place where everything lies in shared memory, else by way of it, piece by piece."""
        meeting = self._meeting
        turn = meeting.begin(call)
        addresses = tuple(
            [array.__array_interface__["data"][0] for row in (*sources, *targets) for array in row]
        )
        placing = kind.placings.get(addresses)
        if placing is None or placing.version != self._own.version:
            placing = self._place(kind, addresses, len(targets))
        staging = None
        body = meeting.my_bodies[turn]
        if placing.number:
            body[: placing.words.nbytes] = placing.words
        else:
            staging = Staging(self._process, self._counts, op, sources, targets)
            self._bring_box(staging, turn)
        meeting.my_heads[turn][NUMBER] = placing.number
        meeting.come(turn, kind.digest)
        numbers = tuple([head[NUMBER] for head in meeting.heads[turn]])
        if 0 not in numbers:
            plan = kind.plans.get(numbers)
            if plan is not None and plan.is_sure:
                plan.run(op)
                meeting.end()
            elif plan is not None:
                meeting.working(partial(plan.run, op))
            else:
                # Memory of others is opened in it: that of one who has died can't be, and then nobody may go on.
                meeting.working(lambda: self._plan(kind, numbers, op, sources[0], targets, turn).run(op))
            return
        # Somebody copies, so all do; where the pieces are is told in a phase of its own, as some have told something else.
        if staging is None:
            staging = Staging(self._process, self._counts, op, sources, targets)
        turn = meeting.next_turn()
        self._bring_box(staging, turn)
        meeting.meet()
        boxes = meeting.working(lambda: self._boxes(turn))
        meeting.working(lambda: staging.run(meeting, boxes))

    def _boxes(self, turn: int) -> list[Array]:
        """Every process's memory for pieces, as it was told."""
        boxes = []
        for process, told in enumerate(self._meeting.bodies[turn]):
            descriptor, serial, num_bytes, _ = told[: 8 * _PLACE].view(np.int64).tolist()
            boxes.append(self._lending.memory_of(process, descriptor, serial, num_bytes))
        return boxes

    def _place(self, kind: _Large, addresses: tuple[int, ...], num_targets: int) -> _Placing:
        """Where these arrays lie, in the form that the others are told; under number 0 if not all are in shared memory."""
        located = [self._own.locate(address) for address in addresses]
        is_shared = NOWHERE not in located and 1 + _PLACE * len(located) <= _WORDS
        number = 0
        if is_shared:
            # Never used again, so that the others may remember what it stands for.
            self._num_placings += 1
            number = self._num_placings
        words = np.array([num_targets, *(word for place in located for word in place)], np.int64)
        placing = _Placing(number, words.view(np.uint8), self._own.version)
        if len(kind.placings) >= _MANY:
            kind.placings.clear()
        kind.placings[addresses] = placing
        return placing

    def _bring_box(self, staging: Staging, turn: int) -> None:
        place = self._lending.locate(self._lending.box(staging.num_bytes))
        self._meeting.my_bodies[turn][: 8 * _PLACE].view(np.int64)[:] = place

    def _plan(
        self,
        kind: _Large,
        numbers: tuple[int, ...],
        op: ReduceOp,
        columns: Sequence[Array],
        targets: Rows,
        turn: int,
    ) -> _Plan:
        """This process's part of a reduction in shared memory, in pieces that fit the cache."""
        dtypes = [column.dtype for column in columns]
        results = [op.result_dtype(dtype) for dtype in dtypes]
        if targets:
            results = [array.dtype for array in targets[0]]
        sources_of: list[list[Array]] = [[] for _ in columns]
        targets_of: list[list[Array]] = [[] for _ in columns]
        for process, (body, count) in enumerate(zip(self._meeting.bodies[turn], self._counts, strict=True)):
            words = body.view(np.int64)
            num_rows = count + int(words[0])
            places = words[1 : 1 + _PLACE * len(columns) * num_rows].reshape(num_rows, len(columns), _PLACE)
            for row, along in enumerate(places.tolist()):
                for column, (descriptor, serial, num_bytes, offset) in enumerate(along):
                    memory = self._lending.memory_of(process, descriptor, serial, num_bytes)
                    dtype = dtypes[column] if row < count else results[column]
                    view = memory[offset : offset + columns[column].size * dtype.itemsize].view(dtype)
                    (sources_of if row < count else targets_of)[column].append(view)
        pieces = []
        lengths = [column.size for column in columns]
        for column, (start, stop) in enumerate(_shares(lengths, dtypes, self._process, len(self._counts))):
            if not targets_of[column]:
                continue
            step = max(1, CHUNK_BYTES // dtypes[column].itemsize)
            for at in range(start, stop, step):
                part = slice(at, min(at + step, stop))
                pieces.append(
                    _Piece(op, [s[part] for s in sources_of[column]], [t[part] for t in targets_of[column]])
                )
        if len(kind.plans) >= _MANY:
            kind.plans.clear()
        plan = kind.plans[numbers] = _Plan(pieces)
        return plan


@final
class _Small:
    """Views into the pages for one kind of call.

    Attributes:
        digest: of the call.
        mine: by slot: this process's columns, member by member.
        rows: by slot, by column: every member's.
    """

    __slots__ = ("digest", "mine", "rows")

    def __init__(self, digest: int, mine: list[list[Array]], rows: list[list[list[Array]]]) -> None:
        self.digest = digest
        self.mine = mine
        self.rows = rows


@final
class _Large:
    """What is remembered of one kind of call.

    Attributes:
        digest: of the call.
        placings: by the addresses of this process's arrays.
        plans: by the numbers of all processes' placings.
    """

    __slots__ = ("digest", "placings", "plans")

    def __init__(self, digest: int) -> None:
        self.digest = digest
        self.placings: dict[tuple[int, ...], _Placing] = {}
        self.plans: dict[tuple[int, ...], _Plan] = {}


@final
class _Placing:
    """Where a process's arrays lie.

    Attributes:
        number: tells it apart from all others of this process; 0 where not all are in shared memory.
        words: as the others are told it, as bytes.
        version: of this process's segments when it was found out.
    """

    __slots__ = ("number", "version", "words")

    def __init__(self, number: int, words: Array, version: int) -> None:
        self.number = number
        self.words = words
        self.version = version


@final
class _Piece:
    """A part of a reduction that one process does at a time."""

    __slots__ = ("_copies", "_first", "_others", "_second", "_sources", "_targets", "_total", "is_direct")

    def __init__(self, op: ReduceOp, sources: list[Array], targets: list[Array]) -> None:
        dtype = sources[0].dtype
        target = targets[0]
        self._sources, self._targets = sources, targets
        self.is_direct = (
            len(sources) > 1
            and op is not ReduceOp.MEAN
            and target.dtype == dtype == op.accumulator_dtype(dtype)
            and all(other.dtype == dtype for other in targets)
            and not any(np.may_share_memory(target, source) for source in sources[2:])
        )
        self._first, self._second, self._others = sources[0], sources[-1], sources[2:]
        if len(sources) > 1:
            self._second = sources[1]
        self._total, self._copies = target, targets[1:]

    def run(self, op: ReduceOp) -> None:
        """Do it.

        Raises:
            OverflowError: a target is too narrow.
        """
        if not self.is_direct:
            Fold(op, self._sources, self._targets).run()
            return
        total = self._total
        op.ufunc(self._first, self._second, out=total)
        for source in self._others:
            op.ufunc(total, source, out=total)
        for target in self._copies:
            np.copyto(target, total)


@final
class _Plan:
    """One process's part of a reduction.

    Attributes:
        pieces: what it is made of.
        is_sure: whether nothing in it can fail.
    """

    __slots__ = ("is_sure", "pieces")

    def __init__(self, pieces: list[_Piece]) -> None:
        self.pieces = pieces
        self.is_sure = all(piece.is_direct for piece in pieces)

    def run(self, op: ReduceOp) -> None:
        """Do all of it.

        Raises:
            OverflowError: a target is too narrow.
        """
        for piece in self.pieces:
            piece.run(op)


def _shares(
    lengths: Sequence[int], dtypes: Sequence[np.dtype[Any]], process: int, num_processes: int
) -> list[tuple[int, int]]:
    """The range of each column that one process works on: together an equal share of the bytes, cut at cache lines."""
    sizes = [length * dtype.itemsize for length, dtype in zip(lengths, dtypes, strict=True)]
    total = sum(sizes)
    begin, end = total * process // num_processes, total * (process + 1) // num_processes
    shares = []
    at = 0
    for length, dtype, size in zip(lengths, dtypes, sizes, strict=True):
        shares.append((_element(begin - at, length, dtype), _element(end - at, length, dtype)))
        at += size
    return shares


def _element(byte: int, length: int, dtype: np.dtype[Any]) -> int:
    """The first element that starts at or after a byte and at a cache line, or the end."""
    if byte <= 0:
        return 0
    unit = max(1, 64 // dtype.itemsize)
    element = -(-byte // dtype.itemsize)
    return min(length, -(-element // unit) * unit)
