"""Who is in a job, and what is to be done next: what the parts of a `Job` have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypeVar, final

from xpdistribute.events import Event, Regrouped
from xpdistribute.wire import Message, WireError

V = TypeVar("V")


@dataclass(frozen=True)
class Send:
    """Send a message to some connections."""

    connections: tuple[int, ...]
    message: Message


@dataclass(frozen=True)
class Drop:
    """Close a connection when what was sent to it before is out."""

    connection: int


@dataclass(frozen=True)
class Tell:
    """Tell the hub's host of an event."""

    event: Event | Regrouped


Action: TypeAlias = Send | Drop | Tell


class Standing(Enum):
    """How a process stands to the job."""

    EXPECTED = "it has not connected yet"
    HERE = "it is connected"
    LEAVING = "it ends its program"
    LEFT = "it has ended its program"
    FAILED = "it has failed"
    LOST = "it is dead"


@dataclass
class Peer:
    """A process that has a number, or a newcomer that waits for one."""

    process: int | None
    standing: Standing = Standing.EXPECTED
    connection: int | None = None
    pid: int = 0
    host: str = ""
    identity: str = ""
    heard: float = 0.0
    info: Any = None
    is_ready: bool = False
    admits: bool = False
    is_spare: bool = False

    @property
    def is_live(self) -> bool:
        """Whether it takes part, now or soon."""
        return self.standing in (Standing.EXPECTED, Standing.HERE)

    def __str__(self) -> str:
        if self.standing is Standing.EXPECTED and not self.pid:
            return f"process {self.process} ({self.standing.value})"
        return f"process {self.process} (pid {self.pid}, host {self.host})"


@final
class Roster:
    """The processes of a job, with the time, and the actions that have been decided on and not been taken yet.

    Args:
        num_processes: how many there are at first.
        elastic: whether their number can change.
    """

    def __init__(self, num_processes: int, *, elastic: bool) -> None:
        self.elastic = elastic
        self._num_wanted = num_processes
        self.epoch = 0
        self.now = 0.0
        self.members = [Peer(process) for process in range(num_processes)]
        self.newcomers: list[Peer] = []
        self.by_connection: dict[int, Peer] = {}
        self.told: list[Message] = []
        """What the members have been told of those that are gone, in this make-up."""
        self.are_spares_called = False
        """Whether the members start MPI, for which they need the spares."""
        self._actions: list[Action] = []

    @property
    def ready(self) -> list[Peer]:
        """The newcomers that can be taken in: all that are ready, but of the spares only as many as places are free."""
        wanted = [peer for peer in self.newcomers if peer.is_ready and not peer.is_spare]
        spares = [peer for peer in self.newcomers if peer.is_ready and peer.is_spare]
        # Who has ended in good order has left no place to be filled.
        gone = (Standing.FAILED, Standing.LOST)
        taken = sum(peer.standing not in gone for peer in self.members)
        return wanted + spares[: max(0, self._num_wanted - taken - len(wanted))]

    def tell_waiting(self) -> None:
        """Tell the members how many newcomers there are."""
        self.send(self.members, {"type": "waiting", "count": len(self.ready)})

    def remove_newcomer(self, peer: Peer) -> None:
        """One of them is gone."""
        self.newcomers.remove(peer)
        self.tell_waiting()

    def cut_off(self, peer: Peer) -> None:
        """Have no more to do with a process, when what was sent to it is out."""
        assert peer.connection is not None
        self._actions.append(Drop(peer.connection))
        del self.by_connection[peer.connection]
        peer.connection = None

    def send(self, peers: Iterable[Peer], message: Message) -> None:
        """Send a message to those that are connected."""
        connections = tuple(peer.connection for peer in peers if peer.connection is not None)
        if connections:
            self._actions.append(Send(connections, message))

    def refuse(self, connection: int, kind: str, text: str) -> None:
        """Say why, and hang up."""
        self._actions += [
            Send((connection,), {"type": "refused", "kind": kind, "text": text}),
            Drop(connection),
        ]

    def tell(self, event: Event | Regrouped) -> None:
        """Tell the hub's host."""
        self._actions.append(Tell(event))

    def taken(self) -> list[Action]:
        """What is to be done, once."""
        actions, self._actions = self._actions, []
        return actions


def number(peer: Peer) -> int:
    """Of a member."""
    assert peer.process is not None
    return peer.process


def listed(peers: Sequence[Peer], most: int = 8) -> str:
    """Their names."""
    names = ", ".join(map(str, peers[:most]))
    return names + (f" and {len(peers) - most} more" if len(peers) > most else "")


def field(message: Message, name: str, kind: type[V]) -> V:
    """A field that must be there. JSON knows no difference between 1 and 1.0 where a float is needed."""
    value = message.get(name)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise WireError(f"{message.get('type')}: {name}: got {type(value).__name__}; need {kind.__name__}")
    return value
