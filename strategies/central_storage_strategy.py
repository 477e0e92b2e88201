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
from variables.partitioners import VariablePartitioner, num_shards_for
from variables.sharded_variable import ShardedVariable
from variables.variable import Variable, VariableSpec


@final
class CentralStorageStrategy(Strategy):
    """One replica on each compute device; variables live once, on the parameter device.

    It saves the memory of the copies. What replicas write is aggregated, then written once.

    Args:
        compute_devices: where the replicas run, as `MirroredStrategy` takes them.
        parameter_device: where the variables are; None chooses the one compute device, or the CPU if there are several. Given
            several, variables and shards are dealt to them in turn, in the order in which they are made.
        communication_options: as in `MirroredStrategy`.
        variable_partitioner: into how many shards each variable is cut along its first axis: a `Partitioner`, or a function of a
            shape and a dtype that returns the number for every axis. Variables of several shards are
            `ShardedVariable`; None makes none.

    Raises:
        ValueError: no devices, unknown or repeated ones.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | Device] | None = None,
        parameter_device: str | Device | Sequence[str | Device] | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        variable_partitioner: VariablePartitioner | None = None,
    ) -> None:
        if compute_devices is None:
            compute_devices = visible_gpus() or [Device("cpu")]
        super().__init__(
            parse_devices(compute_devices, "CentralStorageStrategy"),
            communication_options=communication_options,
        )
        if parameter_device is None:
            parameter_device = self.devices[0] if len(self.devices) == 1 else Device("cpu")
        if isinstance(parameter_device, (str, Device)):
            parameter_device = [parameter_device]
        self._parameter_devices = parse_devices(parameter_device, "CentralStorageStrategy: parameter_device")
        self._memories = [FlatMemory([device]) for device in self._parameter_devices]
        self._partitioner = variable_partitioner
        self._num_placed = 0

    @property
    def parameter_device(self) -> Device:
        """Where the variables are; of several devices, the first."""
        return self._parameter_devices[0]

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """Where the variables are."""
        return self._parameter_devices

    def _create(self, spec: VariableSpec, name: str) -> Variable:
        if self._partitioner is not None:
            value = spec.initial_value
            num_shards = num_shards_for(self._partitioner, value.shape, value.dtype)
            if num_shards > 1:
                return ShardedVariable.cut(spec, name, num_shards, self._create_whole)
        return self._create_whole(spec, name)

    def _create_whole(self, spec: VariableSpec, name: str) -> Variable:
        memory = self._memories[self._num_placed % len(self._memories)]
        self._num_placed += 1
        if len(self.devices) == 1:
            return LocalVariable.made(spec, memory, self, name)
        return CentralVariable(spec, memory, self, name)
