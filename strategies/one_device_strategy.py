"""Everything on one device: the strategy to start and to debug with."""

from __future__ import annotations

from typing import final

from collectives.communication_options import CommunicationOptions
from collectives.devices import Device
from strategies.strategy import Strategy
from variables.flat_memory import FlatMemory
from variables.local_variable import LocalVariable
from variables.variable import Variable, VariableSpec


@final
class OneDeviceStrategy(Strategy):
    """One replica on one device, in the caller's own thread.

    Nothing is wrapped: values, variables and batches are plain, and the synchronization and aggregation of variables have no
    effect. A loop written for it runs on any other strategy.

    Args:
        device: its name, such as ``"cpu:0"`` or ``"gpu:0"``.
    """

    def __init__(
        self, device: str | Device = "cpu:0", *, communication_options: CommunicationOptions | None = None
    ) -> None:
        super().__init__(
            [Device.parse(device)], communication_options=communication_options, wraps_single=False
        )
        self._memory = FlatMemory(self.devices)

    def _create(self, spec: VariableSpec, name: str) -> Variable:
        return LocalVariable.made(spec, self._memory, self, name)
