"""The hosts of a job, as the command line or a file lists them, and whether they are this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ALLOCATIONS = (
    ("SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"),
    ("PBS_NODEFILE", ""),
    ("LSB_MCPU_HOSTS", ""),
    ("PE_HOSTFILE", "NHOSTS"),
)
"""Variables by which a scheduler says which hosts it has given, which mpiexec reads, and how many they are."""


class Host(NamedTuple):
    """A host.

    Args:
        name: its name or address.
        slots: how many processes it is to have; None where nothing was said.
    """

    name: str
    slots: int | None = None

    def __str__(self) -> str:
        return self.name if self.slots is None else f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Hosts of a list with commas: ``name`` or ``name:slots`` each.

    Raises:
        ValueError: no name, slots that are no number from 1, or a host twice.
    """
    return _distinct([_host(part.strip(), "-H") for part in text.split(",")], "-H")


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Hosts of a file, in Open MPI's form (``name slots=2``) or Hydra's (``name:2``); ``#`` starts a comment.

    Raises:
        ValueError: the file can't be read, has no host, or a line of another form.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:  # editors of Windows write a mark at the start
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--hostfile: got {path!r}: {error}; need a file with a line for each host"
        ) from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        host = _host(words[0], where)
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key not in ("slots", "max_slots", "max-slots"):
                raise ValueError(f"{where}: got {word!r}; need 'HOST', 'HOST:SLOTS' or 'HOST slots=SLOTS'")
            if key == "slots":
                host = Host(host.name, _slots(value, where))
        hosts.append(host)
    if not hosts:
        raise ValueError(f"--hostfile: {path} has no host; need a line for each")
    return _distinct(hosts, path)


def are_local(hosts: Sequence[Host]) -> bool:
    """Whether all of them are this machine."""
    node = os.uname().nodename
    own = {*_LOOPBACK, node, node.partition(".")[0]}
    return all(host.name in own for host in hosts)


def allocation(environ: Mapping[str, str]) -> str | None:
    """The variable by which a scheduler has given mpiexec several hosts, if one has."""
    for name, count in _ALLOCATIONS:
        if environ.get(name) and environ.get(count, "2") != "1":
            return name
    return None


def _host(text: str, where: str) -> Host:
    if text.startswith("["):  # an address of IPv6, as in an URL
        name, bracket, rest = text[1:].partition("]")
        if not name or not bracket or (rest and not rest[1:]) or rest[:1] not in ("", ":"):
            raise ValueError(f"{where}: got {text!r}; need [ADDRESS] or [ADDRESS]:SLOTS")
        return Host(name, _slots(rest[1:], where) if rest else None)
    name, colon, slots = text.rpartition(":")
    if not colon or text.count(":") > 1:  # an address of IPv6 has more
        name, slots = text, ""
    if not name or (colon and text.count(":") == 1 and not slots):
        raise ValueError(f"{where}: got {text!r}; need HOST or HOST:SLOTS")
    return Host(name, _slots(slots, where) if slots else None)


def _slots(text: str, where: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{where}: got {text!r} slots; need a whole number from 1")
    return int(text)


def _distinct(hosts: Sequence[Host], where: str) -> tuple[Host, ...]:
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise ValueError(f"{where}: got {host.name} twice; need each host once, with its slots")
        seen.add(host.name)
    return tuple(hosts)
