"""Where processes come to a collective: all have brought theirs, and all want the same, or all raise."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, final

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from collectives.control.watch import Watch
from collectives.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerFailedError,
    common,
)
from collectives.mpi.agreement import DIFFERS, INLINE_BYTES, Agreement
from collectives.mpi.library import keep, let_go, set_failed
from collectives.mpi.messages import Messages, MortalMessages, PlainMessages
from collectives.mpi.transfers import Transfers
from collectives.mpi.waiting import wait_until

NARROW = 2
"""A flag: some target here is narrower than the result."""

_AGREEMENT_TAG, _TRANSFER_TAG = 0, 64
_MANY = 1024
"""Calls whose digest is remembered."""
_RECENT = 8
"""Calls that a report shows."""
_TEXTS, _OVERFLOW = (f"xpd{name}".encode() for name in ("texts", "flows"))
"""Digests of meetings that follow from what all processes know: no call has them but by a chance of 2 ** -64."""


@final
class Meeting:
    """One process's side.

    Attributes:
        comm: what the processes send in; nobody else does with these tags.
        messages: how they send there what goes beyond the agreement.
        agreement: where what is brought stands.
        process: which one this is.
        num_processes: how many there are.
        counts: how many members each hosts.
        starts: the first member of each, and the number of all.
        timeout: seconds to wait for the others.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: what to duplicate.
        counts: as the attribute.
        timeout: seconds to wait for the others.
        watch: what is known of them.
        numbers: by process, what the watch calls it.
        name: what the link is called in reports.
        largest: bytes of one message.
        direct_up_to: as of `Agreement`; None for what is fastest.
        owns_comm: use ``comm`` itself instead.

    Raises:
        CollectiveTimeoutError: some process did not come.
    """

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        counts: Sequence[int],
        *,
        timeout: float,
        watch: Watch | None,
        numbers: Sequence[int],
        name: str,
        largest: int,
        direct_up_to: int | None,
        owns_comm: bool,
    ) -> None:
        self._mpi, self.process, self.num_processes = mpi, comm.rank, comm.size
        self.counts = tuple(counts)
        self.starts = (0, *itertools.accumulate(self.counts))
        self.timeout, self._watch = timeout, watch
        self._numbers = tuple(numbers)
        self._name = name
        self._broken: CollectiveError | None = None
        self._sequence = 0
        self._call: Call | None = Call("the making of an MpiLink")
        self._is_waiting = False
        self._recent: deque[Call] = deque(maxlen=_RECENT)
        self._digests: dict[Call, bytes] = {}
        self._is_of_survivors = owns_comm
        self.comm = comm if owns_comm else self._duplicate(comm)
        self.messages: Messages = MortalMessages(self.comm) if owns_comm else PlainMessages(self.comm)
        self.agreement = (
            Agreement(mpi, self.comm, self._look, _AGREEMENT_TAG)
            if direct_up_to is None
            else Agreement(mpi, self.comm, self._look, _AGREEMENT_TAG, direct_up_to)
        )
        self._largest = largest
        self._ways: list[Transfers] = []
        self._transfers = self.transfers(_TRANSFER_TAG)
        if watch is not None:
            watch.descriptions.add(name, self.describe)

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

    # ----------------------------------------------------------- one collective

    def begin(self, call: Call) -> None:
        """A new collective."""
        if self._broken is not None:
            self.require_working()
        self._call = call
        self._recent.append(call)
        self._sequence += 1

    def come(self, call: Call, num_bytes: int, flags: int = 0) -> int:
        """Meet the others, with so much in the agreement's body; all processes' flags."""
        flags = self.exchange(self.digest_of(call), num_bytes, flags)
        if flags & DIFFERS:
            self.raise_mismatch(call)
        return flags

    def exchange(self, digest: bytes, num_bytes: int, flags: int = 0) -> int:
        """As `come`, but for what differs: that is `DIFFERS` among the flags."""
        self._is_waiting = True
        try:
            return self.agreement.exchange(digest, num_bytes, flags)
        except self._mpi.Exception as error:
            self._break_for(error)
        finally:
            self._is_waiting = False

    def digest_of(self, call: Call) -> bytes:
        """The same bytes for the same call on all processes."""
        digest = self._digests.get(call)
        if digest is None:
            if len(self._digests) >= _MANY:
                self._digests.clear()
            digest = self._digests[call] = hashlib.blake2b(str(call).encode(), digest_size=8).digest()
        return digest

    def is_small(self, num_bytes: int) -> bool:
        """Whether to bring all members' arrays, each of so many bytes, to the meeting. The same on all processes."""
        # Of two arrays as much is sent and received as in slices; of more of them, more.
        return (
            max(self.counts) * num_bytes <= INLINE_BYTES and self.starts[-1] * num_bytes <= 2 * INLINE_BYTES
        )

    def process_of(self, member: int) -> int:
        """The process that hosts a member."""
        return next(p for p, stop in enumerate(self.starts[1:]) if member < stop)

    def transfers(self, tag: int) -> Transfers:
        """A way to send between processes that have agreed on what they do, with a tag of its own."""
        way = Transfers(self._mpi, self.comm, self._look, tag, self._largest, self.messages)
        self._ways.append(way)
        return way

    def run(
        self, receives: Iterable[tuple[Array, int]] = (), sends: Iterable[tuple[Array, int]] = ()
    ) -> None:
        """As `Transfers.run`, between processes that have agreed on it."""
        with self.naming_mpi_errors():
            self._transfers.run(receives, sends)

    def broadcast(self, data: Array, root: int, piece_bytes: int) -> None:
        """As `Transfers.broadcast`, likewise."""
        with self.naming_mpi_errors():
            self._transfers.broadcast(data, root, piece_bytes)

    @contextmanager
    def naming_mpi_errors(self) -> Iterator[None]:
        """Make errors of MPI's to those of a link, which is broken then."""
        try:
            yield
        except self._mpi.Exception as error:
            self._break_for(error)

    # ---------------------------------------------------------- bytes of any length

    def all_bytes(self, call: Call, blob: bytes) -> list[Any]:
        """Every process's bytes."""
        self.come(call, self._put(blob))
        return self._fetch(blob)

    def texts(self, digest: bytes, text: str) -> list[str]:
        """Every process's text; all know already that they are to exchange it."""
        blob = text.encode()
        self.exchange(digest, self._put(blob))
        return [bytes(one).decode() for one in self._fetch(blob)]

    def conclude(self, overflow: str) -> None:
        """Raise OverflowError in all processes if any gives a reason to."""
        text = next(filter(None, self.texts(_OVERFLOW, overflow)), None)
        if text is not None:
            raise common(OverflowError(text))

    def _put(self, blob: bytes) -> int:
        body = self.agreement.body
        is_inline = len(blob) < INLINE_BYTES
        content = bytes([is_inline]) + (blob if is_inline else len(blob).to_bytes(8, "little"))
        body[: len(content)] = np.frombuffer(content, np.uint8)
        return len(content)

    def _fetch(self, blob: bytes) -> list[Any]:
        found: list[Any] = []
        receives: list[tuple[Array, int]] = []
        others = [p for p in range(self.num_processes) if p != self.process]
        for p in range(self.num_processes):
            brought = self.agreement.brought(p).tobytes()
            if p == self.process:
                found.append(blob)
            elif brought[0]:
                found.append(brought[1:])
            else:
                found.append(np.empty(int.from_bytes(brought[1:], "little"), np.uint8))
                receives.append((found[-1], p))
        data = np.frombuffer(blob, np.uint8)
        self.run(receives, [(data, p) for p in others] if len(blob) >= INLINE_BYTES else [])
        return found

    # ---------------------------------------------------------------- failures

    def fail(self, error: CollectiveError) -> None:
        """Let every later collective raise this."""
        if self._broken is None:
            self._broken = error
            set_failed()
            keep(self)

    def abandon(self, timeout: float) -> bool:
        """After a failure: wait until what is under way has ended, well or not; whether it has in so many seconds."""
        if not self.agreement.abandon(timeout) or not all(way.abandon(timeout) for way in self._ways):
            return False
        let_go(self)
        return True

    def close(self) -> bool:
        """Give back what it holds, unless something has failed and others may still write into it; whether it did."""
        if self._broken is not None:
            return False
        self._broken = CollectiveError("MpiLink: it is closed; make a new one")
        return True

    def free(self) -> None:
        """After `close`, when nothing is under way any more."""
        if self._is_of_survivors:
            # What was sent to a process may look done and fail later, when that process dies too; a request that has been given
            # back by then ends the whole job in Open MPI. There is one of these for each loss, so they are kept.
            keep(self)
            return
        self.agreement.close()
        # Not a collective in Open MPI, MPICH and Intel MPI, where the last process to free it does what is left to do.
        self.comm.Free()

    def require_working(self) -> None:
        """Raise what has failed."""
        if self._broken is not None:
            raise _copied(self._broken)

    def look_for(self, process: int, waited: float, waits: str, question: str) -> None:
        """While waiting for a message: raise if the process that can send it never will, or is late.

        Args:
            process: it.
            waited: seconds.
            waits: who waits where, for the error.
            question: to the reader of the error, what the process may not have done.
        """
        self.require_working()
        if self._watch is not None:
            self._look_who_is_gone(self._watch, [process])
        if waited > self.timeout:
            raise CollectiveTimeoutError(
                f"{waits} waited {self.timeout:g} s for process {process}; {question} — raise timeout_seconds if it is only slow",
                [process],
            )

    def raise_mismatch(self, call: Call) -> NoReturn:
        """All processes know that they call different things."""
        calls = self.texts(_TEXTS, str(call))
        listed = "; ".join(f"process {process} calls {text}" for process, text in enumerate(calls))
        error = CollectiveMismatchError(
            f"seq {self._sequence}: the calls do not fit together: {listed}; every process must make the same calls in the "
            "same order, with the same shapes and dtypes — look for a branch that only some take",
            calls,
        )
        raise common(error)

    def _look(self, missing: Sequence[int], waited: float) -> None:
        """While waiting: raise if somebody who has not come never will, or is late."""
        self.require_working()
        watch = self._watch
        if watch is not None and (watch.failure is not None or watch.left):
            self._look_who_is_gone(watch, missing)
            failure = watch.failure
            if isinstance(failure, CollectiveError) and getattr(failure, "process", None) not in watch.gone:
                self._break(failure)  # the hub is gone, or somebody has waited too long
        if waited <= self.timeout:
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
                f"{self._call}: process {self.process} of {self.num_processes} waited {self.timeout:g} s for the others at seq "
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
        died = error.Get_error_class() in _of_a_death(self._mpi)  # type: ignore[attr-defined]  # mpi4py's
        failure = PeerFailedError(text) if died else CollectiveError(text)
        self.fail(failure)
        raise _copied(failure) from error

    def _duplicate(self, comm: Any) -> Any:
        own, request = comm.Idup()
        wait_until(
            request.Test, self._look, lambda: [p for p in range(self.num_processes) if p != self.process]
        )
        own.Set_errhandler(self._mpi.ERRORS_RETURN)
        return own


def _of_a_death(mpi: Any) -> list[int]:
    """What MPI raises to who waits for a process that has died."""
    names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING")
    return [getattr(mpi, name) for name in names if hasattr(mpi, name)]


def _copied(error: CollectiveError) -> CollectiveError:
    # One instance for each that raises it, with notes of its own.
    mine = copy.copy(error)
    mine.__notes__ = list(getattr(error, "__notes__", ()))
    return mine
