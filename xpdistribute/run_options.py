"""What ``xpdistribute run`` was asked for.

Read by hand: argparse takes as long to load as Python itself takes to start, and knows no option that ends where a program's
own options begin.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xpdistribute.hostfile import Host, parse_hosts, read_hostfile

USAGE = """\
usage: xpdistribute run -n N [OPTION ...] [--] PROGRAM [ARGUMENT ...]

Starts a program in several processes, on this machine or on several hosts, as mpiexec does, with settings that are quick and
work everywhere. PROGRAM is a Python file, -m MODULE, or anything that can be executed.

  -n N, --num-processes N  how many; with -H or --hostfile, by default as many as these have slots
  -H HOST[:SLOTS],...      on these hosts, so many on each; XPDISTRIBUTE_ADDRESS is then the address of this one, if they don't
                           find it by themselves
  --hostfile FILE          likewise: a line for each host, 'HOST', 'HOST:SLOTS' or 'HOST slots=SLOTS'
  --elastic                go on when a process dies, and start another in its place
  --max-restarts K         elastic: how many times each process is replaced (3); otherwise: how many times the whole job is
                           started again when it fails (0)
  --spares K               elastic: start K processes more, each to take the place of one that dies; over several hosts nothing
                           else can (0)
  --heartbeat S            elastic: a process of which nothing is heard for S seconds is killed, as if it had died (10)
  --tag-output             put [RANK] before each line of output
  --all-output             show the standard output of all processes, not of rank 0 alone; errors are always shown
  --threads T              threads of BLAS and OpenMP in each process (the cores of a host over its processes)
  --timeout S              end the job after S seconds, with status 124
  --dry-run                print the command, with its environment, and don't run it
  -h, --help               this

Exits with 0 if the job ended well; else with the status of the process that failed first, 128 + N if signal N killed it.
"""

_VALUED = {
    "-n": "num_processes",
    "-np": "num_processes",
    "--np": "num_processes",
    "--num-processes": "num_processes",
    "-H": "hosts",
    "--host": "hosts",
    "--hosts": "hosts",
    "--hostfile": "hostfile",
    "--max-restarts": "max_restarts",
    "--spares": "spares",
    "--threads": "threads",
    "--timeout": "timeout",
    "--heartbeat": "heartbeat",
}
_FLAGS = {
    "--elastic": "elastic",
    "--tag-output": "tag_output",
    "--all-output": "all_output",
    "--dry-run": "dry_run",
}
_REPLACEMENTS = 3
"""How many times each process of an elastic job is replaced, if nothing else is said."""


class RunOptions(NamedTuple):
    """What was asked for, checked.

    Args:
        num_processes: how many to start.
        program: the command of one of them.
        hosts: where, with the slots of each; empty for this machine.
        elastic: whether the job goes on when a process dies.
        max_restarts: of each process if elastic, else of the job.
        tag_output: whether each line says whose it is.
        all_output: whether all processes' standard output is shown.
        threads: of BLAS in each process; None for what fits.
        timeout: seconds that the job has; None for no limit.
        dry_run: whether to print the command only.
        heartbeat: seconds of silence after which a process of an elastic job is treated as dead; None for the hub's own.
        spares: how many processes more are started for the places of those that die.
    """

    num_processes: int
    program: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    elastic: bool = False
    max_restarts: int = 0
    tag_output: bool = False
    all_output: bool = False
    threads: int | None = None
    timeout: float | None = None
    dry_run: bool = False
    heartbeat: float | None = None
    spares: int = 0

    @property
    def num_ranks(self) -> int:
        """How many processes are started."""
        return self.num_processes + self.spares


def parse(arguments: Sequence[str]) -> RunOptions | None:
    """Read the command line, without ``xpdistribute run``.

    Returns:
        What it asks for; None for help.

    Raises:
        ValueError: an option that is none, a value that can't be, or nothing to run.
    """
    values: dict[str, str] = {}
    flags: set[str] = set()
    rest = iter(arguments)
    program: list[str] = []
    for argument in rest:
        if argument in ("-h", "--help"):
            return None
        if argument == "--":
            program = list(rest)
        elif argument in _FLAGS:
            flags.add(_FLAGS[argument])
        elif argument == "-m" or not argument.startswith("-"):
            program = [argument, *rest]
        else:
            name, value = _valued(argument, rest)
            values[name] = value
    hosts = _hosts(values)
    spares = _count("--spares", values.get("spares"), 0) or 0
    num_processes = _count("-n", values.get("num_processes"), 1)
    if num_processes is None:
        if not hosts:
            raise ValueError("-n: not given; need how many processes to start — such as -n 2")
        num_processes = sum(host.slots or 1 for host in hosts) - spares
        if num_processes < 1:
            raise ValueError(
                f"--spares: got {spares}, and the hosts have {num_processes + spares} slots; need one slot at least for a process that "
                "computes — give -n, or more slots"
            )
    elastic = "elastic" in flags
    if spares and not elastic:
        raise ValueError("--spares: got it without --elastic; need both — other jobs end when a process dies")
    if spares and "max_restarts" in values:
        raise ValueError(
            "got both --spares and --max-restarts; need one of them — spares take the places of dead processes in place of new ones"
        )
    if "heartbeat" in values and not elastic:
        raise ValueError(
            "--heartbeat: got it without --elastic; need both — other jobs end when a process dies"
        )
    max_restarts = _count("--max-restarts", values.get("max_restarts"), 0)
    if max_restarts is None:
        max_restarts = _REPLACEMENTS if elastic else 0
    return RunOptions(
        num_processes,
        _command(program),
        hosts,
        elastic,
        max_restarts,
        "tag_output" in flags,
        "all_output" in flags,
        _count("--threads", values.get("threads"), 1),
        _seconds("--timeout", values.get("timeout")),
        "dry_run" in flags,
        _seconds("--heartbeat", values.get("heartbeat")),
        spares,
    )


def _valued(argument: str, rest: Iterator[str]) -> tuple[str, str]:
    """The name and the value of an option: ``-n 4``, ``-n4``, ``-n=4`` or ``--threads=2``."""
    option, equals, value = argument.partition("=")
    if option in _VALUED:
        if not equals:
            value = next(rest, "")
        if not value:
            raise ValueError(f"{option}: got no value; need one after it — see xpdistribute run --help")
        return _VALUED[option], value
    if option[:2] in ("-n", "-H") and not equals and not (option[:2] == "-n" and not option[2:].isdigit()):
        return _VALUED[option[:2]], option[2:]
    known = ", ".join(sorted({*_VALUED, *_FLAGS, "-m", "--help"}))
    raise ValueError(
        f"got the option {argument!r}; need one of {known} — the program's own options stand after the program"
    )


def _hosts(values: dict[str, str]) -> tuple[Host, ...]:
    if "hosts" in values and "hostfile" in values:
        raise ValueError("got both -H and --hostfile; need one of them")
    if "hosts" in values:
        return parse_hosts(values["hosts"])
    return read_hostfile(values["hostfile"]) if "hostfile" in values else ()


def _command(program: Sequence[str]) -> tuple[str, ...]:
    """The program as it is to be executed: with this Python before it, if it is Python's."""
    if not program:
        raise ValueError("got nothing to run; need a Python file, -m MODULE or a program after the options")
    first = program[0]
    if first == "-m":
        if len(program) < 2:
            raise ValueError("-m: got no module; need its name after it")
        return (sys.executable, *program)
    is_file = os.path.isfile(first)
    if first.endswith((".py", ".pyc", ".pyz")):
        if not is_file:
            raise ValueError(
                f"got the program {first!r}, and {os.getcwd()} has no such file; need one that exists"
            )
        return (sys.executable, *program)
    import shutil  # noqa: PLC0415  # Python files, which most programs are, do without

    found = shutil.which(first)
    if found is not None:
        return (os.path.abspath(found), *program[1:])
    if is_file:
        return (sys.executable, *program)
    raise ValueError(
        f"got the program {first!r}, which is no file and not on the PATH; need a Python file, -m MODULE or a program"
    )


def _count(option: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least or int(text) > 1 << 20:
        raise ValueError(f"{option}: got {text!r}; need a whole number from {least}")
    return int(text)


def _seconds(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"{option}: got {text!r}; need seconds above 0")
    return seconds
