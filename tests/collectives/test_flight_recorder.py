"""The last calls of each member: what is kept, what it says of a failure, and the file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Communicator,
    FlightRecorder,
    InProcessCommunicator,
    TracedCommunicator,
)
from collectives.flight_recorder import ENVIRONMENT
from collectives.rendezvous import Rendezvous

OnThreads = Callable[[Sequence[Communicator], Callable[[Communicator], Any]], list[Any]]


def a_group(size: int, timeout: float = 20.0) -> tuple[list[InProcessCommunicator], FlightRecorder]:
    meeting = Rendezvous(size, timeout)
    return [InProcessCommunicator(rank, meeting) for rank in range(size)], meeting.recorder


def errors_of(
    ends: Sequence[Communicator], body: Callable[[Communicator], Any]
) -> list[BaseException | None]:
    errors: list[BaseException | None] = [None] * len(ends)

    def run(rank: int) -> None:
        try:
            body(ends[rank])
        except BaseException as error:  # noqa: BLE001  # it is the result
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return errors


def notes_of(error: BaseException | None) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


# ------------------------------------------------------------------------------------------ what is kept


def test_every_collective_has_the_same_number_on_all_ranks_and_its_bytes_op_and_name(
    on_threads: OnThreads,
) -> None:
    ends, recorder = a_group(3)

    def body(end: Communicator) -> None:
        end.all_reduce(np.ones((4, 2), np.float32), name="loss")
        end.barrier()
        end.all_gather(np.ones((end.rank + 1, 2)))
        end.broadcast(np.ones(3, np.int8), root=2)

    on_threads(ends, body)
    for rank in range(3):
        calls = recorder.calls(rank)
        assert [(call.number, call.call.kind, call.state) for call in calls] == [
            (0, "all_reduce", "done"),
            (1, "barrier", "done"),
            (2, "all_gather", "done"),
            (3, "broadcast", "done"),
        ]
        assert [call.call.num_bytes for call in calls] == [32, None, None, 3]
        assert calls[2].num_bytes == 16 * (rank + 1)
        assert (calls[0].call.name, calls[0].call.words) == ("loss", ["SUM", "float32 of shape (4, 2)"])
        assert all(call.began <= call.ended for call in calls)
        assert all(first.ended <= then.began for first, then in pairwise(calls))


def test_a_collective_whose_work_is_shared_is_one_call(on_threads: OnThreads) -> None:
    meeting = Rendezvous(2, 20)
    ends = [InProcessCommunicator(rank, meeting, shared_from=0) for rank in range(2)]
    on_threads(ends, lambda end: [end.all_reduce(np.ones(8)) for _ in range(3)])
    assert [(call.number, call.call.kind) for call in meeting.recorder.calls(1)] == [
        (number, "all_reduce") for number in range(3)
    ]


def test_a_message_is_recorded_on_both_ends(on_threads: OnThreads) -> None:
    ends, recorder = a_group(2)

    def body(end: Communicator) -> None:
        if end.rank == 0:
            end.send(np.ones(2), peer=1, tag=7)
        else:
            end.recv(peer=0, tag=7)

    on_threads(ends, body)
    assert [str(call.call) for rank in range(2) for call in recorder.calls(rank)] == [
        "send 1 tag 7",
        "recv 0 tag 7",
    ]
    assert [call.state for rank in range(2) for call in recorder.calls(rank)] == ["done", "done"]


def test_the_last_hundred_are_kept(on_threads: OnThreads) -> None:
    ends, recorder = a_group(2)
    on_threads(ends, lambda end: [end.barrier() for _ in range(130)])
    assert [call.number for call in recorder.calls(0)] == list(range(30, 130))


def test_records_hold_no_arrays(on_threads: OnThreads) -> None:
    ends, recorder = a_group(2)
    on_threads(ends, lambda end: end.all_reduce(np.ones(1000)))
    assert not any(isinstance(part, np.ndarray) for log in recorder.logs for record in log for part in record)


def test_it_can_be_switched_off(on_threads: OnThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "off")
    ends, recorder = a_group(2)
    on_threads(ends, lambda end: end.barrier())
    assert recorder.calls(0) == []


def test_a_wrong_member_or_capacity_is_named() -> None:
    with pytest.raises(ValueError, match="got rank 5; need one of 0, 1"):
        FlightRecorder([0, 1]).calls(5)
    with pytest.raises(ValueError, match="got capacity=-1"):
        FlightRecorder([0], capacity=-1)


# ---------------------------------------------------------------------------------------------- failures


def test_a_timeout_tells_the_last_calls_of_all_on_every_rank() -> None:
    ends, _ = a_group(2, timeout=0.2)
    let_go = threading.Event()

    def body(end: Communicator) -> None:
        end.all_reduce(np.ones(2), name="first")
        if end.rank == 0:
            let_go.wait(10)
        else:
            try:
                end.all_reduce(np.ones(2), name="second")
            finally:
                let_go.set()
        end.barrier()

    late, timed_out = errors_of(ends, body)
    assert isinstance(timed_out, CollectiveTimeoutError)
    assert isinstance(late, CollectiveTimeoutError)  # when it came at last
    notes = notes_of(timed_out)
    assert notes == notes_of(late)
    rank_0, rank_1 = notes.split("rank 1:")
    assert "seq 0 all_reduce 'first' SUM float64 of shape (2,) took" in rank_0
    assert "second" not in rank_0
    assert "seq 1 all_reduce 'second' SUM float64 of shape (2,) WAITING for 2" in rank_1  # some 200 ms


def test_a_mismatch_tells_the_last_calls_of_all_on_every_rank() -> None:
    ends, _ = a_group(3)

    def body(end: Communicator) -> None:
        end.barrier()
        if end.rank == 1:
            end.broadcast(np.ones(2))
        else:
            end.all_reduce(np.ones(2))

    for error in errors_of(ends, body):
        assert isinstance(error, CollectiveMismatchError)
        assert notes_of(error).count("the last calls of each rank") == 1
        assert notes_of(error).count("seq 0 barrier took") == 3
        assert notes_of(error).count("seq 1 broadcast float64 of shape (2,) root 0 WAITING") == 1
        assert notes_of(error).count("seq 1 all_reduce SUM float64 of shape (2,) WAITING") == 2


def test_the_notes_of_one_ranks_error_are_not_the_others() -> None:
    ends, _ = a_group(2)
    first, second = errors_of(ends, lambda end: end.broadcast(np.ones(2), root=end.rank))
    assert first is not None
    assert second is not None
    first.add_note("only mine")
    assert "only mine" not in notes_of(second)


def test_only_the_last_few_calls_stand_in_the_message(on_threads: OnThreads) -> None:
    ends, recorder = a_group(2)
    on_threads(ends, lambda end: [end.barrier() for _ in range(30)])
    assert [line.split()[3] for line in recorder.last_calls(2).splitlines() if "seq" in line] == [
        "28",
        "29",
        "28",
        "29",
    ]
    assert recorder.last_calls(0).splitlines()[1:] == ["  rank 0:", "  rank 1:"]
    assert FlightRecorder([4], "replica").last_calls().endswith("  replica 4: no call yet")


def test_a_call_that_never_ended_has_failed_once_others_follow() -> None:
    meeting = Rendezvous(2, 20)
    ends = [InProcessCommunicator(rank, meeting) for rank in range(2)]
    meeting.begin()

    def fail(end: Communicator) -> None:
        if end.rank:
            meeting.abort(KeyError("boom"))
        else:
            end.barrier()

    errors = errors_of(ends, fail)
    assert isinstance(errors[0], CollectiveAbortedError)
    assert [call.state for call in meeting.recorder.calls(0)] == ["waiting"]
    meeting.begin()
    assert errors_of(ends, lambda end: end.barrier()) == [None, None]
    assert [call.state for call in meeting.recorder.calls(0)] == ["failed", "done"]
    assert [call.step for call in meeting.recorder.calls(0)] == [0, 1]


# ------------------------------------------------------------------------------------------------- files


def test_a_dump_is_json_of_all_that_is_kept(on_threads: OnThreads, tmp_path: Path) -> None:
    ends, recorder = a_group(2)
    on_threads(ends, lambda end: end.all_reduce(np.ones((3, 2), np.float32), "MAX", name="norm"))
    path = tmp_path / "new" / "flight.json"
    recorder.dump(path)
    content = json.loads(path.read_text())
    assert content["failure"] is None
    assert sorted(content["calls"]) == ["rank 0", "rank 1"]
    (call,) = content["calls"]["rank 1"]
    assert call.pop("milliseconds") > 0
    assert call.pop("began")[:10] == time.strftime("%Y-%m-%d", time.gmtime())
    assert call == {
        "step": 0,
        "seq": 0,
        "kind": "all_reduce",
        "name": "norm",
        "detail": ["MAX", "float32 of shape (3, 2)"],
        "bytes": 24,
        "state": "done",
    }
    assert [entry.name for entry in path.parent.iterdir()] == ["flight.json"]


def test_a_failure_is_written_once_where_the_environment_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "flights"))
    ends, _ = a_group(2)
    errors = errors_of(ends, lambda end: end.broadcast(np.ones(2), root=end.rank))
    (file,) = (tmp_path / "flights").iterdir()
    assert all(f"all of them: {file}" in notes_of(error) for error in errors)
    content = json.loads(file.read_text())
    assert content["failure"].startswith("CollectiveMismatchError: seq 0: the calls do not fit together")
    assert [content["calls"][f"rank {rank}"][0]["detail"][-1] for rank in range(2)] == ["root 0", "root 1"]


def test_a_folder_that_cannot_be_written_does_not_hide_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "file"))
    ends, _ = a_group(2)
    for error in errors_of(ends, lambda end: end.broadcast(np.ones(2), root=end.rank)):
        assert isinstance(error, CollectiveMismatchError)
        assert "the flight recorder could not be written" in notes_of(error)


# ------------------------------------------------------------------------------------------- the wrapper


def test_the_wrapper_records_each_call_of_any_backend(on_threads: OnThreads) -> None:
    plain = InProcessCommunicator.group(2, 20)
    recorders = [FlightRecorder([rank]) for rank in range(2)]
    ends = [TracedCommunicator(end, recorder) for end, recorder in zip(plain, recorders, strict=True)]

    def body(end: Communicator) -> list[Any]:
        array = np.arange(4.0)
        results = [
            end.all_reduce(array, "MEAN", name="m"),
            end.reduce(array),
            end.reduce_scatter(array),
            end.broadcast(array, 1),
            end.all_gather(np.ones((end.rank + 1, 2))),
            end.all_to_all(array),
            end.all_gather_object(end.rank),
        ]
        if end.rank == 0:
            end.send(array, 1)
        else:
            results.append(end.recv(0))
        end.barrier()
        return results

    first, second = on_threads(ends, body)
    np.testing.assert_array_equal(first[0], np.arange(4.0))
    np.testing.assert_array_equal(second[2], [4.0, 6.0])
    assert first[6] == [0, 1]
    kinds = [
        "all_reduce",
        "reduce",
        "reduce_scatter",
        "broadcast",
        "all_gather",
        "all_to_all",
        "all_gather_object",
    ]
    for rank, middle in enumerate(("send", "recv")):
        calls = recorders[rank].calls(rank)
        assert [call.call.kind for call in calls] == [*kinds, middle, "barrier"]
        assert [call.number for call in calls] == [0, 1, 2, 3, 4, 5, 6, 7, 7]
        assert all(call.state == "done" for call in calls)
    sizes = [call.num_bytes or call.call.num_bytes for call in recorders[1].calls(1)]
    assert sizes == [32, 32, 32, 32, 32, 32, None, None, None]
    assert recorders[0].calls(0)[4].num_bytes == 16


def test_the_wrapper_needs_a_recorder_of_its_rank() -> None:
    (end,) = InProcessCommunicator.group(1)
    with pytest.raises(ValueError, match=r"got a recorder of ranks 3; need one that has rank 0 among them"):
        TracedCommunicator(end, FlightRecorder([3]))


def test_a_call_that_fails_stays_open_in_the_wrappers_record() -> None:
    plain = InProcessCommunicator.group(2, 20)
    recorder = FlightRecorder([0, 1])
    ends = [TracedCommunicator(end, recorder) for end in plain]
    errors_of(ends, lambda end: end.broadcast(np.ones(2), root=end.rank))
    assert [recorder.calls(rank)[0].state for rank in range(2)] == ["waiting", "waiting"]
