"""The link between the processes of one host: they read one another's memory.

What lies in shared memory is never copied: each process reduces its part of everybody's arrays, in place, so every byte is
read once. What does not is copied by way of it in pieces that stay in the cache. Small arrays travel in the page where the
processes meet, so that they cost one meeting.

A collective comes to one or more *phases* (see `Flags`). To the first one each process brings a digest of its call; all see
all digests, so either all go on or all raise.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, final

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from collectives.errors import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    common,
)
from collectives.link import Link
from collectives.reduce_op import ReduceOp
from collectives.reduction import CHUNK_BYTES, Fold, fold
from collectives.shared_memory.flags import DATA, Flags, page_bytes
from collectives.shared_memory.mailbox import Mailbox
from collectives.shared_memory.segments import NOWHERE, PeerSegments, own_segments
from collectives.watch import Watch

T = TypeVar("T")

INLINE_BYTES = 32 * 1024
"""What a process's members can bring in the page itself; beyond, a second meeting costs less than the copies."""
PIECE_BYTES = 1 << 20
"""Of each array that is copied by way of shared memory."""

_HEAD = 64
"""Bytes of a phase's head: the digest, and a number that says more about what is brought."""
_SLOT = _HEAD + INLINE_BYTES
_DIGEST, _NUMBER = 0, 1

_END, _FAILED = 1, 2
"""Digests of the end of a collective: all is well, or this process has failed."""
_TEXT_BYTES = 8000
"""Of an error's text that travels."""

_MANY = 256
"""Entries of each cache."""
_KEPT_BYTES = 64 << 20
"""An outbox up to this size is kept for the next time."""
_ENTRY = 5
"""Words that say where one array is: its bytes, then its `Location`; a descriptor of `_INLINE` means in the page."""
_INLINE = -2

Exchange = Callable[[Any], list[Any]]
"""Gives every process's value, by process; used while the link is made."""


@final
class SharedMemoryLink(Link):
    """One process's end. All of them are made at the same time.

    Args:
        process: which end.
        counts: how many members each process hosts.
        exchange: hands round what the processes need to find one another's memory.
        timeout: seconds that a process waits for the others.
        watch: what is known of the other processes.
        numbers: by process, what the watch calls it; None where it counts alike.
        name: what the link is called in reports.

    Raises:
        RuntimeError: no such memory on this system, or processes that can't share it.
        OSError: no memory left.
    """

    def __init__(
        self,
        process: int,
        counts: Sequence[int],
        exchange: Exchange,
        *,
        timeout: float,
        watch: Watch | None = None,
        numbers: Sequence[int] | None = None,
        name: str = "link",
    ) -> None:
        super().__init__(process, counts)
        self._timeout = timeout
        self._watch = watch
        self._numbers = tuple(range(len(counts)) if numbers is None else numbers)
        self._name = name
        self._own = own_segments()
        self._page, location = self._own.make(page_bytes(_SLOT))
        told = exchange([os.getpid(), *location])
        self._peers = [PeerSegments(pid, f"process {p} (pid {pid})") for p, (pid, *_) in enumerate(told)]
        pages = [
            self._page if p == process else self._peers[p].open(descriptor, num_bytes)
            for p, (_, descriptor, _, num_bytes, _) in enumerate(told)
        ]
        self._flags = Flags(process, pages, self._look)
        # Slots of a page are used in turn: what is brought to a phase stays until all have come to the next but one.
        slots = [[page[DATA + turn * _SLOT :][:_SLOT] for page in pages] for turn in (0, 1)]
        self._slots = slots
        self._heads = [[slot[:_HEAD].view(np.int64).data for slot in turn] for turn in slots]
        self._bodies = [[slot[_HEAD:] for slot in turn] for turn in slots]
        self._my_heads = [turn[process] for turn in self._heads]
        self._my_bodies = [turn[process] for turn in self._bodies]
        self._other_heads = [[h for p, h in enumerate(turn) if p != process] for turn in self._heads]
        self._outbox: Array = np.empty(0, np.uint8)
        self._most = max(self.counts)
        self._digests: dict[Call, int] = {}
        self._small: dict[Call, _Small] = {}
        self._plans: dict[Any, list[_Piece]] = {}
        self._broken: CollectiveError | None = None
        self._sequence = 0
        self._call: Call | None = None
        self._is_waiting = False
        self._recent: deque[Call] = deque(maxlen=8)
        self._mailbox = Mailbox(self, exchange)
        if watch is not None:
            watch.describe = self.describe
        # Who ends right away takes its memory with it: not before everybody has opened it.
        exchange(None)

    def describe(self) -> Mapping[str, Any]:
        """What this process is doing, for reports: the number and the words of its collective, and whether it waits."""
        call = self._call
        return {
            "seq": self._sequence,
            "call": None if call is None else str(call),
            "waiting": self._is_waiting,
            "recent": [str(one) for one in list(self._recent)],
        }

    # ------------------------------------------------------------- collectives

    def barrier(self, call: Call) -> None:
        self._begin(call)
        self._come(call)

    def gather_objects(self, call: Call, values: Sequence[object]) -> list[object]:
        def use(blobs: list[Array]) -> list[object]:
            return [value for p in self.starts[:-1] for value in pickle.loads(blobs[p].data)]

        blob = np.frombuffer(pickle.dumps(list(values), pickle.HIGHEST_PROTOCOL), np.uint8)
        # One for all members of a process; the others bring nothing.
        nothing = blob[:0]
        return self.all_gather(call, [blob, *(nothing for _ in values[1:])], use)

    def fold(
        self, call: Call, op: ReduceOp, sources: Sequence[Sequence[Array]], targets: Sequence[Sequence[Array]]
    ) -> None:
        small = self._small.get(call)
        if small is not None:
            self._fold_small(small, call, op, sources, targets)
        elif sum(source.nbytes + 8 for source in sources[0]) * self._most <= INLINE_BYTES:
            if len(self._small) >= _MANY:
                self._small.clear()
            small = self._small[call] = self._make_small(call, sources[0])
            self._fold_small(small, call, op, sources, targets)
        else:
            self._fold_large(call, op, sources, targets)

    def reduce_scatter(
        self, call: Call, op: ReduceOp, sources: Sequence[Array], targets: Sequence[Array]
    ) -> None:
        dtype, shape = sources[0].dtype, sources[0].shape

        def use(rows: list[Array]) -> None:
            blocks = [row.view(dtype).reshape(shape) for row in rows]
            for number, target in enumerate(targets, start=self.first):
                Fold(op, [block[number] for block in blocks], [target]).run()

        self.all_gather(call, [_as_bytes(source) for source in sources], use)

    def broadcast(self, call: Call, root: int, source: Array | None, targets: Sequence[Array]) -> None:
        def use(arrays: list[Array]) -> None:
            for target in targets:
                if target is not source:
                    np.copyto(target, arrays[root])

        nothing = np.empty(0, np.uint8)
        brought = [nothing] * self.counts[self.process]
        if source is not None:
            brought[root - self.first] = source
        self.all_gather(call, brought, use)

    def all_to_all(self, call: Call, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        shape = sources[0].shape

        def use(arrays: list[Array]) -> None:
            for number, target in enumerate(targets, start=self.first):
                for peer, array in enumerate(arrays):
                    np.copyto(target[peer], array.reshape(shape)[number])

        self.all_gather(call, [source.reshape(-1) for source in sources], use)

    def all_gather(self, call: Call, arrays: Sequence[Array], use: Callable[[list[Array]], T]) -> T:
        self._begin(call)
        turn, head = self._turn()
        is_inline = self._lend(arrays, turn)
        head[_NUMBER] = is_inline
        self._come(call)
        lent = self._lent(turn)
        if all(other[_NUMBER] for other in self._heads[turn]):
            # Nobody can write over what stands in the pages before all have come to the phase after the next.
            return use(lent)
        return self._working(lambda: use(lent))

    def send(self, member: int, array: Array, peer: int, tag: int) -> None:
        self._require_working()
        self._mailbox.send(member, array, peer, tag)

    def receive(self, member: int, peer: int, tag: int) -> Array:
        self._require_working()
        return self._mailbox.receive(member, peer, tag)

    def memory(self, num_bytes: int) -> Array:
        return self._own.make(num_bytes)[0]

    def close(self) -> None:
        if self._broken is None:
            self._broken = CollectiveError("shared memory: called after close(); make a new strategy")
        self._small.clear()
        self._plans.clear()
        self._mailbox.close()
        for peer in self._peers:
            peer.close()

    def fail(self, error: CollectiveError) -> None:
        if self._broken is None:
            self._broken = error

    # ---------------------------------------------------------------- meetings

    def _begin(self, call: Call) -> None:
        if self._broken is not None:
            self._require_working()
        self._sequence += 1
        self._call = call
        self._recent.append(call)

    def _require_working(self) -> None:
        if self._broken is not None:
            raise _copied(self._broken)

    def _turn(self) -> tuple[int, memoryview]:
        """Which of the two slots the next phase uses, and this process's head in it."""
        turn = (self._flags.phase + 1) & 1
        return turn, self._my_heads[turn]

    def _come(self, call: Call) -> None:
        """The first phase of a collective: all have brought theirs, and all call the same."""
        digest = self._digests.get(call)
        if digest is None:
            digest = self._digest(call)
        turn = (self._flags.phase + 1) & 1
        self._my_heads[turn][_DIGEST] = digest
        self._meet()
        for other in self._other_heads[turn]:
            if other[_DIGEST] != digest:
                self._raise_mismatch(call)

    def _meet(self) -> None:
        self._is_waiting = True
        self._flags.meet()
        self._is_waiting = False

    def _working(self, work: Callable[[], T]) -> T:
        """Do this process's part of the work, and wait until all have done theirs, or raise what any has raised."""
        error: Exception | None = None
        try:
            result = work()
        except Exception as failure:  # noqa: BLE001  # raised below, when the others know
            error = failure
        turn, head = self._turn()
        head[_DIGEST] = _END if error is None else _FAILED
        self._meet()
        if any(other[_DIGEST] == _FAILED for other in self._heads[turn]):
            self._raise_failure(error)
        return result

    def _raise_failure(self, own: Exception | None) -> NoReturn:
        kind = "OverflowError" if isinstance(own, OverflowError) else ""
        texts = self._exchange_text("" if own is None else f"{kind}\n{str(own) or type(own).__name__}")
        if own is not None:
            raise common(own)
        process = next(p for p, text in enumerate(texts) if text)
        kind, _, text = texts[process].partition("\n")
        if kind:
            raise common(OverflowError(text))
        raise common(CollectiveAbortedError(f"{self._call}: process {process} failed in it: {text}"))

    def _raise_mismatch(self, call: Call) -> NoReturn:
        calls = self._exchange_text(str(call))
        listed = "; ".join(f"process {process} calls {text}" for process, text in enumerate(calls))
        error = CollectiveMismatchError(
            f"seq {self._sequence}: the calls do not fit together: {listed}; every process must make the same calls in the "
            "same order, with the same shapes and dtypes — look for a branch that only some take",
            calls,
        )
        raise common(error)

    def _exchange_text(self, text: str) -> list[str]:
        """Every process's text. All processes must have seen the reason for it."""
        turn, head = self._turn()
        data = text.encode()[:_TEXT_BYTES]
        head[_DIGEST], head[_NUMBER] = 0, len(data)
        self._my_bodies[turn][: len(data)] = np.frombuffer(data, np.uint8)
        self._meet()
        return [
            body[: head[_NUMBER]].tobytes().decode(errors="replace")
            for head, body in zip(self._heads[turn], self._bodies[turn], strict=True)
        ]

    def _digest(self, call: Call) -> int:
        if len(self._digests) >= 16 * _MANY:
            self._digests.clear()
        told = hashlib.blake2b(str(call).encode(), digest_size=8).digest()
        # Small numbers have a meaning of their own.
        digest = self._digests[call] = int.from_bytes(told, "little", signed=True) | 1 << 20
        return digest

    def _look(self, phase: int, waited: float) -> None:
        """While waiting: raise if somebody who has not come never will, or is late."""
        if self._broken is not None:
            self._require_working()
        watch = self._watch
        if watch is not None and (watch.failure is not None or watch.left):
            self._look_who_is_gone(watch, phase)
        if waited > self._timeout:
            where = str(self._call)
            if watch is not None:
                self._break(watch.explain("timeout", f"{self._name} seq {self._sequence}", waited).error())
            late = [p for p in range(self.num_processes) if self._flags.count(p) < phase]
            self._break(
                CollectiveTimeoutError(
                    f"{where}: process {self.process} of {self.num_processes} waited {self._timeout:g} s for the others at seq "
                    f"{self._sequence}; missing: {', '.join(f'process {p}' for p in late)}; did every process call it? — "
                    "raise timeout_seconds if one is only slow",
                    late,
                )
            )

    def _look_who_is_gone(self, watch: Watch, phase: int) -> None:
        for process, number in enumerate(self._numbers):
            # Whoever came before it went counts: all decide alike, so a collective fails for all or for none.
            if self._flags.count(process) >= phase:
                continue
            if number in watch.gone:
                self._break(watch.gone[number])
            if number in watch.left:
                self._break(watch.ended(number))
        failure = watch.failure
        if isinstance(failure, CollectiveError) and getattr(failure, "process", None) not in watch.gone:
            self._break(failure)  # the hub is gone, or somebody has waited too long

    def _look_for(self, process: int, waited: float, where: str) -> None:
        """The same for a message, which only one process can send."""
        self._require_working()
        watch = self._watch
        if watch is not None:
            number = self._numbers[process]
            if number in watch.gone:
                raise _copied(watch.gone[number])
            if number in watch.left:
                raise watch.ended(number)
        if waited > self._timeout:
            raise CollectiveTimeoutError(
                f"{where}: process {self.process} waited {self._timeout:g} s for process {process}; did it make the other call? — "
                "raise timeout_seconds if it is only slow",
                [process],
            )

    def _break(self, error: CollectiveError) -> NoReturn:
        self._broken = error
        raise _copied(error)

    # ------------------------------------------------------------ small arrays

    def _make_small(self, call: Call, columns: Sequence[Array]) -> _Small:
        offsets = []
        at = 0
        for column in columns:
            offsets.append(at)
            at += -(-column.nbytes // 8) * 8
        stride = at
        rows: list[list[list[Array]]] = []
        for bodies in self._bodies:
            by_member = [
                [
                    body[number * stride + offset :][: column.nbytes].view(column.dtype)
                    for column, offset in zip(columns, offsets, strict=True)
                ]
                for body, count in zip(bodies, self.counts, strict=True)
                for number in range(count)
            ]
            rows.append(by_member)
        digest = self._digests.get(call) or self._digest(call)
        own = slice(self.first, self.first + self.counts[self.process])
        return _Small(
            digest,
            [[view for row in turn[own] for view in row] for turn in rows],
            [[list(column) for column in zip(*turn, strict=True)] for turn in rows],
        )

    def _fold_small(
        self,
        small: _Small,
        call: Call,
        op: ReduceOp,
        sources: Sequence[Sequence[Array]],
        targets: Sequence[Sequence[Array]],
    ) -> None:
        if self._broken is not None:
            self._require_working()
        self._sequence += 1
        self._call = call
        self._recent.append(call)
        flags = self._flags
        turn = (flags.phase + 1) & 1
        if len(sources) == 1:
            (brought,) = sources
        else:
            brought = [column for row in sources for column in row]
        for view, array in zip(small.mine[turn], brought, strict=True):
            np.copyto(view, array)
        digest = small.digest
        self._my_heads[turn][_DIGEST] = digest
        self._is_waiting = True
        flags.meet()
        self._is_waiting = False
        for other in self._other_heads[turn]:
            if other[_DIGEST] != digest:
                self._raise_mismatch(call)
        if targets:
            columns = small.rows[turn]
            if len(columns) == 1 and len(targets) == 1:
                fold(op, columns[0], targets[0])
                return
            for number, rows in enumerate(columns):
                fold(op, rows, [target[number] for target in targets])

    # ------------------------------------------------------------ large arrays

    def _fold_large(
        self, call: Call, op: ReduceOp, sources: Sequence[Sequence[Array]], targets: Sequence[Sequence[Array]]
    ) -> None:
        """In place where everything lies in shared memory, else by way of it, piece by piece."""
        self._begin(call)
        turn, head = self._turn()
        arrays = [array for row in (*sources, *targets) for array in row]
        staging = _Staging(self, op, sources, targets)
        words = self._my_bodies[turn].view(np.int64)
        is_shared = 4 * len(arrays) <= len(words)
        if is_shared:
            located = [self._own.locate(array.__array_interface__["data"][0]) for array in arrays]
            is_shared = NOWHERE not in located
        if is_shared:
            words[: 4 * len(arrays)] = np.array(located, np.int64).reshape(-1)
            head[_NUMBER] = len(targets)
        else:
            words[:4] = staging.open()
            head[_NUMBER] = -1
        self._come(call)
        told = [head[_NUMBER] for head in self._heads[turn]]
        if -1 not in told:
            places = [
                body.view(np.int64)[: 4 * len(sources[0]) * (count + number)]
                for body, count, number in zip(self._bodies[turn], self.counts, told, strict=True)
            ]
            plan = self._plan(call, op, sources[0], targets, told, places)
            self._working(lambda: _run(plan, op))
            return
        if is_shared:  # the others copy, so this process does too
            turn, head = self._turn()
            self._my_bodies[turn].view(np.int64)[:4] = staging.open()
        else:
            entry = words[:4].copy()
            turn, head = self._turn()
            self._my_bodies[turn].view(np.int64)[:4] = entry
        self._meet()
        boxes = []
        for process, body in enumerate(self._bodies[turn]):
            descriptor, serial, num_bytes, _ = (int(word) for word in body.view(np.int64)[:4])
            boxes.append(self._bytes_of(process, descriptor, serial, num_bytes))
        self._working(lambda: staging.run(boxes))

    def _plan(
        self,
        call: Call,
        op: ReduceOp,
        columns: Sequence[Array],
        targets: Sequence[Sequence[Array]],
        num_targets: Sequence[int],
        places: Sequence[Array],
    ) -> list[_Piece]:
        """This process's part of a reduction in shared memory, in pieces that fit the cache."""
        key = (call, *(place.tobytes() for place in places))
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        lengths = [column.size for column in columns]
        dtype = columns[0].dtype
        if any(column.dtype != dtype for column in columns):
            dtypes = [column.dtype for column in columns]
        else:
            dtypes = [dtype] * len(columns)
        if targets:
            results = [array.dtype for array in targets[0]]
        else:
            results = [op.result_dtype(one) for one in dtypes]
        sources_of: list[list[Array]] = [[] for _ in columns]
        targets_of: list[list[Array]] = [[] for _ in columns]
        for process, (place, count) in enumerate(zip(places, self.counts, strict=True)):
            rows = place.reshape(-1, len(columns), 4)
            for row in range(count + num_targets[process]):
                for column, length in enumerate(lengths):
                    descriptor, serial, num_bytes, offset = (int(word) for word in rows[row, column])
                    memory = self._bytes_of(process, descriptor, serial, num_bytes)
                    kind = dtypes[column] if row < count else results[column]
                    view = memory[offset : offset + length * kind.itemsize].view(kind)
                    (sources_of if row < count else targets_of)[column].append(view)
        plan = []
        for column, (start, stop) in enumerate(_shares(lengths, dtypes, self.process, self.num_processes)):
            if not targets_of[column]:
                continue
            step = max(1, CHUNK_BYTES // dtypes[column].itemsize)
            for at in range(start, stop, step):
                part = slice(at, min(at + step, stop))
                plan.append(
                    _piece(op, [s[part] for s in sources_of[column]], [t[part] for t in targets_of[column]])
                )
        if len(self._plans) >= _MANY:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _bytes_of(self, process: int, descriptor: int, serial: int, num_bytes: int) -> Array:
        return self._peers[process].bytes_at(descriptor, serial, num_bytes)

    # ----------------------------------------------------------- arrays to read

    def _lend(self, arrays: Sequence[Array], turn: int) -> bool:
        """Bring bytes to the next phase; whether all of them stand in the page itself."""
        body = self._my_bodies[turn]
        at = start = -(-8 * _ENTRY * len(arrays) // 64) * 64
        entries = np.zeros((len(arrays), _ENTRY), np.int64)
        total = sum(-(-array.nbytes // 64) * 64 for array in arrays)
        is_inline = start + total <= INLINE_BYTES
        away: list[tuple[int, Array]] = []
        for number, array in enumerate(arrays):
            if is_inline:
                body[at : at + array.nbytes] = array
                entries[number] = (array.nbytes, _INLINE, 0, 0, at)
                at += -(-array.nbytes // 64) * 64
                continue
            location = self._own.locate(array.__array_interface__["data"][0]) if array.nbytes else NOWHERE
            entries[number] = (array.nbytes, *location)
            if location == NOWHERE:
                away.append((number, array))
        if away:
            box = self._box(sum(-(-array.nbytes // 64) * 64 for _, array in away))
            descriptor, serial, num_bytes, _ = self._own.locate(box.__array_interface__["data"][0])
            at = 0
            for number, array in away:
                box[at : at + array.nbytes] = array
                entries[number] = (array.nbytes, descriptor, serial, num_bytes, at)
                at += -(-array.nbytes // 64) * 64
        body[: entries.nbytes].view(np.int64)[:] = entries.reshape(-1)
        return is_inline

    def _lent(self, turn: int) -> list[Array]:
        """All members' bytes, as they were brought."""
        lent = []
        for process, (body, count) in enumerate(zip(self._bodies[turn], self.counts, strict=True)):
            entries = body[: 8 * _ENTRY * count].view(np.int64).reshape(count, _ENTRY).tolist()
            for length, descriptor, serial, num_bytes, offset in entries:
                if descriptor == _INLINE:
                    memory = body
                else:
                    memory = self._bytes_of(process, descriptor, serial, num_bytes)
                lent.append(memory[offset : offset + length])
        return lent

    def _box(self, num_bytes: int) -> Array:
        """Shared memory of at least so many bytes, to bring things in; all have finished with what it held."""
        if len(self._outbox) < num_bytes or len(self._outbox) > max(num_bytes, _KEPT_BYTES):
            self._outbox = np.empty(0, np.uint8)  # given back before more is asked for
            size = (
                max(1 << 16, 1 << math.ceil(math.log2(num_bytes))) if num_bytes < _KEPT_BYTES else num_bytes
            )
            self._outbox = self.memory(size)
        return self._outbox


@final
class _Small:
    """Views into the pages for one kind of call.

    Attributes:
        digest: of the call.
        mine: by turn: this process's columns, member by member.
        rows: by turn, by column: every member's.
    """

    __slots__ = ("digest", "mine", "rows")

    def __init__(self, digest: int, mine: list[list[Array]], rows: list[list[list[Array]]]) -> None:
        self.digest = digest
        self.mine = mine
        self.rows = rows


@final
class _Staging:
    """A reduction of arrays that don't lie in shared memory: each piece is copied in, reduced, and copied out.

    Args:
        link: whose.
        op: how to reduce.
        sources: as in `Link.fold`.
        targets: likewise.
    """

    def __init__(
        self,
        link: SharedMemoryLink,
        op: ReduceOp,
        sources: Sequence[Sequence[Array]],
        targets: Sequence[Sequence[Array]],
    ) -> None:
        self._link = link
        self._op = op
        self._sources = sources
        self._targets = targets
        self._results = [op.result_dtype(column.dtype) for column in sources[0]]
        widths = [max(c.itemsize, r.itemsize) for c, r in zip(sources[0], self._results, strict=True)]
        self._lengths = [max(1, PIECE_BYTES // width) for width in widths]

    def open(self) -> Sequence[int]:
        """Where this process's memory for pieces is: a row for each of its members, then one for its part of the results."""
        box = self._link._box((len(self._sources) + 1) * PIECE_BYTES)
        return self._link._own.locate(box.__array_interface__["data"][0])

    def run(self, boxes: Sequence[Array]) -> None:
        """Reduce everything.

        Args:
            boxes: by process, what `open` told.
        """
        link = self._link
        own = boxes[link.process]
        for column, first in enumerate(self._sources[0]):
            dtype, result, length = first.dtype, self._results[column], self._lengths[column]
            for at in range(0, first.size, length):
                stop = min(at + length, first.size)
                num = stop - at
                for number, row in enumerate(self._sources):
                    np.copyto(_part(own, number, dtype, 0, num), row[column][at:stop])
                link._meet()
                start, end = (
                    num * link.process // link.num_processes,
                    num * (link.process + 1) // link.num_processes,
                )
                rows = [
                    _part(box, number, dtype, start, end)
                    for box, count in zip(boxes, link.counts, strict=True)
                    for number in range(count)
                ]
                fold(self._op, rows, [_part(own, len(self._sources), result, start, end)])
                link._meet()
                for process, (box, count) in enumerate(zip(boxes, link.counts, strict=True)):
                    start, end = (
                        num * process // link.num_processes,
                        num * (process + 1) // link.num_processes,
                    )
                    total = _part(box, count, result, start, end)
                    for target in self._targets:
                        _put(target[column][at + start : at + end], total)


@final
class _Piece:
    """A part of a reduction that one process does at a time."""

    __slots__ = ("is_direct", "sources", "targets")

    def __init__(self, sources: list[Array], targets: list[Array], is_direct: bool) -> None:
        self.sources = sources
        self.targets = targets
        self.is_direct = is_direct


def _piece(op: ReduceOp, sources: list[Array], targets: list[Array]) -> _Piece:
    dtype = sources[0].dtype
    target = targets[0]
    is_direct = (
        len(sources) > 1
        and op is not ReduceOp.MEAN
        and target.dtype == dtype == op.accumulator_dtype(dtype)
        and all(other.dtype == dtype for other in targets)
        and not any(np.may_share_memory(target, source) for source in sources[2:])
    )
    return _Piece(sources, targets, is_direct)


def _run(plan: Sequence[_Piece], op: ReduceOp) -> None:
    ufunc = op.ufunc
    for piece in plan:
        if not piece.is_direct:
            Fold(op, piece.sources, piece.targets).run()
            continue
        first, second, *others = piece.sources
        total, *copies = piece.targets
        ufunc(first, second, out=total)
        for source in others:
            ufunc(total, source, out=total)
        for target in copies:
            np.copyto(target, total)


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
        unit = max(1, 64 // dtype.itemsize)

        def cut(
            byte: int, at: int = at, length: int = length, dtype: np.dtype[Any] = dtype, unit: int = unit
        ) -> int:
            if byte <= at:
                return 0
            element = -(-(byte - at) // dtype.itemsize)
            return min(length, -(-element // unit) * unit)

        shares.append((cut(begin), cut(end)))
        at += size
    return shares


def _part(box: Array, row: int, dtype: np.dtype[Any], start: int, stop: int) -> Array:
    base = row * PIECE_BYTES
    part: Array = box[base + start * dtype.itemsize : base + stop * dtype.itemsize].view(dtype)
    return part


def _put(target: Array, total: Array) -> None:
    """Copy a result to where it is wanted, which may be narrower."""
    if target.dtype == total.dtype:
        np.copyto(target, total)
    else:
        Fold(ReduceOp.MAX, [total], [target]).run()


def _as_bytes(array: Array) -> Array:
    flat: Array = array.reshape(-1).view(np.uint8)
    return flat


def _copied(error: CollectiveError) -> CollectiveError:
    """An instance of its own for each time that it is raised, as tracebacks grow."""
    mine = copy.copy(error)
    mine.__notes__ = list(getattr(error, "__notes__", ()))
    return mine
