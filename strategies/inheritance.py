"""What is left of ON_READ variables when a process is lost: what it had added to sums is kept by all the others.

Every process has the copies of the others of its host mapped while these are alive. Of one that is gone, they tell all who are left, and
all of these keep it, so that it is there as long as any of them is. Of a host that is gone as a whole nothing is left.
"""

from __future__ import annotations

import itertools
import os
import weakref
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from collectives.renewable_link import RenewableLink
from collectives.shared_memory.segments import PeerSegments, host_identity, own_segments
from variables.lent_copies import left_in
from variables.sync_on_read_variable import SyncOnReadVariable

_Who = tuple[int, str]
"""A process: its process id, and what all processes of its host have in common."""

_WHERE = Call("where sums lie")
_OPENED = Call("sums of the other processes are mapped")
_LEFT = Call("sums of lost processes")
_KNOWN = Call("all sums of lost processes")


@final
class Inheritance:
    """Of the variables of one strategy.

    Attributes:
        lost_step: the mark of the step that is made again, in which a process was lost; 0 for none.

    Args:
        link: to the other processes.
    """

    def __init__(self, link: RenewableLink) -> None:
        self.lost_step = 0
        self._link = link
        self._variables: dict[str, weakref.ref[SyncOnReadVariable]] = {}
        self._mapped: dict[_Who, _Estate] = {}

    def add(self, variable: SyncOnReadVariable) -> None:
        """Note a new variable; a collective, once this process has been taken in."""
        if variable.copies[0].lent is not None:
            same, alive = f"{variable.name} {variable.dtype} {variable.shape}", self._alive()
            number = next(number for number in itertools.count() if f"{same} {number}" not in alive)
            self._variables[f"{same} {number}"] = weakref.ref(variable)
            if self._link.is_connected:
                self.map()

    def told_by(self, root: int) -> dict[str, Array | None]:
        """What has been taken over, for `take`; a collective.

        Args:
            root: a member of a process that knows.
        """
        link = self._link
        own = {key: variable.inherited for key, variable in self._alive().items()}
        is_root = link.process_of(root) == link.process
        told: list[Any] = link.gather_objects(_KNOWN, [own if is_root else None] * link.counts[link.process])
        inherited: dict[str, Array | None] = told[root]
        return inherited

    def take(self, told: dict[str, Array | None]) -> None:
        """Know what the others know, once the variables have their values."""
        for key, variable in self._alive().items():
            variable.inherited = told.get(key)

    def map(self) -> None:
        """Take over what processes that are gone had, and map what those have that are there; a collective."""
        link = self._link
        segments, places = own_segments(), {}
        for key, variable in self._alive().items():
            lent = variable.copies[0].lent
            assert lent is not None
            places[key] = tuple(segments.locate(lent.memory.ctypes.data))
            if not link.num_calls:
                lent.forget_marks()  # of steps before the numbering began anew
        mine = (os.getpid(), host_identity())
        told: list[Any] = link.gather_objects(_WHERE, [(mine, places)] * link.counts[link.process])
        by_process = [told[start] for start in link.starts[:-1]]
        self._take_over({who for who, _ in by_process})
        estates: dict[_Who, _Estate] = {}
        failure = None
        for process, (who, others) in enumerate(by_process):
            if process == link.process or who[1] != mine[1]:
                continue
            try:
                known = self._mapped.get(who, _Estate(link.counts[process]))
                estates[who] = known.extended(who[0], others)
            except RuntimeError as error:
                failure = error
        success: list[Any] = link.gather_objects(_OPENED, [failure is None] * link.counts[link.process])
        if not all(success):
            # One that has died meanwhile does not come here; then all hear of that.
            link.barrier(_OPENED)
            raise failure or RuntimeError("sums of other processes: some process can't map them")
        self._mapped = estates

    def _take_over(self, there: set[_Who]) -> None:
        """Add what those had that are gone; a collective, as only processes of the same host know."""
        link, alive = self._link, self._alive()
        found = {
            who: estate.left(alive, self.lost_step)
            for who, estate in self._mapped.items()
            if who not in there
        }
        told: list[Any] = link.gather_objects(_LEFT, [found] * link.counts[link.process])
        everybody: dict[_Who, dict[str, list[Array]]] = {}
        for one in told:
            everybody.update(one)
        for left in (everybody[who] for who in sorted(everybody)):
            for key, variable in alive.items():
                if key in left:
                    before = [] if variable.inherited is None else [variable.inherited]
                    with np.errstate(over="ignore"):
                        variable.inherited = np.sum([*before, *left[key]], axis=0, dtype=variable.dtype)
        # Not to be taken over again, if something fails from here on.
        self._mapped = {who: estate for who, estate in self._mapped.items() if who in there}

    def _alive(self) -> dict[str, SyncOnReadVariable]:
        found = {key: reference() for key, reference in self._variables.items()}
        return {key: variable for key, variable in found.items() if variable is not None}


@final
class _Estate:
    """What is mapped of another process.

    Attributes:
        memory: of its copies, by variable.
        num_copies: how many it has of each.
    """

    def __init__(self, num_copies: int, memory: dict[str, Array] | None = None) -> None:
        self.num_copies = num_copies
        self.memory = {} if memory is None else memory

    def left(self, variables: dict[str, SyncOnReadVariable], lost_step: int) -> dict[str, list[Array]]:
        """What there is of these variables, without what was done in a step that is made again."""
        return {
            key: left_in(self.memory[key], self.num_copies, variable.shape, variable.dtype, lost_step)
            for key, variable in variables.items()
            if key in self.memory
        }

    def extended(self, pid: int, places: dict[str, tuple[int, int, int, int]]) -> _Estate:
        """This, with all that it has now.

        Raises:
            RuntimeError: it can't be opened.
        """
        peer = PeerSegments(pid, f"the process with pid {pid}")
        memory = {}
        for key, (descriptor, _, num_bytes, offset) in places.items():
            if key in self.memory:
                memory[key] = self.memory[key]
            else:
                memory[key] = peer.open(descriptor, num_bytes)[offset:]
        return _Estate(self.num_copies, memory)
