"""Which process a process id means: it may be another's by now, or one of another container."""

from __future__ import annotations

import os
import signal


def identify(pid: int) -> str:
    """The process's namespace and start, which no other process has in common with it; "" where the system doesn't say."""
    try:
        namespace = os.readlink(f"/proc/{pid}/ns/pid")
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return ""
    # The program's name, in parentheses, may hold spaces and parentheses itself; the start is the 20th after it.
    return f"{namespace}/{stat.rpartition(b')')[2].split()[19].decode()}"


def kill(pid: int, identity: str) -> bool:
    """SIGKILL a process if it still is the one that `identify` named, stopped or not.

    Returns:
        Whether it was there.
    """
    if not identity or identify(pid) != identity:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True
