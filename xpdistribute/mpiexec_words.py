"""What mpiexec itself says, from which the launcher learns how ranks have ended where nothing else tells it."""

from __future__ import annotations

from typing import NamedTuple

from xpdistribute.output import ERR, OUT, Output, write


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
