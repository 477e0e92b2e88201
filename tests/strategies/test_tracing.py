"""Traces: what is in the timeline, what the numbers add up to, and the files."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from collectives.calls import Call
from collectives.flight_recorder import FlightRecorder, Mark
from collectives.reduce_op import ReduceOp
from strategies import (
    SGD,
    MirroredStrategy,
    OneDeviceStrategy,
    ReplicaContextError,
    Strategy,
    Trace,
    Variable,
    all_gather,
    all_reduce,
    current_replica,
    get_replica_context,
    merge_call,
    span,
)
from strategies.tracing.summary import Summary, byte_count, duration
from strategies.tracing.timeline import Kind, Timeline, gaps

MS = 1_000_000


@pytest.fixture
def strategy() -> Iterator[MirroredStrategy]:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def replica_id() -> int:
    replica = current_replica()
    assert replica is not None
    return replica.replica_id_in_sync_group


def training(strategy: Strategy) -> Any:
    """A step with a bit of everything."""
    with strategy.scope():
        w = Variable(np.zeros((16, 4), np.float32), name="w")
        b = Variable(np.zeros(4, np.float32), name="b")
        optimizer = SGD(0.1, name="descent")

    def step() -> None:
        with span("forward", layer=1):
            all_reduce("SUM", np.ones(4, np.float32), name="count")
        all_gather(np.ones((2, 3)), 0)
        optimizer.apply_gradients([(np.ones((16, 4), np.float32), w), (np.ones(4, np.float32), b)])
        merge_call(lambda strategy: None)

    return step


def events_of(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def tracks_of(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    tracks: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        tracks.setdefault(event["tid"], []).append(event)
    return tracks


# ---------------------------------------------------------------------------------------------- the file


def test_the_file_has_a_track_for_each_replica_with_steps_collectives_and_updates(
    strategy: MirroredStrategy, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "trace.json"
    step = training(strategy)
    strategy.run(step)  # before the trace: not in it
    with strategy.trace(path):
        for _ in range(3):
            strategy.run(step)
    strategy.run(step)  # after it
    content = json.loads(path.read_text())
    names = [event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["replica 0 (cpu:0)", "replica 1 (cpu:1)"]
    for replica, events in tracks_of(events_of(path)).items():
        assert [event["name"] for event in events if event["cat"] == "step"] == ["step 0", "step 1", "step 2"]
        reductions = [event for event in events if event["name"] == "all_reduce 'count'"]
        assert len(reductions) == 3
        assert reductions[0]["args"] | {"waited_us": 0, "last": 0} == {
            "seq": 0,
            "bytes": 16,
            "dtype": "float32",
            "shapes": [[4]],
            "op": "SUM",
            "name": "count",
            "detail": "SUM float32 of shape (4,)",
            "waited_us": 0,
            "last": 0,
        }
        (gathering, *_) = [event for event in events if event["name"] == "all_gather"]
        assert gathering["args"]["bytes"] == 48
        updates = [event for event in events if event["name"] == "apply_gradients 'descent'"]
        assert [update["args"] for update in updates] == [
            {"variables": ["w", "b"], "bytes": 4 * 68, "dtype": "float32"}
        ] * 3
        assert sum(event["name"] == "reduce and update" for event in events) == 3
        assert sum(event["name"] == "merge_call" for event in events) == 3
        spans = [event for event in events if event["cat"] == "span"]
        assert [(event["name"], event["args"]) for event in spans] == [("forward", {"layer": 1})] * 3
        assert replica in (0, 1)


def test_what_is_in_a_track_nests_as_perfetto_needs_it(strategy: MirroredStrategy, tmp_path: Path) -> None:
    step = training(strategy)

    def nested() -> None:
        step()
        merge_call(lambda strategy: strategy.run(lambda: all_reduce("SUM", np.ones(3))))

    path = tmp_path / "trace.json"
    with strategy.trace(path):
        for _ in range(5):
            strategy.run(nested)
    for events in tracks_of(events_of(path)).values():
        open_until: list[float] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, event
            open_until.append(end)
        assert sum(event["name"] == "step in a merge function" for event in events) == 5


def test_the_wait_for_a_slow_replica_is_the_time_until_it_came(
    strategy: MirroredStrategy, tmp_path: Path
) -> None:
    def step() -> None:
        if replica_id() == 1:
            time.sleep(0.05)
        all_reduce("SUM", np.ones(2), name="late")

    path = tmp_path / "trace.json"
    with strategy.trace(path) as trace:
        strategy.run(step)
    tracks = tracks_of(events_of(path))
    (wait,) = [event for event in tracks[0] if event["name"] == "wait for replica 1"]
    assert 40_000 < wait["dur"] < 5_000_000
    (late,) = [event for event in tracks[1] if event["cat"] == "communicate"]
    assert wait["ts"] + wait["dur"] == pytest.approx(late["ts"], abs=0.01)
    assert (late["args"]["last"], late["args"]["waited_us"]) == ("replica 1", 0)
    numbers = trace.statistics
    assert numbers.slowest == 1
    assert 0.04 < numbers.replicas[0].waiting < 5
    assert numbers.replicas[1].held_up == pytest.approx(numbers.replicas[0].waiting, abs=0.02)
    assert numbers.replicas[1].computing > 0.04


def test_the_file_is_whole_also_when_the_block_is_left_by_an_error(
    strategy: MirroredStrategy, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"

    def fail() -> None:
        if replica_id() == 1:
            raise KeyError("boom")
        all_reduce("SUM", np.ones(2), name="broken")

    def train() -> None:
        with strategy.trace(path):
            strategy.run(lambda: all_reduce("SUM", np.ones(2)))
            strategy.run(fail)

    with pytest.raises(KeyError, match="boom"):
        train()
    events = events_of(path)
    assert sorted(event["name"] for event in events if event["cat"] == "step") == [
        "step 0",
        "step 0",
        "step 1",
        "step 1",
    ]
    broken = [event for event in events if event["name"] == "all_reduce 'broken'"]
    assert all(event["args"]["failed"] for event in broken)
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]
    with strategy.trace(path):  # and another one can be taken
        strategy.run(lambda: None)
    assert len([event for event in events_of(path) if event["cat"] == "step"]) == 2


def test_a_compressed_file_holds_the_same(strategy: MirroredStrategy, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    with strategy.trace(path):
        strategy.run(lambda: all_reduce("SUM", np.ones(2)))
    assert len([event for event in events_of(path) if event["name"] == "all_reduce"]) == 2


def test_one_replica_has_a_timeline_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with OneDeviceStrategy("cpu:0") as strategy:
        step = training(strategy)
        with strategy.trace(path) as trace:
            for _ in range(2):
                strategy.run(step)
    names = [event["name"] for event in events_of(path)]
    assert names.count("all_reduce 'count'") == names.count("apply_gradients 'descent'") == 2
    (times,) = trace.statistics.replicas
    assert times.waiting == times.held_up == 0
    assert times.updating > 0
    assert trace.statistics.slowest is None


def test_a_trace_without_a_path_is_only_looked_at(strategy: MirroredStrategy, tmp_path: Path) -> None:
    with strategy.trace() as trace:
        strategy.run(lambda: all_reduce("SUM", np.ones(2)))
        assert trace.statistics.num_steps == 1  # so far
        strategy.run(lambda: all_reduce("SUM", np.ones(2)))
    assert trace.statistics.num_steps == 2
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ wrong use


def test_a_file_that_cannot_be_written_is_said_before_the_training(
    strategy: MirroredStrategy, tmp_path: Path
) -> None:
    with (
        pytest.raises(IsADirectoryError, match="which is a folder; need the path of a file"),
        strategy.trace(tmp_path),
    ):
        pytest.fail("the block was entered")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError), strategy.trace(tmp_path / "file" / "trace.json"):
        pytest.fail("the block was entered")
    with strategy.trace():  # it left nothing behind
        strategy.run(lambda: None)


def test_a_second_trace_and_one_in_a_step_are_refused(strategy: MirroredStrategy) -> None:
    with strategy.trace() as outer:
        with pytest.raises(RuntimeError, match="another trace is being taken"), strategy.trace():
            pytest.fail("the block was entered")
        strategy.run(lambda: None)
        with pytest.raises(ReplicaContextError, match="trace: called inside replica"):
            strategy.run(lambda: strategy.trace().__enter__())
    assert outer.statistics.num_steps == 2
    with pytest.raises(ValueError, match="got max_events=0"), strategy.trace(max_events=0):
        pytest.fail("the block was entered")
    with pytest.raises(RuntimeError, match="trace: has not begun"):
        Trace(FlightRecorder([0])).summary()
    with pytest.raises(ValueError, match="got 1 tracks for 2 members"):
        Trace(FlightRecorder([0, 1]), tracks=["one"])


def test_a_trace_that_is_full_ends_by_itself(
    strategy: MirroredStrategy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    with strategy.trace(path, max_events=10) as trace:
        for _ in range(20):
            strategy.run(lambda: all_reduce("SUM", np.ones(2)))
    assert trace.is_cut_short
    assert trace.statistics.num_steps == 5  # a step is two events of each replica
    assert "reached max_events=10" in caplog.text
    assert json.loads(path.read_text())["otherData"]["cut_short"] is True


def test_a_forked_child_does_not_write_its_parents_trace(strategy: MirroredStrategy, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with strategy.trace(path):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                strategy.run(lambda: all_reduce("SUM", np.ones(2)))
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        strategy.run(lambda: None)
    assert len([event for event in events_of(path) if event["cat"] == "step"]) == 2


# ---------------------------------------------------------------------------------------------- no trace


def test_without_a_trace_a_span_does_nothing_and_nothing_is_kept(strategy: MirroredStrategy) -> None:
    step = training(strategy)
    for _ in range(60):
        strategy.run(step)
    with span("outside of a step"):
        pass
    assert strategy.flight_recorder.marks is None
    assert [len(log) for log in strategy.flight_recorder.logs] == [100, 100]


def test_after_a_trace_the_flight_recorder_goes_on_with_its_ring(strategy: MirroredStrategy) -> None:
    with strategy.trace():
        for _ in range(150):
            strategy.run(lambda: all_reduce("SUM", np.ones(2)))
        assert len(strategy.flight_recorder.logs[0]) == 150
    strategy.run(lambda: all_reduce("SUM", np.ones(2)))
    assert [call.step for call in strategy.flight_recorder.calls(0)] == list(range(51, 151))


def test_a_strategys_recorder_numbers_steps_and_dumps(strategy: MirroredStrategy, tmp_path: Path) -> None:
    for _ in range(2):
        strategy.run(lambda: all_reduce("SUM", np.ones(2), name="x"))
    strategy.flight_recorder.dump(tmp_path / "flight.json")
    calls = json.loads((tmp_path / "flight.json").read_text())["calls"]
    assert [(call["step"], call["seq"], call["name"]) for call in calls["replica 1"]] == [
        (0, 0, "x"),
        (1, 0, "x"),
    ]


def test_a_hang_is_explained_by_last_calls_and_the_stack_of_who_is_missing() -> None:
    from strategies import CollectiveTimeoutError, CommunicationOptions

    let_go = threading.Event()

    def wait_for_ever() -> None:
        let_go.wait(20)

    def step() -> None:
        all_reduce("SUM", np.ones(2), name="first")
        if replica_id() == 1:
            wait_for_ever()
        all_reduce("SUM", np.ones(2), name="second")

    options = CommunicationOptions(timeout_seconds=0.3)
    with MirroredStrategy(["cpu:0", "cpu:1"], communication_options=options) as strategy:
        try:
            with pytest.raises(CollectiveTimeoutError, match=r"missing: replica 1") as caught:
                strategy.run(step)
        finally:
            let_go.set()
    notes = "\n".join(caught.value.__notes__)
    assert "seq 1 all_reduce 'second' SUM float64 of shape (2,) WAITING" in notes
    assert "replica 1 is at" in notes
    assert "in wait_for_ever" in notes


# ------------------------------------------------------------------------------------------- the numbers


def by_hand() -> Timeline:
    """Two replicas, one step of 100 ms: replica 1 begins at 10, comes to the all-reduce at 60 and ends at 90."""
    reduce = Call("all_reduce", (ReduceOp.SUM, (np.dtype(np.float32), (250,))), "g")
    update, end = Call("apply_gradients", (), None), Call("the end of apply_gradients", (), None)
    logs = [
        [
            [0, 0, reduce, None, 30 * MS, 65 * MS],
            [0, 1, update, None, 75 * MS, 80 * MS],
            [0, 2, end, None, 82 * MS, 85 * MS],
        ],
        [
            [0, 0, reduce, None, 60 * MS, 64 * MS],
            [0, 1, update, None, 70 * MS, 81 * MS],
            [0, 2, end, None, 84 * MS, 85 * MS],
        ],
    ]
    w = np.zeros(10, np.float32)

    class Named:
        name, size, dtype = "w", w.size, w.dtype

    marks = [
        [
            Mark("span", "forward", 0, 5 * MS, 40 * MS, {}),
            Mark("apply_gradients", "sgd", 0, 70 * MS, 86 * MS, {"variables": (Named(),)}),
            Mark("step", "step", 0, 0, 100 * MS, {"depth": 0}),
        ],
        [
            Mark("apply_gradients", "sgd", 0, 68 * MS, 86 * MS, {"variables": (Named(),)}),
            Mark("step", "step", 0, 10 * MS, 90 * MS, {"depth": 0}),
        ],
    ]
    return Timeline.of([0, 1], logs, marks, 0, 200 * MS)


def test_shares_of_time_are_those_worked_out_by_hand() -> None:
    summary = Summary.of(by_hand())
    assert (summary.total, summary.in_steps, summary.num_steps, summary.slowest) == (0.2, 0.1, 1, 1)
    first, second = summary.replicas
    # Replica 0 waits from 30 to 60 for the all-reduce, which then takes 5; updates from 70 to 86, and waits for nobody there.
    assert (first.waiting, first.communicating, first.updating, first.merging) == pytest.approx(
        (0.030, 0.005, 0.016, 0)
    )
    assert first.computing == pytest.approx(0.1 - 0.051)
    # Replica 1 waits 10 to begin, 5 in the update (70 to 75), and 10 for the end.
    assert (second.waiting, second.communicating, second.updating) == pytest.approx(
        (0.025, 0.004, 0.018 - 0.005)
    )
    assert second.computing == pytest.approx(0.1 - 0.042)
    assert (first.held_up, second.held_up) == pytest.approx((0.005 + 0.010, 0.030))
    assert first.in_steps == pytest.approx(second.in_steps) == pytest.approx(0.1)
    by_kind = {kind.kind: kind for kind in summary.calls}
    assert (by_kind["all_reduce"].count, by_kind["all_reduce"].num_bytes) == (1, 1000)
    assert by_kind["all_reduce"].worked == pytest.approx((0.005 + 0.004) / 2)
    assert by_kind["all_reduce"].waited == pytest.approx(0.030 / 2)
    assert (by_kind["apply_gradients"].count, by_kind["apply_gradients"].num_bytes) == (1, 40)
    assert by_kind["apply_gradients"].worked == pytest.approx((0.016 + 0.013) / 2)


def test_intervals_are_those_worked_out_by_hand() -> None:
    intervals = [i for i in by_hand().intervals() if i.replica == 0]
    assert [(i.kind.value, i.name, i.began // MS, i.ended // MS) for i in intervals] == [
        ("step", "step 0", 0, 100),
        ("compute", "compute", 0, 5),
        ("span", "forward", 5, 40),
        ("compute", "compute", 5, 30),
        ("communicate", "all_reduce 'g'", 30, 65),
        ("wait", "wait for replica 1", 30, 60),
        ("compute", "compute", 65, 70),
        ("update", "apply_gradients 'sgd'", 70, 86),
        ("update", "gather gradients", 70, 75),
        ("update", "reduce and update", 75, 85),
        ("compute", "compute", 86, 100),
    ]
    others = [i for i in by_hand().intervals() if i.replica == 1 and i.kind is Kind.WAIT]
    assert [(i.name, i.began // MS, i.ended // MS) for i in others] == [
        ("wait to begin", 0, 10),
        ("wait for replica 0", 70, 75),
        ("wait for the others' end", 90, 100),
    ]


def test_gaps_are_what_is_not_taken_in_pieces_at_the_cuts() -> None:
    assert gaps(0, 10, []) == [(0, 10)]
    assert gaps(0, 10, [(2, 4), (3, 6)], [5, 8, 8, 20]) == [(0, 2), (6, 8), (8, 10)]
    assert gaps(5, 10, [(0, 7), (9, 12)]) == [(7, 9)]
    assert gaps(5, 10, [(0, 20)]) == []


def test_the_parts_of_each_replicas_time_add_up_in_a_real_trace(strategy: MirroredStrategy) -> None:
    step = training(strategy)
    with strategy.trace() as trace:
        for _ in range(10):
            strategy.run(step)
    summary = trace.statistics
    assert 0 < summary.in_steps <= summary.total
    for times in summary.replicas:
        assert times.in_steps == pytest.approx(summary.in_steps, rel=1e-6)
        assert min(times.computing, times.waiting, times.communicating, times.updating, times.merging) >= 0
    assert {kind.kind: kind.count for kind in summary.calls} == dict.fromkeys(
        ("all_reduce", "all_gather", "apply_gradients", "merge_call"), 10
    )
    steps = [i for i in trace.timeline.intervals() if i.kind is Kind.STEP and i.replica == 0]
    assert all(first.ended <= then.began for first, then in pairwise(steps))


def test_the_tables_show_shares_calls_and_the_slowest() -> None:
    class Fixed:
        timeline = by_hand()

    out = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  # closed with the console
    with out.file:
        out.print(Summary.of(Fixed.timeline).tables("two replicas"))
        text = out.export_text()
    assert "two replicas: 1 steps in 200 ms" in text
    assert "50.0% of the time in steps" in text
    assert "the others waited most for replica 1" in text
    (row,) = [line for line in text.splitlines() if line.startswith("│ 0 ")]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "0",
        "49.0%",
        "30.0%",
        "5.0%",
        "16.0%",
        "0.0%",
        "15.0%",
    ]
    (row,) = [line for line in text.splitlines() if line.startswith("│ all_reduce")]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "all_reduce",
        "1",
        "1000 B",
        "4.5 ms",
        "4.5 ms",
        "15 ms",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (1.5e-6, "1.5 µs"), (0.0123, "12.3 ms"), (2.0, "2 s"), (4321.0, "4,321 s")],
)
def test_durations_are_in_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_are_in_the_unit_that_suits_them() -> None:
    assert [byte_count(n) for n in (0, 1023, 1536, 3 << 20, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3 MiB",
        "5 TiB",
    ]


# ------------------------------------------------------------------------------------------- the picture


def test_a_picture_is_drawn_of_the_steps_asked_for(strategy: MirroredStrategy, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    step = training(strategy)
    with strategy.trace() as trace:
        for _ in range(4):
            strategy.run(step)
    trace.save_plot(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    trace.save_plot(tmp_path / "timeline.svg", range(1))
    assert "<svg" in (tmp_path / "timeline.svg").read_text()
    with pytest.raises(ValueError, match=r"got steps=range\(9, 10\) of a trace with 4 steps"):
        trace.save_plot(tmp_path / "none.png", range(9, 10))
    with strategy.trace() as empty:
        pass
    with pytest.raises(ValueError, match="of a trace with 0 steps"):
        empty.save_plot(tmp_path / "none.png")
    assert empty.statistics.num_steps == 0
    assert get_replica_context() is not None
