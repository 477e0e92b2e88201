"""What a report of all processes' states says in words."""

from __future__ import annotations

import threading
from typing import Any

from collectives.control.hang_report import HangReport, failure_text, stacks_now
from collectives.errors import CollectiveMismatchError, CollectiveTimeoutError

REDUCE = "all_reduce SUM float32 (3,)"


def state(call: str | None = REDUCE, seq: int = 17, waiting: bool = True, **more: Any) -> dict[str, Any]:
    return {"call": call, "seq": seq, "waiting": waiting, "pid": 12, "host": "a", **more}


def report(*states: dict[str, Any], kind: str = "timeout", reporter: int = 0) -> HangReport:
    return HangReport(1, kind, "link 0 seq 17", 60.0, reporter, states)


def test_a_process_that_waits_in_another_call_is_named_with_it() -> None:
    assert failure_text(report(state(), state("barrier", 16))) == (
        "all_reduce SUM float32 (3,): process 1 did not come within 60 s at seq 17, where process 0 waits; process 1 (pid 12, "
        "host a) of 2: it waits in barrier at seq 16; need every process to call it — raise timeout_seconds if one is only slow"
    )


def test_a_process_that_computes_is_named_with_the_line_it_is_at() -> None:
    text = failure_text(
        report(state(), state(None, 16, waiting=False, frame='in File "train.py", line 3 in load'))
    )
    assert 'it is in no collective, at seq 16, but in File "train.py", line 3 in load' in text


def test_silent_and_gone_processes_are_named_with_what_is_known() -> None:
    silent = {"silent": True, "pid": 13, "host": "b", "process": 1}
    gone = {"gone": "it has ended its program", "pid": 14, "host": "b", "process": 2}
    found = report(state(), silent, gone)
    text = failure_text(found)
    assert "processes 1, 2 did not come" in text
    assert (
        "process 1 (pid 13, host b) of 3: it does not answer: it is stopped, or native code holds the GIL"
        in text
    )
    assert "process 2 (pid 14, host b) of 3: it has ended its program" in text
    assert found.missing == (1, 2)
    assert found.calls == (REDUCE, None, None)


def test_a_mismatch_groups_the_processes_by_what_they_call() -> None:
    found = report(
        state(), state("all_reduce SUM float32 (4,)"), state(), state(None, waiting=False), kind="mismatch"
    )
    text = failure_text(found)
    assert text.startswith(
        "seq 17: the calls do not fit together: processes 0, 2 call all_reduce SUM float32 (3,) at seq 17; process 1 calls "
        "all_reduce SUM float32 (4,) at seq 17; process 3 calls nothing (it is in no collective, at seq 17)"
    )
    error = found.error()
    assert isinstance(error, CollectiveMismatchError)
    assert error.calls == (REDUCE, "all_reduce SUM float32 (4,)", REDUCE, None)


def test_the_error_carries_stacks_and_last_calls_those_of_the_late_first() -> None:
    late = state(
        "barrier", 16, stack='Thread MainThread:\n  File "x.py", line 1 in f', recent=["broadcast", "barrier"]
    )
    error = report(state(), late).error()
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == (1,)
    first, second = error.__notes__
    assert first.splitlines() == [
        "process 1 (pid 12, host a): it waits in barrier at seq 16",
        "  its last calls: broadcast; barrier",
        "  Thread MainThread:",
        '    File "x.py", line 1 in f',
    ]
    assert second.startswith("process 0 ")


def test_of_many_processes_only_some_are_named() -> None:
    error = report(state(), *(state("barrier", 16) for _ in range(99))).error()
    assert "processes 1, 2, 3, 4, 5, 6, 7, 8, ... did not come" in str(error)
    assert "and 91 more" in str(error)
    assert error.__notes__[-1] == "and 84 processes more"
    assert len(str(error)) < 2000


def test_when_all_wait_in_the_same_call_nobody_is_blamed() -> None:
    text = failure_text(report(state(), state()))
    assert "all others wait in the same call" in text


def test_a_state_of_nothing_is_put_into_words_too() -> None:
    text = failure_text(
        report({"pid": 1, "host": "a"}, {"pid": 2, "host": "a", "describe_failed": "KeyError()"})
    )
    assert text.startswith("link 0 seq 17: process 1 did not come within 60 s at seq ?")


def test_stacks_are_of_the_program_and_its_replicas_only() -> None:
    done = threading.Event()

    def waits_here() -> None:
        done.wait(10.0)

    threads = [
        threading.Thread(target=waits_here, name=name) for name in ("xpdistribute-replica-1", "somebody-else")
    ]
    for thread in threads:
        thread.start()
    try:
        stacks, frame = stacks_now()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert "Thread MainThread (most recent call first):" in stacks
    assert "Thread xpdistribute-replica-1 (most recent call first):" in stacks
    assert "in waits_here" in stacks
    assert "somebody-else" not in stacks
    assert "test_stacks_are_of_the_program_and_its_replicas_only" in frame
