"""Which process of a job starts another one in the place of a lost one, where the launcher can't.

MPI connects a process with the one that has started it, and through that one with the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from xpdistribute import events
from xpdistribute.events import NotSpawned
from xpdistribute.roster import Peer, Roster, Standing, field
from xpdistribute.wire import Message


@dataclass
class _Order:
    rank: int
    host: str | None
    spawner: Peer | None = None
    newcomer: Peer | None = None


@final
class Spawning:
    """What has been ordered, and has not led to a newcomer that was taken in.

    One after another: Open MPI 5.0.11 crashes where a process spawns two at the same time.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._orders: dict[int, _Order] = {}
        self._num_orders = 0
        self._hang: list[Peer] = []
        """Those whose newcomer has ended too early, which MPI goes on waiting for."""

    def order(self, rank: int, host: str | None) -> None:
        """Have some process start one.

        Args:
            rank: in whose place.
            host: where; None for wherever there is room.
        """
        self._drop(rank)
        self._add(_Order(rank, host))
        self._hand_out()

    def give_up(self, rank: int) -> None:
        """None comes any more that was to be started in the place of a rank."""
        self._drop(rank)
        self._hand_out()

    def arrived(self, newcomer: Peer, number: int) -> int | None:
        """A newcomer says by which order it was started; the rank whose place it takes, or None if the order holds no more."""
        order = self._orders.get(number)
        if order is None or order.newcomer is not None or order.spawner is None:
            return None
        order.newcomer, newcomer.spawner, newcomer.spawn = newcomer, order.spawner, number
        self._hand_out()
        return order.rank

    def failed(self, peer: Peer, message: Message) -> None:
        """A process could not start another one."""
        number, text = field(message, "id", int), field(message, "text", str)
        order = self._orders.get(number)
        if order is not None and order.spawner is peer:
            del self._orders[number]
            self._roster.tell(
                NotSpawned(peer.process, peer.pid, peer.host, peer.identity, rank=order.rank, text=text)
            )
            self._hand_out()

    def settle(self) -> None:
        """Somebody is gone or was taken in; orders of those that are gone go to others."""
        for number, order in list(self._orders.items()):
            if order.newcomer is not None and order.newcomer not in self._roster.newcomers:
                del self._orders[number]
            elif order.spawner is not None and not order.spawner.is_live:
                del self._orders[number]
                if order.newcomer is not None:
                    self._send_away(order.newcomer, order.spawner)
                self._add(_Order(order.rank, order.host))
        self._hand_out()

    def _send_away(self, newcomer: Peer, spawner: Peer) -> None:
        """MPI connects it by way of its spawner only."""
        text = (
            f"join: {spawner}, which has started this process, is gone; another one is started in its place"
        )
        self._roster.send([newcomer], {"type": "refused", "kind": "runtime", "text": text})
        self._roster.cut_off(newcomer)
        self._roster.remove_newcomer(newcomer)

    def _drop(self, rank: int) -> None:
        for number, order in list(self._orders.items()):
            if order.rank == rank and order.newcomer is None:
                del self._orders[number]
                if order.spawner is not None:
                    self._hang.append(order.spawner)

    def _add(self, order: _Order) -> None:
        self._num_orders += 1
        self._orders[self._num_orders] = order

    def _hand_out(self) -> None:
        members, orders = self._roster.members, self._orders.values()
        here = [peer for peer in members if peer.standing is Standing.HERE and peer.connection is not None]
        # The job ends when a process has ended in good order.
        is_ending = any(peer.standing in (Standing.LEAVING, Standing.LEFT) for peer in members)
        is_under_way = any(order.spawner is not None and order.newcomer is None for order in orders)
        number = next((number for number, order in self._orders.items() if order.spawner is None), None)
        if not here or is_ending or is_under_way or number is None:
            return
        order = self._orders[number]
        busy = [*(id(one.spawner) for one in orders), *map(id, self._hang)]
        order.spawner = min(here, key=lambda peer: busy.count(id(peer)))
        who = order.spawner.process, order.spawner.pid, order.spawner.host, order.spawner.identity
        self._roster.tell(events.Spawning(*who, rank=order.rank, number=number))
        self._roster.send(
            [order.spawner], {"type": "spawn", "id": number, "rank": order.rank, "host": order.host}
        )
