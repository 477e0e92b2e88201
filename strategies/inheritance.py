"""What is left of ON_READ variables when a process is lost: what it had added to sums is kept by all the others.

Every process has the copies of all others mapped while these are alive. Of one that is gone, all who are left read the same, so
they need not agree on it, and it survives as long as any of them.
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
from collectives.shared_memory.segments import PeerSegments, own_segments
from variables.lent_copies import left_in
from variables.sync_on_read_variable import SyncOnReadVariable

_WHERE = Call("where sums lie")
_OPENED = Call("sums of the other processes are mapped")
_LEFT = Call("sums of lost processes")


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
        self._mapped: dict[int, _Estate] = {}

    def add(self, variable: SyncOnReadVariable) -> None:
        """Note a new variable; a collective, once this process has been taken in."""
        if variable.copies[0].lent is not None:
            same, alive = f"{variable.name} {variable.dtype} {variable.shape}", self._alive()
            number = next(number for number in itertools.count() if f"{same} {number}" not in alive)
            self._variables[f"{same} {number}"] = weakref.ref(variable)
            if self._link.is_connected:
                self.map()

    def hand_over(self, root: int) -> None:
        """Give newcomers what has been taken over; all call it.

        Args:
            root: a member of a process that knows.
        """
        link = self._link
        own = {key: variable.inherited for key, variable in self._alive().items()}
        is_root = link.process_of(root) == link.process
        told: list[Any] = link.gather_objects(_LEFT, [own if is_root else None] * link.counts[link.process])
        for key, variable in self._alive().items():
            if key in told[root]:
                variable.inherited = told[root][key]

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
        told: list[Any] = link.gather_objects(_WHERE, [(os.getpid(), places)] * link.counts[link.process])
        by_process = [told[start] for start in link.starts[:-1]]
        self._take_over([pid for pid, _ in by_process])
        estates: dict[int, _Estate] = {}
        failure = None
        for process, (pid, others) in enumerate(by_process):
            if process == link.process:
                continue
            try:
                known = self._mapped.get(pid, _Estate(link.counts[process]))
                estates[pid] = known.extended(pid, others)
            except RuntimeError as error:
                failure = error
        success: list[Any] = link.gather_objects(_OPENED, [failure is None] * link.counts[link.process])
        if not all(success):
            # One that has died meanwhile does not come here; then all hear of that.
            link.barrier(_OPENED)
            raise failure or RuntimeError("sums of other processes: some process can't map them")
        self._mapped = estates

    def _take_over(self, there: list[int]) -> None:
        for pid in [pid for pid in self._mapped if pid not in there]:
            estate = self._mapped.pop(pid)
            for key, variable in self._alive().items():
                if key in estate.memory:
                    left = left_in(
                        estate.memory[key], estate.num_copies, variable.shape, variable.dtype, self.lost_step
                    )
                    before = [] if variable.inherited is None else [variable.inherited]
                    with np.errstate(over="ignore"):
                        variable.inherited = np.sum([*before, *left], axis=0, dtype=variable.dtype)

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
