"""Connecting to the hub of this process's job, wherever that is.

Our launcher hosts the hub and says where it is. Without it, process 0 hosts it: MPI hands its address round, or Slurm's and
TF_CONFIG's variables tell it to every process alike.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from collectives.cluster_environment import ClusterKind, ClusterPlace
from collectives.control.channel import Channel
from collectives.errors import CollectiveError
from xpdistribute.hub import Hub
from xpdistribute.wire import split_address

TOKEN, JOIN = "XPDISTRIBUTE_TOKEN", "XPDISTRIBUTE_JOIN"

_hub: Hub | None = None
"""Of a job whose process 0 this is; lives as long as the process."""


def connect(place: ClusterPlace, timeout: float, environ: Mapping[str, str] | None = None) -> Channel | None:
    """A channel to the job's hub; None for a process alone.

    Args:
        place: of this process in the job.
        timeout: seconds to wait for the hub.
        environ: where the job's secret is; None takes the process's environment.

    Raises:
        CollectiveTimeoutError: there is no hub where it should be, or some process does not come.
        PeerFailedError: one has ended before.
        RuntimeError: the processes can't be connected as they were started.
    """
    environ = os.environ if environ is None else environ
    joins = place.is_spare or (environ.get(JOIN) == "1" and place.kind is ClusterKind.LAUNCHER)
    if place.is_alone and not joins and place.kind is not ClusterKind.LAUNCHER:
        return None
    address, token = _meeting_point(place, environ, timeout)
    channel = Channel.connect(
        address,
        token,
        None if joins else place.process,
        host=place.host,
        size=None if joins else place.num_processes,
        join=joins,
        spare=place.is_spare,
        timeout=timeout,
    )
    channel.install_hooks()
    return channel


def _meeting_point(place: ClusterPlace, environ: Mapping[str, str], timeout: float) -> tuple[str, str]:
    """Where the hub is, and the secret; in process 0 also the hub itself, where no launcher has one."""
    if place.kind is ClusterKind.LAUNCHER:
        if place.hub is None or not environ.get(TOKEN):
            raise RuntimeError(
                f"{TOKEN}: it is not set, and the hub is at {place.hub}; need both as xpdistribute run sets them"
            )
        return place.hub, environ[TOKEN]
    if place.kind.has_mpi:
        return _by_mpi(place, timeout)
    if place.hub is None:
        raise RuntimeError(f"{place}: nobody says where the hub is; start the program with xpdistribute run")
    # Everybody who knows the job's variables knows it; who shares the network with others sets one that is secret.
    told = f"{place.hub} {place.num_processes} {os.getuid()}"
    token = environ.get(TOKEN) or hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
    if place.process == 0:
        host, port = split_address(place.hub)
        is_local = host in ("localhost", "::1") or host.startswith("127.")
        _start(Hub(place.num_processes, token, host if is_local else "", port))
        if not is_local:
            return f"127.0.0.1:{port}", token
    return place.hub, token


def _by_mpi(place: ClusterPlace, timeout: float) -> tuple[str, str]:
    from collectives.mpi.communicators import survives_losses  # noqa: PLC0415  # likewise
    from collectives.mpi.handing_round import hand_round  # noqa: PLC0415  # for MPI, which is an extra
    from collectives.mpi.library import set_leaving_alone, world  # noqa: PLC0415  # an extra

    comm: Any = world(timeout)
    if survives_losses():
        set_leaving_alone()
    if comm.size != place.num_processes:
        raise RuntimeError(
            f"{place}, and MPI's world has {comm.size} processes; need the same — start one program for all"
        )

    def start_hub(hosts: Sequence[str]) -> tuple[str, str]:
        token = secrets.token_hex(16)
        is_local = len(set(hosts)) == 1
        hub = _start(Hub(comm.size, token, "127.0.0.1" if is_local else "", elastic=survives_losses()))
        return hub.address, token

    address, token = hand_round(comm, place.host, start_hub, timeout)
    if comm.rank == 0:
        address = f"127.0.0.1:{split_address(address)[1]}"
    return address, token


def _start(hub: Hub) -> Hub:
    global _hub
    if _hub is not None:
        raise CollectiveError("hub: this process has one already; need one job for each process")
    _hub = hub.start()
    return _hub
