"""How a strategy's collectives are carried out: the choices that users have."""

from __future__ import annotations

import operator
import threading
from dataclasses import dataclass, fields
from enum import Enum
from typing import SupportsFloat, SupportsIndex, final

from collectives.reduce_op import parse_member

DEFAULT_TIMEOUT = 300.0
"""Seconds that a replica waits for the others: longer than a slow step, shorter than a lost night."""


class CommunicationImplementation(Enum):
    """Which library carries the collectives."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@final
@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for collectives.

    Args:
        bytes_per_pack: size of the buckets that gradients travel in between processes; 0 chooses.
        timeout_seconds: how long a replica waits for the others in a collective; None chooses 300.
        implementation: a `CommunicationImplementation` or its name; AUTO chooses by the devices.

    Raises:
        ValueError: a negative size, a time that is not above 0, an unknown implementation.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if not _is_size(self.bytes_per_pack):
            raise ValueError(f"bytes_per_pack: got {self.bytes_per_pack!r}; need bytes >= 0, 0 to choose")
        if self.timeout_seconds is not None and not _is_time(self.timeout_seconds):
            raise ValueError(
                f"timeout_seconds: got {self.timeout_seconds!r}; need seconds above 0, at most "
                f"{threading.TIMEOUT_MAX:.0f}, or None"
            )
        member = parse_member(CommunicationImplementation, self.implementation, "implementation")
        object.__setattr__(self, "implementation", member)

    @property
    def timeout(self) -> float:
        """Seconds that a collective waits."""
        return DEFAULT_TIMEOUT if self.timeout_seconds is None else self.timeout_seconds

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """These, with the fields of ``options`` that differ from the defaults in their place."""
        if options is None:
            return self
        default = CommunicationOptions()
        chosen = {
            field.name: getattr(
                options if getattr(options, field.name) != getattr(default, field.name) else self, field.name
            )
            for field in fields(self)
        }
        return CommunicationOptions(**chosen)


@final
@dataclass(frozen=True)
class ReductionToOneDevice:
    """Reduce on one device, then copy to the others. On CPUs one thread does it all.

    Args:
        reduce_to_device: its name; None chooses the first.
    """

    reduce_to_device: str | None = None


@final
@dataclass(frozen=True)
class HierarchicalCopyAllReduce:
    """TensorFlow's name for a reduction in two levels; right for any number of replicas here.

    On CPUs the replicas share the work, whatever the number of packs.

    Args:
        num_packs: how many buckets the arrays are sent in; 0 for none.

    Raises:
        ValueError: a negative number.
    """

    num_packs: int = 1

    def __post_init__(self) -> None:
        _require_packs(self.num_packs, "HierarchicalCopyAllReduce")


@final
@dataclass(frozen=True)
class NcclAllReduce:
    """NVIDIA's NCCL, between GPUs.

    Args:
        num_packs: as in `HierarchicalCopyAllReduce`.

    Raises:
        ValueError: a negative number.
    """

    num_packs: int = 1

    def __post_init__(self) -> None:
        _require_packs(self.num_packs, "NcclAllReduce")


CrossDeviceOps = ReductionToOneDevice | HierarchicalCopyAllReduce | NcclAllReduce


def _require_packs(num_packs: int, where: str) -> None:
    if num_packs < 0:
        raise ValueError(f"{where}: got num_packs={num_packs}; need 0 or more")


def _is_size(value: object) -> bool:
    return isinstance(value, SupportsIndex) and operator.index(value) >= 0


def _is_time(value: object) -> bool:
    return isinstance(value, SupportsFloat) and 0 < float(value) <= threading.TIMEOUT_MAX
