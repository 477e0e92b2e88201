"""JSON lines: how the processes of a job and their hub talk.

One JSON object a line. Nothing that comes from a socket is ever unpickled.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any, TypeAlias, final

LIMIT = 16 << 20
"""Bytes that one message to the hub may take."""

Message: TypeAlias = dict[str, Any]


class WireError(ValueError):
    """What came is no message of ours."""


def encode(message: Message) -> bytes:
    """A message as it goes over the wire.

    Raises:
        TypeError: something in it has no form in JSON.
    """
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


@final
class Lines:
    """Puts messages together from the pieces in which they come.

    Args:
        limit: bytes that a message may take.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._pieces: list[bytes] = []
        self._length = 0

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that ``data`` completes, in order.

        Raises:
            WireError: a line is no JSON object, or too long. What came before it has been given.
        """
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._keep(end)
            line = b"".join(self._pieces)
            self._pieces.clear()
            self._length = 0
            yield _decode(line)
        self._keep(rest)

    def _keep(self, piece: bytes) -> None:
        self._length += len(piece)
        if self._length > self.limit:
            raise WireError(f"message: got over {self._length} bytes; need at most {self.limit}")
        if piece:
            self._pieces.append(piece)


def _decode(line: bytes) -> Message:
    try:
        message = json.loads(line)
    # The depth of the nesting is the sender's choice, so the recursion is his fault too.
    except (ValueError, RecursionError) as error:
        raise WireError(f"message: {line[:60]!r} is no JSON ({type(error).__name__})") from None
    if not isinstance(message, dict):
        raise WireError(f"message: got a JSON {type(message).__name__}; need an object")
    return message


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``"host:port"`` or ``"[::1]:port"``.

    Raises:
        ValueError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"address: got {address!r}; need host:port, such as 127.0.0.1:4711")
    return host.removeprefix("[").removesuffix("]"), int(port)


def prepare(sock: socket.socket) -> None:
    """Small messages go out at once, and a host that is gone without a word is found out within half a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not all of them exist on macOS
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
