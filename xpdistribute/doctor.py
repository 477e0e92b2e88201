"""What is on this machine, what follows from it, and what to do."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from xpdistribute.host import Cores, Memory, find_cores, find_memory, processor
from xpdistribute.packages import (
    CUDA,
    OURS,
    PACKAGES,
    Found,
    Package,
    State,
    find_all,
    installed,
    own_version,
)

_BLAS_VARIABLES = {
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
    "accelerate": "VECLIB_MAXIMUM_THREADS",
}
"""Where each BLAS reads its number of threads, by how its name begins."""


@final
@dataclass(frozen=True)
class Advice:
    """Something that is missing, and how to get it.

    Args:
        what: in a few words.
        use: what it is for.
        command: that installs it.
    """

    what: str
    use: str
    command: str


@final
@dataclass(frozen=True)
class Report:
    """All that the doctor has found out.

    Args:
        cores: for this process.
        memory: likewise.
        found: about each package and the driver, by name.
        gpus: names and bytes, as CuPy sees them, or else the driver.
        mpiexec: the path of the program that starts MPI jobs, or None.
        warnings: what would be slow or go wrong, in sentences.
        missing: what could be installed.
        required: names of what had to be there.
        failures: what is wrong with the library itself or with what was required, in sentences.
    """

    cores: Cores
    memory: Memory
    found: Mapping[str, Found]
    gpus: Sequence[Mapping[str, Any]]
    mpiexec: str | None
    warnings: Sequence[str]
    missing: Sequence[Advice]
    required: Sequence[str]
    failures: Sequence[str]

    @property
    def versions(self) -> dict[str, str]:
        """Of what is always there."""
        python = platform.python_version()
        is_gil_enabled = getattr(sys, "_is_gil_enabled", None)  # from Python 3.13 on
        if is_gil_enabled is not None and not is_gil_enabled():
            python += " free-threaded"
        return {
            "xpdistribute": own_version(),
            "python": python,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "processor": processor() or platform.processor() or platform.machine(),
        }

    @property
    def blas(self) -> list[dict[str, Any]]:
        """The BLAS libraries that NumPy has loaded: name, version and threads, None where that is not known."""
        numpy = self.found["numpy"].facts
        pools: list[dict[str, Any]] = numpy.get("pools") or []
        if not pools and (built := numpy.get("blas")):
            pools = [{"name": built["name"], "version": built["version"], "threads": None, "kernels": None}]
        return [
            {
                **pool,
                "threads": _threads_told(pool["name"]) if pool["threads"] is None else pool["threads"],
            }
            for pool in pools
        ]


CAPABILITIES = (
    "numpy",
    "gpu",
    "nccl",
    "mpi",
    "torch",
    "jax",
    "checkpoint",
    "tensorboard",
    "plot",
    "demo",
    "bench",
)
"""What can be required."""

_OF_EXTRAS = {
    "torch": ("torch",),
    "jax": ("jax",),
    "numpy": ("numpy",),
    "checkpoint": ("ml_dtypes",),
    "tensorboard": ("tensorboardX",),
    "plot": ("matplotlib",),
    "demo": ("matplotlib", "sklearn"),
    "bench": ("matplotlib", "threadpoolctl"),
}
"""The packages that a capability consists of, where it is no more than that."""


def examine(required: Sequence[str] = (), timeout: float = 60.0) -> Report:
    """Look at the machine and at every package.

    Args:
        required: of `CAPABILITIES`: what has to be usable.
        timeout: seconds that each package has for its import.
    """
    found = _judged(find_all(timeout))
    cores, memory = find_cores(), find_memory()
    cupy = found["cupy"].facts
    gpus = cupy.get("gpus") or found[CUDA].facts.get("gpus") or []
    mpiexec = _program("mpiexec")
    # The warnings are about a report, and stand in it.
    report = Report(cores, memory, found, gpus, mpiexec, (), (), tuple(dict.fromkeys(required)), ())
    failures = [
        f"{package.name} is needed always, and {_told(found[package.name])}"
        for package in PACKAGES
        if package.extra is None and found[package.name].state in (State.MISSING, State.BROKEN)
    ]
    for name in report.required:
        problem = _problem_with(name, found, mpiexec)
        if problem is not None:
            failures.append(f"--require {name}: {problem} — {_command(name, found)}")
    return Report(
        cores,
        memory,
        found,
        gpus,
        mpiexec,
        tuple(_warnings(report)),
        tuple(_advice(report)),
        report.required,
        tuple(failures),
    )


def _judged(found: dict[str, Found]) -> dict[str, Found]:
    """What was found, with what only this process can judge: whether our packages are ours."""
    ours = found["strategies"]
    file = ours.facts.get("file")
    if ours.state is State.OK and file and Path(file).resolve().parents[1] != OURS:
        problem = f"{file} hides our package of that name; rename it"
        return {**found, "strategies": Found(State.BROKEN, None, problem, ours.facts)}
    return {**found, "strategies": Found(ours.state, None, ours.problem, ours.facts)}


def _problem_with(name: str, found: Mapping[str, Found], mpiexec: str | None) -> str | None:
    """Why something can't be used, in words; None if it can."""
    if name in _OF_EXTRAS:
        return next(
            (f"{p} {_told(found[p])}" for p in _OF_EXTRAS[name] if found[p].state is not State.OK), None
        )
    package = "mpi4py" if name == "mpi" else "cupy"
    one = found[package]
    if one.state is not State.OK:
        return f"{package} {_told(one)}"
    if name == "mpi":
        if "library_problem" in one.facts:
            return f"mpi4py loads no MPI library ({one.facts['library_problem']})"
        return None if mpiexec else "there is no mpiexec"
    if "gpu_problem" in one.facts or not one.facts.get("gpus"):
        return f"CuPy sees no GPU ({one.facts.get('gpu_problem', 'there is none')})"
    if name == "nccl" and "nccl_problem" in one.facts:
        return f"CuPy loads no NCCL ({one.facts['nccl_problem']})"
    return None


def _warnings(report: Report) -> list[str]:
    found, cores = report.found, report.cores
    warnings = [
        f"{package.name} {_told(found[package.name])}"
        for package in PACKAGES
        if found[package.name].state in (State.BROKEN, State.OLD)
    ]
    if found[CUDA].state is State.BROKEN:
        warnings.append(f"NVIDIA's driver {_told(found[CUDA])}")
    for pool in report.blas:
        warnings += _about_threads(pool, cores)
    if cores.limit is not None and cores.limit < cores.usable:
        warnings.append(
            f"the container grants {cores.limit:g} of {cores.usable} cores, which libraries don't see: set the number of threads for "
            "each of them"
        )
    if report.memory.limit is not None:
        warnings.append(
            f"the container grants {_gib(report.memory.limit)} of the machine's memory; beyond that the process is killed"
        )
    cupy = found["cupy"]
    several = installed(("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy"))
    if len(several) > 1:
        warnings.append(
            f"CuPy is installed {len(several)} times ({', '.join(several)}), and they overwrite one another: uninstall all, then "
            "install one"
        )
    if cupy.state is State.OK and "gpu_problem" in cupy.facts:
        warnings.append(f"CuPy is installed and sees no GPU: {cupy.facts['gpu_problem']}")
    if cupy.state is State.OK and "nccl_problem" in cupy.facts and len(report.gpus) > 1:
        warnings.append(
            f"there are {len(report.gpus)} GPUs, and CuPy loads no NCCL: {cupy.facts['nccl_problem']}"
        )
    mpi = found["mpi4py"]
    if mpi.state is State.OK and "library_problem" in mpi.facts:
        warnings.append(f"mpi4py is installed and loads no MPI library: {mpi.facts['library_problem']}")
    elif mpi.state is State.OK and report.mpiexec is None:
        warnings.append(
            "mpi4py is installed, and there is no mpiexec on the PATH to start several processes with"
        )
    return warnings


def _about_threads(pool: Mapping[str, Any], cores: Cores) -> list[str]:
    threads, name = pool["threads"], pool["name"]
    variable = _variable(name)
    if threads is None:
        return [
            f"how many threads {name} uses is not known, one for each core if nothing is set: set {variable}, or pip install threadpoolctl to have it asked"
        ]
    if threads > cores.available:
        return [
            f"BLAS ({name}) uses {threads} threads, and there are {cores.available} cores: set {variable}={cores.available} or less "
            "before Python starts"
        ]
    if threads > 1:
        return [
            f"BLAS ({name}) uses {threads} threads in each replica: several replicas take the cores from one another; set "
            f"{variable} to the cores for each replica before Python starts ({cores.available} cores: 1 for "
            f"{cores.available} replicas)"
        ]
    return []


def _advice(report: Report) -> list[Advice]:
    advice: list[Advice] = []
    for package in PACKAGES:
        if report.found[package.name].state is not State.MISSING:
            continue
        extra = _extra(package, report.found)
        if extra is None:
            command = (
                f"pip install {package.name}" if package.name != "strategies" else "pip install xpdistribute"
            )
        else:
            command = f"pip install 'xpdistribute[{extra}]'"
        use = package.use
        if package.name == "cupy" and not report.gpus:
            use += ", of which none is visible here"
        advice.append(Advice(package.name, use, command))
    return advice


def _command(capability: str, found: Mapping[str, Found]) -> str:
    """What to do about a capability that can't be used."""
    extra = {"gpu": _cuda_extra(found), "nccl": _cuda_extra(found)}.get(capability, capability)
    if capability == "numpy":
        return "pip install --force-reinstall numpy"
    needed = {"gpu": "cupy", "nccl": "cupy", "mpi": "mpi4py"}
    packages = _OF_EXTRAS.get(capability) or (needed[capability],)
    if any(found[package].state is State.BROKEN for package in packages):
        return f"pip install --force-reinstall 'xpdistribute[{extra}]'"
    if capability == "gpu" and found["cupy"].state is State.OK:
        return "run it where nvidia-smi shows a GPU"
    return f"pip install 'xpdistribute[{extra}]'"


def _extra(package: Package, found: Mapping[str, Found]) -> str | None:
    return _cuda_extra(found) if package.name == "cupy" else package.extra


def _cuda_extra(found: Mapping[str, Found]) -> str:
    """CuPy for the CUDA that the driver can run."""
    version = found[CUDA].version or "12"
    return "cuda13" if int(version.partition(".")[0]) >= 13 else "cuda12"


def _told(found: Found) -> str:
    verb = {State.MISSING: "is not installed", State.BROKEN: "is broken", State.OLD: "is too old"}[
        found.state
    ]
    return verb if found.state is State.MISSING or not found.problem else f"{verb}: {found.problem}"


def _threads_told(blas: str) -> int | None:
    """The number of threads that the environment sets for a BLAS, if it does."""
    for name in (_variable(blas), "OMP_NUM_THREADS"):
        if (value := os.environ.get(name, "")).isdigit() and int(value):
            return int(value)
    return None


def _variable(blas: str) -> str:
    name = blas.lower().removeprefix("scipy-")
    return next((v for known, v in _BLAS_VARIABLES.items() if name.startswith(known)), "OMP_NUM_THREADS")


def _program(name: str) -> str | None:
    """A program on the PATH, or beside this Python: a virtual environment that is not activated has it there."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
