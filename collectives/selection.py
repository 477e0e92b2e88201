"""Chooses the backend: the one module that knows them all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from collectives.communication_options import (
    CommunicationImplementation,
    CommunicationOptions,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from collectives.communicator import Communicator
from collectives.devices import Device
from collectives.hierarchical import HierarchicalCommunicator
from collectives.in_process import SHARED_FROM, InProcessCommunicator
from collectives.link import Link
from collectives.rendezvous import Rendezvous

_KNOWN = (ReductionToOneDevice, HierarchicalCopyAllReduce, NcclAllReduce)


def require_available(
    devices: Sequence[Device],
    options: CommunicationOptions,
    cross_device_ops: CrossDeviceOps | None,
    where: str,
) -> None:
    """Refuse at construction what could not communicate later.

    Raises:
        RuntimeError: devices or a library that no backend serves.
        ModuleNotFoundError: a GPU, and CuPy is not installed.
        TypeError: not cross-device ops.
    """
    if cross_device_ops is not None and not isinstance(cross_device_ops, _KNOWN):
        raise TypeError(
            f"{where}: got cross_device_ops={cross_device_ops!r}; need one of {', '.join(k.__name__ for k in _KNOWN)}"
        )
    wants_nccl = (
        isinstance(cross_device_ops, NcclAllReduce)
        or options.implementation is CommunicationImplementation.NCCL
    )
    on_gpus = [device for device in devices if device.kind == "gpu"]
    if wants_nccl and not on_gpus:
        raise RuntimeError(
            f"{where}: NCCL was asked for, and the devices are {', '.join(map(str, devices))}; NCCL needs NVIDIA GPUs, "
            "CuPy and nvidia-nccl — use cross_device_ops=None, ReductionToOneDevice() or HierarchicalCopyAllReduce()"
        )
    if on_gpus and len(devices) > 1:
        raise RuntimeError(
            f"{where}: collectives between GPUs need the NCCL backend, which this version does not have; "
            f"got {', '.join(map(str, devices))} — use one GPU, or CPUs: 'cpu:0', 'cpu:1', ..."
        )
    for device in on_gpus:
        _ = device.xp  # raises where CuPy is missing, now rather than with the first variable


def local_communicators(
    rendezvous: Rendezvous,
    options: CommunicationOptions,
    cross_device_ops: CrossDeviceOps | None,
    link: Link | None = None,
) -> list[Communicator]:
    """This process's ends of a group of replicas, by local replica; with a link those of all processes make one group."""
    del options  # all that an in-process group needs of them, the timeout, is the rendezvous's
    if link is not None:
        return [HierarchicalCommunicator(rank, rendezvous, link) for rank in range(rendezvous.size)]
    alone = isinstance(cross_device_ops, ReductionToOneDevice)
    shared_from = math.inf if alone else SHARED_FROM
    return [InProcessCommunicator(rank, rendezvous, shared_from) for rank in range(rendezvous.size)]
