"""TF_CONFIG is read as TensorFlow reads it, and what can't work is refused at once."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from collectives.clusters import ClusterTask

WORKERS = {"worker": ["h1:1", "h2:1"]}
FULL = {"chief": ["h0:1"], "worker": ["h1:1", "h2:1"], "ps": ["h3:1"]}


def read(cluster: Any = None, task_type: Any = None, index: Any = None, **others: Any) -> ClusterTask:
    config = dict(others)
    if cluster is not None:
        config["cluster"] = cluster
    if task_type is not None:
        config["task"] = {"type": task_type} if index is None else {"type": task_type, "index": index}
    return ClusterTask.from_tf_config({"TF_CONFIG": json.dumps(config)})


def test_a_worker_of_a_cluster_with_a_chief_comes_after_it() -> None:
    task = read(FULL, "worker", 1)
    assert task.cluster_spec == FULL
    assert (task.task_type, task.task_id, task.rpc_layer) == ("worker", 1, None)
    assert (task.worker_count, task.id_in_cluster, task.is_chief) == (3, 2, False)
    assert task.leader == "/job:chief/replica:0/task:0"
    assert task.master == "h2:1"


def test_the_chief_is_number_0() -> None:
    task = read(FULL, "chief", 0)
    assert (task.is_chief, task.id_in_cluster, task.worker_count) == (True, 0, 3)


def test_without_a_chief_worker_0_is_it() -> None:
    first, second = read(WORKERS, "worker", 0), read(WORKERS, "worker", 1)
    assert (first.is_chief, second.is_chief) == (True, False)
    assert (first.id_in_cluster, second.id_in_cluster) == (0, 1)
    assert first.leader == second.leader == "/job:worker/replica:0/task:0"
    assert first.worker_count == 2


def test_an_evaluator_stands_apart() -> None:
    task = read({"worker": ["h1:1"], "evaluator": ["h2:1"]}, "evaluator", 0)
    assert (task.is_chief, task.leader, task.worker_count, task.id_in_cluster) == (True, "", 1, 0)
    unnamed = read(WORKERS, "evaluator", 0)
    assert (unnamed.is_chief, unnamed.worker_count) == (True, 1)
    with pytest.raises(ValueError, match="evaluator 0 has no address"):
        _ = unnamed.master


def test_a_parameter_server_does_not_compute() -> None:
    task = read(FULL, "ps", 0)
    assert (task.is_chief, task.leader) == (False, "/job:chief/replica:0/task:0")
    for role in ("worker_count", "id_in_cluster"):
        with pytest.raises(ValueError, match=f"{role}: this task is a parameter server"):
            getattr(task, role)


def test_servers_alone_have_no_leader() -> None:
    with pytest.raises(ValueError, match=r"ps \(1\)"):
        _ = read({"ps": ["h:1"]}, "ps", 0).leader


@pytest.mark.parametrize("text", ["", "  ", "{}"])
def test_without_tf_config_a_process_is_alone(text: str) -> None:
    task = ClusterTask.from_tf_config({"TF_CONFIG": text})
    assert (task.task_type, task.task_id, task.cluster_spec, task.master) == (None, None, {}, "")
    assert (task.is_chief, task.worker_count, task.id_in_cluster, task.leader) == (True, 1, 0, "")
    assert task == ClusterTask.from_tf_config({}) == ClusterTask()


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": WORKERS, "task": {"type": "worker", "index": 1}}))
    task = ClusterTask.from_tf_config()
    assert task == read(WORKERS, "worker", 1)
    monkeypatch.delenv("TF_CONFIG")
    assert task.task_id == 1
    assert ClusterTask.from_tf_config() == ClusterTask()


def test_a_task_is_immutable_and_hashable() -> None:
    task = read(WORKERS, "worker", 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.task_id = 1  # type: ignore[misc]  # that is the point
    task.cluster_spec["worker"].append("h3:1")
    assert task.cluster_spec == WORKERS
    assert len({task, read(WORKERS, "worker", 0)}) == 1


def test_the_protocol_stands_before_the_master_address() -> None:
    task = read(WORKERS, "worker", 1, rpc_layer="grpc")
    assert (task.rpc_layer, task.master) == ("grpc", "grpc://h2:1")


def test_a_single_task_needs_no_master() -> None:
    assert read({"worker": ["h1:1"]}, "worker", 0).master == ""


def test_a_session_master_takes_the_place_of_the_address() -> None:
    assert read(WORKERS, "worker", 1, session_master="h9:9").master == "h9:9"


@pytest.mark.parametrize("index", ["1", 1.0, 1], ids=repr)
def test_an_index_may_be_written_as_text(index: Any) -> None:
    assert read(WORKERS, "worker", index).task_id == 1


@pytest.mark.parametrize("index", ["one", -1, 0.5, True, [1], ""])
def test_an_index_that_is_no_number_is_refused(index: Any) -> None:
    with pytest.raises(ValueError, match=r"task index: got .*; need an integer from 0"):
        read(WORKERS, "worker", index)


def test_a_cluster_without_a_task_is_read_but_has_no_role() -> None:
    for task in (read(WORKERS), read(WORKERS, "worker")):
        assert task.task_id is None
        for role in ("is_chief", "worker_count", "id_in_cluster", "leader", "master"):
            with pytest.raises(ValueError, match=rf"{role}: .*'type': \.\.\., 'index'"):
                getattr(task, role)


# https://github.com/tensorflow/tensorflow/issues/39922, https://github.com/tensorflow/adanet/issues/76,
# https://github.com/tensorflow/tensorflow/issues/53098
@pytest.mark.parametrize(
    ("cluster", "task_type", "index", "words"),
    [
        (WORKERS, "worker", 2, ["index 2", "2 tasks", "(0..1)"]),
        ({"worker": ["h:1"]}, "worker", 7, ["index 7", "1 tasks", "(0..0)"]),
        (WORKERS, "chief", 0, ["'chief'", "worker (2)"]),
        (WORKERS, "master", 0, ["'master'", "'chief'"]),
        ({"master": ["h:1"]}, "master", 0, ["'master'", "'chief'"]),
        ({"worker": ["h:1"], "helper": ["i:1"]}, "worker", 0, ["'helper'", "chief, worker, ps, evaluator"]),
        ({"chief": ["h:1", "i:1"]}, "chief", 0, ["2 tasks of type 'chief'", "one at most"]),
        ({"worker": ["w:1"], "evaluator": ["h:1", "i:1"]}, "worker", 0, ["2 tasks of type 'evaluator'"]),
        ({"worker": ["h:1", "h:1"]}, "worker", 0, ["'h:1'", "worker 0", "worker 1"]),
        ({"chief": ["h:1"], "worker": ["h:1"]}, "worker", 0, ["'h:1'", "chief 0", "worker 0"]),
        ({"worker": []}, "worker", 0, ["no address", "'worker'"]),
        ({"worker": "h:1"}, "worker", 0, ["'h:1'", "list of addresses"]),
        ({"worker": [1]}, "worker", 0, ["[1]", "list of addresses"]),
        (["h:1"], "worker", 0, ["cluster", "JSON object"]),
        (None, "worker", 0, ["'worker'", "no task at all"]),
        (WORKERS, 3, 0, ["task type", "3", "string"]),
    ],
)
def test_a_cluster_that_can_not_work_is_refused_at_once(
    cluster: Any, task_type: Any, index: Any, words: list[str]
) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the words are the test
        read(cluster, task_type, index)
    assert not [word for word in words if word not in str(raised.value)], str(raised.value)


@pytest.mark.parametrize("text", ["{not json", "[1, 2]", '"worker"', '{"task": 3}'])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"TF_CONFIG: .*need .*object"):
        ClusterTask.from_tf_config({"TF_CONFIG": text})
