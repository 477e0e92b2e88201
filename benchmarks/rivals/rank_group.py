"""Our side of a group of ranks: starts their processes, asks all of them at once, and puts their answers together."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from benchmarks.harness import Case, Timeline
from benchmarks.rivals.rank import PORT, RANK, RANKS, TOKEN
from benchmarks.rivals.rival import RivalError

RUNNER = Path(__file__).with_name("rank.py")

_START_SECONDS = 90.0
_END_SECONDS = 10.0
_WARM_SECONDS, _MOST_WARM = 5e-3, 2000
"""What a turn starts with, untimed: others had the caches meanwhile."""


@final
@dataclass(frozen=True)
class System:
    """How the ranks of a system are started.

    Args:
        name: of the system, for messages.
        python: the interpreter to run them with.
        program: what ``rank.py`` loads in each of them.
        environment: of all of them.
        of_rank: what the environment of each rank has besides; one entry a rank where the suite starts each of them.
        starter: the command that starts all of them, followed by that of a rank; empty where the suite starts each.
        memory: bytes of shared memory that each rank is handed as a file descriptor; 0 for none.
    """

    name: str
    python: str
    program: Path
    environment: Mapping[str, str]
    of_rank: Sequence[Mapping[str, str]] = ()
    starter: Sequence[str] = ()
    memory: int = field(default=0, kw_only=True)


@final
class RankGroup:
    """The running ranks of a system, which use no CPU while they are not asked. Leaving the context ends them.

    Args:
        system: what to start.
        ranks: how many.
        timeout: seconds that an answer may take.

    Raises:
        RivalError: they did not start.
    """

    def __init__(self, system: System, ranks: int, timeout: float) -> None:
        self.name = system.name
        self.num_wrong = 0
        self._timeout = timeout
        self._usual: dict[str, float] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._pending = [b""] * ranks
        self._pids: list[int] = []
        self._resources = ExitStack()
        try:
            folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory()))
            self._output = folder / "output"
            listener = self._resources.enter_context(socket.create_server(("127.0.0.1", 0)))
            token = secrets.token_hex(16)
            self._start(system, ranks, folder, {PORT: str(listener.getsockname()[1]), TOKEN: token})
            self._connect(listener, token, ranks)
            self.about: dict[str, Any] = self._answers(_START_SECONDS)[0]["about"]
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the ranks' processes, by rank."""
        return list(self._pids)

    def case(self, case: str, **details: Any) -> Case:
        """One of its cases, to take turns with others; JSON's types for the details."""
        return lambda iterations: self.measure(case, iterations, **details)

    def measure(self, case: str, iterations: int, **details: Any) -> list[float]:
        """Seconds of each iteration, until all ranks have ended it. What they got wrong is added to ``num_wrong``.

        So is every iteration that some rank ended before another had begun it: its result can't have been everybody's.

        Raises:
            RivalError: a rank failed, or did not answer in time.
        """
        key = f"{case} {details}"
        warm_up = max(1, min(_MOST_WARM, int(_WARM_SECONDS / max(1e-9, self._usual.get(key, 1.0)))))
        question = {"measure": case, "warm_up": warm_up, "iterations": iterations}
        answers = self._ask({**question, **details})
        timeline = Timeline(*(np.array([a[key] for a in answers], np.int64) for key in ("begun", "ended")))
        self.num_wrong += sum(int(answer["wrong"]) for answer in answers)
        self.num_wrong += int(np.count_nonzero(timeline.ended.min(axis=0) < timeline.begun.max(axis=0)))
        self._usual[key] = float(np.median(timeline.seconds))
        return timeline.seconds

    def idle(self, seconds: float) -> list[float]:
        """The share of a core that each rank but 0 used while it waited in a barrier for rank 0, which slept."""
        return [float(answer["cpu_share"]) for answer in self._ask({"idle": seconds})[1:]]

    def forget(self) -> None:
        """Let the ranks give their cases and the memory of them back."""
        self._ask({"forget": True})

    def describe(self) -> str:
        """Who it is, in words."""
        return ", ".join(f"{key} {value}" for key, value in self.about.items())

    def close(self) -> None:
        """End the ranks, in good order if they listen."""
        with suppress(RivalError):
            self._say({"quit": True})
        deadline = time.monotonic() + (_END_SECONDS if self._connections else 0)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._end_by_force()
        for connection in self._connections:
            connection.close()
        self._connections = []
        self._resources.close()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _start(self, system: System, ranks: int, folder: Path, meeting: Mapping[str, str]) -> None:
        environment = {**system.environment, **meeting, RANKS: str(ranks), "BENCHMARK_FOLDER": str(folder)}
        command = [*system.starter, system.python, str(RUNNER), str(system.program)]
        descriptors = []
        if system.memory:
            # Without a name, so that nothing of it can be left behind.
            descriptors.append(os.memfd_create("benchmarks"))
            self._resources.callback(os.close, descriptors[0])
            os.ftruncate(descriptors[0], system.memory)
            environment["BENCHMARK_MEMORY_FD"] = str(descriptors[0])
        each: list[Mapping[str, str]] = [{}]
        if not system.starter:
            each = [{RANK: str(rank)} for rank in range(ranks)]
        of_rank = system.of_rank or [{}] * len(each)
        with self._output.open("wb") as output:
            for own, more in zip(each, of_rank, strict=True):
                try:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env={**environment, **own, **more},
                        pass_fds=descriptors,
                        # A group to be ended by. Not a session: Linux shares the cores fairly between sessions first, so
                        # that ranks which mpiexec starts in one would get less than ranks with a session each.
                        process_group=0,
                    )
                except OSError as error:
                    raise RivalError(
                        f"{self.name}: {command[0]} could not be run ({error}); need a command that exists — --rival-python "
                        "PATH names the interpreter"
                    ) from error
                self._processes.append(process)

    def _connect(self, listener: socket.socket, token: str, ranks: int) -> None:
        listener.settimeout(0.1)
        deadline = time.monotonic() + _START_SECONDS
        found: dict[int, tuple[socket.socket, int]] = {}
        while len(found) < ranks:
            ended = [process.returncode for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                how = f"ended with status {ended[0]}" if ended else f"did not come in {_START_SECONDS:g} s"
                raise RivalError(
                    f"{self.name}: {len(found)} of {ranks} ranks came, others {how}: {self._last_words()}"
                )
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            self._resources.enter_context(connection)
            connection.settimeout(10)
            with suppress(OSError, ValueError, KeyError):  # of a stranger
                hello = json.loads(_line(connection))
                if secrets.compare_digest(str(hello["token"]), token):
                    found[int(hello["rank"])] = connection, int(hello["pid"])
        self._connections = [found[rank][0] for rank in range(ranks)]
        self._pids = [found[rank][1] for rank in range(ranks)]

    def _ask(self, question: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._say(question)
        return self._answers(self._timeout)

    def _say(self, words: Mapping[str, Any]) -> None:
        line = json.dumps(words).encode() + b"\n"
        for rank, connection in enumerate(self._connections):
            try:
                connection.sendall(line)
            except OSError as error:
                raise RivalError(f"{self.name}: rank {rank} has ended: {self._last_words()}") from error

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        """What all ranks answer; the first that fails ends the wait for the others, who may wait for it."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self._connections):
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, rank)
            while len(answers) < len(self._connections):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = [r for r in range(len(self._connections)) if r not in answers]
                    self._end_by_force()
                    raise RivalError(
                        f"{self.name}: no answer from rank {', '.join(map(str, late))} within {timeout:g} s; its processes were "
                        f"ended: {self._last_words()}"
                    )
                for key, _ in ready:
                    answer = self._read(key.data)
                    if answer is None:
                        continue
                    if "error" in answer:
                        self._end_by_force()
                        raise RivalError(f"{self.name}: rank {key.data}: {answer['error']}")
                    answers[key.data] = answer
        for connection in self._connections:
            connection.setblocking(True)
        return [answers[rank] for rank in range(len(self._connections))]

    def _read(self, rank: int) -> dict[str, Any] | None:
        """A rank's answer, once its whole line is there."""
        try:
            arrived = self._connections[rank].recv(1 << 20)
        except ConnectionError:
            arrived = b""
        if not arrived:
            self._end_by_force()
            raise RivalError(f"{self.name}: rank {rank} has ended: {self._last_words()}")
        self._pending[rank] += arrived
        line, newline, rest = self._pending[rank].partition(b"\n")
        if not newline:
            return None
        self._pending[rank] = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end_by_force(self) -> None:
        for process in self._processes:
            # mpiexec ends its ranks when it is asked to end; killed, it would leave those that are in no call of MPI.
            process.terminate()
        for process in self._processes:
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(_END_SECONDS)

    def _last_words(self) -> str:
        words = self._output.read_text(encoding="utf-8", errors="replace").split()
        return " ".join(words[-60:]) or "it said nothing"


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (arrived := connection.recv(1)):
        line += arrived
    return line
