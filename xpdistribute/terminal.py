"""A terminal for the rank that the user watches, where the launcher itself has one: progress bars move only on terminals.

Lines of other ranks are put above what that rank has begun to draw.
"""

from __future__ import annotations

import fcntl
import os
import re
import termios
from typing import final

_SIZE_BYTES = 8
"""Of what the system calls winsize: rows, columns and two that nobody uses."""
_KEPT_BYTES = 4096
"""Of a line that never ends."""
_CLEAR, _UP = b"\x1b[2K", b"\x1b[1A"
_ERASURE = re.compile(rb"\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")
"""How a drawing of several lines is taken back, from the last to the first of them."""
_COMMAND = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_SHOW_CURSOR, _HIDE_CURSOR = b"\x1b[?25h", b"\x1b[?25l"


def open_terminal(like: int) -> tuple[int, int]:
    """A new terminal that changes nothing of what is written to it.

    Args:
        like: the descriptor of one that has the size to begin with.

    Returns:
        The descriptors to read from, without waiting, and for the terminal itself. As long as the latter is open, the former has no end.
    """
    master, slave = os.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST  # the launcher's own does it: "\n" would become "\r\r\n"
    attributes[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    os.set_blocking(master, False)
    for descriptor in (master, slave):
        os.set_inheritable(descriptor, False)
    copy_size(like, master)
    return master, slave


def copy_size(source: int, target: int) -> None:
    """Give a terminal the size of another one."""
    size = fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * _SIZE_BYTES)
    fcntl.ioctl(target, termios.TIOCSWINSZ, size)


@final
class Drawing:
    """The line that a rank has begun on the terminal and goes on redrawing, with those above that belong to it."""

    def __init__(self) -> None:
        self._line = b""
        self._num_above = 0
        self._is_drawn = False
        self._has_cursor = True

    def note(self, data: bytes) -> None:
        """The rank has written more."""
        if erasures := _ERASURE.findall(data):
            self._num_above = erasures[-1].count(_UP)
        self._is_drawn = self._is_drawn or b"\r" in data.replace(b"\r\n", b"\n")
        shown, hidden = data.rfind(_SHOW_CURSOR), data.rfind(_HIDE_CURSOR)
        self._has_cursor = shown > hidden or (hidden < 0 and self._has_cursor)
        self._line = (self._line + data).replace(b"\r", b"\n").rpartition(b"\n")[2][-_KEPT_BYTES:]

    def above(self, lines: bytes) -> bytes:
        """What to write so that whole lines of somebody else come to stand above it."""
        if not self._is_visible:
            return lines
        erased = b"\r" + _CLEAR + (_UP + _CLEAR) * self._num_above
        # The lines above the last are drawn again by the rank itself, which goes up to the first of them.
        return erased + lines + b"\n" * self._num_above + self._line

    def end(self) -> bytes:
        """What to write when the rank has ended, maybe in the middle of it."""
        text = b"\n" if self._is_drawn and self._is_visible else b""
        if not self._has_cursor:
            text += _SHOW_CURSOR
        self._line, self._num_above, self._has_cursor = b"", 0, True
        return text

    @property
    def _is_visible(self) -> bool:
        return bool(_COMMAND.sub(b"", self._line))
