"""Which process of which job this one is, told from environment variables alone.

Who starts processes says so in variables of his own: our launcher, Open MPI, Hydra (MPICH and Intel MPI), Slurm, or, for
TensorFlow's programs, TF_CONFIG. They are looked at in this order, and the first that says something holds; what is half set or
contradicts itself is refused at once, as a job whose processes believe different things would wait for itself for ever.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import final

from collectives.clusters import EVALUATOR, PARAMETER_SERVER, TF_CONFIG, ClusterTask
from collectives.node_list import expand_counts, expand_node_list

HUB, SIZE, RANK, HOST = "XPDISTRIBUTE_HUB", "XPDISTRIBUTE_SIZE", "XPDISTRIBUTE_RANK", "XPDISTRIBUTE_HOST"
SPARES = "XPDISTRIBUTE_SPARES"
HUB_PORT = "XPDISTRIBUTE_PORT"

_SLURM_PORTS = range(20000, 28000)
"""Where the hub of a Slurm job listens, by the job's number: all its processes come to the same one without talking."""


class ClusterKind(Enum):
    """Who said so."""

    LAUNCHER = "xpdistribute run"
    OPEN_MPI = "Open MPI"
    HYDRA = "Hydra (MPICH, Intel MPI)"
    SLURM = "Slurm"
    TF_CONFIG = "TF_CONFIG"
    ALONE = "nobody"

    @property
    def has_mpi(self) -> bool:
        """Whether the processes were started by an MPI's own launcher, so that MPI connects them."""
        return self in (ClusterKind.OPEN_MPI, ClusterKind.HYDRA)


@final
@dataclass(frozen=True)
class ClusterPlace:
    """One process's place in its job. Immutable: what the environment says later changes nothing.

    Args:
        kind: who said so.
        process: its number, in ``range(num_processes)``.
        num_processes: how many compute together.
        local_process: its number among those of its host; None where nobody said.
        num_local_processes: how many those are; None where nobody said.
        host: the name of this process's host.
        hosts: of all processes' hosts, once each, where they are known; else empty.
        hub: ``host:port`` of the hub, where it is known before the processes have talked.
        task: what TF_CONFIG said, if it did.
        looked_at: the variables that it was told from, with their values, for messages.
        is_spare: whether it computes only when it has taken the place of one that was lost; ``process`` is its number in what was started.
    """

    kind: ClusterKind
    process: int = 0
    num_processes: int = 1
    local_process: int | None = None
    num_local_processes: int | None = None
    host: str = ""
    hosts: tuple[str, ...] = ()
    hub: str | None = None
    task: ClusterTask | None = None
    looked_at: tuple[tuple[str, str], ...] = ()
    is_spare: bool = False

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and speaks for all."""
        if self.task is not None and self.task.jobs and self.kind is ClusterKind.TF_CONFIG:
            return self.task.is_chief
        return self.process == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process to compute with."""
        return self.num_processes == 1

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.looked_at)
        return (
            f"{'spare ' if self.is_spare else ''}process {self.process} of {self.num_processes}, as {self.kind.value} says"
            + (f" ({told})" if told else "")
        )


def find_place(environ: Mapping[str, str] | None = None) -> ClusterPlace:
    """This process's place in its job; a process alone where nothing says otherwise.

    Args:
        environ: where to look; None takes the process's environment.

    Raises:
        ValueError: a variable is missing beside another one, is no number, or can't be; or TF_CONFIG contradicts the
            launcher.
    """
    environ = os.environ if environ is None else environ
    host = environ.get(HOST) or socket.gethostname()
    place = (
        _from_launcher(environ, host)
        or _from_mpi(environ, host)
        or _from_slurm(environ, host)
        or _from_tf_config(environ, host)
    )
    if place is None:
        return ClusterPlace(ClusterKind.ALONE, 0, 1, 0, 1, host, (host,))
    if place.kind is not ClusterKind.TF_CONFIG and environ.get(TF_CONFIG, "").strip():
        return _beside_tf_config(place, environ)
    return place


def tf_config_changed(place: ClusterPlace, environ: Mapping[str, str] | None = None) -> str | None:
    """What has changed in TF_CONFIG since a place was found, for a warning; None if nothing that matters has.

    A program that sets it after the strategy was made would otherwise train several models that know nothing of one another.

    Args:
        place: what was found.
        environ: what there is now; None takes the process's environment.
    """
    try:
        now = ClusterTask.from_tf_config(environ)
    except ValueError as error:
        return f"{TF_CONFIG} was changed after the strategy was made, to something that can't be: {error}"
    before = place.task or ClusterTask()
    if now == before or (place.kind not in (ClusterKind.TF_CONFIG, ClusterKind.ALONE) and not now.jobs):
        return None
    workers = f"{place.num_processes} worker{'s' if place.num_processes > 1 else ''}"
    return (
        f"{TF_CONFIG} was changed after the strategy was made; the strategy still has {workers}, as it read it then — set "
        f"{TF_CONFIG} before the strategy is made"
    )


# ---------------------------------------------------------------- who may say it


@dataclass(frozen=True)
class _Variables:
    """How one kind says it: each by the first of its variables that is set."""

    kind: ClusterKind
    process: tuple[str, ...]
    num_processes: tuple[str, ...]
    local_process: tuple[str, ...] = ()
    num_local_processes: tuple[str, ...] = ()


_OPEN_MPI = _Variables(
    ClusterKind.OPEN_MPI,
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
_HYDRA = _Variables(
    ClusterKind.HYDRA,
    ("PMI_RANK",),
    ("PMI_SIZE",),
    ("MPI_LOCALRANKID",),
    ("MPI_LOCALNRANKS",),
)
_SLURM = _Variables(
    ClusterKind.SLURM,
    ("SLURM_PROCID",),
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    ("SLURM_LOCALID",),
)


def _from_launcher(environ: Mapping[str, str], host: str) -> ClusterPlace | None:
    hub = environ.get(HUB)
    if not hub:
        if environ.get(RANK) or environ.get(SIZE):
            name = RANK if environ.get(RANK) else SIZE
            raise ValueError(
                f"{name}: got {environ[name]!r}, and {HUB} is not set; need both, or neither — start the program with xpdistribute run, "
                f"or unset {name}"
            )
        return None
    started_by = _SLURM if "SLURM_PROCID" in environ else None
    started_by = _HYDRA if "PMI_RANK" in environ else started_by
    started_by = _OPEN_MPI if "OMPI_COMM_WORLD_RANK" in environ else started_by
    local = started_by or _Variables(ClusterKind.LAUNCHER, (), ())
    variables = _Variables(
        ClusterKind.LAUNCHER,
        (RANK, "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"),
        (SIZE,),
        local.local_process if not environ.get(RANK) else (),
        local.num_local_processes if not environ.get(RANK) else (),
    )
    _, spares = _number((SPARES,), environ, f"{ClusterKind.LAUNCHER.value}: looked at {SPARES}")
    return _read(variables, environ, host, hub=hub, num_spares=spares or 0)


def _from_mpi(environ: Mapping[str, str], host: str) -> ClusterPlace | None:
    for variables in (_OPEN_MPI, _HYDRA):
        names = (*variables.process, *variables.num_processes)
        if any(environ.get(name) for name in names):
            if variables is _HYDRA and _is_srun(environ):
                continue
            return _read(variables, environ, host)
    return None


def _is_srun(environ: Mapping[str, str]) -> bool:
    """Whether the variables of PMI are those of srun with its plugin pmi2, which says more in variables of its own.

    Hydra may be started by srun too; its ranks are then others than srun's.
    """
    return (
        bool(environ.get("SLURM_STEP_ID"))
        and environ.get("PMI_RANK") == environ.get("SLURM_PROCID")
        and environ.get("PMI_SIZE", environ.get("SLURM_STEP_NUM_TASKS"))
        == environ.get("SLURM_STEP_NUM_TASKS")
    )


def _from_slurm(environ: Mapping[str, str], host: str) -> ClusterPlace | None:
    # A script of sbatch's, or a shell of salloc's, sees the job's variables and is one process: srun makes steps of several.
    if not environ.get("SLURM_STEP_ID") and not environ.get("SLURM_STEP_NUM_TASKS"):
        return None
    if environ.get("SLURM_STEP_ID", "").startswith(("4294967", "batch", "interactive", "extern")):
        return None  # steps that Slurm makes by itself
    if not environ.get("SLURM_PROCID") and not environ.get("SLURM_STEP_NUM_TASKS"):
        return None
    hosts: tuple[str, ...] = ()
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            hosts = expand_node_list(environ[name])
            break
    place = _read(_SLURM, environ, host, hosts=hosts)
    if place.num_processes == 1:
        return place
    hub_host = hosts[0] if hosts else None
    if hub_host is None:
        raise ValueError(
            f"Slurm: got {place.num_processes} tasks, and neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST; need the nodes to know "
            "where the hub is — start the tasks with srun"
        )
    per_node = expand_counts(
        environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    )
    node = environ.get("SLURM_NODEID", "")
    num_local = per_node[int(node)] if node.isdecimal() and int(node) < len(per_node) else None
    return ClusterPlace(
        place.kind,
        place.process,
        place.num_processes,
        place.local_process,
        num_local,
        host,
        hosts,
        f"{hub_host}:{_slurm_port(environ)}",
        None,
        place.looked_at,
    )


def _from_tf_config(environ: Mapping[str, str], host: str) -> ClusterPlace | None:
    task = ClusterTask.from_tf_config(environ)
    if not task.jobs:
        return None
    if task.task_type is None or task.task_id is None:
        raise ValueError(
            f"{TF_CONFIG}: got a cluster and the task type {task.task_type}, index {task.task_id}; need both for this process — set "
            "'task': {'type': ..., 'index': ...}"
        )
    looked_at = ((TF_CONFIG, environ[TF_CONFIG]),)
    if task.task_type in (PARAMETER_SERVER, EVALUATOR):
        # They compute alone: what the cluster says of chief and workers is for others to use.
        return ClusterPlace(ClusterKind.TF_CONFIG, 0, 1, 0, 1, host, (), None, task, looked_at)
    spec = task.cluster_spec
    addresses = [address for job in ("chief", "worker") for address in spec.get(job, ())]
    hosts = tuple(dict.fromkeys(address.rpartition(":")[0] or address for address in addresses))
    return ClusterPlace(
        ClusterKind.TF_CONFIG,
        task.id_in_cluster,
        task.worker_count,
        host=host,
        hosts=hosts,
        hub=addresses[0] if len(addresses) > 1 else None,
        task=task,
        looked_at=looked_at,
    )


def _beside_tf_config(place: ClusterPlace, environ: Mapping[str, str]) -> ClusterPlace:
    """The same place, once TF_CONFIG has been found to agree with it."""
    told = _from_tf_config(environ, place.host)
    if told is None or told.task is None:
        return place
    computes = told.task.task_type not in (PARAMETER_SERVER, EVALUATOR)
    if computes and told.num_processes != place.num_processes:
        source = place.looked_at[-1][0] if place.looked_at else place.kind.value
        raise ValueError(
            f"{TF_CONFIG}: got {told.num_processes} processes (chief and workers), but {place.kind.value} says "
            f"{place.num_processes} ({source}={dict(place.looked_at).get(source, '')}); need the same number in both — unset "
            f"{TF_CONFIG}, or start as many processes"
        )
    if computes and told.process != place.process:
        raise ValueError(
            f"{TF_CONFIG}: got the task {told.task.task_type} {told.task.task_id}, which is process {told.process}, but {place.kind.value} "
            f"says that this is process {place.process} ({place.looked_at[0][0]}); need the same in both — unset {TF_CONFIG}"
        )
    return replace(place, task=told.task)


# ---------------------------------------------------------------- reading


def _read(
    variables: _Variables,
    environ: Mapping[str, str],
    host: str,
    *,
    hosts: tuple[str, ...] = (),
    hub: str | None = None,
    num_spares: int = 0,
) -> ClusterPlace:
    where = f"{variables.kind.value}: looked at {', '.join((*variables.process, *variables.num_processes))}"
    process_name, process = _number(variables.process, environ, where)
    size_name, size = _number(variables.num_processes, environ, where)
    if size_name is None and process_name is None and hub is not None:
        raise ValueError(
            f"{HUB}: got {hub!r}, and neither {SIZE} nor {RANK} is set; need all three — {_ADVICE} ({where})"
        )
    if size_name is None or size is None:
        raise ValueError(
            f"{process_name}: got {process}, and {' and '.join(variables.num_processes)} {_is_not(variables.num_processes)} set; need "
            f"both — {_ADVICE} ({where})"
        )
    if process_name is None or process is None:
        raise ValueError(
            f"{size_name}: got {size}, and {' and '.join(variables.process)} {_is_not(variables.process)} set; need both — "
            f"{_ADVICE} ({where})"
        )
    if size < 1:
        raise ValueError(f"{size_name}: got {size} processes; need at least one — {_ADVICE} ({where})")
    if process >= size + num_spares:
        raise ValueError(
            f"{process_name}: got {process}, but {size_name} is {size}{f' and {SPARES} {num_spares}' if num_spares else ''}; need a number from 0 to "
            f"{size + num_spares - 1} — {_ADVICE} ({where})"
        )
    local_name, local = _number(variables.local_process, environ, where)
    num_name, num_local = _number(variables.num_local_processes, environ, where)
    if local is not None and num_local is not None and local >= num_local:
        raise ValueError(
            f"{local_name}: got {local}, but {num_name} is {num_local}; need a number from 0 to {num_local - 1} — {_ADVICE}"
        )
    return ClusterPlace(
        variables.kind,
        process,
        size,
        local,
        num_local,
        host,
        hosts,
        hub,
        None,
        ((process_name, environ[process_name]), (size_name, environ[size_name])),
        process >= size,
    )


_ADVICE = "start the program with xpdistribute run, mpiexec or srun, or unset the variable to run it alone"


def _is_not(names: Sequence[str]) -> str:
    return "is not" if len(names) == 1 else "are not"


def _number(names: Sequence[str], environ: Mapping[str, str], where: str) -> tuple[str | None, int | None]:
    """The first of the variables that is set, and its value."""
    for name in names:
        text = environ.get(name, "").strip()
        if text:
            if not (text.isascii() and text.isdecimal()):
                raise ValueError(f"{name}: got {text!r}; need a whole number from 0 — {_ADVICE} ({where})")
            return name, int(text)
    return None, None


def _slurm_port(environ: Mapping[str, str]) -> int:
    if environ.get(HUB_PORT):
        _, port = _number((HUB_PORT,), environ, "the port of the hub")
        if port is None or not 0 < port < 65536:
            raise ValueError(f"{HUB_PORT}: got {environ[HUB_PORT]!r}; need a port from 1 to 65535")
        return port
    job, step = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0")
    number = int(job) * 31 + int(step) if job.isdecimal() and step.isdecimal() else 0
    return _SLURM_PORTS[number % len(_SLURM_PORTS)]
