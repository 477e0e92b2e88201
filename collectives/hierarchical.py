"""Collectives between replicas that are spread over several processes.

The replicas of a process meet in it, as threads do; the last to come speaks for all of them on the process's link to the
others. With one replica in a process, the usual case, nothing is left of the first level but a function call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from collectives.arrays import Array, describe
from collectives.communicator import Communicator
from collectives.link import Link
from collectives.operands import all_operands, apart_from, copy_back, flat_operands
from collectives.recycled_memory import RecycledMemory
from collectives.reduce_op import ReduceOp
from collectives.reduction import Fold
from collectives.rendezvous import Call, Rendezvous


@final
class HierarchicalCommunicator(Communicator):
    """One replica's end of a group of all replicas in all processes.

    Args:
        local_rank: which of this process's replicas.
        rendezvous: where they meet.
        link: to the other processes.
    """

    def __init__(self, local_rank: int, rendezvous: Rendezvous, link: Link) -> None:
        self._local = local_rank
        self._rendezvous = rendezvous
        self._link = link
        self._memory = RecycledMemory()
        self._last: tuple[Any, ...] = (None, None, None, None, None)
        self._is_alone = rendezvous.size == 1

    @classmethod
    def alone(cls, link: Link, timeout: float = 60.0) -> HierarchicalCommunicator:
        """The end of a process that hosts one rank."""
        return cls(0, Rendezvous(1, timeout), link)

    @property
    def rank(self) -> int:
        return self._link.first + self._local

    @property
    def world_size(self) -> int:
        return self._link.size

    def barrier(self) -> None:
        call = Call("barrier")

        def conclude(values: list[Any]) -> list[Any]:
            self._link.barrier(call)
            return values

        self._meet(call, None, conclude)

    def all_gather_object(self, value: object) -> list[object]:
        call = Call("all_gather_object")

        def conclude(values: list[object]) -> list[list[object]]:
            gathered = self._link.gather_objects(call, values)
            return [list(gathered) for _ in values]

        gathered: list[object] = self._meet(call, value, conclude)
        return gathered

    def _all_reduce(
        self, arrays: list[Array], op: ReduceOp, outs: Sequence[Array] | None, name: str | None
    ) -> list[Array]:
        if len(arrays) == 1 and name is None:
            return [self._all_reduce_one(arrays[0], op, None if outs is None else outs[0])]
        detail, sources, results, targets = all_operands(arrays, op, outs, self._memory)
        self._fold(Call("all_reduce", detail, name), op, sources, targets)
        for result, target in zip(results, targets, strict=True):
            copy_back(target, result)
        return results

    def _all_reduce_one(self, array: Array, op: ReduceOp, out: Array | None) -> Array:
        """The most frequent case, mostly of the same kind again and again: its call is made once."""
        source, result, target = flat_operands(array, op, out, self._memory)
        shape, dtype, into = array.shape, array.dtype, result.dtype
        last = self._last
        if last[1] is op and last[2] == shape and last[3] is dtype and last[4] is into:
            call = last[0]
        else:
            detail: list[Any] = [op, (dtype, shape)]
            if into != op.result_dtype(dtype):
                detail.append(f"into {into}")
            call = Call("all_reduce", tuple(detail))
            self._last = (call, op, shape, dtype, into)
        self._fold(call, op, [source], [target])
        copy_back(target, result)
        return result

    def _reduce(self, array: Array, op: ReduceOp, root: int, out: Array | None) -> Array | None:
        call = Call("reduce", (op, (array.dtype, array.shape), f"root {root}"))
        source = np.ascontiguousarray(array).reshape(-1)
        if self.rank != root:
            self._fold(call, op, [source], None)
            return None
        # The other processes don't know of an out that is narrower than the result.
        total = self._memory.empty(array.shape, op.result_dtype(array.dtype))
        self._fold(call, op, [source], [total.reshape(-1)])
        if out is None:
            return total
        if out.dtype == total.dtype:
            out[...] = total
        else:
            narrow = np.empty(out.shape, out.dtype)
            Fold(ReduceOp.MAX, [total.reshape(-1)], [narrow.reshape(-1)]).run()
            out[...] = narrow
        return out

    def _reduce_scatter(self, array: Array, op: ReduceOp, out: Array | None) -> Array:
        array = apart_from(array, out)
        blocks = np.ascontiguousarray(array).reshape(self.world_size, -1)
        shape = (len(array) // self.world_size, *array.shape[1:])
        result = np.empty(shape, op.result_dtype(array.dtype)) if out is None else out
        target = result if result.flags.c_contiguous else np.empty(shape, result.dtype)
        call = Call("reduce_scatter", (op, (array.dtype, array.shape)))

        def conclude(values: list[Any]) -> list[None]:
            self._link.reduce_scatter(
                call, op, [value[0] for value in values], [value[1].reshape(-1) for value in values]
            )
            return [None] * len(values)

        self._meet(call, (blocks, target), conclude, blocks.nbytes)
        if target is not result:
            result[...] = target
        return result

    def _broadcast(self, array: Array, root: int, out: Array | None) -> Array:
        result = self._memory.empty(array.shape, array.dtype) if out is None else out
        target = result if result.flags.c_contiguous else np.empty(array.shape, array.dtype)
        call = Call("broadcast", ((array.dtype, array.shape), f"root {root}"))
        first = self._link.first

        def conclude(values: list[Any]) -> list[None]:
            is_here = first <= root < first + len(values)
            source = _bytes_of(values[root - first][0]) if is_here else None
            self._link.broadcast(call, root, source, [_bytes_of(value[1]) for value in values])
            return [None] * len(values)

        self._meet(call, (np.ascontiguousarray(array), target), conclude, array.nbytes)
        if target is not result:
            result[...] = target
        return result

    def _all_gather(self, array: Array, axis: int, out: Array | None) -> Array:
        before, after = array.shape[:axis], array.shape[axis + 1 :]
        row_bytes = math.prod((*before, *after)) * array.dtype.itemsize
        array = np.ascontiguousarray(apart_from(array, out))
        call = Call("all_gather", (f"axis {axis}", (array.dtype, (*before, -1, *after))))

        def conclude(values: list[Any]) -> list[Array]:
            arrays = [value[0] for value in values]
            # Of rows without bytes, only their owner can tell how many there are.
            lengths = (
                None
                if row_bytes
                else self._link.gather_objects(call, [_length_on(lent, axis) for lent in arrays])
            )

            def use(blobs: list[Array]) -> list[Array]:
                known: list[Any] = [len(blob) // row_bytes for blob in blobs] if lengths is None else lengths
                parts = [
                    blob.view(array.dtype).reshape((*before, length, *after))
                    if row_bytes
                    else np.empty((*before, length, *after), array.dtype)
                    for blob, length in zip(blobs, known, strict=True)
                ]
                shape = (*before, sum(known), *after)
                return [_joined(parts, axis, shape, value[1]) for value in values]

            return self._link.all_gather(call, [_bytes_of(lent) for lent in arrays], use)

        gathered: Array = self._meet(call, (array, out), conclude, array.nbytes)
        return gathered

    def _all_to_all(self, array: Array, out: Array | None) -> Array:
        array = np.ascontiguousarray(apart_from(array, out))
        result = np.empty(array.shape, array.dtype) if out is None else out
        target = result if result.flags.c_contiguous else np.empty(array.shape, array.dtype)
        size = self.world_size
        call = Call("all_to_all", ((array.dtype, array.shape),))

        def conclude(values: list[Any]) -> list[None]:
            self._link.all_to_all(
                call,
                [_bytes_of(value[0]).reshape(size, -1) for value in values],
                [_bytes_of(value[1]).reshape(size, -1) for value in values],
            )
            return [None] * len(values)

        self._meet(call, (array, target), conclude, array.nbytes)
        if target is not result:
            result[...] = target
        return result

    def _send(self, array: Array, peer: int, tag: int) -> None:
        local = peer - self._link.first
        if 0 <= local < self._rendezvous.size:
            self._rendezvous.send(self._local, local, tag, array.copy())
        else:
            self._link.send(self.rank, np.asarray(array, order="C"), peer, tag)

    def _recv(self, peer: int, tag: int) -> Array:
        local = peer - self._link.first
        if 0 <= local < self._rendezvous.size:
            array: Array = self._rendezvous.receive(self._local, local, tag)
            return array
        return self._link.receive(self.rank, peer, tag)

    # ------------------------------------------------------------------ pieces

    def _meet(
        self,
        call: Call,
        value: Any,
        conclude: Callable[[list[Any]], Sequence[Any]],
        num_bytes: int | None = None,
    ) -> Any:
        return self._rendezvous.meet(self._local, call, value, conclude, num_bytes)

    def _fold(self, call: Call, op: ReduceOp, sources: list[Array], targets: list[Array] | None) -> None:
        if self._is_alone and self._rendezvous.recorder.marks is None:
            self._link.fold(call, op, (sources,), () if targets is None else (targets,))
            return

        def conclude(values: list[Any]) -> list[None]:
            wanted = [value[1] for value in values if value[1] is not None]
            self._link.fold(call, op, [value[0] for value in values], wanted)
            return [None] * len(values)

        self._meet(call, (sources, targets), conclude)


def _length_on(array: Array, axis: int) -> int:
    """How long an array is along an axis."""
    return int(array.shape[axis])


def _joined(parts: Sequence[Array], axis: int, shape: tuple[int, ...], into: Array | None) -> Array:
    if into is not None and (into.shape != shape or into.dtype != parts[0].dtype):
        raise ValueError(f"all_gather: got out={describe(into)}; need {parts[0].dtype} of shape {shape}")
    return np.concatenate(parts, axis=axis, out=into)


def _bytes_of(array: Array) -> Array:
    flat: Array = array.reshape(-1).view(np.uint8)
    return flat
