"""What the hub tells the launcher, carried out: who is killed, who is replaced, whose output is shown, and who is not missed.

What is to be done is decided in `xpdistribute.membership`.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from xpdistribute.outcome import own_host
from xpdistribute.output import ERR, Output
from xpdistribute.rank_processes import RankProcesses, send

if TYPE_CHECKING:
    from xpdistribute.events import Event, Regrouped
    from xpdistribute.hub import Hub
    from xpdistribute.membership import Decision, Membership

_TO_FAIL = 4.0
"""Seconds that mpiexec has to end the others when a rank has failed; some don't do it by themselves."""
_TO_FAIL_TOO = 0.3
"""Seconds that the others have to raise the same as the one that is to be replaced: when nobody is left, none is started."""
_TO_HEAR = 0.3
"""Seconds that the hub has to tell what it knew of a process that has ended."""


@final
class HubReports:
    """What has been told so far, and what is done about it.

    Args:
        processes: of this machine.
        output: of the job.
        replace: starts a process in the place of a rank, if the job is not ending.
        end_by: ends the job at a `time.monotonic`, or before.
        num_processes: how many there are at first.
        is_local: whether all ranks are on this machine.
        elastic: whether the others go on when one dies.
        num_spares: how many more were started.
        replacements: how many times each process is replaced then, where there are no spares.

    Attributes:
        members: what has been told; None as long as there is nothing.
        is_muted: whether the user has ended the job, so that nobody is replaced or missed any more.
    """

    def __init__(
        self,
        processes: RankProcesses,
        output: Output,
        replace: Callable[[int], None],
        end_by: Callable[[float], None],
        *,
        num_processes: int,
        num_spares: int,
        is_local: bool,
        elastic: bool,
        replacements: int,
    ) -> None:
        self.members: Membership | None = None
        self.is_muted = False
        self._processes = processes
        self._output = output
        self._replace = replace
        self._end_by = end_by
        self._num_processes, self._num_spares = num_processes, num_spares
        self._is_local = is_local
        self._elastic = elastic
        self._replacements = replacements
        self._declared: set[int] = set()  # ranks that the hub was told are dead
        self._told: dict[int, int] = {}  # by rank, the process ids of those whose status the hub was told
        self._ranks: dict[tuple[str, int], int] = {}  # by host and process id, of all that have joined
        self._decided: deque[tuple[float, Decision]] = deque()  # what is done about the lost, and when

    def take(self, event: Event | Regrouped) -> None:
        """Do what follows from what has happened."""
        from xpdistribute.events import Joined, Regrouped  # noqa: PLC0415  # as below

        if self.members is None:
            from xpdistribute.membership import Membership  # noqa: PLC0415  # loaded while the ranks start

            self.members = Membership(
                self._num_processes,
                elastic=self._elastic,
                num_spares=self._num_spares,
                replacements=self._replacements,
                host=None if self._is_local else own_host(),
            )
        if isinstance(event, Regrouped):
            # Process 0 prints and writes files for all, whichever rank it is by now.
            self._output.follow(self._ranks.get((event.hosts[0], event.pids[0]), self._output.speaker))
            self._obey(self.members.handle(event, None))
            return
        if isinstance(event, Joined):
            self._ranks.pop((event.host, event.pid), None)  # the system gives numbers anew
        self._obey(self.members.handle(event, self._rank_of(event)))
        if self._elastic and not self.members.can_take_in:
            # That there is nobody left whom they could join is no news of theirs, but the end of the job.
            pids = self._processes.pids()
            for rank in self._processes.newcomers:
                if not self.members.has_taken_in(pids.get(rank, 0)):
                    self._output.hidden.add((rank, ERR))

    def act(self, now: float) -> None:
        """Do what was put off until now."""
        while self._decided and now >= self._decided[0][0]:
            self._act_on(self._decided.popleft()[1])

    def look(self, hub: Hub) -> None:
        """Tell the hub how ranks have ended, also those that never talked to it, while others wait for them."""
        if self.members is None or not self._is_local:
            return
        if self._elastic and not self.members.can_take_in:
            # Newcomers that nobody is left to take in would wait for the end of their time.
            for rank in self._processes.newcomers:
                if not self.members.has_taken_in(self._processes.pids().get(rank, 0)):
                    self._processes.kill_newcomer(rank)
        just_now = time.monotonic() - _TO_HEAR
        processes = self._processes
        pids = processes.pids() if processes.statuses else {}
        for rank, status in list(processes.statuses.items()):
            if rank in pids and self._told.get(rank) != pids[rank]:
                self._told[rank] = pids[rank]
                hub.ended(rank, pids[rank], status)
            if rank not in pids or processes.ended_at[rank] > just_now or self.members.knows(pids[rank]):
                continue
            if rank in processes.newcomers:
                # The hub's numbers are others by now, and it waits for nobody in this place.
                processes.ended_at[rank] = float("inf")
                if status:
                    self._obey(self.members.newcomer_ended(rank, pids[rank], status))
            elif rank not in self._declared:
                self._declared.add(rank)
                what = f"its process (pid {pids[rank]}) ended with status {status} without joining the job"
                hub.declare_lost(rank, what, pids[rank])

    def _rank_of(self, event: Event) -> int | None:
        """The rank of a process: of all that take one place the same, while the hub's numbers change."""
        known = self._ranks.get((event.host, event.pid))
        if known is not None:
            return known
        is_here = self._is_local or event.host == own_host()
        rank = self._processes.rank_of(event.pid) if is_here else None
        if rank is None:
            # On other hosts, before the processes have regrouped, the hub's numbers are the ranks.
            rank = event.process
        if rank is not None and event.pid:
            self._ranks[event.host, event.pid] = rank
        return rank

    def _obey(self, decision: Decision) -> None:
        if decision.ends_job:
            self._end_by(time.monotonic() + _TO_FAIL)
        if decision.kill is not None:
            pid, identity = decision.kill
            send(pid, signal.SIGKILL, identity)
        if decision.say is None:
            return
        if decision.at_once:
            self._act_on(decision)
        else:
            self._decided.append((time.monotonic() + _TO_FAIL_TOO, decision))

    def _act_on(self, decision: Decision) -> None:
        assert self.members is not None
        assert decision.say is not None
        if self.is_muted:
            return
        if self.members.can_take_in:
            self._output.tell(decision.say)
            if decision.replace is not None:
                self._replace(decision.replace)
        elif self.members.has_ended_well:
            # Nobody was started in its place; all else is as it is said.
            self._output.tell(decision.say if decision.replace is None else decision.lost or decision.say)
