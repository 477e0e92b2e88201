"""Processes that come later: when they are taken in, and what they are given."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from collectives.errors import CollectiveTimeoutError, in_words
from collectives.processes import Processes
from collectives.reduce_op import ReduceOp
from collectives.renewable_link import RenewableLink
from strategies.inheritance import Inheritance
from variables.sharded_variable import ShardedVariable
from variables.variable import Variable

_log = logging.getLogger("xpdistribute")

_AGREE = Call("are there newcomers", (ReduceOp.MIN, (np.dtype(np.int64), (1,))))
_STATE = Call("the state for newcomers")
_MOST_NAMES = 20


class Outcome(Protocol):
    """What came of taking values over, by names."""

    @property
    def missing(self) -> list[str]:
        """Of objects that there was no value for."""

    @property
    def unused(self) -> list[str]:
        """Of values that no object has taken."""

    def expect_partial(self) -> Any:
        """Say that this is looked at."""


class SharedState(Protocol):
    """What newcomers are given: a `Checkpoint`."""

    @property
    def objects(self) -> dict[str, Any]:
        """What it holds, by name; groups of objects, lists and dicts among them."""

    def to_bytes(self, *, for_newcomer: bool) -> Array:
        """All values that a newcomer begins with; so asked for, not a collective."""

    def from_bytes(self, content: Any) -> Outcome:
        """Take the values over; not a collective."""


@final
class Newcomers:
    """What one strategy does for processes that come later, and in them.

    Attributes:
        has_state: whether this process has what the others have: from the start, or by being given it.
        num_made: how many variables the strategy has made.

    Args:
        processes: of the job.
        link: between them.
        inheritance: of lost processes, which newcomers are given too.
        timeout: seconds to wait for the others.
    """

    def __init__(
        self, processes: Processes, link: RenewableLink, inheritance: Inheritance, timeout: float
    ) -> None:
        self.has_state = link.is_connected
        self.num_made = 0
        self._processes = processes
        self._link = link
        self._inheritance = inheritance
        self._timeout = timeout
        self._state: SharedState | None = None
        self._held: dict[int, object] = {}
        self._changed: dict[int, weakref.ref[Any]] = {}
        self._num_checked = (-1, -1, -1)
        self._refusal: str | None = None
        self._has_warned = False
        self._waiting, self._fewest = np.zeros(1, np.int64), np.zeros(1, np.int64)

    def begin(self, state: SharedState, variables: Callable[[], Sequence[Variable]]) -> None:
        """Say what newcomers are given.

        Args:
            state: that.
            variables: gives all of the strategy's.

        Raises:
            ValueError: not all that steps change is in it.
        """
        self._state = state
        self._num_checked = (-1, -1, -1)
        self.require_complete(variables)

    def note(self, changed: object) -> None:
        """A step changes an object that is no variable."""
        if id(changed) not in self._changed:
            self._changed[id(changed)] = weakref.ref(changed)

    def require_complete(self, variables: Callable[[], Sequence[Variable]]) -> None:
        """Check that all that steps change is in the state, where it may have become more since the last time.

        Raises:
            ValueError: it is not; on all processes at the same place.
        """
        state = self._state
        if state is None:
            return
        num = (self.num_made, len(self._changed), len(state.objects))
        if num == self._num_checked:
            return
        there = variables()
        self._held = {id(one): one for one in _leaves(state.objects)}
        missing = [v.name for v in there if id(v) not in self._held]
        alive = [one for reference in self._changed.values() if (one := reference()) is not None]
        missing += [getattr(one, "name", type(one).__name__) for one in alive if id(one) not in self._held]
        if missing:
            more = f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
            raise ValueError(
                f"share_state: got a state without {', '.join(sorted(missing)[:_MOST_NAMES])}{more}, in which a process that comes "
                "later would differ from the others; need all variables of the strategy, and all optimizers and other objects that "
                "steps change — Checkpoint(model=..., optimizer=..., iterator=...)"
            )
        self._num_checked = num

    def warn_of_waiting(self) -> None:
        """Say once that there are newcomers which can't be taken in, if so."""
        channel = self._processes.channel
        if channel is None or not channel.newcomers or self._has_warned:
            return
        if self._state is None:
            self._has_warned = True
            _log.warning(
                "%d processes wait to be taken in, which needs strategy.share_state(checkpoint) before the first step; the others go on "
                "without them",
                channel.newcomers,
            )

    def can_begin_at(self, iterator: object) -> bool:
        """Whether newcomers may be taken in where this iterator is asked for its next element."""
        if self._state is None or self._refusal is not None:
            return False
        return iterator is None or id(iterator) in self._held

    def are_there(self) -> bool:
        """Whether all processes know of some; a collective."""
        own, fewest = self._waiting, self._fewest
        own[0] = self._processes.newcomers
        count = self._link.counts[self._link.process]
        self._link.fold(_AGREE, ReduceOp.MIN, [[own]] * count, [[fewest]])
        return bool(fewest[0])

    def take_in(self) -> None:
        """Take in all that wait, and give them the state; in a newcomer, wait for that. All call it.

        Raises:
            CollectiveTimeoutError: in a newcomer, the others don't take it in.
            RuntimeError: in a newcomer, nobody is left that has the state, or it can't be given.
            ValueError: in a newcomer, the state does not fit its program.
        """
        assert self._state is not None
        try:
            self._processes.regroup(admit=True, timeout=self._timeout)
        except CollectiveTimeoutError as late:
            if self._link.is_connected:
                raise
            raise CollectiveTimeoutError(
                f"share_state: this process waited {self._timeout:g} s to be taken in ({late}); need the others to call share_state too, "
                "and then next() on an iterator of the state, or take_in_newcomers() — or more time: timeout_seconds",
                late.missing,
            ) from None
        self._hand_over(self._state)

    def _hand_over(self, state: SharedState) -> None:
        link = self._link
        count = link.counts[link.process]
        have: list[Any] = link.gather_objects(_STATE, [self.has_state] * count)
        root = next((member for member, has in enumerate(have) if has), None)
        if root is None:
            raise RuntimeError(
                "share_state: all processes that had the state are gone; need a checkpoint to begin from — start the job again"
            )
        data, failure = None, None
        if link.process_of(root) == link.process:
            try:
                data = state.to_bytes(for_newcomer=True)
            except Exception as error:  # noqa: BLE001  # those that have the state go on, whatever is wrong with it
                failure = in_words(error)
        told: list[Any] = link.gather_objects(_STATE, [(0 if data is None else len(data), failure)] * count)
        length, failure = told[root]
        if failure is not None:
            if not self.has_state:
                raise RuntimeError(f"share_state: the state can't be given to this process: {failure}")
            self._refusal = failure
            _log.warning("no process is taken in any more, as the state can't be given to it: %s", failure)
            return
        target = np.empty(length, np.uint8) if data is None else data
        link.broadcast(_STATE, root, data, [target])
        inherited = self._inheritance.told_by(root)
        if not self.has_state:
            outcome = state.from_bytes(target)
            outcome.expect_partial()
            if outcome.missing or outcome.unused:
                raise ValueError(
                    f"share_state: this process, which has come later, has {outcome.missing or 'nothing'} that the others' state lacks, "
                    f"and lacks {outcome.unused or 'nothing'} of it; need the same program"
                )
            self._inheritance.take(inherited)
            self.has_state = True


def _leaves(value: Any) -> list[Any]:
    """All objects in a state, groups of objects and what they hold among them."""
    found = [value]
    parts: Sequence[Any] = ()
    if isinstance(value, Variable):
        parts = value.shards if isinstance(value, ShardedVariable) else ()
    elif isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    elif callable(getattr(value, "state", None)) and callable(getattr(value, "restore", None)):
        # What tells its state in its own way, as metrics do, answers for the variables that are its own.
        parts = [one for one in getattr(value, "__dict__", {}).values() if isinstance(one, Variable)]
    else:
        # A group of objects, a model, or an optimizer around another one.
        held = [getattr(value, name, None) for name in ("objects", "variables", "inner_optimizer")]
        parts = [one for one in held if one is not None and not callable(one)]
    return found + [one for part in parts for one in _leaves(part)]
