"""Going on when processes are lost, and taking in new ones, without a checkpoint on a disk.

A collective fails for all survivors or for none (see `SharedMemoryLink`), so all of them are at the same call when they notice.
They regroup over the hub, take back what the step under way has changed, split its batch over the replicas that are left,
and make it again. Newcomers are taken in between two steps, when all survivors have agreed that there are some; the
chief hands them the image of a checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, final

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from collectives.errors import PeerFailedError
from collectives.processes import Processes
from collectives.reduce_op import ReduceOp
from collectives.renewable_link import RenewableLink
from strategies.datasets.splitting import share_bounds
from strategies.membership_change import MembershipChange
from strategies.steps import Steps
from variables.journal import Journal
from variables.replica_context import current_replica
from variables.values import PerReplica, map_structure

T = TypeVar("T")

_log = logging.getLogger("xpdistribute")

_AGREE = Call("are there newcomers")
_STATE = Call("the state for newcomers")


class SharedState(Protocol):
    """What newcomers are given: a `Checkpoint`."""

    def to_bytes(self, *, for_newcomer: bool) -> Array:
        """All values that a newcomer begins with; so asked for, not a collective."""

    def from_bytes(self, content: Any) -> object:
        """Take the values over; not a collective."""


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
    """

    def __init__(
        self,
        processes: Processes,
        link: RenewableLink,
        steps: Steps,
        on_change: Callable[[MembershipChange], object] | None,
        timeout: float,
        set_journal: Callable[[Journal | None], None],
    ) -> None:
        self._processes = processes
        self._link = link
        self._steps = steps
        self._on_change = on_change
        self._timeout = timeout
        self._set_journal = set_journal
        self._state: SharedState | None = None
        self._is_in_step = False
        self._needs_copies: dict[Any, bool] = {}
        processes.on_renewal(self._renewed)

    # ------------------------------------------------------------------- steps

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A step, made again as often as processes are lost in it."""
        key = getattr(fn, "__code__", type(fn))
        while True:
            journal = Journal(lambda: self._link.num_calls, copies_updates=self._needs_copies.get(key, True))
            self._set_journal(journal)
            self._is_in_step = True
            try:
                result = self._steps.run(0, fn, args, kwargs)
            except PeerFailedError as error:
                self._is_in_step = False
                self._set_journal(None)
                if not self._can_go_on(error):
                    raise
                if not journal.can_roll_back:
                    self._needs_copies[key] = True
                    error.add_note(
                        "The step had updated variables before it lost a process, and makes a collective after that which it did not make "
                        "before; it can't be made again — go on from a checkpoint"
                    )
                    raise
                journal.roll_back()
                self._regroup(error)
                args, kwargs = self._split_anew(args), self._split_anew(dict(kwargs))
            else:
                calls = journal.num_calls_at_update
                self._needs_copies[key] = calls is not None and self._link.num_calls > calls
                return result
            finally:
                self._is_in_step = False
                self._set_journal(None)

    def again(self, work: Callable[[], T]) -> T:
        """What all processes do together between steps, done again as often as processes are lost in it."""
        while True:
            try:
                return work()
            except PeerFailedError as error:
                if self._is_in_step or current_replica() is not None or not self._can_go_on(error):
                    raise
                self._regroup(error)

    def _split_anew(self, structure: Any) -> Any:
        """The structure with this process's shares of global batches, now that there are others to share them with."""
        first, total = self._link.first, self._link.size

        def split(leaf: Any) -> Any:
            if not isinstance(leaf, PerReplica) or leaf.whole is None:
                return leaf
            bounds = share_bounds(len(leaf.whole), total)
            count = len(leaf.values)
            return PerReplica(
                [leaf.whole[bounds[r] : bounds[r + 1]] for r in range(first, first + count)], leaf.whole
            )

        return map_structure(split, structure)

    # -------------------------------------------------------------- newcomers

    def share(self, state: SharedState) -> None:
        """Say what newcomers are given; in a newcomer, wait until it is taken in, and take it over."""
        self._state = state
        if self._link.is_connected:
            return
        _log.info("waiting until the others take this process in")
        started = time.monotonic()
        self._processes.regroup(admit=True, timeout=self._timeout)
        state.from_bytes(self._hand_over(state))
        self._tell(
            MembershipChange((), 1, *self._numbers(), time.monotonic() - started, "this process has come")
        )

    def take_in(self) -> None:
        """Between two steps: take in whoever waits for it. All processes call it at the same place."""
        if self._state is None or current_replica() is not None:
            return
        while self.again(self._agreed_newcomers):
            self.again(self._take_in_now)

    def _agreed_newcomers(self) -> int:
        channel = self._processes.channel
        waiting = np.array([0 if channel is None else channel.newcomers], np.int64)
        call = Call(_AGREE.kind, (ReduceOp.MIN, (waiting.dtype, waiting.shape)))
        count = self._link.counts[self._link.process]
        self._link.fold(call, ReduceOp.MIN, [[waiting.copy()] for _ in range(count)], [[waiting]])
        return int(waiting[0])

    def _take_in_now(self) -> None:
        assert self._state is not None
        started = time.monotonic()
        before = self._processes.num_processes
        self._processes.regroup(admit=True, timeout=self._timeout)
        self._hand_over(self._state)
        joined = self._processes.num_processes - before
        self._tell(
            MembershipChange((), joined, *self._numbers(), time.monotonic() - started, f"{joined} have come")
        )

    def _hand_over(self, state: SharedState) -> Array:
        """The chief's values, on all processes. The chief is one of those who were there before."""
        link = self._link
        data = None if link.process else state.to_bytes(for_newcomer=True)
        length: Any = link.gather_objects(
            _STATE, [None if data is None else len(data)] * link.counts[link.process]
        )
        target = np.empty(length[0], np.uint8) if data is None else data
        link.broadcast(_STATE, 0, data, [target])
        return target

    # -------------------------------------------------------------- regrouping

    def _can_go_on(self, error: PeerFailedError) -> bool:
        channel = self._processes.channel
        return channel is not None and channel.elastic and error.process in channel.gone

    def _regroup(self, error: PeerFailedError) -> None:
        channel = self._processes.channel
        assert channel is not None
        started = time.monotonic()
        lost = sorted(channel.gone)
        before = self._processes.num_processes
        self._processes.regroup(admit=False, timeout=self._timeout)
        change = MembershipChange(tuple(lost), 0, *self._numbers(), time.monotonic() - started, str(error))
        _log.warning(
            "going on with %d of %d processes: %s", self._processes.num_processes, before, change.reason
        )
        self._tell(change)

    def _numbers(self) -> tuple[int, int, int]:
        return self._processes.process, self._processes.num_processes, self._link.size

    def _tell(self, change: MembershipChange) -> None:
        if self._on_change is not None:
            self._on_change(change)

    def _renewed(self) -> None:
        self._steps.renew()
