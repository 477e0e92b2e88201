"""Records the calls of one rank, of any backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

from collectives.arrays import Array
from collectives.calls import Call
from collectives.communicator import Communicator
from collectives.flight_recorder import LEFT, FlightRecorder, clock
from collectives.reduce_op import ReduceOp

T = TypeVar("T")


@final
class TracedCommunicator(Communicator):
    """Wraps any communicator, and leaves a record of every call in a `FlightRecorder`.

    What one rank records is how long its own calls took; which part of that was waiting shows where the ranks of one process
    share a recorder. The replicas of a strategy on one machine are recorded anyway, without a wrapper.

    Args:
        inner: does the work.
        recorder: with this rank among its members.

    Raises:
        ValueError: the recorder is not for this rank.
    """

    def __init__(self, inner: Communicator, recorder: FlightRecorder) -> None:
        if inner.rank not in recorder.members:
            raise ValueError(
                f"TracedCommunicator: got a recorder of {recorder.noun}s {', '.join(map(str, recorder.members))}; "
                f"need one that has rank {inner.rank} among them — FlightRecorder([{inner.rank}])"
            )
        self._inner = inner
        self._recorder = recorder
        self._position = recorder.members.index(inner.rank)
        self._sequence = 0

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def world_size(self) -> int:
        return self._inner.world_size

    def barrier(self) -> None:
        self._recorded(Call("barrier"), self._inner.barrier)

    def all_gather_object(self, value: object) -> list[object]:
        return self._recorded(Call("all_gather_object"), lambda: self._inner.all_gather_object(value))

    def _all_reduce(
        self, arrays: list[Array], op: ReduceOp, outs: Sequence[Array] | None, name: str | None
    ) -> list[Array]:
        call = Call("all_reduce", (op, *map(_kind, arrays)), name)
        return self._recorded(
            call, lambda: self._inner.all_reduce_coalesced(arrays, op, outs=outs, name=name)
        )

    def _reduce(self, array: Array, op: ReduceOp, root: int, out: Array | None) -> Array | None:
        call = Call("reduce", (op, _kind(array), f"root {root}"))
        return self._recorded(call, lambda: self._inner.reduce(array, op, root, out=out))

    def _reduce_scatter(self, array: Array, op: ReduceOp, out: Array | None) -> Array:
        call = Call("reduce_scatter", (op, _kind(array)))
        return self._recorded(call, lambda: self._inner.reduce_scatter(array, op, out=out))

    def _broadcast(self, array: Array, root: int, out: Array | None) -> Array:
        call = Call("broadcast", (_kind(array), f"root {root}"))
        return self._recorded(call, lambda: self._inner.broadcast(array, root, out=out))

    def _all_gather(self, array: Array, axis: int, out: Array | None) -> Array:
        others = (*array.shape[:axis], -1, *array.shape[axis + 1 :])
        call = Call("all_gather", (f"axis {axis}", (array.dtype, others)))
        return self._recorded(call, lambda: self._inner.all_gather(array, axis, out=out), array.nbytes)

    def _all_to_all(self, array: Array, out: Array | None) -> Array:
        return self._recorded(
            Call("all_to_all", (_kind(array),)), lambda: self._inner.all_to_all(array, out=out)
        )

    def _send(self, array: Array, peer: int, tag: int) -> None:
        call = Call("send", (peer, f"tag {tag}", _kind(array)))
        self._recorded(call, lambda: self._inner.send(array, peer, tag))

    def _recv(self, peer: int, tag: int) -> Array:
        return self._recorded(Call("recv", (peer, f"tag {tag}")), lambda: self._inner.recv(peer, tag))

    def _recorded(self, call: Call, work: Callable[[], T], num_bytes: int | None = None) -> T:
        record = [0, self._sequence, call, num_bytes, clock(), 0]
        self._recorder.logs[self._position].append(record)
        if call.kind not in ("send", "recv"):
            self._sequence += 1
        result = work()
        record[LEFT] = clock()
        return result


def _kind(array: Array) -> tuple[Any, tuple[int, ...]]:
    return array.dtype, array.shape
