"""Collectives between the threads of one process.

The ranks lend one another their arrays by reference: nothing is serialized, and of a small reduction all
is done by the last rank to come, in the cache of one core. From a size on, every rank takes chunks
of the work, so that all cores share it. It is the backend of `MirroredStrategy` on the CPU, and the
reference that all other backends are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from collectives.arrays import Array, describe
from collectives.communicator import Communicator
from collectives.operands import all_operands, apart_from, copy_back, flat_operands
from collectives.recycled_memory import RecycledMemory
from collectives.reduce_op import ReduceOp
from collectives.reduction import Fold, fold
from collectives.rendezvous import LONGEST_TIMEOUT, Call, Rendezvous

SHARED_FROM = 4 << 20
"""Bytes of all ranks together. Below, waking the other threads takes longer than their help saves."""

_DONE = Call("the end of the same collective")


@final
class InProcessCommunicator(Communicator):
    """One thread's end of a group; `group` makes all ends at once.

    Args:
        rank: which end.
        rendezvous: where the ranks meet.
        shared_from: bytes, of all ranks together, from which the ranks share the work of a collective. Never, with
            ``math.inf``: the last rank to come does it alone.
    """

    def __init__(self, rank: int, rendezvous: Rendezvous, shared_from: float = SHARED_FROM) -> None:
        self._rank = rank
        self._rendezvous = rendezvous
        self._shared_from = shared_from
        self._memory = RecycledMemory()

    @classmethod
    def group(cls, world_size: int, timeout: float = 60.0) -> list[InProcessCommunicator]:
        """The ends of a new group, by rank. A rank waits ``timeout`` seconds for the others.

        Raises:
            ValueError: no rank, no time, or more than the system can wait.
        """
        if world_size < 1 or not 0 < timeout <= LONGEST_TIMEOUT:
            raise ValueError(
                f"group: got world_size={world_size}, timeout={timeout}; need both above 0, and at most "
                f"{LONGEST_TIMEOUT:.0f} s"
            )
        rendezvous = Rendezvous(world_size, timeout)
        return [cls(rank, rendezvous) for rank in range(world_size)]

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._rendezvous.size

    def barrier(self) -> None:
        self._meet(Call("barrier"), None, lambda values: values)

    def all_gather_object(self, value: object) -> list[object]:
        gathered: list[object] = self._meet(
            Call("all_gather_object"), value, lambda values: [list(values) for _ in values]
        )
        return gathered

    def _all_reduce(
        self, arrays: list[Array], op: ReduceOp, outs: Sequence[Array] | None, name: str | None
    ) -> list[Array]:
        detail, sources, results, targets = all_operands(arrays, op, outs, self._memory)
        self._fold(Call("all_reduce", detail, name), op, sources, targets)
        for result, target in zip(results, targets, strict=True):
            copy_back(target, result)
        return results

    def _reduce(self, array: Array, op: ReduceOp, root: int, out: Array | None) -> Array | None:
        call = Call("reduce", (op, (array.dtype, array.shape), f"root {root}"))
        if self.rank != root:
            self._fold(call, op, [np.ascontiguousarray(array).reshape(-1)], None)
            return None
        source, result, target = flat_operands(array, op, out, self._memory)
        self._fold(call, op, [source], [target])
        copy_back(target, result)
        return result

    def _reduce_scatter(self, array: Array, op: ReduceOp, out: Array | None) -> Array:
        size = self.world_size
        array = apart_from(array, out)
        blocks = np.ascontiguousarray(array).reshape(size, -1)
        shape = (len(array) // size, *array.shape[1:])
        result = np.empty(shape, op.result_dtype(array.dtype)) if out is None else out
        target = result if result.flags.c_contiguous else np.empty(shape, result.dtype)

        def work(values: list[Any], rank: int) -> None:
            Fold(op, [lent[rank] for lent, _ in values], [values[rank][1].reshape(-1)]).run()

        call = Call("reduce_scatter", (op, (array.dtype, array.shape)))
        self._share(call, (blocks, target), blocks.nbytes, work)
        if target is not result:
            result[...] = target
        return result

    def _broadcast(self, array: Array, root: int, out: Array | None) -> Array:
        result = self._memory.empty(array.shape, array.dtype) if out is None else out
        array = apart_from(array, out)

        def work(values: list[Any], rank: int) -> None:
            np.copyto(values[rank][1], values[root][0])

        call = Call("broadcast", ((array.dtype, array.shape), f"root {root}"))
        self._share(call, (array, result), array.nbytes, work)
        return result

    def _all_gather(self, array: Array, axis: int, out: Array | None) -> Array:
        others = (*array.shape[:axis], -1, *array.shape[axis + 1 :])
        array = apart_from(array, out)

        def work(values: list[Any], rank: int) -> Array:
            arrays, into = [lent for lent, _ in values], values[rank][1]
            length = sum(lent.shape[axis] for lent in arrays)
            shape = (*others[:axis], length, *others[axis + 1 :])
            if into is not None and (into.shape != shape or into.dtype != arrays[0].dtype):
                raise ValueError(
                    f"all_gather: got out={describe(into)}; need {arrays[0].dtype} of shape {shape}"
                )
            return np.concatenate(arrays, axis=axis, out=into)

        call = Call("all_gather", (f"axis {axis}", (array.dtype, others)))
        gathered: Array = self._share(call, (array, out), array.nbytes, work)
        return gathered

    def _all_to_all(self, array: Array, out: Array | None) -> Array:
        array = apart_from(array, out)
        result = np.empty(array.shape, array.dtype) if out is None else out
        block = len(array) // self.world_size

        def work(values: list[Any], rank: int) -> None:
            mine = slice(rank * block, (rank + 1) * block)
            for peer, (lent, _) in enumerate(values):
                values[rank][1][peer * block : (peer + 1) * block] = lent[mine]

        call = Call("all_to_all", ((array.dtype, array.shape),))
        self._share(call, (array, result), array.nbytes, work)
        return result

    def _send(self, array: Array, peer: int, tag: int) -> None:
        self._rendezvous.send(self.rank, peer, tag, array.copy())

    def _recv(self, peer: int, tag: int) -> Array:
        array: Array = self._rendezvous.receive(self.rank, peer, tag)
        return array

    # ------------------------------------------------------------------ pieces

    def _meet(self, call: Call, value: Any, conclude: Callable[[list[Any]], Sequence[Any]]) -> Any:
        return self._rendezvous.meet(self._rank, call, value, conclude)

    def _fold(self, call: Call, op: ReduceOp, sources: list[Array], targets: list[Array] | None) -> None:
        """Fold every rank's sources into the targets of the ranks that have some, with all ranks' help."""

        def conclude(values: list[Any]) -> list[Any]:
            wanted = [value[1] for value in values if value[1] is not None]
            columns = [
                (op, [value[0][i] for value in values], [target[i] for target in wanted])
                for i in range(len(sources))
            ]
            if (
                len(values) > 1
                and len(values) * sum([source.nbytes for source in sources]) >= self._shared_from
            ):
                return [[Fold(*column) for column in columns]] * len(values)
            for column in columns:
                fold(*column)
            return [None] * len(values)

        folds = self._meet(call, (sources, targets), conclude)
        if folds is not None:
            self._finish(lambda: [fold.run() for fold in folds])

    def _share(self, call: Call, value: Any, num_bytes: int, work: Callable[[list[Any], int], Any]) -> Any:
        """Lend all ranks' values and do ``work`` on them for every rank, alone in the last or each its own.

        Nobody returns before everybody has finished, so what was lent may be changed afterwards.
        """

        def conclude(values: list[Any]) -> list[Any]:
            lent = [value for value, _ in values]
            if len(values) > 1 and sum(size for _, size in values) >= self._shared_from:
                return [(True, lent)] * len(values)
            return [(False, work(lent, rank)) for rank in range(len(values))]

        is_lent, result = self._rendezvous.meet(self._rank, call, (value, num_bytes), conclude, num_bytes)
        return self._finish(lambda: work(result, self._rank)) if is_lent else result

    def _finish(self, work: Callable[[], Any]) -> Any:
        try:
            result = work()
        except BaseException as failure:
            self._rendezvous.abort(failure)
            raise
        self._meet(_DONE, None, lambda values: values)
        return result
