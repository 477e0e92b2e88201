"""Going on when processes are lost, and taking in new ones, without a checkpoint on a disk.

A collective fails for all survivors or for none (see `Meeting`), so all of them are at the same call when they notice.
They regroup over the hub, take back what the step under way has changed, split its batch over the replicas that are left,
and make it again. Newcomers are taken in between two steps (see `Newcomers`).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, final

from collectives.errors import PeerFailedError
from collectives.processes import Processes
from collectives.renewable_link import RenewableLink
from strategies.chief import speaks_for_all
from strategies.datasets.splitting import share_bounds
from strategies.inheritance import Inheritance
from strategies.membership_change import MembershipChange
from strategies.newcomers import Newcomers, SharedState
from strategies.steps import Steps
from variables.journal import Journal
from variables.replica_context import current_replica
from variables.sync_on_read_variable import SyncOnReadVariable
from variables.values import DistributedValues, PerReplica, map_structure
from variables.variable import Variable

T = TypeVar("T")

_log = logging.getLogger("xpdistribute")


class _Together(threading.local):
    """Whether this thread is in what all processes do together."""

    is_begun = False

    def __enter__(self) -> None:
        self.is_begun = True

    def __exit__(self, *_: object) -> None:
        self.is_begun = False


_together = _Together()
_all: list[weakref.ref[Recovery]] = []
"""Of the strategies of this process, in the order in which they were made."""


@final
class Recovery:
    """What one strategy does when its processes change.

    Args:
        processes: of the job.
        link: between them.
        steps: of the strategy.
        on_change: called after every change, on every process that is left or new.
        timeout: seconds to wait for the others.
        set_journal: says which journal changes are noted in; None for none.
        min_workers: with fewer processes the job does not go on.
    """

    def __init__(
        self,
        processes: Processes,
        link: RenewableLink,
        steps: Steps,
        on_change: Callable[[MembershipChange], object] | None,
        timeout: float,
        set_journal: Callable[[Journal | None], None],
        min_workers: int = 1,
    ) -> None:
        self._processes = processes
        self._link = link
        self._steps = steps
        self._on_change = on_change
        self._timeout = timeout
        self._set_journal = set_journal
        self._min_workers = min_workers
        self._inheritance = Inheritance(link)
        self._newcomers = Newcomers(processes, link, self._inheritance, timeout)
        self._variables: list[weakref.ref[Variable]] = []
        self._told_names = processes.names
        self._is_in_step = False
        self._needs_copies: dict[Any, bool] = {}
        self._has_warned = False
        processes.on_renewal(self._renewed, self._described)
        _all.append(weakref.ref(self))

    def note(self, variable: Variable) -> None:
        """A variable has been made; all processes make the same ones in the same order."""
        self._variables.append(weakref.ref(variable))
        self._newcomers.num_made += 1
        if isinstance(variable, SyncOnReadVariable):
            self.again(partial(self._inheritance.add, variable))

    # ------------------------------------------------------------------- steps

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A step, made again as often as processes are lost in it."""
        kind = _kind_of(fn)
        self._newcomers.warn_of_waiting()
        while True:
            copies = self._needs_copies.get(kind, True)
            journal = Journal(self._num_calls, copies_updates=copies, note=self._newcomers.note)
            self._set_journal(journal)
            self._is_in_step = True
            self._link.loss = None
            try:
                result = self._steps.run(0, fn, args, kwargs)
                # A step that catches the error of a lost process has not been made with the others all the same.
                loss = self._link.loss
            except Exception as error:
                loss = self._loss(error)
                if loss is None or not self._can_go_on(loss):
                    raise
                _require_kept(journal, self._needs_copies, kind, error)
            finally:
                self._is_in_step = False
                self._set_journal(None)
            if loss is None:
                calls = journal.num_calls_at_update
                if calls is not None:
                    # For good: a step that makes a collective only now and then must be ready for it.
                    known = self._needs_copies.get(kind, False)
                    self._needs_copies[kind] = known or self._link.num_calls > calls
                self._newcomers.require_complete(self._living_variables)
                return result
            if not self._can_go_on(loss):
                raise loss
            _require_kept(journal, self._needs_copies, kind, loss)
            journal.roll_back()
            self._regroup(loss, journal.mark)
            args, kwargs = self._split_anew(args), self._split_anew(dict(kwargs))

    def can_go_on_after(self, error: BaseException) -> bool:
        """Whether an error that has left a step is one that the step is made again after."""
        loss = self._loss(error)
        return loss is not None and self._can_go_on(loss)

    def again(self, work: Callable[[], T]) -> T:
        """What all processes do together between steps, done again as often as processes are lost in it.

        As a whole: of what is a part of something else that is done together, the loss is the whole's.
        """
        if _together.is_begun:
            return work()
        while True:
            try:
                with _together:
                    return work()
            except PeerFailedError as error:
                if self._is_in_step or current_replica() is not None or not self._can_go_on(error):
                    raise
                self._regroup(error, 0)

    def _num_calls(self) -> int:
        return self._link.num_calls

    def _loss(self, error: BaseException) -> PeerFailedError | None:
        return error if isinstance(error, PeerFailedError) else self._link.loss

    def _split_anew(self, structure: Any) -> Any:
        """The structure with this process's shares of global batches, now that there are others to share them with."""
        first, total = self._link.first, self._link.size

        def split(leaf: Any) -> Any:
            if not isinstance(leaf, PerReplica):
                return leaf
            if leaf.whole is None:
                self._warn_of_parts()
                return leaf
            bounds = share_bounds(len(leaf.whole), total)
            count = len(leaf.values)
            return PerReplica(
                [leaf.whole[bounds[r] : bounds[r + 1]] for r in range(first, first + count)], leaf.whole
            )

        if isinstance(structure, DistributedValues):
            return split(structure)
        return map_structure(split, structure)

    def _warn_of_parts(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "run: a step is made again without the lost replicas' parts of its arguments: a PerReplica that is no share of a "
                "global batch, as of distribute_datasets_from_function, can't be split over the replicas that are left"
            )

    # -------------------------------------------------------------- newcomers

    def share(self, state: SharedState) -> None:
        """Say what newcomers are given; in a newcomer, wait until it is taken in, and take it over."""
        if current_replica() is not None:
            raise RuntimeError("share_state: called in a step; need it before the first step, outside of run")
        started = time.monotonic()
        self._newcomers.begin(state, self._living_variables)
        if not self._link.is_connected:
            _log.info("waiting until the others take this process in")
            self.again(self._newcomers.take_in)
            self._tell(started, "this process has come")

    def take_in(self, iterator: object = None) -> None:
        """Between two steps: take in whoever waits for it. All processes call it at the same place.

        Args:
            iterator: that asks for its next element, and is ready for newcomers only if these are given it; None if none does.
        """
        newcomers = self._newcomers
        newcomers.warn_of_waiting()
        if current_replica() is not None or not newcomers.can_begin_at(iterator):
            return
        while self.again(newcomers.are_there):
            started = time.monotonic()
            self.again(newcomers.take_in)
            self._tell(started, "others have come")

    # -------------------------------------------------------------- regrouping

    def _can_go_on(self, error: PeerFailedError) -> bool:
        channel = self._processes.channel
        return channel is not None and channel.elastic and error.process in channel.gone

    def _regroup(self, error: PeerFailedError, lost_step: int) -> None:
        started = time.monotonic()
        before = self._processes.num_processes
        self._inheritance.lost_step = lost_step
        try:
            self._processes.regroup(admit=False, timeout=self._timeout)
        finally:
            # Another strategy's loss is in none of this one's steps, and marks begin anew.
            self._inheritance.lost_step = 0
        now = self._processes.num_processes
        if now < self._min_workers:
            raise PeerFailedError(
                f"{error} — {now} of {before} processes are left, and min_workers is {self._min_workers}; the variables are as the last "
                "complete step left them: save a checkpoint now, or start the job again from one",
                error.process,
                error.text,
            ) from error
        if speaks_for_all():
            more = f" (and {before - now - 1} more)" if before - now > 1 else ""
            _log.warning("going on with %d of %d processes: %s%s", now, before, error, more)
        if self._newcomers.has_state:
            self._tell(started, str(error))

    def _tell(self, started: float, reason: str) -> None:
        """Tell the program what has changed since it was told last."""
        processes = self._processes
        before, self._told_names = self._told_names, processes.names
        lost = tuple(number for number, name in enumerate(before) if name not in processes.names)
        num_joined = sum(name not in before for name in processes.names) if before else 1
        if self._on_change is not None and (lost or num_joined):
            seconds = time.monotonic() - started
            numbers = processes.process, processes.num_processes, self._link.size
            self._on_change(MembershipChange(lost, num_joined, *numbers, seconds, reason))

    def _renewed(self) -> None:
        self._steps.renew()
        self._inheritance.map()

    def _described(self) -> list[str]:
        return sorted(f"{v.name} {v.dtype}{list(v.shape)}" for v in self._living_variables())

    def _living_variables(self) -> list[Variable]:
        self._variables = [reference for reference in self._variables if reference() is not None]
        return [variable for reference in self._variables if (variable := reference()) is not None]


def again(work: Callable[[], T]) -> T:
    """`Recovery.again` of what belongs to no strategy: by the first that there is, as all processes have made the same ones."""
    living = [one for reference in _all if (one := reference()) is not None]
    _all[:] = map(weakref.ref, living)
    return living[0].again(work) if living else work()


def _require_kept(
    journal: Journal, needs_copies: dict[Any, bool], kind: object, error: BaseException
) -> None:
    """Refuse to make a step again whose changes can't be taken back, from now on they are kept."""
    if not journal.can_roll_back:
        needs_copies[kind] = True
        error.add_note(
            "The step had updated variables before it lost a process, and makes a collective after that which it did not make "
            "before; it can't be made again — go on from a checkpoint"
        )
        raise error


def _kind_of(fn: Callable[..., Any]) -> object:
    """What tells a step's function apart from others, also where it is made anew for each step."""
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__code__", None) or type(fn)
