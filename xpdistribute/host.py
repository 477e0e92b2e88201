"""The cores and the memory that this process has, also where a container gives it less than the machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""Bytes: version 1 of cgroups says nearly 2**63 where there is no limit."""


@final
@dataclass(frozen=True)
class Cores:
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


@final
@dataclass(frozen=True)
class Memory:
    """Bytes for this process; None where the system does not say.

    Args:
        total: of the machine.
        free: that can be had without swapping.
        limit: that a cgroup grants; None also where that is all.
    """

    total: int | None
    free: int | None
    limit: int | None


def find_cores(root: Path = _ROOT) -> Cores:
    """The cores, by ``/proc`` and ``/sys`` under a folder."""
    logical = os.cpu_count() or 1
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    limits = list(_cpu_limits(root))
    return Cores(logical, logical if affinity is None else len(affinity(0)), min(limits) if limits else None)


def find_memory(root: Path = _ROOT) -> Memory:
    """The memory, likewise."""
    told = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            told[name] = int(rest.split()[0]) * 1024
    total = told.get("MemTotal")
    if total is None and "SC_PHYS_PAGES" in os.sysconf_names:  # not Linux
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [limit for limit in _memory_limits(root) if limit < (total or _UNLIMITED)]
    return Memory(total, told.get("MemAvailable"), min(limits) if limits else None)


def processor(root: Path = _ROOT) -> str | None:
    """The processor's name, where the system says it."""
    lines = _lines(root / "proc/cpuinfo")
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _cpu_limits(root: Path) -> Iterator[float]:
    for folder in _cgroups(root, "cpu"):
        quota, _, period = _word(folder / "cpu.max").partition(" ")
        if not period:
            quota, period = _word(folder / "cpu.cfs_quota_us"), _word(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def _memory_limits(root: Path) -> Iterator[int]:
    for folder in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _word(folder / name)
            if limit.isdigit() and int(limit) < _UNLIMITED:
                yield int(limit)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders whose limits hold for this process: its own cgroup's and those above, in both versions."""
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top = mount
        elif controller in controllers.split(","):
            top = next((t for name in (controllers, controller) if (t := mount / name).is_dir()), mount)
        else:
            continue
        own = top / path.lstrip("/")
        # Seen from inside of a container the path may lead to nowhere; the folder at the top is its own then.
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _word(path: Path) -> str:
    return next(iter(_lines(path)), "").strip()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
