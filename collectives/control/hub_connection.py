"""A socket to the hub: how it is opened, kept alive and read, by one thread."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from collectives.errors import CollectiveTimeoutError
from xpdistribute.wire import Lines, Message, WireError, encode, prepare, split_address

TELL_EVERY = 10.0
"""Seconds between two lines of the log that say who is waited for."""
_TO_SEND = 30.0
_PING = encode({"type": "ping"})

_log = logging.getLogger("xpdistribute")


@final
class HubConnection:
    """A process's socket to the hub, open from the start.

    Args:
        address: of the hub, ``host:port``.
        hello: what to say first.
        timeout: seconds to try for.

    Raises:
        ValueError: the address is none; or the hub refuses what ``hello`` says.
        RuntimeError: it is another job's hub, or none at all.
        CollectiveTimeoutError: there is no hub to be reached.
    """

    def __init__(self, address: str, hello: Message, timeout: float) -> None:
        self.address = address
        self._sock, self._lines, (self.welcome, *self._first) = _greeted(address, hello, timeout)
        self._ping_every: float = self.welcome["heartbeat_seconds"] / 3
        self._sending = threading.Lock()
        self._is_closed = False
        self._take: Callable[[Message], None] | None = None
        self._lose: Callable[[str], None] | None = None
        self._thread = threading.Thread(target=self._read, name="xpdistribute-channel", daemon=True)

    def start(self, take: Callable[[Message], None], lose: Callable[[str], None]) -> None:
        """Begin to read.

        Args:
            take: called with each message, in the thread that reads.
            lose: called, in that thread, with what is known when the hub is gone.
        """
        self._take, self._lose = take, lose
        for message in self._first:
            take(message)
        self._thread.start()

    def send(self, data: bytes) -> None:
        """Send a message; several threads may.

        Raises:
            OSError: the hub is gone.
        """
        with self._sending:
            self._sock.sendall(data)

    def close(self) -> None:
        """Hang up, and end the thread."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # the other end may have closed it
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_TO_SEND)
        self._sock.close()

    def forget_after_fork(self) -> None:
        """Give up this process's copy of the parent's connection.

        Were it open here too, the hub would not see it end when the parent dies.
        """
        self._is_closed = True
        self._sending = threading.Lock()
        self._sock.close()

    def _read(self) -> None:
        assert self._take is not None
        assert self._lose is not None
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        ping_at = time.monotonic() + self._ping_every
        try:
            while True:
                ready = poll.poll(max(0.0, ping_at - time.monotonic()) * 1000)
                if self._is_closed:
                    return
                if ready:
                    data = self._sock.recv(1 << 18)
                    if not data:
                        self._lose("its connection closed")
                        return
                    for message in self._lines.feed(data):
                        self._take(message)
                if time.monotonic() >= ping_at:
                    ping_at = time.monotonic() + self._ping_every
                    self.send(_PING)
        except OSError as error:
            self._lose(f"its connection broke: {error.strerror or error}")
        except (WireError, KeyError, TypeError, ValueError) as error:
            self._lose(f"what it says makes no sense: {error!r}")


def _greeted(address: str, hello: Message, timeout: float) -> tuple[socket.socket, Lines, Sequence[Message]]:
    """A connection whose hub has taken us, and what it has said so far."""
    where = split_address(address)
    start = time.monotonic()
    tell_at, pause = start + TELL_EVERY, 0.02
    while True:
        left = start + timeout - time.monotonic()
        sock = None
        try:
            sock = socket.create_connection(where, max(0.05, min(left, TELL_EVERY)))
            if sock.getsockname() == sock.getpeername():
                # Where nobody listens, a local port that is chosen at random may be the very one that is called.
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            return _shake_hands(sock, address, hello, max(0.05, left))
        except OSError as error:
            if sock is not None:
                sock.close()
            problem = error.strerror or str(error)
        except BaseException:
            if sock is not None:
                sock.close()
            raise
        now = time.monotonic()
        if now >= start + timeout:
            raise CollectiveTimeoutError(
                f"connect: process {hello['process']} found no hub at {address} for {timeout:g} s ({problem}); is the launcher, or "
                "process 0, running there, and does no firewall stand between?"
            )
        if now >= tell_at:
            _log.warning("waiting for the hub at %s (%s)", address, problem)
            tell_at += TELL_EVERY
        time.sleep(min(pause, max(0.0, start + timeout - now)))
        pause = min(0.5, 2 * pause)


def _shake_hands(
    sock: socket.socket, address: str, hello: Message, timeout: float
) -> tuple[socket.socket, Lines, Sequence[Message]]:
    sock.settimeout(timeout)
    prepare(sock)
    sock.sendall(encode(hello))
    # What the hub collects may be many values, each as long as a message.
    lines = Lines(limit=sys.maxsize)
    while True:
        data = sock.recv(1 << 18)
        if not data:
            raise ConnectionResetError("it closed the connection")
        try:
            messages = list(lines.feed(data))
        except WireError as error:
            raise RuntimeError(f"connect: what listens at {address} is no hub of a job: {error}") from None
        if not messages:
            continue
        if messages[0].get("type") == "refused":
            kind = ValueError if messages[0].get("kind") == "value" else RuntimeError
            raise kind(str(messages[0].get("text")))
        if messages[0].get("type") != "welcome":
            raise RuntimeError(f"connect: what listens at {address} is no hub of a job: {messages[0]!r}")
        sock.settimeout(_TO_SEND)
        return sock, lines, messages
