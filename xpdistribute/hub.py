"""The hub of a job: a small server that all its processes talk to, and that sees when one of them dies.

It carries control only: who is there, failures, reports of what hangs, who goes on with whom. Data goes another way.
What it decides is in `xpdistribute.job`; here are the sockets, and the one thread that serves them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import final

from xpdistribute.events import Event, Failed, Failure, Lost, Regrouped, Silent
from xpdistribute.job import Job
from xpdistribute.roster import Action, Drop, Send
from xpdistribute.wire import LIMIT, Lines, WireError, encode, prepare

HEARTBEAT_SECONDS = 10.0
QUEUE_LIMIT = 16 * LIMIT
"""Bytes that may wait for a process that does not read."""
TO_READ_THE_LAST = 2.0
"""Seconds that one who is dropped has to read why."""
GUESTS = 256
"""Connections that may be open without having said who they are, beyond one for each process."""

_log = logging.getLogger("xpdistribute.hub")


@final
class Hub:
    """The server of one job.

    Args:
        num_processes: how many the job starts with.
        token: a secret that the job's processes know; who does not is refused.
        host: where to listen; only this machine reaches the default. "" means everywhere.
        port: 0 takes a free one.
        elastic: whether the job goes on without the processes it loses, and takes newcomers.
        heartbeat_seconds: in an elastic job, a process that is silent for so long is treated as dead.
        num_spares: how many more are started, each to take the place of one that is lost.
        sees_ends: whether `ended` is called for each process.
        grace: seconds that `close` takes at most to send what is under way.
        on_event: called with what happens, in the hub's thread; it must not take long.
        listener: a socket that listens already, instead of one of ``host`` and ``port``.

    Attributes:
        port: where it listens.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        num_processes: int,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        elastic: bool = False,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        num_spares: int = 0,
        sees_ends: bool = False,
        grace: float = 0.5,
        on_event: Callable[[Event | Regrouped], None] | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._job = Job(
            num_processes,
            token,
            elastic=elastic,
            heartbeat_seconds=heartbeat_seconds,
            num_spares=num_spares,
            sees_ends=sees_ends,
        )
        if listener is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=1024)
        self._num_spares = num_spares
        self._listener = listener
        self._listener.setblocking(False)
        self.port: int = listener.getsockname()[1]
        self._host = host
        self._grace = grace
        self._on_event = on_event
        self._failures: list[Failure] = []
        self._finished = threading.Event()
        self._calls: deque[Callable[[], None]] = deque()
        self._connections: dict[int, _Connection] = {}
        self._num_connections = 0
        self._closing = False
        self._pid = os.getpid()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="xpdistribute-hub", daemon=True)
        _all.add(self)

    def start(self) -> Hub:
        """Begin to serve; returns the hub itself."""
        self._thread.start()
        atexit.register(self.close)
        return self

    @property
    def address(self) -> str:
        """Where the processes of this and of other machines reach it, ``host:port``."""
        host = self._host if self._host not in ("", "0.0.0.0", "::") else socket.gethostname()
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Who did not end in good order, the first first."""
        return tuple(self._failures)

    @property
    def is_finished(self) -> bool:
        """Whether every process has come and gone."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every process has come and gone; whether they have."""
        return self._finished.wait(timeout)

    def declare_lost(self, process: int, text: str, pid: int | None = None) -> None:
        """Tell the others that a process is dead, which may never have connected.

        Args:
            process: its number.
            text: what is known, such as ``"it ended with status 3"``.
            pid: its process id, if that is known: another process that has got its number is not meant.
        """
        self._call(lambda: self._do(self._job.declare_lost(process, text, time.monotonic(), pid)))

    def ended(self, process: int, pid: int, status: int) -> None:
        """Tell with which status a process has ended, which may have said goodbye before.

        Args:
            process: the number that it was started with.
            pid: its process id.
            status: 128 + N for signal N.
        """
        self._call(lambda: self._do(self._job.ended(process, pid, status, time.monotonic())))

    def all_ended(self, timeout: float = 0.5) -> None:
        """Say that `ended` is called no more, and wait until ``on_event`` was told of all that has happened."""
        done = threading.Event()
        self._call(lambda: self._do(self._job.all_ended(time.monotonic())))
        self._call(done.set)
        done.wait(timeout)

    def close(self) -> None:
        """End it in good order: what is under way to the processes is sent first. Calling it again does nothing."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid or self._closing:
            return
        self._closing = True
        if self._thread.ident is None:
            self._close_sockets()
            return
        self._call(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(self._grace + 1.0)

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------- the hub's thread

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: there is nobody to wake
            self._wake.send(b"!")

    def _serve(self) -> None:
        try:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._selector.register(self._woken, selectors.EVENT_READ, self._run_calls)
            while self._serve_once():
                pass
            self._say_closed()
        except BaseException:
            _log.exception("the hub failed; the processes of the job lose their connection to it")
            raise
        finally:
            # Also after a failure: processes that see the connection end fail, and don't wait for ever.
            self._close_sockets()

    def _serve_once(self) -> bool:
        wait = self._job.seconds_to_tick(time.monotonic())
        before = time.monotonic()
        for key, events in self._selector.select(wait):
            key.data(events)
        now = time.monotonic()
        if now - before > wait + self._job.heartbeat_seconds / 2:
            self._job.paused(now)
        self._do(self._job.tick(now))
        for connection in [one for one in self._connections.values() if one.ends_at < now]:
            self._forget(connection, "it did not read the last that the hub sent it")
        if self._job.is_finished:
            self._finished.set()
        return not self._closing

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError as error:
            # Out of file descriptors, say: the one who wants in tries again, and those who are in are served.
            _log.warning("the hub could not take a connection: %s", error)
            time.sleep(0.02)
            return
        if len(self._connections) >= self._job.num_processes + self._num_spares + GUESTS:
            sock.close()
            return
        self._num_connections += 1
        prepare(sock)
        sock.setblocking(False)
        connection = _Connection(self._num_connections, sock)
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, lambda events: self._handle(connection, events))
        self._do(self._job.connected(connection.number, time.monotonic()))

    def _handle(self, connection: _Connection, events: int) -> None:
        if connection.number not in self._connections:
            return  # closed by what another one did, in the same round
        if events & selectors.EVENT_WRITE:
            self._flush(connection)
        if events & selectors.EVENT_READ:
            self._receive(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            self._forget(connection, f"its connection broke: {error.strerror or error}")
            return
        if not data:
            self._forget(connection, "its connection closed")
            return
        if connection.is_ending:
            return
        now = time.monotonic()
        try:
            for message in connection.lines.feed(data):
                self._do(self._job.received(connection.number, message, now))
        except WireError as error:
            self._do(self._job.malformed(connection.number, str(error), now))

    def _forget(self, connection: _Connection, why: str) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._do(self._job.disconnected(connection.number, time.monotonic(), why))

    # ----------------------------------------------------------------- actions

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                data = encode(action.message)
                for number in action.connections:
                    self._queue(number, data)
            elif isinstance(action, Drop):
                self._drop(action.connection)
            else:
                self._tell(action.event)

    def _queue(self, number: int, data: bytes) -> None:
        connection = self._connections.get(number)
        if connection is None or connection.is_ending:
            return
        connection.queue.append(memoryview(data))
        connection.queued_bytes += len(data)
        if connection.queued_bytes > QUEUE_LIMIT:
            # From within an action, so its consequences come when this round of them is through.
            self._call(lambda: self._forget(connection, "it did not read what the hub sent it"))
        elif len(connection.queue) == 1:
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        queue = connection.queue
        try:
            while queue:
                sent = connection.sock.send(queue[0])
                connection.queued_bytes -= sent
                if sent == len(queue[0]):
                    queue.popleft()
                else:
                    queue[0] = queue[0][sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            queue.clear()
            why = f"its connection broke: {error.strerror or error}"
            self._call(lambda: self._forget(connection, why))
            return
        if not queue and connection.is_ending:
            # The other end reads what was sent, and closes then: a close here, with something of its unread, could
            # take the last words back.
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if queue else 0)
        if connection.wanted != wanted:
            connection.wanted = wanted
            key = self._selector.get_key(connection.sock)
            self._selector.modify(connection.sock, wanted, key.data)

    def _drop(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is not None and not connection.is_ending:
            connection.is_ending = True
            connection.ends_at = time.monotonic() + TO_READ_THE_LAST
            if not connection.queue:
                self._flush(connection)

    def _tell(self, event: Event | Regrouped) -> None:
        if isinstance(event, Failed):
            kind = "failed" if event.follows is None else "follows"
            self._failures.append(Failure(event.process, event.text, kind))
        elif isinstance(event, Lost):
            self._failures.append(Failure(event.process, event.text, "died"))
        elif isinstance(event, Silent):
            self._failures.append(Failure(event.process, "nothing was heard of it", "stopped"))
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001  # of the host; the job's processes must not lose their hub by it
            _log.exception("on_event(%r) raised; the hub goes on", event)

    def _run_calls(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 12)
        while self._calls:
            self._calls.popleft()()

    # ------------------------------------------------------------------- ending

    def _say_closed(self) -> None:
        data = encode({"type": "hub_closed"})
        for number in list(self._connections):
            self._queue(number, data)
        deadline = time.monotonic() + self._grace
        while any(one.queue for one in self._connections.values()) and time.monotonic() < deadline:
            for connection in list(self._connections.values()):
                self._flush(connection)
            time.sleep(0.005)

    def _close_sockets(self) -> None:
        for sock in (self._listener, self._wake, self._woken):
            sock.close()
        for connection in self._connections.values():
            connection.sock.close()
        self._connections.clear()
        self._selector.close()
        if self._job.is_finished:
            self._finished.set()

    def _forget_all_after_fork(self) -> None:
        # The connections are the parent's: were they open here too, nobody would see them end when it dies.
        self._closing = True
        self._close_sockets()


@final
class _Connection:
    """One socket, with what is on its way in and out."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.sock = sock
        self.lines = Lines()
        self.queue: deque[memoryview] = deque()
        self.queued_bytes = 0
        self.wanted = selectors.EVENT_READ
        self.is_ending = False
        self.ends_at = math.inf


_all: weakref.WeakSet[Hub] = weakref.WeakSet()


def _after_fork() -> None:
    for hub in list(_all):
        hub._forget_all_after_fork()


os.register_at_fork(after_in_child=_after_fork)
