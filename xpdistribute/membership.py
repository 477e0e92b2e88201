"""What follows from what the hub tells: who failed first, who is replaced, and whether the job has ended well.

It decides only; the launcher kills and starts. Loaded when the first event comes, as programs that don't use the
library have none.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias, final

from xpdistribute.events import Event, Failed, Joined, Left, Lost, Regrouped, Silent


class Loss(NamedTuple):
    """A process that the job has lost.

    Args:
        process: its rank; None where it isn't known.
        pid: of it; 0 if it never came.
        host: of it; "" if it never came.
        text: what it said last; empty if it went without a word.
        has_died: whether it went without a word.
    """

    process: int | None
    pid: int
    host: str
    text: str
    has_died: bool


class Decision(NamedTuple):
    """What is to be done.

    Args:
        ends_job: whether the others have to end too.
        kill: process id and identity of a process that does not answer, to be killed first.
        replace: the rank in whose place another process is to be started.
        say: a line for the user.
        lost: what has happened, where nothing more can be done about it.
        at_once: whether not to wait and see if the others go the same way, as with an error in the program.
    """

    ends_job: bool = False
    kill: tuple[int, str] | None = None
    replace: int | None = None
    say: str | None = None
    lost: str | None = None
    at_once: bool = False


_Process: TypeAlias = tuple[str, int]
"""Its host and its process id there: containers of several hosts count from 1 each."""


class _Standing(Enum):
    NEW = "it has come, and was not taken in yet"
    HERE = "it takes part"
    LEFT = "it has ended in good order"
    GONE = "it has failed or died"


@final
class Membership:
    """The processes of the job as the hub sees them.

    Args:
        num_processes: how many there are at first.
        elastic: whether the others go on when one is lost.
        num_spares: how many more were started, which take the places of the lost by themselves.
        replacements: how many times each process is replaced then, where there are no spares.
        host: of the launcher, the only one on which it can start and kill processes; None if there is no other.
    """

    def __init__(
        self,
        num_processes: int,
        *,
        elastic: bool,
        replacements: int,
        host: str | None,
        num_spares: int = 0,
    ) -> None:
        self.loss: Loss | None = None
        """Why the job has ended, if it has not ended well: the first that was lost for a reason of its own; in an elastic
        job, which goes on without those, the first since it went on for the last time."""
        self.have_left: set[int | None] = set()
        """The ranks that have said goodbye. Where nobody sees their statuses, one of them may have failed all the same."""
        self._goes_on_after_loss = False
        self._num_awaited = num_processes  # of those that it starts with: they have not come yet
        self._elastic = elastic
        self._replacements = replacements
        self._has_spares, self._num_spares_left = num_spares > 0, num_spares
        self._host = host
        self._standings: dict[_Process, _Standing] = {}
        self._hosts: set[str] = set()
        self._has_said_why = False
        self._past: dict[_Process, _Standing] = {}  # those that the others go on without, as they stood last
        self._replaced: dict[int, int] = {}  # how many times, by rank

    @property
    def has_ended_well(self) -> bool:
        """Whether all who went on together to the end have left in good order."""
        members = [one for one in self._standings.values() if one is not _Standing.NEW]
        return bool(members) and all(one is _Standing.LEFT for one in members)

    @property
    def can_take_in(self) -> bool:
        """Whether anybody is left whom a newcomer could join; one that has not come yet may still."""
        return self._num_awaited > 0 or _Standing.HERE in self._standings.values()

    def has_taken_in(self, pid: int) -> bool:
        """Whether a process of this machine is, or has been, one of those who go on together."""
        return any(
            own == pid and standing is not _Standing.NEW
            for (_, own), standing in [*self._standings.items(), *self._past.items()]
        )

    def knows(self, pid: int) -> bool:
        """Whether a process of this machine has ever joined."""
        return any(own == pid for _, own in [*self._standings, *self._past])

    def handle(self, event: Event | Regrouped, rank: int | None) -> Decision:
        """Take in what has happened.

        Args:
            event: what.
            rank: of the process, as the launcher numbers them: the same for all that take one place, while the hub's numbers
                change when the processes regroup. None where it isn't known.
        """
        if isinstance(event, Regrouped):
            # Those who are not among them are no longer waited for.
            new = {who: one for who, one in self._standings.items() if one is _Standing.NEW}
            before = {who: one for who, one in self._standings.items() if one is not _Standing.NEW}
            members = zip(event.hosts, event.pids, strict=True)
            self._standings = {**new, **{who: before.get(who, _Standing.HERE) for who in members}}
            # But they stay known: that their processes end is no news for the others, whose numbers may be theirs by now.
            self._past.update({who: one for who, one in before.items() if who not in self._standings})
            self._goes_on_after_loss, self._num_awaited = True, 0
        elif isinstance(event, Joined):
            self._past.pop(_process(event), None)  # the system gives numbers anew
            self._standings[_process(event)] = _Standing.NEW if event.process is None else _Standing.HERE
            self._num_awaited -= event.process is not None
            if event.process is not None:
                self._hosts.add(event.host)
        elif isinstance(event, Left):
            self.have_left.add(rank)
            self._standings[_process(event)] = _Standing.LEFT
        elif isinstance(event, (Failed, Lost, Silent)):
            return self._lose(event, rank)
        return Decision()

    def newcomer_ended(self, rank: int, pid: int, status: int) -> Decision:
        """Take in that a process which was to replace a rank has ended before it joined."""
        return self._replace(
            rank, f"rank {rank} (pid {pid}) ended with status {status} before it joined", None
        )

    def _lose(self, event: Failed | Lost | Silent, rank: int | None) -> Decision:
        process = _process(event)
        is_new = self._standings.get(process) is _Standing.NEW
        if is_new:
            self._past[process] = self._standings.pop(process)
        elif event.pid:
            self._standings[process] = _Standing.GONE
        else:
            self._num_awaited -= 1
        follows = isinstance(event, Failed) and event.follows is not None
        is_idle = is_new and self._has_spares
        if not follows and not is_idle and (self.loss is None or (self._goes_on_after_loss and not is_new)):
            text = "" if isinstance(event, Silent) else event.text
            self.loss = Loss(rank, event.pid, event.host, text, isinstance(event, Lost))
            self._goes_on_after_loss = False
        if not self._elastic:
            return Decision(ends_job=True)
        is_here = self._host is None or event.host in ("", self._host)
        kill = (event.pid, event.identity) if isinstance(event, Silent) and is_here and event.pid else None
        if is_idle:
            return Decision(kill=kill, say=self._lose_spare(event))
        if rank is None:
            return Decision(kill=kill)
        where = f" (pid {event.pid}, host {event.host})" if event.pid else ""
        what = f"rank {rank}{where} {_fate(event)}"
        if self._has_spares:
            return Decision(kill=kill, say=self._take_spare(what))
        if not is_here:
            return Decision(
                kill=kill,
                say=f"{what}; none can be started in its place on another host than this, so the others go on without it (--spares K keeps "
                "some ready)",
            )
        if len(self._hosts) > 1:
            # MPI connects the processes of several hosts, and knows only those that it has started with.
            why = (
                ""
                if self._has_said_why
                else ", as nobody can join processes of several hosts later (--spares K keeps some ready)"
            )
            self._has_said_why = True
            return Decision(kill=kill, say=f"{what}; the others go on without it{why}")
        return self._replace(rank, what, kill)._replace(at_once=not isinstance(event, Failed))

    def _lose_spare(self, event: Failed | Lost | Silent) -> str:
        self._num_spares_left = max(0, self._num_spares_left - 1)
        return f"a spare (pid {event.pid}, host {event.host}) {_fate(event)}, {self._num_spares_left} left"

    def _take_spare(self, what: str) -> str:
        if not self._num_spares_left:
            return f"{what}; no spare is left, so the others go on without it"
        self._num_spares_left -= 1
        return f"{what}; a spare will take its place, {self._num_spares_left} left"

    def _replace(self, rank: int, what: str, kill: tuple[int, str] | None) -> Decision:
        if not self.can_take_in:
            return Decision(kill=kill)
        times = self._replaced.get(rank, 0)
        if times >= self._replacements:
            why = f"it has been replaced {times} times" if times else "--max-restarts is 0"
            return Decision(kill=kill, say=f"{what}; {why}, so the others go on without it", lost=what)
        self._replaced[rank] = times + 1
        say = f"{what}; another one is started in its place ({times + 1} of {self._replacements})"
        return Decision(kill=kill, replace=rank, say=say, lost=what)


def _process(event: Event) -> _Process:
    return event.host, event.pid


def _fate(event: Failed | Lost | Silent) -> str:
    if isinstance(event, Silent):
        return "does not answer and is treated as dead"
    if isinstance(event, Lost):
        return "has died"
    lines = event.text.strip().splitlines()
    return f"has failed ({lines[-1].strip()})" if lines else "has failed"
