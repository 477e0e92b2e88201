"""Several processes, on one host or many, each with one or more replicas."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

from collectives.clusters import ClusterTask
from collectives.communication_options import CommunicationOptions, CrossDeviceOps
from collectives.devices import Device, parse_devices, visible_gpus
from strategies.membership_change import MembershipChange
from strategies.strategy import Strategy
from variables.flat_memory import FlatMemory
from variables.journal import Journal
from variables.mirrored_variable import MirroredVariable
from variables.sync_on_read_variable import SyncOnReadVariable
from variables.synchronization import VariableSynchronization
from variables.variable import Variable, VariableSpec

if TYPE_CHECKING:
    from strategies.newcomers import SharedState

_TO_START = 300.0
"""Seconds that a process waits for the others to start, unless told otherwise."""


@final
class MultiWorkerMirroredStrategy(Strategy):
    """`MirroredStrategy` across processes: every process runs the same program, and its replicas train in step with all others.

    Started by ``xpdistribute run -n 4 train.py``, mpiexec or srun. Each process has its own replicas' values: `run` returns those,
    datasets give their shares of each global batch. `reduce`, `gather` and reading ON_READ variables bring the
    values of all processes together, so all processes must call them, as they must create the same variables in
    the same order. A process that is alone is a job of one.

    Args:
        cluster_resolver: a `ClusterTask`, instead of what TF_CONFIG says; None finds the cluster in the environment: that of
            ``xpdistribute run``, mpiexec, srun or TF_CONFIG, in this order.
        communication_options: hints, and ``timeout_seconds``, how long a process waits for the others.
        devices: of this process's replicas; None takes its share of the host's GPUs, or one CPU where there is none.
        on_membership_change: in an elastic job (``xpdistribute run --elastic``), called on every process with a `MembershipChange`
            when processes were lost or have come, before it goes on.
        min_workers: an elastic job does not go on with fewer processes; all that are left raise a `PeerFailedError` then.
        backend: how processes exchange data: ``"auto"`` is shared memory inside a host and MPI between hosts.

    Raises:
        ValueError: an environment that describes no possible job; unknown or repeated devices; no such backend.
        CollectiveTimeoutError: some process did not come in time.
        RuntimeError: a way to communicate that these processes don't have.
    """

    def __init__(
        self,
        cluster_resolver: ClusterTask | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        backend: str = "auto",
        on_membership_change: Callable[[MembershipChange], object] | None = None,
        min_workers: int = 1,
    ) -> None:
        # What talks to other processes is loaded by those who have some.
        from collectives.processes import join  # noqa: PLC0415
        from collectives.renewable_link import RenewableLink  # noqa: PLC0415

        if devices is None:
            devices = visible_gpus() or [Device("cpu")]
        own = parse_devices(devices, "MultiWorkerMirroredStrategy")
        options = CommunicationOptions() if communication_options is None else communication_options
        timeout = options.timeout_seconds
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterTask):
            raise TypeError(
                f"MultiWorkerMirroredStrategy: got cluster_resolver={cluster_resolver!r}; need a ClusterTask, or None to find the "
                "cluster in the environment"
            )
        self._processes = join(_TO_START if timeout is None else timeout, cluster_resolver)
        on_gpus = [str(device) for device in own if device.kind != "cpu"]
        if on_gpus and self._processes.num_processes > 1:
            raise RuntimeError(
                f"MultiWorkerMirroredStrategy: got {', '.join(on_gpus)} and {self._processes.num_processes} processes; collectives between "
                "GPUs of several processes need the NCCL backend, which this version does not have — pass devices=['cpu:0']"
            )
        num_processes = self._processes.num_processes
        if not 1 <= min_workers <= num_processes:
            raise ValueError(
                f"MultiWorkerMirroredStrategy: got min_workers={min_workers}; need a number from 1 to that of the processes, "
                f"{num_processes}"
            )
        link = self._processes.link(len(own), options, backend)
        super().__init__(
            own,
            cross_device_ops=cross_device_ops,
            communication_options=communication_options,
            link=link,
            on_failure=self._fail,
        )
        self._memory = FlatMemory(self.devices, link)
        self._before_first_step = self._warn_of_changes
        self._newcomers_link = link if isinstance(link, RenewableLink) and not link.is_connected else None
        if isinstance(link, RenewableLink):
            from strategies.recovery import Recovery  # noqa: PLC0415

            self._recovery = Recovery(
                self._processes,
                link,
                self._steps,
                on_membership_change,
                options.timeout,
                self._set_journal,
                min_workers,
            )

    @property
    def is_chief(self) -> bool:
        return self._processes.is_chief

    @property
    def cluster_resolver(self) -> ClusterTask:
        """The cluster as the job was found in it, and which task of it this process is. Immutable."""
        return self._processes.cluster

    @property
    def worker_id(self) -> int:
        """The number of this process."""
        return self._processes.process

    @property
    def num_workers(self) -> int:
        """How many processes there are."""
        return self._processes.num_processes

    def __repr__(self) -> str:
        devices = ", ".join(repr(str(device)) for device in self.devices)
        place = self._processes.place
        return f"{type(self).__name__}([{devices}], worker {self.worker_id} of {self.num_workers}, as {place.kind.value} says)"

    def share_state(self, state: SharedState) -> None:
        """Say what newcomers of an elastic job need to go on where the others are; nothing in other jobs.

        Call it once, before the first step, with the model, the optimizers, the iterators of datasets and the counters that the program's
        loop goes by. A process that has come later waits in it until it is taken in, and has the others' values then. That happens
        when the others ask an iterator of the state for the next element, or call `take_in_newcomers`: there the loop of
        a newcomer must be able to begin.

        Raises:
            ValueError: the state lacks a variable of the strategy, in which newcomers would differ; `run` raises it for what is made
                or used for the first time in a step. In a newcomer also: its program is not that of the others.
            CollectiveTimeoutError: in a newcomer, the others did not take it in.
            RuntimeError: in a newcomer, all that had the state are gone.
        """
        if self._recovery is None:
            return
        self._recovery.share(state)

    def take_in_newcomers(self) -> None:
        """Take in whoever has come, in an elastic job whose loop goes by no iterator. All processes call it between two steps."""
        if self._recovery is not None:
            self._recovery.take_in()

    def _warn_of_changes(self) -> None:
        changed = self._processes.changed_environment()
        if changed is not None:
            warnings.warn(f"{self!r}: {changed}", stacklevel=3)

    def _fail(self, error: BaseException) -> None:
        if self._recovery is None or not self._recovery.can_go_on_after(error):
            self._processes.fail(error, self._link)

    def _set_journal(self, journal: Journal | None) -> None:
        self.journal = journal

    @property
    def _takes_initial_values(self) -> bool:
        return self._newcomers_link is None or self._newcomers_link.is_connected

    def _create(self, spec: VariableSpec, name: str) -> Variable:
        variable: Variable
        if spec.synchronization is VariableSynchronization.ON_READ:
            variable = SyncOnReadVariable(spec, self._memory, self, name, outlasts=self._recovery is not None)
        else:
            variable = MirroredVariable(spec, self._memory, self, name)
        if self._recovery is not None:
            self._recovery.note(variable)
        return variable
