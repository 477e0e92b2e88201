"""The address by which other hosts reach this one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from xpdistribute.output import Output

ADDRESS = "XPDISTRIBUTE_ADDRESS"
"""The variable by which the user says it, where it can't be found."""

_ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): the way to it is the way to where no other way is known."""


def own_address(
    hosts: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    node: str | None = None,
    elsewhere: str = _ELSEWHERE,
) -> tuple[str, str]:
    """The address that other hosts reach, and the one to listen at for it: "" for all of this machine.

    The name of this machine is not given to others: on itself it often stands for a loopback address, and elsewhere for nothing.

    Args:
        hosts: the others, as the user names them; empty where a scheduler knows them.
        environ: where the user may have said it.
        node: the name of this machine; None for what the system says.
        elsewhere: an address that no interface but the usual one leads to.

    Raises:
        ValueError: this machine has no address but the loopback's.
    """
    given = environ.get(ADDRESS, "").strip()
    if given:
        return given, ""
    for host in hosts:
        address = _own_end_to(host)
        # A name that stands for this machine itself, behind which a tunnel may be, says nothing of the way.
        if address is not None and not _is_loopback(address):
            return address, address
    node = os.uname().nodename if node is None else node
    address = _resolved(node)
    if address is not None and not _is_loopback(address):
        return address, ""
    address = _own_end_to(elsewhere)
    if address is not None and not _is_loopback(address):
        if hosts:
            Output.say(
                f"{', '.join(hosts)}: no address is known here, so processes there are told to find this one at {address}; "
                f"if they don't, set {ADDRESS} to an address of this host that they reach"
            )
        return address, ""
    whom = ", ".join(hosts) or "the hosts of the job"
    raise ValueError(
        f"{whom}: got no address of this host ({node}) that others could reach, only {address or 'none at all'}; need one — set "
        f"{ADDRESS} to it"
    )


def _own_end_to(host: str) -> str | None:
    import socket  # noqa: PLC0415  # it takes long to load, and only jobs on several hosts need it

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Sends nothing: it only makes the system choose the way there.
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _resolved(node: str) -> str | None:
    import socket  # noqa: PLC0415  # as above

    try:
        return socket.gethostbyname(node)
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "0.0.0.0"
