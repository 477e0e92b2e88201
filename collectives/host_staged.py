"""Collectives of arrays on a GPU, by way of the host's memory.

For groups whose backend knows nothing of GPUs. An array is copied into pinned memory when all that its stream was given before has been
done, and the result is back before the call returns: neither the backend nor what is computed next can see half an array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, final

import numpy as np

from collectives.arrays import ALIGNMENT, Array, is_host, settle, write_into
from collectives.communicator import Communicator
from collectives.reduce_op import ReduceOp


@final
class HostStagedCommunicator(Communicator):
    """Wraps a communicator of host arrays: CuPy arrays work too, also on some ranks only.

    Results lie on the GPU that the rank's own array lies on. What `recv` gives lies on the host, unless ``like`` or ``out`` says
    otherwise.

    Args:
        inner: does the work. Nobody else uses it.
    """

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self._pinned: Array = np.empty(0, np.uint8)

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def world_size(self) -> int:
        return self._inner.world_size

    def barrier(self) -> None:
        self._inner.barrier()

    def all_gather_object(self, value: object) -> list[object]:
        return self._inner.all_gather_object(value)

    def _all_reduce(
        self, arrays: list[Array], op: ReduceOp, outs: Sequence[Array] | None, name: str | None
    ) -> list[Array]:
        if all(map(is_host, arrays)) and (outs is None or all(map(is_host, outs))):
            return self._inner.all_reduce_coalesced(arrays, op, outs=outs, name=name)
        hosts = self._on_host(arrays)
        rooms = []
        for index, (array, host) in enumerate(zip(arrays, hosts, strict=True)):
            out = None if outs is None else outs[index]
            dtype = op.result_dtype(array.dtype) if out is None else out.dtype
            if out is not None and is_host(out):
                rooms.append(out)
            elif host is not array and host.dtype == dtype:
                rooms.append(host)  # in pinned memory too
            else:
                rooms.append(np.empty(host.shape, dtype))
        self._inner.all_reduce_coalesced(hosts, op, outs=rooms, name=name)
        if outs is None:
            return [_beside(array, room) for array, room in zip(arrays, rooms, strict=True)]
        for out, room in zip(outs, rooms, strict=True):
            if out is not room:
                write_into(out, room)
        return list(outs)

    def _reduce(self, array: Array, op: ReduceOp, root: int, out: Array | None) -> Array | None:
        if self.rank == root:
            return self._staged(array, out, lambda a, o: self._inner.reduce(a, op, root, out=o))
        return self._inner.reduce(self._on_host([array])[0], op, root)

    def _reduce_scatter(self, array: Array, op: ReduceOp, out: Array | None) -> Array:
        return self._staged(array, out, lambda a, o: self._inner.reduce_scatter(a, op, out=o))

    def _broadcast(self, array: Array, root: int, out: Array | None) -> Array:
        return self._staged(array, out, lambda a, o: self._inner.broadcast(a, root, out=o))

    def _all_gather(self, array: Array, axis: int, out: Array | None) -> Array:
        return self._staged(array, out, lambda a, o: self._inner.all_gather(a, axis, out=o))

    def _all_to_all(self, array: Array, out: Array | None) -> Array:
        return self._staged(array, out, lambda a, o: self._inner.all_to_all(a, out=o))

    def _send(self, array: Array, peer: int, tag: int) -> None:
        self._inner.send(self._on_host([array])[0], peer, tag)

    def _recv(self, peer: int, tag: int) -> Array:
        return self._inner.recv(peer, tag)

    # ------------------------------------------------------------------ pieces

    def _staged(
        self, array: Array, out: Array | None, work: Callable[[Array, Array | None], Array | None]
    ) -> Array:
        """Do ``work(array, out)`` with both on the host; the result where the caller wants it."""
        room = out if out is None or is_host(out) else np.empty(out.shape, out.dtype)
        result = work(self._on_host([array])[0], room)
        assert result is not None
        if out is None:
            return _beside(array, result)
        if room is not out:
            write_into(out, result)
        return out

    def _on_host(self, arrays: Sequence[Array]) -> list[Array]:
        """These arrays on the host: those that are there, themselves; the others in pinned memory, until the next call."""
        if all(map(is_host, arrays)):
            return list(arrays)
        sizes = [0 if is_host(array) else -(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
        if sum(sizes) > self._pinned.nbytes:
            self._pinned = import_module("cupyx").empty_pinned(sum(sizes), np.uint8)
        hosts, start = [], 0
        for array, size in zip(arrays, sizes, strict=True):
            if is_host(array):
                hosts.append(array)
                continue
            host = self._pinned[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            settle(array)  # older CuPys copy in a stream of their own
            array.get(out=host)  # type: ignore[attr-defined]  # CuPy's way to the host
            hosts.append(host)
            start += size
        return hosts


def _beside(array: Any, result: Array) -> Array:
    """A result on the GPU that the array lies on; itself if that lies on the host."""
    if is_host(array):
        return result
    cupy = import_module("cupy")
    with array.device:
        moved = cupy.asarray(result)
        # The next collective writes over the pinned memory that this is copied from.
        cupy.cuda.get_current_stream().synchronize()
    return moved  # type: ignore[no-any-return]  # a CuPy array, see Array
