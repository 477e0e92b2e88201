"""The hub behind real sockets: what it survives, and what its host learns."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from xpdistribute.events import Event, Failure, Joined, Left, Regrouped
from xpdistribute.hub import Hub
from xpdistribute.process_identity import identify, kill
from xpdistribute.wire import LIMIT, Lines, WireError, encode, split_address

TOKEN = "secret"
HELLO = {
    "type": "hello",
    "token": TOKEN,
    "process": 0,
    "join": False,
    "pid": 1,
    "host": "here",
    "identity": "",
    "size": None,
}


class Client:
    """A process that talks to the hub as a test wants it to."""

    def __init__(self, hub: Hub) -> None:
        self.sock = socket.create_connection(split_address(hub.address), 5.0)
        self._lines = Lines()
        self._come: list[dict[str, Any]] = []

    def send(self, data: bytes | dict[str, Any]) -> None:
        self.sock.sendall(data if isinstance(data, bytes) else encode(data))

    def get(self) -> dict[str, Any] | None:
        """The next message, or None at the end."""
        while not self._come:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._come += self._lines.feed(data)
        return self._come.pop(0)


@pytest.fixture
def client() -> Iterator[Callable[..., Client]]:
    """Makes clients, with a process number if they are to be welcomed."""
    made = []

    def make(hub: Hub, process: int | None = None, **fields: Any) -> Client:
        one = Client(hub)
        made.append(one)
        if process is not None:
            one.send({**HELLO, "process": process, **fields})
            welcome = one.get()
            assert welcome is not None
            assert welcome["type"] == "welcome", welcome
        return one

    yield make
    for one in made:
        one.sock.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(2, TOKEN).start() as made:
        yield made


def eventually(condition: Callable[[], Any], seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come about"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "is no JSON"),
        (b"\x16\x03\x01\x02\x00\n", "is no JSON"),
        (b"[1, 2]\n", "got a JSON list; need an object"),
        (b"{}\n", "type: got NoneType; need str"),
        (b'{"type": "gather"}\n', "the first must be hello"),
        (b"[" * 100_000 + b"\n", "is no JSON (RecursionError)"),
        (b'{"type": "hello", "pid": ' + b"9" * 5000 + b"}\n", "is no JSON (ValueError)"),
        (encode({**HELLO, "token": "wrong"}), "XPDISTRIBUTE_TOKEN"),
        (encode({**HELLO, "process": 9}), "need a number in 0..1"),
    ],
)
def test_whoever_says_something_else_is_told_why_and_the_hub_goes_on(
    hub: Hub, client: Callable[..., Client], data: bytes, words: str
) -> None:
    stranger = client(hub)
    stranger.send(data)
    refused = stranger.get()
    assert refused is not None
    assert refused["type"] == "refused"
    assert words in refused["text"]
    assert stranger.get() is None
    client(hub, 0)


def test_a_message_over_the_limit_is_refused_before_it_is_read_whole(
    hub: Hub, client: Callable[..., Client]
) -> None:
    flood = client(hub)
    flood.sock.settimeout(5.0)
    with contextlib.suppress(OSError):  # once the hub has had enough
        for _ in range(LIMIT // (1 << 20) + 64):
            flood.send(b"x" * (1 << 20))
    refused = flood.get()
    assert refused is None or f"need at most {LIMIT}" in refused["text"]
    client(hub, 0)


def test_a_message_may_come_in_pieces_and_several_at_once(hub: Hub, client: Callable[..., Client]) -> None:
    slow = client(hub)
    for byte in encode({**HELLO, "process": 1}):
        slow.send(bytes([byte]))
    welcome = slow.get()
    assert welcome is not None
    assert welcome["process"] == 1
    other = client(hub, 0)
    other.send(encode({"type": "ping"}) * 3 + encode({"type": "who", "key": "k"}))
    answer = other.get()
    assert answer is not None
    assert answer["type"] == "missing"


def test_the_hubs_host_learns_of_everything_in_order(client: Callable[..., Client]) -> None:
    events: list[Event | Regrouped] = []
    with Hub(3, TOKEN, on_event=events.append).start() as hub:
        first, second, third = (client(hub, process) for process in range(3))
        second.send({"type": "failed", "text": "KeyError: 'boom'", "follows": None})
        eventually(lambda: len(events) == 4)
        first.send({"type": "failed", "text": "PeerFailedError", "follows": 1})
        eventually(lambda: len(events) == 5)
        third.sock.close()
        eventually(lambda: len(events) == 6)
        assert not hub.is_finished
        first.sock.close()
        second.sock.close()
        assert hub.wait(3.0)
        assert [failure.kind for failure in hub.failures] == ["failed", "follows", "died"]
        assert hub.failures[0] == Failure(1, "KeyError: 'boom'", "failed")


def test_an_error_of_the_host_in_on_event_does_not_stop_the_hub(
    client: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    def raises(event: Event | Regrouped) -> None:
        raise KeyError("the host's")

    with Hub(1, TOKEN, on_event=raises).start() as hub:
        client(hub, 0).send({"type": "goodbye"})
        eventually(lambda: "Left" in caplog.text)
    assert "on_event(Joined(process=0" in caplog.text


def test_who_does_not_read_is_lost_and_holds_nobody_up(
    client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xpdistribute.hub.QUEUE_LIMIT", 4 << 20)
    with Hub(2, TOKEN).start() as hub:
        stuck, reader = client(hub, 0), client(hub, 1)
        reader.sock.settimeout(5.0)
        answers = []
        for number in range(40):  # 40 MB: more than the sockets and the queue hold
            stuck.send({"type": "gather", "key": f"{number}", "value": None, "epoch": 0})
            reader.send({"type": "gather", "key": f"{number}", "value": "x" * (1 << 20), "epoch": 0})
            answer = reader.get()
            assert answer is not None
            answers.append(answer["type"])
            if answer["type"] == "lost":
                break
        assert answers[0] == "gathered"
        assert answers[-1] == "lost"
        assert hub.failures == (Failure(0, "it did not read what the hub sent it", "died"),)


def test_closing_tells_the_processes_so(hub: Hub, client: Callable[..., Client]) -> None:
    one = client(hub, 0)
    hub.close()
    assert one.get() == {"type": "hub_closed"}
    assert one.get() is None
    hub.close()
    with pytest.raises(ConnectionRefusedError):
        client(hub)


def test_a_hub_listens_to_this_machine_only_unless_told_otherwise() -> None:
    with Hub(1, TOKEN).start() as hub:
        assert hub.address == f"127.0.0.1:{hub.port}"
    with Hub(1, TOKEN, host="").start() as hub:
        assert hub.address == f"{socket.gethostname()}:{hub.port}"


def test_a_hub_that_was_never_started_closes_too() -> None:
    Hub(1, TOKEN).close()


def test_a_port_that_is_taken_is_an_error() -> None:
    with Hub(1, TOKEN) as hub, pytest.raises(OSError, match="Address already in use"):
        Hub(1, TOKEN, port=hub.port)


def test_a_forked_child_does_not_keep_the_connections_open(client: Callable[..., Client]) -> None:
    code = f"""
import os, sys, time
from xpdistribute.hub import Hub
hub = Hub(1, {TOKEN!r}).start()
print(hub.address, flush=True)
sys.stdin.readline()  # somebody has connected
child = os.fork()
if child == 0:
    sys.stdin.readline()
    os._exit(0)
print(child, flush=True)
time.sleep(30)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        address = process.stdout.readline().strip()
        with socket.create_connection(split_address(address), 5.0) as sock:
            sock.settimeout(5.0)
            sock.sendall(encode(HELLO))
            assert b"welcome" in sock.recv(1 << 16)
            process.stdin.write("\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            try:
                process.kill()
                assert sock.recv(1 << 16) == b"", "the child held the connection"
            finally:
                os.kill(child, signal.SIGKILL)


def test_the_hub_is_quick_to_import_and_needs_no_numpy() -> None:
    code = "import sys, xpdistribute.hub; print('numpy' in sys.modules, 'ssl' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    assert result.stdout.split() == ["False", "False"]


def test_an_idle_hub_takes_hardly_any_time(hub: Hub, client: Callable[..., Client]) -> None:
    client(hub, 0)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.02


# ------------------------------------------------------------------------- wire


def test_lines_give_what_is_whole_and_keep_the_rest() -> None:
    lines = Lines()
    assert list(lines.feed(b'{"a": 1}\n{"b"')) == [{"a": 1}]
    assert list(lines.feed(b": 2")) == []
    assert list(lines.feed(b"}\n")) == [{"b": 2}]


def test_lines_give_what_came_before_a_bad_one() -> None:
    come = Lines().feed(b'{"a": 1}\n17\n')
    assert next(come) == {"a": 1}
    with pytest.raises(WireError, match="got a JSON int; need an object"):
        next(come)


def test_text_of_any_kind_goes_over_the_wire() -> None:
    message = {"text": "newline\nNUL\0 ä \udcff 🙂", "number": 1e300, "none": None}
    assert list(Lines().feed(encode(message))) == [json.loads(json.dumps(message))]


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:x", "host:0", "host:65536", "host:-1"])
def test_an_address_needs_host_and_port(address: str) -> None:
    with pytest.raises(ValueError, match="need host:port"):
        split_address(address)


def test_addresses_of_both_kinds_are_understood() -> None:
    assert split_address("a.example:4711") == ("a.example", 4711)
    assert split_address("[::1]:80") == ("::1", 80)


def test_only_the_process_that_was_meant_is_killed() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        meant = identify(sleeper.pid)
        assert meant
        assert meant != identify(os.getpid())
        assert not kill(sleeper.pid, "another")
        assert not kill(sleeper.pid, "")
        assert sleeper.poll() is None
        os.kill(sleeper.pid, signal.SIGSTOP)
        assert kill(sleeper.pid, meant)
        assert sleeper.wait(5.0) == -signal.SIGKILL
        assert not kill(sleeper.pid, meant)
    finally:
        sleeper.kill()
        sleeper.wait()


def test_events_say_who_and_how(client: Callable[..., Client]) -> None:
    events: list[Event | Regrouped] = []
    with Hub(1, TOKEN, on_event=events.append).start() as hub:
        client(hub, 0, pid=12, host="a", identity="i").send({"type": "goodbye"})
        eventually(lambda: len(events) == 2)
    assert events == [Joined(0, 12, "a", "i"), Left(0, 12, "a", "i")]
