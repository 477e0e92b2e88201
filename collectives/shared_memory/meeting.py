"""Where the processes of a host come to a collective: all have brought theirs, and all want the same, or all raise.

A collective comes to one or more *phases* (see `Flags`). To the first one each process brings a digest of its call; all see
all digests, so either all go on or all raise. To the last one, if there is more than one, each brings whether its part of the
work succeeded.
"""

from __future__ import annotations

import copy
import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, final

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from collectives.control.watch import Watch
from collectives.errors import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerFailedError,
    common,
)
from collectives.shared_memory.flags import DATA, Flags, page_bytes
from xpdistribute.words import shortened

T = TypeVar("T")

BODY_BYTES = 32 * 1024
"""What a process can bring to a phase in its page."""
DIGEST, NUMBER = 0, 1
"""The words of a phase's head: the digest of the call, and a number that says more about what is brought."""

_HEAD = 64
_SLOT = _HEAD + BODY_BYTES
_END, _FAILED, _EXCUSED = 1, 2, 3
"""Digests of the end of a collective: all is well, or this process has failed; of a process that takes part in none."""
_TEXT_BYTES = 8000
"""Of an error's text that travels."""
_MANY_DIGESTS = 4096
_TO_HEAR_OF_LOSS = 1.0
"""Seconds that a message from a process is waited for when another one is gone."""

PAGE_BYTES = page_bytes(_SLOT)
"""The size of the page that each process brings things in."""


class _OutOfPatienceError(Exception):
    """Others don't come to a phase soon enough."""


@final
class Meeting:
    """One process's side.

    Attributes:
        flags: what phases are passed by; the slot of a phase is ``phase & 1``.
        heads: by slot, by process: the words of the head.
        bodies: by slot, by process: `BODY_BYTES` bytes.
        my_heads: this process's, by slot.
        my_bodies: likewise.
        other_heads: by slot, those of the others.

    Args:
        process: which one.
        pages: by process, `PAGE_BYTES` bytes, zeroed at first.
        timeout: seconds to wait for the others.
        watch: what is known of them.
        numbers: by process, what the watch calls it.
        name: what the link is called in reports.
    """

    def __init__(
        self,
        process: int,
        pages: Sequence[Array],
        *,
        timeout: float,
        watch: Watch | None,
        numbers: Sequence[int],
        name: str,
    ) -> None:
        self._process = process
        self._num_processes = len(pages)
        self._timeout = timeout
        self._watch = watch
        self._numbers = tuple(numbers)
        self._name = name
        self.flags = Flags(process, pages, self._look)
        # Slots are used in turn: what is brought to a phase stays until all have come to the next but one.
        slots = [[page[DATA + turn * _SLOT :][:_SLOT] for page in pages] for turn in (0, 1)]
        self.heads = [[slot[:_HEAD].view(np.int64).data for slot in turn] for turn in slots]
        self.bodies = [[slot[_HEAD:] for slot in turn] for turn in slots]
        self.my_heads = [turn[process] for turn in self.heads]
        self.my_bodies = [turn[process] for turn in self.bodies]
        self.other_heads = [[h for p, h in enumerate(turn) if p != process] for turn in self.heads]
        self._digests: dict[Call, int] = {}
        self._broken: CollectiveError | None = None
        self._sequence = 0
        self._call: Call | None = None
        self._is_waiting = False
        self._patience: float | None = None
        self._recent: deque[Call] = deque(maxlen=8)
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

    # ----------------------------------------------------------- one collective

    def begin(self, call: Call) -> int:
        """A new collective; the slot of its first phase."""
        if self._broken is not None:
            self.require_working()
        watch = self._watch
        if watch is not None and isinstance(watch.failure, CollectiveTimeoutError):
            # The others have given this process up: what they left here must not look like a collective that succeeds.
            self._break(watch.failure)
        self._sequence += 1
        self._call = call
        self._recent.append(call)
        return (self.flags.phase + 1) & 1

    def come(self, turn: int, digest: int) -> None:
        """The first phase of the collective that was begun: all have brought theirs, and all call the same.

        Args:
            turn: its slot, which this process has filled, but for the digest.
            digest: of the call.
        """
        self.my_heads[turn][DIGEST] = digest
        self._is_waiting = True
        self.flags.meet()
        self._is_waiting = False
        for other in self.other_heads[turn]:
            if other[DIGEST] != digest:
                self._raise_mismatch(turn)

    def meet(self) -> None:
        """A phase in the middle."""
        self._is_waiting = True
        self.flags.meet()
        self._is_waiting = False

    def next_turn(self) -> int:
        """The slot of the next phase."""
        return (self.flags.phase + 1) & 1

    def end(self) -> None:
        """The last phase, where this process has done its part: all have, or all raise."""
        turn = (self.flags.phase + 1) & 1
        self.my_heads[turn][DIGEST] = _END
        self._is_waiting = True
        self.flags.meet()
        self._is_waiting = False
        for other in self.other_heads[turn]:
            if other[DIGEST] != _END:
                self._raise_failure(None)

    def working(self, work: Callable[[], T]) -> T:
        """Do this process's part of the work, then `end`; raises on all processes what any of them has raised."""
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  # raised when the others know
            self.my_heads[(self.flags.phase + 1) & 1][DIGEST] = _FAILED
            self.meet()
            self._raise_failure(error)
        self.end()
        return result

    def excuse(self, text: str, seconds: float) -> bool:
        """As `Link.excuse`."""
        if self._broken is not None:
            return False
        turn = self.begin(Call(f"nothing, as its step has failed: {text}"))
        self.my_heads[turn][DIGEST] = _EXCUSED
        self._patience = seconds
        try:
            self.meet()
            if any(other[DIGEST] != _EXCUSED for other in self.other_heads[turn]):
                self._exchange_text(text)  # the others do it as they see that not all have come for the same
        except (_OutOfPatienceError, CollectiveError):
            return False
        finally:
            self._patience = None
        return True

    def digest_of(self, call: Call) -> int:
        """The same number for the same call on all processes."""
        digest = self._digests.get(call)
        if digest is None:
            if len(self._digests) >= _MANY_DIGESTS:
                self._digests.clear()
            told = hashlib.blake2b(str(call).encode(), digest_size=8).digest()
            # Small numbers have a meaning of their own.
            digest = self._digests[call] = int.from_bytes(told, "little", signed=True) | 1 << 20
        return digest

    # ---------------------------------------------------------------- failures

    def fail(self, error: CollectiveError) -> None:
        """Let every later collective raise this."""
        if self._broken is None:
            self._broken = error

    def require_working(self) -> None:
        """Raise what has failed."""
        if self._broken is not None:
            raise _copied(self._broken)

    def look_for(self, process: int, waited: float, where: str) -> None:
        """While waiting for a message: raise if the process that can send it never will, or is late."""
        self.require_working()
        watch = self._watch
        if watch is not None:
            number = self._numbers[process]
            if number in watch.gone:
                raise _copied(watch.gone[number])
            if number in watch.left:
                raise watch.ended(number)
            if watch.gone and waited > _TO_HEAR_OF_LOSS:
                # It does not send any more, if it waits itself for one that is gone.
                raise _copied(next(iter(watch.gone.values())))
        if waited > self._timeout:
            raise CollectiveTimeoutError(
                f"{where}: process {self._process} waited {self._timeout:g} s for process {process}; did it make the other call? — "
                "raise timeout_seconds if it is only slow",
                [process],
            )

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

    def _raise_mismatch(self, turn: int) -> NoReturn:
        excused = [process for process, head in enumerate(self.heads[turn]) if head[DIGEST] == _EXCUSED]
        told = self._exchange_text("\n".join([str(self._call), *map(str, list(self._recent)[-6:-1])]))
        if excused:
            text = told[excused[0]]
            last = text.rstrip().rpartition("\n")[2]
            failure = PeerFailedError(
                f"{self._call}: process {excused[0]} of {self._num_processes} (in its step) failed: {last}",
                self._numbers[excused[0]],
                text,
            )
            failure.add_note(f"What process {excused[0]} said:\n{text}")
            raise common(failure)
        calls = [text.partition("\n")[0] for text in told]
        listed = "; ".join(f"process {process} calls {text}" for process, text in enumerate(calls))
        error = CollectiveMismatchError(
            f"seq {self._sequence}: the calls do not fit together: {listed}; every process must make the same calls in the "
            "same order, with the same shapes and dtypes — look for a branch that only some take",
            calls,
        )
        for process, text in enumerate(told):
            before = "; ".join(text.split("\n")[1:]) or "none"
            error.add_note(f"process {process}: its last calls before: {before}")
        raise common(error)

    def _exchange_text(self, text: str) -> list[str]:
        """Every process's text. All processes must have seen the reason for it."""
        turn = self.next_turn()
        # A character takes at most four bytes, and what says that some are left out a few more.
        data = text.encode(errors="replace")
        if len(data) > _TEXT_BYTES:
            data = shortened(text, _TEXT_BYTES * len(text) // len(data) - 100).encode(errors="replace")
            data = data[-_TEXT_BYTES:]
        head = self.my_heads[turn]
        head[DIGEST], head[NUMBER] = 0, len(data)
        self.my_bodies[turn][: len(data)] = np.frombuffer(data, np.uint8)
        self.meet()
        return [
            body[: head[NUMBER]].tobytes().decode(errors="replace")
            for head, body in zip(self.heads[turn], self.bodies[turn], strict=True)
        ]

    def _look(self, phase: int, waited: float) -> None:
        """While waiting for a phase: raise if somebody who has not come never will, or is late."""
        if self._broken is not None:
            self.require_working()
        if self._patience is not None and waited > self._patience:
            raise _OutOfPatienceError
        watch = self._watch
        if watch is not None and (watch.failure is not None or watch.left):
            self._look_who_is_gone(watch, phase)
        if waited > self._timeout:
            if watch is not None:
                self._break(watch.explain("timeout", f"{self._name} seq {self._sequence}", waited).error())
            late = [p for p in range(self._num_processes) if self.flags.count(p) < phase]
            self._break(
                CollectiveTimeoutError(
                    f"{self._call}: process {self._process} of {self._num_processes} waited {self._timeout:g} s for the others at seq "
                    f"{self._sequence}; missing: {', '.join(f'process {p}' for p in late)}; did every process call it? — "
                    "raise timeout_seconds if one is only slow",
                    late,
                )
            )

    def _look_who_is_gone(self, watch: Watch, phase: int) -> None:
        for process, number in enumerate(self._numbers):
            # Whoever came before it went counts: all decide alike, so a collective fails for all or for none.
            if self.flags.count(process) >= phase:
                continue
            if number in watch.gone:
                self._break(watch.gone[number])
            if number in watch.left:
                self._break(watch.ended(number))
        failure = watch.failure
        if isinstance(failure, CollectiveError) and getattr(failure, "process", None) not in watch.gone:
            self._break(failure)  # the hub is gone, or somebody has waited too long

    def _break(self, error: CollectiveError) -> NoReturn:
        self._broken = error
        raise _copied(error)


def _copied(error: CollectiveError) -> CollectiveError:
    """An instance of its own for each time that it is raised, as tracebacks grow."""
    mine = copy.copy(error)
    mine.__notes__ = list(getattr(error, "__notes__", ()))
    return mine
