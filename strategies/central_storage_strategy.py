"""Replicas on several devices, with one copy of every variable for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from collectives.communication_options import CommunicationOptions
from collectives.devices import Device, parse_devices, visible_gpus
from strategies.strategy import Strategy
from variables.central_variable import CentralVariable
from variables.flat_memory import FlatMemory
from variables.local_variable import LocalVariable
from variables.variable import Variable, VariableSpec


@final
class CentralStorageStrategy(Strategy):
    """One replica on each compute device; variables live once, on the parameter device.

    It saves the memory of the copies. What replicas write is aggregated, then written once.

    Args:
        compute_devices: where the replicas run, as `MirroredStrategy` takes them.
        parameter_device: where the variables are; None chooses the one compute device, or the CPU if there are several.
        communication_options: as in `MirroredStrategy`.

    Raises:
        ValueError: no devices, unknown or repeated ones.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | Device] | None = None,
        parameter_device: str | Device | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        if compute_devices is None:
            compute_devices = visible_gpus() or [Device("cpu")]
        super().__init__(
            parse_devices(compute_devices, "CentralStorageStrategy"),
            communication_options=communication_options,
        )
        if parameter_device is None:
            parameter_device = self.devices[0] if len(self.devices) == 1 else Device("cpu")
        self._parameter_device = Device.parse(parameter_device)
        self._memory = FlatMemory([self._parameter_device])

    @property
    def parameter_device(self) -> Device:
        """Where the variables are."""
        return self._parameter_device

    def _create(self, spec: VariableSpec, name: str) -> Variable:
        if len(self.devices) == 1:
            return LocalVariable.made(spec, self._memory, self, name)
        return CentralVariable(spec, self._memory, self, name)
