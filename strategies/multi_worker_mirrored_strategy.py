"""Several processes, on one host or many, each with one or more replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from collectives.communication_options import CommunicationOptions, CrossDeviceOps
from collectives.devices import Device, parse_devices, visible_gpus
from collectives.processes import join
from strategies.strategy import Strategy
from variables.flat_memory import FlatMemory
from variables.mirrored_variable import MirroredVariable
from variables.sync_on_read_variable import SyncOnReadVariable
from variables.synchronization import VariableSynchronization
from variables.variable import Variable, VariableSpec


@final
class MultiWorkerMirroredStrategy(Strategy):
    """`MirroredStrategy` across processes: every process runs the same program, and its replicas train in step with all others.

    Started by ``xpdistribute run -n 4 train.py``, mpiexec or srun. Each process has its own replicas' values: `run` returns those,
    datasets give their shares of each global batch. `reduce`, `gather` and reading ON_READ variables bring the
    values of all processes together, so all processes must call them, as they must create the same variables in
    the same order. A process that is alone is a job of one.

    Args:
        cluster_resolver: accepted for TensorFlow's signature; None finds the cluster in the environment.
        communication_options: hints, and ``timeout_seconds``, how long a process waits for the others.
        devices: of this process's replicas; None takes its share of the host's GPUs, or one CPU where there is none.
        backend: how processes exchange data: ``"auto"`` is shared memory inside a host and MPI between hosts.

    Raises:
        ValueError: an environment that describes no possible job; unknown or repeated devices; no such backend.
        CollectiveTimeoutError: some process did not come in time.
        RuntimeError: a way to communicate that these processes don't have.
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        backend: str = "auto",
    ) -> None:
        if devices is None:
            devices = visible_gpus() or [Device("cpu")]
        own = parse_devices(devices, "MultiWorkerMirroredStrategy")
        options = CommunicationOptions() if communication_options is None else communication_options
        self._processes = join(options.timeout)
        link = self._processes.link(len(own), options, backend)
        super().__init__(
            own,
            cross_device_ops=cross_device_ops,
            communication_options=communication_options,
            link=link,
            on_failure=self._processes.fail,
        )
        self._resolver = cluster_resolver
        self._memory = FlatMemory(self.devices, link)

    @property
    def is_chief(self) -> bool:
        return self.worker_id == 0

    @property
    def worker_id(self) -> int:
        """The number of this process."""
        return self._processes.process

    @property
    def num_workers(self) -> int:
        """How many processes there are."""
        return self._processes.num_processes

    def _create(self, spec: VariableSpec, name: str) -> Variable:
        if spec.synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable(spec, self._memory, self, name)
        return MirroredVariable(spec, self._memory, self, name)
