"""A process finds its place in the environment, whoever started it, and what can't be is refused with its name."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from collectives.cluster_environment import ClusterKind, ClusterPlace, find_place, tf_config_changed
from collectives.device_map import check_device_map
from collectives.node_list import expand_counts, expand_node_list

ROOT = Path(__file__).parents[2]
Environment = dict[str, str]


def tf_config(workers: int = 2, index: int = 0, kind: str = "worker", **more: list[str]) -> str:
    cluster = {"worker": [f"h{i}:1" for i in range(workers)], **more}
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def open_mpi(rank: int = 1, size: int = 4) -> Environment:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_RANK": str(rank),
    }


SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[01-03]",
}
OURS = {"XPDISTRIBUTE_HUB": "127.0.0.1:5", "XPDISTRIBUTE_SIZE": "4", "XPDISTRIBUTE_TOKEN": "t"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}


@pytest.mark.parametrize(
    ("environ", "kind", "process", "count", "local"),
    [
        ({}, ClusterKind.ALONE, 0, 1, (0, 1)),
        (open_mpi(), ClusterKind.OPEN_MPI, 1, 4, (1, 2)),
        (HYDRA, ClusterKind.HYDRA, 2, 3, (2, 3)),
        (SRUN, ClusterKind.SLURM, 3, 5, (1, 2)),
        ({**OURS, **open_mpi(3)}, ClusterKind.LAUNCHER, 3, 4, (1, 2)),
        ({**OURS, **HYDRA}, ClusterKind.LAUNCHER, 2, 4, (2, 3)),
        ({**OURS, **open_mpi(0), "XPDISTRIBUTE_RANK": "2"}, ClusterKind.LAUNCHER, 2, 4, (None, None)),
        ({**SRUN, **open_mpi()}, ClusterKind.OPEN_MPI, 1, 4, (1, 2)),
        ({"TF_CONFIG": tf_config(2, 1)}, ClusterKind.TF_CONFIG, 1, 2, (None, None)),
        ({"TF_CONFIG": tf_config(2, 1, chief=["c:1"])}, ClusterKind.TF_CONFIG, 2, 3, (None, None)),
        ({"TF_CONFIG": tf_config(2, 0, "evaluator", evaluator=["e:1"])}, ClusterKind.TF_CONFIG, 0, 1, (0, 1)),
        ({"TF_CONFIG": " "}, ClusterKind.ALONE, 0, 1, (0, 1)),
        # srun with its plugin pmi2, and Hydra that srun has started.
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "5"}, ClusterKind.SLURM, 3, 5, (1, 2)),
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "8"}, ClusterKind.HYDRA, 1, 8, (None, None)),
        # sbatch and salloc without srun: the job has tasks, and this is one process.
        (
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-4]"},
            ClusterKind.ALONE,
            0,
            1,
            (0, 1),
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"},
            ClusterKind.ALONE,
            0,
            1,
            (0, 1),
        ),
    ],
    ids=lambda value: getattr(value, "value", None),
)
def test_a_process_finds_its_place(
    environ: Environment, kind: ClusterKind, process: int, count: int, local: tuple[int | None, int | None]
) -> None:
    place = find_place(environ)
    assert (place.kind, place.process, place.num_processes) == (kind, process, count)
    assert (place.local_process, place.num_local_processes) == local
    assert place.is_alone == (count == 1)
    assert place.host


def test_the_chief_is_process_0_or_the_one_that_tf_config_names() -> None:
    assert find_place({}).is_chief
    assert find_place(open_mpi(0)).is_chief
    assert not find_place(open_mpi(1)).is_chief
    assert find_place({"TF_CONFIG": tf_config(2, 0, "chief", chief=["c:1"])}).is_chief
    assert not find_place({"TF_CONFIG": tf_config(2, 0, chief=["c:1"])}).is_chief
    assert find_place({"TF_CONFIG": tf_config(2, 0, "evaluator", evaluator=["e:1"])}).is_chief
    assert not find_place({"TF_CONFIG": tf_config(2, 0, "ps", ps=["p:1"])}).is_chief


def test_the_hub_of_a_job_is_known_where_the_starter_says_enough() -> None:
    assert find_place({**OURS, **open_mpi()}).hub == "127.0.0.1:5"
    assert find_place({"TF_CONFIG": tf_config(2, 1)}).hub == "h0:1"
    assert find_place({"TF_CONFIG": tf_config(2, 1, chief=["c:9"])}).hub == "c:9"
    assert find_place(open_mpi()).hub is None
    slurm = find_place(SRUN)
    assert slurm.hosts == ("node01", "node02", "node03")
    assert slurm.hub is not None
    assert slurm.hub.startswith("node01:")
    # All tasks come to the same port without talking, and another step or job has another one.
    assert find_place({**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).hub == slurm.hub
    assert find_place({**SRUN, "SLURM_STEP_ID": "1"}).hub != slurm.hub
    assert find_place({**SRUN, "XPDISTRIBUTE_PORT": "999"}).hub == "node01:999"


def test_the_host_can_be_told() -> None:
    assert find_place({**open_mpi(), "XPDISTRIBUTE_HOST": "imitated"}).host == "imitated"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1"}, ["OMPI_COMM_WORLD_RANK: got 1", "OMPI_COMM_WORLD_SIZE is not set"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_SIZE: got 2", "OMPI_COMM_WORLD_RANK is not set"]),
        (open_mpi(4, 4), ["OMPI_COMM_WORLD_RANK: got 4", "OMPI_COMM_WORLD_SIZE is 4", "0 to 3"]),
        ({**open_mpi(), "OMPI_COMM_WORLD_RANK": "one"}, ["OMPI_COMM_WORLD_RANK: got 'one'", "whole number"]),
        ({**open_mpi(), "OMPI_COMM_WORLD_RANK": "-1"}, ["OMPI_COMM_WORLD_RANK: got '-1'", "xpdistribute run"]),
        ({"PMI_RANK": "0", "PMI_SIZE": "0"}, ["PMI_SIZE: got 0"]),
        ({**OURS, "XPDISTRIBUTE_SIZE": ""}, ["XPDISTRIBUTE_SIZE", "looked at", "XPDISTRIBUTE_RANK"]),
        (OURS, ["XPDISTRIBUTE_SIZE: got 4", "PMI_RANK"]),
        ({**OURS, "XPDISTRIBUTE_RANK": "4"}, ["XPDISTRIBUTE_RANK: got 4", "XPDISTRIBUTE_SIZE is 4"]),
        (
            {**OURS, "XPDISTRIBUTE_RANK": "6", "XPDISTRIBUTE_SPARES": "2"},
            ["XPDISTRIBUTE_RANK: got 6", "XPDISTRIBUTE_SIZE is 4 and XPDISTRIBUTE_SPARES 2", "0 to 5"],
        ),
        ({**OURS, "XPDISTRIBUTE_RANK": "0", "XPDISTRIBUTE_SPARES": "x"}, ["XPDISTRIBUTE_SPARES: got 'x'"]),
        ({"XPDISTRIBUTE_RANK": "4"}, ["XPDISTRIBUTE_RANK: got '4'", "XPDISTRIBUTE_HUB is not set"]),
        ({**SRUN, "SLURM_PROCID": "5"}, ["SLURM_PROCID: got 5", "SLURM_STEP_NUM_TASKS is 5"]),
        ({k: v for k, v in SRUN.items() if "NODELIST" not in k}, ["SLURM_STEP_NODELIST", "5 tasks"]),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, ["NODELIST", "n[1-"]),
        ({**SRUN, "XPDISTRIBUTE_PORT": "70000"}, ["XPDISTRIBUTE_PORT", "70000"]),
        (
            {**open_mpi(), "OMPI_COMM_WORLD_LOCAL_RANK": "2"},
            ["OMPI_COMM_WORLD_LOCAL_RANK: got 2", "OMPI_COMM_WORLD_LOCAL_SIZE is 2"],
        ),
        ({"TF_CONFIG": tf_config(2, 2)}, ["index 2", "2 tasks", "0..1"]),
        ({"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}})}, ["TF_CONFIG", "'task'"]),
        ({**open_mpi(1, 4), "TF_CONFIG": tf_config(2, 1)}, ["TF_CONFIG: got 2", "Open MPI says 4", "OMPI_COMM_WORLD_SIZE"]),
        ({**open_mpi(1, 2), "TF_CONFIG": tf_config(2, 0)}, ["TF_CONFIG", "process 0", "process 1"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_can_not_be_is_refused_with_its_name(environ: Environment, words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # its words are looked at below
        find_place(environ)
    for word in words:
        assert word in str(raised.value)


def test_tf_config_may_stand_beside_what_agrees_with_it() -> None:
    place = find_place({**open_mpi(1, 2), "TF_CONFIG": tf_config(2, 1)})
    assert (place.kind, place.process) == (ClusterKind.OPEN_MPI, 1)
    assert place.task is not None
    assert place.task.task_id == 1


def test_a_place_says_who_told_it() -> None:
    assert str(find_place(open_mpi())) == (
        "process 1 of 4, as Open MPI says (OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4)"
    )
    assert str(find_place({})) == "process 0 of 1, as nobody says"


# ---------------------------------------------------------------- TF_CONFIG that changes


def test_a_tf_config_that_came_too_late_is_noticed() -> None:
    words = tf_config_changed(find_place({}), {"TF_CONFIG": tf_config(2, 0)})
    assert words is not None
    assert "TF_CONFIG" in words
    assert "1 worker," in words


@pytest.mark.parametrize(
    ("before", "now", "is_told"),
    [
        ({}, {}, False),
        ({"TF_CONFIG": tf_config(2, 1)}, {"TF_CONFIG": tf_config(2, 1) + " "}, False),
        ({"TF_CONFIG": tf_config(2, 1)}, {"TF_CONFIG": tf_config(3, 1)}, True),
        ({"TF_CONFIG": tf_config(2, 1)}, {}, True),
        ({}, {"TF_CONFIG": "{"}, True),
        (open_mpi(), {}, False),
        (open_mpi(1, 2), {"TF_CONFIG": tf_config(2, 1)}, True),
    ],
    ids=str,
)
def test_only_changes_that_matter_are_noticed(before: Environment, now: Environment, is_told: bool) -> None:
    assert (tf_config_changed(find_place(before), now) is not None) == is_told


# ---------------------------------------------------------------- Slurm's texts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("a[1-2],login,b[09-10]-ib", ["a1", "a2", "login", "b09-ib", "b10-ib"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_a_node_list_is_expanded(text: str, names: list[str]) -> None:
    assert list(expand_node_list(text)) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n]1[", "n[a-b]", "n[3-1]", "n[]", "n[1-99999999]", "n[[1]]"])
def test_a_node_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SLURM_JOB_NODELIST"):
        expand_node_list(text)


def test_tasks_per_node_are_expanded() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("") == []


# ---------------------------------------------------------------- two ranks on one GPU


def test_two_ranks_on_one_gpu_are_named_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"ranks 0 and 1 share GPU-a on h0") as raised:
        check_device_map([("h0", "GPU-a"), ("h0", "GPU-a")])
    assert "local rank" in str(raised.value)
    assert "NCCL_MULTI_RANK_GPU_ENABLE" in str(raised.value)
    check_device_map([("h0", "GPU-a"), ("h1", "GPU-a"), ("h0", "GPU-b")])
    check_device_map([])


# ---------------------------------------------------------------- for real

PROGRAM = """
from collectives.cluster_environment import find_place
p = find_place()
print(p.kind.name, p.process, p.num_processes, p.local_process, p.num_local_processes, p.hub is not None, p.is_chief, flush=True)
"""


def environment(**more: str) -> dict[str, Any]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi]")
@pytest.mark.parametrize(
    ("through_us", "expected"),
    [
        (False, ["OPEN_MPI 0 2 0 2 False True", "OPEN_MPI 1 2 1 2 False False"]),
        (True, ["LAUNCHER 0 2 0 2 True True", "LAUNCHER 1 2 1 2 True False"]),
    ],
    ids=["mpiexec", "xpdistribute run"],
)
def test_ranks_find_their_places_whoever_starts_them(through_us: bool, expected: list[str]) -> None:
    ours = [sys.executable, "-m", "xpdistribute", "run", "-n", "2"]
    ours += ["--all-output"] if through_us else ["--dry-run"]
    done = subprocess.run(
        [*ours, sys.executable, "-c", PROGRAM],
        env=environment(),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=30,
        check=True,
    )
    if not through_us:  # the command that it prints is plain mpiexec
        done = subprocess.run(
            ["sh", "-c", done.stdout],
            env=environment(),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=30,
            check=True,
        )
    assert sorted(done.stdout.splitlines()) == expected


def test_a_place_can_not_be_changed() -> None:
    with pytest.raises(AttributeError):
        find_place({}).process = 1  # type: ignore[misc]  # this is what is refused
    assert find_place({}) == ClusterPlace(
        ClusterKind.ALONE, 0, 1, 0, 1, find_place({}).host, (find_place({}).host,)
    )


def test_processes_beyond_those_that_compute_are_spares() -> None:
    environ = {**OURS, "XPDISTRIBUTE_SPARES": "2"}
    places = [find_place({**environ, "XPDISTRIBUTE_RANK": str(rank)}) for rank in range(6)]
    assert [place.is_spare for place in places] == [False] * 4 + [True] * 2
    assert {place.num_processes for place in places} == {4}
    assert str(places[5]).startswith("spare process 5 of 4")
