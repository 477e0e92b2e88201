"""Pieces of memory that the processes of one host share.

A segment is an anonymous file in memory (memfd): it has no name, so nothing is left behind however its processes end,
and it does not count against the size of /dev/shm, which containers keep small. Other processes open it by way of its
owner's ``/proc/<pid>/fd``, which the kernel allows to the same user.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import mmap
import os
import resource
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from collectives.arrays import Array

PAGE = mmap.PAGESIZE
_MANY_MAPPINGS = 1024
"""Segments of other processes that are kept mapped; those not used for longest go first."""

_NEED = "need processes of one user in one PID namespace, alive — use backend='mpi' where they are not"


class Location(NamedTuple):
    """Where an array starts that lies in a segment of this process."""

    descriptor: int
    serial: int
    """Tells segments apart that have had the same file descriptor."""
    num_bytes: int
    """Of the whole segment."""
    offset: int


NOWHERE = Location(-1, 0, 0, 0)
"""Of an array in ordinary memory."""


def require_shared_memory() -> None:
    """Check that this system has what segments need.

    Raises:
        RuntimeError: it has not.
    """
    if not hasattr(os, "memfd_create"):
        raise RuntimeError(
            f"shared memory: this is {sys.platform}; it needs Linux (memfd) — use the MPI backend: pip install 'xpdistribute[mpi]'"
        )


@final
@dataclass(frozen=True)
class _Segment:
    descriptor: int
    serial: int
    start: int
    num_bytes: int


@final
class OwnSegments:
    """The segments that this process has made, found by the address of what lies in them.

    Attributes:
        version: changes with them: as long as it is the same, the same addresses lie in the same segments.
    """

    def __init__(self) -> None:
        require_shared_memory()
        self._serials = itertools.count(1)
        self._mutex = threading.Lock()
        self._starts: list[int] = []
        self._segments: list[_Segment] = []
        self._pid = os.getpid()
        self.version = 0

    def make(self, num_bytes: int) -> tuple[Array, Location]:
        """Zeroed memory, shape ``(num_bytes,)``, dtype uint8, in a segment of its own, and where it lies.

        The segment is given back when nothing refers to the memory any more.

        Raises:
            OSError: the system has no memory left.
        """
        size = max(PAGE, -(-num_bytes // PAGE) * PAGE)
        try:
            descriptor = os.memfd_create("xpdistribute", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, size)
                mapping = mmap.mmap(descriptor, size)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise OSError(
                error.errno,
                f"shared memory: the system refused {size} bytes ({error.strerror}); "
                f"{_remedy(error, 'free some memory')}",
            ) from error
        memory: Array = np.frombuffer(mapping, np.uint8)
        segment = _Segment(descriptor, next(self._serials), memory.ctypes.data, size)
        with self._mutex:
            at = bisect.bisect_right(self._starts, segment.start)
            self._starts.insert(at, segment.start)
            self._segments.insert(at, segment)
            self.version += 1
        # Not the mapping: the array refers to it, so that it ends after the array.
        given_back = weakref.finalize(memory, self._forget, segment)
        # A collective may go on in the background while the program ends; the system takes back what is left.
        given_back.atexit = False
        return memory[:num_bytes], Location(descriptor, segment.serial, size, 0)

    def locate(self, address: int) -> Location:
        """Where an address lies, or `NOWHERE`."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return NOWHERE
        segment = self._segments[at]
        offset = address - segment.start
        if offset >= segment.num_bytes:
            return NOWHERE
        return Location(segment.descriptor, segment.serial, segment.num_bytes, offset)

    def _forget(self, segment: _Segment) -> None:
        with self._mutex:
            at = bisect.bisect_left(self._starts, segment.start)
            if at < len(self._segments) and self._segments[at] is segment:
                del self._starts[at], self._segments[at]
                self.version += 1
        if os.getpid() == self._pid:
            os.close(segment.descriptor)


_own: OwnSegments | None = None
_making = threading.Lock()


def own_segments() -> OwnSegments:
    """Those of this process, whichever link lends what lies in them."""
    global _own
    with _making:
        if _own is None:
            _own = OwnSegments()
        return _own


def _after_fork() -> None:
    global _own, _making
    _own, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@final
class PeerSegments:
    """Another process's segments, as they are mapped here.

    Args:
        pid: of their owner.
        where: what the owner is called in messages.
    """

    def __init__(self, pid: int, where: str) -> None:
        self._pid = pid
        self._where = where
        self._mapped: OrderedDict[int, Array] = OrderedDict()

    def bytes_at(self, descriptor: int, serial: int, num_bytes: int) -> Array:
        """The whole of one segment, dtype uint8.

        Raises:
            RuntimeError: it can't be opened.
        """
        memory = self._mapped.get(serial)
        if memory is None:
            memory = self._mapped[serial] = self.open(descriptor, num_bytes)
            if len(self._mapped) > _MANY_MAPPINGS:
                self._mapped.popitem(last=False)
        return memory

    def open(self, descriptor: int, num_bytes: int) -> Array:
        """A new mapping of one segment, which lasts as long as arrays refer to it.

        Raises:
            RuntimeError: it can't be opened.
        """
        path = f"/proc/{self._pid}/fd/{descriptor}"
        try:
            own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                mapping = mmap.mmap(own, num_bytes)
            finally:
                os.close(own)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RuntimeError(
                f"shared memory: can't open that of {self._where} ({path}: {reason}); {_remedy(error, _NEED)}"
            ) from error
        memory: Array = np.frombuffer(mapping, np.uint8)
        return memory

    def close(self) -> None:
        """Forget all mappings."""
        self._mapped.clear()


def _remedy(error: OSError | ValueError, otherwise: str) -> str:
    """What there is to be done about memory that can't be made or opened."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"this process may have {most} open files, and each piece of shared memory is one — raise the limit (ulimit -n 65536, or "
            "your system's limits.conf)"
        )
    if number == errno.ENFILE:
        return "the whole system has no open files left — raise the sysctl fs.file-max"
    if number == errno.EFBIG:
        return "the limit of the size of files holds for it — raise it (ulimit -f unlimited)"
    if number == errno.ENOMEM:
        return "free some, or raise the limit of memory (ulimit -v, the container's) or of mappings (sysctl vm.max_map_count)"
    return otherwise


def open_all(
    process: int, own: Sequence[tuple[Array, Location]], exchange: Callable[[Any], list[Any]]
) -> tuple[list[PeerSegments], list[list[Array]]]:
    """Every process's memory, opened by every process, or by none.

    Args:
        process: which one this is.
        own: some memory of this process, with where it lies; as many pieces in all processes.
        exchange: gives every process's value, by process.

    Returns:
        The processes' segments, by process, and for each piece every process's memory, by process.

    Raises:
        RuntimeError: some process can't open that of another, which is alive; on every process.
    """
    told = exchange([os.getpid(), [list(location) for _, location in own]])
    peers = [PeerSegments(pid, f"process {p} (pid {pid})") for p, (pid, _) in enumerate(told)]
    opened: list[list[Array]] = [[] for _ in own]
    error = None
    try:
        for p, (_, locations) in enumerate(told):
            for pieces, (memory, _), (descriptor, _, num_bytes, _) in zip(
                opened, own, locations, strict=True
            ):
                pieces.append(memory if p == process else peers[p].open(descriptor, num_bytes))
    except RuntimeError as failure:
        error = failure
    # Also, whoever ends right away takes its memory with it: not before everybody has opened it.
    failures = [text for text in exchange(None if error is None else str(error)) if text is not None]
    if failures:
        # Whoever has died meanwhile can't come here, and that is what the others hear then.
        exchange(None)
        raise error or RuntimeError(failures[0])
    return peers, opened


def host_identity() -> str:
    """What all processes have in common that can share memory: host, boot, PID namespace and user."""
    parts: list[Any] = [os.environ.get("XPDISTRIBUTE_HOST") or os.uname().nodename]
    for path in ("/proc/sys/kernel/random/boot_id",):
        try:
            with open(path) as file:
                parts.append(file.read().strip())
        except OSError:
            parts.append("")
    try:
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append("")
    parts.append(os.getuid())
    return "/".join(map(str, parts))
