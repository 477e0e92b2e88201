"""What is shown of a job of several processes is shown once, and names replicas by their numbers among all."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strategies as xd
from tests.jobs import run_in_job, run_script, strategy_of


def test_the_chief_alone_prints_unless_all_are_asked() -> None:
    """B79."""

    def body() -> str:
        s = strategy_of(2)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            xd.print("hello")
            with s.scope():
                xd.print("in scope")
            s.run(lambda: xd.print("in a step"))
            xd.print("rank", all_ranks=True)
            s.run(lambda: xd.print("replica", all_ranks=True))
        return out.getvalue()

    first, second = run_in_job(2, body)
    assert first.splitlines()[:4] == ["hello", "in scope", "in a step", "[rank 0] rank"]
    assert sorted(first.splitlines()[4:]) == ["[rank 0] replica", "[rank 1] replica"]
    assert second.splitlines()[0] == "[rank 1] rank"
    assert sorted(second.splitlines()[1:]) == ["[rank 2] replica", "[rank 3] replica"]


def test_the_chief_alone_logs_and_shows_progress(tmp_path: Path) -> None:
    def body() -> tuple[bool, str, int]:
        s = strategy_of(1)
        out = io.StringIO()
        from rich.console import Console

        path = tmp_path / "log.jsonl"
        with xd.ScalarLogger(path) as log, xd.Progress(2, console=Console(file=out)) as progress:
            for step in range(2):
                loss = s.reduce("MEAN", s.run(lambda: np.float64(s.worker_id)), None)
                log.log(step, {"loss": loss})
                progress.advance(loss=loss)
        return s.is_chief, out.getvalue(), s.worker_id

    chief, other = run_in_job(2, body)
    assert (chief[0], chief[2], other[0], other[2]) == (True, 0, False, 1)
    assert "2 steps" in chief[1]
    assert other[1] == ""
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(0, 0.5), (1, 0.5)]
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_tracks_of_a_trace_have_the_numbers_among_all_replicas(tmp_path: Path) -> None:
    def body() -> list[str]:
        s = strategy_of(2)
        path = tmp_path / f"trace{s.worker_id}.json"
        with s.trace(path) as trace:
            s.run(lambda: xd.all_reduce("SUM", np.ones(2)))
        assert trace.timeline is not None
        assert len(s.flight_recorder.calls(2 * s.worker_id + 1)) == 1
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return sorted({e["args"]["name"] for e in events if e["name"] == "thread_name"})

    first, second = run_in_job(2, body)
    assert [name.split(" (")[0] for name in first] == ["replica 0", "replica 1"]
    assert [name.split(" (")[0] for name in second] == ["replica 2", "replica 3"]


def test_messages_name_replicas_by_their_numbers_among_all() -> None:
    def body() -> str:
        s = strategy_of(2, timeout=5.0)
        if s.worker_id == 0:
            return ""

        def step() -> None:
            context = xd.get_replica_context()
            assert context is not None
            context.all_reduce("SUM", np.ones(1 + context.local_replica_id))

        with pytest.raises(xd.CollectiveMismatchError) as caught:
            s.run(step)
        return str(caught.value)

    _, text = run_in_job(2, body)
    assert "replica 2 calls all_reduce" in text
    assert "replica 3 calls all_reduce" in text


@pytest.mark.slow  # PyTorch is imported in both processes
def test_a_torch_module_trains_as_with_as_many_replicas_in_one_process() -> None:
    pytest.importorskip("torch")
    program = """
import torch
def train(s):
    torch.manual_seed(s.num_workers if hasattr(s, "num_workers") else 0)  # the chief's parameters count
    with s.scope():
        optimizer = xd.Adam(0.1)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        rng = np.random.default_rng(0)
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.from_numpy(rng.normal(size=p.shape).astype("f4")) + getattr(s, "worker_id", 0))
        model = xd.ReplicatedModule(net, optimizer, num_threads=1)
    def step():
        r = xd.get_replica_context().replica_id_in_sync_group
        x = torch.from_numpy(np.random.default_rng(r).normal(size=(8, 4)).astype("f4"))
        model.zero_grad()
        model(x).square().mean().backward()
        optimizer.apply_gradients(model.gradients())
    for _ in range(3):
        s.run(step)
    xd.assert_replicas_equal(model.trainable_variables)
    return b"".join(v.read_value().tobytes() for v in model.trainable_variables).hex()
mine = train(s)
one = train(xd.MirroredStrategy(["cpu:0", "cpu:1"])) if s.is_chief else mine
print(mine == one, mine)
"""
    ended = run_script(2, program)
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert ended[0].out == ended[1].out
    assert ended[0].out.startswith("True ")


def test_one_process_is_a_job_of_one() -> None:
    def body() -> Any:
        s = strategy_of(2)
        assert (s.is_chief, s.worker_id, s.num_workers, s.num_replicas_in_sync) == (True, 0, 1, 2)
        return s.reduce("SUM", s.run(lambda: np.ones(2)), None).tolist()

    assert run_in_job(1, body) == [[2.0, 2.0]]
