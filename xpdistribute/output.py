"""What the ranks print, on its way through the launcher.

On one machine every rank writes into pipes of its own, so that it is known whose a line is and nothing gets mixed up; from
other hosts it comes through mpiexec, which says at the beginning of a line whose it is. A rank's last words are kept, to be said
again at the end if it is the one that failed.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xpdistribute.terminal import Drawing

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
        of_all: whether the standard output of all ranks is shown, or only of the one that speaks for them.
        drawing: what that one draws on the terminal, if it has one.

    Attributes:
        speaker: the rank that speaks for all: the one that the user talks to.
    """

    def __init__(self, *, tagged: bool, of_all: bool = True, drawing: Drawing | None = None) -> None:
        self.tagged = tagged
        self.speaker = 0
        self._of_all = of_all
        self._drawing = drawing
        self._cut: set[tuple[int, int]] = (
            set()
        )  # ranks and streams of which the beginning of a line was not shown
        self.has_taken = False
        """Whether any rank has printed anything."""
        self.hidden: set[tuple[int, int]] = set()
        """Ranks and streams that are not shown from now on."""
        self._begun: dict[tuple[int, int], bytearray] = {}
        self._words: dict[int, bytearray] = {}
        self._last: int | None = (
            None  # the rank whose errors were shown last, and what was of it since any other's
        )
        self._last_shown = bytearray()

    def take(self, rank: int, stream: int, data: bytes) -> None:
        """Pass on what a rank has printed, by whole lines.

        Raises:
            BrokenPipeError: nobody reads the launcher's output any more.
        """
        self.has_taken = True
        if stream == ERR:
            words = self._words.setdefault(rank, bytearray())
            words += data
            del words[:-_KEPT_BYTES]
        if (rank, stream) in self.hidden:
            return
        if stream == OUT and rank != self.speaker and not self._of_all:
            if data:
                (self._cut.discard if data.endswith((b"\n", b"\r")) else self._cut.add)((rank, stream))
            return
        if (rank, stream) in self._cut:
            data = b"".join(data.splitlines(keepends=True)[1:])
            if not data:
                return
            self._cut.remove((rank, stream))
        begun = self._begun.setdefault((rank, stream), bytearray())
        begun += data
        # Also at a carriage return: progress bars end their lines by going back to the beginning.
        lines = bytes(begun).splitlines(keepends=True)
        begun.clear()
        if lines and not lines[-1].endswith((b"\n", b"\r")) and len(lines[-1]) <= _KEPT_BYTES:
            begun += lines.pop()
        if lines:
            if stream == ERR:
                self._note_shown(rank, b"".join(lines))
            tag = b"[%d] " % rank if self.tagged else b""
            self._show(rank, stream, b"".join(tag + line for line in lines))

    def follow(self, rank: int) -> None:
        """Another rank speaks for all from now on, as the one that did is gone."""
        if rank != self.speaker:
            self.flush()
            self.speaker = rank

    @property
    def has_prompt(self) -> bool:
        """Whether the rank that speaks for all has begun a line."""
        return not self.tagged and any(
            begun for (rank, _), begun in self._begun.items() if rank == self.speaker
        )

    def show_prompt(self) -> None:
        """Pass on what the rank that talks to the user has begun: prompts and progress bars are to be seen before they end."""
        for (rank, stream), begun in self._begun.items():
            if rank == self.speaker and begun:
                self._show(rank, stream, bytes(begun))
                begun.clear()

    def flush(self) -> None:
        """Pass on lines that have no end."""
        if not self.tagged:
            self.show_prompt()  # as it is: a program may end without a newline
        for (rank, stream), begun in self._begun.items():
            if begun:
                self._show(rank, stream, (b"[%d] " % rank if self.tagged else b"") + bytes(begun) + b"\n")
                begun.clear()
        if self._drawing is not None and (end := self._drawing.end()):
            write(OUT if os.isatty(OUT) else ERR, end)

    def last_words(self, rank: int) -> str:
        """The last traceback of a rank, with those that led to it; else its last lines; empty if it has said nothing."""
        text = bytes(self._words.get(rank, b"")).decode(errors="replace").rstrip()
        start = text.rfind(_TRACEBACK)
        while (earlier := text.rfind(_TRACEBACK, 0, max(start, 0))) >= 0 and text[:start].endswith(_CHAINED):
            start = earlier
        return text[start:] if start >= 0 else "\n".join(text.splitlines()[-20:])

    def has_shown_last(self, rank: int, text: str) -> bool:
        """Whether a text of a rank is the last of all errors shown, and in one piece."""
        shown = bytes(self._last_shown).decode(errors="replace").rstrip()
        return rank == self._last and shown.endswith(text.rstrip())

    def _note_shown(self, rank: int, data: bytes) -> None:
        if rank != self._last:
            self._last = rank
            self._last_shown.clear()
        self._last_shown += data
        del self._last_shown[:-_KEPT_BYTES]

    def tell(self, text: str) -> None:
        """Likewise `say`, while the ranks run."""
        line = _line(text)
        write(ERR, line if self._drawing is None else self._drawing.above(line))

    def _show(self, rank: int, stream: int, data: bytes) -> None:
        if self._drawing is None:
            write(stream, data)
        elif rank == self.speaker:
            write(stream, data)
            self._drawing.note(data)
        else:
            write(stream, self._drawing.above(data))

    @staticmethod
    def say(text: str) -> None:
        """A line of the launcher's own."""
        write(ERR, _line(text))


def drawing_on(terminals: Collection[int]) -> Drawing | None:
    """A drawing for an `Output` on terminals; None where there are none."""
    if not terminals:
        return None
    from xpdistribute.terminal import Drawing  # noqa: PLC0415  # pipes are more usual

    return Drawing()


def _line(text: str) -> bytes:
    return f"xpdistribute run: {text}\n".encode(errors="replace")


def write(stream: int, data: bytes) -> None:
    """Write all of it, waiting for a reader that is slow."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(stream, view) :]
        except BlockingIOError:  # somebody has made the terminal that we share with him non-blocking
            os.set_blocking(stream, True)
