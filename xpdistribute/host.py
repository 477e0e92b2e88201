"""The cores and the memory that this process has, also where a container gives it less than the machine.

The launcher needs it before it can start anything: so it does without dataclasses and pathlib, which take long to load.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import NamedTuple

_ROOT = "/"
_UNLIMITED = 1 << 60
"""Bytes: version 1 of cgroups says nearly 2**63 where there is no limit."""


class Cores(NamedTuple):
    """How many cores there are for this process.

    Args:
        logical: of the machine.
        usable: that the scheduler may run it on.
        limit: how many at a time a cgroup grants, possibly a fraction; None for all.
    """

    logical: int
    usable: int
    limit: float | None

    @property
    def available(self) -> int:
        """How many threads can compute at a time: at least 1."""
        return max(1, min(self.usable, math.floor(self.limit) if self.limit is not None else self.usable))


class Memory(NamedTuple):
    """Bytes for this process; None where the system does not say.

    Args:
        total: of the machine.
        free: that can be had without swapping.
        limit: that a cgroup grants; None also where that is all.
    """

    total: int | None
    free: int | None
    limit: int | None


def find_cores(root: str | os.PathLike[str] = _ROOT) -> Cores:
    """The cores, by ``/proc`` and ``/sys`` under a folder."""
    logical = os.cpu_count() or 1
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    limits = list(_cpu_limits(root))
    return Cores(logical, logical if affinity is None else len(affinity(0)), min(limits) if limits else None)


def find_memory(root: str | os.PathLike[str] = _ROOT) -> Memory:
    """The memory, likewise."""
    told = {}
    for line in _lines(os.path.join(root, "proc/meminfo")):
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            told[name] = int(rest.split()[0]) * 1024
    total = told.get("MemTotal")
    if total is None and "SC_PHYS_PAGES" in os.sysconf_names:  # not Linux
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [limit for limit in _memory_limits(root) if limit < (total or _UNLIMITED)]
    return Memory(total, told.get("MemAvailable"), min(limits) if limits else None)


def processor(root: str | os.PathLike[str] = _ROOT) -> str | None:
    """The processor's name, where the system says it."""
    lines = _lines(os.path.join(root, "proc/cpuinfo"))
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _cpu_limits(root: str | os.PathLike[str]) -> Iterator[float]:
    for folder in _cgroups(root, "cpu"):
        quota, _, period = _word(f"{folder}/cpu.max").partition(" ")
        if not period:
            quota, period = _word(f"{folder}/cpu.cfs_quota_us"), _word(f"{folder}/cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def _memory_limits(root: str | os.PathLike[str]) -> Iterator[int]:
    for folder in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _word(f"{folder}/{name}")
            if limit.isdigit() and int(limit) < _UNLIMITED:
                yield int(limit)


def _cgroups(root: str | os.PathLike[str], controller: str) -> Iterator[str]:
    """The folders whose limits hold for this process: its own cgroup's and those above, in both versions."""
    mount = os.path.join(root, "sys/fs/cgroup")
    for line in _lines(os.path.join(root, "proc/self/cgroup")):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top = mount
        elif controller in controllers.split(","):
            tops = (f"{mount}/{name}" for name in (controllers, controller))
            top = next((top for top in tops if os.path.isdir(top)), mount)
        else:
            continue
        # Seen from inside of a container the path may lead to nowhere; the folder at the top is its own then.
        parts = [part for part in path.split("/") if part]
        yield from ("/".join([top, *parts[:depth]]) for depth in range(len(parts), -1, -1))


def _word(path: str) -> str:
    return next(iter(_lines(path)), "").strip()


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
