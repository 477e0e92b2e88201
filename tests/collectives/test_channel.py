"""Processes and their hub: real processes, real signals."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collectives.control.channel import Channel
from collectives.control.descriptions import Descriptions
from collectives.control.exit_hooks import followed
from collectives.control.votes import Vote
from collectives.errors import CollectiveAbortedError, CollectiveTimeoutError, PeerFailedError
from tests.mpi_runner import finish_ranks
from xpdistribute.hub import Hub

TOKEN = "secret"
TIMEOUT = 20.0

PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
from collectives.control.channel import Channel
from collectives.errors import *
address, process, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
connect = lambda **more: Channel.connect(address, "secret", process, host="here", size=size, timeout=20.0, **more)
"""


class Started:
    """A process that a test has started."""

    def __init__(self, hub: Hub, process: int, size: int, body: str) -> None:
        self.popen = subprocess.Popen(
            [
                sys.executable,
                "-u",
                "-c",
                PRELUDE + textwrap.dedent(body),
                hub.address,
                str(process),
                str(size),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def end(self, seconds: float = TIMEOUT) -> tuple[int, str, str]:
        """Status, stdout, stderr."""
        out, err = self.popen.communicate(timeout=seconds)
        return self.popen.returncode, out, err


Start = Callable[..., Started]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Started] = []

    def begin(hub: Hub, process: int, size: int, body: str) -> Started:
        made.append(Started(hub, process, size, body))
        return made[-1]

    yield begin
    for one in made:
        one.popen.kill()
        one.popen.communicate()


@pytest.fixture
def hubs() -> Iterator[Callable[..., Hub]]:
    with contextlib.ExitStack() as stack:
        yield lambda size, **options: stack.enter_context(Hub(size, TOKEN, **options).start())


@pytest.fixture
def channels() -> Iterator[Callable[..., Channel]]:
    """Makes channels of this process, each as if it were a process of its own."""
    made: list[Channel] = []

    def make(hub: Hub, process: int | None, **options: Any) -> Channel:
        one = Channel.connect(hub.address, TOKEN, process, host="here", **{"timeout": TIMEOUT, **options})
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def eventually(condition: Callable[[], Any], seconds: float = 5.0) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + seconds, "it has not come about"
        time.sleep(0.002)
    return time.monotonic() - start


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns, or raises, all running at the same time."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001  # it is a result
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    return results


# ----------------------------------------------------------------------- gathers


def test_eight_processes_gather(hubs: Callable[..., Hub], start: Start) -> None:
    hub = hubs(8)
    body = """
    channel = connect()
    channel.install_hooks()
    time.sleep(0.05 * (process % 3))
    print(channel.gather("first", {"process": process}, 20.0))
    print(channel.gather("second", process ** 2, 20.0))
    """
    ended = [one.end() for one in [start(hub, process, 8, body) for process in range(8)]]
    expected = f"{[{'process': p} for p in range(8)]}\n{[p**2 for p in range(8)]}\n"
    assert ended == [(0, expected, "")] * 8
    assert hub.wait(5.0)
    assert hub.failures == ()


def test_votes_are_told_to_all_and_forgotten_when_the_job_goes_on(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    hub = hubs(2, elastic=True)
    first, second = (channels(hub, process) for process in range(2))
    first.votes.cast("link", 0, Vote(3, succeeded=False))
    together(lambda: first.gather("then", 1, 5.0), lambda: second.gather("then", 1, 5.0))
    assert [one.votes.outcome("link", 3, {0, 1}) for one in (first, second)] == [False, False]
    together(lambda: first.regroup(None, False, 5.0), lambda: second.regroup(None, False, 5.0))
    assert [one.votes.outcome("link", 3, {0, 1}) for one in (first, second)] == [None, None]


def test_a_gather_times_out_on_all_who_wait_with_the_names_of_the_missing(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    hub = hubs(4)
    first, second, _ = (channels(hub, process) for process in range(3))
    errors = together(lambda: first.gather("boot", 1, 0.3), lambda: second.gather("boot", 1, 10.0))
    assert [type(error) for error in errors] == [CollectiveTimeoutError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "boot: process 0 (pid" in str(errors[0])
    assert "waited 0.3 s for process 2 (pid" in str(errors[0])
    assert "process 3 (it has not connected yet)" in str(errors[0])
    assert errors[0].missing == (2, 3)


def test_who_waits_long_says_for_whom(
    hubs: Callable[..., Hub],
    channels: Callable[..., Channel],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("collectives.control.channel.TELL_EVERY", 0.05)
    with pytest.raises(CollectiveTimeoutError):
        channels(hubs(2), 0).gather("boot", 1, 0.2)
    assert "boot: waiting for process 1 (it has not connected yet)" in caplog.text


def test_a_value_that_json_does_not_know_or_that_is_too_long_is_refused_before_it_is_sent(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    one = channels(hubs(1), 0)
    with pytest.raises(TypeError, match="not JSON serializable"):
        one.gather("k", object(), 1.0)
    with pytest.raises(ValueError, match="need at most"):
        one.gather("k", "x" * (17 << 20), 1.0)
    assert one.gather("k", {"a": [1, None, 2.5]}, 1.0) == [{"a": [1, None, 2.5]}]


def test_values_that_are_long_together_arrive(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    hub = hubs(3)
    ends = [channels(hub, process) for process in range(3)]
    values = [f"{process}" * (12 << 20) for process in range(3)]
    calls = [lambda one=one: one.gather("k", values[one.process], TIMEOUT) for one in ends]
    assert together(*calls) == [values] * 3


# -------------------------------------------------------------------- connecting


def test_processes_may_come_before_their_hub(channels: Callable[..., Channel]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    made: list[Hub] = []
    timer = threading.Timer(0.3, lambda: made.append(Hub(1, TOKEN, port=port).start()))
    timer.start()
    try:
        one = Channel.connect(f"127.0.0.1:{port}", TOKEN, 0, host="here", timeout=10.0)
        assert one.gather("k", 1, 5.0) == [1]
        one.close()
    finally:
        timer.join()
        made[0].close()


def test_without_a_hub_connecting_ends_in_time_and_says_where_it_looked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.control.hub_connection.TELL_EVERY", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(CollectiveTimeoutError, match=f"no hub at {address} for 0.4 s .Connection refused"):
        Channel.connect(address, TOKEN, 0, host="here", timeout=0.4)
    assert f"waiting for the hub at {address}" in caplog.text


def test_a_listener_that_never_answers_is_no_hub() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="no hub at"):
            Channel.connect(address, TOKEN, 0, host="here", timeout=0.4)
        assert time.monotonic() - start < 3.0


def test_a_server_of_another_kind_is_no_hub() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(1 << 16)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(RuntimeError, match="is no hub of a job"):
            Channel.connect(f"127.0.0.1:{server.getsockname()[1]}", TOKEN, 0, host="here", timeout=5.0)
        thread.join()


def test_who_does_not_belong_to_the_job_is_told_so(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    hub = hubs(2)
    channels(hub, 0)
    with pytest.raises(ValueError, match="has this number already"):
        channels(hub, 0)
    with pytest.raises(ValueError, match=r"need a number in 0\.\.1"):
        channels(hub, 2)
    with pytest.raises(ValueError, match="got a job of 3 processes; need 2"):
        channels(hub, 1, size=3)
    with pytest.raises(RuntimeError, match="the token is another job's"):
        Channel.connect(hub.address, "wrong", 1, host="here", timeout=5.0)
    with pytest.raises(RuntimeError, match="takes no newcomers"):
        channels(hub, None, join=True)
    with pytest.raises(ValueError, match="need host:port"):
        Channel.connect("nowhere", TOKEN, 1, host="here", timeout=5.0)


# ----------------------------------------------------------------- dying, failing


def test_an_exception_in_one_process_ends_the_others_with_its_text(
    hubs: Callable[..., Hub], start: Start
) -> None:
    hub = hubs(3)
    body = """
    channel = connect()
    channel.install_hooks()
    channel.gather("here", None, 20.0)
    if process == 1:
        {}["boom"]
    channel.gather("never", None, 60.0)
    """
    others = [start(hub, process, 3, body) for process in (0, 2)]
    culprit = start(hub, 1, 3, body)
    status, _, err = culprit.end()
    assert status == 1
    assert err.count("KeyError: 'boom'") == 1
    for other in others:
        status, _, err = other.end(5.0)
        assert status == 1
        assert (
            f"PeerFailedError: process 1 of 3 (pid {culprit.pid}, host here) failed: KeyError: 'boom'" in err
        )
        assert "What process 1 said:\nTraceback" in err
    assert hub.wait(5.0)
    assert [failure.kind for failure in hub.failures] == ["failed", "follows", "follows"]
    assert hub.failures[0].text.endswith("KeyError: 'boom'")


def test_an_exception_with_notes_is_named_by_the_others_and_not_its_last_note(
    hubs: Callable[..., Hub], start: Start
) -> None:
    hub = hubs(2)
    body = """
    channel = connect()
    channel.install_hooks()
    channel.gather("here", None, 20.0)
    if process == 1:
        error = ValueError("wrong data")
        error.add_note("seen in file 7")
        raise error
    channel.gather("never", None, 60.0)
    """
    other, culprit = start(hub, 0, 2, body), start(hub, 1, 2, body)
    assert culprit.end()[0] == 1
    err = other.end()[2]
    assert "failed: ValueError: wrong data" in err
    assert "seen in file 7" in err


def test_a_killed_process_is_noticed_at_once(
    hubs: Callable[..., Hub], channels: Callable[..., Channel], start: Start
) -> None:
    hub = hubs(2)
    one = channels(hub, 0)
    other = start(hub, 1, 2, "connect().gather('here', None, 20.0); time.sleep(60)")
    one.gather("here", None, TIMEOUT)
    assert one.failure is None
    other.popen.kill()
    assert eventually(lambda: one.failure) < 0.5
    with pytest.raises(
        PeerFailedError, match=rf"process 1 of 2 \(pid {other.pid}, host here\) died"
    ) as caught:
        one.gather("next", None, 5.0)
    assert caught.value.process == 1
    assert hub.failures[0].kind == "died"


def test_a_process_that_dies_while_others_gather_ends_their_wait(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    hub = hubs(3)
    first, second, third = (channels(hub, process) for process in range(3))
    timer = threading.Timer(0.1, third.close)
    timer.start()
    errors = together(lambda: first.gather("k", 1, 10.0), lambda: second.gather("k", 1, 10.0))
    timer.join()
    assert [type(error) for error in errors] == [PeerFailedError] * 2


def test_a_process_that_ends_in_good_order_is_no_failure_until_it_is_waited_for(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    hub = hubs(2)
    first, second = channels(hub, 0), channels(hub, 1)
    second.goodbye()
    second.close()
    eventually(lambda: first.left)
    assert first.left == {1}
    assert first.failure is None
    with pytest.raises(
        PeerFailedError, match=r"process 1 of 2 .* has ended its program, and others wait for it"
    ):
        first.gather("k", 1, 5.0)
    assert hub.failures == ()


@pytest.mark.parametrize(
    ("ending", "status", "kind", "words"),
    [
        ("sys.exit(3)", 3, "failed", "it ended with status 3"),
        ("sys.exit('no data')", 1, "failed", "it ended with: no data"),
        ("raise KeyError('x')", 1, "failed", "KeyError: 'x'"),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "failed", "KeyboardInterrupt"),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "died", "its connection"),
        ("os._exit(0)", 0, "died", "its connection"),
        ("sys.exit(0)", 0, None, ""),
        ("sys.exit()", 0, None, ""),
        ("pass", 0, None, ""),
        ("\ntry: sys.exit(4)\nexcept SystemExit as e: assert e.code == 4", 0, None, ""),
        ("\ntry: raise KeyError\nexcept KeyError: pass", 0, None, ""),
        ("threading.Thread(target=sys.exit, args=(5,)).start()", 0, None, ""),
        ("\nif os.fork() == 0: sys.exit(6)\nos.wait()", 0, None, ""),
        # A SystemExit that was not made by sys.exit shows its status to nobody.
        ("raise SystemExit(7)", 7, None, ""),
    ],
)
def test_the_end_of_a_program_is_told_as_what_it_is(
    hubs: Callable[..., Hub], start: Start, ending: str, status: int, kind: str | None, words: str
) -> None:
    hub = hubs(1)
    ended = start(hub, 0, 1, f"connect().install_hooks()\n{ending}").end()
    assert ended[0] == status, ended
    assert hub.wait(5.0)
    assert [failure.kind for failure in hub.failures] == ([kind] if kind else [])
    assert words in "".join(failure.text for failure in hub.failures)


def test_hooks_that_are_removed_leave_everything_as_it_was(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    before = sys.excepthook, sys.exit
    one = channels(hubs(1), 0)
    one.install_hooks()
    assert sys.exit is not before[1]
    one.close()
    assert (sys.excepthook, sys.exit) == before


def test_last_words_are_out_before_the_process_ends(
    hubs: Callable[..., Hub], channels: Callable[..., Channel], start: Start
) -> None:
    hub = hubs(2)
    one = channels(hub, 0)
    start(hub, 1, 2, "channel = connect(); channel.publish_failure('last words'); os._exit(1)").end()
    eventually(lambda: one.failure)
    with pytest.raises(PeerFailedError, match="failed: last words"):
        one.check()


def test_who_has_failed_takes_part_in_nothing_any_more(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    one = channels(hubs(1), 0)
    one.publish_failure("Traceback\nKeyError: 'x'\n")
    with pytest.raises(
        CollectiveAbortedError, match="process 0 has failed before and the others know it: KeyError: 'x'"
    ):
        one.gather("k", 1, 5.0)


def test_text_of_any_length_can_be_said_last(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    hub = hubs(2)
    one, other = channels(hub, 0), channels(hub, 1)
    other.publish_failure("first\n" + "x" * (40 << 20) + "\nlast")
    eventually(lambda: one.failure)
    failure = one.failure
    assert isinstance(failure, PeerFailedError)
    assert failure.text.startswith("first\n")
    assert failure.text.endswith("\nlast")
    assert len(failure.text) < 2 << 20


def test_the_loss_of_the_hub_is_a_failure_and_its_good_end_is_none(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    code = "from xpdistribute.hub import Hub; h = Hub(1, 'secret').start(); print(h.address, flush=True); input()"
    host = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    with host:
        one = Channel.connect(host.stdout.readline().strip(), TOKEN, 0, host="here", timeout=10.0)
        host.kill()
        assert eventually(lambda: one.failure) < 1.0
    with pytest.raises(PeerFailedError, match=r"the hub at .* is gone"):
        one.gather("k", 1, 5.0)
    one.close()

    hub = hubs(1)
    one = channels(hub, 0)
    hub.close()
    with pytest.raises(CollectiveAbortedError, match="has ended in good order"):
        eventually(lambda: one.check())
    assert one.failure is None


def test_a_forked_child_is_no_process_of_the_job_and_does_not_hide_its_parents_death(
    hubs: Callable[..., Hub], channels: Callable[..., Channel], start: Start
) -> None:
    hub = hubs(2)
    one = channels(hub, 0)
    body = """
    channel = connect()
    channel.install_hooks()
    channel.gather("here", None, 20.0)
    child = os.fork()
    if child == 0:
        try:
            channel.gather("from the child", None, 5.0)
        except CollectiveAbortedError as error:
            print(error)
        sys.stdout.flush()
        os.close(1); os.close(2)
        time.sleep(20)
        os._exit(0)
    print(child)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    other = start(hub, 1, 2, body)
    one.gather("here", None, TIMEOUT)
    eventually(lambda: one.failure)
    with pytest.raises(PeerFailedError, match=r"process 1 of 2 .* died"):
        one.check()
    _, out, _ = other.end()
    child, said = sorted(out.splitlines(), key=lambda line: not line.isdecimal())
    os.kill(int(child), signal.SIGKILL)
    assert (
        said == "process 1: this is a forked child, which is no process of the job; need a process of its own"
    )


# ----------------------------------------------------------------------- reports

STUCK = {
    "python": "\nfor _ in range(10 ** 12): pass",
    "sleep": "time.sleep(60)",
    "numpy": "\na = np.ones((1500, 1500))\nfor _ in range(10 ** 9): a @ a",
}


@pytest.mark.parametrize("how", STUCK)
def test_a_process_that_is_busy_is_reported_with_its_stack_and_all_raise_the_same(
    hubs: Callable[..., Hub], channels: Callable[..., Channel], start: Start, how: str
) -> None:
    hub = hubs(3)
    one, two = channels(hub, 0), channels(hub, 1)
    waits = {"seq": 17, "call": "all_reduce SUM float32 (3,)", "waiting": True, "recent": ["barrier"]}
    one.descriptions = two.descriptions = Descriptions(lambda: waits)
    body = f"""
channel = connect(describe=lambda: {{"seq": 16, "call": "barrier", "waiting": False, "recent": ["barrier"]}})
channel.gather("here", None, 20.0)
def is_stuck(): {STUCK[how].replace(chr(10), chr(10) + "    ")}
is_stuck()
"""
    late = start(hub, 2, 3, body)
    together(lambda: one.gather("here", None, TIMEOUT), lambda: two.gather("here", None, TIMEOUT))
    time.sleep(0.1)
    report = one.explain("timeout", "link 0 seq 17", 2.0)
    eventually(lambda: two.failure)
    for end in (one, two):
        with pytest.raises(CollectiveTimeoutError) as caught:
            end.check()
        assert caught.value.missing == (2,)
        assert str(caught.value) == str(report.error())
    assert (
        f"process 2 (pid {late.pid}, host here) of 3: it is in no collective, at seq 16, but in File"
        in str(caught.value)
    )
    assert "in is_stuck" in caught.value.__notes__[0]


@pytest.mark.parametrize("how", ["stopped", "holding the GIL"])
def test_a_process_that_cannot_answer_is_reported_silent_with_its_pid(
    hubs: Callable[..., Hub], channels: Callable[..., Channel], start: Start, how: str
) -> None:
    hub = hubs(2)
    one = channels(hub, 0)
    body = "import ctypes; connect().gather('here', None, 20.0); "
    other = start(hub, 1, 2, body + ("ctypes.PyDLL(None).sleep(8)" if how != "stopped" else "time.sleep(60)"))
    one.gather("here", None, TIMEOUT)
    if how == "stopped":
        os.kill(other.pid, signal.SIGSTOP)
    time.sleep(0.2)
    start_time = time.monotonic()
    report = one.explain("timeout", "", 2.0)
    assert 1.0 < time.monotonic() - start_time < 3.0
    assert report.states[1]["silent"]
    assert f"process 1 (pid {other.pid}, host here) of 2: it does not answer" in str(one.failure)


def test_all_who_ask_at_the_same_time_get_one_report(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    hub = hubs(4)
    ends = [channels(hub, process) for process in range(4)]
    calls = [lambda one=one: one.explain("mismatch", "link 0 seq 3", 0.0) for one in ends]
    reports = together(*calls)
    assert all(report == reports[0] for report in reports)
    # Also who asks about it only now.
    assert ends[0].explain("mismatch", "link 0 seq 3", 0.0) == reports[0]
    assert all(one.failure is None for one in ends), "a mismatch leaves the channel usable"
    assert ends[0].explain("mismatch", "link 0 seq 4", 0.0) != reports[0]
    results = together(*(lambda one=one: one.gather("k", one.process, 5.0) for one in ends))
    assert results == [[0, 1, 2, 3]] * 4


def test_a_describe_that_raises_or_returns_nonsense_does_no_harm(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    hub = hubs(3)
    ends = [channels(hub, process) for process in range(3)]
    ends[1].descriptions = Descriptions(lambda: 1 / 0)  # type: ignore[arg-type,return-value]  # it is wrong
    ends[2].descriptions = Descriptions(lambda: {"seq": object()})
    report = ends[0].explain("mismatch", "", 0.0)
    assert "ZeroDivisionError" in report.states[1]["describe_failed"]
    assert "TypeError" in report.states[2]["describe_failed"]
    assert report.error().__notes__


class _Link:
    """What a link says of itself."""

    def __init__(self, call: str, *, waiting: bool) -> None:
        self._said = {"seq": 1, "call": call, "waiting": waiting, "recent": []}

    def describe(self) -> dict[str, Any]:
        return self._said


def test_of_several_links_the_one_that_is_asked_about_answers_in_every_process(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    hub = hubs(2)
    ends = [channels(hub, process) for process in range(2)]
    links = [_Link("barrier", waiting=True) for _ in ends]
    others = [_Link("all_reduce", waiting=True) for _ in ends]
    for end, link, other in zip(ends, links, others, strict=True):
        end.descriptions.add("link 0.1", link.describe)
        end.descriptions.add("link 0.10", other.describe)
    report = ends[0].explain("mismatch", "link 0.1 seq 1", 0.0)
    assert [state["call"] for state in report.states] == ["barrier"] * 2
    report = ends[0].explain("mismatch", "link 0.10 seq 1", 0.0)
    assert [state["call"] for state in report.states] == ["all_reduce"] * 2


def test_where_no_link_is_named_one_that_waits_answers_and_what_is_gone_does_not() -> None:
    descriptions = Descriptions(lambda: {"call": "otherwise"})
    assert descriptions.about("any")["call"] == "otherwise"
    waits, works = _Link("waits", waiting=True), _Link("works", waiting=False)
    descriptions.add("a", waits.describe)
    descriptions.add("b", works.describe)
    assert descriptions.about("agreeing on it")["call"] == "waits"
    del waits
    gc.collect()
    assert descriptions.about("a seq 1")["call"] == "works"


# ----------------------------------------------------------------------- elastic


def test_survivors_of_a_kill_go_on_with_new_numbers(
    hubs: Callable[..., Hub], channels: Callable[..., Channel], start: Start
) -> None:
    hub = hubs(3, elastic=True)
    one = channels(hub, 0)
    doomed = start(hub, 1, 3, "connect().gather('here', None, 20.0); time.sleep(60)")
    body = """
    channel = connect()
    channel.install_hooks()
    channel.gather("here", None, 20.0)
    while channel.failure is None: time.sleep(0.001)
    print(channel.regroup({"was": process}, False, 10.0).process, channel.failure, channel.num_processes, channel.epoch)
    print(channel.gather("again", process, 10.0))
    """
    survivor = start(hub, 2, 3, body)
    one.gather("here", None, TIMEOUT)
    doomed.popen.kill()
    eventually(lambda: one.failure)
    with pytest.raises(PeerFailedError):
        one.gather("not now", None, 5.0)
    regrouped = one.regroup({"was": 0}, False, 10.0)
    assert (regrouped.epoch, regrouped.process) == (1, 0)
    assert [member.old_process for member in regrouped.members] == [0, 2]
    assert [member.info for member in regrouped.members] == [{"was": 0}, {"was": 2}]
    assert regrouped.members[1].pid == survivor.pid
    assert (one.failure, one.num_processes, one.gone, one.epoch) == (None, 2, {}, 1)
    assert one.gather("again", 0, 5.0) == [0, 2]
    assert survivor.end() == (0, "1 None 2 1\n[0, 2]\n", "")


def test_a_process_killed_in_the_middle_of_a_regroup_is_not_waited_for(
    hubs: Callable[..., Hub], channels: Callable[..., Channel], start: Start
) -> None:
    hub = hubs(4, elastic=True)
    one, two = channels(hub, 0), channels(hub, 1)
    doomed = [
        start(hub, process, 4, "connect().gather('here', None, 20.0); time.sleep(60)") for process in (2, 3)
    ]
    together(lambda: one.gather("here", None, TIMEOUT), lambda: two.gather("here", None, TIMEOUT))
    doomed[0].popen.kill()
    eventually(lambda: one.failure and two.failure)
    timer = threading.Timer(0.2, doomed[1].popen.kill)
    timer.start()
    first, second = together(lambda: one.regroup(None, False, 10.0), lambda: two.regroup(None, False, 10.0))
    timer.join()
    assert [member.old_process for member in first.members] == [0, 1]
    assert first.members == second.members
    assert one.failure is None


def test_a_stopped_process_is_treated_as_dead_killed_and_not_waited_for(
    hubs: Callable[..., Hub], channels: Callable[..., Channel], start: Start
) -> None:
    hub = hubs(2, elastic=True, heartbeat_seconds=0.6)
    one = channels(hub, 0)
    other = start(hub, 1, 2, "connect().gather('here', None, 20.0); time.sleep(60)")
    one.gather("here", None, TIMEOUT)
    time.sleep(0.8)
    assert one.failure is None, "it is alive and pings"
    os.kill(other.pid, signal.SIGSTOP)
    assert 0.2 < eventually(lambda: one.failure) < 1.5
    with pytest.raises(PeerFailedError, match=r"is treated as dead: nothing was heard of it for 0\.6 s"):
        one.check()
    assert other.end(5.0)[0] == -signal.SIGKILL
    assert one.regroup(None, False, 5.0).process == 0
    assert hub.failures[0].kind == "stopped"


def test_a_newcomer_comes_in_when_all_admit_it(
    hubs: Callable[..., Hub], channels: Callable[..., Channel], start: Start
) -> None:
    hub = hubs(2, elastic=True)
    one, two = channels(hub, 0), channels(hub, 1)
    body = """
    channel = Channel.connect(address, "secret", None, host="there", join=True, timeout=20.0)
    print(channel.process)
    regrouped = channel.regroup("new", True, 20.0)
    print(regrouped.process, channel.process, channel.num_processes, [m.is_new for m in regrouped.members])
    print(channel.gather("k", "from the new one", 5.0))
    channel.goodbye()
    """
    newcomer = start(hub, 7, 2, body)
    eventually(lambda: one.newcomers == two.newcomers == 1, 10.0)
    refused = together(lambda: one.regroup(0, True, 5.0), lambda: two.regroup(1, False, 5.0))
    assert [len(one.members) for one in refused] == [2, 2]
    taken = together(lambda: one.regroup(0, True, 5.0), lambda: two.regroup(1, True, 5.0))
    assert [(member.host, member.info) for member in taken[0].members] == [
        ("here", 0),
        ("here", 1),
        ("there", "new"),
    ]
    assert one.newcomers == 0
    values = together(lambda: one.gather("k", 0, 5.0), lambda: two.gather("k", 1, 5.0))
    assert values == [[0, 1, "from the new one"]] * 2
    assert newcomer.end() == (0, "-1\n2 2 3 [False, False, True]\n[0, 1, 'from the new one']\n", "")


def test_a_regroup_times_out_on_all_who_wait_with_the_names_of_the_missing(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    hub = hubs(3, elastic=True)
    ends = [channels(hub, process) for process in range(3)]
    errors = together(lambda: ends[0].regroup(None, False, 0.2), lambda: ends[1].regroup(None, False, 9.0))
    assert [error.missing for error in errors] == [(2,), (2,)]
    assert "regroup: process 0 (pid" in str(errors[1])


def test_a_job_that_is_not_elastic_does_not_regroup(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    with pytest.raises(CollectiveAbortedError, match="it is not elastic"):
        channels(hubs(1), 0).regroup(None, False, 5.0)


# --------------------------------------------------------------------------- MPI


@pytest.mark.parametrize("peer", ["waits in MPI", "computes"])
def test_an_exception_ends_a_process_even_while_mpi_waits_for_the_others(
    hubs: Callable[..., Hub], peer: str
) -> None:
    hub = hubs(2)
    script = f"""
import sys, time
from mpi4py import MPI
from collectives.control.channel import Channel
world = MPI.COMM_WORLD
channel = Channel.connect({hub.address!r}, {TOKEN!r}, world.rank, host="here", size=2, timeout=20.0)
channel.install_hooks()
world.Barrier()
if world.rank == 1:
    raise KeyError("boom")
{"world.recv(source=1)" if peer == "waits in MPI" else "time.sleep(20)"}
"""
    run = finish_ranks(2, script, timeout=15.0)
    assert run.returncode == 1, str(run)
    assert run.seconds < 8.0, str(run)
    assert "KeyError: 'boom'" in run.errors[1]
    assert hub.wait(5.0)
    assert hub.failures[0].process == 1
    assert hub.failures[0].text.endswith("KeyError: 'boom'")


# ------------------------------------------------------------------------- hooks


def test_what_comes_from_a_peers_failure_is_known_however_it_is_wrapped() -> None:
    released = CollectiveAbortedError("released")
    released.__cause__ = PeerFailedError("process 3 failed", 3)
    wrapped = RuntimeError("the step failed")
    wrapped.__context__ = released
    assert followed(wrapped) == 3
    assert followed(KeyError("own")) is None


def test_an_exit_that_is_watched_looks_like_any_other(
    hubs: Callable[..., Hub], channels: Callable[..., Channel]
) -> None:
    channels(hubs(1), 0).install_hooks()
    for status in (None, 0, 3, "text"):
        with pytest.raises(SystemExit) as caught:
            sys.exit(status)
        assert caught.value.code == status
        assert repr(caught.value) == repr(SystemExit(*(() if status is None else (status,))))
        again = pickle.loads(pickle.dumps(caught.value))
        assert type(again) is SystemExit
        assert again.code == status
