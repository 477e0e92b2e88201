"""What a figure was measured on: the header of every text and JSON result."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from benchmarks.blas_threads import describe_blas

_REPOSITORY = Path(__file__).resolve().parents[1]


def describe_machine() -> dict[str, str | int | float]:
    """Machine, versions, BLAS, date and commit, by name."""
    return {
        "machine": cpu_model(),
        "cores": num_cores(),
        "memory_gib": round(_meminfo("MemTotal") / 2**30, 1),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else -1.0,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "xpdistribute": package_version(),
        "blas": describe_blas(),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def header(about: dict[str, str | int | float], max_ranks: int) -> list[str]:
    """The lines that stand above every result.

    Args:
        about: from `describe_machine`.
        max_ranks: the most ranks or replicas that any benchmark of this run uses.
    """
    cores = int(about["cores"])
    lines = [
        f"# xpdistribute {about['xpdistribute']} benchmarks, {about['date']}, commit {about['commit']}",
        f"# machine  {about['machine']}, {cores} cores, {about['memory_gib']} GiB, {about['system']}, "
        f"load average {about['load_average']}",
        f"# versions Python {about['python']}, NumPy {about['numpy']}",
        f"# BLAS     {about['blas']}",
        "# ranks    threads of one process, one for each replica; the caller's own runs replica 0",
    ]
    if max_ranks > cores:
        lines.append(f"# note     up to {max_ranks} ranks on {cores} cores: ranks share cores")
    return lines


def cpu_model() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int:
    """The memory that can be had without swapping; 0 where the system does not say."""
    return _meminfo("MemAvailable")


def package_version() -> str:
    """The installed version of this project."""
    try:
        return version("xpdistribute")
    except PackageNotFoundError:
        return "(not installed)"


def _meminfo(name: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return "unknown"
