"""Finds the ranks that disagree, at the price of one more exchange for each collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from collectives.arrays import Array, describe
from collectives.communicator import Communicator
from collectives.errors import CollectiveMismatchError
from collectives.reduce_op import ReduceOp


@final
class CheckedCommunicator(Communicator):
    """Wraps any communicator; every rank of the group must be wrapped.

    What the ranks call is compared before any data moves, so backends that would read wrong memory or wait for ever
    raise a `CollectiveMismatchError` instead. `InProcessCommunicator` compares by itself.
    """

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def world_size(self) -> int:
        return self._inner.world_size

    def barrier(self) -> None:
        self._require_alike("barrier")
        self._inner.barrier()

    def all_gather_object(self, value: object) -> list[object]:
        self._require_alike("all_gather_object")
        return self._inner.all_gather_object(value)

    def _all_reduce(
        self, arrays: list[Array], op: ReduceOp, outs: Sequence[Array] | None, name: str | None
    ) -> list[Array]:
        named = "" if name is None else f" {name!r}"
        self._require_alike(f"all_reduce{named} {op.name} of {', '.join(map(describe, arrays))}")
        return self._inner.all_reduce_coalesced(arrays, op, outs=outs, name=name)

    def _reduce(self, array: Array, op: ReduceOp, root: int, out: Array | None) -> Array | None:
        self._require_alike(f"reduce {op.name} of {describe(array)} to {root}")
        return self._inner.reduce(array, op, root, out=out)

    def _reduce_scatter(self, array: Array, op: ReduceOp, out: Array | None) -> Array:
        self._require_alike(f"reduce_scatter {op.name} of {describe(array)}")
        return self._inner.reduce_scatter(array, op, out=out)

    def _broadcast(self, array: Array, root: int, out: Array | None) -> Array:
        self._require_alike(f"broadcast of {describe(array)} from {root}")
        return self._inner.broadcast(array, root, out=out)

    def _all_gather(self, array: Array, axis: int, out: Array | None) -> Array:
        # The lengths along the axis may differ.
        others = (*array.shape[:axis], "...", *array.shape[axis + 1 :])
        self._require_alike(f"all_gather of {array.dtype} of shape {others}")
        return self._inner.all_gather(array, axis, out=out)

    def _all_to_all(self, array: Array, out: Array | None) -> Array:
        self._require_alike(f"all_to_all of {describe(array)}")
        return self._inner.all_to_all(array, out=out)

    # Point to point has no group to compare with.
    def _send(self, array: Array, peer: int, tag: int) -> None:
        self._inner.send(array, peer, tag)

    def _recv(self, peer: int, tag: int) -> Array:
        return self._inner.recv(peer, tag)

    def _require_alike(self, call: str) -> None:
        calls = [str(other) for other in self._inner.all_gather_object(call)]
        for rank, other in enumerate(calls):
            if other != calls[0]:
                raise CollectiveMismatchError(
                    f"rank {rank} calls {other}, rank 0 calls {calls[0]}; "
                    "every rank must make the same calls in the same order",
                    calls,
                )
