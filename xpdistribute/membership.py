"""What follows from what the hub tells: who failed first, who is replaced, and whether the job has ended well.

It decides only; the launcher kills and starts. Loaded when the first event comes, as programs that don't use the
library have none.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, final

from xpdistribute.events import Event, Failed, Joined, Left, Lost, Regrouped, Silent


class Loss(NamedTuple):
    """A process that the job has lost.

    Args:
        process: its number; None for a newcomer.
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
        replace: the number of a process to be started in its place.
        say: a line for the user.
    """

    ends_job: bool = False
    kill: tuple[int, str] | None = None
    replace: int | None = None
    say: str | None = None


class _Standing(Enum):
    HERE = "it takes part"
    LEFT = "it has ended in good order"
    GONE = "it has failed or died"


@final
class Membership:
    """The processes of the job as the hub sees them.

    Args:
        elastic: whether the others go on when one is lost.
        replacements: how many times each process is replaced then.
        host: of the launcher, the only one on which it can start and kill processes; None if there is no other.
    """

    def __init__(self, *, elastic: bool, replacements: int, host: str | None) -> None:
        self.first: Loss | None = None
        """The first that was lost for a reason of its own."""
        self._elastic = elastic
        self._replacements = replacements
        self._host = host
        self._standings: dict[int, _Standing] = {}  # by process id
        self._replaced: dict[int, int] = {}  # how many times, by number

    @property
    def has_ended_well(self) -> bool:
        """Whether all who went on together to the end have left in good order."""
        return bool(self._standings) and all(one is _Standing.LEFT for one in self._standings.values())

    def knows(self, pid: int) -> bool:
        """Whether a process has ever joined."""
        return pid in self._standings

    def handle(self, event: Event | Regrouped) -> Decision:
        """Take in what has happened."""
        if isinstance(event, Regrouped):
            # Those who are not among them are no longer waited for.
            self._standings = {pid: self._standings.get(pid, _Standing.HERE) for pid in event.pids}
        elif isinstance(event, Joined):
            self._standings[event.pid] = _Standing.HERE
        elif isinstance(event, Left):
            self._standings[event.pid] = _Standing.LEFT
        elif isinstance(event, (Failed, Lost, Silent)):
            return self._lose(event)
        return Decision()

    def _lose(self, event: Failed | Lost | Silent) -> Decision:
        if event.pid:
            self._standings[event.pid] = _Standing.GONE
        follows = isinstance(event, Failed) and event.follows is not None
        if self.first is None and not follows:
            text = "" if isinstance(event, Silent) else event.text
            self.first = Loss(event.process, event.pid, event.host, text, isinstance(event, Lost))
        if not self._elastic:
            return Decision(ends_job=True)
        is_here = self._host is None or event.host in ("", self._host)
        kill = (event.pid, event.identity) if isinstance(event, Silent) and is_here and event.pid else None
        if event.process is None:
            return Decision(kill=kill)
        where = f" (pid {event.pid}, host {event.host})" if event.pid else ""
        what = f"rank {event.process}{where} {_fate(event)}"
        times = self._replaced.get(event.process, 0)
        if not is_here:
            return Decision(
                kill=kill,
                say=f"{what}; none can be started in its place on another host than this, so the others go on without it",
            )
        if times >= self._replacements:
            why = f"it has been replaced {times} times" if times else "--max-restarts is 0"
            return Decision(kill=kill, say=f"{what}; {why}, so the others go on without it")
        self._replaced[event.process] = times + 1
        say = f"{what}; another one is started in its place ({times + 1} of {self._replacements})"
        return Decision(kill=kill, replace=event.process, say=say)


def _fate(event: Failed | Lost | Silent) -> str:
    if isinstance(event, Silent):
        return "does not answer and is treated as dead"
    if isinstance(event, Lost):
        return "has died"
    lines = event.text.strip().splitlines()
    return f"has failed ({lines[-1].strip()})" if lines else "has failed"
