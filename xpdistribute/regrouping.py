"""How a job goes on in another make-up: without those it has lost, and with newcomers."""

from __future__ import annotations

from typing import final

from xpdistribute.events import Regrouped
from xpdistribute.gathers import Gathers
from xpdistribute.inquiry import Inquiries
from xpdistribute.roster import Peer, Roster, field, listed
from xpdistribute.wire import Message


@final
class Regrouping:
    """Waits until every live process wants to go on, and gives out new numbers then."""

    def __init__(self, roster: Roster, gathers: Gathers, inquiries: Inquiries) -> None:
        self._roster = roster
        self._gathers = gathers
        self._inquiries = inquiries

    def add(self, peer: Peer, message: Message) -> None:
        """A process wants to go on, or, a newcomer, to come in."""
        admits, roster = field(message, "admit", bool), self._roster
        if peer in roster.newcomers:
            peer.info, peer.is_ready = message.get("info"), True
            roster.tell_waiting()
        elif not roster.elastic or message.get("epoch") != roster.epoch or not peer.is_live:
            why = "it has gone on in another make-up" if roster.elastic else "it is not elastic"
            self._fail([peer], f"regroup: the job can't go on with {peer}: {why}", [])
        else:
            peer.info, peer.is_ready, peer.admits = message.get("info"), True, admits
            self.settle()

    @property
    def missing(self) -> list[Peer]:
        """Who is waited for."""
        return [peer for peer in self._roster.members if peer.is_live and not peer.is_ready]

    def give_up(self, peer: Peer, waited: float) -> None:
        """A process has waited too long; so have all who wait with it."""
        if not peer.is_ready:
            return
        # Members don't wait for a newcomer, only it for them.
        ready = [peer] if peer.process is None else [one for one in self._roster.members if one.is_ready]
        missing = self.missing
        text = f"regroup: {peer} waited {waited:g} s for {listed(missing) or 'a regroup that admits it'}"
        for one in ready:
            one.is_ready = False
        self._fail(ready, text, missing)
        if peer.process is None:
            self._roster.tell_waiting()

    def settle(self) -> None:
        """Go on, if nobody is waited for any more."""
        survivors = [peer for peer in self._roster.members if peer.is_live]
        if survivors and all(peer.is_ready for peer in survivors):
            self._go_on(survivors)

    def _go_on(self, survivors: list[Peer]) -> None:
        roster = self._roster
        self._gathers.fail_all("stale", "the job goes on in another make-up")
        self._inquiries.close()
        admitted: list[Peer] = []
        if all(peer.admits for peer in survivors):
            admitted = roster.ready
        for peer in roster.members:
            if not peer.is_live and peer.connection is not None:
                # It failed or said goodbye, and still is there; but it has no number any more.
                roster.cut_off(peer)
        roster.newcomers = [peer for peer in roster.newcomers if peer not in admitted]
        roster.members = [*survivors, *admitted]
        roster.epoch += 1
        roster.told.clear()
        listed_members = [
            {
                "pid": peer.pid,
                "host": peer.host,
                "old_process": peer.process,
                "info": peer.info,
            }
            for peer in roster.members
        ]
        for process, peer in enumerate(roster.members):
            peer.process, peer.info, peer.is_ready, peer.admits = process, None, False, False
            message = {
                "type": "regrouped",
                "epoch": roster.epoch,
                "process": process,
                "members": listed_members,
                "waiting": len(roster.ready),
            }
            roster.send([peer], message)
        pids, hosts = zip(*((peer.pid, peer.host) for peer in roster.members), strict=True)
        roster.tell(Regrouped(roster.epoch, pids, hosts))

    def _fail(self, peers: list[Peer], text: str, missing: list[Peer]) -> None:
        numbers = [one.process for one in missing]
        self._roster.send(peers, {"type": "regroup_failed", "text": text, "missing": numbers})
