"""Collectives between the processes of a job without a strategy."""

from __future__ import annotations

from importlib.util import find_spec

from collectives.communication_options import CommunicationOptions
from collectives.communicator import Communicator
from collectives.host_staged import HostStagedCommunicator
from collectives.in_process import InProcessCommunicator


def process_group(
    communication_options: CommunicationOptions | None = None, *, backend: str = "auto"
) -> Communicator:
    """A new group of all processes of this job, one rank each. All processes make it at the same time.

    Arrays may lie on GPUs, where CuPy is installed; they travel by way of the host's memory.

    For what is no training step: numbers and arrays that processes hand to one another. Groups, and strategies too, are apart
    from one another: each makes its own calls in its own order, also in threads of their own. A process that is alone is
    a group of one.

    Args:
        communication_options: with ``timeout_seconds``, how long a process waits for the others in a collective.
        backend: how they exchange data: ``"auto"`` is shared memory inside a host and MPI between hosts, ``"shared_memory"`` and
            ``"mpi"`` are one of them alone.

    Raises:
        TypeError: options that are none.
        ValueError: an environment that describes no possible job; no such backend.
        CollectiveTimeoutError: some process did not come in time.
        RuntimeError: a backend that these processes can't use.
    """
    # What talks to other processes is loaded by those who have some.
    from collectives.hierarchical import HierarchicalCommunicator  # noqa: PLC0415  # as above
    from collectives.processes import join  # noqa: PLC0415  # likewise

    options = CommunicationOptions() if communication_options is None else communication_options
    if not isinstance(options, CommunicationOptions):
        raise TypeError(
            f"process_group: got communication_options={options!r:.80}; need CommunicationOptions, or None"
        )
    link = join(options.timeout).link(1, options, backend)
    if link is None:
        return InProcessCommunicator.group(1, options.timeout)[0]
    group = HierarchicalCommunicator.alone(link, options.timeout)
    # Where there may be arrays on a GPU; whether CuPy is installed is known without loading it.
    return HostStagedCommunicator(group) if find_spec("cupy") is not None else group
