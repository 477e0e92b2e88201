"""Printing and progress: once, not once for each replica (users' report B79)."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest
from rich.console import Console

import strategies


def replica_id() -> int:
    replica = strategies.current_replica()
    assert replica is not None
    return replica.replica_id_in_sync_group


@pytest.fixture
def strategy() -> Iterator[strategies.MirroredStrategy]:
    with strategies.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        yield strategy


def test_in_a_step_one_replica_prints(
    strategy: strategies.MirroredStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy.run(lambda: strategies.print("hello", 1, sep="-"))
    assert capsys.readouterr().out == "hello-1\n"


def test_on_request_all_replicas_print_with_their_number_before_each_line(
    strategy: strategies.MirroredStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy.run(lambda: strategies.print("a\nb", all_ranks=True))
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"[rank {rank}] {letter}" for rank in range(3) for letter in "ab"
    ]


def test_outside_of_steps_it_prints_as_the_built_in_does(
    strategy: strategies.MirroredStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    strategies.print()
    with strategy.scope():
        strategies.print(None, 2.5, end="!")
    file = io.StringIO()
    strategies.print("there", file=file, flush=True)
    assert (capsys.readouterr().out, file.getvalue()) == ("\nNone 2.5!", "there\n")
    assert strategy.is_chief


def test_a_per_replica_value_is_printed_with_all_of_its_components(
    strategy: strategies.MirroredStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    strategies.print(strategy.run(lambda: np.int64(7) + replica_id()))
    assert capsys.readouterr().out == "PerReplica(0: np.int64(7), 1: np.int64(8), 2: np.int64(9))\n"


def test_progress_says_at_the_end_how_far_it_came_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with strategies.Progress(3, "training", console=Console(file=out)) as progress:
        for step in progress.over(range(3)):
            assert progress.completed == step
        progress.advance(0, loss=0.123456)
    assert out.getvalue().startswith("training  3 steps  loss 0.1235  ")
    assert out.getvalue().endswith(" steps/s\n")


def test_progress_on_a_terminal_shows_the_numbers() -> None:
    out = io.StringIO()
    with strategies.Progress(
        2, "training", console=Console(file=out, force_terminal=True, width=100)
    ) as progress:
        progress.advance(loss=0.5)
        progress.advance(loss=0.25)
    assert "2/2" in out.getvalue()
    assert "loss 0.25" in out.getvalue()


def test_progress_refuses_what_a_logger_would_refuse(strategy: strategies.MirroredStrategy) -> None:
    each = strategy.run(lambda: np.ones(()) * replica_id())
    out = io.StringIO()
    with strategies.Progress(console=Console(file=out)) as progress:
        with pytest.raises(ValueError, match=r"Progress.advance: loss is a PerReplica.*reduce='SUM'"):
            progress.advance(loss=each)
        progress.advance(loss=each, reduce="SUM")
        with pytest.raises(strategies.ReplicaContextError, match="called in replica"):
            strategy.run(progress.advance)
    assert "loss 3 " in out.getvalue()
    with pytest.raises(ValueError, match="got total=-1"):
        strategies.Progress(-1)
