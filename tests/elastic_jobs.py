"""Elastic jobs of real processes, with the hub in this process: they are killed and stopped where a test says, and others join."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, final

import strategies as xd
from collectives.control.exit_hooks import followed
from collectives.control.hub_connection import HubConnection
from collectives.processes import joined
from collectives.shared_memory.flags import Flags
from xpdistribute.events import Event, Regrouped
from xpdistribute.hub import Hub

TIMEOUT = 15.0
"""Seconds that a process waits for the others."""


@final
class Rank:
    """What a process of a job knows of the test.

    Attributes:
        number: in the order in which they were started; those that join later go on counting.
        num_done: how often it has done what it is to die at.
    """

    def __init__(self, number: int, pipe: Connection) -> None:
        self.number = number
        self.num_done = 0
        self._pipe = pipe

    def tell(self, what: str, value: Any = None) -> None:
        """Tell the test something, with the time."""
        self._pipe.send_bytes(pickle.dumps((what, value, time.monotonic())))

    def die(self) -> NoReturn:
        """Be killed, as by kill -9."""
        self.tell("dies")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    def dies_at(self, what: str, number: int, *, after: bool) -> None:
        """Be killed right before or right after something that is done together with others.

        Args:
            what: ``meeting`` for coming to one with the others in shared memory, ``message`` for telling the hub something.
            number: how often that has been done then, with this time.
            after: whether right after it.
        """
        owner, name = {"meeting": (Flags, "arrive"), "message": (HubConnection, "send")}[what]
        act = getattr(owner, name)

        def counted(this: Any, *arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return act(this, *arguments)  # a heartbeat
            self.num_done += 1
            is_last = self.num_done == number
            if is_last and not after:
                self.die()
            result = act(this, *arguments)
            if is_last:
                self.die()
            return result

        setattr(owner, name, counted)  # in this process alone


@dataclass
class Story:
    """What one process has told.

    Attributes:
        pid: its process id.
        told: what, the value and the time, in order.
        result: what its function returned.
        failure: its traceback, if it raised.
        was_killed: whether it went without a word.
    """

    pid: int
    told: list[tuple[str, Any, float]] = field(default_factory=list)
    result: Any = None
    failure: str | None = None
    was_killed: bool = False
    is_over: bool = False

    def all(self, what: str) -> list[Any]:
        """The values of everything of that name that it told."""
        return [value for name, value, _ in self.told if name == what]

    def when(self, what: str) -> float:
        """When it first told that."""
        return next(at for name, _, at in self.told if name == what)


@final
class ElasticJob:
    """Forked processes that run a function, each with its `Rank`; open it by ``with``.

    Args:
        num_processes: at first.
        function: which may be a closure.
        heartbeat_seconds: who is silent for so long is treated as dead.
        replaces: whether the test's hub starts another process for each that is lost, as the launcher does.
        timeout: seconds that all of it may take.
    """

    def __init__(
        self,
        num_processes: int,
        function: Callable[[Rank], Any],
        *,
        heartbeat_seconds: float = 10.0,
        replaces: bool = False,
        timeout: float = 30.0,
    ) -> None:
        self._function = function
        self._num_processes = num_processes
        self._deadline = time.monotonic() + timeout
        self._token = secrets.token_hex(8)
        self.events: list[Event | Regrouped] = []
        self.stories: list[Story] = []
        self._pipes: list[Connection] = []
        self._replaces = replaces
        self._timeout = timeout
        self.hub = Hub(
            num_processes,
            self._token,
            elastic=True,
            heartbeat_seconds=heartbeat_seconds,
            on_event=self.events.append,
        ).start()

    def __enter__(self) -> ElasticJob:
        for number in range(self._num_processes):
            self._start({"XPDISTRIBUTE_RANK": str(number)})
        return self

    def __exit__(self, *_: object) -> None:
        for story, pipe in zip(self.stories, self._pipes, strict=True):
            if not story.is_over:
                os.kill(story.pid, signal.SIGKILL)
                os.waitpid(story.pid, 0)
            pipe.close()
        self.hub.close()

    def join(self) -> Story:
        """Start one more process, which joins the job."""
        return self._start({"XPDISTRIBUTE_JOIN": "1", "XPDISTRIBUTE_RANK": "0"})

    def kill(self, number: int, signal_number: int = signal.SIGKILL) -> float:
        """Send a process a signal; when."""
        os.kill(self.stories[number].pid, signal_number)
        return time.monotonic()

    def until(self, holds: Callable[[], bool]) -> None:
        """Listen to the processes until something holds."""
        while not holds():
            assert time.monotonic() < self._deadline, f"it hangs: {self._sketch()}"
            self._listen(0.05)

    def until_told(self, number: int, what: str) -> Any:
        """Listen until a process has told something; the value."""
        self.until(lambda: bool(self.stories[number].all(what)) or self.stories[number].is_over)
        values = self.stories[number].all(what)
        assert values, f"process {number} never told {what}: {self._sketch()}"
        return values[0]

    def finish(self) -> list[Story]:
        """Listen until all processes have ended."""
        self.until(lambda: all(story.is_over for story in self.stories))
        return self.stories

    @property
    def survivors(self) -> list[Story]:
        """Those that ended in good order."""
        return [
            story for story in self.stories if story.is_over and not story.was_killed and not story.failure
        ]

    def _start(self, more: dict[str, str]) -> Story:
        ours, theirs = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        number = len(self.stories)
        pid = os.fork()
        if pid == 0:
            for pipe in (*self._pipes, ours):
                pipe.close()
            os.environ.update(
                {
                    "XPDISTRIBUTE_HUB": self.hub.address,
                    "XPDISTRIBUTE_TOKEN": self._token,
                    "XPDISTRIBUTE_SIZE": str(self._num_processes),
                    "XPDISTRIBUTE_ELASTIC": "1",
                    **more,
                }
            )
            _run(Rank(number, theirs), theirs, self._function, self._timeout)
        theirs.close()
        story = Story(pid)
        self.stories.append(story)
        self._pipes.append(ours)
        return story

    def _listen(self, seconds: float) -> None:
        listening = [pipe for story, pipe in zip(self.stories, self._pipes, strict=True) if not story.is_over]
        for pipe in wait(listening, seconds):
            assert isinstance(pipe, Connection)
            story = self.stories[self._pipes.index(pipe)]
            try:
                what, value, at = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                _, status = os.waitpid(story.pid, 0)
                story.is_over, story.was_killed = True, os.WIFSIGNALED(status)
                if story.was_killed and self._replaces:
                    self.join()
                continue
            if what == "result":
                story.result = value
            elif what == "failure":
                story.failure = value
            else:
                story.told.append((what, value, at))

    def _sketch(self) -> str:
        return "\n".join(
            f"{number} (pid {story.pid}): {'over' if story.is_over else 'alive'}"
            f"{', killed' if story.was_killed else ''}, told {[what for what, _, _ in story.told][-12:]}\n{story.failure or ''}"
            for number, story in enumerate(self.stories)
        )


def elastic_strategy(rank: Rank, num_replicas: int = 1, **arguments: Any) -> xd.MultiWorkerMirroredStrategy:
    """A strategy over all processes of the job; every change is told as ``change``."""
    arguments.setdefault("communication_options", xd.CommunicationOptions(timeout_seconds=TIMEOUT))
    return xd.MultiWorkerMirroredStrategy(
        devices=[f"cpu:{number}" for number in range(num_replicas)],
        on_membership_change=lambda change: rank.tell("change", change),
        **arguments,
    )


def _run(rank: Rank, pipe: Connection, function: Callable[[Rank], Any], timeout: float) -> NoReturn:
    """A forked process, from its start to its end, which comes as a program's does."""
    # Not dump_traceback_later, which waits in a forked child for the thread that pytest had started for it.
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.setitimer(signal.ITIMER_REAL, timeout - 2.0)
    try:
        result = function(rank)
        processes = joined()
        if processes is not None and processes.channel is not None:
            processes.channel.goodbye()
        rank.tell("result", result)
    except BaseException as error:  # noqa: BLE001  # raised in the test
        text = traceback.format_exc()
        processes = joined()
        if processes is not None and processes.channel is not None:
            processes.channel.publish_failure(text, followed(error))
        with contextlib.suppress(OSError):
            rank.tell("failure", text)
    finally:
        os._exit(0)
