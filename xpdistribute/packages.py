"""The packages that the library needs or can use, and how to find out about them without trusting them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any, final

OURS = Path(__file__).resolve().parents[1]
"""The folder that our packages are in."""
_PROBES = Path(__file__).with_name("probes.py")
_TO_DIE = 5.0
"""Seconds that a killed process has to be gone."""


class State(Enum):
    """How it is with a package."""

    OK = "ok"
    OLD = "too old"
    """It works, and is older than what the library is made for."""
    MISSING = "missing"
    BROKEN = "broken"
    """It is there, and can't be imported, or does not come back from it."""


@final
@dataclass(frozen=True)
class Package:
    """A package that the library needs or can use.

    Args:
        name: to import it by.
        use: what it is for, in a few words.
        extra: of our distribution, which installs it; None for what is always needed.
        distributions: that have it, by the names they are installed by; empty for the same name.
    """

    name: str
    use: str
    extra: str | None = None
    distributions: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Found:
    """What was found out about a package.

    Args:
        state: how it is.
        version: of it, where it says one.
        problem: in words, if it is not OK.
        facts: what else its probe has told.
    """

    state: State
    version: str | None = None
    problem: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


PACKAGES = (
    Package("numpy", "arrays on CPUs"),
    Package("optree", "nested structures"),
    Package("greenlet", "replicas that share a thread"),
    Package("rich", "progress bars and tables"),
    Package("strategies", "this library"),
    Package("cupy", "NCCL and arrays on GPUs", "cuda12", ("cupy-cuda12x", "cupy-cuda13x", "cupy")),
    Package("mpi4py", "several processes and hosts", "mpi"),
    Package("torch", "PyTorch models", "torch"),
    Package("jax", "JAX models", "jax"),
    Package("safetensors", "checkpoints"),
    Package("ml_dtypes", "bfloat16", "checkpoint", ("ml-dtypes",)),
    Package("tensorboardX", "logs for TensorBoard", "tensorboard"),
    Package("matplotlib", "pictures", "plot"),
    Package("sklearn", "the demo's data", "demo", ("scikit-learn",)),
    Package("threadpoolctl", "asking BLAS for its threads", "bench"),
)
CUDA = "cuda"
"""The name under which NVIDIA's driver is examined, which is no package."""


def find_all(timeout: float) -> dict[str, Found]:
    """What is found out about every package and the driver, by name; each in a process of its own.

    Args:
        timeout: seconds that each has.
    """
    names = [*(package.name for package in PACKAGES), CUDA]
    minima = _minima()
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        found = dict(zip(names, pool.map(lambda name: probe(name, timeout), names), strict=True))
    for package in PACKAGES:
        one = found[package.name]
        least = next((minima[d] for d in package.distributions or (package.name,) if d in minima), None)
        if one.state is State.OK and one.version and least and _numbers(one.version) < _numbers(least):
            problem = f"version {one.version}; need {least} or later"
            found[package.name] = Found(State.OLD, one.version, problem, one.facts)
    return found


def probe(name: str, timeout: float) -> Found:
    """What is found out about one package; returns whatever it does.

    Args:
        name: to import it by.
        timeout: seconds that it has.
    """
    # -P: what lies in the current folder is not what programs elsewhere would import.
    command = [sys.executable, "-P", str(_PROBES), name, str(OURS)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that what it starts can be ended with it
        )
    except OSError as error:
        return Found(State.BROKEN, problem=f"no process could be started to import it: {error}")
    is_late = False
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        is_late = True
        out, err = _end(process)
    told = _answer(out)
    if told is not None:
        version, problem = told.pop("version", None), told.pop("problem", None)
        return Found(State(told.pop("state")), version, problem, told)
    if is_late:
        return Found(State.BROKEN, problem=f"the import did not end within {timeout:g} s")
    return Found(State.BROKEN, problem=f"the import {_ending(process.returncode)}{_last_line(err)}")


def own_version() -> str:
    """The version of the library that is installed."""
    try:
        return metadata.version("xpdistribute")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def installed(distributions: Sequence[str]) -> list[str]:
    """Which of these distributions are installed."""
    there = []
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.distribution(name)
            there.append(name)
    return there


def _end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Kill it with all that it started; what it has written until then."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=_TO_DIE)
    except subprocess.TimeoutExpired:  # something that left the group holds its pipes
        return b"", b""


def _answer(out: bytes) -> dict[str, Any] | None:
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            if isinstance(told, dict) and "state" in told:
                return told
    return None


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended the process with status {status}"
    try:
        return f"crashed with {signal.Signals(-status).name}"
    except ValueError:
        return f"crashed with signal {-status}"


def _last_line(err: bytes) -> str:
    lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1].strip()[:300]}" if lines else ""


def _minima() -> dict[str, str]:
    """The least versions that our distribution asks for, by distribution; none where it is not installed."""
    try:
        requirements = metadata.requires("xpdistribute") or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w.-]+)\s*>=\s*([\d.]+)", requirement) for requirement in requirements)
    return {match[1]: match[2] for match in found if match}


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:  # 2.0 is 2
        numbers.pop()
    return numbers
