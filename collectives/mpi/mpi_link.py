"""The link between processes by way of MPI.

Before any data moves, all processes meet in an `Agreement`, to which small arrays are brought along. Of large ones each
process gets its slice of everybody's, folds it in the order of the members, and sends the result to the others: as much is sent as by
MPI's own reductions, whose order is theirs, and which know neither half-precision floats nor our rules for narrow integers.
"""

from __future__ import annotations

import copy
import hashlib
import math
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar, final

import numpy as np

from collectives.arrays import ALIGNMENT, Array
from collectives.calls import Call
from collectives.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerFailedError,
    common,
)
from collectives.link import Link
from collectives.mpi.agreement import DIFFERS, INLINE_BYTES, Agreement
from collectives.mpi.chunks import MESSAGE_BYTES
from collectives.mpi.library import mpi as mpi_module
from collectives.mpi.library import set_failed, track
from collectives.mpi.mailbox import Mailbox
from collectives.mpi.reducing import Piece, Rows, plan_pieces
from collectives.mpi.transfers import Transfers
from collectives.mpi.waiting import wait_until
from collectives.recycled_memory import RecycledMemory
from collectives.reduce_op import ReduceOp
from collectives.reduction import Fold, fold
from collectives.watch import Watch

T = TypeVar("T")

PIECE_BYTES = 4 << 20
"""Of a large array, what is reduced at once. From 1 to 16 MB all are about as fast; a whole large array takes three times as long."""

_UNWANTED, _NARROW = 1, 2
"""Flags: no member here wants the result; some target here is narrower than the result."""
_ALIGNED = 16
"""Bytes on multiples of which arrays begin in what is brought to a meeting."""
_MANY = 1024
"""Calls whose digest is remembered."""
_AGREEMENT_TAG, _TRANSFER_TAG, _MAIL_TAG, _MORE_TAGS = 0, 64, 65, 20_000
_RECENT = 8
"""Calls that a report shows."""
_CLOSING = 5.0
"""Seconds that messages have to get to their receivers when the link is closed."""

_TEXTS, _OVERFLOW, _WANTING = (f"xpd{name}".encode() for name in ("texts", "flows", "wants"))
"""Digests of meetings that follow from what all processes know: no call has them but by a chance of 2 ** -64."""


@final
class MpiLink(Link):
    """One process's end. All processes of the communicator make it at the same time.

    Args:
        comm: of mpi4py; the link uses a duplicate of its own.
        counts: how many members each process hosts, by rank in ``comm``.
        timeout: seconds that a process waits for the others.
        watch: what is known of the other processes.
        numbers: what the watch calls the processes, by rank in ``comm``; None where it counts alike.
        name: what the link is called in reports.
        piece_bytes: how much of a large array is reduced at once.
        largest_message: bytes.
        direct_up_to: as of `Agreement`; None for what is fastest.

    Raises:
        ValueError: not as many counts as processes, or not the same on all; a piece of no bytes.
        CollectiveTimeoutError: some process did not come.
    """

    def __init__(
        self,
        comm: Any,
        counts: Sequence[int],
        *,
        timeout: float,
        watch: Watch | None = None,
        numbers: Sequence[int] | None = None,
        name: str = "link",
        piece_bytes: int = PIECE_BYTES,
        largest_message: int = MESSAGE_BYTES,
        direct_up_to: int | None = None,
    ) -> None:
        super().__init__(comm.rank, counts)
        if len(self.counts) != comm.size or min(self.counts, default=0) < 1:
            raise ValueError(
                f"MpiLink: got counts {list(counts)} for {comm.size} processes; need a number from 1 for each"
            )
        if piece_bytes < 1 or not timeout > 0:
            raise ValueError(f"MpiLink: got piece_bytes={piece_bytes}, timeout={timeout}; need both above 0")
        self._mpi = mpi_module()
        self._timeout, self._watch, self._piece_bytes = timeout, watch, piece_bytes
        self._numbers = tuple(range(comm.size) if numbers is None else numbers)
        self._name = name
        self._broken: CollectiveError | None = None
        self._closed = False
        self._sequence = 0
        self._call: Call | None = Call("the making of an MpiLink")
        self._is_waiting = False
        self._recent: deque[Call] = deque(maxlen=_RECENT)
        self._own: Any = None
        self._own = self._duplicate(comm)
        self._agreement = (
            Agreement(self._mpi, self._own, self._look, _AGREEMENT_TAG)
            if direct_up_to is None
            else Agreement(self._mpi, self._own, self._look, _AGREEMENT_TAG, direct_up_to)
        )
        self._transfers = Transfers(self._mpi, self._own, self._look, _TRANSFER_TAG, largest_message)
        self._largest, self._num_transfers = largest_message, 0
        self._mailbox = Mailbox(self._mpi, self._own, _MAIL_TAG, largest_message)
        self._memory = RecycledMemory(num_blocks=4)
        self._scratch_memory: Array = np.empty(0, np.uint8)
        self._digests: dict[Call, bytes] = {}
        self._small: dict[Call, Rows] = {}
        if watch is not None:
            watch.describe = self.describe
        track(self)
        self._come(Call("the making of an MpiLink", (f"of {list(self.counts)} members",)), 0)

    def describe(self) -> Mapping[str, Any]:
        """What this process is doing, for reports: the number and the words of its collective, and whether it waits."""
        call = self._call
        return {
            "seq": self._sequence,
            "call": None if call is None else str(call),
            "waiting": self._is_waiting,
            "recent": [str(one) for one in list(self._recent)],
        }

    @property
    def is_hopeless(self) -> bool:
        """Whether some process has failed, so that nothing can be done together any more."""
        return self._watch is not None and self._watch.failure is not None

    # ------------------------------------------------------------- collectives

    def barrier(self, call: Call) -> None:
        self._begin(call)
        self._come(call, 0)

    def gather_objects(self, call: Call, values: Sequence[object]) -> list[object]:
        self._begin(call)
        blob = pickle.dumps(list(values), pickle.HIGHEST_PROTOCOL)
        return [value for one in self._all_bytes(call, blob) for value in pickle.loads(one)]

    def fold(
        self,
        call: Call,
        op: ReduceOp,
        sources: Sequence[Sequence[Array]],
        targets: Sequence[Sequence[Array]],
    ) -> None:
        self._begin(call)
        rows = self._small.get(call)
        if rows is None:
            rows = self._learn(call, op, sources)
        pair = rows.pair
        if pair is not None and targets and targets[0][0].dtype == pair[0].dtype:
            own, first, second, ufunc = pair
            own[...] = sources[0][0]
            flags = self._exchange(rows.digest, rows.num_bytes, 0)
            if not flags:
                ufunc(first, second, out=targets[0][0])
                return
        else:
            flags = _UNWANTED if not targets else _NARROW if rows.are_narrow(targets[0]) else 0
            if not rows.is_small:
                self._fold_large(call, op, sources, targets, flags)
                return
            rows.bring(sources)
            flags = self._exchange(rows.digest, rows.num_bytes, flags)
        if flags & DIFFERS:
            self._raise_mismatch(call)
        if not rows.stays:
            rows.find(self._agreement.views(INLINE_BYTES))
        overflow = ""
        try:
            if len(targets) == 1 and len(rows.columns) == 1:
                fold(op, rows.columns[0], targets[0])
            elif targets:
                for column, members in enumerate(rows.columns):
                    fold(op, members, [target[column] for target in targets])
        except OverflowError as error:
            overflow = str(error)
        if flags & _NARROW:
            self._conclude(overflow)

    def reduce_scatter(
        self, call: Call, op: ReduceOp, sources: Sequence[Array], targets: Sequence[Array]
    ) -> None:
        self._begin(call)
        first = sources[0]
        flags = _NARROW if _is_narrow(op, first, targets[0]) else 0
        num_bytes = len(sources) * first.nbytes
        overflow = ""
        if self._is_small(first.nbytes):
            body = self._agreement.body
            for number, source in enumerate(sources):
                body[number * first.nbytes : (number + 1) * first.nbytes] = source.reshape(-1).view(np.uint8)
            flags = self._come(call, num_bytes, flags)
            brought = [
                self._agreement.brought(p).view(first.dtype).reshape(self.counts[p], self.size, -1)
                for p in range(self.num_processes)
            ]
            rows = [member for process in brought for member in process]
            try:
                for number, target in enumerate(targets):
                    Fold(op, [row[self.first + number] for row in rows], [target]).run()
            except OverflowError as error:
                overflow = str(error)
        else:
            flags = self._come(call, 0, flags)
            length = max(1, self._piece_bytes // max(1, first.itemsize * self.size))
            for start in range(0, first.shape[1], length):
                try:
                    self._scatter_piece(op, [s[:, start : start + length] for s in sources], targets, start)
                except OverflowError as error:
                    overflow = str(error)
        if flags & _NARROW:
            self._conclude(overflow)

    def broadcast(self, call: Call, root: int, source: Array | None, targets: Sequence[Array]) -> None:
        self._begin(call)
        process = self.process_of(root)
        num_bytes = targets[0].nbytes
        if num_bytes <= INLINE_BYTES and self._agreement.is_direct:
            if source is not None:
                self._agreement.body[:num_bytes] = source
            self._come(call, 0 if source is None else num_bytes)
            data = self._agreement.brought(process)
        else:
            self._come(call, 0)
            data = targets[0] if source is None else source
            with self.naming_mpi_errors():
                self._transfers.broadcast(data, process, self._piece_bytes)
        for target in targets:
            if target is not data:
                np.copyto(target, data)

    def all_gather(self, call: Call, arrays: Sequence[Array], use: Callable[[list[Array]], T]) -> T:
        self._begin(call)
        lengths = np.array([array.nbytes for array in arrays], np.int64)
        head, content = lengths.nbytes, int(lengths.sum())
        is_inline = head + content <= INLINE_BYTES
        body = self._agreement.body
        body[:head] = lengths.view(np.uint8)
        if is_inline and content:
            body[head : head + content] = np.concatenate(arrays)
        self._come(call, head + content if is_inline else head)
        found: list[list[Array]] = []
        receives, sends = [], []
        for p in range(self.num_processes):
            brought = self._agreement.brought(p)
            head = 8 * self.counts[p]
            lengths = brought[:head].view(np.int64)
            if p == self.process:
                found.append(list(arrays))
            elif len(brought) == head:  # they come by themselves, if there is anything
                places = [self._memory.empty((int(length),), np.dtype(np.uint8)) for length in lengths]
                receives += [(place, p) for place in places]
                found.append(places)
            else:
                found.append(np.split(brought[head:], np.cumsum(lengths)[:-1]))
        if not is_inline:
            # Not all to the same process at the same time.
            for distance in range(1, self.num_processes):
                peer = (self.process + distance) % self.num_processes
                sends += [(array, peer) for array in arrays]
        self._run(receives, sends)
        return use([array for process in found for array in process])

    def all_to_all(self, call: Call, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        self._begin(call)
        first = sources[0]
        if self._is_small(first.nbytes):
            body = self._agreement.body
            for number, source in enumerate(sources):
                body[number * first.nbytes : (number + 1) * first.nbytes] = source.reshape(-1)
            self._come(call, len(sources) * first.nbytes)
            for p in range(self.num_processes):
                brought = self._agreement.brought(p).reshape(self.counts[p], self.size, -1)
                for number, target in enumerate(targets):
                    target[self.starts[p] : self.starts[p + 1]] = brought[:, self.first + number]
            return
        self._come(call, 0)
        receives, sends = [], []
        for distance in range(self.num_processes):
            p = (self.process + distance) % self.num_processes
            members = range(self.starts[p], self.starts[p + 1])
            if p == self.process:
                for number, source in enumerate(sources):
                    for other, target in enumerate(targets):
                        target[self.first + number] = source[self.first + other]
                continue
            receives += [(target[member], p) for member in members for target in targets]
            sends += [(source[member], p) for source in sources for member in members]
        self._run(receives, sends)

    # ---------------------------------------------------------- point to point

    def send(self, member: int, array: Array, peer: int, tag: int) -> None:
        self._require_working()
        self._mailbox.send(self.process_of(peer), member, array, peer, tag)

    def receive(self, member: int, peer: int, tag: int) -> Array:
        self._require_working()
        process = self.process_of(peer)
        where = f"recv from {peer} (tag {tag})"

        def look(missing: Sequence[int], waited: float) -> None:
            self._require_working()
            if self._watch is not None:
                self._look_who_is_gone(self._watch, missing)
            if waited > self._timeout:
                raise CollectiveTimeoutError(
                    f"{where}: member {member} waited {self._timeout:g} s for process {process}; did member {peer} send to "
                    "it? — raise timeout_seconds if it is only slow",
                    [process],
                )

        return self._mailbox.receive(process, member, peer, tag, look)

    # ------------------------------------------------------------------ others

    def memory(self, num_bytes: int) -> Array:
        block = np.zeros(num_bytes + ALIGNMENT, np.uint8)
        start = -block.ctypes.data % ALIGNMENT
        return block[start : start + num_bytes]

    def fail(self, error: CollectiveError) -> None:
        if self._broken is None:
            self._broken = error
            set_failed()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._broken is not None:
            return  # what others may still write into stays
        self._broken = CollectiveError("MpiLink: it is closed; make a new one")
        self._mailbox.close(_CLOSING)
        self._agreement.close()
        # Not a collective in Open MPI, MPICH and Intel MPI, where the last process to free it does what is left to do.
        self._own.Free()

    # ------------------------------------------- for a link that is built upon it

    def is_small(self, sources: Sequence[Array]) -> bool:
        """Whether `fold` of such columns is one meeting, in which all bring all they have."""
        return self._is_small(sum(_padded(source.nbytes) for source in sources))

    def agree(self, call: Call, *, narrow: bool) -> bool:
        """Meet the others, all of whom call this.

        Args:
            call: what is called.
            narrow: whether a target here is narrower than the result.

        Returns:
            Whether any is; then all call `conclude` at the end.
        """
        self._begin(call)
        return bool(self._come(call, 0, _NARROW if narrow else 0) & _NARROW)

    def conclude(self, overflow: str) -> None:
        """Raise OverflowError in all processes if any gives a reason to."""
        self._conclude(overflow)

    def transfers(self) -> Transfers:
        """A way to send between processes that have agreed on what they do; all take theirs in the same order."""
        self._num_transfers += 1
        return Transfers(self._mpi, self._own, self._look, _MORE_TAGS + self._num_transfers, self._largest)

    @contextmanager
    def naming_mpi_errors(self) -> Iterator[None]:
        """Make errors of MPI's to those of a link, which is broken then."""
        try:
            yield
        except self._mpi.Exception as error:
            self._break_for(error)

    # ----------------------------------------------------------------- meeting

    def _begin(self, call: Call) -> None:
        if self._broken is not None:
            self._require_working()
        self._call = call
        self._recent.append(call)
        self._sequence += 1

    def _come(self, call: Call, num_bytes: int, flags: int = 0) -> int:
        """Meet the others, with so much in the agreement's body; all processes' flags."""
        digest = self._digests.get(call)
        if digest is None:
            digest = self._digest(call)
        flags = self._exchange(digest, num_bytes, flags)
        if flags & DIFFERS:
            self._raise_mismatch(call)
        return flags

    def _exchange(self, digest: bytes, num_bytes: int, flags: int = 0) -> int:
        self._is_waiting = True
        try:
            return self._agreement.exchange(digest, num_bytes, flags)
        except self._mpi.Exception as error:
            self._break_for(error)
        finally:
            self._is_waiting = False

    def _run(
        self, receives: Iterable[tuple[Array, int]] = (), sends: Iterable[tuple[Array, int]] = ()
    ) -> None:
        with self.naming_mpi_errors():
            self._transfers.run(receives, sends)

    def _digest(self, call: Call) -> bytes:
        if len(self._digests) >= _MANY:
            self._digests.clear()
            self._small.clear()
        digest = hashlib.blake2b(str(call).encode(), digest_size=8).digest()
        self._digests[call] = digest
        return digest

    def _all_bytes(self, call: Call, blob: bytes) -> list[Any]:
        """Every process's bytes."""
        self._come(call, self._put(blob))
        return self._fetch(blob)

    def _put(self, blob: bytes) -> int:
        body = self._agreement.body
        is_inline = len(blob) < INLINE_BYTES
        content = bytes([is_inline]) + (blob if is_inline else len(blob).to_bytes(8, "little"))
        body[: len(content)] = np.frombuffer(content, np.uint8)
        return len(content)

    def _fetch(self, blob: bytes) -> list[Any]:
        found: list[Any] = []
        receives: list[tuple[Array, int]] = []
        others = [p for p in range(self.num_processes) if p != self.process]
        for p in range(self.num_processes):
            brought = self._agreement.brought(p).tobytes()
            if p == self.process:
                found.append(blob)
            elif brought[0]:
                found.append(brought[1:])
            else:
                found.append(np.empty(int.from_bytes(brought[1:], "little"), np.uint8))
                receives.append((found[-1], p))
        data = np.frombuffer(blob, np.uint8)
        self._run(receives, [(data, p) for p in others] if len(blob) >= INLINE_BYTES else [])
        return found

    def _texts(self, digest: bytes, text: str) -> list[str]:
        """Every process's text; all know already that they are to exchange it."""
        blob = text.encode()
        self._exchange(digest, self._put(blob))
        return [bytes(one).decode() for one in self._fetch(blob)]

    def _conclude(self, overflow: str) -> None:
        """Raise on all processes what any could not do."""
        text = next(filter(None, self._texts(_OVERFLOW, overflow)), None)
        if text is not None:
            raise common(OverflowError(text))

    # -------------------------------------------------------------- reductions

    def _is_small(self, num_bytes: int) -> bool:
        """Whether to bring all members' arrays, each of so many bytes, to the meeting. The same on all processes."""
        # Of two arrays as much is sent and received as in slices; of more of them, more.
        return max(self.counts) * num_bytes <= INLINE_BYTES and self.size * num_bytes <= 2 * INLINE_BYTES

    def _learn(self, call: Call, op: ReduceOp, sources: Sequence[Sequence[Array]]) -> Rows:
        kinds = [(source.dtype, source.size) for source in sources[0]]
        num_bytes = sum(_padded(source.nbytes) for source in sources[0])
        digest, agreement = self._digest(call), self._agreement
        if self._is_small(num_bytes):
            views = agreement.views(INLINE_BYTES) if agreement.is_direct else None
            rows = Rows(op, digest, kinds, _ALIGNED, self.counts, self.process, agreement.body, views)
        else:
            rows = Rows(op, digest, kinds, _ALIGNED, self.counts, self.process, None, None)
        self._small[call] = rows
        return rows

    def _fold_large(
        self,
        call: Call,
        op: ReduceOp,
        sources: Sequence[Sequence[Array]],
        targets: Sequence[Sequence[Array]],
        flags: int,
    ) -> None:
        wants = bool(targets)
        flags = self._come(call, 0, flags)
        wanting = list(range(self.num_processes))
        if flags & _UNWANTED:
            answers = self._texts(_WANTING, "yes" if wants else "")
            wanting = [p for p in wanting if answers[p]]
        overflow = ""
        for piece in plan_pieces(op, sources, targets, self._piece_bytes, self._memory):
            self._fold_piece(op, piece, wanting)
            try:
                piece.finish(op)
            except OverflowError as error:
                overflow = overflow or str(error)
        if flags & _NARROW:
            self._conclude(overflow)

    def _fold_piece(self, op: ReduceOp, piece: Piece, wanting: Sequence[int]) -> None:
        length, others = len(piece.rows[0]), self._others_in_turn()
        slices = [
            slice(length * p // self.num_processes, length * (p + 1) // self.num_processes)
            for p in range(self.num_processes)
        ]
        mine = slices[self.process]
        rows = self._gather_rows([[row[part] for row in piece.rows] for part in slices])
        if piece.result is None:
            result = self._memory.empty((length,), op.result_dtype(rows[0].dtype))
        else:
            result = piece.result
        if mine.stop > mine.start:
            Fold(op, rows, [result[mine]]).run()
        self._run(
            [(result[slices[p]], p) for p in others] if self.process in wanting else [],
            [(result[mine], p) for p in others if p in wanting],
        )

    def _gather_rows(self, parts: Sequence[Sequence[Array]]) -> list[Array]:
        """Send each process its part of this process's rows; its own part of all rows, by member.

        Args:
            parts: for each process, of this process's members.
        """
        own = parts[self.process]
        length, others = len(own[0]), self._others_in_turn()
        scratch = self._scratch((self.size - len(own), length), own[0].dtype)
        rows: list[Array] = []
        receives, row = [], 0
        for p in range(self.num_processes):
            if p == self.process:
                rows += own
                continue
            places = list(scratch[row : row + self.counts[p]])
            row += self.counts[p]
            rows += places
            receives += [(place, p) for place in places]
        self._run(receives, [(part, p) for p in others for part in parts[p]])
        return rows

    def _scatter_piece(
        self, op: ReduceOp, blocks: Sequence[Array], targets: Sequence[Array], start: int
    ) -> None:
        length = blocks[0].shape[1]
        parts = [
            [block[self.starts[p] : self.starts[p + 1]].reshape(-1) for block in blocks]
            for p in range(self.num_processes)
        ]
        scratch = self._scratch((self.size, self.counts[self.process], length), blocks[0].dtype)
        receives = []
        for p in range(self.num_processes):
            for number, member in enumerate(range(self.starts[p], self.starts[p + 1])):
                if p == self.process:
                    scratch[member] = parts[p][number].reshape(-1, length)
                else:
                    receives.append((scratch[member].reshape(-1), p))
        self._run(receives, [(part, p) for p in self._others_in_turn() for part in parts[p]])
        for number, target in enumerate(targets):
            Fold(op, list(scratch[:, number]), [target[start : start + length]]).run()

    def _scratch(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Memory for what one piece brings; the same for the next one."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._scratch_memory.nbytes < num_bytes:
            self._scratch_memory = np.empty(num_bytes, np.uint8)
        return self._scratch_memory[:num_bytes].view(dtype).reshape(shape)

    def _others_in_turn(self) -> list[int]:
        """The other processes, beginning with the next, so that not all send to the same one at first."""
        return [(self.process + distance) % self.num_processes for distance in range(1, self.num_processes)]

    # ---------------------------------------------------------------- failures

    def _raise_mismatch(self, call: Call) -> NoReturn:
        calls = self._texts(_TEXTS, str(call))
        listed = "; ".join(f"process {process} calls {text}" for process, text in enumerate(calls))
        error = CollectiveMismatchError(
            f"seq {self._sequence}: the calls do not fit together: {listed}; every process must make the same calls in the "
            "same order, with the same shapes and dtypes — look for a branch that only some take",
            calls,
        )
        raise common(error)

    def _look(self, missing: Sequence[int], waited: float) -> None:
        """While waiting: raise if somebody who has not come never will, or is late."""
        self._require_working()
        watch = self._watch
        if watch is not None and (watch.failure is not None or watch.left):
            self._look_who_is_gone(watch, missing)
            failure = watch.failure
            if isinstance(failure, CollectiveError) and getattr(failure, "process", None) not in watch.gone:
                self._break(failure)  # the hub is gone, or somebody has waited too long
        if waited <= self._timeout:
            return
        if watch is not None:
            try:
                error: CollectiveError = watch.explain(
                    "timeout", f"{self._name} seq {self._sequence}", waited
                ).error()
            except CollectiveError as failure:
                error = failure
            self._break(error)
        late = ", ".join(f"process {p}" for p in missing)
        self._break(
            CollectiveTimeoutError(
                f"{self._call}: process {self.process} of {self.num_processes} waited {self._timeout:g} s for the others at seq "
                f"{self._sequence}; missing: {late}; did every process call it? — raise timeout_seconds if one is only "
                "slow",
                missing,
            )
        )

    def _look_who_is_gone(self, watch: Watch, missing: Sequence[int]) -> None:
        for process in missing:
            number = self._numbers[process]
            if number in watch.gone:
                self._break(watch.gone[number])
            if number in watch.left:
                self._break(watch.ended(number))

    def _break(self, error: CollectiveError) -> NoReturn:
        self.fail(error)
        raise _copied(error)

    def _break_for(self, error: Exception) -> NoReturn:
        """MPI itself says that something is wrong: with ULFM, that a process died."""
        text = f"{self._call}: MPI failed in process {self.process}: {error}"
        died = error.Get_error_class() == getattr(self._mpi, "ERR_PROC_FAILED", None)  # type: ignore[attr-defined]  # mpi4py's
        failure = PeerFailedError(text) if died else CollectiveError(text)
        self.fail(failure)
        raise _copied(failure) from error

    def _require_working(self) -> None:
        if self._broken is not None:
            raise _copied(self._broken)

    def _duplicate(self, comm: Any) -> Any:
        own, request = comm.Idup()
        wait_until(
            request.Test, self._look, lambda: [p for p in range(self.num_processes) if p != self.process]
        )
        own.Set_errhandler(self._mpi.ERRORS_RETURN)
        return own


def _is_narrow(op: ReduceOp, source: Array, target: Array) -> bool:
    """Whether the result may not fit the target."""
    return op.result_dtype(source.dtype) != target.dtype


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _copied(error: CollectiveError) -> CollectiveError:
    # One instance for each that raises it, with notes of its own.
    mine = copy.copy(error)
    mine.__notes__ = list(getattr(error, "__notes__", ()))
    return mine
