"""All devices of one machine, each with a copy of every variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from collectives.communication_options import CommunicationOptions, CrossDeviceOps
from collectives.devices import Device, parse_devices, visible_gpus
from strategies.strategy import Strategy
from variables.flat_memory import FlatMemory
from variables.mirrored_variable import MirroredVariable
from variables.sync_on_read_variable import SyncOnReadVariable
from variables.synchronization import VariableSynchronization
from variables.variable import Variable, VariableSpec


@final
class MirroredStrategy(Strategy):
    """One replica on each device of this machine, in this process, training in step.

    Args:
        devices: their names; ``cpu:0``, ``cpu:1``, ... are logical, any number shares the machine's cores. None takes every
            GPU, or one CPU where there is none.
        cross_device_ops: how replicas communicate; None chooses by the devices.
        communication_options: hints for that, and ``timeout_seconds``, how long a replica waits for the others.

    Raises:
        ValueError: no devices, unknown or repeated ones.
        RuntimeError: a way to communicate that these devices don't have.
    """

    def __init__(
        self,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        if devices is None:
            devices = visible_gpus() or [Device("cpu")]
        super().__init__(
            parse_devices(devices, "MirroredStrategy"),
            cross_device_ops=cross_device_ops,
            communication_options=communication_options,
        )
        self._memory = FlatMemory(self.devices)

    def _create(self, spec: VariableSpec, name: str) -> Variable:
        if spec.synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable(spec, self._memory, self, name)
        return MirroredVariable(spec, self._memory, self, name)
