"""Producing elements ahead of their use, in a thread of its own.

The thread and the consumer share one channel and nothing else. The consumer is a generator: when it is
dropped or closed, for whatever reason, the channel closes, and the thread ends before its next element.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, final

_LOOK_AROUND = 1.0
"""Seconds between two looks at whether the other side is still there; nobody waits longer than that blindly."""


def prefetched(elements: Iterator[Any], buffer_size: int) -> Iterator[Any]:
    """The same elements, made up to ``buffer_size`` ahead by a daemon thread that starts with the first one.

    What ``elements`` raises is raised here, as itself, after the elements before it.

    Raises:
        RuntimeError: the thread is gone, which happens in a process forked while it ran.
    """
    channel = _Channel(buffer_size)
    thread = threading.Thread(target=_produce, args=(elements, channel), name="prefetch", daemon=True)
    del elements  # so that the thread alone holds the pipeline, and closes it when it ends
    thread.start()
    try:
        while channel.wait_for_element(thread):
            yield channel.take()
    finally:
        channel.close()


def _produce(elements: Iterator[Any], channel: _Channel) -> None:
    try:
        for element in elements:
            if not channel.put(element):
                return
    except BaseException as error:  # noqa: BLE001 - the consumer raises it
        channel.finish(error)
    else:
        channel.finish(None)


@final
class _Channel:
    """A bounded queue of elements with an end, which either side may bring about."""

    def __init__(self, buffer_size: int) -> None:
        self._buffer_size = buffer_size
        self._elements: deque[Any] = deque()
        self._finished = False  # the producer adds nothing more
        self._error: BaseException | None = None  # why it stopped, if not at the end
        self._closed = False  # the consumer takes nothing more
        self._changed = threading.Condition()

    def put(self, element: Any) -> bool:
        """Wait for room and add an element; False if nobody will take it."""
        with self._changed:
            while len(self._elements) >= self._buffer_size and not self._closed:
                self._changed.wait(_LOOK_AROUND)
            if self._closed:
                return False
            self._elements.append(element)
            self._changed.notify()
            return True

    def finish(self, error: BaseException | None) -> None:
        with self._changed:
            self._finished = True
            self._error = error
            self._changed.notify()

    def wait_for_element(self, producer: threading.Thread) -> bool:
        """Whether there is one more element; raises what the producer raised."""
        with self._changed:
            while not self._elements and not self._finished:
                if not producer.is_alive():
                    raise RuntimeError(
                        "prefetch: its thread is gone; need the process that started it — after a fork, make "
                        "a new iterator in the child"
                    )
                self._changed.wait(_LOOK_AROUND)
            if self._elements:
                return True
            # Let go of the error: its traceback holds frames that hold this channel.
            error, self._error = self._error, None
        if error is not None:
            raise error
        return False

    def take(self) -> Any:
        with self._changed:
            element = self._elements.popleft()
            self._changed.notify()
            return element

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._elements.clear()
            self._changed.notify()
