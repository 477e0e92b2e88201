"""The link between processes of several hosts: shared memory inside each, MPI between them.

Large reductions go along a chain of hosts. Each process of a host has its slice of the array: it gets from the same process of
the host before what has come together there, folds all members of its own host on top of it, as they lie in shared
memory, and passes it on; from the last host the result comes back. The order is that of the members, and whatever the number
of processes in a host, it sends and receives an array only twice. Pieces follow one another, so that all hosts work at
the same time. Everything else goes over MPI, which needs one message between any two processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, final

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from collectives.control.watch import Watch
from collectives.errors import CollectiveError, not_common
from collectives.link import Link
from collectives.mpi.chunks import plan_chunks
from collectives.mpi.mpi_link import MpiLink
from collectives.mpi.reducing import Piece, plan_pieces
from collectives.mpi.transfers import Transfers
from collectives.recycled_memory import RecycledMemory
from collectives.reduce_op import ReduceOp
from collectives.reduction import CHUNK_BYTES
from collectives.shared_memory.shared_memory_link import SharedMemoryLink

T = TypeVar("T")

ROUND_BYTES = 64 << 20
"""Of an array, what is lent inside the hosts at once."""
PIECE_BYTES = 1 << 20
"""What one process passes on at once."""


@final
class HostsLink(Link):
    """One process's end. All make it at the same time, of links that nobody else uses.

    Args:
        shared: between the processes of this host, in the order of their numbers.
        between: between all processes.
        hosts: by process, what its host is called.
        watch: what is known of the other processes.
        name: what the link is called in reports: as the two that it is made of.
        round_bytes: of an array, what is lent inside the hosts at once.
        piece_bytes: what one process passes on at once.

    Raises:
        ValueError: the links are not between those processes.
    """

    def __init__(
        self,
        shared: SharedMemoryLink,
        between: MpiLink,
        hosts: Sequence[str],
        *,
        watch: Watch | None = None,
        name: str = "link",
        round_bytes: int = ROUND_BYTES,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        super().__init__(between.process, between.counts)
        self._shared, self._between = shared, between
        lanes = by_host(hosts)
        own = next((lane for lane in lanes if self.process in lane), [])
        counts = tuple(self.counts[p] for p in own)
        if len(hosts) != self.num_processes or counts != shared.counts:
            raise ValueError(
                f"HostsLink: got {len(hosts)} hosts for {self.num_processes} processes, and shared memory between processes with "
                f"{list(shared.counts)} members on a host whose processes have {list(counts)}; need links between those "
                "processes"
            )
        self._num_hosts, self._host = len(lanes), lanes.index(own)
        # Folded host by host, members stand in their order only if no host has some before and some after another's. And with
        # one member in each host there is nothing to save.
        is_in_order = [p for lane in lanes for p in lane] == list(range(self.num_processes))
        self._has_chain = is_in_order and 1 < self._num_hosts < self.size
        self._num_lanes = min(len(lane) for lane in lanes)
        self._lane = own.index(self.process)
        """Which process of its host; those beyond the number that all hosts have leave the work to the others."""
        is_working = self._lane < self._num_lanes
        self._before = lanes[self._host - 1][self._lane] if is_working and self._host else None
        is_last = self._host == self._num_hosts - 1
        self._after = lanes[self._host + 1][self._lane] if is_working and not is_last else None
        self._onward, self._back = between.transfers(), between.transfers()
        self._round_bytes, self._piece_bytes = round_bytes, piece_bytes
        self._memory = RecycledMemory(num_blocks=4)
        self._result_memory: Array = np.empty(0, np.uint8)
        self._buffers: list[Array] = []
        self._is_inside = False
        if watch is not None:
            watch.descriptions.add(name, self.describe)

    def describe(self) -> Mapping[str, Any]:
        """What this process is doing, for reports: the number and the words of its collective, and whether it waits."""
        told = dict(self._between.describe())
        told["waiting"] = told["waiting"] or self._is_inside
        return told

    # ------------------------------------------------------------- reductions

    def fold(
        self,
        call: Call,
        op: ReduceOp,
        sources: Sequence[Sequence[Array]],
        targets: Sequence[Sequence[Array]],
    ) -> None:
        if not self._has_chain or self._between.is_small(sources[0]):
            self._between.fold(call, op, sources, targets)
            return
        columns = [] if not targets else list(zip(sources[0], targets[0], strict=True))
        narrow = any(target.dtype != op.result_dtype(source.dtype) for source, target in columns)
        narrow = self._between.agree(call, narrow=narrow)
        overflow = ""
        with self._breaking():
            for piece in plan_pieces(op, sources, targets, self._round_bytes, self._memory):
                self._fold_piece(call, op, piece)
                try:
                    piece.finish(op)
                except OverflowError as error:
                    overflow = overflow or str(error)
        if narrow:
            self._between.conclude(overflow)

    def _fold_piece(self, call: Call, op: ReduceOp, piece: Piece) -> None:
        dtype, length = piece.rows[0].dtype, len(piece.rows[0])
        result = op.result_dtype(dtype)
        cuts = [length * lane // self._num_lanes for lane in range(self._num_lanes + 1)]
        own = self._part_of_result(
            0 if self._lane >= self._num_lanes else cuts[self._lane + 1] - cuts[self._lane], result
        )

        def fold(lent: list[Array]) -> None:
            if self._lane < self._num_lanes:
                part = slice(cuts[self._lane], cuts[self._lane + 1])
                self._pass_along(op, [row.view(dtype)[part] for row in lent], own)

        def take(lent: list[Array]) -> None:
            if piece.result is None:
                return
            # All members of a process bring the process's part.
            for lane in range(self._num_lanes):
                part = lent[self._shared.starts[lane]].view(result)
                np.copyto(piece.result[cuts[lane] : cuts[lane + 1]], part)

        words = (op, (dtype, (length,)))
        self._shared.all_gather(
            Call(f"the hosts' part of {call.kind}", words), [row.view(np.uint8) for row in piece.rows], fold
        )
        brought = [own.view(np.uint8)] * len(piece.rows)  # lent, not copied
        self._shared.all_gather(Call(f"the hosts' result of {call.kind}", words), brought, take)

    def _pass_along(self, op: ReduceOp, rows: Sequence[Array], result: Array) -> None:
        """Fold this host's rows on top of what comes from the host before, piece by piece, until the result is here."""
        dtype = op.accumulator_dtype(rows[0].dtype)
        length = max(1, self._piece_bytes // dtype.itemsize)
        pieces = [slice(start, start + num) for start, num in plan_chunks(len(result), length)]
        depth = self._num_hosts  # so many pieces are between here and the last host and back
        buffers = self._piece_buffers(depth + 1, length * dtype.itemsize)
        sending: list[list[Any]] = [[] for _ in buffers]
        returning: list[Any] = []
        with self._between.naming_mpi_errors():
            for turn in range(len(pieces) + depth):
                if turn < len(pieces):
                    part, place = pieces[turn], turn % len(buffers)
                    self._finish(self._onward, sending[place])
                    total = buffers[place][: (part.stop - part.start) * dtype.itemsize].view(dtype)
                    if self._before is not None:
                        self._onward.run(receives=[(total, self._before)])
                    _accumulate(op, [row[part] for row in rows], total, is_begun=self._before is not None)
                    if self._after is not None:
                        sending[place] = self._onward.start_send(total, self._after)
                    else:
                        if op is ReduceOp.MEAN:
                            np.divide(total, self.size, out=total)
                        np.copyto(result[part], total, casting="unsafe")
                        if self._before is not None:
                            returning += self._back.start_send(result[part], self._before)
                if self._after is not None and turn >= depth:
                    part = pieces[turn - depth]
                    self._back.run(receives=[(result[part], self._after)])
                    if self._before is not None:
                        returning += self._back.start_send(result[part], self._before)
            for requests in sending:
                self._finish(self._onward, requests)
            self._finish(self._back, returning)

    def _finish(self, way: Transfers, requests: list[Any]) -> None:
        way.finish(requests, [p for p in (self._before, self._after) if p is not None])

    def _part_of_result(self, length: int, dtype: np.dtype[Any]) -> Array:
        """Memory that the host's other processes can read."""
        num_bytes = length * dtype.itemsize
        if self._result_memory.nbytes < num_bytes:
            self._result_memory = np.empty(0, np.uint8)  # given back before more is asked for
            self._result_memory = self._shared.memory(num_bytes)
        return self._result_memory[:num_bytes].view(dtype)

    def _piece_buffers(self, number: int, num_bytes: int) -> list[Array]:
        if len(self._buffers) < number or self._buffers[0].nbytes < num_bytes:
            self._buffers = [np.empty(num_bytes, np.uint8) for _ in range(number)]
        return self._buffers[:number]

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """What fails between some processes only leaves all of them without a common state."""
        self._is_inside = True
        try:
            yield
        except CollectiveError as error:
            self.fail(not_common(error))  # all of the host know it, and nobody else
            raise
        finally:
            self._is_inside = False

    # ------------------------------------------------------------------ others

    def barrier(self, call: Call) -> None:
        self._between.barrier(call)

    def gather_objects(self, call: Call, values: Sequence[object]) -> list[object]:
        return self._between.gather_objects(call, values)

    def reduce_scatter(
        self, call: Call, op: ReduceOp, sources: Sequence[Array], targets: Sequence[Array]
    ) -> None:
        self._between.reduce_scatter(call, op, sources, targets)

    def broadcast(self, call: Call, root: int, source: Array | None, targets: Sequence[Array]) -> None:
        self._between.broadcast(call, root, source, targets)

    def all_gather(self, call: Call, arrays: Sequence[Array], use: Callable[[list[Array]], T]) -> T:
        return self._between.all_gather(call, arrays, use)

    def all_to_all(self, call: Call, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        self._between.all_to_all(call, sources, targets)

    def send(self, member: int, array: Array, peer: int, tag: int) -> None:
        self._between.send(member, array, peer, tag)

    def receive(self, member: int, peer: int, tag: int) -> Array:
        return self._between.receive(member, peer, tag)

    def memory(self, num_bytes: int) -> Array:
        return self._shared.memory(num_bytes)

    def fail(self, error: CollectiveError) -> None:
        self._between.fail(error)
        self._shared.fail(error)

    def abandon(self, timeout: float) -> bool:
        """Have nothing under way between hosts any more; whether that was possible in so many seconds."""
        return self._between.abandon(timeout)

    def close(self) -> None:
        self._between.close()
        self._shared.close()


def by_host(hosts: Sequence[str]) -> list[list[int]]:
    """The processes of each host, hosts in the order of their first process.

    Args:
        hosts: by process.
    """
    lanes: dict[str, list[int]] = {}
    for process, host in enumerate(hosts):
        lanes.setdefault(host, []).append(process)
    return list(lanes.values())


def _accumulate(op: ReduceOp, rows: Sequence[Array], total: Array, *, is_begun: bool) -> None:
    """Fold rows, in their order, on top of what ``total`` holds, or from the first one on."""
    length = max(1, CHUNK_BYTES // total.itemsize)
    for start in range(0, len(total), length):
        part = total[start : start + length]
        rest = rows
        if not is_begun:
            np.copyto(part, rows[0][start : start + length])
            rest = rows[1:]
        for row in rest:
            op.ufunc(part, row[start : start + length], out=part)
