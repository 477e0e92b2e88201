"""A job as its hub knows it: who is in it, what they wait for, and who has to be told what.

It decides and does nothing else: events go in, with their time, and what is to be done comes out. So it knows
neither sockets nor clocks nor threads.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, final

from xpdistribute.events import Event, Failed, Joined, Left, Lost, Silent
from xpdistribute.gathers import Gathers
from xpdistribute.inquiry import Inquiries
from xpdistribute.regrouping import Regrouping
from xpdistribute.roster import Action, Peer, Roster, Standing, field, listed
from xpdistribute.wire import Message, WireError

TO_SAY_HELLO = 10.0
"""Seconds that a connection may stay without saying who it is."""
TO_END = 2.0
"""Seconds that a process has to end after its goodbye, where somebody tells with which status it does."""

_ALL_ENDED = "join: all processes of the job have ended"


@final
class Job:
    """The state of a job.

    Args:
        num_processes: how many it starts with.
        token: who doesn't know it is refused.
        elastic: whether it goes on without the processes it loses, and takes newcomers.
        heartbeat_seconds: in an elastic job, who is silent for so long is treated as dead.
        num_spares: how many more are started, each to take the place of one that is lost.
        sees_ends: whether `ended` is called for each process. A goodbye alone then means nothing yet: a program that raises
            SystemExit says it, too, as Python shows it no status.
    """

    def __init__(
        self,
        num_processes: int,
        token: str,
        *,
        elastic: bool,
        heartbeat_seconds: float,
        num_spares: int = 0,
        sees_ends: bool = False,
    ) -> None:
        if num_processes < 1:
            raise ValueError(f"Job: got {num_processes} processes; need at least 1")
        if not heartbeat_seconds > 0:
            raise ValueError(f"Job: got heartbeat_seconds={heartbeat_seconds!r}; need a positive number")
        self.heartbeat_seconds = heartbeat_seconds
        self._token = token
        self._guests: dict[int, float] = {}
        self._num_spares = num_spares
        self._sees_ends = sees_ends
        self._leaving: list[tuple[float, Peer]] = []
        self._roster = Roster(num_processes, elastic=elastic)
        self._gathers = Gathers(self._roster)
        self._inquiries = Inquiries(self._roster)
        self._regrouping = Regrouping(self._roster, self._gathers, self._inquiries)
        self._handlers: dict[str, Callable[[Peer, Message], None]] = {
            "ping": self._ping,
            "failed": self._failed,
            "goodbye": self._goodbye,
            "gather": self._gathers.add,
            "regroup": self._regrouping.add,
            "who": self._who,
            "give_up": self._give_up,
            "report": self._inquiries.ask,
            "state": self._inquiries.answer,
            "vote": self._vote,
            "call_spares": self._call_spares,
        }

    @property
    def num_processes(self) -> int:
        """How many it has now, those that are gone since the last regroup among them."""
        return len(self._roster.members)

    @property
    def is_finished(self) -> bool:
        """Whether every process has come and gone."""
        return all(not peer.is_live and peer.connection is None for peer in self._roster.members)

    # ------------------------------------------------------------------ events

    def connected(self, connection: int, now: float) -> list[Action]:
        """Somebody has connected."""
        self._guests[connection] = now + TO_SAY_HELLO
        return []

    def received(self, connection: int, message: Message, now: float) -> list[Action]:
        """A message has come."""
        self._roster.now = now
        try:
            if connection in self._guests:
                self._hello(connection, message)
            elif (peer := self._roster.by_connection.get(connection)) is not None:
                peer.heard = now
                handler = self._handlers.get(field(message, "type", str))
                if handler is None:
                    raise WireError(f"message: the hub knows no {message['type'][:60]!r}")
                handler(peer, message)
        except WireError as error:
            return self._roster.taken() + self.malformed(connection, str(error), now)
        return self._roster.taken()

    def malformed(self, connection: int, text: str, now: float) -> list[Action]:
        """What has come is no message; there is no talking to this one."""
        self._roster.refuse(connection, "runtime", text)
        return self.disconnected(connection, now, f"the hub did not understand it: {text}")

    def disconnected(self, connection: int, now: float, why: str = "its connection broke") -> list[Action]:
        """A connection is gone."""
        roster = self._roster
        roster.now = now
        self._guests.pop(connection, None)
        peer = roster.by_connection.pop(connection, None)
        if peer is not None:
            peer.connection = None
            if peer in roster.newcomers:
                roster.remove_newcomer(peer)
                if peer.is_spare:
                    self._event(Lost, peer, text=why)
            elif peer.standing is Standing.HERE:
                self._lose(peer, "died", why)
            self._settle()
        return roster.taken()

    def declare_lost(self, process: int, text: str, now: float, pid: int | None = None) -> list[Action]:
        """The hub's host knows that a process is dead; it need not have connected.

        With a pid only that process, or one that never came: numbers change when the job goes on without some.
        """
        self._roster.now = now
        if (
            process < self.num_processes
            and (peer := self._roster.members[process]).is_live
            and (pid is None or pid == peer.pid or peer.standing is Standing.EXPECTED)
        ):
            self._lose(peer, "died", text)
            self._settle()
        return self._roster.taken()

    def ended(self, process: int, pid: int, status: int, now: float) -> list[Action]:
        """The hub's host has seen a process end.

        Args:
            process: the number that it was started with.
            pid: its process id; that of what it was started by, if that is another program.
            status: 128 + N for signal N.
            now: the time.
        """
        self._roster.now = now
        for _, peer in self._leaving:
            if peer.pid == pid or (peer.process == process and not self._roster.epoch):
                self._has_left(peer, status)
                break
        return self._roster.taken()

    def all_ended(self, now: float) -> list[Action]:
        """The hub's host will see no more ends: who has said goodbye has left."""
        self._roster.now = now
        for _, peer in list(self._leaving):
            self._has_left(peer, 0)
        return self._roster.taken()

    def tick(self, now: float) -> list[Action]:
        """Some time has passed."""
        roster = self._roster
        roster.now = now
        for deadline, peer in list(self._leaving):
            if deadline <= now:
                self._has_left(peer, 0)
        for connection in [one for one, deadline in self._guests.items() if deadline <= now]:
            del self._guests[connection]
            roster.refuse(connection, "runtime", f"hello: nothing came for {TO_SAY_HELLO:g} s")
        if roster.elastic:
            for peer in [*roster.members, *roster.newcomers]:
                if peer.connection is not None and peer.heard + self.heartbeat_seconds <= now:
                    self._give_up_on(peer)
        self._inquiries.settle()
        return roster.taken()

    def paused(self, now: float) -> None:
        """The hub itself was held up, so that nobody's silence means anything."""
        for peer in self._roster.by_connection.values():
            peer.heard = now

    def seconds_to_tick(self, now: float) -> float:
        """How long nothing happens by itself."""
        soon = min(1.0, self.heartbeat_seconds / 4) if self._roster.elastic else 1.0
        deadline = self._inquiries.deadline
        deadlines = [one for one, _ in self._leaving] + ([] if deadline is None else [deadline])
        return max(0.0, min([soon, *(one - now for one in deadlines)]))

    # ------------------------------------------------------------------ coming

    def _hello(self, connection: int, message: Message) -> None:
        if field(message, "type", str) != "hello":
            raise WireError("message: the first must be hello")
        token = field(message, "token", str)
        if not hmac.compare_digest(token.encode(errors="replace"), self._token.encode(errors="replace")):
            text = (
                "hello: the token is another job's; the hub takes only its own job's processes — "
                "is XPDISTRIBUTE_TOKEN or XPDISTRIBUTE_HUB left over from another job?"
            )
            self._refuse_guest(connection, "runtime", text)
            return
        pid, host = field(message, "pid", int), field(message, "host", str)
        identity, now = field(message, "identity", str), self._roster.now
        peer = Peer(None, Standing.HERE, connection, pid, host, identity, now)
        if field(message, "join", bool):
            peer.is_spare = message.get("spare") is True
            self._join(peer, connection)
            return
        process = field(message, "process", int)
        problem = self._problem(process, message.get("size"), f"process {process} (pid {pid}, host {host})")
        if problem:
            self._refuse_guest(connection, "value", problem)
            return
        peer.process = process
        self._roster.members[process] = peer
        self._enter(peer, connection)

    def _problem(self, process: int, size: Any, who: str) -> str | None:
        """Why a process can't have the number that it comes with."""
        if self._roster.epoch:
            return f"{who}: the job has gone on in another make-up; join it as a newcomer"
        if size is not None and size != self.num_processes:
            return f"{who}: got a job of {size} processes; need {self.num_processes}, as the hub's job has"
        if not 0 <= process < self.num_processes:
            return f"{who}: need a number in 0..{self.num_processes - 1}"
        other = self._roster.members[process]
        if other.standing is not Standing.EXPECTED:
            return (
                f"{who}: {other} has this number already, {other.standing.value}; "
                "each process needs a number of its own — are two of them started with the same rank?"
            )
        return None

    def _join(self, peer: Peer, connection: int) -> None:
        if not self._roster.elastic:
            text = "join: this job takes no newcomers; need an elastic one — start it with --elastic"
            self._refuse_guest(connection, "runtime", text)
        elif peer.is_spare != bool(self._num_spares):
            text = "join: this job is started with its spares and takes nobody else; need processes that its launcher has started"
            self._refuse_guest(connection, "runtime", text)
        elif not any(member.is_live for member in self._roster.members):
            self._refuse_guest(connection, "runtime", _ALL_ENDED)
        else:
            self._roster.newcomers.append(peer)
            self._enter(peer, connection)
            if peer.is_spare and self._roster.are_spares_called:
                self._roster.send([peer], {"type": "spares_called"})

    def _enter(self, peer: Peer, connection: int) -> None:
        roster = self._roster
        del self._guests[connection]
        roster.by_connection[connection] = peer
        welcome = {
            "type": "welcome",
            "process": peer.process,
            "num_processes": self.num_processes,
            "epoch": roster.epoch,
            "elastic": roster.elastic,
            "heartbeat_seconds": self.heartbeat_seconds,
            "num_spares": self._num_spares,
            "waiting": len(roster.ready),
        }
        roster.send([peer], welcome)
        if peer.process is not None:
            for message in roster.told:
                roster.send([peer], message)
        self._event(Joined, peer)

    def _refuse_guest(self, connection: int, kind: str, text: str) -> None:
        del self._guests[connection]
        self._roster.refuse(connection, kind, text)

    # ------------------------------------------------------------------- going

    def _ping(self, peer: Peer, _: Message) -> None:
        peer.heard = self._roster.now

    def _goodbye(self, peer: Peer, _: Message) -> None:
        if peer in self._roster.newcomers:
            peer.standing = Standing.LEFT
            self._roster.remove_newcomer(peer)
        elif peer.standing is Standing.HERE:
            peer.standing = Standing.LEAVING
            self._leaving.append((self._roster.now + TO_END, peer))
            if not self._sees_ends:
                self._has_left(peer, 0)
        self._roster.send([peer], {"type": "heard"})
        self._settle()

    def _has_left(self, peer: Peer, status: int) -> None:
        """One that has said goodbye has ended; as nobody heard of another status, with 0."""
        self._leaving = [(deadline, one) for deadline, one in self._leaving if one is not peer]
        text = f"it ended with status {status}"
        peer.standing = Standing.FAILED if status else Standing.LEFT
        # The others may have gone on without it meanwhile.
        if peer in self._roster.members:
            if status:
                self._tell_of(peer, "failed", text=text, follows=None)
            else:
                self._tell_of(peer, "left")
        if status:
            self._event(Failed, peer, text=text, follows=None)
        else:
            self._event(Left, peer)
        self._settle()

    def _failed(self, peer: Peer, message: Message) -> None:
        text, follows = field(message, "text", str), message.get("follows")
        is_known = any(message["type"] != "left" for message in self._roster.told)
        follows = follows if isinstance(follows, int) and (is_known or self._may_follow(follows)) else None
        if peer.standing is Standing.HERE:
            peer.standing = Standing.FAILED
            if peer in self._roster.newcomers:
                self._roster.remove_newcomer(peer)
            # All know already what this one only repeats; in an elastic job that it fails is news all the same.
            elif follows is None or not is_known or self._roster.elastic:
                self._tell_of(peer, "failed", text=text, follows=follows)
            self._event(Failed, peer, text=text, follows=follows)
        # After the others were told: who hears this may end the process, and the hub may live in it.
        self._roster.send([peer], {"type": "heard"})
        self._settle()

    def _may_follow(self, process: int) -> bool:
        """Whether one may have failed because another has, of whose failure the hub does not know."""
        roster = self._roster
        # Who waited in vain for one that had ended in good order is the first to fail. But that a step has failed is told by the
        # link, and the one in which it has may come later with its own words. And what was told before the last regroup is
        # forgotten, and too few may be left to go on.
        is_here = 0 <= process < len(roster.members) and roster.members[process].standing is Standing.HERE
        return is_here or (roster.epoch > 0 and all(message["process"] != process for message in roster.told))

    def _lose(self, peer: Peer, how: str, why: str) -> None:
        peer.standing = Standing.LOST
        self._tell_of(peer, "lost", how=how, why=why)
        if how == "died":
            self._event(Lost, peer, text=why)
        else:
            self._event(Silent, peer)

    def _give_up_on(self, peer: Peer) -> None:
        text = f"nothing was heard of {peer} for {self.heartbeat_seconds:g} s, so the job goes on without it"
        self._roster.send([peer], {"type": "expelled", "text": text})
        self._roster.cut_off(peer)
        if peer in self._roster.newcomers:
            self._roster.remove_newcomer(peer)
            if peer.is_spare:
                # MPI would wait for it. Whoever is on its host can end it.
                who = {"pid": peer.pid, "host": peer.host, "identity": peer.identity}
                self._roster.send(self._roster.members, {"type": "spare_stopped", **who})
            self._event(Silent, peer)
        elif peer.standing is Standing.HERE:
            self._lose(peer, "stopped", f"nothing was heard of it for {self.heartbeat_seconds:g} s")
        self._settle()

    def _tell_of(self, peer: Peer, what: str, **more: Any) -> None:
        """Tell the others that a member is gone, and fail what they wait for with it."""
        roster = self._roster
        message = {
            "type": what,
            "process": peer.process,
            "pid": peer.pid,
            "host": peer.host,
            "identity": peer.identity,
            **more,
        }
        roster.told.append(message)
        roster.send((one for one in roster.members if one is not peer), message)
        self._gathers.fail_all("gone", f"{peer} is gone: {peer.standing.value}", peer.process)

    def _settle(self) -> None:
        """Somebody is gone; maybe he was the last one that others waited for."""
        self._inquiries.settle()
        self._regrouping.settle()
        if not any(peer.is_live for peer in self._roster.members):
            for peer in list(self._roster.newcomers):
                refusal = {"type": "refused", "kind": "runtime", "text": _ALL_ENDED}
                self._roster.send([peer], {"type": "dismissed"} if peer.is_spare else refusal)
                self._roster.cut_off(peer)
            self._roster.newcomers.clear()

    # ----------------------------------------------------------------- waiting

    def _vote(self, peer: Peer, message: Message) -> None:
        """Tell the others what a process says of a collective of theirs."""
        roster = self._roster
        link, number = field(message, "link", str), field(message, "number", int)
        succeeded, epoch = field(message, "succeeded", bool), field(message, "epoch", int)
        if epoch != roster.epoch or peer.process is None:
            return  # of links that there are no more
        what = {"link": link, "number": number, "succeeded": succeeded}
        others = [one for one in roster.members if one is not peer]
        roster.send(others, {"type": "vote", "process": peer.process, **what})

    def _call_spares(self, _peer: Peer, _message: Message) -> None:
        """The members, each of whom says so, start MPI."""
        roster = self._roster
        if not roster.are_spares_called:
            roster.are_spares_called = True
            roster.send([one for one in roster.newcomers if one.is_spare], {"type": "spares_called"})

    def _who(self, peer: Peer, message: Message) -> None:
        key = _key(message)
        missing = self._regrouping.missing if key is None else self._gathers.missing(key)
        self._roster.send([peer], {"type": "missing", "key": key, "text": listed(missing)})

    def _give_up(self, peer: Peer, message: Message) -> None:
        key, waited = _key(message), field(message, "waited", float)
        if key is None:
            self._regrouping.give_up(peer, waited)
        else:
            self._gathers.give_up(peer, key, waited)

    def _event(self, kind: type[Event], peer: Peer, **more: Any) -> None:
        self._roster.tell(kind(peer.process, peer.pid, peer.host, peer.identity, **more))


def _key(message: Message) -> str | None:
    """Of a gather; None means the regroup."""
    return None if message.get("key") is None else field(message, "key", str)
