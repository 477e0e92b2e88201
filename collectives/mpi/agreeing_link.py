"""A link over which a collective succeeds for all survivors or for none, whoever dies in the middle of it.

MPI tells a loss to those that wait for the lost process, and these may have what others lack. So after each collective all
tell all that they have done their parts. Who does not hear it of all says by the hub how its own part went; from what all say so, all
conclude the same (`Votes`). If a part has failed, all raise that the same process is gone: they are at
the same call, and can make the same step again. Nothing is on its way then any more, so that no late message of
the lost step gets into the memory of the next one.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeVar, final

from collectives.arrays import Array
from collectives.calls import Call
from collectives.control.votes import Vote
from collectives.control.watch import Watch
from collectives.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerFailedError,
    is_common,
)
from collectives.link import Link
from collectives.mpi.agreement import Agreement
from collectives.mpi.any_loss import AnyLoss
from collectives.mpi.communicators import Members
from collectives.mpi.library import keep
from collectives.mpi.library import mpi as mpi_module
from collectives.mpi.waiting import wait_until
from collectives.reduce_op import ReduceOp

T = TypeVar("T")

_DONE_TAG = 19_000
"""Besides those of an `MpiLink`."""
_DONE = b"xpd done"
_TO_BE_TOLD = 15.0
"""Seconds that the hub has to say who is gone when MPI knows it already; it may have to miss a heartbeat first."""


class Abandonable(Protocol):
    """What a link can do with what is under way when nobody will complete it."""

    def abandon(self, timeout: float) -> bool:
        """Have nothing under way any more that could write into arrays; whether that was possible."""


@final
class AgreeingLink(Link):
    """One process's end. All make it at the same time.

    Args:
        comm: of the live processes, by their numbers.
        make: makes the link that does the work, in this communicator and with this watch, and says how to abandon what it has
            under way.
        counts: how many members each process hosts.
        watch: what is known of the other processes.
        name: what all processes call the link.
        timeout: seconds that a process waits for the others.

    Raises:
        PeerFailedError: a process was lost meanwhile; on all.
    """

    def __init__(
        self,
        comm: Members,
        make: Callable[[Members, Watch], tuple[Link, Abandonable]],
        counts: Sequence[int],
        *,
        watch: Watch,
        name: str,
        timeout: float,
    ) -> None:
        super().__init__(comm.rank, counts)
        self._name = name
        self._watch, self._timeout = watch, timeout
        self._mpi = mpi_module()
        self._number = 1
        """Of the collective that this process is in or makes next."""
        self._done = Agreement(self._mpi, comm, self._look_for_losses, _DONE_TAG, comm.size)
        self._unheard: Exception | None = None
        """Why this process could not listen to the end of a collective; it makes no other over this link."""
        self._failing = threading.Lock()
        self._broken: CollectiveError | None = None
        self._abandonable: Abandonable | None = None
        self._call = Call("the making of a link")
        self._inner, self._abandonable = self._agreed(self._call, lambda: make(comm, AnyLoss(watch)))

    # ------------------------------------------------------------- collectives

    def barrier(self, call: Call) -> None:
        self._agreed(call, lambda: self._inner.barrier(call))

    def gather_objects(self, call: Call, values: Sequence[object]) -> list[object]:
        return self._agreed(call, lambda: self._inner.gather_objects(call, values))

    def fold(
        self, call: Call, op: ReduceOp, sources: Sequence[Sequence[Array]], targets: Sequence[Sequence[Array]]
    ) -> None:
        self._agreed(call, lambda: self._inner.fold(call, op, sources, targets))

    def reduce_scatter(
        self, call: Call, op: ReduceOp, sources: Sequence[Array], targets: Sequence[Array]
    ) -> None:
        self._agreed(call, lambda: self._inner.reduce_scatter(call, op, sources, targets))

    def broadcast(self, call: Call, root: int, source: Array | None, targets: Sequence[Array]) -> None:
        self._agreed(call, lambda: self._inner.broadcast(call, root, source, targets))

    def all_gather(self, call: Call, arrays: Sequence[Array], use: Callable[[list[Array]], T]) -> T:
        return self._agreed(call, lambda: self._inner.all_gather(call, arrays, use))

    def all_to_all(self, call: Call, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        self._agreed(call, lambda: self._inner.all_to_all(call, sources, targets))

    # ---------------------------------------------------------- point to point

    def send(self, member: int, array: Array, peer: int, tag: int) -> None:
        self._alone(lambda: self._inner.send(member, array, peer, tag))

    def receive(self, member: int, peer: int, tag: int) -> Array:
        return self._alone(lambda: self._inner.receive(member, peer, tag))

    # ------------------------------------------------------------------ others

    def memory(self, num_bytes: int) -> Array:
        return self._inner.memory(num_bytes)

    def fail(self, error: CollectiveError) -> None:
        if self._broken is None:
            self._broken = error
        self._inner.fail(error)

    def close(self) -> None:
        if self._broken is None:
            self._broken = CollectiveError("the link is closed; make a new one")
        self._inner.close()

    # --------------------------------------------------------------- agreeing

    def _agreed(self, call: Call, work: Callable[[], T]) -> T:
        """Do this process's part, and return when all have done theirs; or raise on all that one is gone."""
        if self._broken is not None:
            raise _copied(self._broken)
        self._call = call
        if self._unheard is not None:
            self._lose(self._unheard)
        outcome: Exception | None = None
        try:
            result = work()
        except CollectiveError as error:
            if not is_common(error) or isinstance(error, PeerFailedError):
                self._lose(error)
            outcome = error
        except self._mpi.Exception as error:
            self._lose(error)
        except Exception as error:  # noqa: BLE001  # raised when the others know that it is not for a loss
            if self._abandonable is None:
                self._lose(error)  # the making: memory of one who has died can't be opened
            outcome = error
        if not self._have_all_done():
            self._raise_lost(outcome)
        self._number += 1
        if outcome is not None:
            raise outcome
        return result

    def _alone(self, work: Callable[[], T]) -> T:
        """As `_agreed`, for what not all do: a loss is agreed on in place of the next collective, at which the others are."""
        if self._broken is not None:
            raise _copied(self._broken)
        try:
            if self._unheard is not None:
                raise self._unheard
            return work()
        except (CollectiveError, self._mpi.Exception) as error:
            if isinstance(error, CollectiveTimeoutError):
                raise
            with self._failing:
                if self._broken is not None:
                    raise _copied(self._broken) from error
                self._lose(error)

    def _lose(self, error: Exception) -> NoReturn:
        """This process's part has failed: if that is for a loss, see to it that all fail with it."""
        if isinstance(error, (CollectiveTimeoutError, CollectiveMismatchError)):
            # Everybody learns of it by way of the hub, and nobody goes on.
            self._broken = error
            raise error
        self._vote(succeeded=False)
        self._raise_lost(error)

    def _have_all_done(self) -> bool:
        """Wait for the others to do their parts, after this process; whether they all have, as all conclude."""
        try:
            self._done.exchange(_DONE, 0)
        except (PeerFailedError, self._mpi.Exception) as error:
            # Those that have heard of all go on; that they have, others learn by their votes on what comes next. This process takes no
            # part in that: what it did not hear may still come, and would be taken for something of the next call.
            self._unheard = error
            return self._vote(succeeded=True)
        return True

    def _vote(self, *, succeeded: bool) -> bool:
        """Whether all have done their parts, as all conclude, where MPI can't say so any more."""
        # No message may come later than this.
        ends = (self._done, self._abandonable) if self._abandonable is not None else (self._done,)
        if not all(one.abandon(self._timeout) for one in ends):
            keep(self)
            self._break(
                CollectiveError(
                    f"{self._call}: a process is gone, and MPI did not end within {self._timeout:g} s what was under way, which could "
                    "still write into arrays; need a new start of the job from a checkpoint"
                )
            )
        votes, number = self._watch.votes, self._number
        votes.cast(self._name, self.process, Vote(number, succeeded))

        def is_known() -> bool:
            # What others have under way ends only while this process calls MPI.
            self._mpi.COMM_SELF.Iprobe()
            outcome = votes.outcome(self._name, number, self._live())
            return outcome is not None and (outcome or votes.are_in(self._name, number, self._live()))

        wait_until(is_known, self._look, list)
        return bool(votes.outcome(self._name, number, self._live()))

    def _live(self) -> set[int]:
        return set(range(self.num_processes)) - set(self._watch.gone) - self._watch.left

    def _look_for_losses(self, missing: Sequence[int], waited: float) -> None:
        self._look(missing, waited)
        for lost in self._watch.gone.values():
            raise _copied(lost)
        if not self._watch.left.isdisjoint(missing):
            # It has taken part, or this process's part had failed. What it said last may have been lost with it.
            raise self._watch.ended(min(self._watch.left.intersection(missing)))

    def _look(self, _missing: Sequence[int], waited: float) -> None:
        failure = self._watch.failure
        if isinstance(failure, CollectiveError) and getattr(failure, "process", None) not in self._watch.gone:
            self._break(failure)
        if waited > self._timeout:
            try:
                error: CollectiveError = self._watch.explain(
                    "timeout", f"agreeing on {self._call}", waited
                ).error()
            except CollectiveError as told:
                error = told
            self._break(error)

    def _raise_lost(self, error: Exception | None) -> NoReturn:
        """Raise what the hub says of the first that is gone; it says so to all in the same order."""
        deadline = time.monotonic() + _TO_BE_TOLD
        while not self._watch.gone and not self._watch.left and time.monotonic() < deadline:
            failure = self._watch.failure
            if isinstance(failure, CollectiveError) and not isinstance(failure, PeerFailedError):
                self._break(failure)
            time.sleep(0.001)
        if self._watch.left:
            # Nobody goes on without those that have ended too early. Others may have failed for that already.
            self._break(self._watch.ended(min(self._watch.left)))
        if not self._watch.gone and error is not None and not isinstance(error, self._mpi.Exception):
            self._broken = error if isinstance(error, CollectiveError) else CollectiveError(str(error))
            raise error
        if not self._watch.gone:
            self._break(
                CollectiveError(
                    f"{self._call}: MPI says that a process is gone, and the hub, which reaches all of them, does not; need a network on "
                    f"which processes reach one another ({error or 'another process has noticed it'})"
                )
            )
        self._break(next(iter(self._watch.gone.values())))

    def _break(self, error: CollectiveError) -> NoReturn:
        self._broken = error
        if self._abandonable is not None:
            self._inner.fail(error)
        raise _copied(error)


def _copied(error: CollectiveError) -> CollectiveError:
    # One instance for each that raises it, with notes of its own.
    mine = copy.copy(error)
    mine.__notes__ = list(getattr(error, "__notes__", ()))
    return mine
