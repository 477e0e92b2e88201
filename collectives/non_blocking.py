"""Collectives that go on in the background while their caller computes.

What is started is done one after the other, in a thread that belongs to the rank, so that the order, and with it every result, is that of
the same calls made one by one. What the caller computes meanwhile shares the cores with it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

from collectives.arrays import Array, settle
from collectives.communicator import Communicator
from collectives.errors import CollectiveAbortedError
from collectives.reduce_op import ReduceOp

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


@final
class NonBlocking:
    """Starts the collectives of one rank, and returns a handle of each at once.

    Every rank starts the same collectives in the same order. A handle is a `concurrent.futures.Future`: ``result()`` waits for the
    end and gives what the method of `Communicator` with the same name returns, or raises what it raises, wrong arguments
    included; ``done()`` asks whether it has ended. It can't be cancelled, as the other ranks count on it. Until it has
    ended, the arrays that were passed must not be changed, nor ``out`` be read.

    Args:
        communicator: this rank's end of a group, which nobody else uses from now on: of `process_group`, or of
            `InProcessCommunicator.group`, made for this. `send` and `recv` are no collectives, and not here.
    """

    def __init__(self, communicator: Communicator) -> None:
        if not isinstance(communicator, Communicator):
            raise TypeError(
                f"NonBlocking: got {communicator!r:.80}; need a Communicator of its own, as process_group() makes it"
            )
        self._inner = communicator
        self._started: queue.SimpleQueue[_Started | None] = queue.SimpleQueue()
        self._is_closed = False
        self._pid = os.getpid()
        thread = threading.Thread(
            target=_do,
            args=(self._started,),
            name=f"xpdistribute-background-{communicator.rank}",
            daemon=True,
        )
        thread.start()
        # The thread knows the queue only, so it ends when nobody can start anything any more.
        self._end = weakref.finalize(self, self._started.put, None)
        self._end.atexit = False

    @property
    def rank(self) -> int:
        """This rank, in ``range(world_size)``."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self._inner.world_size

    def all_reduce(
        self,
        array: Array,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        out: Array | None = None,
        name: str | None = None,
        like: Any = None,
    ) -> Future[Array]:
        """As `Communicator.all_reduce`."""
        return self._start(
            "all_reduce", lambda: self._inner.all_reduce(array, op, out=out, name=name, like=like), array, out
        )

    def all_reduce_coalesced(
        self,
        arrays: Sequence[Array],
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        outs: Sequence[Array] | None = None,
        name: str | None = None,
        like: Any = None,
    ) -> Future[list[Array]]:
        """As `Communicator.all_reduce_coalesced`."""
        # Whatever gives them is asked here: the thread would ask it later, and twice.
        arrays, outs = list(arrays), None if outs is None else list(outs)
        return self._start(
            "all_reduce_coalesced",
            lambda: self._inner.all_reduce_coalesced(arrays, op, outs=outs, name=name, like=like),
            *arrays,
            *(outs or ()),
        )

    def reduce(
        self,
        array: Array,
        op: ReduceOp | str = ReduceOp.SUM,
        root: int = 0,
        *,
        out: Array | None = None,
        like: Any = None,
    ) -> Future[Array | None]:
        """As `Communicator.reduce`."""
        return self._start(
            "reduce", lambda: self._inner.reduce(array, op, root, out=out, like=like), array, out
        )

    def reduce_scatter(
        self, array: Array, op: ReduceOp | str = ReduceOp.SUM, *, out: Array | None = None, like: Any = None
    ) -> Future[Array]:
        """As `Communicator.reduce_scatter`."""
        return self._start(
            "reduce_scatter", lambda: self._inner.reduce_scatter(array, op, out=out, like=like), array, out
        )

    def broadcast(
        self, array: Array, root: int = 0, *, out: Array | None = None, like: Any = None
    ) -> Future[Array]:
        """As `Communicator.broadcast`."""
        return self._start(
            "broadcast", lambda: self._inner.broadcast(array, root, out=out, like=like), array, out
        )

    def all_gather(
        self, array: Array, axis: int = 0, *, out: Array | None = None, like: Any = None
    ) -> Future[Array]:
        """As `Communicator.all_gather`."""
        return self._start(
            "all_gather", lambda: self._inner.all_gather(array, axis, out=out, like=like), array, out
        )

    def all_to_all(self, array: Array, *, out: Array | None = None, like: Any = None) -> Future[Array]:
        """As `Communicator.all_to_all`."""
        return self._start(
            "all_to_all", lambda: self._inner.all_to_all(array, out=out, like=like), array, out
        )

    def barrier(self) -> Future[None]:
        """Done when every rank has come: as `Communicator.barrier`."""
        return self._start("barrier", self._inner.barrier)

    def all_gather_object(self, value: object) -> Future[list[object]]:
        """As `Communicator.all_gather_object`."""
        return self._start("all_gather_object", lambda: self._inner.all_gather_object(value))

    def close(self) -> None:
        """Start nothing any more; what was started goes on to its end. Calling it again does nothing."""
        self._is_closed = True
        self._end()

    def _start(self, name: str, work: Callable[[], T], *arrays: Any) -> Future[T]:
        from concurrent.futures import Future  # noqa: PLC0415  # takes time to load, and few use it

        if self._is_closed:
            raise RuntimeError(f"{name}: this NonBlocking is closed; make a new one, of a new communicator")
        if self._pid != os.getpid():
            raise CollectiveAbortedError(
                f"{name}: this is a forked child, without the thread that does what is started; need it started in the process that "
                f"made the NonBlocking, {self._pid}"
            )
        for array in arrays:
            settle(array)  # here, as the thread that reads it has a stream of its own
        future: Future[T] = Future()
        # From now on it can't be cancelled.
        future.set_running_or_notify_cancel()
        caller = sys._getframe(2)
        self._started.put(
            _Started(future, work, f"started by {name} at {caller.f_code.co_filename}:{caller.f_lineno}")
        )
        return future


@final
class _Started:
    """A collective that is to be done.

    Args:
        future: its handle.
        work: does it.
        where: it was started, for whoever reads its error.
    """

    def __init__(self, future: Future[Any], work: Callable[[], Any], where: str) -> None:
        self._future, self._work, self._where = future, work, where

    def do(self) -> None:
        """Do it, and tell who holds the handle."""
        try:
            result = self._work()
        except BaseException as error:  # noqa: BLE001  # raised where the result is asked for
            error.add_note(self._where)
            self._future.set_exception(error)
        else:
            self._future.set_result(result)


def _do(started: queue.SimpleQueue[_Started | None]) -> None:
    # Nothing refers to what has been done while the next is waited for: its arrays may be large.
    while (one := started.get()) is not None:
        one.do()
        del one
