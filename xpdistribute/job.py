"""A job as its hub knows it: who is in it, what they wait for, and who has to be told what.

It decides and does nothing else: events go in, with their time, and what is to be done comes out. So it knows
neither sockets nor clocks nor threads.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypeVar, final

from xpdistribute.events import Event, Failed, Joined, Left, Lost, Regrouped, Silent
from xpdistribute.inquiry import Inquiry
from xpdistribute.wire import Message, WireError

TO_SAY_HELLO = 10.0
"""Seconds that a connection may stay without saying who it is."""

REPORTS_KEPT = 8

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

    @property
    def is_live(self) -> bool:
        """Whether it takes part, now or soon."""
        return self.standing in (Standing.EXPECTED, Standing.HERE)

    def __str__(self) -> str:
        if self.standing is Standing.EXPECTED and not self.pid:
            return f"process {self.process} ({self.standing.value})"
        return f"process {self.process} (pid {self.pid}, host {self.host})"


@final
class Job:
    """The state of a job.

    Args:
        num_processes: how many it starts with.
        token: who doesn't know it is refused.
        elastic: whether it goes on without the processes it loses, and takes newcomers.
        heartbeat_seconds: in an elastic job, who is silent for so long is treated as dead.
    """

    def __init__(self, num_processes: int, token: str, *, elastic: bool, heartbeat_seconds: float) -> None:
        if num_processes < 1:
            raise ValueError(f"Job: got {num_processes} processes; need at least 1")
        if not heartbeat_seconds > 0:
            raise ValueError(f"Job: got heartbeat_seconds={heartbeat_seconds!r}; need a positive number")
        self.elastic = elastic
        self.heartbeat_seconds = heartbeat_seconds
        self.epoch = 0
        self.members = [Peer(process) for process in range(num_processes)]
        self._token = token
        self._guests: dict[int, float] = {}
        self._newcomers: list[Peer] = []
        self._peers: dict[int, Peer] = {}
        self._gathers: dict[str, dict[int, Any]] = {}
        self._told: list[Message] = []
        self._inquiry: Inquiry | None = None
        self._num_inquiries = 0
        self._reports: deque[tuple[tuple[str, str], Message]] = deque(maxlen=REPORTS_KEPT)
        self._actions: list[Action] = []
        self._now = 0.0
        self._handlers: dict[str, Callable[[Peer, Message], None]] = {
            "ping": self._ping,
            "gather": self._gather,
            "who": self._who,
            "give_up": self._give_up,
            "failed": self._failed,
            "goodbye": self._goodbye,
            "report": self._report,
            "state": self._state,
            "regroup": self._regroup,
        }

    @property
    def is_finished(self) -> bool:
        """Whether every process has come and gone."""
        return all(not peer.is_live and peer.connection is None for peer in self.members)

    # ------------------------------------------------------------------ events

    def connected(self, connection: int, now: float) -> list[Action]:
        """Somebody has connected."""
        self._guests[connection] = now + TO_SAY_HELLO
        return []

    def received(self, connection: int, message: Message, now: float) -> list[Action]:
        """A message has come."""
        self._now = now
        try:
            if connection in self._guests:
                self._hello(connection, message)
            elif (peer := self._peers.get(connection)) is not None:
                peer.heard = now
                handler = self._handlers.get(_field(message, "type", str))
                if handler is None:
                    raise WireError(f"message: the hub knows no {message['type'][:60]!r}")
                handler(peer, message)
        except WireError as error:
            return self._taken() + self.malformed(connection, str(error), now)
        return self._taken()

    def malformed(self, connection: int, text: str, now: float) -> list[Action]:
        """What has come is no message; there is no talking to this one."""
        self._refuse(connection, "runtime", text)
        return self._taken() + self.disconnected(connection, now, f"the hub did not understand it: {text}")

    def disconnected(self, connection: int, now: float, why: str = "its connection broke") -> list[Action]:
        """A connection is gone."""
        self._now = now
        self._guests.pop(connection, None)
        peer = self._peers.pop(connection, None)
        if peer is not None:
            peer.connection = None
            if peer in self._newcomers:
                self._newcomers.remove(peer)
                self._tell_waiting()
            elif peer.standing is Standing.HERE:
                self._lose(peer, "died", why)
            self._settle()
        return self._taken()

    def declare_lost(self, process: int, text: str, now: float) -> list[Action]:
        """The hub's host knows that a process is dead; it need not have connected."""
        self._now = now
        if process < len(self.members) and (peer := self.members[process]).is_live:
            self._lose(peer, "died", text)
            self._settle()
        return self._taken()

    def tick(self, now: float) -> list[Action]:
        """Some time has passed."""
        self._now = now
        for connection in [one for one, deadline in self._guests.items() if deadline <= now]:
            self._refuse(connection, "runtime", f"hello: nothing came for {TO_SAY_HELLO:g} s")
        if self.elastic:
            for peer in [*self.members, *self._newcomers]:
                if peer.connection is not None and peer.heard + self.heartbeat_seconds <= now:
                    self._give_up_on(peer)
        if self._inquiry is not None and self._inquiry.deadline <= now:
            self._conclude_inquiry()
        return self._taken()

    def paused(self, now: float) -> None:
        """The hub itself was held up, so that nobody's silence means anything."""
        for peer in self._peers.values():
            peer.heard = now

    def seconds_to_tick(self, now: float) -> float:
        """How long nothing happens by itself."""
        soon = 1.0
        if self.elastic:
            soon = min(soon, self.heartbeat_seconds / 4)
        if self._inquiry is not None:
            soon = min(soon, self._inquiry.deadline - now)
        return max(0.0, soon)

    # ------------------------------------------------------------ coming, going

    def _hello(self, connection: int, message: Message) -> None:
        if _field(message, "type", str) != "hello":
            raise WireError("message: the first must be hello")
        token = _field(message, "token", str)
        if not hmac.compare_digest(token.encode(errors="replace"), self._token.encode()):
            self._refuse(
                connection,
                "runtime",
                "hello: the token is another job's; the hub takes only its own job's processes — "
                "is XPDISTRIBUTE_TOKEN or XPDISTRIBUTE_HUB left over from another job?",
            )
            return
        pid, host = _field(message, "pid", int), _field(message, "host", str)
        peer = Peer(None, Standing.HERE, connection, pid, host, _field(message, "identity", str), self._now)
        if _field(message, "join", bool):
            self._join(peer)
            return
        process, size = _field(message, "process", int), message.get("size")
        problem = self._problem(process, size, pid, host)
        if problem:
            self._refuse(connection, "value", problem)
            return
        peer.process = process
        self.members[process] = peer
        self._enter(peer)

    def _problem(self, process: int, size: Any, pid: int, host: str) -> str | None:
        who = f"process {process} (pid {pid}, host {host})"
        if self.epoch:
            return f"{who}: the job has gone on in another make-up; join it as a newcomer"
        if size is not None and size != len(self.members):
            return f"{who}: got a job of {size} processes; need {len(self.members)}, as the hub's job has"
        if not 0 <= process < len(self.members):
            return f"{who}: need a number in 0..{len(self.members) - 1}"
        other = self.members[process]
        if other.standing is not Standing.EXPECTED:
            return (
                f"{who}: {other} has this number already, {other.standing.value}; "
                "each process needs a number of its own — are two of them started with the same rank?"
            )
        return None

    def _join(self, peer: Peer) -> None:
        assert peer.connection is not None
        if not self.elastic:
            self._refuse(
                peer.connection,
                "runtime",
                "join: this job takes no newcomers; need an elastic one — start it with --elastic",
            )
        elif not any(member.is_live for member in self.members):
            self._refuse(peer.connection, "runtime", "join: all processes of the job have ended")
        else:
            self._newcomers.append(peer)
            self._enter(peer)

    def _enter(self, peer: Peer) -> None:
        assert peer.connection is not None
        del self._guests[peer.connection]
        self._peers[peer.connection] = peer
        welcome = {
            "type": "welcome",
            "process": peer.process,
            "num_processes": len(self.members),
            "epoch": self.epoch,
            "elastic": self.elastic,
            "heartbeat_seconds": self.heartbeat_seconds,
            "waiting": self._num_ready,
        }
        self._send([peer], welcome)
        if peer.process is not None:
            for message in self._told:
                self._send([peer], message)
        self._event(Joined, peer)

    def _refuse(self, connection: int, kind: str, text: str) -> None:
        self._guests.pop(connection, None)
        self._actions.append(Send((connection,), {"type": "refused", "kind": kind, "text": text}))
        self._actions.append(Drop(connection))

    def _ping(self, peer: Peer, _: Message) -> None:
        peer.heard = self._now

    def _goodbye(self, peer: Peer, _: Message) -> None:
        if peer.process is None:
            self._newcomers.remove(peer)
            self._tell_waiting()
            peer.standing = Standing.LEFT
        elif peer.standing is Standing.HERE:
            peer.standing = Standing.LEFT
            self._tell_of(peer, "left")
            self._event(Left, peer)
        self._send([peer], {"type": "heard"})
        self._settle()

    def _failed(self, peer: Peer, message: Message) -> None:
        text, follows = _field(message, "text", str), message.get("follows")
        follows = follows if isinstance(follows, int) else None
        if peer.standing is Standing.HERE:
            peer.standing = Standing.FAILED
            if peer.process is None:
                self._newcomers.remove(peer)
                self._tell_waiting()
            # All know already what this one only repeats; in an elastic job that it fails is news all the same.
            elif follows is None or self.elastic:
                self._tell_of(peer, "failed", text=text, follows=follows)
            self._event(Failed, peer, text=text, follows=follows)
        # After the others were told: who hears this may end the process, and the hub may live in it.
        self._send([peer], {"type": "heard"})
        self._settle()

    def _lose(self, peer: Peer, how: str, why: str) -> None:
        peer.standing = Standing.LOST
        self._tell_of(peer, "lost", how=how, why=why)
        self._event(Lost, peer, text=why) if how == "died" else self._event(Silent, peer)

    def _give_up_on(self, peer: Peer) -> None:
        assert peer.connection is not None
        text = f"nothing was heard of {peer} for {self.heartbeat_seconds:g} s, so the job goes on without it"
        self._send([peer], {"type": "expelled", "text": text})
        self._actions.append(Drop(peer.connection))
        del self._peers[peer.connection]
        peer.connection = None
        if peer in self._newcomers:
            self._newcomers.remove(peer)
            self._event(Silent, peer)
            self._tell_waiting()
        elif peer.standing is Standing.HERE:
            self._lose(peer, "stopped", f"nothing was heard of it for {self.heartbeat_seconds:g} s")
        self._settle()

    def _tell_of(self, peer: Peer, what: str, **more: Any) -> None:
        """Tell the others that a member is gone, and fail what they wait for with it."""
        message = {
            "type": what,
            "process": peer.process,
            "pid": peer.pid,
            "host": peer.host,
            "identity": peer.identity,
            **more,
        }
        self._told.append(message)
        self._send((one for one in self.members if one is not peer), message)
        for key in list(self._gathers):
            self._fail_gather(key, "gone", f"{key}: {peer} is gone: {peer.standing.value}", peer.process)

    def _settle(self) -> None:
        """Somebody is gone; maybe he was the last one that others waited for."""
        if self._inquiry is not None:
            for peer in self.members:
                if peer.connection is None:
                    self._inquiry.give_up_on(_number(peer))
            if self._inquiry.is_answered:
                self._conclude_inquiry()
        if any(peer.is_live for peer in self.members):
            self._try_regroup()
            return
        for peer in self._newcomers:
            assert peer.connection is not None
            self._refuse(peer.connection, "runtime", "join: all processes of the job have ended")
            self._peers.pop(peer.connection)
            peer.connection = None
        self._newcomers.clear()

    # ----------------------------------------------------------------- gathers

    def _gather(self, peer: Peer, message: Message) -> None:
        key, process = _field(message, "key", str), peer.process
        if "value" not in message:
            raise WireError("gather: value is missing")
        gather = self._gathers.setdefault(key, {})
        gone = next((one for one in self.members if not one.is_live), None)
        problem: tuple[str, str, int | None] | None = None
        if process is None or message.get("epoch") != self.epoch:
            problem = "stale", f"{key}: the job has gone on in another make-up", None
        elif gone is not None:
            problem = "gone", f"{key}: {gone} is gone: {gone.standing.value}", gone.process
        elif process in gather:
            problem = "value", f"{key}: process {process} gathers it twice at the same time", None
        if problem is not None or process is None:
            assert problem is not None
            self._send([peer], _failed_gather(key, *problem))
            if not gather:
                del self._gathers[key]
            return
        gather[process] = message["value"]
        if len(gather) == len(self.members):
            del self._gathers[key]
            values = [gather[one] for one in sorted(gather)]
            self._send(self.members, {"type": "gathered", "key": key, "values": values})

    def _fail_gather(self, key: str, kind: str, text: str, process: int | None = None) -> None:
        waiting = self._gathers.pop(key)
        self._send((self.members[one] for one in waiting), _failed_gather(key, kind, text, process))

    def _missing(self, key: str | None) -> list[Peer]:
        """Who is waited for in a gather, or, without a key, in the regroup."""
        if key is None:
            return [peer for peer in self.members if peer.is_live and not peer.is_ready]
        return [peer for peer in self.members if peer.process not in self._gathers.get(key, {})]

    def _who(self, peer: Peer, message: Message) -> None:
        key = _key(message)
        names = _listed(self._missing(key))
        self._send([peer], {"type": "missing", "key": key, "text": names})

    def _give_up(self, peer: Peer, message: Message) -> None:
        """A process has waited too long; so have all who wait with it."""
        key, missing = _key(message), self._missing(_key(message))
        waited = _field(message, "waited", float)
        text = f"{key or 'regroup'}: {peer} waited {waited:g} s for {_listed(missing) or 'nobody'}"
        numbers = [one.process for one in missing]
        if key is not None:
            if peer.process in self._gathers.get(key, {}):
                waiting = self._gathers.pop(key)
                answer = {**_failed_gather(key, "timeout", text, None), "missing": numbers}
                self._send((self.members[one] for one in waiting), answer)
            return
        # Members don't wait for a newcomer, only it for them.
        ready = [peer] if peer.process is None else [one for one in self.members if one.is_ready]
        if peer.is_ready:
            for one in ready:
                one.is_ready = False
            self._send(ready, {"type": "regroup_failed", "text": text, "missing": numbers})
            self._tell_waiting()

    # ----------------------------------------------------------------- reports

    def _report(self, peer: Peer, message: Message) -> None:
        request = {
            "kind": _field(message, "kind", str),
            "about": _field(message, "about", str),
            "waited": _field(message, "waited", float),
            "state": _field(message, "state", dict),
        }
        about = (request["kind"], request["about"])
        known = next((report for key, report in self._reports if request["about"] and key == about), None)
        if known is not None:
            self._send([peer], known)
        elif self._inquiry is not None and peer.process is not None:
            self._inquiry.answer(peer.process, request["state"])
            if self._inquiry.is_answered:
                self._conclude_inquiry()
        elif peer.process is not None:
            asked = [one for one in self.members if one.connection is not None]
            self._num_inquiries += 1
            self._inquiry = Inquiry(
                self._num_inquiries, request, peer.process, map(_number, asked), self._now
            )
            question = {"type": "state_wanted", "id": self._num_inquiries}
            self._send((one for one in asked if one is not peer), question)
            if self._inquiry.is_answered:
                self._conclude_inquiry()

    def _state(self, peer: Peer, message: Message) -> None:
        inquiry, state = self._inquiry, _field(message, "state", dict)
        if inquiry is not None and _field(message, "id", int) == inquiry.number and peer.process is not None:
            inquiry.answer(peer.process, state)
            if inquiry.is_answered:
                self._conclude_inquiry()

    def _conclude_inquiry(self) -> None:
        inquiry = self._inquiry
        assert inquiry is not None
        self._inquiry = None
        report = inquiry.report({_number(peer): self._unanswered(peer) for peer in self.members})
        self._reports.append((inquiry.about, report))
        self._send(self.members, report)

    def _unanswered(self, peer: Peer) -> Message:
        known: Message = {"process": peer.process, "pid": peer.pid, "host": peer.host}
        if peer.connection is None:
            return {**known, "gone": peer.standing.value}
        return {**known, "silent": True, "unheard_seconds": round(self._now - peer.heard, 1)}

    # ------------------------------------------------------------------ regroup

    @property
    def _num_ready(self) -> int:
        return sum(peer.is_ready for peer in self._newcomers)

    def _tell_waiting(self) -> None:
        self._send(self.members, {"type": "waiting", "count": self._num_ready})

    def _regroup(self, peer: Peer, message: Message) -> None:
        admits = _field(message, "admit", bool)
        if peer.process is None and peer.standing is Standing.HERE:
            peer.info, peer.is_ready = message.get("info"), True
            self._tell_waiting()
            return
        if not self.elastic or message.get("epoch") != self.epoch or not peer.is_live:
            why = "it is not elastic" if not self.elastic else "it has gone on in another make-up"
            text = f"regroup: the job can't go on with {peer}: {why}"
            self._send([peer], {"type": "regroup_failed", "text": text, "missing": []})
            return
        peer.info, peer.is_ready, peer.admits = message.get("info"), True, admits
        self._try_regroup()

    def _try_regroup(self) -> None:
        survivors = [peer for peer in self.members if peer.is_live]
        if not survivors or not all(peer.is_ready for peer in survivors):
            return
        for key in list(self._gathers):
            self._fail_gather(key, "stale", f"{key}: the job goes on in another make-up")
        if self._inquiry is not None:
            self._conclude_inquiry()
        admitted: list[Peer] = []
        if all(peer.admits for peer in survivors):
            admitted = [peer for peer in self._newcomers if peer.is_ready]
        for peer in self.members:
            # Who failed may still talk, but has no number any more.
            if not peer.is_live and peer.connection is not None:
                self._peers.pop(peer.connection)
                self._actions.append(Drop(peer.connection))
        self._newcomers = [peer for peer in self._newcomers if peer not in admitted]
        members = [*survivors, *admitted]
        listed = [
            {
                "pid": peer.pid,
                "host": peer.host,
                "old_process": peer.process,
                "is_new": peer.process is None,
                "info": peer.info,
            }
            for peer in members
        ]
        self.epoch += 1
        self.members = members
        self._told.clear()
        self._reports.clear()
        for process, peer in enumerate(members):
            peer.process, peer.info, peer.is_ready, peer.admits = process, None, False, False
            message = {"type": "regrouped", "epoch": self.epoch, "process": process, "members": listed}
            self._send([peer], {**message, "waiting": self._num_ready})
        event = Regrouped(self.epoch, tuple(p.pid for p in members), tuple(p.host for p in members))
        self._actions.append(Tell(event))

    # ----------------------------------------------------------------- actions

    def _send(self, peers: Iterable[Peer], message: Message) -> None:
        connections = tuple(peer.connection for peer in peers if peer.connection is not None)
        if connections:
            self._actions.append(Send(connections, message))

    def _event(self, kind: type[Event], peer: Peer, **more: Any) -> None:
        self._actions.append(Tell(kind(peer.process, peer.pid, peer.host, peer.identity, **more)))

    def _taken(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions


def _failed_gather(key: str, kind: str, text: str, process: int | None) -> Message:
    return {"type": "gather_failed", "key": key, "kind": kind, "text": text, "process": process}


def _number(peer: Peer) -> int:
    assert peer.process is not None
    return peer.process


def _listed(peers: list[Peer], most: int = 8) -> str:
    names = ", ".join(map(str, peers[:most]))
    return names + (f" and {len(peers) - most} more" if len(peers) > most else "")


def _key(message: Message) -> str | None:
    key = message.get("key")
    if key is not None and not isinstance(key, str):
        raise WireError(f"{message['type']}: key: got {type(key).__name__}; need text")
    return key


def _field(message: Message, name: str, kind: type[V]) -> V:
    """A field that must be there. JSON knows no difference between 1 and 1.0 where a float is needed."""
    value = message.get(name)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise WireError(f"{message.get('type')}: {name}: got {type(value).__name__}; need {kind.__name__}")
    return value
