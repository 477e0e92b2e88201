"""Who takes part in a job of several processes, and which part this one plays.

The description comes from the environment variable TF_CONFIG, so that what starts TensorFlow jobs starts ours::

    {"cluster": {"chief": ["host0:1234"], "worker": ["host1:1234", "host2:1234"]},
     "task": {"type": "worker", "index": 1}}

It is checked as a whole when it is read: a job whose processes were told different or impossible things would wait for
itself for ever.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

TF_CONFIG = "TF_CONFIG"

CHIEF, WORKER, PARAMETER_SERVER, EVALUATOR = "chief", "worker", "ps", "evaluator"
TASK_TYPES = (CHIEF, WORKER, PARAMETER_SERVER, EVALUATOR)
_ONE_OF = (CHIEF, EVALUATOR)
"""Of these a cluster has one at most."""


@final
@dataclass(frozen=True)
class ClusterTask:
    """One process's view of a cluster: all tasks by type, and which of them it is.

    Immutable: what the environment says later changes nothing.

    Args:
        jobs: pairs of a task type and the addresses of its tasks, ``host:port``, by index. Empty for a process alone.
        task_type: one of `TASK_TYPES`, or None where nothing was said.
        task_id: the index among the tasks of that type, or None.
        rpc_layer: the protocol that stands before addresses, such as ``grpc``, or None.
        session_master: an address that takes the place of `master`, or None.

    Raises:
        ValueError: a task type that is none or is not in the cluster, an index out of range, two chiefs or evaluators, one
            address for two tasks.
    """

    jobs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    session_master: str | None = None

    def __post_init__(self) -> None:
        _require_jobs(self.cluster_spec)
        _require_task(self.cluster_spec, self.task_type, self.task_id)

    @classmethod
    def from_tf_config(cls, environ: Mapping[str, str] | None = None) -> ClusterTask:
        """The cluster and task that TF_CONFIG describes; a process alone where it is not set.

        Args:
            environ: where to look; None takes the process's environment.

        Raises:
            ValueError: no JSON, not of the form above, or a cluster that can't be.
        """
        text = (os.environ if environ is None else environ).get(TF_CONFIG, "")
        if not text.strip():
            return cls()
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{TF_CONFIG}: got {text!r}, which is no JSON ({error}); need an object with 'cluster' and 'task' — "
                "write it with json.dumps"
            ) from error
        config = _object(config, TF_CONFIG)
        task = _object(config.get("task", {}), f"{TF_CONFIG}: task")
        return cls(
            jobs=_parse_jobs(_object(config.get("cluster", {}), f"{TF_CONFIG}: cluster")),
            task_type=_parse_text(task.get("type"), "task type"),
            task_id=_parse_index(task.get("index")),
            rpc_layer=_parse_text(config.get("rpc_layer"), "rpc_layer"),
            session_master=_parse_text(config.get("session_master"), "session_master"),
        )

    def to_tf_config(self) -> str:
        """The text of the variable TF_CONFIG that describes the same."""
        config: dict[str, Any] = {"cluster": self.cluster_spec}
        if self.task_type is not None:
            config["task"] = {"type": self.task_type, "index": self.task_id}
        if self.rpc_layer is not None:
            config["rpc_layer"] = self.rpc_layer
        if self.session_master is not None:
            config["session_master"] = self.session_master
        return json.dumps(config)

    @property
    def cluster_spec(self) -> dict[str, list[str]]:
        """The addresses by task type; empty for a process alone."""
        return {job: list(addresses) for job, addresses in self.jobs}

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and speaks for all: the chief, else worker 0; an evaluator is its own chief.

        Raises:
            ValueError: there is a cluster, and this process has no task in it.
        """
        if not self.jobs:
            return True
        task_type, task_id = self._require_own_task("is_chief")
        if task_type in _ONE_OF:
            return True
        return task_type == WORKER and task_id == 0 and CHIEF not in self.cluster_spec

    @property
    def worker_count(self) -> int:
        """How many processes compute together with this one: chief and workers; evaluators for an evaluator.

        Raises:
            ValueError: this process is none of them.
        """
        if not self.jobs:
            return 1
        task_type, _ = self._require_own_task("worker_count")
        self._require_computing("worker_count", task_type)
        spec = self.cluster_spec
        if task_type == EVALUATOR:
            return len(spec[EVALUATOR]) if EVALUATOR in spec else 1
        return len(spec.get(CHIEF, [])) + len(spec.get(WORKER, []))

    @property
    def id_in_cluster(self) -> int:
        """This process's number among those of `worker_count`: the chief first, then the workers.

        Raises:
            ValueError: this process is none of them.
        """
        if not self.jobs:
            return 0
        task_type, task_id = self._require_own_task("id_in_cluster")
        self._require_computing("id_in_cluster", task_type)
        return task_id + len(self.cluster_spec.get(CHIEF, [])) if task_type == WORKER else task_id

    @property
    def leader(self) -> str:
        """The name of the task that leads the collectives; empty for an evaluator or a process alone.

        Raises:
            ValueError: a cluster with neither chief nor workers, or one without a task for this process.
        """
        if not self.jobs:
            return ""
        task_type, _ = self._require_own_task("leader")
        if task_type == EVALUATOR:
            return ""
        for job in (CHIEF, WORKER):
            if job in self.cluster_spec:
                return f"/job:{job}/replica:0/task:0"
        raise ValueError(
            f"leader: got a cluster of {_sketch(self.cluster_spec)} only; need a chief or workers"
        )

    @property
    def master(self) -> str:
        """This task's address with its protocol before it; empty where no other task exists.

        Raises:
            ValueError: there is a cluster, and this process has no address in it.
        """
        if self.session_master is not None:
            return self.session_master
        spec = self.cluster_spec
        if sum(map(len, spec.values())) <= 1:
            return ""
        task_type, task_id = self._require_own_task("master")
        if task_type not in spec:
            raise ValueError(
                f"master: {task_type} {task_id} has no address in {_sketch(spec)}; add it to the cluster"
            )
        address = spec[task_type][task_id]
        return f"{self.rpc_layer}://{address}" if self.rpc_layer else address

    def _require_own_task(self, where: str) -> tuple[str, int]:
        if self.task_type is None or self.task_id is None:
            raise ValueError(
                f"{where}: got a cluster of {_sketch(self.cluster_spec)}, and task type {self.task_type}, index "
                f"{self.task_id}; need both for this process — set 'task': {{'type': ..., 'index': ...}} in {TF_CONFIG}"
            )
        return self.task_type, self.task_id

    def _require_computing(self, where: str, task_type: str) -> None:
        if task_type == PARAMETER_SERVER:
            raise ValueError(
                f"{where}: this task is a parameter server; need a chief, a worker or an evaluator"
            )


def _require_jobs(spec: Mapping[str, list[str]]) -> None:
    owners: dict[str, str] = {}
    for job, addresses in spec.items():
        if job not in TASK_TYPES:
            hint = f" — TensorFlow 1's 'master' is called {CHIEF!r}" if job == "master" else ""
            raise ValueError(f"cluster: got tasks of type {job!r}; need {', '.join(TASK_TYPES)}{hint}")
        if not addresses:
            raise ValueError(f"cluster: got no address for {job!r}; need at least one — or leave {job!r} out")
        if job in _ONE_OF and len(addresses) > 1:
            raise ValueError(f"cluster: got {len(addresses)} tasks of type {job!r}; need one at most")
        for index, address in enumerate(addresses):
            task = f"{job} {index}"
            if address in owners:
                raise ValueError(
                    f"cluster: got the address {address!r} for {owners[address]} and for {task}; need one of its own for "
                    "each task — give them different ports"
                )
            owners[address] = task


def _require_task(spec: Mapping[str, list[str]], task_type: str | None, task_id: int | None) -> None:
    if task_type is None:
        return
    if task_type not in TASK_TYPES or (task_type not in spec and task_type != EVALUATOR):
        hint = f" — TensorFlow 1's 'master' is called {CHIEF!r}" if task_type == "master" else ""
        raise ValueError(
            f"task: got type {task_type!r}; need one that the cluster has: {_sketch(spec)}{hint}"
        )
    if task_id is None or task_type not in spec:
        return
    count = len(spec[task_type])
    if not 0 <= task_id < count:
        raise ValueError(
            f"task: got index {task_id}, but the cluster has {count} tasks of type {task_type!r} (0..{count - 1}); need "
            "an index in that range"
        )


def _parse_jobs(cluster: Mapping[str, Any]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    for job, addresses in cluster.items():
        is_list = isinstance(addresses, list)
        if not is_list or not all(isinstance(address, str) and address for address in addresses):
            raise ValueError(
                f"{TF_CONFIG}: cluster: got {addresses!r} for {job!r}; need a list of addresses such as ['host:1234']"
            )
    return tuple((job, tuple(addresses)) for job, addresses in cluster.items())


def _parse_text(value: Any, what: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{TF_CONFIG}: {what}: got {value!r}; need a string")
    return value


def _parse_index(index: Any) -> int | None:
    if index is None:
        return None
    try:
        # Schedulers fill it in from their own variables, often as a string.
        number = int(index)
    except (TypeError, ValueError):
        number = -1
    if number < 0 or isinstance(index, bool) or (isinstance(index, float) and index != number):
        raise ValueError(f"{TF_CONFIG}: task index: got {index!r}; need an integer from 0")
    return number


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {value!r}; need a JSON object")
    return value


def _sketch(spec: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{job} ({len(addresses)})" for job, addresses in spec.items()) or "no task at all"
