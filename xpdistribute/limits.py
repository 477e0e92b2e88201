"""What a system may have too little of for a job: open files, and room where temporary files lie."""

from __future__ import annotations

import errno
import os
import resource

_FILES, _FILES_OF_EACH = 32, 6
"""Open files of mpiexec, and of those for each rank, a little more than Open MPI's takes; the launcher needs fewer."""
_FOLDER_BYTES, _FOLDER_NODES = 64 << 10, 32


def raise_limits(num_processes: int) -> None:
    """Let this process and what it starts open as many files as a job of so many processes needs, if that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_OF_EACH * num_processes
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        if most > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def shortage(num_processes: int) -> str:
    """What there is too little of for a job of so many processes, and what to do; empty if nothing is known."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_OF_EACH * num_processes
    if soft != resource.RLIM_INFINITY and soft < needed:
        return (
            f"open files: a process may have {soft}; mpiexec needs about {needed} for {num_processes} processes — raise the limit "
            "(ulimit -n 65536, or your system's limits.conf)"
        )
    folder = next(filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))), "/tmp")
    if not has_room(folder):
        return f"{folder}: it is full or can't be written, and mpiexec keeps files there — free some room, or set TMPDIR to another folder"
    return ""


def has_room(folder: str) -> bool:
    """Whether a folder takes a few small files."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return False
    # A file system that doesn't count its nodes has none.
    has_nodes = space.f_files == 0 or space.f_favail >= _FOLDER_NODES
    return (
        space.f_bavail * space.f_frsize >= _FOLDER_BYTES
        and has_nodes
        and os.access(folder, os.W_OK | os.X_OK)
    )


def is_shortage(error: OSError) -> bool:
    """Whether an error says that there is too little of something."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
