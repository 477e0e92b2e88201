"""What the ranks print, on its way through the launcher.

On one machine every rank writes into pipes of its own, so that it is known whose a line is and nothing gets mixed up; from
other hosts it comes through mpiexec, which says at the beginning of a line whose it is. A rank's last words are kept, to be said
again at the end if it is the one that failed.
"""

from __future__ import annotations

import os
from typing import NamedTuple

OUT, ERR = 1, 2
"""The streams, which are also the launcher's own descriptors."""

_KEPT_BYTES = 64 << 10
"""Of each rank's errors. A line without an end is passed on when it gets as long."""
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "\n\nThe above exception was the direct cause of the following exception:\n\n",
    "\n\nDuring handling of the above exception, another exception occurred:\n\n",
)


class Output:
    """The launcher's own output, that of the ranks included.

    Args:
        tagged: whether a rank's lines begin with its number.
    """

    def __init__(self, *, tagged: bool) -> None:
        self.tagged = tagged
        self.hidden: set[tuple[int, int]] = set()
        """Ranks and streams that are not shown from now on."""
        self._begun: dict[tuple[int, int], bytearray] = {}
        self._words: dict[int, bytearray] = {}

    def take(self, rank: int, stream: int, data: bytes) -> None:
        """Pass on what a rank has printed, by whole lines.

        Raises:
            BrokenPipeError: nobody reads the launcher's output any more.
        """
        if stream == ERR:
            words = self._words.setdefault(rank, bytearray())
            words += data
            del words[:-_KEPT_BYTES]
        if (rank, stream) in self.hidden:
            return
        begun = self._begun.setdefault((rank, stream), bytearray())
        begun += data
        # Also at a carriage return: progress bars end their lines by going back to the beginning.
        lines = bytes(begun).splitlines(keepends=True)
        begun.clear()
        if lines and not lines[-1].endswith((b"\n", b"\r")) and len(lines[-1]) <= _KEPT_BYTES:
            begun += lines.pop()
        if lines:
            tag = b"[%d] " % rank if self.tagged else b""
            write(stream, b"".join(tag + line for line in lines))

    @property
    def has_prompt(self) -> bool:
        """Whether rank 0 has begun a line."""
        return not self.tagged and any(begun for (rank, _), begun in self._begun.items() if rank == 0)

    def show_prompt(self) -> None:
        """Pass on what rank 0, which talks to the user, has begun: prompts and progress bars are to be seen before they end."""
        for (rank, stream), begun in self._begun.items():
            if rank == 0 and begun:
                write(stream, bytes(begun))
                begun.clear()

    def flush(self) -> None:
        """Pass on lines that have no end."""
        if not self.tagged:
            self.show_prompt()  # as it is: a program may end without a newline
        for (rank, stream), begun in self._begun.items():
            if begun:
                write(stream, (b"[%d] " % rank if self.tagged else b"") + bytes(begun) + b"\n")
                begun.clear()

    def last_words(self, rank: int) -> str:
        """The last traceback of a rank, with those that led to it; else its last lines; empty if it has said nothing."""
        text = bytes(self._words.get(rank, b"")).decode(errors="replace").rstrip()
        start = text.rfind(_TRACEBACK)
        while (earlier := text.rfind(_TRACEBACK, 0, max(start, 0))) >= 0 and text[:start].endswith(_CHAINED):
            start = earlier
        return text[start:] if start >= 0 else "\n".join(text.splitlines()[-20:])

    @staticmethod
    def say(text: str) -> None:
        """A line of the launcher's own."""
        write(ERR, f"xpdistribute run: {text}\n".encode(errors="replace"))


def write(stream: int, data: bytes) -> None:
    """Write all of it, waiting for a reader that is slow."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(stream, view) :]
        except BlockingIOError:  # somebody has made the terminal that we share with him non-blocking
            os.set_blocking(stream, True)


class Ending(NamedTuple):
    """How a rank has ended, as mpiexec says.

    Args:
        rank: which; None where it does not say.
        pid: likewise.
        status: as a shell would give it: 128 + N for signal N.
    """

    rank: int | None
    pid: int | None
    status: int


_ENDINGS = (
    r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node \S+\s+exited\s+on\s+signal (?P<signal>\d+)",
    r"Process name:\s+\[.*[@,\[](?P<rank>\d+)\]\s+Exit code:\s+(?P<status>\d+)",
    r"RANK (?P<rank>\d+) PID (?P<pid>\d+) RUNNING AT \S+[\s=]+KILLED BY SIGNAL: (?P<signal>\d+)",
    r"PID (?P<pid>\d+) RUNNING AT \S+[\s=]+EXIT CODE: (?P<status>\d+)",
)
"""How Open MPI, Intel MPI and MPICH say it. Compiled when they do: most jobs end well."""
_NOISE = (
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING",
    "This typically refers to a problem with your application.",
    "Please see the FAQ page for debugging suggestions",
    "Abort is in progress...hit ctrl-c again",
)


class MpiexecWords:
    """What mpiexec itself says: how ranks ended, which the launcher says in its own way, and all else, which is passed on.

    Args:
        output: where to.
        is_tagged: whether lines of ranks come with it.
    """

    def __init__(self, output: Output, *, is_tagged: bool) -> None:
        self.endings: list[Ending] = []
        self._output = output
        self._is_tagged = is_tagged
        self._begun: dict[int, bytes] = {OUT: b"", ERR: b""}
        self._block: list[str] | None = None

    def take(self, stream: int, data: bytes) -> None:
        """What came of it on a stream."""
        lines = (self._begun[stream] + data).split(b"\n")
        self._begun[stream] = lines.pop()
        for line in lines:
            self._line(stream, line)

    @property
    def has_prompt(self) -> bool:
        """Whether rank 0 has begun a line."""
        return not self.tagged and any(begun for (rank, _), begun in self._begun.items() if rank == 0)

    def show_prompt(self) -> None:
        """Pass on what rank 0, which talks to the user, has begun: prompts and progress bars are to be seen before they end."""
        for (rank, stream), begun in self._begun.items():
            if rank == 0 and begun:
                write(stream, bytes(begun))
                begun.clear()

    def flush(self) -> None:
        """Pass on what has no end."""
        for stream, begun in self._begun.items():
            if begun:
                self._line(stream, begun)
        self._begun = {OUT: b"", ERR: b""}
        if self._block is not None:
            self._close(self._block)

    def _line(self, stream: int, line: bytes) -> None:
        if self._is_tagged:
            rank, rest = _untagged(line)
            if rank is not None:
                self._output.take(rank, stream, rest + b"\n")
                return
        text = line.decode(errors="replace")
        if _is_rule(text):
            if self._block is None:
                self._block = []
            else:
                self._close(self._block)
        elif self._block is not None:
            self._block.append(text)
        elif text.strip() and not text.startswith(_NOISE):
            write(stream, line + b"\n")

    def _close(self, block: list[str]) -> None:
        self._block = None
        text = "\n".join(block)
        import re  # noqa: PLC0415  # it takes longer to load than the first output to come

        for pattern in _ENDINGS:
            if match := re.search(pattern, text):
                found = match.groupdict()
                signal, status = found.get("signal"), found.get("status")
                rank, pid = found.get("rank"), found.get("pid")
                self.endings.append(
                    Ending(
                        int(rank) if rank else None,
                        int(pid) if pid else None,
                        128 + int(signal) if signal else int(status or 1),
                    )
                )
                return
        if text.strip():
            write(ERR, text.encode(errors="replace") + b"\n")


def _is_rule(line: str) -> bool:
    line = line.rstrip()
    return len(line) >= 20 and not line.strip(line[0]) and line[0] in "-="


def _untagged(line: bytes) -> tuple[int | None, bytes]:
    """The rank that a line is of, and the line without saying so: ``[1,0]<stdout>: text`` or ``[0] text``."""
    tag, bracket, rest = line.partition(b"]")
    rank = tag[1:].rpartition(b",")[2]
    if not bracket or tag[:1] != b"[" or not rank.isdigit():
        return None, line
    for stream in (b"<stdout>:", b"<stderr>:"):
        rest = rest.removeprefix(stream)
    return int(rank), rest.removeprefix(b" ")
