"""What happens to the processes of a job, as the hub tells its host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """Something happened to one process.

    Attributes:
        process: its number at that time; None for a newcomer that has none yet.
        pid: its process id; 0 if it never came.
        host: what it calls its host; "" if it never came.
        identity: as `xpdistribute.process_identity.identify` gives it, so that the right process is killed.
    """

    process: int | None
    pid: int
    host: str
    identity: str


@dataclass(frozen=True)
class Joined(Event):
    """It has connected."""


@dataclass(frozen=True)
class Left(Event):
    """It ended in good order."""


@dataclass(frozen=True)
class Failed(Event):
    """It raised, and says how.

    Attributes:
        text: its last words, such as a traceback.
        follows: the process whose failure made it raise; None if it is a culprit itself.
    """

    text: str
    follows: int | None = None


@dataclass(frozen=True)
class Lost(Event):
    """It went without a word: it was killed, crashed, or its host did.

    Attributes:
        text: what is known of it.
    """

    text: str = ""


@dataclass(frozen=True)
class Silent(Event):
    """Nothing was heard of it for the heartbeat time, so it is treated as dead; only in elastic jobs."""


@dataclass(frozen=True)
class Regrouped:
    """The processes that are left, and newcomers, go on together.

    Attributes:
        epoch: how often that has happened.
        pids: by process.
        hosts: by process.
    """

    epoch: int
    pids: tuple[int, ...]
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """A process that did not end in good order.

    Attributes:
        process: its number; None for a newcomer.
        text: its last words, or what is known.
        kind: ``failed`` (it raised), ``follows`` (it raised because another one was gone), ``died`` or ``stopped``.
    """

    process: int | None
    text: str
    kind: str
