"""Values that all processes of a job give to each other."""

from __future__ import annotations

from typing import Any, final

from xpdistribute.roster import Peer, Roster, Standing, field, listed
from xpdistribute.wire import Message, WireError


@final
class Gathers:
    """The gathers that have begun and not ended, by key."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._values: dict[str, dict[int, Any]] = {}

    def add(self, peer: Peer, message: Message) -> None:
        """A process comes with its value; the last to come completes the gather."""
        key, process = field(message, "key", str), peer.process
        if "value" not in message:
            raise WireError("gather: value is missing")
        members = self._roster.members
        # One that is leaving has ended in good order or has failed; what is waited for with it fails when that is known.
        gone = next(
            (one for one in members if not one.is_live and one.standing is not Standing.LEAVING), None
        )
        if process is None or message.get("epoch") != self._roster.epoch:
            self._refuse(peer, key, "stale", f"{key}: the job has gone on in another make-up")
        elif gone is not None:
            self._refuse(peer, key, "gone", f"{key}: {gone} is gone: {gone.standing.value}", gone.process)
        elif process in self._values.get(key, {}):
            self._refuse(peer, key, "value", f"{key}: process {process} gathers it twice at the same time")
        else:
            values = self._values.setdefault(key, {})
            values[process] = message["value"]
            if len(values) == len(members):
                del self._values[key]
                in_order = [values[one] for one in sorted(values)]
                self._roster.send(members, {"type": "gathered", "key": key, "values": in_order})

    def fail_all(self, kind: str, why: str, process: int | None = None) -> None:
        """None of them can be completed."""
        for key in list(self._values):
            self._fail(key, _failed(key, kind, f"{key}: {why}", process))

    def missing(self, key: str) -> list[Peer]:
        """Who is waited for."""
        return [peer for peer in self._roster.members if peer.process not in self._values.get(key, {})]

    def give_up(self, peer: Peer, key: str, waited: float) -> None:
        """A process has waited too long; so have all who wait with it."""
        if peer.process in self._values.get(key, {}):
            missing = self.missing(key)
            text = f"{key}: {peer} waited {waited:g} s for {listed(missing)}"
            self._fail(key, {**_failed(key, "timeout", text), "missing": [one.process for one in missing]})

    def _refuse(self, peer: Peer, key: str, kind: str, text: str, process: int | None = None) -> None:
        self._roster.send([peer], _failed(key, kind, text, process))

    def _fail(self, key: str, message: Message) -> None:
        waiting = self._values.pop(key)
        self._roster.send((self._roster.members[process] for process in waiting), message)


def _failed(key: str, kind: str, text: str, process: int | None = None) -> Message:
    return {"type": "gather_failed", "key": key, "kind": kind, "text": text, "process": process}
